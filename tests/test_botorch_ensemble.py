"""An ensemble as a BoTorch model: its Gaussian beside the explicit mixture, Bayes' rule of its weights, its fit.

Without the extra ``botorch`` these tests are skipped.
"""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Size, Tensor, nn
from torch.distributions import MultivariateNormal

import ntk_laplace as ntkl
from pairwise import pairwise
from refusals import refused

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("botorch")
    from botorch.acquisition.knowledge_gradient import qKnowledgeGradient
    from botorch.acquisition.logei import qLogExpectedImprovement, qLogNoisyExpectedImprovement
    from botorch.acquisition.max_value_entropy_search import qMaxValueEntropy
    from botorch.acquisition.objective import ScalarizedPosteriorTransform
    from botorch.acquisition.thompson_sampling import PathwiseThompsonSampling
    from botorch.models.transforms import Normalize, Standardize
    from botorch.sampling.normal import SobolQMCNormalSampler

D, N, MEMBERS = 2, 9, 3
FINE, ROUGH = {"rtol": 1e-9, "atol": 1e-9}, {"rtol": 2e-3, "atol": 2e-3}


def draws(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def data(m: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    x = draws(N, D, dtype=dtype)
    return x, 2.0 + torch.stack([(3 * x[:, 0] + k * x[:, 1]).sin() for k in range(1, m + 1)], 1)


def perceptron(d: int, m: int) -> nn.Module:
    return nn.Sequential(nn.Linear(d, 5), nn.Tanh(), nn.Linear(5, m)).double()


@functools.cache
def fitted(m: int, transforms: bool = False, dtype: torch.dtype = torch.float64) -> Any:
    """Of untrained networks with noises and precisions of their own, so that the members differ in everything."""
    x, y = data(m, dtype)
    inputs = Normalize(D, bounds=torch.tensor([[-0.1, 0.0], [1.0, 1.2]], dtype=dtype)) if transforms else None
    outcomes = Standardize(m) if transforms else None
    inner, targets = (inputs(x), outcomes(y)[0]) if transforms else (x, y)
    members = []
    for seed in range(MEMBERS):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = perceptron(D, m).to(dtype)
        posterior = ntkl.laplace(network, (inner, targets), ntkl.Gaussian(0.05 * (1 + seed)),
                                 ntkl.GaussianPrior(0.5 + 0.3 * seed))
        members.append(ntkl.botorch.LaplaceModel(posterior))
    return ntkl.botorch.LaplaceEnsemble(members, input_transform=inputs, outcome_transform=outcomes, train_X=x)


def scale(model: Any) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the outcomes, (m,)."""
    if not hasattr(model, "outcome_transform"):
        return torch.zeros(1).double(), torch.ones(1).double()
    return model.outcome_transform.means.flatten().double(), model.outcome_transform.stdvs.flatten().double()


def mixture(model: Any, weights: list[float], posteriors: list[Any], x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (q m,) and covariance of the mixture at x (q, d), from its second moments E ffᵀ, in units of outcomes."""
    offset, factor = (part.repeat(len(x) * model.num_outputs // len(part)) for part in scale(model))
    mean, second = 0.0, 0.0
    for weight, posterior in zip(weights, posteriors, strict=True):
        found = posterior.latent(model.transform_inputs(x))
        own = found.mean.double().flatten()
        mean, second = mean + weight * own, second + weight * (found.covariance_matrix.double() + torch.outer(own, own))
    return mean * factor + offset, (second - torch.outer(mean, mean)) * factor * factor[:, None]


def joint(found: Any) -> Tensor:
    return found.distribution.covariance_matrix


CASES = [*pairwise((1, 3), ((), (2, 3)), (1, 4), (torch.float64,), (False, True)),
         (1, (2, 3), 4, torch.float32, False), (3, (), 1, torch.float32, True)]


@pytest.mark.parametrize(("m", "batch", "q", "dtype", "transforms"), CASES)
class TestConformance:
    """Laws for numbers of outputs, batch shape, number of joint points, dtype, with and without transforms."""

    def test_posterior(self, m: int, batch: tuple, q: int, dtype: torch.dtype, transforms: bool) -> None:
        """The last batch is the mixture's Gaussian; noise is the members' mean; gradients are of these moments."""
        model, x = fitted(m, transforms, dtype), draws(*batch, q, D, seed=1, dtype=dtype).requires_grad_()
        found = model.posterior(x)
        assert found.mean.shape == found.variance.shape == (*batch, q, m) and found.mean.dtype == dtype
        assert model.num_outputs == m and model.batch_shape == ()
        close = FINE if dtype == torch.float64 else ROUGH
        posteriors = [one.laplace for one in model.members]
        mean, covariance = mixture(model, [1 / MEMBERS] * MEMBERS, posteriors, x.detach().view(-1, q, D)[-1])
        assert torch.allclose(found.mean.view(-1, q * m)[-1].double(), mean, **close)
        assert torch.allclose(joint(found).view(-1, q * m, q * m)[-1].double(), covariance, **close)
        noisy = model.posterior(x, observation_noise=True).variance - found.variance
        assert torch.allclose(noisy.double(), (0.1 * scale(model)[1].square()).expand_as(noisy), **close)
        given = model.posterior(x, observation_noise=torch.full((1, m), 0.5, dtype=dtype)).variance - found.variance
        assert torch.allclose(given.double(), (0.5 * scale(model)[1].square()).expand_as(given), **close)
        if dtype == torch.float64 and q == 1:

            def total(x: Tensor) -> Tensor:
                found = model.posterior(x)
                return found.mean.cos().sum() + joint(found).square().sum()

            slope, = torch.autograd.grad(total(x), x)
            direction = draws(*x.shape, seed=2) - 0.5
            with torch.no_grad():
                numeric = (total(x + 1e-5 * direction) - total(x - 1e-5 * direction)) / 2e-5
            assert torch.allclose((slope * direction).sum(), numeric, rtol=1e-6, atol=1e-8)

    def test_conditioning(self, m: int, batch: tuple, q: int, dtype: torch.dtype, transforms: bool) -> None:
        """Each member is `Posterior.add`, with weights by Bayes' rule; two steps are one; fantasies have batches."""
        model = fitted(m, transforms, dtype)
        x, y = draws(*batch, q, D, seed=3, dtype=dtype), 1.5 + draws(*batch, q, m, seed=4, dtype=dtype)
        new, points = model.condition_on_observations(x, y), draws(2, D, seed=5, dtype=dtype)
        found, weights = new.posterior(points), new.weights
        assert new.batch_shape == batch and weights.shape == (*batch, MEMBERS) and bool((model.weights == 1 / 3).all())
        offset, factor = scale(model)
        close = FINE if dtype == torch.float64 else ROUGH
        inner, own_y = model.transform_inputs(x.view(-1, q, D)[-1]), y.view(-1, q, m)[-1].double()
        targets = ((own_y - offset) / factor).to(dtype)
        odds, posteriors = [], []
        for one in model.members:
            latent, noise = one.laplace.latent(inner), float(one.laplace.likelihood.noise)
            covariance = latent.covariance_matrix.double() + noise * torch.eye(q * m).double()
            law = MultivariateNormal(latent.mean.double().flatten(), covariance)
            odds.append(law.log_prob(targets.double().flatten()).exp())
            posteriors.append(one.laplace.add(inner, targets))
        wanted = torch.stack(odds) / sum(odds)
        assert torch.allclose(weights.view(-1, MEMBERS)[-1].double(), wanted, **close)
        mean, covariance = mixture(model, wanted.tolist(), posteriors, points)
        assert torch.allclose(found.mean.view(-1, 2 * m)[-1].double(), mean, **close)
        assert torch.allclose(joint(found).view(-1, 2 * m, 2 * m)[-1].double(), covariance, **close)
        assert new.train_inputs[0].shape == (*batch, N + q, D)
        if q > 1 and dtype == torch.float64:
            twice = model.condition_on_observations(x[..., :1, :], y[..., :1, :])
            twice = twice.condition_on_observations(x[..., 1:, :], y[..., 1:, :]).posterior(points)
            assert torch.allclose(twice.mean, found.mean, **FINE) and torch.allclose(joint(twice), joint(found), **FINE)
        fantasy = model.fantasize(x, SobolQMCNormalSampler(Size([2]), seed=0))
        assert fantasy.batch_shape == (2, *batch) and fantasy.weights.shape == (2, *batch, MEMBERS)
        assert fantasy.posterior(draws(*batch, 2, D, seed=6, dtype=dtype)).variance.shape == (2, *batch, 2, m)
        chosen = [0] if m == 1 else [2, 0]
        part, whole = new.subset_output(chosen).posterior(points), new.posterior(points)
        assert torch.allclose(part.mean, whole.mean[..., chosen]) and new.num_outputs == m
        assert torch.allclose(part.variance, whole.variance[..., chosen], rtol=1e-3)


def test_a_posterior_transform() -> None:
    model, x, weights = fitted(3, True), draws(4, 2, D, seed=1), torch.tensor([0.5, -1.0, 2.0]).double()
    scalar = model.posterior(x, posterior_transform=ScalarizedPosteriorTransform(weights))
    assert torch.allclose(scalar.mean.squeeze(-1), model.posterior(x).mean @ weights)


def test_observations_that_are_expected_leave_the_mean() -> None:
    """E m(x; y) = m(x) over the mixture's own predictive of y: equal weights after y would not have this."""
    model, x, at = fitted(1), draws(1, D, seed=3), draws(4, D, seed=5)
    y = torch.linspace(-30.0, 30.0, 6001, dtype=torch.float64)
    laws = [one.posterior(x, observation_noise=True) for one in model.members]
    density = torch.stack([(-0.5 * (y - p.mean.item()) ** 2 / p.variance.item()).exp() /
                           (2 * torch.pi * p.variance.item()) ** 0.5 for p in laws]).mean(0)
    new = model.condition_on_observations(x.expand(len(y), 1, D), y.view(-1, 1, 1))
    means = new.posterior(at).mean.squeeze(-1)
    expected = (density[:, None] * means).sum(0) * float(y[1] - y[0])
    assert torch.allclose(expected, model.posterior(at).mean.squeeze(-1), rtol=1e-8)
    equal = torch.stack([one.posterior(at).mean.squeeze(-1) for one in new.members]).mean(0)
    assert not torch.allclose((density[:, None] * equal).sum(0) * 0.01, model.posterior(at).mean.squeeze(-1), rtol=1e-3)


@pytest.mark.parametrize("batch", [None, (), (2,)])
def test_paths(batch: tuple | None) -> None:
    """Mean and joint covariance of many are the mixture's, and each is a function: a member's."""
    model, count = fitted(3, True), 10_000
    if batch is not None:
        model = model.condition_on_observations(draws(*batch, 2, D, seed=3), 1.5 + draws(*batch, 2, 3, seed=4))
    x, generator = draws(2, D, seed=1), torch.Generator().manual_seed(0)
    values = model.thompson_path(count, generator)(x).flatten(-2)  # (count, *batch, 6)
    found = model.posterior(x)
    mean, covariance = found.mean.view(-1, 6)[-1], joint(found).view(-1, 6, 6)[-1]
    values = values.view(count, -1, 6)[:, -1]
    assert bool(((values.mean(0) - mean).abs() < 5 * (covariance.diagonal() / count).sqrt()).all())
    assert torch.allclose(values.T.cov(), covariance, rtol=0.1, atol=0.05 * float(covariance.abs().max()))
    if batch:
        assert model.thompson_path(5, generator)(draws(5, 2, 3, D, seed=2)).shape == (5, 2, 3, 3)
        return
    one, batches = model.thompson_path(generator=generator), draws(4, 3, D, seed=2)
    assert one(batches).shape == (4, 3, 3) and torch.allclose(one(batches)[2], one(batches[2]), rtol=1e-12)
    assert model.thompson_path(5, generator)(batches.unsqueeze(1)).shape == (4, 5, 3, 3)


def test_it_is_its_own() -> None:
    """State, copies and dtypes are the members'."""
    model, x = copy.deepcopy(fitted(1, True)), draws(3, D, seed=1)
    assert {"members.2.prior.log_precision", "outcome_transform.means"} <= set(model.state_dict())
    before, other = model.posterior(x).variance, pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        other.members[1].prior.log_precision += 3.0
    assert not torch.allclose(other.posterior(x).variance, before) and torch.equal(model.posterior(x).variance, before)
    other.load_state_dict(model.state_dict())
    assert torch.allclose(other.posterior(x).variance, before, rtol=1e-12)
    model.train()
    assert torch.equal(model.train_inputs[0], data(1)[0])
    single = other.float()
    assert all(one.laplace.dtype == torch.float32 for one in single.members)
    assert torch.allclose(single.posterior(x.float()).variance, before.float(), rtol=1e-2)


@pytest.mark.slow
def test_fit() -> None:
    """The first member is the model of one member; a warm start continues each; the caller's random numbers stay."""
    x, y = data(2)
    one, fit = (functools.partial(model.fit, noise=0.01, steps=15, rounds=1)
                for model in (ntkl.botorch.LaplaceModel, ntkl.botorch.LaplaceEnsemble))
    state = torch.get_rng_state()
    alone = one(perceptron, x, y, outcome_transform=Standardize(2))
    three = fit(perceptron, x, y, outcome_transform=Standardize(2), members=3)
    assert torch.equal(state, torch.get_rng_state())
    assert isinstance(alone, ntkl.botorch.LaplaceModel) and isinstance(three, ntkl.botorch.LaplaceEnsemble)
    assert torch.equal(alone.laplace.network.theta, three.members[0].laplace.network.theta)
    assert len({float(one.laplace.evidence()) for one in three.members}) == 3
    assert float((three.posterior(x).mean - y).abs().max()) < 0.5
    later = one(perceptron, x, y, outcome_transform=Standardize(2), seed=2)
    assert torch.equal(later.laplace.network.theta, three.members[2].laplace.network.theta)
    warm = fit(perceptron, x, y, outcome_transform=Standardize(2), members=3, warm_start=three)
    for before, after in zip(three.members, warm.members, strict=True):
        assert after.laplace.log_joint() > before.laplace.log_joint()
    better = fit(perceptron, x, y, outcome_transform=Standardize(2), members=3, trainer="gauss-newton")
    for after, before in zip(better.members, three.members, strict=True):
        assert after.laplace.log_joint() > before.laplace.log_joint() - 1.0
    words = lambda d, m: nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(2 * d, m)).double()  # noqa: E731
    ids = (5 * draws(6, 4)).floor()
    model = fit(words, ids, draws(6, 1), input_dtype=torch.long, members=2)
    assert model.posterior(ids.view(2, 3, 4)).mean.shape == (2, 3, 1)


@pytest.mark.parametrize(("m", "known"), [(1, False), (3, False), (3, True)])
def test_gauss_newton(m: int, known: bool) -> None:
    """The first step solves with the dense damped matrix; many steps end where the gradient of the log joint is 0."""
    x, y = data(m)
    variances = torch.linspace(0.01, 0.1, N * m, dtype=torch.float64).view(N, m) if known else 0.01 * torch.ones_like(y)
    fit = functools.partial(ntkl.botorch.LaplaceModel.fit, perceptron, x, y, variances if known else None, rounds=1,
                            noise=None if known else 0.01, trainer="gauss-newton")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        start = perceptron(D, m)
    first = nn.utils.parameters_to_vector(start.parameters()).detach()
    names = dict(start.named_parameters())

    def outputs(theta: Tensor) -> Tensor:
        parts = theta.split([p.numel() for p in names.values()])
        values = {name: part.view_as(p) for (name, p), part in zip(names.items(), parts, strict=True)}
        return torch.func.functional_call(start, values, (x,))

    def negative_log_joint(theta: Tensor) -> Tensor:
        return 0.5 * (theta - first).square().sum() + 0.5 * ((y - outputs(theta)).square() / variances).sum()

    jac = torch.func.jacrev(outputs)(first).flatten(0, 1)
    damped = 1.01 * torch.eye(len(first)).double() + jac.mT @ (jac / variances.flatten()[:, None])
    step = torch.linalg.solve(damped, torch.func.grad(negative_log_joint)(first))
    assert negative_log_joint(first - step) < negative_log_joint(first)
    assert torch.allclose(fit(steps=1).laplace.network.theta, first - step, **FINE)
    end = fit(steps=200).laplace.network.theta
    slope, curvature = torch.func.grad(negative_log_joint)(end), torch.func.jacrev(outputs)(end).flatten(0, 1)
    dense = torch.eye(len(first)).double() + curvature.mT @ (curvature / variances.flatten()[:, None])
    assert float(slope @ torch.linalg.solve(dense, slope)) < 1e-2  # nats; the last step gained less than 1e-5


CLIENTS = {
    "qLogEI": (lambda m: qLogExpectedImprovement(m, 3.0), 2),
    "qLogNEI": (lambda m: qLogNoisyExpectedImprovement(m, draws(5, D)), 1),
    "qKG": (lambda m: qKnowledgeGradient(m, num_fantasies=2), 3),
    "qMES": (lambda m: qMaxValueEntropy(m, draws(20, D, seed=1)), 1),
}


@pytest.mark.parametrize("name", CLIENTS)
def test_clients(name: str) -> None:
    """Values of batches, with gradients."""
    make, q = CLIENTS[name]
    x = draws(2, q, D, seed=11).requires_grad_()
    make(fitted(1, True))(x).sum().backward()
    assert bool(x.grad.isfinite().all()) and float(x.grad.abs().max()) > 0


def test_pathwise_thompson_sampling() -> None:
    found = PathwiseThompsonSampling(fitted(1, True))(draws(6, 1, D, seed=1))
    assert found.shape == (6,) and bool(found.isfinite().all())


def test_refusals() -> None:
    x, y = data(1)
    Model, Ensemble = ntkl.botorch.LaplaceModel, ntkl.botorch.LaplaceEnsemble
    one = fitted(1).members[0]
    with refused(ntkl.UnsupportedError, "of the same data", "none", "one fit"):
        Ensemble([])
    with refused(ntkl.UnsupportedError, "of the same data", "Linear", "one fit"):
        Ensemble([one, nn.Linear(2, 1)])
    with refused(ntkl.UnsupportedError, "of the same data", r"\(3, 9\)", "one fit"):
        Ensemble([one, fitted(3).members[0]])
    with refused(ntkl.UnsupportedError, "without transforms", "with a transform", "to the ensemble"):
        Ensemble([one, Model(one.laplace, outcome_transform=Standardize(1))])
    with refused(ntkl.DataError, "train_X", r"\(3, 2\)", "of the fit"):
        Ensemble([one], train_X=x[:3])
    with refused(ntkl.HyperparameterError, "members", "0", "Leave it out"):
        Ensemble.fit("mlp", x, y, members=0)
    for network in (perceptron(D, 1), "fourier"):
        with refused(ntkl.UnsupportedError, "different weights", "twice", r"LaplaceModel\.fit"):
            Ensemble.fit(network, x, y, noise=0.1, rounds=1, steps=1, members=2)
    with refused(ntkl.UnsupportedError, "gauss-newton", "adam", "L-BFGS"):
        Model.fit(perceptron, x, y, trainer="adam")
    with refused(ntkl.HyperparameterError, "seed", "-1", "Leave it out"):
        Model.fit(perceptron, x, y, seed=-1)
    with refused(ntkl.UnsupportedError, "LaplaceEnsemble of 2 members", "one of 3", "no warm start"):
        Ensemble.fit(perceptron, x, y, members=2, warm_start=fitted(1))
    with refused(ntkl.UnsupportedError, "LaplaceEnsemble of 2 members", "a LaplaceModel", "no warm start"):
        Ensemble.fit(perceptron, x, y, members=2, warm_start=one)
    with refused(ntkl.UnsupportedError, "warm_start as a LaplaceModel", "a LaplaceEnsemble", r"LaplaceEnsemble\.fit"):
        Model.fit(perceptron, x, y, warm_start=fitted(1))
    with refused(ntkl.DataError, "finite train_Y", "row 1", "Leave"):
        Ensemble.fit(perceptron, x, y.index_fill(0, torch.tensor([1]), torch.nan))
