"""Concatenation: several uses of one parameter, or several batches of examples, as one block."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ntk_laplace.jacobian.blocks import Block, Dense, Lookup, Wide

__all__ = ["concatenate_examples", "join_positions"]


def join_positions(first: Block, second: Block) -> Block:
    """Join two uses of the same kind into one block: positions are concatenated, rows of `Dense` blocks are summed."""
    if isinstance(first, Dense):
        return replace(first, rows=first.rows + second.rows)
    if isinstance(first, Lookup):
        b, tokens = torch.cat([first.b, second.b], 2), torch.cat([first.tokens, second.tokens], 1)
        return replace(first, b=b, tokens=tokens)
    b, a = torch.cat([first.full_b(), second.full_b()], 3), torch.cat([first.a, second.a], 2)
    return replace(first, b=b, a=a, constant=False)


def _cat_positions(parts: list[Tensor], dim: int, pad_dim: int) -> Tensor:
    """Concatenate examples; batches with fewer positions are zero-padded, which contributes nothing."""
    width = max(part.shape[pad_dim] for part in parts)
    padded = []
    for part in parts:
        missing = width - part.shape[pad_dim]
        if missing:
            shape = list(part.shape)
            shape[pad_dim] = missing
            part = torch.cat([part, part.new_zeros(shape)], pad_dim)
        padded.append(part)
    return torch.cat(padded, dim)


def concatenate_examples(parts: list[Block]) -> Block:
    """Concatenate blocks of the same kind from several batches into one block over all examples."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Dense):
        return replace(first, rows=torch.cat([part.rows for part in parts], 1))
    if isinstance(first, Wide):
        return replace(first, rows=torch.cat([part.rows for part in parts]))
    if isinstance(first, Lookup):
        tokens = _cat_positions([part.tokens for part in parts], 0, 1)
        return replace(first, b=_cat_positions([part.b for part in parts], 1, 2), tokens=tokens)
    a = _cat_positions([part.a for part in parts], 0, 2)
    if all(part.constant and torch.equal(part.b, first.b) for part in parts):
        return replace(first, a=a)
    return replace(first, b=_cat_positions([part.full_b() for part in parts], 1, 3), a=a, constant=False)
