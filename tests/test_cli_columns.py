"""Columns of categories and missing values: the command fits what a table made by pandas and scikit-learn gives."""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import joblib
import numpy as np
import pandas
import pytest
from sklearn.impute import SimpleImputer

import ntk_laplace as ntkl
from ntk_laplace.errors import DataError
from ntk_laplace.tools import cli
from ntk_laplace.tools.cli.columns import InputColumns
from ntk_laplace.tools.cli.estimator_file import Estimator, load_estimator, save_estimator
from ntk_laplace.tools.cli.examples import TrainingExamples, by_row, read_examples
from ntk_laplace.tools.cli.tables import read_table
from ntk_laplace.tools.cli.values import as_numbers, dates, days

pytestmark = pytest.mark.usefixtures("one_perceptron")
QUICK = ["--epochs", "2", "--hidden", "3"]
TABLE = Path("t.csv")


@pytest.fixture
def frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pandas.DataFrame:
    """Twenty rows in t.csv: numbers, names, codes and a target."""
    monkeypatch.chdir(tmp_path)
    random, rows = np.random.default_rng(0), np.arange(20)
    found = pandas.DataFrame({
        "width": random.normal(size=20), "kind": np.array(["oak", "ash", "elm"])[rows % 3],
        "height": random.normal(size=20), "code": np.array([7, 10])[rows % 2], "price": random.normal(size=20),
    })
    found.to_csv(TABLE, index=False)
    return found


def fitted(table: pandas.DataFrame, *options: str) -> pandas.DataFrame:
    """Predictions of held-out rows."""
    table.to_csv("own.csv", index=False)
    assert cli.main(["fit", "own.csv", "--target", "price", "--out", "own", *QUICK, *options]) == 0
    return pandas.read_csv("own/predictions.csv")


def by_hand(frame: pandas.DataFrame, *names: str) -> pandas.DataFrame:
    """Columns of 0 and 1 in place of categories."""
    parts = [pandas.get_dummies(frame[[name]].astype(str), prefix_sep="=", dtype=int) if name in names
             else frame[[name]] for name in frame]
    return pandas.concat(parts, axis=1)


@pytest.mark.slow
def test_categories_are_columns_of_0_and_1(frame: pandas.DataFrame, capsys: pytest.CaptureFixture) -> None:
    found, wanted = fitted(frame), fitted(by_hand(frame, "kind"))
    assert "from 6 inputs: 16 rows to train, 4 held out\nInputs: kind as 3 categories\n" in capsys.readouterr().out
    assert found.equals(wanted)
    assert fitted(frame, "--category", "code").equals(fitted(by_hand(frame, "kind", "code")))


@pytest.mark.slow
def test_missing_values_are_means_and_marked(frame: pandas.DataFrame, capsys: pytest.CaptureFixture) -> None:
    frame.loc[[2, 5], "width"] = np.nan
    frame.loc[[3, 5, 6], "kind"] = None
    imputer = SimpleImputer(add_indicator=True)
    width, gap = imputer.fit_transform(frame[["width"]]).T
    named = by_hand(frame.assign(kind=frame["kind"].fillna("none")), "kind")
    wanted = named.drop(columns="kind=none").assign(width=width)
    wanted.insert(1, "width missing", gap.astype(int))
    wanted.insert(5, "kind missing", named["kind=none"])
    pandas.testing.assert_frame_equal(fitted(frame, "--fill-missing"), fitted(wanted), rtol=1e-9)
    words = "\nInputs: kind as 3 categories, width filled where it is missing, kind filled where it is missing\n"
    assert words in capsys.readouterr().out


