"""Exact weight space from products with JᵀΛJ alone: a low rank, Lanczos on what it leaves, conjugate gradients.

With the low rank M = I + P0^-½FᵀFP0^-½ and FᵀF at most JᵀΛJ, in the order of semidefinite matrices,

    log det B = log det M + tr log C,    C = M^-½ P0^-½ H P0^-½ M^-½,

and no eigenvalue of C is below 1. Few are far above: they are what the low rank leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.curvature.low_rank import LowRankPrecision
from ntk_laplace.curvature.posterior_precision import PosteriorPrecision
from ntk_laplace.curvature.sketch import Curvature, Sketch, growing, normal
from ntk_laplace.errors import NumericalError
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.krylov import Quadrature, conjugate_gradients, inner, lanczos
from ntk_laplace.runtime.linalg import cholesky_log_det, cholesky_of, log_det_curve
from ntk_laplace.runtime.reduction import collective_property

__all__ = ["IterativePrecision", "LogDet", "grown", "reaching"]


@dataclass(frozen=True)
class LogDet:
    """An estimate of log det B with its errors.

    Attributes
    ----------
    value : float
    standard_error : float
        Over the probes, times the ratio of Student's and the normal quantile, so that two of it are a 95 % interval for
        few probes too; plus half the bracket of the quadrature. Half of upper - lower where no probe was needed.
    lower, upper : float
        Certain bounds.
    probes, steps : int
        Probes, and products with each.
    """

    value: float
    standard_error: float
    lower: float
    upper: float
    probes: int = 0
    steps: int = 0


def _signs(count: int, size: int, seed: int) -> Tensor:
    """Probes of random signs, (count, size), int8; the first ones are the same for every count."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(0, 2, (size,), generator=generator, dtype=torch.int8) for _ in range(count)]
    return torch.stack(drawn) * 2 - 1


