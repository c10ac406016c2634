"""Anchored LGVA by sites, and block-diagonal states, against dense recursions in natural parameters ([T20] 4.2, 4.3).

The references know H and H (μ - θ*) as dense matrices and vectors, take Jacobians one backward pass at a time, and
integrate over f with Gauss-Hermite nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gpytorch
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, hessian, vmap

import ntk_laplace as ntkl
from exact_cases import truth
from ntk_laplace.runtime import tuning
from ntk_laplace.structures import KFAC, Diagonal
from ntk_laplace.structures.block_spec import BlockSpec
from ntk_laplace.variational_inference.block_state import BlockState
from ntk_laplace.variational_inference.sites import AnchoredSites, AnchoredWeights
from ntk_laplace.variational_inference.states import DataTerms
from pairwise import pairwise
from reference import relative_error
from registry import LIKELIHOODS, PRIORS, problem, targets
from registry_cases import jacobians

STEPS = (0.3, 1.0, 0.5)
NODES, WEIGHTS = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(80))
WEIGHTS = WEIGHTS / WEIGHTS.sum()


@dataclass
class Reference:
    """Anchored LGVA in natural parameters relative to θ*: H and η = H (μ - θ*)."""

    jac: Tensor
    f: Tensor
    y: Tensor
    density: Callable[[Tensor, Tensor], Tensor]
    prior: tuple[Tensor, Tensor]  # P0 (P,) and θ* - μ0
    precision: Tensor
    natural: Tensor

    def moments(self) -> tuple[Tensor, Tensor]:
        covariance = torch.linalg.inv(self.precision)
        moved = self.jac @ (covariance @ self.natural)
        return self.f + moved, torch.einsum("ncp,pq,ndq->ncd", self.jac, covariance, self.jac)

    def expectation(self, function: Callable[..., Tensor], mean: Tensor, covariance: Tensor) -> Tensor:
        """Of a function of f and y, output by output: each output has its own normal and its own share of log p."""
        deviation = covariance.diagonal(dim1=1, dim2=2).sqrt()
        at = mean + NODES.view(-1, 1, 1) * deviation
        return torch.einsum("s,snc->nc", WEIGHTS, vmap(vmap(vmap(function)), (0, None))(at, self.y))

    def one(self, f: Tensor, y: Tensor) -> Tensor:
        return self.density(f[None], y[None])

    def elbo(self) -> Tensor:
        mean, covariance = self.moments()
        fit = self.expectation(self.one, mean, covariance).sum()
        scale, offset = self.prior
        inverse = torch.linalg.inv(self.precision)
        away = offset + inverse @ self.natural
        return fit - 0.5 * ((scale * away.square()).sum() + torch.linalg.slogdet(self.precision).logabsdet
                            - scale.log().sum() - len(scale) + (scale * inverse.diagonal()).sum())

    def step(self, size: float) -> None:
        mean, covariance = self.moments()
        r = self.expectation(grad(self.one), mean, covariance)
        curvature = -self.expectation(hessian(self.one), mean, covariance)
        scale, offset = self.prior
        pulled = torch.einsum("ncp,nc->p", self.jac, r + curvature * (mean - self.f)) - scale * offset
        ggn = torch.einsum("ncp,nc,ncq->pq", self.jac, curvature, self.jac)
        self.natural = (1 - size) * self.natural + size * pulled
        self.precision = (1 - size) * self.precision + size * (torch.diag(scale) + ggn)


def fitted(network: str, likelihood: str, prior: str, structure: str):
    case = problem(network)
    y = targets(LIKELIHOODS[likelihood], case)
    return ntkl.laplace(case.network, (case.x, y), LIKELIHOODS[likelihood].build(), PRIORS[prior].build(case),
                        structure=structure).fitted


def reference(network: str, likelihood: str, prior: str, start: float | None) -> Reference:
    case, dense = problem(network), truth(network, likelihood, prior)
    y = targets(LIKELIHOODS[likelihood], case).double().reshape(len(dense.log_prob), -1)
    jac, p = jacobians(network)[0], len(dense.offset)
    precision = dense.posterior_precision if start is None else start * torch.eye(p, dtype=torch.float64)
    with torch.no_grad():
        f = fitted(network, likelihood, prior, "gp").points.f
    return Reference(jac, f, y, LIKELIHOODS[likelihood].log_density, (dense.precision, dense.offset), precision,
                     torch.zeros(p, dtype=torch.float64))


@pytest.mark.parametrize("start", [None, 10.0])
@pytest.mark.parametrize("case", [
    ("deep_mlp", "bernoulli", "layer"), ("scalar_outputs", "poisson", "scalar"),
    ("cnn_groups", "gaussian", "parameter"), ("transformer_tied", "bernoulli", "tensor"),
    ("layer_twice", "poisson", "layer"),
], ids="-".join)
def test_sites_are_the_natural_parameters(case: tuple[str, str, str], start: float | None) -> None:
    slow, fast = reference(*case, start), AnchoredSites(fitted(*case, "gp"), start)
    for size in STEPS:
        slow.step(size)
        fast.step(size)
        for found, known in zip(fast.moments(), slow.moments(), strict=True):
            assert relative_error(found, known) < 1e-9
        moved = torch.linalg.solve(slow.precision, slow.natural)
        assert relative_error(fast.mean - problem(case[0]).theta, moved) < 1e-9


@pytest.mark.parametrize("start", [None, 10.0])
@pytest.mark.parametrize("case", [("deep_mlp", "categorical", "layer"), ("cnn_groups", "categorical", "scalar")],
                         ids="-".join)
def test_sites_are_weight_space(case: tuple[str, str, str], start: float | None) -> None:
    """The points of f are those of both spaces, because they depend on the identified directions alone."""
    sites, weights = AnchoredSites(fitted(*case, "gp"), start), AnchoredWeights(fitted(*case, "full"), start)
    for size in STEPS:
        assert sites.step(size) == pytest.approx(weights.step(size), rel=1e-9)
        (mean, blocks), (known, full) = sites.moments(), weights.moments()
        basis = torch.linalg.qr(torch.cat([torch.ones(full.shape[1], 1), torch.eye(full.shape[1])[:, 1:]], 1).double())
        seen = basis.Q[:, 1:]
        assert relative_error(seen.T @ blocks @ seen, seen.T @ full @ seen) < 1e-9
        assert relative_error(mean, known) < 1e-9
        assert relative_error(sites.mean, weights.mean) < 1e-9


@pytest.mark.parametrize("case", [
    ("scalar_outputs", "bernoulli", "layer"), ("scalar_outputs", "poisson", "scalar"),
    ("deep_mlp", "bernoulli", "scalar"),
], ids="-".join)
def test_fixed_point(case: tuple[str, str, str]) -> None:
    """[T20] 2.19 of the linearized model: Jᵀ E r = P0 (μ - μ0), and H = P0 + Jᵀ E[Λ] J."""
    slow, sites = reference(*case, None), AnchoredSites(fitted(*case, "gp"))
    for _ in range(200):
        if sites.step(0.5) < 1e-12:
            break
    mean, blocks = sites.moments()
    scale, _ = slow.prior
    away = sites.mean - problem(case[0]).theta + slow.prior[1]
    pulled = torch.einsum("ncp,nc->p", slow.jac, slow.expectation(grad(slow.one), mean, blocks))
    assert relative_error(pulled, scale * away) < 1e-8
    curvature = -slow.expectation(hessian(slow.one), mean, blocks)
    slow.precision = torch.diag(scale) + torch.einsum("ncp,nc,ncq->pq", slow.jac, curvature, slow.jac)
    assert relative_error(blocks, slow.moments()[1]) < 1e-8


def test_saturated_points() -> None:
    """Sites that hardly change V: a point of weight zero, and outputs whose Λ underflows."""
    case = problem("deep_mlp")
    network = nn.Sequential(case.network, nn.Linear(5, 3, bias=False).double()).eval()
    with torch.no_grad():
        network[1].weight.copy_(torch.diag(torch.tensor([40.0, 1.0, 1e-3, 0.0, 0.0]))[:3])
    y, weights = targets(LIKELIHOODS["bernoulli"], case)[:, :3], torch.ones(len(case.x)).double()
    weights[2] = 0.0
    found = []
    for structure, kind in (("gp", AnchoredSites), ("full", AnchoredWeights)):
        posterior = ntkl.laplace(network, (case.x, y, weights), ntkl.Bernoulli(), ntkl.GaussianPrior(1e-3),
                                 structure=structure)
        found.append(kind(posterior.fitted))
        found[-1].step(0.3)
    sites, dense = found
    (mean, blocks), (known, full) = sites.moments(), dense.moments()
    deviation = full.diagonal(dim1=1, dim2=2).sqrt()
    assert float(((blocks - full) / (deviation.unsqueeze(1) * deviation.unsqueeze(2))).abs().max()) < 1e-9
    assert float(((mean - known) / deviation).abs().max()) < 1e-9


@pytest.mark.parametrize("likelihood", [
    ntkl.Gaussian(0.3, missing="nan"), ntkl.Bernoulli(missing="nan"), ntkl.HeteroscedasticGaussian("natural"),
    ntkl.HeteroscedasticGaussian(),
], ids=repr)
def test_other_likelihoods(likelihood: ntkl.Likelihood) -> None:
    """Missing targets, of one output and of all; two outputs for one response."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(9, 2, generator=generator, dtype=torch.float64) for _ in range(2))
    if isinstance(likelihood, ntkl.HeteroscedasticGaussian):
        y = y[:, :1]
    else:
        y = (y > 0).double()
        y[0, 1], y[1] = torch.nan, torch.nan
    network, found = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2)).double(), []
    for structure, kind in (("gp", AnchoredSites), ("full", AnchoredWeights)):
        posterior = ntkl.laplace(network, (x, y), likelihood, ntkl.GaussianPrior(1.0), structure=structure)
        found.append(kind(posterior.fitted))
        for size in (0.3, 0.5):
            found[-1].step(size)
    for one, other in zip((found[0].mean, *found[0].moments()), (found[1].mean, *found[1].moments()), strict=True):
        assert relative_error(one, other) < 1e-9