@pytest.mark.slow
def test_later_tables_have_the_columns_as_they_are(frame: pandas.DataFrame, capsys: pytest.CaptureFixture) -> None:
    """In any order, with a few of the categories; other categories, and gaps where there was none, are refused."""
    frame.loc[2, "width"] = np.nan
    first = fitted(frame, "--fill-missing")
    capsys.readouterr()

    def predict(table: pandas.DataFrame, words: str = "") -> pandas.DataFrame | None:
        table.to_csv("new.csv", index=False)
        code = cli.main(["predict", "own/model.joblib", "--inputs", "new.csv", "--out", "new_predictions.csv"])
        assert words in capsys.readouterr().err and code == bool(words)
        return None if words else pandas.read_csv("new_predictions.csv")

    again = predict(frame[["price", "kind", "code", "height", "width"]])
    pandas.testing.assert_frame_equal(again.iloc[first["row"]].reset_index(drop=True), first, rtol=1e-9)
    few = predict(frame.iloc[[3, 6]].drop(columns="price"))
    assert np.allclose(few["mean"], again["mean"][[3, 6]], rtol=1e-9)
    predict(frame.assign(kind="fir"), "expected categories of the training data ('ash', 'elm', 'oak') in column 'kind' "
            "of new.csv; got 'fir' in rows 0, 1, 2 and 17 more, counted from 0 below the names. Correct the names, or "
            "remove the rows; --skip-unknown predicts the others.")
    predict(frame.assign(kind=["fir", "ash", "oak "] + ["yew", "box"] + ["elm"] * 15), "got 'fir' in row 0, 'oak ' in "
            "row 2, 'yew' in row 3 and 1 other name, counted from 0 below the names. One differs from 'oak' in blanks "
            "alone. Correct")
    predict(frame.assign(height=np.nan), "column 'height' of new.csv; got none in row 0, counted from 0 below the "
            "names. Fill it in, or remove the row. No row of the training data lacks it; --skip-unknown predicts the "
            "others.")
    predict(frame.drop(columns="kind"), "the 4 input columns of the training data in new.csv; got no 'kind'")
    assert cli.main(["explain", "own/model.joblib", "--inputs", "new.csv", "--out", "e.html"]) == 1
    frame.to_csv("new.csv", index=False)
    assert cli.main(["explain", "own/model.joblib", "--inputs", "new.csv", "--out", "e.html"]) == 0
    rows = json.loads(Path("e.html").read_text().partition('id="data">')[2].partition("</script>")[0])["rows"]
    assert rows["features"] == ["width", "kind", "height", "code"]  # a category is one value
    wanted = frame[rows["features"]].to_numpy().tolist()
    for row, own in zip(rows["points"], wanted, strict=True):
        assert row == [None if np.isnan(own[0]) else pytest.approx(own[0], rel=1e-3), own[1],
                       pytest.approx(own[2], rel=1e-3), own[3]]
    known = {tuple(row[1::2]) for row in wanted}
    assert rows["training"] and {tuple(row[1::2]) for row in rows["training"].values()} <= known


@pytest.mark.slow
def test_rows_with_unknown_inputs_can_be_skipped(frame: pandas.DataFrame, capsys: pytest.CaptureFixture) -> None:
    """Their predictions are empty, those of the others are as they were; columns with gaps may have more of them."""
    frame.loc[2, "width"] = np.nan
    frame.to_csv("own.csv", index=False)
    assert cli.main(["fit", "own.csv", "--target", "code", "--fill-missing", "--out", "own", *QUICK]) == 0

    def predict(table: pandas.DataFrame, *more: str) -> pandas.DataFrame:
        table.to_csv("new.csv", index=False)
        capsys.readouterr()
        assert cli.main(["predict", "own/model.joblib", "--inputs", "new.csv", "--out", "p.csv", *more]) == 0
        return pandas.read_csv("p.csv", dtype=str)

    frame.loc[4, "width"] = np.nan
    whole, scores = predict(frame), capsys.readouterr().out.partition("\n\nThe first")[0]
    assert predict(frame, "--skip-unknown").equals(whole) and capsys.readouterr().out.startswith(scores)
    new = frame.copy()
    new.loc[[1, 3], "kind"], new.loc[3, "height"] = "fir", np.nan
    found, out = predict(new, "--skip-unknown"), capsys.readouterr().out
    assert ("\nNo predictions of 2 of 20 rows: 'fir' in rows 1, 3 of column 'kind'; none in row 3 of column 'height'\n"
            in out)
    assert found["row"].equals(whole["row"]) and found.drop(columns="row").loc[[1, 3]].isna().all(axis=None)
    rest = [row for row in range(20) if row not in (1, 3)]
    exact = [name for name in whole if not name.startswith("probability")]  # whole numbers stay whole
    assert found.loc[rest, exact].equals(whole.loc[rest, exact]) and "Scores of the 18 inputs" in out
    explain = ["explain", "own/model.joblib", "--inputs", "new.csv", "--skip-unknown", "--out", "e.html"]
    assert cli.main(explain) == 0 and "No predictions of 2 of 20 rows: " in capsys.readouterr().out
    names = json.loads(Path("e.html").read_text().partition('id="data">')[2].partition("</script>")[0])["inputNames"]
    assert names == [f"row {row}" for row in rest]
    predict(new.assign(kind=["fir"] * 19 + ["oak"]), "--skip-unknown")
    new.assign(kind="fir").to_csv("new.csv", index=False)
    assert cli.main(explain) == 1
    assert "expected a row of new.csv whose inputs the model knows; got 'fir' in rows 0" in capsys.readouterr().err


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_codes_are_the_same_names_in_every_table(ending: str, frame: pandas.DataFrame) -> None:
    """Also in one where gaps make them floating numbers; a CSV file keeps their zeros."""
    gaps = frame.assign(code=frame["code"].where(frame.index > 1).astype(float))
    codes = frame.assign(code=["7", "07", "10.0", "10"] * 5)
    if ending == ".parquet":
        pytest.importorskip("pyarrow")
    for name, table in {"gaps": gaps, "whole": frame, "codes": codes}.items():
        getattr(table, f"to_{ending[1:]}")(Path(name + ending), index=False)

    def read(name: str) -> pandas.DataFrame:
        return read_table(Path(name + ending), "rows", ["code"])

    found = InputColumns.of(read("gaps"), TABLE, ["code"], ["code"], fill=True)
    assert found.features == ["code=10", "code=7", "code missing"]
    assert np.array_equal(found.rows(read("whole"), TABLE)[:2], [[0, 1, 0], [1, 0, 0]])
    assert InputColumns.of(read("codes"), TABLE, ["code"], ["code"]).categories["code"] == ["07", "10", "7"]


