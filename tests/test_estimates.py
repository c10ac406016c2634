"""Evidences by sampling: importance weights and annealing against conjugate models, quadrature and each other."""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import ntk_laplace as ntkl
from ntk_laplace.model.network import ManyWeights
from ntk_laplace.model.network import Network as FrozenNetwork
from ntk_laplace.posterior.estimates import effective_samples, log_mean, pareto_shape, standard_error
from ntk_laplace.posterior.estimates.gaussians import posterior_gaussian, prior_gaussian
from ntk_laplace.posterior.estimates.hamiltonian import HamiltonianPath
from ntk_laplace.posterior.estimates.paths import schedule
from ntk_laplace.posterior.estimates.slices import SlicedPath
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.reduction import SingleProcess
from ntk_laplace.structures.weight_likelihood import LinearizedLikelihood, NetworkLikelihood
from refusals import refused, without_data
from registry import LIKELIHOODS, NETWORKS, problem, targets
from registry_cases import offered
from unregistered import Eigen, EigenPrecision

STRUCTURES = ("gp", "full", "kfac", "ekfac", "diag", "iterative", "nystrom", ntkl.KFAC(damped=True), ntkl.INF(rank=1),
              Eigen())


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sines(n: int = 20) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-2, 2, n, dtype=torch.float64).unsqueeze(1)
    return x, torch.sin(2 * x) + 0.2 * torch.randn(n, 1, generator=seeded(3), dtype=torch.float64)


