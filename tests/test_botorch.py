"""The BoTorch model: a conformance class of shapes, gradients and conditioning, and BoTorch's acquisition functions.

Without the extra ``botorch`` these tests are skipped.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import pickle
import re
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ntk_laplace as ntkl
from ntk_laplace.posterior.differentiable import DifferentiableModel
from ntk_laplace.runtime import tuning
from pairwise import pairwise
from refusals import refused
from scripts import run_script

with warnings.catch_warnings():  # what they say of other packages when they are imported
    warnings.simplefilter("ignore")
    pytest.importorskip("botorch")
    from botorch.acquisition import qUpperConfidenceBound
    from botorch.acquisition.active_learning import qNegIntegratedPosteriorVariance
    from botorch.acquisition.analytic import LogExpectedImprovement, PosteriorMean
    from botorch.acquisition.knowledge_gradient import qKnowledgeGradient
    from botorch.acquisition.logei import qLogExpectedImprovement, qLogNoisyExpectedImprovement
    from botorch.acquisition.max_value_entropy_search import qLowerBoundMaxValueEntropy, qMaxValueEntropy
    from botorch.acquisition.multi_objective.logei import qLogNoisyExpectedHypervolumeImprovement
    from botorch.acquisition.multi_objective.monte_carlo import qNoisyExpectedHypervolumeImprovement
    from botorch.acquisition.multi_step_lookahead import qMultiStepLookahead
    from botorch.acquisition.objective import ScalarizedPosteriorTransform
    from botorch.cross_validation import efficient_loo_cv
    from botorch.models.transforms import Log, Normalize, Standardize
    from botorch.optim import optimize_acqf
    from botorch.posteriors.transformed import TransformedPosterior
    from botorch.sampling.normal import SobolQMCNormalSampler
    from botorch.utils.datasets import SupervisedDataset

D, N = 2, 9
EXAMPLE = Path(__file__).resolve().parents[1] / "examples/bayesian_optimization"


def draws(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def data(m: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    x = draws(N, D, dtype=dtype)
    return x, 2.0 + torch.stack([(3 * x[:, 0] + k * x[:, 1]).sin() for k in range(1, m + 1)], 1)


def network(m: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, m)).to(dtype)


def small_noise(m: int) -> Any:
    """Of several kinds: one number, and a covariance of the outputs."""
    return 0.05 if m == 1 else 0.05 * torch.eye(m).double() + 0.02


@functools.cache
def fitted(m: int, transforms: bool, dtype: torch.dtype = torch.float64, structure: str = "gp") -> Any:
    """A model of an untrained network; tests leave it alone."""
    x, y = data(m, dtype)
    inputs = Normalize(D, bounds=torch.tensor([[-0.1, 0.0], [1.0, 1.2]], dtype=dtype)) if transforms else None
    outcomes = Standardize(m) if transforms else None
    inner, targets = (inputs(x), outcomes(y)[0]) if transforms else (x, y)
    posterior = ntkl.laplace(network(m, dtype), (inner, targets), ntkl.Gaussian(small_noise(m)),
                             ntkl.GaussianPrior(0.7), structure)
    return ntkl.botorch.LaplaceModel(posterior, input_transform=inputs, outcome_transform=outcomes, train_X=x)


def scale(model: Any) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the outcomes, (m,)."""
    if not hasattr(model, "outcome_transform"):
        like = model.train_inputs[0]
        return like.new_zeros(model.num_outputs), like.new_ones(model.num_outputs)
    return model.outcome_transform.means.flatten(), model.outcome_transform.stdvs.flatten()


def inner(model: Any, x: Tensor) -> Tensor:
    return model.transform_inputs(x)


def joint(found: Any) -> Tensor:
    """Covariance of a posterior, (..., q m, q m)."""
    return found.distribution.covariance_matrix


CASES = [*pairwise((1, 3), ((), (2, 3)), (1, 4), (torch.float64,), (False, True)),
         (1, (2,), 4, torch.float32, False), (3, (2,), 4, torch.float32, True)]


