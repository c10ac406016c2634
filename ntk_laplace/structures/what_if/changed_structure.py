"""What-ifs in an approximate posterior: its precision is unchanged; the changed points are a low-rank update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.curvature import ParameterBlock, PosteriorPrecision
from ntk_laplace.errors import UnsupportedError
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.model.data import Joined, Source
from ntk_laplace.runtime.reduction import collective_property
from ntk_laplace.structures import FittedModel, FunctionSpaceStructure, LinearizedModel, Structure, StructureSpec
from ntk_laplace.structures.points import TrainingPoints, present_values, unmoved
from ntk_laplace.structures.structure import of_kind
from ntk_laplace.structures.what_if.changed_precision import ChangedPrecision


class MovedPoints(TrainingPoints):
    """Training points at the displaced weights of a what-if; a pass over the data computes their outputs on demand.

    Has the attributes of `TrainingPoints`; number, targets and weights need no pass.

    Parameters
    ----------
    unmoved_points : TrainingPoints
        The same points at the trained weights, at which the curvature is taken.
    outputs : callable
        Computes the outputs (N, C).
    """

    def __init__(self, unmoved_points: TrainingPoints, outputs: Callable[[], Tensor]) -> None:
        self._unmoved: TrainingPoints
        self._outputs: Callable[[], Tensor]
        vars(self).update(_unmoved=unmoved_points, _outputs=outputs, targets=unmoved_points.targets,
                          weights=unmoved_points.weights, expanded=unmoved_points.f, rounded=unmoved_points.precision,
                          drawn=unmoved_points.drawn)

    def __repr__(self) -> str:
        return f"MovedPoints({self._unmoved!r})"

    @collective_property
    def f(self) -> Tensor:
        """Outputs at the displaced weights, (N, C)."""
        with torch.no_grad():
            return self._outputs()

    @property
    def num_examples(self) -> int:
        return self._unmoved.num_examples

    @property
    def num_outputs(self) -> int:
        return self._unmoved.num_outputs

    @property
    def counts(self) -> Tensor:
        return self._unmoved.counts


@dataclass(eq=False)
class ChangedStructure(Structure):
    """An approximate posterior some of whose points have other weights or targets, or were added.

    Its curvature is the structure's, with the old terms of these points subtracted and the new ones added; only added
    if their leverage exceeds `max_leverage`. All changes are one joint Newton step from the trained weights, whether
    they were made together or in sequence. Made by `changed_structure`.

    Attributes
    ----------
    spec : StructureSpec
    inner : Structure
        The fitted structure.
    unmoved_points : TrainingPoints
        All points after the change, outputs at the trained weights.
    max_leverage : float
        Leverage above which no point is subtracted from the precision.
    added : tuple of FunctionSpaceStructure
        The added points, in their order.
    old_targets : Tensor
        Targets before the change; those of added points last.
    index : Tensor, (m,)
        Indices of the changed points, added ones last.
    rows : Jacobian or None
        Rows of J at these.
    points : TrainingPoints
        All points after the change, outputs at the displaced weights.
    """

    spec: StructureSpec
    inner: Structure
    unmoved_points: TrainingPoints
    max_leverage: float
    added: tuple[FunctionSpaceStructure, ...]
    old_targets: Tensor
    index: Tensor
    rows: Jacobian | None
    points: TrainingPoints
    _found: tuple[PosteriorPrecision, tuple[Tensor, ...]] | None = None
    base: TrainingPoints = field(init=False)

    def __post_init__(self) -> None:
        self.base = self.inner.points

    @property
    def points_to_change(self) -> TrainingPoints:
        """All changes are made at the trained weights."""
        return self.unmoved_points

    @property
    def source(self) -> Source | None:
        """The training data, those of added points last."""
        source = self.inner.source
        return source if source is None or not self.added else Joined([source, *(one.data for one in self.added)])

    @property
    def parameter_blocks(self) -> Sequence[ParameterBlock]:
        return self.inner.parameter_blocks

    def changed(
        self, model: LinearizedModel, points: TrainingPoints, added: Structure | None = None
    ) -> ChangedStructure:
        """The structure of other points, outputs at the trained weights, from the same sums."""
        together = self.added if added is None else (*self.added, of_kind(FunctionSpaceStructure, added))
        return changed_structure(model, self.inner, points, self.max_leverage, together)

    def stepped(self, model: LinearizedModel) -> tuple[Tensor, ChangedStructure]:
        """One joint Newton step: θ - θ* = H'⁻¹ J_Gᵀ(r' - r), (P,), and the structure with its points at θ."""
        with torch.no_grad():
            if self.rows is None:
                move = torch.zeros_like(model.theta)
            else:
                after, before = (points.residual(model.likelihood) for points in (self.unmoved_points, self.base))
                before = torch.cat([before, before.new_zeros(len(after) - len(before), after.shape[1])])
                pull = (after - before)[self.index].to(self.rows.f)
                move = self.posterior_precision(model).solve(self.rows.vjp(pull, model.network.shapes))
        return move, replace(self, points=MovedPoints(self.unmoved_points, partial(self._moved_outputs, model, move)))

    def _moved_outputs(self, model: LinearizedModel, move: Tensor) -> Tensor:
        """Outputs at the points, (N, C), of the linearized model at θ* + move."""
        return self.unmoved_points.f + self.jvp(model, move)

    # --- algebra

    def posterior_precision(self, model: LinearizedModel) -> PosteriorPrecision:
        """The factorized posterior precision at the current hyperparameters.

        Raises
        ------
        MemoryBudgetError
            If too many points changed.
        """
        modules = model.prior, model.likelihood
        if self._found is None or not unmoved(self._found[1], *modules):
            self._found = self._factored(replace(model, displacement=None)), present_values(*modules)
        return self._found[0]

    def _factored(self, model: LinearizedModel) -> PosteriorPrecision:
        base = self.inner.posterior_precision(model)
        where, root, signs = self._difference(model)
        if self.rows is None or len(where) == 0:
            return base
        return ChangedPrecision(base, self.rows.subset(where).weighted(root), signs, model.prior,
                                model.settings.memory_budget, self.max_leverage)

    def _difference(self, model: LinearizedModel) -> tuple[Tensor, Tensor, Tensor]:
        """Positions in `rows` with Λ' ≠ Λ, (m,), T (m, C, R) and D (m, R) with T D Tᵀ = Λ' - Λ there."""
        weights = self.unmoved_points.counts[self.index]
        old = self.index[self.index < len(self.base.f)]
        was = torch.zeros_like(weights)
        was[: len(old)] = self.base.counts[old]
        after = self._roots(model, self.unmoved_points)
        before = self._roots(model, replace(self.unmoved_points, targets=self.old_targets))
        if torch.equal(after, before):
            gain = weights - was
            root, signs = after * gain.abs().sqrt().view(-1, 1, 1), gain.sign().unsqueeze(1).expand(-1, after.shape[2])
        else:
            root = torch.cat([after * weights.sqrt().view(-1, 1, 1), before * was.sqrt().view(-1, 1, 1)], 2)
            signs = torch.ones_like(root[:, 0])
            signs[:, after.shape[2] :] = -1.0
        where = (root != 0).flatten(1).any(1).nonzero().squeeze(1)
        return where, root[where], signs[where]

    def _roots(self, model: LinearizedModel, points: TrainingPoints) -> Tensor:
        """S at the points that changed, each counted once, (m, C, R)."""
        with torch.no_grad():
            # sampled labels are drawn for all points at once
            return replace(points, weights=None).root(model.curvature_type, model.likelihood)[self.index].detach()

    # --- further passes

    def vjp(self, model: LinearizedModel, residual: Tensor) -> Tensor:
        """Jᵀr, (P,)."""
        total = self.inner.vjp(model, residual[: len(self.base.f)])
        start = len(self.base.f)
        for one in self.added:
            part = residual[start : start + one.points.num_examples]
            total += one.rows.vjp(part.to(one.rows.f), model.network.shapes)
            start += len(part)
        return total

    def jvp(self, model: LinearizedModel, vector: Tensor) -> Tensor:
        """J v, (N, C)."""
        named = model.network.unflatten(vector)
        return torch.cat([self.inner.jvp(model, vector), *(one.rows.jvp(named) for one in self.added)])

    def read_at(self, model: LinearizedModel, index: Tensor) -> Source | None:
        """What the structure before the change reads; several processes have no added points."""
        return self.inner.read_at(model, index[index < len(self.base.f)])

    def rows_at(self, model: LinearizedModel, index: Tensor) -> Iterator[Jacobian]:
        """Rows of J from another pass; those of added points are stored."""
        n, index = len(self.base.f), index.to(self.unmoved_points.f.device)
        old = index[index < n]
        if len(old):
            yield from self.inner.rows_at(model, old)
        added = index[index >= n] - n
        if len(added):
            yield Jacobian.concatenate([one.rows for one in self.added]).subset(added)

    def sensitivity(self, model: LinearizedModel, precision: Any) -> Tensor:
        """Refused: the derivative of the structure's sums in Λ is not available after a change."""
        raise UnsupportedError(
            "a posterior of the data it was fitted to, for the evidence's gradient in the likelihood's hyperparameters",
            f"structure={self.name!r} that a what-if changed",
            "Fit them first, and ask what if afterwards; or use an exact structure.",
        )

    def curve_sensitivity(self, model: LinearizedModel, precision: Any, z: Tensor) -> Tensor:
        """Refused, as in `sensitivity`."""
        return self.sensitivity(model, precision)

    # --- not supported after a change

    def refit_on(self, model: LinearizedModel, source: Source) -> Structure:
        """Refused."""
        raise self._no_condition()

    def merged(self, model: LinearizedModel, other: Structure) -> Structure:
        """Refused."""
        raise self._no_condition()

    def _no_condition(self) -> UnsupportedError:
        return UnsupportedError("a structured posterior of the data it was fitted to, to condition",
                                "one that a what-if changed", "Condition first; or take new points in with add(x, y).")

    def subset(self, model: LinearizedModel, index: Tensor) -> ChangedStructure:
        """Refused."""
        raise UnsupportedError("a structured posterior of the data it was fitted to, to take a part of",
                               "one that a what-if changed", "Take the part first, and ask what if afterwards.")

    def state(self, model: LinearizedModel, include_data: bool) -> dict[str, Any]:
        """Never asked for: `require_unchanged` refuses to save what a what-if changed."""
        raise NotImplementedError

    def to(self, device: torch.device, dtype: torch.dtype) -> ChangedStructure:
        unmoved_points = self.unmoved_points.to(device, dtype)
        return replace(self, inner=self.inner.to(device, dtype), unmoved_points=unmoved_points,
                       points=self.points.to(device, dtype), added=tuple(one.to(device, dtype) for one in self.added),
                       index=self.index.to(device), old_targets=self.old_targets.to(unmoved_points.targets),
                       rows=None if self.rows is None else self.rows.to(dtype, device), _found=None)


