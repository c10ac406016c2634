"""The wave that explains most of residuals at irregular places (the periodogram of Lomb 1976)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_FEWEST = 8  # places
_FINER = 32  # parts of a step of the grid, around the best frequency
# the least share of a wave, and nats by which it must gain more than the best of all that are looked at: by chance one
# of 1,000 tables has such a wave
_SHARE, _NATS = 0.05, 7.0
_NEAR = 0.5  # of a wave's share, which one of the coarse frequencies beside it explains at least: sinc² ¼ = 0.81
_SPREAD = 6  # grid points on each side of a place, for six digits (Greengard and Lee 2004): the best is computed anew

Array = NDArray[np.float64]
Complex = NDArray[np.complex128]


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
    n, centered = len(places), residual - residual.mean(0)
    if n < _FEWEST or not centered.any():
        return None
    columns = centered[:, centered.any(0)]
    columns /= np.sqrt((columns**2).sum(0))
    most = -math.expm1(-2.0 * (math.log(inputs * n) + _NATS) / (n - 3))  # share of the best, by chance
    least, span = max(_SHARE, most), float(np.ptp(places))
    angles = (places - places.min()) * (np.pi / span)
    coarse = _shares(_sums(angles, columns, n)[1:], _sums(angles, np.ones((n, 1)), 2 * n)[2::2, 0], n)
    best = int(coarse.argmax())
    if coarse[best] < _NEAR * least:
        return None
    fine = (best + 1 + np.arange(1 - _FINER, _FINER) / _FINER).clip(1, n)
    turns = np.exp(1j * np.outer(fine, angles))
    shares = _shares(turns @ columns, (turns * turns).sum(1), n)
    share = min(float(shares.max()), 1.0)
    return Wave(float(2.0 * span / fine[shares.argmax()]), share) if share > least else None


def _shares(first: Complex, second: Complex, n: int) -> Array:
    """Share of the squares that each frequency ω explains, by least squares; the mean over the columns.

    Lomb (1976), equations (4) to (8), from sums of r exp(iωx), (frequencies, columns), and of exp(2iωx). The phase τ
    makes sine and cosine orthogonal over the places; a sine that is 0 at all of them explains nothing.
    """
    apart = np.abs(second)
    turned = first * np.exp(-0.5j * np.angle(second))[:, None]  # τ
    of_sine = np.where(n - apart > 1e-9 * n, n - apart, np.inf)
    found: Array = 2.0 * (turned.real**2 / (n + apart)[:, None] + turned.imag**2 / of_sine[:, None]).mean(1)
    return found


def _sums(angles: Array, columns: Array, most: int) -> Complex:
    """Σ_j r_j exp(ik x_j) for k = 0 … `most`, (most + 1, columns), at angles x_j from 0 to π.

    The nonuniform fast Fourier transform of Greengard and Lee (2004): Gaussians around the places, on a grid.
    """
    modes = 2 * (most + 1)
    grid, width = 2 * modes, np.pi * _SPREAD / (3.0 * modes**2)  # τ of their equation (10), oversampled twice
    step = 2.0 * np.pi / grid
    near = np.floor(angles / step).astype(int)[:, None] + np.arange(1 - _SPREAD, _SPREAD + 1)
    weights = np.exp(-((angles[:, None] - near * step) ** 2) / (4.0 * width))
    place = (near % grid).ravel()
    spread = [np.bincount(place, (weights * own[:, None]).ravel(), grid) for own in columns.T]
    found: Complex = np.conj(np.fft.rfft(spread, axis=1)).T[: most + 1]
    return found * (np.sqrt(np.pi / width) / grid * np.exp(np.arange(most + 1) ** 2 * width))[:, None]
