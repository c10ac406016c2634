"""VOGGN, OGGN and LGVA against dense recursions, fixed points and derivatives of the ELBO ([T20] chapter 4).

Identities 1 to 4 of the specification come first: one OGGN step is a Newton step of the linearized model, conjugate
models are solved exactly, a step is a natural-gradient step, and function space is weight space.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ntk_laplace as ntkl
from exact_cases import truth
from ntk_laplace.model.data import Batches
from ntk_laplace.runtime import tuning
from ntk_laplace.structures import FittedModel
from ntk_laplace.variational_inference.algorithms import LGVA, OGGN, VOGGN, Algorithm, SampledLGVA
from ntk_laplace.variational_inference.examples import Examples
from ntk_laplace.variational_inference.iteration import SampledIteration
from ntk_laplace.variational_inference.representations import Matrix, Representation, Rows
from ntk_laplace.variational_inference.states import DataTerms, DenseState, FunctionSpaceState
from pairwise import pairwise
from ranks import on_ranks
from reference import relative_error
from refusals import refused
from registry import LIKELIHOODS, PRIORS, problem, targets
from registry_cases import jacobians

SPACES = {"full": Matrix(), "gp": Rows(1e-18)}  # rows below rounding are dropped


def fitted(network: str, likelihood: str, prior: str, structure: str = "full") -> FittedModel:
    case = problem(network)
    y = targets(LIKELIHOODS[likelihood], case)
    return ntkl.laplace(case.network, (case.x, y), LIKELIHOODS[likelihood].build(), PRIORS[prior].build(case),
                        structure=structure).fitted


def iteration(
    fit: FittedModel, data: tuple, algorithm: Algorithm, form: Representation, start: float | None = 10.0,
    seed: int = 0, batch_size: int | None = None,
) -> SampledIteration:
    """An algorithm on data, from a precision or from the fit's own."""
    model = fit.model
    examples = Examples(model, Batches(data, None, model.network.device, model.network.input_dtype), batch_size)
    few = model.jacobian_pass.rows(data[0][:2])
    state = form.of(model, fit) if start is None else form.isotropic(model, few, start)
    return SampledIteration(model, examples, algorithm, state, seed)


def started(
    network: str, likelihood: str, prior: str, algorithm: Algorithm, space: str = "full", start: float | None = 10.0,
    seed: int = 0,
) -> SampledIteration:
    case = problem(network)
    data = case.x, targets(LIKELIHOODS[likelihood], case)
    return iteration(fitted(network, likelihood, prior, space), data, algorithm, SPACES[space], start, seed)


@torch.no_grad()
def dense(precision: ntkl.PosteriorPrecision) -> Tensor:
    """H, by solves."""
    return torch.linalg.inv(precision.solve(torch.eye(precision.num_parameters, dtype=torch.float64)))


# --- 1. OGGN with γ = 1 is the refitted linear model


@pytest.mark.parametrize(("network", "likelihood", "space"), pairwise(
    ["deep_mlp", "cnn_groups", "transformer_tied"], LIKELIHOODS, SPACES,
))
def test_one_step_is_the_refitted_linear_model(network: str, likelihood: str, space: str) -> None:
    slow, jac = truth(network, likelihood, "layer"), jacobians(network)[1]
    one = started(network, likelihood, "layer", OGGN(), space)
    one.step(1.0)
    case = problem(network)
    assert relative_error(one.mean - case.theta, slow.step) < 1e-9
    solved = one.precision.solve(jac.flatten(0, 1))
    assert relative_error(jac.flatten(0, 1) @ solved.T, slow.latent_covariance(jac)) < 1e-9
    latent = ntkl.laplace(case.network, (case.x, targets(LIKELIHOODS[likelihood], case)),
                          LIKELIHOODS[likelihood].build(), PRIORS["layer"].build(case), structure=space)
    # other likelihoods take further Newton steps of the linearized model for mean="posterior"
    mean, covariance = latent.latent_moments(case.x_new, mean="posterior" if likelihood == "gaussian" else "map")
    with torch.no_grad():
        moved = case.network(case.x_new) + jac @ (one.mean - case.theta)
    if likelihood == "gaussian":
        assert relative_error(moved, mean) < 1e-9
    blocks = torch.einsum("ncp,npd->ncd", jac, solved.T.unflatten(1, jac.shape[:2]).permute(1, 0, 2))
    assert relative_error(blocks, covariance) < 1e-9


# --- 2. conjugate models


def conjugate(algorithm: Algorithm, space: str = "full", seed: int = 0) -> SampledIteration:
    return started("linear_model", "gaussian", "layer", algorithm, space, seed=seed)


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("algorithm", [OGGN(), VOGGN(2), LGVA(), SampledLGVA(2), VOGGN(3)], ids=repr)
def test_conjugate_models_are_solved_exactly(algorithm: Algorithm, space: str) -> None:
    """H approaches its limit as (1-γ)^t with any samples; with pairs the mean has no noise."""
    slow, run, size = truth("linear_model", "gaussian", "layer"), conjugate(algorithm, space), 0.3
    start = 10.0 * torch.eye(15, dtype=torch.float64) - slow.posterior_precision
    optimum = problem("linear_model").theta + slow.step
    for step in range(1, 7):
        run.step(size)
        left = dense(run.precision) - slow.posterior_precision
        assert (left - (1 - size) ** step * start).abs().max() < 1e-11
    paired = getattr(algorithm, "samples", 2) % 2 == 0
    for _ in range(14 if paired else 0):
        run.step(0.9)
    if paired:
        assert relative_error(run.mean, optimum) < 1e-9


