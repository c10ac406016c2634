"""Intervals and sets, against models that are literally fitted again without each point, and quantiles by hand."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ntk_laplace as ntkl
from ntk_laplace.errors import DataError, HyperparameterError, NTKLaplaceWarning, TargetError, UnsupportedError
from ntk_laplace.posterior.conformal import ends, label_scores, members, rank_of
from ntk_laplace.posterior.conformal.quantiles import fewest_points
from ntk_laplace.runtime import tuning
from reference import jacobian
from reference_refit import Linearized
from refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore:leave-one-out is not to be trusted")
EXACT = ("gp", "full")
N, NEW, FEATURES = 24, 5, 3
LEVEL = 0.8


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, X_NEW = drawn(N, FEATURES, seed=0), drawn(NEW, FEATURES, seed=1)
WEIGHTS = torch.rand(N, generator=torch.Generator().manual_seed(2), dtype=torch.float64) + 0.5
Y = X @ drawn(FEATURES, 2, seed=3) + 0.5 * drawn(N, 2, seed=4)
NOISE, PRECISION = torch.tensor([0.3, 0.2], dtype=torch.float64), 0.7


# --- ridge regression, fitted again without each point


def ridge(x: Tensor, y: Tensor, w: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of one response, (P,), and their covariance; a NaN target and a point of weight 0 count as no point."""
    w = w.masked_fill(y.isnan(), 0.0) / noise
    covariance = torch.linalg.inv((x.T * w) @ x + PRECISION * torch.eye(x.shape[1], dtype=x.dtype))
    return covariance @ (x.T @ (w * y.nan_to_num())), covariance


def by_counting(values: Tensor, rank: int) -> Tensor:
    """The smallest of the values v (m, n) for which `rank` of them are at most v."""
    found = []
    for column in values.T.tolist():
        enough = [v for v in column if sum(other <= v for other in column) >= rank]
        found.append(min(enough) if enough else math.inf)
    return torch.tensor(found, dtype=torch.float64)


def refitted_ends(y: Tensor, w: Tensor, noise: Tensor, normalized: bool, new_noise: float) -> tuple[Tensor, Tensor]:
    """Jackknife+ for one response, y (N,): every left-out model is fitted from nothing."""
    low, high = [], []
    for i in range(N):
        if y[i].isnan() or w[i] == 0:
            continue
        others = torch.arange(N) != i
        theta, covariance = ridge(X[others], y[others], w[others], noise[others] if noise.ndim else noise)
        at, own = ((x @ theta, ((x @ covariance * x).sum(1) + new_noise).sqrt()) for x in (X_NEW, X[i : i + 1]))
        scale = at[1] if normalized else torch.ones(NEW, dtype=torch.float64)
        reach = (y[i] - own[0]).abs() / (own[1] if normalized else 1.0) * scale
        low.append(at[0] - reach)
        high.append(at[0] + reach)
    count = len(low)
    rank = next(k for k in range(count + 2) if k >= 0.8 * (count + 1) - 1e-9)  # the smallest k of at least 0.8 (n + 1)
    return -by_counting(-torch.stack(low), rank), by_counting(torch.stack(high), rank)


def linear(y: Tensor, w: Tensor, noise: Tensor) -> nn.Linear:
    """A linear network at the optimum of its ridge regressions."""
    network = nn.Linear(FEATURES, y.shape[1], bias=False, dtype=torch.float64)
    columns = [ridge(X, y[:, c], w, noise[..., c] if noise.ndim else noise)[0] for c in range(y.shape[1])]
    network.weight.data = torch.stack(columns)
    return network


def with_gaps(y: Tensor) -> Tensor:
    y = y.clone()
    y[3, 0] = y[7] = torch.nan
    return y


def removed(w: Tensor) -> Tensor:
    w = w.clone()
    w[5] = 0.0
    return w