def test_weights_are_repetitions() -> None:
    """Of a point of weight 2, each copy has the same site."""
    case, found = problem("scalar_outputs"), []
    y, times = targets(LIKELIHOODS["poisson"], case), torch.ones(len(case.x), dtype=torch.long)
    times[1] = 2
    for data in ((case.x, y, times.double()), (case.x.repeat_interleave(times, 0), y.repeat_interleave(times, 0))):
        found.append(AnchoredSites(ntkl.laplace(case.network, data, ntkl.Poisson(), ntkl.GaussianPrior(0.7)).fitted))
        for size in STEPS:
            found[-1].step(size)
    assert relative_error(found[0].mean, found[1].mean) < 1e-10
    weighted, repeated = (sites.moments()[1].repeat_interleave(one, 0)
                          for sites, one in zip(found, (times, torch.ones_like(times[:1])), strict=True))
    assert relative_error(weighted, repeated) < 1e-10


def logistic(seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A linear classifier at its optimum under precision 0.5."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(12, 6, generator=generator, dtype=torch.float64)
    y = (torch.rand(12, 1, generator=generator) < 0.5).double()
    network, theta = nn.Linear(6, 1, bias=False).double(), torch.zeros(6, dtype=torch.float64)
    for _ in range(30):
        p = torch.sigmoid(x @ theta).unsqueeze(1)
        h = x.T @ (p * (1 - p) * x) + 0.5 * torch.eye(6, dtype=torch.float64)
        theta = theta + torch.linalg.solve(h, (x.T @ (y - p)).squeeze(1) - 0.5 * theta)
    with torch.no_grad():
        network.weight.copy_(theta.unsqueeze(0))
    return network, x, y


def as_reference(network: nn.Module, x: Tensor, y: Tensor, sites: AnchoredSites) -> Reference:
    """The q of sites in a linear model with precision 0.5, dense."""
    theta = network.weight.detach()[0]
    jac = x.unsqueeze(1)
    found = Reference(jac, (x @ theta).unsqueeze(1), y, LIKELIHOODS["bernoulli"].log_density,
                      (torch.full((6,), 0.5, dtype=torch.float64), theta), torch.eye(6), theta)
    found.precision = torch.linalg.inv(sites.precision.solve(torch.eye(6, dtype=torch.float64)))
    found.natural = found.precision @ (sites.mean - theta)
    return found


@pytest.mark.slow
def test_elbo_is_at_least_that_of_laplace() -> None:
    for seed in range(20):
        network, x, y = logistic(seed)
        posterior = ntkl.laplace(network, (x, y), ntkl.Bernoulli(), ntkl.GaussianPrior(0.5))
        sites = AnchoredSites(posterior.fitted)
        before = as_reference(network, x, y, sites).elbo()
        for _ in range(60):
            if sites.step(0.7) < 1e-10:
                break
        gained = as_reference(network, x, y, sites).elbo() - before
        assert gained > 1e-6, (seed, gained)


class _Logistic(gpytorch.likelihoods.Likelihood):
    """Bernoulli with a logistic link: that of GPyTorch is a probit."""

    def forward(self, f: Tensor, *args: object, **kwargs: object) -> torch.distributions.Bernoulli:
        return torch.distributions.Bernoulli(logits=f)

    def expected_log_prob(self, y: Tensor, q: gpytorch.distributions.MultivariateNormal, *args: object,
                          **kwargs: object) -> Tensor:
        return gpytorch.utils.quadrature.GaussHermiteQuadrature1D()(lambda f: self.forward(f).log_prob(y), q)


class _FullRank(gpytorch.models.ApproximateGP):
    """Full-rank variational GP at its own inputs, with the kernel of a linear model of precision 0.5."""

    def __init__(self, x: Tensor) -> None:
        distribution = gpytorch.variational.NaturalVariationalDistribution(len(x))
        super().__init__(gpytorch.variational.VariationalStrategy(self, x, distribution, learn_inducing_locations=False,
                                                                  jitter_val=1e-10))
        self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), gpytorch.kernels.LinearKernel()
        self.covar_module.variance = 2.0

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