@pytest.mark.slow
def test_noise_floor_of_a_single_sample() -> None:
    """The stationary squared distance is γ/((2-γ)S) tr[(G H⁻¹)²], in the metric of H."""
    slow, run, size = truth("linear_model", "gaussian", "layer"), conjugate(VOGGN(1)), 0.5
    optimum, precision = problem("linear_model").theta + slow.step, slow.posterior_precision
    used = torch.eye(15, dtype=torch.float64) - torch.linalg.solve(precision, torch.diag(slow.precision))
    known = size / (2 - size) * torch.trace(used @ used)
    found = []
    for step in range(450):
        run.step(size)
        if step >= 20:
            away = run.mean - optimum
            found.append(float(away @ precision @ away))
    assert np.mean(found) == pytest.approx(float(known), rel=0.15)


# --- 3. a step is a natural-gradient step: η + γ ∂ELBO/∂φ ([T20] C.3)

NODES, WEIGHTS = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(80))
WEIGHTS = WEIGHTS / WEIGHTS.sum()


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("likelihood", ["bernoulli", "poisson"])
def test_step_is_the_derivative_of_the_elbo(likelihood: str, space: str) -> None:
    """ELBO of the model linearized at μ, in expectation parameters φ = (μ, μμᵀ + Σ), by quadrature and autograd."""
    network, prior, size = "scalar_outputs", "layer", 0.4
    run, slow = started(network, likelihood, prior, LGVA(), space), truth(network, likelihood, prior)
    case = problem(network)
    y = targets(LIKELIHOODS[likelihood], case)
    mean, jac, before = case.theta, slow.jac.squeeze(1), 10.0 * torch.eye(len(case.theta), dtype=torch.float64)
    with torch.no_grad():
        f = case.network(case.x)
    density = LIKELIHOODS[likelihood].log_density

    def elbo(first: Tensor, second: Tensor) -> Tensor:
        covariance = second - torch.outer(first, first)
        centre, spread = f + jac @ (first - mean), torch.einsum("np,pq,nq->n", jac, covariance, jac).sqrt()
        at = centre + NODES.unsqueeze(1) * spread
        inner = torch.func.vmap(torch.func.vmap(lambda f, y: density(f[None], y[None])), (0, None))
        away = first - mean + slow.offset
        divergence = 0.5 * ((slow.precision * (away.square() + covariance.diagonal())).sum() - len(mean)
                            - slow.precision.log().sum() - torch.linalg.slogdet(covariance).logabsdet)
        return WEIGHTS @ inner(at, y.double()).sum(1) - divergence

    first = mean.clone().requires_grad_()
    second = (torch.linalg.inv(before) + torch.outer(mean, mean)).requires_grad_()
    slopes = torch.autograd.grad(elbo(first, second), (first, second))
    run.step(size)
    after = dense(run.precision)
    assert relative_error(after @ run.mean, before @ mean + size * slopes[0]) < 1e-8
    symmetric = 0.5 * (slopes[1] + slopes[1].T)
    assert relative_error(-0.5 * after, -0.5 * before + size * symmetric) < 1e-8


# --- 4. function space is weight space


def pair(prior: str, start: float | None, tolerance: float = 0.0) -> tuple[FunctionSpaceState, DenseState, FittedModel]:
    """The same q in both spaces."""
    fit = fitted("far_from_optimum", "categorical", prior, "gp")
    case = problem("far_from_optimum")
    data = case.x, targets(LIKELIHOODS["categorical"], case)
    rows = iteration(fit, data, OGGN(), Rows(tolerance), start).state
    return rows, rows.dense(), fit


def terms_at(fit: FittedModel, theta: Tensor, samples: int) -> list[DataTerms]:
    """Terms of one weight sample, with its share."""
    case, model = problem("far_from_optimum"), fit.model
    rows = model.jacobian_pass.rows(case.x, theta=theta)
    points = replace(fit.points, f=rows.f)
    root = points.root(model.curvature_type, model.likelihood).detach() / samples**0.5
    residual = points.residual(model.likelihood).detach() / samples
    return [DataTerms(rows.vjp(residual, model.network.shapes), rows.weighted(root))]


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(("prior", "start", "samples", "steps"), [
    ("layer", 10.0, 1, 40), ("scalar", None, 4, 11), ("tensor", None, 1, 12), ("parameter", None, 2, 5),
])
def test_function_space_is_weight_space(prior: str, start: float | None, samples: int, steps: int) -> None:
    """The same draws, those of function space: after every step the same mean, and the same H at the end."""
    rows, matrix, fit = pair(prior, start)
    generator = torch.Generator().manual_seed(3)
    for step in range(steps):
        thetas = rows.mean + rows.draw(samples, generator)
        terms = [one for theta in thetas for one in terms_at(fit, theta, samples)]
        size = 0.2 if step % 7 else 0.35
        norms = rows.update(size, terms), matrix.update(size, terms)
        assert norms[0] == pytest.approx(norms[1], rel=1e-9)
        assert relative_error(rows.mean, matrix.mean) < 1e-9
    assert relative_error(dense(rows.precision), dense(matrix.precision)) < 1e-9
    probe = fit.model.jacobian_pass.rows(problem("far_from_optimum").x_new)
    assert relative_error(rows.covariance_blocks(probe), matrix.covariance_blocks(probe)) < 1e-9
    assert rows.rows_kept == 14 * (samples * steps + (start is None))
    later = rows.dense()
    assert relative_error(dense(later.precision), dense(matrix.precision)) < 1e-9


@pytest.mark.slow
class _Subclass(ntkl.Categorical):
    """Its Λ has a root of C - 1 columns, and no directions of f are known to be without effect."""


@pytest.mark.parametrize("likelihood", [ntkl.Categorical(), ntkl.Tempered(ntkl.Categorical(), 0.5), _Subclass()],
                         ids=["categorical", "tempered", "subclass"])
