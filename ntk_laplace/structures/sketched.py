"""Structures from products with JᵀΛJ: "iterative", exact with an error bar, and "nystrom", its low rank alone."""

from __future__ import annotations

import copy
import logging
import math
import warnings
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ntk_laplace.curvature import PosteriorPrecision
from ntk_laplace.curvature.iterative import IterativePrecision, grown, reaching
from ntk_laplace.curvature.leading_rows import LeadingRows, leading_rows, restored_sketch
from ntk_laplace.curvature.low_rank import LowRankPrecision
from ntk_laplace.curvature.probed_log_det import ProbedLogDet
from ntk_laplace.curvature.sketch import RandomSketch, Sketch, sketched
from ntk_laplace.errors import HyperparameterError, NTKLaplaceWarning, UnsupportedError, is_number, require_whole
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.model.data import Joined, Missing, Source, num_examples, take
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.resources import format_bytes, require_memory
from ntk_laplace.structures.data_passes import (
    collected,
    common_factor,
    own_rows,
    per_example,
    read_batches,
    read_points,
    read_rows,
    selected,
    shown,
)
from ntk_laplace.structures.forecast import Forecast, Problem, Work, memory_of
from ntk_laplace.structures.model import LinearizedModel
from ntk_laplace.structures.points import TrainingPoints, UnsavedPoints, present_values, unmoved
from ntk_laplace.structures.products import CurvatureProducts, product_vectors
from ntk_laplace.structures.sketch_forecast import (
    LANCZOS_VECTORS,
    STEPS,
    WEIGHTED_EXAMPLES,
    Growth,
    expected_logs,
    expected_products,
    expected_rows,
    forecast_of_rows,
    rows_limit,
    tolerance,
)
from ntk_laplace.structures.streamed import StreamedStructure
from ntk_laplace.structures.structure import (
    Saved,
    Structure,
    StructureSpec,
    of_kind,
    register_structure,
    require_unchanged,
)

__all__ = ["Iterative", "Nystrom", "SketchSpec", "SketchedStructure", "compressed"]

_LOG = logging.getLogger("ntk_laplace")
_LAYER_PRODUCTS = 4  # tensors of all examples and some vectors in a product with a layer's rows
_AVERAGES = 10  # tensors of outputs while a predictive is averaged


