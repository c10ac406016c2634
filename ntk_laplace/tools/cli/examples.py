"""The examples that ``ntk-laplace fit`` trains on: a table, arrays or images as rows of numbers, and their targets."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch
from numpy.typing import NDArray
from pandas.api.types import is_integer_dtype
from torch import Tensor

import ntk_laplace as ntkl
from ntk_laplace.tools.cli.arrays import load_data, load_inputs, load_sources
from ntk_laplace.tools.cli.columns import InputColumns
from ntk_laplace.tools.cli.images import read_images, require_no_sources
from ntk_laplace.tools.cli.tables import (
    input_columns,
    is_table,
    named_classes,
    numbers,
    read_table,
    require_64_bits,
    require_columns,
    require_no_dropped,
    require_no_numbers,
    target_classes,
    without_dropped,
    without_sources,
)
from ntk_laplace.tools.estimators.tables import require_magnitudes

_FEWEST = 10  # rows
_FEW = 10  # whole numbers that are classes


@dataclass(frozen=True)
class Examples:
    """Inputs and targets.

    Attributes
    ----------
    x : DataFrame, (N, features)
        Columns of arrays and images are numbered, so that estimators take arrays too.
    y : ndarray, (N,), or (N, T) for several real targets
        Labels, or real numbers.
    classes : bool
        Whether targets are labels.
    targets : list of str
        Their names.
    named : DataFrame, (N, 1)
        What names an example in the written predictions: its row, or its file.
    shape : tuple of int, optional
        (channels, height, width), or another shape, of inputs that are no rows.
    sources : ndarray, (N,), optional
        The source of each example.
    columns : InputColumns, optional
        Of a table: what its columns of inputs are taken as.
    """

    x: pandas.DataFrame
    y: NDArray[Any]
    classes: bool
    targets: list[str]
    named: pandas.DataFrame
    shape: tuple[int, ...] | None = None
    sources: NDArray[Any] | None = None
    columns: InputColumns | None = None

    def __str__(self) -> str:
        """What they are taken as."""
        values = np.unique(self.y)
        kind, other = f"{len(values)} classes" if self.classes else "real numbers", "--task says otherwise"
        if not self.classes and self.y.ndim == 1 and len(values) <= _FEW and (values == np.floor(values)).all():
            other = f"{len(values)} whole ones alone, which --task classes takes as classes"
        names = ", ".join(self.targets)
        columns = self.x.shape[1]
        inputs = f"{columns} input{'s' * (columns != 1)}" if self.shape is None else f"inputs of shape {self.shape}"
        are = "are" if len(self.targets) > 1 else "is"
        return f"{names} {are} taken as {kind} ({other}), from {inputs}"

    def subset(self, rows: NDArray[np.intp]) -> Examples:
        """These examples alone."""
        sources = None if self.sources is None else self.sources[rows]
        return replace(self, x=self.x.iloc[rows], y=self.y[rows], named=self.named.iloc[rows], sources=sources)


def row_numbers(x: pandas.DataFrame) -> list[str]:
    """The columns that number the rows, in any order."""
    return [str(name) for name, column in x.items()
            if np.array_equal(np.sort(column.to_numpy()) - column.min(), np.arange(len(x)))]


def example_names(named: pandas.DataFrame) -> list[str]:
    """Names of examples in words: a file, or "row 3" for a row of a table or of arrays, counted from 0."""
    (column,) = named
    return [str(name) if column == "file" else f"{column} {name}" for name in named[column]]


def read_examples(options: argparse.Namespace) -> Examples:
    """The examples of the file or folder that the options name.

    Raises
    ------
    DataError
        If it cannot be read as such.
    """
    path: Path = options.data
    if is_table(path):
        found = _table(path, options)
    else:
        require_no_dropped(path, options.drop)
        if options.category or options.fill_missing:
            raise ntkl.DataError("a table, for --category COLUMN and --fill-missing", f"{path}", "Leave them out.")
        found = (_images if path.is_dir() else _arrays)(path, options.task, options.source)
    if len(found.y) < _FEWEST:
        raise ntkl.DataError(f"at least {_FEWEST} rows", f"{len(found.y)} in {path}", "Add rows.")
    columns = found.y.reshape(len(found.y), -1)
    for name, column in zip(found.targets, columns.T, strict=True):
        if (column == column[0]).all():
            kind, other = ("classes", "another class") if found.classes else ("values", "another value")
            raise ntkl.DataError(f"at least two {kind} in {name!r} of {path}",
                                 f"{column.tolist()[0]!r} in each of {len(column):,} rows",
                                 f"Add rows of {other}, or name another target.")
    if found.classes:
        _require_classes(found, path)
    return found


def _require_classes(found: Examples, path: Path) -> None:
    """Refuse classes of less than two examples each in the mean."""
    names, count = np.unique(found.y).tolist(), len(found.y)
    where = f"{found.targets[0]!r} of {path}"
    if 2 * len(names) > count:
        raise ntkl.DataError(f"classes of two rows each in the mean in {where}",
                             f"{len(names):,} in {count:,} rows, such as {names[0]!r}",
                             "Numbers are no classes with --task regression. Or name another target.")


def _table(path: Path, options: argparse.Namespace) -> Examples:
    frame = read_table(path, "the data", options.category or ())
    targets = require_columns(frame, path, options.target)
    frame, labels = without_sources(frame, path, options.source, targets)
    sources = None if labels is None else np.array(labels, dtype=object)
    frame = without_dropped(frame, path, options.drop, targets)
    columns = InputColumns.of(frame, path, input_columns(frame, path, targets, None), options.category or (),
                              options.fill_missing)
    classes = len(targets) == 1 and _classifies(frame[targets[0]], path, options.task)
    if options.task == "classes" and not classes:
        raise ntkl.DataError("one target that is a class", f"--target {' --target '.join(targets)}",
                             "Fit one of them at a time.")
    if classes:
        y = table_labels(frame[targets[0]], path)
    else:
        y = numbers(frame, path, targets, other="name another target")
        require_magnitudes(y, [f"column {name!r} of {path}" for name in targets])
    named = pandas.DataFrame({"row": range(len(frame))})
    return Examples(columns.rows(frame, path), y[:, 0] if y.ndim == 2 and len(targets) == 1 else y, classes, targets,
                    named, sources=sources, columns=columns)


def _arrays(path: Path, task: str | None, group: str | None) -> Examples:
    inputs, y = load_data(path, torch.float64, what="the data")
    assert isinstance(inputs, Tensor)
    _require_rows(path, inputs, y)
    sources = None if group is None else np.array(load_sources(path, group), dtype=object)
    if sources is not None and len(sources) != len(y):
        raise ntkl.DataError(f"the sources of {len(y):,} examples", f"{len(sources):,} in {path}", "Save one for each.")
    rows = inputs.reshape(len(inputs), -1)
    x = pandas.DataFrame(rows.double().numpy())
    shape = tuple(inputs.shape[1:]) if inputs.ndim > 2 else None
    named = pandas.DataFrame({"row": range(len(x))})
    single = y.reshape(len(y), -1)
    if single.shape[1] == 1:
        column = pandas.Series(single[:, 0].numpy(), name="y")
        classes = _classifies(column, path, task)
        labels = table_labels(column, path) if classes else column.to_numpy(np.float64)
        return Examples(x, labels, classes, ["y"], named, shape, sources)
    if task == "classes" or y.ndim > 2:
        raise ntkl.DataError("y of shape (N,), or (N, targets) of real numbers", f"shape {tuple(y.shape)} in {path}",
                             "Save one class number for each row of X.")
    return Examples(x, y.double().numpy(), False, [f"y{index}" for index in range(y.shape[1])], named, shape, sources)


def array_rows(path: Path, what: str) -> tuple[Tensor, Tensor | None]:
    """X of a file of arrays, and y if the file has it, which may be NaN.

    Raises
    ------
    DataError
        If the file cannot be read, X and y are not of the same examples, or a number in X is not finite.
    """
    inputs, y = load_inputs(path, torch.float64, what=what)
    assert isinstance(inputs, Tensor)
    _require_rows(path, inputs, y, ("X",))
    return inputs, y


def _require_rows(path: Path, inputs: Tensor, y: Tensor | None, finite: Sequence[str] = ("X", "y")) -> None:
    """Refuse no rows, no columns of inputs, X and y of different examples, and numbers that are not finite."""
    if inputs.ndim > 1 and not inputs[:1].numel() and len(inputs):
        raise ntkl.DataError("columns of inputs in X", f"shape {tuple(inputs.shape)} in {path}",
                             "Save one column for each feature.")
    if len(inputs) == 0 or (y is not None and len(inputs) != len(y)):
        got = f"{len(inputs)}" if y is None else f"{len(inputs)} and {len(y)}"
        raise ntkl.DataError("as many rows of X as of y, at least one", f"{got} in {path}",
                             "Save both for the same examples.")
    for name, values in {"X": inputs, "y": y}.items():
        if name in finite and values is not None and not values.isfinite().all():
            row = int((~values.isfinite()).reshape(len(values), -1).any(1).nonzero()[0])
            raise ntkl.DataError(f"finite numbers in {name} of {path}", f"none in row {row}, counted from 0",
                                 "Correct the value, or remove the row.")


def _images(path: Path, task: str | None, group: str | None) -> Examples:
    if task == "regression":
        raise ntkl.DataError("a table or arrays, for regression", f"the folder {path}",
                             "The names in a folder of images are classes.")
    require_no_sources(path, group)
    found = read_images(path)
    x = pandas.DataFrame(found.x.reshape(len(found.x), -1))
    y = np.array(found.classes, dtype=object)[found.y]
    return Examples(x, y, True, ["folder"], pandas.DataFrame({"file": found.files}), found.x.shape[1:])


def _classifies(column: pandas.Series, path: Path, task: str | None) -> bool:
    """Whether targets are classes."""
    if task is not None:
        return task == "classes"
    if named_classes(column):
        require_64_bits(column, path, "take them as names of classes, --task classes")
        require_no_numbers(column, path, "take all as names of classes, --task classes, or name another target")
    return named_classes(column) or (is_integer_dtype(column.dtype) and column.nunique() <= _FEW)


def table_labels(column: pandas.Series, path: Path) -> NDArray[Any]:
    """Labels of a column as text, or as whole numbers.

    Raises
    ------
    DataError
        If a value is missing, or is a number with a fraction.
    """
    if named_classes(column):
        numbered, names = target_classes(column, path, None)
        return np.array(names, dtype=object)[numbered]
    values = numbers(column.to_frame(), path, [str(column.name)])[:, 0]
    if is_integer_dtype(column.dtype):
        return np.array(column.tolist())  # all digits, which a float may not have
    if (values != np.floor(values)).any():
        row = int(np.argmax(values != np.floor(values)))
        raise ntkl.DataError(f"names or whole numbers as classes in column {column.name!r} of {path}",
                             f"{values[row]:g} in row {row}",
                             "Correct the value; fit takes fractions with --task regression.")
    if (np.abs(values) >= 2.0**63).any():
        row = int(np.argmax(np.abs(values)))
        raise ntkl.DataError(f"whole numbers below 2^63 as classes in column {column.name!r} of {path}",
                             f"{values[row]:g} in row {row}",
                             "Write them as names; fit takes them as numbers with --task regression.")
    return values.astype(np.int64)