def test_averaged_curvatures_join_the_rows_of_a_posterior(likelihood: ntkl.Likelihood) -> None:
    """LGVA from Laplace's rows, and VOGGN from LGVA's: the roots of Λ and of an average may differ in columns."""
    case, found = problem("layer_twice"), []
    data = case.x, targets(LIKELIHOODS["categorical"], case)
    for structure in ("full", "gp"):
        given = {"structure": structure, "step_size": 0.3, "steps": 2, "elbo_every": 0}
        laplace = ntkl.laplace(case.network, data, likelihood, PRIORS["layer"].build(case), structure)
        prior = PRIORS["layer"].build(case)
        averaged = ntkl.variational(case.network, data, likelihood, prior, algorithm="lgva", start=laplace, **given)
        sampled = ntkl.variational(case.network, data, likelihood, prior, algorithm="voggn", start=averaged.posterior,
                                   **given | {"step_size": 1e-3})
        ones = torch.ones_like(laplace.fitted.theta)
        found.append([(fit.posterior.fitted.theta, fit.posterior.posterior_precision.solve(ones))
                      for fit in (averaged, sampled)])
    (dense_mean, dense_solved), (rows_mean, rows_solved) = found[0][0], found[1][0]
    assert relative_error(rows_mean, dense_mean) < 1e-9 and relative_error(rows_solved, dense_solved) < 1e-9
    # the same q draws other numbers from rows: equal up to the noise of small steps
    assert relative_error(found[1][1][1], found[0][1][1]) < 0.05


@pytest.mark.slow
@torch.no_grad()
def test_dropped_rows_are_bounded() -> None:
    """‖P0^-½ ΔH P0^-½‖ is at most the stated bound, and that at most the tolerance times the largest Ĝ."""
    tolerance, size = 0.05, 0.3
    (few, matrix, fit), generator = pair("layer", None, tolerance), torch.Generator().manual_seed(3)
    scale, largest = fit.prior.flat_precision().detach().rsqrt(), 0.0
    for step in range(25):
        theta = matrix.mean + matrix.draw(1, generator)[0]
        terms = terms_at(fit, theta, 1)
        units = terms[0].rows.dense(fit.network.shapes).flatten(0, 1) * scale
        largest = max(largest, float(torch.linalg.matrix_norm(units @ units.T)))
        few.update(size, terms)
        matrix.update(size, terms)
        lost = scale[:, None] * (dense(matrix.precision) - dense(few.precision)) * scale
        assert float(torch.linalg.matrix_norm(lost, 2)) <= few.dropped + 1e-12
        assert few.dropped <= tolerance * max(largest, few.dropped * (step == 0))
    assert 0 < few.dropped
    assert few.rows_kept == 14 * 9  # 0.7^8 > 0.05 > 0.7^9


def test_one_gaussian_likelihood_two_names() -> None:
    """LGVA is OGGN for a Gaussian likelihood, where r is linear in f and Λ is constant."""
    runs = [started("deep_mlp", "gaussian", "layer", algorithm) for algorithm in (OGGN(), LGVA(), SampledLGVA(2))]
    for _ in range(4):
        for run in runs:
            run.step(0.3)
        for run in runs[1:]:
            assert relative_error(run.mean, runs[0].mean) < 1e-10


# --- examples: minibatches, weights, noise per point