@pytest.mark.slow
def test_a_few_codes_of_a_column_are_known(frame: pandas.DataFrame) -> None:
    """pandas alone would read them as numbers, without their zeros."""
    codes = frame.assign(code=np.array(["01", "0A"])[np.arange(20) % 2])
    fitted(codes, "--category", "code")
    codes.iloc[[0, 2]].to_csv("new.csv", index=False)
    assert cli.main(["predict", "own/model.joblib", "--inputs", "new.csv", "--out", "p.csv"]) == 0


@pytest.mark.slow
def test_a_model_of_an_earlier_version(frame: pandas.DataFrame) -> None:
    """Its columns are numbers."""
    first = fitted(frame.drop(columns="kind"))
    model = joblib.load("own/model.joblib")
    (told,) = (own for own in vars(model).values() if isinstance(own, dict) and "columns" in own)
    del told["columns"]
    joblib.dump(model, "own/model.joblib")
    assert cli.main(["predict", "own/model.joblib", "--inputs", "own.csv", "--out", "p.csv"]) == 0
    again = pandas.read_csv("p.csv").iloc[first["row"]].reset_index(drop=True)
    pandas.testing.assert_frame_equal(again, first, rtol=1e-9)


@pytest.mark.filterwarnings("ignore:noise is not at the optimum")
def test_a_model_that_was_fitted_again_has_the_columns_of_that_fit(frame: pandas.DataFrame) -> None:
    """What the command knows of its rows, its categories and its targets is not of other data."""
    table = argparse.Namespace(data=TABLE, target=["price"], category=[], drop=["code"], fill_missing=False,
                               likelihood=None, source=None, task=None, exposure=None)
    training = read_examples(table)
    model = ntkl.LaplaceRegressor(epochs=1, hidden_layer_sizes=(2,), likelihood="gaussian", predictive=None,
                                  precision=1.0)
    save_estimator(model.fit(training.x, training.y), Path("own.joblib"), training, table)
    options = argparse.Namespace(network=(Path("own.joblib"), None), classes_of=None)
    own = load_estimator(options)
    assert own.targets == ["price"] and own.dropped == ["code"] and own.columns == training.columns
    again = joblib.load("own.joblib").fit(pandas.concat([training.x[["height"]]] * 2), np.arange(40.0))
    joblib.dump(again, "own.joblib")
    other = load_estimator(options)
    assert other.targets == ["target"] and not other.dropped and other.rows is None
    assert other.columns is not None and other.columns.names == ["height"] and not other.columns.categories


