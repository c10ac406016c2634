"""Proof: rows against autograd. Randomly weighted, they must add up to autograd's gradient of as weighted outputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from ntk_laplace.jacobian.blocks import Block
from ntk_laplace.jacobian.graph import rows_dtype

__all__ = ["GradientCheck", "agree"]

_AGREEMENT = {torch.float64: 1e-8, torch.float32: 2e-3}
_COARSE = 5e-2  # of types of 16 bits


def agree(own: Tensor, expected: Tensor, size: float, loud: float, precision: torch.dtype) -> bool:
    """Whether a flat sum of rows equals autograd's gradient, up to rounding.

    Parameters
    ----------
    own, expected : Tensor
    size, loud : float
        Largest entries, in absolute value, of `expected` and of all gradients of the network: what lies below the
        rounding of the latter cannot be compared.
    precision : torch.dtype
        Coarsest floating type of the computation that both come from, `Network.precision`. It may be coarser than
        their own: float32 parameters of a bfloat16 network have gradients in float32 that are rounded to bfloat16.
    """
    if not own.numel():
        return True
    gap = _largest(own - expected)
    relative = _AGREEMENT.get(precision, _COARSE)
    floor = min(100 * torch.finfo(precision).eps, _COARSE) * loud
    return gap <= max(relative * size, floor) or gap <= relative * _largest(own)


def _largest(values: Tensor) -> float:
    if not values.numel():
        return 0.0
    low, high = torch.aminmax(values)  # one pass without a copy; NaN comes through
    return float(torch.maximum(-low, high))


class GradientCheck:
    """Autograd's gradients of outputs whose cotangents are weighted example by example.

    Parameters
    ----------
    out : Tensor, (N, C)
        With their graph.
    cotangents : Tensor, (K, N, C)
    weights : Tensor, (K, N)
        Drawn at random: rows of the wrong example show then, and so does mixing.
    parameters : dict of str to nn.Parameter
    precision : torch.dtype
        As in `agree`.
    """

    def __init__(
        self, out: Tensor, cotangents: Tensor, weights: Tensor, parameters: dict[str, nn.Parameter],
        precision: torch.dtype
    ) -> None:
        found = torch.autograd.grad(
            out, list(parameters.values()), torch.einsum("kn,knc->nc", weights, cotangents), retain_graph=True,
            allow_unused=True,
        )  # fmt: skip
        self._weights, self._parameters, self._precision = weights.to(rows_dtype(parameters)), parameters, precision
        self._expected = {name: g for name, g in zip(parameters, found, strict=True) if g is not None}
        self._sizes = {name: _largest(gradient) for name, gradient in self._expected.items()}
        self._loud = max(self._sizes.values(), key=lambda value: (value != value, value), default=0.0)

    @property
    def finite(self) -> bool:
        """Whether there is something to compare with."""
        return math.isfinite(self._loud)

    def disagreeing(self, blocks: Sequence[Block], names: Iterable[str] | None = None) -> tuple[str, ...]:
        """Parameters, all or those of `names`, whose rows in these blocks do not add up to the gradient."""
        total: dict[str, Tensor] = {}
        for block in blocks:
            for name, values in block.vjp(self._weights).items():
                total[name] = total[name] + values.detach() if name in total else values.detach()
        wanted = self._parameters if names is None else names
        return tuple(name for name in wanted if not self._agrees(name, total.get(name)))

    def _agrees(self, name: str, own: Tensor | None) -> bool:
        expected, size = self._expected.get(name), self._sizes.get(name, 0.0)
        if own is None and expected is None:
            return True
        own = torch.zeros_like(expected) if own is None else own
        expected = torch.zeros_like(own) if expected is None else expected
        return agree(own.flatten(), expected.flatten(), size, self._loud, self._precision)
