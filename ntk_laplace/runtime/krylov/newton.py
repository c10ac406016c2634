"""Newton's method for many objectives at once, from products with their Hessians, which need not be positive.

Each row is a problem of its own; all share the products. Quasi-Newton steps go first: each takes one gradient, where
the direction of a Newton step takes many products. A direction is that of conjugate gradients, preconditioned by what
the quasi-Newton steps have shown of the Hessian, ended where the residual is small beside the gradient, or at the end
of a trust region, to which it goes where the curvature is not positive (Steihaug, 1983). A line search halves it until
the objective falls.

Where weights may be rotated against each other, a minimum is not isolated, and a small part of the objective, such as
its linear term, may go on falling along the valley. Shifted Newton steps go to the valley's ground; a descent that
changes nothing else there has converged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.krylov.quasi_newton import Descending, Inverses, descend, falls, is_level, outcomes


class Local(Protocol):
    """Derivatives of some of the objectives at points (S, P)."""

    @property
    def gradients(self) -> Tensor:
        """(S, P)."""

    @property
    def products(self) -> Callable[[Tensor], Tensor]:
        """Hessians times vectors, (S, P) to (S, P)."""


class Objectives(Descending, Protocol):
    """The same with second derivatives."""

    def local(self, at: Tensor, rows: Tensor) -> Local:
        """Derivatives."""

    @property
    def renewal(self) -> int | None:
        """Gradients that take as long as a new preconditioner, at least; None where there is none."""

    def renewed(self, at: Tensor, row: int) -> Objectives:
        """The same, preconditioned for one of them at a point (P,)."""


@dataclass(frozen=True)
class Minima:
    """Where the descents have ended.

    Attributes
    ----------
    at : Tensor, (S, P)
    values : Tensor, (S,)
    converged : Tensor of bool, (S,)
        Whether a Newton step gains less than the rounding of the objective, at positive curvature along the step, and
        not because the trust region ended it; or leads along a valley, where the outcome does not change.
    falling : Tensor of bool, (S,)
        Whether the steps ended at their limit. A descent that is neither falling nor converged found no step that
        lowers the objective.
    steps : Tensor, (S,)
        Number of steps, quasi-Newton and Newton.
    """

    at: Tensor
    values: Tensor
    converged: Tensor
    falling: Tensor
    steps: Tensor

    @classmethod
    def joined(cls, parts: Sequence[Minima]) -> Minima:
        """Those of several calls."""
        each = zip(*((one.at, one.values, one.converged, one.falling, one.steps) for one in parts), strict=True)
        return cls(*(torch.cat(column) for column in each))


def minimize(objectives: Objectives, start: Tensor, eps: float, room: int = tuning.DESCENT_BYTES) -> Minima:
    """Minima of several objectives, each from its own start.

    Parameters
    ----------
    objectives : Objectives
    start : Tensor, (S, P)
    eps : float
        Relative rounding of the objectives.
    room : int
        Bytes for what quasi-Newton steps remember.
    """
    flags = torch.zeros(len(start), dtype=torch.bool, device=start.device)
    found = Minima(start.clone(), start.new_full(flags.shape, torch.inf), flags, flags.clone(), flags.long())
    far = _through_valleys(objectives, found, torch.arange(len(start), device=start.device), eps, room,
                           objectives.renewal)
    for row in far.tolist():
        _go_far(objectives, found, row, eps, room)
    return found


def _go_far(objectives: Objectives, found: Minima, row: int, eps: float, room: int) -> None:
    """Replace what is found for one row, whose preconditioner is renewed after each stretch of its way.

    Where stretches fall no more, or there have been many, Newton steps follow.
    """
    stretch, taken, rows = objectives.renewal, 0, torch.tensor([row], device=found.at.device)
    assert stretch is not None
    while True:
        own, before = objectives.renewed(found.at[row], row), float(found.values[row])
        if len(_through_valleys(own, found, rows, eps, room, stretch)) == 0:
            return
        taken += stretch
        falls_still = before - float(found.values[row]) > tuning.STRETCH_FALL or taken < tuning.QUASI_NEWTON_STEPS
        if not falls_still or taken >= tuning.MOST_QUASI_NEWTON_STEPS:
            _through_valleys(objectives.renewed(found.at[row], row), found, rows, eps, room, 0)
            return


def _through_valleys(
    objectives: Objectives, found: Minima, rows: Tensor, eps: float, room: int, stretch: int | None
) -> Tensor:
    """Replace what is found for some rows; those that have not come to an end in a stretch of gradients, (m,)."""
    far = [rows[:0]]
    for patience in (*tuning.VALLEY_STEPS, -1):  # where a valley was none, or goes down steeper further on
        rows, going = _go_down(objectives, found, rows, eps, room, patience, stretch)
        far.append(going)
        if len(rows) == 0:
            break
    return torch.cat(far)


def _go_down(
    objectives: Objectives, found: Minima, rows: Tensor, eps: float, room: int, patience: int, stretch: int | None
) -> tuple[Tensor, Tensor]:
    """Replace what is found for some of the rows.

    Return the rows that have not converged in a valley, and those that have not come to an end in a stretch of
    gradients. Without one, or after one of 0, Newton steps follow for all.
    """
    at, converged = found.at, found.converged
    descent = descend(objectives, at, rows, eps, room, patience,
                      tuning.MOST_QUASI_NEWTON_STEPS if stretch is None else stretch)
    values, taken, soft, inverses = descent.values, descent.steps, descent.soft, descent.inverses
    far = descent.going if stretch else descent.going[:0]
    inverses.sharpen()
    valleys = _Valleys(soft, torch.full_like(values, torch.nan), patience > 0)
    going, radius, products = inverses.rows.clone(), torch.full_like(values, torch.inf), 0
    going = going[inverses.keep(~torch.isin(going, far))]
    for _ in range(tuning.NEWTON_STEPS if len(going) else 0):
        local, rounding = objectives.local(at[going], going), eps * (1.0 + values[going].abs())
        shift = (tuning.VALLEY_SHIFT * soft[going]).unsqueeze(1) * objectives.precision
        step = _directions(local, objectives, inverses, radius[going], rounding, shift)
        del local  # with its graphs
        level = is_level(step.bend, step.square, -step.slope, values[going], eps)
        ground, new, none = valleys.seen(objectives, at[going], step, level, 16.0 * rounding, going)
        step = replace(step, flat=step.flat | ground | new)
        size = _searched(objectives, at[going], step, going, values, eps)
        taking = ((size > 0) & ~ground & ~new).unsqueeze(1)  # a direction that is refused may be NaN
        at[going] += torch.where(taking, size.unsqueeze(1) * step.direction, 0.0)
        radius[going] = step.next_radius(size)
        taken[going] += 1
        # with the shift a saddle bends upward too
        convex = ~soft[going] | (step.bend >= -tuning.VALLEY_CONCAVE * step.square)
        converged[going] = step.flat & step.positive & convex & ~step.ends & ~step.broken & ~new
        inverses.forget(step.broken)
        more = step.broken | new | (~step.flat & (size > 0))
        going, products = going[inverses.keep(more & ~none)], products + step.products
        if len(going) == 0 or products > tuning.DESCENT_PRODUCTS:
            break
    found.values[rows] = values[rows]
    found.falling[rows] = False
    found.falling[going] = True
    found.steps.add_(taken)
    return (soft & ~converged).nonzero().squeeze(1), far


class _Valleys:
    """Which descents (S,) are in a valley, and how much their last steps have changed the outcome, squared.

    Parameters
    ----------
    soft : Tensor of bool, (S,)
        Those in one, which further steps add to.
    changed : Tensor, (S,)
        Of these steps, which replace it; NaN before.
    told : bool
        Whether valleys are told from the rest.
    """

    def __init__(self, soft: Tensor, changed: Tensor, told: bool) -> None:
        self._soft, self._changed, self._told = soft, changed, told

    def seen(
        self, objectives: Objectives, at: Tensor, step: _Directions, level: Tensor, least: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Which steps of some rows are on the ground, in a valley as of now, and in none, three masks.

        On the ground the outcome changes by less than `least`, squared. A step into a valley is solved again, with the
        shift. Where shifted steps do not settle the outcome, it was no valley.
        """
        along = level & (~step.flat | step.ends) & self._told
        before, changed = self._changed[rows], outcomes(objectives, at, step.direction, along)
        soft, self._changed[rows] = self._soft[rows], changed
        ground = soft & step.positive & ~step.ends & ~step.broken & (changed <= least)
        none = soft & ~ground & (changed > tuning.VALLEY_SETTLES * before)
        new = ~soft & (changed <= tuning.VALLEY_OUTCOME * step.square)
        self._soft[rows] |= new
        return ground, new, none


