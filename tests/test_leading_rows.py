"""The low rank of "iterative" from the rows of SᵀJ of largest norm, where few of them have most of the curvature.

References are dense: rows written out, H and its inverse, and a fit with structure="full".
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ntk_laplace as ntkl
from class_cases import classes, digits_like
from exact_cases import ids
from ntk_laplace.curvature.leading_rows import LeadingRows, LeadingRowsPrecision, leading_rows
from ntk_laplace.curvature.sketch import RandomSketch
from ntk_laplace.errors import UnsupportedError
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.reduction import SingleProcess
from ntk_laplace.structures.forecast import Problem
from ntk_laplace.structures.sketch_forecast import expected_rows
from pairwise import one_each
from ranks import on_ranks, shares, take_all
from reference import relative_error
from registry import LIKELIHOODS, NETWORKS, PRIORS, problem, targets

pytestmark = pytest.mark.filterwarnings("ignore:no factor rule covers")


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small problems take leading rows too."""
    monkeypatch.setattr(tuning, "FIRST_LEADING", 8)
    monkeypatch.setattr(tuning, "ROWS_PER_LEADING", 4)


def of(posterior: ntkl.Posterior) -> tuple[LeadingRows, LeadingRowsPrecision]:
    """The sketch and its precision, which have to be of this kind."""
    precision: Any = posterior.posterior_precision
    assert isinstance(precision.sketch, LeadingRows) and isinstance(precision.base, LeadingRowsPrecision)
    return precision.sketch, precision.base


# --- the low rank


