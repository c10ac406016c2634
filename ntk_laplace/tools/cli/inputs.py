"""Data files of the command: arrays, tables, and folders of images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch
from numpy.typing import NDArray
from pandas.api.types import is_integer_dtype
from torch import Tensor

from ntk_laplace.errors import DataError
from ntk_laplace.model.data import Inputs
from ntk_laplace.model.likelihoods import MISSING_LABEL, Categorical, Likelihood
from ntk_laplace.tools.cli.arrays import load_data, load_inputs, load_sources
from ntk_laplace.tools.cli.images import ImageFolder, read_images, require_no_sources
from ntk_laplace.tools.cli.tables import (
    input_columns,
    is_table,
    named_classes,
    numbers,
    read_table,
    require_columns,
    require_no_dropped,
    scored_classes,
    scored_numbers,
    target_classes,
    without_dropped,
    without_sources,
)


class Files:
    """The data files of one command: tables, folders of images, ``.npz`` and ``.pt`` files of arrays.

    All have the columns, or the classes and the size of images, of the training data.

    Parameters
    ----------
    dtype : torch.dtype
        Of floating numbers.
    likelihood : Likelihood
        Names in the column of the targets become class numbers if it classifies.
    targets : str, optional
        Of files of arrays, as in `load_data`.
    columns : sequence of str, optional
        Columns of a table's targets.
    group : str, optional
        The column, or the array, of the sources of the training data; in no file it is an input.
    dropped : sequence of str, optional
        Other columns of a table that are no inputs.

    Attributes
    ----------
    features : list of str or None
        Names of the input columns of the training data; None if these are no table.
    classes : list of str or None
        Names of the classes, sorted, if the training data have names; names of the columns of several targets.
    names : list of str or None
        Of the images that `inputs` has read.
    training_names : list of str or None
        Of the images of the training data.
    sources : list or None
        Of the training data, if `group` is given.
    others : list of str
        What the file that `inputs` has read has in place of targets.
    """

    def __init__(
        self, dtype: torch.dtype, likelihood: Likelihood, targets: str | None = None,
        columns: Sequence[str] | None = None, group: str | None = None, dropped: Sequence[str] | None = None,
    ) -> None:
        self.dtype, self.likelihood, self.targets, self.columns = dtype, likelihood, targets, columns
        self.features: list[str] | None = None
        self.classes: list[str] | None = None
        self.names: list[str] | None = None
        self.training_names: list[str] | None = None
        self.group, self.dropped = group, dropped
        self.sources: list[Any] | None = None
        self.others: list[str] = []
        self._shape: tuple[int, ...] | None = None  # of the images of the training data

    def training(self, path: Path) -> tuple[Inputs, Tensor]:
        """Inputs and targets of the training data.

        Raises
        ------
        DataError
            If the file cannot be read as such.
        """
        what = "the training data"
        if path.is_dir():
            if not self.likelihood.classifies:
                raise DataError("a likelihood of classes, for a folder of images", type(self.likelihood).__name__,
                                "Pass --likelihood categorical, or save arrays in an .npz file.")
            require_no_sources(path, self.group)
            require_no_dropped(path, self.dropped)
            found = read_images(path)
            self.classes, self._shape, self.training_names = found.classes, found.x.shape[1:], found.files
            return self._tensors(found)
        if not is_table(path):
            require_no_dropped(path, self.dropped)
            self.sources = None if self.group is None else load_sources(path, self.group)
            return load_data(path, self.dtype, self.targets, what, self.group, by_name=True)
        frame = self._frame(path, what)
        frame, self.sources = without_sources(frame, path, self.group, self.columns)
        columns = require_columns(frame, path, self.columns)
        frame = without_dropped(frame, path, self.dropped, columns)
        self.features = input_columns(frame, path, columns, None)
        self.classes = columns if len(columns) > 1 else None
        if self.likelihood.classifies and len(columns) == 1 and named_classes(frame[columns[0]]):
            self.classes = target_classes(frame[columns[0]], path, None)[1]
        return self._pair(frame, path, labeled=True)

    def data(self, path: Path, what: str) -> tuple[Inputs, Tensor]:
        """Inputs and targets of other data; read `training` first.

        Raises
        ------
        DataError
            As in `training`; or if the columns, the classes or the images differ from the training data's.
        """
        return self._read(path, what, labeled=True)

    def inputs(self, path: Path, what: str) -> tuple[Inputs, Tensor | None]:
        """Inputs of other data, and targets if the file has some that are known; read `training` first.

        A table may have targets in some rows alone: NaN, or the label -100, is in place of one that is missing, no
        number or no class of the training data. `others` has what the table has in its place.

        Raises
        ------
        DataError
            As in `data`, but not for targets of a table or a folder.
        """
        self.others = []
        return self._read(path, what, labeled=False)

    def _read(self, path: Path, what: str, labeled: bool) -> tuple[Inputs, Any]:
        if path.is_dir():
            return self._folder(path, labeled)
        if not is_table(path):
            return (load_data if labeled else load_inputs)(path, self.dtype, self.targets, what, self.group)
        frame = self._frame(path, what)
        frame = frame.drop(columns=[*(self.dropped or ()), *([] if self.group is None else [self.group])],
                           errors="ignore")
        if labeled:
            require_columns(frame, path, self.columns)
        return self._pair(frame, path, labeled)

    def _folder(self, path: Path, labeled: bool) -> tuple[Tensor, Any]:
        if self._shape is None:
            raise DataError("a file with the columns or arrays of the training data", f"the folder {path}",
                            "A folder of images needs one as --data too.")
        found = read_images(path, self._shape, self.classes, labeled)
        self.names, self.others = found.files, found.others
        x, y = self._tensors(found)
        return x, None if y is None or (y < 0).all() else y.masked_fill(y < 0, MISSING_LABEL)

    def _tensors(self, found: ImageFolder) -> tuple[Tensor, Any]:
        return torch.as_tensor(found.x).to(self.dtype), None if found.y is None else torch.as_tensor(found.y)

    def _frame(self, path: Path, what: str) -> pandas.DataFrame:
        frame = read_table(path, what)
        if self.targets is not None:
            raise DataError("--target COLUMN, for a table", f"--targets {self.targets} and {path}",
                            "--targets names an array of an .npz or .pt file.")
        return frame

    def _pair(self, frame: pandas.DataFrame, path: Path, labeled: bool) -> tuple[Tensor, Any]:
        """Inputs of a table, and its targets if it has all their columns, and some of them unless they are needed."""
        x = numbers(frame, path, input_columns(frame, path, self.columns, self.features))
        inputs = torch.tensor(x, dtype=self.dtype)  # row by row, as in other files: the last digits are the same
        columns = list(self.columns or ())
        if not columns or not set(columns) <= set(frame.columns):
            return inputs, None
        if not labeled:
            return inputs, self._known(frame, columns)
        if self.classes is not None and len(columns) == 1:
            return inputs, torch.as_tensor(target_classes(frame[columns[0]], path, self.classes)[0])
        missing = getattr(self.likelihood, "missing", None) is not None
        y = numbers(frame, path, columns, missing, "name another target")
        return inputs, self._targets(y, all(is_integer_dtype(frame[name].dtype) for name in columns))

    def _known(self, frame: pandas.DataFrame, columns: list[str]) -> Tensor | None:
        """Targets of a table to compare predictions with; None if there is none."""
        named = self.classes is not None and len(columns) == 1
        if named:
            number, self.others = scored_classes(frame[columns[0]].tolist(), self.classes or ())
            y = np.where(number < 0, np.nan, number)[:, None]
        else:
            y, self.others = scored_numbers(frame, columns)
        if np.isnan(y).all():
            return None
        whole = named or all(is_integer_dtype(frame[name].dtype) for name in columns)
        return self._targets(np.where(np.isnan(y), MISSING_LABEL, y) if isinstance(self.likelihood, Categorical) else y,
                             whole)

    def _targets(self, y: NDArray[np.float64], whole: bool) -> Tensor:
        """Targets (N, columns) as a tensor; whole numbers of 64 bits as such."""
        whole = whole and bool((np.abs(y) < 2.0**63).all())
        targets = torch.as_tensor(y.astype(np.int64)) if whole else torch.tensor(y, dtype=self.dtype)
        return targets[:, 0] if y.shape[1] == 1 else targets
