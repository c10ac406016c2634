"""What if, in a structured posterior: its sums stay, and the points that changed stand beside them as a low rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.curvature import ChangedWeightSpace, Part, StructuredWeightSpace, group_numbers
from ntk_laplace.data import Source
from ntk_laplace.errors import DataError, UnsupportedError
from ntk_laplace.evidence import NewtonStep
from ntk_laplace.factors import Rows
from ntk_laplace.points import TrainingPoints, present_values, unmoved
from ntk_laplace.resources import require_memory
from ntk_laplace.structures.base import Trained, require_unchanged
from ntk_laplace.structures.gp import FunctionSpaceStructure
from ntk_laplace.structures.structured import StructuredStructure

__all__ = ["ChangedStructure", "MovedPoints", "rows_of"]


class MovedPoints:
    """Training points at the weights that a what-if moved to; a pass over the data makes their outputs, once needed.

    Whatever `TrainingPoints` answers, they answer; number, targets and weights take no pass.

    Parameters
    ----------
    still : TrainingPoints
        The same points at the trained weights, where the curvature stays.
    outputs : callable
        Gives the outputs (N, C).
    """

    def __init__(self, still: TrainingPoints, outputs: Callable[[], Tensor]) -> None:
        self._still, self._outputs = still, outputs
        self.num_examples, self.num_outputs = still.num_examples, still.num_outputs
        self.targets, self.counts = still.targets, still.counts

    @cached_property
    def settled(self) -> TrainingPoints:
        """Plain points."""
        with torch.no_grad():
            return replace(self._still, f=self._outputs(), expanded=self._still.f)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.settled, name)


class ChangedStructure:
    """A structured posterior some of whose points count otherwise, have other targets, or were added.

    Its curvature is the structure's own, with these points taken out and put in; or put in alone, where it holds too
    little of those that leave. All changes are one joint Newton step
    from the trained weights, whether they were asked for together or one after the other.

    Parameters
    ----------
    trained : Trained
        Before any move.
    inner : StructuredStructure
        As it was fitted.
    still : TrainingPoints
        All points as they are now, outputs at the trained weights.
    most : float
        Leverage above which no point is taken out of the curvature.
    more : sequence of FunctionSpaceStructure
        Of the points that were added, in their order.
    """

    def __init__(
        self, trained: Trained, inner: StructuredStructure, still: TrainingPoints, most: float,
        more: Sequence[FunctionSpaceStructure] = (),
    ) -> None:  # fmt: skip
        self.inner, self.still, self.most, self.more = inner, still, most, tuple(more)
        self.base = inner.points
        before = trained.likelihood.in_form_of(self.base.targets, still.targets)
        self._targets = torch.cat([before, still.targets[len(before) :]])  # before the change, and those added
        self.index = self._changed()
        self.rows = self._read(trained)
        self.points: MovedPoints | TrainingPoints = still
        self._found: tuple[StructuredWeightSpace | ChangedWeightSpace, tuple[Tensor, ...]] | None = None

    def _changed(self) -> Tensor:
        """Numbers of the points that are not as they were, those that were added last, (m,)."""
        base, still, n = self.base, self.still, len(self.base.f)
        now, before = still.targets[:n], self._targets[:n]
        other = ((now != before) & ~(now.isnan() & before.isnan())).reshape(n, -1).any(1)  # NaN is a missing target
        touched = torch.ones(len(still.f), dtype=torch.bool, device=still.f.device)
        touched[:n] = other | (still.counts[:n] != base.counts)
        return touched.nonzero().squeeze(1)

    def _read(self, trained: Trained) -> Rows | None:
        """Rows of J at the points that changed; None if there are none."""
        n = len(self.base.f)
        old = self.index[self.index < n]
        parts = [rows_of(trained, self.inner, old)] if len(old) else []
        parts += [one.rows for one in self.more]
        return Rows.concatenate(parts) if parts else None

    @property
    def name(self) -> str:
        """What `structure=` called it."""
        return self.inner.name

    @property
    def parts(self) -> list[Part]:
        """What shares a factorization, and in which form."""
        return self.inner.parts

    def changed(
        self, trained: Trained, still: TrainingPoints, more: FunctionSpaceStructure | None = None
    ) -> ChangedStructure:
        """Other points again, from the same sums."""
        together = self.more if more is None else (*self.more, more)
        return ChangedStructure(trained, self.inner, still, self.most, together)

    def step(self, trained: Trained) -> Tensor:
        """θ - θ* after one joint Newton step, H'⁻¹ J_Gᵀ(r' - r), (P,), and `points` there."""
        with torch.no_grad():
            if self.rows is None:
                move = torch.zeros_like(trained.theta)
            else:
                after, before = (points.residual(trained.likelihood) for points in (self.still, self.base))
                before = torch.cat([before, before.new_zeros(len(after) - len(before), after.shape[1])])
                pull = (after - before)[self.index].to(self.rows.f)
                move = self.curvature(trained).newton(self.rows.vjp(pull, trained.network.shapes))
        self.points = MovedPoints(self.still, lambda: self.still.f + self.push(trained, move))
        return move

    # --- algebra

    def curvature(self, trained: Trained) -> StructuredWeightSpace | ChangedWeightSpace:
        """Algebra at the present hyperparameters.

        Raises
        ------
        MemoryBudgetError
            If the points that changed are too many.
        """
        modules = trained.prior, trained.likelihood
        if self._found is None or not unmoved(self._found[1], *modules):
            self._found = self._factored(replace(trained, move=None)), present_values(*modules)
        moved = copy.copy(self._found[0])
        moved.theta = trained.theta  # around which samples are drawn; nothing else knows of a move
        return moved

    def _factored(self, trained: Trained) -> StructuredWeightSpace | ChangedWeightSpace:
        base = self.inner.curvature(trained)
        where, root, signs = self._difference(trained)
        if len(where) == 0:
            return base
        groups = group_numbers(trained.prior, trained.network.shapes).to(trained.theta.device)
        return ChangedWeightSpace(base, self.rows.part(where).weighted(root), signs, groups,
                                  trained.settings.memory_budget, self.most)

    def _difference(self, trained: Trained) -> tuple[Tensor, Tensor, Tensor]:
        """T (m, C, R) with T D Tᵀ = Λ' - Λ at those of `rows` where it is not zero, their places, and D (m, R)."""
        weights = self.still.counts[self.index]
        old = self.index[self.index < len(self.base.f)]
        was = torch.zeros_like(weights)
        was[: len(old)] = self.base.counts[old]
        after = self._roots(trained, self.still)
        before = self._roots(trained, replace(self.still, targets=self._targets))
        if torch.equal(after, before):
            gain = weights - was
            root, signs = after * gain.abs().sqrt().view(-1, 1, 1), gain.sign().unsqueeze(1).expand(-1, after.shape[2])
        else:
            root = torch.cat([after * weights.sqrt().view(-1, 1, 1), before * was.sqrt().view(-1, 1, 1)], 2)
            signs = torch.ones_like(root[:, 0])
            signs[:, after.shape[2] :] = -1.0
        where = (root != 0).flatten(1).any(1).nonzero().squeeze(1)
        return where, root[where], signs[where]

    def _roots(self, trained: Trained, points: TrainingPoints) -> Tensor:
        """S at the points that changed, each counted once, (m, C, R)."""
        with torch.no_grad():
            # labels that are drawn are drawn for all points at once
            return replace(points, weights=None).root(trained.root, trained.likelihood)[self.index].detach()

    # --- further passes

    def backproject(self, trained: Trained, residual: Tensor) -> Tensor:
        """Jᵀr, (P,)."""
        total = self.inner.backproject(trained, residual[: len(self.base.f)])
        start = len(self.base.f)
        for one in self.more:
            part = residual[start : start + one.points.num_examples]
            total += one.rows.vjp(part.to(one.rows.f), trained.network.shapes)
            start += len(part)
        return total

    def push(self, trained: Trained, vector: Tensor) -> Tensor:
        """J v, (N, C)."""
        named = trained.network.unflatten(vector)
        return torch.cat([self.inner.push(trained, vector), *(one.rows.jvp(named) for one in self.more)])

    def rows_at(self, trained: Trained, index: Tensor) -> Iterator[Rows]:
        """From another pass; those that were added are kept."""
        n, index = len(self.base.f), index.to(self.still.f.device)
        old = index[index < n]
        if len(old):
            yield from self.inner.rows_at(trained, old)
        added = index[index >= n] - n
        if len(added):
            yield Rows.concatenate([one.rows for one in self.more]).part(added)

    def sensitivity(self, trained: Trained, curvature: Any) -> Tensor:
        """Not there: how the structure's sums follow Λ is known before a change alone."""
        raise UnsupportedError(
            "a posterior of the data it was fitted to, for the evidence's gradient in the likelihood's hyperparameters",
            f"structure={self.name!r} that a what-if changed",
            "Fit them first, and ask what if afterwards; or use an exact structure.",
        )

    def newton_step(self, trained: Trained, curvature: Any, gradient: Tensor) -> NewtonStep:
        """z = H'⁻¹g; zᵀ(H' - P0)z is this structure's own."""
        z = curvature.newton(gradient)
        own = *curvature.quadratic(z), lambda: self.sensitivity(trained, curvature)
        return NewtonStep(z, self.push(trained, z), own)

    # --- what a change does not go together with

    def another(self, trained: Trained, batches: Source) -> StructuredStructure:
        """Refused."""
        raise UnsupportedError("a structured posterior of the data it was fitted to, to condition",
                               "one that a what-if changed", "Condition first; or take new points in with add(x, y).")

    merged = another

    def part(self, trained: Trained, index: Tensor) -> ChangedStructure:
        """Refused."""
        raise UnsupportedError("a structured posterior of the data it was fitted to, to take a part of",
                               "one that a what-if changed", "Take the part first, and ask what if afterwards.")

    def state(self, trained: Trained, include_data: bool) -> dict[str, Any]:
        """Refused."""
        require_unchanged(trained, self.base)
        return {}

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move the sums, the rows and the points."""
        points = self.points.settled if isinstance(self.points, MovedPoints) else self.points
        self.inner = self.inner.copied()  # the posterior that was asked keeps its own
        self.inner.to(device, dtype)
        self.base = self.inner.points
        self.still, self.points = self.still.to(device, dtype), points.to(device, dtype)
        self._targets = self._targets.to(self.still.targets)
        self.index = self.index.to(device)
        self.rows = None if self.rows is None else self.rows.to(dtype, device)
        for one in self.more:
            one.to(device, dtype)
        self._found = None


def rows_of(trained: Trained, structure: Any, index: Tensor) -> Rows:
    """Rows of J at a few training points, ascending, from another pass; kept.

    Raises
    ------
    MemoryBudgetError
        If they are more than a few.
    DataError
        If the data cannot be read again.
    """
    parts: list[Rows] = []
    for rows in structure.rows_at(trained, index):
        if not parts:
            require_memory(rows.nbytes * len(index) // rows.num_examples, rows.f.device,
                           f"the rows of {len(index):,} training points", "Ask about fewer points at a time.",
                           trained.settings.memory_budget)  # fmt: skip
        parts.append(rows)
    if not parts:
        raise DataError(f"{len(index):,} training points", "none", "Pass the data of the fit.")
    return Rows.concatenate(parts)
