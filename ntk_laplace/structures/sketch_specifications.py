"""structure="iterative", exact with an error bar, and "nystrom", its low rank alone: from products with JᵀΛJ."""

from __future__ import annotations

import copy
import logging
import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from ntk_laplace.curvature import PosteriorPrecision
from ntk_laplace.curvature.iterative import IterativePrecision, SketchLimits, grown, reaching
from ntk_laplace.curvature.leading_rows import leading_rows
from ntk_laplace.curvature.low_rank import LowRankPrecision
from ntk_laplace.curvature.posterior_draws import PosteriorDraws, draws_suffice
from ntk_laplace.curvature.sketch import NystromApproximation, RandomSketch, Sketch, growing, sketched
from ntk_laplace.errors import require_number, require_whole, warn
from ntk_laplace.model.data import Missing
from ntk_laplace.runtime import tuning
from ntk_laplace.structures.forecast import Forecast, Problem, memory_of
from ntk_laplace.structures.points import present_values
from ntk_laplace.structures.products import CurvatureProducts
from ntk_laplace.structures.registry import register_structure
from ntk_laplace.structures.sketch_forecast import (
    Course,
    Growth,
    expected_logs,
    expected_rows,
    forecast_of_rows,
    rows_limit,
    tolerance,
)
from ntk_laplace.structures.sketched import SketchedStructure, SketchSpec
from ntk_laplace.structures.structure import Structure, of_kind

