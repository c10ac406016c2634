"""Examples of a file or folder like the training data of an estimator, to predict or to explain."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch
from torch import Tensor

from ntk_laplace.errors import DataError
from ntk_laplace.tools.cli.arrays import load_inputs
from ntk_laplace.tools.cli.estimator_file import Estimator
from ntk_laplace.tools.cli.examples import Examples, array_rows, by_row
from ntk_laplace.tools.cli.images import read_images
from ntk_laplace.tools.cli.table_columns import input_columns, require_no_dropped, without_dropped
from ntk_laplace.tools.cli.tables import is_table, read_table
from ntk_laplace.tools.cli.values import scored_classes, scored_numbers
from ntk_laplace.tools.cli.words import first_few


def read_new(estimator: Estimator, options: argparse.Namespace, what: str) -> Examples:
    """Read the inputs that the options name; `what` says in messages what they are.

    DataError if they cannot be read, or columns, shapes or classes are others than in the training data.
    """
    path: Path = options.inputs
    if is_table(path):
        return _table(estimator, path, what, options.drop or (), options.skip_unknown)
    require_no_dropped(path, options.drop)
    if options.skip_unknown:
        raise DataError("a table, for --skip-unknown", f"{path}", "Leave it out.")
    return _folder(estimator, path) if path.is_dir() else _arrays(estimator, path, what)


def _table(estimator: Estimator, path: Path, what: str, dropped: Sequence[str], skip: bool) -> Examples:
    columns, targets = estimator.columns, estimator.targets
    if columns is None:
        raise _another(estimator, "the table", path)
    # what the fit did not use as inputs; later tables may be with or without it
    unused = {name for name in (estimator.group, *estimator.dropped) if name is not None} - set(columns.names)
    as_written = all(isinstance(label, str) for label in getattr(estimator.model, "classes_", [None]))
    frame = read_table(path, what, [*columns.categories, *(targets if as_written else ())])
    frame = frame.drop(columns=list(unused), errors="ignore")
    frame = without_dropped(frame, path, [name for name in dropped if name not in unused], targets)
    input_columns(frame, path, targets, columns.names, drop=True)
    x, why = columns.rows(frame, path, skip), ""
    skipped = np.flatnonzero(x.isna().any(axis=1)).tolist()
    if skipped:
        why = columns.unknown_words(frame)
        if len(skipped) == len(x):
            raise DataError(f"a row of {path} whose inputs the model knows", why, "Correct the values.")
        x, frame = x.drop(index=skipped), frame.drop(index=skipped)
    found = _examples(estimator, x, frame[targets] if set(targets) <= set(frame.columns) else None)
    return replace(found, skipped=skipped, why=why)


def _arrays(estimator: Estimator, path: Path, what: str) -> Examples:
    if estimator.columns is not None:
        raise _another(estimator, "the arrays", path)
    inputs, y = load_inputs(path, torch.float64, what=what)
    x = array_rows(path, inputs, y, ("X",))
    assert isinstance(inputs, Tensor)
    shape = (estimator.model.n_features_in_,) if estimator.shape is None else estimator.shape
    own = inputs.shape[1:] if inputs.ndim > 1 else x.shape[1:]
    if own != shape:
        raise DataError(f"X of shape {_of(shape)}, as in the training data", f"{_of(own)} in {path}",
                        "Save the inputs as those of the training.")
    if y is not None and not estimator.classifies and y.numel() != len(y) * len(estimator.targets):
        raise DataError(f"y of {len(estimator.targets)} targets", f"shape {tuple(y.shape)} in {path}",
                        "Save the targets as those of the training, or none.")
    return _examples(estimator, x, None if y is None else pandas.DataFrame(y.reshape(len(y), -1).numpy()))


def _folder(estimator: Estimator, path: Path) -> Examples:
    shape = estimator.shape
    if shape is None or len(shape) != 3 or not estimator.classifies:
        raise _another(estimator, "the folder", path)
    found = read_images(path, shape, estimator.outputs, labeled=False)
    y = None if found.y is None else _labels(estimator, found.y)
    return Examples(found.rows, y, pandas.DataFrame({"file": found.files}), others=found.others)


def _examples(estimator: Estimator, x: pandas.DataFrame, targets: pandas.DataFrame | None) -> Examples:
    """Examples with the targets that are known, of the columns of a table."""
    y: Any
    if targets is None:
        return Examples(x, None, by_row(x))
    if estimator.classifies:
        number, others = scored_classes(targets.iloc[:, 0].tolist(), np.asarray(estimator.model.classes_).tolist())
        y = _labels(estimator, number)
    else:
        y, others = scored_numbers(targets, list(targets))
        y = y[:, 0] if len(estimator.targets) == 1 else y
    return Examples(x, y, by_row(x), others=others)


def _labels(estimator: Estimator, number: Any) -> Any:
    """Labels by number; None for -1."""
    classes = np.asarray(getattr(estimator.model, "classes_", ()))
    return classes[number] if (number >= 0).all() else np.where(number < 0, None, classes.astype(object)[number])


def _another(estimator: Estimator, what: str, path: Path) -> DataError:
    """The error for data of another kind than the training data."""
    if estimator.columns is not None:
        names = estimator.columns.names
        expected = f"a table with the {len(names)} input columns {first_few(names)}"
    elif estimator.shape is None:
        expected = f"an .npz or .pt file with X of shape {_of((estimator.model.n_features_in_,))}"
    else:
        expected = f"images or X of shape {_of(estimator.shape)}"
    return DataError(f"{expected}, as the training data were", f"{what} {path}",
                     "Save the inputs as those of the training.")


def _of(shape: Sequence[int]) -> str:
    return f"(N, {', '.join(map(str, shape))})"
