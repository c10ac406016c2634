"""Fused accumulation: sums of a layer's output gradients, for structures that need no rows of the Jacobian.

A layer with one position and one use becomes a `FusedSums`. The sums are accumulated during the backward passes. The
gradients of a few examples are kept, for the gradient check.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ntk_laplace.jacobian.blocks import Outer

__all__ = ["NO_FUSED_LAYERS", "FusedAccumulation", "FusedLayer", "FusedLayers", "FusedSums"]


@dataclass(frozen=True)
class FusedLayer:
    """The form of a layer: another batch's graph may reach the same weight in another way.

    Attributes
    ----------
    outputs : int
        o.
    biases : container of str or None
        Which bias may go with the weight; None for no bias.
    """

    outputs: int
    biases: Container[str | None]


@dataclass(frozen=True)
class FusedLayers:
    """Of which layers sums of output gradients are all that is wanted.

    Attributes
    ----------
    weights : mapping of str to FusedLayer or None
        Theirs, with the form in which the sums can be used; None where any will do.
    squared : bool
        The sums are Σ_k b² of each example, as exact diagonals want them; else Σ_nk b bᵀ, as Kronecker factors do.
    """

    weights: Mapping[str, FusedLayer | None] = field(default_factory=dict)
    squared: bool = False

    def suits(self, weight: str, outputs: int, bias: str | None) -> bool:
        """Whether sums of such a layer can be used."""
        layer = self.weights.get(weight)
        return weight in self.weights and (layer is None or (outputs == layer.outputs and bias in layer.biases))


NO_FUSED_LAYERS = FusedLayers()


@dataclass(frozen=True)
class FusedAccumulation:
    """Which layers' output gradients are added up as they come.

    Attributes
    ----------
    fused_layers : FusedLayers
    sample : Tensor, (m,)
        Examples whose gradients are kept all the same.
    dtype : torch.dtype
        Of the sums.
    """

    fused_layers: FusedLayers
    sample: Tensor
    dtype: torch.dtype


@dataclass(frozen=True)
class FusedSums:
    """What is left of an `Outer` of one position and group once its output gradients have been added up.

    Attributes
    ----------
    sums : Tensor
        Σ_nk b bᵀ, (o, o), lower triangle (whole diagonal blocks); or Σ_k b² of each example, (N, o).
    squared : bool
        Which of the two.
    a : Tensor, (N, i)
        FusedLayer inputs.
    sample : Outer
        Rows of a few of the examples as they were, for the proof.
    """

    sums: Tensor
    squared: bool
    a: Tensor
    sample: Outer

    @property
    def weight(self) -> str:
        """The layer's weight."""
        return self.sample.weight

    @property
    def bias(self) -> str | None:
        """Its bias, whose rows are the output gradients themselves."""
        return self.sample.bias

    @property
    def names(self) -> tuple[str, ...]:
        """Of the parameters."""
        return self.sample.names

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> FusedSums:
        """The same elsewhere."""
        sums, a = self.sums.to(device, dtype), self.a.to(device, dtype)
        return replace(self, sums=sums, a=a, sample=self.sample.to(dtype, device))
