"""Terms of log det B as functions of the hyperparameters, each from one eigendecomposition or one small matrix."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.linalg import symmetric_eigen

__all__ = ["InputTerm", "LogDetTerm", "Spectrum"]


class LogDetTerm(ABC):
    """A term of log det B, as a function of changes of the log precisions."""

    @abstractmethod
    def log_det(self, shift: Tensor) -> Tensor:
        """The term, 0-d, float64.

        Parameters
        ----------
        shift : Tensor, (G,)
            Changes of the log precisions of the prior groups, less log c if Λ becomes cΛ. Differentiable once.
        """


@dataclass(frozen=True)
class Spectrum(LogDetTerm):
    """Σ log(1 + λ_i e^(-s)), for eigenvalues that belong to one prior group each.

    Attributes
    ----------
    values : Tensor, (m,)
        λ, of P0^-½ JᵀΛJ P0^-½; rounding can make them slightly negative.
    group : int or Tensor, (m,)
        The group of all, or of each.
    """

    values: Tensor
    group: int | Tensor

    def log_det(self, shift: Tensor) -> Tensor:
        """One pass over the eigenvalues."""
        found: Tensor = _OfSpectrum.apply(shift[self.group], self.values.detach().clamp_min(0.0))
        return found


@dataclass(frozen=True)
class InputTerm(LogDetTerm):
    """Σ_o log det(I + β_o E A E), with E = diag e^(-s/2), for inputs of a layer that have precisions of their own.

    Attributes
    ----------
    outputs : Tensor, (G, o)
        β.
    inputs : Tensor, (G, i, i)
        P0^-½ A P0^-½, of which the lower triangle is read.
    group : Tensor, (G, i)
        Prior group of each input.
    """

    outputs: Tensor
    inputs: Tensor
    group: Tensor

    def log_det(self, shift: Tensor) -> Tensor:
        """One eigendecomposition of the inputs' side."""
        found: Tensor = _OfInputs.apply(shift[self.group], self.outputs.detach(), self.inputs.detach())
        return found


class _OfSpectrum(torch.autograd.Function):
    """Σ log(1 + λ_i e^(-s)) for one s, or one for each λ_i, with its derivative from the same pass.

    Processed in pieces that fit in the CPU cache: otherwise a million eigenvalues take half of the time in memory.
    """

    @staticmethod
    def forward(ctx: Any, shift: Tensor, values: Tensor) -> Tensor:
        total, slope = shift.new_zeros(()), []
        factor = torch.exp(-shift).to(values)
        factors = factor.expand_as(values).split(tuning.EIGENVALUES) if factor.ndim else repeat(factor)
        for part, own in zip(values.split(tuning.EIGENVALUES), factors, strict=False):
            ratio = part * own
            total += torch.log1p(ratio).sum().to(shift)  # each piece in its own dtype, their sum in double
            used = ratio.div_(ratio + 1)
            slope.append(used if factor.ndim else used.sum().to(shift))
        ctx.slope = torch.cat(slope).to(shift) if factor.ndim else sum(slope, shift.new_zeros(()))
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return -upstream * ctx.slope, None


class _OfInputs(torch.autograd.Function):
    """Σ_ok log(1 + β_o α_k) for the eigenvalues α of E A E.

    With its eigenvectors U, ∂/∂s_i = -Σ_k U_ik² Σ_o β_oα_k/(1 + β_oα_k).
    """

    @staticmethod
    def forward(ctx: Any, shift: Tensor, outputs: Tensor, inputs: Tensor) -> Tensor:
        scale = torch.exp(-0.5 * shift).to(inputs)
        values, vectors = symmetric_eigen(inputs * scale.unsqueeze(1) * scale.unsqueeze(2))
        ratio = outputs.unsqueeze(2) * values.clamp_min(0.0).unsqueeze(1)
        used = (ratio / (1 + ratio)).sum(1).unsqueeze(2)
        ctx.slope = (vectors.square() @ used).squeeze(2).to(shift)
        return torch.log1p(ratio).sum(dtype=shift.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        return -upstream * ctx.slope, None, None
