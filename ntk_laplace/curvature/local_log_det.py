"""A smooth model of log det B near the hyperparameters at which a low rank and estimates of the rest are known."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ntk_laplace.curvature.log_det_terms import LogDetTerm
from ntk_laplace.runtime.linalg import cholesky_log_det, cholesky_of


class LocalLogDet(LogDetTerm):
    """log det (I + Σ_g e^(-s_g) F_gF_gᵀ) + k log (1 + Σ_g e^(-s_g) t_g/k) + constant, in changes s_g of log δ_g.

    Exact in the low rank, of which `cores` has F_gF_gᵀ (G, r, r). What it leaves has k equal eigenvalues with the trace
    t, so that its value `rest` and its derivatives at 0, minus `left` (G,), are those of the estimates. Value and
    gradient are those of one function, unlike the estimates themselves.
    """

    def __init__(self, cores: Tensor, left: Tensor, rest: float) -> None:
        used = float(left.sum())
        self._cores, self._eigenvalue = cores, _common_eigenvalue(used, rest)
        self._count = used * (1.0 + self._eigenvalue) / self._eigenvalue
        self._shares = left.to(cores) / max(used, 1e-300)
        self._constant = rest - self._count * math.log1p(self._eigenvalue)

    def value(self, shift: Tensor) -> Tensor:
        """At changes s (G,), differentiable in them."""
        cores, weights = self._cores, torch.exp(-shift.to(self._cores))
        inner = torch.eye(len(cores[0]), dtype=cores.dtype, device=cores.device)
        inner = inner + (weights.view(-1, 1, 1) * cores).sum(0)
        beyond = self._count * torch.log1p(self._eigenvalue * (self._shares * weights).sum())
        return cholesky_log_det(cholesky_of(inner)) + beyond + self._constant

    def value_and_slope(self, shift: Tensor) -> tuple[Tensor, Tensor]:
        """By one backward pass."""
        with torch.enable_grad():
            at = shift.detach().requires_grad_()
            value = self.value(at)
        return value.detach(), torch.autograd.grad(value, at)[0]


def _common_eigenvalue(used: float, log_det: float) -> float:
    """u with u/(1 + u) / log(1 + u) = used/log_det: that of k equal eigenvalues with these sums over them."""
    low, high = -18.0, 37.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        u = math.exp(middle)
        low, high = (middle, high) if u * log_det > used * (1.0 + u) * math.log1p(u) else (low, middle)
    return math.exp(low)
