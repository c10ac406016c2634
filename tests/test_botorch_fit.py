"""What `LaplaceModel.fit` finds: the optimum of noisy outcomes, a noise for each output, what a warm start continues.

Without the extra ``botorch`` these tests are skipped.
"""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Size, Tensor, nn

import ntk_laplace as ntkl
from refusals import refused

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("botorch")
    from botorch.models import ModelListGP
    from botorch.models.transforms import Normalize, Standardize
    from botorch.sampling.normal import SobolQMCNormalSampler

fit = ntkl.botorch.LaplaceModel.fit
D, N = 2, 40
BOUNDS = torch.tensor([[0.0] * D, [1.0] * D]).double()
DEVIATIONS = torch.tensor([0.5, 0.01]).double()


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=Generator().manual_seed(seed), dtype=torch.float64)


def perceptron(d: int, m: int) -> nn.Module:
    return nn.Sequential(nn.Linear(d, 8), nn.SiLU(), nn.Linear(8, m)).double()


# --- noisy outcomes


@pytest.mark.parametrize(("seed", "n"), [(3, 20), (4, 40), (7, 40)])
def test_noise_is_not_taken_for_a_function(seed: int, n: int) -> None:
    """From little noise alone the search ends at an optimum with errors of 0.5 to 0.7."""
    generator = Generator().manual_seed(seed)
    x = torch.rand(n, D, generator=generator, dtype=torch.float64)
    y = (6 * x[:, :1]).sin() + 0.4 * torch.randn(n, 1, generator=generator, dtype=torch.float64)
    model = fit("fourier", x, y, input_transform=Normalize(D, bounds=BOUNDS), outcome_transform=Standardize(1))
    at = draws(500, D)
    assert float((model.posterior(at).mean - (6 * at[:, :1]).sin()).square().mean().sqrt()) < 0.3
    assert float(model.laplace.likelihood.noise.detach() * y.var()) == pytest.approx(0.16, rel=0.7)


def test_a_function_is_not_taken_for_noise() -> None:
    """Outcomes without noise, from a new network, and after a start with much noise."""
    x = draws(20, D)
    y = (6 * x[:, :1]).sin()
    noisy = fit("fourier", x, y + 2.0 * draws(20, 1, seed=1), outcome_transform=Standardize(1))
    assert float(noisy.laplace.likelihood.noise) > 0.1
    for start in (None, noisy):
        model = fit("fourier", x, y, outcome_transform=Standardize(1), warm_start=start)
        assert float(model.laplace.likelihood.noise) < 1e-3


# --- several outputs


