"""log det B by probes: a low rank exactly, and what it leaves by Lanczos quadrature with fixed signs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ntk_laplace.curvature.sketch import Approximation
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.krylov import Quadrature, conjugate_gradients, lanczos, nearly_solved
from ntk_laplace.runtime.linalg import log_det_curve
from ntk_laplace.runtime.reduction import collective_property

Wished = Callable[[float], float]


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
        Probes, and products with each of the first ones; others take fewer.
    """

    value: float
    standard_error: float
    lower: float
    upper: float
    probes: int = 0
    steps: int = 0


class ProbedLogDet:
    """log det B = log det M + tr log C, with C = Wᵀ P0^-½ H P0^-½ W and W Wᵀ = M⁻¹; see `iterative`.

    Parameters
    ----------
    approximation : Approximation
        The low rank.
    probes, seed : int
    wished : callable
        The wished standard error, in nats, at a value: the quadrature's bracket ends at a fraction of it.
    earlier : ProbedLogDet, optional
        The same with fewer probes.
    """

    def __init__(
        self, approximation: Approximation, probes: int, seed: int, wished: Wished, earlier: ProbedLogDet | None = None
    ) -> None:
        self.approximation, self.curvature, self.base = approximation, approximation.curvature, approximation.base
        self.probes, self.seed, self.wished = probes, seed, wished
        self._earlier = earlier

    # --- products in units of the prior

    def whitened(self, vectors: Tensor) -> Tensor:
        """P0^-½ H P0^-½ v for vectors (m, P)."""
        scale = self.base.deviation
        return self.curvature.products(vectors * scale).mul_(scale).add_(vectors)

    def preconditioned(self, vectors: Tensor) -> Tensor:
        """C v for vectors (m, P)."""
        return self.base.whitened_half(self.whitened(self.base.whitened_half(vectors)), transpose=True)

    def solved(self, vectors: Tensor, tolerance: float = 0.0) -> tuple[Tensor, Tensor]:
        """(P0^-½ H P0^-½)⁻¹ v for vectors (m, P), by conjugate gradients that the low rank preconditions.

        Solutions and their residuals, these at most this share of each vector, or 1e-11 in float64.
        """
        tolerance = max(tolerance, torch.finfo(vectors.dtype).eps ** 0.7)
        return conjugate_gradients(self.whitened, vectors, self.base.whitened_solve, tolerance,
                                   1.0 + self.base.largest, tuning.CONJUGATE_GRADIENT_STEPS)

    def solved_draws(self, draws: Tensor) -> Tensor:
        """(P0^-½ H P0^-½)⁻¹ d for draws d (m, P), with an error far below that of their number."""
        return nearly_solved(self.whitened, draws, self.base.whitened_solve, tuning.DRAW_ERROR,
                             tuning.CONJUGATE_GRADIENT_STEPS)

    @property
    def together(self) -> int:
        """Vectors of solves at a time: more of them share passes where rows are computed again."""
        most = max(1, tuning.COVARIANCE_BYTES // self.curvature.like.nbytes)
        return min(most, self.curvature.together or most)

    # --- the estimate

    @collective_property
    def estimate(self) -> LogDet:
        """log det B with its errors, from the probes."""
        low = float(self.base.log_det())
        upper = low + self.most_left
        if self.most_left <= tuning.QUADRATURE_SHARE * self.wished(low):
            return LogDet(0.5 * (low + upper), 0.5 * self.most_left, low, upper)
        below, above = self.probed.unbind(1)
        middle, width = 0.5 * (below + above), float((above - below).mean())
        error = math.inf
        if self.probes > 1:
            error = float(middle.std()) / self.probes**0.5 * student(self.probes - 1) + 0.5 * width
        return LogDet(low + float(middle.mean()), error, low, upper, self.probes, len(self._quadrature[1]))

    @property
    def probed(self) -> Tensor:
        """Lower and upper value of zᵀ log(C) z for each probe, (m, 2)."""
        return self._quadrature[0]

    @collective_property
    def _quadrature(self) -> tuple[Tensor, Tensor]:
        """`probed`, and the middles of the first probes after each step, (k, m').

        The first probes go on until their bracket is narrow. What later steps change is nearly the same for all probes:
        the others end early, and the mean change of the first is added, with its standard error in their brackets.
        """
        values, middles = self._first_probed() if self._earlier is None else self._earlier._quadrature
        steps, change, error = self._shorter(values, middles)
        first = values[: middles.shape[1]]
        half, found = 0.5 * float((first[:, 1] - first[:, 0]).mean()) + error, [values]
        for signs in self.signs(len(values)):
            rule = lanczos(self.preconditioned, signs, 1.0, steps, lambda _: False)
            middle = torch.stack(rule.bracket(_log)).mean(0) + change
            found.append(torch.stack([middle - half, middle + half], 1))
        return torch.cat(found), middles

    def _first_probed(self) -> tuple[Tensor, Tensor]:
        low, middles = float(self.base.log_det()), list[Tensor]()

        def enough(found: Quadrature) -> bool:
            below, above = found.bracket(_log)
            middles.append(0.5 * (below + above))
            wished = self.wished(low + float(middles[-1].mean()))
            return float((above - below).mean()) <= tuning.QUADRATURE_SHARE * wished

        rule = lanczos(self.preconditioned, next(self.signs(0)), 1.0, tuning.LANCZOS_STEPS, enough)
        values = torch.stack(rule.bracket(_log), 1)
        return values, torch.stack([*middles[: rule.nodes.shape[1] - 1], values.mean(1)])

    def _shorter(self, values: Tensor, middles: Tensor) -> tuple[int, float, float]:
        """Fewest steps from which the change of the middles is known, its mean and its standard error."""
        count, wished = middles.shape[1], self.wished(float(self.base.log_det() + values.mean()))
        for steps in range(1, len(middles) + 1):
            change = middles[-1] - middles[steps - 1]
            error = float(change.std()) / count**0.5 * student(count - 1) if count > 1 else math.inf
            if error <= tuning.QUADRATURE_SHARE * wished:
                break
        return steps, float(change.mean()), error

    @property
    def later_steps(self) -> int:
        """Products with each of the probes that are not among the first."""
        values, middles = self._quadrature
        return self._shorter(values, middles)[0]

    def signs(self, start: int) -> Iterator[Tensor]:
        """Probes of random signs, (s, P), from this number on, some at a time: Lanczos keeps a basis for each.

        The first ones are the same however many there are.
        """
        like, generator = self.curvature.like, torch.Generator().manual_seed(self.seed)

        def drawn() -> Tensor:
            return torch.randint(0, 2, like.shape, generator=generator, dtype=torch.int8, device="cpu")

        for _ in range(start):
            drawn()
        for first in range(start, self.probes, tuning.LANCZOS_PROBES):
            count = min(tuning.LANCZOS_PROBES, self.probes - first)
            yield (torch.stack([drawn() for _ in range(count)]) * 2 - 1).to(like)

    @collective_property
    def diagonal(self) -> tuple[float, float]:
        """tr P0⁻¹JᵀΛJ, and Fischer's bound of log det B."""
        return self.curvature.diagonal(self.base.variances) if self._earlier is None else self._earlier.diagonal

    @property
    def trace_left(self) -> float:
        """tr P0⁻¹JᵀΛJ - tr P0⁻¹FᵀF, at least tr (C - I) and every relative error of a variance of the low rank."""
        return max(0.0, self.diagonal[0] - self.base.trace)

    @property
    def most_left(self) -> float:
        """Upper bound of tr log C, by the smaller of two.

        log det (I + X) <= k log(1 + tr X/k) for X = C - I of rank k; and log det B <= Σ_n log det B_nn (Fischer).
        """
        rank = self.approximation.rank_left
        by_trace = rank * math.log1p(self.trace_left / rank) if rank > 0 else 0.0
        return max(0.0, min(by_trace, self.diagonal[1] - float(self.base.log_det())))

    @property
    def complete(self) -> bool:
        """Whether the low rank alone gives all covariances, up to rounding."""
        return self.trace_left <= tuning.COMPLETE

    @property
    def leaves_little(self) -> bool:
        """Whether the low rank leaves at most `tuning.LEFT_SHARE` of log det B."""
        return self.estimate.value - self.estimate.lower <= tuning.LEFT_SHARE * self.estimate.value

    def curve(self, factors: Tensor) -> Tensor:
        """log det B with all prior precisions multiplied by each of `factors` (m,), from one Lanczos run; (m,).

        The low rank is exact at every factor. For the rest, each probe's quadrature of the whole is compared with its
        known value in the low rank: their difference has little variance.
        """
        wished = self.wished(self.estimate.value)
        if self.most_left <= tuning.QUADRATURE_SHARE * wished:
            return self.base.log_det_curve(factors)
        hardest, tiny = partial(_shifted_log, factor=float(factors.min())), torch.finfo(self.curvature.like.dtype).tiny
        found: Tensor | None = None

        def enough(rule: Quadrature) -> bool:
            below, above = rule.bracket(hardest)
            return float((above - below).mean()) <= tuning.QUADRATURE_SHARE * wished

        for probes in self.signs(0):
            rule = lanczos(self.whitened, probes, 1.0, 4 * tuning.LANCZOS_STEPS, enough)
            # of each eigenvector of the low rank in the probes, times its eigenvalue
            values, shares = self.base.eigenvalues(probes)
            found = log_det_curve(values, factors) if found is None else found
            for place, factor in enumerate(factors):
                below, above = rule.bracket(partial(_shifted_log, factor=float(factor)))
                known = (torch.log1p(values / factor) / values.clamp_min(tiny)) @ shares
                found[place] += (0.5 * float((below + above).sum()) - known) / self.probes
        assert found is not None
        return found


def _log(nodes: Tensor) -> Tensor:
    """log t, as no eigenvalue is below 1."""
    return nodes.clamp_min(1.0).log()


def _shifted_log(nodes: Tensor, factor: float) -> Tensor:
    """log(1 + (t - 1)/c)."""
    return torch.log1p((nodes - 1.0).clamp_min(0.0) / factor)


def student(freedom: int) -> float:
    """Ratio of the 97.5 % quantiles of Student's t and the normal distribution."""
    from scipy import stats  # the import changes warning filters

    return float(stats.t.ppf(0.975, freedom) / stats.norm.ppf(0.975))


def sufficient(count: int, ratio: float) -> int:
    """Probes or draws that bring an error down to the wished one, from its ratio to that with `count` of them."""
    if ratio <= 1.0:
        return count
    # the spread of a few is itself an estimate: a fifth more
    more = 1.2 * count * min((ratio / student(count - 1)) ** 2, 1e6)
    return max(count + 1, math.ceil(more * student(max(1, int(more) - 1)) ** 2))
