"""Fused accumulation: sums of a layer's output gradients, for structures that need no rows of the Jacobian.

A layer with one position and one use becomes a `FusedSums`. The sums are accumulated during the backward passes. The
gradients of a few examples are kept, for the gradient check.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ntk_laplace import tuning
from ntk_laplace.jacobian.blocks import Outer

__all__ = ["NO_FUSED_LAYERS", "FusedAccumulation", "FusedLayer", "FusedLayers", "FusedSums"]


@dataclass(frozen=True)
class FusedLayer:
    """Expected shape of a layer, to detect a batch whose graph uses the weight differently.

    Attributes
    ----------
    outputs : int
        Number of outputs o.
    biases : container of str or None
        Names of the biases that the weight may have; None stands for no bias.
    """

    outputs: int
    biases: Container[str | None]


@dataclass(frozen=True)
class FusedLayers:
    """Layers for which only sums of output gradients are needed.

    Attributes
    ----------
    weights : mapping of str to FusedLayer or None
        Their weights, each with the layer shape that the sums require; None accepts any shape.
    squared : bool
        If true, the sums are Σ_k b² of each example, for exact diagonals; else Σ_nk b bᵀ, for Kronecker factors.
    """

    weights: Mapping[str, FusedLayer | None] = field(default_factory=dict)
    squared: bool = False

    def suits(self, weight: str, outputs: int, bias: str | None) -> bool:
        """Whether the sums of a layer with this weight, shape and bias can be used."""
        layer = self.weights.get(weight)
        return weight in self.weights and (layer is None or (outputs == layer.outputs and bias in layer.biases))


NO_FUSED_LAYERS = FusedLayers()


@dataclass(frozen=True)
class FusedAccumulation:
    """Settings for summing output gradients during the backward passes.

    Attributes
    ----------
    fused_layers : FusedLayers
    sample : Tensor, (m,)
        Examples whose gradients are also kept, for the gradient check.
    dtype : torch.dtype
        Floating type of the sums.
    """

    fused_layers: FusedLayers
    sample: Tensor
    dtype: torch.dtype


@dataclass(frozen=True)
class FusedSums:
    """Sums that replace an `Outer` block of one position and one group.

    Attributes
    ----------
    sums : Tensor
        Σ_nk b bᵀ, (o, o), lower triangle (whole diagonal blocks); or Σ_k b² of each example, (N, o).
    squared : bool
        Whether `sums` is Σ_k b².
    a : Tensor, (N, i)
        Layer inputs.
    sample : Outer
        Rows of a few examples, for the gradient check.
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
        """The layer's bias, whose rows are the output gradients."""
        return self.sample.bias

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters."""
        return self.sample.names

    def squares(self, ones: bool) -> Tensor:
        """Σ_nk (b_o a_i)² from the sums of squares, (1, o, i); `ones` appends an input of 1."""
        (n, o), i = self.sums.shape, self.a.shape[1]
        total = self.sums.new_zeros(1, o, i + ones)
        step = max(1, tuning.SQUARED_INPUT_BYTES // max(1, i * self.a.element_size()))
        for start in range(0, n, step):
            part = slice(start, start + step)
            total[0, :, :i].addmm_(self.sums[part].T, self.a[part].square())
        if ones:
            total[0, :, i] = self.sums.sum(0)
        return total

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> FusedSums:
        """The same sums in another floating type, or on another device."""
        sums, a = self.sums.to(device, dtype), self.a.to(device, dtype)
        return replace(self, sums=sums, a=a, sample=self.sample.to(dtype, device))
