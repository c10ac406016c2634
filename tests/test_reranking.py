"""Re-ranking: effects are those of single moving what-ifs, and a minimum that leaves with its point is told."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ntk_laplace as ntkl
from reference import relative_error
from refusals import inputs, labels, network, refused

NEW = torch.linspace(-1.0, 1.0, 8).double().view(2, 4)


@functools.cache
def trained() -> nn.Module:
    """The network at a minimum."""
    fitted = ntkl.laplace(network(), (inputs(), labels()), ntkl.Categorical(), ntkl.GaussianPrior(3.0)).refit()
    return fitted.reweight(0, 1.0, linearization="moving").network.module


def classes(structure: str = "gp") -> ntkl.Posterior:
    return ntkl.laplace(trained(), (inputs(), labels()), ntkl.Categorical(), ntkl.GaussianPrior(3.0), structure)


class TwoWells(nn.Module):
    """f = θ where the input is 1, and θ² - 1 where it is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor([0.8**0.5]).double())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.theta + (1 - x) * (self.theta.square() - 1)


def two_wells(pull: float, weight: float = 1.0) -> ntkl.Posterior:
    """At θ = 0.894, a minimum of ½ Σ(y - f)² for five points (0, 0) and the points (1, pull) and (1, -pull)."""
    x = torch.tensor([0.0] * 5 + [1.0, 1.0]).double().unsqueeze(1)
    y = torch.tensor([0.0] * 5 + [pull, -pull]).double().unsqueeze(1)
    likelihood = ntkl.Gaussian(1.0) if weight == 1 else ntkl.Tempered(ntkl.Gaussian(1.0), weight)
    return ntkl.laplace(TwoWells(), (x, y), likelihood, ntkl.GaussianPrior(1e-12 * weight))


@pytest.mark.parametrize("structure", ["gp", "full", "kfac"])
def test_effects_are_those_of_single_what_ifs(structure: str) -> None:
    posterior = classes(structure)
    found = posterior.rerank(NEW, 2, by="probability", groups=[[0, 3, 5]])
    before, linear = posterior.predict(NEW, "map").probs, posterior.removal_effects(NEW, by="probability")

    def change(points: list[int], i: int) -> Tensor:
        after = posterior.remove(points, linearization="moving").predict(NEW, "map").probs
        return (after - before)[i, found.quantity.output[i]]

    for i in range(2):
        for rank in range(2):
            j = int(found.indices[i, rank])
            assert abs(float(found.moving[i, rank] - change([j], i))) < 1e-8
            assert float(found.linear[i, rank]) == pytest.approx(float(linear[i, j]), rel=1e-12)
        assert abs(float(found.group_moving[i, 0] - change([0, 3, 5], i))) < 1e-8
    assert bool((found.moving.abs().diff(dim=1) <= 0).all()) and bool(found.converged.all() and found.comes_back.all())
    order = linear.abs().argsort(dim=1, descending=True)
    assert torch.equal(order.gather(1, found.places), found.indices)


@pytest.mark.parametrize("structure", ["gp", "diag"])
def test_of_a_network_at_no_minimum_effects_are_about_the_next_one(structure: str) -> None:
    """Of rankings and of sources; linear effects stay those of the posterior."""
    early = ntkl.laplace(network(), (inputs(), labels()), ntkl.Categorical(), ntkl.GaussianPrior(3.0), structure)
    refitted, sources = early.refit(linearization="moving"), [n % 3 for n in range(early.num_examples)]
    found, want = early.rerank(NEW, 3, output=1, groups=[[0, 3]]), refitted.rerank(NEW, 9, output=1, groups=[[0, 3]])
    points = [{int(j): float(effect) for j, effect in zip(own.indices[0], own.moving[0], strict=True)}
              for own in (found, want)]
    assert points[0] == pytest.approx({j: points[1][j] for j in points[0]}, abs=1e-9)
    assert relative_error(found.group_moving, want.group_moving) < 1e-6
    linear = early.removal_effects(NEW, output=1)
    assert relative_error(found.linear, linear.gather(1, found.indices)) < 1e-9
    assert "no minimum" in found.guarantees[-1] and "no minimum" not in want.guarantees[-1]
    for by in ("output", "variance"):
        one, other = (own.source_effects(NEW, sources, by=by, linearization="moving") for own in (early, refitted))
        assert relative_error(one.effect, other.effect) < 1e-6
        assert "no minimum" in one.guarantees[-1] and "no minimum" not in other.guarantees[-1]
    assert "no minimum" not in early.source_effects(NEW, sources).guarantees[-1]