def sine(n: int = 24) -> tuple[nn.Sequential, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.linspace(-2, 2, n, dtype=torch.float64).unsqueeze(1)
    y = (2 * x).sin() + 0.3 * torch.randn(n, 1, dtype=torch.float64, generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        network = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    return network, (x, y)


@pytest.mark.parametrize("algorithm", [OGGN(), LGVA()], ids=repr)
def test_minibatches_add_up(algorithm: Algorithm) -> None:
    """Terms of one order of minibatches average to those of all examples, with noise per point and example weights."""
    network, (x, y) = sine(24)
    noise, weights = torch.linspace(0.1, 1.0, 24).double(), torch.linspace(0.0, 2.0, 24).double()
    fit = ntkl.laplace(network, (x, y, weights), ntkl.Gaussian(noise, kind="point"), structure="full").fitted
    model, data = fit.model, (x, y, weights)
    state = iteration(fit, data, OGGN(), Matrix()).state
    generator = torch.Generator().manual_seed(0)

    def sums(examples: Examples, steps: int) -> tuple[Tensor, Tensor]:
        parts = [one for _ in range(steps)
                 for one in algorithm.terms(model, state, examples.next(generator), generator)]
        rows = torch.cat([one.rows.dense(model.network.shapes).flatten(0, 1) for one in parts])
        return sum(one.gradient for one in parts) / steps, rows.T @ rows / steps

    whole, batched = (Examples(model, Batches(data, None, model.network.device), size) for size in (None, 7))
    for known, found in zip(sums(whole, 1), sums(batched, 4), strict=True):
        assert relative_error(found, known) < 1e-12
    order = batched.record()["order"]
    sums(batched, 4)
    assert not torch.equal(order, batched.record()["order"])


@pytest.mark.parametrize("algorithm", [VOGGN(2), LGVA()], ids=repr)
def test_example_weights_are_repetitions(algorithm: Algorithm) -> None:
    network, (x, y) = sine(8)
    counts = torch.tensor([0, 1, 2, 1, 3, 1, 0, 1])
    means = []
    for data in ((x, y, counts.double()), (x.repeat_interleave(counts, 0), y.repeat_interleave(counts, 0))):
        fit = ntkl.laplace(network, data, ntkl.Gaussian(0.2), structure="full").fitted
        run = iteration(fit, data, algorithm, Matrix())
        for _ in range(3):
            run.step(0.3)
        means.append(run.mean)
    assert relative_error(means[0], means[1]) < 1e-10


# --- the public function


@pytest.mark.filterwarnings("ignore:OGGN is not at its fixed point")
@pytest.mark.parametrize("structure", ["full", "gp", "kfac", "diag"])
@pytest.mark.parametrize("algorithm", ["lgva", "voggn", "oggn"])
def test_points_without_targets_do_not_count(algorithm: str, structure: str) -> None:
    if (algorithm, structure) == ("voggn", "gp"):
        pytest.skip("draws in function space have a random number for each point")
    network, (x, y) = sine(12)
    more = torch.cat([x, x + 0.5]), torch.cat([y, torch.full_like(y, torch.nan)])
    options: dict[str, Any] = {"structure": structure, "algorithm": algorithm, "steps": 4, "elbo_every": 0,
                               "start": 10.0, "step_size": 0.1}
    found, wanted = (
        ntkl.variational(network, data, ntkl.Gaussian(0.1, missing="nan"), ntkl.GaussianPrior(1.0), **options)
        for data in (more, (x, y))
    )
    assert relative_error(found.posterior.latent_moments(x)[1], wanted.posterior.latent_moments(x)[1]) < 1e-9
    assert relative_error(found.posterior.fitted.theta, wanted.posterior.fitted.theta) < 1e-9


def fit_sine(**arguments: Any) -> Any:
    network, data = sine()
    given = {"start": 10.0, "step_size": 0.1, "steps": 8, "elbo_every": 0} | arguments
    return ntkl.variational(network, data, ntkl.Gaussian(0.1), ntkl.GaussianPrior(1.0), **given)


LIKELIHOOD_CASES = [
    ("one_column", "gaussian"), ("scalar_outputs", "poisson"), ("deep_mlp", "bernoulli"),
    ("layer_twice", "categorical"),
]


@pytest.mark.parametrize(("network", "likelihood", "structure"), [  # the exact ones, and "auto", with two likelihoods
    (*LIKELIHOOD_CASES[(number + step) % 4], structure)
    for number, structure in enumerate(["full", "gp", "auto", "kfac", "diag"])
    for step in ((0, 2) if number < 3 else (0,))
])
def test_ends_in_a_posterior(network: str, likelihood: str, structure: str) -> None:
    """Its mean and H are those of the last step, and its ELBOs those of the history; the caller's network stays."""
    case, seen = problem(network), []
    y, before = targets(LIKELIHOODS[likelihood], case), {k: v.clone() for k, v in case.network.state_dict().items()}
    state = torch.get_rng_state()
    fit = ntkl.variational(
        case.network, (case.x, y), LIKELIHOODS[likelihood].build(), PRIORS["scalar"].build(case), structure, start=20.0,
        step_size=0.05, steps=3, elbo_every=2, callbacks=lambda step: seen.append((step.step, step.mean)),
    )
    posterior, history = fit.posterior, fit.history
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in case.network.state_dict().items())
    assert torch.equal(posterior.network.theta.double(), seen[-1][1]) and [step for step, _ in seen] == [1, 2, 3]
    assert history.steps == [0, 2, 3] and len(history.natural_gradient) == 3
    assert history.elbo_glm[-1] == pytest.approx(float(posterior.elbo("glm", 256)), rel=1e-12)
    own = posterior.elbo("nn", 50, generator=torch.Generator().manual_seed(0))
    assert history.elbo_nn[-1] == pytest.approx(float(own), rel=1e-12)
    assert posterior.predict(case.x_new).mean.isfinite().all()
    assert posterior.structure == "gaussian"
    with pytest.raises(ntkl.UnsupportedError, match="elbo"):
        posterior.log_marginal_likelihood()
    frame = history.to_dataframe()
    assert frame["step"].tolist() == [0, 1, 2, 3] and frame["elbo_nn"].notna().tolist() == [True, False, True, True]
    if structure == "full":  # a picture takes longer than the run
        assert len(history.plot().axes) == 2
    assert "3 steps" in str(fit) and "natural_gradient" not in repr(fit)


@pytest.mark.slow
def test_voggn_raises_the_elbo() -> None:
    """From the Laplace posterior, whose network's ELBO is far below that of its linearization."""
    fit = fit_sine(start="map", steps=150, step_size=0.05, elbo_every=150)
    history = fit.history
    assert history.elbo_nn[1] > history.elbo_nn[0] + 20.0
    assert abs(history.elbo_nn[1] - history.elbo_glm[1]) < 10.0 < history.elbo_glm[0] - history.elbo_nn[0]


@pytest.mark.slow
def test_oggn_ends_in_the_laplace_posterior() -> None:
    network, data = sine()
    fit = fit_sine(algorithm="oggn", steps=300, start="map", tolerance=1e-10)
    assert "tolerance" in fit.stopped and len(fit.history) < 300
    posterior = fit.posterior
    with torch.no_grad():
        for parameter, value in zip(network.parameters(), posterior.network.parameters.values(), strict=True):
            parameter.copy_(value)
    laplace = ntkl.laplace(network, data, ntkl.Gaussian(0.1), ntkl.GaussianPrior(1.0), "full")
    assert posterior.structure == "full" and posterior.network.shapes == laplace.network.shapes
    known = float(laplace.log_marginal_likelihood())
    assert float(posterior.log_marginal_likelihood()) == pytest.approx(known, rel=1e-12)
    assert float(laplace.evidence(correction=True).value - laplace.evidence().value) < 1e-8
    with pytest.warns(ntkl.NTKLaplaceWarning, match="not at its fixed point"):
        assert fit_sine(algorithm="oggn", steps=1).posterior.structure == "gaussian"


@pytest.mark.parametrize("structure", ["full", "gp"])
def test_linearized_once(structure: str) -> None:
    """relinearize=False is LGVA by sites: with a Gaussian likelihood it ends in the refitted linear model."""
    network, data = sine()
    fit = fit_sine(structure=structure, algorithm="lgva", relinearize=False, step_size=1.0, steps=2)
    laplace = ntkl.laplace(network, data, ntkl.Gaussian(0.1), ntkl.GaussianPrior(1.0), structure)
    x = data[0] + 0.05
    mean, covariance = laplace.latent_moments(x, mean="posterior")
    for found, known in zip(fit.posterior.latent_moments(x), (mean, covariance), strict=True):
        assert relative_error(found, known) < 1e-9
    evidence = laplace.evidence(correction=True).value
    assert float(fit.posterior.elbo("glm")) == pytest.approx(float(evidence), rel=1e-9)
    assert math.isfinite(float(fit.posterior.elbo("nn", 4)))


@pytest.mark.parametrize("structure", ["full", "gp", "kfac"])
def test_a_start_of_another_prior_has_its_own_precision(structure: str) -> None:
    """H of the start contains the prior that it was fitted with."""
    network, data = sine()
    laplace = ntkl.laplace(network, data, ntkl.Gaussian(0.1), ntkl.GaussianPrior(7.0), structure)
    model = ntkl.laplace(network, data, ntkl.Gaussian(0.1), ntkl.GaussianPrior(2.0), structure).fitted.model
    state = SPACES["gp" if structure == "gp" else "full"].of(model, laplace.fitted)
    assert relative_error(dense(state.precision), dense(laplace.posterior_precision)) < 1e-9


def test_a_posterior_in_single_precision_is_a_start() -> None:
    network, data = sine()
    found = []
    for dtype in (torch.float32, torch.float64):
        laplace = ntkl.laplace(network, data, ntkl.Gaussian(0.1), structure="gp", dtype=dtype)
        found.append(fit_sine(structure="gp", start=laplace, steps=2).posterior.latent_moments(data[0])[1])
    assert all(one.dtype == torch.float64 for one in found) and relative_error(*found) < 1e-3


@pytest.mark.parametrize("structure", ["full", "gp", "kfac"])
def test_a_posterior_is_a_start(structure: str) -> None:
    """Its mean, and its H: of a Laplace posterior and, where H is that of any Gaussian, of an earlier run."""
    network, data = sine()
    laplace = ntkl.laplace(network, data, ntkl.Gaussian(0.1), ntkl.GaussianPrior(1.0), structure)
    size = 1e-9
    fit = fit_sine(structure=structure, start=laplace, steps=1, step_size=size)
    unit = torch.eye(laplace.network.num_parameters, dtype=torch.float64)
    known = laplace.fitted.precision.solve(unit)
    assert relative_error(fit.posterior.fitted.precision.solve(unit), known) < 1e-6
    assert relative_error(fit.posterior.fitted.theta, laplace.fitted.theta) < 1e-6
    if structure != "kfac":
        first = fit_sine(structure=structure, steps=3)
        again = fit_sine(structure=structure, start=first.posterior, steps=1, step_size=size)
        known = first.posterior.fitted.precision.solve(unit)
        assert relative_error(again.posterior.fitted.precision.solve(unit), known) < 1e-6


@pytest.mark.parametrize("start", [10.0, "laplace"])
def test_low_ranks_of_factors_are_averaged(start: float | str) -> None:
    """They keep the traces of the factors, and so that of H after a step."""
    network, data = sine()
    likelihood, prior, found = ntkl.Gaussian(0.1), ntkl.GaussianPrior(1.0), []
    for structure in (ntkl.KFAC(rank=1), "kfac"):
        own = ntkl.laplace(network, data, likelihood, prior, structure) if start == "laplace" else start
        fit = ntkl.variational(network, data, likelihood, prior, structure, "lgva", start=own, step_size=0.3, steps=1,
                               elbo_every=0)
        found.append(dense(fit.posterior.posterior_precision))
    assert relative_error(*(precision.trace() for precision in found)) < 1e-9
    assert relative_error(*found) > 1e-4  # a low rank it is


def test_starts_of_other_factors_are_refused() -> None:
    network, data = sine()
    for given, other, groups, words in (
        ("kfac", ntkl.KFAC(rank=3), "layer", "rank=3"), (ntkl.KFAC(rank=3), "kfac", "layer", "rank=None"),
        (ntkl.KFAC(rank=3), ntkl.KFAC(rank=3), "tensor", "the same groups"),
        (ntkl.KFAC(damped=True), ntkl.KFAC(damped=True), "tensor", "the same groups"),
    ):
        start = ntkl.laplace(network, data, ntkl.Gaussian(0.1), ntkl.GaussianPrior(1.0, groups="layer"), given)
        with pytest.raises(ntkl.UnsupportedError, match=words):
            ntkl.variational(network, data, ntkl.Gaussian(0.1), ntkl.GaussianPrior(1.0, groups=groups), other,
                             start=start, steps=1)


@pytest.mark.parametrize("space", ["gp", "auto"])
def test_positions_begin_without_rows(space: str) -> None:
    """A layer with few wide positions, whose products fill K in tiles of some rows, begins with none of them.

    The expectations have a closed form, so that weight space takes the same steps.
    """
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Flatten(), nn.Linear(40, 1)).double()
    data = torch.randn(14, 2, 30, dtype=torch.float64), torch.randn(14, 1, dtype=torch.float64)
    rows, matrix = (
        ntkl.variational(network, data, ntkl.Gaussian(0.1), None, structure, "lgva", start=5.0, step_size=0.3, steps=3,
                         elbo_every=0).posterior.latent_moments(data[0])
        for structure in (space, "full")
    )
    for one, other in zip(rows, matrix, strict=True):
        assert relative_error(one, other) < 1e-9


