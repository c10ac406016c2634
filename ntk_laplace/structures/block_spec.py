"""Specification of a block-diagonal structure: the sums over the data, and the factorization built from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor

from ntk_laplace.curvature import BlockPrecision, Eigenbasis, ParameterBlock, Summary
from ntk_laplace.curvature.block_summary import is_sketched, num_tests
from ntk_laplace.curvature.eigenbases import FactorEigen
from ntk_laplace.curvature.parameter_blocks import SummedRows, find_parameter_blocks
from ntk_laplace.curvature.spectral import DenseParameterBlock, SpectralBlock
from ntk_laplace.errors import untold
from ntk_laplace.jacobian import FusedLayer, FusedLayers, LayerRows
from ntk_laplace.jacobian.blocks import Factored, Lookup
from ntk_laplace.model.data import Batches, Inputs, Source
from ntk_laplace.runtime.reflections import Basis
from ntk_laplace.structures.forecast import Forecast, Problem, Work
from ntk_laplace.structures.model import LinearizedModel
from ntk_laplace.structures.structure import StructureSpec


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
            sizes = model.jacobian_pass.prepare(x)
            last = sizes.sums_suffice(fused)  # of a last layer, whose output gradients are not computed
            source.limit_batch_size(sizes.batch(None if last else columns, fused)[0])

    def memory(
        self, blocks: Sequence[ParameterBlock], model: LinearizedModel, buffers: Mapping[str, int] | None = None
    ) -> Forecast:
        """Memory of a fit with these parameter blocks, its evidence and a prediction; bytes of buffers by phase."""
        element, weights = model.jacobian_pass.dtype.itemsize, model.theta.nbytes
        sides = [(block, width, kept) for block in blocks for width, kept in self._sides(block)]
        eigenvectors = sum(block.entries[0] * width * kept for block, width, kept in sides)
        # factors and exact blocks have their size; of a table, one number for each token; and diagonals
        sums = eigenvectors + sum(block.size for block in blocks if block.kind == "diagonal")
        sums += sum(block.entries[1] for block in blocks if block.kind == "kronecker" and block.table)
        moments = sum(block.size for block in blocks if block.kind == "kronecker") * (self.second_pass + self.squares)
        stored = {"sums": (sums + moments) * element, "eigenvectors": eigenvectors * element}
        network = sum(parameter.nbytes for parameter in model.network.module.parameters())  # a copy
        kept = sum(stored.values()) + network
        # gradients of all parameters, with which rows are compared: two, and the largest difference
        tensor = max((parameter.numel() for parameter in model.network.parameters.values()), default=0) * element
        compared = 2 * weights + tensor
        # LAPACK and cuSOLVER decompose a matrix beside its copy with as much memory again, twice
        decomposed = 2 * max((width for _, width, rank in sides if rank == width), default=0) ** 2 * element
        return Forecast.of_phases(stored, {
            "first pass": network + sums * element + compared,
            "eigenvectors": kept + decomposed,
            "second pass": kept + compared,
            "prediction": kept + self.vectors * weights + compared,
            "responses": kept + self.vectors * weights,
        }, buffers)

    def _sides(self, block: ParameterBlock) -> list[tuple[int, int]]:
        """Order and number of eigenvectors of each matrix that is decomposed: two factors, or an exact block.

        The factor of an embedding's tokens is diagonal.
        """
        (g, o, i), rank = block.entries, self.factor_rank
        if block.kind != "kronecker":
            return [(block.size, block.size)] if block.kind == "block" else []
        return [(width, num_tests(width, rank) if rank and is_sketched(width, g, rank) else width)
                for width in ([i] if block.table else [o, i])]

    def forecast(self, problem: Problem) -> Forecast:
        """Sums and eigenvectors on every process; each process reads its share of the data, and sums are added."""
        with untold():  # the fit says it
            blocks = find_parameter_blocks(problem.sample, problem.model.prior, self.kind, self.squares)
        found = self.memory(blocks, problem.model, self._buffers(problem, blocks))
        sent = 2 * sum(found.stored.values()) * (problem.processes - 1) // problem.processes
        return replace(found, work=self._work(problem, blocks), communication=sent)

    def _work(self, problem: Problem, blocks: Sequence[ParameterBlock]) -> Work:
        """Products of rows, of all positions, with themselves and with eigenvectors; eigendecompositions."""
        flops, cubes, r = 0, 0, problem.num_columns
        for block in blocks:
            (g, o, i), t, sides = block.entries, _positions(block.rows(problem.sample)), self._sides(block)
            cubes += g * sum(width * kept**2 for width, kept in sides)
            if block.kind == "kronecker":
                *left, i2 = (width * kept for width, kept in sides)
                o2 = sum(left)  # none of a table
                flops += g * t * (i2 + r * o2)
                # rows in the eigenvectors, and their squares, or their sum over positions first
                flops += self.second_pass * 2 * g * t * (i * i + r * (o2 + o * i))
            else:
                flops += r * block.size**2 if block.kind == "block" else 2 * t * block.size
        return Work(passes=(1 + self.second_pass) * problem.share, matmul=float(flops * problem.share),
                    eigh=cubes if self.second_pass else cubes / 3)

    def _buffers(self, problem: Problem, blocks: Sequence[ParameterBlock]) -> dict[str, int]:
        """Bytes of buffers by phase: a batch with the graph of its rows, or its rows and what one block takes."""
        sizes, layers = problem.model.jacobian_pass.sizes, [(block, block.rows(problem.sample)) for block in blocks]
        fused = self.fused_layers(dict.fromkeys(problem.model.network.names), self.second_pass)
        count, each = sizes.batch(problem.num_columns, fused)
        count = min(count, problem.share)
        # fused layers keep fewer gradients, and the gradients of several uses are joined; inputs are part of the graph
        rows = min(count * (each - sizes.graph_bytes), problem.weighted_bytes(count))
        rows += count * sum(_patch_bytes(problem, block, own) for block, own in layers)

        def largest(size: Callable[[Problem, int, ParameterBlock, LayerRows], int], examples: int) -> int:
            return max((size(problem, examples, block, own) for block, own in layers), default=0)

        found = {"first pass": max(count * each, rows + largest(_summed_bytes, count)),
                 "eigenvectors": problem.chunk_bytes,
                 "prediction": problem.chunk_bytes + largest(self.solved_bytes, problem.chunk),
                 "responses": problem.response_bytes}
        if self.second_pass:  # whose first batch is there when the eigenvectors are made
            found["second pass"] = max(count * each, rows + largest(_squared_bytes, count))
            found["eigenvectors"] = found["second pass"]
        return found

    def fused_layers(self, weights: Mapping[str, FusedLayer | None], moments: bool = False) -> FusedLayers:
        """Layers of these weights, with the fused sums that are sufficient for a pass."""
        weights = {} if self.factor_rank is not None else weights  # a sketch is made of rows
        return FusedLayers(weights, squared=self.kind == "diagonal", moments=moments)

    def solved_bytes(self, problem: Problem, count: int, block: ParameterBlock, rows: LayerRows) -> int:
        """Bytes of a prediction: a panel of rows, written out, where they are sums over positions."""
        return (_positions(rows) > 1) * problem.written_bytes(rows, problem.num_outputs, count)

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


# --- bytes of buffers for the rows of one parameter block


def _patch_bytes(problem: Problem, block: ParameterBlock, rows: LayerRows) -> int:
    """Patches of a convolution's inputs, of an example: they are copies."""
    convolved = _positions(rows) > 1 and len(problem.model.network.shapes[block.weight]) > 2
    return convolved * block.entries[0] * _positions(rows) * block.entries[2] * problem.element


