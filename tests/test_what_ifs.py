"""Many what-ifs at once: each is the single one; and cross-validation by them."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ntk_laplace as ntkl
from minima import case
from ntk_laplace.model.network import ManyWeights
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.krylov import minimize
from ntk_laplace.structures.weight_likelihood import LocalCurvature
from reference import relative_error
from refusals import inputs, labels, network, refused

GROUPS = [[0], [1, 4], [2, 3, 5, 7], []]


def test_outputs_of_many_inputs_are_evaluated_in_parts(monkeypatch):
    """A few inputs at a time where the graph of all does not fit; the outputs are the same."""
    posterior, *_ = case("classes", "gp")
    found, new = posterior.what_ifs(GROUPS[:2], linearization="moving"), inputs(23)
    whole, rows, plain = found.outputs(new), [], ManyWeights.__call__

    def counted(many, thetas, x, apart=False):
        rows.append(len(x))
        return plain(many, thetas, x, apart)

    monkeypatch.setattr(tuning, "CHAIN_BYTES", 4096)
    monkeypatch.setattr(ManyWeights, "__call__", counted)
    assert relative_error(found.outputs(new), whole) < 1e-12
    assert max(rows) < 23


@pytest.mark.parametrize("linearization", ["moving", "fixed"])
@pytest.mark.parametrize("likelihood, structure", [("classes", "gp"), ("values", "full"), ("classes", "kfac")])
def test_each_group_is_the_single_what_if(likelihood, structure, linearization):
    """Weights, outputs and densities; those of the fit count, and the posterior of one group has every verb."""
    posterior, x, _ = case(likelihood, structure, weighted=True)
    found = posterior.what_ifs(GROUPS, linearization=linearization)
    assert bool(found.converged.all()) and len(found) == 4 and "4 groups" in repr(found)
    new = inputs(14)[9:]
    f, density = found.outputs(new), found.log_prob()
    exact = posterior if structure != "kfac" else case(likelihood, "gp", weighted=True)[0]
    for i, group in enumerate(GROUPS):
        options = {"steps": None} if linearization == "fixed" else {"linearization": "moving"}
        if not group:
            assert relative_error(found.thetas[i], posterior.fitted.theta) < 1e-8
            continue
        one = exact.remove(group, **options)
        theta = one.fitted.theta
        assert relative_error(found.thetas[i], theta) < 1e-7
        assert relative_error(f[i], one.outputs(new)) < 1e-7
        after = posterior.likelihood.log_prob(one.outputs(x), posterior.targets)
        assert relative_error(density[i], after) < 1e-7
        assert float(found.weights[i, group].abs().sum()) == 0.0
    if structure != "kfac" or linearization == "moving":
        alone = found.posterior(1)
        want = exact.remove(GROUPS[1], **options)
        assert relative_error(alone.outputs(new), want.outputs(new)) < 1e-7
        assert torch.equal(alone.weights, found.weights[1])


def test_masks_weights_and_indices_say_the_same():
    posterior, _, _ = case("classes")
    masks = torch.zeros(2, 9, dtype=torch.bool)
    masks[0, 1], masks[1, [2, 5]] = True, True
    by_index = posterior.what_ifs([[1], torch.tensor([2, 5])]).thetas
    assert torch.equal(posterior.what_ifs(masks).thetas, by_index)
    assert torch.equal(posterior.what_ifs((~masks).float()).thetas, by_index)
    heavy = posterior.what_ifs(torch.tensor([[2.0, *[1.0] * 8]]))
    want = posterior.reweight(0, 2.0, linearization="moving").network.theta
    assert relative_error(heavy.thetas[0], want) < 1e-8


@pytest.mark.slow
def test_batches_of_groups_and_of_data_change_nothing(monkeypatch):
    """Few groups at a time, graphs of few networks, and graphs that are built again for each product."""
    posterior, _, _ = case("classes")
    groups = [[i] for i in range(9)]
    whole = posterior.what_ifs(groups)
    monkeypatch.setattr(tuning, "GROUPS", 4)
    monkeypatch.setattr(tuning, "GRAPH_GROUPS", 3)
    assert relative_error(posterior.what_ifs(groups).thetas, whole.thetas) < 1e-9
    monkeypatch.setattr(tuning, "CACHED_BYTES", 1)  # a network at a time, which takes no vmap
    assert relative_error(posterior.what_ifs(groups).thetas, whole.thetas) < 1e-9
    monkeypatch.setattr(tuning, "CHAIN_BYTES", 4000)
    again = posterior.what_ifs(groups)
    assert relative_error(again.thetas, whole.thetas) < 1e-9
    assert relative_error(again.outputs(inputs()), whole.outputs(inputs())) < 1e-9


def test_a_long_descent_shows_its_passes(monkeypatch, capsys):
    """Of one change and of several; the bar is gone afterwards, and in other calls."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr(tuning, "PROGRESS_DELAY", 1e-9)
    posterior, _, _ = case("classes")
    posterior.remove([0], linearization="moving")
    assert "1 of 1 networks descend, pass" in capsys.readouterr().err
    found = posterior.what_ifs([[0], [1], [2]])
    assert "of 3 networks descend, pass" in capsys.readouterr().err
    found.comes_back()
    assert "of 4 networks descend, pass" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("chain_bytes", [tuning.CHAIN_BYTES, 1000])
