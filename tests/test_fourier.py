"""The network of Fourier features beside dense formulas of the Gaussian process that it is."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

import ntk_laplace as ntkl
from refusals import refused

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("botorch")
    from botorch.models.transforms import Normalize, Standardize

    from ntk_laplace.tools.botorch.fourier import FourierNetwork
    from ntk_laplace.tools.botorch.surrogate import Angles

N, D = 18, 3


def data(m: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(N, D, generator=generator, dtype=torch.float64)
    return x, torch.stack([(5 * x[:, 0]).sin() + k * x[:, 1] for k in range(1, m + 1)], 1)  # not of x[:, 2]


def kernel(network: object, x: Tensor, z: Tensor, scale: Tensor, precision: Tensor) -> Tensor:
    """The mean over frequencies of cos w·s(x - z), and the bias: no feature is computed."""
    shifts = (scale * (x[:, None] - z[None])) @ network.features.frequencies.T
    return (shifts.cos().mean(-1) + 1.0) / precision


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("noise", ["learned", "fixed", "known"])
def test_it_is_a_gaussian_process(noise: str, m: int) -> None:
    x, y = data(m)
    given = {"fixed": {"noise": 0.01}, "known": {"train_Yvar": torch.linspace(0.001, 0.1, N * m).double().view(N, m)}}
    model = ntkl.botorch.LaplaceModel.fit("fourier", x, y, **given.get(noise, {}))
    network, prior = model.laplace.network.module, model.laplace.prior.precision
    points = torch.rand(5, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = model.posterior(points.unsqueeze(1))
    scale = network.features.scale
    assert prior.shape == (m,) and model.laplace.likelihood.noise.shape == (
        {"fixed": (), "known": (N, m)}.get(noise, () if m == 1 else (m,)))
    for k in range(m):
        cross, own = kernel(network, points, x, scale, prior[k]), kernel(network, x, x, scale, prior[k])
        variances = model.laplace.likelihood.noise
        variances = variances[:, k] if noise == "known" else variances.expand(m)[k].expand(N)
        joint = own + variances.diag()
        assert torch.allclose(found.mean[:, 0, k], cross @ torch.linalg.solve(joint, y[:, k]), rtol=1e-8, atol=1e-9)
        less = (cross * torch.linalg.solve(joint, cross.mT).mT).sum(1)
        variance = kernel(network, points, points, scale, prior[k]).diagonal() - less
        assert torch.allclose(found.variance[:, 0, k], variance, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("noise", ["learned", "fixed", "known"])
def test_hyperparameters_maximize_the_evidence(noise: str) -> None:
    """The density beside that of a multivariate normal, up to the constant; its gradient at the end is small."""
    x, y = data(2)
    network = ntkl.botorch.LaplaceModel.fit("fourier", x, y).laplace.network.module
    given = {"learned": None, "fixed": torch.tensor(0.02).double(), "known": torch.rand(N, 2).double() + 0.1}[noise]

    def dense(logs: list[Tensor]) -> Tensor:
        variances = (logs[2].exp() + 1e-5 if given is None else given).expand(N, 2)
        value = -0.5 * (logs[0] - 0.5 - math.log(2) + 0.5 * math.log(D)).square().sum() - 0.005 * logs[1].square().sum()
        for k in (0, 1):
            own = kernel(network, x, x, logs[0].exp(), logs[1][k].exp()) + variances[:, k].diag()
            value = value + MultivariateNormal(y.new_zeros(N), own).log_prob(y[:, k])
        return value - 0.5 * (logs[2] + 4).square().sum() if given is None else value

    differences = []
    for size in (0.0, 0.5):
        logs = [torch.tensor([1.0, 0.2, -0.3]).double() + size, torch.tensor([size, 0.3]).double()]
        logs += [torch.tensor([-3.0 - size, -5.0]).double()] if given is None else []
        differences.append(dense(logs) - network.log_density(x, y, given, logs))
    assert torch.allclose(differences[0], differences[1], rtol=1e-9)
    for _ in range(4):  # each call takes at most 30 steps
        network.train_with_evidence(x, y, given, warm=True)
    logs = [network.features.scale.log(), network.precision.log()]
    logs += [(network.noise - 1e-5).log()] if given is None else []
    gradients = torch.autograd.grad(dense([one.requires_grad_() for one in logs]), logs)
    assert max(float(gradient.abs().max()) for gradient in gradients) < 0.05  # it stops at a change of 1e-4


def test_an_input_that_does_not_matter_has_the_longest_length_scale() -> None:
    x, y = data(1)
    scale = ntkl.botorch.LaplaceModel.fit("fourier", x, y, noise=1e-4).laplace.network.module.features.scale
    assert float(scale[2]) < 0.3 * float(scale[:2].min())


def test_transforms_dtypes_and_a_warm_start() -> None:
    x, y = data(1)
    bounds = torch.tensor([[0.0] * D, [2.0] * D]).double()
    models = []
    for dtype in (torch.float64, torch.float32):
        transforms = {"input_transform": Normalize(D, bounds=bounds.to(dtype)), "outcome_transform": Standardize(1)}
        models.append(ntkl.botorch.LaplaceModel.fit("fourier", (2 * x).to(dtype), (100 * y).to(dtype), **transforms))
    plain = ntkl.botorch.LaplaceModel.fit("fourier", x, Standardize(1)(y)[0])
    expected = y.mean() * 100 + 100 * y.std() * plain.posterior(x + 0.05).mean
    for model, tolerance in zip(models, (1e-6, 1e-2), strict=True):
        like = model.train_inputs[0]
        assert torch.allclose(model.posterior((2 * x + 0.1).to(like)).mean.double(), expected, rtol=tolerance, atol=1.0)
    state = torch.get_rng_state()
    before = plain.laplace.network.module.features.scale.clone()
    warm = ntkl.botorch.LaplaceModel.fit("fourier", x, Standardize(1)(y)[0], warm_start=plain)
    assert torch.equal(before, plain.laplace.network.module.features.scale)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.allclose(warm.laplace.network.module.features.scale, before, rtol=0.05)


def test_it_trains_itself() -> None:
    x, y = data(1)
    with refused(ntkl.errors.UnsupportedError, 'no trainer for network="fourier"', "a function", "callable"):
        ntkl.botorch.LaplaceModel.fit("fourier", x, y, trainer=lambda *_: None)


def test_constant_outcomes() -> None:
    """A single point, and outcomes that are all zero, have finite hyperparameters."""
    x, _ = data(1)
    for count in (1, N):
        model = ntkl.botorch.LaplaceModel.fit("fourier", x[:count], torch.zeros(count, 1).double())
        found = model.posterior(x)
        assert bool(found.mean.isfinite().all()) and bool((found.variance > 0).all())


def test_the_perceptron_sees_the_unit_cube_as_a_half_circle() -> None:
    ends = torch.tensor([[0.0], [0.5], [1.0]]).double()
    expected = torch.tensor([[-1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]).double()
    assert torch.allclose(Angles()(Normalize(1, bounds=torch.tensor([[2.0], [4.0]]).double())(2 + 2 * ends)), expected)


@pytest.mark.parametrize("size", [-450.0, 450.0])
def test_long_steps_of_the_search_do_not_overflow(size: float) -> None:
    """A line search of clustered points in six dimensions went there; it comes back if squares of slopes are finite."""
    x, y = data(2)
    network = ntkl.botorch.LaplaceModel.fit("fourier", x, y).laplace.network.module
    for chosen in range(3):
        logs = [torch.zeros(D).double(), torch.zeros(2).double(), torch.zeros(2).double() - 4.0]
        logs[chosen][1] += size
        value = network.log_density(x, y, None, [one.requires_grad_() for one in logs])
        slopes = torch.autograd.grad(value, logs)
        assert bool(value.isfinite()) and all(bool(slope.square().isfinite().all()) for slope in slopes)
        assert float(slopes[chosen][1]) * size < 0


def test_a_warm_search_begins_at_the_present_hyperparameters_too() -> None:
    """Its steps are limited: where they ended, a warm search goes on, and a cold one ends there again."""
    torch.manual_seed(3)
    x = torch.rand(40, 6).double()
    y = torch.sin(5 * x[:, :1]) * torch.cos(4 * x[:, 1:2]) + x[:, 2:3] * x[:, 3:4] ** 2
    y, network = (y - y.mean()) / y.std(), FourierNetwork(6, 1)
    found = []
    for warm in (False, True, False):
        network.train_with_evidence(x, y, None, warm=warm)
        logs = [network.features.scale.log(), network.precision.log(), (network.noise - 1e-5).log()]
        found.append(float(network.log_density(x, y, None, logs)))
    assert found[1] > found[0] + 1e-6 and found[2] == pytest.approx(found[0], abs=1e-9)