@pytest.mark.parametrize(("m", "batch", "q", "dtype", "transforms"), CASES)
class TestConformance:
    """Laws for numbers of outputs, batch shapes, numbers of joint points, dtypes, with and without transforms."""

    def test_posterior(self, m: int, batch: tuple, q: int, dtype: torch.dtype, transforms: bool) -> None:
        """Shapes; each batch is `Posterior.latent` at its points, in units of the outcomes; noise; samples."""
        model, x = fitted(m, transforms, dtype), draws(*batch, q, D, seed=1, dtype=dtype)
        found = model.posterior(x)
        assert found.mean.shape == found.variance.shape == (*batch, q, m)
        assert found.mean.dtype == found.variance.dtype == dtype
        assert model.num_outputs == m and model.batch_shape == ()
        assert found.rsample(torch.Size([5])).shape == (5, *batch, q, m)
        offset, factor = scale(model)
        units = factor.repeat(q)
        tolerance = 1e-9 if dtype == torch.float64 else 2e-4
        covariance, mean = joint(found).reshape(-1, q * m, q * m), found.mean.reshape(-1, q, m)
        for b, points in enumerate(x.reshape(-1, q, D)):
            wanted = model.laplace.latent(inner(model, points))
            both = wanted.covariance_matrix.to(dtype) * units * units[:, None]
            assert torch.allclose(covariance[b], both, rtol=tolerance, atol=tolerance)
            assert torch.allclose(mean[b], wanted.mean.to(dtype) * factor + offset, rtol=tolerance, atol=tolerance)
        own = torch.as_tensor(small_noise(m), dtype=dtype) * torch.eye(m, dtype=dtype) if m == 1 else small_noise(m)
        own = torch.block_diag(*[own.to(dtype) * factor * factor[:, None]] * q)
        noisy = joint(model.posterior(x, observation_noise=True)) - joint(found)
        assert torch.allclose(noisy, own.expand_as(noisy), rtol=tolerance, atol=tolerance)
        given = model.posterior(x, observation_noise=torch.full((1, m), 0.5, dtype=dtype)).variance - found.variance
        assert torch.allclose(given, (0.5 * factor.square()).expand_as(given), rtol=1e-3, atol=tolerance)

    def test_gradients(self, m: int, batch: tuple, q: int, dtype: torch.dtype, transforms: bool) -> None:
        """Of mean and joint covariance in X, on a few of the points; float32 against float64."""
        model, x = fitted(m, transforms, dtype), draws(*batch, q, D, seed=1, dtype=dtype)

        def total(x: Tensor, model: Any = model) -> Tensor:
            found = model.posterior(x)
            return (found.mean.cos() + found.variance).sum() + joint(found).square().sum()

        slope, = torch.autograd.grad(total(x.requires_grad_()), x)
        if dtype == torch.float32:
            fine = x.detach().double().requires_grad_()
            wanted, = torch.autograd.grad(total(fine, fitted(m, transforms)), fine)
            assert torch.allclose(slope.double(), wanted, rtol=1e-2, atol=1e-3 * float(wanted.abs().max()))
            return
        direction = draws(*x.shape, seed=2) - 0.5
        with torch.no_grad():  # another path: no graph
            numeric = (total(x + 1e-5 * direction) - total(x - 1e-5 * direction)) / 2e-5
        assert torch.allclose((slope * direction).sum(), numeric, rtol=1e-6, atol=1e-8)

    def test_conditioning(self, m: int, batch: tuple, q: int, dtype: torch.dtype, transforms: bool) -> None:
        """It is `Posterior.add` in each batch; two steps are one; fantasies have their dimension first."""
        model = fitted(m, transforms, dtype)
        x, y = draws(*batch, q, D, seed=3, dtype=dtype), draws(*batch, q, m, seed=4, dtype=dtype)
        new = model.condition_on_observations(x, y)
        points = draws(3, D, seed=5, dtype=dtype)
        found = new.posterior(points)
        assert new.batch_shape == batch and found.mean.shape == (*batch, 3, m)
        offset, factor = scale(model)
        tolerance = 1e-9 if dtype == torch.float64 else 2e-4
        mean, covariance = found.mean.reshape(-1, 3, m), joint(found).reshape(-1, 3 * m, 3 * m)
        for b, (own_x, own_y) in enumerate(zip(x.reshape(-1, q, D), y.reshape(-1, q, m), strict=True)):
            wanted = model.laplace.add(inner(model, own_x), (own_y - offset) / factor).latent(inner(model, points))
            units = factor.repeat(3)
            assert torch.allclose(mean[b], (wanted.mean * factor + offset).to(dtype), rtol=tolerance, atol=tolerance)
            both = (wanted.covariance_matrix * units * units[:, None]).to(dtype)
            assert torch.allclose(covariance[b], both, rtol=tolerance, atol=tolerance)
        assert new.train_targets.shape == (*batch, *(() if m == 1 else (m,)), N + q)
        assert new.train_inputs[0].shape == (*batch, N + q, D)
        if q > 1 and dtype == torch.float64:
            twice = model.condition_on_observations(x[..., :1, :], y[..., :1, :])
            twice = twice.condition_on_observations(x[..., 1:, :], y[..., 1:, :]).posterior(points)
            assert torch.allclose(twice.mean, found.mean, rtol=1e-9, atol=1e-10)
            assert torch.allclose(joint(twice), joint(found), rtol=1e-9, atol=1e-10)
        fantasy = model.fantasize(x, SobolQMCNormalSampler(torch.Size([2]), seed=0))
        assert fantasy.batch_shape == (2, *batch)
        assert fantasy.posterior(points).mean.shape == (2, *batch, 3, m)
        assert fantasy.posterior(draws(*batch, 2, D, seed=6, dtype=dtype)).variance.shape == (2, *batch, 2, m)

    @pytest.mark.slow
    def test_noise_of_each_fantasy(self, m: int, batch: tuple, q: int, dtype: torch.dtype, transforms: bool) -> None:
        """Variances may have more batch dimensions than X: each is the model with that noise, once and twice."""
        model, points = fitted(m, transforms, dtype), draws(3, D, seed=5, dtype=dtype)
        x, y = draws(q, D, seed=3, dtype=dtype), draws(q, m, seed=4, dtype=dtype)
        noise = 0.1 + draws(*(batch or (2,)), q, m, seed=6, dtype=dtype)
        new = model.condition_on_observations(x, y, noise=noise)
        twice = new.condition_on_observations(x + 0.1, y, noise=0.2 + noise)
        drawn = twice.thompson_path()(points.expand(*noise.shape[:-2], 3, D))
        assert new.batch_shape == noise.shape[:-2] and drawn.shape == (*noise.shape[:-2], 3, m)
        for place in itertools.product(*map(range, noise.shape[:-2])):
            one = model.condition_on_observations(x, y, noise=noise[place])
            other = one.condition_on_observations(x + 0.1, y, noise=0.2 + noise[place])
            for many, single in ((new, one), (twice, other)):
                found, wanted = many.posterior(points), single.posterior(points)
                assert torch.allclose(found.mean[place], wanted.mean, rtol=1e-4, atol=1e-5)
                assert torch.allclose(joint(found)[place], joint(wanted), rtol=1e-3, atol=1e-5)
        exact = model.condition_on_observations(x, y, noise=torch.zeros_like(noise))
        assert exact.thompson_path()(points.expand(*noise.shape[:-2], 3, D)).isfinite().all()
        for flag in (None, 0, np.bool_(False)):
            assert torch.equal(joint(model.posterior(x, observation_noise=flag)), joint(model.posterior(x)))
        noisy = model.posterior(x, observation_noise=noise)
        assert noisy.mean.shape == noise.shape
        assert torch.allclose(joint(noisy), joint(model.posterior(x)) + torch.diag_embed(
            (noise * scale(model)[1] ** 2).flatten(-2)), rtol=1e-3, atol=1e-5)

    def test_outputs(self, m: int, batch: tuple, q: int, dtype: torch.dtype, transforms: bool) -> None:
        """`subset_output` and `output_indices` are the marginals, of a conditioned model too."""
        model = fitted(m, transforms, dtype)
        x, chosen = draws(*batch, q, D, seed=1, dtype=dtype), [0] if m == 1 else [2, 0]
        new = model.condition_on_observations(x, draws(*batch, q, m, seed=4, dtype=dtype))
        for one in (model, new):
            whole, part = one.posterior(x), one.subset_output(chosen)
            assert part.num_outputs == len(chosen)
            for found in (part.posterior(x), one.posterior(x, output_indices=chosen)):
                assert torch.allclose(found.mean, whole.mean[..., chosen], rtol=1e-6)
                assert torch.allclose(found.variance, whole.variance[..., chosen], rtol=1e-3, atol=1e-6)
            assert one.num_outputs == m  # as before
        if m > 1:
            weights = torch.tensor([0.5, -1.0, 2.0], dtype=dtype)
            scalar = model.posterior(x, posterior_transform=ScalarizedPosteriorTransform(weights))
            assert torch.allclose(scalar.mean.squeeze(-1), model.posterior(x).mean @ weights, rtol=1e-5)


