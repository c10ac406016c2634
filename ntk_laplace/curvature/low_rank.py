"""Low rank: the posterior precision H = P0 + FᵀF with F (r, P), in closed form."""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property

import torch
from torch import Tensor

from ntk_laplace.curvature.posterior_precision import PosteriorPrecision, less_
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.jacobian.gram import Variances, diagonal_blocks, gram
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.runtime.krylov import inner
from ntk_laplace.runtime.sampling import normal


def prior_deviation(prior: GaussianPrior, like: Tensor) -> Tensor:
    """P0^-½, (P,), with dtype and device of `like`."""
    with torch.no_grad():
        return prior.flat_precision().to(like).rsqrt()


class LowRankBase(PosteriorPrecision):
    """H = P0 + FᵀF for F (r, P) with FᵀF at most JᵀΛJ, in the order of semidefinite matrices.

    `log_det` is then at most that of JᵀΛJ, and no variance is below that of JᵀΛJ. In units of the prior H is
    M = I + P0^-½FᵀFP0^-½ = (W Wᵀ)⁻¹.

    Attributes
    ----------
    variances : mapping of str to Tensor
        P0⁻¹, by parameter name.
    """

    variances: Variances

    @cached_property
    def deviation(self) -> Tensor:
        """P0^-½, (P,)."""
        return self.prior_precision.rsqrt()

    @property
    @abstractmethod
    def rank(self) -> int:
        """r."""

    @property
    @abstractmethod
    def trace(self) -> float:
        """tr FP0⁻¹Fᵀ."""

    @property
    @abstractmethod
    def largest(self) -> float:
        """The largest eigenvalue of FP0⁻¹Fᵀ, or an estimate of it."""

    @abstractmethod
    def products(self, vectors: Tensor) -> Tensor:
        """FᵀF v for vectors (m, P)."""

    @abstractmethod
    def whitened_solve(self, vectors: Tensor) -> Tensor:
        """M⁻¹ v for vectors (m, P)."""

    @abstractmethod
    def whitened_half(self, vectors: Tensor, transpose: bool = False) -> Tensor:
        """W v, or Wᵀ v, for vectors (m, P)."""

    @abstractmethod
    def eigenvalues(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Eigenvalues λ of FP0⁻¹Fᵀ, (r,), and Σ_m (uᵀFP0^-½v_m)² of each eigenvector u, (r,), for vectors (m, P)."""

    @abstractmethod
    def group_grams(self) -> Tensor:
        """The parts F_gP0⁻¹F_gᵀ of the prior groups, (G, r, r), in double precision and any basis of the r rows."""


class LowRankPrecision(LowRankBase):
    """H = P0 + FᵀF, F (r, P) with rows that are orthogonal in units of the prior: FP0⁻¹Fᵀ = diag(λ).

    Parameters
    ----------
    factor : Tensor, (r, P)
        F.
    values : Tensor, (r,)
        λ, ascending.
    prior : GaussianPrior
    """

    def __init__(self, factor: Tensor, values: Tensor, prior: GaussianPrior) -> None:
        super().__init__(prior, factor)
        self.variances = prior.variances()
        self.factor, self.values = factor, values

    @property
    def rank(self) -> int:
        return len(self.values)

    @property
    def trace(self) -> float:
        """Σ λ."""
        return float(self.values.sum())

    @property
    def largest(self) -> float:
        """The largest λ."""
        return float(self.values[-1]) if self.rank else 0.0

    # --- evidence

    def log_det(self) -> Tensor:
        """log det (I + P0^-½FᵀFP0^-½)."""
        return torch.log1p(self.values).sum()

    def spectrum(self) -> Tensor:
        """λ, (r,)."""
        return self.values

    def effective_parameters(self) -> Tensor:
        """γ_g = Σ_j λ_j/(1 + λ_j) ‖U_jg‖² for each prior group, with the eigenvectors U of P0^-½FᵀFP0^-½, (G,)."""
        used = torch.zeros_like(self.deviation)
        for value, row in zip(1.0 / (1.0 + self.values), self.factor, strict=True):
            used.addcmul_(row, row * value)
        found = self._by_group.new_zeros(self._num_groups)
        return found.index_add_(0, self.groups, used * self.deviation.square())

    def eigenvalues(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """λ, and Σ_m (f_jᵀP0^-½v_m)² of the rows f_j of F, for vectors (m, P)."""
        return self.values, inner(vectors, self.factor, self.deviation).square().sum(0)

    def group_grams(self) -> Tensor:
        scaled = self.factor * self.deviation
        parts = (scaled[:, self.groups == g] for g in range(self._num_groups))
        return torch.stack([part @ part.T for part in parts]).double()

    # --- products in units of the prior: M = I + P0^-½FᵀFP0^-½

    def products(self, vectors: Tensor) -> Tensor:
        return (vectors @ self.factor.T) @ self.factor

    def whitened_solve(self, vectors: Tensor) -> Tensor:
        return self._changed(vectors, -1.0 / (1.0 + self.values))

    def whitened_half(self, vectors: Tensor, transpose: bool = False) -> Tensor:
        """M^-½ v for vectors (m, P): W is symmetric."""
        root = (1.0 + self.values).sqrt()
        return self._changed(vectors, -1.0 / (root * (1.0 + root)))  # (1/root - 1)/λ

    def _changed(self, vectors: Tensor, weights: Tensor) -> Tensor:
        """v + P0^-½Fᵀ diag(w) F P0^-½ v."""
        seen = (vectors * self.deviation) @ self.factor.T
        return ((seen * weights) @ self.factor).mul_(self.deviation).add_(vectors)

    def solve(self, vectors: Tensor) -> Tensor:
        flat = vectors.reshape(-1, self.num_parameters) * self.deviation
        return (self.whitened_solve(flat) * self.deviation).view_as(vectors)

    def multiply(self, vectors: Tensor) -> Tensor:
        flat = vectors.reshape(-1, self.num_parameters)
        return (self.products(flat) + self.prior_precision * flat).view_as(vectors)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        noise = normal((count, self.num_parameters), self.factor, generator)
        return self.whitened_half(noise) * self.deviation

    # --- covariance of f

    @cached_property
    def directions(self) -> Tensor:
        """Rows D (r, P) with H⁻¹ = P0⁻¹ - DᵀD."""
        return self.factor * (1.0 + self.values).rsqrt().unsqueeze(1) * self.deviation.square()

    def covariance_blocks(self, rows: Jacobian) -> Tensor:
        """V = J P0⁻¹ Jᵀ - (JDᵀ)(JDᵀ)ᵀ, diagonal blocks (n, C, C)."""
        seen = rows.products(self.shapes.parts(self.directions)).transpose(0, 1)  # J Dᵀ, (n, K, r)
        return less_(diagonal_blocks(rows, self.variances), seen)

    def covariance(self, rows: Jacobian) -> Tensor:
        seen = rows.products(self.shapes.parts(self.directions)).transpose(0, 1).flatten(0, 1)
        return less_(gram(rows, self.variances), seen)
