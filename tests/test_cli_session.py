"""A whole session in the shell: what `fit` writes is what `predict`, `explain` and `evidence` read."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pandas
import pytest
from PIL import Image

import ntk_laplace as ntkl
from ntk_laplace.tools import cli

pytestmark = pytest.mark.usefixtures("one_perceptron")
QUICK = {"epochs": 2, "hidden_layer_sizes": (2,), "random_state": 0}
GAUSSIAN = ["--likelihood", "gaussian"]  # one training: the choice of the noise takes two
NETWORK = """
from torch import nn


class Net(nn.Sequential):
    pass


def make_network():
    return Net(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with 20 rows of two inputs, two real targets, names, whole numbers and a source."""
    monkeypatch.chdir(tmp_path)
    draws = np.random.default_rng(0)
    table = pandas.DataFrame(draws.normal(size=(20, 2)), columns=["height", "width"])
    table["price"], table["rent"] = draws.normal(size=(2, 20)) * 1e3
    table["kind"], table["count"] = np.array(["cat", "ant", "bee"])[np.arange(20) % 3], np.arange(20) % 3 + 5
    table["month"] = np.array(["May", "June"])[np.arange(20) % 2]
    table.to_csv("all.csv", index=False)
    return tmp_path


def frame(*columns: str) -> pandas.DataFrame:
    return pandas.read_csv("all.csv")[["height", "width", *columns]]


def fit(targets: Sequence[str], *more: str) -> pandas.DataFrame:
    """Fit in the shell; the predictions of the held-out rows."""
    group = ["month"] if "--group" in more else []
    frame(*targets, *group).to_csv("data.csv", index=False)
    named = [part for target in targets for part in ("--target", target)]
    own = [] if "--network" in more else ["--hidden", "2"]
    assert cli.main(["fit", "data.csv", *named, "--epochs", "2", *own, "--out", "out", *more]) == 0
    return pandas.read_csv("out/predictions.csv")


def predict(data: pandas.DataFrame, *more: str) -> pandas.DataFrame:
    data.to_csv("new.csv", index=False)
    assert cli.main(["predict", "out/model.joblib", "--inputs", "new.csv", "--out", "p.csv", *more]) == 0
    return pandas.read_csv("p.csv")


def page(*more: str) -> dict[str, Any]:
    assert cli.main(["explain", "out/model.joblib", "--inputs", "new.csv", "--out", "page.html", *more]) == 0
    return content("page.html")


def content(path: str) -> dict[str, Any]:
    return json.loads(Path(path).read_text().partition('id="data">')[2].partition("</script>")[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:leave-one-out is not to be trusted", "ignore:training to the optimum")
@pytest.mark.parametrize(("targets", "more"), [
    (["price"], []), (["price", "rent"], []), (["kind"], []), (["count"], []),
    (["price"], ["--likelihood", "student-t"]), (["price", "rent"], ["--likelihood", "heteroscedastic-gaussian"]),
])
def test_a_session_in_the_shell(
    targets: list[str], more: list[str], folder: Path, capsys: pytest.CaptureFixture
) -> None:
    """Predictions, scores, explanations and evidence of the model's file are those that `fit` showed."""
    expected = fit(targets, "--level", "0.5", *more)
    told = capsys.readouterr().out
    held_out = frame(*targets).iloc[expected["row"]]
    found = predict(held_out[[*targets, "width", "height"]], "--level", "0.5")  # in another order
    again = capsys.readouterr().out
    assert found["row"].tolist() == list(range(4))
    pandas.testing.assert_frame_equal(found.drop(columns="row"), expected.drop(columns="row"), check_exact=True)
    scores = told[told.index("Scores of") : told.index("\n\nLog marginal")].partition("\n")[2]
    assert scores in again and "Scores of the 4 inputs" in again
    one, other = page(), content("out/explanations.html")
    if "mean" in "".join(found):
        _page_in_units_of_the_targets(one, found, targets)
    _targets_in_some_rows(held_out[["height", "width", *targets]], found, one, capsys)
    assert one["points"] == other["points"] and one["training"] == other["training"] and one["rows"] == other["rows"]
    assert one["names"] == other["names"]
    # by rows of data.csv, and of new.csv, counted from 0
    assert other["inputNames"] == [f"row {row}" for row in expected["row"]]
    rest = [row for row in range(20) if row not in set(expected["row"])]
    assert one["trainingNames"] == other["trainingNames"] == [f"row {row}" for row in rest]
    assert one["inputNames"] == ["row 0", "row 1", "row 2", "row 3"]
    assert cli.main(["evidence", "out/model.joblib", "--structures", "full", "--json", "e.json"]) == 0
    (row,) = json.loads(Path("e.json").read_text())["rows"]
    model = joblib.load("out/model.joblib")
    assert row["evidence"] == pytest.approx(model.log_marginal_likelihood_value_, rel=1e-9)
    for path in ("out/explanations.html", "page.html"):  # the same number as fit and evidence print
        words = f"log evidence {row['evidence']:,.1f} nats</p>".replace("-", "\N{MINUS SIGN}")
        assert words in Path(path).read_text()
    told = " ".join(capsys.readouterr().out.split())
    assert ("of standardized targets" in told) == (targets[0] in ("price", "rent"))


def _page_in_units_of_the_targets(page: dict[str, Any], table: pandas.DataFrame, targets: list[str]) -> None:
    """Of predictions, truths, training rows, parts and log densities; sizes are rounded once, to four digits."""
    ends = [""] if len(targets) == 1 else [f"_{target}" for target in targets]
    for row, point in enumerate(page["points"]):
        known = point["target"] if len(targets) > 1 else [point["target"]]
        for number, end in enumerate(ends):
            near = {"rel": 1e-3, "abs": 1e-3 * page["spreads"]["responses"][number]}
            assert point["prediction"]["mean"][number] == pytest.approx(table[f"mean{end}"][row], **near)
            assert point["prediction"]["deviation"][number] == float(f"{table[f'sd{end}'][row]:.4g}")
            assert known[number] == pytest.approx(table[f"target{end}"][row], rel=1e-3)
    model = joblib.load("out/model.joblib")
    assert np.allclose(np.reshape(page["training"]["target"], model.y_train_.shape), model.y_train_, rtol=1e-3)
    scale, mean = model.output_units
    without = (model.posterior_.leave_one_out().mean.numpy() * scale + mean)[:, : len(targets)]
    assert np.allclose(np.reshape(page["training"]["without"], without.shape), without, rtol=1e-2)
    inputs = pandas.read_csv("new.csv")[["height", "width"]]
    told = [point["prediction"].get("interval", []) for point in page["points"]]
    if model.likelihood_ == "gaussian":
        assert not any(told)
    else:
        quantiles = model.predict_quantiles(inputs, (0.05, 0.95)).reshape(len(told), len(targets), 2)
        near = {"rtol": 1e-3, "atol": 1e-3 * max(page["spreads"]["responses"])}
        np.testing.assert_allclose(np.moveaxis(told, 1, 2), quantiles, **near)
    explained = model.explain(inputs, k=6)
    for row, point in enumerate(page["points"]):
        near = {"rel": 2e-3, "abs": 1e-3 * page["spreads"]["outputs"][0]}
        for name, values in {"f": explained.f, "offset": explained.offset, "gap": explained.gap}.items():
            own = point["f"][0] if name == "f" else point[name]
            assert own == pytest.approx(float(values[row, 0]), **near)
        assert point["offset"] + point["total"] + point["gap"] == pytest.approx(point["f"][0], **near)
        for side in ("for", "against"):
            effects = {entry.training_index: entry.removal_effect for entry in explained.entries(row, side)}
            assert point[side] and all(own == float(f"{effects[j]:.4g}") for j, own, _ in point[side])
    density = model.posterior_.leave_one_out().log_density.numpy()
    shift = model.log_marginal_likelihood_value_ - model.posterior_.log_marginal_likelihood().item()
    assert np.allclose(page["training"]["logDensity"], density + shift / len(density), rtol=1e-3, atol=1e-3)


def _targets_in_some_rows(
    held_out: pandas.DataFrame, whole: pandas.DataFrame, full: dict[str, Any], capsys: pytest.CaptureFixture
) -> None:
    """Predictions need no targets: rows without one, or with one that is unknown, have no score, and are counted."""
    new, first = held_out.astype(object), held_out.columns[2]
    new.iloc[1, 2:], new.iloc[2, 2] = None, "?"
    level = "--level", "0.5"
    found = predict(new, *level)
    known = [name for name in whole if not name.startswith("target")]
    pandas.testing.assert_frame_equal(found[known], whole[known], check_exact=True)
    told = [name for name in whole if name in ("target", f"target_{first}")]
    assert found[told[0]].isna().tolist() == [False, True, True, False]
    several, kind = held_out.shape[1] > 3, "number" if "mean" in "".join(known) else "class of the training data"
    out = capsys.readouterr().out
    heading, _, table = out.partition("Scores of ")[2].partition("\n")
    assert heading == (f"{first} in 2 and rent in 3 of 4 inputs; 2 targets are missing" if several else
                       "2 of 4 inputs; 1 target is missing") + f" and 1 is no {kind}, such as '?'"
    predict(held_out.iloc[[0, 3]], *level)
    few = capsys.readouterr().out.partition("Scores of ")[2].splitlines()[1:3]
    assert few[0] == table.splitlines()[0] and few[1] in table.splitlines()
    predict(new, *level)
    shown = page()["points"]
    assert shown[0] == full["points"][0] and ("target" in shown[1]) is False
    assert "target" in shown[2] if several else "target" not in shown[2]
    capsys.readouterr()
    unknown = predict(new.assign(**dict.fromkeys(new.columns[2:], "?")), *level)
    words = f"\nNo scores of the 4 inputs; {8 if several else 4} are no {kind}, such as '?'\n"
    assert words in capsys.readouterr().out
    none = predict(new.assign(**dict.fromkeys(new.columns[2:])), *level)
    assert none.equals(unknown)
    assert none.equals(predict(new[["height", "width"]], *level)) and "Scores" not in capsys.readouterr().out
    predict(held_out, *level)


@pytest.mark.slow
def test_equal_rows_have_the_name_of_the_first(folder: Path) -> None:
    """Rows 0 to 9 come twice; a file of an earlier version, without names, has numbers."""
    data = frame("price").iloc[:10]
    pandas.concat([data, data]).to_csv("data.csv", index=False)
    assert cli.main(["fit", "data.csv", "--target", "price", *GAUSSIAN, "--hidden", "2", "--epochs", "2", "--out",
                     "out"]) == 0
    rest = sorted(set(range(20)) - set(pandas.read_csv("out/predictions.csv")["row"]))
    first = [row for row in rest if row < 10 or row - 10 not in rest]
    assert content("out/explanations.html")["trainingNames"] == [f"row {row}" for row in first] and len(first) < 16
    data.to_csv("new.csv", index=False)
    assert page()["trainingNames"] == [f"row {row}" for row in first]
    model = joblib.load("out/model.joblib")
    del next(told for told in vars(model).values() if isinstance(told, dict) and "dropped" in told)["rows"]
    joblib.dump(model, "out/model.joblib")
    assert page()["trainingNames"] is None


@pytest.mark.slow
def test_inputs_without_targets(folder: Path, capsys: pytest.CaptureFixture) -> None:
    expected = fit(["price"], *GAUSSIAN)
    capsys.readouterr()
    found = predict(frame().iloc[expected["row"]])
    pandas.testing.assert_frame_equal(found.drop(columns="row"), expected.drop(columns=["row", "target"]))
    assert "Scores" not in capsys.readouterr().out
    assert len(page("--most", "3")["points"]) == 3 and "target" not in page()["points"][0]
    assert page("--k", "1")["points"][0]["for"] is not None


@pytest.mark.slow
def test_targets_that_were_not_standardized(folder: Path) -> None:
    """The mean of the targets is no zero of their page."""
    model = ntkl.LaplaceRegressor(**QUICK, standardize=False, predictive=None, precision=1.0)
    Path("out").mkdir()
    joblib.dump(model.fit(frame(), frame("price")["price"] / 1e3), "out/model.joblib")
    frame().to_csv("new.csv", index=False)
    shown, mean = page(), model.predict(frame())
    assert "origins" not in shown and len(shown["points"]) == 20
    for point, own in zip(shown["points"], mean, strict=True):
        assert point["network"]["mean"][0] == pytest.approx(own, rel=1e-3)


@pytest.mark.slow
def test_sources_are_no_input_and_are_explained(folder: Path, capsys: pytest.CaptureFixture) -> None:
    fit(["price"], "--group", "month", *GAUSSIAN)
    expected = predict(frame("price", "month").iloc[:4])
    assert predict(frame("price", "month").iloc[:4], "--drop", "month").equals(expected)
    predict(frame().iloc[:4])
    capsys.readouterr()
    assert "sources" in page() and "June" in capsys.readouterr().out


@pytest.mark.slow
def test_sources_of_equal_rows(folder: Path, capsys: pytest.CaptureFixture) -> None:
    """Two annotators who label the same items: each source has all of its rows, in the page of `explain` too."""
    items = frame("kind")
    items["kind"] = items["kind"].replace("bee", "ant")
    both = pandas.concat([items.assign(who="Ann"), items.assign(who="Bob")])
    both.to_csv("data.csv", index=False)
    quick = ["--epochs", "2", "--hidden", "2", "--out", "out"]
    assert cli.main(["fit", "data.csv", "--target", "kind", "--group", "who", *quick]) == 0
    sources = content("out/explanations.html")["sources"]
    model = joblib.load("out/model.joblib")
    assert sum(sources["points"]) == len(model.training_point_) == 32 > len(model.training_index_)
    items.iloc[:4].to_csv("new.csv", index=False)
    again = page()["sources"]
    assert again["points"] == sources["points"] and again["own"] == sources["own"]
    flat = items[["height", "width"]].round() * 0.0 + np.arange(20)[:, None] % 2  # two different rows in each source
    flat.assign(kind=np.array(["a", "b"])[np.arange(20) % 2], who=["Ann"] * 10 + ["Bob"] * 10).to_csv("data.csv")
    flat = pandas.read_csv("data.csv", index_col=0)
    flat.to_csv("data.csv", index=False)
    assert cli.main(["fit", "data.csv", "--target", "kind", "--group", "who", *quick]) == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:training to the optimum", "ignore:the network is not at its optimum")
def test_the_output_that_is_explained(folder: Path, capsys: pytest.CaptureFixture) -> None:
    """The first target, or the one that is named; of classes the predicted one."""
    fit(["price", "rent"], "--group", "month", *GAUSSIAN)
    predict(frame("price", "rent").iloc[:4])
    first, second = page(), page("--output", "rent")
    assert [p["sources"]["effect"] for p in first["points"]] != [p["sources"]["effect"] for p in second["points"]]
    for shown, output in ((first, 0), (second, 1), (page("--output", "1"), 1), (page("--output", "price"), 0)):
        assert {point["output"] for point in shown["points"]} == {output}
    assert {point["output"] for point in content("out/explanations.html")["points"]} == {0}
    capsys.readouterr()
    for wrong in ("cost", "2"):
        assert cli.main(["explain", "out/model.joblib", "--inputs", "new.csv", "--output", wrong]) == 1
        assert f"an output among 'price', 'rent', or its position; got --output {wrong}." in capsys.readouterr().err
    fit(["kind"])
    predict(frame("kind").iloc[:4])
    assert {point["output"] for point in page("--output", "cat")["points"]} == {2}


@pytest.mark.slow
def test_labels_of_another_type_are_known_by_their_text(folder: Path) -> None:
    """A file without the class "K" has whole numbers, and the names of booleans are text in a table."""
    table = frame()
    table["good"], table["grade"] = np.arange(20) % 2 == 0, np.array(["1", "2", "K"])[np.arange(20) % 3]
    for name, kinds in {"zero": ("01", "02"), "point": ("1.0", "2.5"), "power": ("1e3", "2e3"), "flag": ("TRUE", "NO"),
                        "space": (" 1", "2")}.items():
        table[name] = np.array([*kinds, "K"])[np.arange(20) % 3]
    plain = {**QUICK, "predictive": None, "precision": 1.0}
    Path("out").mkdir()
    for name in ("grade", "good", "zero", "point", "power", "flag", "space"):
        model = ntkl.LaplaceClassifier(**plain).fit(table[["height", "width"]], table[name])
        joblib.dump(model, "out/model.joblib")
        new = table[table["grade"] != "K"].iloc[:5]
        predict(new[["height", "width"]].assign(target=new[name]))
        assert pandas.read_csv("p.csv", dtype=str)["target"].tolist() == new[name].astype(str).tolist()
    number = ntkl.LaplaceClassifier(**plain).fit(table[["height", "width"]].to_numpy(), np.arange(20) % 2)
    joblib.dump(number, "out/model.joblib")
    np.savez("new.npz", X=table[["height", "width"]], y=np.arange(20.0) % 2)
    assert cli.main(["predict", "out/model.joblib", "--inputs", "new.npz", "--out", "p.csv"]) == 0


@pytest.mark.slow
def test_a_model_without_leave_one_out_has_no_sets(folder: Path, capsys: pytest.CaptureFixture) -> None:
    model = ntkl.LaplaceClassifier(**QUICK, predictive=None).fit(frame().to_numpy(), frame("kind")["kind"])
    assert model.posterior_.structure == "kfac"
    Path("out").mkdir()
    joblib.dump(model, "out/model.joblib")
    np.savez("new.npz", X=frame().to_numpy()[:6])
    assert cli.main(["predict", "out/model.joblib", "--inputs", "new.npz", "--out", "p.csv"]) == 0
    assert "set" not in pandas.read_csv("p.csv") and "The first of them\n" in capsys.readouterr().out


@pytest.mark.slow
def test_one_column_without_an_axis(folder: Path) -> None:
    x = np.linspace(-1, 1, 20)
    np.savez("d.npz", X=x, y=np.arange(20) % 2)
    assert cli.main(["fit", "d.npz", "--epochs", "2", "--hidden", "2", "--out", "out"]) == 0
    assert cli.main(["predict", "out/model.joblib", "--inputs", "d.npz", "--out", "p.csv"]) == 0


@pytest.mark.slow
def test_arrays_and_images(folder: Path, capsys: pytest.CaptureFixture) -> None:
    draws = np.random.default_rng(0)
    np.savez("d.npz", X=frame().to_numpy(), y=frame("price")["price"])
    quick = ["--epochs", "2", "--hidden", "2", "--out", "out"]
    assert cli.main(["fit", "d.npz", *GAUSSIAN, *quick]) == 0
    expected = pandas.read_csv("out/predictions.csv")
    rows = expected["row"]
    np.savez("n.npz", X=frame().to_numpy()[rows], y=frame("price")["price"].to_numpy()[rows])
    assert cli.main(["predict", "out/model.joblib", "--inputs", "n.npz", "--out", "p.csv"]) == 0
    np.testing.assert_array_equal(pandas.read_csv("p.csv").iloc[:, 1:], expected.iloc[:, 1:])
    for number in range(20):
        Path("images", "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        pixels = draws.integers(0, 255, (4, 4), dtype=np.uint8)
        Image.fromarray(pixels).save(Path("images", "ab"[number % 2], f"{number}.png"))
    assert cli.main(["fit", "images", *quick]) == 0
    expected = pandas.read_csv("out/predictions.csv")
    assert cli.main(["predict", "out/model.joblib", "--inputs", "images", "--out", "p.csv"]) == 0
    found = pandas.read_csv("p.csv").set_index("file").loc[expected["file"]].reset_index()
    pandas.testing.assert_frame_equal(found, expected)
    assert cli.main(["explain", "out/model.joblib", "--inputs", "images/a", "--out", "page.html"]) == 0
    shown = content("page.html")
    assert shown["pictures"] is not None and shown["inputNames"] == [f"{number}.png" for number in
                                                                     sorted(range(0, 20, 2), key=str)]
    assert content("out/explanations.html")["inputNames"] == list(expected["file"])
    assert sorted(shown["trainingNames"] + list(expected["file"])) == sorted(
        f"{'ab'[number % 2]}/{number}.png" for number in range(20))


@pytest.mark.slow
def test_a_network_of_ones_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """In another process its classes are not there; `--network` gives them."""
    Path("net.py").write_text(NETWORK)
    expected = fit(["price"], "--network", "net.py", *GAUSSIAN)
    monkeypatch.delitem(sys.modules, "_ntk_laplace_network_net")
    frame().iloc[expected["row"]].to_csv("new.csv", index=False)
    line = ["predict", "out/model.joblib", "--inputs", "new.csv", "--out", "p.csv"]
    capsys.readouterr()
    assert cli.main(line) == 1
    assert capsys.readouterr().err == (
        "ntk-laplace: expected a model whose classes Python can find, in out/model.joblib; got ModuleNotFoundError: "
        "No module named '_ntk_laplace_network_net'. Pass the file of its network, --network FILE.py.\n"
    )
    assert cli.main([*line, "--network", "net.py"]) == 0
    found = pandas.read_csv("p.csv")
    pandas.testing.assert_frame_equal(found.iloc[:, 1:], expected.drop(columns="target").iloc[:, 1:])


@pytest.fixture
def models(folder: Path) -> Path:
    """Estimators that Python wrote: of a table, of arrays, of names, of whole numbers; and other pickles."""
    data = frame("price", "kind", "count")
    x = data[["height", "width"]]
    regressor = ntkl.LaplaceRegressor(**QUICK, predictive=None, precision=1.0)
    classifier = ntkl.LaplaceClassifier(**QUICK, predictive=None)
    joblib.dump(regressor, "unfitted.joblib")
    joblib.dump(regressor.fit(x, data["price"]), "table.joblib")
    joblib.dump(regressor.fit(x.to_numpy(), data["price"]), "array.joblib")
    joblib.dump(classifier.fit(x.to_numpy(), data["count"]), "count.joblib")
    joblib.dump({"weights": 3}, "dict.joblib")
    Path("text.joblib").write_text("no pickle")
    Path("net.py").write_text(NETWORK)
    Path("empty").mkdir()
    data.drop(columns=["price", "kind", "count", "width"]).to_csv("less.csv", index=False)
    data.drop(columns=["price", "kind"]).iloc[:4].to_csv("more.csv", index=False)
    data[["height"]].assign(width="wide").to_csv("text.csv", index=False)
    x.iloc[:4].to_csv("new.csv", index=False)
    np.savez("d.npz", X=x.to_numpy(), y=np.arange(20))
    np.savez("wide.npz", X=np.ones((3, 3)))
    np.savez("gaps.npz", X=np.full((3, 2), np.nan))
    np.savez("pairs.npz", X=np.ones((3, 2)), y=np.ones((3, 2)))
    return folder


AGAIN = "Pass the model.joblib that ntk-laplace fit wrote, or FILE.py with --checkpoint and --data."


@pytest.mark.slow
def test_what_does_not_fit_a_model_is_one_line(models: Path, capsys: pytest.CaptureFixture) -> None:
    """One test of all, since training the models takes longer than the rest."""
    for network, inputs, words in [
        ("nowhere.joblib", "new.csv", "a model.joblib that ntk-laplace fit wrote; got nowhere.joblib, where there is "
         "no file. Check the path."),
        ("text.joblib", "new.csv", "a model.joblib that ntk-laplace fit wrote; got text.joblib, which joblib cannot "
         "load ("),
        ("dict.joblib", "new.csv", f"that ntk-laplace fit wrote; got a dict in dict.joblib. {AGAIN}"),
        ("unfitted.joblib", "new.csv", "got a LaplaceRegressor without a fit in unfitted.joblib."),
        ("table.joblib", "nowhere.csv", "a table of inputs to predict; got nowhere.csv, where there is no file."),
        ("table.joblib", "less.csv", "expected the 2 input columns of the training data in less.csv; got no 'width'. "
         "Give both tables the same columns; their order does not matter."),
        ("table.joblib", "more.csv", "expected the 2 input columns of the training data in more.csv; got 'count' too. "
         "Leave out what is no input: --drop count."),
        ("table.joblib", "text.csv", "expected numbers in column 'width' of text.csv; got 'wide' in row 0, "
         "counted from 0 below the names. Replace it by a number, or remove the row."),
        ("table.joblib", "d.npz", "expected a table with the 2 input columns 'height', 'width', as the training data "
         "were; got the arrays d.npz. Save the inputs as those of the training."),
        ("table.joblib", "empty", "as the training data were; got the folder empty."),
        ("array.joblib", "new.csv", "an .npz or .pt file with X of shape (N, 2), as the training data were; got the "
         "table new.csv."),
        ("array.joblib", "wide.npz", "X of shape (N, 2), as in the training data; got (N, 3) in wide.npz."),
        ("array.joblib", "gaps.npz", "finite numbers in X of gaps.npz; got none in row 0, counted from 0."),
        ("array.joblib", "pairs.npz", "y of 1 targets; got shape (3, 2) in pairs.npz."),
    ]:
        assert cli.main(["predict", network, "--inputs", inputs, "--out", "p.csv"]) == 1
        printed = capsys.readouterr()
        assert printed.err.startswith("ntk-laplace: expected ") and words in printed.err, printed.err
        assert printed.err.count("\n") == 1 and printed.out == "" and not Path("p.csv").exists()
    for drop, words in (("x", "--drop COLUMN, one of 'height', 'width', 'count' in more.csv; got --drop x."),
                        ("width", "got no 'width' and 'count' too")):
        assert cli.main(["predict", "table.joblib", "--inputs", "more.csv", "--drop", drop, "--out", "p.csv"]) == 1
        assert words in capsys.readouterr().err
    assert cli.main(["predict", "array.joblib", "--inputs", "d.npz", "--drop", "width", "--out", "p.csv"]) == 1
    assert "a table, for --drop COLUMN; got d.npz. Leave --drop out." in capsys.readouterr().err
    assert cli.main(["predict", "array.joblib", "--inputs", "d.npz", "--skip-unknown", "--out", "p.csv"]) == 1
    assert "expected a table, for --skip-unknown; got d.npz. Leave it out." in capsys.readouterr().err
    found = []
    for inputs in (["more.csv", "--drop", "count"], ["new.csv"]):
        assert cli.main(["predict", "table.joblib", "--inputs", *inputs, "--out", "p.csv"]) == 0
        found.append(Path("p.csv").read_text())
        assert cli.main(["explain", "table.joblib", "--inputs", *inputs, "--out", "page.html"]) == 0
    assert found[0] == found[1]
    Path("table.joblib").rename("empty/model.joblib")
    with pytest.raises(SystemExit):
        cli.main(["predict", "empty", "--inputs", "new.csv"])
    assert f"; got empty. Pass {Path('empty', 'model.joblib')}.\n" in capsys.readouterr().err
    Path("empty/model.joblib").rename("table.joblib")
    assert cli.main(["predict", "table.joblib", "--inputs", "new.csv", "--out", "new.csv"]) == 1
    assert "got new.csv, which is an input." in capsys.readouterr().err


FILE = ["predict", "model.joblib", "--inputs", "new.csv"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*FILE, "--checkpoint", "w.pt"], "expected a Python file for --checkpoint; got model.joblib, which has its "
         "own. Leave --checkpoint out."),
        ([*FILE, "--data", "d.csv", "--target", "price"], "expected a Python file for --data"),
        ([*FILE, "--target", "price"], "expected a Python file for --target"),
        ([*FILE, "--group", "month"], "expected a Python file for --group"),
        ([*FILE, "--held-out", "d.csv"], "expected a Python file for --held-out"),
        ([*FILE, "--structure", "kfac"], "expected a Python file for --structure"),
        ([*FILE, "--memory", "1"], "expected a Python file for --memory"),
        (["evidence", "model.joblib", "--precision", "2"], "expected a Python file for --precision"),
        (["plan", "model.joblib"], "expected FILE.py[:FACTORY] for plan; got model.joblib. Pass the network's Python"),
        (["predict", "model.py", "--inputs", "new.csv"], "the following arguments are required: --checkpoint, --data, "
         "--likelihood; a model.joblib that fit wrote has these"),
        (["predict", "new.csv"], "expected a model.joblib that fit wrote, or FILE.py[:FACTORY] with --checkpoint, "
         "--data, --likelihood; got new.csv. Name the model first, and new.csv with --inputs."),
        (["predict", "model.pkl"], "with --checkpoint, --data, --likelihood; got model.pkl.\n"),
        (["evidence", "new.csv"], "with --checkpoint, --data, --likelihood; got new.csv.\n"),
        (["plan", "new.csv"], "expected FILE.py[:FACTORY] with --checkpoint, --data, --likelihood; got new.csv.\n"),
        (["explain", "model.joblib"], "the following arguments are required: --inputs"),
        (["predict", "model.py", "--inputs", "new.csv", "--checkpoint", "w.pt", "--data", "d.npz", "--likelihood",
          "gaussian", "--network", "model.py"], "expected --network with a model.joblib alone"),
        (["predict", "model.py", "--inputs", "new.csv", "--checkpoint", "w.pt", "--data", "d.npz", "--likelihood",
          "gaussian", "--skip-unknown"], "expected --skip-unknown with a model.joblib alone; got it with a Python"),
    ],
)
def test_options_that_do_not_fit_leave_with_two(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2 and words in capsys.readouterr().err


def test_help_says_that_a_pickle_can_run_code(capsys: pytest.CaptureFixture) -> None:
    for command in ("predict", "explain", "evidence"):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        words = " ".join(capsys.readouterr().out.split())
        assert "a pickle, which can run code: load only your own" in words
