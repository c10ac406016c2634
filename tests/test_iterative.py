"""Structures from products with the curvature: "iterative" is exact, its error bars hold, and "nystrom" bounds it.

References are dense: H and its inverse, log determinants by Cholesky, and a fit with structure="full".
"""

from __future__ import annotations

import math
import types
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ntk_laplace as ntkl
from class_cases import classes, digits_like
from exact_cases import TURNS, fit, ids
from ntk_laplace.curvature import probed_log_det
from ntk_laplace.curvature.iterative import IterativePrecision
from ntk_laplace.curvature.probed_log_det import ProbedLogDet
from ntk_laplace.curvature.remainder import Remainder
from ntk_laplace.errors import HyperparameterError, MemoryBudgetError, NTKLaplaceWarning, NumericalError
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.krylov import conjugate_gradients, lanczos, low_rank, nearly_solved
from pairwise import one_each
from reference import relative_error
from refusals import refused
from registry import LIKELIHOODS, NETWORKS, PRIORS, problem, targets

pytestmark = pytest.mark.filterwarnings("ignore:no factor rule covers")
COMPLETE = ntkl.Iterative(relative_error=1e-9)  # the rank grows until it is complete


def iterative(network: str, likelihood: str, prior: str, structure: Any = COMPLETE, **settings: Any) -> ntkl.Posterior:
    """A fit that is not kept: its sketches would change with the order of the tests."""
    case = problem(network)
    y = targets(LIKELIHOODS[likelihood], case)
    return ntkl.laplace(case.network, (case.x, y), LIKELIHOODS[likelihood].build(), PRIORS[prior].build(case),
                        structure, settings=ntkl.Settings(**settings))


# --- linear algebra


def spectrum_matrix(values: Tensor, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64))[0]
    return (basis * values) @ basis.T


