"""structure="auto": the cheaper of the two exact matrices that fits in memory, or a structure without such a matrix."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from ntk_laplace.errors import MemoryBudgetError, UnsupportedError
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.resources import format_bytes
from ntk_laplace.structures.forecast import Forecast, Problem, memory_of
from ntk_laplace.structures.full import FullWeightSpace
from ntk_laplace.structures.function_space import FunctionSpace
from ntk_laplace.structures.structure import StructureSpec


@dataclass(frozen=True)
class Auto:
    """A choice among the exact structures, made for the data at hand.

    Attributes
    ----------
    otherwise : StructureSpec, optional
        Taken where neither matrix fits in memory; without it the smaller one is, which its own check refuses. Also
        taken where an exact matrix takes too many operations, and several times those of this structure.
    share : float, optional
        Share of `EXACT_OPERATIONS` that is not too many; None if there is no limit. Without `otherwise` a matrix that
        takes more is refused.
    """

    otherwise: StructureSpec | None
    share: float | None = 1.0
    exact: ClassVar[bool] = True
    keeps_jacobian: ClassVar[bool] = False  # not for certain
    factored_rows: ClassVar[bool] = False

    def chosen(self, problem: Problem, sampled: Callable[[], Problem | None]) -> tuple[StructureSpec, str]:
        """The specification for a problem, and the reason in words; `sampled`: with the spectrum, if that is known.

        Raises
        ------
        UnsupportedError
            If an exact matrix takes too many operations, and there is no other structure.
        """
        needs, memory, p = _needs(problem), _memory(problem), problem.num_parameters
        smaller, fitting = needs[0][0], [(spec, found) for spec, found in needs if found.required <= memory]
        sizes = f"auto: N x R = {problem.num_rows:,} rows and P = {p:,} parameters"
        spec, forecast = fitting[0] if fitting else (self.otherwise or smaller, None)
        operations = max(problem.model.settings.reducer.gather(_operations(forecast, problem)))  # one choice for all
        most = math.inf if self.share is None else self.share * _most(problem)
        if operations > most and self.otherwise is None:
            raise UnsupportedError(f"an exact matrix that takes at most {most:.1g} operations",
                                   f"{operations:.1g} of {spec.name!r}", "Fit it afterwards with laplace().")
        if operations > most and self.otherwise is not None and _takes_less(self.otherwise, operations, sampled()):
            return self.otherwise, (f"{sizes}; {spec.name!r} would take {operations:.1g} operations, so "
                                    f"{self.otherwise.name!r} factors neither matrix")
        if spec is smaller:
            return spec, (f"auto: N x R = {problem.num_rows:,} rows against P = {p:,} parameters, so {spec.name!r} "
                          "factors the smaller matrix")
        other = "factors neither" if spec is self.otherwise else "factors the larger matrix"
        return spec, f"{sizes}; of {format_bytes(memory)}, {_words(needs)} would be needed, so {spec.name!r} {other}"

    def require_memory(self, problem: Problem) -> None:
        """Refuse a problem of which no choice fits in memory (MemoryBudgetError)."""
        needs, memory = _needs(problem), _memory(problem)
        if self.otherwise is None and all(found.required > memory for _, found in needs):
            raise MemoryBudgetError(
                f"an exact structure for {problem.num_examples:,} examples to fit into {format_bytes(memory)} on "
                f"{problem.model.network.device}", f"a predicted need of {_words(needs)}",
                "Use fewer examples, or dtype=torch.float32.")


def _most(problem: Problem) -> float:
    """Operations of an exact matrix that are not too many, in each process."""
    return tuning.EXACT_OPERATIONS if problem.model.network.device.type == "cpu" else tuning.EXACT_OPERATIONS_DEVICE


def _operations(forecast: Forecast | None, problem: Problem) -> float:
    """Of a fit in this process; 0 if that is not known."""
    return 0.0 if forecast is None or forecast.work is None else forecast.work.operations(problem)


def _takes_less(spec: StructureSpec, operations: float, problem: Problem | None) -> bool:
    """Whether another structure is known to take far fewer operations, on all processes."""
    if problem is None:
        return False
    found = _operations(spec.forecast(problem), problem)
    return all(problem.model.settings.reducer.gather(0.0 < tuning.FASTER * found < operations))


def _needs(problem: Problem) -> list[tuple[StructureSpec, Forecast]]:
    """The two matrices, the smaller one first, with their forecasts."""
    specs: list[StructureSpec] = [FunctionSpace(), FullWeightSpace()]
    ordered = specs if problem.num_rows <= problem.num_parameters else specs[::-1]
    forecasts = [spec.forecast(problem) for spec in ordered]
    return [(spec, found) for spec, found in zip(ordered, forecasts, strict=True) if found is not None]


def _memory(problem: Problem) -> int:
    """The least memory of a process."""
    return min(problem.model.settings.reducer.gather(memory_of(problem.model)))


def _words(needs: list[tuple[StructureSpec, Forecast]]) -> str:
    return " and ".join(f"{spec.name!r} {format_bytes(found.required)}" for spec, found in needs)
