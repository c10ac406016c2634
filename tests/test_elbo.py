"""Expectations over f, the divergence from the prior, the evidence lower bound, and Gaussians found elsewhere."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from outside_likelihood import Gamma
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, kl_divergence
from torch.utils.data import DataLoader, TensorDataset

import ntk_laplace as ntkl
from exact_cases import TURNS, fit, ids, truth
from ntk_laplace.model.expectations import Expectation
from ntk_laplace.posterior import _OF_LAPLACE
from ranks import on_ranks
from refusals import inputs, labels, network, refused, without_data
from registry_cases import tolerance

pytestmark = [pytest.mark.filterwarnings("ignore:no factor rule"),
              pytest.mark.filterwarnings("ignore:the fitted predictive"),
              pytest.mark.filterwarnings("ignore:leave-one-out is not")]

# --- expectations over f_n ~ N(m_n, V_nn)


def drawn(n: int, c: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Means, and covariances of full rank."""
    generator = torch.Generator().manual_seed(10 * n + c)
    mean = torch.randn(n, c, generator=generator, dtype=torch.float64)
    root = scale * torch.randn(n, c, c, generator=generator, dtype=torch.float64) / c**0.5
    return mean, root @ root.mT


def product_rule(function: Callable[[Tensor], Tensor], mean: Tensor, covariance: Tensor, order: int = 20) -> Tensor:
    """E function(f (n, C)) by a product Gauss-Hermite rule in the whitened outputs of one Cholesky factor."""
    nodes, weights = (torch.from_numpy(a) for a in np.polynomial.hermite_e.hermegauss(order))
    c = mean.shape[1]
    grid = torch.cartesian_prod(*[nodes] * c).view(-1, c)
    weight = torch.cartesian_prod(*[weights] * c).view(-1, c).prod(1) / math.sqrt(2 * math.pi) ** c
    root = torch.linalg.cholesky(covariance)
    return sum(w * function(mean + (root @ z)) for z, w in zip(grid, weight, strict=True))


def gaps(y: Tensor) -> Tensor:
    y = y.clone()
    y.view(-1)[1] = torch.nan
    return y


REAL = torch.tensor([[0.3, -1.0], [2.0, 0.4], [-0.7, 1.1]], dtype=torch.float64)
COUNTS = torch.tensor([[0.0, 3.0], [1.0, 2.0], [5.0, 0.0]], dtype=torch.float64)
LABELS = torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
KNOWN = {  # likelihoods without sampling, with targets, and the outputs of the network
    "gaussian": (ntkl.Gaussian(0.3), REAL, 2),
    "gaussian with gaps": (ntkl.Gaussian(torch.tensor([[0.5, 0.2], [0.2, 0.4]]), missing="nan"), gaps(REAL), 2),
    "noise per point": (ntkl.Gaussian(torch.tensor([0.3, 0.5, 1.2]), kind="point"), REAL, 2),
    "poisson": (ntkl.Poisson(), COUNTS, 2),
    "poisson with gaps": (ntkl.Poisson(missing="nan"), gaps(COUNTS), 2),
    "negative binomial": (ntkl.NegativeBinomial(0.4), COUNTS, 2),
    "negative binomial with gaps": (ntkl.NegativeBinomial(2.0, missing="nan"), gaps(COUNTS), 2),
    "student with gaps": (ntkl.StudentT(torch.tensor([4.0, 9.0]), 30.0, "nan"), gaps(REAL), 2),
    "bernoulli": (ntkl.Bernoulli(), LABELS, 2),
    "bernoulli with gaps": (ntkl.Bernoulli(missing="nan"), gaps(LABELS), 2),
    "tempered": (ntkl.Tempered(ntkl.Poisson(), 2.5), COUNTS, 2),
    "heteroscedastic": (ntkl.HeteroscedasticGaussian(), REAL[:, :1], 2),
    "heteroscedastic with gaps": (ntkl.HeteroscedasticGaussian(missing="nan"), gaps(REAL[:, :1]), 2),
    "user's, one output": (ntkl.CustomLikelihood(lambda f, y: -(2 * (y - f).cosh()).log().sum(1)), REAL[:, :1], 1),
}


@pytest.mark.parametrize("name", KNOWN)
def test_expectations_without_sampling(name: str) -> None:
    """E log p, E r and E Λ equal a product quadrature of the likelihood's own methods."""
    likelihood, y, c = KNOWN[name]
    mean, covariance = drawn(3, c, 0.5)
    likelihood.bind(3, c)
    found = Expectation(likelihood)
    values, errors = found.log_prob(mean, covariance, y)
    assert not errors.any()
    own = values, *found.derivatives(mean, covariance, y)
    for value, function in zip(own, (likelihood.log_prob, likelihood.residual, likelihood.curvature), strict=True):
        wanted = product_rule(lambda f, function=function: function(f, y).detach(), mean, covariance)
        torch.testing.assert_close(value, wanted, rtol=1e-9, atol=1e-9)


def test_wide_bernoulli_is_accurate() -> None:
    """Far wider than a posterior at its training points: where a Gauss-Hermite rule of 20 nodes errs by 1e-2."""
    mean, covariance = torch.tensor([[0.5], [-3.0]]).double(), torch.tensor([[[16.0]], [[9.0]]]).double()
    y = torch.tensor([[1.0], [1.0]]).double()
    z = torch.linspace(-12, 12, 240_001, dtype=torch.float64)
    f = mean + covariance[:, 0].sqrt() * z
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    wanted = torch.trapezoid(torch.nn.functional.logsigmoid(f) * density, z)
    found, _ = Expectation(ntkl.Bernoulli()).log_prob(mean, covariance, y)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=0)