ONES = torch.ones(N, dtype=torch.float64)
PER_POINT = torch.linspace(0.1, 0.6, N, dtype=torch.float64)[:, None].expand(N, 2).contiguous()
RIDGE = {
    "one response": (Y[:, :1], ONES, NOISE[:1]),
    "two responses": (Y, ONES, NOISE),
    "missing targets": (with_gaps(Y), ONES, NOISE),
    "example weights": (Y, removed(WEIGHTS), NOISE),
    "noise per point": (Y, ONES, PER_POINT),
}


@pytest.mark.parametrize("structure", EXACT)
@pytest.mark.parametrize("score", ["absolute", "normalized"])
@pytest.mark.parametrize("case", RIDGE)
def test_intervals_are_those_of_fits_without_each_point(case: str, score: str, structure: str) -> None:
    y, w, noise = RIDGE[case]
    per_point = case == "noise per point"
    likelihood = ntkl.Gaussian(noise, "point" if per_point else "output", missing="nan")
    posterior = ntkl.laplace(linear(y, w, noise), (X, y, w), likelihood, ntkl.GaussianPrior(PRECISION),
                             structure=structure)
    if per_point and score == "normalized":
        with refused(UnsupportedError, 'score="absolute"', "noise per training point", "absolute"):
            posterior.predict_interval(X_NEW, LEVEL)
        return
    found = posterior.predict_interval(X_NEW, LEVEL, score=score)
    for c in range(y.shape[1]):
        own = noise[..., c]
        lower, upper = refitted_ends(y[:, c], w, own, score == "normalized", 0.0 if per_point else float(own))
        torch.testing.assert_close(found.lower[:, c], lower, rtol=0, atol=1e-9)
        torch.testing.assert_close(found.upper[:, c], upper, rtol=0, atol=1e-9)
        assert int(found.counts[c]) == int(((w > 0) & ~y[:, c].isnan()).sum())
    assert found.method == "jackknife+" and found.reliability is not None and found.reliability.exact


def test_a_removed_point_is_as_if_it_had_never_been() -> None:
    """`remove` is the fit without the point here; the point then has no score either."""
    y, kept = Y[:, :1], torch.arange(N) != 4
    prior, likelihood = ntkl.GaussianPrior(PRECISION), ntkl.Gaussian(NOISE[:1])
    without = ntkl.laplace(linear(y, ONES, NOISE[:1]), (X, y), likelihood, prior, structure="gp").remove([4])
    network = nn.Linear(FEATURES, 1, bias=False, dtype=torch.float64)
    network.weight.data = ridge(X[kept], y[kept, 0], ONES[kept], NOISE[0])[0][None]
    never = ntkl.laplace(network, (X[kept], y[kept]), likelihood, prior, structure="gp")
    one, other = (posterior.predict_interval(X_NEW, LEVEL) for posterior in (without, never))
    torch.testing.assert_close(one.lower, other.lower, rtol=0, atol=1e-9)
    torch.testing.assert_close(one.mean, other.mean, rtol=0, atol=1e-9)


# --- classes: one Newton step of the linearized network without each point


def log_softmax(f: Tensor, y: Tensor) -> Tensor:
    return torch.log_softmax(f, -1).gather(0, y.unsqueeze(0)).squeeze(0)


def log_sigmoid(f: Tensor, y: Tensor) -> Tensor:
    return -torch.log1p(torch.exp(-f[0] * (2 * y - 1)))


LABELS = (Y @ torch.tensor([[1.0, -1.0, 0.3], [0.5, 0.2, -1.0]], dtype=torch.float64)).argmax(1)


def mlp(outputs: int) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def newton_probabilities(network: nn.Module, density: Callable, y: Tensor) -> tuple[Tensor, Tensor]:
    """Class probabilities at new inputs (N, n, C) and at each point (N, C), without the point."""
    with torch.no_grad():
        f, f_new = network(X), network(X_NEW)
    jac, jac_new = jacobian(network, X), jacobian(network, X_NEW)
    theta = torch.cat([p.detach().flatten() for p in network.parameters()])
    model = Linearized(density, f, jac, torch.full_like(theta, PRECISION), theta)
    left, _ = model.gradient(torch.zeros_like(theta), y, ONES)
    at, own = [], []
    for i in range(N):
        move, _ = model.refit(y, ONES * (torch.arange(N) != i), 1, left)
        at.append(f_new + jac_new @ move)
        own.append(f[i] + jac[i] @ move)
    found = []
    for values in (torch.stack(at), torch.stack(own)):
        found.append(values.softmax(-1) if values.shape[-1] > 1
                     else torch.cat([(-values).sigmoid(), values.sigmoid()], -1))
    return found[0], found[1]