@pytest.mark.parametrize("structure", ["full", "kfac", "diag"])
def test_other_structures(structure: str) -> None:
    """The same laws with H of another form; conditioning is the algebra of the linearized network given that H."""
    model = fitted(3, True, structure=structure)
    x = draws(2, 3, D, seed=1)
    assert torch.autograd.gradcheck(lambda x: model.posterior(x).variance, x.requires_grad_(), atol=1e-6)
    wanted = model.laplace.latent(inner(model, x[1].detach())).covariance_matrix
    units = scale(model)[1].repeat(3)
    assert torch.allclose(joint(model.posterior(x))[1], wanted * units * units[:, None], rtol=1e-9, atol=1e-10)
    point, y = x[0].detach(), draws(3, 3, seed=2)
    after = model.condition_on_observations(point, y).posterior(point).variance
    assert bool((after < model.posterior(point).variance).all())
    if structure == "full":
        same = fitted(3, True).condition_on_observations(point, y).posterior(point).variance
        assert torch.allclose(after, same, rtol=1e-8)


@pytest.mark.parametrize("m", [1, 3])
def test_fantasies_are_refits_where_the_network_is_linear_in_its_weights(m: int) -> None:
    """The model given (X, Y) is the posterior fitted to all data, at the optimum of all data."""

    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(3 * D, m).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.cat([x, (3 * x).sin(), (4 * x).cos()], 1))

    def model_of(x: Tensor, y: Tensor) -> Any:
        start = ntkl.laplace(Features(), (x, y), ntkl.Gaussian(0.02), ntkl.GaussianPrior(0.5))
        with torch.no_grad():  # of a quadratic, one Newton step
            network = copy.deepcopy(start.network.module)
            step = start.posterior_precision.solve(start.fitted.joint_gradient())
            for parameter, part in zip(network.parameters(), start.network.unflatten(step).values(), strict=True):
                parameter -= part
        return ntkl.botorch.LaplaceModel(ntkl.laplace(network, (x, y), ntkl.Gaussian(0.02), ntkl.GaussianPrior(0.5)))

    x, y = data(m)
    model, more, points = model_of(x, y), draws(4, D, seed=7), draws(5, D, seed=8)
    fantasy = model.fantasize(more, SobolQMCNormalSampler(torch.Size([3]), seed=1))
    for number in range(3):
        own = fantasy.train_targets[number]
        own = (own if m > 1 else own.unsqueeze(0)).mT[N:]
        again = model_of(torch.cat([x, more]), torch.cat([y, own])).posterior(points)
        found = fantasy.posterior(points)
        assert torch.allclose(found.mean[number], again.mean, rtol=1e-8, atol=1e-10)
        assert torch.allclose(joint(found)[number], joint(again), rtol=1e-8, atol=1e-10)