def test_groups_by_linearization_are_refits_of_the_linearized_network() -> None:
    posterior = classes()
    y = torch.tensor([0, 2])
    found = posterior.rerank(NEW, 2, by="log_likelihood", y=y, groups=[[0, 3, 5], torch.arange(9) == 1])
    for g, group in enumerate(([0, 3, 5], [1])):
        after = posterior.remove(group, steps=None)
        then, now = (one.likelihood.log_prob(one.outputs(NEW), y) for one in (after, posterior))
        assert relative_error(found.group_linear[:, g], then - now) < 1e-8
    table = found.groups_dataframe()
    assert table["points"].tolist() == [3, 1, 3, 1] and table["converged"].all()


def test_a_linear_network_has_equal_effects() -> None:
    x = inputs()
    posterior = ntkl.laplace(nn.Linear(4, 2).double(), (x, x[:, :2].sin()), ntkl.Gaussian(0.3), ntkl.GaussianPrior(2.0))
    found = posterior.rerank(NEW, 9, output=1, groups=[[1, 2]])
    assert relative_error(found.moving, found.linear) < 1e-9
    assert relative_error(found.group_moving, found.group_linear) < 1e-9
    assert not found.disagrees.any() and not found.group_disagrees.any() and bool(found.comes_back.all())


def test_a_minimum_that_leaves_with_its_point_does_not_come_back() -> None:
    """Without the point that pulls to the right, θ goes to the left minimum, and stays there when it is back."""
    right = torch.ones(1, 1).double()
    found = two_wells(4.0).rerank(right, 7)
    away = found.indices[0][~found.comes_back[0]].tolist()
    assert away == [5] and int(found.indices[0, 0]) == 5 and bool(found.converged.all())
    left = float(found.f[0, 0] + found.moving[0, 0])
    assert left < -1 and 10 * left**3 - 9 * left + 4 == pytest.approx(0.0, abs=1e-6)
    assert bool(two_wells(0.5).rerank(right, 7).comes_back.all())
    for weight in (1.0, 1e-3, 1e3):  # the same minima
        what_ifs = two_wells(4.0, weight).what_ifs([[5], [6], [0, 1]])
        assert what_ifs.comes_back().tolist() == [False, True, True]
    assert two_wells(4.0).what_ifs([[5]], linearization="fixed").comes_back().tolist() == [True]


def test_disagreement_is_a_sign_or_a_factor_of_two() -> None:
    found = two_wells(4.0).rerank(torch.ones(1, 1).double(), 7)
    ratio = found.moving / found.linear
    assert torch.equal(found.disagrees, (ratio < 0.5) | (ratio > 2.0)) and found.disagrees.any()


def test_tables_pictures_and_words() -> None:
    found = classes().rerank(NEW, 3, groups=[[0, 1]])
    table = found.to_dataframe()
    assert len(table) == 6 and table["rank"].tolist() == [0, 1, 2] * 2
    assert torch.equal(found.top(2), found.indices[:, :2])
    assert "removing it" in table["meaning"][0] and "2 input(s), 3 training points" in repr(found)
    axes = found.plot().axes[0]
    assert axes.get_xlabel() == "linear effect" and "groups" in axes.get_legend_handles_labels()[1]