def fits_worse(p: list[float], label: int, score: str) -> float:
    """The score of a label, from sorted probabilities."""
    return 1 - p[label] if score == "probability" else sum(q for q in p if q >= p[label])


@pytest.mark.slow
@pytest.mark.parametrize("structure", EXACT)
@pytest.mark.parametrize("likelihood", ["Categorical", "Bernoulli"])
def test_sets_are_those_of_a_newton_step_without_each_point(likelihood: str, structure: str) -> None:
    many = likelihood == "Categorical"
    network, y = mlp(3 if many else 1), LABELS if many else (LABELS > 0).long()
    data = (X, y) if many else (X, y.double()[:, None])
    own = ntkl.Categorical() if many else ntkl.Bernoulli()
    posterior = ntkl.laplace(network, data, own, ntkl.GaussianPrior(PRECISION), structure=structure)
    at, points = newton_probabilities(network, log_softmax if many else log_sigmoid, y)
    for score in ("probability", "cumulative"):
        found = posterior.predict_set(X_NEW, LEVEL, score=score)
        for x in range(NEW):
            for label in range(at.shape[-1]):
                own_scores = [fits_worse(points[i].tolist(), int(y[i]), score) for i in range(N)]
                others = [fits_worse(at[i, x].tolist(), label, score) for i in range(N)]
                better = sum(a < b for a, b in zip(own_scores, others, strict=True))
                assert bool(found.mask[x, label]) == (better < 0.8 * (N + 1) - 1e-9)
    assert found.mask.dtype is torch.bool and found.mask.shape == (NEW, 3 if many else 2)


def test_both_structures_agree_where_variances_pass_through_a_link() -> None:
    y = Y[:, :1].abs().floor()
    cases = [(ntkl.HeteroscedasticGaussian(), 2), (ntkl.HeteroscedasticGaussian("natural"), 2), (ntkl.Poisson(), 1)]
    for likelihood, outputs in cases:
        both = [ntkl.laplace(mlp(outputs), (X, y), likelihood, ntkl.GaussianPrior(5.0), structure=structure)
                .predict_interval(X_NEW, LEVEL) for structure in EXACT]
        torch.testing.assert_close(both[0].lower, both[1].lower, rtol=1e-9, atol=1e-9)
        assert both[0].mean.shape == (NEW, 1) and bool((both[0].width > 0).all())


# --- quantiles and scores by hand


@pytest.mark.parametrize("level, count, rank", [
    (0.9, 9, 9), (0.9, 10, 10), (0.9, 99, 90), (0.9, 100, 91), (0.55, 99, 55), (0.7, 9, 7), (0.9, 8, 9), (0.1, 9, 1),
])
def test_ranks(level: float, count: int, rank: int) -> None:
    assert rank_of(level, count) == rank
    assert (rank_of(level, count) > count) == (count < fewest_points(level))


def test_ends_by_hand() -> None:
    """Four points, level 0.6: the 3rd smallest m + R, the 2nd smallest m - R."""
    mean = torch.tensor([[0.0, 1.0, 2.0, 3.0]], dtype=torch.float64).unsqueeze(-1)
    scores = torch.tensor([[1.0], [5.0], [0.5], [2.0]], dtype=torch.float64)
    kept = torch.ones(4, 1, dtype=torch.bool)
    # m + R: 1, 6, 2.5, 5; m - R: -1, -4, 1.5, 1
    lower, upper = ends(mean, torch.ones_like(mean), scores, kept, 0.6)
    assert (lower.item(), upper.item()) == (-1.0, 5.0)
    # 2 R: m + 2 R 2, 11, 3, 7; m - 2 R -2, -9, 1, -1
    lower, upper = ends(mean, torch.full_like(mean, 2.0), scores, kept, 0.6)
    assert (lower.item(), upper.item()) == (-2.0, 7.0)
    lower, upper = ends(mean, torch.ones_like(mean), scores, kept, 0.81)  # the 5th of 4
    assert (lower.item(), upper.item()) == (-math.inf, math.inf)


