"""Low rank: the posterior precision H = P0 + FᵀF with F (r, P), in closed form."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from ntk_laplace.curvature.function_space import prior_variances
from ntk_laplace.curvature.posterior_precision import PosteriorPrecision
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.jacobian.gram import diagonal_blocks, gram
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.runtime.linalg import symmetric_eigen

__all__ = ["LowRankPrecision", "prior_deviation"]


def prior_deviation(prior: GaussianPrior, like: Tensor) -> Tensor:
    """P0^-½, (P,), with dtype and device of `like`."""
    with torch.no_grad():
        return prior.flat_precision().to(like).rsqrt()


class LowRankPrecision(PosteriorPrecision):
    """H = P0 + FᵀF, from the eigenvectors U (r, P) and eigenvalues λ of P0^-½FᵀFP0^-½.

    If FᵀF is at most JᵀΛJ, in the order of semidefinite matrices, `log_det` is at most that of JᵀΛJ, and no variance is
    below that of JᵀΛJ.

    Parameters
    ----------
    factor : Tensor, (r, P)
        F.
    prior : GaussianPrior
    shapes : mapping of str to torch.Size
        The parameters, in order.
    eigen : tuple of Tensor, optional
        λ and U, if they are known.

    Attributes
    ----------
    values : Tensor, (r,)
        λ, ascending.
    vectors : Tensor, (r, P)
        U, with orthonormal rows.
    """

    def __init__(
        self, factor: Tensor, prior: GaussianPrior, shapes: Mapping[str, torch.Size],
        eigen: tuple[Tensor, Tensor] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(prior, shapes, factor)
        self.variances = prior_variances(prior, shapes)
        self.deviation = self.prior_precision.rsqrt()  # P0^-½, (P,)
        self.values, self.vectors = self._eigen(factor) if eigen is None else eigen
        self._used = self.values / (1.0 + self.values)

    def _eigen(self, factor: Tensor) -> tuple[Tensor, Tensor]:
        scaled = factor * self.deviation
        values, turn = symmetric_eigen(scaled @ scaled.T)
        clear = values > len(values) * torch.finfo(values.dtype).eps * values[-1:].clamp_min(0.0)
        return values[clear], (turn[:, clear] * values[clear].rsqrt()).T @ scaled

    # --- evidence

    def log_det(self) -> Tensor:
        """log det (I + P0^-½FᵀFP0^-½)."""
        return torch.log1p(self.values).sum()

    def spectrum(self) -> Tensor:
        """λ, (r,)."""
        return self.values

    def effective_parameters(self) -> Tensor:
        """γ_g = Σ_j λ_j/(1 + λ_j) ‖U_jg‖² for each prior group, (G,)."""
        used = self._used @ self.vectors.square()
        return self._by_group.new_zeros(self._num_groups).index_add_(0, self.groups, used)

    # --- products in units of the prior: M = I + P0^-½FᵀFP0^-½

    def whitened_solve(self, vectors: Tensor) -> Tensor:
        """M⁻¹ v for vectors (m, P)."""
        return vectors - ((vectors @ self.vectors.T) * self._used) @ self.vectors

    def whitened_half(self, vectors: Tensor) -> Tensor:
        """M^-½ v for vectors (m, P)."""
        return vectors + ((vectors @ self.vectors.T) * ((1.0 + self.values).rsqrt() - 1.0)) @ self.vectors

    def solve(self, vectors: Tensor) -> Tensor:
        """H⁻¹ v for vectors (..., P)."""
        flat = vectors.reshape(-1, self.num_parameters) * self.deviation
        return (self.whitened_solve(flat) * self.deviation).view_as(vectors)

    def multiply(self, vectors: Tensor) -> Tensor:
        """H v for vectors (..., P)."""
        flat = vectors.reshape(-1, self.num_parameters) / self.deviation
        seen = flat + ((flat @ self.vectors.T) * self.values) @ self.vectors
        return (seen / self.deviation).view_as(vectors)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws from N(0, H⁻¹), (count, P)."""
        noise = torch.randn(count, self.num_parameters, dtype=self.vectors.dtype, device=self.vectors.device,
                            generator=generator)
        return self.whitened_half(noise) * self.deviation

    # --- covariance of f

    @cached_property
    def directions(self) -> Tensor:
        """Rows D (r, P) with H⁻¹ = P0⁻¹ - DᵀD."""
        return self.vectors * self._used.sqrt().unsqueeze(1) * self.deviation

    def covariance_blocks(self, rows: Jacobian) -> Tensor:
        """V = J P0⁻¹ Jᵀ - (JDᵀ)(JDᵀ)ᵀ, diagonal blocks (n, C, C)."""
        seen = rows.products(self.shapes.parts(self.directions)).transpose(0, 1)  # J Dᵀ, (n, K, r)
        return diagonal_blocks(rows, self.variances) - seen @ seen.mT

    def covariance(self, rows: Jacobian) -> Tensor:
        """V, joint and interleaved, (nC, nC)."""
        seen = rows.products(self.shapes.parts(self.directions)).transpose(0, 1).flatten(0, 1)
        return gram(rows, None, self.variances).addmm_(seen, seen.T, alpha=-1.0)