def test_the_page_ranks_the_output_that_it_explains_again() -> None:
    posterior = classes()
    for output in (0, 2):
        found, wanted = ntkl.explore(posterior, NEW, candidates=3, output=output), posterior.rerank(NEW, 3, output)
        for point, own in zip(found.content["points"], wanted.linear, strict=True):
            assert [row[1] for row in point["reranked"]] == pytest.approx(own.tolist(), rel=1e-3)
            assert point["output"] == output


def test_refusals(tmp_path: Path) -> None:
    posterior = classes()
    with refused(ntkl.HyperparameterError, "candidates", "-1", "Pass 0"):
        ntkl.explore(posterior, NEW, candidates=-1)
    with refused(ntkl.UnsupportedError, "quantity of the outputs", "variance", "explain"):
        posterior.rerank(NEW, by="variance")
    with refused(ntkl.HyperparameterError, "candidates", "0", "how many points"):
        posterior.rerank(NEW, 0)
    with refused(ntkl.DataError, "0 to 8", "9", ""):
        posterior.rerank(NEW, 2, groups=[[9]])
    with refused(ntkl.DataError, "that is left", "none in group 1", "fewer"):
        posterior.rerank(NEW, 2, groups=[[0], range(9)])
    y = labels().double().unsqueeze(1)
    y[3:] = torch.nan
    few = ntkl.laplace(network(outputs=1), (inputs(), y), ntkl.Gaussian(0.3, missing="nan"))
    with refused(ntkl.DataError, "that is left", "none in group 0", "fewer"):
        few.rerank(NEW, 2, groups=[[0, 1, 2]])
    vars(posterior.fitted.settings)["memory_budget"] = 10  # the class is frozen
    with refused(ntkl.MemoryBudgetError, "networks", "need of", "fewer candidates"):
        posterior.rerank(NEW, 2)
    classes().save(tmp_path / "fit.pt", include_data=True)
    alone = ntkl.load(tmp_path / "fit.pt", trained())
    for verb in (lambda: alone.what_ifs([[0]]), lambda: alone.remove(0, linearization="moving")):
        with refused(ntkl.DataError, "training", "checkpoint|none", "^Load.*data="):
            verb()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["classes", "binary", "values"])
def test_the_page_has_both_effects(kind: str) -> None:
    """The table of each input, and the answers without its groups, are those of the verb."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3 if kind == "classes" else 1)).double()
    x = inputs()
    likelihood, y = {
        "classes": (ntkl.Categorical(), labels()), "binary": (ntkl.Bernoulli(), (x[:, :1] > 0).double()),
        "values": (ntkl.Gaussian(0.3), x[:, :1].sin()),
    }[kind]
    posterior = ntkl.laplace(module, (x, y), likelihood, ntkl.GaussianPrior(2.0)).refit(linearization="moving")
    page = ntkl.explore(posterior, NEW, x, k=2, candidates=3)
    found = posterior.rerank(NEW, 3)
    for i, point in enumerate(page.content["points"]):
        sign = -1.0 if kind == "binary" and found.f[i, 0] < 0 else 1.0
        assert [row[0] for row in point["reranked"]] == found.indices[i].tolist()
        for row, linear, moving, apart in zip(point["reranked"], found.linear[i], found.moving[i], found.disagrees[i],
                                              strict=True):
            assert row[1] == pytest.approx(sign * float(linear), rel=1e-3)
            assert row[2] == pytest.approx(sign * float(moving), rel=1e-3) and row[4] == bool(apart)
        group = [j for side in ("for", "against") for j, *_ in point[side]]
        without = posterior.remove(group, linearization="moving").outputs(NEW)[i] * sign
        assert point["without"]["both"]["moving"]["f"] == pytest.approx(without.tolist(), rel=1e-3)
    assert "Ranked again" in page.html() and "Ranked again" not in ntkl.explore(posterior, NEW, x).html()
