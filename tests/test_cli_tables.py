"""Tables of the command: CSV and Parquet give the numbers of the npz; what is wrong with a table is one line."""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shlex
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import joblib
import numpy as np
import pandas
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

import ntk_laplace as ntkl
from ntk_laplace import plotting
from ntk_laplace.model.calibration import Calibration
from ntk_laplace.runtime import tuning
from ntk_laplace.tools import cli
from ntk_laplace.tools.cli.described import describe, fitted_words, tell_first
from ntk_laplace.tools.cli.examples import read_examples, table_labels
from ntk_laplace.tools.cli.inputs import Files
from ntk_laplace.tools.cli.scores import score_table
from ntk_laplace.tools.cli.tables import read_table
from ntk_laplace.tools.cli.values import scored_classes, target_classes

pytestmark = pytest.mark.usefixtures("one_perceptron")
NETWORK = """
from torch import nn


def classes():
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3))


def single():
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


def unsaved():
    class Inner(nn.Linear):
        pass

    return Inner(2, 1)


make_network = single
"""
KINDS = np.array(["cat", "ant", "bee"])  # not sorted: their numbers are 2, 0, 1


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: networks, and 20 rows of two inputs with a number, a count and a name as targets."""
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(NETWORK)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name, outputs in {"classes": 3, "single": 1}.items():
            torch.save(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, outputs)).state_dict(), f"{name}.pt")
    random = np.random.default_rng(0)
    frame = table(random.normal(size=(20, 2)) / 3, random.normal(size=20) * 1e-5)
    frame.to_csv("all.csv", index=False)
    for target in ("price", "count", "kind"):
        frame[["height", target, "width"]].to_csv(f"{target}.csv", index=False)
    x = frame[["height", "width"]].to_numpy()
    np.savez("price.npz", X=x, y=frame["price"])
    np.savez("count.npz", X=x, y=frame["count"])
    np.savez("kind.npz", X=x, y=np.array([2, 0, 1])[np.arange(20) % 3])
    return tmp_path


def read(path: str) -> pandas.DataFrame:
    """A table with all digits, which pandas reads by itself from version 3 on."""
    older = int(pandas.__version__.partition(".")[0]) < 3
    return pandas.read_csv(path, **({"float_precision": "round_trip"} if older else {}))


def table(x: np.ndarray, price: np.ndarray) -> pandas.DataFrame:
    rows = np.arange(len(x))
    return pandas.DataFrame(
        {"height": x[:, 0], "price": price, "count": rows % 4, "kind": KINDS[rows % 3], "width": x[:, 1]}
    )


MODELS = {
    "price": ("single", "gaussian"), "count": ("single", "poisson"), "kind": ("classes", "categorical"),
}


def line(command: str, data: str, target: str | None, likelihood: str | None = None, *more: str) -> list[str]:
    network, own = MODELS[target or "kind"]
    named = [] if target is None or data.endswith(".npz") else ["--target", target]
    return [command, f"model.py:{network}", "--checkpoint", f"{network}.pt", "--data", data, "--likelihood",
            likelihood or own, *named, *more]


def evidence(data: str, target: str) -> float:
    assert cli.main([*line("evidence", data, target), "--structures", "gp", "--json", "o.json"]) == 0
    return json.loads(Path("o.json").read_text())["rows"][0]["evidence"]


@pytest.mark.slow
@pytest.mark.parametrize("target", list(MODELS))
def test_a_csv_gives_the_evidence_of_the_npz_to_all_digits(target: str, folder: Path) -> None:
    read(f"{target}.csv").to_csv("packed.csv.gz", index=False)
    expected = evidence(f"{target}.npz", target)
    assert evidence(f"{target}.csv", target) == expected and evidence("packed.csv.gz", target) == expected


@pytest.mark.parametrize("target", list(MODELS))
def test_parquet_gives_the_evidence_of_the_npz_to_all_digits(target: str, folder: Path) -> None:
    pytest.importorskip("pyarrow")
    frame = read(f"{target}.csv")
    frame.set_axis(np.arange(len(frame)) * 2).to_parquet("t.parquet")  # an index that is no column
    assert evidence("t.parquet", target) == evidence(f"{target}.npz", target)


def test_decimal_columns_are_numbers(folder: Path) -> None:
    pytest.importorskip("pyarrow")
    frame = pandas.DataFrame({"price": [Decimal("1.25"), None, Decimal("-3")], "name": ["a", "b", "c"]})
    frame.to_parquet("t.parquet")
    found = read_table(Path("t.parquet"), "the data")
    np.testing.assert_array_equal(found["price"], [1.25, np.nan, -3.0])
    assert found["name"].tolist() == ["a", "b", "c"]


def test_a_named_index_is_a_column(folder: Path) -> None:
    pytest.importorskip("pyarrow")
    frame = read("all.csv")
    frame.set_index("height").to_parquet("named.parquet")
    frame.set_index(pandas.Index(np.arange(20)[::-1])).to_parquet("unnamed.parquet")
    for name in ("named", "unnamed"):
        found = read_table(Path(f"{name}.parquet"), "the data")
        assert set(found) == set(frame)
        pandas.testing.assert_frame_equal(found[list(frame)], frame, check_dtype=False)


def test_parquet_without_an_engine_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def no_engine(path: Path) -> pandas.DataFrame:
        raise ImportError("Unable to find a usable engine\nin several lines")

    monkeypatch.setattr(pandas, "read_parquet", no_engine)
    Path("t.parquet").write_bytes(b"PAR1")
    assert cli.main(line("evidence", "t.parquet", "kind")) == 1
    assert capsys.readouterr().err == (
        "ntk-laplace: expected a table that pandas can read here; got t.parquet, for which pandas finds no engine. "
        "Install one, pip install pyarrow, or save the table as .csv.\n"
    )


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small picture for all: drawing takes longer than all the rest."""
    dot = plotting.png(Figure(figsize=(0.1, 0.1)), dpi=10)
    monkeypatch.setattr(plotting, "png", lambda figure: dot)


def predicted(data: str, inputs: str, target: str, *more: str) -> pandas.DataFrame:
    assert cli.main([*line("predict", data, target), "--inputs", inputs, *more]) == 0
    return read("predictions.csv")


