"""Leave-one-out of some points under any structure, against single refits written out in weight space."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import ntk_laplace as ntkl
from noise import COVARIANCE, draw
from ntk_laplace.posterior.explain import leave_some_out
from ntk_laplace.runtime import tuning
from ntk_laplace.structures import FullWeightSpace
from reference import jacobian, outputs, relative_error
from refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning")

N, C = 14, 3
CHOSEN = torch.tensor([1, 2, 5, 6, 11, 13])
STRUCTURES = ("kfac", "ekfac", "inf", "diag")
NAN, F64 = float("nan"), torch.float64
OF_THE_MEAN = ("mean", "plug_in_log_density", "leverage", "self_influence", "effective_parameters", "information",
               "importance")


@dataclass(frozen=True)
class Unnamed(FullWeightSpace):
    """All of the curvature, by a structure that says it is approximate."""

    name: ClassVar[str] = "unnamed"
    exact: ClassVar[bool] = False


def missing(y: Tensor) -> Tensor:
    """No target of point 2, and one output less at point 5, which both are left out; one less at a point that stays."""
    y = y.clone()
    y[2] = NAN
    y[5, 0] = y[4, 1] = NAN
    return y


LABELS = draw(4, N, C).argmax(1)
WEIGHTS = torch.linspace(0.4, 2.0, N, dtype=F64).index_fill(0, torch.tensor([6]), 0.0)
ENTRIES = torch.linspace(0.2, 2.0, N * C, dtype=F64).view(N, C)
CASES: dict[str, tuple[Any, Tensor, Tensor | None]] = {
    "gaussian": (lambda: ntkl.Gaussian(0.3), draw(3, N, C), None),
    "gaussian, covariance and weights": (
        lambda: ntkl.Gaussian(COVARIANCE), draw(3, N, C), WEIGHTS),
    "gaussian, missing, weights and noise of each entry": (
        lambda: ntkl.Gaussian(ENTRIES, missing="nan"), missing(draw(3, N, C)), WEIGHTS),
    "bernoulli, weights": (lambda: ntkl.Bernoulli(), (draw(3, N, C) > 0).to(F64), WEIGHTS),
    "student, missing and weights": (lambda: ntkl.StudentT(0.3, missing="nan"), missing(draw(3, N, C)), WEIGHTS),
    "poisson": (lambda: ntkl.Poisson(), draw(3, N, C).exp().round(), None),
    "categorical": (lambda: ntkl.Categorical(1.3), LABELS, None),
    "categorical, missing and weights": (
        lambda: ntkl.Categorical(), LABELS.index_fill(0, torch.tensor([2, 4]), -100), WEIGHTS),
    "tempered": (lambda: ntkl.Tempered(ntkl.Categorical(), 0.5), LABELS, WEIGHTS),
}


@functools.cache
def problem() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, C)).double(), draw(2, N, 4)


@functools.cache
def fit(case: str, structure: Any, **options: Any) -> ntkl.Posterior:
    network, x = problem()
    build, y, weights = CASES[case]
    data = (x, y) if weights is None else (x, y, weights)
    prior = ntkl.GaussianPrior(torch.tensor([0.7, 1.9]), groups="layer")
    return ntkl.laplace(network, data, build(), prior, structure, **options)


@pytest.fixture
def large_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups of three among six points; steps to convergence."""
    monkeypatch.setattr(tuning, "LEFT_OUT_SHARE", 0.25)
    monkeypatch.setattr(tuning, "LEFT_OUT_PASSES", 100)
    monkeypatch.setattr(tuning, "LEFT_OUT_ACCURACY", 0.0)


def without(group: Tensor) -> Tensor:
    """All other points."""
    return torch.tensor([n for n in range(N) if n not in group])


