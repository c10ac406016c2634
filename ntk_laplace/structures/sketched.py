"""A structure from products with JᵀΛJ over the training points, and what its specifications have in common."""

from __future__ import annotations

import copy
import logging
import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ntk_laplace.curvature import PosteriorPrecision
from ntk_laplace.curvature.iterative import IterativePrecision, SketchLimits
from ntk_laplace.curvature.leading_rows import LeadingRows, restored_sketch
from ntk_laplace.curvature.posterior_draws import PosteriorDraws
from ntk_laplace.curvature.probed_log_det import ProbedLogDet
from ntk_laplace.curvature.sketch import Sketch
from ntk_laplace.errors import UnsupportedError, require_number, require_whole
from ntk_laplace.jacobian import Jacobian, placed
from ntk_laplace.model.data import Joined, Source, num_examples, take
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.resources import format_bytes
from ntk_laplace.structures.data_passes import (
    collected,
    common_factor,
    own_rows,
    per_example,
    read_batches,
    read_points,
    read_rows,
    shown,
)
from ntk_laplace.structures.forecast import Forecast, Problem, Work, memory_of
from ntk_laplace.structures.model import LinearizedModel
from ntk_laplace.structures.points import TrainingPoints, UnsavedPoints, present_values, unmoved
from ntk_laplace.structures.products import CurvatureProducts
from ntk_laplace.structures.sketch_forecast import (
    Course,
    batch_bytes,
    covariance_bytes,
    draw_bytes,
    product_bytes,
    rows_kept,
)
from ntk_laplace.structures.streamed import StreamedStructure
from ntk_laplace.structures.structure import (
    Saved,
    Structure,
    StructureSpec,
    of_kind,
)

_LOG = logging.getLogger("ntk_laplace")