@pytest.mark.filterwarnings("ignore:noise is not at the optimum")
def test_the_page_of_a_wide_table_shows_the_most_relevant_columns(
    frame: pandas.DataFrame, capsys: pytest.CaptureFixture
) -> None:
    draws = pandas.DataFrame(np.random.default_rng(1).normal(size=(20, 40))).add_prefix("x")
    fitted(pandas.concat([frame, draws], axis=1).assign(day=pandas.date_range("2020-01-01", periods=20)))
    assert ("takes a pandas table of the inputs,\nwith columns of 0 and 1 such as 'kind=ash' and days since 2000-01-01 "
            "for dates such as 'day'.") in capsys.readouterr().out
    page = Path("own/explanations.html").read_text().partition('id="data">')[2].partition("</script>")[0]
    rows = json.loads(page)["rows"]
    model = joblib.load("own/model.joblib")
    relevance = pandas.Series(model.relevance_, model.feature_names_in_)
    known = relevance.groupby(lambda name: name.partition("=")[0], sort=False).max()
    assert rows["features"] == [name for name in known.index if name in known.nlargest(40).index]
    assert rows["others"] == 5 and len(rows["points"][0]) == 40


@pytest.mark.parametrize(("relevant", "shown"), [(3, 10), (20, 20), (60, 40)])
def test_columns_of_little_relevance_are_not_shown(relevant: int, shown: int) -> None:
    """At least ten of more than 40."""
    relevance = np.where(np.arange(60) < relevant, 1.0, 0.05) + np.arange(60) * 1e-6
    table = pandas.DataFrame(np.zeros((2, 60)))
    found = Estimator(SimpleNamespace(relevance_=relevance), []).shown(table, 40)
    assert sorted(found.columns) == sorted(f"x{i}" for i in np.argsort(-relevance)[:shown])
    assert list(found.columns) == sorted(found.columns, key=lambda name: int(name[1:]))