def outcomes(n: int = N, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two functions, with much noise and with little."""
    x = draws(n, D, seed=seed)
    white = torch.randn(n, 2, generator=Generator().manual_seed(seed + 100), dtype=torch.float64)
    return x, torch.stack([(3 * x[:, 0]).sin(), x[:, 1].square()], 1) + DEVIATIONS * white


@functools.cache
def learned(kind: str) -> Any:
    """Tests leave it alone."""
    network = perceptron if kind == "perceptron" else kind
    return fit(network, *outcomes(), outcome_transform=Standardize(2))


def noise_of(model: Any) -> Tensor:
    """In units of the outcomes, (m,)."""
    return model.laplace.likelihood.noise.detach() * model.outcome_transform.stdvs.flatten() ** 2


def joint(found: Any) -> Tensor:
    return found.distribution.covariance_matrix


KINDS = pytest.mark.parametrize("kind", ["fourier", pytest.param("perceptron", marks=pytest.mark.slow)])


@KINDS
def test_each_output_has_its_noise(kind: str) -> None:
    """It is learned; one output has a scalar, and a fixed noise stays one number."""
    model = learned(kind)
    likelihood = model.laplace.likelihood
    assert likelihood.kind == "output" and likelihood.noise.shape == (2,)
    assert torch.allclose(noise_of(model).sqrt(), DEVIATIONS, rtol=0.4)
    network = perceptron if kind == "perceptron" else kind
    x, y = outcomes()
    one = fit(network, x, y[:, :1], rounds=1, steps=3).laplace.likelihood
    assert one.kind == "scalar" and one.noise.shape == ()
    fixed = fit(network, x, y, noise=0.1, rounds=1, steps=3).laplace.likelihood
    assert fixed.kind == "scalar" and float(fixed.noise) == pytest.approx(0.1)


@pytest.mark.parametrize("kind", ["fourier", "mlp"])
@pytest.mark.slow
def test_intervals_cover_each_output(kind: str) -> None:
    """With one noise, intervals of 90 % contain 70 % of the noisy outcomes and 98 % of the others."""
    model = fit(kind, *outcomes(80), outcome_transform=Standardize(2))
    x, y = outcomes(1000, seed=1)
    found = model.posterior(x.unsqueeze(-2), observation_noise=True)
    inside = ((y - found.mean.squeeze(-2)).abs() < 1.645 * found.variance.squeeze(-2).sqrt()).double().mean(0)
    assert bool(((inside > 0.83) & (inside < 0.99)).all())


def test_each_output_of_fourier_has_its_precision() -> None:
    """Outputs of one function at other amplitudes: the prior variances differ by the square."""
    x = draws(30, D)
    y = (4 * x[:, :1]).sin() * torch.tensor([1.0, 5.0]).double()
    precision = fit("fourier", x, y).laplace.prior.precision.detach()
    assert float(precision[0] / precision[1]) == pytest.approx(25.0, rel=0.2)


def test_outputs_with_length_scales_of_their_own_are_a_list_of_models() -> None:
    x, y = outcomes()
    models = [fit("fourier", x, y[:, [k]], outcome_transform=Standardize(1)) for k in (0, 1)]
    scales = [model.laplace.network.module.features.scale for model in models]
    assert int(scales[0].argmax()) == 0 and int(scales[1].argmax()) == 1
    at = draws(3, D, seed=5)
    both = ModelListGP(*models).posterior(at)
    for k, model in enumerate(models):
        assert torch.allclose(both.mean[:, [k]], model.posterior(at).mean, rtol=1e-12)
        assert torch.allclose(both.variance[:, [k]], model.posterior(at).variance, rtol=1e-9)


def conditioned(model: Any, x: Tensor, y: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (2 q,) and covariance of f at `at` given y = f(x) + ε, from the joint Gaussian of f at both."""
    found, n = model.posterior(torch.cat([x, at])), 2 * len(x)
    mean, covariance = found.mean.flatten(), joint(found)
    seen = covariance[:n, :n] + noise_of(model).repeat(len(x)).diag()
    gain = torch.linalg.solve(seen, covariance[:n, n:]).mT
    return mean[n:] + gain @ (y.flatten() - mean[:n]), covariance[n:, n:] - gain @ covariance[:n, n:]


@KINDS
def test_observations_have_the_noise_of_their_output(kind: str) -> None:
    """Noise in the posterior, observations, fantasies and marginals, beside dense formulas."""
    model, at = learned(kind), draws(3, D, seed=5)
    extra = joint(model.posterior(at, observation_noise=True)) - joint(model.posterior(at))
    assert torch.allclose(extra, noise_of(model).repeat(3).diag(), rtol=1e-8, atol=1e-12)
    x, y = outcomes(4, seed=2)
    new = model.condition_on_observations(x, y)
    mean, covariance = conditioned(model, x, y, at)
    assert torch.allclose(new.posterior(at).mean.flatten(), mean, rtol=1e-6, atol=1e-8)
    assert torch.allclose(joint(new.posterior(at)), covariance, rtol=1e-6, atol=1e-9)
    fantasy = model.fantasize(x, SobolQMCNormalSampler(Size([3]), seed=0))
    for number, targets in enumerate(fantasy.train_targets[..., N:]):
        sampled, _ = model.outcome_transform.untransform(targets.mT)
        mean, covariance = conditioned(model, x, sampled, at)
        found = fantasy.posterior(at)
        assert torch.allclose(found.mean[number].flatten(), mean, rtol=1e-6, atol=1e-8)
        assert torch.allclose(joint(found)[number], covariance, rtol=1e-6, atol=1e-9)
    for whole in (model, new):
        for k in (0, 1):
            part = whole.subset_output([k])
            for noise in (False, True):
                found, both = (one.posterior(at, observation_noise=noise) for one in (part, whole))
                assert torch.allclose(found.mean, both.mean[:, [k]], rtol=1e-9)
                assert torch.allclose(joint(found), joint(both)[k::2, k::2], rtol=1e-8, atol=1e-12)


def test_fantasies_of_fourier_are_refits_with_these_hyperparameters() -> None:
    """Beside the Gaussian process of all data, with a kernel and a noise for each output."""
    model, at = learned("fourier"), draws(3, D, seed=5)
    (x, _), (more, _) = outcomes(), outcomes(4, seed=2)
    fantasy = model.fantasize(more, SobolQMCNormalSampler(Size([2]), seed=0))
    features, every = model.laplace.network.module.features, torch.cat([x, more])
    shifts = (every[:, None] - torch.cat([every, at])) * features.scale @ features.frequencies.T
    gram, units = shifts.cos().mean(-1) + 1.0, model.outcome_transform
    for k, (precision, noise) in enumerate(zip(model.laplace.prior.precision, model.laplace.likelihood.noise,
                                               strict=True)):
        own = gram[:, : len(every)] / precision + noise * torch.eye(len(every))
        for number in (0, 1):
            mean = gram[:, len(every) :].mT / precision @ torch.linalg.solve(own, fantasy.train_targets[number, k])
            wanted = units.means[..., k] + units.stdvs[..., k] * mean
            assert torch.allclose(fantasy.posterior(at).mean[number, :, k], wanted.squeeze(), rtol=1e-6, atol=1e-7)


@KINDS
def test_copies_and_files_keep_the_noise(kind: str, tmp_path: Path) -> None:
    model, at = learned(kind), draws(3, D, seed=5)
    wanted = joint(model.posterior(at, observation_noise=True))
    assert torch.equal(joint(pickle.loads(pickle.dumps(model)).posterior(at, observation_noise=True)), wanted)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.likelihood.observation.log_noise += 1.0
    other.load_state_dict(model.state_dict())
    assert torch.allclose(joint(other.posterior(at, observation_noise=True)), wanted, rtol=1e-10)
    model.laplace.save(tmp_path / "posterior.pt", include_data=True)
    loaded = ntkl.load(tmp_path / "posterior.pt", model.laplace.network.module)
    again = ntkl.botorch.LaplaceModel(loaded, outcome_transform=model.outcome_transform)
    assert torch.allclose(joint(again.posterior(at, observation_noise=True)), wanted, rtol=1e-8, atol=1e-12)


def test_members_learn_the_noise_of_each_output() -> None:
    model = ntkl.botorch.LaplaceEnsemble.fit(perceptron, *outcomes(), members=2, rounds=1, steps=5)
    at = draws(3, D, seed=5)
    extra = joint(model.posterior(at, observation_noise=True)) - joint(model.posterior(at))
    noise = torch.stack([one.laplace.likelihood.noise.detach() for one in model.members]).mean(0)
    assert noise.shape == (2,) and torch.allclose(extra, noise.repeat(3).diag(), rtol=1e-7, atol=1e-10)


# --- warm starts


@KINDS
def test_a_warm_start_continues_the_noise(kind: str) -> None:
    """Of each output; from one number, each output gets one. A covariance stays one."""
    network = perceptron if kind == "perceptron" else kind
    more, first = outcomes(N + 5), learned(kind)
    options: dict[str, Any] = {"outcome_transform": Standardize(2)}
    cold, warm = fit(network, *more, **options), fit(network, *more, warm_start=first, **options)
    assert torch.allclose(noise_of(warm), noise_of(cold), rtol=0.3)
    at = draws(3, D, seed=5)
    assert torch.allclose(warm.posterior(at).mean, cold.posterior(at).mean, atol=0.2)
    fixed = fit(network, *outcomes(), noise=0.1, rounds=1, steps=20)
    assert fit(network, *more, warm_start=fixed, rounds=1, steps=3).laplace.likelihood.kind == "output"
    if kind == "perceptron":
        x, y = outcomes()
        posterior = ntkl.laplace(perceptron(D, 2), (x, y), ntkl.Gaussian(0.1 * torch.eye(2).double()))
        wrapped = ntkl.botorch.LaplaceModel(posterior)
        assert fit(network, x, y, warm_start=wrapped, rounds=1, steps=3).laplace.likelihood.kind == "covariance"


def test_a_warm_start_takes_over_the_prior() -> None:
    """Its groups and its mean, whether the caller names them or not."""
    x, y = outcomes(9)
    fast = functools.partial(fit, perceptron, x, y, noise=0.1, rounds=1, steps=3)
    for given in ({}, {"groups": "layer", "prior_mean": "zero"}, {"groups": {"a": ["0"], "b": ["2"]}}):
        first = fast(**given)
        for named in ({}, given):
            warm = fast(warm_start=first, seed=1, **named)
            assert warm.laplace.prior.groups == first.laplace.prior.groups
            assert torch.equal(warm.laplace.prior.flat_mean(), first.laplace.prior.flat_mean())
    fast(warm_start=fast(), groups="all", prior_mean="initial")
    zeros = perceptron(D, 2).requires_grad_(True)
    nn.utils.vector_to_parameters(torch.zeros(42).double(), zeros.parameters())
    start = fit(zeros, x, y, noise=0.1, rounds=1, steps=3)
    assert fit(zeros, x, y, noise=0.1, rounds=1, steps=3, prior_mean="initial", warm_start=start).num_outputs == 2


def test_a_warm_start_of_another_network_or_prior_is_refused() -> None:
    x, y = outcomes(9)
    fast = functools.partial(fit, noise=0.1, rounds=1, steps=3)
    first, mlp, fourier = fast(perceptron, x, y), fast("mlp", x, y, hidden_layer_sizes=(4,)), fast("fourier", x, y)
    wider = lambda d, m: nn.Sequential(nn.Linear(d, 9), nn.SiLU(), nn.Linear(9, m)).double()  # noqa: E731
    tanh = lambda d, m: nn.Sequential(nn.Linear(d, 8), nn.Tanh(), nn.Linear(8, m)).double()  # noqa: E731
    deeper = lambda d, m: nn.Sequential(*perceptron(d, m), nn.Linear(m, m).double())  # noqa: E731
    remedy = "Pass that network, with the hidden_layer_sizes and activation of its fit, or leave out warm_start"
    for network, start, expected, got in (
        (wider, first, r"0: Linear weight \(8, 2\) bias", r"0: Linear weight \(9, 2\)"),
        (tanh, first, "1: SiLU", "1: Tanh"), (deeper, first, "no other part", "3: Linear"),
        ("fourier", first, "class Sequential", "class FourierNetwork"), (perceptron, fourier, "FourierN", "Sequential"),
        ("mlp", mlp, r"1\.0: Linear weight \(4, 4\)", r"\(64, 4\)"),
    ):
        with refused(ntkl.UnsupportedError, f"the network of warm_start, with .*{expected}", got, remedy):
            fast(network, x, y, warm_start=start)
    with refused(ntkl.UnsupportedError, r"2: Linear weight \(2, 8\)", r"\(1, 8\)", remedy):
        fast(perceptron, x, y[:, :1], warm_start=first)
    with refused(ntkl.UnsupportedError, "groups='all', as in warm_start", "'layer'", "takes over the prior"):
        fast(perceptron, x, y, warm_start=first, groups="layer")
    with refused(ntkl.UnsupportedError, "prior_mean='initial', as in warm_start", "'zero'", "takes over the prior"):
        fast(perceptron, x, y, warm_start=first, prior_mean="zero")
    with refused(ntkl.UnsupportedError, "prior_mean='zero', as in warm_start", "'initial'", "takes over the prior"):
        fast(perceptron, x, y, warm_start=fast(perceptron, x, y, prior_mean="zero"), prior_mean="initial")
    with refused(ntkl.UnsupportedError, 'prior_mean "zero" or "initial"', "'one'", "Choose"):
        fast(perceptron, x, y, prior_mean="one")
    ensemble = ntkl.botorch.LaplaceEnsemble.fit(perceptron, x, y, members=2, noise=0.1, rounds=1, steps=3)
    with refused(ntkl.UnsupportedError, "the network of warm_start", r"\(9, 2\)", remedy):
        ntkl.botorch.LaplaceEnsemble.fit(wider, x, y, members=2, warm_start=ensemble)