def refits(posterior: ntkl.Posterior, groups: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Means, covariances and leverages by a refit for each point, P x P.

    A Newton step without the group, with all of the curvature; a second one that takes back the group without the
    point, under the structure's own curvature of the others.
    """
    fitted, (network, x) = posterior.fitted, problem()
    jac, f = jacobian(network, x), outputs(network, x)
    pull = fitted.residual()
    root = fitted.points.root(fitted.curvature_type, fitted.likelihood).detach()
    curvature = root @ root.mT
    prior = fitted.prior.flat_precision().detach()

    def information(index: Tensor) -> Tensor:
        return torch.einsum("ncp,ncd,ndq->pq", jac[index], curvature[index], jac[index])

    means, covariances, leverages = f.clone(), f.new_zeros(N, C, C), f.new_zeros(N)
    for group in groups:
        others = without(group)
        unit = torch.eye(len(prior), dtype=F64)
        approximate = torch.linalg.inv(posterior.subset(others).posterior_precision.solve(unit))
        pulled = torch.einsum("ncp,nc->p", jac[group], pull[group])
        step = -torch.linalg.solve(prior.diag() + information(others), pulled)
        for point in group.tolist():
            rest = group[group != point]
            inner = approximate + information(rest)
            left = pull[rest] - torch.einsum("ncd,ndp,p->nc", curvature[rest], jac[rest], step)
            here = step + torch.linalg.solve(inner, torch.einsum("ncp,nc->p", jac[rest], left))
            means[point] += jac[point] @ here
            covariances[point] = jac[point] @ torch.linalg.solve(approximate, jac[point].T)
            whole = root[point].T @ jac[point] @ torch.linalg.solve(inner + information(torch.tensor([point])),
                                                                    jac[point].T @ root[point])
            leverages[point] = torch.linalg.eigvalsh(whole).max()
    return means, covariances, leverages


@pytest.mark.parametrize("case", CASES)
def test_with_all_of_the_curvature_it_is_the_exact_leave_one_out(case: str, large_groups: None) -> None:
    """Any likelihood, missing targets, weights (one of them zero): a group of three is no different from one point."""
    found, exact = fit(case, Unnamed()).leave_one_out(CHOSEN), fit(case, "gp").leave_one_out()
    assert found.index.tolist() == CHOSEN.tolist() and found.reliability.unfinished == 0.0
    for name in OF_THE_MEAN:
        truth = getattr(exact, name)[CHOSEN]
        assert (getattr(found, name) - truth).abs().max() < 1e-8 * (1 + truth.abs().max()), name
    _, x = problem()
    for group in (CHOSEN[0::2], CHOSEN[1::2]):  # covariances are those of a fit without the group
        truth = fit(case, "gp").subset(without(group)).latent_moments(x[group])[1]
        assert relative_error(found.covariance[torch.isin(CHOSEN, group)], truth) < 1e-8


@pytest.mark.parametrize("case", CASES)
def test_single_points_give_the_exact_covariances_and_densities_too(case: str) -> None:
    found, exact = fit(case, Unnamed()).leave_one_out(range(N)), fit(case, "gp").leave_one_out()
    for name in (*OF_THE_MEAN, "covariance", "log_density"):
        truth = getattr(exact, name)
        assert (getattr(found, name) - truth).abs().max() < 1e-8 * (1 + truth.abs().max()), name


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("case", ["gaussian, missing, weights and noise of each entry", "categorical"])
def test_structures_equal_refits_in_weight_space(case: str, structure: str, large_groups: None) -> None:
    posterior = fit(case, structure)
    found = posterior.leave_one_out(CHOSEN)
    means, covariances, leverages = refits(posterior, [CHOSEN[0::2], CHOSEN[1::2]])
    assert relative_error(found.mean, means[CHOSEN]) < 1e-7
    assert relative_error(found.covariance, covariances[CHOSEN]) < 1e-9
    assert (found.leverage - leverages[CHOSEN]).abs().max() < 1e-9
    assert not found.reliability.exact and not any("subtracted" in reason for reason in found.reasons)
    assert "nothing is subtracted" in found.guarantees[0]


@pytest.mark.parametrize("structure", ["gp", "full"])
def test_exact_posteriors_give_the_numbers_of_all(structure: str) -> None:
    posterior = fit("categorical", structure)
    whole, some = posterior.leave_one_out(), posterior.leave_one_out(CHOSEN)
    for name in (*OF_THE_MEAN, "covariance", "log_density", "targets"):
        assert relative_error(getattr(some, name), getattr(whole, name)[CHOSEN]) < 1e-12, name
    assert whole.index.tolist() == list(range(N)) and some.reliability.unfinished is None
    assert some.guarantees == whole.guarantees


def test_leverages_stay_below_one_where_subtraction_fails() -> None:
    """All points but one are certain: Kronecker factors spread its curvature over the others."""
    x = draw(2, 20, 3)
    x[:, 0] = 5.0 * x[:, 0].sign()
    x[7, 0] = 0.0
    network = nn.Linear(3, 1).double()
    with torch.no_grad():
        network.weight.copy_(torch.tensor([[3.0, 0.1, 0.0]]))
        network.bias.zero_()
    data = x, (x[:, :1] > 0).double()
    posterior = ntkl.laplace(network, data, ntkl.Bernoulli(), ntkl.GaussianPrior(0.01), "kfac")
    with pytest.raises(ntkl.UnsupportedError, match=r"leverages of at most 1.*points=300.*other data"):
        posterior.leave_one_out()
    assert 0 < posterior.leave_one_out([3, 7, 9]).leverage.max() < 1


@pytest.mark.slow
def test_points_are_named_drawn_or_masked(large_groups: None) -> None:
    posterior = fit("categorical", "kfac")
    named = posterior.leave_one_out(CHOSEN.flip(0).tolist())
    assert named.index.tolist() == CHOSEN.tolist() and relative_error(named.targets, posterior.targets[CHOSEN]) == 0
    mask = torch.zeros(N, dtype=torch.bool).index_fill(0, CHOSEN, True)
    assert torch.equal(posterior.leave_one_out(mask).mean, named.mean)
    drawn = [posterior.leave_one_out(5, seed=seed).index.tolist() for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2] and len(set(drawn[0])) == 5
    assert torch.equal(leave_some_out(posterior.fitted, CHOSEN).log_density, named.log_density)
    frame = named.to_dataframe()
    assert frame.training_index.tolist() == CHOSEN.tolist() and len(named.flagged) == 6
    worst = int(CHOSEN[named.log_density.argmin()])
    assert int(named.ranked(k=1)) == worst == named.to_dataframe(by="suspicion", k=1).training_index[0]


def test_scores_are_scaled_to_all_points(large_groups: None) -> None:
    posterior = fit("tempered", "kfac")
    found, w = posterior.leave_one_out(CHOSEN), WEIGHTS
    truth = 0.5 * (w[CHOSEN] * found.log_density).sum() * w.sum() / w[CHOSEN].sum()  # the likelihood counts half
    assert float(posterior.loo_log_density(CHOSEN)) == pytest.approx(float(truth), rel=1e-12)
    exact = fit("categorical", "gp")
    assert float(exact.loo_log_density(range(N))) == pytest.approx(float(exact.loo_log_density()), rel=1e-12)
    share = w[CHOSEN] / w[CHOSEN].sum()
    apart = (share * (found.log_density - share @ found.log_density))[share > 0]
    expected = (apart.square().sum() * len(apart) / (len(apart) - 1)).sqrt()
    assert found.standard_error == pytest.approx(float(expected), rel=1e-12)
    with refused(ntkl.DataError, "points that count", "none with a target and a positive weight", "others"):
        posterior.loo_log_density([6])


@pytest.mark.slow
def test_passes_end_early_and_say_so(large_groups: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few passes leave the means between the fit and the leave-one-out; what is missing is estimated."""
    posterior = fit("gaussian", "diag")
    found = {}
    for passes in (1, 8, 100):
        monkeypatch.setattr(tuning, "LEFT_OUT_PASSES", passes)
        found[passes] = posterior.leave_one_out(CHOSEN)
    moved = [float((one.mean - found[100].mean).norm()) for one in found.values()]
    assert moved[0] > moved[1] > moved[2] == 0.0
    left = [one.reliability.unfinished for one in found.values()]
    assert left[0] == 1.0 > left[1] > left[2] == 0.0
    with pytest.warns(ntkl.NTKLaplaceWarning, match="means without the points were still moving, with 1 of a Newton"):
        monkeypatch.setattr(tuning, "LEFT_OUT_PASSES", 1)
        posterior.leave_one_out(CHOSEN)
    monkeypatch.setattr(tuning, "LEFT_OUT_PASSES", 100)
    monkeypatch.setattr(tuning, "LEFT_OUT_ACCURACY", 0.02)
    assert 0 < posterior.leave_one_out(CHOSEN).reliability.unfinished <= 0.02


def test_rows_that_are_not_kept_are_read_again(large_groups: None, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = fit("categorical", "kfac", settings=ntkl.Settings(batch_size=5))
    monkeypatch.setattr(tuning, "LEFT_OUT_PASSES", 6)
    kept = posterior.leave_one_out(CHOSEN[:3])
    monkeypatch.setattr(tuning, "KEPT_ROWS_BYTES", 0)
    again = posterior.leave_one_out(CHOSEN[:3])
    assert relative_error(again.mean, kept.mean) < 1e-12 and relative_error(again.covariance, kept.covariance) < 1e-12


def test_float32_algebra() -> None:
    double, single = (fit("categorical", "kfac", dtype=dtype).leave_one_out(CHOSEN) for dtype in (F64, torch.float32))
    assert single.mean.dtype == torch.float32 and relative_error(single.mean, double.mean) < 1e-2
    assert relative_error(single.covariance, double.covariance) < 1e-4


def test_other_hyperparameters_are_followed_and_told() -> None:
    network, x = problem()
    posterior, other = (ntkl.laplace(network, (x, CASES["gaussian"][1]), ntkl.Gaussian(noise), ntkl.GaussianPrior(2.0),
                                     "kfac") for noise in (0.3, 0.8))
    posterior.likelihood.noise = 0.8
    moved, truth = posterior.leave_one_out(CHOSEN), other.leave_one_out(CHOSEN)
    assert relative_error(moved.mean, truth.mean) < 1e-9 and relative_error(moved.log_density, truth.log_density) < 1e-9
    assert moved.reliability.moved and "changed since the fit" in moved.guarantees[-1] and not truth.reliability.moved


def test_the_posterior_stays_as_it_was() -> None:
    posterior = fit("categorical", "ekfac")
    before = posterior.log_det().clone(), posterior.f.clone()
    posterior.leave_one_out(4)
    assert torch.equal(posterior.log_det(), before[0]) and torch.equal(posterior.f, before[1])


@pytest.mark.parametrize(
    ("points", "got"),
    [(0, "points=0"), (-2, "points=-2"), (N + 1, "points=15"), ([], "none"), ([0.5], "float"), ([N], f"{N}"),
     ([1, 1], "more than once"), (torch.ones(3, dtype=torch.bool), "3 booleans"), ("five", "five"), ({"a": 1}, "a")],
)
@pytest.mark.parametrize("structure", ["gp", "kfac"])
def test_points_that_are_none_are_refused(structure: str, points: Any, got: str) -> None:
    with refused(ntkl.DataError, "training point", got, "Pass"):
        fit("categorical", structure).leave_one_out(points)


def test_what_it_cannot_do_is_refused(tmp_path: Any) -> None:
    posterior = fit("categorical", "kfac")
    with refused(ntkl.errors.HyperparameterError, "seed", "-1", "seed=0"):
        posterior.leave_one_out(3, seed=-1)
    with refused(ntkl.UnsupportedError, 'curvature="ggn"', "'ef'", "GGN"):
        fit("categorical", "kfac", curvature="ef").leave_one_out(3)
    with refused(ntkl.UnsupportedError, "the data it was fitted to", "what-if changed", "Take the part first"):
        posterior.remove([0]).leave_one_out(3)
    with refused(ntkl.UnsupportedError, '"gp", "full" or "iterative"', "kfac", "points=300"):
        posterior.loo_log_density()
    with refused(ntkl.DataError, "at least two training points", "1", "other data"):
        posterior.subset([4]).leave_one_out(1)
    posterior.save(tmp_path / "posterior.pt")
    with refused(ntkl.UnsupportedError, "training data|training points", "without", "Load it"):
        ntkl.load(tmp_path / "posterior.pt", problem()[0]).leave_one_out(3)


def test_memory_is_known_before_anything_is_read(large_groups: None) -> None:
    budget = ntkl.Settings(memory_budget=3_500)
    posterior = fit("gaussian", "diag", settings=budget)
    with refused(ntkl.MemoryBudgetError, r"6 matrices over 9 outputs.*3\.4 KiB", r"3\.8 KiB", "fewer points"):
        posterior.leave_one_out(range(N))
    assert len(posterior.leave_one_out([1, 2]).mean) == 2
