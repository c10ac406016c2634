"""The inputs of a last linear layer in units of the prior, and the places of its weights among all parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ntk_laplace.jacobian import Jacobian, Outer
from ntk_laplace.jacobian.gram import Variances
from ntk_laplace.runtime.parameter_layout import ParameterLayout


@dataclass(frozen=True, eq=False)
class LayerInputs:
    """Inputs φ of a layer and a one, times their prior deviations, in r = min(N, D + 1) coordinates.

    Attributes
    ----------
    layer : Outer
        The layer's rows at N training points, which lie in these coordinates.
    deviations : Tensor, (D + 1,)
        Prior deviations of the layer's inputs and of the bias.
    turn : Tensor, (D + 1, r), optional
        Orthonormal columns; None is the identity.
    """

    layer: Outer
    deviations: Tensor
    turn: Tensor | None = None

    @classmethod
    def of(cls, layer: Outer, variances: Variances) -> LayerInputs:
        """The coordinates of the examples of `layer`."""
        weight, *bias = (float(variances[name]) ** 0.5 for name in layer.names)
        deviations = layer.a.new_tensor([weight] * layer.a.shape[3] + bias, dtype=torch.float64)
        whitened = layer.inputs[:, 0, 0].double() * deviations
        few = len(whitened) < whitened.shape[1]
        return cls(layer, deviations, torch.linalg.qr(whitened.T).Q if few else None)

    def plain(self, rows: Jacobian) -> Tensor:
        """The layer's inputs, and a one if there is a bias, (n, D + 1)."""
        (block,) = rows.blocks
        assert isinstance(block, Outer)
        return block.inputs[:, 0, 0].double()

    def inside(self, rows: Jacobian) -> Tensor:
        """φ in the r coordinates, (n, r)."""
        whitened = self.plain(rows) * self.deviations
        return whitened if self.turn is None else whitened @ self.turn

    def split(self, rows: Jacobian) -> tuple[Tensor, Tensor]:
        """`inside`, and what lies outside of the coordinates, (n, D + 1), or (n, 0) if nothing can."""
        inside = self.inside(rows)
        if self.turn is None:
            return inside, inside[:, :0]
        return inside, self.plain(rows) * self.deviations - inside @ self.turn.T

    def whole(self, inside: Tensor) -> Tensor:
        """Diagonal of a matrix (r, r) in the coordinates, between the inputs themselves, (D + 1,)."""
        return inside.diagonal() if self.turn is None else ((self.turn @ inside) * self.turn).sum(1)

    def solved(self, values: Tensor, solve: Callable[[Tensor], Tensor]) -> Tensor:
        """P0^½ H⁻¹ P0^½ v for v (m, C, D + 1), from H⁻¹ in the coordinates."""
        inside = values if self.turn is None else values @ self.turn
        found = solve(inside)
        return found if self.turn is None else values + (found - inside) @ self.turn.T

    # --- weights

    def gather(self, flat: Tensor, shapes: ParameterLayout) -> Tensor:
        """The layer's entries of vectors (m, P) as (m, C, D + 1)."""
        named, (weight, *bias) = shapes.parts(flat), self.layer.names
        columns = [named[weight].view(len(flat), -1, self.layer.a.shape[3])]
        return torch.cat(columns + [named[name].unsqueeze(2) for name in bias], 2).double()

    def scatter_(self, flat: Tensor, values: Tensor, shapes: ParameterLayout) -> None:
        """Write (m, C, D + 1) to the layer's entries of vectors (m, P)."""
        named, (weight, *bias) = shapes.parts(flat), self.layer.names
        named[weight].copy_(values[..., : self.layer.a.shape[3]].flatten(1))
        for name in bias:
            named[name].copy_(values[..., -1])
