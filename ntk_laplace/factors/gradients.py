"""Gradients: one backward pass per seed, and each node's output gradient put where rows are made from it.

A plain loop over seeds beats one batched pass on CPUs. What a layer's factors need is kept for all seeds, laid out for
what comes next: seeds inside the examples where rows are written out, so that each example's gradients are one
matrix, and a seed after the other where factors are summed. Rows that are plain sums are made at once from the one
gradient at hand, which is then gone; and so are the sums Σ g gᵀ, or Σ g² over the seeds, where nothing else of a
layer's gradients is wanted, which spares a copy of them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ntk_laplace.factors.folding import Folding
from ntk_laplace.factors.graph import Graph
from ntk_laplace.factors.rules import OperandDense, OperandRows
from ntk_laplace.linalg import add_outer_lower_

__all__ = ["Gradients", "Reading", "edges", "kept_whole"]


@dataclass(frozen=True)
class Reading:
    """What makes rows from the output gradient of a node.

    Attributes
    ----------
    consumer : int
        Number of the node.
    axis : int
        Its output's axis that holds the examples.
    read : callable or None
        Rows for gradients (K, *output shape); None if all that is asked is whether there are any.
    at_once : bool
        Read one seed at a time and keep those rows, in place of the gradients of all seeds.
    folded : bool
        Keep sums alone, and the gradients of a few examples.
    """

    consumer: int
    axis: int
    read: Callable[[Tensor], OperandRows | None] | None
    at_once: bool = False
    folded: bool = False


def edges(readings: Sequence[Reading]) -> list[int]:
    """Numbers of the nodes that are read, each once."""
    return sorted({reading.consumer for reading in readings})


def kept_whole(readings: Sequence[Reading]) -> set[int]:
    """Nodes whose gradients are kept for all seeds: one reader that needs it is enough."""
    return {reading.consumer for reading in readings if reading.read and not (reading.at_once or reading.folded)}


class Gradients:
    """Output gradients of a batch for all its seeds, as far as they are needed for rows.

    Parameters
    ----------
    graph : Graph
    readings : sequence of Reading
    seeds : Tensor, (K, N, C)
        What each backward pass starts from.
    seeds_first : bool
        Keep the gradients of a layer without positions a seed after the other.
    folding : Folding, optional
        Where readings are folded: over which type, and which examples are kept.
    """

    def __init__(
        self, graph: Graph, readings: Sequence[Reading], seeds: Tensor, seeds_first: bool = False,
        folding: Folding | None = None,
    ) -> None:  # fmt: skip
        self.graph, self.readings, self.seeds, self.seeds_first = graph, list(readings), seeds, seeds_first
        self.folding = folding
        self._whole: dict[int, Tensor] = {}  # by node
        self._rows: dict[int, Tensor] = {}  # by reading
        self._sums: dict[int, Tensor] = {}  # by reading, Σ g gᵀ or Σ g²
        self._some: dict[int, Tensor] = {}  # by reading, g of a few examples
        self._watched: set[int] = set()  # readings without rows that have a gradient all the same

    def collect(self, out: Tensor) -> Gradients:
        """Run the backward passes from the outputs `out` (N, C); returns itself."""
        axes = {reading.consumer: reading.axis for reading in self.readings}
        whole, numbers = kept_whole(self.readings), edges(self.readings)
        summed = [(index, each) for index, each in enumerate(self.readings) if each.consumer not in whole]
        wanted = [GradientEdge(self.graph.nodes[number], 0) for number in numbers]
        for k, seed in enumerate(self.seeds if numbers else ()):
            found = torch.autograd.grad(out, wanted, seed, retain_graph=True, allow_unused=True)
            gradients = dict(zip(numbers, found, strict=True))
            for number in whole:
                self._keep(self._whole, number, gradients[number], k, axes[number])
            for index, each in summed:
                gradient = gradients[each.consumer]
                if each.read is None:
                    self._watched |= {index} if gradient is not None and bool(gradient.any()) else set()
                    continue
                if each.folded:
                    self._fold(index, gradient, k)
                    continue
                rows = None if gradient is None else each.read(gradient.unsqueeze(0)).rows[0]
                self._keep(self._rows, index, rows, k, 0)
            found = gradients = gradient = rows = None  # their memory, warm, is the next seed's
        return self

    def _keep(self, kept: dict[int, Tensor], key: int, values: Tensor | None, k: int, axis: int) -> None:
        """Write what seed k gives; None is zero."""
        if values is None:
            if key in kept:
                kept[key][k] = 0.0
            return
        if key not in kept:
            count, n = self.seeds.shape[:2]
            flat = self.seeds_first and values.ndim == 2 and len(values) == n
            kept[key] = values.new_empty(count, *values.shape) if flat else _room(values, count, axis)
            kept[key][:k] = 0.0
        kept[key][k] = values

    def _fold(self, index: int, gradient: Tensor | None, k: int) -> None:
        """Add what seed k gives to the sums, while it is warm."""
        squared, dtype = self.folding.fold.squared, self.folding.dtype
        if index not in self._sums:
            n, o = self.graph.shape(self.readings[index].consumer)
            self._sums[index] = self.seeds.new_zeros(n if squared else o, o, dtype=dtype)
            self._some[index] = self.seeds.new_zeros(len(self.seeds), len(self.folding.some), o, dtype=self.graph.dtype)
        if gradient is None:
            return
        self._some[index][k] = gradient[self.folding.some]
        gradient = gradient.to(dtype)
        if squared:
            self._sums[index].addcmul_(gradient, gradient)
        else:
            add_outer_lower_(self._sums[index], gradient)

    def folds(self, index: int) -> tuple[Tensor, Tensor]:
        """Σ g gᵀ (o, o) or Σ_k g² (N, o) of one folded reading, and g at the few examples, (K, m, o)."""
        return self._sums.pop(index), self._some.pop(index)

    def rows(self, index: int) -> OperandRows | None:
        """Rows of the operand of one reading, for all seeds."""
        consumer, read = self.readings[index].consumer, self.readings[index].read
        if index in self._rows:
            return OperandDense(self._rows[index])
        if consumer in self._whole:
            return read(self._whole[consumer])
        # no seed reaches the node
        return read(self.seeds.new_zeros(len(self.seeds), *self.graph.shape(consumer)))

    def any(self, index: int) -> bool:
        """Whether what one reading reads has an entry other than zero."""
        if index in self._watched:
            return True
        by_reading = self._sums.get(index, self._rows.get(index))
        values = self._whole.get(self.readings[index].consumer) if by_reading is None else by_reading
        return values is not None and bool(values.any())

    def forget(self, indices: Sequence[int]) -> None:
        """Free what these readings read, and nobody else."""
        for index in indices:
            self._rows.pop(index, None)
            self._whole.pop(self.readings[index].consumer, None)
        for index in indices:
            self.readings[index] = None  # with the inputs that it has unfolded


def _room(values: Tensor, num_seeds: int, axis: int) -> Tensor:
    """Room for (K, *shape of values), in memory in the order of `values`, the seeds just outside the axis after `axis`.

    That axis holds channels: then channels of all seeds are one axis of a matrix, and positions the other.
    """
    order = sorted(range(values.ndim), key=lambda d: -values.stride(d)) if _dense(values) else list(range(values.ndim))
    order.insert(order.index(axis + 1) if axis + 1 < values.ndim else 0, -1)
    sizes = [num_seeds if d < 0 else values.shape[d] for d in order]
    return values.new_empty(sizes).permute([order.index(d) for d in range(-1, values.ndim)])


def _dense(values: Tensor) -> bool:
    return values.is_contiguous() or (values.ndim == 4 and values.is_contiguous(memory_format=torch.channels_last))
