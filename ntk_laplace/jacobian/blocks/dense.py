"""Rows that are written out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ntk_laplace.jacobian.blocks.base import Block
from ntk_laplace.runtime.reflections import Basis


@dataclass(frozen=True)
class Dense(Block):
    """Dense rows of one parameter, or of several side by side for one matrix product over all of them.

    Attributes
    ----------
    spans : tuple of (str, int, int)
        Name, first and last column (exclusive) of each parameter.
    rows : Tensor, (N, K, Σp)
        Each parameter in its flat order. Contiguous rows of consecutive examples are one matrix.
    layer : tuple of int, optional
        (G, o, i), if the columns are the entries of one layer; by default (1, 1, Σp).
    """

    spans: tuple[tuple[str, int, int], ...]
    rows: Tensor
    layer: tuple[int, int, int] | None = None

    @classmethod
    def of(cls, name: str, rows: Tensor) -> Dense:
        """Rows (K, N, p) of one parameter."""
        return cls(((name, 0, rows.shape[2]),), rows.transpose(0, 1))

    @classmethod
    def of_layer(cls, name: str, rows: Tensor) -> Dense:
        """Rows (N, K, G, o, i) of one layer's entries."""
        g, o, i = rows.shape[2:]
        return cls(((name, 0, g * o * i),), rows.flatten(2), (g, o, i))

    @classmethod
    def cat(cls, blocks: Sequence[Dense]) -> Dense:
        """The rows of several parameters as one matrix per example."""
        return cls(cls.spans_of(blocks), torch.cat([block.rows for block in blocks], 2).contiguous())

    @staticmethod
    def spans_of(blocks: Sequence[Dense]) -> tuple[tuple[str, int, int], ...]:
        """Spans of the parameters of several blocks, side by side."""
        spans, start = [], 0
        for block in blocks:
            spans += [(name, start + first, start + last) for name, first, last in block.spans]
            start += block.rows.shape[2]
        return tuple(spans)

    @property
    def weight(self) -> str:
        """Name of the parameter, or of the first of several."""
        return self.spans[0][0]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _, _ in self.spans)

    @property
    def kind(self) -> tuple:
        return ("dense", self.spans)

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.shape[1], self.rows.shape[0]

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    @property
    def values(self) -> Tensor:
        return self.rows.transpose(0, 1)

    def sizes(self) -> dict[str, int]:
        return {name: stop - start for name, start, stop in self.spans}

    def dense(self) -> dict[str, Tensor]:
        return {name: self.values[:, :, start:stop] for name, start, stop in self.spans}

    def weighted(self, root: Tensor) -> Dense:
        return replace(self, rows=root.mT @ self.rows)

    def subset(self, index: slice | Tensor) -> Dense:
        return replace(self, rows=self.rows[index])

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> Dense:
        return replace(self, rows=self.rows.to(device or self.rows.device, dtype))

    def jvp(self, vector: Mapping[str, Tensor]) -> Tensor:
        return (self.rows @ torch.cat([vector[name].flatten() for name in self.names])).T

    def vjp(self, cotangent: Tensor) -> dict[str, Tensor]:
        # in the order of memory, this is one matrix product without a copy
        rows, weights = self.rows, cotangent.T
        if rows.stride(0) < rows.stride(1):
            rows, weights = rows.transpose(0, 1), cotangent
        total = weights.flatten() @ rows.flatten(0, 1)
        return {name: total[start:stop] for name, start, stop in self.spans}

    def push(self, vectors: Mapping[str, Tensor]) -> Tensor:
        return (self.rows @ torch.cat([vectors[name] for name in self.names], 1).T).transpose(0, 1)

    def pull(self, cotangents: Tensor) -> dict[str, Tensor]:
        rows, weights = self.rows, cotangents.transpose(0, 1)
        if rows.stride(0) < rows.stride(1):  # in the order of memory, as in `vjp`
            rows, weights = rows.transpose(0, 1), cotangents
        total = weights.flatten(0, 1).T @ rows.flatten(0, 1)
        return {name: total[:, start:stop] for name, start, stop in self.spans}

    def joined(self, others: Sequence[Dense]) -> Dense:
        rows = self.rows.clone()
        for other in others:
            rows += other.rows
        return replace(self, rows=rows)

    def concatenated(self, parts: Sequence[Dense]) -> Dense:
        return replace(self, rows=torch.cat([part.rows for part in parts]))

    @property
    def entries(self) -> tuple[int, int, int]:
        return self.layer or (1, 1, self.rows.shape[2])

    def written(self, part: slice) -> Tensor:
        return self.rows[part].unflatten(2, self.entries)

    def rotated(self, basis: Basis) -> Dense:
        return Dense.of_layer(self.weight, basis.turn(self.written(slice(None))))
