"""Output gradients of a batch: one backward pass per cotangent, and what is stored of each node's gradient.

A loop over cotangents is faster than one batched pass on CPUs. A node's gradient is handled in one of four ways:

* It is the cotangents themselves, where the only node is that of the outputs, as for a last linear layer.
* It is stored for all cotangents, for layers with factors. Where rows are written out, cotangents are next to the
  examples in memory, so that each example's gradients are one matrix. Where factors are summed, cotangents come first.
* It is reduced to rows at once, for rows that are sums over positions; the gradient is then freed.
* It is added to Σ g gᵀ or Σ_k g², where only these sums are needed; this avoids a copy of all gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ntk_laplace.jacobian.blocks import Block, Dense
from ntk_laplace.jacobian.fast import NO_FUSED_LAYERS, FusedAccumulation, FusedSums, gradient_buffer
from ntk_laplace.jacobian.graph import Graph


@dataclass(frozen=True)
class Extraction:
    """How rows are computed from the output gradient of a node.

    Attributes
    ----------
    name : str
        The parameter.
    consumer : int
        Number of the node.
    axis : int
        The example axis of its output.
    extract : callable or None
        Returns rows for gradients (K, *output shape). None only records whether any gradient is nonzero.
    at_once : bool
        Compute rows one cotangent at a time and store them instead of the gradients of all cotangents.
    fused : bool
        Store only sums, and the gradients of a few examples.
    """

    name: str
    consumer: int
    axis: int
    extract: Callable[[Tensor], Block | None] | None
    at_once: bool = False
    fused: bool = False

    def rows(self, gradient: Tensor) -> Block:
        """Rows for gradients (K, *output shape); the extraction has `extract`."""
        found = None if self.extract is None else self.extract(gradient)
        if found is None:
            raise RuntimeError(f"no rows of {self.name!r} can be computed from this output gradient")
        return found


def edges(extractions: Sequence[Extraction]) -> list[int]:
    """Sorted numbers of the nodes whose gradients are read, without duplicates."""
    return sorted({extraction.consumer for extraction in extractions})


def kept_whole(extractions: Sequence[Extraction]) -> set[int]:
    """Nodes whose gradients are stored for all cotangents, because at least one extraction needs them."""
    return {each.consumer for each in extractions if each.extract and not (each.at_once or each.fused)}


class Gradients:
    """Output gradients of a batch for all cotangents, as far as rows need them.

    Parameters
    ----------
    graph : Graph
    extractions : sequence of Extraction
    cotangents : Tensor, (K, N, C)
        Starting points of the backward passes.
    cotangents_first : bool
        Store gradients of layers without positions with the cotangent axis first in memory.
    accumulation : FusedAccumulation, optional
        Floating type and kept examples of fused extractions.
    """

    def __init__(
        self, graph: Graph, extractions: Sequence[Extraction], cotangents: Tensor, cotangents_first: bool = False,
        accumulation: FusedAccumulation | None = None,
    ) -> None:
        self.graph, self.extractions = graph, list(extractions)
        self.cotangents, self.cotangents_first = cotangents, cotangents_first
        self.accumulation = accumulation or FusedAccumulation(NO_FUSED_LAYERS, cotangents.new_zeros(0), graph.dtype)
        self._whole: dict[int, Tensor] = {}  # by node
        self._rows: dict[int, Tensor] = {}  # by extraction
        self._watched: set[int] = set()  # extractions without rows that have a nonzero gradient

    def collect(self, out: Tensor) -> Gradients:
        """Run the backward passes from the outputs `out` (N, C); returns itself."""
        numbers = edges(self.extractions)
        for index, each in enumerate(self.extractions):
            if each.fused:
                self.accumulation.start(index, self.cotangents, self.graph.shape(each.consumer)[-1], self.graph.dtype)
        if numbers == [0] and kept_whole(self.extractions) == {0} and self.graph.shape(0) == out.shape:
            self._whole[0] = self.cotangents  # the layer is the last: no backward pass
            return self
        wanted = [GradientEdge(self.graph.nodes[number], 0) for number in numbers]
        for k, cotangent in enumerate(self.cotangents if numbers else ()):
            # no variable here refers to the buffers: the allocator reuses them in the next pass
            self._read(k, dict(zip(numbers, torch.autograd.grad(out, wanted, cotangent, retain_graph=True,
                                                                allow_unused=True), strict=True)))
        return self

    def _read(self, k: int, gradients: dict[int, Tensor | None]) -> None:
        """Store what rows need of the gradients of cotangent k, by node."""
        whole = kept_whole(self.extractions)
        for number, axis in {each.consumer: each.axis for each in self.extractions if each.consumer in whole}.items():
            self._keep(self._whole, number, gradients[number], k, axis)
        for index, each in enumerate(self.extractions):
            gradient = gradients[each.consumer]
            if each.consumer in whole:
                continue
            if each.extract is None:
                self._watched |= {index} if gradient is not None and bool(gradient.any()) else set()
            elif not each.fused:
                rows = None if gradient is None else each.rows(gradient.unsqueeze(0)).dense()[each.name][0]
                self._keep(self._rows, index, rows, k, 0)
            elif gradient is not None:
                self.accumulation.add(index, gradient, k)

    def _keep(self, kept: dict[int, Tensor], key: int, values: Tensor | None, k: int, axis: int) -> None:
        """Store the values of cotangent k; None is zero."""
        if values is None:
            if key in kept:
                kept[key][k] = 0.0
            return
        if key not in kept:
            count, n = self.cotangents.shape[:2]
            flat = self.cotangents_first and values.ndim == 2 and len(values) == n
            kept[key] = values.new_empty(count, *values.shape) if flat else gradient_buffer(values, count, axis)
            kept[key][:k] = 0.0
        kept[key][k] = values

    def block(self, index: int) -> Block:
        """Rows of one extraction, for all cotangents."""
        each = self.extractions[index]
        if index in self._rows:
            return Dense.of(each.name, self._rows[index])
        if each.consumer in self._whole:
            return each.rows(self._whole[each.consumer])
        # no cotangent reaches the node
        return each.rows(self.cotangents.new_zeros(len(self.cotangents), *self.graph.shape(each.consumer)))

    def fused_block(self, index: int, bias: str | None) -> FusedSums:
        """The sums of a fused extraction, and the layer's inputs."""
        each = self.extractions[index]
        unread = self.cotangents.new_zeros(()).expand(1, *self.graph.shape(each.consumer))  # only inputs are needed
        return self.accumulation.block(index, each.rows(unread), bias)

    def any(self, index: int) -> bool:
        """Whether the gradient that one extraction reads has a nonzero entry."""
        if index in self._watched:
            return True
        if self.extractions[index].fused:
            return self.accumulation.any(index)
        values = self._rows.get(index, self._whole.get(self.extractions[index].consumer))
        return values is not None and bool(values.any())

    def forget(self, indices: Sequence[int]) -> None:
        """Free the gradients and rows of these extractions."""
        for index in indices:
            self._rows.pop(index, None)
            self._whole.pop(self.extractions[index].consumer, None)
        for index in indices:
            self.extractions[index] = replace(self.extractions[index], extract=None)  # also frees its unfolded inputs