CASES = one_each(NETWORKS, LIKELIHOODS, PRIORS)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_the_precision_is_that_of_its_rows_written_out(case: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch,
                                                       ) -> None:
    monkeypatch.setattr(tuning, "ROWS_PER_LEADING", 1)
    monkeypatch.setattr(tuning, "FIRST_LEADING", 3)
    monkeypatch.setattr(tuning, "LEADING_SHARE", 0.3)
    network, likelihood, prior = case
    given = problem(network)
    posterior = ntkl.laplace(given.network, (given.x, targets(LIKELIHOODS[likelihood], given)),
                             LIKELIHOODS[likelihood].build(), PRIORS[prior].build(given),
                             ntkl.Iterative(rank=1, probes=2))
    fitted: Any = posterior.fitted
    curvature, root = fitted.structure.curvature(fitted.model), fitted.points.root(fitted.curvature_type,
                                                                                  fitted.likelihood)
    sketch = leading_rows(curvature, 10**6)
    assert sketch is not None
    approximation = sketch.at(curvature)
    base = approximation.base
    p, r = posterior.num_parameters, base.rank
    eye, shapes = torch.eye(p, dtype=torch.float64), posterior.network.shapes
    factor = sketch.rows.dense(shapes)[0]
    whole = torch.cat([rows.dense(shapes) for rows in fitted.rows_at(torch.arange(len(root)))], 1).transpose(0, 1)
    weighted = (root.mT @ whole).detach()  # SᵀJ, (N, R, P)
    scale = base.prior_precision.rsqrt()
    inside = factor * scale
    m = eye + inside.T @ inside

    # the rows are the largest, of rows turned so that those of one example are orthogonal in units of the prior
    turned = torch.linalg.svd(weighted * scale, full_matrices=False)[1].square().flatten().sort(descending=True).values
    assert relative_error(inside.square().sum(1).sort(descending=True).values, turned[:r]) < 1e-8
    rest = (weighted.flatten(0, 1).T @ weighted.flatten(0, 1)) - factor.T @ factor
    assert relative_error(torch.einsum("nrp,nrs,nsq->pq", weighted, sketch.rest, weighted), rest) < 1e-9
    assert float(torch.linalg.eigvalsh(rest * scale * scale.unsqueeze(1)).min()) > -1e-9 * float(turned[0])

    vectors = torch.randn(4, p, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    half, other = base.whitened_half(eye), base.whitened_half(eye, transpose=True)
    assert relative_error(half, other.T) < 1e-10
    assert relative_error(half.T @ half, torch.linalg.inv(m)) < 1e-8  # rows of `half` are W applied to unit vectors
    assert relative_error(base.whitened_solve(vectors) @ m, vectors) < 1e-8
    assert relative_error(base.products(vectors), vectors @ factor.T @ factor) < 1e-10
    assert relative_error(base.log_det(), torch.logdet(m)) < 1e-9
    own = torch.linalg.eigvalsh(inside @ inside.T)
    assert base.trace == pytest.approx(float(own.sum()), rel=1e-10)
    assert 0.5 * float(own[-1]) < base.largest <= float(own[-1]) * (1 + 1e-9)
    values, seen = base.eigenvalues(vectors)
    assert relative_error(values, own) < 1e-8
    assert float(seen.sum()) == pytest.approx(float((vectors @ inside.T).square().sum()), rel=1e-9)
    parts = base.group_grams()
    dense = torch.stack([(q := inside[:, base.groups == g]) @ q.T for g in range(len(parts))])
    assert relative_error(parts, dense) < 1e-10

    generator = torch.Generator().manual_seed(2)
    drawn = torch.randn(*root.shape[::2], 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    noise = torch.einsum("nrp,nrs,nsm->mp", weighted, sketch.rest, drawn)
    assert relative_error(approximation.noise(3, generator), noise) < 1e-8
    assert relative_error(sketch.scaled(9.0).rows.dense(shapes)[0], 3.0 * factor) < 1e-12


def test_they_are_taken_where_few_rows_have_most_of_the_trace() -> None:
    of(classes("iterative"))
    network, x, _ = digits_like()
    alike = ntkl.laplace(network, (x, x[:, :5]), ntkl.Gaussian(0.1), structure="iterative")
    assert isinstance(alike.posterior_precision.sketch, RandomSketch)
    ranked = classes(ntkl.Iterative(rank=20)).posterior_precision.sketch
    assert isinstance(ranked, RandomSketch)


# --- what is computed with it


@pytest.mark.slow
@pytest.mark.parametrize("likelihood", ["categorical", "saturated", "poisson"])
def test_two_standard_errors_cover(likelihood: str) -> None:
    """20 seeds: at least 18 within two standard errors, all within the bounds."""
    network, x, y = digits_like()
    if likelihood == "saturated":
        network = nn.Sequential(network, nn.Linear(5, 5, bias=False).double())
        with torch.no_grad():
            network[1].weight.copy_(4 * torch.eye(5))
    elif likelihood == "poisson":
        network = nn.Sequential(*network[:2], nn.Linear(16, 1).double())
        with torch.no_grad():
            network[2].weight.fill_(1.5)
    data = (x, (y % 3).double() if likelihood == "poisson" else y)
    build = ntkl.Poisson if likelihood == "poisson" else ntkl.Categorical
    exact, inside = float(ntkl.laplace(network, data, build(), structure="full").log_marginal_likelihood()), 0
    for seed in range(20):
        spec = ntkl.Iterative(probes=16, relative_error=0.05, seed=seed)
        posterior = ntkl.laplace(network, data, build(), structure=spec)
        of(posterior)
        found = posterior.evidence()
        assert found.standard_error > 0 and found.lower <= exact <= found.upper
        inside += abs(float(found) - exact) <= 2 * found.standard_error
    assert inside >= 18


@pytest.mark.slow
def test_covariances_samples_and_explanations() -> None:
    found, exact = classes("iterative"), classes("full")
    of(found)
    x = digits_like(20, seed=1)[1]
    one, other = found.latent_moments(x)[1], exact.latent_moments(x)[1]
    ratio = (one / other).diagonal(dim1=1, dim2=2) - 1.0
    assert float(ratio.abs().max()) < 4 * ntkl.Iterative.variance_error
    joint, whole = (p.latent(x).covariance_matrix for p in (found, exact))
    assert relative_error(joint, whole) < 4 * ntkl.Iterative.variance_error
    gradient = exact.fitted.joint_gradient()
    one, other = (p.posterior_precision.solve(gradient) for p in (found, exact))
    assert relative_error(one, other) < 1e-8
    one, other = (p.leave_one_out(points=[0, 7, 30]).log_density for p in (found, exact))
    assert relative_error(one, other) < 0.02
    assert relative_error(found.effective_parameters(), exact.effective_parameters()) < 0.03
    draws = found.posterior_precision.sample(500, torch.Generator().manual_seed(7))
    rows = next(iter(exact.fitted.rows_at(torch.arange(6))))
    seen = rows.products(exact.network.shapes.parts(draws)).flatten(0, 1)
    variance = exact.posterior_precision.covariance_blocks(rows).diagonal(dim1=1, dim2=2).T.flatten()
    assert float((seen.square().mean(1) / variance - 1).abs().max()) < 5 * (2 / 500) ** 0.5


@pytest.mark.slow
def test_draws_of_what_the_rows_leave_have_its_covariance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "REMAINDER_DRAWS", 4000)
    monkeypatch.setattr(tuning, "LEFT_SHARE", 0.5)
    found = classes("iterative")
    of(found)
    precision: Any = found.posterior_precision
    fine, eye = precision.refined, torch.eye(found.num_parameters, dtype=torch.float64)
    left = fine.probing.base.whitened_solve(eye) - 0.1 * precision.solve(eye)  # the prior precision is 0.1
    draws = fine.enough.draws
    assert len(draws) == 4000 and relative_error(draws.T @ draws / len(draws), left) < 0.15


@pytest.mark.parametrize("groups", ["all", "layer", "input"])
def test_learned_precisions_are_those_of_full_weight_space(groups: str) -> None:
    found, exact = (classes(s, ntkl.GaussianPrior(2.0, groups=groups)) for s in ("iterative", "full"))
    of(found)
    history, _ = found.fit_hyperparameters(), exact.fit_hyperparameters()
    assert history.converged
    assert relative_error(found.prior.precision.log(), exact.prior.precision.log()) < 0.05
    assert relative_error(found.evidence().value, exact.evidence().value) < 0.005
    of(found)


def test_the_curve_over_precisions() -> None:
    found, exact = classes(ntkl.Iterative(relative_error=0.05)), classes("full")
    base = of(found)[1]
    factors = torch.tensor([0.1, 1.0, 30.0])
    one, other = found.evidence_curve(factors), exact.evidence_curve(factors)
    full = torch.log1p(exact.spectrum().clamp_min(0) / factors.unsqueeze(1)).sum(1)
    low = torch.log1p(base.spectrum().clamp_min(0) / factors.unsqueeze(1)).sum(1)
    assert bool(((one - other).abs() < 0.5 * 0.25 * (full - low)).all())


def test_rows_are_chosen_anew_where_the_prior_moved() -> None:
    found, exact = (classes(s, ntkl.GaussianPrior(100.0)) for s in (ntkl.Iterative(relative_error=0.002), "full"))
    before = of(found)[1].rank
    for one in (found, exact):
        with torch.no_grad():
            one.prior.log_precision -= 8.0
    value = found.evidence()
    assert of(found)[1].rank > before
    assert abs(float(value) - float(exact.log_marginal_likelihood())) <= 4 * value.standard_error
    assert value.lower <= float(exact.log_marginal_likelihood()) <= value.upper


def test_streamed_rows_are_kept_rows() -> None:
    spec = ntkl.Iterative(relative_error=0.5)
    one, other = classes(spec), classes(spec, memory_budget=240_000, batch_size=40)
    assert other.fitted.structure.rows is None
    assert of(one)[1].rank == of(other)[1].rank
    assert relative_error(one.log_det(), other.log_det()) < 1e-9
    assert relative_error(of(one)[0].rest, of(other)[0].rest) < 1e-8


@pytest.mark.slow
def test_other_points() -> None:
    x, y = digits_like(8, seed=2)[1:]
    found, exact, new = classes("iterative"), classes("full"), digits_like(5, seed=3)[1]
    of(found)
    for change in (lambda p: p.remove([1, 5]), lambda p: p.condition((x, y)), lambda p: p.subset(torch.arange(0, 90))):
        one, other = (change(p) for p in (found, exact))
        assert relative_error(one.latent_moments(new)[0], other.latent_moments(new)[0]) < 1e-5
        value = one.evidence()
        assert abs(float(value) - float(other.log_marginal_likelihood())) <= 4 * value.standard_error


def test_a_checkpoint_has_the_rows(tmp_path: Any) -> None:
    posterior, path, network = classes("iterative"), tmp_path / "posterior.pt", digits_like()[0]
    x = digits_like(9, seed=5)[1]
    before = posterior.predict(x).probs
    with pytest.raises(UnsupportedError, match=r"include_data=True to save .*rows of training points.*compress\(rank"):
        posterior.save(path, include_data=False)
    posterior.save(path, include_data=True)
    loaded = ntkl.load(path, network)
    of(loaded)
    one, other = posterior.evidence(), loaded.evidence()
    assert (float(one), one.standard_error) == (float(other), other.standard_error)
    assert torch.allclose(before, loaded.predict(x).probs, rtol=1e-9)
    there = loaded.to(dtype=torch.float32)
    assert relative_error(there.latent_moments(x)[1].double(), posterior.latent_moments(x)[1]) < 1e-3


@pytest.mark.slow
def test_shares_are_one_data_set() -> None:
    world_size, (network, x, y) = 3, digits_like(50)

    def look(data: tuple[Tensor, ...], **settings: Any) -> list[Tensor]:
        posterior = ntkl.laplace(network, data, ntkl.Categorical(), ntkl.GaussianPrior(0.1, groups="layer"),
                                 ntkl.Iterative(relative_error=0.05), settings=ntkl.Settings(batch_size=7, **settings))
        of(posterior)
        return [posterior.log_det().detach(), posterior.effective_parameters(), posterior.latent_moments(x[:4])[1]]

    parts = shares(len(x), world_size)
    found = on_ranks(world_size, lambda reducer: look(take_all((x, y), parts[reducer.rank]), reducer=reducer,
                                                      sharded=True))
    alone = look((x, y), reducer=SingleProcess())
    for numbers in found:
        for one, other in zip(numbers, alone, strict=True):
            assert relative_error(one, other) < 1e-9


def test_row_weights_are_eigenvalues_of_blocks() -> None:
    posterior = classes(ntkl.Iterative(rank=4, probes=2))
    curvature = posterior.fitted.structure.curvature(posterior.fitted.model)
    values, vectors = curvature.row_weights(posterior.prior.variances())
    blocks = vectors @ torch.diag_embed(values) @ vectors.mT
    trace, log_dets = curvature.diagonal(posterior.prior.variances())
    assert float(blocks.diagonal(dim1=1, dim2=2).sum()) == pytest.approx(trace, rel=1e-10)
    assert float(torch.log1p(values.clamp_min(0)).sum()) == pytest.approx(log_dets, rel=1e-10)


def test_draws_are_as_many_as_the_measured_points_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "REMAINDER_DRAWS", 8)
    monkeypatch.setattr(tuning, "LEFT_SHARE", 0.3)
    posterior = classes("iterative")
    fine: Any = posterior.posterior_precision.refined.enough
    count, base = len(fine), fine.probing.base
    assert tuning.REMAINDER_DRAWS < count <= tuning.MOST_DRAWS
    for rows in posterior.fitted.rows_at(torch.arange(tuning.MEASURED_POINTS)):
        low = base.covariance_blocks(rows)
        seen = rows.products(posterior.network.shapes.parts(fine.draws * base.deviation)).transpose(0, 1)
        rest = seen @ seen.mT / count
        ratio = torch.linalg.eigvals(torch.linalg.solve(low - rest, rest)).real.amax(1)  # the worst direction of each
        worst = float(ratio.max()) * (2 / count) ** 0.5
        assert worst < 1.5 * ntkl.Iterative.variance_error  # eight draws estimate what all of them need


