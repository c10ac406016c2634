"""Exact weight space from products with JᵀΛJ alone: a low rank, Lanczos on what it leaves, conjugate gradients.

With the low rank M = I + P0^-½FᵀFP0^-½ and FᵀF at most JᵀΛJ, in the order of semidefinite matrices,

    log det B = log det M + tr log C,    C = Wᵀ P0^-½ H P0^-½ W,    W Wᵀ = M⁻¹,

and no eigenvalue of C is below 1. Few are far above: they are what the low rank leaves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.curvature.local_log_det import LocalLogDet
from ntk_laplace.curvature.posterior_draws import PosteriorDraws, draws_suffice
from ntk_laplace.curvature.posterior_precision import PosteriorPrecision
from ntk_laplace.curvature.probed_log_det import LogDet, ProbedLogDet, Wished, sufficient
from ntk_laplace.curvature.remainder import Remainder
from ntk_laplace.curvature.sketch import Approximation, Sketch, growing
from ntk_laplace.errors import NumericalError
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.reduction import collective_property
from ntk_laplace.runtime.sampling import normal


@dataclass(frozen=True)
class SketchLimits:
    """The largest rank of a sketch, and the most draws of the posterior."""

    rank: int
    draws: int


class IterativePrecision(PosteriorPrecision):
    """H = P0 + JᵀΛJ, never formed.

    Solves and samples are exact, to the tolerance of conjugate gradients. `log_det` is an estimate by probes with fixed
    signs. Effective parameters and covariances are those of a low rank, and what draws estimate of the rest: for
    effective parameters as many as their error needs (`informed`), and for covariances a low rank that leaves little
    (`refined`). Where a variance could be wrong by more than `variance_error`, it is solved exactly.

    Parameters
    ----------
    probing : ProbedLogDet
        The estimate of log det B, with the low rank that it is made from.
    limits : SketchLimits
    variance_error : float
        Expected relative error of a variance by draws, above which it is solved exactly. Where draws of the posterior
        alone give variances with it, what needs a low rank has at most `tuning.LOW_RANK_VARIANCE_ERROR`.
    """

    solves_covariance = False
    reads_data = True

    def __init__(self, probing: ProbedLogDet, limits: SketchLimits, variance_error: float) -> None:
        curvature = probing.curvature
        super().__init__(curvature.prior, curvature.like)
        self.probing: ProbedLogDet = probing
        self.curvature, self.base, self.seed = curvature, probing.base, probing.seed
        self.sketch = probing.approximation.sketch
        self.most, self.limits = min(limits.rank, curvature.rank), limits
        self.variance_error = variance_error
        self._draws_alone = draws_suffice(variance_error, curvature.num_columns)
        self._best = self._remainder(probing)

    def _remainder(self, probing: ProbedLogDet) -> Remainder:
        """What a low rank leaves."""
        error = min(self.variance_error, tuning.LOW_RANK_VARIANCE_ERROR) if self._draws_alone else self.variance_error
        return Remainder(probing, self.most, error)

    def estimates_record(self) -> dict[str, Any]:
        """The estimates, in plain containers; `restored` takes them with `best_sketch`.

        The best sketch is the refined one if that exists, or if variances need it.
        """
        effective, own = self._effective, {"probes": self.probing.probes, "seed": self.seed, "most": self.most}
        drawn = None if self.drawn_for_variances is None else self.drawn_for_variances.record()
        refined = not self._draws_alone or "refined" in vars(self)
        best = self.refined if refined else self._best
        left = best.enough.draws if refined and not best.probing.complete else None
        return {"own": own, "drawn": drawn, "estimate": asdict(self.estimate), "effective": effective,
                "best": asdict(best.probing.estimate), "diagonal": best.probing.diagonal, "refined": refined,
                "left": left}

    @classmethod
    def restored(
        cls, approximation: Approximation, wished: Wished, draws: int, variance_error: float, record: Mapping[str, Any]
    ) -> IterativePrecision:
        """The precision with the estimates of a record, at the hyperparameters of the record."""
        like, own = approximation.curvature.like, dict(record["own"])
        limits = SketchLimits(own.pop("most"), draws)
        first, probing = (ProbedLogDet(approximation, wished=wished, **own) for _ in range(2))
        found = cls(first, limits, variance_error)
        best = found._remainder(probing)
        effective, error = record["effective"]
        vars(found).update(_best=best, _effective=(effective.to(like), error))
        vars(found.probing)["estimate"] = LogDet(**record["estimate"])
        vars(best.probing).update(estimate=LogDet(**record["best"]), diagonal=tuple(record["diagonal"]))
        if record["refined"]:
            vars(found)["refined"] = best
        if record["left"] is not None:
            best.draws = record["left"].to(like)
            vars(best)["enough"] = best
        if record.get("drawn") is not None:
            drawn = PosteriorDraws(best.probing, float(effective.sum()), error, draws)
            drawn.restore(record["drawn"])
            vars(found).update(drawn=drawn, drawn_for_variances=drawn)
        return found

    # --- evidence

    @property
    def estimate(self) -> LogDet:
        """log det B with its errors, from the probes."""
        return self.probing.estimate

    def log_det(self) -> Tensor:
        """log det B, an estimate: see `estimate`."""
        return self.curvature.like.new_tensor(self.estimate.value)

    @property
    def standard_error(self) -> float:  # type: ignore[override]
        """Of `log_det`."""
        return self.estimate.standard_error

    @property
    def log_det_bounds(self) -> tuple[float, float]:  # type: ignore[override]
        """Certain bounds of log det B, from the best sketch so far."""
        found = [one.estimate for one in (self.probing, self._best.probing)]
        return max(one.lower for one in found), min(one.upper for one in found)

    @property
    def best_sketch(self) -> Sketch:
        """The largest sketch so far."""
        return self._best.probing.approximation.sketch

    def effective_parameters(self) -> Tensor:
        """γ_g = n_g - δ_g tr_g(H⁻¹): that of the low rank, and what the draws find of the rest, (G,)."""
        return self._effective[0].clone()

    @property
    def effective_error(self) -> float:
        """Standard error of the sum of `effective_parameters`, from the spread of the probes or draws."""
        return self._effective[1]

    @collective_property
    def _effective(self) -> tuple[Tensor, float]:
        """`effective_parameters` with its error."""
        low, each = self.informed.effective()
        error = 0.0 if self.informed.probing.complete else float(each.sum(1).std() / len(each) ** 0.5)
        return low + each.mean(0).to(self.curvature.like), error

    @collective_property
    def informed(self) -> Remainder:
        """A low rank and draws that give each γ_g a relative error of `tuning.EFFECTIVE_ERROR`.

        The rank is doubled as long as that costs less than the draws that the present rank needs, and more than
        `tuning.LEFT_SHARE` of log det B is left; there are at most `tuning.REMAINDER_DRAWS` draws.
        """
        most = tuning.REMAINDER_DRAWS
        for left, larger in self._drawing():
            if left.probing.complete:
                break
            left.draw(tuning.LANCZOS_PROBES)
            wanted = min(sufficient(len(left), left.effective_error() / tuning.EFFECTIVE_ERROR), most)
            cheap = (wanted - len(left)) * tuning.DRAW_PRODUCTS <= (larger or 0)
            if cheap or larger is None or left.probing.leaves_little:
                left.draw(wanted)
                break
        return left

    def _drawing(self) -> Iterator[tuple[Remainder, float | None]]:
        """What low ranks leave, as `growing` yields them from the best so far on."""
        start, probes = self._best.probing.approximation, min(self.probing.probes, tuning.MEASURING_PROBES)
        if not self._best.probing.complete:
            start = start.drawing(self.seed)
        for found, larger in growing(start, self.most, self.seed, True):
            if found is not self._best.probing.approximation:
                self._best = self._remainder(ProbedLogDet(found, probes, self.seed, self.probing.wished))
            yield self._best, larger

    def log_det_curve(self, factors: Tensor) -> Tensor:
        """log det B with all prior precisions multiplied by each of `factors` (m,), from one Lanczos run; (m,)."""
        return self.probing.curve(factors)

    def local_log_det(self) -> list[LocalLogDet] | None:
        """`LocalLogDet` of the low rank and the estimates; None if there are too many prior groups for it."""
        base, estimate = self.informed.probing.base, self.informed.probing.estimate
        if self._num_groups * base.rank**2 * self.curvature.like.element_size() > tuning.LOCAL_BYTES:
            return None
        _, used = self.informed.effective()
        return [LocalLogDet(base.group_grams(), used.mean(0), estimate.value - estimate.lower)]

    # --- solves and samples

    def solve(self, vectors: Tensor) -> Tensor:
        """H⁻¹ v for vectors (..., P), by conjugate gradients."""
        flat = vectors.reshape(-1, self.num_parameters) * self.base.deviation
        best = self._best.probing
        for some in flat.split(best.together):
            some.copy_(best.solved(some)[0])
        return (flat * self.base.deviation).view_as(vectors)

    def multiply(self, vectors: Tensor) -> Tensor:
        flat = vectors.reshape(-1, self.num_parameters)
        return (self.prior_precision * flat + self.curvature.products(flat)).view_as(vectors)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws from N(0, H⁻¹), (count, P): H⁻¹(P0^½ε + JᵀSε') has the covariance H⁻¹(P0 + JᵀΛJ)H⁻¹."""
        generator = torch.Generator().manual_seed(self.seed) if generator is None else generator
        white = normal((count, self.num_parameters), self.curvature.like, generator)
        return self.solve(white * self.prior_precision.sqrt() + self.curvature.noise(count, generator))

    # --- covariance of f

    @collective_property
    def refined(self) -> Remainder:
        """A low rank that leaves at most `tuning.LEFT_SHARE` of log det B, if memory allows.

        Where that is reached, or where a larger sketch costs more than the fewest draws, these tell whether those that
        the present one needs are cheaper. A larger one that costs less than half of them is taken unasked.
        """
        fewest = tuning.REMAINDER_DRAWS * tuning.DRAW_PRODUCTS
        for left, larger in self._drawing():
            if larger is None or left.probing.complete:
                break
            if (left.probing.leaves_little and larger >= fewest / 2) or larger > fewest:
                left.draw(tuning.REMAINDER_DRAWS)
                if (left.needed() - len(left)) * tuning.DRAW_PRODUCTS <= larger:
                    break
        return left

    def covariance_blocks(self, rows: Jacobian) -> Tensor:
        if draws_suffice(self.variance_error, rows.num_cotangents) and self.drawn_for_variances is not None:
            seen = self.drawn_for_variances.outputs(rows, tuning.REMAINDER_DRAWS)
            return seen @ seen.mT
        return self._blocks(rows, None)

    @collective_property
    def drawn(self) -> PosteriorDraws | None:
        """Draws of the posterior, none so far; None if V is known without them."""
        effective, error = self._effective
        best = self._best.probing
        return None if best.complete else PosteriorDraws(best, float(effective.sum()), error, self.limits.draws)

    @collective_property
    def drawn_for_variances(self) -> PosteriorDraws | None:
        """Draws that give V without a low rank, where few of them suffice for the wished error; else None."""
        drawn = self.drawn if draws_suffice(self.variance_error, 1) else None
        if drawn is not None:
            drawn.draw(tuning.REMAINDER_DRAWS)
        return drawn

    def removal_blocks(self, rows: Jacobian, root: Tensor) -> Tensor:
        """V at training points, (n, C, C), solved exactly where I - SᵀVS would be wrong by too much."""
        return self._blocks(rows, root)

    def _blocks(self, rows: Jacobian, root: Tensor | None) -> Tensor:
        fine = self.refined
        return fine.probing.base.covariance_blocks(rows) if fine.probing.complete else fine.enough.blocks(rows, root)

    def covariance(self, rows: Jacobian) -> Tensor:
        fine = self.refined
        if fine.probing.complete:
            return fine.probing.base.covariance(rows)
        found = fine.enough.joint(rows)
        return super().covariance(rows) if found is None else found


