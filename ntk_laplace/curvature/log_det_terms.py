"""Terms of log det B as functions of the hyperparameters, each from one eigendecomposition or one small matrix."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.linalg import cholesky_, cholesky_log_det, symmetric_eigen
from ntk_laplace.runtime.lower_triangle import LowerTriangle
from ntk_laplace.runtime.panels import panels


class LogDetTerm(ABC):
    """A term of log det B, as a function of changes s of the log precisions."""

    @abstractmethod
    def value_and_slope(self, shift: Tensor) -> tuple[Tensor, Tensor]:
        """The term, 0-d, and its derivatives in s, (G,), both float64 and without a graph.

        The `shift` s (G,) contains the changes of the log precisions of the prior groups, less log c if Λ becomes cΛ.
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

    def value_and_slope(self, shift: Tensor) -> tuple[Tensor, Tensor]:
        """One pass over the eigenvalues, ∂/∂s = -λe^(-s)/(1 + λe^(-s)).

        It goes in pieces that fit in the CPU cache: otherwise a million eigenvalues take half of the time in memory.
        """
        total, slope = shift.new_zeros(()), torch.zeros_like(shift)
        factors = torch.exp(-shift).to(self.values)
        for part in panels(len(self.values), 1, tuning.EIGENVALUES):
            group = self.group if isinstance(self.group, int) else self.group[part]
            ratio = self.values[part].clamp_min(0.0).mul_(factors[group])
            total += torch.log1p(ratio).sum().to(shift)  # each piece in its own dtype, their sum in double
            used = ratio.div_(ratio + 1)
            if isinstance(group, int):
                slope[group] -= used.sum().to(shift)
            else:
                slope.index_add_(0, group, used.to(shift), alpha=-1.0)
        return total, slope


def joined(terms: Sequence[LogDetTerm]) -> list[LogDetTerm]:
    """The same sum in fewer terms: short spectra become one, as each operation takes longer than their numbers do."""
    short = [term for term in terms if isinstance(term, Spectrum) and len(term.values) <= tuning.EIGENVALUES]
    kinds = {(term.values.device, term.values.dtype) for term in short}
    if len(short) < 2 or len(kinds) > 1:
        return list(terms)
    groups = [torch.full_like(term.values, term.group, dtype=torch.long) if isinstance(term.group, int) else term.group
              for term in short]
    one = Spectrum(torch.cat([term.values for term in short]), torch.cat(groups))
    return [one, *(term for term in terms if not any(term is own for own in short))]


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

    def value_and_slope(self, shift: Tensor) -> tuple[Tensor, Tensor]:
        """Σ_ok log(1 + β_o α_k) for the eigenvalues α of E A E, from one eigendecomposition.

        With its eigenvectors U, ∂/∂s_i = -Σ_k U_ik² Σ_o β_oα_k/(1 + β_oα_k).
        """
        scale = torch.exp(-0.5 * shift).to(self.inputs)[self.group]
        values, vectors = symmetric_eigen(self.inputs * scale.unsqueeze(1) * scale.unsqueeze(2))
        ratio = self.outputs.unsqueeze(2) * values.clamp_min(0.0).unsqueeze(1)
        total = torch.log1p(ratio).sum(dtype=shift.dtype)
        used = ratio.div_(ratio + 1).sum(1).unsqueeze(2)
        own = (vectors.square() @ used).flatten().to(shift)
        return total, torch.zeros_like(shift).index_add_(0, self.group.flatten(), own, alpha=-1.0)


@dataclass(frozen=True)
class MatrixTerm(LogDetTerm):
    """log det(G + P0 eˢ) - log det(P0 eˢ), for a matrix G that mixes entries of different precisions.

    Attributes
    ----------
    ggn : Tensor, (P, P)
        G, of which the lower triangle is read.
    prior_precision : Tensor, (P,)
        Diagonal of P0.
    group : Tensor, (P,)
        Prior group of each entry.
    """

    ggn: Tensor
    prior_precision: Tensor
    group: Tensor

    def value_and_slope(self, shift: Tensor) -> tuple[Tensor, Tensor]:
        """From one Cholesky factorization H = L Lᵀ, ∂/∂s_g = -γ_g = -Σ_{i in g} (1 - P_ii (H⁻¹)_ii)."""
        precision = self.prior_precision * shift.exp().to(self.prior_precision)[self.group]
        matrix = self.ggn.clone()
        matrix.diagonal().add_(precision)
        cholesky_(matrix)
        used = 1.0 - precision * LowerTriangle.of(matrix).inverse_diagonal(1).flatten()
        total = cholesky_log_det(matrix).to(shift) - precision.to(shift).log().sum()
        return total, torch.zeros_like(shift).index_add_(0, self.group, used.to(shift), alpha=-1.0)
