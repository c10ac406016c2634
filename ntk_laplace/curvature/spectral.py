"""H on a part whose curvature has known eigenvectors: KFAC, EKFAC, exact blocks and diagonals."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from ntk_laplace.curvature.part_rows import LookupRows, OuterRows, PartRows
from ntk_laplace.curvature.parts import Part
from ntk_laplace.curvature.summary import Basis
from ntk_laplace.factors import Rows

__all__ = ["KroneckerPart", "SpectralPart"]


class SpectralPart:
    """H = P0^½ U (λ + 1) Uᵀ P0^½ on one part, written with δ where P0 = δ I.

    Parameters
    ----------
    part : Part
    basis : Basis
        U.
    values : Tensor, (G, o, i)
        λ, at least zero.
    precision : Tensor
        δ, 0-d; or (G, o, i), which `basis` then must bear: the identity, or that of P0^-½ (JᵀΛJ) P0^-½.
    scale : Tensor, (G, o, i), optional
        P0^-½, if λ and U are those of the scaled matrix; H's own eigenvalues are then relative to P0.
    """

    def __init__(
        self, part: Part, basis: Basis, values: Tensor, precision: Tensor, scale: Tensor | None = None
    ) -> None:
        self.part, self.basis, self.values, self.scale = part, basis, values, scale
        self.precision = precision
        self._shift = torch.ones_like(precision) if scale is not None else precision

    @cached_property
    def inverse(self) -> Tensor:
        """Eigenvalues of H⁻¹ (of P0^½ H⁻¹ P0^½ if there is a scale), (G, o, i)."""
        return 1.0 / (self.values + self._shift)

    # --- evidence

    def logdet(self) -> Tensor:
        """log det B = Σ log(1 + λ/δ) on this part, in double precision."""
        return torch.log1p((self.values / self._shift).double()).sum()

    def log_dets(self, factors: Tensor) -> Tensor:
        """The same with the precision multiplied by each of `factors` (m,)."""
        ratio = (self.values / self._shift).double().flatten()
        return torch.stack([torch.log1p(ratio / factor).sum() for factor in factors.double()])

    def effective(self) -> Tensor:
        """γ = Σ λ/(λ + δ), 0-d; or entry by entry, (G, o, i), where each has a precision of its own."""
        used = self.values * self.inverse
        if self.precision.ndim == 0:
            return used.sum(dtype=torch.float64)
        if self.basis.right is None:
            return used.expand(self.part.entries)
        return (self.basis.right.square() @ used.unsqueeze(-1)).squeeze(-1)  # 1 - δ_i (H⁻¹)_ii

    # --- H⁻¹ and its root

    def solve(self, values: Tensor) -> Tensor:
        """H⁻¹ v for v (..., G, o, i)."""
        return self._out(self.inverse * self._in(values))

    def factor(self, noise: Tensor) -> Tensor:
        """F z with F Fᵀ = H⁻¹ for z (..., G, o, i)."""
        return self._out(self.inverse.sqrt() * noise)

    def _in(self, values: Tensor) -> Tensor:
        return self.basis.turn(values if self.scale is None else values * self.scale)

    def _out(self, values: Tensor) -> Tensor:
        back = self.basis.back(values)
        return back if self.scale is None else back * self.scale

    # --- covariance of f

    def blocks(self, rows: Rows) -> Tensor:
        """J H⁻¹ Jᵀ on this part, (n, K, K)."""
        return self._turned(rows).blocks(self.inverse)

    def joint(self, rows: Rows) -> Tensor:
        """The same, joint and interleaved."""
        return self._turned(rows).joint(self.inverse)

    def _turned(self, rows: Rows) -> PartRows:
        own: PartRows = self.part.rows(rows)
        own = own if self.scale is None else own.scaled(self.scale)
        return own.rotated(self.basis.left, self.basis.right)

    # --- how it moves with Λ

    def sensitivity(self, rows: Rows, vector: Tensor | None = None) -> Tensor:
        """∂ log det H/∂Λ_n (n, C, C), the basis held; with a vector z, ∂ zᵀHz/∂Λ_n."""
        return self._turned(rows).blocks(self._weights(vector))

    def quadratic(self, vector: Tensor) -> Tensor:
        """zᵀ (H - P0) z for z (G, o, i)."""
        turned = self.basis.turn(vector) if self.scale is None else self.basis.turn(vector / self.scale)
        return (self.values * turned.square()).sum(dtype=torch.float64)

    def _weights(self, vector: Tensor | None) -> Tensor:
        if vector is None:
            return self.inverse
        return self.basis.turn(vector if self.scale is None else vector / self.scale).square()

    def information(self) -> Tensor:
        """The part's approximation of JᵀΛJ, (p, p); for small parts."""
        size = self.part.size
        eye = torch.eye(size, dtype=self.values.dtype, device=self.values.device).view(size, *self.part.entries)
        half = self.basis.turn(eye).flatten(1) * self.values.expand(self.part.entries).flatten().sqrt()
        matrix = half @ half.T
        if self.scale is None:
            return matrix
        inverse_scale = 1.0 / self.scale.flatten()
        return matrix * inverse_scale * inverse_scale.unsqueeze(1)


