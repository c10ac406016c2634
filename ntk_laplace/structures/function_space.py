"""structure="gp": function space, with stored rows of the Jacobian.

The data of the fit are kept by reference, for what evaluates the network at them again: nothing is copied, and a loader
is read again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ntk_laplace.curvature import DistributedFunctionSpacePrecision, FunctionSpacePrecision, PosteriorPrecision
from ntk_laplace.curvature.distributed_function_space import dealt_examples
from ntk_laplace.errors import UnsupportedError
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.jacobian.contractions import tile_rows
from ntk_laplace.model.data import Joined, Missing, RowBuffer, Source
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.lower_triangle import LowerTriangle, panel_rows
from ntk_laplace.runtime.resources import format_bytes
from ntk_laplace.structures.data_passes import collected_jacobian, collected_points, read_batches, selected
from ntk_laplace.structures.forecast import Forecast, Problem, Work, memory_of
from ntk_laplace.structures.last_layer import by_output, forecast_by_output, precision_by_output
from ntk_laplace.structures.model import LinearizedModel
from ntk_laplace.structures.points import TrainingPoints
from ntk_laplace.structures.registry import register_structure
from ntk_laplace.structures.structure import Saved, Structure, StructureSpec, of_kind


@register_structure
@dataclass(frozen=True)
class FunctionSpace(StructureSpec):
    """Exact inference in function space: half of B = I + SᵀKS, (N R, N R), and stored rows of the Jacobian.

    Of the last linear layer of a network with many outputs, one matrix for each output takes the place of B. The
    numbers are the same up to rounding.
    """

    name: ClassVar[str] = "gp"
    exact: ClassVar[bool] = True
    keeps_jacobian: ClassVar[bool] = True

    def fit(self, model: LinearizedModel, source: Source) -> FunctionSpaceStructure:
        """Read the rows of J in one pass. Every process stores the rows of all.

        Raises
        ------
        MemoryBudgetError
            After the first rows, if the rows of all points and B do not fit in memory.
        """
        parts: list[Jacobian] = []
        reducer = model.settings.reducer
        total = source.length if reducer.world_size == 1 else source.numbers(reducer)[1]
        targets, count = RowBuffer(source.length or 0), 0
        for x, y in read_batches(model, source, "Jacobians"):
            found = model.jacobian_pass.parts(x, batch_size=model.settings.batch_size, offset=count)
            if not parts:
                parts.append(next(found))
                _require_memory(Problem(model, total or len(y), parts[0], reducer.world_size))
            parts.extend(found)
            targets.append(y)
            count += len(y)
        rows, whole = Jacobian.concatenate(parts), len(parts) == 1 and reducer.world_size == 1
        parts.clear()
        _, every, weights = collected_points(model, source, rows.f, targets.rows)
        rows = collected_jacobian(model, source, [rows])
        points = TrainingPoints.checked(model.likelihood, model.outputs(rows), every, weights)
        if not whole:  # one batch of all examples was checked when it was read
            _require_memory(Problem(model, rows.num_examples, rows, reducer.world_size), held=True)
        return FunctionSpaceStructure(self, rows, points, data=source)

    def require_memory(self, model: LinearizedModel, n: int, first: Structure) -> None:
        """Refuse n examples if their rows and B do not fit in memory (MemoryBudgetError)."""
        rows = of_kind(FunctionSpaceStructure, first).rows
        _require_memory(Problem(model, n, rows, model.settings.reducer.world_size))

    def forecast(self, problem: Problem) -> Forecast:
        """The lower triangle of B, shared by all processes; rows of J and SᵀJ of all points and S, on each of them."""
        if problem.processes == 1 and by_output(problem.model, problem.sample):
            return forecast_by_output(problem)
        n, size, e, share = problem.num_examples, problem.num_rows, problem.element, problem.processes
        device, r, tile = problem.model.network.device, problem.num_columns, tile_rows(problem.sample.f)
        if share == 1:
            matrix = LowerTriangle.predicted_bytes(size, r, problem.model.jacobian_pass.dtype, device)
            # a tile has at most a quarter of the rows; a factorization copies a diagonal block, and solves one below it
            height = width = min(size, tile, max(tuning.FEWEST_TILE_ROWS, -(-size // 4)))
            panel = min(size, panel_rows(device))
            copied, sent_rows = panel * (panel + min(panel, size - panel)) * e, 0
        else:
            height, width = min(size, dealt_examples(n, r, share, device) * r), min(size, tile)
            matrix = (size + height) * size // 2 // share * e
            copied = sent_rows = 2 * height * size * e  # one is used while the next arrives, also in solves
        rows = problem.row_bytes(n)
        stored = {"B": matrix, "rows of J": rows, "rows of SᵀJ": problem.weighted_bytes(n), "S": problem.root_bytes}
        # own rows twice while batches are joined; then those of all, in the order of processes and of the data
        sizes = {"pass": 2 * rows // share, "rows of all": (share > 1) * (2 * rows + rows // share)}
        sizes |= dict.fromkeys(("B", "prediction", "responses"), sum(stored.values()))
        written = problem.shares_positions * min(problem.buffer(tuning.TILE_BYTES), size * problem.num_parameters * e)
        one = size * problem.num_outputs * e  # cross-covariances of one input
        seen = min(-(-problem.chunk // share) * one, max(one, tuning.COVARIANCE_BYTES, (share > 1) * matrix // 8))
        found = Forecast.of_phases(stored, sizes, {
            "pass": problem.batch_bytes, "B": max(2 * height * width * e + 3 * written, copied),
            "prediction": problem.row_bytes(problem.chunk) + 4 * seen // 3 + sent_rows,
            "responses": problem.response_bytes})
        sent = 0 if share == 1 else size * size // 2 * e + rows
        work = Work(passes=problem.share, matmul=problem.pair_flops * n**2 / share, cholesky=size**3 / 3 / share)
        return replace(found, work=work, communication=sent)

    def restored(self, model: LinearizedModel, saved: Saved) -> FunctionSpaceStructure:
        """From the rows of a checkpoint."""
        return FunctionSpaceStructure(self, Jacobian.from_record(saved.state), saved.points, data=saved.source)


@dataclass(frozen=True)
class FunctionSpaceStructure(Structure):
    """Rows of J at the training points.

    Attributes
    ----------
    spec : FunctionSpace
    rows : Jacobian
    points : TrainingPoints
    base : TrainingPoints, optional
        The points the network was trained on, if a what-if has changed them since.
    data : Source
        The training data, as they were given; missing after a checkpoint without them.
    """

    spec: FunctionSpace
    rows: Jacobian
    points: TrainingPoints
    base: TrainingPoints | None = None
    data: Source = field(default_factory=Missing, repr=False)

    @property
    def source(self) -> Source | None:
        """The training data, for another pass; None if they are missing."""
        return None if isinstance(self.data, Missing) else self.data

    def posterior_precision(self, model: LinearizedModel) -> FunctionSpacePrecision:
        """Factorize B at the current hyperparameters, without a new Jacobian."""
        return _precision(model, self.rows, self.points)

    def vjp(self, model: LinearizedModel, residual: Tensor) -> Tensor:
        """Jᵀr, (P,)."""
        return self.rows.vjp(residual, model.network.shapes)

    def jvp(self, model: LinearizedModel, vector: Tensor) -> Tensor:
        """J v, (N, C)."""
        return self.rows.jvp(model.network.unflatten(vector))

    def rows_at(self, model: LinearizedModel, index: Tensor) -> Iterator[Jacobian]:
        """The stored rows."""
        yield self.rows.subset(index)

    def sensitivity(self, model: LinearizedModel, precision: PosteriorPrecision) -> Tensor:
        """∂ log det B/∂Λ_n = V_nn, (N, C, C), or its equal on the range of Λ_n if that is constant."""
        left_inverse = self.points.left_inverse(model.curvature_type, model.likelihood)
        if left_inverse is None:
            return precision.covariance_blocks(self.rows)
        return of_kind(FunctionSpacePrecision, precision).sensitivity(left_inverse)

    # --- other points

    def merged(self, model: LinearizedModel, other: Structure) -> FunctionSpaceStructure:
        """Rows of both data sets."""
        other = of_kind(FunctionSpaceStructure, other)
        rows = Jacobian.concatenate([self.rows, other.rows])
        _require_memory(Problem(model, rows.num_examples, rows, model.settings.reducer.world_size), held=True)
        points = self.points.joined(model.likelihood, other.points)
        return FunctionSpaceStructure(self.spec, rows, points, self._merged_base(model, other),
                                      _joined(self.data, other.data))

    def changed(
        self, model: LinearizedModel, points: TrainingPoints, added: Structure | None = None
    ) -> FunctionSpaceStructure:
        """The structure of changed points, those of `added` last; `base` keeps the training points."""
        base = self.trained_points
        if added is None:
            return replace(self, points=points, base=base)
        added = of_kind(FunctionSpaceStructure, added)
        rows = Jacobian.concatenate([self.rows, added.rows])
        return FunctionSpaceStructure(self.spec, rows, points, base, _joined(self.data, added.data))

    def solve_at(self, model: LinearizedModel, points: TrainingPoints, gradient: Tensor) -> Tensor:
        """H⁻¹g, (P,), with the curvature of `points`; points of weight zero are skipped."""
        active = (points.counts > 0).nonzero().squeeze(1)
        return _precision(model, self.rows, points, active).solve(gradient)

    def subset(self, model: LinearizedModel, index: Tensor) -> FunctionSpaceStructure:
        """The stored rows of some points; no pass over the data."""
        points = self.points.subset(index)
        data = self.data if self.source is None else selected(model, self.data, index, self.points.num_examples)
        return FunctionSpaceStructure(self.spec, self.rows.subset(index), points, self._base_at(index), data)

    # --- storage

    def state(self, model: LinearizedModel, include_data: bool) -> dict[str, Any]:
        """The rows."""
        if not include_data:
            raise UnsupportedError(
                'include_data=True to save structure="gp"', "include_data=False",
                "Function space is made of its training points: their rows contain the inputs of the first layer.",
            )
        return self.rows.record()

    def to(self, device: torch.device, dtype: torch.dtype) -> FunctionSpaceStructure:
        """The rows on another device, with another dtype; none is recomputed."""
        return replace(self, rows=self.rows.to(dtype, device), points=self.points.to(device, dtype),
                       data=self.data.on(device),
                       base=None if self.base is None else self.base.to(device, dtype))


def _joined(first: Source, second: Source) -> Source:
    """Both data sets in sequence; missing if either is."""
    missing = isinstance(first, Missing) or isinstance(second, Missing)
    return Missing() if missing else Joined([first, second])


def _precision(
    model: LinearizedModel, rows: Jacobian, points: TrainingPoints, index: Tensor | None = None
) -> FunctionSpacePrecision:
    """The factorization of B, of all points or of some: one output at a time where that is smaller.

    Several processes share it.
    """
    index = None if index is None or len(index) == points.num_examples else index
    rows = rows if index is None else rows.subset(index)
    smaller = precision_by_output(model, rows, points, index)
    if smaller is not None:
        return smaller
    root = points.root(model.curvature_type, model.likelihood).detach()
    found = rows, root if index is None else root[index], model.prior
    reducer = model.settings.reducer
    alone = reducer.world_size == 1
    return FunctionSpacePrecision(*found) if alone else DistributedFunctionSpacePrecision(*found, reducer)


def _require_memory(problem: Problem, held: bool = False) -> None:
    """Refuse a problem that does not fit in memory; `held` says whether its rows of J are there already."""
    model, size, p = problem.model, problem.num_rows, problem.num_parameters
    full = 2 * p * p * problem.element
    forecast = FunctionSpace().forecast(problem)
    n, c = problem.num_examples, problem.num_outputs
    what = (f"the last layer with one matrix for each of {c:,} outputs (N = {n:,})" if forecast.note else
            f"B of {size:,} x {size:,} (N = {n:,}, C = {c}; half of it is stored) and its rows")
    fits = f'structure="full", which takes {format_bytes(full)} (P = {p:,}), ' if full <= memory_of(model) else ""
    forecast.require(
        model, what,
        f'Fit with {fits}structure="iterative", exact without a matrix, or structure="kfac", which approximates; with '
        'curvature="ef", parameters="last_layer", fewer points or dtype=torch.float32.',
        forecast.stored["rows of J"] if held else 0,
    )