def test_scores_of_labels_by_hand() -> None:
    p, u = torch.tensor([[0.2, 0.5, 0.3]]), torch.tensor([[0.25]])
    torch.testing.assert_close(label_scores(p, "probability", u), torch.tensor([[0.8, 0.5, 0.7]]))
    torch.testing.assert_close(label_scores(p, "cumulative", u), torch.tensor([[1.0, 0.5, 0.8]]))
    torch.testing.assert_close(label_scores(p, "randomized", u), torch.tensor([[0.85, 0.125, 0.575]]))


def test_members_by_hand() -> None:
    """Four points, level 0.6: fewer than 3 of them fit better than the label; a tie does not count as better."""
    own = torch.tensor([0.1, 0.2, 0.3, 0.4])
    scores = torch.tensor([[[0.3, 0.31, 0.1]]])
    assert members(scores, own, 0.6).tolist() == [[True, False, True]]
    each = torch.tensor([[0.3, 0.31], [0.1, 0.31], [0.1, 0.31], [0.9, 0.31]])[None]
    assert members(each, own, 0.6).tolist() == [[True, False]]
    assert members(each, own, 0.9).all()


# --- coverage


@pytest.mark.slow
def test_the_coverage_of_a_linear_model() -> None:
    """40 data sets of 19 points with 12 features, where residuals are a fraction of the errors; 25 new points each."""
    generator, features, eye = torch.Generator().manual_seed(0), 12, torch.eye(12, dtype=torch.float64)
    found: dict[str, list[float]] = {"absolute": [], "normalized": []}
    truth = torch.randn(features, dtype=torch.float64, generator=generator)
    for _ in range(40):
        x = torch.randn(19 + 25, features, dtype=torch.float64, generator=generator)
        y = (x @ truth + 0.5 * torch.randn(len(x), dtype=torch.float64, generator=generator))[:, None]
        (x, x_new), (y, y_new) = x.split([19, 25]), y.split([19, 25])
        network = nn.Linear(features, 1, bias=False, dtype=torch.float64)
        network.weight.data = torch.linalg.solve(x.T @ x / 0.3 + eye, x.T @ y / 0.3).T.contiguous()
        posterior = ntkl.laplace(network, (x, y), ntkl.Gaussian(0.3), ntkl.GaussianPrior(1.0), structure="gp")
        for score, values in found.items():
            values.append(posterior.predict_interval(x_new, LEVEL, score=score).coverage(y_new))
    for values in found.values():
        each = torch.tensor(values, dtype=torch.float64)
        # the level within four standard errors over data sets; the theorem's bound, 0.6, is far below
        assert abs(each.mean() - LEVEL) < 4 * each.std() / len(each) ** 0.5 < 0.1


# --- held-out data


@pytest.mark.parametrize("structure", ["kfac", "gp"])
def test_split_intervals_by_hand(structure: str) -> None:
    network, y = mlp(2), Y
    posterior = ntkl.laplace(network, (X, y), ntkl.Gaussian(NOISE), ntkl.GaussianPrior(5.0), structure=structure)
    x, held = drawn(14, FEATURES, seed=8), drawn(14, 2, seed=9)
    f, covariance = posterior.latent_moments(x)
    f_new, covariance_new = posterior.latent_moments(X_NEW)
    for score in ("absolute", "normalized"):
        sd, sd_new = ((v.diagonal(dim1=1, dim2=2) + NOISE).sqrt() if score == "normalized" else torch.ones_like(m)
                      for m, v in ((f, covariance), (f_new, covariance_new)))
        reach = ((held - f).abs() / sd).sort(0).values[11]  # the 12th of 14
        found = posterior.predict_interval(X_NEW, LEVEL, score=score, data=(x, held))
        torch.testing.assert_close(found.upper, f_new + reach * sd_new)
        torch.testing.assert_close(found.lower, f_new - reach * sd_new)
        assert found.method == "split" and found.reliability is None and "at least 0.8" in found.guarantees[0]
        loader = DataLoader(TensorDataset(x, held), batch_size=4)
        again = posterior.predict_interval(X_NEW, LEVEL, score=score, data=loader, batch_size=2)
        torch.testing.assert_close(again.upper, found.upper)
    weights = torch.ones(14, dtype=torch.float64)
    weights[10:] = 0.0  # these have no score
    few = posterior.predict_interval(X_NEW, LEVEL, data=(x, held, weights))
    other = posterior.predict_interval(X_NEW, LEVEL, data=(x[:10], held[:10]))
    assert few.counts.tolist() == [10, 10]
    torch.testing.assert_close(few.upper, other.upper, rtol=1e-12, atol=1e-12)


