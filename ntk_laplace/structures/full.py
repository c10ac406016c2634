"""structure="full": JᵀΛJ over all P parameters, summed over streaming data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ntk_laplace.curvature import FullPrecision, accumulate_ggn
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.runtime import tuning
from ntk_laplace.structures.forecast import Forecast, Problem, Work
from ntk_laplace.structures.model import LinearizedModel
from ntk_laplace.structures.registry import register_structure
from ntk_laplace.structures.summed import SummedSpec, Sums


@register_structure
@dataclass(frozen=True)
class FullWeightSpace(SummedSpec):
    """Exact inference in weight space: H = P0 + JᵀΛJ, (P, P), the default of laplace-torch's "full"."""

    name: ClassVar[str] = "full"
    exact: ClassVar[bool] = True

    def check_memory(self, model: LinearizedModel) -> None:
        """Refuse P x P matrices that do not fit in memory (MemoryBudgetError)."""
        p = model.network.num_parameters
        _matrices(p, model.jacobian_pass.dtype.itemsize).require(
            model, f"the {p:,} x {p:,} matrices of weight space",
            'Use structure="iterative" (exact without a matrix), structure="gp" (memory (N R)²/2), structure="kfac" '
            '(approximate) or parameters="last_layer".',
        )

    def forecast(self, problem: Problem) -> Forecast:
        """JᵀΛJ and the factor of H, P² numbers each, on every process; JᵀΛJ takes N R P² flops and H P³/3."""
        p = problem.num_parameters
        dense = p * problem.num_outputs * problem.element  # rows of one example
        batch = min(problem.share * dense, max(dense, tuning.FULL_ROWS_BYTES))
        seen = min(problem.chunk * dense, max(dense, tuning.COVARIANCE_BYTES))
        rows = problem.num_rows / problem.processes
        work = Work(passes=problem.share, matmul=rows * p * p, cholesky=p**3 / 3)
        matrix, stored = p * p * problem.element, _matrices(p, problem.element).stored
        found = Forecast.of_phases(
            stored, {"pass": matrix, "prediction": 2 * matrix, "responses": 2 * matrix},  # no factor during the pass
            {"pass": 2 * batch, "prediction": 2 * seen, "responses": problem.response_bytes})
        sent = 2 * matrix * (problem.processes - 1) // problem.processes
        return replace(found, work=work, communication=sent)

    def zeros(self, model: LinearizedModel) -> Sums:
        """JᵀΛJ of no points."""
        p = model.network.num_parameters
        return {"ggn": torch.zeros(p, p, dtype=model.jacobian_pass.dtype, device=model.network.device)}

    def add(self, sums: Sums, rows: Jacobian, model: LinearizedModel) -> None:
        """JᵀΛJ += (SᵀJ)ᵀ(SᵀJ); lower triangle only."""
        accumulate_ggn(sums["ggn"], rows, model.network.shapes)

    def precision(self, sums: Sums, model: LinearizedModel) -> FullPrecision:
        """Factorize H."""
        return FullPrecision(sums["ggn"], model.prior)


def _matrices(p: int, element: int) -> Forecast:
    return Forecast({"JᵀΛJ": p * p * element, "factor of H": p * p * element})
