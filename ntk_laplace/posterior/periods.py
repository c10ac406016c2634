"""The wave that explains most of residuals at irregular places (the periodogram of Lomb 1976)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lombscargle

_FEWEST, _MOST = 8, 2_000  # places; of more as many are drawn
_FINER = 32  # parts of a step of the grid, around the best frequency
_BLOCK = 2**20  # frequencies times places at a time
# the least share of a wave, and nats by which it must gain more than the best of all that are looked at: by chance one
# of 1,000 tables has such a wave
_SHARE, _NATS = 0.05, 7.0

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Wave:
    """A sine and a cosine of a period, and the share of the residuals' squares that they explain."""

    period: float
    share: float


def strongest_wave(places: Array, residual: Array, inputs: int = 1) -> Wave | None:
    """The wave whose least squares fit to residuals (n, C) at different places (n,) is best; None if it may be chance.

    Frequencies go from half a wave over all places to one wave over two of them. One of them explains a share above ρ
    of normal noise with the probability (1 - ρ)^((n - 3)/2); the best is compared with all of them, at all `inputs`.
    """
    if len(places) > _MOST:
        chosen = np.random.default_rng(0).permutation(len(places))[:_MOST]
        places, residual = places[chosen], residual[chosen]
    n, centered = len(places), residual - residual.mean(0)
    if n < _FEWEST or not centered.any():
        return None
    step = np.pi / np.ptp(places)
    coarse = step * np.arange(1, n + 1)
    best = coarse[_shares(places, centered, coarse).argmax()]
    fine = best + step * np.arange(1 - _FINER, _FINER) / _FINER
    shares = _shares(places, centered, fine)
    share = min(float(shares.max()), 1.0 - 1e-12)
    if share < _SHARE or -0.5 * (n - 3) * math.log1p(-share) < math.log(inputs * n) + _NATS:
        return None
    return Wave(float(2.0 * np.pi / fine[shares.argmax()]), share)


def _shares(places: Array, residual: Array, frequencies: Array) -> Array:
    """Share of the squares that each angular frequency explains, the mean over the outputs that are not 0."""
    columns = residual[:, residual.any(0)].T
    parts = np.array_split(frequencies, -(-len(frequencies) * len(places) // _BLOCK))
    power = [sum(lombscargle(places, column / np.sqrt((column**2).sum()), part) for column in columns)
             for part in parts]
    found: Array = 2.0 * np.concatenate(power) / len(columns)
    return found