@pytest.mark.slow
@pytest.mark.parametrize("target", ["price", "kind"])
def test_predictions_of_tables_are_those_of_the_npz(
    target: str, folder: Path, quick: None, capsys: pytest.CaptureFixture
) -> None:
    """Columns of the inputs in another order, with the targets and without; the names of the classes are used."""
    frame = read(f"{target}.csv")
    new = frame.iloc[5:10]
    new[["width", "height", target]].to_csv("new.csv", index=False)
    new[["width", "height"]].to_csv("unknown.csv", index=False)
    expected = np.load(f"{target}.npz")
    np.savez("new.npz", X=expected["X"][5:10], y=expected["y"][5:10])
    classes = ["--classes", "ant,bee,cat"] if target == "kind" else []
    held_out = ["--held-out", "new.csv", "--level", "0.5"]
    reference = predicted(f"{target}.npz", "new.npz", target, *classes)
    split = predicted(f"{target}.npz", "new.npz", target, *classes, "--held-out", "new.npz", "--level", "0.5")
    pandas.testing.assert_frame_equal(predicted(f"{target}.csv", "new.csv", target), reference, check_exact=True)
    pandas.testing.assert_frame_equal(predicted(f"{target}.csv", "new.csv", target, *held_out), split, check_exact=True)
    unknown = predicted(f"{target}.csv", "unknown.csv", target)
    pandas.testing.assert_frame_equal(unknown, reference.drop(columns=["target", "covered"]), check_exact=True)
    if target == "kind":
        assert list(reference["target"]) == list(new["kind"])


@pytest.mark.slow
@pytest.mark.parametrize("target", ["price", "kind"])
def test_targets_in_some_rows(target: str, folder: Path, quick: None, capsys: pytest.CaptureFixture) -> None:
    """Predictions need none: a row without a target, or with one that is unknown, has no score."""
    new = read(f"{target}.csv").iloc[5:10].astype(object)
    new.to_csv("new.csv", index=False)
    whole = predicted(f"{target}.csv", "new.csv", target)
    rest = ["target", "covered"]
    new.iloc[1, 1], new.iloc[2, 1] = None, "?"
    new.to_csv("new.csv", index=False)
    capsys.readouterr()
    found = predicted(f"{target}.csv", "new.csv", target)
    pandas.testing.assert_frame_equal(found.drop(columns=rest), whole.drop(columns=rest), check_exact=True)
    assert found["target"].isna().tolist() == found["covered"].isna().tolist() == [False, True, True, False, False]
    kind = "number" if target == "price" else "class of the training data"
    words = f"Scores of 3 of 5 inputs; 1 target is missing and 1 is no {kind}, such as '?'\n"
    assert words in capsys.readouterr().out
    assert cli.main([*line("explain", f"{target}.csv", target), "--inputs", "new.csv", "--out", "page.html"]) == 0
    new.assign(**{target: "?"}).to_csv("new.csv", index=False)
    capsys.readouterr()
    predicted(f"{target}.csv", "new.csv", target)
    assert f"\nNo scores of the 5 inputs; 5 are no {kind}, such as '?'\n" in capsys.readouterr().out
    new.assign(**{target: None}).to_csv("new.csv", index=False)
    assert not {*rest} & set(predicted(f"{target}.csv", "new.csv", target))


def test_the_page_of_explanations_has_the_names_of_the_table(folder: Path) -> None:
    def content(*more: str) -> dict:
        assert cli.main([*line("explain", *more), "--inputs", more[0], "--out", "page.html"]) == 0
        return json.loads(Path("page.html").read_text().partition('id="data">')[2].partition("</script>")[0])

    page = content("kind.csv", "kind")
    assert page["names"] == ["ant", "bee", "cat"] and page["rows"]["features"] == ["height", "width"]
    assert [point["target"] for point in page["points"][:3]] == [2, 0, 1]
    assert content("price.csv", "price")["names"] == ["price"]


@pytest.mark.parametrize(("target", "known"), [("price", True), ("price", False), ("kind", True), ("kind", False)])
def test_sources_have_the_change_of_known_targets_alone(
    target: str, known: bool, folder: Path, capsys: pytest.CaptureFixture
) -> None:
    """A mean over the inputs would count 0 for each input without a target."""
    frame = read(f"{target}.csv")
    frame.assign(month=["may", "june"] * 10).to_csv("data.csv", index=False)
    new = frame.head(4).astype(object)
    new.loc[1, target] = new.loc[1, target] if known else None
    new.to_csv("new.csv", index=False)
    command = line("explain", "data.csv", target, None, "--inputs", "new.csv", "--group", "month", "--out", "page.html")
    assert cli.main(command) == 0
    assert ("change of log p(y)" in capsys.readouterr().out) == known


def test_names_of_two_classes_for_one_output(folder: Path, capsys: pytest.CaptureFixture) -> None:
    frame = read("price.csv")
    above = frame["price"] > 0
    values = []
    for column in (above.map({True: "yes", False: "no"}), above, above.astype(int)):
        frame.assign(price=column).to_csv("two.csv", index=False)
        assert cli.main([*line("evidence", "two.csv", "price", "bernoulli"), "--structures", "gp"]) == 0
        values.append(re.findall(r"^gp +(-?[\d.]+)", capsys.readouterr().out, re.MULTILINE))
    assert values[0] == values[1] == values[2] and values[0]


def test_missing_targets_are_allowed_where_the_likelihood_has_them(folder: Path) -> None:
    frame = read("price.csv")
    frame.loc[3, "price"] = np.nan
    frame.to_csv("gaps.csv", index=False)
    np.savez("gaps.npz", X=frame[["height", "width"]], y=frame["price"])
    missing = ["--likelihood-option", "missing=nan", "--structures", "gp", "--json", "o.json"]
    found = []
    for data in ("gaps.csv", "gaps.npz"):
        assert cli.main([*line("evidence", data, "price"), *missing]) == 0
        found.append(json.loads(Path("o.json").read_text())["rows"][0]["evidence"])
    assert found[0] == found[1]