def reaching(candidates: Iterator[tuple[Approximation, float | None]], seed: int, tolerance: Wished) -> Approximation:
    """The first whose log determinant is within the tolerance, by an estimate of what it leaves; see `grown`."""
    for found, _ in candidates:
        wished = tolerance(float(found.base.log_det()))
        estimate = ProbedLogDet(found, tuning.FIRST_PROBES, seed, tolerance).estimate
        if estimate.value - estimate.lower <= wished:
            break
    return found


def grown(
    candidates: Iterator[tuple[Approximation, float | None]], limits: SketchLimits, probes: tuple[int, int], seed: int,
    wished: Wished, variance_error: float,
) -> IterativePrecision:
    """The precision whose log determinant has the wished standard error, or the best that ranks and probes allow.

    The `candidates` of `growing` are tried as long as the next costs less than the probes that the present one needs;
    of these there are `probes`, fewest and most. `wished` is the standard error in nats at a value of log det B, of
    which the estimate has to be finite (NumericalError).
    """
    (fewest, most), first = probes, min(tuning.LANCZOS_PROBES, probes[1])
    for found, larger in candidates:
        probing = ProbedLogDet(found, first, seed, wished)
        error = probing.estimate.standard_error / wished(probing.estimate.value)
        if not math.isfinite(error):
            raise NumericalError("a finite estimate of log det B", "numbers that overflow",
                                 "Take a larger prior precision.")
        wanted = sufficient(first, error)
        if wanted == first or larger is None:
            break
        if wanted <= most and (wanted - first) * probing.later_steps <= larger:
            break
    enough = min(max(wanted, fewest), most)
    if enough > first:
        probing = ProbedLogDet(found, enough, seed, wished, probing)
    return IterativePrecision(probing, limits, variance_error)