def test_more_rows_take_the_place_of_draws_that_cost_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "REMAINDER_DRAWS", 8)
    monkeypatch.setattr(tuning, "LEFT_SHARE", 0.9)  # the first rows leave less
    dear, free = classes(ntkl.Iterative(relative_error=0.5)), classes(ntkl.Iterative(relative_error=0.5))
    first = of(dear)[1].rank
    assert dear.posterior_precision.refined.probing.base.rank > first
    monkeypatch.setattr(tuning, "DRAW_PRODUCTS", 0)
    fine: Any = free.posterior_precision.refined
    assert fine.probing.base.rank == first and len(fine.enough) > 8


@pytest.mark.slow
def test_rows_that_do_not_fit_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the rows with their factorization nor the eigenvectors of all blocks may take more than half."""
    fits, tight = (classes(ntkl.Iterative(relative_error=0.5), memory_budget=memory, batch_size=40)
                   for memory in (400_000, 40_000))
    sketch = of(fits)[0]
    row = sketch.rows.nbytes // sketch.rows.num_examples
    assert sketch.limit == min(int((400_000 / 16) ** 0.5), 400_000 // (8 * row))
    assert isinstance(tight.posterior_precision.sketch, RandomSketch)
    monkeypatch.setattr(tuning, "LEADING_SHARE", 0.3)  # few rows, so that the blocks decide
    blocks = 2 * 4 * sketch.rest.nbytes
    enough, short = (classes(ntkl.Iterative(relative_error=0.5), memory_budget=blocks + more, batch_size=40)
                     for more in (0, -1))
    of(enough)
    assert isinstance(short.posterior_precision.sketch, RandomSketch)


def test_the_bounds_hold_where_leading_rows_depend_on_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight rows along one direction leave a curvature of full rank."""
    monkeypatch.setattr(tuning, "ROWS_PER_LEADING", 2)
    x = torch.cat([100.0 * torch.eye(16, dtype=torch.float64)[:1].expand(8, -1), torch.eye(16, dtype=torch.float64)])
    network, y = nn.Linear(16, 1, bias=False).double(), torch.zeros(24, 1, dtype=torch.float64)
    found = ntkl.laplace(network, (x, y), ntkl.Gaussian(1.0), structure=ntkl.Iterative(relative_error=0.9))
    assert of(found)[1].rank == 8 and found.posterior_precision.probing.approximation.rank_left == 16
    exact = ntkl.laplace(network, (x, y), ntkl.Gaussian(1.0), structure="full").log_marginal_likelihood()
    assert found.evidence().lower <= float(exact) <= found.evidence().upper


