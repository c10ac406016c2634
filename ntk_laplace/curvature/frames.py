"""Frames: the eigenvectors of a part's factors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ntk_laplace.curvature.parts import Part
from ntk_laplace.curvature.summary import Basis, Summary

__all__ = ["Frame", "eigen"]


@dataclass(frozen=True)
class Frame:
    """Eigenvectors of a part, and KFAC's eigenvalues in them.

    Attributes
    ----------
    basis : Basis
    left, right : Tensor or None
        Eigenvalues of Σ b bᵀ (G, o) and Σ a aᵀ (G, i) of a Kronecker part.
    """

    basis: Basis
    left: Tensor | None = None
    right: Tensor | None = None

    @classmethod
    def of(cls, summary: Summary) -> Frame:
        """Eigenvectors of a summary's factors; of a block or a diagonal, none."""
        if summary.part.kind != "kronecker":
            return cls(Basis(None, None))
        summary.require_finite()
        right, right_basis = eigen(summary.sums["right"])
        if summary.part.table:
            return cls(Basis(None, right_basis), summary.sums["left"], right)
        left, left_basis = eigen(summary.sums["left"])
        return cls(Basis(left_basis, right_basis), left, right)

    def scaled(self, part: Part, factor: float) -> Frame:
        """For Λ multiplied by a number."""
        if self.left is None or self.right is None:
            return self
        left, right = (1.0, factor) if part.table else (factor, 1.0)
        return Frame(self.basis, self.left * left, self.right * right)

    def to(self, device: torch.device, dtype: torch.dtype) -> Frame:
        """The same frame elsewhere."""
        left, right = (None if v is None else v.to(device, dtype) for v in (self.left, self.right))
        return Frame(self.basis.to(device, dtype), left, right)


def eigen(lower: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues of a semidefinite matrix, given by its lower triangle, at least zero; and its eigenvectors."""
    values, vectors = torch.linalg.eigh(lower, UPLO="L")
    return values.clamp_min(0.0), vectors  # rounding leaves those of a semidefinite matrix a little below zero