def test_auto_leaves_function_space() -> None:
    fit = fit_sine(structure="auto", samples=1, steps=3, seed=4, decay=1e9)
    assert fit.history.rows == []  # 24 rows a step and 19 parameters
    network = nn.Sequential(nn.Linear(1, 60), nn.Tanh(), nn.Linear(60, 1)).double()
    _, data = sine()
    rows = ntkl.variational(network, data, ntkl.Gaussian(0.1), structure="auto", start=10.0, steps=5, step_size=0.1,
                            elbo_every=0).history.rows
    assert rows == [48, 96, 144]  # of at most 181


def test_step_sizes_and_averages() -> None:
    means: list[Tensor] = []
    fit = fit_sine(decay=3.0, average=True, callbacks=[lambda step: means.append(step.mean)])
    assert fit.history.step_size == pytest.approx([0.1 * (1 + t / 3.0) ** -0.6 for t in range(8)])
    assert relative_error(fit.posterior.network.theta, torch.stack(means[4:]).mean(0)) < 1e-12


def test_callbacks_stop_the_run() -> None:
    fit = fit_sine(callbacks=lambda step: step.stop("enough") if step.step == 3 else None)
    assert len(fit.history) == 3 and fit.stopped == "enough"


def test_inplace_moves_the_network() -> None:
    network, data = sine()
    fit = ntkl.variational(network, data, ntkl.Gaussian(0.1), start=10.0, steps=2, elbo_every=0, inplace=True)
    flat = torch.cat([p.detach().flatten() for p in network.parameters()])
    assert torch.equal(flat, fit.posterior.network.theta)


