"""Storage: convert a batch's blocks to the types in which they are kept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from ntk_laplace.jacobian.blocks import Block, Dense, Factored, Lookup, Outer
from ntk_laplace.jacobian.jacobian import Jacobian
from ntk_laplace.model.data import Inputs, leaves
from ntk_laplace.runtime import tuning


def compacted(blocks: Iterable[Block], keep_factors: bool) -> list[Block]:
    """Choose each block's storage, and sum the written-out rows of each parameter."""
    written: dict[str, Dense] = {}
    kept: list[Block] = []
    for block in blocks:
        block = _share_constant(block)
        for small in [block] if keep_factors else _compact(block):
            if not isinstance(small, Dense):
                kept.append(small)
            elif small.weight in written:
                written[small.weight] = small.joined([written[small.weight]])
            else:
                written[small.weight] = small
    return [*kept, *written.values()]


def _share_constant(block: Block) -> Block:
    """Store b once if it is the same for all examples, as in the last linear layer, where b is the cotangents."""
    if not isinstance(block, Outer) or not block.single or block.b.shape[1] < 2:
        return block
    if block.b.stride(1) == 0:  # cotangents that were never written out for each example
        return replace(block, b=block.b[:, :1], constant=True)
    if torch.equal(block.b[:, 0], block.b[:, 1]) and bool((block.b == block.b[:, :1]).all()):
        return replace(block, b=block.b[:, :1], constant=True)
    return block


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


def _compact(block: Block) -> list[Block]:
    """Keep a block's factors or write its rows out, whichever makes the Gram entries of a pair of examples cheaper.

    Multiply-adds per pair: K² o i written out; T² (i + K o) + K² T o from the factors. Factors are also kept if the
    rows would need more than 2 times (few positions) or 8 times (many positions) their memory; the Gram computation
    then writes out a few columns at a time, which is little work if positions are few.
    """
    if not isinstance(block, Factored) or (isinstance(block, Outer) and block.single):
        return [block]
    cost = block.gram_cost
    if cost.written > cost.contracted:
        return [block.with_cotangents_last()]
    few = block.b.shape[-2] <= tuning.FEW_POSITIONS
    room = tuning.ROWS_OVER_FACTORS_FEW_POSITIONS if few else tuning.ROWS_OVER_FACTORS
    if isinstance(block, Outer) and cost.rows_size > room * cost.factors_size:
        return [block]
    return [Dense.of(name, rows) for name, rows in block.dense().items()]