class KroneckerPart(SpectralPart):
    """KFAC: λ_oi = β_o α_i / count ([I21] 9), the factors' eigenvalues undamped, or damped for the ablation.

    Parameters
    ----------
    part : Part
    basis : Basis
    left, right : Tensor, (G, o) and (G, i)
        Eigenvalues β and α.
    count : Tensor, ()
        Number of terms in the inputs' factor.
    sharing : str
        "expand" or "reduce".
    precision : Tensor, ()
        δ.
    damped : bool
        (β' + √δ)(α' + √δ), β' = β/√count and α' = α/√count, in place of β'α' + δ ([I21] A.3).
    """

    def __init__(
        self, part: Part, basis: Basis, eigenvalues: tuple[Tensor, Tensor, Tensor], sharing: str, precision: Tensor,
        damped: bool = False,
    ) -> None:  # fmt: skip
        left, right, count = eigenvalues
        self.left, self.right = ((side / count.sqrt()).to(side) for side in (left, right))
        values = self.left.unsqueeze(2) * self.right.unsqueeze(1)
        super().__init__(part, basis, values, precision)
        self.sharing, self.damped, self.count = sharing, damped, count

    @cached_property
    def inverse(self) -> Tensor:
        """Eigenvalues of H⁻¹, (G, o, i)."""
        if not self.damped:
            return 1.0 / (self.values + self.precision)
        root = self.precision.sqrt()
        return 1.0 / ((self.left + root).unsqueeze(2) * (self.right + root).unsqueeze(1))

    def logdet(self) -> Tensor:
        """log det H - log det P0."""
        return self.log_dets(self.precision.new_ones(1)).squeeze(0) if self.damped else super().logdet()

    def log_dets(self, factors: Tensor) -> Tensor:
        """The same with the precision multiplied by each of `factors` (m,)."""
        if not self.damped:
            return super().log_dets(factors)
        root = (factors * self.precision).sqrt().double().view(-1, 1, 1)
        _, o, i = self.part.entries
        sides = i * torch.log1p(self.left / root).sum((1, 2)) + o * torch.log1p(self.right / root).sum((1, 2))
        return sides.double()

    def effective(self) -> Tensor:
        """γ = -∂ log det B/∂ log δ, 0-d."""
        if not self.damped:
            return super().effective()
        root = self.precision.sqrt()
        _, o, i = self.part.entries
        left, right = self.left / (self.left + root), self.right / (self.right + root)
        return 0.5 * (i * left.sum(dtype=torch.float64) + o * right.sum(dtype=torch.float64))

    def quadratic(self, vector: Tensor) -> Tensor:
        """zᵀ (H - P0) z for z (G, o, i)."""
        if not self.damped:
            return super().quadratic(vector)
        return ((1.0 / self.inverse - self.precision) * self.basis.turn(vector).square()).sum(dtype=torch.float64)

    def sensitivity(self, rows: Rows, vector: Tensor | None = None) -> Tensor:
        """∂ log det H/∂Λ_n: the outputs' factor is linear in Λ, the inputs' knows nothing of it."""
        weights = self._weights(vector)
        own = self.part.rows(rows)
        shift = self.precision.sqrt() if self.damped else 0.0
        scale = 1.0 / math.sqrt(float(self.count))
        if isinstance(own, LookupRows):
            per_entry = ((self.left + shift).unsqueeze(2) * weights).sum(1)[0] * scale  # (d,)
            b = (own.b @ self.basis.right[0]).transpose(0, 1).unsqueeze(2)
        elif isinstance(own, OuterRows):
            per_entry = ((self.right + shift).unsqueeze(1) * weights).sum(2) * scale  # (G, o)
            b = own.b.sum(3, keepdim=True) if self.sharing == "reduce" else own.b
            turned = torch.einsum("kngto,gop->kngtp", b, self.basis.left).permute(1, 0, 3, 2, 4)  # (n, K, T, G, o)
            b, per_entry = turned.flatten(3).unsqueeze(2), per_entry.flatten()
        else:
            return super().sensitivity(rows, vector)
        flat = b.flatten(2)
        return (b * per_entry).flatten(2) @ flat.mT
