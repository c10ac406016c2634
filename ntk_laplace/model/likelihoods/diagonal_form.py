"""Output curvatures that are a diagonal less an outer product, in O(C) numbers per example instead of C²."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DiagonalForm:
    """Λ_n = diag(d_n) - u_n u_nᵀ, positive semidefinite.

    Attributes
    ----------
    values : Tensor, (N, C) or (2, N, C)
        d, or d and u.
    """

    values: Tensor

    @classmethod
    def of(cls, diagonal: Tensor, vector: Tensor | None = None) -> DiagonalForm:
        """The form with this d (N, C) and u (N, C); without u, Λ is diagonal."""
        return cls(diagonal if vector is None else torch.stack([diagonal, vector]))

    @property
    def diagonal(self) -> Tensor:
        """d, (N, C)."""
        return self.values if self.values.ndim == 2 else self.values[0]

    @property
    def vector(self) -> Tensor | None:
        """u, (N, C); None if Λ is diagonal."""
        return None if self.values.ndim == 2 else self.values[1]

    def times(self, weights: Tensor) -> DiagonalForm:
        """w_n Λ_n, for weights (N,)."""
        weights = weights.to(self.values).unsqueeze(1)
        both = weights if self.vector is None else torch.stack([weights, weights.sqrt()])
        return DiagonalForm(self.values * both)

    def detach(self) -> DiagonalForm:
        """The form without a graph."""
        return DiagonalForm(self.values.detach())

    def to(self, dtype: torch.dtype) -> DiagonalForm:
        """The form in another floating type."""
        return DiagonalForm(self.values.to(dtype))

    def quadratic(self, values: Tensor) -> Tensor:
        """Σ_n v_nᵀΛ_nv_n for v (N, C)."""
        total = (self.diagonal * values.square()).sum()
        return total if self.vector is None else total - (self.vector * values).sum(1).square().sum()

    def total(self) -> Tensor:
        """Σ_n Λ_n, (C, C)."""
        total = torch.diag(self.diagonal.sum(0))
        return total if self.vector is None else total.addmm_(self.vector.T, self.vector, alpha=-1.0)

    def squares(self, basis: Tensor | None = None) -> Tensor:
        """Diagonals of UᵀΛ_nU for columns U (C, m), (N, m); without U those of Λ_n. At least zero."""
        total = self.diagonal if basis is None else self.diagonal @ basis.square()
        if self.vector is None:
            return total
        own = self.vector if basis is None else self.vector @ basis
        return (total - own.square()).clamp_min(0.0)  # in the null space of Λ rounding gives either sign

    def pulled(self, blocks: Tensor) -> Tensor:
        """Derivative in `values` of a function with derivative G_n (N, C, C), symmetric, in Λ_n."""
        diagonal = blocks.diagonal(dim1=1, dim2=2)
        if self.vector is None:
            return diagonal
        return torch.stack([diagonal, -2.0 * (blocks @ self.vector.detach().unsqueeze(-1)).squeeze(-1)])