def _outer_bytes(problem: Problem, block: ParameterBlock, rows: LayerRows) -> int:
    """Output gradients and inputs at all positions, of an example; 0 of rows that are no such products."""
    g, o, i = block.entries
    return isinstance(rows, Factored) * g * _positions(rows) * (problem.num_columns * o + i) * problem.element


def _summed_bytes(problem: Problem, count: int, block: ParameterBlock, rows: LayerRows) -> int:
    """First pass: matrices whose products are factors, of several positions; else a panel of rows, written out."""
    if isinstance(rows, Lookup) or (_positions(rows) == 1 and not isinstance(rows, SummedRows)):
        return 0
    if isinstance(rows, SummedRows) or block.kind == "diagonal":
        return problem.written_bytes(rows, problem.num_columns, count)
    return count * _outer_bytes(problem, block, rows)


def _squared_bytes(problem: Problem, count: int, block: ParameterBlock, rows: LayerRows) -> int:
    """Second pass: rows in the eigenvectors, and a panel of them, written out, where they are sums over positions."""
    if isinstance(rows, Lookup):  # of its tokens alone, never of the whole vocabulary
        return count * _positions(rows) * problem.num_columns * block.entries[2] * problem.element
    written = isinstance(rows, SummedRows) or _positions(rows) > 1
    panel = written * problem.written_bytes(rows, problem.num_columns, count)
    return count * _outer_bytes(problem, block, rows) + panel


def _block(summary: Summary, precision: Tensor) -> DenseParameterBlock:
    """Eigendecompose an exact block, or P0^-½ (JᵀΛJ) P0^-½ if entries have precisions of their own."""
    lower = summary.sums["block"]
    if precision.ndim:
        scale = precision.rsqrt().flatten()
        lower = lower * scale * scale.unsqueeze(1)
    return DenseParameterBlock(summary.block, FactorEigen(lower), precision)
