"""Examples as rows of numbers, with their targets; and those that ``ntk-laplace fit`` trains on."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch
from numpy.typing import NDArray
from pandas.api.types import is_integer_dtype
from torch import Tensor

from ntk_laplace.errors import DataError
from ntk_laplace.tools.cli.arrays import load_data, load_sources
from ntk_laplace.tools.cli.columns import InputColumns
from ntk_laplace.tools.cli.images import read_images, require_no_sources
from ntk_laplace.tools.cli.table_columns import input_columns, require_no_dropped, training_columns
from ntk_laplace.tools.cli.tables import is_table, read_table
from ntk_laplace.tools.cli.values import (
    named_classes,
    numbers,
    require_64_bits,
    require_no_numbers,
    target_classes,
)
from ntk_laplace.tools.estimators.regressor import COUNTS
from ntk_laplace.tools.estimators.tables import require_exposures, require_magnitudes

_FEWEST = 10  # rows
_FEW = 10  # whole numbers that are classes


@dataclass(frozen=True)
class Examples:
    """Inputs of an estimator, and their targets where they are known."""

    x: pandas.DataFrame  # (n, features); columns of arrays and images are numbered: estimators take arrays too
    # (n,) labels or real numbers, (n, targets) for several; None or NaN for one that the model does not know
    y: NDArray[Any] | None
    named: pandas.DataFrame  # (n, 1), what names an example in the written predictions: its row, or its file
    sources: NDArray[Any] | None = None  # (n,), the source of each example
    others: list[str] = field(default_factory=list)  # what the file has in place of a known label, or of a number
    skipped: list[int] = field(default_factory=list)  # other rows of the file, whose inputs the model does not know
    why: str = ""  # what these rows have

    @property
    def known(self) -> NDArray[np.bool_]:
        """Whether there is each target, of the shape of y (n,) or (n, targets); one target if y is None."""
        return np.zeros(len(self.x), bool) if self.y is None else ~pandas.isna(self.y)

    @property
    def names(self) -> list[str]:
        """Their names in words: a file, or "row 3" for a row of a table or of arrays, counted from 0."""
        (column,) = self.named
        return [str(name) if column == "file" else f"{column} {name}" for name in self.named[column]]

    def subset(self, rows: Any) -> Any:
        """These rows alone, of the same type."""
        y, sources = (None if own is None else own[rows] for own in (self.y, self.sources))
        return replace(self, x=self.x.iloc[rows], y=y, named=self.named.iloc[rows], sources=sources)

    def whole(self, predictions: pandas.DataFrame) -> pandas.DataFrame:
        """A table of predictions with all rows of the file; those of skipped rows are empty."""
        if not self.skipped:
            return predictions
        rows = pandas.RangeIndex(len(predictions) + len(self.skipped), name="row")
        return predictions.astype(object).set_index("row").reindex(rows).reset_index()  # objects keep whole numbers

    @property
    def skipped_words(self) -> str:
        """How many rows were skipped, and why; empty if none was."""
        count = len(self.x) + len(self.skipped)
        return f"No predictions of {len(self.skipped):,} of {count:,} rows: {self.why}" if self.skipped else ""


@dataclass(frozen=True, kw_only=True)
class TrainingExamples(Examples):
    """Examples to train on, all with targets, and what they are."""

    y: NDArray[Any]
    targets: list[str]  # their names
    classes: bool  # whether targets are labels
    shape: tuple[int, ...] | None = None  # (channels, height, width), or another shape, of inputs that are no rows
    columns: InputColumns | None = None  # of a table: what its columns of inputs are taken as
    counts: bool = False  # whether --likelihood or --exposure says that targets are

    def __str__(self) -> str:
        """What they are taken as."""
        values = np.unique(self.y)
        kind, other = f"{len(values)} classes" if self.classes else "real numbers", "--task says otherwise"
        if self.counts:
            kind, other = "counts", "--likelihood says otherwise"
        elif not self.classes and (values == np.floor(values)).all():
            if self.y.ndim == 1 and len(values) <= _FEW:
                other = f"{len(values)} whole ones alone, which --task classes takes as classes"
            elif values[0] >= 0:
                other = "whole ones alone, which --likelihood negative-binomial takes as counts"
        columns = self.x.shape[1]
        inputs = f"{columns} input{'s' * (columns != 1)}" if self.shape is None else f"inputs of shape {self.shape}"
        are = "are" if len(self.targets) > 1 else "is"
        return f"{', '.join(self.targets)} {are} taken as {kind} ({other}), from {inputs}"

    @property
    def numbering(self) -> list[str]:
        """The columns of a table that number the rows, in any order; not those of dates."""
        return [] if self.columns is None else [
            str(name) for name, column in self.x.items() if name not in self.columns.dates
            and np.array_equal(np.sort(column.to_numpy()) - column.min(), np.arange(len(self.x)))]


def by_row(x: pandas.DataFrame) -> pandas.DataFrame:
    """Names of examples that have the number of their row alone."""
    return pandas.DataFrame({"row": x.index})


def read_examples(options: argparse.Namespace) -> TrainingExamples:
    """The examples of the file or folder that the options name (DataError if it cannot be read as such)."""
    path: Path = options.data
    if is_table(path):
        found = _table(path, options)
    else:
        require_no_dropped(path, options.drop)
        if options.category or options.fill_missing or options.exposure:
            raise DataError("a table, for --category COLUMN, --fill-missing and --exposure COLUMN", f"{path}",
                            "Leave them out.")
        found = (_images if path.is_dir() else _arrays)(path, options)
    count = len(found.y)
    if count < _FEWEST:
        raise DataError(f"at least {_FEWEST} rows", f"{count} in {path}", "Add rows.")
    for name, column in zip(found.targets, found.y.reshape(count, -1).T, strict=True):
        if (column == column[0]).all():
            kind, other = ("classes", "another class") if found.classes else ("values", "another value")
            raise DataError(f"at least two {kind} in {name!r} of {path}",
                            f"{column.tolist()[0]!r} in each of {count:,} rows",
                            f"Add rows of {other}, or name another target.")
    names = np.unique(found.y).tolist() if found.classes else []
    if 2 * len(names) > count:
        raise DataError(f"classes of two rows each in the mean in {found.targets[0]!r} of {path}",
                        f"{len(names):,} in {count:,} rows, such as {names[0]!r}",
                        "Numbers are no classes with --task regression. Or name another target.")
    return replace(found, counts=options.likelihood in COUNTS or options.exposure is not None)


def _table(path: Path, options: argparse.Namespace) -> TrainingExamples:
    frame = read_table(path, "the data", options.category or ())
    frame, targets, sources = training_columns(frame, path, options.target, options.source, options.drop)
    columns = InputColumns.of(frame, path, input_columns(frame, path, targets, None), options.category or (),
                              options.fill_missing)
    if options.exposure is not None:
        columns.require_number("--exposure", options.exposure, path)
    classes = len(targets) == 1 and _classifies(frame[targets[0]], path, options)
    if options.task == "classes" and not classes:
        raise DataError("one target that is a class", f"--target {' --target '.join(targets)}",
                        "Fit one of them at a time.")
    if classes:
        y = table_labels(frame[targets[0]], path)
    else:
        y = numbers(frame, path, targets, other="name another target")
        require_magnitudes(y, [f"column {name!r} of {path}" for name in targets])
        y = y[:, 0] if len(targets) == 1 else y
    x = columns.rows(frame, path)
    if options.exposure is not None:
        require_exposures(x[options.exposure].to_numpy(), f"column {options.exposure!r} of {path}")
    return TrainingExamples(x=x, y=y, named=by_row(x), targets=targets, classes=classes, columns=columns,
                            sources=None if sources is None else np.array(sources, object))


def _arrays(path: Path, options: argparse.Namespace) -> TrainingExamples:
    task, group = options.task, options.source
    inputs, y = load_data(path, torch.float64, what="the data")
    x = array_rows(path, inputs, y)
    sources = None if group is None else np.array(load_sources(path, group), object)
    if sources is not None and len(sources) != len(y):
        raise DataError(f"the sources of {len(y):,} examples", f"{len(sources):,} in {path}", "Save one for each.")
    columns, classes = y.reshape(len(y), -1).numpy(), False
    if columns.shape[1] == 1:
        column = pandas.Series(columns[:, 0], name="y")
        classes, targets = _classifies(column, path, options), ["y"]
        values = table_labels(column, path) if classes else column.to_numpy(np.float64)
    elif task == "classes" or y.ndim > 2:
        raise DataError("y of shape (N,), or (N, targets) of real numbers", f"shape {tuple(y.shape)} in {path}",
                        "Save one class number for each row of X.")
    else:
        values, targets = columns.astype(np.float64), [f"y{index}" for index in range(columns.shape[1])]
    assert isinstance(inputs, Tensor)
    shape = tuple(inputs.shape[1:]) if inputs.ndim > 2 else None
    return TrainingExamples(x=x, y=values, named=by_row(x), targets=targets, classes=classes, shape=shape,
                            sources=sources)


def array_rows(path: Path, inputs: Any, y: Tensor | None, finite: Sequence[str] = ("X", "y")) -> pandas.DataFrame:
    """X of a file of arrays as rows of numbers.

    Refuse no rows, no columns, X and y of different examples, and numbers that are not finite (DataError).
    """
    if inputs.ndim > 1 and not inputs[:1].numel() and len(inputs):
        raise DataError("columns of inputs in X", f"shape {tuple(inputs.shape)} in {path}",
                        "Save one column for each feature.")
    if len(inputs) == 0 or (y is not None and len(inputs) != len(y)):
        got = f"{len(inputs)}" if y is None else f"{len(inputs)} and {len(y)}"
        raise DataError("as many rows of X as of y, at least one", f"{got} in {path}",
                        "Save both for the same examples.")
    for name, values in {"X": inputs, "y": y}.items():
        if name in finite and values is not None and not values.isfinite().all():
            row = int((~values.isfinite()).reshape(len(values), -1).any(1).nonzero()[0])
            raise DataError(f"finite numbers in {name} of {path}", f"none in row {row}, counted from 0",
                            "Correct the value, or remove the row.")
    return pandas.DataFrame(inputs.reshape(len(inputs), -1).double().numpy())


def _images(path: Path, options: argparse.Namespace) -> TrainingExamples:
    task, group = options.task, options.source
    if task == "regression":
        raise DataError("a table or arrays, for regression", f"the folder {path}",
                        "The names in a folder of images are classes.")
    require_no_sources(path, group)
    found = read_images(path)
    y = np.array(found.classes, object)[found.y]
    return TrainingExamples(x=found.rows, y=y, named=pandas.DataFrame({"file": found.files}), targets=["folder"],
                            classes=True, shape=found.x.shape[1:])


def _classifies(column: pandas.Series, path: Path, options: argparse.Namespace) -> bool:
    """Whether targets are classes; with --likelihood, which is that of numbers, only names are."""
    if options.task is not None:
        return bool(options.task == "classes")
    if named_classes(column):
        require_64_bits(column, path, "take them as names of classes, --task classes")
        require_no_numbers(column, path, "take all as names of classes, --task classes, or name another target")
    few = is_integer_dtype(column.dtype) and column.nunique() <= _FEW
    return named_classes(column) or (few and options.likelihood is None and options.exposure is None)


def table_labels(column: pandas.Series, path: Path) -> NDArray[Any]:
    """Labels of a column as text, or as whole numbers; refuse a missing value, and a fraction (DataError)."""
    if named_classes(column):
        numbered, names = target_classes(column, path, None)
        return np.array(names, object)[numbered]
    values = numbers(column.to_frame(), path, [str(column.name)])[:, 0]
    if is_integer_dtype(column.dtype):
        return np.array(column.tolist())  # all digits, which a float may not have
    for wrong, what, remedy in (
        (values != np.floor(values), "names or whole numbers",
         "Correct the value; fit takes fractions with --task regression."),
        (np.abs(values) >= 2.0**63, "whole numbers below 2^63",
         "Write them as names; fit takes them as numbers with --task regression."),
    ):
        if wrong.any():
            row = int(np.argmax(wrong))
            raise DataError(f"{what} as classes in column {column.name!r} of {path}",
                            f"{values[row]:g} in row {row}", remedy)
    return values.astype(np.int64)
