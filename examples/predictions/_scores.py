"""Predictive distributions of the methods, and the scores of a table's row."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from _tables import Problem
from scipy.optimize import minimize_scalar
from torch import Tensor
from torch.distributions import Categorical, Distribution, Normal
from torch.nn.functional import cross_entropy

from ntk_laplace import metrics

__all__ = ["Method", "of_moments", "of_probabilities", "score", "softened", "temperature"]

Predictor = Callable[[Tensor], Distribution]


@dataclass(frozen=True)
class Method:
    """What a method made of the training data.

    Attributes
    ----------
    predict : callable
        Distribution of the responses at inputs.
    seconds : float
        CPU time from the untrained network to the last number, on one thread.
    uncalibrated : callable, optional
        The same before anything was tuned on predictions; by default `predict`.
    notes : dict
        What else the table's file keeps.
    """

    predict: Predictor
    seconds: float
    uncalibrated: Predictor | None = None
    notes: dict[str, Any] = field(default_factory=dict)


def of_probabilities(p: Tensor) -> Categorical:
    """Classes; a probability below 1e-12 counts as 1e-12."""
    return Categorical(probs=p.double().clamp_min(1e-12))


def of_moments(mean: Tensor, variance: Tensor) -> Normal:
    """Regression, (n, 1) or (n,)."""
    return Normal(mean.double().flatten(), variance.double().flatten().sqrt())


def temperature(log_probabilities: Tensor, y: Tensor) -> float:
    """T in [1/20, 20] of the largest posterior density, softmax(log p / T) under log T ~ N(0, 1).

    Without the prior T would be 0 where all of a few held-out labels are predicted right, which does harm.
    """

    def loss(t: float) -> float:
        return float(cross_entropy(log_probabilities / math.exp(t), y, reduction="sum")) + 0.5 * t**2

    return math.exp(minimize_scalar(loss, bounds=(-3, 3), method="bounded").x)


def softened(log_probabilities: Tensor, t: float) -> Categorical:
    """The probabilities that are proportional to exp(log p / T)."""
    return of_probabilities(torch.softmax(log_probabilities.double() / t, -1))


def score(method: Method, problem: Problem) -> dict[str, Any]:
    """Log likelihood, accuracy or RMSE, ECE, coverage, AUROC of unfamiliar inputs, seconds."""
    found = method.predict(problem.x_test)
    plain = method.uncalibrated or method.predict
    y = problem.y_test if problem.classes else problem.y_test[:, 0].double()
    results = {"log_likelihood": float(found.log_prob(y).mean())}
    if problem.classes:
        results["accuracy"] = metrics.accuracy(found.probs, y)
        results["ece"] = metrics.expected_calibration_error(found.probs, y, 15)
        results["coverage"] = _in_sets(found.probs, y)
    else:
        results["rmse"] = metrics.rmse(found.mean, y)
        results["coverage"] = float(metrics.interval_coverage(found.mean, found.variance, y, [0.9])[0])
        results["width"] = float(2 * 1.645 * found.stddev.mean())
    results["auroc"] = _strangeness(method.predict, problem)
    results["auroc_uncalibrated"] = _strangeness(plain, problem) if method.uncalibrated else results["auroc"]
    return results | {"seconds": method.seconds, "notes": method.notes}


def _in_sets(p: Tensor, y: Tensor, level: float = 0.9) -> float:
    """Share of labels in the smallest sets of classes of this probability."""
    sorted_, order = p.sort(1, descending=True)
    before = sorted_.cumsum(1) - sorted_  # probability of the classes that are more likely
    place = (order == y[:, None]).to(torch.int64).argmax(1)
    return float((before.gather(1, place[:, None])[:, 0] < level).double().mean())


def _strangeness(predict: Predictor, problem: Problem) -> float:
    """AUROC of entropy, or of variance in a regression."""

    def scores(x: Tensor) -> np.ndarray:
        found = predict(x)
        return (found.entropy() if problem.classes else found.variance).numpy()

    return metrics.detection_auroc(scores(problem.x_test), scores(problem.strange))
