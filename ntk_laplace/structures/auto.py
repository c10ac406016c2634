"""structure="auto": the cheaper of the two exact matrices that fits in memory, or a structure without such a matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ntk_laplace.errors import MemoryBudgetError
from ntk_laplace.runtime.resources import format_bytes
from ntk_laplace.structures.forecast import Problem, memory_of
from ntk_laplace.structures.full import FullWeightSpace
from ntk_laplace.structures.function_space import FunctionSpace
from ntk_laplace.structures.structure import StructureSpec


@dataclass(frozen=True)
class Auto:
    """A choice among the exact structures, made for the data at hand.

    Attributes
    ----------
    otherwise : StructureSpec, optional
        Taken where neither matrix fits in memory; without it the smaller one is, which its own check refuses.
    """

    otherwise: StructureSpec | None
    exact: ClassVar[bool] = True
    keeps_jacobian: ClassVar[bool] = False  # not for certain
    factored_rows: ClassVar[bool] = False

    def chosen(self, problem: Problem) -> tuple[StructureSpec, str]:
        """The specification for a problem, and the reason in words."""
        needs, memory = _needs(problem), _memory(problem)
        smaller = needs[0][0]
        spec = next((spec for spec, needed in needs if needed <= memory), self.otherwise or smaller)
        size, p = problem.num_rows, problem.num_parameters
        if spec is smaller:
            return spec, (f"auto: N x R = {size:,} rows against P = {p:,} parameters, so {spec.name!r} factors the "
                          "smaller matrix")
        other = "factors neither" if spec is self.otherwise else "factors the larger matrix"
        return spec, (f"auto: N x R = {size:,} rows and P = {p:,} parameters; of {format_bytes(memory)}, "
                      f"{_words(needs)} would be needed, so {spec.name!r} {other}")

    def require_memory(self, problem: Problem) -> None:
        """Refuse a problem of which no choice fits in memory (MemoryBudgetError)."""
        needs, memory = _needs(problem), _memory(problem)
        if self.otherwise is None and all(needed > memory for _, needed in needs):
            raise MemoryBudgetError(
                f"an exact structure for {problem.num_examples:,} examples to fit into {format_bytes(memory)} on "
                f"{problem.model.network.device}", f"a predicted need of {_words(needs)}",
                "Use fewer examples, or dtype=torch.float32.")


def _needs(problem: Problem) -> list[tuple[StructureSpec, int]]:
    """The two matrices, the smaller one first, with the bytes that they need."""
    specs: list[StructureSpec] = [FunctionSpace(), FullWeightSpace()]
    ordered = specs if problem.num_rows <= problem.num_parameters else specs[::-1]
    forecasts = [spec.forecast(problem) for spec in ordered]
    return [(spec, found.required) for spec, found in zip(ordered, forecasts, strict=True) if found is not None]


def _memory(problem: Problem) -> int:
    """The least memory of a process."""
    return min(problem.model.settings.reducer.gather(memory_of(problem.model)))


def _words(needs: list[tuple[StructureSpec, int]]) -> str:
    return " and ".join(f"{spec.name!r} {format_bytes(needed)}" for spec, needed in needs)