def changed_structure(
    model: LinearizedModel, inner: Structure, unmoved_points: TrainingPoints, max_leverage: float,
    added: Sequence[FunctionSpaceStructure] = (),
) -> ChangedStructure:
    """Read the rows of the points that changed; `model` is without displacement."""
    base, n = inner.points, inner.points.num_examples
    before = model.likelihood.in_form_of(base.targets, unmoved_points.targets)
    old_targets = torch.cat([before, unmoved_points.targets[n:]])
    now = unmoved_points.targets[:n]
    missing = now.isnan() & before.isnan()  # NaN is a missing target
    touched = torch.ones(len(unmoved_points.f), dtype=torch.bool, device=unmoved_points.f.device)
    touched[:n] = ((now != before) & ~missing).reshape(n, -1).any(1) | (unmoved_points.counts[:n] != base.counts)
    index = touched.nonzero().squeeze(1)
    old = index[index < n]
    parts = [rows_of(FittedModel(model, inner), old)] if len(old) else []
    parts += [one.rows for one in added]
    rows = Jacobian.concatenate(parts) if parts else None
    return ChangedStructure(inner.spec, inner, unmoved_points, max_leverage, tuple(added), old_targets, index, rows,
                            unmoved_points)


def rows_of(fitted: FittedModel, index: Tensor) -> Jacobian:
    """Rows of J at a few training points, ascending, from another pass, as `FittedModel.gathered_rows`."""
    return fitted.gathered_rows(index, f"the rows of {len(index):,} training points",
                                "Ask about fewer points at a time.")