ROWS = "counted from 0 below the names"
REFUSED = {
    "mixed": ({"kind": ["1", "2", "?", "4"] * 5}, {}, f"expected numbers alone, or names alone, in column 'kind' of "
              f"t.csv; got '?' in row 2, {ROWS}, beside numbers. Correct the values, leave cells empty where one is "
              "missing, for --fill-missing, or take all as names, --category kind."),
    "digits": ({"kind": pandas.Series(["1", "2"] * 10, dtype=object)}, {},
               f"in column 'kind' of t.csv; got '1' in row 0, {ROWS}, as text."),
    "one each": ({"kind": [f"tree {row}" for row in range(20)]}, {}, "expected at most 100 categories in column 'kind' "
                 "of t.csv, of two rows each in the mean; got 20 in 20 rows, such as 'tree 0'. Join names, or leave "
                 "the column out, --drop kind."),
    "amounts": ({"kind": ["€3", None, "€4", "€3"] * 5}, {"fill": True}, "names or numbers in column 'kind' of t.csv; "
                f"got '€3' in row 0, {ROWS}, a date or an amount as text. Make numbers of the amounts, in pandas by "
                "frame['kind'] = frame['kind'].str.replace(r'[^-+.0-9]', '', regex=True).astype(float). Or take all as "
                "names, --category kind, or leave the column out, --drop kind."),
    "blanks": ({"kind": ["oak", "ash", " oak", "elm"] * 5}, {}, "expected names that differ in more than blanks in "
               f"column 'kind' of t.csv; got ' oak' in row 2, {ROWS}, beside 'oak'. Remove the blanks, in pandas by "
               "frame['kind'] = frame['kind'].str.strip()."),
    "blanks of all": ({"kind": ["oak\t", "ash", "\xa0oak", "elm"] * 5}, {}, rf"got 'oak\t' in row 0, {ROWS}, beside "
                      r"'\xa0oak'."),
    "blanks alone": ({"kind": ["oak", "  "] * 10}, {}, f"got '  ' in row 1, {ROWS}. Remove the blanks, in pandas by "
                     "frame['kind'] = frame['kind'].str.strip(), and name what is left empty, or fill it in."),
    "dates": ({"kind": ["2026-01-31", "2026-02-30"] * 10}, {}, "expected dates such as 2026-01-31 in column 'kind' of "
              f"t.csv; got '2026-02-30' in row 1, {ROWS}. Correct the value, remove the row, or take all as names, "
              "--category kind."),
    "durations": ({"kind": pandas.to_timedelta(np.arange(20), unit="D")}, {}, "expected names or numbers in column "
                  f"'kind' of t.csv; got a date or a time in row 0, {ROWS}."),
    "dates of another form": ({"kind": ["31.01.2026", "01.02.2026"] * 10}, {}, f"got '31.01.2026' in row 0, {ROWS}, a "
                              "date or an amount as text. Make days of the dates, in pandas by frame['kind'] = "
                              "(pandas.to_datetime(frame['kind'], dayfirst=True) - "),
    "lists": ({"kind": [["oak"]] * 20}, {}, "got a value of type list in row 0"),
    "missing": ({"kind": [None, "oak"] * 10}, {}, f"got none in row 0, {ROWS}. Fill it in, or remove the row. Or let "
                "--fill-missing do so."),
    "all missing": ({"kind": [None] * 20}, {"fill": True}, "expected a value in some row of column 'kind' of t.csv; "
                    "got none. Leave it out, --drop kind."),
    "unknown": ({}, {"categories": ["tree"]}, "expected --category COLUMN, one of 'width', 'kind', 'height' and 2 more "
                "in t.csv; got --category tree. Name a column of inputs."),
    "named twice": ({"kind=ash": np.arange(20.0)}, {}, "expected different names of the columns of inputs and of "
                    "categories; got 'kind=ash' twice for t.csv. Rename a column."),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_is_wrong_with_a_column(name: str, frame: pandas.DataFrame) -> None:
    changed, options, words = REFUSED[name]
    table = frame.assign(**changed)
    table.to_csv(TABLE, index=False)
    with pytest.raises(DataError) as error:
        InputColumns.of(table, TABLE, list(table), **options)
    assert words in str(error.value)


@pytest.mark.parametrize(("text", "number"), [
    ("$1,234.50", 1234.5), ("-3 %", -3), ("1 234 EUR", 1234), ("1.234,50 €", 1234.5), ("12,5", 12.5), ("£7", 7),
    ("12", None),
    ("2024-01-31", 8796), ("31.01.2024", 8796), ("01/31/2024", 8796), ("2024-01-31 10:00", 8796),
    ("u-00017", None), ("A12", None),
])
def test_lines_that_make_numbers_of_dates_and_amounts(text: str, number: float | None) -> None:
    """They are run as they are printed."""
    frame = pandas.DataFrame({"kind": [text, None, text]})
    line = as_numbers(frame["kind"])
    assert (line == "") == (number is None)
    if number is not None:
        exec(line.partition("in pandas by ")[2].removesuffix("."), {"pandas": pandas, "frame": frame})
        assert frame["kind"].tolist()[::2] == [number, number] and frame["kind"].isna()[1]
    assert as_numbers(pandas.Series([text, "other"], name="kind")) == ""


@pytest.mark.parametrize("values", [
    ["2000-01-01", "2000-01-11", "1999-12-31"], [datetime.date(2000, 1, 1), datetime.date(2000, 1, 11),
                                                 datetime.date(1999, 12, 31)],
    pandas.to_datetime(["2000-01-01", "2000-01-11", "1999-12-31"]),
    ["2000-01-01T00:00Z", "2000-01-11 02:00:00.0+02:00", "1999-12-31"],
    pandas.Categorical(["2000-01-01", "2000-01-11", "1999-12-31"]),
], ids=["text", "objects", "pandas", "zones", "categories"])
def test_dates_are_days(values: Any, frame: pandas.DataFrame) -> None:
    column = pandas.Series(values)
    table = frame[["width"]].assign(kind=column[np.arange(20) % 3].to_numpy())
    found = InputColumns.of(table, TABLE, list(table))
    assert found.features == ["width", "kind"] and str(found) == "Inputs: kind as days since 2000-01-01"
    rows = found.rows(table, TABLE)
    assert rows["kind"].tolist()[:3] == [0, 10, -1]
    assert found.shown(rows)["kind"].tolist()[:3] == ["2000-01-01", "2000-01-11", "1999-12-31"]
    assert InputColumns.of(table.astype({"kind": str}), TABLE, list(table), ["kind"]).categories["kind"]


def test_dates_far_from_today_and_a_single_category() -> None:
    """A date that stands for none; pandas before 3 has nanoseconds for 292 years alone."""
    column = pandas.Series(np.array(["9999-12-31", "0001-01-01"], "datetime64[s]"))
    assert days(column).tolist() == [2_921_939, -730_119]
    assert dates(pandas.Series(days(column))).tolist() == ["9999-12-31", "0001-01-01"]
    assert days(pandas.Series(pandas.Categorical(["2000-01-02"] * 2))).tolist() == [1, 1]


def test_dates_number_no_rows_and_a_filled_gap_gives_the_others_no_time(frame: pandas.DataFrame) -> None:
    daily = frame.assign(kind=pandas.date_range("2020-01-01", periods=20))[["width", "kind", "price"]]
    found = InputColumns.of(daily, TABLE, ["width", "kind"])
    rows = found.rows(daily, TABLE)
    assert TrainingExamples(x=rows, y=daily["price"].to_numpy(), named=by_row(rows), targets=["price"], classes=False,
                            columns=found).numbering == []
    table = daily.assign(kind=["2000-01-01", "2000-01-02", None, "2000-01-01"] * 5)
    found = InputColumns.of(table, TABLE, ["width", "kind"], fill=True)
    assert found.shown(found.rows(table, TABLE))["kind"].tolist()[:3] == ["2000-01-01", "2000-01-02", None]


def test_later_dates_and_gaps(frame: pandas.DataFrame) -> None:
    table = frame[["width"]].assign(kind=["2000-01-01", "2000-01-11 12:00", None, None] * 5)
    found = InputColumns.of(table, TABLE, list(table), fill=True)
    rows = found.rows(table, TABLE)
    assert rows["kind"].tolist()[:4] == [0, 10.5, 5.25, 5.25] and rows["kind missing"].tolist()[:4] == [0, 0, 1, 1]
    assert found.shown(rows)["kind"].tolist()[:3] == ["2000-01-01 00:00:00", "2000-01-11 12:00:00", None]
    assert np.isnan(days(pandas.Series(["now", "today", "2020", "2020-01"]))).all()
    later = table.assign(kind=["2001-01-01", "soon", 7, None] * 5)
    with pytest.raises(DataError, match=r"expected dates such as .*; got 'soon' in row 1"):
        found.rows(later, TABLE)
    assert found.rows(later, TABLE, skip=True)["kind"].isna().tolist()[:4] == [False, True, True, False]
    assert found.unknown_words(later).startswith("'soon' in rows 1, 5, ")


@pytest.mark.parametrize("values", [pandas.Categorical([1, 2] * 10), pandas.Series(["1", "2"] * 10, dtype=object)])
def test_digits_can_be_names(values: pandas.Categorical | pandas.Series, frame: pandas.DataFrame) -> None:
    """In a column of categories of pandas, and where they are asked to be."""
    table = frame[["width"]].assign(kind=values)
    options = {} if isinstance(values, pandas.Categorical) else {"categories": ["kind"]}
    found = InputColumns.of(table, TABLE, list(table), **options)
    assert found.features == ["width", "kind=1", "kind=2"]
    assert np.array_equal(found.rows(table, TABLE).to_numpy()[:3, 1:], [[1, 0], [0, 1], [1, 0]])


def test_truth_values_stay_numbers(frame: pandas.DataFrame) -> None:
    table = frame[["width"]].assign(kind=[True, False] * 10)
    assert InputColumns.of(table, TABLE, list(table)).features == ["width", "kind"]


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_truth_values_may_be_missing(ending: str, frame: pandas.DataFrame) -> None:
    """Objects in pandas, as are columns of a later table without any value."""
    if ending == ".parquet":
        pytest.importorskip("pyarrow")
    flags = frame[["width"]].assign(kind=[True, None, False, True] * 5)
    getattr(flags, f"to_{ending[1:]}")("own" + ending, index=False)
    getattr(flags.assign(kind=None), f"to_{ending[1:]}")("none" + ending, index=False)
    table, none = (read_table(Path(name + ending), "rows") for name in ("own", "none"))
    found = InputColumns.of(table, TABLE, list(table), fill=True)
    assert found.features == ["width", "kind", "kind missing"]
    assert np.allclose(found.rows(table, TABLE).to_numpy()[:4, 1:], [[1, 0], [2 / 3, 1], [0, 0], [1, 0]])
    assert np.allclose(found.rows(none, TABLE).to_numpy()[:, 1:], [2 / 3, 1])


@pytest.mark.parametrize("option", [["--category", "0"], ["--fill-missing"]])
def test_arrays_have_neither(option: list[str], frame: pandas.DataFrame, capsys: pytest.CaptureFixture) -> None:
    np.savez("a.npz", X=frame[["width"]].to_numpy(), y=frame["price"].to_numpy())
    assert cli.main(["fit", "a.npz", *option]) == 1
    words = "expected a table, for --category COLUMN, --fill-missing and --exposure COLUMN; got a.npz. Leave them out."
    assert words in capsys.readouterr().err
