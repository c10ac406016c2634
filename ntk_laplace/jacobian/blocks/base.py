"""The interface of all blocks, with defaults for rows that are written out a few examples at a time."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.panels import panels
from ntk_laplace.runtime.reflections import Basis
from ntk_laplace.runtime.resources import buffer_bytes


@dataclass(frozen=True)
class LayerRows(ABC):
    """Rows J_nk of one layer's parameters as entries (G, o, i), with o outputs and i inputs of G groups.

    A bias is the last input, whose value is one. By default rows are written out a few examples at a time.
    """

    copies: ClassVar[int] = 1  # of the written-out rows, while they are computed

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(K, N)."""

    @property
    @abstractmethod
    def like(self) -> Tensor:
        """A tensor of the rows' type and device."""

    @property
    def written_bytes(self) -> int:
        """Bytes of the written-out rows of one example."""
        return self.shape[0] * math.prod(self.entries) * self.like.element_size()

    @property
    @abstractmethod
    def entries(self) -> tuple[int, int, int]:
        """(G, o, i)."""

    @abstractmethod
    def written(self, part: slice) -> Tensor:
        """Rows of some examples, (n, K, G, o, i)."""

    @abstractmethod
    def rotated(self, basis: Basis) -> LayerRows:
        """Rows in another basis."""

    def squares(self) -> Tensor:
        """Σ_nk J_nk², (G, o, i)."""
        total = self.like.new_zeros(self.entries)
        for _, rows in self.panels():
            total += sum(row.square().sum(0) for row in rows.unbind(1))  # all squares would be as large as the panel
            del rows  # before the next are written
        return total

    def inner(self, weights: Tensor) -> Tensor:
        """Σ_e w_e J_nke J_nle for weights (G, o, i): (N, K, K)."""
        k, n = self.shape
        out, flat = self.like.new_empty(n, k, k), weights.expand(self.entries).flatten()
        for part, rows in self.panels(2):
            rows = rows.flatten(2)
            out[part] = (rows * flat) @ rows.mT
            del rows  # before the next are written
        return out

    def inner_diagonal(self, weights: Tensor) -> Tensor:
        """Diagonals of `inner`, (N, K)."""
        flat = weights.expand(self.entries).flatten()
        return torch.cat([rows.flatten(2).square() @ flat for _, rows in self.panels(2)])

    def joint(self, weights: Tensor) -> Tensor:
        """`inner` for all pairs of examples, interleaved, (N*K, N*K)."""
        k, n = self.shape
        out, flat = self.like.new_zeros(n * k, n * k), weights.expand(self.entries).flatten()
        panels = [(slice(part.start * k, part.stop * k), rows.flatten(2).flatten(0, 1)) for part, rows in
                  self.panels()]
        for rows, left in panels:
            for columns, right in panels:
                out[rows, columns] = (left * flat) @ right.T
        return out

    def products(self, vectors: Tensor) -> Tensor:
        """J_nk v for vectors (m, G, o, i): (K, N, m)."""
        flat = vectors.flatten(1).T
        return torch.cat([rows.flatten(2) @ flat for _, rows in self.panels()]).transpose(0, 1)

    def project(self, weights: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """(left ⊗ right)ᵀ (w ∘ J_nk) for bases (G, o, p) and (G, i, q): (N, K, G, p, q)."""
        k, n = self.shape
        out = self.like.new_empty(n, k, self.entries[0], left.shape[2], right.shape[2])
        for part, rows in self.panels(2):
            out[part] = left.mT @ (rows * weights) @ right
            del rows  # before the next are written
        return out

    def panels(self, tensors: int = 1) -> Iterator[tuple[slice, Tensor]]:
        """`written` a few examples at a time, with their slice: as many as fit with so many tensors of that size."""
        for part in steps(self.shape[1], tensors * self.copies * self.written_bytes, self.like.device):
            yield part, self.written(part)


@dataclass(frozen=True)
class Block(LayerRows):
    """Rows J_nk of some parameters, in each parameter's flat order, and as the entries of `LayerRows`."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Names of the parameters."""

    @property
    @abstractmethod
    def kind(self) -> tuple:
        """Key that is equal for blocks which can be joined or concatenated."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the stored tensors."""

    @property
    @abstractmethod
    def values(self) -> Tensor:
        """The stored gradients, of the rows' type and device; the example axis is the second one."""

    @property
    def like(self) -> Tensor:
        return self.values

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Number of entries of each parameter."""

    @abstractmethod
    def dense(self) -> dict[str, Tensor]:
        """The rows written out, (K, N, p) by parameter."""

    @abstractmethod
    def weighted(self, root: Tensor) -> Self:
        """Rows of SᵀJ for a root S (N, C, R)."""

    @abstractmethod
    def subset(self, index: slice | Tensor) -> Self:
        """Rows of some examples."""

    @abstractmethod
    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> Self:
        """The block in another floating type, or on another device."""

    @abstractmethod
    def jvp(self, vector: Mapping[str, Tensor]) -> Tensor:
        """J v for a vector v by parameter, (K, N)."""

    @abstractmethod
    def vjp(self, cotangent: Tensor) -> dict[str, Tensor]:
        """Jᵀ c for c (K, N), flat by parameter."""

    def push(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """J v for m vectors (m, p) by parameter, (K, N, m)."""
        k, n = self.shape
        out = self.values.new_zeros(k, n, len(next(iter(vectors.values()))))
        for part in self._dense_panels():
            for name, values in self.subset(part).dense().items():
                out[:, part] += values @ vectors[name].T
        return out

    def pull(self, cotangents: Tensor) -> dict[str, Tensor]:
        """Jᵀ c for m cotangents (K, N, m), (m, p) by parameter."""
        total = {name: self.values.new_zeros(cotangents.shape[2], size) for name, size in self.sizes().items()}
        for part in self._dense_panels():
            weights = cotangents[:, part].flatten(0, 1).T
            for name, values in self.subset(part).dense().items():
                total[name].addmm_(weights, values.flatten(0, 1))
        return total

    def _dense_panels(self) -> Iterator[slice]:
        k, n = self.shape
        yield from steps(n, k * sum(self.sizes().values()) * self.values.element_size(), self.values.device)

    @abstractmethod
    def joined(self, others: Sequence[Self]) -> Self:
        """Rows of several uses of the same parameters; all blocks have the same `kind`."""

    @abstractmethod
    def concatenated(self, parts: Sequence[Self]) -> Self:
        """Rows of the examples of several batches, all of this block's `kind`."""


@dataclass(frozen=True)
class GramCost:
    """Cost of a Gram matrix, by written-out rows and by factors.

    Attributes
    ----------
    written, contracted : int
        Multiply-adds per pair of examples. Contracted positions count twice, because their products are small.
    rows_size, factors_size : int
        Numbers stored per example.
    """

    written: int
    contracted: int
    rows_size: int
    factors_size: int


class Factored(Block):
    """Rows as sums of outer products of output gradients b and inputs, over positions."""

    weight: str
    b: Tensor

    @property
    @abstractmethod
    def gram_cost(self) -> GramCost:
        """Cost of a Gram matrix by written-out rows and by factors."""

    @abstractmethod
    def matches(self, other: Block) -> bool:
        """Whether the other block has factors of the same entries, in the same order."""

    @abstractmethod
    def input_products(self, other: Self, weight: float, bias: float) -> Tensor:
        """Inner products of the inputs at pairs of positions, times the prior variances, (n1, n2, G, T1, T2)."""

    @abstractmethod
    def own_input_products(self, weight: float, bias: float) -> Tensor:
        """`input_products` of each example with itself, (n, G, T, T)."""

    @abstractmethod
    def grouped_b(self) -> Tensor:
        """Output gradients, (K, N, G, T, o)."""

    @abstractmethod
    def with_cotangents_last(self) -> Self:
        """The block in the memory layout that the contraction of positions reads."""


def steps(n: int, per_example: int, device: torch.device) -> Iterator[slice]:
    """Slices of n examples whose written-out rows, of so many bytes each, fit in a panel."""
    return panels(n, per_example, buffer_bytes(tuning.WRITTEN_BYTES, device))


def weigh(values: Tensor, root: Tensor) -> Tensor:
    """Sᵀ over the leading output axis: (C, N, ...) and root (N, C, R) give (R, N, ...)."""
    flat = values.flatten(2)
    return torch.einsum("ncr,cnx->rnx", root, flat).reshape(root.shape[-1], *values.shape[1:])


def over_cotangents(cotangent: Tensor, b: Tensor) -> Tensor:
    """Σ_k c_kn b_kn: (K, N) and (K, N, ...) give (N, ...). A loop, because an einsum would run N tiny products."""
    weights = cotangent.reshape(*cotangent.shape, *(1,) * (b.ndim - 2))
    total = b[0] * weights[0]
    for k in range(1, len(b)):
        total.addcmul_(b[k], weights[k])
    return total


def cat_positions(parts: Sequence[Tensor], dim: int, pad_dim: int) -> Tensor:
    """Concatenate examples; batches with fewer positions are zero-padded, which contributes nothing."""
    width = max(part.shape[pad_dim] for part in parts)
    padded = []
    for part in parts:
        missing = width - part.shape[pad_dim]
        if missing:
            shape = list(part.shape)
            shape[pad_dim] = missing
            part = torch.cat([part, part.new_zeros(shape)], pad_dim)
        padded.append(part)
    return torch.cat(padded, dim)
