"""Metrics of predictions on held-out data: log likelihood, Brier score, accuracy, calibration, RMSE, coverage, AUROC.

They are functions of arrays and of distributions, independent of networks and posteriors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.metrics import accuracy_score, mean_squared_error, roc_auc_score
from torch.distributions import Distribution

from ntk_laplace.errors import DataError, TargetError, require_whole
from ntk_laplace.runtime.conversion import to_tensor

__all__ = [
    "Reliability",
    "accuracy",
    "brier_score",
    "central_coverage",
    "class_probabilities",
    "detection_auroc",
    "expected_calibration_error",
    "held_out_scores",
    "interval_coverage",
    "mean_log_likelihood",
    "reliability",
    "rmse",
    "set_coverage",
]


def class_probabilities(probabilities: ArrayLike) -> NDArray[np.float64]:
    """Probabilities as one row per example and one column per class.

    Parameters
    ----------
    probabilities : array_like or Tensor, (N, C), (N, 1) or (N,)
        With one column or shape (N,), the probability of class 1 of two classes.

    Returns
    -------
    ndarray, (N, C) with C at least 2

    Raises
    ------
    DataError
        If an entry is outside [0, 1] or not a number, or a row does not sum to one.
    """
    table = _array(probabilities)
    if table.ndim == 1:
        table = table[:, None]
    if table.ndim != 2 or table.size == 0:
        raise DataError("probabilities of shape (N, C), (N, 1) or (N,)", f"shape {table.shape}",
                        "Pass one row per example.")
    if table.shape[1] == 1:
        table = np.concatenate([1.0 - table, table], axis=1)
    # float32 sums have rounding errors of about 1e-6; NaN fails the comparison and is detected too
    bad = ~((table >= 0).all(1) & (table <= 1 + 1e-5).all(1) & (np.abs(table.sum(1) - 1) < 1e-4))
    if bad.any():
        first = int(bad.argmax())
        raise DataError("probabilities in [0, 1] that sum to one in each row", f"{table[first]} at example {first}",
                        "Pass the probabilities of a predictive distribution, not logits.")
    return table


def accuracy(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Fraction of examples whose most probable class is the true one.

    Parameters
    ----------
    probabilities : array_like or Tensor, (N, C), (N, 1) or (N,)
        See `class_probabilities`.
    labels : array_like or Tensor, (N,) or (N, 1)
        True classes, integers from 0.
    """
    table = class_probabilities(probabilities)
    return float(accuracy_score(_labels(labels, table), table.argmax(1)))