class IterativePrecision(PosteriorPrecision):
    """H = P0 + JᵀΛJ, never formed.

    Solves and samples are exact, to the tolerance of conjugate gradients. `log_det` is an estimate by probes with fixed
    signs. Covariances and effective parameters are those of a low rank that leaves little (`refined`), less what draws
    estimate of the rest; where a variance could be wrong by more than `tuning.VARIANCE_ERROR`, it is solved exactly.

    Parameters
    ----------
    curvature : Curvature
    sketch : Sketch
    base : LowRankPrecision
        P0 + FᵀF.
    probes, seed : int
    tolerance : float
        Wished standard error of `log_det`, in nats: the quadrature's bracket ends at a fraction of it.
    most : int
        Largest rank of the sketch.
    earlier : Tensor, (k, 2), optional
        `probed` of the same with fewer probes.
    """

    solves_covariance = False

    def __init__(
        self, curvature: Curvature, sketch: Sketch, base: LowRankPrecision, probes: int, seed: int, tolerance: float,
        most: int, earlier: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__(curvature.prior, curvature.shapes, sketch.factor)
        self.curvature, self.sketch, self.base = curvature, sketch, base
        self.probes, self.seed, self.tolerance, self.most = probes, seed, tolerance, min(most, curvature.rank)
        self._earlier = sketch.factor.new_empty(0, 2, dtype=torch.float64) if earlier is None else earlier

    def estimates_record(self) -> dict[str, Any]:
        """The estimates, in plain containers; `restored` takes them with `best_sketch`."""
        fine = self.refined
        own = {"probes": self.probes, "seed": self.seed, "tolerance": self.tolerance, "most": self.most}
        return {"own": own, "estimate": asdict(self.estimate), "refined": asdict(fine.estimate),
                "diagonal": fine._diagonal, "left": None if fine._complete else fine._left}

    @classmethod
    def restored(cls, curvature: Curvature, sketch: Sketch, record: Mapping[str, Any]) -> IterativePrecision:
        """The precision with the estimates of a record, at the hyperparameters of the record."""
        sketch, base = sketch.at(curvature)
        found, fine = (cls(curvature, sketch, base, **record["own"]) for _ in range(2))
        vars(found).update(estimate=LogDet(**record["estimate"]), refined=fine)
        vars(fine).update(estimate=LogDet(**record["refined"]), refined=fine, _diagonal=tuple(record["diagonal"]))
        if record["left"] is not None:
            vars(fine)["_left"] = record["left"].to(base.factor)
        return found

    # --- products in units of the prior

    def _whitened(self, vectors: Tensor) -> Tensor:
        """P0^-½ H P0^-½ v for vectors (m, P)."""
        scale = self.base.deviation
        return self.curvature.products(vectors * scale).mul_(scale).add_(vectors)

    def _preconditioned(self, vectors: Tensor) -> Tensor:
        """C v for vectors (m, P)."""
        return self.base.whitened_half(self._whitened(self.base.whitened_half(vectors)))

    def _solved_whitened(self, vectors: Tensor) -> Tensor:
        tolerance = torch.finfo(vectors.dtype).eps ** 0.7  # 1e-11 in float64
        base, found = self._best.base, torch.empty_like(vectors)
        largest = 1.0 + float(base.values[-1]) if len(base.values) else 1.0
        for start in range(0, len(vectors), self._width):
            some = slice(start, start + self._width)
            found[some] = conjugate_gradients(self._whitened, vectors[some], base.whitened_solve, tolerance, largest,
                                              tuning.CONJUGATE_GRADIENT_STEPS)
        return found

    @property
    def _width(self) -> int:
        """Right-hand sides of solves at a time."""
        return max(1, tuning.COVARIANCE_BYTES // (self.num_parameters * self.base.factor.element_size()))

    @property
    def _best(self) -> IterativePrecision:
        """`refined`, if it is known already."""
        best: IterativePrecision = vars(self).get("refined", self)
        return best

    # --- evidence

    @collective_property
    def estimate(self) -> LogDet:
        """log det B with its errors, from the probes."""
        low = float(self.base.log_det())
        upper = low + self._most_left
        if self._most_left <= tuning.QUADRATURE_SHARE * self.tolerance:
            return LogDet(0.5 * (low + upper), 0.5 * self._most_left, low, upper)
        below, above = self.probed.unbind(1)
        middle, width = 0.5 * (below + above), float((above - below).mean())
        error = math.inf
        if self.probes > 1:
            error = float(middle.std()) / self.probes**0.5 * _student(self.probes - 1) + 0.5 * width
        steps = max(rule.nodes.shape[1] for rule in self._quadratures)
        return LogDet(low + float(middle.mean()), error, low, upper, self.probes, steps)

    @collective_property
    def _quadratures(self) -> list[Quadrature]:
        """Of C, for the probes that are not among the earlier ones."""
        rules = self._rules(self._preconditioned, len(self._earlier), tuning.LANCZOS_STEPS, torch.log)
        return [rule for _, rule in rules]

    def _rules(
        self, operator: Callable[[Tensor], Tensor], first: int, steps: int, function: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[Tensor, Quadrature]]:
        """Some probes at a time, from the first on, with their quadratures: Lanczos keeps a basis for each."""
        signs = _signs(self.probes, self.num_parameters, self.seed)[first:]
        for some in signs.split(tuning.LANCZOS_PROBES):
            probes = some.to(self.base.factor)
            yield probes, lanczos(operator, probes, 1.0, steps, partial(self._enough, function))

    def _enough(self, function: Callable[[Tensor], Tensor], found: Quadrature) -> bool:
        """Whether the bracket is narrow beside the wished standard error."""
        below, above = found.bracket(function)
        return float((above - below).mean()) <= tuning.QUADRATURE_SHARE * self.tolerance

    @property
    def probed(self) -> Tensor:
        """Lower and upper value of zᵀ log(C) z for each probe, (m, 2)."""
        # rounding: no eigenvalue is below 1
        found = [torch.stack(rule.bracket(lambda t: t.clamp_min(1.0).log()), 1) for rule in self._quadratures]
        return torch.cat([self._earlier, *found])

    @collective_property
    def _diagonal(self) -> tuple[float, float]:
        return self.curvature.diagonal(self.base.variances)

    @property
    def _trace_left(self) -> float:
        """tr P0⁻¹JᵀΛJ - tr P0⁻¹FᵀF, at least tr (C - I) and every relative error of a variance of the low rank."""
        return max(0.0, self._diagonal[0] - float(self.base.values.sum()))

    @property
    def _most_left(self) -> float:
        """Upper bound of tr log C, by the smaller of two.

        log det (I + X) <= k log(1 + tr X/k) for X = C - I of rank k; and log det B <= Σ_n log det B_nn (Fischer).
        """
        rank = self.curvature.rank - len(self.base.values)
        by_trace = rank * math.log1p(self._trace_left / rank) if rank > 0 else 0.0
        return max(0.0, min(by_trace, self._diagonal[1] - float(self.base.log_det())))

    @property
    def _complete(self) -> bool:
        """Whether the low rank alone gives all covariances, up to rounding."""
        return self._trace_left <= tuning.COMPLETE

    def log_det(self) -> Tensor:
        """log det B, an estimate: see `estimate`."""
        return self.base.values.new_tensor(self.estimate.value)

    @property
    def standard_error(self) -> float:  # type: ignore[override]
        """Of `log_det`."""
        return self.estimate.standard_error

    @property
    def log_det_bounds(self) -> tuple[float, float]:  # type: ignore[override]
        """Certain bounds of log det B, from the best sketch so far."""
        found = [one.estimate for one in (self, self._best)]
        return max(one.lower for one in found), min(one.upper for one in found)

    @property
    def best_sketch(self) -> Sketch:
        """The largest sketch so far."""
        return self._best.sketch

    def effective_parameters(self) -> Tensor:
        """γ_g = n_g - δ_g tr_g(H⁻¹): that of the low rank, and what the draws find of the rest, (G,)."""
        fine = self.refined
        found = fine.base.effective_parameters()
        return found if fine._complete else found.index_add_(0, self.groups, fine._left.square().mean(0))

    @property
    def effective_error(self) -> float:
        """Standard error of the sum of `effective_parameters`, from the spread of the draws."""
        fine = self.refined
        if fine._complete:
            return 0.0
        each = fine._left.square().sum(1)
        return float(each.std() / len(each) ** 0.5)

    def log_det_curve(self, factors: Tensor) -> Tensor:
        """log det B with all prior precisions multiplied by each of `factors` (m,), from one Lanczos run; (m,).

        The low rank is exact at every factor. For the rest, each probe's quadrature of the whole is compared with its
        known value in the low rank: their difference has little variance.
        """
        found = log_det_curve(self.base.values, factors)
        if self._most_left <= tuning.QUADRATURE_SHARE * self.tolerance:
            return found
        hardest, tiny = partial(_shifted_log, factor=float(factors.min())), torch.finfo(self.base.values.dtype).tiny
        for probes, rule in self._rules(self._whitened, 0, 4 * tuning.LANCZOS_STEPS, hardest):
            # of each eigenvector of the low rank in the probes, times its eigenvalue
            shares = inner(probes, self.base.factor, self.base.deviation).square().sum(0)
            for place, factor in enumerate(factors):
                below, above = rule.bracket(partial(_shifted_log, factor=float(factor)))
                known = (torch.log1p(self.base.values / factor) / self.base.values.clamp_min(tiny)) @ shares
                found[place] += (0.5 * float((below + above).sum()) - known) / self.probes
        return found

    def local_log_det(self) -> Callable[[Tensor], Tensor] | None:
        """log det (I + Σ_g e^(-s_g) F_gF_gᵀ) + Σ_g q_g (e^(-s_g) - 1) + the rest, in changes s_g of log δ_g.

        Exact in the low rank, and of first order in what it leaves, with q_g its effective parameters: a function whose
        gradient is its own, unlike that of two estimates. None if there are too many groups for their matrices.
        """
        fine, r = self.refined, len(self.refined.base.values)
        if self._num_groups * r * r * self.base.factor.element_size() > tuning.LOCAL_BYTES:
            return None
        left = self._by_group.new_zeros(self._num_groups)
        if not fine._complete:
            left.index_add_(0, self.groups, fine._left.square().mean(0))
        scaled = fine.sketch.factor * self.base.deviation
        cores = torch.stack([(part := scaled[:, self.groups == g]) @ part.T for g in range(self._num_groups)]).double()
        left, rest = left.double(), fine.estimate.value - fine.estimate.lower

        def log_det(shift: Tensor) -> Tensor:
            weights = torch.exp(-shift.to(cores))
            inner = torch.eye(len(cores[0]), dtype=cores.dtype, device=cores.device)
            inner = inner + (weights.view(-1, 1, 1) * cores).sum(0)
            return cholesky_log_det(cholesky_of(inner)) + rest + (left * (weights - 1.0)).sum()

        return log_det

    # --- solves and samples

    def solve(self, vectors: Tensor) -> Tensor:
        """H⁻¹ v for vectors (..., P), by conjugate gradients."""
        flat = vectors.reshape(-1, self.num_parameters) * self.base.deviation
        return (self._solved_whitened(flat) * self.base.deviation).view_as(vectors)

    def multiply(self, vectors: Tensor) -> Tensor:
        """H v for vectors (..., P)."""
        flat = vectors.reshape(-1, self.num_parameters)
        return (self.prior_precision * flat + self.curvature.products(flat)).view_as(vectors)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws from N(0, H⁻¹), (count, P): H⁻¹(P0^½ε + JᵀSε') has the covariance H⁻¹(P0 + JᵀΛJ)H⁻¹."""
        generator = torch.Generator().manual_seed(self.seed) if generator is None else generator
        white = normal(count, self.base.factor, generator)
        return self.solve(white * self.prior_precision.sqrt() + self.curvature.noise(count, generator))

    # --- covariance of f

    @collective_property
    def _left(self) -> Tensor:
        """Draws d (s, P) with covariance M⁻¹ - (P0^-½HP0^-½)⁻¹, which the low rank leaves of the inverse.

        With E = P0^-½(JᵀΛJ - FᵀF)P0^-½, x ~ N(0, M⁻¹) and e ~ N(0, E): d = (M + E)⁻¹(E x + e).
        """
        found = self._drawn(tuning.REMAINDER_DRAWS, self.seed + 1)
        # the largest relative error of a variance falls with the root of the number of draws
        error = self.curvature.largest(lambda rows: self._largest_error(rows, found))
        count = math.ceil(len(found) * min((error / tuning.VARIANCE_ERROR) ** 2, 1e6))
        more = min(count, tuning.MOST_DRAWS, max(self.most, len(found))) - len(found)
        return found if more <= 0 else torch.cat([found, self._drawn(more, self.seed + 1 + len(found))])

    def _drawn(self, count: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        widths = [min(self._width, count - start) for start in range(0, count, self._width)]
        return torch.cat([self._some_drawn(width, generator) for width in widths])

    def _some_drawn(self, count: int, generator: torch.Generator) -> Tensor:
        scale, factor = self.base.deviation, self.sketch.factor
        x = self.base.whitened_half(normal(count, self.base.factor, generator)) * scale
        noise = self.curvature.noise(count, generator)
        right = self.curvature.products(x) - (x @ factor.T) @ factor + self.sketch.left(noise)
        return self._solved_whitened(right * scale)

    def _largest_error(self, rows: Jacobian, left: Tensor) -> float:
        """The largest relative error of a variance by these draws; one that is zero counts nothing."""
        seen = rows.products(self.shapes.parts(left * self.base.deviation / len(left) ** 0.5)).transpose(0, 1)
        rest = seen @ seen.mT
        own = (self.base.covariance_blocks(rows) - rest).diagonal(dim1=1, dim2=2)
        rest = rest.diagonal(dim1=1, dim2=2)
        share = torch.where(rest > 0, rest / own.clamp_min(torch.finfo(own.dtype).tiny), torch.zeros_like(own))
        return float(share.max()) * (2 / len(left)) ** 0.5

    @collective_property
    def _left_directions(self) -> dict[str, Tensor]:
        return self.shapes.parts(self._left * self.base.deviation / len(self._left) ** 0.5)

    @collective_property
    def refined(self) -> IterativePrecision:
        """The same with the smallest sketch that leaves at most `tuning.LEFT_SHARE` of log det B, if memory allows."""
        found, probes = self, min(self.probes, tuning.MEASURING_PROBES)
        for sketch, base, _ in growing(self.curvature, (self.sketch, self.base), (0, self.most), self.seed):
            if base is not self.base:
                found = IterativePrecision(self.curvature, sketch, base, probes, self.seed, self.tolerance, self.most)
            if found.estimate.value - found.estimate.lower <= tuning.LEFT_SHARE * found.estimate.value:
                break
        return found

    def covariance_blocks(self, rows: Jacobian) -> Tensor:
        """V = J H⁻¹ Jᵀ, diagonal blocks (n, C, C)."""
        return self._blocks(rows, None)

    def removal_blocks(self, rows: Jacobian, root: Tensor) -> Tensor:
        """V at training points, (n, C, C), solved exactly where I - SᵀVS would be wrong by too much."""
        return self._blocks(rows, root)

    def _blocks(self, rows: Jacobian, root: Tensor | None) -> Tensor:
        fine = self.refined
        low = fine.base.covariance_blocks(rows)
        if fine._complete:
            return low
        seen = rows.products(fine._left_directions).transpose(0, 1)  # (n, K, s)
        rest = seen @ seen.mT
        blocks = low - rest
        uncertain = _uncertain(blocks, rest, len(fine._left))
        if root is not None:
            eye = torch.eye(root.shape[2], dtype=root.dtype, device=root.device)
            uncertain |= _uncertain(eye - root.mT @ blocks @ root, root.mT @ rest @ root, len(fine._left))
        solved = uncertain.nonzero().squeeze(1)
        if len(solved):
            blocks[solved] = PosteriorPrecision.covariance_blocks(fine, rows.subset(solved))
        return blocks

    def covariance(self, rows: Jacobian) -> Tensor:
        """V = J H⁻¹ Jᵀ, joint and interleaved, (nC, nC)."""
        fine = self.refined
        joint = fine.base.covariance(rows)
        if fine._complete:
            return joint
        seen = rows.products(fine._left_directions).transpose(0, 1)
        own = joint.view(rows.num_examples, rows.num_cotangents, rows.num_examples, -1)
        rest = seen @ seen.mT
        if bool(_uncertain(own.diagonal(dim1=0, dim2=2).permute(2, 0, 1) - rest, rest, len(fine._left)).any()):
            return PosteriorPrecision.covariance(fine, rows)
        flat = seen.flatten(0, 1)
        return joint.addmm_(flat, flat.T, alpha=-1.0)


def _uncertain(own: Tensor, rest: Tensor, draws: int) -> Tensor:
    """Mask of blocks A (n, k, k) of which cᵀAc may be too wrong for some c, with `rest` R in A by s draws.

    The expected relative error cᵀRc/cᵀAc (2/s)^½ is at most `tuning.VARIANCE_ERROR` for all c if a multiple of A less R
    is positive definite: differences of outputs are right too, whose variance may be far below those of the outputs.
    """
    allowed = tuning.VARIANCE_ERROR * (draws / 2) ** 0.5
    slack = 64 * torch.finfo(own.dtype).eps * (own + rest).diagonal(dim1=1, dim2=2).abs()
    tiny = torch.finfo(own.dtype).tiny
    return torch.linalg.cholesky_ex(allowed * own - rest + torch.diag_embed(slack + tiny)).info > 0


def _shifted_log(nodes: Tensor, factor: float) -> Tensor:
    """log(1 + (t - 1)/c)."""
    return torch.log1p((nodes - 1.0).clamp_min(0.0) / factor)


def _student(freedom: int) -> float:
    """Ratio of the 97.5 % quantiles of Student's t and the normal distribution."""
    from scipy import stats  # the import changes warning filters

    return float(stats.t.ppf(0.975, freedom) / stats.norm.ppf(0.975))


def reaching(
    curvature: Curvature, ranks: tuple[int, int], seed: int, tolerance: Callable[[float], float]
) -> tuple[Sketch, LowRankPrecision]:
    """The sketch whose log determinant is within the tolerance, by an estimate of what it leaves; arguments as `grown`.

    The rank is doubled until then.
    """
    for sketch, base, _ in growing(curvature, None, ranks, seed):
        wished = tolerance(float(base.log_det()))
        found = IterativePrecision(curvature, sketch, base, tuning.FIRST_PROBES, seed, wished, ranks[1]).estimate
        if found.value - found.lower <= wished:
            break
    return sketch, base


def grown(
    curvature: Curvature, sketch: Sketch | None, ranks: tuple[int, int], probes: tuple[int, int], seed: int,
    tolerance: Callable[[float], float],
) -> IterativePrecision:  # fmt: skip
    """The precision whose log determinant has the wished standard error, or the best that ranks and probes allow.

    The rank is doubled as long as that costs less than the probes that the present rank needs.

    Parameters
    ----------
    curvature : Curvature
    sketch : Sketch, optional
        What is known of the curvature, at any prior.
    ranks, probes : tuple of int
        First and most.
    seed : int
    tolerance : callable
        The wished standard error of log det B, in nats, at a value of log det B.
    """
    sketches = growing(curvature, None if sketch is None else sketch.at(curvature), ranks, seed)
    for larger, base, doubled in sketches:
        wished = tolerance(float(base.log_det()))
        found = IterativePrecision(curvature, larger, base, probes[0], seed, wished, ranks[1])
        estimate = found.estimate
        wished = tolerance(estimate.value)
        if estimate.standard_error <= wished:
            return found
        if not math.isfinite(estimate.standard_error):
            raise NumericalError("a finite estimate of log det B", "numbers that overflow",
                                 "Take a larger prior precision.")  # fmt: skip
        # the spread of the first probes is itself an estimate: a fifth more
        needed = math.ceil(1.2 * probes[0] * min((estimate.standard_error / wished) ** 2, 1e6))
        if doubled is None or (needed <= probes[1] and (needed - probes[0]) * estimate.steps <= doubled):
            break
    enough = min(needed, probes[1])
    if enough <= probes[0]:
        return found
    return IterativePrecision(curvature, larger, base, enough, seed, wished, ranks[1], found.probed)