@dataclass(frozen=True)
class _Directions:
    """Directions (S, P) of a step, their slopes and lengths in the norm of M, the inverse of the preconditioner, (S,).

    `flat` says that a step gains less than rounding, `positive` that no curvature along the search was negative, `ends`
    that the trust region ended it, `broken` that an inverse that is not positive definite did. `bend` is dᵀHd, `square`
    dᵀP0d.
    """

    direction: Tensor
    slope: Tensor
    length: Tensor
    bend: Tensor
    square: Tensor
    flat: Tensor
    positive: Tensor
    ends: Tensor
    broken: Tensor
    radius: Tensor
    products: int

    def next_radius(self, size: Tensor) -> Tensor:
        """Of the trust region: the length of a step that was halved, twice that of a whole one that reached its end."""
        whole = torch.where(self.ends, 2.0 * self.length, self.radius)
        return torch.where(size < 1.0, size * self.length, whole)


def _searched(
    objectives: Objectives, at: Tensor, found: _Directions, rows: Tensor, values: Tensor, eps: float
) -> Tensor:
    """Sizes of the steps, (S,): 1, halved until the objective falls; 1 where a step is flat, 0 where a halved one is.

    `values` of the objectives are replaced in place.
    """
    size, left = torch.ones_like(found.slope), (~found.flat).nonzero().squeeze(1)
    for _ in range(tuning.HALVINGS):
        if len(left) == 0:
            return size
        own, before = rows[left], values[rows[left]]
        reached, _ = objectives.values_and_gradients(at[left] + size[left].unsqueeze(1) * found.direction[left], own)
        good = falls(reached, before, -size[left] * found.slope[left], eps)
        values[own[good]] = reached[good]
        left = left[~good]
        size[left] /= 2.0
        # a step that gains less than rounding may only seem to fall
        flat = -size[left] * found.slope[left] <= 8.0 * eps * (1.0 + values[rows[left]].abs())
        size[left[flat]], left = 0.0, left[~flat]
    size[left] = 0.0
    return size


