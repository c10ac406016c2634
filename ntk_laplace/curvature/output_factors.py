"""The algebra of a last linear layer: B factored one output at a time, K = k ⊗ I_C.

With Λ_n = diag(d_n) - u_n u_nᵀ, u_nc = √d_nc v_nc, D_c = diag(d_nc) over the examples n, and k = X Xᵀ ([RW06] 3.3)

    B_c = I + D_c^½ k D_c^½,    M = I - Σ_c V_c (I - B_c⁻¹) V_c,    log det B = Σ_c log det B_c + log det M:

C matrices and one more instead of one matrix of order N R. X contains the layer's inputs and a one, times their prior
deviations, in r coordinates. Of each output only G_c = (I + XᵀD_cX)⁻¹, (r, r), is kept: det B_c = 1/det G_c, and in
these coordinates

    H⁻¹ = blockdiag(G_c) + [G_cXᵀU_c M⁻¹ U_c'XG_c'],    V(x) = φᵀ H⁻¹ φ.

The algebra is in float64: M is a difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ntk_laplace.model.likelihoods import DiagonalForm
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.linalg import add_outer_lower_, cholesky_log_det, cholesky_of, mirror_lower_
from ntk_laplace.runtime.lower_triangle import require_definite
from ntk_laplace.runtime.panels import panels
from ntk_laplace.runtime.resources import require_memory


@dataclass(frozen=True)
class OutputFactors:
    """The factorization of B at one setting of the hyperparameters, and H⁻¹ in the r coordinates of X.

    Attributes
    ----------
    features : Tensor, (N, r)
        X.
    form : DiagonalForm
        Λ.
    log_det : Tensor, ()
        log det B.
    inner : Tensor, (N, N)
        L with M = L Lᵀ, if Λ is not diagonal.
    covariances : Tensor, (C, r, r)
        All G_c; none if they were not to be kept.
    """

    features: Tensor
    form: DiagonalForm
    log_det: Tensor
    inner: Tensor
    covariances: Tensor

    @classmethod
    def of(cls, features: Tensor, form: DiagonalForm, direct: bool, keep: bool = True) -> OutputFactors:
        """Factor B, and keep all G_c if they are needed; `direct` forms B_c itself, where N is smaller than r."""
        x, d = features, form.diagonal
        (n, r), c = x.shape, d.shape[1]
        total, kept = x.new_zeros((), dtype=torch.float64), x.new_empty(c if keep else 0, r, r)
        inner, unit = x.new_zeros(n, n), None
        if direct and form.vector is not None:
            root = d.sqrt()
            unit = torch.where(root > 0, form.vector / root, 0.0)  # v, 0 where d is
        eye = torch.eye(r, dtype=x.dtype, device=x.device)
        for part in output_parts(form, 2 * r * (r + n) + 3 * n * n * direct):
            lower = _cholesky((x.T * d.T[part].unsqueeze(1)) @ x + eye)  # of XᵀD_cX + I
            total = total + 2.0 * lower.diagonal(dim1=1, dim2=2).log().sum()
            if unit is not None:
                _add_direct_(inner, x, d.T[part].sqrt(), unit.T[part])
            elif form.vector is not None:  # -U_cX G_c XᵀU_c, by the Woodbury identity
                half = torch.linalg.solve_triangular(lower, x.T.expand(len(lower), r, n), upper=False)
                half *= form.vector.T[part].unsqueeze(1)
                add_outer_lower_(inner, half.flatten(0, 1), scale=-1.0)
            if keep:
                kept[part] = torch.cholesky_inverse(lower)
        if form.vector is None:
            return cls(x, form, total, inner, kept)
        inner.diagonal().add_(1.0 if unit is None else 1.0 - unit.square().sum(1))
        inner = cholesky_of(mirror_lower_(inner))
        return cls(x, form, total + cholesky_log_det(inner), inner, kept)

    @cached_property
    def marginals(self) -> Tensor:
        """Covariance of the weights of each output, G_c + G_cXᵀU_c M⁻¹ U_cXG_c, (C, r, r)."""
        require_memory(self.covariances.nbytes, self.features.device, "the covariance of each output's weights",
                       "Use fewer training points, or a structured posterior.")
        found = self.covariances.clone()
        if self.form.vector is not None:
            (n, r) = self.features.shape
            for part in output_parts(self.form, 2 * n * r):
                half = self.form.vector.T[part].unsqueeze(2) * (self.features @ self.covariances[part])  # (m, N, r)
                half = torch.linalg.solve_triangular(self.inner, half, upper=False)
                found[part].baddbmm_(half.mT, half)
        return found

    def solve(self, values: Tensor) -> Tensor:
        """H⁻¹ v for v (m, C, r)."""
        solved = self._by_output(values)
        if self.form.vector is None:
            return solved
        u = self.form.vector.T
        seen = (u * (solved @ self.features.T)).sum(1)  # (m, N)
        back = torch.cholesky_solve(seen.T, self.inner).T.unsqueeze(1) * u
        return solved + self._by_output(back @ self.features)

    def _by_output(self, values: Tensor) -> Tensor:
        """G_c v_c for v (m, C, r)."""
        return (values.transpose(0, 1) @ self.covariances).transpose(0, 1)

    def moments(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """φᵀG_cφ, (n, C), and L⁻¹U_cXG_cφ, (n, N, C), for φ (n, r): V is diag of the first, and the second squared."""
        solved = self.covariances @ features.T  # (C, r, n)
        own = torch.einsum("crn,nr->nc", solved, features)
        if self.form.vector is None:
            return own, own.new_zeros(len(own), 0, own.shape[1])
        seen = self.form.vector.T.unsqueeze(2) * (self.features @ solved)  # (C, N, n)
        (c, n, m) = seen.shape
        seen = torch.linalg.solve_triangular(self.inner, seen.permute(1, 2, 0).reshape(n, m * c), upper=False)
        return own, seen.view(n, m, c).transpose(0, 1)


def output_parts(form: DiagonalForm, numbers: int) -> Iterator[slice]:
    """Slices of outputs that take so many numbers each."""
    return panels(form.diagonal.shape[1], 8 * numbers, tuning.OUTPUTS_BYTES)


def _add_direct_(inner: Tensor, x: Tensor, scale: Tensor, unit: Tensor) -> None:
    """Add V_cB_c⁻¹V_c of some outputs, for √d (m, N) and v (m, N)."""
    small = (x @ x.T) * scale.unsqueeze(1) * scale.unsqueeze(2)
    small.diagonal(dim1=1, dim2=2).add_(1.0)
    inner += (torch.cholesky_inverse(_cholesky(small)) * unit.unsqueeze(1) * unit.unsqueeze(2)).sum(0)


def _cholesky(matrices: Tensor) -> Tensor:
    """L with A = L Lᵀ, for matrices (m, p, p)."""
    lower, info = torch.linalg.cholesky_ex(matrices)
    require_definite(info.max(), 0, matrices.shape[1], matrices.dtype)
    return lower
