"""Data files of a network of one's own: arrays, tables, and folders of images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
from ntk_laplace.tools.cli.table_columns import (
    input_columns,
    require_no_dropped,
    require_targets,
    training_columns,
)
from ntk_laplace.tools.cli.tables import is_table, read_table
from ntk_laplace.tools.cli.values import named_classes, numbers, scored_classes, scored_numbers, target_classes


@dataclass
class Files:
    """The data files of one command: tables, folders of images, ``.npz`` and ``.pt`` files of arrays.

    All have the columns, or the classes and the size of images, of the training data, which are read first.
    """

    dtype: torch.dtype  # of floating numbers
    likelihood: Likelihood  # names in the column of the targets become class numbers if it classifies
    targets: str | None = None  # of files of arrays, as in `load_data`
    columns: Sequence[str] | None = None  # of a table's targets
    group: str | None = None  # the column, or the array, of the sources of the training data; nowhere an input
    dropped: Sequence[str] | None = None  # other columns of a table that are no inputs
    # of the training data:
    features: list[str] | None = field(default=None, init=False)  # names of a table's columns of inputs
    classes: list[str] | None = field(default=None, init=False)  # sorted names; those of several columns of targets
    shape: tuple[int, ...] | None = field(default=None, init=False)  # of images
    training_names: list[str] | None = field(default=None, init=False)  # of images
    sources: list[Any] | None = field(default=None, init=False)  # if `group` is given
    # of the file that `inputs` has read:
    names: list[str] | None = field(default=None, init=False)  # of images
    others: list[str] = field(default_factory=list, init=False)  # what it has in place of targets

    def training(self, path: Path) -> tuple[Inputs, Tensor]:
        """Inputs and targets of the training data (DataError if the file cannot be read as such)."""
        what = "the training data"
        if is_table(path) and not path.is_dir():
            frame = self._frame(path, what)
            frame, columns, self.sources = training_columns(frame, path, self.columns, self.group, self.dropped)
            self.features = input_columns(frame, path, columns, None)
            self.classes = columns if len(columns) > 1 else None
            if self.likelihood.classifies and len(columns) == 1 and named_classes(frame[columns[0]]):
                self.classes = target_classes(frame[columns[0]], path, None)[1]
            return self._pair(frame, path, labeled=True)
        if not path.is_dir():
            require_no_dropped(path, self.dropped)
            self.sources = None if self.group is None else load_sources(path, self.group)
            return load_data(path, self.dtype, self.targets, what, self.group, by_name=True)
        if not self.likelihood.classifies:
            raise DataError("a likelihood of classes, for a folder of images", type(self.likelihood).__name__,
                            "Pass --likelihood categorical, or save arrays in an .npz file.")
        require_no_sources(path, self.group)
        require_no_dropped(path, self.dropped)
        found = read_images(path)
        self.classes, self.shape, self.training_names = found.classes, found.x.shape[1:], found.files
        return self._tensors(found)

    def data(self, path: Path, what: str) -> tuple[Inputs, Tensor]:
        """Inputs and targets of other data, which are like the training data (DataError)."""
        return self._read(path, what, labeled=True)

    def inputs(self, path: Path, what: str) -> tuple[Inputs, Tensor | None]:
        """Inputs of other data, and targets if the file has some that are known.

        A table or a folder may have targets in some rows alone: NaN, or the label -100, is in place of one that is
        missing, no number or no class of the training data. `others` has what the file has in its place.
        """
        self.others = []
        return self._read(path, what, labeled=False)

    def _read(self, path: Path, what: str, labeled: bool) -> tuple[Inputs, Any]:
        if path.is_dir():
            return self._folder(path, labeled)
        if not is_table(path):
            return (load_data if labeled else load_inputs)(path, self.dtype, self.targets, what, self.group)
        unused = [name for name in (*(self.dropped or ()), self.group) if name is not None]
        frame = self._frame(path, what).drop(columns=unused, errors="ignore")
        if labeled:
            require_targets(frame, path, self.columns)
        return self._pair(frame, path, labeled)

    def _folder(self, path: Path, labeled: bool) -> tuple[Tensor, Any]:
        if self.shape is None:
            raise DataError("a file with the columns or arrays of the training data", f"the folder {path}",
                            "A folder of images needs one as --data too.")
        found = read_images(path, self.shape, self.classes, labeled)
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
        columns = list(self.columns or ())
        x = numbers(frame, path, input_columns(frame, path, columns, self.features))
        inputs = torch.tensor(x, dtype=self.dtype)  # row by row, as in other files: the last digits are the same
        if not columns or not set(columns) <= set(frame.columns):
            return inputs, None
        whole = all(is_integer_dtype(frame[name].dtype) for name in columns)
        classes = self.classes if len(columns) == 1 else None  # names of several targets are no classes
        if labeled and classes is not None:
            return inputs, torch.as_tensor(target_classes(frame[columns[0]], path, classes)[0])
        if labeled:
            missing = getattr(self.likelihood, "missing", None) is not None
            return inputs, self._targets(numbers(frame, path, columns, missing, "name another target"), whole)
        if classes is not None:
            number, self.others = scored_classes(frame[columns[0]].tolist(), classes)
            y, whole = np.where(number < 0, np.nan, number)[:, None], True
        else:
            y, self.others = scored_numbers(frame, columns)
        if np.isnan(y).all():
            return inputs, None
        labels = isinstance(self.likelihood, Categorical)
        return inputs, self._targets(np.where(np.isnan(y), MISSING_LABEL, y) if labels else y, whole)

    def _targets(self, y: NDArray[np.float64], whole: bool) -> Tensor:
        """Targets (N, columns) as a tensor; whole numbers of 64 bits as such."""
        whole = whole and bool((np.abs(y) < 2.0**63).all())
        targets = torch.as_tensor(y.astype(np.int64)) if whole else torch.tensor(y, dtype=self.dtype)
        return targets[:, 0] if y.shape[1] == 1 else targets