class SketchSpec(StructureSpec):
    """Specification of a structure from products with JᵀΛJ."""

    rank: int | None
    relative_error: float
    seed: int
    copies: ClassVar[float]  # tensors of the rank at the peak
    images: ClassVar[float]  # those of them that take the place of others where rows are kept

    def __post_init__(self) -> None:
        if self.rank is not None:
            vars(self)["rank"] = require_whole("rank", self.rank, 1, "Leave it out to have it chosen.")
        vars(self)["seed"] = require_whole("seed", self.seed, 0, "Pass for instance seed=0.")
        require_number("a relative_error between 0 and 1", self.relative_error, "Leave it out for 0.005.", above=0,
                       below=1)

    @abstractmethod
    def precision(
        self, curvature: CurvatureProducts, sketch: Sketch | None, joint: float, saved: dict[str, Any] | None,
    ) -> tuple[PosteriorPrecision, Sketch]:
        """The posterior precision from a sketch, and the sketch, which may have grown.

        `joint` is the log joint, and `saved` what `record` returned at these hyperparameters.
        """

    def fit(self, model: LinearizedModel, source: Source) -> SketchedStructure:
        """Read outputs and targets; products follow on first use."""
        self.require_rank(model)
        return SketchedStructure(self, source, read_points(model, source)).displaced(model)

    def require_rank(self, model: LinearizedModel) -> None:
        """Refuse a rank whose vectors do not fit in memory (MemoryBudgetError)."""
        rank = min(self.rank or 1, model.network.num_parameters)
        model.require_memory(self.sketch_bytes(model, rank),
                             f"{self.copies:g} x {rank:,} vectors of {model.network.num_parameters:,} parameters",
                             f"Use {'' if rank == 1 else 'a smaller rank, '}dtype=torch.float32, "
                             'structure="kfac" or parameters="last_layer".')

    def sketch_bytes(self, model: LinearizedModel, rank: int) -> int:
        """Bytes of a sketch at its peak."""
        return int(self.copies * rank * model.network.num_parameters * model.jacobian_pass.dtype.itemsize)

    @abstractmethod
    def expected(self, problem: Problem, most: int) -> Course:
        """The sketches by their numbers of test vectors, at most so many."""

    def forecast(self, problem: Problem) -> Forecast:
        """A sketch of the expected rank r on every process, and rows of J of its share of the examples if they fit.

        A sketch takes a product per vector and ten r²P flops of algebra; streamed, every pass computes the rows anew.
        """
        model, p, share, vector = problem.model, problem.num_parameters, problem.share, problem.vector_bytes
        course = self.expected(problem, min(self.most_rank(model), p, problem.num_rows))
        ranks, rank, kept = course.ranks, min(course.last, self.rank or course.last), rows_kept(problem)
        stored = {"sketch": rank * vector, "rows of J": kept * problem.row_bytes(share)}
        whole = sum(stored.values())
        # a sketch in place of the one before, if there is one
        made = self.copies - kept * self.images - 1.0
        made = (1 + kept) * self.images if len(ranks) == 1 and not self.exact else made
        products = batch_bytes(problem) + product_bytes(problem, max(rank, *course.probes, 1))
        sizes = {"sketch": whole + int(made * rank * vector) + products,
                 "probes": whole + course.lanczos_bytes(vector) + products}
        # directions of V, and draws of what an exact structure's sketch leaves and their images, are kept
        drawn = (rank + self.exact * 2 * tuning.REMAINDER_DRAWS) * vector
        buffers = {"prediction": drawn + covariance_bytes(problem, rank), "responses": drawn + problem.response_bytes}
        if self.exact:  # the draws, beside the evidence's sketch and test vectors
            buffers["draws"] = (rank + ranks[-1]) * vector + problem.root_bytes + draw_bytes(problem, kept)
        found = Forecast.of_phases(stored, sizes | dict.fromkeys(buffers, whole), buffers)
        passes, tried = len(ranks) + course.probing_passes, course.tried
        work = Work(passes=share * (1 if kept else passes), products=share * (sum(ranks) + tried),
                    matmul=10.0 * p * sum(r * r for r in ranks) + 8.0 * rank * p * tried)
        sent = 2 * (sum(ranks) + sum(course.further) + tried) * vector * (problem.processes - 1) // problem.processes
        note = f"rank {rank:,}, rows {'kept' if kept else 'streamed'}"
        least = self.sketch_bytes(model, min(self.rank or 1, p))
        return replace(found, work=work, communication=sent, note=note, least=least)

    def restored(self, model: LinearizedModel, saved: Saved) -> SketchedStructure:
        """From the sketch of a checkpoint."""
        found = SketchedStructure(self, saved.source, saved.points)
        found.at.sketch = restored_sketch(saved.state["sketch"])
        found.at.likelihood, found.at.saved = copy.deepcopy(model.likelihood), saved.state["precision"]
        found.at.values = present_values(model.prior, model.likelihood)
        return found

    def most_rank(self, model: LinearizedModel) -> int:
        """The rank that was asked for, or the largest whose vectors take at most half of the memory."""
        return self.vectors_in_memory(model) if self.rank is None else self.rank

    def vectors_in_memory(self, model: LinearizedModel) -> int:
        """Vectors of P numbers of a sketch that take at most half of the memory."""
        each = 2 * self.sketch_bytes(model, 1)
        return min(model.settings.reducer.gather(max(1, memory_of(model) // each)))  # the same on all processes

    def record(self, precision: PosteriorPrecision) -> dict[str, Any]:
        """What is saved of the precision beside the sketch."""
        return {}

    def best_sketch(self, precision: PosteriorPrecision, sketch: Sketch | None) -> Sketch | None:
        """The sketch to keep of a precision made from `sketch`."""
        return sketch

    def drawn(self, precision: PosteriorPrecision) -> PosteriorDraws | None:
        """Draws of the posterior that give V in sums over the data; None if V is computed point by point."""
        return None


@dataclass
class _AtLikelihood:
    """What products have found, with the hyperparameters it belongs to.

    Attributes
    ----------
    sketch : Sketch, optional
        Of JᵀΛJ at `likelihood`; of other points, if `changed`.
    likelihood : Likelihood, optional
    precision : PosteriorPrecision, optional
        At `values`, the hyperparameters of prior and likelihood.
    saved : mapping, optional
        The estimates of a checkpoint, at `values`.
    changed : bool
        Whether points changed since: the sketch is a start for another.
    """

    sketch: Sketch | None = None
    likelihood: Likelihood | None = None
    precision: PosteriorPrecision | None = None
    values: tuple[Tensor, ...] = ()
    saved: dict[str, Any] | None = None
    changed: bool = False


@dataclass
class SketchedStructure(StreamedStructure):
    """Products with JᵀΛJ over the training points, and the sketch found by them.

    Attributes
    ----------
    spec : SketchSpec
    rows : list of Jacobian, optional
        Rows of J in batches, if they fit in memory; empty before the first pass, None if they do not fit.
    at : _AtLikelihood
        A cache.
    """

    spec: SketchSpec
    rows: list[Jacobian] | None = field(default_factory=list)
    at: _AtLikelihood = field(default_factory=_AtLikelihood)

    def posterior_precision(self, model: LinearizedModel) -> PosteriorPrecision:
        """From the sketch, which grows if the hyperparameters have moved so far that the error needs it."""
        at, modules = self.at, (model.prior, model.likelihood)
        same = unmoved(at.values, *modules)
        if at.precision is not None and same:
            return at.precision
        if at.precision is not None:
            at.sketch, at.precision = self.spec.best_sketch(at.precision, at.sketch), None
        at.saved = at.saved if same else None
        curvature, sketch = self.curvature(model), self._present_sketch(model)
        with torch.no_grad():
            joint = float(self.points.log_likelihood(model.likelihood) - model.prior.energy(model.theta))
        at.precision, at.sketch = self.spec.precision(curvature, sketch, joint, at.saved)
        at.likelihood, at.values, at.changed = copy.deepcopy(model.likelihood), present_values(*modules), False
        return at.precision

    def _present_sketch(self, model: LinearizedModel) -> Sketch | None:
        """The sketch at the present likelihood; None if its curvature is no multiple of that of the sketch."""
        at = self.at
        if at.sketch is None or at.likelihood is None or at.changed:
            return None
        if unmoved(present_values(at.likelihood), model.likelihood):
            return at.sketch
        if isinstance(self.points, UnsavedPoints):
            return None
        factor = common_factor(model, at.likelihood, self.points)
        return None if not factor else at.sketch.scaled(factor)  # no curvature is left at 0

    # --- passes over the rows

    def curvature(self, model: LinearizedModel) -> CurvatureProducts:
        """Products with JᵀΛJ at the present likelihood."""
        columns = model.curvature_type.columns(model.likelihood, self.points.num_outputs)
        shares, joined = (partial(function, model, self.data) for function in (own_rows, collected))
        return CurvatureProducts(model, partial(self._rows, model), shares, self.points.num_examples, columns, joined,
                                 partial(self._all_kept, model))

    def _all_kept(self, model: LinearizedModel) -> bool:
        """Whether every process keeps its rows."""
        return all(model.settings.reducer.gather(self._kept(model) is not None))

    def _rows(self, model: LinearizedModel, what: str) -> Iterator[tuple[Jacobian, Tensor | None]]:
        """Rows of J with S, if they are kept, or rows of SᵀJ, in batches."""
        root, kept = self.points.root(model.curvature_type, model.likelihood).detach(), self._kept(model)
        if kept is None:
            yield from ((rows, None) for rows in read_rows(model, self.data, root, None, what))
            return
        root, own = own_rows(model, self.data, root), sum(rows.num_examples for rows in kept)
        for here, rows in placed(shown(model, kept, what, own, lambda rows: rows.num_examples)):
            yield rows, root[here]

    def _kept(self, model: LinearizedModel) -> list[Jacobian] | None:
        """Rows of J of the examples that this process reads, if half of the memory is enough for them."""
        if self.rows is not None and not self.rows:
            n = self.points.num_examples // model.settings.reducer.world_size
            first = next(iter(self.data), None)
            if first is None:  # one of several processes, without an example
                return self.rows
            one = model.jacobian_pass.rows(take(first[0], slice(0, 4)))
            needed = one.nbytes // one.num_examples * n
            fits = 2 * needed <= memory_of(model)
            _LOG.info(f"{self.name}: rows of J of {n:,} examples, {format_bytes(needed)}, "
                      f"{'are kept' if fits else 'are computed again in every pass'}")
            self.rows = list(self._read(model)) if fits else None
        return self.rows

    def _read(self, model: LinearizedModel) -> Iterator[Jacobian]:
        seen = 0
        for x, _ in read_batches(model, self.data, "Jacobians"):
            yield model.jacobian_pass.rows(x, batch_size=model.settings.batch_size, offset=seen)
            seen += num_examples(x)

    def vjp(self, model: LinearizedModel, residual: Tensor) -> Tensor:
        """Jᵀr, (P,)."""
        if not self.rows:
            return super().vjp(model, residual)
        own, total = own_rows(model, self.data, residual), torch.zeros_like(model.theta)
        for here, rows in placed(self.rows):
            total += rows.vjp(own[here], model.network.shapes)
        model.settings.reducer.sum_(total)
        return total

    def sensitivity(self, model: LinearizedModel, precision: PosteriorPrecision) -> Tensor:
        """V_nn, (N, C, C); by draws where the likelihood has one number, whose gradient is a sum over all points.

        Draws are right in such sums, and may be far off at single points, or for single outputs.
        """
        one = sum(parameter.numel() for parameter in model.likelihood.parameters()) == 1
        drawn = self.spec.drawn(precision) if one else None
        if drawn is None:
            return super().sensitivity(model, precision)
        count = drawn.draw_for_sums()
        weight = drawn.weight_in_sums(count)

        def blocks(rows: Jacobian) -> Tensor:
            seen = drawn.outputs(rows, count)
            return (seen @ seen.mT).mul_(weight)

        if not self.rows:
            return per_example(model, self.data, None, "Jacobians", blocks)
        return collected(model, self.data, torch.cat([blocks(rows) for rows in self.rows]))

    def jvp(self, model: LinearizedModel, vector: Tensor) -> Tensor:
        if not self.rows:
            return super().jvp(model, vector)
        named = model.network.unflatten(vector)
        return collected(model, self.data, torch.cat([rows.jvp(named) for rows in self.rows]))

    # --- other points

    def merged(self, model: LinearizedModel, other: Structure) -> SketchedStructure:
        """Products over both data sets."""
        other = of_kind(SketchedStructure, other)
        points = self.points.joined(model.likelihood, other.points)
        return self._with(points, Joined([self.data, other.data]), other, self._merged_base(model, other))

    def changed(
        self, model: LinearizedModel, points: TrainingPoints, added: Structure | None = None
    ) -> SketchedStructure:
        """The structure of changed points, those of `added` last; `base` keeps the training points."""
        more = None if added is None else of_kind(SketchedStructure, added)
        source = self.data if more is None else Joined([self.data, more.data])
        return self._with(points, source, more, self.trained_points)

    def _with(
        self, points: TrainingPoints, source: Source, more: SketchedStructure | None, base: TrainingPoints | None
    ) -> SketchedStructure:
        """Other points, with the rows that are kept, and with this sketch as the start of another."""
        rows = self.rows
        if more is not None:
            rows = [*self.rows, *more.rows] if self.rows and more.rows else None if self.rows is None else []
        at = _AtLikelihood(self.at.sketch, self.at.likelihood, changed=True)
        return SketchedStructure(self.spec, source, points, base, rows, at)

    def solve_at(self, model: LinearizedModel, points: TrainingPoints, gradient: Tensor) -> Tensor:
        """H⁻¹g, (P,), with the curvature of `points`, by conjugate gradients preconditioned by this sketch."""
        if self.at.sketch is None or not self.spec.exact:
            return super().solve_at(model, points, gradient)
        there = self.at.sketch.at(self.changed(model, points).curvature(model))
        probing = ProbedLogDet(there, 2, 0, lambda _: math.inf)
        return IterativePrecision(probing, SketchLimits(0, 0), math.inf).solve(gradient)

    # --- storage

    def state(self, model: LinearizedModel, include_data: bool) -> dict[str, Any]:
        """The sketch, and what was estimated at the present hyperparameters."""
        precision = self.posterior_precision(model)
        record, sketch = self.spec.record(precision), self.spec.best_sketch(precision, self.at.sketch)
        assert sketch is not None
        if isinstance(sketch, LeadingRows) and not include_data:
            raise UnsupportedError(f"include_data=True to save structure={self.name!r} with rows of training points",
                                   "include_data=False",
                                   "Or save posterior.compress(rank), whose vectors are sums over points.")
        return {"sketch": sketch.record(), "precision": record}

    def to(self, device: torch.device, dtype: torch.dtype) -> SketchedStructure:
        sketch, likelihood = self.at.sketch, self.at.likelihood
        at = _AtLikelihood(None if sketch is None else sketch.to(device, dtype),
                           None if likelihood is None else copy.deepcopy(likelihood).to(device),
                           values=tuple(value.to(device) for value in self.at.values), saved=self.at.saved,
                           changed=self.at.changed)
        rows = self.rows if self.rows is None else [rows.to(dtype, device) for rows in self.rows]
        return self._moved(device, dtype, rows=rows, at=at)