SAMPLED = {
    "categorical": (ntkl.Categorical(1.3), torch.tensor([0, 1, 2]), 3),
    "soft labels, one missing": (
        ntkl.Categorical(), torch.tensor([[0.2, 0.7, 0.1], [-100] * 3, [1.0, 0.0, 0.0]]).double(), 3),
    "tempered": (ntkl.Tempered(ntkl.Categorical(), 3.0), torch.tensor([0, 1, 1]), 3),
    "natural": (ntkl.HeteroscedasticGaussian("natural"), REAL[:, :1], 2),
    "two outputs per response": (Gamma(), REAL[:, :1].abs(), 2),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_expectations(name: str) -> None:
    """They meet a product quadrature within their standard error, which is what seeds make of it."""
    likelihood, y, c = SAMPLED[name]
    mean, covariance = drawn(3, c, 0.25)
    order = 20 if c == 2 else 10
    wanted = product_rule(lambda f: likelihood.log_prob(f, y).detach(), mean, covariance, order)
    deviations = []
    for seed in range(80):
        found = Expectation(likelihood, 256, torch.Generator().manual_seed(seed))
        values, errors = found.log_prob(mean, covariance, y)
        assert (errors < 0.1).all()
        deviations.append((values - wanted).sum() / errors.square().sum().sqrt())
    assert 0.6 < torch.stack(deviations).square().mean() < 1.9  # neither too small nor too large
    residual, curvature = Expectation(likelihood, 4000).derivatives(mean, covariance, y)
    known = product_rule(lambda f: likelihood.residual(f, y).detach(), mean, covariance, order)
    torch.testing.assert_close(residual, known, rtol=1e-2, atol=5e-3)
    known = product_rule(lambda f: likelihood.curvature(f, y).detach(), mean, covariance, order)
    torch.testing.assert_close(curvature, known, rtol=3e-2, atol=1e-2)


@pytest.mark.parametrize("y", [torch.tensor([0, 2, -100]), torch.eye(3).double()], ids=["labels", "soft"])
def test_average_of_class_curvatures(y: Tensor) -> None:
    f = torch.randn(40, 3, 3, generator=torch.Generator().manual_seed(0)).double()
    for likelihood in (ntkl.Categorical(1.7), ntkl.Tempered(ntkl.Categorical(1.7), 2.0)):
        wanted = torch.stack([likelihood.curvature(one, y) for one in f]).mean(0)
        torch.testing.assert_close(likelihood.averaged_curvature(f, y), wanted, rtol=1e-12, atol=1e-14)


def test_pairs_leave_no_error_of_what_is_odd() -> None:
    """The points are m ± e: a linear log density is averaged exactly."""
    mean, covariance = drawn(3, 2)
    linear = ntkl.CustomLikelihood(lambda f, y: (f * y).sum(1))
    values, errors = Expectation(linear, 8).log_prob(mean, covariance, REAL)
    torch.testing.assert_close(values, (mean * REAL).sum(1), rtol=1e-12, atol=1e-12)
    assert (errors < 1e-12).all()


def test_tiles_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    mean, covariance = drawn(5, 3)
    found, y = Expectation(ntkl.Categorical(), 64), torch.tensor([0, 2, 1, 1, 0])
    whole = *found.log_prob(mean, covariance, y), *found.derivatives(mean, covariance, y)
    monkeypatch.setattr("ntk_laplace.runtime.tuning.AVERAGED_OUTPUTS", 2 * 64 * 3)
    parts = *found.log_prob(mean, covariance, y), *found.derivatives(mean, covariance, y)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


def test_certain_outputs_give_the_density_itself() -> None:
    mean, _ = drawn(3, 2)
    for likelihood, y in ((ntkl.Categorical(), torch.tensor([0, 1, 1])), (ntkl.Bernoulli(), LABELS)):
        values, errors = Expectation(likelihood).log_prob(mean, mean.new_zeros(3, 2, 2), y)
        torch.testing.assert_close(values, likelihood.log_prob(mean, y).detach(), rtol=1e-12, atol=1e-12)
        assert (errors < 1e-12).all()


# --- the divergence from the prior


def closed(theta: Tensor, covariance: Tensor, mean: Tensor, precision: Tensor) -> Tensor:
    """KL of two Gaussians by torch."""
    return kl_divergence(MultivariateNormal(theta, covariance), MultivariateNormal(mean, torch.diag(1 / precision)))


@pytest.mark.parametrize("case", TURNS[::3], ids=ids)
def test_divergence_is_that_of_two_gaussians(case: tuple[str, str, str]) -> None:
    dense, near = truth(*case), tolerance(case[0], 1e-9)
    wanted = closed(dense.offset, dense.covariance, torch.zeros_like(dense.offset), dense.precision)
    for structure in ("full", "gp"):
        found = fit(*case, structure).kl()
        torch.testing.assert_close(found.value, wanted, rtol=near, atol=near)
        assert found.standard_error == 0.0


def problem(classes: int = 3) -> tuple[nn.Module, Tensor, Tensor, ntkl.GaussianPrior]:
    return network(classes), inputs(), labels(classes=classes), ntkl.GaussianPrior(0.7, groups="layer")


ITERATIVE = ntkl.Iterative(rank=4, probes=8, relative_error=0.5)


@pytest.mark.parametrize("structure", [
    ntkl.KFAC(damped=True), "kfac", "ekfac", "diag", ntkl.INF(rank=2), ntkl.Nystrom(rank=5), ITERATIVE,
], ids=str)
@pytest.mark.filterwarnings("ignore:INF")
@pytest.mark.filterwarnings("ignore:.*standard error")
def test_divergence_of_approximate_structures(structure: Any) -> None:
    """With the structure's own H; damped factors, whose H - P0 depends on the prior, included."""
    model, x, y, prior = problem()
    posterior = ntkl.laplace(model, (x, y), ntkl.Categorical(), prior, structure)
    precision = posterior.posterior_precision
    h = precision.multiply(torch.eye(posterior.num_parameters, dtype=torch.float64))
    own, theta = posterior.prior.flat_precision().detach(), posterior.network.theta
    wanted = closed(theta, torch.linalg.inv(0.5 * (h + h.T)), torch.zeros_like(theta), own)
    found = posterior.kl()
    assert abs(float(found) - float(wanted)) <= max(1e-9 * float(wanted), 4 * found.standard_error)
    assert (found.standard_error > 0) == (precision.standard_error > 0)


# --- the lower bound


@pytest.mark.parametrize("case", [case for case in TURNS if case[1] == "gaussian"], ids=ids)
def test_bound_of_gaussian_likelihoods_is_the_evidence(case: tuple[str, str, str]) -> None:
    near = tolerance(case[0], 1e-9)
    for structure in ("full", "gp"):
        found = fit(*case, structure).elbo()
        torch.testing.assert_close(found.value, truth(*case).evidence(), rtol=near, atol=near)
        assert found.standard_error == 0.0


@pytest.mark.parametrize("likelihood", ["gaps", "noise per point", "tempered", "weights"])
def test_bound_is_the_evidence_in_every_form_of_gaussian(likelihood: str) -> None:
    x = inputs()
    y, model = x[:, :2] * x[:, 2:], network(2)
    data: tuple[Tensor, ...] = (x, y)
    if likelihood == "gaps":
        data = x, gaps(y)
    if likelihood == "weights":
        data = x, y, torch.linspace(0, 3, len(x))
    own = {"gaps": ntkl.Gaussian(0.2, missing="nan"), "tempered": ntkl.Tempered(ntkl.Gaussian(0.2), 3.0),
           "noise per point": ntkl.Gaussian(torch.linspace(0.1, 1, len(x)), kind="point")}
    posterior = ntkl.laplace(model, data, own.get(likelihood, ntkl.Gaussian(0.2)), structure="full")
    torch.testing.assert_close(posterior.elbo().value, posterior.log_marginal_likelihood().detach(), rtol=1e-10, atol=0)


class Curved(nn.Module):
    """f = a tanh(b x): two weights, for grids."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.tensor([1.2, 0.8]).double())

    def forward(self, x: Tensor) -> Tensor:
        return self.weights[0] * torch.tanh(self.weights[1] * x)


def grid(half: float = 9.0, count: int = 401) -> tuple[Tensor, float]:
    """Points of a square, (count², 2), and the area of a cell."""
    line = torch.linspace(-half, half, count, dtype=torch.float64)
    return torch.cartesian_prod(line, line), float(line[1] - line[0]) ** 2


POINTS = torch.tensor([[-1.5], [-0.4], [0.3], [1.1], [2.0]]).double()
ONES = torch.tensor([[0.0], [1.0], [0.0], [1.0], [1.0]]).double()


@pytest.mark.slow
def test_bound_on_a_grid() -> None:
    """E log p - KL of the linearized model, of the network and their evidences, by sums over a grid of the weights."""
    model, likelihood, prior = Curved(), ntkl.Bernoulli(), ntkl.GaussianPrior(0.5)
    posterior = ntkl.laplace(model, (POINTS, ONES), likelihood, prior, "full")
    theta, cell = grid()
    mean, h = posterior.network.theta, posterior.posterior_precision.multiply(torch.eye(2).double())
    q = MultivariateNormal(mean, precision_matrix=h).log_prob(theta)
    p = MultivariateNormal(torch.zeros(2).double(), 2.0 * torch.eye(2).double()).log_prob(theta)
    rows = torch.func.jacrev(lambda w: w[0] * torch.tanh(w[1] * POINTS[:, 0]))(mean)
    outputs = {"nn": theta[:, :1] * torch.tanh(theta[:, 1:] * POINTS.T),
               "glm": mean[0] * torch.tanh(mean[1] * POINTS.T) + (theta - mean) @ rows.T}
    for method, f in outputs.items():
        log_likelihood = (f * ONES.T - nn.functional.softplus(f)).sum(1)
        wanted = (q.exp() * (log_likelihood + p - q)).sum() * cell
        found = posterior.elbo(method, samples=4000)
        assert abs(float(found) - float(wanted)) <= 4 * found.standard_error + 1e-9
        assert (found.standard_error == 0) == (method == "glm")
        evidence = torch.logsumexp(log_likelihood + p, 0) + math.log(cell)
        assert float(wanted) < float(evidence)
        assert float(found.log_likelihood - found.kl) == pytest.approx(float(found), abs=1e-12)


@pytest.mark.slow
def test_bound_of_any_gaussian_is_below_the_evidence_and_tight_at_the_posterior() -> None:
    """A linear-Gaussian model: log p(D) - ELBO is the divergence from the exact posterior, zero there."""
    model, x = nn.Linear(2, 1, bias=False).double(), inputs()[:, :2]
    y, prior = x[:, :1] - 0.3, ntkl.GaussianPrior(0.8)
    exact = ntkl.laplace(model, (x, y), ntkl.Gaussian(0.5), prior, "full")
    evidence, optimum = exact.log_marginal_likelihood(correction=True), exact.network.theta
    optimum = optimum - exact.posterior_precision.solve(exact.fitted.joint_gradient())
    h = exact.posterior_precision.multiply(torch.eye(2).double())
    for precision in (h, torch.tensor([0.7, 5.0]), 3 * h):
        for place in (optimum, optimum + 0.3):
            nn.utils.vector_to_parameters(place, model.parameters())
            q = ntkl.gaussian_posterior(model, (x, y), ntkl.Gaussian(0.5), prior, precision=precision)
            matrix = precision if precision.ndim == 2 else torch.diag(precision.double())
            gap = kl_divergence(MultivariateNormal(place, precision_matrix=matrix),
                                MultivariateNormal(optimum, precision_matrix=h))
            torch.testing.assert_close(q.elbo().value, evidence.detach() - gap, rtol=1e-9, atol=1e-9)
            near = q.elbo("nn", samples=600)
            assert abs(float(near) - float(evidence - gap)) <= 4 * near.standard_error + 1e-9


@pytest.mark.slow
def test_bound_after_a_what_if_is_that_of_the_changed_data() -> None:
    """Of the moved weights, the new H and the remaining points, written out."""
    model, x = network(2), inputs()
    y, prior = (x[:, :2] > 0).double(), ntkl.GaussianPrior(0.7)
    posterior = ntkl.laplace(model, (x, y), ntkl.Bernoulli(), prior, "full").remove([2, 5])
    h = posterior.posterior_precision.multiply(torch.eye(posterior.num_parameters).double())
    theta, kept = posterior.fitted.theta, torch.tensor([0, 1, 3, 4, 6, 7, 8])
    step = theta - posterior.network.theta
    jac = posterior.jacobian(x[kept]).dense(posterior.network.shapes).transpose(0, 1)
    f = model(x[kept]).detach() + jac @ step
    v = jac @ torch.linalg.solve(h, jac.transpose(1, 2))
    fit_term = product_rule(lambda f: ntkl.Bernoulli().log_prob(f, y[kept]), f, v).sum()
    wanted = fit_term - closed(theta, torch.linalg.inv(h), torch.zeros_like(theta), 0.7 * torch.ones_like(theta))
    torch.testing.assert_close(posterior.elbo().value, wanted, rtol=1e-8, atol=1e-8)
    values = []
    for e in posterior.posterior_precision.sample(400, torch.Generator().manual_seed(1)):
        for place in (theta + e, theta - e):
            other = copy.deepcopy(model)
            nn.utils.vector_to_parameters(place, other.parameters())
            values.append(ntkl.Bernoulli().log_prob(other(x[kept]), y[kept]).sum().detach())
    found = posterior.elbo("nn", samples=800)
    direct = torch.stack(values).view(-1, 2).mean(1)
    spread = math.hypot(found.standard_error, float(direct.std() / 20))
    assert abs(float(found.log_likelihood - direct.mean())) < 4 * spread


def test_a_weight_counts_as_often_as_the_example_occurs() -> None:
    model, x, y, prior = problem()
    y = nn.functional.one_hot(y, 3).double()
    once = ntkl.laplace(model, (x, y, torch.tensor([2.0] + [1.0] * 7 + [0.0])), ntkl.Bernoulli(), prior, "full")
    twice = ntkl.laplace(model, (torch.cat([x[:1], x[:8]]), torch.cat([y[:1], y[:8]])), ntkl.Bernoulli(), prior, "full")
    torch.testing.assert_close(once.elbo().value, twice.elbo().value, rtol=1e-12, atol=0)
    one, other = once.elbo("nn", samples=50), twice.elbo("nn", samples=50)
    torch.testing.assert_close(one.value, other.value, rtol=1e-9, atol=0)


USERS: dict[str, tuple[Callable[[], ntkl.Likelihood], Callable[[Tensor], Tensor], int]] = {
    "categorical": (ntkl.Categorical, lambda x: labels(), 3),
    "gamma": (Gamma, lambda x: x[:, :1].exp(), 2),
    "heteroscedastic": (ntkl.HeteroscedasticGaussian, lambda x: x[:, :1], 2),
    "natural": (lambda: ntkl.HeteroscedasticGaussian("natural"), lambda x: x[:, :1], 2),
    "user's": (lambda: ntkl.CustomLikelihood(lambda f, y: -(2 * (y - f).cosh()).log().sum(1)), lambda x: x[:, :2], 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", USERS)
def test_bound_of_every_likelihood(name: str) -> None:
    """Both kinds agree with plain draws of f and of the weights, for two structures."""
    build, target, outputs = USERS[name]
    x = inputs()
    y = target(x)
    for structure in ("full", "kfac"):
        posterior = ntkl.laplace(network(outputs), (x, y), build(), ntkl.GaussianPrior(5.0), structure)
        found = posterior.elbo(samples=1000)
        mean, v = posterior.latent_moments(x)
        draws = MultivariateNormal(mean, v).sample((1000,))
        direct = torch.stack([posterior.likelihood.log_prob(f, posterior.targets).detach() for f in draws]).sum(1)
        gap = float(found.log_likelihood) - float(direct.mean())
        assert abs(gap) <= 4 * math.hypot(found.standard_error, float(direct.std()) / 1000**0.5)
        again, other = posterior.elbo("nn", samples=20), posterior.elbo("nn", samples=20)
        assert float(again) == float(other) and again.standard_error > 0


def test_network_bound_of_function_space_reads_its_inputs(tmp_path: Path) -> None:
    model, x, y, prior = problem()
    gp, full = (ntkl.laplace(model, (x, y), ntkl.Categorical(), prior, s) for s in ("gp", "full"))
    one, other = gp.elbo("nn", samples=400, x=x), full.elbo("nn", samples=400)
    assert abs(float(one) - float(other)) < 4 * math.hypot(one.standard_error, other.standard_error)
    with refused(ntkl.DataError, "training inputs x", "none", r"elbo\("):
        without_data(gp).elbo("nn")
    with refused(ntkl.DataError, "the inputs of the fit", "differ", "same inputs"):
        gp.elbo("nn", x=x + 1)
    for data in (TensorDataset(x), DataLoader(TensorDataset(x, y), 5)):
        assert float(gp.elbo("nn", samples=400, x=data)) == float(one)
    full.save(tmp_path / "p.pt")  # neither inputs nor targets
    with refused(ntkl.UnsupportedError, "training targets", "without them", "data="):
        ntkl.load(tmp_path / "p.pt", model).elbo("nn")


def test_draws_of_the_network_come_in_pairs() -> None:
    model, x, y, prior = problem()
    posterior = ntkl.laplace(model, (x, y), ntkl.Categorical(), prior, "full")
    values = []
    for e in posterior.posterior_precision.sample(3, torch.Generator().manual_seed(8)):
        for theta in (posterior.network.theta + e, posterior.network.theta - e):
            f = posterior.network.with_parameters(theta, x)
            values.append(ntkl.Categorical().log_prob(f, y).sum().detach())
    pairs = torch.stack(values).view(3, 2).mean(1)
    found = posterior.elbo("nn", samples=5, generator=torch.Generator().manual_seed(8))  # rounded up to pairs
    torch.testing.assert_close(found.log_likelihood, pairs.mean(), rtol=1e-12, atol=0)
    assert found.standard_error == pytest.approx(float(pairs.std()) / 3**0.5, rel=1e-9)


def test_blocks_of_draws_are_the_same_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y, prior = problem()
    posterior = ntkl.laplace(model, (x, y), ntkl.Categorical(), prior, "full", settings=ntkl.Settings(batch_size=4))
    whole = posterior.elbo("nn", samples=11)
    monkeypatch.setattr("ntk_laplace.runtime.tuning.WEIGHT_SAMPLE_BYTES", 8 * posterior.num_parameters * 6)
    torch.testing.assert_close(posterior.elbo("nn", samples=12).value, whole.value, rtol=1e-12, atol=0)


@pytest.mark.parametrize("structure", ["gp", "full", "kfac"])
def test_processes_share_the_bound(structure: str) -> None:
    def bounds(settings: ntkl.Settings) -> tuple[Tensor, ...]:
        model, x, y, prior = problem()
        posterior = ntkl.laplace(model, (x, y), ntkl.Categorical(), prior, structure, settings=settings)
        h = torch.linspace(1, 3, posterior.num_parameters)
        given = ntkl.gaussian_posterior(model, (x, y), ntkl.Categorical(), prior, precision=h, settings=settings)
        own = posterior.elbo("nn", samples=6, x=x if structure == "gp" else None)
        return posterior.elbo(samples=64).value, own.value, given.elbo("nn", samples=6).value, given.elbo().value

    wanted = bounds(ntkl.Settings(batch_size=2))
    for rank, found in enumerate(on_ranks(3, lambda reducer: bounds(ntkl.Settings(batch_size=2, reducer=reducer)))):
        for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
            if (structure, number) == ("gp", 1):  # its draws are dealt to the processes
                continue
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9, msg=f"rank {rank}, value {number}")


def test_bound_refuses_bad_input() -> None:
    model, x, y, prior = problem()
    posterior = ntkl.laplace(model, (x, y), ntkl.Categorical(), prior, "full")
    with refused(ntkl.UnsupportedError, "method among glm, nn", "'map'", "linearized"):
        posterior.elbo("map")
    with refused(ntkl.HyperparameterError, "samples", "0", "1000"):
        posterior.elbo(samples=0)
    with refused(ntkl.HyperparameterError, "samples", "2", "1000"):
        posterior.elbo("nn", samples=2)
    with refused(ntkl.UnsupportedError, "Generator", "3", "manual_seed"):
        posterior.elbo(generator=3)
    small = ntkl.gaussian_posterior(model, (x, y), ntkl.Categorical(), prior, precision=torch.ones(43),
                                    settings=ntkl.Settings(memory_budget=500))
    with refused(ntkl.MemoryBudgetError, "covariances of 3 outputs at 9 points", "predicted", "fewer"):
        small.elbo()


def test_error_of_an_estimated_divergence_is_part_of_the_bounds() -> None:
    model, x, y, prior = problem()
    posterior = ntkl.laplace(model, (x, y), ntkl.Categorical(), prior, ntkl.Iterative(rank=4, probes=4))
    kl, bound = posterior.kl(), posterior.elbo()
    values = Expectation(posterior.likelihood, 1000).log_prob(
        posterior.fitted.points.f, posterior.latent_moments(x)[1], posterior.fitted.points.targets)[1]
    assert kl.standard_error > 0
    sampled = float(values.square().sum().sqrt())
    assert bound.standard_error == pytest.approx((sampled**2 + kl.standard_error**2) ** 0.5, rel=1e-3)


def test_error_of_an_estimate_beside_another_prior_is_a_bound() -> None:
    """The error of Σ_g δ_g tr_g(H⁻¹) is at most that of the estimate times the largest ratio of the priors."""
    model, x, y, prior = problem()
    precision = ntkl.laplace(model, (x, y), ntkl.Categorical(), prior,
                             ntkl.Iterative(rank=4, probes=4)).posterior_precision
    other = ntkl.GaussianPrior(1.0, groups="layer")
    given = ntkl.gaussian_posterior(model, (x, y), ntkl.Categorical(), other, precision=precision)
    with torch.no_grad():
        given.prior.log_precision.copy_(torch.tensor([2.0, 0.5]).log())
    found = given.posterior_precision
    largest = 2.0 / float(precision.prior_precision[0])
    assert precision.effective_error > 0
    assert found.effective_error == pytest.approx(largest * precision.effective_error, rel=1e-6)


def test_results_print_their_terms() -> None:
    model, x, y, prior = problem()
    posterior = ntkl.laplace(model, (x, y), ntkl.Categorical(), prior, "full")
    assert "±" in str(posterior.elbo()) and "glm: log likelihood" in str(posterior.elbo())
    assert "effective parameters" in str(posterior.kl()) and "±" not in str(posterior.kl())


# --- Gaussians found elsewhere


def given_of(posterior: ntkl.Posterior, model: nn.Module, data: Any, likelihood: ntkl.Likelihood,
             prior: ntkl.GaussianPrior, form: str) -> ntkl.Posterior:
    """The posterior's Gaussian, given in one of the forms."""
    precision = posterior.posterior_precision
    matrix = precision.multiply(torch.eye(posterior.num_parameters, dtype=torch.float64))
    return ntkl.gaussian_posterior(model, data, likelihood, prior, precision={
        "matrix": 0.5 * (matrix + matrix.T), "object": precision, "diagonal": matrix.diagonal(),
        "mapping": {name: 0.5 * (matrix + matrix.T)[place, place].diagonal().view(posterior.network.shapes[name])
                    for name, place in posterior.network.shapes.slices().items()},
    }[form])


VERBS: dict[str, Callable[[ntkl.Posterior, Tensor], Any]] = {
    "latent": lambda p, x: p.latent(x[:4]).covariance_matrix,
    "moments": lambda p, x: p.latent_moments(x)[1],
    "outputs": lambda p, x: p.outputs(x),
    "prior": lambda p, x: p.prior_latent(x[:4]).covariance_matrix,
    "glm": lambda p, x: p.predict(x).mean,
    "blr": lambda p, x: p.predict(x, "blr").mean,
    "map": lambda p, x: p.predict(x, "map").mean,
    "nn": lambda p, x: p.predict(x, "nn", 30, generator=torch.Generator().manual_seed(3)).mean,
    "sample": lambda p, x: p.sample(3, generator=torch.Generator().manual_seed(3)),
    "functions": lambda p, x: p.sample(3, x[:4], generator=torch.Generator().manual_seed(3)),
    "jacobian": lambda p, x: p.jacobian(x).dense(p.network.shapes),
    "kl": lambda p, x: p.kl().value,
    "glm bound": lambda p, x: p.elbo().value,
    "nn bound": lambda p, x: p.elbo("nn", samples=20, x=x).value,
    "log_det": lambda p, x: p.log_det().detach(),
    "log_joint": lambda p, x: p.log_joint().detach(),
    "effective": lambda p, x: p.effective_parameters().double(),
    "bic": lambda p, x: p.bic(effective=True),
    "calibrated": lambda p, x: torch.tensor(p.calibrate((x, labels())).calibration.scale),
}


@pytest.mark.parametrize(("structure", "form"), [
    ("full", "matrix"), ("full", "object"), ("gp", "object"), ("kfac", "object"), ("iterative", "object"),
    ("diag", "diagonal"), ("diag", "mapping"), ("gp", "matrix"),
])
def test_laplace_given_as_a_gaussian_is_laplace(structure: str, form: str) -> None:
    model, x, y, prior = problem()
    posterior = ntkl.laplace(model, (x, y), ntkl.Categorical(1.3), prior, structure)
    given = given_of(posterior, model, (x, y), ntkl.Categorical(1.3), prior, form)
    drawn = ("nn", "sample", "nn bound") if structure == "full" or form == "object" else ()
    for name, verb in VERBS.items():
        if name in ("nn", "sample", "nn bound") and name not in drawn:
            continue  # the same distribution, by other draws
        one, other = verb(given, x), verb(posterior, x)
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


def test_dense_blocks_beside_diagonals() -> None:
    """A mapping of both kinds equals the matrix that it is."""
    model, x, y, prior = problem()
    shapes = {name: p.shape for name, p in model.named_parameters()}
    root = torch.randn(20, 20, generator=torch.Generator().manual_seed(4)).double()
    mapping = {name: torch.rand(shape, generator=torch.Generator().manual_seed(5)).double() + 1
               for name, shape in shapes.items()} | {"0.weight": root @ root.T + torch.eye(20)}
    whole = torch.block_diag(*[value if name == "0.weight" else torch.diag(value.flatten())
                               for name, value in mapping.items()])
    one, other = (ntkl.gaussian_posterior(model, (x, y), ntkl.Categorical(), prior, precision=h)
                  for h in (mapping, whole))
    for name in ("latent", "moments", "kl", "glm bound", "effective", "log_det"):
        torch.testing.assert_close(VERBS[name](one, x), VERBS[name](other, x), rtol=1e-9, atol=1e-9)
    vectors = torch.randn(3, 2, one.num_parameters, generator=torch.Generator().manual_seed(6)).double()
    for verb in ("solve", "multiply"):
        found = getattr(one.posterior_precision, verb)(vectors)
        exact = torch.linalg.inv(whole) if verb == "solve" else whole
        torch.testing.assert_close(found, vectors @ exact, rtol=1e-9, atol=1e-9)
    draws = one.posterior_precision.sample(20_000, torch.Generator().manual_seed(7))
    torch.testing.assert_close(draws.T @ draws / 20_000, torch.linalg.inv(whole), rtol=0.1, atol=0.05)


def test_another_prior_changes_the_divergence_alone() -> None:
    model, x, y, prior = problem()
    posterior = ntkl.laplace(model, (x, y), ntkl.Categorical(), prior, "full")
    for form in ("object", "matrix"):
        given = given_of(posterior, model, (x, y), ntkl.Categorical(), prior, form)
        before = given.latent_moments(x)[1]
        with torch.no_grad():
            given.prior.log_precision += torch.tensor([0.5, -1.0])
        h = posterior.posterior_precision.multiply(torch.eye(given.num_parameters).double())
        theta = given.network.theta
        wanted = closed(theta, torch.linalg.inv(h), torch.zeros_like(theta), given.prior.flat_precision().detach())
        torch.testing.assert_close(given.kl().value, wanted, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(given.latent_moments(x)[1], before, rtol=0, atol=0)


@pytest.mark.parametrize("structure", ["gp", ntkl.KFAC(damped=True)], ids=str)
@pytest.mark.parametrize("groups", [("all", "layer"), ("layer", "all")])
def test_effective_parameters_in_other_groups(structure: Any, groups: tuple[str, str]) -> None:
    """The groups of the given precision's own prior may be finer or coarser than those of the posterior's."""
    model, x, y, _ = problem()
    own, other = (ntkl.GaussianPrior(0.7, groups=name) for name in groups)
    precision = ntkl.laplace(model, (x, y), ntkl.Categorical(), own, structure).posterior_precision
    given = ntkl.gaussian_posterior(model, (x, y), ntkl.Categorical(), other, precision=precision)
    with torch.no_grad():
        given.prior.log_precision += 0.3
    p0, place = given.prior.flat_precision().detach(), given.posterior_precision.groups
    variances = precision.solve(torch.eye(len(p0), dtype=torch.float64)).diagonal()
    wanted = torch.zeros(len(given.prior.log_precision), dtype=torch.float64).index_add_(0, place, 1 - p0 * variances)
    torch.testing.assert_close(given.effective_parameters().double(), wanted, rtol=1e-9, atol=1e-9)


FORMS: dict[str, Any] = {"matrix": "matrix", "mapping": "mapping", "rows": "gp", "kfac": "kfac", "ekfac": "ekfac",
                         "damped": ntkl.KFAC(damped=True)}


@pytest.mark.parametrize(("form", "groups"), [  # every form with two of three groupings
    (form, ["all", "tensor", {"last": ["2"], "first": ["0"]}][(number + step) % 3])
    for number, form in enumerate(FORMS) for step in (0, 1)
], ids=str)
def test_checkpoints_of_given_gaussians(form: str, groups: Any, tmp_path: Path) -> None:
    """A tensor, and the factorized precision of a structure, in the prior groups of that structure."""
    model, x, y, prior = problem()
    own = ntkl.GaussianPrior(0.7, groups=groups)
    if form in ("matrix", "mapping"):
        posterior = ntkl.laplace(model, (x, y), ntkl.Categorical(), own, "full")
        given = given_of(posterior, model, (x, y), ntkl.Categorical(), prior, form)
    else:
        precision = ntkl.laplace(model, (x, y), ntkl.Categorical(), own, FORMS[form]).posterior_precision
        given = ntkl.gaussian_posterior(model, (x, y), ntkl.Categorical(), prior, precision=precision)
    given.save(tmp_path / "q.pt", include_data=True)
    alone, whole = ntkl.load(tmp_path / "q.pt", model), ntkl.load(tmp_path / "q.pt", model, (x, y))
    for name in ("moments", "kl", "sample", "glm"):
        for other in (alone, whole):
            torch.testing.assert_close(VERBS[name](other, x), VERBS[name](given, x), rtol=1e-12, atol=1e-12)
    for used in (alone, whole):
        torch.testing.assert_close(used.effective_parameters(), given.effective_parameters(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(whole.elbo().value, given.elbo().value, rtol=1e-12, atol=0)
    small = whole.to(dtype=torch.float32)
    assert small.latent_moments(x)[1].dtype == torch.float32
    torch.testing.assert_close(small.latent_moments(x)[1].double(), given.latent_moments(x)[1], rtol=1e-4, atol=1e-5)


def test_a_checkpoint_without_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, x, y, prior = problem()
    posterior = ntkl.laplace(model, (x, y), ntkl.Categorical(), prior, "full")
    given_of(posterior, model, (x, y), ntkl.Categorical(), prior, "matrix").save("q.pt")
    with pytest.raises(ntkl.UnsupportedError, match="training data"):
        ntkl.load("q.pt", model).elbo()
    rows = ntkl.laplace(model, (x, y), ntkl.Categorical(), prior, "gp").posterior_precision
    with refused(ntkl.UnsupportedError, "include_data=True", "False", "rows of J"):
        ntkl.gaussian_posterior(model, (x, y), ntkl.Categorical(), prior, precision=rows).save("rows.pt")


def test_objects_that_cannot_be_saved_say_so(tmp_path: Path) -> None:
    model, x, y, prior = problem()
    given = ntkl.gaussian_posterior(model, (x, y), ntkl.Categorical(), prior, precision=ntkl.laplace(
        model, (x, y), ntkl.Categorical(), prior, "iterative").posterior_precision)
    with refused(ntkl.UnsupportedError, "tensors, to save", "IterativePrecision", "tensor"):
        given.save(tmp_path / "q.pt")
    with refused(ntkl.UnsupportedError, "tensors, to move", "IterativePrecision", "tensor"):
        given.to(dtype=torch.float32)
    assert given.to(dtype=torch.float64) is given


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "evidence_curve": ([1.0],), "conditional_log_marginal_likelihood": (3,), "explain": (inputs(),),
    "removal_effects": (inputs(),), "remove": ([0],), "reweight": ([0], 2.0), "relabel": ([0], [1]),
    "add": (inputs(1), labels(1)), "merge": (None,), "condition": ((inputs(), labels()),), "subset": ([0],),
    "retrain": ((inputs(), labels()),), "compress": (3,),
}


def test_what_needs_the_curvature_of_the_data_is_refused() -> None:
    model, x, y, prior = problem()
    given = ntkl.gaussian_posterior(model, (x, y), ntkl.Categorical(), prior, precision=torch.ones(43))
    words = "Laplace posterior", "found elsewhere", "elbo.*importance_evidence"
    for verb in _OF_LAPLACE:
        with refused(ntkl.UnsupportedError, *words):
            getattr(given, verb)(*ARGUMENTS.get(verb, ()))
    for call in (lambda: given.latent(x, mean="posterior"), lambda: given.fit_predictive(),
                 lambda: given.predict(x, mean="posterior")):
        with refused(ntkl.UnsupportedError, *words):
            call()
    with refused(ntkl.UnsupportedError, "held-out data", "gaussian", "Pass data"):
        given.predict_set(x)
    assert given.predict_set(x, data=(x, y)).contains(y).shape == y.shape
    assert "structure='gaussian'" in repr(given)


def test_bad_precisions() -> None:
    model, x, y, prior = problem()

    def give(precision: Any, **options: Any) -> None:
        ntkl.gaussian_posterior(model, (x, y), ntkl.Categorical(), prior, precision=precision, **options)

    eye, wrong = torch.eye(43).double(), torch.eye(43).double()
    wrong[0, 1] = 0.5
    nan = torch.full((43,), torch.nan)
    mapping = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    other = ntkl.laplace(network(2), (x, y % 2), ntkl.Categorical(), prior=None, structure="full")
    error = ntkl.HyperparameterError
    for precision, kind, words in (
        (torch.ones(42), error, (r"\(43, 43\) or \(43,\)", r"\(42,\)", "flattened")),
        (torch.ones(43, dtype=torch.int64), error, ("float64", "int64", "Convert")),
        (torch.cat([torch.ones(42), -torch.ones(1)]), error, ("positive finite", "-1 at entry 42", "variances")),
        (nan, error, ("positive finite", "nan", "variances")),
        (wrong, error, ("symmetric", "0.5", "rounding")),
        (eye.to_sparse(), error, ("dense", "sparse", "to_dense")),
        (torch.ones(43, device="meta"), error, ("dense", "meta", "to_dense")),
        (eye * torch.nan, error, ("finite numbers", "NaN", "Check")),
        (-eye, ntkl.NumericalError, ("positive definite", "Cholesky", "inverse of a covariance")),
        ({k: v for k, v in mapping.items() if k != "0.bias"}, error, ("0.weight", "none for 0.bias", "Name")),
        (mapping | {"extra": torch.ones(1)}, error, ("0.weight", "extra", "Name")),
        (mapping | {"0.bias": torch.ones(4)}, error, (r"0\.bias.*\(5,\)", r"\(4,\)", "flattened")),
        (mapping | {"0.bias": 1.0}, ntkl.UnsupportedError, ("tensor", "float", "torch")),
        (other.posterior_precision, error, ("parameters", "Size", "same network")),
        (other, ntkl.UnsupportedError, ("PosteriorPrecision", "Posterior", "posterior_precision")),
        (2.0, ntkl.UnsupportedError, ("PosteriorPrecision", "float", "Pass")),
    ):
        with refused(kind, *words):
            give(precision)
    single = ntkl.laplace(model, (x, y), ntkl.Categorical(), prior, "full", dtype=torch.float32)
    with refused(error, "float64", "float32", "Move"):
        give(single.posterior_precision)
    with refused(ntkl.MemoryBudgetError, "factor of precision", "14.4 KiB", "diagonal"):
        give(eye, settings=ntkl.Settings(memory_budget=1000))
    with refused(ntkl.UnsupportedError, "precision of a Gaussian", "none", "gaussian_posterior"):
        ntkl.laplace(model, (x, y), ntkl.Categorical(), prior, "gaussian")
    assert "gaussian" not in ntkl.structures.structure_names()


# --- columns of comparisons


@pytest.mark.slow
def test_bounds_in_a_comparison_of_models() -> None:
    """Asked for, they stand beside the evidence; a Gaussian that is no Laplace approximation has them alone."""
    model, x, y, prior = problem()
    data, likelihood = (x, y), ntkl.Categorical()
    laplace = ntkl.laplace(model, data, likelihood, prior, "full")
    given = ntkl.gaussian_posterior(model, data, likelihood, prior, precision=torch.full((43,), 30.0))
    found = ntkl.compare_models({"laplace": laplace, "given": given}, (x, y), scores=("evidence", "loo", "elbo"))
    assert found["given"].evidence is None and found["given"].loo is None and found["given"].bic is None
    assert "Laplace posterior" in found["given"].loo_note
    assert found["given"].elbo == float(given.elbo()) and found["laplace"].elbo == float(laplace.elbo())
    assert found["laplace"].elbo_error == laplace.elbo().standard_error
    assert found["laplace"].evidence == float(laplace.log_marginal_likelihood())
    assert " ELBO " in str(found) and "BIC" not in str(found) and "conditional" not in str(found)
    both = ntkl.compare_models([given], scores=["elbo_nn"])
    assert both.rows[0].elbo_nn == float(given.elbo("nn")) and both.rows[0].elbo is None
    usual = ntkl.compare_models([laplace, given])
    assert usual["model 2"].conditional is None and "ELBO" not in str(usual)
    with refused(ntkl.UnsupportedError, "scores.*elbo_nn", "'elbow'", "some of them"):
        ntkl.compare_models([laplace], scores=["elbow"])
    with refused(ntkl.UnsupportedError, "scores", "'elbo'", "list"):
        ntkl.compare_models([laplace], scores="elbo")


def test_bounds_in_a_comparison_of_structures() -> None:
    model, x, y, prior = problem()
    arguments = model, (x, y), ntkl.Categorical(), prior
    found = ntkl.compare_evidence(*arguments, structures=["full", "kfac"], scores=["elbo"])
    for row in found.rows:
        wanted = ntkl.laplace(*arguments, row.structure).elbo()
        assert row.elbo == pytest.approx(float(wanted), rel=1e-12) and row.elbo_error == wanted.standard_error
    assert "ELBO ±" in str(found)
    assert "ELBO" not in str(ntkl.compare_evidence(*arguments, structures=["full"]))
    with refused(ntkl.UnsupportedError, "scores", "loo", "Pass"):
        ntkl.compare_evidence(*arguments, scores=["loo"])
