"""Structure specifications: the sums that each structure stores, and the factorization built from them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ntk_laplace.curvature.block_summary import SHARING, Basis, Summary
from ntk_laplace.curvature.eigenbases import Eigenbasis, FactorEigen
from ntk_laplace.curvature.inf import InfBlock, LowRank, check_rank
from ntk_laplace.curvature.spectral import DenseParameterBlock, KroneckerBlock, SpectralBlock
from ntk_laplace.curvature.structured import BlockPrecision
from ntk_laplace.errors import HyperparameterError, NTKLaplaceWarning, UnsupportedError
from ntk_laplace.jacobian import FusedLayer, FusedLayers
from ntk_laplace.priors import GaussianPrior

__all__ = ["EKFAC", "INF", "KFAC", "STRUCTURE_SPECS", "Diagonal", "StructureSpec"]


@dataclass(frozen=True)
class StructureSpec:
    """Base class of the structure specifications.

    Attributes
    ----------
    name : str
        Name for `structure=`.
    kind : str
        "kronecker" or "diagonal": the `form` of the parameter blocks.
    second_pass : bool
        Whether a second pass over the data computes second moments in the eigenbasis of the first.
    squares : bool
        Whether the second pass also computes the exact diagonal.
    """

    name: ClassVar[str]
    kind: ClassVar[str] = "kronecker"
    second_pass: ClassVar[bool] = False
    squares: ClassVar[bool] = False

    def fused_layers(self, weights: Mapping[str, FusedLayer | None]) -> FusedLayers:
        """Layers of these weights, with the fused sums that are sufficient for the first pass."""
        return FusedLayers(weights, squared=self.kind == "diagonal")

    def check(self, prior: GaussianPrior) -> None:
        """Raise an error for a prior that the structure does not support.

        Raises
        ------
        HyperparameterError
            If the prior has one precision per parameter, and the eigenvectors mix parameters.
        """
        if self.kind == "kronecker" and prior.groups == "parameter" and not self.squares:
            raise HyperparameterError(
                f"one prior precision per layer or tensor for {self.name!r}, whose eigenvectors mix a layer's weights",
                'groups="parameter"',
                'Use groups "all", "layer" or "tensor", or structure "inf", "diag", "full" or "gp".',
            )  # fmt: skip

    def finalized(self, summaries: Sequence[Summary], eigenbases: Sequence[Eigenbasis]) -> Sequence[Any]:
        """Extra state of each parameter block after the fit; None by default."""
        return [None] * len(summaries)

    def algebra(self, summary: Summary, eigenbasis: Eigenbasis, extra: Any, precision: Tensor) -> BlockPrecision:
        """Factorization of H on one parameter block at one precision, 0-d or (G, o, i)."""
        if summary.block.kind == "diagonal":
            values = summary.sums["squares"]
            return SpectralBlock(summary.block, Basis(None, None), values, precision)
        if summary.block.kind == "block":
            return _block(summary, precision)
        return self.kronecker(summary, eigenbasis, extra, precision)

    def kronecker(self, summary: Summary, eigenbasis: Eigenbasis, extra: Any, precision: Tensor) -> BlockPrecision:
        """Factorization of H on a Kronecker block."""
        raise NotImplementedError


def _block(summary: Summary, precision: Tensor) -> DenseParameterBlock:
    """Eigendecompose an exact block, or P0^-½ (JᵀΛJ) P0^-½ if every entry has its own precision."""
    lower = summary.sums["block"]
    scale = None
    if precision.ndim:
        scale = precision.rsqrt()
        lower = lower * scale.flatten() * scale.flatten().unsqueeze(1)
    return DenseParameterBlock(summary.block, FactorEigen(lower), precision, scale)


def _check_sharing(sharing: str) -> None:
    if sharing not in SHARING:
        raise UnsupportedError(f"weight sharing among {', '.join(SHARING)}", repr(sharing),
                               "Use 'expand' (positions are independent) or 'reduce' (they are averaged).")


@dataclass(frozen=True)
class KFAC(StructureSpec):
    """Kronecker factors of each layer's curvature ([I21] 9): one pass over the data.

    Parameters
    ----------
    sharing : str
        Treatment of positions that share a weight (pixels, tokens). "expand" (default): each position is an example,
        A = Σ_nt a aᵀ, B = Σ_nkt b bᵀ. "reduce": inputs are averaged and output gradients summed over positions
        first. With one position both are equal. Embeddings always expand.
    damped : bool
        Add √δ to each factor instead of δ to their product. For the ablation of [I21] A.3 only: it changes the model.
    """

    sharing: str = "expand"
    damped: bool = False
    name: ClassVar[str] = "kfac"

    def __post_init__(self) -> None:
        _check_sharing(self.sharing)

    def kronecker(self, summary: Summary, eigenbasis: Eigenbasis, extra: Any, precision: Tensor) -> BlockPrecision:
        """λ_oi = β_o α_i / count."""
        return KroneckerBlock(summary.block, eigenbasis, summary.sums["count"], self.sharing, precision, self.damped)


@dataclass(frozen=True)
class EKFAC(StructureSpec):
    """KFAC's eigenvectors, with second moments of the examples' rows as eigenvalues (EFB in [S20]): two passes.

    Parameters
    ----------
    sharing : str
        Weight sharing of the factors, as in `KFAC`. With "reduce" and few examples the averaged factors are singular,
        and the eigenvectors in their null space are arbitrary.
    basis : Posterior, optional
        A KFAC or EKFAC posterior of the same network whose eigenvectors are used. The fit then needs one pass, and
        fits on disjoint data with the same basis can be merged.
    """

    sharing: str = "expand"
    basis: Any = None
    name: ClassVar[str] = "ekfac"
    second_pass: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_sharing(self.sharing)

    def kronecker(self, summary: Summary, eigenbasis: Eigenbasis, extra: Any, precision: Tensor) -> BlockPrecision:
        """λ_oi = Σ_nk ((U_Bᵀ J_nk U_A)_oi)²."""
        return SpectralBlock(summary.block, eigenbasis.basis, summary.sums["moments"], precision)


@dataclass(frozen=True)
class INF(StructureSpec):
    """EKFAC's largest eigenvalues plus a diagonal that makes the diagonal exact ([S20] section 2): two passes.

    Parameters
    ----------
    rank : int, float or str
        Eigenvalues kept per parameter block: a number, a fraction in (0, 1], or "trace:0.95", as many as reach that
        share of the trace. Their eigenvectors on both sides are kept, so L is at least that number; costs are O(L³).
    sharing : str
        As in `KFAC`.
    violation : str
        Where the diagonal of the low-rank term exceeds the exact one ([S20] lemma 3): "shrink" scales its row and
        column down, with a warning; "raise" raises an error unless the prior precision exceeds the excess.
    basis : Posterior, optional
        As in `EKFAC`.
    """

    rank: int | float | str = 100
    sharing: str = "expand"
    violation: str = "shrink"
    basis: Any = None
    name: ClassVar[str] = "inf"
    second_pass: ClassVar[bool] = True
    squares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_sharing(self.sharing)
        check_rank(self.rank)
        if self.violation not in ("shrink", "raise"):
            raise UnsupportedError('violation "shrink" or "raise"', repr(self.violation), "Choose one of the two.")

    def finalized(self, summaries: Sequence[Summary], eigenbases: Sequence[Eigenbasis]) -> Sequence[LowRank | None]:
        """The kept eigenvectors of each parameter block; checks the two conditions of [S20] lemma 3."""
        kept: list[LowRank | None] = []
        broken: list[str] = []
        singular: list[str] = []
        for summary, eigenbasis in zip(summaries, eigenbases, strict=True):
            if summary.block.kind != "kronecker":
                kept.append(None)
                continue
            low = LowRank.keep(summary.block, eigenbasis.basis, summary.sums["moments"], self.rank)
            kept.append(low)
            one = torch.ones((), dtype=low.left.dtype, device=low.left.device)
            part = InfBlock(summary.block, low, summary.sums["moments"], summary.sums["squares"], one)
            over = part.excess()
            if bool((over > 0).any()):
                share = float((over / part.low_diagonal())[over > 0].max())
                broken.append(f"{summary.block.weight} ({int((over > 0).sum()):,} of {over.numel():,} entries, by at "
                              f"most {share:.1%})")
            zeros = part.zeros()
            if zeros:
                singular.append(f"{summary.block.weight} ({zeros:,} of {low.size:,})")
        if broken and self.violation == "shrink":
            warnings.warn(
                "INF's low-rank part exceeds the exact diagonal ([S20] lemma 3) in " + "; ".join(broken) + ": those "
                "rows and columns are scaled down to it, which keeps the diagonal exact", NTKLaplaceWarning,
                stacklevel=2,
            )  # fmt: skip
        if singular:
            warnings.warn(
                "INF's low-rank part keeps eigenvalues that are zero ([S20] lemma 3) in " + "; ".join(singular)
                + ": what the data say is singular there, and the prior makes H positive definite", NTKLaplaceWarning,
                stacklevel=2,
            )  # fmt: skip
        return kept

    def kronecker(self, summary: Summary, eigenbasis: Eigenbasis, extra: Any, precision: Tensor) -> BlockPrecision:
        """Low rank plus diagonal."""
        sums = summary.sums
        return InfBlock(summary.block, extra, sums["moments"], sums["squares"], precision, self.violation)


@dataclass(frozen=True)
class Diagonal(StructureSpec):
    """The exact diagonal of JᵀΛJ: one pass."""

    name: ClassVar[str] = "diag"
    kind: ClassVar[str] = "diagonal"


STRUCTURE_SPECS: dict[str, type[StructureSpec]] = {spec.name: spec for spec in (KFAC, EKFAC, INF, Diagonal)}