def test_split_sets_by_hand() -> None:
    posterior = ntkl.laplace(mlp(3), (X, LABELS), ntkl.Categorical(), ntkl.GaussianPrior(1.0), structure="kfac")
    x, y = drawn(14, FEATURES, seed=8), torch.arange(14) % 3
    p, p_new = (posterior.predict(inputs, "map").probs for inputs in (x, X_NEW))
    limit = (1 - p[torch.arange(14), y]).sort().values[11]
    found = posterior.predict_set(X_NEW, LEVEL, data=(x, y))
    assert torch.equal(found.mask, 1 - p_new <= limit)
    missing = y.clone()
    missing[10:] = -100
    assert posterior.predict_set(X_NEW, LEVEL, data=(x, missing)).count == 10


# --- inputs, results, refusals


def regression(structure: str = "gp", dtype: torch.dtype = torch.float64, **options: Any) -> ntkl.Posterior:
    network = mlp(1).to(dtype)
    return ntkl.laplace(network, (X.to(dtype), Y[:, :1].to(dtype)), ntkl.Gaussian(0.3), ntkl.GaussianPrior(2.0),
                        structure=structure, **options)


def classes(structure: str = "gp", **options: Any) -> ntkl.Posterior:
    return ntkl.laplace(mlp(3), (X, LABELS), ntkl.Categorical(), ntkl.GaussianPrior(1.0), structure=structure,
                        **options)


