"""Maximize the mean log density over the numbers of a calibration: a coarse grid, then bounded L-BFGS."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ntk_laplace.errors import UnsupportedError, is_choice
from ntk_laplace.model.calibration import Calibration
from ntk_laplace.posterior.calibrate.densities import Densities, NormalDensities, Objective, Setting


@dataclass(frozen=True)
class Axis:
    """Bounds of a positive number, and the coarse grid in which the search for its best value starts."""

    low: float
    high: float
    grid_low: float
    grid_high: float
    count: int

    def grid(self) -> list[float]:
        """Equally spaced logarithms."""
        return np.geomspace(self.grid_low, self.grid_high, self.count).tolist()

    def at_low(self, value: float) -> bool:
        """Whether a value is at the lower bound."""
        return value <= self.low * (1 + 1e-6)

    def at_high(self, value: float) -> bool:
        """Whether a value is at the upper bound."""
        return value >= self.high * (1 - 1e-6)


AXES = {
    "scale": Axis(1e-7, 20.0, 1e-3, 10.0, 6),
    "temperature": Axis(0.25, 10.0, 0.25, 6.0, 5),
    "average_temperature": Axis(0.25, 10.0, 0.25, 6.0, 5),
    "noise": Axis(0.05, 1e10, 0.05, 1e3, 9),
}
_EXAMPLES = 1_000  # as which more than 20,000 of a posterior count under the largest scale
COMMON = "common"
"""One factor for the covariance of f and the noise."""


def fit_calibration(
    found: Densities, names: Sequence[str] | None, fixed: Mapping[str, float] | None = None, examples: float = 0.0
) -> tuple[Calibration, tuple[str, ...]]:
    """The calibration of the largest mean log density, and the names of what is at a bound.

    The numbers of these names are fitted, by default all of the likelihood (UnsupportedError if it has no such number);
    the others are `fixed`, or 1. With "scale" among them, scale 0 is compared as well. "common" alone: one factor for
    the covariance and the noise, in closed form.

    `examples` is the sum of the weights of those that the posterior was fitted to. The covariance is inversely
    proportional to it, and errors of the network are not. A scale of c counts them as that sum over c: at most 20, or
    a thousandth of the sum.
    """
    chosen = _checked(found, names)
    if isinstance(found, NormalDensities) and chosen == (COMMON,):
        factor = found.common()
        return Calibration(scale=factor, noise=factor), ()
    axes = {name: AXES[name] for name in chosen}
    if "scale" in axes:
        axes["scale"] = replace(AXES["scale"], high=max(AXES["scale"].high, examples / _EXAMPLES))
    best = climb(found, axes, fixed)
    if "scale" in chosen:
        certain = climb(found, {name: axis for name, axis in axes.items() if name != "scale"}, {"scale": 0.0})
        best = best if best[0] > certain[0] + 1e-7 else certain
    values = best[1]
    return Calibration(**values), _at_bounds(axes, values)


def log_density_terms(found: Densities, calibration: Calibration) -> Tensor:
    """Terms of the weighted mean of log p(y_n) under a calibration, (N,), nats per point."""
    values = {name: value for name, value in vars(calibration).items() if value != 1.0}
    with torch.no_grad():
        return torch.cat(list(found.parts(_setting(values))))


def _checked(found: Densities, names: Sequence[str] | None) -> tuple[str, ...]:
    if names is None:
        return found.names
    chosen = tuple(names) if isinstance(names, (Sequence, Set)) and not isinstance(names, str) else (names,)
    known = {*found.names, *(("average_temperature",) if "temperature" in found.names else ()),
             *((COMMON,) if isinstance(found, NormalDensities) else ())}
    if not chosen or not all(is_choice(name, known) for name in chosen) or (COMMON in chosen and len(chosen) > 1):
        raise UnsupportedError(f"parameters among {', '.join(sorted(known))} for this likelihood",
                               f"{', '.join(map(str, chosen)) or 'none'}",
                               f"Leave parameters= out for {' and '.join(found.names)}.")
    return chosen


def climb(
    found: Objective, axes: Mapping[str, Axis], fixed: Mapping[str, float] | None = None
) -> tuple[float, dict[str, float]]:
    """The largest value over the numbers of `axes`, the others `fixed`, and all numbers: a grid, then bounded L-BFGS.

    A search over few points of f comes before that over all: from its end most of the steps are saved.
    """
    fixed = dict(fixed or {})
    if not axes:
        return _value(found, fixed, found.samples[-1]), fixed
    names = tuple(axes)
    starts = [dict(zip(names, point, strict=True)) for point in product(*(axis.grid() for axis in axes.values()))]
    starts.append(dict.fromkeys(names, 1.0))
    start = max(starts, key=lambda values: _value(found, fixed | values, found.samples[0]))
    from scipy.optimize import minimize  # installed with scikit-learn

    limits = [(math.log(axis.low), math.log(axis.high)) for axis in axes.values()]
    result: Any = None
    logs = np.log([start[name] for name in names])
    for samples in found.samples[1:]:

        def negative(logs: np.ndarray, samples: int | None = samples) -> tuple[float, np.ndarray]:
            value, gradient = _value_and_gradient(found, names, fixed, logs, samples)
            return -value, -gradient

        last = samples == found.samples[-1]
        result = minimize(negative, logs, jac=True, method="L-BFGS-B", bounds=limits,
                          options={"ftol": 1e-13 if last else 1e-8, "gtol": 1e-7, "maxiter": 60})
        logs = result.x
    return -float(result.fun), fixed | {name: math.exp(x) for name, x in zip(names, logs, strict=True)}


def _value(found: Objective, values: dict[str, float], samples: int | None = None) -> float:
    with torch.no_grad():
        return sum(float(part.sum()) for part in found.parts(_setting(values), samples))


def _setting(values: Mapping[str, float]) -> Setting:
    return {name: torch.tensor(value, dtype=torch.float64, device="cpu") for name, value in values.items()}


def _value_and_gradient(
    found: Objective, names: tuple[str, ...], fixed: dict[str, float], logs: np.ndarray, samples: int | None
) -> tuple[float, np.ndarray]:
    """The mean log density and its gradient in the logarithms."""
    free = torch.tensor(logs, dtype=torch.float64, requires_grad=True, device="cpu")
    total, gradient = 0.0, torch.zeros_like(free)
    with torch.enable_grad():
        setting = _setting(fixed) | dict(zip(names, free.exp().unbind(), strict=True))
        for part in found.parts(setting, samples):  # each part's graph is freed before the next is built
            value = part.sum()
            gradient += torch.autograd.grad(value, free, retain_graph=True)[0]
            total += float(value.detach())
    return total, gradient.numpy()


def _at_bounds(axes: Mapping[str, Axis], values: dict[str, float]) -> tuple[str, ...]:
    """What ended at a bound as a symptom: of a bad model, of too little noise, or of points that are all right.

    Others are limits of good models: a small temperature of each draw with a scale, whose probabilities are those of a
    probit model, and a large scale beside a small temperature of the average.
    """
    found = []
    for name, axis in axes.items():
        value = values[name]
        limit = name == "scale" and "average_temperature" in axes
        all_right = name == "temperature" and values.get("scale") == 0.0
        if (axis.at_low(value) and (name == "noise" or all_right)) or (axis.at_high(value) and not limit):
            found.append(name)
    return tuple(found)
