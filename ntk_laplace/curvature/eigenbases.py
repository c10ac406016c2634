"""Eigenbases: eigenvalues and eigenvectors of a parameter block's factors, computed on first use.

Eigenvalues alone are cheaper than both, and sufficient for the evidence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.curvature.block_summary import Summary, sketch_vectors
from ntk_laplace.runtime.krylov import low_rank
from ntk_laplace.runtime.linalg import symmetric_eigen, symmetric_eigenvalues, unique_null_space_
from ntk_laplace.runtime.reduction import Reducer
from ntk_laplace.runtime.reflections import Basis, Reflections, Side, side_from_record, side_record


class FactorEigen:
    """Lazy eigendecomposition of semidefinite matrices: one factor of a parameter block, or an exact block.

    Parameters
    ----------
    lower : Tensor, (..., p, p), optional
        The matrices' lower triangles. Not needed if `values` and `vectors` are given, or for a diagonal matrix, whose
        diagonal is `values`.
    values : Tensor, (..., p), optional
        Eigenvalues, if known.
    vectors : Tensor, (..., p, p), or Reflections, optional
        Eigenvectors, if known.
    unique : bool
        Whether eigenvectors of eigenvalue 0 have to be the same on every machine.
    """

    def __init__(
        self, lower: Tensor | None, values: Tensor | None = None, vectors: Side = None,
        unique: bool = False,
    ) -> None:
        self.lower, self._values, self._vectors, self._unique = lower, values, vectors, unique

    @property
    def values(self) -> Tensor:
        """Eigenvalues, ascending; slightly negative values, which rounding causes, are clamped to zero."""
        if self._values is None:
            assert self.lower is not None
            self._values = symmetric_eigenvalues(self.lower).clamp_min(0.0)
        return self._values

    @property
    def vectors(self) -> Side:
        """Eigenvectors; None for the identity."""
        if self._vectors is None and self.lower is not None:
            values, vectors = symmetric_eigen(self.lower)
            self._vectors = unique_null_space_(values, vectors) if self._unique else vectors
            if self._values is None:  # else keep the eigenvalues already returned
                self._values = values.clamp_min(0.0)
        return self._vectors

    @property
    def made(self) -> bool:
        """Whether eigenvectors are computed, or not needed."""
        return self._vectors is not None or self.lower is None

    def shared(self, reducer: Reducer) -> FactorEigen:
        """The decomposition that rank 0 has computed."""
        vectors = self.vectors
        if vectors is None:
            return self
        if isinstance(vectors, Reflections):
            same = Reflections(reducer.broadcast(vectors.vectors), reducer.broadcast(vectors.kernel))
            return FactorEigen(None, reducer.broadcast(self.values), same)
        return FactorEigen(self.lower, reducer.broadcast(self.values), reducer.broadcast(vectors))

    def to(self, device: torch.device, dtype: torch.dtype) -> FactorEigen:
        """The same decomposition on another device, or in another floating type."""
        lower, values = (None if one is None else one.to(device, dtype) for one in (self.lower, self._values))
        vectors = None if self._vectors is None else self._vectors.to(device, dtype)
        return FactorEigen(lower, values, vectors, self._unique)


class Eigenbasis:
    """Eigenvectors of a parameter block, and the eigenvalues of its Kronecker factors.

    Parameters
    ----------
    outer, inner : FactorEigen, optional
        Of Σ b bᵀ and Σ a aᵀ of a Kronecker block; None for other kinds.
    scales : tuple of float
        Multipliers of the eigenvalues of `outer` and `inner`.
    """

    def __init__(
        self, outer: FactorEigen | None = None, inner: FactorEigen | None = None,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        self._outer, self._inner, self._scales = outer, inner, scales

    @classmethod
    def of(cls, summary: Summary, rank: int | None = None, unique: bool = False) -> Eigenbasis:
        """Eigenbasis of a summary's factors, of wide ones at this rank; empty for an exact block or a diagonal.

        Parameters
        ----------
        summary : Summary
        rank : int, optional
        unique : bool
            Whether the eigenvectors of eigenvalue 0 have to be the same on every machine: what is summed in the basis
            for other data depends on them.
        """
        if summary.block.kind != "kronecker":
            return cls()
        if summary.block.table:
            return cls(FactorEigen(None, summary.sums["left"]), FactorEigen(summary.sums["right"], unique=unique))
        left, right = (_side(summary.sums, name, rank, unique) for name in ("left", "right"))
        return cls(left, right)

    @property
    def basis(self) -> Basis:
        """U_B ⊗ U_A."""
        return Basis(*(None if side is None else side.vectors for side in (self._outer, self._inner)))

    @property
    def left(self) -> Tensor | None:
        """Eigenvalues of Σ b bᵀ, (G, o)."""
        return None if self._outer is None else self._outer.values * self._scales[0]

    @property
    def right(self) -> Tensor | None:
        """Eigenvalues of Σ a aᵀ, (G, i)."""
        return None if self._inner is None else self._inner.values * self._scales[1]

    @property
    def inputs(self) -> Tensor | None:
        """Lower triangle of the matrix of the inputs' side, (G, i, i); None if it is not kept."""
        return None if self._inner is None else self._inner.lower

    @property
    def made(self) -> bool:
        """Whether eigenvectors are computed."""
        return all(side is None or side.made for side in (self._outer, self._inner))

    def scaled(self, table: bool, factor: float) -> Eigenbasis:
        """Eigenbasis for Λ multiplied by `factor`, which scales the outer side, or the inner side of a `table`."""
        outer, inner = self._scales
        scales = (outer, inner * factor) if table else (outer * factor, inner)
        return Eigenbasis(self._outer, self._inner, scales)

    def relative_to(self, precision: Tensor, summary: Summary) -> Eigenbasis:
        """The eigenbasis with that of P0^-½ A P0^-½ on the inputs' side, for precisions (G, i) of the inputs."""
        scale = precision.rsqrt()
        inputs = FactorEigen(summary.sums["right"] * scale.unsqueeze(1) * scale.unsqueeze(2))
        return Eigenbasis(self._outer, inputs, (self._scales[0], 1.0))  # the sums have the scale already

    def shared(self, reducer: Reducer) -> Eigenbasis:
        """The eigenbasis that rank 0 has computed: signs, and vectors of equal eigenvalues, differ between machines."""
        outer, inner = (None if side is None else side.shared(reducer) for side in (self._outer, self._inner))
        return Eigenbasis(outer, inner, self._scales)

    def to(self, device: torch.device, dtype: torch.dtype) -> Eigenbasis:
        """The same eigenbasis on another device, or in another floating type."""
        outer, inner = (None if side is None else side.to(device, dtype) for side in (self._outer, self._inner))
        return Eigenbasis(outer, inner, self._scales)

    def record(self) -> dict[str, Any]:
        """Plain containers of tensors. The keys are of version 1."""
        basis = self.basis
        return {"basis_left": side_record(basis.left), "basis_right": side_record(basis.right), "left": self.left,
                "right": self.right}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Eigenbasis:
        """Restore an eigenbasis from its record."""
        if record["right"] is None:
            return cls()
        outer, inner = (FactorEigen(None, record[side], side_from_record(record[f"basis_{side}"]))
                        for side in ("left", "right"))
        return cls(outer, inner)


