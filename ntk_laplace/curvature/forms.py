"""Forms of structured weight space: which sums are kept, and the algebra they become."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ntk_laplace.curvature.frames import Frame, Side
from ntk_laplace.curvature.inf import InfPart, LowRank, check_rank
from ntk_laplace.curvature.spectral import BlockPart, KroneckerPart, SpectralPart
from ntk_laplace.curvature.structured import PartAlgebra
from ntk_laplace.curvature.summary import SHARING, Basis, Summary
from ntk_laplace.errors import HyperparameterError, NTKLaplaceWarning, UnsupportedError
from ntk_laplace.factors import Fold, Layer
from ntk_laplace.priors import GaussianPrior

__all__ = ["EKFAC", "FORMS", "INF", "KFAC", "Diagonal", "Form"]


@dataclass(frozen=True)
class Form:
    """Base of the structured forms.

    Attributes
    ----------
    name : str
        What `structure=` calls it.
    kind : str
        "kronecker" or "diagonal": what parts may be.
    moments : bool
        A second pass over the data collects second moments in the first one's eigenbasis.
    squares : bool
        That pass collects the exact diagonal too.
    """

    name: ClassVar[str]
    kind: ClassVar[str] = "kronecker"
    moments: ClassVar[bool] = False
    squares: ClassVar[bool] = False

    def fold(self, weights: Mapping[str, Layer | None]) -> Fold:
        """Which sums over the data are all that the first pass asks of those weights' layers."""
        return Fold(weights, squared=self.kind == "diagonal")

    def check(self, prior: GaussianPrior) -> None:
        """Refuse a prior that the form cannot hold.

        Raises
        ------
        HyperparameterError
        """
        if self.kind == "kronecker" and prior.groups == "parameter" and not self.squares:
            raise HyperparameterError(
                f"one prior precision per layer or tensor for {self.name!r}, whose eigenvectors mix a layer's weights",
                'groups="parameter"',
                'Use groups "all", "layer" or "tensor", or structure "inf", "diag", "full" or "gp".',
            )  # fmt: skip

    def settled(self, summaries: Sequence[Summary], frames: Sequence[Frame]) -> Sequence[Any]:
        """What else belongs to each part once the data have passed: nothing."""
        return [None] * len(summaries)

    def algebra(self, summary: Summary, frame: Frame, extra: Any, precision: Tensor) -> PartAlgebra:
        """Algebra of one part at one precision, 0-d or (G, o, i)."""
        if summary.part.kind == "diagonal":
            values = summary.sums["squares"]
            return SpectralPart(summary.part, Basis(None, None), values, precision)
        if summary.part.kind == "block":
            return _block(summary, precision)
        return self.kronecker(summary, frame, extra, precision)

    def kronecker(self, summary: Summary, frame: Frame, extra: Any, precision: Tensor) -> PartAlgebra:
        """Algebra of a Kronecker part."""
        raise NotImplementedError


def _block(summary: Summary, precision: Tensor) -> BlockPart:
    """An exact block: eigenvectors of itself, or of P0^-½ (JᵀΛJ) P0^-½ where every entry has its own precision."""
    lower = summary.sums["block"]
    scale = None
    if precision.ndim:
        scale = precision.rsqrt()
        lower = lower * scale.flatten() * scale.flatten().unsqueeze(1)
    return BlockPart(summary.part, Side(lower), precision, scale)


def _check_sharing(sharing: str) -> None:
    if sharing not in SHARING:
        raise UnsupportedError(f"weight sharing among {', '.join(SHARING)}", repr(sharing),
                               "Use 'expand' (positions are independent) or 'reduce' (they are averaged).")


@dataclass(frozen=True)
class KFAC(Form):
    """Kronecker factors of each layer's curvature ([I21] 9): one pass over the data.

    Parameters
    ----------
    sharing : str
        How positions that share a weight (pixels, tokens) are counted. "expand" (default): each is an example,
        A = Σ_nt a aᵀ, B = Σ_nkt b bᵀ. "reduce": inputs are averaged and output gradients added up over positions
        first. The same where there is one position. Embeddings always expand.
    damped : bool
        Put √δ on each factor instead of δ on their product. For the ablation of [I21] A.3 only: it changes the model.
    """

    sharing: str = "expand"
    damped: bool = False
    name: ClassVar[str] = "kfac"

    def __post_init__(self) -> None:
        _check_sharing(self.sharing)

    def kronecker(self, summary: Summary, frame: Frame, extra: Any, precision: Tensor) -> PartAlgebra:
        """λ = β α / count, undamped."""
        return KroneckerPart(summary.part, frame, summary.sums["count"], self.sharing, precision, self.damped)


