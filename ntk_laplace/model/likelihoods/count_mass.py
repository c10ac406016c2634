"""Probabilities of counts with mean exp(f) and variance μ + α μ²."""

from __future__ import annotations

import torch
from torch import Tensor

_LARGE = 20.0  # r from which Stirling's series, cut after four terms, is exact in double precision


def log_mass(y: Tensor, log_rate: Tensor, log_dispersion: Tensor) -> Tensor:
    """Log probabilities of counts y, broadcast against the logarithms f of their means.

    With r = 1/α and u = f + log α they are
    ``log Γ(y + r) - log Γ(r) - y log r - log y! + y f - (y + r) log(1 + eᵘ)``. For α = 0,
    whose logarithm is -∞, they are those of Poisson, ``y f - e^f - log y!``.
    """
    if bool(torch.isneginf(log_dispersion.detach())):
        return y * log_rate - log_rate.exp() - torch.lgamma(y + 1)
    exact = _rising(y.double(), (-log_dispersion.double()).exp()).to(log_rate)
    log_dispersion = log_dispersion.to(log_rate)
    terms = exact - torch.lgamma(y + 1) + y * log_rate
    return terms - (y + (-log_dispersion).exp()) * log1p_exp(log_rate + log_dispersion)


def log1p_exp(u: Tensor) -> Tensor:
    """log(1 + eᵘ); torch's softplus is u from 20 on, 2e-9 off."""
    return torch.logaddexp(u, torch.zeros_like(u))


def _rising(y: Tensor, r: Tensor) -> Tensor:
    """log Γ(y + r) - log Γ(r) - y log r, which vanishes for large r as y (y - 1)/2r.

    There it is ``(y + r - ½) log(1 + y/r) - y + s(y + r) - s(r)`` with Stirling's series s: both gamma functions have
    no digits of the difference.
    """
    if float(r.detach()) < _LARGE:
        return torch.lgamma(y + r) - torch.lgamma(r) - y * r.log()
    return (y + r - 0.5) * (y / r).log1p() - y + _stirling(y + r) - _stirling(r)


def _stirling(z: Tensor) -> Tensor:
    """log Γ(z) less (z - ½) log z - z + ½ log 2π."""
    square = z.square()
    return (1.0 / 12.0 - (1.0 / 360.0 - (1.0 / 1260.0 - 1.0 / (1680.0 * square)) / square) / square) / z
