"""Full weight space: the Laplace-GGN posterior from H = JᵀΛJ + P0, (P, P)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from ntk_laplace.curvature.log_det_terms import LogDetTerm, MatrixTerm
from ntk_laplace.curvature.posterior_precision import PosteriorPrecision
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.linalg import (
    add_outer_lower_,
    cholesky_,
    cholesky_log_det,
    solve_lower,
    solve_spd,
    symmetric_eigenvalues,
)
from ntk_laplace.runtime.lower_triangle import LowerTriangle
from ntk_laplace.runtime.resources import require_memory
from ntk_laplace.runtime.sampling import normal


def accumulate_ggn(ggn: Tensor, rows: Jacobian, shapes: Mapping[str, torch.Size]) -> None:
    """JᵀΛJ += (SᵀJ)ᵀ(SᵀJ) for rows of SᵀJ; lower triangle only."""
    add_outer_lower_(ggn, rows.dense(shapes).flatten(0, 1))


def whitened(factor: Tensor, rows: Jacobian, shapes: Mapping[str, torch.Size]) -> Tensor:
    """L⁻¹Jᵀ of some parameters for the L (p, p) of H = L Lᵀ, (p, n, K)."""
    half = solve_lower(factor, rows.dense(shapes).flatten(0, 1).T)
    return half.view(len(half), rows.num_cotangents, rows.num_examples).transpose(1, 2)


class FullPrecision(PosteriorPrecision):
    """Factorization of H for one setting of the hyperparameters.

    Parameters
    ----------
    ggn : Tensor, (P, P)
        Lower triangle of JᵀΛJ.
    prior : GaussianPrior
    shapes : mapping of str to torch.Size, optional
        As in `PosteriorPrecision`.

    Attributes
    ----------
    ggn : Tensor, (P, P)
        As given.
    factor : Tensor, (P, P)
        L with H = L Lᵀ; only the lower triangle is valid.
    """

    def __init__(self, ggn: Tensor, prior: GaussianPrior, shapes: Mapping[str, torch.Size] | None = None) -> None:
        super().__init__(prior, ggn, shapes)
        with torch.no_grad():  # in double precision, and of these parameters, which may be some of the prior's
            logs = prior.precision.double().log()
            self._log_det_prior = (torch.bincount(self.groups, minlength=len(logs)) * logs).sum().to(ggn)
        self.ggn = ggn
        self.factor = self._factorized(1.0)

    def _factorized(self, factor: float) -> Tensor:
        """L with L Lᵀ = JᵀΛJ + c P0 for a factor c of all precisions."""
        matrix = self.ggn.clone()
        matrix.diagonal().add_(self.prior_precision, alpha=factor)
        return cholesky_(matrix)

    # --- evidence

    def log_det(self) -> Tensor:
        return cholesky_log_det(self.factor) - self._log_det_prior

    @cached_property
    def log_det_rounding(self) -> float:
        """Of H, from the pivots of its factorization."""
        return LowerTriangle.of(self.factor).pivot_rounding()

    def effective_parameters(self) -> Tensor:
        used = 1.0 - self.prior_precision * LowerTriangle.of(self.factor).inverse_diagonal(1).flatten()
        return torch.zeros_like(self._by_group).index_add_(0, self.groups, used)

    def spectrum(self) -> Tensor | None:
        """Eigenvalues of P0^-½ JᵀΛJ P0^-½, (P,), ascending; the nonzero ones are those of SᵀKS."""
        if not self._lists_eigenvalues(self.num_parameters):
            return None
        scale = self.prior_precision.rsqrt()
        return symmetric_eigenvalues(self.ggn * scale * scale.unsqueeze(1))

    def log_det_terms(self) -> Sequence[LogDetTerm] | None:
        """From the spectrum, or where precisions differ from a factorization at each of them, of a small matrix.

        That of a large one takes the time of a step, and the posterior's own makes room for it.
        """
        if self._num_groups == 1:
            return super().log_det_terms()
        few = self.num_parameters <= tuning.STEP_MATRIX
        return [MatrixTerm(self.ggn, self.prior_precision, self.groups)] if few else None

    def log_det_at(self, factor: float) -> Tensor:
        """log det B with all prior precisions multiplied by a factor, from another H."""
        require_memory(self.factor.nbytes, self.factor.device, "another H for the evidence at other precisions",
                       "Set prior.log_precision, and ask for the evidence there.")
        return cholesky_log_det(self._factorized(factor)) - self._log_det_prior - self.num_parameters * math.log(factor)

    def solve(self, vectors: Tensor) -> Tensor:
        return solve_spd(self.factor, vectors.reshape(-1, len(self.factor)).T).T.view_as(vectors)

    def multiply(self, vectors: Tensor) -> Tensor:
        flat = vectors.reshape(-1, self.num_parameters)
        seen = LowerTriangle.of(self.ggn).multiply(flat.T).T + self.prior_precision * flat
        return seen.view_as(vectors)

    # --- covariance of f

    def covariance_blocks(self, rows: Jacobian) -> Tensor:
        k, n = rows.num_cotangents, rows.num_examples
        blocks = self.factor.new_empty(n, k, k)
        for part in self._panels(rows):
            half = whitened(self.factor, rows.subset(part), self.shapes).permute(1, 2, 0)
            blocks[part] = half @ half.mT
        return blocks

    def covariance(self, rows: Jacobian) -> Tensor:
        half = whitened(self.factor, rows, self.shapes).flatten(1)
        return half.T @ half

    # --- samples

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        noise = normal((len(self.factor), count), self.factor, generator)
        return solve_lower(self.factor, noise, transpose=True).T
