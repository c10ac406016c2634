"""The file ``model.joblib`` that ``ntk-laplace fit`` writes: an estimator, and the data that it takes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pandas
from numpy.typing import NDArray
from torch import Tensor

import ntk_laplace as ntkl
from ntk_laplace.errors import first_line
from ntk_laplace.tools.cli.columns import InputColumns
from ntk_laplace.tools.cli.described import Model
from ntk_laplace.tools.cli.examples import Examples, array_rows, example_names
from ntk_laplace.tools.cli.images import ImageNetwork, read_images
from ntk_laplace.tools.cli.python_files import first_few, require_file, run_file
from ntk_laplace.tools.cli.tables import (
    input_columns,
    is_table,
    read_table,
    require_no_dropped,
    scored_classes,
    scored_numbers,
    without_dropped,
)
from ntk_laplace.tools.estimators.base import training_data

_AGAIN = "Pass the model.joblib that ntk-laplace fit wrote, or FILE.py with --checkpoint and --data."
_TOLD = "_command"  # the attribute with what the command knows beyond the estimator


@dataclass(frozen=True)
class NewExamples:
    """Inputs of an estimator, and the targets if the file has them.

    Attributes
    ----------
    x : DataFrame, (n, features)
    y : ndarray, (n,) or (n, targets), or None
        Labels, or real numbers; None or NaN where there is none that the model knows.
    named : DataFrame, (n, 1)
        What names an example: its row, or its file.
    others : list of str
        What the file has in place of a known label, or of a number.
    skipped : list of int
        Rows of the file that are not among them, since the model does not know their inputs.
    why : str
        What these rows have.
    """

    x: pandas.DataFrame
    y: NDArray[Any] | None
    named: pandas.DataFrame
    others: list[str] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    why: str = ""

    @property
    def known(self) -> NDArray[np.bool_]:
        """Whether there is each target, of the shape of y (n,) or (n, targets); one target if y is None."""
        return np.zeros(len(self.x), bool) if self.y is None else ~pandas.isna(self.y)

    @property
    def names(self) -> list[str]:
        """What the page of explanations calls them."""
        return example_names(self.named)

    def first(self, most: int) -> NewExamples:
        """The first examples alone."""
        return replace(self, x=self.x.iloc[:most], y=None if self.y is None else self.y[:most],
                       named=self.named.iloc[:most])

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


def save_estimator(
    model: Model, path: Path, training: Examples, group: str | None, dropped: Sequence[str] | None
) -> Estimator:
    """Write an estimator, with the names of its targets, and the names and the sources of its training rows."""
    sources = None if training.sources is None else training.sources.tolist()
    columns = None if training.columns is None else asdict(training.columns)
    told: dict[str, Any] = {"targets": training.targets, "group": group, "sources": sources, "columns": columns,
                            "dropped": list(dropped or ()), "rows": example_names(training.named)}
    model.__dict__[_TOLD] = told
    joblib.dump(model, path)
    return Estimator(model, **told | {"columns": training.columns})


def load_estimator(options: argparse.Namespace) -> Estimator:
    """The estimator of the file that the options name as the network.

    Raises
    ------
    DataError
        If there is no such file, or it contains no fitted estimator.
    """
    path: Path = options.network[0]
    require_file(path, "a model.joblib that ntk-laplace fit wrote")
    if options.classes_of is not None:
        run_file(options.classes_of)
    try:
        found = joblib.load(path)
    except (ImportError, AttributeError) as cause:
        raise ntkl.DataError(f"a model whose classes Python can find, in {path}",
                             f"{type(cause).__name__}: {first_line(cause)}",
                             "Pass the file of its network, --network FILE.py.") from cause
    except Exception as cause:  # damaged bytes may raise anything
        raise ntkl.DataError("a model.joblib that ntk-laplace fit wrote", f"{path}, which joblib cannot load "
                             f"({type(cause).__name__}: {first_line(cause)})", _AGAIN) from cause
    if not isinstance(found, (ntkl.LaplaceRegressor, ntkl.LaplaceClassifier)) or not hasattr(found, "posterior_"):
        kind = f"a {type(found).__name__}"
        got = f"{kind} without a fit" if hasattr(found, "get_params") else kind
        raise ntkl.DataError("a model.joblib that ntk-laplace fit wrote", f"{got} in {path}", _AGAIN)
    if not hasattr(found, "training_point_"):
        raise ntkl.DataError("a model of this version", f"one of an earlier version in {path}", "Fit it again.")
    told = vars(found).get(_TOLD, {"targets": _names(found)})
    names = getattr(found, "feature_names_in_", None)  # without categories, as in a file of an earlier version
    columns = told.get("columns") or (None if names is None else {"names": list(names), "categories": {}, "filled": {}})
    told = {"group": None, "sources": None, "dropped": [], "rows": None, **told}
    return Estimator(found, **told | {"columns": None if columns is None else InputColumns(**columns)})


def _names(model: Model) -> list[str]:
    """Names of the targets of an estimator that the command did not fit."""
    count = 1 if isinstance(model, ntkl.LaplaceClassifier) else np.size(model.noise_)
    return ["target"] if count == 1 else [f"target {index}" for index in range(count)]


@dataclass(frozen=True)
class Estimator:
    """A fitted estimator, and what its data are.

    Attributes
    ----------
    model : LaplaceRegressor or LaplaceClassifier
    targets : list of str
        Names of the targets.
    group : str or None
        The column of the sources, which is no input.
    sources : list or None
        The source of each row of the training data.
    dropped : list of str
        Other columns that are no inputs.
    rows : list of str or None
        Names of the rows of the training data; None in a file of an earlier version.
    columns : InputColumns or None
        The columns of inputs; None if the training data were no table.
    """

    model: Model
    targets: list[str]
    group: str | None
    sources: list[Any] | None
    dropped: list[str]
    rows: list[str] | None
    columns: InputColumns | None

    @property
    def names(self) -> list[str] | None:
        """Names of the training points; one of several equal rows has that of the first."""
        return None if self.rows is None else [self.rows[row] for row in self.model.training_index_]

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of inputs that are no rows."""
        network = self.model.network
        return network.shape if isinstance(network, ImageNetwork) else None

    @property
    def features(self) -> list[str] | None:
        """Names of the inputs as numbers; None if the training data were no table."""
        return None if self.columns is None else self.columns.features

    @property
    def outputs(self) -> list[str]:
        """Names of the classes, or of the targets."""
        return [str(name) for name in getattr(self.model, "classes_", self.targets)]

    def number(self, target: str | int | None) -> int | None:
        """Number of the target of a name or position; None, the default, for classes.

        Raises
        ------
        DataError
            If there is no such target.
        """
        names = self.outputs
        if target is None:
            return None if isinstance(self.model, ntkl.LaplaceClassifier) else 0
        if str(target) in names:
            return names.index(str(target))
        if isinstance(target, int) and target < len(names):
            return target
        raise ntkl.DataError(f"an output among {first_few(names)}, or its position", f"--output {target}",
                             "Choose one of them.")

    @property
    def data(self) -> tuple[Tensor, ...]:
        """Inputs and targets of the training points as the posterior takes them, and weights if they have some."""
        return training_data(self.model.posterior_)

    @property
    def inputs(self) -> pandas.DataFrame:
        """Inputs of the training points in their own units."""
        return pandas.DataFrame(self.model.original_inputs(self.data[0]), columns=self.features)

    def shown(self, inputs: pandas.DataFrame, most: int) -> pandas.DataFrame:
        """Inputs in their own units as the page of explanations shows them: categories by their names.

        Of more than `most` columns those of the largest relevance, if the estimator has learned that.
        """
        columns = self.columns
        found = inputs.set_axis([f"x{i}" for i in range(inputs.shape[1])], axis=1) if columns is None else (
            columns.shown(inputs))
        relevance = getattr(self.model, "relevance_", None)
        if relevance is None or found.shape[1] <= most:
            return found
        if columns is not None:  # of a category that of its most relevant name
            known = dict(zip(columns.features, relevance, strict=True))
            relevance = [max(known[feature] for feature in own) for own in columns.features_of.values()]
        return found.iloc[:, np.sort(np.argsort(relevance)[-most:])]

    def read(
        self, path: Path, what: str, dropped: Sequence[str] | None = None, skip: bool = False
    ) -> NewExamples:
        """The examples of a file or folder like the training data.

        Parameters
        ----------
        path : Path
        what : str
            What they are, for messages.
        dropped : sequence of str, optional
            Columns of a table that are no inputs, beside those that the model knows.
        skip : bool
            Whether to skip rows of a table with inputs that the model does not know.

        Raises
        ------
        DataError
            If it cannot be read, or its columns, shapes or classes are others than in the training data.
        """
        if is_table(path):
            return self._table(path, what, [name for name in dropped or () if name not in self._left_out], skip)
        require_no_dropped(path, dropped)
        if skip:
            raise ntkl.DataError("a table, for --skip-unknown", f"{path}", "Leave it out.")
        if path.is_dir():
            return self._folder(path)
        return self._arrays(path, what)

    @property
    def _left_out(self) -> list[str]:
        """Columns that the fit did not use as inputs; later tables may be with or without them."""
        columns = [name for name in (self.group, *self.dropped) if name is not None]
        return [name for name in columns if self.columns is None or name not in self.columns.names]

    def _table(self, path: Path, what: str, dropped: Sequence[str], skip: bool) -> NewExamples:
        if self.columns is None:
            raise self._another("the table", path)
        names = all(isinstance(label, str) for label in getattr(self.model, "classes_", [None]))
        frame = read_table(path, what, [*self.columns.categories, *(self.targets if names else ())])
        frame = without_dropped(frame.drop(columns=self._left_out, errors="ignore"), path, dropped, self.targets)
        input_columns(frame, path, self.targets, self.columns.names, drop=True)
        x, why = self.columns.rows(frame, path, skip), ""
        skipped = np.flatnonzero(x.isna().any(axis=1)).tolist()
        if skipped:
            why = self.columns.unknown_words(frame)
            if len(skipped) == len(x):
                raise ntkl.DataError(f"a row of {path} whose inputs the model knows", why, "Correct the values.")
            x, frame = x.drop(index=skipped), frame.drop(index=skipped)
        found = self._with_targets(x, frame)
        return replace(found, named=found.named.assign(row=x.index), skipped=skipped, why=why)

    def _with_targets(self, x: pandas.DataFrame, frame: pandas.DataFrame) -> NewExamples:
        """Rows of a table, which may have the targets."""
        if not set(self.targets) <= set(frame.columns):
            return NewExamples(x, None, _counted(len(x)))
        if isinstance(self.model, ntkl.LaplaceClassifier):
            return self._of_labels(x, frame[self.targets[0]].tolist())
        return self._of_numbers(x, *scored_numbers(frame, self.targets))

    def _of_numbers(self, x: pandas.DataFrame, y: NDArray[np.float64], others: list[str]) -> NewExamples:
        """Examples with real targets, (n, targets)."""
        return NewExamples(x, y[:, 0] if len(self.targets) == 1 else y, _counted(len(x)), others)

    def _of_labels(self, x: pandas.DataFrame, labels: list[Any]) -> NewExamples:
        """Examples with labels."""
        classes = np.asarray(getattr(self.model, "classes_", ()))
        number, others = scored_classes(labels, classes.tolist())
        return NewExamples(x, _named(number, classes), _counted(len(x)), others)

    def _arrays(self, path: Path, what: str) -> NewExamples:
        if self.columns is not None:
            raise self._another("the arrays", path)
        inputs, y = array_rows(path, what)
        inputs = inputs.reshape(len(inputs), -1) if inputs.ndim == 1 else inputs  # as the data of fit
        count = self.model.n_features_in_
        shape = (count,) if self.shape is None else self.shape
        if inputs.shape[1:] != shape:
            raise ntkl.DataError(f"X of shape {_of(shape)}, as in the training data", f"{_of(inputs.shape[1:])} in "
                                 f"{path}", "Save the inputs as those of the training.")
        x = pandas.DataFrame(inputs.reshape(len(inputs), -1).double().numpy())
        if y is None:
            return NewExamples(x, None, _counted(len(x)))
        if isinstance(self.model, ntkl.LaplaceClassifier):
            return self._of_labels(x, y.reshape(len(y), -1)[:, 0].tolist())
        if y.numel() != len(y) * len(self.targets):
            raise ntkl.DataError(f"y of {len(self.targets)} targets", f"shape {tuple(y.shape)} in {path}",
                                 "Save the targets as those of the training, or none.")
        rows = pandas.DataFrame(y.double().numpy().reshape(len(y), -1))
        return self._of_numbers(x, *scored_numbers(rows, list(rows)))

    def _folder(self, path: Path) -> NewExamples:
        shape = self.shape
        if shape is None or len(shape) != 3 or not isinstance(self.model, ntkl.LaplaceClassifier):
            raise self._another("the folder", path)
        classes = [str(name) for name in self.model.classes_]
        found = read_images(path, shape, classes, labeled=False)
        y = None if found.y is None else _named(found.y, self.model.classes_)
        x = pandas.DataFrame(found.x.reshape(len(found.x), -1))
        return NewExamples(x, y, pandas.DataFrame({"file": found.files}), found.others)

    def _another(self, what: str, path: Path) -> ntkl.DataError:
        """The error for data of another kind than the training data."""
        if self.columns is not None:
            names = self.columns.names
            expected = f"a table with the {len(names)} input columns {first_few(names)}"
        elif self.shape is None:
            expected = f"an .npz or .pt file with X of shape {_of((self.model.n_features_in_,))}"
        else:
            expected = f"images or X of shape {_of(self.shape)}"
        return ntkl.DataError(f"{expected}, as the training data were", f"{what} {path}",
                              "Save the inputs as those of the training.")


def _named(number: NDArray[np.intp], classes: NDArray[Any]) -> NDArray[Any]:
    """Labels by number; None for -1."""
    if (number >= 0).all():
        return classes[number]
    found = classes.astype(object)[number]
    found[number < 0] = None
    return found


def _of(shape: Sequence[int]) -> str:
    return f"(N, {', '.join(map(str, shape))})"


def _counted(count: int) -> pandas.DataFrame:
    return pandas.DataFrame({"row": range(count)})