class SketchSpec(StructureSpec):
    """Specification of a structure from products with JᵀΛJ."""

    rank: int | None
    relative_error: float
    seed: int
    copies: ClassVar[float]  # tensors of the rank at the peak
    images: ClassVar[float]  # those of them that take the place of others where rows are kept

    def __post_init__(self) -> None:
        if self.rank is not None:
            require_whole("rank", self.rank, 1, "Leave it out to have it chosen.")
        require_whole("seed", self.seed, 0, "Pass for instance seed=0.")
        error = self.relative_error
        if not is_number(error, above=0, below=1):
            raise HyperparameterError("a relative_error between 0 and 1", repr(error), "Leave it out for 0.005.")

    @abstractmethod
    def precision(
        self, curvature: CurvatureProducts, sketch: Sketch | None, joint: float, saved: dict[str, Any] | None,
    ) -> tuple[PosteriorPrecision, Sketch]:
        """The posterior precision from a sketch, and the sketch, which may have grown.

        `joint` is the log joint, and `saved` what `record` returned at these hyperparameters.
        """

    def fit(self, model: LinearizedModel, source: Source) -> SketchedStructure:
        """Read outputs and targets; products follow on first use."""
        self.require_rank(model, 1)
        found = SketchedStructure(self, source, read_points(model, source))
        if model.displacement is None:
            return found
        moved = replace(found.points, f=found.points.f + found.jvp(model, model.displacement))
        return replace(found, points=moved)

    def require_rank(self, model: LinearizedModel, rank: int) -> None:
        """Refuse a rank whose vectors do not fit in memory.

        Raises
        ------
        MemoryBudgetError
        """
        rank = self.rank or rank
        require_memory(self.sketch_bytes(model, rank), model.network.device,
                       f"{self.copies:g} x {rank:,} vectors of {model.network.num_parameters:,} parameters",
                       f"Use {'' if rank == 1 else 'a smaller rank, '}dtype=torch.float32, "
                       'structure="kfac" or parameters="last_layer".',
                       model.settings.memory_budget)  # fmt: skip

    def sketch_bytes(self, model: LinearizedModel, rank: int) -> int:
        """Bytes of a sketch at its peak."""
        return int(self.copies * rank * _vector_bytes(model))

    @abstractmethod
    def expected(self, problem: Problem, most: int) -> tuple[list[int], list[int], list[int]]:
        """Test vectors of the sketches of the evidence, of further ones of predictions, and probes of the former."""

    def forecast(self, problem: Problem) -> Forecast:
        """A sketch of the expected rank r on every process, and rows of J of its share of the examples if they fit.

        A sketch takes a product per vector and ten r²P flops of algebra; streamed, every pass computes the rows anew.
        """
        model, p, e = problem.model, problem.num_parameters, problem.element
        most = min(self.most_rank(model), p, problem.num_rows)
        ranks, further, probes = self.expected(problem, most)
        last = [*ranks, *further][-1]
        rank, tried = min(last, self.rank or last), sum(map(expected_products, probes))
        rows, weighted = problem.row_bytes(problem.share), problem.weighted_bytes(problem.share)
        kept = 2 * rows <= memory_of(model)
        stored = {"sketch": rank * p * e, "rows of J": rows if kept else 0}
        passes = len(ranks) + sum(-(-count // tuning.LANCZOS_PROBES) for count in probes) * STEPS
        work = Work(passes=problem.share * (1 if kept else passes), products=problem.share * (sum(ranks) + tried),
                    matmul=10.0 * p * sum(r * r for r in ranks) + 8.0 * rank * p * tried)  # fmt: skip
        # SᵀJ of one batch, and products with it
        batch = min(weighted, problem.weighted_bytes(WEIGHTED_EXAMPLES))
        together = min(product_vectors(p * e), max(rank, *probes, 1))
        pushed = together * (2 * p + min(problem.share, WEIGHTED_EXAMPLES) * problem.num_columns) * e
        pushed += _LAYER_PRODUCTS * min(problem.share, WEIGHTED_EXAMPLES) * tuning.PRODUCT_COLUMNS * e
        pushed += problem.shares_positions * problem.buffer(tuning.WRITTEN_BYTES)
        # vectors of Lanczos, while the sketch is kept
        basis = min(tuning.LANCZOS_PROBES, max(probes, default=0)) * LANCZOS_VECTORS * p * e
        growth = int((self.copies - (self.images if kept else 0.0)) * rank * p * e) - stored["sketch"]
        if len(ranks) == 1 and not self.exact:  # no sketch before
            growth = int((2.0 if kept else 1.0) * self.images * rank * p * e)
        at_once = max(growth, basis)
        temporary = at_once + problem.root_bytes + batch + pushed
        sent = 2 * (sum(ranks) + sum(further) + tried) * p * e * (problem.processes - 1) // problem.processes
        note = f"rank {rank:,}, rows {'kept' if kept else 'streamed'}"
        # conjugate gradients of predictions: right sides of all rows or of draws, and eleven such tensors more
        rights = max(problem.num_examples * problem.num_outputs, tuning.REMAINDER_DRAWS) * p * e
        rights = min(rights, product_vectors(p * e) * p * e if kept else tuning.COVARIANCE_BYTES)
        vectors = self.exact * (rank + 2 * tuning.REMAINDER_DRAWS) * p * e  # test vectors and draws
        averaged = _AVERAGES * tuning.AVERAGED_OUTPUTS * e
        more = max(0, vectors + self.exact * 12 * rights - at_once, vectors + averaged - temporary)
        least = self.sketch_bytes(model, self.rank or 1)
        return Forecast(stored, temporary, more, work, sent, note, least)

    def restored(self, model: LinearizedModel, saved: Saved) -> SketchedStructure:
        """From the sketch of a checkpoint."""
        found = SketchedStructure(self, saved.source, saved.points)
        found.at.sketch = restored_sketch(saved.state["sketch"])
        found.at.likelihood, found.at.saved = copy.deepcopy(model.likelihood), saved.state["precision"]
        found.at.values = present_values(model.prior, model.likelihood)
        return found

    def most_rank(self, model: LinearizedModel) -> int:
        """The largest rank whose vectors take at most half of the memory."""
        if self.rank is not None:
            return self.rank
        each = 2 * self.sketch_bytes(model, 1)
        return min(model.settings.reducer.gather(max(1, memory_of(model) // each)))  # the same on all processes

    def record(self, precision: PosteriorPrecision) -> dict[str, Any]:
        """What is saved of the precision beside the sketch."""
        return {}

    def best_sketch(self, precision: PosteriorPrecision, sketch: Sketch | None) -> Sketch | None:
        """The sketch to keep of a precision made from `sketch`."""
        return sketch


@register_structure
@dataclass(frozen=True)
class Iterative(SketchSpec):
    """Exact inference from products with JᵀΛJ: no matrix of N R x N R or P x P, and an evidence with an error bar.

    Parameters
    ----------
    rank : int, optional
        Of a random sketch. By default the low rank grows until more of it is worth less than probes, and consists of
        leading rows (`curvature.leading_rows`) where few rows have most of the curvature.
    probes : int, optional
        Of the log determinant; by default 16, and up to 128 if the error needs them.
    relative_error : float
        Wished standard error of the evidence, relative to its absolute value.
    seed : int
        Of test vectors, probes and draws, which stay the same when a hyperparameter changes.
    variance_error : float
        Expected relative error of predictive variances; those that draws do not give with it are solved exactly. A
        larger one takes fewer draws: their number goes with its inverse square.
    """

    rank: int | None = None
    probes: int | None = None
    relative_error: float = 0.005
    seed: int = 0
    variance_error: float = 0.05
    name: ClassVar[str] = "iterative"
    exact: ClassVar[bool] = True
    copies: ClassVar[float] = 3.0  # F of the round before, test vectors, images
    images: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.probes is not None:
            require_whole("probes", self.probes, 2, "Leave it out to have it chosen.")
        if not is_number(self.variance_error, above=0, below=1):
            raise HyperparameterError("a variance_error between 0 and 1", repr(self.variance_error),
                                      "Leave it out for 0.05.")  # fmt: skip

    def precision(
        self, curvature: CurvatureProducts, sketch: Sketch | None, joint: float, saved: dict[str, Any] | None,
    ) -> tuple[IterativePrecision, Sketch]:
        """Grow the sketch until the evidence has the wished standard error."""
        model, wished = curvature.model, partial(tolerance, self.relative_error, joint)
        if saved is not None and sketch is not None:
            restored = IterativePrecision.restored(curvature, sketch, wished, self.variance_error, saved)
            return restored, restored.sketch
        most = self.most_rank(model)
        ranks = (min(tuning.FIRST_RANK, most), most) if self.rank is None else (most, most)
        probes = (tuning.FIRST_PROBES, tuning.MOST_PROBES) if self.probes is None else (self.probes, self.probes)
        if sketch is None and self.rank is None:
            memory = min(model.settings.reducer.gather(memory_of(model)))
            limit = rows_limit(memory, curvature.num_rows, curvature.num_columns, curvature.like.element_size(),
                                curvature.row_bytes)  # fmt: skip
            sketch = leading_rows(curvature, limit)
        found = grown(curvature, sketch, ranks, probes, self.seed, wished, self.variance_error)
        estimate = found.estimate
        error = wished(estimate.value)
        _LOG.info(f"iterative: rank {found.base.rank:,}, {estimate.probes} probes of {estimate.steps} products, "
                  f"log det {estimate.value:.6g} +- {estimate.standard_error:.3g}")
        if estimate.standard_error > tuning.MISSED * error and self.rank is None and self.probes is None:
            warnings.warn(
                f"the evidence's standard error is {0.5 * estimate.standard_error:.3g} nats, and {0.5 * error:.3g} "
                f"were wished: a rank of {found.base.rank:,} and {estimate.probes} probes are the most. Its "
                "bounds hold. Raise Settings.memory_budget, probes or the prior precision, or use dtype=torch.float32.",
                NTKLaplaceWarning, stacklevel=2)  # fmt: skip
        return found, found.sketch

    def expected(self, problem: Problem, most: int) -> tuple[list[int], list[int], list[int]]:
        """The decisions of `Growth` for a random sketch, which costs a product for each vector."""
        logs = expected_logs(problem)

        def left(rank: int) -> tuple[float, float]:
            return float(logs[rank:].sum()), float(logs[rank:].square().sum())

        growth = Growth.of(problem, self.relative_error, left, float, most)
        return growth.expected(most if self.rank else min(tuning.FIRST_RANK, most), self.probes)

    def forecast(self, problem: Problem) -> Forecast:
        """That of a random sketch, or of leading rows where a fit is expected to choose them."""
        rows = None if self.rank is not None else expected_rows(problem)
        if rows is None:
            return super().forecast(problem)
        return forecast_of_rows(problem, rows, self.relative_error, self.probes, self.sketch_bytes(problem.model, 1))

    def record(self, precision: PosteriorPrecision) -> dict[str, Any]:
        """The estimates."""
        return of_kind(IterativePrecision, precision).estimates_record()

    def best_sketch(self, precision: PosteriorPrecision, sketch: Sketch | None) -> Sketch | None:
        """The largest so far: predictions may have refined it."""
        return of_kind(IterativePrecision, precision).best_sketch


@register_structure
@dataclass(frozen=True)
class Nystrom(SketchSpec):
    """Low rank H = P0 + FᵀF, FᵀF at most JᵀΛJ: evidence and variances are never below the exact ones.

    Parameters
    ----------
    rank : int, optional
        By default the rank at which the evidence is within `relative_error` of the exact one, by an estimate.
    relative_error : float
    rounds : int
        Rounds of subspace iteration, each 1.25 products per vector of the rank; with three times the effective
        parameters as rank, two give variances and evidence within half a percent.
    seed : int
    """

    rank: int | None = None
    relative_error: float = 0.005
    rounds: int = 2
    seed: int = 0
    name: ClassVar[str] = "nystrom"
    copies: ClassVar[float] = 3.0 * tuning.OVERSAMPLING  # F of the round before, test vectors, images
    images: ClassVar[float] = tuning.OVERSAMPLING

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("rounds", self.rounds, 1, "Leave it out for 2.")

    def precision(
        self, curvature: CurvatureProducts, sketch: Sketch | None, joint: float, saved: dict[str, Any] | None,
    ) -> tuple[LowRankPrecision, Sketch]:
        """The low rank of a sketch, which is made once."""
        random = self._sketch(curvature, joint) if sketch is None else of_kind(RandomSketch, sketch)
        if sketch is not None and saved:
            values = saved["values"].to(random.factor)
            return LowRankPrecision(random.factor, values, curvature.prior, curvature.shapes), random
        random, base = random.at(curvature)
        return base, random

    def record(self, precision: PosteriorPrecision) -> dict[str, Any]:
        """The eigenvalues, whose rounding another decomposition would change."""
        return {"values": of_kind(LowRankPrecision, precision).values}

    def expected(self, problem: Problem, most: int) -> tuple[list[int], list[int], list[int]]:
        """Doubled up to the rank that leaves at most the wished error, which takes all rounds."""
        logs = expected_logs(problem)
        wished = tolerance(self.relative_error, problem.log_joint or 0.0, float(logs.sum()))
        ranks = [min(tuning.FIRST_RANK, most)]
        if self.rank is not None:
            ranks = [self._tests(self.rank, min(problem.num_parameters, problem.num_rows))]
        while ranks[-1] < most and float(logs[ranks[-1] :].sum()) > wished:
            ranks.append(min(2 * ranks[-1], most))
        return ranks + ranks[-1:] * (self.rounds - 1), [], []

    def _tests(self, rank: int, most: int) -> int:
        """More test vectors than the rank that is kept find its directions with less error."""
        return max(rank, min(math.ceil(tuning.OVERSAMPLING * rank), most))

    def _sketch(self, curvature: CurvatureProducts, joint: float) -> RandomSketch:
        if self.rank is None:
            most = self.most_rank(curvature.model)
            sketch, base = reaching(curvature, (min(tuning.FIRST_RANK, most), most), self.seed,
                                    partial(tolerance, self.relative_error, joint))
            count = base.rank
        else:
            count = self._tests(self.rank, curvature.rank)
            sketch, base = sketched(curvature, None, count, self.seed)
        for _ in range(1, self.rounds):
            del sketch  # it is large
            sketch, base = sketched(curvature, base, count, self.seed)
        return sketch.best(self.rank or count)


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

        def kept() -> bool:
            return all(model.settings.reducer.gather(self._kept(model) is not None))

        shares, joined = (partial(function, model, self.data) for function in (own_rows, collected))
        return CurvatureProducts(model, partial(self._rows, model), shares, self.points.num_examples, columns, joined,
                                 kept)

    def _rows(self, model: LinearizedModel, what: str) -> Iterator[tuple[Jacobian, Tensor | None]]:
        """Rows of J with S, if they are kept, or rows of SᵀJ, in batches."""
        root, kept = self.points.root(model.curvature_type, model.likelihood).detach(), self._kept(model)
        if kept is None:
            yield from ((rows, None) for rows in read_rows(model, self.data, root, None, what))
            return
        root, seen = own_rows(model, self.data, root), 0
        own = sum(rows.num_examples for rows in kept)
        for rows in shown(model, kept, what, own, lambda rows: rows.num_examples):
            yield rows, root[seen : seen + rows.num_examples]
            seen += rows.num_examples

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
        own, seen, total = own_rows(model, self.data, residual), 0, torch.zeros_like(model.theta)
        for rows in self.rows:
            total += rows.vjp(own[seen : seen + rows.num_examples], model.network.shapes)
            seen += rows.num_examples
        model.settings.reducer.sum_(total)
        return total

    def sensitivity(self, model: LinearizedModel, precision: PosteriorPrecision) -> Tensor:
        """V_nn by draws, (N, C, C), right in sums over the points, which a gradient is; single ones may be far off."""
        directions = precision.drawn_directions if isinstance(precision, IterativePrecision) else None
        if directions is None:
            return super().sensitivity(model, precision)

        def blocks(rows: Jacobian) -> Tensor:
            seen = rows.products(directions).transpose(0, 1)
            return seen @ seen.mT

        if not self.rows:
            return per_example(model, self.data, None, "Jacobians", blocks)
        return collected(model, self.data, torch.cat([blocks(rows) for rows in self.rows]))

    def jvp(self, model: LinearizedModel, vector: Tensor) -> Tensor:
        """J v, (N, C)."""
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

    def subset(self, model: LinearizedModel, index: Tensor) -> SketchedStructure:
        """Products over some points, from other passes."""
        source = selected(model, self.data, index, self.points.num_examples)
        return SketchedStructure(self.spec, source, self.points.subset(index), self._base_at(index))

    def changed(
        self, model: LinearizedModel, points: TrainingPoints, added: Structure | None = None
    ) -> SketchedStructure:
        """The structure of changed points, those of `added` last; `base` keeps the training points."""
        more = None if added is None else of_kind(SketchedStructure, added)
        source = self.data if more is None else Joined([self.data, more.data])
        return self._with(points, source, more, self.points if self.base is None else self.base)

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
        there, sketch = self.changed(model, points).curvature(model), self.at.sketch
        probing = ProbedLogDet(there, *sketch.at(there), 2, 0, lambda _: math.inf)
        return IterativePrecision(probing, 0, math.inf).solve(gradient)

    # --- storage

    def state(self, model: LinearizedModel, include_data: bool) -> dict[str, Any]:
        """The sketch, and what was estimated at the present hyperparameters."""
        require_unchanged(model, self)
        precision = self.posterior_precision(model)
        record, sketch = self.spec.record(precision), self.spec.best_sketch(precision, self.at.sketch)
        assert sketch is not None
        if isinstance(sketch, LeadingRows) and not include_data:
            raise UnsupportedError(f"include_data=True to save structure={self.name!r} with rows of training points",
                                   "include_data=False",
                                   "Or save posterior.compress(rank), whose vectors are sums over points.")
        return {"sketch": sketch.record(), "precision": record}

    def to(self, device: torch.device, dtype: torch.dtype) -> SketchedStructure:
        """The structure on another device, with another dtype."""
        sketch, likelihood = self.at.sketch, self.at.likelihood
        at = _AtLikelihood(None if sketch is None else sketch.to(device, dtype),
                           None if likelihood is None else copy.deepcopy(likelihood).to(device),
                           values=tuple(value.to(device) for value in self.at.values), saved=self.at.saved,
                           changed=self.at.changed)
        rows = self.rows if self.rows is None else [rows.to(dtype, device) for rows in self.rows]
        return replace(self, data=self.data.on(device), points=self.points.to(device, dtype), rows=rows, at=at,
                       base=None if self.base is None else self.base.to(device, dtype))


def compressed(spec: Nystrom, structure: Structure, curvature: CurvatureProducts) -> SketchedStructure:
    """The low rank of another structure's curvature, with its points and its data, if it keeps them."""
    model = curvature.model
    found = SketchedStructure(spec, structure.source or Missing(), structure.points, structure.base, None)
    spec.require_rank(model, 1)
    _, found.at.sketch = spec.precision(curvature, None, 0.0, None)
    found.at.likelihood = copy.deepcopy(model.likelihood)
    found.at.values = present_values(model.prior, model.likelihood)
    return found


def _vector_bytes(model: LinearizedModel) -> int:
    return model.network.num_parameters * model.jacobian_pass.dtype.itemsize
