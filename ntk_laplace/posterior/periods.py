"""The period of the wave that explains most of residuals at irregular places (the periodogram of Lomb 1976)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lombscargle

_FEWEST = 8  # different places
_AROUND, _FINER = 2, 32  # steps of the grid on each side of the best frequency, and parts of a step
_BLOCK = 2**20  # frequencies times places at a time


def strongest_period(places: NDArray[np.float64], residual: NDArray[np.float64]) -> float | None:
    """Period of the sine and cosine of places (n,) whose least squares fit to residuals (n, C) is best.

    Frequencies go from a quarter of a wave over all places to one wave over four of them. None where fewer than eight
    places differ, or the residuals are equal.
    """
    distinct = len(np.unique(places))
    centered = residual - residual.mean(0)
    if distinct < _FEWEST or not centered.any():
        return None
    step = np.pi / (2.0 * np.ptp(places))
    coarse = step * np.arange(1, distinct + 1)
    best = coarse[_power(places, centered, coarse).argmax()]
    fine = best + step * np.arange(-_AROUND * _FINER, _AROUND * _FINER + 1) / _FINER
    fine = fine[fine > 0.0]
    return float(2.0 * np.pi / fine[_power(places, centered, fine).argmax()])


def _power(places: NDArray[np.float64], residual: NDArray[np.float64], frequencies: NDArray[np.float64]) -> (
    NDArray[np.float64]
):
    """Squares explained at each angular frequency, summed over the outputs, each of one size."""
    size = np.sqrt((residual**2).mean(0))
    columns = (residual / np.where(size > 0, size, np.inf)).T
    parts = np.array_split(frequencies, -(-len(frequencies) * len(places) // _BLOCK))
    return np.concatenate([sum(lombscargle(places, column, part) for column in columns) for part in parts])