def test_passes_over_the_points_that_count_are_those_over_all(chain_bytes, monkeypatch):
    """Half of the points leave, in rows with more and with fewer that stay, all data in a pass or few points."""
    posterior, _, _ = case("classes", weighted=True)
    groups = [[0, 1, 2, 3, 4], [1, 3, 5, 8], [2, 4, 6, 7, 8], [0, 1, 2]]
    with monkeypatch.context() as all_points:
        all_points.setattr(tuning, "CHOSEN_SHARE", -1.0)
        want = posterior.what_ifs(groups).thetas
    monkeypatch.setattr(tuning, "CHAIN_BYTES", chain_bytes)
    found = posterior.what_ifs(groups)
    assert bool(found.converged.all())
    assert relative_error(found.thetas, want) < 1e-9
    assert relative_error(found.thetas[1], posterior.remove(groups[1], linearization="moving").fitted.theta) < 1e-7


@pytest.mark.slow
@pytest.mark.parametrize("linearization", ["moving", "fixed"])
def test_cross_validation_is_training_without_each_fold(linearization):
    posterior, x, y = case("classes")
    folds = torch.tensor([7, 7, 2, 2, 2, 4, 4, 4, 7])
    found = posterior.cross_validate(folds, linearization=linearization)
    options = {"steps": None} if linearization == "fixed" else {"linearization": "moving"}
    for fold in (2, 4, 7):
        own = folds == fold
        f = posterior.remove(own, **options).outputs(x[own])
        assert (found.f[own] - f).abs().max() < 1e-6 * posterior.outputs(x).abs().max()  # without a fold f may be 0
        assert relative_error(found.log_density[own], torch.log_softmax(f, 1)[range(len(f)), y[own]]) < 1e-6
    assert torch.equal(found.folds, folds) and bool(found.converged.all()) and "3 folds" in repr(found)
    drawn = posterior.cross_validate(4, seed=3)
    assert sorted(drawn.folds.bincount().tolist()) == [2, 2, 2, 3]
    assert torch.equal(drawn.folds, posterior.cross_validate(4, seed=3).folds)


def test_the_mean_over_the_folds_counts_points_as_the_fit_does() -> None:
    """Not at all without a target or with a weight of zero."""
    x, y, w = inputs(), labels(), torch.ones(9)
    y[:4] = -100
    w[4:6] = torch.tensor([0.0, 3.0])
    posterior = ntkl.laplace(network(), (x, y, w), ntkl.Categorical())
    found = posterior.cross_validate(3, linearization="fixed")
    assert found.counts.tolist() == [0, 0, 0, 0, 0, 3, 1, 1, 1]
    mean = (3 * found.log_density[5] + found.log_density[6:].sum()) / 6
    apart = torch.cat([3 * (found.log_density[5:6] - mean), found.log_density[6:] - mean]) / 6
    assert found.standard_error == pytest.approx(float(apart.norm()) * (4 / 3) ** 0.5)
    assert f"mean log density {float(mean):.4f} ± {found.standard_error:.2g} nats" in repr(found)