def test_gauss_and_radau_bracket_every_probe() -> None:
    matrix = spectrum_matrix(1.0 + torch.logspace(3, -6, 60, dtype=torch.float64))
    probes = torch.randn(7, 60, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values, vectors = torch.linalg.eigh(matrix)
    exact = ((probes @ vectors).square() * values.log()).sum(1)
    widths = []
    for steps in (1, 3, 8, 20):
        found = lanczos(lambda v: v @ matrix, probes, 1.0, steps, lambda _: False)
        below, above = found.bracket(torch.log)
        assert found.nodes.shape == (7, steps)
        assert bool((below <= exact + 1e-9).all()) and bool((exact <= above + 1e-9).all())
        widths.append(float((above - below).mean()))
    assert widths == sorted(widths, reverse=True) and widths[-1] < 1e-3 * widths[0]


def test_an_invariant_subspace_ends_lanczos_with_exact_values() -> None:
    matrix = spectrum_matrix(torch.tensor([1.0, 1.0, 1.0, 4.0, 9.0], dtype=torch.float64))
    probes = torch.ones(2, 5, dtype=torch.float64)
    found = lanczos(lambda v: v @ matrix, probes, 1.0, 50, lambda _: False)
    below, above = found.bracket(torch.log)
    exact = torch.einsum("mi,ij,mj->m", probes, _log(matrix), probes)
    assert found.nodes.shape[1] <= 4
    assert relative_error(below, exact) < 1e-12 and relative_error(above, exact) < 1e-12


def _log(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.log()) @ vectors.T


def test_conjugate_gradients_reach_the_tolerance_of_every_row() -> None:
    matrix = spectrum_matrix(torch.logspace(4, 0, 50, dtype=torch.float64))
    right = torch.randn(6, 50, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    right[3] = 0.0
    right[4] *= 1e-8
    found, _ = conjugate_gradients(lambda v: v @ matrix, right, lambda v: v, 1e-11, 1e4, 500)
    left = (right - found @ matrix).norm(dim=1)
    assert bool((left <= 1e-11 * right.norm(dim=1)).all()) and not bool(found[3].any())
    early, residual = conjugate_gradients(lambda v: v @ matrix, right, lambda v: v, 1e-2, 1e4, 500)
    assert relative_error(residual, right - early @ matrix) < 1e-9


def test_conjugate_gradients_say_where_they_end() -> None:
    matrix = spectrum_matrix(torch.logspace(8, 0, 50, dtype=torch.float64))
    right = torch.ones(2, 50, dtype=torch.float64)
    with pytest.raises(NumericalError, match=r"expected a solve with a residual of 1e-11 .* after \d+ products"):
        conjugate_gradients(lambda v: v @ matrix, right, lambda v: v, 1e-11, 1e8, 8)


@pytest.mark.parametrize("share", [0.3, 0.003])
def test_solves_with_an_error_in_the_norm_of_the_matrix(share: float) -> None:
    """The preconditioner knows little of the matrix, and a row of zeros stays zero."""
    matrix = spectrum_matrix(torch.logspace(0, 6, 60, dtype=torch.float64))
    low = torch.linalg.eigh(matrix)[1][:, 40:]
    inner = low.T @ matrix @ low
    inverse = torch.eye(60) - low @ torch.linalg.inv(torch.eye(20) + torch.linalg.inv(0.5 * inner)) @ low.T
    right, count = torch.randn(5, 60, dtype=torch.float64) @ matrix, [0]
    right[2] = 0.0

    def operator(vectors: Tensor) -> Tensor:
        count[0] += 1
        return vectors @ matrix

    found = nearly_solved(operator, right, lambda v: v @ inverse, share, 1000)
    want = torch.linalg.solve(matrix, right.T).T
    error, size = ((v @ matrix * v).sum(1).sqrt() for v in (found - want, want))
    assert (error <= share * size).all() and float(error.max()) > 0.0 and count[0] < 60
    with pytest.raises(NumericalError, match="a larger one after 2 products"):
        nearly_solved(operator, right, lambda v: v, 1e-3, 2)


def test_conjugate_gradients_end_at_rounding() -> None:
    """At a condition of 1e10 a residual of 1e-11 b is out of reach; one of eps times A x, as of a factor, is not."""
    matrix = spectrum_matrix(torch.logspace(10, 0, 50, dtype=torch.float64))
    right = torch.randn(6, 50, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    values, vectors = torch.linalg.eigh(matrix * (1 + 1e-9))
    near = (vectors / values) @ vectors.T
    found, _ = conjugate_gradients(lambda v: v @ matrix, right, lambda v: v @ near, 1e-11, 1e10, 500)
    left = (right - found @ matrix).norm(dim=1)
    assert bool((left > 1e-11 * right.norm(dim=1)).any())
    assert bool((left <= 64 * 2.3e-16 * 1e10 * found.norm(dim=1)).all())
    assert relative_error(found, torch.linalg.solve(matrix, right.T).T) < 1e-5
    with pytest.raises(NumericalError, match="Use a larger prior precision, or a larger rank"):
        conjugate_gradients(lambda v: v @ matrix, right, lambda v: v @ near, 1e-11, 1.0, 500)
    single = (part.float() for part in (matrix, near))
    with pytest.raises(NumericalError, match=r"Use dtype=torch\.float64, a larger prior"):
        a, m = single
        conjugate_gradients(lambda v: v @ a, right.float(), lambda v: v @ m, 1e-7, 1.0, 500)


@pytest.mark.parametrize("count", [5, 20, 60])
def test_the_low_rank_never_exceeds_the_matrix(count: int) -> None:
    matrix = spectrum_matrix(torch.cat([torch.logspace(3, -9, 30), torch.zeros(10)]).double())
    tests = torch.randn(count, 40, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    scale = torch.logspace(-1, 1, 40, dtype=torch.float64)
    found = low_rank(lambda v: v @ matrix, tests, scale)
    factor, mixed = found.factor, found.mixing @ tests
    left = torch.linalg.eigvalsh(matrix - factor.T @ factor)
    eye = torch.eye(len(factor), dtype=torch.float64)
    assert float(left[0]) > -1e-7 and len(factor) <= min(count, 30)
    assert relative_error(factor * scale @ (factor * scale).T, found.values.diag()) < 1e-12
    assert relative_error(mixed @ matrix, factor) < 1e-6
    assert float((mixed @ matrix @ mixed.T - eye).abs().max()) < 1e-2
    if count == 60:
        assert float(left[-1]) < 1e-6
    # in the place of the test vectors, some products at a time
    other = low_rank(lambda v: v @ matrix, tests.clone(), scale, 7).factor
    assert relative_error(other.T @ other, factor.T @ factor) < 1e-7


# --- laws over the registry


@pytest.mark.parametrize("case", TURNS, ids=ids)
def test_a_complete_sketch_is_full_weight_space(case: tuple[str, str, str]) -> None:
    found, exact = iterative(*case), fit(*case, "full")
    limit = 1e-8 if NETWORKS[case[0]].dtype == torch.float64 else 1e-5
    value = exact.evidence()
    assert relative_error(found.evidence().value, value.value) < limit
    assert relative_error(found.effective_parameters(), exact.effective_parameters()) < limit
    new = problem(case[0]).x_new
    for one, other in zip(found.latent_moments(new), exact.latent_moments(new), strict=True):
        assert relative_error(one, other) < limit
    gradient = exact.fitted.joint_gradient()
    assert relative_error(found.posterior_precision.solve(gradient), exact.posterior_precision.solve(gradient)) < limit


# one of the two ranks for every second network
@pytest.mark.parametrize(("case", "rank"), one_each(TURNS[::2], (1, 4)), ids=lambda v: ids(v) if v in TURNS else str(v))
def test_the_bounds_hold_for_any_sketch(case: tuple[str, str, str], rank: int) -> None:
    exact = float(fit(*case, "full").log_marginal_likelihood())
    slack = (1e-9 if NETWORKS[case[0]].dtype == torch.float64 else 1e-5) * (1.0 + abs(exact))
    found = iterative(*case, ntkl.Iterative(rank=rank, probes=4)).evidence()
    assert found.lower - slack <= exact <= found.upper + slack
    bound = iterative(*case, ntkl.Nystrom(rank=rank, rounds=1))
    assert float(bound.log_marginal_likelihood()) >= exact - slack


@pytest.mark.parametrize("noise", [0.3, 1e-4])
def test_rounds_at_a_rank_above_the_curvatures_find_nothing_more(noise: float) -> None:
    """Test vectors less all that is known are rounding, and so are their images."""
    generator = torch.Generator().manual_seed(7)
    x, y = (torch.randn(12, k, generator=generator, dtype=torch.float64) for k in (4, 2))
    weights = (torch.arange(12) % 3 > 0).double()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    full, low = (
        ntkl.laplace(network, (x, y, weights), ntkl.Gaussian(noise), ntkl.GaussianPrior(1.0), structure)
        for structure in ("full", ntkl.Nystrom(rank=40, rounds=3))
    )
    assert float(low.log_det()) <= float(full.log_det()) * (1.0 + 1e-9)
    assert relative_error(low.latent_moments(x)[1], full.latent_moments(x)[1]) < 1e-6


@pytest.mark.parametrize("case", TURNS[::3], ids=ids)
def test_streamed_rows_are_kept_rows(case: tuple[str, str, str]) -> None:
    vectors = torch.randn(3, problem(case[0]).theta.numel(), generator=torch.Generator().manual_seed(4)).double()
    posterior, found = iterative(*case, ntkl.Iterative(rank=2, probes=2), batch_size=3), []
    structure, model = posterior.fitted.structure, posterior.fitted.model
    assert structure.rows
    for rows in (structure.rows, None):
        structure.rows = rows
        curvature = structure.curvature(model)
        noise = curvature.noise(2, torch.Generator().manual_seed(5))
        found.append(torch.cat([curvature.products(vectors).flatten(), noise.flatten()]))
    assert relative_error(found[1], found[0]) < (1e-12 if NETWORKS[case[0]].dtype == torch.float64 else 1e-6)


# --- error bars


@pytest.mark.slow
@pytest.mark.parametrize("likelihood", ["categorical", "gaussian", "poisson", "bernoulli"])
def test_two_standard_errors_cover(likelihood: str) -> None:
    """20 seeds: at least 18 within two standard errors, all within the bounds, with a sketch of little help."""
    network, x, y = digits_like(60)
    one = nn.Sequential(*network[:2], nn.Linear(16, 1).double())
    with torch.no_grad():
        one[2].weight.copy_(network[2].weight[:1])
        one[2].bias.zero_()
    build, module, given = {
        "categorical": (ntkl.Categorical, network, y), "gaussian": (lambda: ntkl.Gaussian(0.05), one, x[:, 0]),
        "poisson": (ntkl.Poisson, one, (y % 3).double()), "bernoulli": (ntkl.Bernoulli, one, (y % 2).double()),
    }[likelihood]
    x = x[: len(given)]
    exact = float(ntkl.laplace(module, (x, given), build(), structure="full").log_marginal_likelihood())
    inside = 0
    for seed in range(20):
        spec = ntkl.Iterative(rank=5, probes=16, seed=seed)
        found = ntkl.laplace(module, (x, given), build(), structure=spec).evidence()
        assert found.standard_error > 0 and found.lower <= exact <= found.upper
        inside += abs(float(found) - exact) <= 2 * found.standard_error
    assert inside >= 18


def test_a_saturated_network_has_error_bars_too() -> None:
    network, x, y = digits_like()
    sure = nn.Sequential(network, nn.Linear(5, 5, bias=False).double())
    with torch.no_grad():
        sure[1].weight.copy_(40 * torch.eye(5))
    exact = float(ntkl.laplace(sure, (x, y), ntkl.Categorical(), structure="full").log_marginal_likelihood())
    found = ntkl.laplace(sure, (x, y), ntkl.Categorical(), structure=ntkl.Iterative(rank=3, probes=8)).evidence()
    assert found.lower <= exact <= found.upper and abs(float(found) - exact) <= 4 * found.standard_error


@pytest.mark.slow
def test_the_wished_error_is_reached_or_a_warning_says_not(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = float(classes("full").log_marginal_likelihood())
    for wished in (0.05, 0.002):
        found = classes(ntkl.Iterative(relative_error=wished)).evidence()
        assert found.standard_error <= tuning.MISSED * wished * abs(float(found))
        assert abs(float(found) - exact) <= 4 * found.standard_error
    p = 12 * 16 + 16 + 16 * 5 + 5
    monkeypatch.setattr(tuning, "MOST_PROBES", 24)
    with pytest.warns(NTKLaplaceWarning, match="standard error is .* nats, and .* were wished"):
        # the budget holds five vectors of two copies and no rows
        classes(ntkl.Iterative(relative_error=1e-6), memory_budget=5 * 2 * 5 * p * 8)


def test_the_evidence_is_a_fixed_function_of_the_hyperparameters() -> None:
    values = []
    for _ in range(2):
        posterior = classes(ntkl.Iterative(rank=10, probes=4))
        with torch.no_grad():
            posterior.prior.log_precision += 0.3
        values.append(float(posterior.log_marginal_likelihood()))
    assert values[0] == values[1]
    step = 1e-4
    with torch.no_grad():
        posterior.prior.log_precision += step
    near = float(posterior.log_marginal_likelihood())
    # new probes would move it by about its standard error
    assert abs(near - values[0]) < 0.01 < 0.1 * posterior.evidence().standard_error


def test_the_lower_bound_is_the_better_of_two() -> None:
    """log det B <= log det M + k log(1 + t/k), with t and k trace and rank of the rest, and <= Σ_n log det B_nn."""
    network, x, _ = digits_like()
    parameters = {name: p.detach() for name, p in network.named_parameters()}
    jacobian = torch.func.jacrev(lambda p: torch.func.functional_call(network, p, (x,)))(parameters)
    rows = torch.cat([part.flatten(2) for part in jacobian.values()], 2)
    probs = torch.softmax(network(x).detach(), 1)
    curvature = torch.diag_embed(probs) - probs.unsqueeze(2) * probs.unsqueeze(1)
    blocks = curvature @ (rows @ rows.mT) / 0.1
    fischer = float(torch.logdet(torch.eye(5, dtype=torch.float64) + blocks).sum())
    better = set()
    for rank in (5, 130):
        precision = classes(ntkl.Iterative(rank=rank, probes=2)).posterior_precision
        values = precision.base.values
        trace, left = float(blocks.diagonal(dim1=1, dim2=2).sum() - values.sum()), rows.shape[2] - len(values)
        bounds = [float(values.log1p().sum()) + left * math.log1p(trace / left), fischer]
        assert precision.estimate.upper == pytest.approx(min(bounds), rel=1e-9)
        better.add(bounds.index(min(bounds)))
    assert better == {0, 1}


@pytest.mark.parametrize(("probes", "quantile"), [(2, 12.7062047), (5, 2.7764451)])
def test_the_standard_error_is_that_of_the_probes(probes: int, quantile: float) -> None:
    """Quantiles at 97.5 % of Student's t with one and four degrees of freedom, from a table; log det B counts half."""
    posterior = classes(ntkl.Iterative(rank=10, probes=probes))
    below, above = posterior.posterior_precision.probing.probed.T
    middle = 0.5 * (below + above)
    deviation = ((middle - middle.mean()).square().sum() / (probes - 1)).sqrt()
    expected = deviation / probes**0.5 * quantile / 1.95996398 + 0.5 * (above - below).mean()
    found = posterior.evidence()
    assert found.standard_error == pytest.approx(0.5 * float(expected), rel=1e-6)
    low = posterior.posterior_precision.base.log_det() + middle.mean()
    assert float(found) == pytest.approx(float(posterior.log_joint().detach() - 0.5 * low), rel=1e-10)


def probing(own: Any, probes: int, wished: float, earlier: ProbedLogDet | None = None) -> ProbedLogDet:
    return ProbedLogDet(own.probing.approximation, probes, 0, lambda _: wished, earlier)


def test_more_probes_keep_the_earlier_ones() -> None:
    own = classes(ntkl.Iterative(rank=10, probes=4)).posterior_precision
    whole, fewer = probing(own, 7, 1e-6), probing(own, 4, 1e-6)
    more = probing(own, 7, 1e-6, fewer)
    assert whole.probed.shape == (7, 2) and relative_error(more.probed, whole.probed) < 1e-8
    assert torch.equal(more.probed[:4], fewer.probed)


def test_probes_do_not_depend_on_how_many_are_drawn_at_a_time() -> None:
    own = classes(ntkl.Iterative(rank=10, probes=4)).posterior_precision
    every = torch.cat(list(probing(own, 21, 1e-6).signs(0)))
    assert every.shape == (21, own.num_parameters) and bool((every.abs() == 1).all())
    for start in (1, 8, 20):
        assert torch.equal(torch.cat(list(probing(own, 21, 1e-6).signs(start))), every[start:])
    assert torch.equal(torch.cat(list(probing(own, 3, 1e-6).signs(0))), every[:3])


@pytest.mark.slow
def test_later_probes_take_fewer_steps_and_their_brackets_say_what_that_costs() -> None:
    own = classes(ntkl.Iterative(rank=5, probes=4)).posterior_precision
    loose, tight = (probing(own, 40, wished) for wished in (4.0, 1e-6))
    assert loose.later_steps < loose.estimate.steps < tight.estimate.steps
    below, above = loose.probed.T
    exact = tight.probed.mean(1)
    assert bool((below[:8] <= exact[:8]).all()) and bool((exact[:8] <= above[:8]).all())
    shift = (0.5 * (below + above) - exact)[8:].mean()
    assert 0.0 < abs(float(shift)) < 0.5 * float((above - below)[8:].mean())
    rule = lanczos(loose.preconditioned, next(loose.signs(8)), 1.0, loose.later_steps, lambda _: False)
    early = rule.bracket(torch.log)
    uncorrected = 0.5 * (early[0] + early[1]) - exact[8:16]
    assert abs(float(uncorrected.mean())) > 4 * abs(float(shift))


def test_the_seed_sets_all_random_numbers() -> None:
    fits = (classes(ntkl.Iterative(rank=10, probes=4, seed=s)).posterior_precision for s in (0, 1))
    left, other = (one.refined for one in fits)
    own = left.probing
    low = own.approximation
    assert not torch.allclose(low.sketch.tests, other.probing.approximation.sketch.tests)
    probed = (ProbedLogDet(low, 4, seed, own.wished) for seed in (0, 1))
    same, moved = (Remainder(one, 10, 0.05).enough for one in probed)
    near, far = (relative_error(one.probing.probed, own.probed) for one in (same, moved))
    assert near < 1e-3 < far
    assert torch.equal(same.draws, left.enough.draws) and not torch.allclose(moved.draws, left.draws)
    noise = own.curvature.noise(3, torch.Generator().manual_seed(8))
    one, four = (types.SimpleNamespace(noise=lambda *_, size=size: size * noise) for size in (1.0, 2.0))
    drawn = replace(low, curvature=one).noise(3, torch.Generator())
    scaled = replace(low, curvature=four, sketch=low.sketch.scaled(4.0))
    assert relative_error(scaled.noise(3, torch.Generator()), 2.0 * drawn) < 1e-12


# --- hyperparameters


def test_the_gradient_of_a_local_model_is_its_own() -> None:
    precision = classes(ntkl.Iterative(rank=10, probes=4), ntkl.GaussianPrior(0.1, groups="layer")).posterior_precision
    (term,) = precision.local_log_det()
    log_det = term.value
    shift = torch.tensor([0.2, -0.3], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(log_det, (shift,), atol=1e-6)
    zero = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    assert float(log_det(zero).detach()) == pytest.approx(precision.informed.probing.estimate.value, rel=1e-10)
    (slope,) = torch.autograd.grad(log_det(zero), zero)
    assert relative_error(-slope, precision.effective_parameters()) < 1e-10
    assert torch.equal(term.value_and_slope(zero.detach())[1], slope)


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True])
def test_the_gradient_in_a_temperature_is_right_by_draws(streamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sketch leaves a part of log det B: the gradient is that of draws, and no block of a single point is used."""
    if streamed:
        monkeypatch.setattr("ntk_laplace.structures.sketched.memory_of", lambda _: 10_000)
    monkeypatch.delattr(IterativePrecision, "covariance_blocks")
    found, exact = (classes(one, ntkl.GaussianPrior(0.1)) for one in (ntkl.Iterative(rank=10, probes=4), "full"))
    slopes = []
    for one in (found, exact):
        one.log_det().backward()
        slopes.append(next(one.likelihood.parameters()).grad)
    assert relative_error(*slopes) < 0.03
    drawn, used = found.posterior_precision.drawn, torch.zeros(())
    for rows, root in found.posterior_precision.curvature.rows("Jacobians"):
        seen = drawn.outputs(rows, len(drawn.draws))
        used = used + (seen if root is None else root.mT @ seen).square().sum((0, 1))
    assert relative_error(used * len(used), drawn.used) < 1e-9
    one = drawn.weight_in_sums(len(drawn.draws)) * drawn.used.mean()
    other = found.posterior_precision.effective_parameters().sum()
    assert min(drawn.used.mean(), other) < one < max(drawn.used.mean(), other)


@pytest.mark.slow
def test_gradients_in_the_noise_of_each_point_are_not_by_draws() -> None:
    network, x, _ = digits_like(30)
    y, noise = torch.randn(30, 5, dtype=torch.float64), torch.linspace(0.2, 1.0, 150, dtype=torch.float64).view(30, 5)
    slopes = []
    for structure in (ntkl.Iterative(rank=10, probes=4), "full"):
        posterior = ntkl.laplace(network, (x, y), ntkl.Gaussian(noise), ntkl.GaussianPrior(0.1), structure)
        posterior.log_det().backward()
        slopes.append(next(posterior.likelihood.parameters()).grad)
    assert relative_error(*slopes) < 0.03


@pytest.mark.parametrize("which", ["layer", "all"])
def test_learned_precisions_are_those_of_full_weight_space(which: str) -> None:
    found, exact = (classes(s, ntkl.GaussianPrior(2.0, groups=which)) for s in ("iterative", "full"))
    history, _ = found.fit_hyperparameters(), exact.fit_hyperparameters()
    assert history.converged and history.evidence == sorted(history.evidence) and history.best == len(history) - 1
    assert relative_error(found.prior.precision, torch.tensor(history.values[-1], dtype=torch.float64)) < 1e-12
    assert relative_error(found.prior.precision, exact.prior.precision) < 0.03
    assert relative_error(found.evidence().value, exact.evidence().value) < 0.005


def test_an_estimate_is_not_maximized_with_its_correction() -> None:
    with pytest.raises(ntkl.UnsupportedError, match=r"without a standard error, .*structure='iterative'.* Leave corr"):
        classes(ntkl.Iterative(rank=10, probes=2)).fit_hyperparameters(correction=True)
    assert torch.isfinite(classes(ntkl.Nystrom(rank=10)).log_marginal_likelihood(correction=True))


@pytest.mark.slow
def test_without_a_local_model_no_line_search_follows_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three noise variances do more than scale the curvature; and the matrices of the groups may take too much."""
    network, x, _ = digits_like(40)
    y = x[:, :5] + 0.1 * torch.randn(len(x), 5, generator=torch.Generator().manual_seed(6), dtype=torch.float64)

    def noisy(structure: Any) -> ntkl.Posterior:
        return ntkl.laplace(network, (x, y), ntkl.Gaussian(torch.ones(5)), structure=structure)

    found, few = noisy(ntkl.Iterative(rank=10, probes=2)), {"steps": 2, "tolerance": 1.0}
    with pytest.raises(ntkl.UnsupportedError, match=r'in precision, noise; got "lbfgs"\. Name parameters='):
        found.fit_hyperparameters()
    with pytest.warns(NTKLaplaceWarning, match="in precision, noise is an estimate without a local model"):
        found.fit_hyperparameters(method="adam", **few)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NTKLaplaceWarning)
        found.fit_hyperparameters(parameters=["precision"])
        noisy("full").fit_hyperparameters(**few)
        noisy(ntkl.Nystrom(rank=10)).fit_hyperparameters(parameters=["precision"], **few)  # its gradient is its own
    monkeypatch.setattr(tuning, "LOCAL_BYTES", 0)
    with pytest.raises(ntkl.UnsupportedError, match=r'Use method="mackay", or fewer prior groups'):
        found.fit_hyperparameters(parameters=["precision"])
    found.fit_hyperparameters(method="mackay", parameters=["precision"], steps=3, tolerance=1.0)


def test_noise_and_precision_together() -> None:
    network, x, _ = digits_like()
    head = nn.Sequential(*network[:2], nn.Linear(16, 2).double())
    y = x[:, :2] + 0.1 * torch.randn(len(x), 2, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    fits = [ntkl.laplace(head, (x, y), ntkl.Gaussian(1.0), structure=s) for s in ("iterative", "full")]
    for one in fits:
        one.fit_hyperparameters()
    assert relative_error(fits[0].likelihood.noise, fits[1].likelihood.noise) < 0.03
    assert relative_error(fits[0].prior.precision, fits[1].prior.precision) < 0.03


def test_the_curve_over_precisions_from_one_run() -> None:
    found, exact = classes(ntkl.Iterative(rank=40, probes=16)), classes("full")
    factors = torch.tensor([0.1, 1.0, 30.0])
    one, other = found.evidence_curve(factors), exact.evidence_curve(factors)
    # without the remainder the low rank alone is further away
    low = torch.log1p(found.posterior_precision.base.values / factors.unsqueeze(1)).sum(1)
    full = torch.log1p(exact.spectrum().clamp_min(0) / factors.unsqueeze(1)).sum(1)
    assert bool(((one - other).abs() < 0.5 * 0.25 * (full - low)).all())


# --- covariances and samples


@pytest.mark.slow
def test_draws_of_what_the_sketch_leaves_have_its_covariance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "REMAINDER_DRAWS", 4000)
    _, x, y = digits_like(40)
    small = nn.Sequential(nn.Linear(12, 5).double())
    found = ntkl.laplace(small, (x, y), ntkl.Categorical(), structure=ntkl.Iterative(rank=20, probes=2))
    precision = found.posterior_precision
    fine, eye = precision.refined, torch.eye(found.num_parameters, dtype=torch.float64)
    left = fine.probing.base.whitened_solve(eye) - precision.solve(eye)  # the prior precision is 1
    draws = fine.enough.draws
    assert relative_error(draws.T @ draws / len(draws), left) < 0.1


@pytest.mark.slow
def test_a_weak_prior_gives_what_full_weight_space_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variances are of the size of 1/δ here; a rank that is too small is refused."""
    prior = ntkl.GaussianPrior(1e-8)
    found, exact = classes("iterative", prior), classes("full", prior)
    value = found.evidence()
    assert value.lower <= float(exact.evidence()) <= value.upper and value.upper - value.lower < 0.01
    x = digits_like(20, seed=1)[1]
    assert relative_error(found.latent_moments(x)[1], exact.latent_moments(x)[1]) < 1e-6
    gradient = exact.fitted.joint_gradient()
    one, other = (p.posterior_precision.solve(gradient) for p in (found, exact))
    assert relative_error(one, other) < 1e-5
    assert found.sample(2).isfinite().all()
    monkeypatch.setattr(tuning, "CONJUGATE_GRADIENT_STEPS", 100)
    with pytest.raises(NumericalError, match=r"after 10\d products\. Use a larger prior precision, or a larger rank"):
        classes(ntkl.Iterative(rank=20, probes=2), prior).posterior_precision.solve(gradient)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [10, 40, 160])
def test_variances_are_right_at_any_rank(rank: int) -> None:
    found, exact = classes(ntkl.Iterative(rank=rank, probes=4)), classes("full")
    x = digits_like(20, seed=1)[1]
    one, other = found.latent_moments(x)[1], exact.latent_moments(x)[1]
    ratio = (one / other).diagonal(dim1=1, dim2=2) - 1.0
    assert float(ratio.abs().max()) < 4 * ntkl.Iterative.variance_error
    joint, whole = (p.latent(x).covariance_matrix for p in (found, exact))
    assert relative_error(joint, whole) < 4 * ntkl.Iterative.variance_error
    low = found.posterior_precision.base
    for rows in found.fitted.rows_at(torch.arange(20)):
        above = low.covariance_blocks(rows) - exact.posterior_precision.covariance_blocks(rows)
        assert float(torch.linalg.eigvalsh(above).min()) > -1e-9  # the low rank alone is an upper bound


@pytest.mark.slow
def test_the_wished_error_of_variances_says_how_they_are_computed() -> None:
    """Solved, by what draws find beyond the low rank, and by draws alone, for outputs that are few."""
    exact, x = classes("full"), digits_like(20, seed=1)[1]
    want, errors = exact.latent_moments(x)[1], []
    for wished in (0.05, 0.17, 0.4):
        found = classes(ntkl.Iterative(rank=40, probes=4, variance_error=wished))
        ratio = (found.latent_moments(x)[1] / want).diagonal(dim1=1, dim2=2) - 1.0
        errors.append(float(ratio.square().mean().sqrt()))
    assert errors[0] < 1e-9 and 1e-3 < errors[1] < 0.17 < 2 * errors[2] < 0.8
    drawn = found.posterior_precision.drawn_for_variances
    assert len(drawn.draws) == tuning.REMAINDER_DRAWS
    for rows in found.fitted.rows_at(torch.arange(20)):
        seen = drawn.outputs(rows, 64)
        assert torch.equal(seen @ seen.mT, found.posterior_precision.covariance_blocks(rows))
        wide = rows.weighted(torch.randn(rows.num_examples, rows.num_cotangents, 17, dtype=torch.float64))
        exactly = exact.posterior_precision.covariance_blocks(wide)
        assert relative_error(found.posterior_precision.covariance_blocks(wide), exactly) < 0.1


@pytest.mark.slow
def test_draws_of_the_posterior_do_not_depend_on_what_was_asked_before() -> None:
    x, slopes, variances = digits_like(20, seed=1)[1], [], []
    for order in ("gradient first", "variances first"):
        found = classes(ntkl.Iterative(rank=20, probes=4, variance_error=0.2))
        if order == "variances first":
            variances.append(found.latent_moments(x)[1])
        found.log_det().backward()
        slopes.append(next(found.likelihood.parameters()).grad)
        if order == "gradient first":
            variances.append(found.latent_moments(x)[1])
    assert relative_error(*slopes) < 1e-3 and relative_error(*variances) < 1e-2


@pytest.mark.slow
def test_draws_of_the_remainder_are_subtracted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "REMAINDER_DRAWS", 1000)
    monkeypatch.setattr(tuning, "LEFT_SHARE", 0.3)
    monkeypatch.setattr(tuning, "DRAWS_PER_OUTPUT", 1000)  # no draws alone; and none is solved
    found, exact = classes(ntkl.Iterative(rank=40, probes=4, variance_error=0.999)), classes("full")
    x = digits_like(20, seed=1)[1]
    rows = next(iter(found.fitted.rows_at(torch.arange(20))))
    low = found.posterior_precision.base.covariance_blocks(rows).diagonal(dim1=1, dim2=2)
    seen, other = (p.posterior_precision.covariance_blocks(rows).diagonal(dim1=1, dim2=2) for p in (found, exact))
    assert float((low / other - 1.0).mean()) > 0.1
    assert abs(float((seen / other - 1.0).mean())) < 0.02
    joint, whole = (p.latent(x).covariance_matrix.diagonal() for p in (found, exact))
    assert abs(float((joint / whole - 1.0).mean())) < 0.02


def test_solved_variances_are_exact_from_the_root_of_the_residual() -> None:
    found, exact = classes(ntkl.Iterative(rank=10, probes=2)), classes("full")
    rows = next(iter(exact.fitted.rows_at(torch.arange(20))))
    one = Remainder(found.posterior_precision.probing, 1, 0.05).solved_blocks(rows)
    assert relative_error(one, exact.posterior_precision.covariance_blocks(rows)) < 1e-10


def test_a_singular_prior_covariance_is_no_error() -> None:
    network, x, y = digits_like()
    parameters = {name: p.detach() for name, p in network.named_parameters()}
    jacobian = torch.func.jacrev(lambda p: torch.func.functional_call(network, p, (x,)))(parameters)
    dense = torch.cat([part.flatten(2) for part in jacobian.values()], 2).flatten(0, 1)
    assert dense.shape[0] > dense.shape[1]
    for dtype, limit in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        posterior = ntkl.laplace(network, (x, y), ntkl.Categorical(), ntkl.GaussianPrior(0.1), "full", dtype=dtype)
        assert relative_error(posterior.prior_latent(x).covariance_matrix.double(), dense @ dense.T / 0.1) < limit


@pytest.mark.slow
def test_samples_have_the_exact_covariance() -> None:
    network, x, y = digits_like(30)
    found, exact = (
        ntkl.laplace(network, (x, y), ntkl.Categorical(), ntkl.GaussianPrior(0.1), structure)
        for structure in (ntkl.Iterative(rank=10, probes=2), "full")
    )
    draws = found.posterior_precision.sample(1000, torch.Generator().manual_seed(7))
    rows = next(iter(exact.fitted.rows_at(torch.arange(6))))
    seen = rows.products(exact.network.shapes.parts(draws)).flatten(0, 1)
    variance = exact.posterior_precision.covariance_blocks(rows).diagonal(dim1=1, dim2=2).T.flatten()
    assert float((seen.square().mean(1) / variance - 1).abs().max()) < 5 * (2 / 1000) ** 0.5


# --- other verbs


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Newton's method goes too far")
def test_what_ifs_equal_those_of_full_weight_space() -> None:
    x, y = digits_like(8, seed=2)[1:]
    found, exact = classes(COMPLETE), classes("full")
    new = digits_like(5, seed=3)[1]

    def check(one: ntkl.Posterior, other: ntkl.Posterior) -> None:
        a, b = one.latent_moments(new), other.latent_moments(new)
        assert relative_error(a[0], b[0]) < 1e-7 and relative_error(a[1], b[1]) < 1e-6
        assert relative_error(one.log_marginal_likelihood(), other.log_marginal_likelihood()) < 1e-7

    check(found.remove([1, 5]), exact.remove([1, 5]))
    check(found.remove([1, 5], steps=None), exact.remove([1, 5], steps=None))
    check(found.relabel([3], torch.tensor([2])), exact.relabel([3], torch.tensor([2])))
    check(found.add(x, y), exact.add(x, y))
    check(found.condition((x, y)), exact.condition((x, y)))
    check(found.refit(), exact.refit())
    index = torch.arange(0, 100, 2)
    check(found.subset(index), exact.subset(index))


def test_explanations_and_leave_one_out_of_named_points() -> None:
    found, exact = classes(COMPLETE), classes("full")
    x = digits_like(3, seed=4)[1]
    one, other = (p.removal_effects(x) for p in (found, exact))
    assert relative_error(one, other) < 1e-6
    one, other = (p.leave_one_out(points=[0, 7, 30]) for p in (found, exact))
    assert relative_error(one.log_density, other.log_density) < 1e-6


def test_points_of_high_leverage_are_left_out_exactly() -> None:
    """With leverage h, a relative error of V is one h/(1 - h) times as large of (I - ΛV)⁻¹."""
    network, x, y = digits_like(40)
    weights = torch.zeros(40, dtype=torch.float64)
    weights[::8] = 30.0
    found, exact = (
        ntkl.laplace(network, (x, (y + 1) % 5, weights), ntkl.Categorical(), ntkl.GaussianPrior(0.1), structure)
        for structure in (ntkl.Iterative(rank=16, probes=2), "full")
    )
    assert float(exact.explain(x[:1]).leverage.max()) > 0.95
    for by in ("output", "variance"):
        one, other = (p.removal_effects(x[:5], by=by) for p in (found, exact))
        assert relative_error(one, other) < 0.1


STORED = [ntkl.Iterative(probes=4), ntkl.Iterative(rank=10, probes=4, variance_error=0.2), ntkl.Nystrom(rank=20)]


@pytest.mark.parametrize("structure", STORED, ids=str)
def test_a_checkpoint_without_data_gives_the_same(structure: Any, tmp_path: Any) -> None:
    posterior, path = classes(structure), tmp_path / "posterior.pt"
    posterior.save(path, include_data=False)
    network, x, _ = digits_like()
    loaded = ntkl.load(path, network)
    one, other = posterior.evidence(), loaded.evidence()
    assert (float(one), one.standard_error) == (float(other), other.standard_error)
    assert torch.allclose(posterior.predict(x[:9]).probs, loaded.predict(x[:9]).probs, rtol=1e-9)
    assert torch.allclose(posterior.effective_parameters(), loaded.effective_parameters(), rtol=1e-9)
    there = ntkl.load(path, network).to(dtype=torch.float32)
    assert relative_error(there.latent_moments(x[:9])[1].double(), posterior.latent_moments(x[:9])[1]) < 1e-3
    again = ntkl.load(path, network, (x, digits_like()[2]))
    for one in (posterior, again):
        with torch.no_grad():
            one.prior.log_precision += 1.0
    assert again.log_det() < 0.99 * loaded.log_det()
    assert relative_error(again.log_det(), posterior.log_det()) < 0.01


@pytest.mark.slow
def test_what_draws_alone_do_not_give_is_as_with_the_default(tmp_path: Any) -> None:
    """Leave-one-out and joint covariances. Their low rank is not computed to be saved, and saved if it exists."""
    default, coarse = (classes(ntkl.Iterative(probes=4, variance_error=error)) for error in (0.05, 0.2))
    path, (network, x, y) = tmp_path / "posterior.pt", digits_like()
    coarse.save(path, include_data=True)
    alone, with_data = ntkl.load(path, network), ntkl.load(path, network, (x, y))
    assert "refined" not in vars(coarse.posterior_precision)
    for loaded in (alone, with_data):
        assert torch.allclose(loaded.latent_moments(x[:5])[1], coarse.latent_moments(x[:5])[1], rtol=1e-9)
    with refused(ntkl.DataError, "the training data", "a checkpoint", "data="):
        alone.latent(x[:5])
    for found in (coarse, with_data):
        assert relative_error(found.leave_one_out().log_density, default.leave_one_out().log_density) < 1e-3
        assert relative_error(*(one.latent(x[:5]).covariance_matrix for one in (found, default))) < 1e-2
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    uncertain = [found.posterior_precision.refined.enough.uncertain(one, 0.5 * one) for found in (coarse, default)]
    assert uncertain == [torch.tensor([True])] * 2  # with 64 draws of half of a variance, its error is 0.09
    coarse.save(path, include_data=True)
    again = ntkl.load(path, network)
    assert relative_error(*(one.latent(x[:5]).covariance_matrix for one in (again, coarse))) < 1e-9


@pytest.mark.slow
def test_a_rank_does_not_limit_the_draws_for_a_gradient() -> None:
    found, exact = classes(ntkl.Iterative(rank=10, probes=4)), classes("full")
    slopes = []
    for posterior in (found, exact):
        posterior.log_det().backward()
        slopes.append(next(posterior.likelihood.parameters()).grad)
    assert relative_error(*slopes) < 0.04
    drawn = found.posterior_precision.drawn
    assert drawn is not None and tuning.REMAINDER_DRAWS < len(drawn.draws) <= tuning.MOST_DRAWS


@pytest.mark.parametrize("structure", ["gp", "full", "iterative"])
def test_compression_says_what_it_costs(structure: str) -> None:
    posterior, exact = classes(structure, batch_size=40), classes("full")
    small = posterior.compress(60)
    assert small.structure == "nystrom" and "rank 60" in small.reason and "nats too large" in small.reason
    assert float(small.log_marginal_likelihood()) >= float(exact.log_marginal_likelihood())
    whole = posterior.compress(exact.num_parameters)
    assert relative_error(whole.log_marginal_likelihood(), exact.log_marginal_likelihood()) < 1e-8
    x = digits_like(5, seed=3)[1]
    assert relative_error(whole.latent_moments(x)[1], exact.latent_moments(x)[1]) < 1e-7


def test_a_rank_above_that_of_the_curvature_is_the_curvature() -> None:
    """No matrix of the rank that is asked for is made; the rest has nothing to keep."""
    exact = classes("full")
    value = exact.log_marginal_likelihood()
    for found in (exact.compress(10**9), classes(ntkl.Nystrom(rank=10**9)), classes(ntkl.Iterative(rank=10**9))):
        assert relative_error(found.log_marginal_likelihood(), value) < 1e-8
    assert "rank 293 of" in exact.compress(10**9).reason


def test_three_times_the_effective_parameters_are_the_posterior() -> None:
    exact = classes("full")
    rank = math.ceil(3 * float(exact.effective_parameters().sum()))
    small = classes(ntkl.Nystrom(rank=rank))
    x = digits_like(40, seed=3)[1]
    ratio = (small.latent_moments(x)[1] / exact.latent_moments(x)[1]).diagonal(dim1=1, dim2=2) - 1.0
    assert 0 <= float(ratio.min()) + 1e-9 and float(ratio.max()) < 0.005
    assert relative_error(small.log_marginal_likelihood(), exact.log_marginal_likelihood()) < 0.005


@pytest.mark.parametrize("rank", [20, 60])
def test_the_low_rank_alone_is_nearly_the_best_of_its_rank(rank: int) -> None:
    values = classes("full").spectrum()
    assert values is not None
    left = float(torch.log1p(values.clamp_min(0).sort(descending=True).values[rank:]).sum())  # by the best of all
    found = classes(ntkl.Nystrom(rank=rank))
    assert found.fitted.structure.at.sketch.factor.shape[0] == rank  # type: ignore[attr-defined]
    lost = float(classes("full").log_det() - found.log_det())
    assert left - 1e-9 <= lost < 1.03 * left


def test_the_other_precision_of_the_algebra() -> None:
    network, x, y = digits_like()
    found = ntkl.laplace(network, (x, y), ntkl.Categorical(), ntkl.GaussianPrior(0.1), "iterative", dtype=torch.float32)
    exact = classes("full")
    assert abs(float(found.evidence()) - float(exact.evidence())) <= 4 * found.evidence().standard_error + 1e-3
    new = digits_like(20, seed=1)[1]
    ratio = (found.latent_moments(new)[1].double() / exact.latent_moments(new)[1])
    assert float((ratio.diagonal(dim1=1, dim2=2) - 1).abs().max()) < 4 * ntkl.Iterative.variance_error


@pytest.mark.slow
def test_long_work_shows_its_progress(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    x, found = digits_like(20, seed=1)[1], {}
    for progress in (True, False):
        posterior = classes(ntkl.Iterative(rank=10, probes=4), progress=progress)
        assert posterior.fitted.structure.rows  # kept
        found["evidence", progress] = capsys.readouterr().err
        posterior.latent_moments(x)
        found["predictions", progress] = capsys.readouterr().err
    assert "10 products" in found["evidence", True] and "4 products" in found["evidence", True]
    assert "predictions" in found["predictions", True] and "64 draws" in found["predictions", True]
    assert found["evidence", False] == found["predictions", False] == ""


# --- bad input


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ntkl.Iterative(variance_error=0.0), "a variance_error between 0 and 1.*0.0.*Leave it out for 0.05"),
        (lambda: ntkl.Iterative(rank=0), "rank"),
        (lambda: ntkl.Iterative(probes=1), "probes"),
        (lambda: ntkl.Iterative(relative_error=0), "a relative_error between 0 and 1; got 0"),
        (lambda: ntkl.Iterative(relative_error=True), "a relative_error between 0 and 1; got True"),
        (lambda: ntkl.Iterative(seed=-1), "seed"),
        (lambda: ntkl.Nystrom(rounds=0), "rounds"),
    ],
)
def test_wrong_options_are_refused(build: Any, message: str) -> None:
    with pytest.raises(HyperparameterError, match=message):
        build()


@pytest.mark.parametrize("spread", [float("nan"), float("inf")])
def test_numbers_that_overflow_are_told(spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of some probes do at a precision of 1e-300: their spread is no number."""
    network, x = nn.Linear(4, 3).double(), torch.randn(30, 4).double()
    monkeypatch.setattr(probed_log_det, "student", lambda _: spread)
    with pytest.raises(NumericalError, match="larger prior precision"):
        ntkl.laplace(network, (x, torch.arange(30) % 3), ntkl.Categorical(), structure=ntkl.Iterative(rank=2))


def test_a_rank_that_does_not_fit_is_refused_before_anything_is_read() -> None:
    with pytest.raises(MemoryBudgetError, match=r"3 x 293 vectors of 293 parameters"):
        classes(ntkl.Iterative(rank=1000), memory_budget=10**6)
    with pytest.raises(HyperparameterError, match="rank"):
        classes("full").compress(0)
    with pytest.raises(ntkl.UnsupportedError, match="an exact structure to compress"):
        classes("kfac").compress(5)


def test_a_likelihood_without_curvature_left_is_no_error() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        network, x, y = digits_like()
        posterior = ntkl.laplace(network, (x, y), ntkl.Categorical(), structure=ntkl.Iterative(rank=5, probes=2))
        precision = posterior.posterior_precision
    assert isinstance(precision, IterativePrecision) and precision.base.values.min() > 0
