"""Matheron paths and model lists: BoTorch's own callers beside dense formulas of the linearized network."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import Size, Tensor, nn

import ntk_laplace as ntkl
from refusals import refused

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("botorch")
    from botorch.acquisition.logei import qLogExpectedImprovement
    from botorch.acquisition.objective import LinearMCObjective
    from botorch.acquisition.thompson_sampling import PathwiseThompsonSampling
    from botorch.models import ModelList, SingleTaskGP
    from botorch.models.transforms import Normalize, Standardize
    from botorch.optim import optimize_acqf
    from botorch.sampling.get_sampler import get_sampler
    from botorch.sampling.normal import SobolQMCNormalSampler
    from botorch.sampling.pathwise import draw_matheron_paths
    from botorch.sampling.pathwise.posterior_samplers import get_matheron_path_model

D, N = 2, 9


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@functools.cache
def fitted(m: int, seed: int = 0) -> Any:
    x = draws(N, D, seed=seed)
    y = 2.0 + torch.stack([(3 * x[:, 0] + k * x[:, 1]).sin() for k in range(1, m + 1)], 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, m)).double()
    inputs, outcomes = Normalize(D, bounds=torch.tensor([[-0.1, 0.0], [1.0, 1.2]]).double()), Standardize(m)
    posterior = ntkl.laplace(network, (inputs(x), outcomes(y)[0]), ntkl.Gaussian(0.05), ntkl.GaussianPrior(0.7))
    return ntkl.botorch.LaplaceModel(posterior, input_transform=inputs.eval(), outcome_transform=outcomes.eval())


def dense(model: Any, X: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Mean (n m,) and covariance (n m, n m) of the linearized network in weight space, from autograd's rows of J."""
    posterior = model.laplace
    module, noise = posterior.network.module, float(posterior.likelihood.noise)
    names = dict(module.named_parameters())

    def jacobian(x: Tensor) -> Tensor:
        def call(values: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(module, values, (x,))

        parts = torch.func.jacrev(call)({name: p.detach() for name, p in names.items()})
        return torch.cat([part.flatten(2) for part in parts.values()], -1).flatten(0, 1)

    x, inputs = model.input_transform(draws(N, D, seed=seed)), model.input_transform(X)
    own, rows = jacobian(x), jacobian(inputs)
    precision = 0.7 * torch.eye(own.shape[1]).double() + own.mT @ own / noise
    with torch.no_grad():
        mean, size = module(inputs), model.outcome_transform.stdvs.flatten().repeat(len(X))
    covariance = rows @ torch.linalg.solve(precision, rows.mT)
    return model.outcome_transform.untransform(mean)[0].flatten(), size[:, None] * covariance * size


@pytest.mark.parametrize("m", [1, 2])
def test_paths_have_the_posterior_s_moments(m: int) -> None:
    model, x, count = fitted(m), draws(2, D, seed=1), 20_000
    torch.manual_seed(0)
    values = get_matheron_path_model(model, Size([count]))(x)  # (count, 2, m)
    assert values.shape == (count, 2, m)
    mean, covariance = dense(model, x)
    error = (covariance.diagonal() / count).sqrt()
    assert bool(((values.flatten(1).mean(0) - mean).abs() < 5 * error).all())
    assert torch.allclose(values.flatten(1).T.cov(), covariance, rtol=0.1, atol=0.05 * float(covariance.abs().max()))


@pytest.mark.parametrize("m", [1, 2])
def test_paths_are_thompson_paths(m: int) -> None:
    model = fitted(m).condition_on_observations(draws(2, D, seed=3), 2.0 + draws(2, m, seed=4))
    X = draws(3, 4, 5, D, seed=2)
    torch.manual_seed(1)
    found = get_matheron_path_model(model, Size([4]))
    torch.manual_seed(1)
    assert torch.allclose(found(X), model.thompson_path(4)(X), rtol=1e-12)
    assert found.batch_shape == Size([4]) and found.num_outputs == m
    one = get_matheron_path_model(model)
    assert one(X).shape == (3, 4, 5, m) and torch.allclose(one(X)[1], one(X[1]), rtol=1e-12)


def test_thompson_sampling() -> None:
    """Values are the sum over draws at their own points; two runs of the optimizer find the maximum of each draw."""
    model, bounds = fitted(1), torch.tensor([[0.0] * D, [1.0] * D]).double()
    acquisition, X = PathwiseThompsonSampling(model), draws(6, 3, D, seed=5)
    torch.manual_seed(2)
    found = acquisition(X)
    torch.manual_seed(2)
    path = model.thompson_path(3)
    assert torch.allclose(found, path(X.unsqueeze(-2)).flatten(1).sum(1), rtol=1e-12)
    best, value = optimize_acqf(acquisition, bounds, q=3, num_restarts=3, raw_samples=16, options={"maxiter": 30})
    grid = torch.cartesian_prod(*[torch.linspace(0, 1, 21).double()] * D)
    with torch.no_grad():
        highest = path(grid.unsqueeze(0)).amax((1, 2)).sum()
    assert best.shape == (3, D) and float(value) > float(highest) - 0.05


def test_thompson_sampling_of_several_outputs() -> None:
    """One model of two outputs, and a list of two models: the objective combines their draws."""
    objective, X = LinearMCObjective(torch.tensor([1.0, -2.0]).double()), draws(4, 2, D, seed=6)
    for model in (fitted(2), ModelList(fitted(1), fitted(1, 1))):
        torch.manual_seed(3)
        found = PathwiseThompsonSampling(model, objective=objective)(X)
        torch.manual_seed(3)
        parts = [one.thompson_path(2) for one in (model.models if isinstance(model, ModelList) else [model])]
        values = torch.cat([part(X.unsqueeze(-2)) for part in parts], -1).squeeze(-2)
        assert torch.allclose(found, (values[..., 0] - 2 * values[..., 1]).sum(1), rtol=1e-12)
    path = draw_matheron_paths(fitted(2), Size([2]))
    with refused(ntkl.errors.DataError, r"\(\.\.\., 1, n, d\) of the 2 outputs", r"shape \(5, 2, 4, 2\)", "unsqueeze"):
        path(draws(5, 2, 4, D))


def test_model_lists() -> None:
    """Posterior, fantasies, a subset and an acquisition function; the parts are independent."""
    parts = [fitted(1), fitted(1, 1)]
    both, X = ModelList(*parts), draws(3, D, seed=7)
    found = both.posterior(X)
    for k, part in enumerate(parts):
        mean, covariance = dense(part, X, seed=k)
        assert torch.allclose(found.mean[:, k], mean, rtol=1e-9)
        assert torch.allclose(found.variance[:, k], covariance.diagonal(), rtol=1e-8, atol=1e-11)
    assert both.subset_output([1]) is parts[1]
    fantasies = both.fantasize(draws(2, D, seed=8), SobolQMCNormalSampler(Size([4]), seed=0))
    assert fantasies.posterior(X).mean.shape == (4, 3, 2)
    gp = SingleTaskGP(draws(N, D), draws(N, 1, seed=9))
    several = ModelList(parts[0], gp)
    objective = LinearMCObjective(torch.tensor([1.0, 0.5]).double())
    sampler = get_sampler(several.posterior(X), Size([8]))
    acquisition = qLogExpectedImprovement(several, best_f=2.0, sampler=sampler, objective=objective)
    points = draws(2, 1, D, seed=10).requires_grad_()
    (slope,) = torch.autograd.grad(acquisition(points).sum(), points)
    assert bool(slope.isfinite().all()) and float(slope.abs().max()) > 0
