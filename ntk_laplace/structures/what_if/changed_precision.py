"""Weight space with a few points added, removed or changed: H' = H + (TᵀJ)ᵀ D TᵀJ, where D has entries ±1.

By the Woodbury identity H'⁻¹ = H⁻¹ - H⁻¹(TᵀJ)ᵀ (D + K)⁻¹ TᵀJ H⁻¹ with K = TᵀJ H⁻¹ JᵀT, a matrix over the changed points
only. The factorization of H, of any structure, is reused. With K = L Lᵀ and A = I + LᵀDL, whose eigenvalues are those
of H^-½ H' H^-½ that are not 1,

    (D + K)⁻¹ = D - D L A⁻¹ LᵀD,    log det H' = log det H + log det A.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, partial

import torch
from torch import Tensor

from ntk_laplace.curvature import CrossCovariance, PosteriorPrecision
from ntk_laplace.errors import NumericalError, UnsupportedError
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.linalg import symmetric_root
from ntk_laplace.runtime.panels import panels
from ntk_laplace.runtime.resources import require_memory

HIGH_LEVERAGE = 0.9  # above it one Newton step without a point is an extrapolation, and is flagged


class ChangedPrecision(PosteriorPrecision):
    """Factorization of H' for one setting of the hyperparameters.

    Parameters
    ----------
    base : PosteriorPrecision
        H.
    rows : Jacobian
        Rows of TᵀJ at m points, R cotangents.
    signs : Tensor, (m, R)
        The diagonal of D: 1 where curvature is added, -1 where it is removed.
    prior : GaussianPrior
        That of H, with the same precisions.
    budget : int, optional
        Maximum bytes to allocate.
    max_leverage : float, optional
        Leverage above which nothing is removed: an approximate H may contain less information about the points than
        their curvature. None removes in any case.

    Attributes
    ----------
    leverage : float
        Largest share of H, over all directions, that the removed points account for; below 1 if H is exact.
    partial : bool
        Whether `leverage` exceeds `max_leverage`. H' then contains the added points, but the points to remove are
        still in it.

    Raises
    ------
    MemoryBudgetError
        If the changed points need too much memory.
    NumericalError
        If H' is not positive definite.
    """

    def __init__(
        self, base: PosteriorPrecision, rows: Jacobian, signs: Tensor, prior: GaussianPrior,
        budget: int | None = None, max_leverage: float | None = None,
    ) -> None:
        super().__init__(prior, rows.f)
        self.base, self.rows = base, rows
        self.homogeneous, self.standard_error = base.homogeneous, base.standard_error
        self.reads_data = base.reads_data
        self._require_memory(budget)
        self._signs = signs.flatten().to(rows.f)
        kernel = self._cross(rows).transpose(0, 1).flatten(0, 1)  # K, (m R, m R)
        self._root = symmetric_root(0.5 * (kernel + kernel.mT))
        self._factor()
        self.leverage = float(1.0 - self._values.min())
        self.partial = max_leverage is not None and self.leverage > max_leverage
        if self.partial:
            self._signs = self._signs.clamp_min(0.0)
            self._factor()
        elif not bool((self._values > 0).all()):
            raise NumericalError("points to remove whose joint leverage is below 1",
                                 f"a leverage of {self.leverage:.17g}",
                                 'Remove fewer points, use dtype=torch.float64, or structure="gp".')
        half = self._scaled @ (self._vectors * self._values.rsqrt())
        self.inner = torch.diag(self._signs) - half @ half.mT  # (D + K)⁻¹, with zeros for points where D is zero

    def _factor(self) -> None:
        """Compute D L and the eigendecomposition of A."""
        self._scaled = self._signs.unsqueeze(1) * self._root
        eye = torch.eye(len(self._root), dtype=self._root.dtype, device=self._root.device)
        self._values, self._vectors = torch.linalg.eigh(self._root.mT @ self._scaled + eye)

    def _require_memory(self, budget: int | None) -> None:
        """Raise an error before H⁻¹JᵀT, or its compressed form, is computed."""
        r, m = self.rows.num_cotangents, self.rows.num_examples
        one = self.base.cross_covariance(self._one_cotangent(self.rows.subset(slice(0, 1)), 0)).numbers
        require_memory((one * m * r + 4 * (m * r) ** 2) * self.rows.f.element_size(), self.rows.f.device,
                       f"{m:,} points that change ({m * r:,} rows)",
                       "Change fewer points at a time. At the same weights, subset(points that stay) removes any "
                       'number, and condition(data) adds them; linearization="moving" trains to the new optimum.',
                       budget)

    @staticmethod
    def _one_cotangent(rows: Jacobian, cotangent: int) -> Jacobian:
        chosen = rows.f.new_zeros(rows.num_examples, rows.num_cotangents, 1)
        chosen[:, cotangent] = 1.0
        return rows.weighted(chosen)

    @cached_property
    def _cross_covariances(self) -> list[CrossCovariance]:
        each = (self._one_cotangent(self.rows, number) for number in range(self.rows.num_cotangents))
        return [self.base.cross_covariance(rows) for rows in each]

    def _cross(self, rows: Jacobian) -> Tensor:
        """J H⁻¹ JᵀT, (K, n, m R)."""
        return torch.stack([cross_covariance.products(rows) for cross_covariance in self._cross_covariances],
                           -1).flatten(2)

    def _solved_vjp(self, values: Tensor) -> Tensor:
        """H⁻¹JᵀT v, (k, P), for v (k, m R)."""
        cotangents = values.view(len(values), self.rows.num_examples, -1).permute(2, 1, 0)
        return self.base.solve(self.rows.transposed_products(cotangents, self.shapes))

    def _jvp(self, vectors: Tensor) -> Tensor:
        """TᵀJ v, (k, m R), for v (k, P)."""
        return self.rows.products(self.shapes.parts(vectors)).permute(2, 1, 0).flatten(1)

    # --- evidence

    def log_det(self) -> Tensor:
        """log det B' = log det B + log det A.

        Raises
        ------
        UnsupportedError
            If the points to remove are still in H' (`partial`).
        """
        if self.partial:
            raise UnsupportedError(
                "an approximation with enough information about the removed points, for the evidence without them",
                f"a leverage of {self.leverage:.3g} of these points in it",
                'Change fewer points, use an exact structure ("gp", "full" or "iterative"), or fit to those that stay.',
            )
        before = self.base.log_det()
        return before + self._values.log().sum().to(before)

    def log_det_curve(self, factors: Tensor) -> Tensor:
        """Not available: K changes with every factor.

        Raises
        ------
        UnsupportedError
            Always.
        """
        raise UnsupportedError("a posterior of the data it was fitted to, for its evidence over many precisions",
                               "one that a what-if changed", "Set prior.log_precision, and ask for the evidence there.")

    def effective_parameters(self) -> Tensor:
        """γ_g = n_g - δ_g tr_g(H'⁻¹), one solve per changed direction.

        Raises
        ------
        UnsupportedError
            If the factors of the base are damped.
        """
        if not self.homogeneous:
            raise UnsupportedError("factors that are not damped, for the effective parameters after a what-if",
                                   "damped ones", "Fit with KFAC(), without damped=True.")
        before = self.base.effective_parameters()
        values, vectors = torch.linalg.eigh(self.inner)
        used = torch.zeros_like(self.prior_precision)
        for value, vector in zip(values, vectors.mT, strict=True):
            used += value * self._solved_vjp(vector[None])[0].square()
        return before.index_add(0, self.groups, (used * self.prior_precision).to(before))

    def solve(self, vectors: Tensor) -> Tensor:
        """H'⁻¹ v for vectors (..., P)."""
        found = torch.empty_like(flat := vectors.reshape(-1, self.num_parameters))
        for part in self._together(flat):
            step = self.base.solve(flat[part])
            found[part] = step - self._solved_vjp(self._jvp(step) @ self.inner)
        return found.view_as(vectors)

    @staticmethod
    def _together(vectors: Tensor) -> Iterator[slice]:
        """Vectors (k, P) that are solved for at a time."""
        return panels(len(vectors), vectors.shape[1] * vectors.element_size(), tuning.WEIGHT_SAMPLE_BYTES)

    def multiply(self, vectors: Tensor) -> Tensor:
        """H'v = H v + JᵀT D TᵀJ v for vectors (..., P)."""
        flat = vectors.reshape(-1, self.num_parameters)
        seen = self.rows.products(self.shapes.parts(flat)) * self._signs.view(self.rows.num_examples, -1).T.unsqueeze(2)
        return self.base.multiply(vectors) + self.rows.transposed_products(seen, self.shapes).view_as(vectors)

    def quadratic_slope(self, vector: Tensor) -> Tensor:
        """Derivative of zᵀ (H' - P0) z in each log precision, (G,): that of H."""
        return self.base.quadratic_slope(vector)

    # --- covariance of f

    def covariance_blocks(self, rows: Jacobian) -> Tensor:
        """V' = V - V_xT (D + K)⁻¹ V_Tx, diagonal blocks (n, C, C)."""
        blocks = self.base.covariance_blocks(rows)
        each = len(self._signs) * rows.num_cotangents * rows.f.element_size()
        for part in panels(rows.num_examples, each, tuning.COVARIANCE_BYTES):
            cross = self._cross(rows.subset(part)).transpose(0, 1)
            blocks[part] -= cross @ self.inner @ cross.mT
        return blocks

    def covariance(self, rows: Jacobian) -> Tensor:
        """V', joint and interleaved, (nC, nC)."""
        cross = self._cross(rows).transpose(0, 1).flatten(0, 1)
        return self.base.covariance(rows) - cross @ self.inner @ cross.mT

    def cross_covariance(self, rows: Jacobian) -> CrossCovariance:
        """V' between later rows and these, which have one cotangent."""
        before = self.base.cross_covariance(rows)
        ours = before.products(self.rows).transpose(0, 1).flatten(0, 1)  # V_Tx, (m R, n)
        known = self.inner @ ours
        return CrossCovariance(partial(self._changed_products, before, known), before.numbers + known.numel())

    def _changed_products(self, before: CrossCovariance, known: Tensor, rows: Jacobian) -> Tensor:
        """V' between rows and those that were solved for."""
        return before.products(rows) - self._cross(rows) @ known

    # --- samples

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws from N(0, H'⁻¹), (count, P).

        A draw w from N(0, H⁻¹) becomes w + H⁻¹JᵀT X TᵀJ w with X = L⁻ᵀ(A^-½ - I)L⁻¹. Because A^-½ - I = -LᵀDL φ(A),
        φ(a) = 1/(√a (1 + √a)), X has only one inverse of L. It multiplies TᵀJ w, which is in the range of K, so the
        pseudoinverse is exact.
        """
        draws = self.base.sample(count, generator)
        root = self._values.sqrt()
        shape = (self._vectors / (root * (1.0 + root))) @ self._vectors.mT
        update = -self._scaled @ shape @ torch.linalg.pinv(self._root)  # X
        for part in self._together(draws):
            draws[part] += self._solved_vjp(self._jvp(draws[part]) @ update.mT)
        return draws