@pytest.mark.parametrize("structure", ["full", "gp", "diag", "kfac"])
def test_saved_and_moved(structure: str, tmp_path: Any) -> None:
    """The file has no weights: the network that was moved to μ has."""
    network, (x, y) = sine()
    given = {"structure": structure, "start": 10.0, "steps": 3, "elbo_every": 0, "step_size": 0.1}
    posterior = ntkl.variational(network, (x, y), ntkl.Gaussian(0.1), **given, inplace=True).posterior
    wanted, whole = posterior.latent_moments(x)[1], posterior.elbo().value
    posterior.save(tmp_path / "q", include_data=structure == "gp")
    loaded = ntkl.load(tmp_path / "q", network, (x, y))
    assert relative_error(loaded.latent_moments(x)[1], wanted) < 1e-12
    assert float(loaded.elbo()) == pytest.approx(float(whole), rel=1e-12)
    assert relative_error(posterior.to(dtype=torch.float32).latent_moments(x)[1].double(), wanted) < 1e-4


def test_an_average_that_never_began_is_told() -> None:
    with pytest.warns(ntkl.NTKLaplaceWarning, match="nothing was averaged"):
        fit_sine(average=True, callbacks=lambda step: step.stop())


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [
    {"structure": "full", "start": "map"}, {"structure": "kfac"},
    {"structure": "gp", "batch_size": 9, "start": "map", "row_tolerance": 0.6},
    {"structure": "auto", "average": True, "batch_size": 5}, {"algorithm": "lgva", "relinearize": False},
], ids=str)
def test_interrupted_and_resumed(arguments: dict[str, Any], tmp_path: Any) -> None:
    """Bit-identical, from the error and from the file."""
    arguments = {"elbo_every": 3, "elbo_samples": 4} | arguments
    whole = fit_sine(**arguments)

    def interrupt(step: Any) -> None:
        if step.step == 7:  # in the half that is averaged
            raise KeyboardInterrupt

    path = tmp_path / "state"
    slow = _every_step()
    with slow, pytest.raises(ntkl.VariationalInterrupted, match="resume") as caught:
        fit_sine(**arguments, callbacks=interrupt, settings=ntkl.Settings(checkpoint=path))
    assert len(caught.value.state["history"]["step_size"]) == 6
    for state in (caught.value.state, path):
        again = fit_sine(**arguments, settings=ntkl.Settings(resume=state))
        assert torch.equal(again.posterior.network.theta, whole.posterior.network.theta)
        assert again.history == whole.history
        assert torch.equal(*(one.posterior.sample(2, generator=torch.Generator().manual_seed(0))
                             for one in (again, whole)))
    with pytest.raises(ntkl.UnsupportedError, match="seed of the interrupted run"):
        fit_sine(**arguments, seed=1, settings=ntkl.Settings(resume=path))
    with pytest.raises(ntkl.DataError, match="state of variational inference"):
        fit_sine(settings=ntkl.Settings(resume=tmp_path / "nothing"))
    with pytest.raises(ntkl.DataError, match="interrupted run"):
        fit_sine(settings=ntkl.Settings(resume={"other": 1}))


@pytest.mark.slow
def test_a_converged_run_is_not_continued(tmp_path: Any) -> None:
    given = {"algorithm": "oggn", "start": "map", "tolerance": 1e-4, "steps": 50}
    whole = fit_sine(**given, settings=ntkl.Settings(checkpoint=tmp_path / "state"))
    again = fit_sine(**given, settings=ntkl.Settings(resume=tmp_path / "state"))
    assert len(whole.history) < 50 and again.history == whole.history and again.stopped == whole.stopped
    assert torch.equal(again.posterior.network.theta, whole.posterior.network.theta)
    further = fit_sine(**given | {"tolerance": 1e-30}, settings=ntkl.Settings(resume=tmp_path / "state"))
    assert len(further.history) == 50


def test_resuming_another_tempering_is_refused(tmp_path: Any) -> None:
    network, (x, y) = sine()
    given = {"start": 10.0, "steps": 2, "elbo_every": 0}
    for weight, settings in ((0.5, ntkl.Settings(checkpoint=tmp_path / "state")),
                             (0.25, ntkl.Settings(resume=tmp_path / "state"))):
        likelihood = ntkl.Tempered(ntkl.Gaussian(0.1), weight)
        if weight == 0.5:
            ntkl.variational(network, (x, y), likelihood, settings=settings, **given)
            continue
        with pytest.raises(ntkl.UnsupportedError, match="likelihood of the interrupted run"):
            ntkl.variational(network, (x, y), likelihood, settings=settings, **given)


