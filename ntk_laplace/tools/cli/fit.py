"""The command ``ntk-laplace fit``: a network trained on a table, and its posterior, scored on held-out rows."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import NormalDist
from typing import Any

import joblib
import numpy as np
import pandas
import torch
from numpy.typing import NDArray
from pandas.api.types import is_integer_dtype
from torch import distributions

import ntk_laplace as ntkl
from ntk_laplace import metrics
from ntk_laplace.tools.cli.model import require_writable
from ntk_laplace.tools.cli.predictions import NETWORK
from ntk_laplace.tools.cli.tables import (
    input_columns,
    is_table,
    named_classes,
    numbers,
    read_table,
    require_column,
    target_classes,
)

__all__ = ["run"]

_POSTERIOR = "posterior"
_HELD_OUT = 0.2
_LEVEL = 0.9
_FEWEST = 10  # rows
_FEW = 10  # whole numbers that are classes


def run(options: argparse.Namespace) -> None:
    """Read, split, train, score, write.

    Raises
    ------
    NTKLaplaceError
        If the table or an option is invalid.
    OSError
        If the files cannot be written; raised before the computation.
    """
    path: Path = options.data
    if not is_table(path):
        raise ntkl.DataError("a table, .csv or .parquet", str(path), "Save the data as a table, or fit an estimator in "
                             "Python: LaplaceRegressor or LaplaceClassifier.")  # fmt: skip
    frame = read_table(path, "the data")
    target = require_column(frame, path, options.target)
    if len(frame) < _FEWEST:
        raise ntkl.DataError(f"at least {_FEWEST} rows", f"{len(frame)} in {path}", "Add rows.")
    names = input_columns(frame, path, target, None)
    x = pandas.DataFrame(numbers(frame, path, names), columns=names)
    classes = _classifies(frame[target], options.task)
    y = _labels(frame[target], path) if classes else numbers(frame, path, [target])[:, 0]
    options.out.mkdir(parents=True, exist_ok=True)
    table, saved = options.out / "predictions.csv", options.out / "model.joblib"
    for file in (table, saved):
        require_writable(file)
    order = np.random.default_rng(options.seed).permutation(len(y))
    held_out, rest = np.split(order, [round(_HELD_OUT * len(y))])
    held_out.sort()
    rest.sort()
    what = f"{len(np.unique(y))} classes" if classes else "real numbers"
    print(f"{target} is taken as {what} (--task says otherwise), from {len(names)} inputs: "
          f"{len(rest):,} rows to train, {len(held_out):,} held out")  # fmt: skip
    fitted = _fit_classes if classes else _fit_numbers
    settings = {"hidden_layer_sizes": options.hidden, "epochs": options.epochs, "random_state": options.seed,
                "verbose": sys.stderr.isatty()}  # fmt: skip
    model, scores, columns = fitted(x.iloc[rest], y[rest], x.iloc[held_out], y[held_out], settings)
    pandas.DataFrame({"row": held_out, **columns}).to_csv(table, index=False)
    joblib.dump(model, saved)
    print(f"\nScores of the {len(held_out):,} held-out rows")
    print(pandas.DataFrame(scores).T.to_string(float_format="{:.4f}".format))
    print(f"\nLog marginal likelihood of the training rows: {model.log_marginal_likelihood_value_:.3f} nats")
    fit = model.predictive_fit_
    if fit is not None and not fit.trusted:
        print(f"\nWARNING: the posterior is used as it is, without calibration: {'; '.join(fit.reasons)}.")
    print(f"\nPredictions of the held-out rows are in {table}. The model is in {saved}:\n"
          f"joblib.load({str(saved)!r}).predict(frame) takes a pandas table of the inputs.")  # fmt: skip


def _classifies(column: pandas.Series, task: str | None) -> bool:
    """Whether targets are classes."""
    if task is not None:
        return task == "classes"
    return named_classes(column) or (is_integer_dtype(column.dtype) and column.nunique() <= _FEW)


def _labels(column: pandas.Series, path: Path) -> NDArray[Any]:
    """Labels as text, or as whole numbers."""
    if named_classes(column):
        numbered, names = target_classes(column, path, None)
        return np.array(names, dtype=object)[numbered]
    values = numbers(column.to_frame(), path, [str(column.name)])[:, 0]
    if (values != np.floor(values)).any():
        row = int(np.argmax(values != np.floor(values)))
        raise ntkl.DataError(f"names or whole numbers as classes in column {column.name!r} of {path}",
                             f"{values[row]:g} in row {row}", "Take --task regression.")  # fmt: skip
    return values.astype(np.int64)


def _fit_numbers(
    x: pandas.DataFrame, y: NDArray[Any], x_new: pandas.DataFrame, y_new: NDArray[Any], settings: dict[str, Any]
) -> tuple[ntkl.LaplaceRegressor, dict[str, dict[str, float]], dict[str, Any]]:
    """The estimator, its scores at new points, and columns of predictions."""
    model = ntkl.LaplaceRegressor(**settings).fit(x, y)
    mean, sd = model.predict(x_new, return_std=True)
    scores = {}
    for name, own in {NETWORK: np.full_like(sd, np.sqrt(model.noise_)), _POSTERIOR: sd}.items():
        response = distributions.Normal(torch.as_tensor(mean), torch.as_tensor(own))
        (covered,) = metrics.interval_coverage(mean, own**2, y_new, [_LEVEL])
        scores[name] = metrics.held_out_scores(response, torch.as_tensor(y_new))
        scores[name][f"coverage of {_LEVEL:.0%}"] = covered
    half = NormalDist().inv_cdf(0.5 + _LEVEL / 2) * sd
    return model, scores, {"mean": mean, "sd": sd, "lower": mean - half, "upper": mean + half, "target": y_new}


def _fit_classes(
    x: pandas.DataFrame, y: NDArray[Any], x_new: pandas.DataFrame, y_new: NDArray[Any], settings: dict[str, Any]
) -> tuple[ntkl.LaplaceClassifier, dict[str, dict[str, float]], dict[str, Any]]:
    """As `_fit_numbers`."""
    unknown = np.setdiff1d(y_new, y)
    if len(unknown):
        raise ntkl.DataError("each class among the training rows", f"{unknown[0]!r} in held-out rows alone",
                             "Add rows of this class, or pass another --seed.")  # fmt: skip
    model = ntkl.LaplaceClassifier(**settings).fit(x, y)
    p = model.predict_proba(x_new)
    alone = model.posterior_.predict(model.network_inputs(x_new), "map").mean.detach().cpu().double()
    labels = torch.as_tensor(np.searchsorted(model.classes_, y_new))
    scores = {
        name: metrics.held_out_scores(distributions.Categorical(probs=probs), labels)
        for name, probs in {NETWORK: alone, _POSTERIOR: torch.as_tensor(p)}.items()
    }
    each = {f"probability_{name}": p[:, index] for index, name in enumerate(model.classes_)}
    return model, scores, {"predicted": model.classes_[p.argmax(1)], **each, "target": y_new}
