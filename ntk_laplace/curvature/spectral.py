"""H on a parameter block whose curvature has known eigenvectors: KFAC, EKFAC, exact blocks and diagonals."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ntk_laplace.curvature.eigenbases import Eigenbasis, FactorEigen
from ntk_laplace.curvature.log_det_terms import InputTerm, LogDetTerm, Spectrum
from ntk_laplace.curvature.parameter_blocks import ParameterBlock
from ntk_laplace.curvature.posterior_precision import CrossCovariance
from ntk_laplace.curvature.structured import BlockPrecision
from ntk_laplace.jacobian import Jacobian, LayerRows, Lookup, Outer
from ntk_laplace.jacobian.blocks.outer_products import separated
from ntk_laplace.runtime.linalg import cross_approximation
from ntk_laplace.runtime.reflections import Basis, Reflections, side_from_record, side_record, turned, turned_back


class SpectralBlock(BlockPrecision):
    """H = U (λ + δ) Uᵀ on one parameter block, with orthonormal U.

    Relative to P0, H = P0 U (λ + 1) UᵀP0 with UᵀP0U = I, from the generalized eigenproblem JᵀΛJ u = λ P0 u.

    Parameters
    ----------
    block : ParameterBlock
    basis : Basis
        U.
    values : Tensor, (G, o, i)
        λ, at least zero.
    precision : Tensor
        δ, 0-d or (G, o, i). If it is not `relative`, the latter requires a `basis` that is the identity.
    relative : bool
        Whether λ and U are relative to P0.
    """

    many_variances = True

    def __init__(
        self, block: ParameterBlock, basis: Basis, values: Tensor, precision: Tensor, relative: bool = False
    ) -> None:
        self.block, self._basis, self._values = block, basis, values
        self.precision, self.relative = precision, relative

    @property
    def basis(self) -> Basis:
        """U."""
        return self._basis

    @property
    def values(self) -> Tensor:
        """λ, (G, o, i)."""
        return self._values

    @property
    def _shift(self) -> Tensor:
        """Eigenvalues of P0: δ, or 1 relative to itself."""
        return torch.ones_like(self.precision) if self.relative else self.precision

    @cached_property
    def inverse(self) -> Tensor:
        """1/(λ + δ), or 1/(λ + 1), (G, o, i): H⁻¹ = U diag(inverse) Uᵀ."""
        return (self.values + self._shift).reciprocal_()

    # --- storage

    def record(self) -> dict[str, Any] | None:
        """U, λ and δ; of damped factors the λ whose undamped H is the same."""
        values = self.values if self.homogeneous else 1.0 / self.inverse - self._shift
        return {"block": self.block.record(), "left": side_record(self.basis.left),
                "right": side_record(self.basis.right), "values": values,
                "precision": self.precision, "relative": self.relative}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> SpectralBlock:
        """Restore what `record` returned, of this version or an earlier one, whose U has no factor P0^-½."""
        basis = Basis(side_from_record(record["left"]), side_from_record(record["right"]))
        scale = record.get("scale")
        if scale is not None and isinstance(basis.right, Tensor):
            basis = Basis(basis.left, basis.right * scale[:, 0].unsqueeze(2))
        return SpectralBlock(ParameterBlock.from_record(record["block"]), basis, record["values"],
                             record["precision"], record.get("relative", scale is not None))

    # --- evidence

    def log_det(self) -> Tensor:
        """log det B = Σ log(1 + λ/δ) on this parameter block, in double precision."""
        return torch.log1p((self.values / self._shift).double()).sum()

    def log_det_curve(self, factors: Tensor) -> Tensor:
        ratio = (self.values / self._shift).double().flatten()
        return torch.stack([torch.log1p(ratio / factor).sum() for factor in factors.double()])

    def spectrum(self) -> Tensor | None:
        return self.values / self._shift

    def log_det_term(self, groups: int | Tensor) -> LogDetTerm | None:
        """Σ log(1 + λ/δ), if each eigenvalue belongs to one precision."""
        spectrum = self.spectrum()
        if spectrum is None:
            return None
        if isinstance(groups, int):
            return Spectrum(spectrum.flatten(), groups)
        identity = self.basis.left is None and self.basis.right is None
        return Spectrum(spectrum.flatten(), groups.flatten()) if identity else None

    def effective(self) -> Tensor:
        """γ = Σ λ/(λ + δ), 0-d; per entry, (G, o, i), if entries have precisions of their own."""
        used = self.values * self.inverse
        if self.precision.ndim == 0:
            return used.sum(dtype=torch.float64)
        left, right = self.basis.left, self.basis.right
        assert not isinstance(left, Reflections) and not isinstance(right, Reflections)
        squares = Basis(None if left is None else left.square(), None if right is None else right.square())
        own = squares.back(used.expand(self.block.entries))  # Σ_j U_ij² λ_j/(λ_j + 1)
        return own * self.precision if self.relative else own  # 1 - δ_i (H⁻¹)_ii

    # --- H⁻¹ and its root

    def solve(self, values: Tensor) -> Tensor:
        return self.basis.back(self.inverse * self.basis.turn(values))

    def multiply(self, values: Tensor) -> Tensor:
        found = self.basis.back(self._coordinates(values) / self.inverse)
        return found * self.precision if self.relative else found

    def factor(self, noise: Tensor) -> Tensor:
        return self.basis.back(self.inverse.sqrt() * noise)

    def _coordinates(self, values: Tensor) -> Tensor:
        """U⁻¹ v, which is Uᵀ v, or UᵀP0 v."""
        return self.basis.turn(values * self.precision if self.relative else values)

    # --- covariance of f

    def blocks(self, rows: Jacobian) -> Tensor:
        return self._turned(rows).inner(self.inverse)

    def variances(self, rows: Jacobian) -> Tensor:
        return self._turned(rows).inner_diagonal(self.inverse)

    def joint(self, rows: Jacobian) -> Tensor:
        return self._turned(rows).joint(self.inverse)

    def _turned(self, rows: Jacobian) -> LayerRows:
        return self.block.rows(rows).rotated(self.basis)

    # --- derivatives in Λ

    def sensitivity(self, rows: Jacobian, vector: Tensor | None = None) -> Tensor:
        """∂ log det H/∂Λ_n (n, C, C) with the eigenbasis fixed; with a vector z, ∂ zᵀHz/∂Λ_n."""
        if vector is None:
            return self._turned(rows).inner(self.inverse)
        if self.block.kind == "block":  # use J z: a block's eigenvectors change with Λ
            pushed = self.block.rows(rows).products(vector.unsqueeze(0))[:, :, 0].T
            return pushed.unsqueeze(2) * pushed.unsqueeze(1)
        return self._turned(rows).inner(self._coordinates(vector).square())

    def quadratic(self, vector: Tensor) -> Tensor:
        return (self.values * self._coordinates(vector).square()).sum(dtype=torch.float64)

    def information(self) -> Tensor:
        size = self.block.size
        eye = torch.eye(size, dtype=self.values.dtype, device=self.values.device).view(size, *self.block.entries)
        half = self._coordinates(eye).flatten(1) * self.values.expand(self.block.entries).flatten().sqrt()
        return half @ half.T


class DenseParameterBlock(SpectralBlock):
    """H on an exact block, in the eigenvectors of the block.

    Parameters
    ----------
    block : ParameterBlock
    side : FactorEigen
        Eigendecomposition of the block of JᵀΛJ; of P0^-½ (JᵀΛJ) P0^-½ if entries have precisions of their own.
    precision : Tensor
        δ, 0-d or (1, 1, p).
    """

    def __init__(self, block: ParameterBlock, side: FactorEigen, precision: Tensor) -> None:
        self.block, self.precision, self.relative, self._side = block, precision, precision.ndim > 0, side

    @cached_property
    def basis(self) -> Basis:
        vectors = self._side.vectors
        if not isinstance(vectors, Tensor):
            return Basis(None, vectors)
        return Basis(None, (vectors * self.precision.rsqrt().view(-1, 1) if self.relative else vectors).unsqueeze(0))

    @cached_property
    def values(self) -> Tensor:
        """λ, (1, 1, p)."""
        return self._side.values.view(1, 1, -1)


def _factors(rows: LayerRows) -> TypeGuard[Outer]:
    """Whether each row is one outer product."""
    return isinstance(rows, Outer) and rows.single


class KroneckerBlock(SpectralBlock):
    """H on a Kronecker block of KFAC: λ_oi = β_o α_i / count ([I21] 9).

    Parameters
    ----------
    block : ParameterBlock
    eigenbasis : Eigenbasis
        The factors' eigenvectors and eigenvalues β (G, o) and α (G, i). If inputs have precisions of their own, α and
        the eigenvectors of that side are those of P0^-½ A P0^-½.
    count : Tensor, ()
        Number of terms in the input factor.
    sharing : str
        "expand" or "reduce".
    precision : Tensor
        δ, 0-d, or (G, o, i) and the same for all o.
    """

    def __init__(
        self, block: ParameterBlock, eigenbasis: Eigenbasis, count: Tensor, sharing: str, precision: Tensor
    ) -> None:
        self.block, self.precision, self.relative = block, precision, precision.ndim > 0
        self.sharing, self.count, self._eigenbasis = sharing, count, eigenbasis

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state.get("damped"):  # of an earlier version
            self.__class__ = DampedKroneckerBlock
        vars(self).update(state)

    @cached_property
    def basis(self) -> Basis:
        """U_B ⊗ U_A, or U_B ⊗ P0^-½ U_A."""
        found = self._eigenbasis.basis
        if not self.relative or not isinstance(found.right, Tensor):
            return found
        return Basis(found.left, found.right * self.precision[:, 0].rsqrt().unsqueeze(2))

    @property
    def _damping(self) -> Tensor | float:
        """What each factor's eigenvalues are raised by."""
        return 0.0

    @cached_property
    def left(self) -> Tensor:
        """β/√count, (G, o)."""
        return self._shared(self._eigenbasis.left)

    @cached_property
    def right(self) -> Tensor:
        """α/√count, (G, i)."""
        return self._shared(self._eigenbasis.right)

    def _shared(self, side: Tensor | None) -> Tensor:
        assert side is not None
        return (side / self.count.sqrt()).to(side)

    @property
    def values(self) -> Tensor:
        return self.left.unsqueeze(2) * self.right.unsqueeze(1)  # not kept: as large as the weight

    def cross_covariance(self, rows: Jacobian) -> CrossCovariance:
        """V between later rows and these, which have one cotangent.

        If the eigenvalues of H⁻¹ are a short sum Σ_r u_ro v_ri and there is one position, V = Σ_r (bᵀ l_r)(aᵀ h_r)
        with l_r = U_B (u_r ∘ U_Bᵀ b*) and h_r = U_A (v_r ∘ U_Aᵀ a*). No rows are written out.
        """
        own = self.block.rows(rows)
        if not _factors(own) or self._separated is None:
            return super().cross_covariance(rows)
        rotated = own.rotated(self.basis)
        outputs, inputs = self._separated
        left = turned_back(rotated.full_b()[0, :, 0, 0].unsqueeze(1) * outputs, self.basis.left)
        right = turned_back(rotated.a[:, 0, 0].unsqueeze(1) * inputs, self.basis.right)
        return CrossCovariance(partial(self._separated_products, rows, left, right), left.numel() + right.numel())

    def _separated_products(self, rows: Jacobian, left: Tensor, right: Tensor, other: Jacobian) -> Tensor:
        """V between other rows and these, from l_r and h_r of these where the others have factors too."""
        theirs = self.block.rows(other)
        if _factors(theirs):
            return separated(theirs.full_b()[:, :, 0, 0], theirs.inputs[:, 0, 0], left, right)
        return super().cross_covariance(rows).products(other)

    @cached_property
    def _separated(self) -> tuple[Tensor, Tensor] | None:
        """u (r, o) and v (r, i) with Σ_r u_ro v_ri equal to `inverse` up to rounding; None if r would be large."""
        _, o, i = self.block.entries
        found = cross_approximation(self.inverse[0], o * i // (2 * (o + i)))
        return None if found is None else (found[0].to(self.inverse), found[1].to(self.inverse))

    def log_det_term(self, groups: int | Tensor) -> LogDetTerm | None:
        """Σ log(1 + λ/δ); if inputs have precisions of their own, from the input factor at any of them."""
        inputs = self._eigenbasis.inputs
        if not self.relative or inputs is None or isinstance(groups, int):
            return super().log_det_term(groups)
        return InputTerm(self.left / self.count.sqrt(), inputs, groups[:, 0])

    def information_gained(self) -> Tensor:
        return (1.0 - self._shift * self.inverse).sum(dtype=torch.float64)

    def sensitivity(self, rows: Jacobian, vector: Tensor | None = None) -> Tensor:
        """∂ log det H/∂Λ_n, or ∂ zᵀHz/∂Λ_n: the output factor is linear in Λ, the input factor independent of it."""
        own = self.block.rows(rows)
        if isinstance(own, Lookup):
            b = turned(own.b.unsqueeze(2), self.basis.right).squeeze(2)
            b = b.transpose(0, 1).unsqueeze(3)  # (n, K, T, 1, d)
        elif isinstance(own, Outer):
            b = own.full_b()
            b = b.sum(3, keepdim=True) if self.sharing == "reduce" else b
            b = turned(b, self.basis.left).permute(1, 0, 3, 2, 4)
        else:
            raise self.block.other_use('Use structure="ekfac", "diag" or "full".')
        pulled = torch.einsum("nktgp,gpq->nktgq", b, self._by_outputs(vector))
        return pulled.flatten(2) @ b.flatten(2).mT

    def _by_outputs(self, vector: Tensor | None) -> Tensor:
        """Derivative of log det H, or of zᵀHz, in the output factor, in its eigenbasis, (G, o, o)."""
        outputs_last = self.block.table
        inputs = (self.left if outputs_last else self.right) + self._damping
        scale = 1.0 / math.sqrt(float(self.count))
        if vector is None:
            weights = self.inverse.mT if outputs_last else self.inverse
            return torch.diag_embed((weights @ inputs.unsqueeze(-1)).squeeze(-1)) * scale
        z = self._coordinates(vector)
        z = z.mT if outputs_last else z
        return (z * inputs.unsqueeze(1)) @ z.mT * scale


class DampedKroneckerBlock(KroneckerBlock):
    """H = (B + √δ) ⊗ (A + √δ) in place of B ⊗ A + δ, for the ablation of [I21] A.3; B and A have the count in them."""

    homogeneous = False

    @property
    def _damping(self) -> Tensor:
        """√δ."""
        return self.precision.sqrt()

    @cached_property
    def inverse(self) -> Tensor:
        """1/((β + √δ)(α + √δ)), (G, o, i)."""
        root = self._damping
        return 1.0 / ((self.left + root).unsqueeze(2) * (self.right + root).unsqueeze(1))

    def log_det(self) -> Tensor:
        return self.log_det_curve(self.precision.new_ones(1)).squeeze(0)

    def log_det_curve(self, factors: Tensor) -> Tensor:
        root = (factors * self.precision).sqrt().double().view(-1, 1, 1)
        _, o, i = self.block.entries
        return i * torch.log1p(self.left / root).sum((1, 2)) + o * torch.log1p(self.right / root).sum((1, 2))

    def spectrum(self) -> None:
        """None: H - P0 depends on δ."""

    def effective(self) -> Tensor:
        """γ = -∂ log det B/∂ log δ, 0-d; not p - tr(P0 H⁻¹), because P0 is smaller than what H adds."""
        root = self._damping
        _, o, i = self.block.entries
        left, right = self.left / (self.left + root), self.right / (self.right + root)
        return 0.5 * (i * left.sum(dtype=torch.float64) + o * right.sum(dtype=torch.float64))

    def quadratic(self, vector: Tensor) -> Tensor:
        return ((1.0 / self.inverse - self.precision) * self.basis.turn(vector).square()).sum(dtype=torch.float64)

    def quadratic_slope(self, vector: Tensor) -> Tensor:
        sides = 0.5 * self._damping * (self.left.unsqueeze(2) + self.right.unsqueeze(1))
        return (sides * self.basis.turn(vector).square()).sum(dtype=torch.float64)
