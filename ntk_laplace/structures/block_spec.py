"""Specification of a block-diagonal structure: the sums over the data, and the factorization built from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor

from ntk_laplace.curvature import BlockPrecision, Eigenbasis, ParameterBlock, Summary
from ntk_laplace.curvature.block_summary import Basis
from ntk_laplace.curvature.eigenbases import FactorEigen
from ntk_laplace.curvature.spectral import DenseParameterBlock, SpectralBlock
from ntk_laplace.jacobian import NO_FUSED_LAYERS, FusedLayer, FusedLayers
from ntk_laplace.model.data import Inputs, Source
from ntk_laplace.structures.model import LinearizedModel
from ntk_laplace.structures.structure import StructureSpec

__all__ = ["BlockBasis", "BlockSpec", "HasEigenbasis"]


@dataclass(frozen=True)
class BlockBasis:
    """Eigenbases of a fit, for another fit to use.

    Attributes
    ----------
    structure : str
        Name of the structure they come from.
    shapes : mapping of str to torch.Size
        The parameters.
    parameter_blocks : tuple of ParameterBlock
    eigenbases : tuple of Eigenbasis
        One per block.
    squares : bool
        Whether the blocks are divided as an exact diagonal requires it.
    """

    structure: str
    shapes: Mapping[str, Any]
    parameter_blocks: tuple[ParameterBlock, ...]
    eigenbases: tuple[Eigenbasis, ...]
    squares: bool

    def eigenbasis(self) -> BlockBasis:
        """Itself."""
        return self


@runtime_checkable
class HasEigenbasis(Protocol):
    """A posterior, or the `BlockBasis` itself."""

    def eigenbasis(self) -> BlockBasis:
        """The eigenbases of its structure."""


class BlockSpec(StructureSpec):
    """Base of the structures whose H is block diagonal, from one or two passes over streaming data.

    Attributes
    ----------
    kind : str
        "kronecker" or "diagonal": the `kind` of the parameter blocks.
    second_pass : bool
        Whether a second pass over the data computes second moments in the eigenbasis of the first.
    squares : bool
        Whether the second pass also computes the exact diagonal.
    sharing : str
        "expand" or "reduce": treatment of positions that share a weight.
    basis : Posterior or BlockBasis, optional
        Whose eigenbases are used.
    """

    factored_rows: ClassVar[bool] = True
    resumable: ClassVar[bool] = True
    kind: ClassVar[str] = "kronecker"
    second_pass: ClassVar[bool] = False
    squares: ClassVar[bool] = False
    sharing: str = "expand"
    basis: HasEigenbasis | None = None

    def options(self) -> dict[str, Any]:
        """The fields that determine the structure; a reused basis is stored with the eigenbases."""
        return {name: value for name, value in vars(self).items() if name != "basis"}

    def prepare(self, model: LinearizedModel, x: Inputs, source: Source) -> None:
        """Limit the batch size by what the pass keeps of each example."""
        fused = NO_FUSED_LAYERS if self.second_pass else self.fused_layers(dict.fromkeys(model.network.names))
        columns = model.curvature_type.columns(model.likelihood, model.network.num_outputs)
        source.limit_batch_size(model.jacobian_pass.examples_at_once(x, columns, fused))

    def fused_layers(self, weights: Mapping[str, FusedLayer | None]) -> FusedLayers:
        """Layers of these weights, with the fused sums that are sufficient for the first pass."""
        return FusedLayers(weights, squared=self.kind == "diagonal")

    def finalized(self, summaries: Sequence[Summary], eigenbases: Sequence[Eigenbasis]) -> Sequence[Any]:
        """Extra state of each parameter block after the fit; None by default."""
        return [None] * len(summaries)

    def algebra(self, summary: Summary, eigenbasis: Eigenbasis, extra: Any, precision: Tensor) -> BlockPrecision:
        """Factorization of H on one parameter block at one precision, 0-d or (G, o, i)."""
        if summary.block.kind == "diagonal":
            return SpectralBlock(summary.block, Basis(None, None), summary.sums["squares"], precision)
        return _block(summary, precision)


def _block(summary: Summary, precision: Tensor) -> DenseParameterBlock:
    """Eigendecompose an exact block, or P0^-½ (JᵀΛJ) P0^-½ if every entry has its own precision."""
    lower = summary.sums["block"]
    scale = None
    if precision.ndim:
        scale = precision.rsqrt()
        lower = lower * scale.flatten() * scale.flatten().unsqueeze(1)
    return DenseParameterBlock(summary.block, FactorEigen(lower), precision, scale)
