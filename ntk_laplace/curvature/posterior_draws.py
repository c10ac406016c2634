"""Draws of the posterior by solves, as an estimate of covariances of f: of sums over the data by few, of V by more."""

from __future__ import annotations

import torch
from torch import Tensor

from ntk_laplace.curvature.probed_log_det import ProbedLogDet, student, sufficient
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.sampling import normal

_BLOCK = 8  # draws from one seed


def draws_suffice(variance_error: float, outputs: int) -> bool:
    """Whether `tuning.REMAINDER_DRAWS` draws give V of so many outputs with this expected relative error, (2/s)^½."""
    few = tuning.DRAWS_PER_OUTPUT * outputs <= tuning.REMAINDER_DRAWS
    return few and 2.0 / variance_error**2 <= tuning.REMAINDER_DRAWS


class PosteriorDraws:
    """Draws y from N(0, H⁻¹).

    Parameters
    ----------
    probing : ProbedLogDet
        Products, and the low rank that preconditions their solves.
    effective, error : float
        Σ_g γ_g from elsewhere, with its standard error.
    most : int
        Draws for which there is memory; at least `tuning.REMAINDER_DRAWS` are made.

    Attributes
    ----------
    draws : Tensor, (s, P)
        Those so far.
    used : Tensor, (s,)
        yᵀJᵀΛJy of each; their expectation is Σ_n tr Λ_nV_n = Σ_g γ_g.
    """

    def __init__(self, probing: ProbedLogDet, effective: float, error: float, most: int) -> None:
        self._probing, self._effective, self._error = probing, effective, error
        self._most = max(tuning.REMAINDER_DRAWS, min(tuning.MOST_DRAWS, most))
        self.draws = probing.curvature.like.new_zeros(0, len(probing.curvature.like))
        self.used = self.draws.new_zeros(0)

    def draw(self, count: int) -> None:
        """Continue to so many draws, or as many as there may be; the first ones do not depend on the number."""
        begin, end = len(self.draws), min(_whole_blocks(count), self._most)
        if begin >= end:
            return
        curvature, deviation = self._probing.curvature, self._probing.base.deviation
        drawn, used, step = [self.draws], [self.used], max(1, self._probing.together // _BLOCK) * _BLOCK
        for start in range(begin, end, step):
            stop = min(start + step, end)
            rights = torch.cat([self._right(block) for block in range(start, stop, _BLOCK)])[: stop - start]
            drawn.append(self._probing.solved_draws(rights) * deviation)
            used.append((curvature.products(drawn[-1]) * drawn[-1]).sum(1))
        self.draws, self.used = torch.cat(drawn), torch.cat(used)

    def _right(self, start: int) -> Tensor:
        """P0^-½ (P0^½ε + JᵀSε'), whose solution in units of the prior has the covariance (P0^-½HP0^-½)⁻¹."""
        curvature, generator = self._probing.curvature, torch.Generator()
        # apart from the draws of other estimates, with which these are weighed, and from those of other seeds
        generator.manual_seed((self._probing.seed + 1) * 2**32 % 2**62 + start)
        white = normal((_BLOCK, len(curvature.like)), curvature.like, generator)
        return white + curvature.noise(_BLOCK, generator) * self._probing.base.deviation

    def outputs(self, rows: Jacobian, count: int) -> Tensor:
        """J y over s^½ for the first draws, (n, K, s): the product with its transpose estimates V."""
        named = self._probing.curvature.prior.shapes.parts(self.draws[:count])
        return rows.products(named).transpose(0, 1) / min(count, len(self.draws)) ** 0.5

    # --- sums over the data

    def draw_for_sums(self) -> int:
        """Continue to as many as give Σ_n tr Λ_nV_n a relative error of `tuning.EFFECTIVE_ERROR`; their number."""
        self.draw(_BLOCK)
        first = self.used[:_BLOCK]
        if len(first) < 2 or not (mean := float(first.mean())) > 0:
            return len(first)
        error = float(first.std()) / mean * student(len(first) - 1) / len(first) ** 0.5
        count = min(_whole_blocks(sufficient(len(first), error / tuning.EFFECTIVE_ERROR)), self._most)
        self.draw(count)
        return count

    def weight_in_sums(self, count: int) -> float:
        """Of J YᵀY Jᵀ in sums over the data: that which gives Σ_n tr Λ_nV_n its value from here and elsewhere together.

        Each estimate counts with its inverse variance; here, of the first draws.
        """
        used = self.used[:count]
        own, variance = float(used.mean()), float(used.var()) / len(used)
        if not own > 0:
            return 1.0
        share = variance / max(variance + self._error**2, torch.finfo(torch.float64).tiny)
        return 1.0 + share * (self._effective / own - 1.0)

    # --- storage

    def record(self) -> tuple[Tensor, Tensor]:
        """The draws, and what each uses."""
        return self.draws, self.used

    def restore(self, record: tuple[Tensor, Tensor]) -> None:
        """Continue from a record."""
        self.draws, self.used = (part.to(self.draws) for part in record)


def _whole_blocks(count: int) -> int:
    return -(-count // _BLOCK) * _BLOCK
