"""Maximize the mean log density over the numbers of a calibration: a coarse grid, then bounded L-BFGS."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import torch

from ntk_laplace.errors import UnsupportedError
from ntk_laplace.model.calibration import Calibration
from ntk_laplace.posterior.calibrate.densities import Densities, NormalDensities, Setting

__all__ = ["BOUNDS", "fit_calibration", "mean_log_density"]

BOUNDS = {
    "scale": (1e-7, 20.0),
    "temperature": (0.1, 10.0),
    "average_temperature": (0.1, 10.0),
    "noise": (0.05, 1e5),
}
_GRID = {"scale": (1e-4, 20.0, 8), "temperature": (0.25, 6.0, 6), "average_temperature": (0.25, 6.0, 6),
         "noise": (0.05, 1e3, 9)}  # fmt: skip
COMMON = "common"
"""One factor for the covariance of f and the noise."""


def fit_calibration(found: Densities, names: Sequence[str] | None) -> tuple[Calibration, tuple[str, ...]]:
    """The calibration of the largest mean log density, and the names of what is at a bound.

    Parameters
    ----------
    found : Densities
    names : sequence of str, optional
        Which numbers are fitted, by default all of the likelihood; the others are 1. With "scale" among them, scale 0
        is compared as well. "common" alone: one factor for the covariance and the noise, in closed form.

    Raises
    ------
    UnsupportedError
        If the likelihood has no such number.
    """
    chosen = _checked(found, names)
    if isinstance(found, NormalDensities) and chosen == (COMMON,):
        factor = found.common()
        return Calibration(scale=factor, noise=factor), ()
    best = _climb(found, chosen, {})
    if "scale" in chosen:
        certain = _climb(found, tuple(name for name in chosen if name != "scale"), {"scale": 0.0})
        best = best if best[0] > certain[0] + 1e-7 else certain
    values = best[1]
    return Calibration(**values), _at_bounds(chosen, values)


def mean_log_density(found: Densities, calibration: Calibration) -> float:
    """Weighted mean of log p(y_n) under a calibration, nats per point."""
    values = {name: value for name, value in vars(calibration).items() if value != 1.0}
    return _value(found, values, coarse=False)


def _checked(found: Densities, names: Sequence[str] | None) -> tuple[str, ...]:
    if names is None:
        return found.names
    chosen = (names,) if isinstance(names, str) else tuple(names)
    known = {*found.names, *(("average_temperature",) if "temperature" in found.names else ()),
             *((COMMON,) if isinstance(found, NormalDensities) else ())}  # fmt: skip
    if not chosen or not set(chosen) <= known or (COMMON in chosen and len(chosen) > 1):
        raise UnsupportedError(f"parameters among {', '.join(sorted(known))} for this likelihood",
                               f"{', '.join(map(str, chosen)) or 'none'}",
                               f"Leave parameters= out for {' and '.join(found.names)}.")
    return chosen


def _climb(found: Densities, names: tuple[str, ...], fixed: dict[str, float]) -> tuple[float, dict[str, float]]:
    """The largest mean log density over `names`, and all values."""
    if not names:
        return _value(found, fixed, coarse=False), fixed
    axes = [np.geomspace(*_GRID[name]) for name in names]
    starts = [dict(zip(names, map(float, point), strict=True)) for point in product(*axes)]
    starts.append(dict.fromkeys(names, 1.0))
    start = max(starts, key=lambda values: _value(found, fixed | values, coarse=True))
    from scipy.optimize import minimize  # installed with scikit-learn

    def negative(logs: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = _value_and_gradient(found, names, fixed, logs)
        return -value, -gradient

    limits = [tuple(map(math.log, BOUNDS[name])) for name in names]
    result: Any = minimize(negative, [math.log(start[name]) for name in names], jac=True, method="L-BFGS-B",
                           bounds=limits, options={"ftol": 1e-10, "gtol": 1e-6, "maxiter": 60})
    return -float(result.fun), fixed | {name: math.exp(x) for name, x in zip(names, result.x, strict=True)}


def _value(found: Densities, values: dict[str, float], coarse: bool) -> float:
    with torch.no_grad():
        setting: Setting = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
        return sum(float(part) for part in found.parts(setting, coarse))


def _value_and_gradient(
    found: Densities, names: tuple[str, ...], fixed: dict[str, float], logs: np.ndarray
) -> tuple[float, np.ndarray]:
    """The mean log density and its gradient in the logarithms."""
    free = torch.tensor(logs, dtype=torch.float64, requires_grad=True)
    total, gradient = 0.0, torch.zeros_like(free)
    with torch.enable_grad():
        rest = {name: torch.tensor(value, dtype=torch.float64) for name, value in fixed.items()}
        values = iter(found.parts(rest | dict(zip(names, free.exp().unbind(), strict=True))))
        for part in values:  # each part's graph is freed before the next is built
            gradient += torch.autograd.grad(part, free, retain_graph=True)[0]
            total += float(part.detach())
    return total, gradient.numpy()


def _at_bounds(names: Sequence[str], values: dict[str, float]) -> tuple[str, ...]:
    """What ended at a bound as a symptom of a bad model.

    Others are limits of good models: a temperature of each draw near 0, whose probabilities are those of a probit
    model, and a large scale beside a small temperature of the average.
    """
    found = []
    for name in names:
        low, high = BOUNDS[name]
        at_low, at_high = values[name] <= low * (1 + 1e-6), values[name] >= high * (1 - 1e-6)
        if (at_low and name == "noise") or (at_high and not (name == "scale" and "average_temperature" in names)):
            found.append(name)
    return tuple(found)