# --- forecasts


def forecast_of(data: tuple[Tensor, ...], network: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Problem]:
    """The row of a plan, and what it is computed from."""
    seen: list[Problem] = []
    plain = ntkl.Iterative.forecast
    monkeypatch.setattr(tuning, "PROBED_ORDER", 16)
    monkeypatch.setattr(ntkl.Iterative, "forecast", lambda self, given: (seen.append(given), plain(self, given))[1])
    (row,) = ntkl.plan(network, data, ntkl.Categorical(), ntkl.GaussianPrior(0.1), ["iterative"]).rows
    return row, seen[0]


def test_a_forecast_stores_what_the_fit_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    network, x, y = digits_like()
    monkeypatch.setattr(tuning, "PROBED_ROWS", 1000)
    row, given = forecast_of((x, y), network, monkeypatch)
    posterior = classes("iterative")
    fine: Any = posterior.posterior_precision.refined.probing  # whose rank is that of predictions
    sketch, base = fine.approximation.sketch, fine.base
    assert row.note == f"{base.rank:,} leading rows, rows kept"
    rows: Any = posterior.fitted.structure
    assert row.stored == {"leading rows": sketch.rows.nbytes + sketch.rest.nbytes, "factor": base.factor.nbytes,
                          "rows of J": sum(rows.nbytes for rows in rows.rows)}
    # the probe saw all examples: the first rows, and what they leave, are no estimates
    expected, exact = expected_rows(given), float(classes("full").log_det())
    assert expected is not None and expected.count == first_rows(posterior) < base.rank
    for rank in (expected.count, base.rank):
        kept = fine.approximation.grown(rank, 0, draws=False).base
        assert expected.left(rank)[0] == pytest.approx(exact - float(kept.log_det()), rel=1e-6)