@pytest.mark.parametrize(("what", "changed"), [
    ("targets and example weights", lambda network, x, y: (network, (x, -y))),
    ("targets and example weights", lambda network, x, y: (network, (x, y, torch.full((len(x),), 0.5)))),
    ("network", lambda network, x, y: (nn.Sequential(network[0], nn.ReLU(), network[2]), (x, y))),
    ("network", lambda network, x, y: (nn.Sequential(*network, *[nn.Identity()] * 40), (x, y))),
    ("frozen parameters", lambda network, x, y: (nn.Sequential(_moved(network[0]), *network[1:]), (x, y))),
])
def test_resuming_another_model_is_refused(what: str, changed: Any, tmp_path: Any) -> None:
    network, (x, y) = sine()
    given: dict[str, Any] = {"start": 10.0, "steps": 2, "elbo_every": 0, "parameters": ["2"]}
    likelihood, path = ntkl.Gaussian(0.1), tmp_path / "state"
    ntkl.variational(network, (x, y), likelihood, settings=ntkl.Settings(checkpoint=path), **given)
    again = ntkl.Settings(resume=path)
    shuffled = torch.randperm(len(x))  # a loader may shuffle
    ntkl.variational(network, (x[shuffled], y[shuffled]), likelihood, settings=again, **given)
    other, data = changed(network, x, y)
    with refused(ntkl.UnsupportedError, f"to resume with the {what}", ".", "same arguments"):
        ntkl.variational(other, data, likelihood, settings=again, **given)
    with refused(ntkl.UnsupportedError, "row tolerance", r"0\.1", "same arguments"):
        ntkl.variational(network, (x, y), likelihood, settings=again, row_tolerance=0.1, **given)
    with refused(ntkl.HyperparameterError, "at least the 2 steps", "steps=1", "steps=2 or more"):
        ntkl.variational(network, (x, y), likelihood, settings=again, **given | {"steps": 1})


def _moved(layer: nn.Linear) -> nn.Linear:
    other = nn.Linear(layer.in_features, layer.out_features).to(layer.weight)
    return other


def test_a_callback_cannot_move_the_run() -> None:
    alone, seen = (fit_sine(callbacks=call) for call in (lambda step: None, lambda step: step.mean.zero_()))
    assert torch.equal(alone.posterior.network.theta, seen.posterior.network.theta)


def test_a_network_of_inference_tensors_is_moved_in_place() -> None:
    data = sine()[1]
    with torch.inference_mode():
        network = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    fit = ntkl.variational(network, data, ntkl.Gaussian(0.1), start=10.0, steps=2, elbo_every=0, inplace=True)
    assert torch.equal(torch.cat([p.flatten() for p in network.parameters()]), fit.posterior.network.theta)


def test_rows_of_a_precision_are_none() -> None:
    """The forecast counts the rows of the steps, and those of the start where it has any."""
    for start, rows in ((10.0, 96), ("map", 120)):
        with pytest.raises(ntkl.MemoryBudgetError, match=f"{rows} rows, 48 a step"):
            fit_sine(structure="gp", algorithm="voggn", samples=2, start=start, steps=2, batch_size=None,
                     settings=ntkl.Settings(memory_budget=20_000))


def _every_step() -> Any:
    """Snapshots after every step."""
    from unittest import mock

    return mock.patch.multiple(tuning, SNAPSHOT_SECONDS=0.0, SNAPSHOT_SHARE=0)


# --- bad input


@pytest.mark.parametrize(("arguments", "error", "words"), [
    ({"samples": 0}, ntkl.HyperparameterError, "even number"),
    ({"samples": 1.5}, ntkl.HyperparameterError, "whole number"),
    ({"step_size": 0.0}, ntkl.HyperparameterError, r"\(0, 1\]"),
    ({"step_size": 1.5}, ntkl.HyperparameterError, r"\(0, 1\]"),
    ({"step_size": math.nan}, ntkl.HyperparameterError, r"\(0, 1\]"),
    ({"step_size": "fast"}, ntkl.HyperparameterError, r"\(0, 1\]"),
    ({"steps": 0}, ntkl.HyperparameterError, "steps"),
    ({"seed": -1}, ntkl.HyperparameterError, "seed"),
    ({"decay": 0}, ntkl.HyperparameterError, "decay"),
    ({"tolerance": -1.0}, ntkl.HyperparameterError, "tolerance"),
    ({"row_tolerance": 1.0}, ntkl.HyperparameterError, "row_tolerance"),
    ({"batch_size": 0}, ntkl.HyperparameterError, "batch_size"),
    ({"elbo_every": -1}, ntkl.HyperparameterError, "elbo_every"),
    ({"elbo_samples": 1}, ntkl.HyperparameterError, "elbo_samples"),
    ({"start": 0.0}, ntkl.HyperparameterError, "positive, finite precision"),
    ({"start": "prior"}, ntkl.UnsupportedError, 'start="map"'),
    ({"structure": "ekfac"}, ntkl.UnsupportedError, "structure among"),
    ({"algorithm": "vogn"}, ntkl.UnsupportedError, "algorithm among"),
    ({"expectations": "weights"}, ntkl.UnsupportedError, "lgva"),
    ({"algorithm": "lgva", "expectations": "both"}, ntkl.UnsupportedError, "outputs"),
    ({"relinearize": False}, ntkl.UnsupportedError, "relinearize"),
    ({"callbacks": [3]}, ntkl.UnsupportedError, "callbacks"),
    ({"callbacks": 3}, ntkl.UnsupportedError, "callbacks"),
    ({"callbacks": None}, ntkl.UnsupportedError, "callbacks"),
    ({"seed": 2**70}, ntkl.HyperparameterError, r"seed below 2\*\*63"),
    ({"algorithm": "oggn", "samples": 4}, ntkl.UnsupportedError, "4 with algorithm"),
    ({"settings": ntkl.Settings(memory_budget=1000)}, ntkl.MemoryBudgetError, "copy to resume from"),
    ({"structure": "gp", "settings": ntkl.Settings(memory_budget=1000)}, ntkl.MemoryBudgetError, "row_tolerance"),
], ids=str)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        fit_sine(**arguments)


