"""What leaving out each training point changes, matrix by matrix."""

from __future__ import annotations

import torch
from torch import Tensor


def dense_effects(h: Tensor, reference, jac_new: Tensor, direction: Tensor, variance: bool, exact: bool) -> Tensor:
    """cᵀ of the change of f, or of its variance, for every training point, matrix by matrix, (n, N)."""
    inverse, columns = torch.linalg.inv(h), []
    for jac, curvature, residual in zip(reference.jac, reference.hessian, reference.residual, strict=True):
        inner = jac @ inverse @ jac.T
        leverage = torch.linalg.eigvals(curvature @ inner).real.max()
        eye = torch.eye(len(inner), dtype=inner.dtype)
        held = eye - curvature @ inner if exact or leverage <= 0.9 else eye
        seen = torch.einsum("xc,xcp,pq,kq->xk", direction, jac_new, inverse, jac)
        if variance:
            columns.append(torch.einsum("xk,kl,xl->x", seen, torch.linalg.solve(held, curvature), seen))
        else:
            columns.append(-seen @ torch.linalg.solve(held, residual))
    return torch.stack(columns, 1)
