"""Specification of a block-diagonal structure: the sums over the data, and the factorization built from them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor

from ntk_laplace.curvature import BlockPrecision, Eigenbasis, ParameterBlock, Summary
from ntk_laplace.curvature.block_summary import Basis, is_sketched, num_tests
from ntk_laplace.curvature.eigenbases import FactorEigen
from ntk_laplace.curvature.parameter_blocks import SummedRows, find_parameter_blocks
from ntk_laplace.curvature.spectral import DenseParameterBlock, SpectralBlock
from ntk_laplace.errors import NTKLaplaceWarning
from ntk_laplace.jacobian import FusedLayer, FusedLayers, LayerRows
from ntk_laplace.jacobian.blocks import Factored, Lookup
from ntk_laplace.model.data import Batches, Inputs, Source
from ntk_laplace.structures.forecast import Forecast, Problem, Work
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
    vectors : int
        Vectors of P numbers that a factorization keeps: eigenvalues and their inverses, for instance.
    """

    factored_rows: ClassVar[bool] = True
    resumable: ClassVar[bool] = True
    kind: ClassVar[str] = "kronecker"
    second_pass: ClassVar[bool] = False
    squares: ClassVar[bool] = False
    vectors: ClassVar[int] = 2
    sharing: str = "expand"
    basis: HasEigenbasis | None = None

    @property
    def factor_rank(self) -> int | None:
        """Eigenvectors that are kept of a wide Kronecker factor; None for all."""
        return None

    def options(self) -> dict[str, Any]:
        """The fields that determine the structure; a reused basis is stored with the eigenbases."""
        return {name: value for name, value in vars(self).items() if name != "basis"}

    def prepare(self, model: LinearizedModel, x: Inputs, source: Source) -> None:
        """Limit the batch size by what the pass keeps of each example."""
        fused = self.fused_layers(dict.fromkeys(model.network.names), self.second_pass)
        columns = model.curvature_type.columns(model.likelihood, model.network.num_outputs)
        if isinstance(source, Batches):
            last = model.jacobian_pass.last_layer(x, fused)  # its output gradients are not computed
            source.limit_batch_size(model.jacobian_pass.examples_at_once(x, None if last else columns, fused))

    def memory(
        self, blocks: Sequence[ParameterBlock], model: LinearizedModel, batch: int = 0, chunk: int = 0, written: int = 0
    ) -> Forecast:
        """Memory of a fit with these parameter blocks, its evidence and a prediction.

        `batch` are the bytes of a batch of a pass over the data, `chunk` those of a prediction's rows, and `written`
        those of them that are written out.
        """
        element, weights = model.jacobian_pass.dtype.itemsize, model.theta.nbytes
        sums = moments = vectors = largest = 0
        for block in blocks:
            g, o, i = block.entries
            kronecker = block.kind == "kronecker"
            widths = [] if not kronecker else [i] if block.table else [o, i]
            ranks = [self._kept(width, g) for width in widths]
            both = sum(g * width * rank for width, rank in zip(widths, ranks, strict=True))
            both += block.size**2 if block.kind == "block" else 0
            sums += both + g * o * (block.table and kronecker)
            moments += ((self.second_pass + self.squares) * kronecker + (block.kind == "diagonal")) * block.size
            vectors += both
            whole = [width for width, rank in zip(widths, ranks, strict=True) if width == rank]
            largest = max([largest, *whole, block.size * (block.kind == "block")])
        stored = {"sums": (sums + moments) * element, "eigenvectors": vectors * element}
        network = sum(parameter.nbytes for parameter in model.network.module.parameters())  # a copy
        kept = sum(stored.values()) + network
        # gradients of all parameters, with which rows are compared: two, and the largest difference
        tensor = max((parameter.numel() for parameter in model.network.parameters.values()), default=0) * element
        checked = 2 * weights + tensor
        # LAPACK and cuSOLVER decompose a matrix beside its copy with as much memory again, twice
        decomposed = kept + 2 * largest**2 * element
        phases = [(sums * element + network + checked, batch), (decomposed, chunk),
                  (kept + self.vectors * weights + checked, chunk + written)]
        if self.second_pass:
            phases += [(decomposed, batch), (kept + checked, batch)]
        return Forecast.of_phases(stored, phases)

    def _kept(self, width: int, groups: int) -> int:
        """Vectors that are kept of a factor of this width."""
        rank = self.factor_rank
        return num_tests(width, rank) if rank and is_sketched(width, groups, rank) else width

    def forecast(self, problem: Problem) -> Forecast:
        """Sums and eigenvectors on every process; each process reads its share of the data, and sums are added."""
        model, passes, r = problem.model, 1 + self.second_pass, problem.num_columns
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NTKLaplaceWarning)  # the fit says it
            blocks = find_parameter_blocks(problem.sample, model.prior, self.kind, self.squares)
        flops = cubes = 0
        for block in blocks:
            g, o, i = block.entries
            t = _positions(block.rows(problem.sample))
            if block.kind == "kronecker":
                o2, i2 = (width * self._kept(width, g) for width in (o, i))
                o2 = 0 if block.table else o2
                flops += g * t * (i2 + r * o2)
                # rows in the eigenvectors, and their squares, or their sum over positions first
                flops += self.second_pass * 2 * g * t * (i * i + r * (o2 + o * i))
                cubes += g * (i * self._kept(i, g) ** 2 + (0 if block.table else o * self._kept(o, g) ** 2))
            elif block.kind == "block":
                flops, cubes = flops + r * block.size**2, cubes + block.size**3
            else:
                flops += 2 * t * block.size
        work = Work(passes=passes * problem.share, matmul=float(flops * problem.share),
                    eigh=cubes if self.second_pass else cubes / 3)
        shared = [rows for rows in (block.rows(problem.sample) for block in blocks) if _positions(rows) > 1]
        written = [problem.written_bytes(rows, problem.num_outputs, problem.chunk) for rows in shared]
        found = self.memory(blocks, model, self._batch_bytes(problem, blocks), problem.chunk_bytes,
                            max(written, default=0))
        sent = 2 * sum(found.stored.values()) * (problem.processes - 1) // problem.processes
        return replace(found, work=work, communication=sent)

    def _batch_bytes(self, problem: Problem, blocks: Sequence[ParameterBlock]) -> int:
        """Bytes of a batch with its graph and its root S, or of its rows and what is computed of them.

        The latter are the rows of one block that are written out, and those of one block in the eigenvectors, or as the
        matrices of which factors are products.
        """
        r, inputs, written, turned = problem.num_columns, 0, 0, 0
        fused = self.fused_layers(dict.fromkeys(problem.model.network.names), self.second_pass)
        count, each = problem.model.jacobian_pass.planned_batch(r, fused)
        count = min(count, problem.share)
        for block in blocks:
            g, o, i = block.entries
            rows = block.rows(problem.sample)
            t = _positions(rows)
            if isinstance(rows, Lookup):  # rows of its tokens alone, never of the whole vocabulary
                turned = max(turned, self.second_pass * count * t * r * i * problem.element)
                continue
            convolved = t > 1 and len(problem.model.network.shapes[block.weight]) > 2
            inputs += convolved * g * t * i * problem.element  # its patches are copied
            if isinstance(rows, SummedRows) or (t > 1 and (self.second_pass or block.kind == "diagonal")):
                written = max(written, problem.written_bytes(rows, r, count))
            if isinstance(rows, Factored) and (self.second_pass or (t > 1 and block.kind == "kronecker")):
                turned = max(turned, count * g * t * (r * o + i) * problem.element)
        # fused layers keep fewer gradients, and the gradients of several uses are joined; inputs are part of the graph
        kept = min(count * (each - problem.model.jacobian_pass.graph_bytes), problem.weighted_bytes(count))
        return max(count * each, kept + count * inputs + written + turned)

    def fused_layers(self, weights: Mapping[str, FusedLayer | None], moments: bool = False) -> FusedLayers:
        """Layers of these weights, with the fused sums that are sufficient for a pass."""
        weights = {} if self.factor_rank is not None else weights  # a sketch is made of rows
        return FusedLayers(weights, squared=self.kind == "diagonal", moments=moments)

    def finalized(self, summaries: Sequence[Summary], eigenbases: Sequence[Eigenbasis]) -> Sequence[Any]:
        """Extra state of each parameter block after the fit; None by default."""
        return [None] * len(summaries)

    def algebra(self, summary: Summary, eigenbasis: Eigenbasis, extra: Any, precision: Tensor) -> BlockPrecision:
        """Factorization of H on one parameter block at one precision, 0-d or (G, o, i)."""
        if summary.block.kind == "diagonal":
            return SpectralBlock(summary.block, Basis(None, None), summary.sums["squares"], precision)
        return _block(summary, precision)


def _positions(rows: LayerRows) -> int:
    """Positions that share a weight."""
    return rows.b.shape[-2] if isinstance(rows, Factored) else 1


def _block(summary: Summary, precision: Tensor) -> DenseParameterBlock:
    """Eigendecompose an exact block, or P0^-½ (JᵀΛJ) P0^-½ if entries have precisions of their own."""
    lower = summary.sums["block"]
    if precision.ndim:
        scale = precision.rsqrt().flatten()
        lower = lower * scale * scale.unsqueeze(1)
    return DenseParameterBlock(summary.block, FactorEigen(lower), precision)