def brier_score(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Mean squared distance of the probabilities from the indicator of the true class, summed over classes: 0 to 2.

    This is Brier's definition. For two classes it is twice the common definition, which counts only class 1.

    Parameters
    ----------
    probabilities, labels
        As in `accuracy`.
    """
    table = class_probabilities(probabilities)
    truth = np.eye(table.shape[1])[_labels(labels, table)]
    return float(table.shape[1] * mean_squared_error(truth, table))


def mean_log_likelihood(predictive: Distribution, targets: torch.Tensor) -> float:
    """Mean log predictive density (or probability) of the targets, in nats per example that has a target.

    Parameters
    ----------
    predictive : Distribution, batch shape (N,)
        Such as `posterior.predict(x)`.
    targets : Tensor
        In the shape that ``predictive.log_prob`` takes.
    """
    return float(log_likelihoods(predictive, targets).mean())


def log_likelihoods(predictive: Distribution, targets: torch.Tensor) -> torch.Tensor:
    """Log predictive density (or probability) of each example that has a target, in their order, nats.

    Of two models of the same examples, the differences have a mean and a standard error.

    Parameters
    ----------
    predictive, targets
        As for `mean_log_likelihood`.

    Returns
    -------
    Tensor, (M,)
    """
    scores = predictive.log_prob(targets)
    if scores.ndim != 1:
        raise TargetError("one log probability per example", f"log probabilities of shape {tuple(scores.shape)}",
                          "Give the targets the shape of the predictive's samples.")
    present = _present(predictive, targets)
    return scores if present is None else scores[present]


@dataclass(frozen=True)
class Reliability:
    """Confidence against accuracy in bins of equal width; empty bins are left out.

    Attributes
    ----------
    confidence : ndarray, (B,)
        Mean probability of the predicted class in each bin.
    accuracy : ndarray, (B,)
        Fraction of these predictions that are correct.
    count : ndarray of int, (B,)
        Number of examples in each bin.
    """

    confidence: NDArray[np.float64]
    accuracy: NDArray[np.float64]
    count: NDArray[np.int64]

    @property
    def error(self) -> float:
        """Expected calibration error: the mean of `|accuracy - confidence|`, weighted by count."""
        return float(np.average(np.abs(self.accuracy - self.confidence), weights=self.count))


def reliability(probabilities: ArrayLike, labels: ArrayLike, bins: int = 15) -> Reliability:
    """Reliability of the predicted class ([Guo et al. 2017], section 2).

    Parameters
    ----------
    probabilities, labels
        As in `accuracy`.
    bins : int
        Number of intervals ((b-1)/bins, b/bins] of confidence.

    Returns
    -------
    Reliability
    """
    bins = require_whole("bins", bins, 1, "Pass for instance 15.")
    table = class_probabilities(probabilities)
    right = table.argmax(1) == _labels(labels, table)
    confidence = table.max(1)
    index = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    count = np.bincount(index, minlength=bins)
    used = count > 0
    sums = np.bincount(index, weights=confidence, minlength=bins)
    hits = np.bincount(index, weights=right, minlength=bins)
    return Reliability(sums[used] / count[used], hits[used] / count[used], count[used])


def expected_calibration_error(probabilities: ArrayLike, labels: ArrayLike, bins: int = 15) -> float:
    """Compute the expected calibration error of the predicted class, between 0 and 1; see `reliability`."""
    return reliability(probabilities, labels, bins).error


def rmse(prediction: ArrayLike, targets: ArrayLike) -> float:
    """Root mean squared error over all examples and outputs, in the unit of the targets."""
    guess, truth = _array(prediction), _array(targets)
    if guess.squeeze().shape != truth.squeeze().shape or guess.size == 0:
        raise TargetError(f"targets of the shape of the predictions, {guess.shape}", f"{truth.shape}",
                          "Pass one target for each prediction.")
    _require_present(guess, truth)
    return float(np.sqrt(mean_squared_error(truth.ravel(), guess.ravel())))


def detection_auroc(inside: ArrayLike, outside: ArrayLike) -> float:
    """Area under the ROC curve of a score that should be larger for out-of-distribution inputs.

    The probability that a random element of `outside` is larger than a random element of `inside`; ties count half.

    Parameters
    ----------
    inside, outside : array_like or Tensor, (n,) and (m,)
        Scores such as a predictive entropy, an epistemic variance, or minus the largest class probability.
    """
    known, strange = _array(inside).ravel(), _array(outside).ravel()
    if not known.size or not strange.size or not np.isfinite(np.concatenate([known, strange])).all():
        raise DataError("finite scores of both kinds of inputs", f"{known.size} and {strange.size} scores",
                        "Pass one score for each input, and at least one of each kind.")
    return float(roc_auc_score(np.repeat([0, 1], [known.size, strange.size]), np.concatenate([known, strange])))


def held_out_scores(predictive: Distribution, targets: torch.Tensor, bins: int = 15) -> dict[str, float]:
    """All applicable scores: log likelihood; accuracy, Brier score and ECE for classes; RMSE for regression.

    Missing targets are left out. Soft labels have only a log likelihood. Under `Everywhere` the log likelihood is
    that of an example, and the other scores are those of positions.

    Parameters
    ----------
    predictive : Distribution, batch shape (N,)
        Such as `posterior.predict(x)`; one with `probs` is a classification.
    targets : Tensor
        In the shape that ``predictive.log_prob`` takes.
    bins : int
        Number of bins of the ECE.

    Returns
    -------
    dict
        "log_likelihood", then "accuracy", "brier" and "ece", or "rmse".
    """
    scores = {"log_likelihood": mean_log_likelihood(predictive, targets)}
    by_position = getattr(predictive, "by_position", None)
    if by_position is not None:
        predictive, targets = by_position(targets)
    present = _present(predictive, targets)
    everything = slice(None) if present is None else present
    targets = targets[everything]
    probabilities = getattr(predictive, "probs", None)
    if probabilities is None:
        there = ~targets.isnan()
        mean = predictive.mean[everything].reshape(targets.shape)
        return scores | {"rmse": rmse(mean[there.to(mean.device)], targets[there])}
    probabilities = probabilities[everything]
    several = probabilities.ndim == 2 and probabilities.shape[1] > 1 and targets.ndim == 2
    if several or (targets.is_floating_point() and bool((targets != targets.floor()).any())):
        return scores  # several binary outputs, or soft labels: there is no single true class
    return scores | {
        "accuracy": accuracy(probabilities, targets),
        "brier": brier_score(probabilities, targets),
        "ece": expected_calibration_error(probabilities, targets, bins),
    }


def interval_coverage(
    mean: ArrayLike, variance: ArrayLike, targets: ArrayLike, levels: Sequence[float]
) -> NDArray[np.float64]:
    """Fraction of targets inside the central Gaussian interval of each nominal level.

    Parameters
    ----------
    mean, variance, targets : array_like or Tensor, (N,) or (N, C)
        Predictive mean, predictive variance including observation noise, and observed targets.
    levels : sequence of float
        Nominal probabilities in (0, 1), such as 0.9 for the central 90 % interval.

    Returns
    -------
    ndarray, (len(levels),)
        A calibrated prediction has coverage equal to level.
    """
    given = middle, spread, truth = _array(mean), _array(variance), _array(targets)
    wanted = to_tensor(_levels(levels))
    if len({part.squeeze().shape for part in given}) > 1 or truth.size == 0:
        raise TargetError(f"targets and variances of the shape of the means, {middle.shape}",
                          f"targets of shape {truth.shape} and variances of shape {spread.shape}",
                          "Pass one of each for every prediction.")
    middle, spread, truth = (part.ravel() for part in given)
    _require_present(middle, spread, truth)
    if (spread < 0).any():
        raise DataError("variances of at least 0", f"{spread.min():g}", "Pass the variance of the response.")
    # the interval of level q is mean ± z sqrt(variance) with P(|Z| < z) = q, so z = sqrt(2) erfinv(q)
    half_width = (2.0**0.5 * torch.erfinv(wanted)).numpy()
    away, deviation = np.abs(truth - middle), np.sqrt(spread)
    return (away[None, :] <= half_width[:, None] * deviation[None, :]).mean(1)


def central_coverage(predictive: Distribution, targets: torch.Tensor, levels: Sequence[float]) -> NDArray[np.float64]:
    """Fraction of targets inside the central interval of each nominal level, which leaves out as much on either side.

    Its ends are the quantiles of (1 - level)/2 and (1 + level)/2. That of counts holds more than the level.

    Parameters
    ----------
    predictive : Distribution
        Of single numbers, with `cdf`: such as ``posterior.predict(x).univariate()``.
    targets : Tensor, the predictive's batch shape
    levels : sequence of float
        Nominal probabilities in (0, 1).

    Returns
    -------
    ndarray, (len(levels),)
        A calibrated prediction has coverage equal to level.
    """
    if targets.shape != predictive.batch_shape or not targets.numel():
        raise TargetError(f"targets of shape {tuple(predictive.batch_shape)}, at least one", f"{tuple(targets.shape)}",
                          "Pass one target for each number.")
    reached = _array(predictive.cdf(targets)).ravel()
    _require_present(reached)
    discrete = predictive.support is not None and predictive.support.is_discrete
    before = _array(predictive.cdf(targets - 1.0)).ravel() if discrete else reached
    half = 0.5 * _levels(levels)[:, None]  # a target is an end of the interval, or inside
    return ((reached >= 0.5 - half) & (before <= 0.5 + half)).mean(1)


def set_coverage(probabilities: ArrayLike, labels: ArrayLike, levels: Sequence[float]) -> NDArray[np.float64]:
    """Fraction of labels in the sets of the most probable classes that hold each nominal level.

    The set takes classes in the order of their probabilities until these sum to the level q, the last class with the
    probability that makes the sum exactly q. With P the sum up to and including the label's own p, the label is in it
    with probability (q - P + p)/p, clipped to [0, 1]; the mean of these is returned, without random numbers.

    Parameters
    ----------
    probabilities, labels
        As in `accuracy`.
    levels : sequence of float
        Nominal probabilities in (0, 1).

    Returns
    -------
    ndarray, (len(levels),)
        A calibrated prediction has coverage equal to level.
    """
    table = class_probabilities(probabilities)
    own, wanted = _labels(labels, table)[:, None], _levels(levels)
    order = np.argsort(-table, 1, kind="stable")
    place = np.argsort(order, 1, kind="stable")  # of each class in the order
    until = np.take_along_axis(np.take_along_axis(table, order, 1).cumsum(1), np.take_along_axis(place, own, 1), 1)
    p = np.take_along_axis(table, own, 1)
    return np.clip((wanted - until + p) / np.maximum(p, np.finfo(float).tiny), 0.0, 1.0).mean(0)


def _levels(levels: Sequence[float]) -> NDArray[np.float64]:
    wanted = np.atleast_1d(_array(levels))
    if not ((wanted > 0) & (wanted < 1)).all():
        raise DataError("levels strictly between 0 and 1", f"{levels}", "Pass probabilities such as 0.9.")
    return wanted


def _present(predictive: Distribution, targets: torch.Tensor) -> torch.Tensor | None:
    """Mask of examples with a target, for a prediction of this library; None if all have one."""
    find = getattr(predictive, "present", None)
    present = None if find is None else find(targets)
    return None if present is None else present.to(targets.device)


def _array(values: ArrayLike) -> NDArray[np.float64]:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().double().numpy()
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as cause:
        raise DataError("numbers in a tensor, an array or a list of equal rows", f"{values!r}"[:80],
                        "Convert them, numpy.asarray(values, dtype=float).") from cause


def _require_present(*values: NDArray[np.float64]) -> None:
    """Refuse NaN, a missing target for instance."""
    if any(np.isnan(part).any() for part in values):
        raise TargetError("predictions and targets that are all there", "NaN", "Leave out the missing ones, in both.")


def _labels(labels: ArrayLike, table: NDArray[np.float64]) -> NDArray[np.int64]:
    values = _array(labels).ravel()
    examples, classes = table.shape
    if values.size != examples:
        raise TargetError(f"{examples} labels, one per prediction", f"{values.size}", "Pass one label per example.")
    bad = ~((values == np.floor(values)) & (values >= 0) & (values < classes))
    if bad.any():
        first = int(bad.argmax())
        raise TargetError(f"class labels in 0..{classes - 1}", f"{values[first]:g} at example {first}",
                          "Number the classes from 0.")
    return values.astype(np.int64)