def test_thompson_paths() -> None:
    """Mean and joint covariance of many draws are the posterior's, of a conditioned model too; a path is a function."""
    for model in (fitted(3, True), fitted(3, True).condition_on_observations(draws(2, D, seed=3), draws(2, 3, seed=4))):
        x, generator = draws(2, D, seed=1), torch.Generator().manual_seed(0)
        paths = model.thompson_path(20_000, generator)
        values = paths(x.unsqueeze(0)).flatten(1)
        found = model.posterior(x)
        error = found.variance.flatten().sqrt() / 20_000**0.5
        assert bool(((values.mean(0) - found.mean.flatten()).abs() < 5 * error).all())
        assert torch.allclose(values.T.cov(), joint(found), rtol=0.1, atol=0.05 * float(joint(found).abs().max()))
    one = model.thompson_path(generator=generator)
    batches = draws(4, 3, D, seed=2).requires_grad_()
    assert one(batches).shape == (4, 3, 3) and torch.allclose(one(batches)[2], one(batches[2]), rtol=1e-12)
    one(batches).sum().backward()
    assert float(batches.grad.abs().max()) > 0
    several = model.thompson_path(5, generator)
    assert several(draws(4, 1, 3, D, seed=2)).shape == (4, 5, 3, 3)


def test_the_model_is_its_own() -> None:
    """No weight is in its state; hyperparameters are shared with the posterior; copies are apart."""
    model, x = copy.deepcopy(fitted(1, True)), draws(3, D, seed=1)
    names = set(model.state_dict())
    assert {"prior.log_precision", "likelihood.observation.log_noise", "outcome_transform.means"} <= names
    assert not any("weight" in name or "network" in name for name in names)
    before = model.posterior(x).variance
    other = pickle.loads(pickle.dumps(model))
    assert torch.equal(other.posterior(x).variance, before)
    with torch.no_grad():
        other.prior.log_precision += 3.0
    assert not torch.allclose(other.posterior(x).variance, before) and torch.equal(model.posterior(x).variance, before)
    other.load_state_dict(model.state_dict())
    assert torch.allclose(other.posterior(x).variance, before, rtol=1e-12)
    model.train()
    assert torch.equal(model.train_inputs[0], data(1)[0])
    model.eval()
    assert torch.equal(model.train_inputs[0], model.transform_inputs(data(1)[0]))
    single = other.float()
    assert single.laplace.dtype == torch.float32
    assert torch.allclose(single.posterior(x.float()).variance, before.float(), rtol=1e-2)


@pytest.mark.parametrize("change", ["precision", "dtype", "dtype of the first"])
def test_observations_at_another_precision_or_dtype(change: str) -> None:
    """Whatever was computed of the observations before."""
    model, x = copy.deepcopy(fitted(3, False)), draws(4, D, seed=1)
    given = draws(2, D, seed=5), draws(2, 3, seed=6), draws(2, 3, seed=7)
    more, tolerance = model.condition_on_observations(*given), 1e-10
    wanted = more.posterior(x)
    if change == "precision":
        model.prior.precision = 0.05
        wanted = model.condition_on_observations(*given).posterior(x)
    else:
        (model if change.endswith("first") else more).float()
        assert more.train_targets.dtype == (torch.float64 if change.endswith("first") else torch.float32)
        x, tolerance = x.float(), 1e-4
    found = more.posterior(x)
    assert torch.allclose(found.mean, wanted.mean.to(x), rtol=tolerance, atol=tolerance)
    assert torch.allclose(found.variance, wanted.variance.to(x), rtol=100 * tolerance)
    assert model.posterior(x).mean.dtype == x.dtype


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_after_a_call_without_them(mode: Any) -> None:
    """In the inputs that were observed, which qKnowledgeGradient optimizes, and in those to predict."""
    slopes = []
    for before in (False, True):
        observed, x = draws(2, D, seed=5).requires_grad_(), draws(3, D, seed=1).requires_grad_()
        model = fitted(1, True).condition_on_observations(observed, draws(2, 1, seed=6))
        if before:
            with mode():
                model.posterior(x).variance  # noqa: B018
        found = model.posterior(x)
        slopes.append(torch.autograd.grad(found.mean.sum() + found.variance.sum(), (observed, x)))
    for plain, after in zip(*slopes, strict=True):
        assert torch.allclose(plain, after, rtol=1e-12)