def _side(sums: Mapping[str, Tensor], name: str, rank: int | None, unique: bool) -> FactorEigen:
    """Eigendecomposition of a factor, or of Q diag(α) Qᵀ + σ (I - Q Qᵀ) with its trace, for at most `rank` values α.

    α are the largest eigenvalues of a Nyström approximation, which are at most those of the factor, and at least σ.
    So their sums are at most those of the factor's largest eigenvalues, and log det (I + c factor), which is concave in
    the eigenvalues, is at least that of the factor.
    """
    if name in sums:
        return FactorEigen(sums[name], unique=unique)
    products, trace = sums[f"{name}_products"], sums[f"{name}_trace"]
    width, rank = len(products), rank or products.shape[1]
    tests = sketch_vectors(width, rank, products).T.contiguous()
    found = low_rank(lambda _: products.T.clone(), tests, products.new_ones(width))
    values, vectors = found.values[-rank:], found.factor[-rank:]
    rest = _rest(values, trace, width)
    while len(values) and bool(values[0] < rest):
        values, vectors = values[1:], vectors[1:]
        rest = _rest(values, trace, width)
    columns = (vectors * values.rsqrt().unsqueeze(1)).T
    every = torch.cat([values, rest.expand(width - len(values))])
    return FactorEigen(None, every.unsqueeze(0), Reflections.of(columns))


def _rest(values: Tensor, trace: Tensor, width: int) -> Tensor:
    """σ, 0 up to rounding where the values α have the whole trace."""
    left = trace - values.sum()
    left = torch.where(left > width * torch.finfo(values.dtype).eps * trace, left, 0.0)
    return left / max(1, width - len(values))