def test_bad_start() -> None:
    network, data = sine()
    other = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    with pytest.raises(ntkl.DataError, match=r"19 parameters.*16 parameters; '0.weight'"):
        fit_sine(start=ntkl.laplace(other, data, ntkl.Gaussian(0.1)))
    with pytest.raises(ntkl.UnsupportedError, match="in function space"):
        fit_sine(structure="gp", start=ntkl.laplace(network, data, ntkl.Gaussian(0.1), structure="full"))
    layers = ntkl.laplace(network, data, ntkl.Gaussian(0.1), ntkl.GaussianPrior(1.0, groups="layer"))
    with torch.no_grad():
        layers.prior.log_precision[0] += 0.5
    with pytest.raises(ntkl.UnsupportedError, match="differ within a group"):
        fit_sine(structure="gp", start=layers)
    with pytest.raises(ntkl.UnsupportedError, match="structure='kfac'"):
        fit_sine(structure="kfac", start=ntkl.laplace(network, data, ntkl.Gaussian(0.1), structure="diag"))


def test_odd_samples_are_told() -> None:
    with pytest.warns(ntkl.NTKLaplaceWarning, match=r"0\.0526 tr"):
        fit_sine(samples=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit_sine(samples=4, steps=1)
        fit_sine(algorithm="oggn", start="map", steps=1)


def test_targets_are_refused_before_a_step() -> None:
    """Not as a step that diverged."""
    network, (x, y) = sine()
    for start in (10.0, "map"):
        with pytest.raises(ntkl.NonFiniteError, match="missing targets"):
            ntkl.variational(network, (x, y * math.nan), ntkl.Gaussian(0.1), start=start, steps=2, elbo_every=0)


def test_noise_per_point_needs_another_start() -> None:
    network, (x, y) = sine()
    likelihood = ntkl.Gaussian(torch.full((len(x),), 0.1, dtype=torch.float64), kind="point")
    with refused(ntkl.UnsupportedError, 'start="map"', "noise per point", r"start=laplace\(.*start=10\.0"):
        ntkl.variational(network, (x, y), likelihood, steps=2)
    given: dict[str, Any] = {"steps": 3, "elbo_every": 0, "start": 10.0}
    one, other = (ntkl.variational(network, (x, y), noise, **given) for noise in (likelihood, ntkl.Gaussian(0.1)))
    assert relative_error(one.posterior.network.theta, other.posterior.network.theta) < 1e-12


def test_a_start_without_a_finite_elbo_is_no_step() -> None:
    x = 300.0 * torch.randn(9, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with refused(ntkl.NumericalError, "a start with a finite ELBO", "rates", 'start="map", or a larger precision'):
        ntkl.variational(nn.Linear(2, 1).double(), (x, torch.ones(9, 1)), ntkl.Poisson(), start=1e-3, steps=3)


@pytest.mark.parametrize("structure", ["full", "gp"])
def test_an_expectation_that_is_not_concave_is_refused_later(structure: str) -> None:
    """At the start Λ is positive; under a later q E Λ of two points is not."""
    x, y = torch.ones(8, 1).double(), torch.tensor([[-0.95]] * 6 + [[0.95]] * 2).double()
    cauchy = ntkl.CustomLikelihood(lambda f, y: -torch.log1p((y - f) ** 2).sum(1))
    network = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(network.weight)
    with pytest.raises(ntkl.NTKLaplaceError, match="concave"):
        ntkl.variational(network, (x, y), cauchy, ntkl.GaussianPrior(0.1), structure, "lgva", relinearize=False,
                         start=10.0, step_size=0.5, steps=100, elbo_every=0)


def test_likelihoods_that_are_not_concave() -> None:
    network, data = sine()
    cauchy = ntkl.CustomLikelihood(lambda f, y: -torch.log1p((y - f).square() / 0.01).sum(1))
    for algorithm in ("voggn", "oggn", "lgva"):
        with pytest.raises(ntkl.UnsupportedError, match="concave"):
            ntkl.variational(network, data, cauchy, algorithm=algorithm, start=10.0, steps=2, elbo_every=0)


def test_divergence() -> None:
    """A run that overflows is an error, one that falls far below its best ELBO a warning, each with the remedy."""
    network, (x, y) = sine()
    explosive = nn.Sequential(network, _Cubes())
    with pytest.raises(ntkl.NumericalError, match="step_size"):
        ntkl.variational(explosive, (x, y), ntkl.Gaussian(1e-6), start=1e-3, steps=50, step_size=0.9, elbo_every=0)
    with pytest.warns(ntkl.NTKLaplaceWarning, match="the steps diverge"):
        fit_sine(step_size=0.999, steps=12, elbo_every=3)


class _Cubes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (5 * x) ** 9


def test_several_processes_are_refused() -> None:
    network, data = sine()
    with pytest.raises(ntkl.UnsupportedError, match="one process"):
        on_ranks(2, lambda reducer: ntkl.variational(network, data, ntkl.Gaussian(0.1),
                                                     settings=ntkl.Settings(reducer=reducer)))
