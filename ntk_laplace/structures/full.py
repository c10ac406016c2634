"""structure="full": JᵀΛJ over all P parameters, summed over streaming data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ntk_laplace.curvature import FullPrecision, accumulate_ggn
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.runtime.resources import require_memory
from ntk_laplace.structures.model import LinearizedModel
from ntk_laplace.structures.structure import register_structure
from ntk_laplace.structures.summed import SummedSpec, Sums

__all__ = ["FullWeightSpace"]


@register_structure
@dataclass(frozen=True)
class FullWeightSpace(SummedSpec):
    """Exact inference in weight space: H = P0 + JᵀΛJ, (P, P), the default of laplace-torch's "full"."""

    name: ClassVar[str] = "full"
    exact: ClassVar[bool] = True

    def check_memory(self, model: LinearizedModel) -> None:
        """Refuse P x P matrices that do not fit in memory.

        Raises
        ------
        MemoryBudgetError
        """
        p, element = model.network.num_parameters, model.jacobian_pass.dtype.itemsize
        require_memory(
            2 * p * p * element, model.network.device, f"the {p:,} x {p:,} matrices of weight space",
            'Use structure="gp" (memory (N R)²/2), structure="kfac" (approximate) or parameters="last_layer".',
            model.settings.memory_budget,
        )

    def zeros(self, model: LinearizedModel) -> Sums:
        """JᵀΛJ of no points."""
        p = model.network.num_parameters
        return {"ggn": torch.zeros(p, p, dtype=model.jacobian_pass.dtype, device=model.network.device)}

    def add(self, sums: Sums, rows: Jacobian, model: LinearizedModel) -> None:
        """JᵀΛJ += (SᵀJ)ᵀ(SᵀJ); lower triangle only."""
        accumulate_ggn(sums["ggn"], rows, model.network.shapes)

    def precision(self, sums: Sums, model: LinearizedModel) -> FullPrecision:
        """Factorize H."""
        return FullPrecision(sums["ggn"], model.prior, model.network.shapes)
