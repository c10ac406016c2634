"""Seed by seed: one backward pass at a time, its rows put where they stay, and no stack of gradients.

What a layer's rule needs beside the gradient (unfolded inputs, normalized activations) is made once for all seeds.
Rows that are written out go straight into one matrix, side by side; factors that are kept are stacked over seeds.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from ntk_laplace.factors.blocks import Block, Dense, Wide, write_rows
from ntk_laplace.factors.graph import Graph
from ntk_laplace.factors.plan import Plan
from ntk_laplace.factors.rows import keeps_factors

__all__ = ["stream_blocks"]


def stream_blocks(
    plan: Plan, graph: Graph, out: Tensor, seeds: Tensor, parameters: dict[str, nn.Parameter],
    dtype: torch.dtype | None,
) -> list[Block]:  # fmt: skip
    """Rows of all parameters that the plan covers.

    Parameters
    ----------
    plan : Plan
    graph : Graph
        Of this batch.
    out : Tensor, (N, C)
    seeds : Tensor, (K, N, C)
    parameters : dict of str to nn.Parameter
    dtype : torch.dtype or None
        Of rows that are written out; None writes out nothing that has factors.
    """
    numbers = plan.edges
    if not numbers:
        return []
    edges = [GradientEdge(graph.nodes[number], 0) for number in numbers]
    memo: dict[int, dict[str, Tensor]] = {}
    sink: _Sink | None = None
    for k, seed in enumerate(seeds):
        found = torch.autograd.grad(out, edges, seed, retain_graph=True, allow_unused=True)
        gradients = {
            number: (torch.zeros(graph.shape(number), dtype=out.dtype, device=out.device) if g is None else g)[None]
            for number, g in zip(numbers, found, strict=True)
        }
        blocks = plan.blocks(graph, gradients, parameters, len(out), memo)
        if sink is None:
            sink = _Sink(blocks, len(seeds), len(out), dtype)
        sink.take(k, blocks)
    return sink.blocks()


class _Sink:
    """Where the rows of all seeds end up."""

    def __init__(self, first: list[Block], num_seeds: int, n: int, dtype: torch.dtype | None) -> None:
        self._kept = [dtype is None or keeps_factors(block, num_seeds) for block in first]
        shared = {name for block, kept in zip(first, self._kept, strict=True) if kept for name in block.names}
        self._kept = [kept or bool(set(block.names) & shared) for block, kept in zip(first, self._kept, strict=True)]
        self._stacks: list[Block | None] = [
            _stack(block, num_seeds) if kept else None for block, kept in zip(first, self._kept, strict=True)
        ]
        sizes: dict[str, int] = {}
        counts: dict[str, int] = {}
        for block, kept in zip(first, self._kept, strict=True):
            if not kept:
                for name, size in block.sizes().items():
                    sizes[name], counts[name] = size, counts.get(name, 0) + 1
        self._spans, start = [], 0
        for name, size in sizes.items():
            self._spans.append((name, start, start + size))
            start += size
        like = _values(first[0])
        self._rows = like.new_empty(n, num_seeds, start, dtype=dtype) if start else None
        self._several = {name for name, count in counts.items() if count > 1}

    def take(self, k: int, blocks: list[Block]) -> None:
        """Put the rows of one seed in their place."""
        seen: set[str] = set()
        targets = {}
        if self._rows is not None:
            targets = {name: self._rows[:, k, start:stop] for name, start, stop in self._spans}
        for block, kept, stack in zip(blocks, self._kept, self._stacks, strict=True):
            if kept:
                _values(stack)[k] = _values(block)[0]
                continue
            if not self._several.isdisjoint(block.names):
                for name, rows in block.dense().items():  # several blocks of one parameter add up
                    targets[name].add_(rows[0]) if name in seen else targets[name].copy_(rows[0])
                    seen.add(name)
                continue
            write_rows(block, targets)

    def blocks(self) -> list[Block]:
        """All that was gathered."""
        kept = [stack for stack in self._stacks if stack is not None]
        return kept if self._rows is None else [*kept, Wide(tuple(self._spans), self._rows)]


def _values(block: Block) -> Tensor:
    """The one tensor of a block that depends on the seed; seeds first."""
    return block.rows if isinstance(block, Dense) else block.b


def _stack(block: Block, num_seeds: int) -> Block:
    values = _values(block)
    room = values.new_empty(num_seeds, *values.shape[1:])
    return replace(block, rows=room) if isinstance(block, Dense) else replace(block, b=room)