def _directions(
    local: Local, objectives: Objectives, inverses: Inverses, radius: Tensor, rounding: Tensor, shift: Tensor
) -> _Directions:
    """Inexact Newton directions by Steihaug's conjugate gradients, preconditioned by `inverses`.

    A diagonal `shift` (S, P) is added to the Hessian.

    The residual is solved to the share min(0.1, λ) of the gradient, λ² = gᵀKg in nats, both in the norm of K, so that
    convergence is quadratic; or to where what is left gains less than rounding. K is that of the objectives: where
    they have kinks, the quasi-Newton steps make any gradient small in the norm of their own inverse.
    """
    gradient = local.gradients
    residual, direction = gradient.clone(), torch.zeros_like(gradient)
    raised = objectives.precondition(residual)
    z = inverses.times(residual, raised)
    size, left = (residual * z).sum(1).clamp_min(0.0), (residual * raised).sum(1)
    radius = torch.minimum(radius, (2.0 * size.sqrt()).clamp_min(1.0)) if bool(radius.isinf().all()) else radius
    goal = torch.maximum(left * left.clamp(max=0.01), 1e-6 * rounding)
    search, image, seen = -z, -residual, torch.zeros_like(z)  # p, M p and M d
    flags = torch.zeros_like(size, dtype=torch.bool)
    broken = (left > goal) & (size <= 0)
    going, negative, ends, used = (left > goal) & (size > 0), flags, flags, 0
    while bool(going.any()) and used < tuning.NEWTON_PRODUCTS:
        product, used = local.products(torch.where(going.unsqueeze(1), search, 0.0)), used + 1
        product = product + shift * search
        curvature, long = (search * product).sum(1), (search * image).sum(1)
        bends = curvature > tuning.LEAST_CURVATURE * long
        step = torch.where(bends, size / torch.where(bends, curvature, 1.0), torch.inf)
        along, own = (search * seen).sum(1), (direction * seen).sum(1)
        most = (-along + (along.square() + long * (radius.square() - own).clamp_min(0.0)).sqrt()) / long
        negative, ends = negative | (going & ~bends), ends | (going & (step >= most))
        step = torch.where(going, torch.minimum(step, most), 0.0).unsqueeze(1)
        direction, residual, seen = direction + step * search, residual + step * product, seen + step * image
        raised = objectives.precondition(residual)
        z = inverses.times(residual, raised)
        before, size = size, torch.where(going, (residual * z).sum(1), size)
        going = going & ~ends & ((residual * raised).sum(1) > goal)
        broken, going = broken | (going & (size <= 0)), going & (size > 0)
        ratio = torch.where(going, size / before, 0.0).unsqueeze(1)
        search, image = -z + ratio * search, -residual + ratio * image
    slope = (gradient * direction).sum(1)
    length = (direction * seen).sum(1).clamp_min(0.0).sqrt()
    square = (objectives.precision * direction.square()).sum(1)
    bend = (residual * direction).sum(1) - slope - (shift * direction.square()).sum(1)
    return _Directions(direction, slope, length, bend, square, -slope <= 16.0 * rounding, ~negative, ends, broken,
                       radius, used)