@pytest.mark.slow
def test_optimum_is_that_of_gpytorch() -> None:
    """Another parametrization of q, another optimizer, and points outside the span of the weights' prior."""
    network, x, y = logistic(3)
    x, y = x[:6], y[:6]
    sites = AnchoredSites(ntkl.laplace(network, (x, y), ntkl.Bernoulli(), ntkl.GaussianPrior(0.5)).fitted)
    for _ in range(60):
        sites.step(0.7)
    ours = float(as_reference(network, x, y, sites).elbo())
    model, likelihood = _FullRank(x).double(), _Logistic()
    objective = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(x))
    optimizer = gpytorch.optim.NGD(model.variational_parameters(), num_data=len(x), lr=0.5)
    for _ in range(60):
        optimizer.zero_grad()
        loss = -objective(model(x), y.squeeze(1))
        loss.backward()
        optimizer.step()
    theirs = -float(loss.detach()) * len(x)
    assert abs(theirs - ours) < 1e-3, (ours, theirs)


# --- block-diagonal states


@pytest.mark.parametrize(("network", "spec", "start"), pairwise([
    "deep_mlp", "cnn_groups", "transformer_tied", "scalar_outputs", "layer_twice", "lstm", "embedding_as_head",
], [KFAC(), Diagonal()], ["laplace", "number"]))
def test_averages_of_sums(network: str, spec: BlockSpec, start: str) -> None:
    """With the inputs of every layer fixed, H is linear in the sums, so the dense recursion is exact for KFAC too."""
    case = problem(network)
    y = targets(LIKELIHOODS["bernoulli"], case)
    fitted = ntkl.laplace(case.network, (case.x, y), ntkl.Bernoulli(), PRIORS["layer"].build(case),
                          structure=spec).fitted
    model, precision = fitted.model, fitted.precision
    root = fitted.points.root(model.curvature_type, model.likelihood).detach()
    own, ggn = torch.diag(precision.prior_precision), precision.information()
    from_fit = start == "laplace"
    ratio = torch.ones_like(model.prior.precision.detach()) if from_fit else 3.0 / model.prior.precision.detach()
    state = BlockState(model.theta, spec, fitted.structure.summaries(model) if from_fit else [], ratio, model.prior)
    dense, mean = own + ggn if from_fit else 3.0 * torch.eye(len(own), dtype=torch.float64), model.theta
    generator = torch.Generator().manual_seed(0)
    for number, size in enumerate(STEPS):
        scale, gradient = 1.0 + number, torch.randn(len(own), generator=generator, dtype=torch.float64)
        state.update(size, [DataTerms(gradient, model.jacobian_pass.rows(case.x, root * scale**0.5))])
        dense = (1 - size) * dense + size * (own + scale * ggn)
        mean = mean + size * torch.linalg.solve(dense, gradient - own @ (mean - model.prior.flat_mean()))
        found = torch.diag(state.precision.prior_precision) + state.precision.information()
        assert relative_error(found, dense) < 1e-10
        assert relative_error(state.mean, mean) < 1e-10
    saved = state.record()
    other = BlockState(model.theta, spec, [], ratio, model.prior)
    other.restore(saved)
    assert torch.equal(other.draw(2, torch.Generator().manual_seed(1)), state.draw(2, torch.Generator().manual_seed(1)))
    assert torch.equal(other.precision.log_det(), state.precision.log_det())


