"""Effects of sources: each is the removal of all of its points, whatever the labels are given as."""

from __future__ import annotations

import numpy as np
import pandas
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ntk_laplace as ntkl
from minima import case
from ntk_laplace import plotting
from reference import relative_error
from refusals import inputs, labels, network, refused

SOURCES = ["b", "a", "b", "c", "a", "c", "c", "b", "a"]
NAMES = ("a", "b", "c")


def members(name: str) -> torch.Tensor:
    return torch.tensor([label == name for label in SOURCES])


def log_prob(posterior: ntkl.Posterior, f: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return posterior.likelihood.log_prob(f, y)


def new(likelihood: str) -> tuple[torch.Tensor, torch.Tensor]:
    x = inputs(14)[9:]
    return x, (torch.tensor([0, 2, 1, 0, 1]) if likelihood == "classes" else x[:, :3].cos())


@pytest.mark.parametrize("linearization", ["fixed", "moving"])
@pytest.mark.parametrize("likelihood, structure", [("classes", "gp"), ("values", "full"), ("classes", "kfac")])
def test_each_source_is_removed_as_a_whole(likelihood: str, structure: str, linearization: str) -> None:
    """Effects, densities and the source's own points, from the posterior without its points; weighted examples."""
    posterior, x, _ = case(likelihood, structure, weighted=True)
    exact = posterior if structure != "kfac" or linearization == "moving" else case(likelihood, "gp", weighted=True)[0]
    options = {"steps": None} if linearization == "fixed" else {"linearization": "moving"}
    x_new, y_new = new(likelihood)
    found = posterior.source_effects(x_new, SOURCES, y=y_new, linearization=linearization)
    f = posterior.outputs(x_new)
    single = posterior.removal_effects(x_new)
    assert found.names == NAMES and found.linearization == linearization and bool(found.converged.all())
    assert relative_error(found.f, f) < 1e-12
    output = f.argmax(1) if likelihood == "classes" else torch.zeros(len(f), dtype=torch.long)
    for s, name in enumerate(NAMES):
        own = members(name)
        without = exact.remove(own, **options)
        after = without.outputs(x_new)
        assert relative_error(found.outputs[:, s], after) < 1e-9
        effect = (after - f).gather(1, output.unsqueeze(1)).squeeze(1)
        assert relative_error(found.effect[:, s], effect) < 1e-8
        change = log_prob(posterior, after, y_new) - log_prob(posterior, f, y_new)
        assert relative_error(found.log_prob_change[:, s], change) < 1e-8
        assert relative_error(found.single[:, s], single[:, own].sum(1)) < 1e-12
        left = log_prob(posterior, without.outputs(x), posterior.targets)[own].mean()
        assert abs(float(found.own_log_prob_without[s] - left)) < 1e-9
        with_it = log_prob(posterior, posterior.outputs(x), posterior.targets)[own].mean()
        assert abs(float(found.own_log_prob[s] - with_it)) < 1e-12
        assert int(found.num_points[s]) == 3


@pytest.mark.parametrize("by", ["output", "probability", "log_likelihood", "variance", "probability_variance"])
def test_a_source_of_one_point_has_the_effect_of_that_point(by: str) -> None:
    """With a Gaussian likelihood one Newton step is the optimum, so a joint effect is that of `explain`."""
    posterior, _, _ = case("values")
    x_new, y_new = new("values")
    found = posterior.source_effects(x_new, ["one", *["rest"] * 8], 1, by=by, y=y_new)
    effect = posterior.explain(x_new, output=1, by=by, y=y_new).effect[:, 0]
    assert relative_error(found.effect[:, 0], effect) < 1e-9
    assert relative_error(found.single[:, 0], effect) < 1e-12 and found.by == by
    assert (found.log_prob_change is not None) and len(found) == 2


@pytest.mark.parametrize("linearization", ["fixed", "moving"])
@pytest.mark.parametrize("by", ["variance", "probability_variance", "probability"])
def test_other_quantities_of_classes(by: str, linearization: str) -> None:
    posterior, _, _ = case("classes")
    x_new, _ = new("classes")
    found = posterior.source_effects(x_new, SOURCES, 2, by=by, linearization=linearization)
    options = {"steps": None} if linearization == "fixed" else {"linearization": "moving"}
    (f, before), p = posterior.latent_moments(x_new), posterior.outputs(x_new).softmax(1)
    for s, name in enumerate(NAMES):
        mean, after = posterior.remove(members(name), **options).latent_moments(x_new)
        if by == "probability":
            want = mean.softmax(1)[:, 2] - p[:, 2]
        elif by == "variance":
            want = (after - before)[:, 2, 2]
        else:
            slope = p[:, 2:] * (torch.eye(3).double()[2] - p)  # of the softmax
            want = torch.einsum("nc,ncd,nd->n", slope, after - before, slope)
        assert relative_error(found.effect[:, s], want) < 1e-7
    assert found.log_prob_change is None and relative_error(found.f, f) < 1e-12


@pytest.mark.slow
def test_labels_of_every_kind_say_the_same() -> None:
    posterior, _, _ = case("values")
    x_new, _ = new("values")
    want = posterior.source_effects(x_new, SOURCES)
    number = torch.tensor([NAMES.index(label) for label in SOURCES])
    series = pandas.Series(SOURCES, index=range(20, 29))
    for given in (tuple(SOURCES), np.array(SOURCES), np.array(SOURCES, dtype=object), series,
                  series.astype("category")):
        found = posterior.source_effects(x_new, given)
        assert found.names == NAMES and torch.equal(found.effect, want.effect)
    for given in (number, number.tolist(), number.numpy(), pandas.Series(number.numpy()), list(number)):
        found = posterior.source_effects(x_new, given)
        assert found.names == ("0", "1", "2") and torch.equal(found.effect, want.effect)
    months = posterior.source_effects(x_new, [10 if label == "a" else 9 if label == "b" else 1 for label in SOURCES])
    assert months.names == ("1", "9", "10")  # numbers in their order
    dates = pandas.Series(pandas.to_datetime(["2024-02-01" if label == "a" else "2023-12-01" for label in SOURCES]))
    assert posterior.source_effects(x_new, dates).names[0].startswith("2023-12-01")
    mixed = posterior.source_effects(x_new, [1 if label == "a" else label for label in SOURCES])
    assert mixed.names == ("1", "b", "c") and torch.equal(mixed.effect, want.effect)
    equal = iter([1, 1.0, True] * 3)  # equal in Python: one source
    alike = posterior.source_effects(x_new, [next(equal) if label == "a" else label for label in SOURCES])
    assert alike.names == ("1", "b", "c") and torch.equal(alike.effect, want.effect)


class Halves(nn.Module):
    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self.whole(torch.cat([left, right], 1))


@pytest.mark.slow
@pytest.mark.parametrize("linearization", ["fixed", "moving"])
def test_several_inputs_loaders_and_single_precision(linearization: str) -> None:
    posterior, x, y = case("classes")
    x_new, _ = new("classes")
    want = posterior.source_effects(x_new, SOURCES, linearization=linearization)
    loader = DataLoader(TensorDataset(x_new), batch_size=2)
    found = posterior.source_effects(loader, SOURCES, linearization=linearization)
    assert relative_error(found.effect, want.effect) < 1e-9
    parts, parts_new = ({"left": each[:, :1], "right": each[:, 1:]} for each in (x, x_new))
    halves = ntkl.laplace(Halves(posterior.network.module), (parts, y), ntkl.Categorical(), ntkl.GaussianPrior(3.0))
    found = halves.source_effects(parts_new, SOURCES, linearization=linearization)
    assert relative_error(found.effect, want.effect) < 1e-9 and relative_error(found.single, want.single) < 1e-9
    module = network().float()
    module.load_state_dict(posterior.network.module.state_dict())
    few = ntkl.laplace(module, (x.float(), y), ntkl.Categorical(), ntkl.GaussianPrior(3.0), dtype=torch.float32)
    found = few.source_effects(x_new.float(), SOURCES, linearization=linearization)
    assert found.effect.dtype == torch.float32 and relative_error(found.effect.double(), want.effect) < 1e-2


def test_what_was_changed_before_stays_changed() -> None:
    """A removed point belongs to no source any more; effects are those on top of the change, from its optimum."""
    posterior, _, _ = case("classes")
    x_new, _ = new("classes")
    gone = members("c")
    changed = posterior.remove(gone, steps=None)
    found = changed.source_effects(x_new, SOURCES, by="variance")
    assert found.num_points.tolist() == [3, 3, 0]
    both = posterior.remove(gone | members("a"), steps=None)
    assert relative_error(found.f, changed.outputs(x_new)) < 1e-8
    assert relative_error(found.outputs[:, 0], both.outputs(x_new)) < 1e-8
    assert relative_error(found.outputs[:, 2], changed.outputs(x_new)) < 1e-8
    assert bool(found.own_log_prob[2].isnan()) and bool(found.own_log_prob[:2].isfinite().all())
    same = changed.latent_moments(x_new)[1], both.latent_moments(x_new)[1]
    rows = torch.arange(5), found.quantity.output, found.quantity.output
    assert relative_error(found.effect[:, 0], (same[1] - same[0])[rows]) < 1e-7


@pytest.mark.parametrize("by", ["variance", "probability_variance", "probability", "log_likelihood"])
def test_numbers_have_no_graph(by: str) -> None:
    posterior = ntkl.laplace(network(), (inputs(), labels()), ntkl.Categorical())
    found = posterior.source_effects(inputs(2), list("aaabbbccc"), by=by, linearization="fixed")
    assert not any(value.requires_grad for value in vars(found).values() if isinstance(value, torch.Tensor))


def test_missing_targets_do_not_count() -> None:
    y = (inputs()[:, :3] > 0).double()
    y[[1, 3]] = y[0, 0] = float("nan")
    posterior = ntkl.laplace(network(), (inputs(), y), ntkl.Bernoulli(missing="nan"), ntkl.GaussianPrior(3.0))
    found = posterior.source_effects(inputs(14)[9:], SOURCES)
    density = torch.where(y > 0.5, 1.0, -1.0).mul(posterior.outputs(inputs())).sigmoid().log()
    for s, name in enumerate(NAMES):
        own = members(name) & ~y.isnan().all(1)
        want = density.masked_fill(y.isnan(), 0.0)[own].sum(1).mean()
        assert abs(float(found.own_log_prob[s] - want)) < 1e-9


@pytest.mark.slow
def test_table_frame_and_picture() -> None:
    posterior, _, _ = case("classes")
    x_new, y_new = new("classes")
    found = posterior.source_effects(x_new, SOURCES, y=y_new)
    frame, table = found.to_dataframe(), found.table()
    assert len(frame) == 15 and frame["log_prob_change"].notna().all()
    first = frame[frame["input"] == 3]
    assert (first["removal_effect"].abs().diff().dropna() <= 0).all()
    s = NAMES.index(first["source"].iloc[0])
    assert first["removal_effect"].iloc[0] == float(found.effect[3, s])
    assert first["meaning"].iloc[0].startswith("removing them ")
    assert table["change of log p(y)"].is_monotonic_decreasing and table["source"][0] == NAMES[found.order[0]]
    said = str(found)
    assert all(name in said for name in NAMES) and "mean over 5 inputs" in said and "own log p" in said
    assert repr(found) == "SourceEffects(3 sources, 5 input(s), linearization='fixed', 3 converged)"
    alone = posterior.source_effects(x_new[:1], SOURCES)
    assert alone.table()["effect"].abs().is_monotonic_decreasing and "mean over 1" not in str(alone)
    assert "change of output" in str(alone)
    for one, panels in ((found, 3), (alone, 2)):
        figure = one.plot()
        assert len(figure.axes) == panels and plotting.png(figure).startswith(b"\x89PNG")
        ticks = [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
        assert ticks == [f"{NAMES[s]} (3)" for s in one.order.tolist()]


def test_what_makes_no_sense() -> None:
    posterior, _, _ = case("classes")
    x_new, y_new = new("classes")
    for sources, expected, got, remedy in (
        (SOURCES[:5], "sources of 9 training points", "5 labels", "one label for each"),
        ("abcabcabc", "sources of 9 training points", "'abcabcabc'", "one label for each"),
        (3, "sources of 9 training points", "3", "one label for each"),
        (torch.zeros(9, 2), "sources of 9 training points", "shape", "one label for each"),
        ([["a"]] * 9, "names or numbers of sources", r"\['a'\]", "one label for each"),
        ([*SOURCES[:7], None, "a"], "a source for each training point", "none for point 7", "unknown"),
        (pandas.Series([*range(3), float("nan"), float("nan"), *range(4)]), "a source for each", "3 and 1 more", "own"),
        ([1, "1", *SOURCES[2:]], "labels that differ in print", "print as 1, of different types", "one type"),
        (["x"] * 9, "at least two sources", "'x' for all of 9", "others must remain"),
        (list(range(9)), "sources of several training points", "each of 9", "removal_effects"),
    ):
        with refused(ntkl.DataError, expected, got, remedy):
            posterior.source_effects(x_new, sources)
    with pytest.warns(ntkl.NTKLaplaceWarning, match="6 sources for 9 training points"):
        posterior.source_effects(x_new, [0, 0, 0, 0, 1, 2, 3, 4, 5])
    with refused(ntkl.DataError, "at least two sources", "'a' for all", "remain"):
        posterior.remove(~members("a"), steps=None).source_effects(x_new, SOURCES)
    with refused(ntkl.UnsupportedError, 'linearization="fixed" or "moving"', "'no'", "moving"):
        posterior.source_effects(x_new, SOURCES, linearization="no")
    with refused(ntkl.UnsupportedError, "an effect on one of", "'odds'", "output"):
        posterior.source_effects(x_new, SOURCES, by="odds")
    with refused(ntkl.DataError, "5", "3", "[A-Z]"):
        posterior.source_effects(x_new, SOURCES, y=y_new[:3])
    with refused(ntkl.UnsupportedError, 'structure="gp", "full" or "iterative"', "'kfac'", "moving"):
        case("classes", "kfac")[0].source_effects(x_new, SOURCES, by="variance")
    loader = DataLoader(TensorDataset(inputs(), labels()), batch_size=4, shuffle=True)
    with refused(ntkl.DataError, "a fit to data in a known order", "a DataLoader that shuffles", "shuffle=False"):
        ntkl.laplace(network(), loader, ntkl.Categorical()).source_effects(x_new, SOURCES)
    small = ntkl.laplace(network(), (inputs(), labels()), ntkl.Categorical(),
                         settings=ntkl.Settings(memory_budget=2**13))
    with refused(ntkl.MemoryBudgetError, "the weights of 4 networks", "predicted need", "fewer groups"):
        small.source_effects(x_new, SOURCES, linearization="moving")
