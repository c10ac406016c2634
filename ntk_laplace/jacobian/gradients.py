"""Gradients: one backward pass per cotangent, and each node's output gradient put where rows are made from it.

A plain loop over cotangents beats one batched pass on CPUs. What a layer's factors need is kept for all cotangents,
laid out for what comes next: cotangents inside the examples where rows are written out, so that each example's
gradients are one matrix, and a cotangent after the other where factors are summed. Rows that are plain sums are made at
once from the one gradient at hand, which is then gone; and so are the sums Σ g gᵀ, or Σ g² over the cotangents, where
nothing else of a layer's gradients is wanted, which spares a copy of them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ntk_laplace.jacobian.fused import FusedAccumulation
from ntk_laplace.jacobian.graph import Graph
from ntk_laplace.jacobian.rules import OperandDense, OperandRows
from ntk_laplace.linalg import add_outer_lower_

__all__ = ["Extraction", "Gradients", "edges", "kept_whole"]


@dataclass(frozen=True)
class Extraction:
    """What makes rows from the output gradient of a node.

    Attributes
    ----------
    consumer : int
        Number of the node.
    axis : int
        Its output's axis that holds the examples.
    extract : callable or None
        Jacobian for gradients (K, *output shape); None if all that is asked is whether there are any.
    at_once : bool
        Read one cotangent at a time and keep those rows, in place of the gradients of all cotangents.
    fused : bool
        Keep sums alone, and the gradients of a few examples.
    """

    consumer: int
    axis: int
    extract: Callable[[Tensor], OperandRows | None] | None
    at_once: bool = False
    fused: bool = False


def edges(extractions: Sequence[Extraction]) -> list[int]:
    """Numbers of the nodes that are read, each once."""
    return sorted({extraction.consumer for extraction in extractions})


def kept_whole(extractions: Sequence[Extraction]) -> set[int]:
    """Nodes whose gradients are kept for all cotangents: one extractor that needs it is enough."""
    return {each.consumer for each in extractions if each.extract and not (each.at_once or each.fused)}


class Gradients:
    """Output gradients of a batch for all its cotangents, as far as they are needed for rows.

    Parameters
    ----------
    graph : Graph
    extractions : sequence of Extraction
    cotangents : Tensor, (K, N, C)
        What each backward pass starts from.
    cotangents_first : bool
        Keep the gradients of a layer without positions a cotangent after the other.
    accumulation : FusedAccumulation, optional
        Where extractions are fused: over which type, and which examples are kept.
    """

    def __init__(
        self, graph: Graph, extractions: Sequence[Extraction], cotangents: Tensor, cotangents_first: bool = False,
        accumulation: FusedAccumulation | None = None,
    ) -> None:  # fmt: skip
        self.graph, self.extractions = graph, list(extractions)
        self.cotangents, self.cotangents_first = cotangents, cotangents_first
        self.accumulation = accumulation
        self._whole: dict[int, Tensor] = {}  # by node
        self._rows: dict[int, Tensor] = {}  # by extraction
        self._sums: dict[int, Tensor] = {}  # by extraction, Σ g gᵀ or Σ g²
        self._some: dict[int, Tensor] = {}  # by extraction, g of a few examples
        self._watched: set[int] = set()  # extractions without rows that have a gradient all the same

    def collect(self, out: Tensor) -> Gradients:
        """Run the backward passes from the outputs `out` (N, C); returns itself."""
        axes = {extraction.consumer: extraction.axis for extraction in self.extractions}
        whole, numbers = kept_whole(self.extractions), edges(self.extractions)
        summed = [(index, each) for index, each in enumerate(self.extractions) if each.consumer not in whole]
        wanted = [GradientEdge(self.graph.nodes[number], 0) for number in numbers]
        for k, cotangent in enumerate(self.cotangents if numbers else ()):
            found = torch.autograd.grad(out, wanted, cotangent, retain_graph=True, allow_unused=True)
            gradients = dict(zip(numbers, found, strict=True))
            for number in whole:
                self._keep(self._whole, number, gradients[number], k, axes[number])
            for index, each in summed:
                gradient = gradients[each.consumer]
                if each.extract is None:
                    self._watched |= {index} if gradient is not None and bool(gradient.any()) else set()
                    continue
                if each.fused:
                    self._fused_layers(index, gradient, k)
                    continue
                rows = None if gradient is None else each.extract(gradient.unsqueeze(0)).rows[0]
                self._keep(self._rows, index, rows, k, 0)
            found = gradients = gradient = rows = None  # their memory, warm, is the next cotangent's
        return self

    def _keep(self, kept: dict[int, Tensor], key: int, values: Tensor | None, k: int, axis: int) -> None:
        """Write what cotangent k gives; None is zero."""
        if values is None:
            if key in kept:
                kept[key][k] = 0.0
            return
        if key not in kept:
            count, n = self.cotangents.shape[:2]
            flat = self.cotangents_first and values.ndim == 2 and len(values) == n
            kept[key] = values.new_empty(count, *values.shape) if flat else _room(values, count, axis)
            kept[key][:k] = 0.0
        kept[key][k] = values

    def _fused_layers(self, index: int, gradient: Tensor | None, k: int) -> None:
        """Add what cotangent k gives to the sums, while it is warm."""
        squared, dtype = self.accumulation.fused_layers.squared, self.accumulation.dtype
        if index not in self._sums:
            n, o = self.graph.shape(self.extractions[index].consumer)
            self._sums[index] = self.cotangents.new_zeros(n if squared else o, o, dtype=dtype)
            self._some[index] = self.cotangents.new_zeros(len(self.cotangents), len(self.accumulation.sample), o,
                                                          dtype=self.graph.dtype)
        if gradient is None:
            return
        self._some[index][k] = gradient[self.accumulation.sample]
        gradient = gradient.to(dtype)
        if squared:
            self._sums[index].addcmul_(gradient, gradient)
        else:
            add_outer_lower_(self._sums[index], gradient)

    def fused_sums(self, index: int) -> tuple[Tensor, Tensor]:
        """Σ g gᵀ (o, o) or Σ_k g² (N, o) of one fused extraction, and g at the few examples, (K, m, o)."""
        return self._sums.pop(index), self._some.pop(index)

    def rows(self, index: int) -> OperandRows | None:
        """Rows of the operand of one extraction, for all cotangents."""
        consumer, extract = self.extractions[index].consumer, self.extractions[index].extract
        if index in self._rows:
            return OperandDense(self._rows[index])
        if consumer in self._whole:
            return extract(self._whole[consumer])
        # no cotangent reaches the node
        return extract(self.cotangents.new_zeros(len(self.cotangents), *self.graph.shape(consumer)))

    def any(self, index: int) -> bool:
        """Whether what one extraction reads has an entry other than zero."""
        if index in self._watched:
            return True
        by_reading = self._sums.get(index, self._rows.get(index))
        values = self._whole.get(self.extractions[index].consumer) if by_reading is None else by_reading
        return values is not None and bool(values.any())

    def forget(self, indices: Sequence[int]) -> None:
        """Free what these extractions read, and nobody else."""
        for index in indices:
            self._rows.pop(index, None)
            self._whole.pop(self.extractions[index].consumer, None)
        for index in indices:
            self.extractions[index] = None  # with the inputs that it has unfolded


def _room(values: Tensor, num_cotangents: int, axis: int) -> Tensor:
    """An empty tensor (K, *shape of values) in the memory order of `values`, cotangents just outside the next axis.

    The axis after `axis` holds channels: channels of all cotangents are then one axis of a matrix, positions the other.
    """
    order = sorted(range(values.ndim), key=lambda d: -values.stride(d)) if _dense(values) else list(range(values.ndim))
    order.insert(order.index(axis + 1) if axis + 1 < values.ndim else 0, -1)
    sizes = [num_cotangents if d < 0 else values.shape[d] for d in order]
    return values.new_empty(sizes).permute([order.index(d) for d in range(-1, values.ndim)])


def _dense(values: Tensor) -> bool:
    return values.is_contiguous() or (values.ndim == 4 and values.is_contiguous(memory_format=torch.channels_last))