# --- in the loop


def classes() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A small classifier with three classes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(15, 2, generator=generator, dtype=torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    return network, (x, (x.sum(1) > 0).long() + (x[:, 0] > 0.5).long())


def line() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """One linear layer with two outputs: the factors of KFAC are exact."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(12, k, generator=generator, dtype=torch.float64) for k in (3, 2))
    return nn.Linear(3, 2).double(), (x, y)


ANCHORED = {"algorithm": "lgva", "relinearize": False, "step_size": 0.5}


@pytest.mark.slow
def test_linearized_once(tmp_path: Path) -> None:
    """Both spaces give one posterior, whose moments are those of the linearized network at μ, not at its weights."""
    network, data = classes()
    start = ntkl.laplace(network, data, ntkl.Categorical(), ntkl.GaussianPrior(0.7))
    fits = [ntkl.variational(network, data, ntkl.Categorical(), ntkl.GaussianPrior(0.7), structure, start=start,
                             steps=8, elbo_every=4, **ANCHORED) for structure in ("gp", "full")]
    first, second = (fit.posterior for fit in fits)
    x_new = data[0][:4] + 0.3
    for one, other in zip(first.latent_moments(x_new), second.latent_moments(x_new), strict=True):
        assert relative_error(one, other) < 1e-9
    jac = first.jacobian(x_new).dense(first.network.shapes).transpose(0, 1)
    theta = torch.nn.utils.parameters_to_vector(network.parameters()).detach()
    moved = network(x_new).detach() + torch.einsum("ncp,p->nc", jac, first.fitted.theta - theta)
    assert relative_error(first.latent_moments(x_new)[0], moved) < 1e-12
    assert not torch.allclose(moved, network(x_new).detach(), atol=0.1)
    assert fits[0].history.elbo_glm == pytest.approx(fits[1].history.elbo_glm, rel=1e-9)
    assert fits[0].history.elbo_glm[-1] > fits[0].history.elbo_glm[0] + 0.1
    assert fits[0].history.steps == [0, 4, 8] and float(first.kl().value) == pytest.approx(float(second.kl().value))
    for verb in (first.log_marginal_likelihood, first.explain):
        with pytest.raises(ntkl.UnsupportedError):
            verb()
    for posterior in (first, second):  # the file has the displacement of the linearized network
        posterior.save(tmp_path / "q.pt", include_data=True)
        for again in (ntkl.load(tmp_path / "q.pt", network), ntkl.load(tmp_path / "q.pt", network, data)):
            for one, other in zip(posterior.latent_moments(x_new), again.latent_moments(x_new), strict=True):
                assert relative_error(one, other) < 1e-12
            assert torch.equal(again.f, posterior.f) or relative_error(again.f, posterior.f) < 1e-12
        assert float(again.elbo()) == pytest.approx(float(posterior.elbo()), rel=1e-12)


def test_converged() -> None:
    network, data = classes()
    fit = ntkl.variational(network, data, ntkl.Categorical(), ntkl.GaussianPrior(0.7), "auto", start=3.0, steps=500,
                           tolerance=1e-12, elbo_every=0, **ANCHORED)
    assert "within the tolerance" in fit.stopped and len(fit.history) < 100
    assert fit.posterior.kl().value > 0


@pytest.mark.parametrize("options", [
    {"algorithm": "voggn"}, {"batch_size": 4}, {"structure": "kfac"}, {"expectations": "weights", "samples": 2},
], ids=str)
def test_only_lgva_is_anchored(options: dict[str, object]) -> None:
    network, data = classes()
    with pytest.raises(ntkl.UnsupportedError, match="relinearize"):
        ntkl.variational(network, data, ntkl.Categorical(), **(ANCHORED | {"start": 1.0, "steps": 1} | options))


def test_kfac_of_one_layer_is_exact() -> None:
    """Pairs are exact on a conjugate model: H and μ approach the exact posterior's at the rate 1 - γ."""
    network, data = line()
    prior, exact = ntkl.GaussianPrior(0.8), ntkl.Gaussian(0.3)
    known = ntkl.laplace(network, data, exact, prior, "full")
    fit = ntkl.variational(network, data, exact, prior, "kfac", start=5.0, step_size=0.4, steps=60, elbo_every=0)
    unit = torch.eye(8, dtype=torch.float64)
    assert relative_error(fit.posterior.posterior_precision.solve(unit), known.posterior_precision.solve(unit)) < 1e-9
    means = fit.posterior.latent_moments(data[0])[0], known.latent_moments(data[0], "posterior")[0]
    assert relative_error(*means) < 1e-9
    bound = fit.posterior.elbo()
    assert float(bound) == pytest.approx(float(known.evidence(correction=True)), rel=1e-9)


@pytest.mark.slow
def test_diagonal_has_the_optimum_and_the_diagonal() -> None:
    network, data = line()
    known = ntkl.laplace(network, data, ntkl.Gaussian(0.3), ntkl.GaussianPrior(0.8), "diag")
    fit = ntkl.variational(network, data, ntkl.Gaussian(0.3), ntkl.GaussianPrior(0.8), "diag", start=known,
                           step_size=0.2, steps=300, elbo_every=0)
    assert fit.history.natural_gradient[-1] < 1e-9
    draws = torch.ones(8, dtype=torch.float64)
    assert relative_error(fit.posterior.posterior_precision.solve(draws), known.posterior_precision.solve(draws)) < 1e-9


@pytest.mark.parametrize("structure", ["kfac", "diag"])
def test_one_whole_step_has_the_sums_of_laplace(structure: str) -> None:
    """With example weights, which the inputs of a layer have as well."""
    network, (x, y) = classes()
    data = x, y, torch.linspace(0.0, 3.0, len(x), dtype=torch.float64)
    known = ntkl.laplace(network, data, ntkl.Categorical(), ntkl.GaussianPrior(0.7), structure)
    with pytest.warns(ntkl.NTKLaplaceWarning, match="fixed point"):
        fit = ntkl.variational(network, data, ntkl.Categorical(), ntkl.GaussianPrior(0.7), structure, "oggn",
                               start=2.0, step_size=1, steps=1, elbo_every=0)
    unit = torch.eye(known.num_parameters, dtype=torch.float64)
    assert relative_error(fit.posterior.posterior_precision.solve(unit), known.posterior_precision.solve(unit)) < 1e-10


def test_block_structures_with_options() -> None:
    network, data = classes()
    given = {"start": 2.0, "step_size": 0.1, "steps": 2, "elbo_every": 0}
    fits = [ntkl.variational(network, data, ntkl.Categorical(), structure=structure, **given)
            for structure in ("kfac", KFAC(), KFAC(sharing="reduce"))]  # one position: the same sums
    assert all(torch.equal(fits[0].posterior.fitted.theta, fit.posterior.fitted.theta) for fit in fits)
    with pytest.raises(ntkl.UnsupportedError, match="one pass"):
        ntkl.variational(network, data, ntkl.Categorical(), structure=ntkl.EKFAC(), **given)
    with pytest.raises(ntkl.UnsupportedError, match="structure='kfac'"):
        ntkl.variational(network, data, ntkl.Categorical(), structure="kfac",
                         **given | {"start": fits[0].posterior})
    settings = ntkl.Settings(memory_budget=1000)
    for structure in ("kfac", "diag"):
        with pytest.raises(ntkl.MemoryBudgetError, match="averages"):
            ntkl.variational(network, data, ntkl.Categorical(), structure=structure, settings=settings, **given)


@pytest.mark.parametrize("options", [
    ANCHORED, ANCHORED | {"elbo_every": 1, "prior": ntkl.GaussianPrior(50.0, groups="layer")},
    {"structure": "kfac", "batch_size": 6, "step_size": 0.009}, {"structure": "diag", "batch_size": 6},
], ids=lambda options: options.get("structure", "gp"))
def test_resumed_runs_are_bit_identical(options: dict[str, object]) -> None:
    """Also between two eigendecompositions of the Kronecker factors."""
    network, data = classes()
    start = 4.0
    if options.get("structure") == "kfac":  # a start whose blocks change little in a few steps
        start = ntkl.laplace(network, data, ntkl.Categorical(), ntkl.GaussianPrior(50.0), "kfac")
    given = {"structure": "gp", "start": start, "prior": ntkl.GaussianPrior(50.0), "steps": 9, "elbo_every": 0}
    given |= options

    def run(settings: ntkl.Settings | None = None, stop: int = 0) -> ntkl.VariationalFit:
        def interrupt(step: ntkl.VariationalStep) -> None:
            if step.step == stop:
                raise KeyboardInterrupt

        return ntkl.variational(network, data, ntkl.Categorical(), callbacks=interrupt, settings=settings, **given)

    whole = run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "SNAPSHOT_SECONDS", 0.0)
        patch.setattr(tuning, "SNAPSHOT_SHARE", 0)
        with pytest.raises(ntkl.VariationalInterrupted) as caught:
            run(stop=5)
    rest = run(ntkl.Settings(resume=caught.value.state))
    if "relinearize" in options:  # the state is that of one linearization, from one start
        for structure in ("gp", "full"):
            given |= {"structure": structure, "start": "map"}
            with pytest.raises(ntkl.UnsupportedError, match="structure" if structure == "full" else "linearized at"):
                run(ntkl.Settings(resume=caught.value.state))
        given |= {"structure": "gp", "start": 9.0}  # takes the place of any other number
        rest = run(ntkl.Settings(resume=caught.value.state))
    assert torch.equal(rest.posterior.fitted.theta, whole.posterior.fitted.theta)
    assert rest.history.natural_gradient == whole.history.natural_gradient
    ones = torch.ones_like(whole.posterior.fitted.theta)
    assert torch.equal(*(fit.posterior.posterior_precision.solve(ones) for fit in (rest, whole)))