def first_rows(posterior: ntkl.Posterior) -> int:
    """Leading rows before their number grows."""
    structure: Any = posterior.fitted.structure
    found = leading_rows(structure.curvature(posterior.fitted.model), 10**6)
    assert found is not None
    return found.rows.num_examples


@pytest.mark.slow
def test_a_sample_shows_how_many_rows_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    network, x, y = digits_like(600)
    chosen = ntkl.laplace(network, (x, y), ntkl.Categorical(), ntkl.GaussianPrior(0.1), "iterative")
    monkeypatch.setattr(tuning, "PROBED_EXAMPLES", 200)
    row, given = forecast_of((x, y), network, monkeypatch)
    expected = expected_rows(given)
    assert given.sample.num_examples == 200 and expected is not None
    assert expected.count == pytest.approx(first_rows(chosen), rel=0.3)
    alike = ntkl.plan(network, (x, x[:, :5]), ntkl.Gaussian(0.1), structures=["iterative"]).rows[0]
    assert "leading" in row.note and alike.note.startswith("rank")


def test_what_rows_leave_is_extrapolated_from_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """More examples explain the others: the sample alone leaves half as much again of log det B."""
    network, x, y = digits_like(600)
    posterior, full = (ntkl.laplace(network, (x, y), ntkl.Categorical(), ntkl.GaussianPrior(0.1), structure)
                       for structure in ("iterative", "full"))
    monkeypatch.setattr(tuning, "PROBED_EXAMPLES", 200)
    _, given = forecast_of((x, y), network, monkeypatch)
    expected, low = expected_rows(given), posterior.posterior_precision.probing.approximation
    assert expected is not None and given.spectrum is not None
    for rank in (first_rows(posterior), 2 * first_rows(posterior)):
        kept = low.grown(rank, 0, draws=False).base
        exact = 1.0 - float(kept.log_det()) / float(full.log_det())
        assert expected.left(rank)[0] / float(given.spectrum.log1p().sum()) == pytest.approx(exact, rel=0.2)
