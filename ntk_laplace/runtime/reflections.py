"""Orthonormal bases: columns that are written out, or products of reflections, which are k vectors instead of p."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Reflections:
    """U = I - Y T Yᵀ, orthogonal, (p, p): a matrix whose first columns are given.

    Attributes
    ----------
    vectors : Tensor, (p, k)
        Y.
    kernel : Tensor, (k, k)
        T, upper triangular.
    """

    vectors: Tensor
    kernel: Tensor

    @classmethod
    def of(cls, columns: Tensor) -> Reflections:
        """U whose first k columns are the orthonormal `columns` (p, k), up to signs; the others complete the basis."""
        packed, _ = torch.geqrf(columns)
        vectors = packed.tril(-1)
        vectors.diagonal().fill_(1.0)
        products = vectors.mT @ vectors
        # T⁻¹ + T⁻ᵀ = YᵀY, because U is orthogonal
        inverse = products.triu(1) + torch.diag(0.5 * products.diagonal())
        eye = torch.eye(len(inverse), dtype=inverse.dtype, device=inverse.device)
        return cls(vectors, torch.linalg.solve_triangular(inverse, eye, upper=True))

    @property
    def dtype(self) -> torch.dtype:
        """Floating type."""
        return self.vectors.dtype

    def turned(self, values: Tensor) -> Tensor:
        """Values (..., p) times U."""
        return values - (values @ self.vectors @ self.kernel) @ self.vectors.mT

    def turned_back(self, values: Tensor) -> Tensor:
        """Values (..., p) times Uᵀ."""
        return values - (values @ self.vectors @ self.kernel.mT) @ self.vectors.mT

    def columns(self) -> Tensor:
        """U written out, (1, p, p)."""
        return self.turned(torch.eye(len(self.vectors), dtype=self.dtype, device=self.vectors.device)).unsqueeze(0)

    def to(self, device: torch.device | None, dtype: torch.dtype) -> Reflections:
        """The same matrix on another device, or in another floating type."""
        return Reflections(self.vectors.to(device, dtype), self.kernel.to(device, dtype))


Side = Tensor | Reflections | None
"""One side of a basis: its columns (G, p, q), or reflections; None is the identity."""


def turned(values: Tensor, side: Side) -> Tensor:
    """Values (..., G, T, p) in the basis of a side's columns."""
    if side is None:
        return values
    return side.turned(values) if isinstance(side, Reflections) else torch.einsum("...gtp,gpq->...gtq", values, side)


def turned_back(values: Tensor, side: Side) -> Tensor:
    """Values (..., G, T, q) in such a basis, in the one that it was given in."""
    if side is None:
        return values
    return side.turned_back(values) if isinstance(side, Reflections) else values @ side.mT


@dataclass(frozen=True)
class Basis:
    """left ⊗ right of entries (G, o, i), such as the orthonormal eigenvectors of a parameter block.

    Attributes
    ----------
    left, right : Tensor, (G, o, p) and (G, i, q), Reflections, or None
    """

    left: Side
    right: Side

    def turn(self, values: Tensor) -> Tensor:
        """(left ⊗ right)ᵀ values, (..., G, o, i)."""
        return turned(turned(values.mT, self.left).mT, self.right)

    def back(self, values: Tensor) -> Tensor:
        """(left ⊗ right) values, (..., G, o, i)."""
        return turned_back(turned_back(values.mT, self.left).mT, self.right)


def side_record(side: Side) -> Any:
    """Plain containers of tensors."""
    return {"vectors": side.vectors, "kernel": side.kernel} if isinstance(side, Reflections) else side


def side_from_record(record: Any) -> Side:
    """Restore what `side_record` returned."""
    return Reflections(**record) if isinstance(record, Mapping) else record
