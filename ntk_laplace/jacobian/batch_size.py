"""How many examples a batch has: what its passes keep of each example, within the sizes of `tuning`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ntk_laplace.jacobian.fast import FusedLayers
from ntk_laplace.jacobian.gradients import edges, kept_whole
from ntk_laplace.jacobian.graph import Graph
from ntk_laplace.jacobian.plan import Plan
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


def batch_size(
    edges: Sequence[Edge], cotangents: int, fused_layers: FusedLayers, device: torch.device, root: int = 0
) -> tuple[int, int]:
    """Bytes that a batch keeps of each example, and how many examples it has."""
    held = [edge.held(cotangents, fused_layers) for edge in edges]
    room, each = (buffer_bytes(size, device) for size in (tuning.WORKING_SET_BYTES, tuning.GRADIENT_BYTES))
    own = sum(held) + root
    return own, max(1, min(room // max(1, own), each // max(held, default=1)))


def edges_of(plan: Plan, graph: Graph, out: Tensor) -> list[Edge]:
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
    return found
