"""A smooth model of log det B near the hyperparameters at which a low rank and estimates of the rest are known."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ntk_laplace.runtime.linalg import cholesky_log_det, cholesky_of


def approximate_log_det(cores: Tensor, left: Tensor, rest: float) -> Callable[[Tensor], Tensor]:
    """log det (I + Σ_g e^(-s_g) F_gF_gᵀ) + k log (1 + Σ_g e^(-s_g) t_g/k) + constant, in changes s_g of log δ_g.

    Exact in the low rank, of which `cores` has F_gF_gᵀ (G, r, r). What it leaves has k equal eigenvalues with the trace
    t, so that its value `rest` and its derivatives at 0, minus `left` (G,), are those of the estimates. Value and
    gradient are those of one function, unlike the estimates themselves.
    """
    used = float(left.sum())
    eigenvalue = _common_eigenvalue(used, rest)
    count, shares = used * (1.0 + eigenvalue) / eigenvalue, left.to(cores) / max(used, 1e-300)
    constant = rest - count * math.log1p(eigenvalue)

    def log_det(shift: Tensor) -> Tensor:
        weights = torch.exp(-shift.to(cores))
        inner = torch.eye(len(cores[0]), dtype=cores.dtype, device=cores.device)
        inner = inner + (weights.view(-1, 1, 1) * cores).sum(0)
        beyond = count * torch.log1p(eigenvalue * (shares * weights).sum())
        return cholesky_log_det(cholesky_of(inner)) + beyond + constant

    return log_det


def _common_eigenvalue(used: float, log_det: float) -> float:
    """u with u/(1 + u) / log(1 + u) = used/log_det: that of k equal eigenvalues with these sums over them."""
    low, high = -18.0, 37.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        u = math.exp(middle)
        low, high = (middle, high) if u * log_det > used * (1.0 + u) * math.log1p(u) else (low, middle)
    return math.exp(low)
