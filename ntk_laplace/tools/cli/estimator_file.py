"""The file ``model.joblib`` that ``ntk-laplace fit`` writes: an estimator, and the data that it takes."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pandas
from torch import Tensor

import ntk_laplace as ntkl
from ntk_laplace.errors import DataError, first_line
from ntk_laplace.tools.cli.columns import InputColumns
from ntk_laplace.tools.cli.described import Model
from ntk_laplace.tools.cli.examples import TrainingExamples
from ntk_laplace.tools.cli.files import require_file
from ntk_laplace.tools.cli.images import ImageNetwork
from ntk_laplace.tools.cli.python_files import run_file
from ntk_laplace.tools.cli.words import first_few
from ntk_laplace.tools.estimators.base import training_data

_AGAIN = "Pass the model.joblib that ntk-laplace fit wrote, or FILE.py with --checkpoint and --data."
_TOLD = "_command"  # the attribute with what the command knows beyond the estimator
_FEW, _NEAR = 10, 0.1  # columns that are shown whatever their relevance, and the others' over the largest
_OF = "network"  # in it, that of the fit: another fit, in Python, is of other data


@dataclass(frozen=True)
class Estimator:
    """A fitted estimator, and what its data are."""

    model: Model
    targets: list[str]  # their names
    columns: InputColumns | None = None  # of inputs; None if the training data were no table
    group: str | None = None  # the column of the sources, which is no input
    sources: list[Any] | None = None  # the source of each row of the training data
    dropped: list[str] = field(default_factory=list)  # other columns that are no inputs
    rows: list[str] | None = None  # names of the rows of the training data; None in a file of an earlier version

    @property
    def classifies(self) -> bool:
        """Whether targets are classes."""
        return isinstance(self.model, ntkl.LaplaceClassifier)

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
    def outputs(self) -> list[str]:
        """Names of the classes, or of the targets."""
        return [str(name) for name in getattr(self.model, "classes_", self.targets)]

    def number(self, target: str | int | None) -> int | None:
        """Number of the target of a name or position (DataError if there is none); None, the default, for classes."""
        names = self.outputs
        if target is None:
            return None if self.classifies else 0
        if str(target) in names:
            return names.index(str(target))
        if isinstance(target, int) and target < len(names):
            return target
        raise DataError(f"an output among {first_few(names)}, or its position", f"--output {target}",
                        "Choose one of them.")

    @property
    def data(self) -> tuple[Tensor, ...]:
        """Inputs and targets of the training points as the posterior takes them, and weights if they have some."""
        return training_data(self.model.posterior_)

    @property
    def inputs(self) -> pandas.DataFrame:
        """Inputs of the training points in their own units."""
        features = None if self.columns is None else self.columns.features
        return pandas.DataFrame(self.model.original_inputs(self.data[0]), columns=features)

    def shown(self, inputs: pandas.DataFrame, most: int) -> pandas.DataFrame:
        """Inputs in their own units as the page of explanations shows them: categories by their names.

        Of more than `most` columns those of the largest relevance, if the estimator has learned that: those of at least
        a tenth of the largest, ten or more.
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
        order = np.argsort(relevance)[-most:]
        near = np.asarray(relevance)[order] >= _NEAR * np.max(relevance)
        return found.iloc[:, np.sort(order[-max(_FEW, int(near.sum())):])]


def save_estimator(model: Model, path: Path, training: TrainingExamples, options: argparse.Namespace) -> Estimator:
    """Write an estimator, with the names of its targets, and the names and the sources of its training rows."""
    sources = None if training.sources is None else training.sources.tolist()
    told: dict[str, Any] = {"targets": training.targets, "group": options.source, "sources": sources,
                            "dropped": list(options.drop or ()), "rows": training.names}
    columns = training.columns
    model.__dict__[_TOLD] = told | {"columns": None if columns is None else asdict(columns), _OF: model.network_}
    joblib.dump(model, path)
    return Estimator(model, columns=columns, **told)


def load_estimator(options: argparse.Namespace) -> Estimator:
    """The estimator of the file that the options name as the network (DataError if it contains no fitted one)."""
    path: Path = options.network[0]
    require_file(path, "a model.joblib that ntk-laplace fit wrote")
    if options.classes_of is not None:
        run_file(options.classes_of)
    try:
        found = joblib.load(path)
    except (ImportError, AttributeError) as cause:
        raise DataError(f"a model whose classes Python can find, in {path}",
                        f"{type(cause).__name__}: {first_line(cause)}",
                        "Pass the file of its network, --network FILE.py.") from cause
    except Exception as cause:  # damaged bytes may raise anything
        raise DataError("a model.joblib that ntk-laplace fit wrote", f"{path}, which joblib cannot load "
                        f"({type(cause).__name__}: {first_line(cause)})", _AGAIN) from cause
    if not isinstance(found, (ntkl.LaplaceRegressor, ntkl.LaplaceClassifier)) or not hasattr(found, "posterior_"):
        got = f"a {type(found).__name__}{' without a fit' * hasattr(found, 'get_params')}"
        raise DataError("a model.joblib that ntk-laplace fit wrote", f"{got} in {path}", _AGAIN)
    if not hasattr(found, "training_point_"):
        raise DataError("a model of this version", f"one of an earlier version in {path}", "Fit it again.")
    told = dict(vars(found).get(_TOLD, ()))
    if not told or told.pop(_OF, found.network_) is not found.network_:  # a fit that is not the command's
        told = {"targets": _names(found)}
    columns, names = told.pop("columns", None), getattr(found, "feature_names_in_", None)
    if columns is None and names is not None:  # without categories, as in a file of an earlier version
        columns = {"names": list(names), "categories": {}, "filled": {}}
    return Estimator(found, columns=columns and InputColumns(**columns), **told)


def _names(model: Model) -> list[str]:
    """Names of the targets of an estimator that the command did not fit."""
    count = 1 if isinstance(model, ntkl.LaplaceClassifier) else np.size(model.noise_)
    return ["target"] if count == 1 else [f"target {index}" for index in range(count)]