def test_the_training_points_may_come_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own terms are computed in the first pass, batch by batch, and used in the next."""
    wanted, sets = regression().predict_interval(X_NEW, LEVEL), classes().predict_set(X_NEW, LEVEL, score="cumulative")
    monkeypatch.setattr(tuning, "EXPLAINED_BYTES", 1)
    options = {"structure": "full", "settings": ntkl.Settings(batch_size=3)}
    found = regression(**options).predict_interval(X_NEW, LEVEL, batch_size=2)
    torch.testing.assert_close(torch.stack([found.lower, found.upper]), torch.stack([wanted.lower, wanted.upper]))
    again = classes(**options).predict_set(X_NEW, LEVEL, score="cumulative", batch_size=2)
    assert torch.equal(again.mask, sets.mask)


@pytest.mark.parametrize("structure", EXACT)
def test_chunks_and_loaders_change_nothing(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = regression(structure)
    whole = posterior.predict_interval(X_NEW, LEVEL)
    sets = classes(structure).predict_set(X_NEW, LEVEL)
    monkeypatch.setattr(tuning, "EXPLAINED_BYTES", 1)  # every chunk has a pass of its own
    for x in (X_NEW, DataLoader(TensorDataset(X_NEW), batch_size=2), TensorDataset(X_NEW)):
        found = posterior.predict_interval(x, LEVEL, batch_size=2)
        torch.testing.assert_close(found.lower, whole.lower)
        assert torch.equal(classes(structure).predict_set(x, LEVEL, batch_size=2).mask, sets.mask)


def test_float32_and_networks_without_an_output_axis() -> None:
    single, double = regression(dtype=torch.float32), regression()
    found, truth = (p.predict_interval(X_NEW.to(p.network.theta.dtype), LEVEL) for p in (single, double))
    torch.testing.assert_close(found.lower.double(), truth.lower.double(), rtol=1e-3, atol=1e-3)
    flat = nn.Sequential(mlp(1), nn.Flatten(0))
    posterior = ntkl.laplace(flat, (X, Y[:, 0]), ntkl.Gaussian(0.3), ntkl.GaussianPrior(2.0), structure="gp")
    scalar = posterior.predict_interval(X_NEW, LEVEL)
    assert scalar.lower.shape == (NEW,)
    torch.testing.assert_close(scalar.lower, truth.lower[:, 0])
    assert scalar.coverage(scalar.mean) == 1.0


def test_what_intervals_tell() -> None:
    found = regression().predict_interval(X_NEW, LEVEL)
    y = found.mean.clone()
    y[0], y[1], y[2] = found.upper[0], found.upper[1] + 1e-6, torch.nan
    assert found.contains(y).flatten().tolist() == [True, False, False, True, True]
    assert found.coverage(y) == 0.75
    frame = found.to_dataframe()
    assert list(frame) == ["input", "response", "mean", "lower", "upper", "width"] and len(frame) == NEW
    assert frame.width.tolist() == found.width.flatten().tolist() and frame.attrs["level"] == LEVEL
    assert "level 0.8" in repr(found) and "jackknife+" in repr(found)
    assert len(found.plot(y).axes[0].lines) == 3 and len(found.plot().axes[0].lines) == 1
    with pytest.raises(TargetError):
        found.coverage(torch.zeros(NEW + 1))


def test_what_sets_tell() -> None:
    found = classes().predict_set(X_NEW, LEVEL)
    labels = found.probabilities.argmax(1)
    assert found.coverage(labels) == found.mask[torch.arange(NEW), labels].double().mean()
    assert found.coverage(torch.where(torch.arange(NEW) == 0, labels, -100)) == float(found.mask[0, labels[0]])
    frame = found.to_dataframe(names=["a", "b", "c"])
    assert frame["size"].tolist() == found.size.tolist() == [len(row) for row in frame.labels]
    assert {name for row in frame.labels for name in row} <= {"a", "b", "c"}
    assert "3 classes" in repr(found) and "level 0.8" in repr(found)
    with pytest.raises(TargetError):
        found.coverage(torch.full((NEW,), 3))


def test_random_scores_and_sets_that_are_never_empty() -> None:
    posterior = classes()
    one, same = (posterior.predict_set(X_NEW, 0.3, score="randomized", generator=torch.Generator().manual_seed(0))
                 for _ in range(2))
    assert torch.equal(one.mask, same.mask)
    for score in ("probability", "cumulative"):  # nothing is drawn
        generator = torch.Generator().manual_seed(5)
        states = generator.get_state(), torch.get_rng_state()
        posterior.predict_set(X_NEW, 0.3, score=score, generator=generator)
        posterior.predict_set(X_NEW, 0.3, score=score)
        assert all(map(torch.equal, states, (generator.get_state(), torch.get_rng_state())))
    network = nn.Linear(3, 3, bias=False, dtype=torch.float64)
    network.weight.data = 3 * torch.eye(3, dtype=torch.float64)
    posterior = ntkl.laplace(network, (X, X.argmax(1)), ntkl.Categorical(), ntkl.GaussianPrior(1.0), structure="gp")
    x = X_NEW * torch.tensor([[0.0], [0.1], [1.0], [2.0], [3.0]])  # at 0 no label is as probable as the points' own
    plain, filled = (posterior.predict_set(x, 0.5, never_empty=each) for each in (False, True))
    empty = plain.size == 0
    assert empty.any() and (filled.size[empty] == 1).all() and torch.equal(filled.mask[~empty], plain.mask[~empty])
    assert torch.equal(filled.mask[empty].int().argmax(1), filled.probabilities[empty].argmax(1))


def test_too_few_points_are_told() -> None:
    with pytest.warns(NTKLaplaceWarning, match="24 points are too few for level 0.99, which needs 99: its intervals"):
        found = regression().predict_interval(X_NEW, 0.99)
    assert found.upper.isinf().all() and "too few" in found.guarantees[-1] and found.coverage(Y[:NEW, :1]) == 1.0
    assert len(found.plot().axes) == 1
    with pytest.warns(NTKLaplaceWarning, match="its sets have all labels"):
        assert classes().predict_set(X_NEW, 0.99).mask.all()


def test_unreliable_leave_one_out_is_told() -> None:
    posterior = regression()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = posterior.predict_interval(X_NEW, LEVEL)
    assert found.reliability is not None and not found.reliability.trusted  # an untrained network
    assert [one.filename for one in caught] == [__file__]
    assert "not to be trusted" in str(caught[0].message) and "data=(X, y)" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        posterior.predict_interval(X_NEW, LEVEL, data=(X, Y[:, :1]))


def test_refusals() -> None:
    posterior, labels = regression(), classes()
    for level in (0.0, 1.0, 1.5, math.nan, None, True, "0.9"):
        with refused(HyperparameterError, "level between 0 and 1", ".", "level=0.9"):
            posterior.predict_interval(X_NEW, level)
    with refused(UnsupportedError, "normalized, absolute", "'lac'", "Choose"):
        posterior.predict_interval(X_NEW, score="lac")
    with refused(UnsupportedError, "probability, cumulative, randomized", "'aps'", "Choose"):
        labels.predict_set(X_NEW, score="aps")
    with refused(UnsupportedError, "real responses", "Categorical", "predict_set"):
        labels.predict_interval(X_NEW)
    with refused(UnsupportedError, "one label per example", "Gaussian", "predict_interval"):
        posterior.predict_set(X_NEW)
    two = ntkl.laplace(mlp(2), (X, (Y > 0).double()), ntkl.Bernoulli(), ntkl.GaussianPrior(1.0), structure="gp")
    with refused(UnsupportedError, "one label per example", r"Bernoulli of 2 output", "predict_interval"):
        two.predict_set(X_NEW)
    for structure in ("kfac", "diag"):
        with refused(UnsupportedError, r"data=\(X, y\)", structure, "Pass data"):
            regression(structure).predict_interval(X_NEW)
    fisher = ntkl.laplace(mlp(3), (X, LABELS), ntkl.Categorical(), ntkl.GaussianPrior(1.0), structure="gp",
                          curvature="ef")
    with refused(UnsupportedError, r"data=\(X, y\)", "'ef'", "Pass data"):
        fisher.predict_set(X_NEW)
    soft = nn.functional.one_hot(LABELS, 3).double() * 0.9 + 0.1 / 3
    blurred = ntkl.laplace(mlp(3), (X, soft), ntkl.Categorical(), ntkl.GaussianPrior(1.0), structure="gp")
    with refused(UnsupportedError, "one label for each point", "soft labels", "hard labels"):
        blurred.predict_set(X_NEW)
    with refused(DataError, "at least one point", "none", "missing"):
        labels.predict_set(X_NEW, data=(X[:3], torch.full((3,), -100)))


def test_soft_labels_that_are_certain_are_labels() -> None:
    certain = nn.functional.one_hot(LABELS, 3).double()
    certain[2] = -100.0
    y = LABELS.clone()
    y[2] = -100
    found = [ntkl.laplace(mlp(3), (X, own), ntkl.Categorical(), ntkl.GaussianPrior(1.0), structure="gp")
             .predict_set(X_NEW, LEVEL) for own in (certain, y)]
    assert torch.equal(found[0].mask, found[1].mask) and found[0].count == found[1].count == N - 1


def test_cumulative_sets_do_not_depend_on_rounding() -> None:
    """The least probable label has the score 1 whatever its probabilities add up to: equal ones stay equal."""
    torch.manual_seed(0)
    x, y, fresh = torch.randn(60, 2).double(), torch.randint(0, 6, (60,)), torch.randn(200, 2).double()
    network = torch.nn.Linear(2, 6).double()
    found = [ntkl.laplace(network, (x, y), ntkl.Categorical(), ntkl.GaussianPrior(1.0), structure=structure)
             .predict_set(fresh, 0.8, score="cumulative").mask for structure in ("gp", "full")]
    assert torch.equal(*found)