ROW = "in row {}, counted from 0 below the names"
BAD = {
    "empty": ("", "in the first line; got bad.csv, which is empty. Check the file."),
    "only names": ("height,width,kind\n", "at least one row below the names of its columns; got bad.csv without rows."),
    "no column": ("height,width,sort\n1,2,ant\n", "expected --target COLUMN, one of 'height', 'width', 'sort' in "
                  "bad.csv; got --target kind. Name the column of the targets; all others are inputs."),
    "no inputs": ("kind\nant\n", "columns of inputs beside the target; got 'kind' alone in bad.csv"),
    "missing input": ("height,width,kind\n1,2,ant\n1,,bee\n", "expected a value in each row of column 'width' of "
                      f"bad.csv; got none {ROW.format(1)}. Fill it in, or remove the row."),
    "missing class": ("height,width,kind\n1,2,\n1,3,bee\n", f"column 'kind' of bad.csv; got none {ROW.format(0)}"),
    "text": ("height,width,kind\n1,2,ant\n?,3,bee\n", "expected numbers in column 'height' of bad.csv; got '?' "
             f"{ROW.format(1)}. Replace it by a number, make columns of 0 and 1 of categories, or leave the column "
             "out, --drop height."),
    "longer row": ("height,width,kind\n1,2,ant\n1,2,3,bee\n", "got bad.csv (Error tokenizing data."),
    "longer rows": ("height,width,kind\n1,2,3,ant\n", "got bad.csv (Length of header or names does not match"),
    "index": (",height,width,kind\n0,1,2,ant\n", "a name for each column; got none for column 1 of bad.csv. Name it. "
              "If it is pandas's own row numbers, take it out in Python: pandas.read_csv('bad.csv', index_col=0)."
              "to_csv('bad_named.csv', index=False)."),
    "trailing comma": ("height,width,kind,\n1,2,ant,\n", "none for column 4 of bad.csv. Name it, or take it out."),
    "twice": ("height,kind,height\n1,ant,2\n", "columns with different names; got 'height' twice in bad.csv."),
    "infinite": ("height,width,kind\n1,2,ant\ninf,2,bee\n",
                 f"expected finite numbers in column 'height' of bad.csv; got inf {ROW.format(1)}"),
    "semicolons": ("height;width;kind\n1.5;2;ant\n", "in the first line; got bad.csv with ';' between them. Convert it "
                   "in Python: pandas.read_csv('bad.csv', sep=';').to_csv('bad_commas.csv', index=False)."),
    "decimal commas": ("height;width;kind\n1,5;2;ant\n", "pandas.read_csv('bad.csv', sep=';', decimal=',').to_csv("),
    "tabs": ("height\twidth\tkind\n1\t2\tant\n", r"got bad.csv with '\t' between them. Convert it in Python: "),
    "bytes": (b"height,width,kind\n1,2,\xe9\n", "in UTF-8; got bad.csv ('utf-8' codec can't decode byte 0xe9"),
    "NA": ("height,width,kind\n1,2,ant\n1,3,NA\n", "expected a value in each row of column 'kind' of bad.csv; got "
           f"'NA', which is read as missing, {ROW.format(1)}. Fill it in, or remove the row. If it is a name, write "
           "another one."),
    "null": ("height,width,kind\nnull,2,ant\n", f"of bad.csv; got 'null', which is read as missing, {ROW.format(0)}"),
    "wide": (f"height,width,kind\n2,2,ant\n{10**39},2,bee\n", "expected numbers of at most 64 bits in column 'height' "
             f"of bad.csv; got '{10**39}' {ROW.format(1)}. Write them with a decimal point, or leave the column out, "
             "--drop height."),
    "wide and other": (f"height,width,kind\n{10**39},2,ant\n?,2,bee\n",
                       f"in column 'height' of bad.csv; got '?' {ROW.format(1)}"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_what_is_wrong_with_a_table_is_one_line(name: str, folder: Path, capsys: pytest.CaptureFixture) -> None:
    content, words = BAD[name]
    Path("bad.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(line("evidence", "bad.csv", "kind"), words, capsys)


@pytest.mark.parametrize("name", ["NA", "None", "nan", "null"])
def test_columns_may_have_the_name_of_a_missing_value(name: str, folder: Path) -> None:
    Path("t.csv").write_text(f"{name},EU,y\n1,2,3\n")
    assert list(read_table(Path("t.csv"), "data").columns) == [name, "EU", "y"]


@pytest.mark.parametrize(("text", "values"), [
    ("x\n1\n\n3\n", None), ("x\n\n2\n", None), ("x\n1\n \n3\n", None), ("\n\nx\n1\n3\n\n \n", [1, 3]),
    ('x\n1\n""\n3\n', [1, np.nan, 3]), ("x\nNA\n2\n", [np.nan, 2]), ("x\n1\n", [1]),
])
def test_an_empty_line_of_one_column_is_a_missing_value(text: str, values: list[float] | None, folder: Path) -> None:
    """Without it the rows after it would have the numbers of others."""
    Path("t.csv").write_text(text)
    if values is None:
        with pytest.raises(ntkl.DataError, match="an empty line between others"):
            read_table(Path("t.csv"), "data")
    else:
        np.testing.assert_array_equal(read_table(Path("t.csv"), "data")["x"], values)
        Path("t.csv").write_text("a,b\n\n1,2\n\n3,4\n")  # no row
        assert len(read_table(Path("t.csv"), "data")) == 2


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16"])
@pytest.mark.parametrize(("name", "marks"), [
    ("t.csv", {}), ("t.csv.gz", {}), ("t.csv", {"sep": ";", "decimal": ","}), ("t.csv", {"sep": "\t"}),
])
def test_the_error_for_another_encoding_shows_the_line_that_converts_it(
    encoding: str, name: str, marks: dict[str, str], folder: Path, capsys: pytest.CaptureFixture
) -> None:
    """Also where columns have other separators. The remedy is run as it is printed."""
    table = read("kind.csv").rename(columns={"height": "h\u00f6he"})
    table.to_csv(name, index=False, encoding=encoding, **marks)
    assert cli.main(line("evidence", name, "kind")) == 1
    message = capsys.readouterr().err
    assert message.startswith(f"ntk-laplace: expected a table in UTF-8; got {name} (") and message.count("\n") == 1
    exec(message[message.index("pandas.") : message.index("index=False)") + 12], {"pandas": pandas})
    pandas.testing.assert_frame_equal(read_table(Path("t_utf8.csv"), "the data"), table)


VALUES = {
    "lists": ([[1, 2]] * 20, None, "expected names or numbers in column 'price' of t.csv; got a value of type list in "
              "row 0"),
    "bytes": ([b"a", b"b"] * 10, None, "numbers in column 'price' of t.csv; got a value of type bytes in row 0"),
    "date objects": ([datetime.date(2024, 1, 1)] * 20, None, "got a value of type date in row 0"),
    "dates": (pandas.date_range("2024-01-01", periods=20), None, "got a date or a time in row 0, counted from 0 below "
              "the names. Make it text or a number, or name another target."),
    "durations": (pandas.to_timedelta(np.arange(20), unit="D"), "classes", "got a date or a time in row 0"),
    "dates as text": ([f"2024-01-{day:02}" for day in range(1, 21)], None, "expected names or numbers in column "
                      "'price' of t.csv; got '2024-01-01' in row 0, counted from 0 below the names, a date or an "
                      "amount as text. Make days of the dates, in pandas by frame['price'] = (pandas.to_datetime("
                      "frame['price']) - pandas.Timestamp('2000-01-01')).dt.days. Or take all as names of classes, "
                      "--task classes, or name another target."),
    "amounts as text": (["1,200 €", "950"] * 10, None, "got '1,200 €' in row 0, counted from 0 below the names, a date "
                        "or an amount as text. Make numbers of the amounts, in pandas by frame['price'] = "
                        "frame['price'].str.replace(r'[^-+.0-9]', '', regex=True).astype(float). Or take all as"),
    "one each": ([f"house {row}" for row in range(20)], None, "classes of two rows each in the mean in 'price' of "
                 "t.csv; got 20 in 20 rows, such as 'house 0'. Numbers are no classes with --task regression. Or name"),
    "numbers": (np.arange(20), "classes", "in 'price' of t.csv; got 20 in 20 rows, such as 0."),
    "blanks": (["x", "y", "y "] * 6 + ["x", "x"], None, "names that differ in more than blanks in column 'price' of "
               "t.csv; got 'y ' in row 2, counted from 0 below the names, beside 'y'. Remove the blanks, in pandas by"),
    "one name": (["x"] * 20, None, "expected at least two classes in 'price' of t.csv; got 'x' in each of 20 rows. Add "
                 "rows of another class, or name another target."),
    "one number": ([3] * 20, None, "at least two classes in 'price' of t.csv; got 3 in each of 20 rows."),
    "one real number": ([2.5] * 20, None, "at least two values in 'price' of t.csv; got 2.5 in each of 20 rows. "
                        "Add rows of another value, or name another target."),
    "wide numbers": ([str(10**39 + row) for row in range(20)], None, "expected numbers of at most 64 bits in column "
                     f"'price' of t.csv; got '{10**39}' in row 0, counted from 0 below the names. Write them with a "
                     "decimal point, or take them as names of classes, --task classes."),
    "tiny": (np.arange(20) * 1e-200, None, "expected magnitudes from 1e-140 to 1e+140 in column 'price' of t.csv; got "
             "1.9e-199 at most. Take another unit for it."),
    "text": ([1, "tbd"] * 10, "regression", "numbers in column 'price' of t.csv; got 'tbd' in row 1, counted from 0 "
             "below the names. Replace it by a number, or name another target."),
    "negative ones": ([-(10**20), *range(19)], None, f"64 bits in column 'price' of t.csv; got '-{10**20}' in row 0"),
}


@pytest.mark.parametrize("name", list(VALUES))
def test_targets_that_are_no_numbers_and_no_classes_are_one_line(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """As Parquet and CSV have them."""
    values, task, words = VALUES[name]
    found = read("price.csv").assign(price=pandas.Series(values))
    monkeypatch.setattr("ntk_laplace.tools.cli.examples.read_table", lambda *_: found)
    refused(["fit", "t.csv", "--target", "price", *(["--task", task] if task else [])], words, capsys)


def test_targets_that_are_scored() -> None:
    """Whole numbers are floating ones beside gaps."""
    found, others = scored_classes([1.0, None, 2, "K", 2.5, "fir"], ["1", "2", "K"])
    assert found.tolist() == [0, -1, 1, 2, -1, -1] and others == ["2.5", "fir"]
    assert scored_classes([np.nan, "1", 1.0, True, [1]], [1, 2])[1] == ["[1]"]


@pytest.mark.parametrize("spelling", ["true", "TRUE", "True"])
def test_truth_values_are_classes_in_each_spelling(spelling: str) -> None:
    """A column of them alone is read as truth values, and later tables as they are written."""
    column = pandas.Series(["False", spelling], name="kept")
    assert scored_classes(column.tolist(), ["False", "True"])[0].tolist() == [0, 1]
    assert target_classes(column, Path("t.csv"), ["False", "True"])[0].tolist() == [0, 1]
    names = ["TRUE", "True", "true"]  # three classes
    assert scored_classes([spelling], names)[0].tolist() == [names.index(spelling)]


def test_a_later_table_has_names_of_classes_as_they_are_written(folder: Path) -> None:
    """With one class alone a column looks like numbers, or like truth values."""
    frame = read("kind.csv")
    for name in ("01", "true"):
        frame.assign(kind=np.where(frame["kind"] == "cat", name, frame["kind"])).to_csv("named.csv", index=False)
        found = pandas.read_csv("named.csv", dtype={"kind": str})
        found[found["kind"] == name].to_csv("one.csv", index=False)
        files = Files(torch.float64, ntkl.Categorical(), columns=["kind"])
        training = files.training(Path("named.csv"))
        assert training.classes is not None
        for labeled in (True, False):
            new = files.like(training, Path("one.csv"), "the inputs", labeled)
            assert not new.others and (new.y == training.classes.index(name)).all()


def test_wide_numbers_can_be_names() -> None:
    column = pandas.Series([str(10**39 + row % 2) for row in range(4)], name="a")
    assert target_classes(column, Path("t.parquet"), None)[0].tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (line("evidence", "nowhere.csv", "kind"), "a table of the training data; got nowhere.csv, where there is no "
         "file. Check the path."),
        (line("evidence", "kind.csv", None), "expected --target COLUMN, one of 'height', 'kind', 'width' in kind.csv; "
         "got none. Name the column"),
        (line("evidence", "kind.csv", None, None, "--targets", "kind"), "--target COLUMN, for a table; got --targets "
         "kind and kind.csv."),
        (line("evidence", "kind.csv", "kind", "gaussian"), "expected numbers in column 'kind' of kind.csv; got 'cat' "
         "in row 0"),
        (line("predict", "kind.csv", "kind", None, "--inputs", "all.csv"), "expected the 2 input columns of the "
         "training data in all.csv; got 'price', 'count' too."),
        (line("predict", "kind.csv", "kind", None, "--inputs", "less.csv"), "in less.csv; got no 'width'. Give both"),
        (line("predict", "kind.csv", "kind", None, "--inputs", "kind.csv", "--held-out", "other.csv"), "expected "
         "classes of the training data ('ant', 'bee', 'cat') in column 'kind' of other.csv; got 'dog' in row 1"),
        (line("predict", "kind.csv", "kind", None, "--inputs", "kind.csv", "--held-out", "unknown.csv"), "one of "
         "'height', 'width' in unknown.csv; got --target kind."),
    ],
)
def test_tables_that_do_not_fit_are_one_line(
    arguments: list[str], words: str, folder: Path, capsys: pytest.CaptureFixture
) -> None:
    frame = read("kind.csv")
    frame[["height", "kind"]].to_csv("less.csv", index=False)
    frame[["height", "width"]].to_csv("unknown.csv", index=False)
    frame.iloc[:2].assign(kind=["ant", "dog"]).to_csv("other.csv", index=False)
    refused(arguments, words, capsys)


def refused(arguments: list[str], words: str, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(arguments) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("ntk-laplace: expected ") and words in printed.err, printed.err
    assert printed.err.count("\n") == 1 and printed.out == ""


def test_a_column_needs_a_table(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main([*line("evidence", "kind.npz", "kind"), "--target", "kind"])
    assert left.value.code == 2
    words = "expected --target with a table, .csv, .parquet, .feather or .arrow; got kind.npz."
    assert words in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------------- fit

QUICK = ["--epochs", "2", "--hidden", "2", "--out", "out"]


def scores(text: str) -> dict[str, list[float]]:
    rows = re.findall(r"^(without inputs|network alone|posterior) +([-\d.e ]+)$", text, re.MULTILINE)
    return {name: [float(number) for number in numbers.split()] for name, numbers in rows}


def fitted(target: str, capsys: pytest.CaptureFixture) -> tuple[pandas.DataFrame, pandas.DataFrame, str]:
    """The table without other targets, the predictions, and what was printed."""
    assert cli.main(["fit", f"{target}.csv", "--target", target, "--seed", "3", *QUICK]) == 0
    out = capsys.readouterr().out
    assert re.search(r"from 2 inputs: 16 rows to train, 4 held out$", out, re.MULTILINE), out
    frame, found = read(f"{target}.csv"), read("out/predictions.csv")
    assert len(found) == 4 and list(found["target"]) == list(frame[target].iloc[found["row"]])
    return frame, found, out


@pytest.mark.slow
def test_fit_of_numbers(folder: Path, capsys: pytest.CaptureFixture) -> None:
    """Scores from the written predictions; the model is the estimator of all other rows, and can be loaded."""
    frame, found, out = fitted("price", capsys)
    x, y = frame[["height", "width"]], frame["price"]
    rest = frame.index.difference(found["row"])
    model = ntkl.LaplaceRegressor(epochs=2, hidden_layer_sizes=(2,), random_state=3).fit(x.loc[rest], y.loc[rest])
    mean, sd = model.predict(x.loc[found["row"]], return_std=True)
    np.testing.assert_allclose(found[["mean", "sd"]], np.column_stack([mean, sd]), rtol=1e-9)
    np.testing.assert_allclose(found["upper"] - found["mean"], 1.6448536269514722 * sd, rtol=1e-9)
    np.testing.assert_allclose(found["lower"] + found["upper"], 2 * mean, rtol=1e-9)
    assert f"training rows: {model.log_marginal_likelihood_value_:.3f} nats" in out
    most = model.relevance_.argmax()
    assert f"under the prior: {x.columns[most]} {model.relevance_[most]:.3g}, " in " ".join(out.split())
    assert "Constant" not in out
    loaded = joblib.load("out/model.joblib")
    np.testing.assert_allclose(loaded.predict(x.loc[found["row"]]), mean, rtol=1e-9)
    same = np.full(4, y[rest].mean()), np.full(4, y[rest].std(ddof=0))
    versions = {"without inputs": same, "network alone": (mean, np.full(4, model.noise_**0.5)), "posterior": (mean, sd)}
    assert set(scores(out)) == set(versions)
    for name, (center, own) in versions.items():
        error = found["target"] - center
        density = -0.5 * np.log(2 * np.pi) - np.log(own) - error**2 / own**2 / 2
        covered = (np.abs(error) <= 1.6448536269514722 * own).mean()
        told, spread, rmse, inside = scores(out)[name]
        assert [told, inside] == pytest.approx([density.mean(), covered], abs=5.1e-5)
        assert spread == pytest.approx(density.std(ddof=1) / 2, rel=0.05)
        assert rmse == pytest.approx((error**2).mean() ** 0.5, rel=5.1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the network is not at its optimum")
def test_fit_of_numbers_with_outliers(folder: Path, capsys: pytest.CaptureFixture) -> None:
    """Intervals are quantiles of Student's t, scores its densities, and files and pages those of the estimator."""
    draws = np.random.default_rng(0)
    x = draws.normal(size=(100, 2))
    y = 30 * x[:, 0] + draws.normal(size=100) + 90 * draws.choice([-1, 1], 100) * (draws.uniform(size=100) < 0.15)
    table(x, y)[["height", "width", "price"]].to_csv("t.csv", index=False)
    options = ["--epochs", "30", "--hidden", "4", "--seed", "1", "--out", "out"]
    assert cli.main(["fit", "t.csv", "--target", "price", *options]) == 0
    out, found = capsys.readouterr().out, read("out/predictions.csv")
    model = joblib.load("out/model.joblib")
    assert model.likelihood_ == "student-t"
    assert f"Student's t of {float(model.posterior_.likelihood.df):.3g} degrees of freedom" in out
    inputs, target = read("t.csv").loc[found["row"], ["height", "width"]], found["target"].to_numpy(copy=True)
    np.testing.assert_allclose(found[["lower", "upper"]], model.predict_quantiles(inputs, (0.05, 0.95)), rtol=1e-9)
    assert ((found["upper"] - found["lower"]) < 3.2 * found["sd"]).all()
    for name, method in (("network alone", "map"), ("posterior", "glm")):
        each = model.predict_distribution(inputs, method)
        told, _, rmse, inside = scores(out)[name]
        lower, upper = (each.icdf(torch.tensor(q, dtype=torch.float64)).numpy() for q in (0.05, 0.95))
        assert told == pytest.approx(float(each.log_prob(torch.as_tensor(target)).mean()), abs=5.1e-5)
        assert inside == pytest.approx(((lower <= target) & (target <= upper)).mean(), abs=5.1e-5)
        assert rmse == pytest.approx(((target - found["mean"]) ** 2).mean() ** 0.5, rel=5.1e-4)
    assert "StudentT likelihood" in Path("out/explanations.html").read_text()
    for command in (["predict", "out/model.joblib", "--inputs", "t.csv", "--out", "again.csv"],
                    ["explain", "out/model.joblib", "--inputs", "t.csv", "--most", "3"],
                    ["evidence", "out/model.joblib"]):
        assert cli.main(command) == 0
    again = read("again.csv").iloc[found["row"]]
    np.testing.assert_allclose(again[["mean", "lower", "upper"]], found[["mean", "lower", "upper"]], rtol=1e-9)
    assert cli.main(["fit", "t.csv", "--target", "price", "--likelihood", "gaussian", *QUICK]) == 0
    assert joblib.load("out/model.joblib").likelihood_ == "gaussian"


def test_the_noise_of_numbers_is_not_for_classes(folder: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["fit", "kind.csv", "--target", "kind", "--likelihood", "student-t", *QUICK]) == 1
    assert "expected targets that are numbers, for --likelihood; got classes" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("rare", [1, 5])
def test_each_class_is_held_out_in_its_share(rare: int, folder: Path) -> None:
    """The only row of a class is in the training."""
    kinds = ["rare"] * rare + ["common"] * (20 - rare)
    read("price.csv").assign(price=kinds).to_csv("t.csv", index=False)
    for seed in ("0", "1"):
        assert cli.main(["fit", "t.csv", "--target", "price", "--seed", seed, *QUICK]) == 0
        held_out = read("out/predictions.csv")["target"].tolist()
        assert held_out.count("rare") == rare // 5 and len(held_out) == 4
    few = read("price.csv").iloc[:10].assign(price=[*"aabccccdee"])  # the shares are rounded to b and d
    few.to_csv("t.csv", index=False)
    assert cli.main(["fit", "t.csv", "--target", "price", *QUICK]) == 0
    assert read("out/predictions.csv")["target"].tolist() == ["c"]


@pytest.mark.slow
def test_constant_columns_are_named_and_not_ranked(folder: Path, capsys: pytest.CaptureFixture) -> None:
    read("price.csv").assign(year=2024).to_csv("t.csv", index=False)
    drop = ["--drop", "height", "--drop", "width"]
    assert cli.main(["fit", "t.csv", "--target", "price", *drop, *QUICK]) == 0
    assert "Relevance" not in (out := capsys.readouterr().out) and "\nConstant in the training rows: year" in out
    assert cli.main(["fit", "t.csv", "--target", "price", *QUICK]) == 0
    out = capsys.readouterr().out
    ranked = out[out.index("Relevance") :].partition("\n\n")[0]
    assert "\nConstant in the training rows: year" in ranked and "year" not in ranked.partition("Constant")[0]


@pytest.mark.slow
def test_fit_of_classes(folder: Path, capsys: pytest.CaptureFixture) -> None:
    frame, found, out = fitted("kind", capsys)
    rest = frame.index.difference(found["row"])
    model = ntkl.LaplaceClassifier(epochs=2, hidden_layer_sizes=(2,), random_state=3)
    model.fit(frame.loc[rest, ["height", "width"]], frame.loc[rest, "kind"])
    p = found[["probability_ant", "probability_bee", "probability_cat"]].to_numpy()
    np.testing.assert_allclose(p, model.predict_proba(frame.loc[found["row"], ["height", "width"]]), rtol=1e-9)
    labels = found["target"].map({"ant": 0, "bee": 1, "cat": 2}).to_numpy()
    x = frame[["height", "width"]].to_numpy()
    x = (x[found["row"]] - x[rest].mean(0)) / x[rest].std(0)
    with torch.no_grad():
        alone = model.network_(torch.as_tensor(x)).softmax(1).numpy()
    shares = np.tile(frame.loc[rest, "kind"].value_counts(normalize=True).sort_index(), (4, 1))
    for name, own in {"without inputs": shares, "network alone": alone, "posterior": p}.items():
        density, accuracy = np.log(own[np.arange(4), labels]).mean(), (own.argmax(1) == labels).mean()
        assert scores(out)[name][::2][:2] == pytest.approx([density, accuracy], abs=5.1e-5)
    assert list(found["predicted"]) == [["ant", "bee", "cat"][index] for index in p.argmax(1)]
    assert list(joblib.load("out/model.joblib").classes_) == ["ant", "bee", "cat"]


def test_the_prediction_without_inputs_counts_equal_rows() -> None:
    frame, numbers = pandas.DataFrame({"height": [0.0, 0.0, 0.0, 1.0, 2.0]}), np.array([1.0, 1.0, 1.0, 2.0, 4.0])
    model = ntkl.LaplaceRegressor(epochs=2, hidden_layer_sizes=(2,)).fit(frame, numbers)
    assert len(model.y_train_) == 3
    found = describe(model, frame, numbers, ["y"], 0.9).scores["without inputs"]
    assert found["rmse"] == pytest.approx(numbers.std(), rel=1e-9)
    names = np.where(numbers > 1.0, "b", "a")
    classifier = ntkl.LaplaceClassifier(epochs=2, hidden_layer_sizes=(2,)).fit(frame, names)
    found = describe(classifier, frame, names, ["y"], 0.9)
    expected = 0.6 * np.log(0.6) + 0.4 * np.log(0.4)
    assert found.scores["without inputs"]["log_likelihood"] == pytest.approx(expected, rel=1e-9)


def test_names_with_commas_are_quoted_in_sets_of_labels() -> None:
    frame = pandas.DataFrame({"height": np.arange(20) % 7 + 0.0})
    names = np.where(frame["height"] > 3, "a, b", "c")
    model = ntkl.LaplaceClassifier(epochs=2, hidden_layer_sizes=(2,), random_state=3).fit(frame, names)
    found = describe(model, frame, None, ["kind"], 0.9).columns["set"]
    assert set(found) <= {'{"a, b"}', "{c}", '{"a, b", c}', '{c, "a, b"}'} and any('"' in one for one in found)


@pytest.mark.parametrize(
    ("values", "task", "kind"),
    [
        (np.arange(20) % 10, None, "Classifier"),
        (np.arange(20) % 11, None, "Regressor"),
        (np.arange(20) % 2 + 0.0, "classes", "Classifier"),
        (np.arange(20) % 3, "regression", "Regressor"),
        (np.arange(20) % 3 + 0.0, None, "Regressor"),
        (np.arange(20) % 2 == 1, None, "Classifier"),
        ([f"{min(number, 9)}th" for number in range(20)], "classes", "Classifier"),
    ],
)
def test_what_a_target_is_taken_as(
    values: np.ndarray | list[str], task: str | None, kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    def taken(name: str) -> type:
        class Taken:
            def __init__(self, **options: object) -> None:
                raise ntkl.DataError("to stop here", f"{name} {options['predictive']}", "It is a test.")

        return Taken

    for name in ("Regressor", "Classifier"):
        monkeypatch.setattr(ntkl, f"Laplace{name}", taken(name))
    read("price.csv").assign(price=values).to_csv("t.csv", index=False)
    more = ["--task", task, "--predictive", "folds"] if task else []
    assert cli.main(["fit", "t.csv", "--target", "price", *QUICK, *more]) == 1
    printed = capsys.readouterr()
    assert f"{kind} {'folds' if task else 'loo'}" in printed.err and not Path("out/predictions.csv").exists()
    assert ("classes" if kind != "Regressor" else "real numbers") in printed.out
    few = kind == "Regressor" and len(np.unique(values)) <= 10
    assert ("(3 whole ones alone, which --task classes takes as classes)" in printed.out) is few


def test_a_linear_part_is_told(folder: Path, capsys: pytest.CaptureFixture) -> None:
    table = read("kind.csv")
    for columns in (3, 66):
        more = {f"more {number}": np.sin(number + np.arange(len(table))) for number in range(columns)}
        table.assign(**more).to_csv("t.csv", index=False)
        assert cli.main(["fit", "t.csv", "--target", "kind", *QUICK]) == 0
        assert ("a perceptron and a linear function of the columns" in capsys.readouterr().out) is (columns == 66)


def test_columns_in_pieces_are_told(
    folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the fit has them: a step of a skewed column, and none of columns of two values."""
    monkeypatch.setattr(tuning, "EXAMPLES_IN_PIECES", 100)
    rng = np.random.default_rng(0)
    skewed = np.exp(3 * rng.normal(size=60))
    step = pandas.DataFrame({"skewed": skewed, "other": np.arange(60) % 2,
                         "y": (skewed > 1) + 0.2 * rng.normal(size=60)})
    for table, expected in ((step, True), (step.assign(skewed=skewed > 1), False)):
        table.to_csv("t.csv", index=False)
        assert cli.main(["fit", "t.csv", "--target", "y", *QUICK, "--likelihood", "gaussian", "--epochs", "20"]) == 0
        assert ("as inputs of the network too: skewed" in " ".join(capsys.readouterr().out.split())) is expected
        assert (joblib.load("out/model.joblib").piecewise_features_ == [0]) is expected


@pytest.mark.filterwarnings("ignore:.* is not at the optimum of the evidence")
def test_extreme_values_and_factors_are_told(
    folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the fit has them: a slip of the decimal point in some rows of a column, and a target's logarithm."""
    monkeypatch.setattr(tuning, "EXAMPLES_IN_PIECES", 100)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 2))
    y = np.exp(np.sin(2 * x[:, 0]) + 0.2 * rng.normal(size=80))
    x[::16, 0] *= 100
    pandas.DataFrame({"age": x[:, 0], "size": x[:, 1], "price": y}).to_csv("t.csv", index=False)
    for likelihood in ("log-normal", "gaussian"):
        options = ["--target", "price", *QUICK, "--likelihood", likelihood, "--epochs", "20"]
        assert cli.main(["fit", "t.csv", *options]) == 0
        told, model = " ".join(capsys.readouterr().out.split()), joblib.load("out/model.joblib")
        assert ("are clipped smoothly in columns age, size" in told) is (model.clipped_features_ == [0, 1])
        assert ("The logarithm of the target has normal noise" in told) is (likelihood == "log-normal")
        assert model.clipped_features_ == [0, 1] or likelihood == "gaussian"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["kind.csv"], "expected --target COLUMN, one of 'height', 'kind', 'width' in kind.csv; got none."),
        (["kind.csv", "--target", "kind", "--task", "regression"], "expected numbers in column 'kind' of kind.csv"),
        (["price.csv", "--target", "price", "--task", "classes"], "expected names or whole numbers as classes in "
         "column 'price' of price.csv; got "),
        (["price.csv", "--target", " Price"], "expected --target COLUMN, one of 'height', 'price', 'width' in "
         "price.csv; got --target  Price. There is 'price'. Name the column of the targets"),
        (["price.csv", "--target", "price", "--drop", "WIDTH"], "got --drop WIDTH. There is 'width'. Name a"),
        (["few.csv", "--target", "price"], "expected at least 10 rows; got 9 in few.csv."),
        (["price.csv", "--target", "price", "--out", "model.py/below"], "cannot write to model.py/below"),
        (["price.csv", "--target", "price", "--out", "/proc/x"], "cannot write to /proc/x/predictions.csv: "),
        (["predictions.csv", "--target", "price", "--out", "."], "expected another name for what is written; got "
         "predictions.csv, which is an input. It would be overwritten: choose another --out"),
        (["price.tsv", "--target", "price"], r"got price.tsv. A table can be .csv, .parquet, .feather or .arrow, with "
         r"--target COLUMN. Convert it in Python: pandas.read_csv('price.tsv', sep='\t').to_csv('price.csv', index"),
        (["price.csv", "--target", "price", "--network", "model.py:unsaved"], "expected a network that pickle can "
         "save, for model.joblib; got "),
    ],
)
def test_what_cannot_be_fitted_is_one_line(
    arguments: list[str], words: str, folder: Path, capsys: pytest.CaptureFixture
) -> None:
    frame = read("price.csv")
    frame.iloc[:9].to_csv("few.csv", index=False)
    frame.to_csv("price.tsv", index=False, sep="\t")
    frame.to_csv("predictions.csv", index=False)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert cli.main(["fit", *arguments]) == 1
    printed = capsys.readouterr()
    assert words in printed.err and printed.err.count("\n") == 1 and printed.out == "", printed.err
    assert before.items() <= {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}.items()
    assert not Path("ntk-laplace-fit").exists()


@pytest.mark.parametrize(("months", "words"), [
    (["May"] * 20, "at least two sources in 'month' of t.csv; got 'May' in each of {} training rows. Name another "
     "column, or leave --group out."),
    ([f"{row}th" for row in range(20)], "sources of several rows in 'month' of t.csv; got another one in each of {} "
     "training rows, such as '0th'. Name another column, or leave --group out: the page has"),
])
def test_sources_that_tell_nothing_are_refused_before_the_work(
    months: list[str], words: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(ntkl, "LaplaceRegressor", lambda **_: pytest.fail("work began"))
    monkeypatch.setattr(ntkl, "laplace", lambda *_, **__: pytest.fail("work began"))
    read("price.csv").assign(month=months).to_csv("t.csv", index=False)
    refused(["fit", "t.csv", "--target", "price", "--group", "month", *QUICK], words.format(16), capsys)
    explain = line("explain", "t.csv", "price", None, "--group", "month", "--inputs", "t.csv")
    refused(explain, words.format(20), capsys)
    assert not Path("out").exists()


@pytest.mark.slow
def test_columns_that_are_no_inputs(folder: Path, capsys: pytest.CaptureFixture) -> None:
    """Numbers and names of rows, of the estimator and of a Python file; later tables may be with or without them."""
    frame = read("price.csv")
    frame.assign(row=range(7, 27)).to_csv("t.csv", index=False)
    assert cli.main(["fit", "t.csv", "--target", "price", *QUICK]) == 0
    words = "\nAnother whole number in each row, an input too: row. Leave out what only numbers the rows: --drop row.\n"
    assert words in capsys.readouterr().out
    frame.assign(row=range(20), name=[f"house {row}" for row in range(20)]).to_csv("t.csv", index=False)
    drop = ["--drop", "row", "--drop", "name"]
    assert cli.main(["fit", "t.csv", "--target", "price", *drop, *QUICK]) == 0
    out = capsys.readouterr().out
    assert "from 2 inputs" in out and "Another whole number" not in out
    found = []
    for table in ("t.csv", "price.csv"):
        assert cli.main(["predict", "out/model.joblib", "--inputs", table, "--out", "p.csv"]) == 0
        found.append(read("p.csv"))
        assert cli.main(line("predict", "t.csv", "price", None, *drop, "--inputs", table, "--out", "p.csv")) == 0
        found.append(read("p.csv"))
    assert found[0].equals(found[2]) and found[1].equals(found[3])
    capsys.readouterr()
    refused(["fit", "t.csv", "--target", "price", "--drop", "rows", *QUICK],
            "--drop COLUMN, one of 'height', 'width', 'row' and 1 more in t.csv; got --drop rows. Name a", capsys)
    assert cli.main(["predict", "out/model.joblib", "--inputs", "price.csv", "--drop", "row", "--out", "p.csv"]) == 0
    with pytest.raises(SystemExit):
        cli.main(["evidence", "out/model.joblib", "--drop", "row"])
    words = "a Python file for --drop; got out/model.joblib, which has its own. Leave --drop out."
    assert words in capsys.readouterr().err
    np.savez("a.npz", X=frame[["width"]].to_numpy(), y=frame["price"].to_numpy())
    refused(["fit", "a.npz", "--drop", "row", *QUICK], "a table, for --drop COLUMN; got a.npz. Leave", capsys)


@pytest.mark.slow
def test_a_page_that_fails_leaves_the_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ntkl.DataError("a page", "none", "It is a test.")

    monkeypatch.setattr("ntk_laplace.tools.cli.fit.estimator_page", fails)
    assert cli.main(["fit", "price.csv", "--target", "price", *QUICK]) == 1
    assert "expected a page; got none" in capsys.readouterr().err
    assert sorted(file.name for file in Path("out").iterdir()) == ["model.joblib", "predictions.csv"]


def test_whole_numbers_are_classes_by_all_their_digits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two numbers that are one in double precision."""
    labels = np.array([10**17, 10**17 + 1])[np.arange(20) % 2]
    read("price.csv").assign(price=labels).to_csv("t.csv", index=False)
    options = argparse.Namespace(data=Path("t.csv"), target=["price"], task=None, likelihood=None, source=None,
                                 drop=None, category=None, fill_missing=False, exposure=None)
    assert np.array_equal(read_examples(options).y, labels)


@pytest.mark.parametrize(("value", "remedy"), [
    (1.5, "Correct the value; fit takes fractions with --task regression."),
    (1e20, "Write them as names; fit takes them as numbers with --task regression."),
])
def test_remedies_for_labels_name_the_command_that_has_the_option(value: float, remedy: str) -> None:
    """`predict` reads labels too, and has no --task."""
    with pytest.raises(ntkl.DataError, match=re.escape(f"{value:g} in row 1. {remedy}")):
        table_labels(pandas.Series([1.0, value, 2.0], name="kind"), Path("new.csv"))


def test_predictions_that_are_close_to_each_other_differ_in_print(capsys: pytest.CaptureFixture) -> None:
    close = pandas.DataFrame({"row": [3, 4], "mean": [100000.125, 100000.25], "upper": 100000.5, "target": [1e5, None]})
    tell_first(close.assign(lower=99999.5), 0.9)
    tell_first(pandas.DataFrame({"predicted": ["oak", "elm"], "target": ["oak", None]}), 0.9)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[3] == ["3", "100000.125", "100000.5", "100000", "99999.5"]
    assert lines[4] == ["4", "100000.25", "100000.5", "99999.5"]
    assert lines[-1] == ["elm"]


def test_what_the_uncertainty_is_fitted_to() -> None:
    found = ntkl.PredictiveFit(Calibration(scale=0.5), "loo", -3.0, -1.0, -1.25, 1200, 0.125, 0.0625)
    words = "fitted to 1,200 training rows, each predicted from {}: covariance times 0.5; 0.25 ± 0.062 nats a row"
    assert words.format("all others") in fitted_words(found)
    folds = words.format("a network that was trained without its fold")
    assert folds in fitted_words(replace(found, objective="folds"))


def test_scores_in_any_unit() -> None:
    text = score_table({"posterior": {"log_likelihood": 21.4, "rmse": 1.23e-10}, "network": {"rmse": 17150.4639}})
    assert "21.4000" in text and "1.23e-10" in text and " 17150" in text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:noise is not at the optimum")
def test_commands_on_the_docs_page_run(folder: Path, quick: None, capsys: pytest.CaptureFixture) -> None:
    """With two epochs; the first line of the printed results is that of the page."""
    page = (Path(__file__).resolve().parents[1] / "docs" / "tables.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    exec(code, {})
    frame = read("price.csv")
    frame.to_csv("train.csv", index=False)
    frame[["width", "height"]].to_csv("new.csv", index=False)
    Path("single.pt").rename("weights.pt")
    shell = "".join(re.findall(r"^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    commands = [shlex.split(line) for line in shell.replace("\\\n", "").splitlines()]
    session = ["fit", "predict", "explain", "evidence", "fit", "fit", "fit"]
    assert [command[1] for command in commands] == [*session, "evidence", "explain", "predict"]
    for command in commands:
        assert cli.main([*command[1:], *(["--epochs", "2"] if command[1] == "fit" else [])]) == 0
        if command[1] == "fit":
            assert capsys.readouterr().out.splitlines()[0] in page.splitlines()
    assert len(read("predictions.csv")) == 20
