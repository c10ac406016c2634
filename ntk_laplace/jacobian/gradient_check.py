"""Gradient check: randomly weighted rows must sum to autograd's gradient of the outputs with the same weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from ntk_laplace.jacobian.blocks import Block, summed
from ntk_laplace.jacobian.graph import rows_dtype

_AGREEMENT = {torch.float64: 1e-8, torch.float32: 2e-3}
_COARSE = 5e-2  # for 16-bit types
_CANCELLED, _NOTHING_ELSE = 4, 8  # rounding errors of one sum, and what all gradients are then, relative to them


def agree(own: Tensor, expected: Tensor, size: float, loud: float, precision: torch.dtype) -> bool:
    """Whether a flat sum of rows equals autograd's gradient, up to rounding.

    Parameters
    ----------
    own, expected : Tensor
    size, loud : float
        Largest absolute entries of `expected` and of all gradients of the network. Differences below the rounding
        error of the latter are ignored.
    precision : torch.dtype
        Coarsest floating type of the computation, `Network.precision`. It may be coarser than the type of the
        gradients: float32 parameters of a bfloat16 network have float32 gradients that are rounded to bfloat16.
    """
    gap, found = _largest([own - expected, own])
    return _is_small(gap, found, size, loud, precision)


def _is_small(gap: float, own: float, size: float, loud: float, precision: torch.dtype) -> bool:
    relative = _AGREEMENT.get(precision, _COARSE)
    floor = min(100 * torch.finfo(precision).eps, _COARSE) * loud
    return gap <= max(relative * size, floor) or gap <= relative * own


def _largest(tensors: Iterable[Tensor]) -> list[float]:
    """Largest absolute entry of each tensor, 0 of an empty one; a device is read once for all of them."""
    found = [torch.maximum(-low, high).double() for low, high in  # aminmax: one pass without a copy; propagates NaN
             (torch.aminmax(values if values.numel() else values.new_zeros(1)) for values in tensors)]
    return torch.stack(found).tolist() if found else []


class GradientCheck:
    """Autograd's gradients of the outputs, with one random weight per cotangent and example.

    Parameters
    ----------
    out : Tensor, (N, C)
        With their autograd graph.
    cotangents : Tensor, (K, N, C)
    weights : Tensor, (K, N)
        Random weights, which reveal rows of the wrong example and mixed examples.
    parameters : dict of str to nn.Parameter
    precision : torch.dtype
        As in `agree`.
    """

    def __init__(
        self, out: Tensor, cotangents: Tensor, weights: Tensor, parameters: dict[str, nn.Parameter],
        precision: torch.dtype
    ) -> None:
        weighted, found = torch.einsum("kn,knc->nc", weights, cotangents), tuple[Tensor | None, ...]()
        if out.requires_grad:  # these examples may not depend on the parameters
            found = torch.autograd.grad(out, list(parameters.values()), weighted, retain_graph=True, allow_unused=True)
        self._weights, self._parameters, self._precision = weights.to(rows_dtype(parameters)), parameters, precision
        # to_dense: of functional.embedding(..., sparse=True)
        self._expected = {n: g.to_dense().flatten() for n, g in zip(parameters, found, strict=False) if g is not None}
        *sizes, outputs, cotangent = _largest([*self._expected.values(), out.detach(), weighted])
        self._sizes = dict(zip(self._expected, sizes, strict=True))
        self._loud = max(sizes, key=lambda value: (value != value, value), default=0.0)
        # all gradients may cancel; what is left is the rounding of their parts, which are about as large as f c
        rounding = _CANCELLED * torch.finfo(precision).eps * outputs * cotangent
        alike = self._loud <= _NOTHING_ELSE * rounding and torch.finfo(precision).bits >= 32
        self._cancelled = rounding if alike else 0.0

    @property
    def finite(self) -> bool:
        """Whether autograd's gradients are finite, so that rows can be compared with them."""
        return math.isfinite(self._loud)

    def disagreeing(self, blocks: Sequence[Block], names: Iterable[str] | None = None) -> tuple[str, ...]:
        """Parameters (all, or those in `names`) whose rows in these blocks do not sum to the gradient."""
        total = summed({n: g.detach() for n, g in block.vjp(self._weights).items()} for block in blocks)
        wanted = [name for name in (self._parameters if names is None else names)
                  if name in total or name in self._expected]
        zero = self._weights.new_zeros(())
        gaps = _largest(total.get(name, zero) - self._expected.get(name, zero) for name in wanted)
        own = dict(zip(total, _largest(total.values()), strict=True))
        return tuple(name for name, gap in zip(wanted, gaps, strict=True)
                     if not gap <= self._cancelled
                     and not _is_small(gap, own.get(name, 0.0), self._sizes.get(name, 0.0), self._loud,
                                       self._precision))