_LOG = logging.getLogger("ntk_laplace")


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
        Expected relative error of predictive variances; those that draws do not give with it are solved exactly. From
        0.18 on, and for at most 16 outputs, they are those of 64 draws of the posterior, which take the least time.
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
            vars(self)["probes"] = require_whole("probes", self.probes, 2, "Leave it out to have it chosen.")
        require_number("a variance_error between 0 and 1", self.variance_error, "Leave it out for 0.05.", above=0,
                       below=1)

    def precision(
        self, curvature: CurvatureProducts, sketch: Sketch | None, joint: float, saved: dict[str, Any] | None,
    ) -> tuple[IterativePrecision, Sketch]:
        """Grow the sketch until the evidence has the wished standard error."""
        model, wished = curvature.model, partial(tolerance, self.relative_error, joint)
        if saved is not None and sketch is not None:
            restored = IterativePrecision.restored(sketch.at(curvature), wished, self.vectors_in_memory(model),
                                                   self.variance_error, saved)
            return restored, restored.sketch
        limits = SketchLimits(self.most_rank(model), self.vectors_in_memory(model))
        first = min(tuning.FIRST_RANK if self.rank is None else limits.rank, limits.rank, curvature.rank)
        probes = (tuning.FIRST_PROBES, tuning.MOST_PROBES) if self.probes is None else (self.probes, self.probes)
        if sketch is None and self.rank is None:
            memory = min(model.settings.reducer.gather(memory_of(model)))
            limit = rows_limit(memory, curvature.num_rows, curvature.num_columns, curvature.like.element_size(),
                                curvature.row_bytes)
            sketch = leading_rows(curvature, limit)
        candidates = growing(sketch.at(curvature) if sketch else sketched(curvature, None, first, self.seed),
                             limits.rank, self.seed)
        found = grown(candidates, limits, probes, self.seed, wished, self.variance_error)
        estimate = found.estimate
        error = wished(estimate.value)
        _LOG.info(f"iterative: rank {found.base.rank:,}, {estimate.probes} probes of {estimate.steps} products, "
                  f"log det {estimate.value:.6g} +- {estimate.standard_error:.3g}")
        if estimate.standard_error > tuning.MISSED * error and self.rank is None and self.probes is None:
            warn(f"the evidence's standard error is {0.5 * estimate.standard_error:.3g} nats, and {0.5 * error:.3g} "
                 f"were wished: a rank of {found.base.rank:,} and {estimate.probes} probes are the most. Its "
                 "bounds hold. Raise Settings.memory_budget, probes or the prior precision, or use "
                 "dtype=torch.float32.")
        return found, found.sketch

    def expected(self, problem: Problem, most: int) -> Course:
        """The decisions of `Growth` for a random sketch, which costs a product for each vector."""
        logs = expected_logs(problem)

        def left(rank: int) -> tuple[float, float]:
            return float(logs[rank:].sum()), float(logs[rank:].square().sum())

        growth = Growth.of(problem, self.relative_error, left, float, most, self._refined(problem))
        return growth.expected(most if self.rank else min(tuning.FIRST_RANK, most), self.probes)

    def forecast(self, problem: Problem) -> Forecast:
        """That of a random sketch, or of leading rows where a fit is expected to choose them."""
        rows = None if self.rank is not None else expected_rows(problem)
        if rows is None:
            return super().forecast(problem)
        return forecast_of_rows(problem, rows, self.relative_error, self.probes, self.sketch_bytes(problem.model, 1),
                                self._refined(problem))

    def _refined(self, problem: Problem) -> bool:
        """Whether predictions take a larger low rank."""
        return not draws_suffice(self.variance_error, problem.num_outputs)

    def record(self, precision: PosteriorPrecision) -> dict[str, Any]:
        """The estimates."""
        return of_kind(IterativePrecision, precision).estimates_record()

    def best_sketch(self, precision: PosteriorPrecision, sketch: Sketch | None) -> Sketch | None:
        """The largest so far: predictions may have refined it."""
        return of_kind(IterativePrecision, precision).best_sketch

    def drawn(self, precision: PosteriorPrecision) -> PosteriorDraws | None:
        """Unless V is known without draws."""
        return of_kind(IterativePrecision, precision).drawn


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
        vars(self)["rounds"] = require_whole("rounds", self.rounds, 1, "Leave it out for 2.")

    def precision(
        self, curvature: CurvatureProducts, sketch: Sketch | None, joint: float, saved: dict[str, Any] | None,
    ) -> tuple[LowRankPrecision, Sketch]:
        """The low rank of a sketch, which is made once."""
        random = self._sketch(curvature, joint) if sketch is None else of_kind(RandomSketch, sketch)
        if sketch is not None and saved:
            values = saved["values"].to(random.factor)
            return LowRankPrecision(random.factor, values, curvature.prior), random
        found = random.at(curvature)
        return found.base, found.sketch

    def record(self, precision: PosteriorPrecision) -> dict[str, Any]:
        """The eigenvalues, whose rounding another decomposition would change."""
        return {"values": of_kind(LowRankPrecision, precision).values}

    def expected(self, problem: Problem, most: int) -> Course:
        """Doubled up to the rank that leaves at most the wished error, which takes all rounds."""
        logs = expected_logs(problem)
        wished = tolerance(self.relative_error, problem.log_joint or 0.0, float(logs.sum()))
        ranks = [min(tuning.FIRST_RANK, most)]
        if self.rank is not None:
            ranks = [self._tests(self.rank, min(problem.num_parameters, problem.num_rows))]
        while ranks[-1] < most and float(logs[ranks[-1] :].sum()) > wished:
            ranks.append(min(2 * ranks[-1], most))
        return Course(ranks + ranks[-1:] * (self.rounds - 1))

    def _tests(self, rank: int, most: int) -> int:
        """More test vectors than the rank that is kept find its directions with less error; no more than there are."""
        return min(math.ceil(tuning.OVERSAMPLING * rank), most)

    def _sketch(self, curvature: CurvatureProducts, joint: float) -> RandomSketch:
        if self.rank is None:
            most = self.most_rank(curvature.model)
            first, wished = min(tuning.FIRST_RANK, most, curvature.rank), partial(tolerance, self.relative_error, joint)
            reached = reaching(growing(sketched(curvature, None, first, self.seed), most, self.seed), self.seed, wished)
            found = of_kind(NystromApproximation, reached)
            count = found.base.rank
        else:
            count = self._tests(self.rank, curvature.rank)
            found = sketched(curvature, None, count, self.seed)
        for _ in range(1, self.rounds):
            found = sketched(curvature, found.base, count, self.seed)
        return found.sketch.best(self.rank or count)


def compressed(spec: Nystrom, structure: Structure, curvature: CurvatureProducts) -> SketchedStructure:
    """The low rank of another structure's curvature, with its points and its data, if it keeps them."""
    model = curvature.model
    found = SketchedStructure(spec, structure.source or Missing(), structure.points, structure.base, None)
    spec.require_rank(model)
    _, found.at.sketch = spec.precision(curvature, None, 0.0, None)
    found.at.likelihood = copy.deepcopy(model.likelihood)
    found.at.values = present_values(model.prior, model.likelihood)
    return found