def perceptron(*sizes: int, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    torch.manual_seed(4)
    layers: list[nn.Module] = []
    for i, o in itertools.pairwise(sizes):
        layers += [nn.Linear(i, o), activation()]
    return nn.Sequential(*layers[:-1]).double()


def optimum(network: nn.Module, log_likelihood: Callable[[Tensor], Tensor], x: Tensor, precision: float) -> nn.Module:
    optimizer = torch.optim.LBFGS(network.parameters(), max_iter=500, tolerance_change=0, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        energy = 0.5 * precision * sum((p**2).sum() for p in network.parameters())
        (loss := energy - log_likelihood(network(x))).backward()
        return loss

    optimizer.step(closure)
    return network


def logistic(n: int = 15, seed: int = 0) -> tuple[ntkl.Posterior, Tensor, Tensor]:
    """Logistic regression with two parameters, at its optimum."""
    x = torch.randn(n, 2, generator=seeded(seed), dtype=torch.float64)
    y = (torch.rand(n, 1, generator=seeded(seed + 1), dtype=torch.float64) < torch.sigmoid(2 * x[:, :1])).double()
    torch.manual_seed(0)
    network = nn.Linear(2, 1, bias=False).double()
    optimum(network, lambda f: -nn.functional.binary_cross_entropy_with_logits(f, y, reduction="sum"), x, 0.5)
    return ntkl.laplace(network, (x, y), ntkl.Bernoulli(), ntkl.GaussianPrior(0.5), "full"), x, y


def quadrature(log_density: Callable[[np.ndarray], np.ndarray], width: float = 15.0, count: int = 401) -> float:
    """Log integral of exp(log_density) over the plane, by the trapezoidal rule."""
    line = np.linspace(-width, width, count)
    values = log_density(np.stack(np.meshgrid(line, line, indexing="ij"), -1))
    return float(np.log(np.exp(values - values.max()).sum()) + values.max() + 2 * np.log(line[1] - line[0]))


def by_quadrature(x: Tensor, y: Tensor) -> float:
    xs, ys = x.numpy(), y.numpy()[:, 0]

    def log_density(w: np.ndarray) -> np.ndarray:
        f = w @ xs.T
        return (ys * f - np.logaddexp(0, f)).sum(-1) - 0.25 * (w**2).sum(-1) + np.log(0.5 / (2 * np.pi))

    return quadrature(log_density)


# ------------------------------------------------------------------------------------------------ H times vectors


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
@pytest.mark.parametrize("groups", ["all", "layer"])
@pytest.mark.filterwarnings("ignore:INF's low-rank part")
def test_a_product_undoes_a_solve(structure: Any, groups: str) -> None:
    x, y = torch.randn(15, 3).double(), torch.randint(0, 3, (15,))
    prior = ntkl.GaussianPrior(2.0, groups=groups)
    posterior = ntkl.laplace(perceptron(3, 5, 3), (x, y), ntkl.Categorical(), prior, structure)
    vectors = torch.randn(2, 3, posterior.num_parameters).double()
    precision = posterior.posterior_precision
    torch.testing.assert_close(precision.multiply(precision.solve(vectors)), vectors, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(precision.multiply(precision.solve(vectors)[0, 0]), vectors[0, 0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("panel", [3, 768])
def test_a_product_undoes_a_solve_in_panels_and_after_a_change(panel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "PANEL_ROWS", panel)
    x, y = torch.randn(15, 3).double(), torch.randint(0, 3, (15,))
    for structure in ("full", "kfac"):
        posterior = ntkl.laplace(perceptron(3, 5, 3), (x, y), ntkl.Categorical(), structure=structure).remove([0, 3])
        vectors = torch.randn(3, posterior.num_parameters).double()
        precision = posterior.posterior_precision
        torch.testing.assert_close(precision.multiply(precision.solve(vectors)), vectors, rtol=1e-9, atol=1e-9)


# ------------------------------------------------------------------------------------------------ weights


@pytest.mark.parametrize("shape", [0.2, 0.5, 0.9, -0.3])
def test_pareto_shape_of_known_tails(shape: float) -> None:
    """Quantiles of a generalized Pareto distribution, whose tails have its shape; 1,342 of them are looked at."""
    p = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    x = ((1 - p) ** -shape - 1) / shape
    order = torch.randperm(len(x))
    found = pareto_shape((x + 1.0).log()[order])
    shrunk = (1342 * shape + 5.0) / 1352
    assert found == pytest.approx(shrunk, abs=0.02)
    assert pareto_shape((x + 1.0).log() + 500.0) == pytest.approx(found, abs=1e-9)


def test_pareto_shape_where_there_is_none() -> None:
    assert pareto_shape(torch.full((100,), -3.0)) == -math.inf
    assert pareto_shape(torch.full((1000,), 1e5) + 1e-8 * torch.randn(1000).double()) == -math.inf
    assert math.isnan(pareto_shape(torch.randn(20).double()))
    assert math.isnan(pareto_shape(torch.full((100,), -torch.inf)))
    assert pareto_shape(torch.full((1000,), 60.0) + 1e-5 * torch.randn(1000)) == -math.inf  # of float32
    assert pareto_shape(torch.full((1000,), 60.0).double() + 1e-5 * torch.randn(1000)) > -math.inf
    ties = torch.cat([torch.zeros(90), torch.linspace(1, 2, 10)]).double()
    assert math.isfinite(pareto_shape(ties))


def test_effective_samples_and_their_error() -> None:
    log_weights = torch.randn(500).double() - 900.0
    weights = np.exp(log_weights.numpy() + 900.0)
    assert log_mean(log_weights) == pytest.approx(np.log(weights.mean()) - 900.0, abs=1e-12)
    assert effective_samples(log_weights) == pytest.approx(weights.sum() ** 2 / (weights**2).sum(), rel=1e-12)
    error = weights.std(ddof=1) / weights.mean() / np.sqrt(500)
    assert standard_error(log_weights) == pytest.approx(error, rel=1e-12)
    assert standard_error(torch.zeros(1)) == math.inf


# ------------------------------------------------------------------------------------------------ conjugate models


def conjugate(structure: Any, case: str) -> ntkl.Posterior:
    """A linear or a linearized model with a Gaussian likelihood, away from its optimum."""
    x, y = sines()
    network: nn.Module = nn.Linear(1, 1).double() if case == "linear" else perceptron(1, 3, 1)
    likelihood: ntkl.Likelihood = ntkl.Gaussian(0.1)
    data: tuple[Tensor, ...] = x, y
    if case == "weighted":
        data = x, y, torch.linspace(0.0, 2.0, len(x), dtype=torch.float64)
    elif case == "tempered":
        likelihood = ntkl.Tempered(ntkl.Gaussian(0.1), 0.3)
    elif case == "noise of each point":
        likelihood = ntkl.Gaussian(torch.linspace(0.1, 0.5, len(x), dtype=torch.float64))
    elif case == "two outputs":
        network, data = perceptron(1, 3, 2), (x, torch.cat([y, y**2], 1))
    elif case == "few points":
        data = x[:4], y[:4]
    prior = ntkl.GaussianPrior(0.7, mean=0.2, groups="layer")
    return ntkl.laplace(network, data, likelihood, prior, structure)


CONJUGATE = ("linear", "network", "weighted", "tempered", "noise of each point", "two outputs", "few points")


@pytest.mark.parametrize("structure", ["gp", "full", Eigen()], ids=str)
@pytest.mark.parametrize("case", CONJUGATE)
def test_weights_of_a_conjugate_model_are_equal(case: str, structure: Any) -> None:
    """Identity 7 for importance sampling and for annealing with one temperature, in f and in weights."""
    posterior = conjugate(structure, case)
    exact = float(posterior.evidence(correction=True))
    for found in (
        posterior.importance_evidence(50, inflation=1.0, model="glm", generator=seeded()),
        posterior.annealed_evidence(1, 30, model="glm", bounds=True, generator=seeded()),
        posterior.annealed_evidence(4, 30, model="glm", generator=seeded()),
    ):
        assert float(found.log_weights.std()) < 1e-9 and not found.log_weights.requires_grad
        assert float(found) == pytest.approx(exact, abs=1e-9)
        assert found.trusted and found.khat == -math.inf and found.standard_error == 0.0 and "exact" in found.words
    assert posterior.annealed_evidence(1, 30, model="glm", bounds=True).upper == pytest.approx(exact, abs=1e-9)


@pytest.mark.parametrize("structure", ["gp", "full"])
def test_hamiltonian_chains_of_a_conjugate_model(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The linearized model in weights, where its outputs are too many; from the posterior all weights stay equal."""
    posterior = conjugate(structure, "few points")
    exact = float(posterior.evidence(correction=True))
    monkeypatch.setattr(tuning, "SLICED_OUTPUTS", 0)
    found = posterior.annealed_evidence(3, 30, model="glm", bounds=True, generator=seeded())
    assert "Hamiltonian" in found.sampler and found.value == pytest.approx(exact, abs=1e-9)
    assert found.upper == pytest.approx(exact, abs=1e-9) and found.acceptance is not None
    written = tuning.DENSE_METRIC
    monkeypatch.setattr(tuning, "DENSE_METRIC", 0)  # the structure's own solves, draws and products
    own = posterior.annealed_evidence(3, 30, model="glm", leapfrog=2, generator=seeded())
    assert own.value == pytest.approx(exact, abs=1e-9) and own.acceptance == pytest.approx(found.acceptance, abs=0.15)
    assert written > 0


@pytest.mark.parametrize("structure", ["kfac", "diag"])
def test_any_structure_proposes(structure: str) -> None:
    """Its H only proposes: the linear model's evidence comes out, whatever the structure's own evidence is."""
    x = torch.randn(30, 2, generator=seeded(1), dtype=torch.float64)
    y = x @ torch.tensor([[1.0, 0.3], [0.2, -0.5]]).double() + 0.3 * torch.randn(30, 2, generator=seeded(2)).double()
    network = nn.Linear(2, 2).double()
    options = (network, (x, y), ntkl.Gaussian(0.1), ntkl.GaussianPrior(1.0))
    exact = float(ntkl.laplace(*options, "full").evidence(True))
    network = optimum(network, lambda f: -5.0 * (f - y).square().sum(), x, 1.0)
    posterior = ntkl.laplace(*options, structure)
    for model in ("nn", "glm"):
        found = posterior.importance_evidence(2000, 1.2, model, generator=seeded())
        assert found.trusted and abs(found.value - exact) < 3 * found.standard_error < 0.3
    assert abs(posterior.annealed_evidence(1, 30, model="glm").value - exact) < 1e-9


def test_what_inflation_alone_costs() -> None:
    posterior = conjugate("full", "linear")
    for inflation in (1.2, 1.6):
        found = posterior.importance_evidence(20_000, inflation, "glm", generator=seeded())
        assert found.ess / 20_000 == pytest.approx((math.sqrt(2 * inflation - 1) / inflation) ** 2, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("in_f", [True, False])
def test_bounds_from_the_prior(in_f: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = conjugate("full", "linear")
    exact = float(posterior.evidence(correction=True))
    if not in_f:
        monkeypatch.setattr(tuning, "SLICED_OUTPUTS", 0)
    found = posterior.annealed_evidence(50, 100, "prior", "glm", bounds=True, leapfrog=4, generator=seeded(1))
    assert found.upper is not None and found.upper_error is not None
    assert found.lower - 2 * found.lower_error < exact < found.upper + 2 * found.upper_error
    assert found.lower + 0.1 < found.upper < found.lower + 30
    assert abs(found.value - exact) < 4 * found.standard_error


@pytest.mark.filterwarnings("ignore:the evidence of")  # that two estimates are rough is not asked here
def test_bounds_from_weights_that_made_the_data() -> None:
    """A draw of the posterior of synthetic data; two chains back from two of them."""
    x, _ = sines(10)
    network = nn.Linear(1, 1).double()
    theta = torch.tensor([0.4, -0.8]).double()
    y = x * theta[0] + theta[1] + 0.3 * torch.randn(10, 1, generator=seeded(5)).double()
    posterior = ntkl.laplace(network, (x, y), ntkl.Gaussian(0.09), ntkl.GaussianPrior(1.0), "full")
    exact = float(posterior.evidence(correction=True))
    for model in ("nn", "glm"):
        found = posterior.annealed_evidence(12, 40, "prior", model, True, leapfrog=4, exact_draws=theta,
                                            generator=seeded())
        assert found.upper is not None and math.isnan(found.upper_error or 0.0)
        assert found.lower - 2 * found.lower_error < exact and abs(found.upper - exact) < 6.0


# ------------------------------------------------------------------------------------------------ quadrature


@pytest.mark.slow
def test_logistic_regression_against_quadrature(seed: int = 0) -> None:
    """Identity 7: four estimates of one number; the study over 100 seeds is a benchmark."""
    posterior, x, y = logistic(seed=seed)
    exact = by_quadrature(x, y)
    estimates = [
        posterior.importance_evidence(2000, generator=seeded(seed)),
        posterior.importance_evidence(2000, model="glm", generator=seeded(seed)),
        posterior.annealed_evidence(10, 64, leapfrog=3, generator=seeded(seed)),
        posterior.annealed_evidence(30, 64, "prior", leapfrog=4, generator=seeded(seed)),
        posterior.annealed_evidence(15, 64, "posterior", "glm", generator=seeded(seed)),
        posterior.annealed_evidence(80, 100, "prior", "glm", generator=seeded(seed)),
    ]
    for found in estimates:
        assert found.trusted and found.standard_error < 0.2
        assert abs(found.value - exact) < 3 * found.standard_error, str(found)
    assert abs(float(posterior.evidence()) - exact) > 3 * estimates[0].standard_error  # Laplace's is another number


@pytest.mark.parametrize("likelihood", ["bernoulli", "poisson"])
def test_the_linearized_network_in_f_against_quadrature(likelihood: str) -> None:
    """Identity 8: f at two points under N(m, K), by a kernel and a mean of finite differences."""
    x, y = torch.tensor([[0.3], [-1.1]]).double(), torch.tensor([[1.0], [2.0 if likelihood == "poisson" else 0.0]])
    network, precision = perceptron(1, 3, 1), 0.6
    names = [name for name, _ in network.named_parameters()]
    theta = torch.cat([p.detach().flatten() for p in network.parameters()])

    def outputs(weights: Tensor) -> Tensor:
        parts = weights.split([p.numel() for p in network.parameters()])
        values = {n: w.view_as(p) for n, w, p in zip(names, parts, network.parameters(), strict=True)}
        return functional_call(network, values, (x,))[:, 0].detach()

    step = 1e-5 * torch.eye(len(theta)).double()
    jacobian = torch.stack([(outputs(theta + e) - outputs(theta - e)) / 2e-5 for e in step], 1).numpy()
    mean, kernel = outputs(theta).numpy() - jacobian @ theta.numpy(), jacobian @ jacobian.T / precision
    t = y.double().numpy()[:, 0]

    def log_density(f: np.ndarray) -> np.ndarray:
        away = f - mean
        prior = -0.5 * (away @ np.linalg.inv(kernel) * away).sum(-1) - 0.5 * np.linalg.slogdet(2 * np.pi * kernel)[1]
        if likelihood == "bernoulli":
            return prior + (t * f - np.logaddexp(0, f)).sum(-1)
        return prior + (t * f - np.exp(f)).sum(-1) - math.log(2.0)  # log 1! + log 2!

    exact = quadrature(log_density, 25.0, 1001)
    prior, model = ntkl.GaussianPrior(precision), LIKELIHOODS[likelihood].build()
    posterior = ntkl.laplace(network, (x, y.double()), model, prior, "gp")
    for start in ("posterior", "prior"):
        found = posterior.annealed_evidence(60, 100, start, "glm", generator=seeded(2))
        assert found.trusted and "elliptical" in found.sampler and found.acceptance is None
        assert abs(found.value - exact) < 3 * found.standard_error < 0.5, f"{found} {exact}"


@pytest.mark.slow
def test_a_tanh_unit_has_two_modes() -> None:
    """Identity 7: the prior's chains see both, importance sampling one; the study with 1, 2, 3 units is a benchmark."""
    x, y = sines(25)
    network = perceptron(1, 1, 1)
    optimum(network, lambda f: -2.5 * (f - y).square().sum(), x, 1.0)
    posterior = ntkl.laplace(network, (x, y), ntkl.Gaussian(0.2), ntkl.GaussianPrior(1.0), "full")
    one = posterior.importance_evidence(5000, 1.5, generator=seeded())
    both = posterior.annealed_evidence(60, 100, "prior", leapfrog=4, generator=seeded())
    assert one.symmetry == both.symmetry == pytest.approx(math.log(2.0)) and "are not added" in str(one)
    assert both.trusted and abs(both.value - one.value - one.symmetry) < 3 * both.standard_error < 0.8
    near = posterior.annealed_evidence(15, 80, leapfrog=4, generator=seeded(1))
    assert abs(near.value - one.value) < 4 * math.hypot(near.standard_error, one.standard_error)


# ------------------------------------------------------------------------------------------------ transitions


@pytest.mark.parametrize("sampler", ["hamiltonian", "slices", "slices from the posterior"])
def test_transitions_leave_their_target_invariant(sampler: str) -> None:
    """Exact draws of a Gaussian posterior stay exact: their mean and covariance, after 20 transitions."""
    posterior = conjugate("full", "linear")
    fitted, count = posterior.fitted, 2000
    target = posterior_gaussian(fitted, fitted.theta - fitted.precision.solve(fitted.joint_gradient()))
    start = target.draws(count, seeded())
    path: Any
    if sampler == "hamiltonian":
        prior = prior_gaussian(fitted)
        path = HamiltonianPath(LinearizedLikelihood(fitted, count), prior, prior, 4)
        path.steps = torch.tensor([0.05])
    else:
        path = SlicedPath(fitted, "posterior" if "from" in sampler else "prior")
    state = path.at_weights(start)
    first = state
    for number in range(20):
        state = path.move(state, 1, 1.0, seeded(number + 1))
    rows = posterior.jacobian(sines()[0]).dense(posterior.network.shapes)[0]
    if sampler == "hamiltonian":
        assert 0.6 < min(path.acceptances) < 0.995
        draws, mean, covariance = state.theta, target.mean, fitted.precision.solve(torch.eye(2).double())
        torch.testing.assert_close(state.gain, path.at_weights(draws).gain)
        assert not torch.equal(draws, start)
    else:
        assert float((state.f - first.f).abs().mean()) > 0.01
        draws = torch.linalg.lstsq(rows, (state.f[:, :, 0] - posterior.f[:, 0]).T).solution.T + fitted.theta
        mean, covariance = target.mean, fitted.precision.solve(torch.eye(2).double())
    white = (draws - mean) @ torch.linalg.inv(torch.linalg.cholesky(covariance)).T
    assert float(white.mean(0).abs().max()) < 4 / count**0.5
    assert float((white.T @ white / count - torch.eye(2)).abs().max()) < 4 * (2 / count) ** 0.5


def test_energy_is_conserved_to_second_order() -> None:
    posterior, _, _ = logistic()
    fitted = posterior.fitted
    base = posterior_gaussian(fitted, fitted.theta, dense=True)
    rates = []
    for step in (0.4, 0.2, 0.1):
        path = HamiltonianPath(NetworkLikelihood.of(fitted, None, 200), prior_gaussian(fitted), base, round(0.8 / step))
        path.steps = torch.tensor([step])
        path.move(path.start(200, seeded()), 1, 0.7, seeded(1))
        rates.append(1.0 - path.acceptances[0])
    assert 0 < rates[1] < 0.35 * rates[0] and 0 < rates[2] < 0.35 * rates[1]


def test_steps_are_adapted_before_the_run() -> None:
    posterior, _, _ = logistic()
    fitted = posterior.fitted
    prior = prior_gaussian(fitted)
    path = HamiltonianPath(NetworkLikelihood.of(fitted, None, 64), prior, prior, 4)
    betas = schedule(20)
    assert float(betas[0]) == 0.0 and float(betas[-1]) == 1.0 and bool((betas.diff() > 0).all())
    path.adapt(betas, 64, seeded(), False)
    assert path.steps.shape == (19,) and path.acceptances == []
    kept, state = path.steps.clone(), path.start(64, seeded(1))
    for number in range(1, 20):
        state = path.move(state, number, float(betas[number]), seeded(number))
    told = path.told()
    assert torch.equal(path.steps, kept) and 0.65 < told["acceptance"] < 0.95 and told["stuck"] == 0


def test_chains_that_diverge_are_told() -> None:
    posterior, _, _ = logistic()
    fitted = posterior.fitted
    path = HamiltonianPath(NetworkLikelihood.of(fitted, None, 30), prior_gaussian(fitted), prior_gaussian(fitted), 8)
    path.steps = torch.full((1,), 1e4)
    state = path.start(30, seeded())
    after = path.move(state, 1, 1.0, seeded(1))
    told = path.told()
    assert told["diverged"] == 1.0 and told["stuck"] == 30 and told["acceptance"] == 0.0
    assert torch.equal(after.theta, state.theta)
    found = posterior.annealed_evidence(5, 30, generator=seeded())
    words = type(found)(**{**vars(found), "stuck": 3, "diverged": 0.25}).words
    assert "3 of 30 chains were stuck" in words and "25% of the trajectories diverged" in words


# ------------------------------------------------------------------------------------------------ many weights


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.filterwarnings("ignore:torch.func.vmap does not evaluate", "ignore:There is a performance drop",
                            "ignore:no factor rule")
def test_every_network_at_many_weights(name: str) -> None:
    """Values and gradients against the network at one value after the other, with its own autograd."""
    case = problem(name)
    likelihood = LIKELIHOODS[offered(name)[0]]
    y = targets(likelihood, case)
    posterior = ntkl.laplace(case.network, (case.x, y), likelihood.build(), structure="diag")
    fitted, network = posterior.fitted, posterior.network
    thetas = fitted.theta + 0.05 * torch.randn(3, posterior.num_parameters, generator=seeded()).to(fitted.theta)
    values, gradients = NetworkLikelihood.of(fitted, None, 3).values_and_gradients(thetas)
    double = case.case.dtype == torch.float64
    for theta, value, gradient in zip(thetas, values, gradients, strict=True):
        with network.with_theta(theta.to(network.dtype)):
            f = network.evaluate(case.x)
            expected = posterior.likelihood.log_prob(f.double(), posterior.targets).sum()
            found = torch.autograd.grad(expected, list(network.parameters.values()), allow_unused=True)
        flat = torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten()
                          for g, p in zip(found, network.parameters.values(), strict=True)])
        torch.testing.assert_close(value, expected.detach().to(value), rtol=1e-9 if double else 1e-3, atol=1e-9)
        scale = float(flat.abs().max()) + 1e-12
        assert float((gradient - flat.to(gradient)).abs().max()) < (1e-9 if double else 2e-2) * scale


class Stateful(nn.Module):
    """Looks at a value, which vmap does not allow."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (1.0 if float(self.linear.bias.detach()[0]) < 1e6 else 2.0)


class Wordless(Stateful):
    """Refuses tensors of vmap without a message."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return super().forward(x)
        except RuntimeError:
            raise NotImplementedError from None


@pytest.mark.parametrize("kind", [Stateful, Wordless])
@pytest.mark.filterwarnings("ignore:the evidence of")
def test_a_network_that_vmap_does_not_take(kind: type[Stateful]) -> None:
    x, y = sines()
    torch.manual_seed(0)
    network = kind().double()
    plain = network.linear
    options = (x, y), ntkl.Gaussian(0.1), ntkl.GaussianPrior(1.0), "full"
    with pytest.warns(ntkl.NTKLaplaceWarning, match="each is evaluated alone") as told:
        one = ntkl.laplace(network, *options).annealed_evidence(8, 30, "prior", leapfrog=2, generator=seeded())
    assert told[0].filename == __file__
    two = ntkl.laplace(plain, *options).annealed_evidence(8, 30, "prior", leapfrog=2, generator=seeded())
    torch.testing.assert_close(one.log_weights, two.log_weights)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.randn(12, 3).double(), torch.randint(0, 3, (12,))
    y[2] = -100
    weights = torch.linspace(0, 2, 12).double()
    posterior = ntkl.laplace(perceptron(3, 4, 3), (x, y, weights), ntkl.Categorical(), structure="full")
    thetas = posterior.sample(7, generator=seeded())
    whole = NetworkLikelihood.of(posterior.fitted, None, 7).values_and_gradients(thetas)
    few = posterior.importance_evidence(50, model="glm", generator=seeded())
    linear = [posterior.fitted.likelihood.log_prob(
        posterior.f + posterior.jacobian(x).jvp(posterior.network.unflatten(theta - posterior.fitted.theta)),
        posterior.targets) @ weights for theta in thetas]
    torch.testing.assert_close(LinearizedLikelihood(posterior.fitted, 7).values(thetas), torch.stack(linear).detach())
    monkeypatch.setattr(tuning, "WEIGHT_SAMPLE_BYTES", 700)
    for size in (1, 3000, 20_000):
        monkeypatch.setattr(tuning, "CHAIN_BYTES", size)
        parts = NetworkLikelihood.of(posterior.fitted, None, 7).values_and_gradients(thetas)
        torch.testing.assert_close(parts, whole)
        torch.testing.assert_close(NetworkLikelihood.of(posterior.fitted, None, 7).values(thetas), whole[0])
    torch.testing.assert_close(posterior.importance_evidence(50, model="glm", generator=seeded()).log_weights.shape,
                               few.log_weights.shape)


def test_outputs_that_a_likelihood_refuses_have_no_weight() -> None:
    """Log variances out of range, of some chains: the values and slopes of the others stay the same."""
    x, y = sines(5)
    likelihood = ntkl.HeteroscedasticGaussian()
    posterior = ntkl.laplace(nn.Linear(1, 2, bias=False).double(), (x, y), likelihood, structure="full")
    thetas = torch.tensor([[0.2, 0.1], [0.3, 1e6], [0.1, -0.4], [1e4, -1e6]]).double()
    of = NetworkLikelihood.of(posterior.fitted, None, 4)
    values, slopes = of.values_and_gradients(thetas)
    assert values.isfinite().tolist() == [True, False, True, False] and not slopes[1::2].any()
    alone = of.values_and_gradients(thetas[::2])
    torch.testing.assert_close((values[::2], slopes[::2]), alone, rtol=0, atol=0)
    assert torch.equal(of.values(thetas), values) and bool((values[1::2] == -math.inf).all())
    reference = [likelihood.log_prob(x @ theta.view(1, 2), y).sum() for theta in thetas[::2]]
    torch.testing.assert_close(values[::2], torch.stack(reference))


def test_outputs_that_are_not_finite_have_no_weight() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((1,), 1.0))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight.sqrt()

    x, y = sines(6)
    posterior = ntkl.laplace(Root().double(), (x, y), ntkl.Gaussian(0.5), structure="full")
    likelihood = NetworkLikelihood.of(posterior.fitted, None, 2)
    values, gradients = likelihood.values_and_gradients(torch.tensor([[1.5], [-1.0]]).double())
    assert math.isfinite(values[0]) and values[1] == -math.inf and math.isfinite(gradients[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ntkl.NTKLaplaceWarning)
        found = posterior.annealed_evidence(10, 60, "prior", generator=seeded())
    assert math.isfinite(found.value) and bool((found.log_weights == -math.inf).any())


# ------------------------------------------------------------------------------------------------ the report


def test_what_each_approximation_costs() -> None:
    posterior, _, _ = logistic()
    found = posterior.approximation_errors(20, 80, leapfrog=2, generator=seeded())
    assert found.laplace == pytest.approx(float(posterior.evidence(True)))
    assert found.gaussian[0] == pytest.approx(found.linearized.value - found.laplace)
    assert found.linearization[0] == pytest.approx(found.network.value - found.linearized.value)
    # logistic regression is its own linearization
    assert abs(found.linearization[0]) < 3 * found.linearization[1] and found.gaussian[0] > 2 * found.gaussian[1] > 0
    table = found.to_dataframe()
    assert list(table["evidence"]) == ["Laplace", "linearized model", "network"] and bool(table["trusted"].all())
    assert float(table["value"][0] + table["step"][1] + table["step"][2]) == pytest.approx(found.network.value)
    assert "the Gaussian" in str(found) and "the linearization" in str(found) and found.trusted
    axes = found.plot().axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["Laplace", "linearized model", "network"]
    assert len(axes.texts) == 7 and f"{found.laplace:.2f}".replace("-", "\N{MINUS SIGN}") in axes.texts[0].get_text()


@pytest.mark.filterwarnings("ignore:the evidence of the network")
def test_a_gaussian_likelihood_has_no_error_of_the_gaussian() -> None:
    posterior = conjugate("gp", "linear")
    x, _ = sines()
    found = posterior.approximation_errors(5, 30, start="prior", leapfrog=2, x=x, generator=seeded())
    assert found.gaussian[0] == pytest.approx(0.0, abs=1e-9) and found.gaussian[1] == 0.0
    assert "+0.000 ± 0: the Gaussian" in str(found)


def test_the_generator_decides() -> None:
    posterior, _, _ = logistic()
    for ask in (posterior.importance_evidence, functools.partial(posterior.annealed_evidence, 3, 30, leapfrog=1)):
        assert torch.equal(ask(generator=seeded(1)).log_weights, ask(generator=seeded(1)).log_weights)
        assert not torch.equal(ask(generator=seeded(1)).log_weights, ask(generator=seeded(2)).log_weights)
        torch.manual_seed(5)
        one, two = ask().log_weights, ask().log_weights
        torch.manual_seed(5)
        assert torch.equal(ask().log_weights, one) and not torch.equal(one, two)


def test_the_iterative_structure_tells_the_error_of_its_log_determinant() -> None:
    x, y = torch.randn(40, 3).double(), torch.randn(40, 2).double()
    structure = ntkl.Iterative(rank=4, probes=4)
    posterior = ntkl.laplace(perceptron(3, 6, 2), (x, y), ntkl.Gaussian(0.5), structure=structure)
    error = posterior.posterior_precision.standard_error
    found = posterior.importance_evidence(100, 1.0, "glm", generator=seeded())
    assert found.khat == -math.inf and found.standard_error == pytest.approx(0.5 * error) and error > 0


@pytest.mark.parametrize(("sizes", "activation", "expected"), [
    ((1, 3, 1), nn.Tanh, math.log(8 * 6)), ((2, 4, 3, 1), nn.Tanh, math.log(16 * 24 * 8 * 6)),
    ((1, 3, 1), nn.ReLU, math.log(6)), ((1, 1), nn.Tanh, None), ((1, 2, 1), lambda: nn.Softmax(1), None),
])
@pytest.mark.filterwarnings("ignore:the evidence of")
def test_symmetries(sizes: tuple[int, ...], activation: type[nn.Module], expected: float | None) -> None:
    x, y = sines(4)
    network = perceptron(*sizes, activation=activation)
    posterior = ntkl.laplace(network, (x.expand(-1, sizes[0]), y), ntkl.Gaussian(0.1), structure="full")
    found = posterior.importance_evidence(40, model="glm").symmetry
    assert found == (None if expected is None else pytest.approx(expected))


def test_symmetries_that_the_prior_or_the_choice_breaks() -> None:
    x, y = sines(4)
    each = ntkl.GaussianPrior(torch.rand(10) + 1, groups="parameter")
    every: tuple[dict[str, Any], ...] = (
        {"prior": ntkl.GaussianPrior(1.0, mean=0.1)}, {"prior": each}, {"parameters": "last_layer"})
    for options in every:
        posterior = ntkl.laplace(perceptron(1, 3, 1), (x, y), ntkl.Gaussian(0.1), structure="full", **options)
        assert posterior.importance_evidence(40, 1.05, "glm", generator=seeded()).symmetry is None


class Residual(nn.Sequential):
    """A Sequential whose forward is its own."""

    def forward(self, x: Tensor) -> Tensor:
        return self[2](self[1](self[0](x)) + x)


def test_symmetries_that_tied_weights_or_another_forward_break() -> None:
    x, y = sines(4)
    tied, again = perceptron(1, 1, 1, 1), perceptron(1, 1, 1)
    tied[2].weight = tied[0].weight
    for network in (tied, nn.Sequential(*again, *again[1:]), Residual(*perceptron(1, 3, 1))):
        posterior = ntkl.laplace(network, (x, y), ntkl.Gaussian(0.1), structure="full")
        assert posterior.importance_evidence(40, 1.05, "glm", generator=seeded()).symmetry is None


def test_columns_of_comparisons() -> None:
    posterior, x, y = logistic()
    found = ntkl.compare_models({"one": posterior}, scores=("evidence", "importance"))
    row = found["one"]
    exact = by_quadrature(x, y)
    assert row.importance_trusted and abs(row.importance - exact) < 4 * row.importance_error < 0.2
    assert "importance" in str(found) and f"{row.importance:.2f} ±" in str(found)
    arguments = posterior.network.module, (x, y), ntkl.Bernoulli(), ntkl.GaussianPrior(0.5)
    models = {"one": posterior, "two": without_data(ntkl.laplace(*arguments, "gp"))}
    with refused(ntkl.DataError, "keep their training inputs, for importance", "two without", "with their data"):
        ntkl.compare_models(models, scores=["importance"])
    rows = ntkl.compare_evidence(*arguments, structures=["full", "diag"], scores=["importance"])
    assert all(abs(one.importance - exact) < 4 * one.importance_error < 0.5 for one in rows.rows)
    assert "importance" in str(rows) and "imp. ±" in str(rows)


def test_a_gaussian_found_elsewhere_is_a_proposal() -> None:
    """Two Gaussians, one network: one evidence, and the mean that was given."""
    posterior, x, y = logistic()
    options = posterior.network.module, (x, y), ntkl.Bernoulli(), ntkl.GaussianPrior(0.5)
    given = ntkl.gaussian_posterior(*options, precision=torch.tensor([1.2, 1.0]).double())
    for model in ("nn", "glm"):
        found = given.importance_evidence(4000, 1.2, model, generator=seeded())
        assert found.trusted and abs(found.value - by_quadrature(x, y)) < 3 * found.standard_error
    with refused(ntkl.UnsupportedError, "what Laplace's evidence hides", "found elsewhere", "elbo"):
        given.approximation_errors()


# ------------------------------------------------------------------------------------------------ bad input


def test_bad_arguments() -> None:
    posterior, x, y = logistic()
    hyper, other = ntkl.HyperparameterError, ntkl.UnsupportedError
    for samples in (0, -1, 2.5, True):
        with refused(hyper, "samples as a whole number", f"{samples}", "Leave it out"):
            posterior.importance_evidence(samples)  # type: ignore[arg-type]
    for inflation in (0.0, -1.0, 1e-300, 0.5, math.inf, math.nan, "1"):
        with refused(hyper, "positive, finite inflation", f"{inflation}", "Leave it out"):
            posterior.importance_evidence(inflation=inflation)  # type: ignore[arg-type]
    for ask in (posterior.importance_evidence, posterior.annealed_evidence):
        with refused(other, "model among 'nn', 'glm'", "'map'", "Choose one"):
            ask(model="map")
        with refused(other, "a torch.Generator", "3", "Pass torch.Generator"):
            ask(generator=3)  # type: ignore[arg-type]
    for name in ("temperatures", "chains", "leapfrog"):
        with refused(hyper, f"{name} as a whole number", "0", "Leave it out"):
            posterior.annealed_evidence(**{name: 0})
    with refused(other, "start among 'posterior', 'prior'", "'map'", "Choose one"):
        posterior.annealed_evidence(start="map")
    for model in ("nn", "glm"):
        with refused(other, "exact draws of the posterior", "whose posterior is not Gaussian", "Pass exact_draws"):
            posterior.annealed_evidence(2, 2, model=model, bounds=True)
    for draws, got in ((torch.zeros(3), r"shape \(3,\)"), (torch.zeros(0, 2), r"shape \(0, 2\)"),
                       (torch.full((1, 2), math.nan), "NaN"), ([[1.0, 2.0]], r"\[\[1.0")):
        with refused(ntkl.DataError, r"exact draws of the weights, \(m, 2\)", got, "Pass weights"):
            posterior.annealed_evidence(2, 30, bounds=True, exact_draws=draws)  # type: ignore[arg-type]
    with refused(other, "exact_draws with bounds=True", "bounds=False", "Pass bounds=True"):
        posterior.annealed_evidence(2, 30, exact_draws=torch.zeros(1, 2))
    gp = ntkl.laplace(posterior.network.module, (x, y), ntkl.Bernoulli(), structure="gp")
    with refused(ntkl.DataError, "the training inputs x", "none", "pass x="):
        without_data(gp).importance_evidence()
    with refused(ntkl.DataError, "the inputs of the fit", "differ", "Pass the same inputs"):
        gp.annealed_evidence(2, 30, x=x.flip(0))
    assert gp.importance_evidence(x=x).trusted


class Two(SingleProcess):
    """A process that says that it is one of two."""

    @property
    def world_size(self) -> int:
        return 2


def test_several_processes_are_refused() -> None:
    posterior, _, _ = logistic()
    vars(posterior.fitted.model)["settings"] = ntkl.Settings(reducer=Two())
    for ask in (posterior.importance_evidence, posterior.annealed_evidence):
        with refused(ntkl.UnsupportedError, "one process", "2", "Save the fit"):
            ask()


def test_a_structure_that_does_not_sample_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = sines()
    posterior = ntkl.laplace(perceptron(1, 2, 1), (x, y), ntkl.Gaussian(0.1), structure=Eigen())
    monkeypatch.setattr(EigenPrecision, "sample", lambda self, count, generator=None: torch.zeros(count, 3))
    for ask in (posterior.importance_evidence, posterior.annealed_evidence):
        monkeypatch.setattr(tuning, "DENSE_METRIC", 0)
        with refused(ntkl.UnsupportedError, "a tensor .* of EigenPrecision.sample", r"\(\d+, 3\)", "Correct"):
            ask()


def test_memory_is_refused_before_it_is_allocated() -> None:
    x, y = sines()
    network = perceptron(1, 3, 1)
    for size, model in ((3000, "nn"), (3000, "glm")):
        posterior = ntkl.laplace(network, (x, y), ntkl.Gaussian(0.1), structure="full")
        small = ntkl.Settings(memory_budget=size)
        vars(posterior.fitted.model)["settings"] = small
        what = "gradients at 64 weights|rows of J"
        with refused(ntkl.MemoryBudgetError, what, "a predicted need", "Take fewer chains"):
            posterior.annealed_evidence(2, 64, model=model)


def test_estimates_that_are_not_to_be_trusted() -> None:
    posterior, x, _ = logistic()
    with pytest.warns(ntkl.NTKLaplaceWarning, match="not to be trusted: 10 weights are too few"):
        few = posterior.importance_evidence(10)
    assert not few.trusted and math.isnan(few.khat) and few.samples == 10
    equal = posterior.annealed_evidence(2, 20, leapfrog=1, generator=seeded())  # trusted without a shape
    assert equal.trusted and math.isnan(equal.khat) and "too few" in equal.words and "not to be" not in equal.words
    y = torch.sin(3 * x[:, :1])
    network = perceptron(2, 6, 1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        far = ntkl.laplace(network, (x, y), ntkl.Gaussian(1e-3), structure="full").importance_evidence(500)
    assert not far.trusted and far.khat > 0.7 and "is not an estimate" in str(far)
    assert "not to be trusted" in str(told[-1].message) and told[-1].filename == __file__
    assert str(told[-1].message).endswith('Estimate it by annealed_evidence(model="nn")')
    with pytest.warns(ntkl.NTKLaplaceWarning, match="with more temperatures or chains") as told:
        posterior.approximation_errors(1, 5, leapfrog=1)
    assert [one.filename for one in told] == [__file__] * 2


def test_saved_bytes_grow_with_the_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = FrozenNetwork(perceptron(2, 50, 1))
    many = ManyWeights(frozen, torch.randn(3, 2).double())
    ten, hundred = many.saved_bytes(torch.randn(10, 2).double()), many.saved_bytes(torch.randn(100, 2).double())
    assert ten > 10 * 50 * 8 and 8 < hundred / ten < 10.5
    assert many.at_once(torch.randn(10, 2).double(), 10 * tuning.GRAPH_FACTOR * ten) == (10, 10)
    assert many.at_once(torch.randn(10, 2).double(), tuning.GRAPH_FACTOR * ten // 2) == (1, 5)
    monkeypatch.setattr(tuning, "CACHED_BYTES", 3 * tuning.GRAPH_FACTOR * ten)
    assert many.at_once(torch.randn(10, 2).double(), 10 * tuning.GRAPH_FACTOR * ten) == (3, 10)
    monkeypatch.setattr(tuning, "CACHED_BYTES", 1)
    assert many.at_once(torch.randn(10, 2).double(), 10 * tuning.GRAPH_FACTOR * ten) == (1, 10)


def test_torch_does_not_warn_of_a_vmap_without_a_rule() -> None:
    """weight_norm has no batching rule; torch's fallback for it is exact."""
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(2, 3, device="cpu"))
    network = nn.Sequential(layer, nn.Tanh(), nn.Linear(3, 1, device="cpu")).double()
    x = torch.randn(6, 2, dtype=torch.float64, device="cpu")
    posterior = ntkl.laplace(network, (x, x[:, :1]), ntkl.Gaussian(noise=0.5))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        posterior.importance_evidence(samples=20)
    assert not [str(warning.message) for warning in told if "performance drop" in str(warning.message)]