@dataclass(frozen=True)
class EKFAC(Form):
    """KFAC's eigenvectors with second moments of the examples' own rows in them ([S20]'s EFB): two passes.

    Parameters
    ----------
    sharing : str
        Of the factors whose eigenvectors are taken, as in `KFAC`. With "reduce" and few examples the averaged factors
        are singular, and the eigenvectors in their null space are arbitrary.
    basis : Posterior, optional
        A KFAC or EKFAC posterior of the same network whose eigenvectors are used: one pass, and fits on disjoint
        data that share a basis can be merged.
    """

    sharing: str = "expand"
    basis: Any = None
    name: ClassVar[str] = "ekfac"
    moments: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_sharing(self.sharing)

    def kronecker(self, summary: Summary, frame: Frame, extra: Any, precision: Tensor) -> PartAlgebra:
        """λ_oi = Σ_nk ((U_Bᵀ J_nk U_A)_oi)²."""
        return SpectralPart(summary.part, frame.basis, summary.sums["moments"], precision)


@dataclass(frozen=True)
class INF(Form):
    """EKFAC's top eigenvalues and the diagonal that keeps the exact one ([S20] section 2): two passes.

    Parameters
    ----------
    rank : int, float or str
        Eigenvalues kept per part: a number, a fraction in (0, 1], or "trace:0.95", as many as carry that share. The
        eigenvectors they touch on either side are all kept, so L is at least that number; costs are L³.
    sharing : str
        As in `KFAC`.
    violation : str
        What to do where the low-rank part's diagonal exceeds the exact one ([S20] lemma 3): "shrink" its row and
        column to it, with a warning, or "raise" if the prior precision does not make up for it.
    basis : Posterior, optional
        As in `EKFAC`.
    """

    rank: int | float | str = 100
    sharing: str = "expand"
    violation: str = "shrink"
    basis: Any = None
    name: ClassVar[str] = "inf"
    moments: ClassVar[bool] = True
    squares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_sharing(self.sharing)
        check_rank(self.rank)
        if self.violation not in ("shrink", "raise"):
            raise UnsupportedError('violation "shrink" or "raise"', repr(self.violation), "Choose one of the two.")

    def settled(self, summaries: Sequence[Summary], frames: Sequence[Frame]) -> Sequence[LowRank | None]:
        """The kept eigenvectors of each part; the two conditions of [S20] lemma 3 are checked here."""
        kept: list[LowRank | None] = []
        broken: list[str] = []
        singular: list[str] = []
        for summary, frame in zip(summaries, frames, strict=True):
            if summary.part.kind != "kronecker":
                kept.append(None)
                continue
            low = LowRank.keep(summary.part, frame.basis, summary.sums["moments"], self.rank)
            kept.append(low)
            one = torch.ones((), dtype=low.left.dtype, device=low.left.device)
            part = InfPart(summary.part, low, summary.sums["moments"], summary.sums["squares"], one)
            over = part.excess()
            if bool((over > 0).any()):
                share = float((over / part.low_diagonal())[over > 0].max())
                broken.append(f"{summary.part.weight} ({int((over > 0).sum()):,} of {over.numel():,} entries, by at "
                              f"most {share:.1%})")
            zeros = part.zeros()
            if zeros:
                singular.append(f"{summary.part.weight} ({zeros:,} of {low.size:,})")
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

    def kronecker(self, summary: Summary, frame: Frame, extra: Any, precision: Tensor) -> PartAlgebra:
        """Low rank plus diagonal."""
        sums = summary.sums
        return InfPart(summary.part, extra, sums["moments"], sums["squares"], precision, self.violation)


@dataclass(frozen=True)
class Diagonal(Form):
    """The exact diagonal of JᵀΛJ: one pass."""

    name: ClassVar[str] = "diag"
    kind: ClassVar[str] = "diagonal"


FORMS: dict[str, type[Form]] = {form.name: form for form in (KFAC, EKFAC, INF, Diagonal)}