class Banana:
    """Rosenbrock's function from several starts, with its Hessian, which is not positive everywhere."""

    precision = torch.ones(2).double()
    renewal = None

    def values_and_gradients(self, at: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        a, b = at.T
        gradients = torch.stack([-400 * a * (b - a**2) - 2 * (1 - a), 200 * (b - a**2)], 1)
        return 100.0 * (b - a**2) ** 2 + (1.0 - a) ** 2, gradients

    def precondition(self, vectors: Tensor, rounded: bool = False) -> Tensor:
        return vectors / 10.0

    def changes(self, at: Tensor, directions: Tensor) -> Tensor:
        return directions.norm(dim=1)

    def local(self, at: Tensor, rows: Tensor) -> LocalCurvature:
        (a, b), (_, gradients) = at.T, self.values_and_gradients(at, rows)
        rows_ = [torch.stack([1200 * a**2 - 400 * b + 2, -400 * a], 1), torch.stack([-400 * a, 200 + 0 * a], 1)]
        return LocalCurvature(gradients, lambda v: torch.einsum("sij,sj->si", torch.stack(rows_, 1), v))


def test_newton_steps_pass_negative_curvature():
    start = torch.tensor([[-1.2, 1.0], [0.0, 2.0], [1.0, 1.0], [-0.5, 3.0]]).double()
    found = minimize(Banana(), start, 1e-16)
    assert bool(found.converged.all()) and relative_error(found.at, torch.ones_like(start)) < 1e-7
    assert found.steps[2] == 1  # there already
    assert not bool(found.falling.any())


def test_steps_that_are_cut_short_still_fall(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tuning, "MOST_QUASI_NEWTON_STEPS", 1)
    monkeypatch.setattr(tuning, "NEWTON_STEPS", 2)
    found = minimize(Banana(), torch.tensor([[-1.2, 1.0], [1.0, 1.0]]).double(), 1e-16)
    assert found.falling.tolist() == [True, False] and found.converged.tolist() == [False, True]


def test_what_makes_no_sense():
    posterior, _, _ = case("classes")
    for groups, error, expected in (
        ([], ntkl.DataError, "at least one group"), (3, ntkl.DataError, "groups of training points"),
        ([[9]], ntkl.DataError, "from 0 to 8"), ([[1, 1]], ntkl.DataError, "once"),
        ([list(range(9))], ntkl.DataError, "at least one training point with a target that is left"),
        (torch.zeros(2, 5, dtype=torch.bool), ntkl.DataError, "9 columns"),
        (torch.full((1, 9), -1.0), ntkl.HyperparameterError, "at least 0"),
    ):
        with refused(error, expected, ".", "."):
            posterior.what_ifs(groups)
    for by_name in (posterior.what_ifs, lambda groups: posterior.rerank(inputs(1), groups=groups)):
        with refused(ntkl.DataError, "groups of training points", "a dict", r"list\(groups.values\(\)\)"):
            by_name({0: [2, 3]})
    with refused(ntkl.UnsupportedError, 'linearization="fixed" or "moving"', "'no'", "moving"):
        posterior.what_ifs([[0]], linearization="no")
    for folds in (1, 10, 2.5, "all", [0] * 9, [0, 1], torch.rand(9)):
        with refused(ntkl.DataError, "2 to 9 folds", ".", "9 integers"):
            posterior.cross_validate(folds)
    with refused(ntkl.DataError, "a group from 0 to 0", "3", "number of a group"):
        posterior.what_ifs([[0]]).posterior(3)
    small = ntkl.laplace(network(), (inputs(), labels()), ntkl.Categorical(),
                         settings=ntkl.Settings(memory_budget=2**20))
    with refused(ntkl.MemoryBudgetError, "the weights of 9,000 networks", "predicted need", "fewer groups"):
        small.what_ifs(torch.ones(9000, 9))


@pytest.mark.parametrize("linearization", ["moving", "fixed"])
def test_answers_do_not_change_with_later_hyperparameters(linearization: str) -> None:
    posterior, _, _ = case("classes")
    found, new = posterior.what_ifs([[0], [1, 2]], linearization=linearization), inputs(14)[9:]
    posterior.prior.precision = 30.0
    assert relative_error(found.posterior(1).outputs(new), found.outputs(new)[1]) < 1e-9


def test_a_group_of_an_approximation_has_no_posterior_at_a_fixed_linearization() -> None:
    posterior, _, _ = case("classes", "kfac")
    with refused(ntkl.UnsupportedError, 'structure="gp", "full" or "iterative"', "'kfac'", "moving"):
        posterior.what_ifs([[0]], linearization="fixed").posterior(0)


@pytest.mark.filterwarnings("ignore:the network is not at a minimum")
@pytest.mark.parametrize("change", ["condition", "subset", "prior", "copy"])
def test_a_moved_network_stays_where_it_is_without_a_change(change: str) -> None:
    """What remains of the gradient is that of the present points and prior, as it is for a posterior that was fitted.

    After the same data it is that of the what-if, which goes on where its steps have ended.
    """
    x = inputs(14)[9:]
    posterior, _, _ = case("classes")
    moved = posterior.remove([0], linearization="moving")
    theta = moved.network.theta
    if change == "condition":
        moved = moved.condition((x, labels(5)))
    elif change == "subset":
        moved = moved.subset([1, 2, 3, 4, 5])
    elif change == "prior":
        moved.prior.precision = 30.0
    else:
        moved = copy.deepcopy(moved)
    assert relative_error(moved.remove([], linearization="moving").network.theta, theta) < 1e-9
    if change != "condition":  # by whose labels it is at no minimum
        found = moved.source_effects(x, [n % 2 for n in range(moved.num_examples)], linearization="moving")
        assert relative_error(found.f, moved.outputs(x)) < 1e-7
    with pytest.raises(ntkl.UnsupportedError, match="a what-if changed"):
        moved.save("never.pt")


@pytest.mark.parametrize("structure", ["gp", "full", "kfac", "diag", "iterative"])
def test_a_moved_network_is_not_saved(structure: str, tmp_path: Path) -> None:
    """A checkpoint has no remaining gradient: a what-if of the loaded posterior would start from another objective."""
    posterior, *_ = case("classes", structure)
    moved = posterior.remove([0], linearization="moving")
    for changed in (moved, copy.deepcopy(moved).remove([1], linearization="moving")):
        with pytest.raises(ntkl.UnsupportedError, match="a what-if changed"):
            changed.save(tmp_path / "never.pt", include_data=True)


@pytest.mark.filterwarnings("ignore:the network is not at a minimum")
@pytest.mark.parametrize("structure", ["gp", "kfac"])
def test_a_point_with_a_target_must_be_left(structure: str) -> None:
    """Points without targets are no data: the prior alone would remain, which a fit refuses as well."""
    y = labels().double().unsqueeze(1)
    y[3:] = torch.nan
    posterior = ntkl.laplace(network(outputs=1), (inputs(), y), ntkl.Gaussian(0.3, missing="nan"), structure=structure)
    changes = (
        lambda: posterior.remove([0, 1, 2]),
        lambda: posterior.remove([0, 1, 2], linearization="moving"),
        lambda: posterior.reweight([0, 1, 2], 0.0),
        lambda: posterior.relabel([0, 1, 2], torch.full((3, 1), torch.nan)),
        lambda: posterior.what_ifs([[0], [0, 1, 2]]),
        lambda: posterior.cross_validate([0, 0, 0, *[1] * 6]),
    )
    for change in changes:
        with refused(ntkl.DataError, "at least one training point with a target that is left", "none", "fewer points"):
            change()
    with refused(ntkl.DataError, "at least two sources", "'a' for all of 3 training points", "others must remain"):
        posterior.source_effects(inputs()[:2], ["a"] * 3 + ["b"] * 6)
    assert bool(posterior.remove([0, 1], linearization="moving").outputs(inputs()).isfinite().all())
