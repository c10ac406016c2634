"""A low-rank factor of a positive semidefinite matrix from products with it, which it dominates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ntk_laplace.runtime.linalg import symmetric_eigen

__all__ = ["LowRank", "low_rank"]


@dataclass(frozen=True)
class LowRank:
    """F with FᵀF at most A, in the order of semidefinite matrices; rows of F are vectors.

    With C a root of A (A = CᵀC) and Q an orthonormal basis of C Ωᵀ, F = QᵀC: the Nyström approximation of A. The basis
    is that of orthogonal rows of F.

    Attributes
    ----------
    values : Tensor, (r,)
        Eigenvalues λ of FᵀF, ascending.
    vectors : Tensor, (r, d)
        Its eigenvectors: F = λ^½ times these.
    tests : Tensor, (m, d)
        Ω.
    mixing : Tensor, (r, m)
        W with F = W Ω A and W Ω A Ωᵀ Wᵀ = I.
    """

    values: Tensor
    vectors: Tensor
    tests: Tensor
    mixing: Tensor


def low_rank(operator: Callable[[Tensor], Tensor], tests: Tensor) -> LowRank:
    """Nyström approximation A Ωᵀ (Ω A Ωᵀ)⁻¹ Ω A for test vectors, the rows of Ω (m, d), from one product each.

    Directions in which Ω A Ωᵀ is zero up to rounding are left out, so that nothing is divided by rounding errors: r is
    then below m.
    """
    images = operator(tests)
    core = (tests @ images.T).double()
    # an image is wrong by a share of its own size: in units of these sizes rounding is the same everywhere
    sizes = core.diagonal().clamp_min(0.0).sqrt()
    units = torch.where(sizes > 0, sizes, torch.inf).reciprocal()
    values, vectors = torch.linalg.eigh(0.5 * (core + core.T) * units * units.unsqueeze(1))
    kept = values > 8.0 * len(values) * torch.finfo(tests.dtype).eps
    root = (units.unsqueeze(1) * vectors[:, kept] * values[kept].rsqrt()).to(tests)
    factor = root.T @ images
    values, turn = symmetric_eigen(factor @ factor.T)
    clear = values > len(values) * torch.finfo(tests.dtype).eps * values[-1:].clamp_min(0.0)
    values, turn = values[clear], turn[:, clear]
    return LowRank(values, (turn * values.rsqrt()).T @ factor, tests, (root @ turn).T)
