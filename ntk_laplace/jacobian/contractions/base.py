"""The interface of a contraction: the products of two clusters of blocks, by one method with its cost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from ntk_laplace.jacobian.blocks import Block, Cluster, written_out
from ntk_laplace.jacobian.contractions.tile import Tile, Variance, Variances, scaled

B = TypeVar("B", bound=Block)


@dataclass(frozen=True)
class Contraction(ABC, Generic[B]):
    """The products J_nk P0⁻¹ J_mlᵀ of two clusters, by one method.

    A subclass is one method: it gives its `cost`, and adds to a tile in `add`.

    Attributes
    ----------
    left, right : tuple of Block
        Clusters that name the same parameters.
    variances : mapping of str to float or Tensor
        As `read_once` returns them: a tile that asked a device for a number would wait for all work before it.
    """

    left: tuple[B, ...]
    right: tuple[B, ...]
    variances: Variances

    stage: ClassVar[int]  # contractions of one stage share a pass over K; later stages add to an initialized tile

    @classmethod
    @abstractmethod
    def applies(cls, left: Cluster, right: Cluster, variances: Variances) -> bool:
        """Whether the method is exact for these clusters and variances."""

    @property
    @abstractmethod
    def cost(self) -> int:
        """Multiply-adds per pair of examples; more where the method also moves much memory."""

    @abstractmethod
    def add(self, tile: Tile) -> None:
        """Add the products of all examples of both sides."""

    def diagonal(self) -> Tensor:
        """The products of each example with itself, (n, K, K); both sides are the same cluster."""
        k, n = self.left[0].shape
        total: Tensor | None = None
        for name, rows in written_out(self.left).items():
            variance = self.variance(name)
            if variance is not None:
                own = torch.einsum("knp,lnp->nkl", scaled(rows, variance), rows)
                total = own if total is None else total + own
        return self.left[0].values.new_zeros(n, k, k) if total is None else total

    def passes(self) -> Iterator[Contraction]:
        """Parts that fill K one after the other, to bound the memory of rows that are written out."""
        yield self

    def largest_tile(self) -> float:
        """Maximum number of examples on a side of a square tile, by the buffers of the method."""
        return float("inf")

    def tile_shape(self, n: int, step: int) -> tuple[int, int]:
        """Examples (rows, columns) of the tiles that fill K of n rows of examples; `step` bounds the buffers."""
        return step, step

    def cut_rows(self, examples: slice) -> Contraction:
        """The same products for some examples of the left side."""
        return replace(self, left=_cut(self.left, examples))

    def cut_columns(self, examples: slice) -> Contraction:
        """The same products for some examples of the right side."""
        return replace(self, right=_cut(self.right, examples))

    def variance(self, name: str | None) -> Variance | None:
        """Prior variance of a parameter; None if it contributes nothing."""
        return None if name is None else self.variances.get(name)

    def number(self, name: str | None) -> float:
        """Prior variance of a parameter that has only one, zero if it contributes nothing."""
        variance = self.variance(name)
        return 0.0 if variance is None else float(variance)

    @property
    def cotangents(self) -> int:
        """The larger of K1 and K2."""
        return max(self.left[0].shape[0], self.right[0].shape[0])

    @property
    def cost_of_rows(self) -> int:
        """Cost of products of written-out rows."""
        sizes = {name: size for block in self.left for name, size in block.sizes().items()}
        return self.cotangents**2 * sum(sizes.values())


def _cut(cluster: tuple[B, ...], examples: slice) -> tuple[B, ...]:
    return tuple(block.subset(examples) for block in cluster)
