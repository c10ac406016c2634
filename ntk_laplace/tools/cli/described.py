"""Predictions of an estimator as columns of a table, with scores where the targets are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pandas
import torch
from numpy.typing import NDArray
from pandas.api.types import is_float_dtype
from torch import Tensor, distributions

import ntk_laplace as ntkl
from ntk_laplace.errors import untold
from ntk_laplace.model.likelihoods import CountMixture, NormalMixture
from ntk_laplace.model.likelihoods.number_mixture import NumberMixture
from ntk_laplace.runtime.conversion import to_tensor
from ntk_laplace.tools.cli.scores import NETWORK, as_set, score_table, scores_of
from ntk_laplace.tools.estimators.base import training_data
from ntk_laplace.tools.explorer import in_digits, spread_of

_WITHOUT, _POSTERIOR = "without inputs", "posterior"
_SHOWN = 5  # predictions that are printed

Model = ntkl.LaplaceRegressor | ntkl.LaplaceClassifier


@dataclass(frozen=True)
class Described:
    """Columns of the predictions; scores by name, if the targets are known; and what else to tell of these."""

    columns: dict[str, Any]
    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    note: str = ""


def describe(
    model: Model, x: pandas.DataFrame, y: NDArray[Any] | None, targets: Sequence[str], level: float
) -> Described:
    """Describe the predictions of an estimator at inputs x (n, features), with intervals or sets of this level.

    The columns of several targets have their names. An input is scored if its target in y, (n,) or (n, targets), is
    known: neither None nor NaN. The prediction that is the same for every input, the mean and standard deviation of the
    training targets or the share of each class, is scored too; of counts it may be in proportion to an exposure.
    """
    if isinstance(model, ntkl.LaplaceClassifier):
        return _classes(model, x, y, level)
    return _numbers(model, x, y, targets, level)


def _numbers(
    model: ntkl.LaplaceRegressor, x: pandas.DataFrame, y: NDArray[Any] | None, targets: Sequence[str], level: float
) -> Described:
    mean, sd = (_columns(values) for values in model.predict(x, return_std=True))
    known = {} if y is None or pandas.isna(y).all() else {"target": _columns(y)}
    tail = to_tensor(0.5 - level / 2, dtype=torch.float64)
    lower, upper = np.moveaxis(model.predict_quantiles(x, (tail, 1 - tail)).reshape(*mean.shape, 2), -1, 0)
    versions = _versions(model, x, mean.shape) if known else {}
    ends = {name: (one.icdf(tail).numpy(), one.icdf(1 - tail).numpy()) for name, one in versions.items()}
    parts = {"mean": mean, "sd": sd, "lower": lower, "upper": upper} | known
    scores, columns = {}, dict[str, Any]()
    for index, target in enumerate(targets):
        one = slice(None), index
        ending, of = ("", "") if len(targets) == 1 else (f"_{target}", f", {target}")
        columns |= {part + ending: values[one] for part, values in parts.items()}
        there = ~np.isnan(known["target"][one]) if known else np.zeros(len(mean), bool)
        for name, version in versions.items() if there.any() else ():
            low, high, truth = (values[there, index] for values in (*ends[name], known["target"]))
            scores[name + of] = scores_of(version[to_tensor(there), index], to_tensor(truth))
            scores[name + of][f"coverage of {100 * level:g}%"] = float(((low <= truth) & (truth <= high)).mean())
    return Described(columns, scores)


def _versions(model: ntkl.LaplaceRegressor, x: pandas.DataFrame, shape: tuple[int, ...]) -> dict[str, NumberMixture]:
    """Distributions of each target of each input, (n, targets), that are scored."""
    known = {name: model.predict_distribution(x, method).reshaped(*shape)
             for name, method in {NETWORK: "map", _POSTERIOR: "glm"}.items()}
    training, weights = _columns(model.y_train_), _counts(model)
    center = np.average(training, 0, weights)
    spread = np.average((training - center) ** 2, 0, weights)
    if not spread.all():
        return known
    if isinstance(known[NETWORK], CountMixture):  # of the rate and the variance of one target
        own = _exposures(model, training_data(model.posterior_)[0])
        rate = center / np.average(own, 0, weights)
        over = np.average((training - rate * own) ** 2 - rate * own, 0, weights)[0]
        alpha = max(0.0, float(over / np.average((rate * own) ** 2, 0, weights)[0]))
        mean = to_tensor(rate * _exposures(model, model.network_inputs(x)))
        alike: NumberMixture = CountMixture.single(mean.expand(shape), to_tensor(alpha))
    else:
        alike = NormalMixture.normal(*(to_tensor(part).expand(shape) for part in (center, spread)))
    return {_WITHOUT: alike} | known


def _classes(model: ntkl.LaplaceClassifier, x: pandas.DataFrame, y: NDArray[Any] | None, level: float) -> Described:
    p, inputs, sets = model.predict_proba(x), model.network_inputs(x), None
    if model.posterior_.fitted.exact:  # another has no leave-one-out to make sets from
        with untold():  # the reasons of predictive_fit_, which are told, and too few points
            sets = model.posterior_.predict_set(inputs, level, never_empty=True)
    names = [str(name) for name in model.classes_]
    columns: dict[str, Any] = {"predicted": model.classes_[p.argmax(1)]}
    if sets is not None:
        columns["set"] = [as_set(one) for one in sets.labels(names)]
    columns |= {f"probability_{name}": p[:, index] for index, name in enumerate(names)}
    there = np.zeros(len(p), bool) if y is None else ~pandas.isna(y)
    if y is None or not there.any():
        return Described(columns)
    alone = model.posterior_.predict(inputs, "map").mean.detach().cpu().double()[there]
    labels = model.network_targets(y[there].astype(model.classes_.dtype))
    of_class = np.unique(model.y_train_, return_inverse=True)[1]
    shares = np.bincount(of_class, _counts(model))
    versions = {_WITHOUT: to_tensor(shares / shares.sum()).expand(len(labels), -1), NETWORK: alone,
                _POSTERIOR: to_tensor(p[there])}
    scores = {name: scores_of(distributions.Categorical(probs=probs), labels) for name, probs in versions.items()}
    note = ""
    if sets is not None:
        mask = sets.mask.cpu()[to_tensor(there)]
        inside = float(mask[torch.arange(len(labels), device="cpu"), labels].double().mean())
        size = float(mask.sum(1).double().mean())
        note = f"Sets of labels of level {100 * level:g}%: {inside:.1%} contain the label; {size:.2f} labels on average"
    return Described({**columns, "target": y}, scores, note)


def fitted_words(fit: ntkl.PredictiveFit) -> str:
    """What the uncertainty was fitted to, and what it gains, in a sentence."""
    seen = {"folds": "training rows, each predicted from a network that was trained without its fold",
            "loo": "training rows, each predicted from all others"}
    rows = seen.get(fit.objective, "rows that were kept from the training")
    return (f"Uncertainty, fitted to {fit.num_points:,} {rows}: "
            f"{fit.calibration}; {fit.gain:.2g} ± {fit.gain_error:.2g} nats a row better than the network as it was "
            "trained")


def tell_scores(found: Described, heading: str) -> None:
    """Print the scores."""
    print(f"\n{heading}")
    print(score_table(found.scores))
    if found.note:
        print(f"\n{found.note}")


def tell_first(predictions: pandas.DataFrame, level: float) -> None:
    """Print the first predictions with their intervals or sets."""
    wanted = ("row", "file", "mean", "lower", "upper", "predicted", "set", "target")
    shown = [name for name in predictions if name.partition("_")[0] in wanted]
    kinds = {"set": "sets of labels", "lower": "intervals"}
    told = [f", with {what} of {100 * level:g}%" for part, what in kinds.items()
            if any(name.partition("_")[0] == part for name in shown)]
    print(f"\nThe first of them{''.join(told)}")
    first = predictions[shown].head(_SHOWN)
    real = {name: name.partition("_")[2] for name, column in first.items() if is_float_dtype(column.dtype)}
    spreads = {target: spread_of([value for name in real if real[name] == target for value in first[name]])
               for target in real.values()}  # of all columns of a target, which people compare
    formats = {name: partial(in_digits, spread=spreads[target]) for name, target in real.items()}
    objects = [name for name, column in first.items() if column.dtype == object]
    first = first.assign(**{name: first[name].where(first[name].notna(), "") for name in objects})
    print(first.to_string(index=False, formatters=formats, na_rep=""))


def _exposures(model: ntkl.LaplaceRegressor, inputs: Tensor) -> NDArray[np.float64]:
    """Of the network's inputs, (n, 1); 1 if the model has none."""
    if model.exposure is None:
        return np.ones((len(inputs), 1))
    found: NDArray[np.float64] = inputs[:, -1:].detach().cpu().double().exp().numpy()
    return found


def _counts(model: Model) -> NDArray[np.float64]:
    """How many rows of the training data each training point stands for, (N,)."""
    return model.posterior_.fitted.points.counts.double().cpu().numpy()


def _columns(values: NDArray[Any]) -> NDArray[Any]:
    return values.reshape(len(values), -1)
