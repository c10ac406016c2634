"""structure="kfac", "ekfac", "inf", "diag": the block-diagonal structures, with their options."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ntk_laplace.curvature import BlockPrecision, Eigenbasis, LowRank, ParameterBlock, Summary
from ntk_laplace.curvature.block_summary import SHARING
from ntk_laplace.curvature.inf import InfBlock, check_rank
from ntk_laplace.curvature.spectral import DampedKroneckerBlock, KroneckerBlock, SpectralBlock
from ntk_laplace.errors import HyperparameterError, require_choice, require_whole, warn
from ntk_laplace.jacobian import LayerRows
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.runtime import tuning
from ntk_laplace.structures.block_spec import HasEigenbasis
from ntk_laplace.structures.forecast import Problem
from ntk_laplace.structures.registry import register_structure
from ntk_laplace.structures.structured import StructuredSpec


class KroneckerSpec(StructuredSpec):
    """Base of the structures with Kronecker-factored eigenvectors."""

    def __post_init__(self) -> None:
        require_choice(self.sharing, SHARING, f"weight sharing among {', '.join(SHARING)}",
                       "Use 'expand' (positions are independent) or 'reduce' (they are averaged).")

    def check(self, prior: GaussianPrior) -> None:
        """Raise an error for a prior that the structure does not support.

        Raises
        ------
        HyperparameterError
            If a layer's weights have several precisions, and the eigenvectors mix them.
        """
        if (prior.groups == "parameter" and not self.squares) or (prior.groups == "input" and not self.by_input):
            raise HyperparameterError(
                f"one prior precision per layer or tensor for {self.name!r}, whose eigenvectors mix a layer's weights",
                f'groups="{prior.groups}"' + f" with {self}" * (prior.groups == "input"),
                'Use groups "all", "layer" or "tensor", or structure "inf", "diag", "full" or "gp".'
                + ' "kfac" without options takes groups="input" too.' * (prior.groups == "input"),
            )

    @property
    def by_input(self) -> bool:
        """False where the eigenvectors of the fit stay as they are: precisions of inputs turn them."""
        return self.squares

    def algebra(self, summary: Summary, eigenbasis: Eigenbasis, extra: Any, precision: Tensor) -> BlockPrecision:
        if summary.block.kind == "kronecker":
            return self.kronecker(summary, eigenbasis, extra, precision)
        return super().algebra(summary, eigenbasis, extra, precision)

    @abstractmethod
    def kronecker(self, summary: Summary, eigenbasis: Eigenbasis, extra: Any, precision: Tensor) -> BlockPrecision:
        """Factorization of H on a Kronecker block."""


@register_structure
@dataclass(frozen=True)
class KFAC(KroneckerSpec):
    """Kronecker factors of each layer's curvature ([I21] 9): one pass over the data.

    Parameters
    ----------
    sharing : str
        Treatment of positions that share a weight (pixels, tokens). "expand" (default): each position is an example,
        A = Σ_nt a aᵀ, B = Σ_nkt b bᵀ. "reduce": inputs are averaged and output gradients summed over positions
        first. With one position both are equal. Embeddings always expand.
    damped : bool
        Add √δ to each factor instead of δ to their product. For the ablation of [I21] A.3 only: it changes the model.
    rank : int, optional
        Keep this many eigenvectors of each factor that is wider, for layers with thousands of inputs or outputs: the
        factor is Q diag(α) Qᵀ + σ (I - Q Qᵀ), with the trace of the whole one. Its largest eigenvalues are those of a
        Nyström approximation, so no (p, p) matrix is formed. Embeddings and grouped convolutions keep all.

    Raises
    ------
    HyperparameterError
        If the rank is not a positive integer.
    """

    sharing: str = "expand"
    damped: bool = False
    rank: int | None = None
    name: ClassVar[str] = "kfac"
    vectors: ClassVar[int] = 1  # eigenvalues are products of those of the factors

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank is not None:
            vars(self)["rank"] = require_whole("rank", self.rank, 1, "Leave it out for all eigenvectors.")

    @property
    def factor_rank(self) -> int | None:
        """The rank."""
        return self.rank

    @property
    def by_input(self) -> bool:
        """Whether the whole input factor is kept, and the precision is added to the product."""
        return not self.damped and self.rank is None

    def kronecker(self, summary: Summary, eigenbasis: Eigenbasis, extra: Any, precision: Tensor) -> BlockPrecision:
        """λ_oi = β_o α_i / count."""
        if precision.ndim:
            if not torch.equal(precision, precision[:, :1].expand_as(precision)):
                raise HyperparameterError(
                    f"inputs on the second axis of {summary.block.weight!r}, for a precision of each under {self}",
                    "a layer that has its outputs there", 'Use groups "layer", or structure "gp", "full" or "diag".',
                )
            eigenbasis = eigenbasis.relative_to(precision[:, 0], summary)
        kind = DampedKroneckerBlock if self.damped else KroneckerBlock
        return kind(summary.block, eigenbasis, summary.count, self.sharing, precision)


@register_structure
@dataclass(frozen=True)
class EKFAC(KroneckerSpec):
    """KFAC's eigenvectors, with second moments of the examples' rows as eigenvalues (EFB in [S20]): two passes.

    Parameters
    ----------
    sharing : str
        Weight sharing of the factors, as in `KFAC`. With "reduce" and few examples the averaged factors are singular,
        and the eigenvectors in their null space are arbitrary.
    basis : Posterior or BlockBasis, optional
        A KFAC or EKFAC posterior of the same network whose eigenvectors are used. The fit then needs one pass, and
        fits on disjoint data with the same basis can be merged.
    """

    sharing: str = "expand"
    basis: HasEigenbasis | None = None
    name: ClassVar[str] = "ekfac"
    second_pass: ClassVar[bool] = True
    vectors: ClassVar[int] = 1  # eigenvalues are sums

    def kronecker(self, summary: Summary, eigenbasis: Eigenbasis, extra: Any, precision: Tensor) -> BlockPrecision:
        """λ_oi = Σ_nk ((U_Bᵀ J_nk U_A)_oi)²."""
        return SpectralBlock(summary.block, eigenbasis.basis, summary.sums["moments"], precision)


@register_structure
@dataclass(frozen=True)
class INF(KroneckerSpec):
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
    basis : Posterior or BlockBasis, optional
        As in `EKFAC`.
    """

    rank: int | float | str = 100
    sharing: str = "expand"
    violation: str = "shrink"
    basis: HasEigenbasis | None = None
    name: ClassVar[str] = "inf"
    second_pass: ClassVar[bool] = True
    squares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        vars(self)["rank"] = check_rank(self.rank)
        require_choice(self.violation, ("shrink", "raise"), 'violation "shrink" or "raise"')

    def solved_bytes(self, problem: Problem, count: int, block: ParameterBlock, rows: LayerRows) -> int:
        """Bytes of a prediction: rows on their way to the kept eigenvectors, of as many as there may be."""
        if block.kind != "kronecker" or block.table:
            return super().solved_bytes(problem, count, block, rows)
        o, i = block.entries[1:]
        p, q = (min(side, self.rank) if isinstance(self.rank, int) else side for side in (o, i))
        each = (problem.num_outputs * p * (o + q) + q * (o + i)) * problem.element
        return min(count * each, max(each, problem.buffer(tuning.WRITTEN_BYTES)))

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
            warn("INF's low-rank part exceeds the exact diagonal ([S20] lemma 3) in " + "; ".join(broken) + ": those "
                 "rows and columns are scaled down to it, which keeps the diagonal exact")
        if singular:
            warn("INF's low-rank part keeps eigenvalues that are zero ([S20] lemma 3) in " + "; ".join(singular)
                 + ": the data's term is singular there, and the prior makes H positive definite")
        return kept

    def kronecker(self, summary: Summary, eigenbasis: Eigenbasis, extra: Any, precision: Tensor) -> BlockPrecision:
        """Low rank plus diagonal."""
        sums = summary.sums
        return InfBlock(summary.block, extra, sums["moments"], sums["squares"], precision, self.violation)


@register_structure
@dataclass(frozen=True)
class Diagonal(StructuredSpec):
    """The exact diagonal of JᵀΛJ: one pass."""

    name: ClassVar[str] = "diag"
    kind: ClassVar[str] = "diagonal"
    vectors: ClassVar[int] = 1  # eigenvalues are sums
