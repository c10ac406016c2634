"""The example axis of a tensor in the graph, found by two backward passes with known weights.

Attention flattens tokens as (T*N), convolutions as (N*T). The gradients for the cotangents r and α_n r differ, row by
row, by the factor α_n of the example n that the row belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}
_COARSE = 3e-2  # for 16-bit types


@dataclass(frozen=True)
class Layout:
    """Axis `dim` contains the examples: index n*T + t, or t*N + n if `positions_first`."""

    dim: int
    positions_first: bool = False

    def split(self, values: Tensor, n: int, lead: int) -> Tensor:
        """(lead..., *shape) -> (lead..., N, T, remaining axes)."""
        values, example, position = self._unflatten(values, n, lead)
        return values.movedim((example, position), (lead, lead + 1))

    def reduce(self, values: Tensor, n: int, shape: torch.Size) -> Tensor | None:
        """Sum (K, *out) over all axes but the examples' and those of a broadcast operand: (K, N, numel of `shape`).

        None if the operand is not broadcast along the example axis.
        """
        if self.dim == 0 and values.shape[1] == n and len(shape) <= values.ndim - 2:
            axes = values.ndim - 2  # already (K, N, axes of the operand)
        else:
            values, example, _ = self._unflatten(values, n, 1)
            values = values.movedim(example, 1)
            axes = values.ndim - 2
        aligned = (1,) * (axes - len(shape)) + tuple(shape)
        if len(aligned) != axes or any(s not in (1, v) for s, v in zip(aligned, values.shape[2:], strict=True)):
            return None
        # the reshape drops axes of length one
        gone = [axis + 2 for axis, s in enumerate(aligned) if s == 1 and values.shape[axis + 2] != 1]
        kept = values.sum(gone) if gone else values
        return kept.reshape(*kept.shape[:2], -1)

    def _unflatten(self, values: Tensor, n: int, lead: int) -> tuple[Tensor, int, int]:
        axis = lead + self.dim
        positions = values.shape[axis] // n
        if self.positions_first:
            return values.unflatten(axis, (positions, n)), axis + 1, axis
        return values.unflatten(axis, (n, positions)), axis, axis + 1


def shape_layout(shape: torch.Size, n: int, other: torch.Size, m: int) -> Layout | None:
    """Find the example axis from a tensor's shapes for n and for m examples; None if it is not unique.

    The order of examples and positions on that axis remains unknown.
    """
    if len(shape) != len(other):
        return None
    grown = [dim for dim, (one, two) in enumerate(zip(shape, other, strict=True)) if one != two]
    if len(grown) != 1 or shape[grown[0]] % n or shape[grown[0]] * m != other[grown[0]] * n:
        return None
    return Layout(grown[0])


def find_layouts(plain: Tensor, scaled: Tensor, weights: Tensor, precision: torch.dtype) -> list[Layout]:
    """Find the axes along which ``scaled = weights[example] * plain``; none if the tensor mixes examples.

    These are gradients at one node for the cotangents r_n and weights_n r_n, with one distinct weight per example (N,).
    `precision` is the coarsest floating type of the computation.
    """
    n = len(weights)
    size = float(scaled.abs().max()) if scaled.numel() else 0.0
    found: list[Layout] = []
    if size == 0.0:
        return found
    tolerance = _TOLERANCE.get(precision, _COARSE) * size
    for dim, length in enumerate(plain.shape):
        if length % n or length == 0:
            continue
        for positions_first in (False, True) if length != n else (False,):
            per_row = weights.repeat(length // n) if positions_first else weights.repeat_interleave(length // n)
            shape = [1] * plain.ndim
            shape[dim] = length
            if float((scaled - plain * per_row.reshape(shape)).abs().max()) <= tolerance:
                found.append(Layout(dim, positions_first))
    return found
