"""How many examples a batch has: what its passes keep of each example, within the sizes of `tuning`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from ntk_laplace.jacobian.fast import NO_FUSED_LAYERS, FusedLayers
from ntk_laplace.jacobian.gradients import edges, kept_whole
from ntk_laplace.jacobian.graph import Graph, rows_dtype
from ntk_laplace.jacobian.plan import Plan
from ntk_laplace.model.network import Network
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.resources import buffer_bytes


@dataclass(frozen=True)
class Edge:
    """A node whose output gradient is read.

    Attributes
    ----------
    size : int
        Bytes per example and cotangent.
    kept : bool
        Whether the gradients of all cotangents are stored.
    plain : str or None
        Weight whose output gradients can be fused.
    bias : str or None
        The bias that goes with that weight.
    last : bool
        Whether the node's output is the network's.
    """

    size: int
    kept: bool
    plain: str | None
    bias: str | None
    last: bool

    def held(self, cotangents: int, fused_layers: FusedLayers) -> int:
        """Bytes stored per example."""
        return self.size * cotangents if self.kept and self.plain not in fused_layers.weights else self.size


@dataclass(frozen=True)
class BatchSizes:
    """How many examples a batch of a Jacobian pass has, and what it keeps of each.

    Attributes
    ----------
    network : Network
    dtype : torch.dtype
        Floating type of the rows; the network runs in its own type.
    budget : int, optional
        Bytes, of which a batch takes at most half.
    edges : tuple of Edge, optional
        The nodes whose output gradients are read; None before a plan is made.
    graph_bytes : int
        Bytes that a forward pass keeps of each example for the backward passes; 0 before a plan is made.
    """

    network: Network
    dtype: torch.dtype
    budget: int | None
    edges: tuple[Edge, ...] | None = None
    graph_bytes: int = 0

    def batch(self, cotangents: int | None = None, fused_layers: FusedLayers = NO_FUSED_LAYERS) -> tuple[int, int]:
        """Number of examples in a batch with a root of so many columns, or without, and the bytes it has of each.

        Backward passes hold gradients of what the forward pass has saved, at most all of them.
        """
        root = tuning.ROOT_COPIES * self.network.num_outputs * (cotangents or 0) * self.dtype.itemsize
        if cotangents is None:
            cotangents = 1 if self._of_last_layer else self.network.num_outputs
        count, each = self._fitting(cotangents, fused_layers, root)
        converted = 0 if self._widening == 1.0 else int(self._widening * each)
        return count, each + converted + 2 * self.graph_bytes

    @property
    def evaluated(self) -> int | None:
        """Number of examples in a forward pass without a graph; None before a plan is made."""
        return None if self.edges is None else tuning.FORWARD_FACTOR * self._fitting(1, NO_FUSED_LAYERS, 0)[0]

    def _fitting(self, cotangents: int, fused_layers: FusedLayers, root: int) -> tuple[int, int]:
        """Number of examples, and the bytes of output gradients of each and of its root."""
        held = [edge.held(cotangents, fused_layers) for edge in self.edges or ()]
        room, most = (buffer_bytes(size, self.network.device)
                      for size in (tuning.WORKING_SET_BYTES, tuning.GRADIENT_BYTES))
        each = sum(held) + root
        count = min(room // max(1, each), most // max(held, default=1))
        if self.budget is not None:  # for gradients, the same as rows of `dtype`, and the graph
            count = min(count, int(self.budget / 2 / max(1.0, (1.0 + self._widening) * each + self.graph_bytes)))
        return max(1, count), each

    @property
    def _widening(self) -> float:
        """Size of a number of `dtype` over that of the floating type in which the passes compute rows."""
        return self.dtype.itemsize / rows_dtype(self.network.parameters).itemsize

    @property
    def _of_last_layer(self) -> bool:
        """Whether the rows are those of one last layer, whose output gradients are the cotangents."""
        return [edge.last for edge in self.edges or ()] == [True]

    def sums_suffice(self, fused_layers: FusedLayers) -> bool:
        """Whether the rows are those of one last layer, and its sums are sufficient for all parameters."""
        if not self.edges or not self._of_last_layer:
            return False
        weight, bias = self.edges[0].plain, self.edges[0].bias
        chosen = {name for name, parameter in self.network.parameters.items() if parameter.numel()}
        return (weight is not None and chosen <= {weight, bias}
                and fused_layers.suits(weight, self.network.num_outputs, bias))


def edges_of(plan: Plan, graph: Graph, out: Tensor) -> tuple[Edge, ...]:
    """The nodes whose output gradients a plan reads, from its graph of the outputs `out`."""
    extractions, uses = plan.extractions(graph, len(out)), Counter(use.name for use in plan.uses)
    kept, plain = kept_whole(extractions), {use.step.consumer: use.name for use in plan.uses if use.plain}
    joined = kept & {use.step.consumer for use in plan.uses if uses[use.name] > 1}
    element = torch.promote_types(out.dtype, graph.dtype).itemsize
    found = []
    for number in edges(extractions):
        size = graph.shape(number).numel() * element // len(out)
        size *= 2 if number in joined else 1  # with the copy that joins them
        found.append(Edge(max(1, size), number in kept, plain.get(number), plan.partners.get(plain.get(number, "")),
                          number == 0 and number in kept and graph.shape(0) == out.shape))
    return tuple(found)
