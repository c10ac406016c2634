"""Anchored LGVA by sites, and block-diagonal states, against dense recursions in natural parameters ([T20] 4.2, 4.3).

The references know H and H (μ - θ*) as dense matrices and vectors, take Jacobians one backward pass at a time, and
integrate over f with Gauss-Hermite nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import gpytorch
import numpy as np
import pytest
import torch
from exact_cases import truth
from reference import relative_error
from registry import LIKELIHOODS, PRIORS, problem, targets
from registry_cases import jacobians
from torch import Tensor, nn
from torch.func import grad, hessian, vmap

import ntk_laplace as ntkl
from ntk_laplace.structures import KFAC, Diagonal
from ntk_laplace.structures.block_spec import BlockSpec
from ntk_laplace.variational_inference.block_state import BlockState
from ntk_laplace.variational_inference.sites import AnchoredSites, AnchoredWeights
from ntk_laplace.variational_inference.states import DataTerms

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
                        structure=structure).fitted  # fmt: skip


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
    ("deep_mlp", "bernoulli", "layer"), ("scalar_outputs", "poisson", "scalar"), ("cnn_groups", "gaussian", "parameter"),
    ("transformer_tied", "bernoulli", "tensor"), ("layer_twice", "poisson", "layer"),
], ids="-".join)  # fmt: skip
def test_sites_are_the_natural_parameters(case: tuple[str, str, str], start: float | None) -> None:
    slow, fast = reference(*case, start), AnchoredSites(fitted(*case, "gp"), start)
    for size in STEPS:
        slow.step(size)
        fast.step(size)
        for found, known in zip(fast.moments(), slow.moments(), strict=True):
            assert relative_error(found, known) < 1e-9
        assert relative_error(fast.mean - problem(case[0]).theta, torch.linalg.solve(slow.precision, slow.natural)) < 1e-9


@pytest.mark.parametrize("start", [None, 10.0])
@pytest.mark.parametrize("case", [("deep_mlp", "categorical", "layer"), ("cnn_groups", "categorical", "scalar")],
                         ids="-".join)  # fmt: skip
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
    ("scalar_outputs", "bernoulli", "layer"), ("scalar_outputs", "poisson", "scalar"), ("deep_mlp", "bernoulli", "scalar"),
], ids="-".join)  # fmt: skip
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
                      (torch.full((6,), 0.5, dtype=torch.float64), theta), torch.eye(6), theta)  # fmt: skip
    found.precision = torch.linalg.inv(sites.precision.solve(torch.eye(6, dtype=torch.float64)))
    found.natural = found.precision @ (sites.mean - theta)
    return found


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


class _Logistic(gpytorch.likelihoods._OneDimensionalLikelihood):
    """Bernoulli with a logistic link: that of GPyTorch is a probit."""

    def forward(self, f: Tensor, *args: object, **kwargs: object) -> torch.distributions.Bernoulli:
        return torch.distributions.Bernoulli(logits=f)


class _FullRank(gpytorch.models.ApproximateGP):
    """Full-rank variational GP at its own inputs, with the kernel of a linear model of precision 0.5."""

    def __init__(self, x: Tensor) -> None:
        distribution = gpytorch.variational.NaturalVariationalDistribution(len(x))
        super().__init__(gpytorch.variational.VariationalStrategy(self, x, distribution, learn_inducing_locations=False,
                                                                  jitter_val=1e-10))  # fmt: skip
        self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), gpytorch.kernels.LinearKernel()
        self.covar_module.variance = 2.0

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


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


@pytest.mark.parametrize("start", ["laplace", "number"])
@pytest.mark.parametrize("spec", [KFAC(), Diagonal()], ids=["kfac", "diag"])
@pytest.mark.parametrize("network", [
    "deep_mlp", "cnn_groups", "transformer_tied", "scalar_outputs", "layer_twice", "lstm", "embedding_as_head",
])  # fmt: skip
def test_averages_of_sums(network: str, spec: BlockSpec, start: str) -> None:
    """With the inputs of every layer fixed, H is linear in the sums, so the dense recursion is exact for KFAC too."""
    case = problem(network)
    y = targets(LIKELIHOODS["bernoulli"], case)
    fitted = ntkl.laplace(case.network, (case.x, y), ntkl.Bernoulli(), PRIORS["layer"].build(case), structure=spec).fitted
    model, precision, shapes = fitted.model, fitted.precision, fitted.network.shapes
    root = fitted.points.root(model.curvature_type, model.likelihood).detach()
    own, ggn = torch.diag(precision.prior_precision), precision.information()
    from_fit = start == "laplace"
    ratio = torch.ones_like(model.prior.precision.detach()) if from_fit else 3.0 / model.prior.precision.detach()
    state = BlockState(model.theta, spec, fitted.structure.summaries(model) if from_fit else [], ratio, model.prior,
                       shapes)
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
    other = BlockState(model.theta, spec, [], ratio, model.prior, shapes)
    other.restore(saved)
    assert torch.equal(other.draw(2, torch.Generator().manual_seed(1)), state.draw(2, torch.Generator().manual_seed(1)))
    assert torch.equal(other.precision.log_det(), state.precision.log_det())
