"""Draws of the posterior by solves, as an estimate of covariances of f: of sums over the data by few, of V by more."""

from __future__ import annotations

import torch
from torch import Tensor

from ntk_laplace.curvature.probed_log_det import ProbedLogDet, student, sufficient
from ntk_laplace.curvature.sketch import normal
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.runtime import tuning

__all__ = ["PosteriorDraws", "draws_suffice"]


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
        Draws for which there is memory.

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
        self._directions: tuple[int, dict[str, Tensor]] = 0, {}  # of so many draws, by parameter

    def draw(self, count: int) -> None:
        """Continue to so many draws, or as many as there may be."""
        begin, end = len(self.draws), min(count, self._most)
        if begin >= end:
            return
        curvature, deviation, together = self._probing.curvature, self._probing.base.deviation, self._probing.together
        generator = torch.Generator().manual_seed(self._probing.seed + 1 + begin)
        drawn, used = [self.draws], [self.used]
        for start in range(begin, end, together):
            some = min(together, end - start)
            # P0^-½ (P0^½ε + JᵀSε'), whose solution in units of the prior has the covariance (P0^-½HP0^-½)⁻¹
            right = normal(some, curvature.like, generator) + curvature.noise(some, generator) * deviation
            drawn.append(self._probing.solved_draws(right) * deviation)
            used.append((curvature.products(drawn[-1]) * drawn[-1]).sum(1))
        self.draws, self.used = torch.cat(drawn), torch.cat(used)

    def draw_for_sums(self) -> None:
        """Continue to as many as give Σ_n tr Λ_nV_n a relative error of `tuning.EFFECTIVE_ERROR`."""
        self.draw(tuning.LANCZOS_PROBES)
        if (count := len(self.used)) > 1 and (mean := float(self.used.mean())) > 0:
            error = float(self.used.std()) / mean * student(count - 1) / count**0.5
            self.draw(sufficient(count, error / tuning.EFFECTIVE_ERROR))

    def outputs(self, rows: Jacobian) -> Tensor:
        """J y over s^½ for all draws, (n, K, s): the product with its transpose estimates V."""
        if self._directions[0] != len(self.draws):
            count = len(self.draws)
            self._directions = count, self._probing.curvature.shapes.parts(self.draws / count**0.5)
        return rows.products(self._directions[1]).transpose(0, 1)

    def weight_in_sums(self) -> float:
        """Of J YᵀY Jᵀ in sums over the data: that which gives Σ_n tr Λ_nV_n its value from here and elsewhere together.

        Each estimate counts with its inverse variance.
        """
        own, variance = float(self.used.mean()), float(self.used.var()) / len(self.used)
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
