"""The path from a parameter to the operand that a node reads, along which rows of the operand are pulled back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ntk_laplace.jacobian.blocks import Block, Dense, Lookup, Outer
from ntk_laplace.jacobian.graph import is_view, node_kind, output_shape, pull_back, uncast, view_positions


@dataclass(frozen=True)
class ParameterPath:
    """An operand that is a parameter, or a function of one parameter alone (a transpose, a slice, an exponential).

    Each method makes a block of the parameter from rows of the operand.

    Attributes
    ----------
    name : str
        The parameter's name.
    parameter : nn.Parameter
    source : autograd node
        The node that outputs the operand; the parameter's accumulator if the operand is the parameter.
    output : int
        Which of its outputs.
    """

    name: str
    parameter: nn.Parameter
    source: Any
    output: int

    @classmethod
    def to(cls, name: str, parameter: nn.Parameter, source: Any, output: int) -> ParameterPath:
        """The path to an output of a node, before conversions to other floating types."""
        return cls(name, parameter, *uncast(source, output))

    @property
    def shape(self) -> torch.Size:
        """Shape of the operand."""
        return output_shape(self.source, self.output)

    def outer(self, b: Tensor, a: Tensor, inputs_first: bool = False) -> Block:
        """Rows Σ_t b ⊗ a for b (K, N, G, T, o) and a (N, G, T, i).

        The operand's axes are (g, o, i), or (g, i, o) with `inputs_first`.
        """
        size, shape = self.parameter.numel(), self.shape
        if inputs_first and self._is_transposed and shape.numel() == size:
            return Outer(self.name, None, b, a, None, size)
        order = _inputs_first(b, a) if inputs_first else None
        if self._is_parameter:
            return Outer(self.name, None, b, a, order if order is None else _unless_identity(order, size), size)
        positions = view_positions(self.source, self.output, self.parameter) if self._is_view else None
        if positions is not None:
            index = positions if order is None else positions[order]
            return Outer(self.name, None, b, a, _unless_identity(index, size), size)
        return self.dense(Outer("", None, b, a, order, shape.numel()).dense()[""])

    def lookup(self, b: Tensor, tokens: Tensor, padding: int) -> Block:
        """Rows of an embedding table, for b (K, N, T, d), zero at the token `padding` (-1: none)."""
        if self._is_parameter:
            return Lookup(self.name, b, tokens, self.shape[0], padding)
        return self.dense(Lookup("", b, tokens, self.shape[0]).dense()[""])

    def dense(self, rows: Tensor) -> Dense:
        """Dense rows (K, N, numel) in the operand's flat order."""
        if not self._is_parameter:
            flat = rows.flatten(0, 1).reshape(-1, *self.shape)
            rows = pull_back(self.source, self.output, self.parameter, flat).reshape(*rows.shape[:2], -1)
        return Dense.of(self.name, rows)

    @property
    def _is_parameter(self) -> bool:
        return hasattr(self.source, "variable")

    @property
    def _is_transposed(self) -> bool:
        if self._is_parameter or node_kind(self.source) != "TBackward":
            return False
        return hasattr(uncast(*self.source.next_functions[0])[0], "variable")

    @property
    def _is_view(self) -> bool:
        node = self.source
        while not hasattr(node, "variable"):
            if not is_view(node):
                return False
            node = node.next_functions[0][0]
        return True


def _inputs_first(b: Tensor, a: Tensor) -> Tensor:
    """Flat position of entry (g, o, i) in an operand with axes (g, i, o)."""
    g, o, i = b.shape[2], b.shape[4], a.shape[3]
    return torch.arange(g * o * i, device=b.device).reshape(g, i, o).transpose(1, 2).flatten()


def _unless_identity(index: Tensor, size: int) -> Tensor | None:
    whole = len(index) == size
    return None if whole and torch.equal(index, torch.arange(size, device=index.device)) else index
