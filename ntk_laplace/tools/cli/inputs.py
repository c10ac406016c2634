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
from ntk_laplace.runtime.conversion import to_tensor
from ntk_laplace.tools.cli.arrays import load_data, load_inputs, load_sources
from ntk_laplace.tools.cli.images import read_images, require_no_sources
from ntk_laplace.tools.cli.table_columns import (
    input_columns,
    require_no_dropped,
    require_targets,
    training_columns,
)
from ntk_laplace.tools.cli.tables import is_table, read_table
from ntk_laplace.tools.cli.values import named_classes, numbers, scored_classes, scored_numbers, target_classes


@dataclass(frozen=True)
class Data:
    """Inputs and targets of a file, as the network and the likelihood take them."""

    x: Inputs  # several input arrays are a dict
    # None if no target is known; NaN or the label -100 stands for one that is missing, no number or no known class
    y: Tensor | None
    names: list[str] | None = None  # of images
    others: list[str] = field(default_factory=list)  # what the file has in place of known targets


@dataclass(frozen=True, kw_only=True)
class TrainingData(Data):
    """Data to train on, all with targets, and what later files are to be like."""

    y: Tensor
    features: list[str] | None = None  # names of a table's columns of inputs
    classes: list[str] | None = None  # sorted names; those of several columns of targets
    shape: tuple[int, ...] | None = None  # of images
    sources: list[Any] | None = None  # if `group` is given


@dataclass(frozen=True)
class Files:
    """How a command reads data files: tables, folders of images, ``.npz`` and ``.pt`` files of arrays."""

    dtype: torch.dtype  # of floating numbers
    likelihood: Likelihood  # names in the column of the targets become class numbers if it classifies
    targets: str | None = None  # of files of arrays, as in `load_data`
    columns: Sequence[str] | None = None  # of a table's targets
    group: str | None = None  # the column, or the array, of the sources of the training data; nowhere an input
    dropped: Sequence[str] | None = None  # other columns of a table that are no inputs

    def training(self, path: Path) -> TrainingData:
        """The training data (DataError if the file cannot be read as such)."""
        what = "the training data"
        if is_table(path) and not path.is_dir():
            frame, columns, sources = training_columns(
                self._frame(path, what), path, self.columns, self.group, self.dropped)
            features = input_columns(frame, path, columns, None)
            classes = columns if len(columns) > 1 else None
            if self.likelihood.classifies and len(columns) == 1 and named_classes(frame[columns[0]]):
                classes = target_classes(frame[columns[0]], path, None)[1]
            return TrainingData(self._inputs(frame, path, features),
                                y=self._targets(frame, path, columns, classes),
                                features=features, classes=classes, sources=sources)
        if not path.is_dir():
            require_no_dropped(path, self.dropped)
            sources = None if self.group is None else load_sources(path, self.group)
            x, y = load_data(path, self.dtype, self.targets, what, self.group, by_name=True)
            return TrainingData(x, y=y, sources=sources)
        if not self.likelihood.classifies:
            raise DataError("a likelihood of classes, for a folder of images", type(self.likelihood).__name__,
                            "Pass --likelihood categorical, or save arrays in an .npz file.")
        require_no_sources(path, self.group)
        require_no_dropped(path, self.dropped)
        found = read_images(path)
        return TrainingData(to_tensor(found.x).to(self.dtype), y=to_tensor(found.y), names=found.files,
                            classes=found.classes, shape=found.x.shape[1:])

    def like(self, training: TrainingData, path: Path, what: str, labeled: bool) -> Data:
        """Other data with the columns, or the classes and the size of images, of the training data (DataError).

        Unless they are to be `labeled`, a table or a folder may have targets in some rows alone, or in none.
        """
        if path.is_dir():
            return self._images(training, path, labeled)
        if not is_table(path):
            return Data(*(load_data if labeled else load_inputs)(path, self.dtype, self.targets, what, self.group))
        unused = [name for name in (*(self.dropped or ()), self.group) if name is not None]
        named = training.classes is not None and len(self.columns or ()) == 1  # which are as they are written
        frame = self._frame(path, what, (self.columns or ()) if named else ())
        frame = frame.drop(columns=unused, errors="ignore")
        columns = require_targets(frame, path, self.columns) if labeled else list(self.columns or ())
        classes = training.classes if len(columns) == 1 else None  # names of several targets are no classes
        x = self._inputs(frame, path, input_columns(frame, path, columns, training.features))
        if labeled:
            return Data(x, self._targets(frame, path, columns, classes))
        y, others = self._known_targets(frame, columns, classes)
        return Data(x, y, others=others)

    def _images(self, training: TrainingData, path: Path, labeled: bool) -> Data:
        if training.shape is None:
            raise DataError("a file with the columns or arrays of the training data", f"the folder {path}",
                            "A folder of images needs one as --data too.")
        found = read_images(path, training.shape, training.classes, labeled)
        y = None
        if found.y is not None and (found.y >= 0).any():
            y = to_tensor(np.where(found.y < 0, MISSING_LABEL, found.y))
        return Data(to_tensor(found.x).to(self.dtype), y, found.files, found.others)

    def _frame(self, path: Path, what: str, text: Sequence[str] = ()) -> pandas.DataFrame:
        frame = read_table(path, what, text)
        if self.targets is not None:
            raise DataError("--target COLUMN, for a table", f"--targets {self.targets} and {path}",
                            "--targets names an array of an .npz or .pt file.")
        return frame

    def _inputs(self, frame: pandas.DataFrame, path: Path, features: Sequence[str]) -> Tensor:
        # row by row, as in other files: the last digits are the same
        return torch.tensor(numbers(frame, path, features), dtype=self.dtype, device="cpu")

    def _targets(
        self, frame: pandas.DataFrame, path: Path, columns: Sequence[str], classes: Sequence[str] | None
    ) -> Tensor:
        """Targets of which none may be missing, unless the likelihood has a mark for it."""
        if classes is not None and len(columns) == 1:
            return to_tensor(target_classes(frame[columns[0]], path, classes)[0])
        missing = getattr(self.likelihood, "missing", None) is not None
        return self._tensor(numbers(frame, path, columns, missing, "name another target"), _whole(frame, columns))

    def _known_targets(
        self, frame: pandas.DataFrame, columns: Sequence[str], classes: Sequence[str] | None
    ) -> tuple[Tensor | None, list[str]]:
        """Targets as far as they are known, and what the table has in place of the others."""
        if not columns or not set(columns) <= set(frame.columns):
            return None, []
        if classes is not None:
            number, others = scored_classes(frame[columns[0]].tolist(), classes)
            y, whole = np.where(number < 0, np.nan, number)[:, None], True
        else:
            y, others = scored_numbers(frame, columns)
            whole = _whole(frame, columns)
        if np.isnan(y).all():
            return None, others
        labels = isinstance(self.likelihood, Categorical)
        return self._tensor(np.where(np.isnan(y), MISSING_LABEL, y) if labels else y, whole), others

    def _tensor(self, y: NDArray[np.float64], whole: bool) -> Tensor:
        """Targets (N, columns) as a tensor; whole numbers of 64 bits as such."""
        whole = whole and bool((np.abs(y) < 2.0**63).all())
        targets = to_tensor(y.astype(np.int64)) if whole else torch.tensor(y, dtype=self.dtype, device="cpu")
        return targets[:, 0] if y.shape[1] == 1 else targets


def _whole(frame: pandas.DataFrame, columns: Sequence[str]) -> bool:
    return all(is_integer_dtype(frame[name].dtype) for name in columns)
