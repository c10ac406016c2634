"""Full weight space: the Laplace-GGN posterior from H = JᵀΛJ + P0, (P, P)."""

from __future__ import annotations

import torch
from torch import Tensor

from ntk_laplace import tuning
from ntk_laplace.curvature.structured import CrossCovariance, group_numbers
from ntk_laplace.jacobian.jacobian import Jacobian
from ntk_laplace.linalg import (
    add_outer_lower_,
    cholesky_,
    cholesky_log_det,
    inverse_diagonal,
    log_det_curve,
    solve_lower,
    solve_spd,
)
from ntk_laplace.priors import GaussianPrior

__all__ = ["FullWeightSpace", "accumulate_ggn"]


def accumulate_ggn(ggn: Tensor, rows: Jacobian, shapes: dict[str, torch.Size]) -> None:
    """JᵀΛJ += (SᵀJ)ᵀ(SᵀJ) for rows of SᵀJ; lower triangle only."""
    add_outer_lower_(ggn, rows.dense(shapes).flatten(0, 1))


class FullWeightSpace:
    """Factorization of H for one setting of the hyperparameters.

    Parameters
    ----------
    ggn : Tensor, (P, P)
        Lower triangle of JᵀΛJ.
    prior : GaussianPrior
    shapes : dict of str to torch.Size
        The parameters, in order.
    theta : Tensor, (P,)
        The weights at which the network is linearized.
    """

    homogeneous = True

    def __init__(self, ggn: Tensor, prior: GaussianPrior, shapes: dict[str, torch.Size], theta: Tensor) -> None:
        self.shapes, self.theta = shapes, theta
        with torch.no_grad():
            self.prior_precision = prior.flat_precision().to(ggn)
            self._log_det_prior = prior.log_det().to(ggn)
            self._group_counts = prior.group_counts().to(ggn)
        self._ggn = ggn
        self._groups = group_numbers(prior, shapes).to(ggn.device)
        matrix = ggn.clone()
        matrix.diagonal().add_(self.prior_precision)  # H = JᵀΛJ + P0
        self.factor = cholesky_(matrix)

    # --- evidence

    def log_det(self) -> Tensor:
        """log det B = log det H - log det P0."""
        return cholesky_log_det(self.factor) - self._log_det_prior

    def effective_parameters(self) -> Tensor:
        """γ_g = n_g - δ_g tr_g(H⁻¹) for each prior group, (G,)."""
        used = self.prior_precision * inverse_diagonal(self.factor, 1).flatten()
        return self._group_counts - torch.zeros_like(self._group_counts).index_add_(0, self._groups, used)

    def spectrum(self) -> Tensor:
        """Eigenvalues of P0^-½ JᵀΛJ P0^-½, (P,), ascending; the nonzero ones are those of SᵀKS."""
        scale = self.prior_precision.rsqrt()
        return torch.linalg.eigvalsh(self._ggn * scale * scale.unsqueeze(1), UPLO="L")

    def log_det_curve(self, factors: Tensor) -> Tensor:
        """log det B with all prior precisions multiplied by each of `factors` (m,): (m,)."""
        return log_det_curve(self.spectrum(), factors)

    def solve(self, gradient: Tensor) -> Tensor:
        """H⁻¹ g; g and the result are (P,)."""
        return solve_spd(self.factor, gradient.unsqueeze(1)).squeeze(1)

    # --- covariance of f

    def covariance_blocks(self, rows: Jacobian) -> Tensor:
        """V = J H⁻¹ Jᵀ, diagonal blocks (n, C, C)."""
        k, n = rows.num_cotangents, rows.num_examples
        step = max(1, tuning.COVARIANCE_BYTES // (len(self.factor) * k * self.factor.element_size()))
        blocks = self.factor.new_empty(n, k, k)
        for start in range(0, n, step):
            part = slice(start, min(start + step, n))
            half = self._half(rows.subset(part)).view(len(self.factor), k, -1).permute(2, 1, 0)
            blocks[part] = half @ half.mT
        return blocks

    def cross_covariance(self, rows: Jacobian) -> CrossCovariance:
        """V between later rows and these, which have one cotangent."""
        solved = solve_spd(self.factor, rows.dense(self.shapes)[0].T).T
        sizes = [shape.numel() for shape in self.shapes.values()]
        named = dict(zip(self.shapes, solved.split(sizes, dim=1), strict=True))

        def products(other: Jacobian) -> Tensor:
            each = len(self.factor) * other.num_cotangents * self.factor.element_size()
            step = max(1, tuning.COVARIANCE_BYTES // each)
            parts = range(0, other.num_examples, step)
            return torch.cat([other.subset(slice(start, start + step)).products(named) for start in parts], 1)

        return CrossCovariance(products, solved.numel())

    def covariance(self, rows: Jacobian) -> Tensor:
        """V = J H⁻¹ Jᵀ, joint and interleaved, (nC, nC)."""
        k, n = rows.num_cotangents, rows.num_examples
        half = self._half(rows).view(-1, k, n).transpose(1, 2).reshape(-1, n * k)
        return half.T @ half

    def _half(self, rows: Jacobian) -> Tensor:
        """L⁻¹Jᵀ with H = L Lᵀ, (P, K*n), cotangents first."""
        return solve_lower(self.factor, rows.dense(self.shapes).flatten(0, 1).T)

    # --- samples

    def sample_weights(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws from N(θ*, H⁻¹), (count, P)."""
        noise = torch.randn(len(self.theta), count, dtype=self.factor.dtype, device=self.factor.device,
                            generator=generator)
        return self.theta + solve_lower(self.factor, noise, transpose=True).T

