"""Storage: convert a batch's blocks to the types in which they are kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ntk_laplace.data import Inputs, leaves
from ntk_laplace.jacobian.blocks import Block, Dense, Lookup, Outer, Wide
from ntk_laplace.jacobian.jacobian import Jacobian, compact

__all__ = ["apart_from", "compacted", "side_by_side"]

_MATRIX = 512  # entries from which a parameter's rows get a separate matrix product


def compacted(blocks: Iterable[Block], keep_factors: bool) -> list[Block]:
    """Choose each block's storage, and sum the written-out rows of each parameter."""
    written: dict[str, Dense] = {}
    kept: list[Block] = []
    for block in blocks:
        block = _share_constant(block)
        for small in [block] if keep_factors else compact(block):
            if not isinstance(small, Dense):
                kept.append(small)
            elif small.weight in written:
                written[small.weight] = replace(small, rows=small.rows + written[small.weight].rows)
            else:
                written[small.weight] = small
    return [*kept, *written.values()]


def _share_constant(block: Block) -> Block:
    """Store b once if it is the same for all examples, as in the last linear layer, where b is the cotangents."""
    if not isinstance(block, Outer) or not block.single or block.b.shape[1] < 2:
        return block
    if torch.equal(block.b[:, 0], block.b[:, 1]) and bool((block.b == block.b[:, :1]).all()):
        return replace(block, b=block.b[:, :1], constant=True)
    return block


def side_by_side(blocks: list[Block], dtype: torch.dtype) -> Iterator[Block]:
    """Turn written-out rows into matrices, concatenate small ones, and convert all blocks to `dtype`.

    The list is emptied on the way: each block is freed once it is converted.
    """
    elsewhere = {name for block in blocks if not isinstance(block, Dense) for name in block.names}
    small = []
    while blocks:
        block = blocks.pop(0)
        if not isinstance(block, Dense) or block.weight in elsewhere:
            yield block.to(dtype)
        elif block.rows.shape[2] >= _MATRIX:
            alone = [block]
            del block
            yield Wide.of(alone, dtype)
        else:
            small.append(block)
    if small:
        block = None
        yield Wide.of(small, dtype)


def apart_from(rows: Jacobian, x: Inputs) -> Jacobian:
    """Copy layer inputs that share memory with the caller's `x`, so that later changes of `x` have no effect."""
    theirs = {tensor.untyped_storage().data_ptr() for tensor in leaves(x)}

    def is_theirs(values: Tensor) -> bool:
        return values.untyped_storage().data_ptr() in theirs

    def apart(block: Block) -> Block:
        if isinstance(block, Outer) and is_theirs(block.a):
            return replace(block, a=block.a.clone())
        if isinstance(block, Lookup) and is_theirs(block.tokens):
            return replace(block, tokens=block.tokens.clone())
        return block

    return replace(rows, blocks=tuple(apart(block) for block in rows.blocks))
