"""The Gaussian q = N(μ, H⁻¹) that variational inference moves, and how one step changes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.curvature import FullPrecision, PosteriorPrecision
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.linalg import add_outer_lower_
from ntk_laplace.runtime.parameter_layout import ParameterLayout

__all__ = ["DataTerms", "DenseState", "VariationalState"]


@dataclass(frozen=True)
class DataTerms:
    """Share of some examples in the two expectations of a step, ĝ = Σ Jᵀr and Ĝ = Σ JᵀΛJ = RᵀR.

    Attributes
    ----------
    gradient : Tensor, (P,)
        Share of ĝ.
    rows : Jacobian
        Share of R: rows of SᵀJ, scaled so that the sum of their outer products is the share of Ĝ.
    counts : Tensor, (n,), optional
        How often each example counts; equally often by default.
    """

    gradient: Tensor
    rows: Jacobian
    counts: Tensor | None = None


class VariationalState(ABC):
    """q = N(μ, H⁻¹) under a prior N(μ0, P0⁻¹), updated by natural gradients ([T20] 4.2, 4.3).

    A step of size γ with the expectations ĝ (P,) and Ĝ (P, P) is, without a difference of large vectors,

        H ← (1-γ) H + γ (P0 + Ĝ),    μ ← μ + γ H⁻¹ [ĝ - P0 (μ - μ0)],    with the new H in the second.

    Attributes
    ----------
    mean : Tensor, (P,)
        μ.
    """

    mean: Tensor

    @property
    @abstractmethod
    def precision(self) -> PosteriorPrecision:
        """H, factorized. Its `log_det` may be relative to another diagonal than P0; see `posterior_precision`."""

    @abstractmethod
    def update(self, step_size: float, terms: Iterable[DataTerms]) -> float:
        """Take one step. The terms are read once, and may be computed from this state while they are read.

        Returns
        -------
        float
            Norm of the natural gradient in q's own metric, sqrt(gᵀH⁻¹g) for g = ĝ - P0 (μ - μ0).

        Raises
        ------
        NumericalError
            If the new H is not positive definite; the state is then undefined.
        """

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """Copies of all tensors that another process needs to continue with the same numbers."""

    @abstractmethod
    def restore(self, record: Mapping[str, Any]) -> None:
        """Continue from a record."""

    @property
    def rows_kept(self) -> int | None:
        """Number of rows that represent H - diag; None if it is a matrix of parameters."""
        return None

    def draw(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws e from N(0, H⁻¹), (count, P); θ = μ ± e are two samples of q."""
        return self.precision.sample(count, generator)

    def covariance_blocks(self, rows: Jacobian) -> Tensor:
        """V = J H⁻¹ Jᵀ, diagonal blocks (n, C, C): covariance of the outputs, linearized in the weights."""
        return self.precision.covariance_blocks(rows)


class DenseState(VariationalState):
    """H - P0 as a matrix over the parameters, (P, P).

    Parameters
    ----------
    mean : Tensor, (P,)
        In the dtype of the algebra.
    excess : Tensor, (P, P)
        H - P0, of which only the lower triangle is read; it is changed in place.
    prior : GaussianPrior
        Bound to the parameters of `shapes`.
    shapes : ParameterLayout
        The parameters, in order.
    """

    def __init__(self, mean: Tensor, excess: Tensor, prior: GaussianPrior, shapes: ParameterLayout) -> None:
        self.mean, self._excess, self._prior, self._shapes = mean, excess, prior, shapes
        self._prior_mean = prior.flat_mean().to(mean)
        self._precision: FullPrecision | None = None

    @classmethod
    def isotropic(
        cls, mean: Tensor, precision: float, prior: GaussianPrior, shapes: ParameterLayout
    ) -> DenseState:
        """H = λ I for a number λ."""
        excess = mean.new_zeros(len(mean), len(mean))
        excess.diagonal().copy_(precision - prior.flat_precision().detach().to(mean))
        return cls(mean, excess, prior, shapes)

    @property
    def precision(self) -> FullPrecision:
        """H, factorized; `log_det` is relative to P0."""
        if self._precision is None:
            self._precision = FullPrecision(self._excess, self._prior, self._shapes)
        return self._precision

    def update(self, step_size: float, terms: Iterable[DataTerms]) -> float:
        """H - P0 ← (1-γ)(H - P0) + γ Ĝ by few large products, one factorization, and one solve."""
        gradient = self.precision.prior_precision * (self._prior_mean - self.mean)
        sums = _OuterSums(self._excess, step_size)
        for part in terms:
            gradient += part.gradient
            sums.add(part.rows.dense(self._shapes).flatten(0, 1))
        sums.finish()
        self._precision = None  # its memory is that of the new factor
        direction = self.precision.solve(gradient)
        self.mean = self.mean + step_size * direction
        return float((gradient @ direction).clamp_min(0.0).sqrt())

    def record(self) -> dict[str, Any]:
        return {"mean": self.mean.clone(), "excess": self._excess.clone()}

    def restore(self, record: Mapping[str, Any]) -> None:
        self.mean = record["mean"].to(self.mean)
        self._excess.copy_(record["excess"])
        self._precision = None


class _OuterSums:
    """matrix ← (1-γ) matrix + γ Σ rowsᵀrows; rows wait until one product over them is efficient."""

    def __init__(self, matrix: Tensor, step_size: float) -> None:
        self._matrix, self._step_size, self._keep = matrix, step_size, 1.0 - step_size
        self._waiting: list[Tensor] = []

    def add(self, rows: Tensor) -> None:
        self._waiting.append(rows)
        if sum(part.nbytes for part in self._waiting) >= tuning.FULL_ROWS_BYTES:
            self._flush()

    def finish(self) -> None:
        if self._waiting or self._keep != 1.0:
            self._flush()

    def _flush(self) -> None:
        rows = torch.cat(self._waiting) if self._waiting else self._matrix[:0]
        add_outer_lower_(self._matrix, rows, scale=self._step_size, keep=self._keep)
        self._waiting, self._keep = [], 1.0
