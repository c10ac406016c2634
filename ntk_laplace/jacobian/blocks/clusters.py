"""Clusters: blocks whose rows belong to the same parameters, and sums over them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ntk_laplace.jacobian.blocks.base import Block
from ntk_laplace.jacobian.blocks.outer import Outer

Cluster = tuple[Block, ...]


def clusters(blocks: Sequence[Block]) -> list[Cluster]:
    """Group blocks that share a parameter: their rows must be summed before products are formed."""
    found: list[list[Block]] = []
    for block in blocks:
        touching = [c for c in found if any(_overlap(block, member) for member in c)]
        merged = [member for cluster in touching for member in cluster] + [block]
        # by identity: blocks are compared entry by entry
        found = [cluster for cluster in found if not any(cluster is other for other in touching)] + [merged]
    return [tuple(cluster) for cluster in found]


def _overlap(first: Block, second: Block) -> bool:
    if not set(first.names) & set(second.names):
        return False
    if isinstance(first, Outer) and isinstance(second, Outer) and first.names == second.names == (first.weight,):
        if first.index is not None and second.index is not None:  # slices of one parameter may be disjoint
            return bool(torch.isin(first.index, second.index).any())
    return True


def written_out(blocks: Iterable[Block]) -> dict[str, Tensor]:
    """Rows (K, N, p) of each parameter, summed over the blocks."""
    return summed(block.dense() for block in blocks)


def summed(found: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Sum tensors by name."""
    total: dict[str, Tensor] = {}
    for values in found:
        for name, value in values.items():
            total[name] = total[name] + value if name in total else value
    return total