@pytest.mark.parametrize("given", [False, True])
def test_many_batches_are_predicted_in_parts(given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = fitted(3, True), draws(4, 2, D, seed=1)
    model = model.condition_on_observations(draws(2, D, seed=5), draws(2, 3, seed=6)) if given else model
    whole, seen, plain = model.posterior(x), [], DifferentiableModel.rows
    monkeypatch.setattr(tuning, "COVARIANCE_BYTES", 1)
    monkeypatch.setattr(DifferentiableModel, "rows", lambda self, x: (seen.append(len(x)), plain(self, x))[1])
    parts = model.posterior(x)
    assert seen == [2] * 4
    assert torch.allclose(parts.mean, whole.mean, rtol=1e-12)
    assert torch.allclose(joint(parts), joint(whole), rtol=1e-8)


def test_a_fit_in_inference_mode_has_gradients() -> None:
    x, y = data(1)
    options: dict[str, Any] = {"noise": 0.1, "steps": 5, "rounds": 1}
    plain = ntkl.botorch.LaplaceModel.fit(network(1), x, y, outcome_transform=Standardize(1), **options)
    with torch.inference_mode():
        model = ntkl.botorch.LaplaceModel.fit(
            network(1), x.clone(), y.clone(), outcome_transform=Standardize(1), **options)
    point = draws(3, 1, D, seed=1).requires_grad_()
    found, wanted = (torch.autograd.grad(one.posterior(point).variance.sum(), point)[0] for one in (model, plain))
    assert torch.allclose(found, wanted, rtol=1e-10)


def test_each_observation_is_solved_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many were added before it, one after another; the posterior is that of all together."""
    model, x, y = fitted(1, True), draws(5, D, seed=5), draws(5, 1, seed=6)
    kind, solved = type(model.laplace.posterior_precision), []
    plain = kind.solve
    monkeypatch.setattr(kind, "solve", lambda self, v: (solved.append(v.shape[:-1].numel()), plain(self, v))[1])
    one = model
    for at in range(5):
        one = one.condition_on_observations(x[at : at + 1], y[at : at + 1])
        one.posterior(x[:1])
    assert sum(solved) == 10  # one for the observation, and one for the point to predict
    assert torch.allclose(joint(one.posterior(x)), joint(model.condition_on_observations(x, y).posterior(x)), rtol=1e-8)


def test_fantasies_of_no_points() -> None:
    """The same posterior for each fantasy, as of BoTorch's models."""
    model, x = fitted(3, True), draws(4, D, seed=1)
    found = model.fantasize(draws(2, 0, D), SobolQMCNormalSampler(torch.Size([5])))
    assert found.batch_shape == (5, 2)
    assert torch.allclose(found.posterior(x).mean, model.posterior(x).mean.expand(5, 2, 4, 3), rtol=1e-12)
    assert torch.allclose(joint(found.posterior(x)), joint(model.posterior(x)).expand(5, 2, 12, 12), rtol=1e-12)


def test_a_transform_without_a_gaussian_result() -> None:
    x, y = data(1)
    model = ntkl.botorch.LaplaceModel.fit("mlp", x, y, noise=0.01, outcome_transform=Log(), steps=20)
    found = model.posterior(x)
    assert isinstance(found, TransformedPosterior) and bool((found.rsample() > 0).all())


@pytest.mark.slow
def test_fit() -> None:
    """The log joint falls, a warm start begins at the weights of the last fit, known noise is used as it is."""
    x, y = data(2)
    module = network(2)
    before = [parameter.clone() for parameter in module.parameters()]
    state = torch.get_rng_state()
    first = ntkl.botorch.LaplaceModel.fit(module, x, y, noise=1e-3, outcome_transform=Standardize(2))
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert torch.equal(state, torch.get_rng_state())
    assert float((first.posterior(x).mean - y).abs().max()) < 0.05
    assert float(first.laplace.likelihood.noise) == pytest.approx(1e-3)
    assert len(first.laplace.prior.precision) == 1
    assert torch.equal(first.laplace.prior.flat_mean(), torch.cat([p.detach().flatten() for p in before]))
    more_x, more_y = torch.cat([x, x[:1] + 0.1]), torch.cat([y, y[:1]])
    warm = ntkl.botorch.LaplaceModel.fit(module, more_x, more_y, noise=1e-3, outcome_transform=Standardize(2),
                                         warm_start=first, steps=1, rounds=1)
    assert float((warm.posterior(x).mean - y).abs().max()) < 0.5
    variances = torch.linspace(0.001, 0.1, 2 * N).view(N, 2).double()
    known = ntkl.botorch.LaplaceModel.fit("mlp", x, y, variances, outcome_transform=Standardize(2), steps=20)
    assert torch.allclose(known.laplace.likelihood.noise, variances / y.var(0), rtol=1e-12)
    extra = known.posterior(x, observation_noise=True).variance - known.posterior(x).variance
    assert torch.allclose(extra, variances.mean(0).expand_as(extra), rtol=1e-6)
    given = known.condition_on_observations(x[:1], y[:1], noise=torch.full((1, 2), 1e-4).double()).posterior(x[:1])
    assert bool((given.variance < 2e-4 * y.var(0)).all())
    learned = ntkl.botorch.LaplaceModel.fit(lambda d, m: network(m), x, y, steps=20, groups="layer", prior_mean="zero")
    assert len(learned.laplace.prior.precision) == 2 and not bool(learned.laplace.prior.flat_mean().any())
    assert not torch.isclose(learned.laplace.likelihood.noise.detach(), torch.full((2,), 1e-2).double()).any()
    seen: list[tuple] = []
    own = ntkl.botorch.LaplaceModel.fit(module, x, y, noise=0.1, rounds=1, trainer=lambda *given: seen.append(given))
    assert torch.equal(own.laplace.network.theta, torch.cat([p.flatten() for p in before])) and len(seen) == 1


@pytest.mark.parametrize("known", [False, True])
def test_a_dataset_is_a_fit(known: bool) -> None:
    """The class is made of what `construct_inputs` returns, and is the model of `fit`; it goes on like any other."""
    x, y = data(2)
    variances = torch.linspace(0.01, 0.1, 2 * N).view(N, 2).double() if known else None
    dataset = SupervisedDataset(x, y, feature_names=["a", "b"], outcome_names=["y", "z"], Yvar=variances)

    def options() -> dict[str, Any]:
        bounds = torch.tensor([[0.0] * D, [2.0] * D]).double()
        return {"noise": None if known else 0.01, "steps": 5, "rounds": 1, "input_shape": (D,),
                "input_transform": Normalize(D, bounds=bounds), "outcome_transform": Standardize(2)}

    model = ntkl.botorch.LaplaceModel(**ntkl.botorch.LaplaceModel.construct_inputs(dataset, network(2), **options()))
    wanted, at = ntkl.botorch.LaplaceModel.fit(network(2), x, y, variances, **options()), draws(4, D, seed=3)
    for noise in (False, True):
        found, other = (one.posterior(at, observation_noise=noise) for one in (model, wanted))
        assert torch.equal(found.mean, other.mean) and torch.equal(joint(found), joint(other))
    assert torch.equal(model.train_inputs[0], wanted.train_inputs[0])
    assert torch.equal(model.train_targets, wanted.train_targets)
    assert model.condition_on_observations(at, y[:4]).train_inputs[0].shape == (N + 4, D)
    with refused(ntkl.DataError, "SupervisedDataset", "tuple", "LaplaceModel.fit"):
        ntkl.botorch.LaplaceModel.construct_inputs((x, y), network=network(2))
    with refused(ntkl.UnsupportedError, "LaplaceEnsemble.fit", "construct_inputs", "LaplaceModel"):
        ntkl.botorch.LaplaceEnsemble.construct_inputs(dataset, network=network(2))


def test_the_prior_variance_of_the_default_network_is_about_the_same_everywhere() -> None:
    """A perceptron of the inputs themselves has three times the variance in the corners of a cube."""
    x = draws(4, 5)
    model = ntkl.botorch.LaplaceModel.fit("mlp", x, x[:, :1], noise=1e-2, steps=1, rounds=1)
    corners = torch.tensor(list(itertools.product((0.0, 1.0), repeat=5))).double()
    inside = 0.35 + 0.3 * draws(32, 5, seed=1)
    variances = [model.laplace.prior_latent(part).variance.mean() for part in (corners, inside)]
    assert 0.6 < float(variances[0] / variances[1]) < 1.7


@pytest.mark.slow
def test_the_example(tmp_path: Path) -> None:
    """In miniature; another run reads its cells, and shows them beside those of another method."""
    given = ["--small", "--threads", "1", "--problems", "branin,sequences", "--out", "runs", "--methods"]
    run_script(EXAMPLE / "optimize.py", tmp_path, *given, "ntk_laplace")
    cell = tmp_path / "runs/branin ntk_laplace 0.json"
    kept, age = json.loads(cell.read_text())["result"]["regret"], cell.stat().st_mtime_ns
    assert kept == sorted(kept, reverse=True)
    printed = run_script(EXAMPLE / "optimize.py", tmp_path, *given, "Sobol")
    assert cell.stat().st_mtime_ns == age
    branin = json.loads((tmp_path / "runs/optimize.json").read_text())["results"]["branin"]
    last = {method: row["regret"] for method, row in branin.items()}
    won = sum(ours < other for ours, other in zip(last["ntk_laplace"], last["Sobol"], strict=True))
    assert re.search(rf"Sobol +\| 2 +\| .* \| {won} of 2 ", printed.partition("sequences")[0])
    found = json.loads((tmp_path / "runs/optimize.json").read_text())["results"]
    assert set(found) == {"branin", "sequences"} and len(found["branin"]["ntk_laplace"]["regret"]) == 2
    assert min(found["sequences"]["ntk_laplace"]["regret"]) > 0
    assert (tmp_path / "runs/optimize.png").stat().st_size > 0


def test_the_sequences_of_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is above all sequences that there are and near the best; mutants are new and near their parents."""
    made = runpy.run_path(str(EXAMPLE / "_problems.py"))
    monkeypatch.setitem(made["sequences"].__globals__, "LENGTH", 7)
    monkeypatch.setitem(made["sequences"].__globals__, "MOTIF", 3)
    every = made["one_hot"](torch.cartesian_prod(*[torch.arange(4)] * 7))
    gaps = []
    for seed in range(4):
        problem = made["sequences"](seed)
        gaps.append(problem.best - float(problem.value(every).max()))
    assert min(gaps) > -1e-9 and max(gaps) < 0.02
    x = problem.start(12, 0)
    assert torch.equal(x, problem.start(20, 0)[:12])
    torch.manual_seed(0)
    y = problem.value(x)
    best = x[y.squeeze(1).topk(10).indices]
    new = problem.choices(best, x, 500)
    assert not (new.unsqueeze(1) == x).all(-1).any() and len(new.unique(dim=0)) == len(new) > 100
    changed = (new.unsqueeze(1) != best).sum(-1).amin(1) / 2.0  # two entries a letter
    assert 1 <= float(changed.mean()) < 1.5


@pytest.mark.slow
def test_images_and_token_ids() -> None:
    """Inputs of other shapes and dtypes are given as rows of numbers."""

    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = nn.Conv2d(1, 3, 2).double(), nn.Linear(3, 1).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(self.inner(x)).mean((2, 3)))

    x = draws(6, 9)
    model = ntkl.botorch.LaplaceModel.fit(Images(), x, x[:, :1], noise=0.01, input_shape=(1, 3, 3), steps=20)
    assert torch.autograd.gradcheck(lambda x: model.posterior(x).variance, draws(2, 2, 9, seed=1).requires_grad_())
    words = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(12, 1)).double()
    ids = (5 * draws(6, 4)).floor()
    model = ntkl.botorch.LaplaceModel.fit(words, ids, draws(6, 1), noise=0.01, input_dtype=torch.long, steps=20)
    assert model.posterior(ids.view(2, 3, 4)).mean.shape == (2, 3, 1)


@functools.cache
def toy() -> Any:
    """A fitted model of a few values."""
    x = draws(6, D)
    y = (6 * x).sin().sum(1, keepdim=True)
    return ntkl.botorch.LaplaceModel.fit("mlp", x, y, noise=1e-3, outcome_transform=Standardize(1))


CLIENTS: dict[str, tuple[Any, int]] = {
    "LogEI": (lambda m: LogExpectedImprovement(m, 1.0), 1),
    "qLogEI": (lambda m: qLogExpectedImprovement(m, 1.0), 2),
    "qLogNEI": (lambda m: qLogNoisyExpectedImprovement(m, draws(8, D)), 1),
    "qUCB": (lambda m: qUpperConfidenceBound(m, 2.0, X_pending=draws(1, D, seed=9)), 2),
    "qKG": (lambda m: qKnowledgeGradient(m, num_fantasies=3), 1),
    "qMES": (lambda m: qMaxValueEntropy(m, draws(20, D, seed=1)), 1),
    "NIPV": (lambda m: qNegIntegratedPosteriorVariance(m, draws(10, D, seed=2)), 1),
    "look-ahead": (lambda m: qMultiStepLookahead(m, batch_sizes=[1], num_fantasies=[2]), 1),
    "Thompson": (lambda m: PosteriorMean(m.thompson_path(generator=torch.Generator().manual_seed(0))), 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CLIENTS)
@pytest.mark.filterwarnings("ignore:Optimization failed")  # a few iterations on purpose
def test_clients(name: str) -> None:
    """Each is maximized by L-BFGS, which needs gradients, to more than the best of as many random points."""
    make, q = CLIENTS[name]
    bounds = torch.tensor([[0.0] * D, [1.0] * D]).double()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        acquisition = make(toy())
        q = getattr(acquisition, "get_augmented_q_batch_size", lambda q: q)(q)
        start = draws(2, q, D, seed=11)
        with torch.no_grad():
            before = acquisition(start)
        x, value = optimize_acqf(acquisition, bounds, q=q, num_restarts=2, batch_initial_conditions=start,
                                 options={"maxiter": 8})
    assert bool((x >= 0).all() and (x <= 1).all()) and value.isfinite().all()
    assert float(value) > float(before.max())


def test_gibbon_knows_points_that_are_pending() -> None:
    """It lowers their value by log(1 - aᵀB⁻¹a/v)/2, with the covariances of y at the point and those pending."""
    model, pending, x = fitted(1, True), draws(2, D, seed=9), draws(4, 1, D, seed=11)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        acquisition = qLowerBoundMaxValueEntropy(model, draws(20, D, seed=1))
        alone = acquisition(x)
        acquisition.set_X_pending(pending)
        found = acquisition(x)
        every = joint(model.posterior(torch.cat([x, pending.expand(4, 2, D)], 1), observation_noise=True))
    part = every[:, :1, 1:] @ torch.linalg.solve(every[:, 1:, 1:], every[:, 1:, :1]) / every[:, :1, :1]
    assert torch.allclose(found - alone, 0.5 * (1 - part).log().flatten(), rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [qNoisyExpectedHypervolumeImprovement, qLogNoisyExpectedHypervolumeImprovement])
@pytest.mark.filterwarnings("ignore:qNoisyExpectedHypervolumeImprovement has known", "ignore:Optimization failed",
                            "ignore:Failed to compile")
def test_several_objectives(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Maximized like the others. The logarithm is computed in Python: its C++ would be compiled on first use."""
    monkeypatch.setitem(sys.modules, "torch.utils.cpp_extension", None)
    x, y = data(2)
    model = ntkl.botorch.LaplaceModel.fit("mlp", x, y, noise=1e-3, steps=30)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        acquisition = kind(model, ref_point=[0.0, 0.0], X_baseline=x, prune_baseline=True,
                           sampler=SobolQMCNormalSampler(torch.Size([8]), seed=0))
        start = draws(2, 1, D, seed=1)
        with torch.no_grad():
            before = acquisition(start)
        found, value = optimize_acqf(acquisition, torch.tensor([[0.0] * D, [1.0] * D]).double(), q=1, num_restarts=2,
                                     batch_initial_conditions=start, options={"maxiter": 8})
    assert found.shape == (1, D) and float(value) > float(before.max())


@pytest.mark.parametrize("shape", [(0, D), (0, 3, D), (2, 0, D)])
def test_no_points(shape: tuple) -> None:
    """As of BoTorch's own models, whatever was observed."""
    model = fitted(1, True)
    for one in (model, model.condition_on_observations(draws(2, D), draws(2, 1))):
        for noise in (False, True):
            found = one.posterior(draws(*shape), observation_noise=noise)
            assert found.mean.shape == found.variance.shape == (*shape[:-1], 1)


def test_refusals() -> None:
    plain, new = ntkl.botorch.LaplaceModel(ntkl.laplace(network(2), data(2), ntkl.Gaussian(0.1))), draws(2, D, seed=5)
    given = torch.zeros(2, 2, dtype=torch.float64)
    for noise, words in ((given - 1e-3, "at least 0"), (given + torch.nan, "at least 0"), (given[:, :1].T, "2, 2")):
        wrong = noise if noise.shape == (2, 2) else torch.zeros(3, 2)
        with refused(ntkl.DataError, words, ".", "Pass"):
            plain.condition_on_observations(new, given, noise=wrong)
        with refused(ntkl.DataError, words, ".", "Pass"):
            plain.posterior(new, observation_noise=wrong)
    for wrong in (0.1, "yes"):
        with refused(ntkl.DataError, "noise as a tensor of variances", str(wrong), "each value"):
            plain.condition_on_observations(new, given, noise=wrong)  # type: ignore[arg-type]
        with refused(ntkl.DataError, "observation_noise as a tensor of variances", str(wrong), "each value"):
            plain.posterior(new, observation_noise=wrong)  # type: ignore[arg-type]
    with refused(ntkl.UnsupportedError, "observations of all outputs", "evaluation_mask", "ModelList"):
        plain.fantasize(new, SobolQMCNormalSampler(torch.Size([2])), evaluation_mask=given > 0)
    with refused(ntkl.DataError, "finite Y", "NaN", "Leave"):
        plain.condition_on_observations(new, given + torch.nan)
    with refused(ntkl.NumericalError, "different points, or with noise", "determine", "noise="):
        plain.condition_on_observations(new[:1].expand(2, -1), given, noise=given).posterior(new).variance  # noqa: B018
    for outputs in ([0.5], "a", []):
        with refused(ntkl.UnsupportedError, "outputs among 0 to 1", ".", "Choose"):
            plain.subset_output(outputs)  # type: ignore[arg-type]
    x, y = data(1)
    Model = ntkl.botorch.LaplaceModel
    for name, kind in (("input_transform", "InputTransform"), ("outcome_transform", "OutcomeTransform")):
        for call in (lambda wrong: Model.fit("mlp", x, y, **wrong), lambda wrong: Model(plain.laplace, **wrong)):
            with refused(ntkl.UnsupportedError, f"{name} as a botorch {kind}, or None", "a function", "Normalize"):
                call({name: lambda values: values})
    with refused(ntkl.UnsupportedError, "Gaussian likelihood", "Linear", "laplace"):
        Model(nn.Linear(2, 1))
    with refused(ntkl.UnsupportedError, "Gaussian likelihood", "Bernoulli", "Gaussian"):
        Model(ntkl.laplace(network(1), (x, (y > 2).double()), ntkl.Bernoulli()))
    with refused(ntkl.UnsupportedError, "trained network", "the prior", "leave_one_out"):
        efficient_loo_cv(fitted(1, True))
    model = fitted(3, False)
    with refused(ntkl.DataError, "q, d", r"shape \(2,\)", "unsqueeze"):
        model.posterior(x[0])
    with refused(ntkl.DataError, "q, d", "a ndarray", "as_tensor"):
        model.posterior(x.numpy())  # type: ignore[arg-type]
    with refused(ntkl.DataError, r"\(\.\.\., n, 3\)", r"\(9, 1\)", "one row of Y"):
        model.condition_on_observations(x, y)
    fantasies, four = model.condition_on_observations(draws(5, 1, D), draws(5, 1, 3)), draws(4, 1, 3)
    for ask in (lambda: model.condition_on_observations(draws(5, 1, D), four),
                lambda: model.condition_on_observations(draws(5, 1, D), draws(5, 1, 3), noise=four),
                lambda: fantasies.condition_on_observations(draws(4, 1, D), four),
                lambda: fantasies.posterior(draws(4, 1, D))):
        with refused(ntkl.DataError, r"the model, \(5?,?\)", r"\(4,\) of", "unsqueeze"):
            ask()
    fourier = Model.fit("fourier", x[:3], y[:3])
    for size in (1, 3):  # of one feature it made as many as there are
        with refused(ntkl.DataError, r"float64 \(n, 2\)", rf"\(9, {size}\)", "that form"):
            fourier.posterior(x[:, :1].expand(-1, size))
    with refused(ntkl.UnsupportedError, "outputs among 0 to 2", r"\[3\]", "Choose"):
        model.subset_output([3])
    with refused(ntkl.DataError, "train_Y", r"\(9,\)", "one row"):
        Model.fit("mlp", x, y[:, 0])
    for name, row in {"train_X": [x.clone(), y], "train_Y": [x, y.clone()]}.items():
        row[name == "train_Y"][4, 0] = float("nan")
        with refused(ntkl.DataError, f"finite {name}", "in row 4", "out"):
            Model.fit("fourier", *row)
    with refused(ntkl.DataError, "train_X", r"\(3, 2\)", "of the fit"):
        Model(model.laplace, train_X=x[:3])
    with refused(ntkl.UnsupportedError, '"fourier" or "mlp"', "deep", "one of them"):
        Model.fit("deep", x, y)
    with refused(ntkl.DataError, r"train_Yvar of shape \(9, 1\)", r"\(9, 2\)", "each number"):
        Model.fit("fourier", x, y, torch.ones_like(x))
    with refused(ntkl.DataError, "2 outputs", "1", "last layer"):
        Model.fit(network(1), x, y.expand(-1, 2), noise=0.1)
    with refused(ntkl.HyperparameterError, "positive", "-1", "above 0"):
        Model.fit("mlp", x, y, noise=-1.0)
    with refused(ntkl.HyperparameterError, "one variance, for all outputs", r"\[0.1, 0.2\]", "train_Yvar"):
        Model.fit("fourier", x, y, noise=[0.1, 0.2])  # type: ignore[arg-type]
    for kind in ("fourier", "mlp", network(1)):
        with refused(ntkl.HyperparameterError, "noise= or train_Yvar", "both", "Pass one"):
            Model.fit(kind, x, y, 0.1 + y**2, noise=0.1)
    with refused(ntkl.HyperparameterError, "count", "0", "one draw"):
        model.thompson_path(0)
    with refused(ntkl.UnsupportedError, "no error of sampling", "iterative", "kfac"):
        Model(ntkl.laplace(network(1), (x, y), ntkl.Gaussian(0.1), structure="iterative")).posterior(x)
