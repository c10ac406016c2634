"""Preconditioned BFGS for many objectives at once, which share each evaluation of values and gradients.

All steps lie in the span of the vectors K g so far, with K the preconditioner and g the gradients. With rows of Q a
basis of this span, orthonormal in the inner product of K⁻¹, the inverse is

    H = K + Qᵀ(T - I)Q,

and a pair of a step s = Qᵀσ and a change y of the gradient updates T as BFGS does for σ and Qy (Gill and Leonard,
2001). A step takes one vector of memory, and two products with Q. Where memory ends, Q is turned to eigenvectors of T:
those with the eigenvalues furthest from 1 stay, beside the direction of the present gradient.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.linalg import symmetric_eigen

__all__ = ["Descending", "Inverses", "descend", "falls", "remembered"]

_OUTSIDE = 1e-3  # share of gᵀKg outside the span from which g adds to it; its root divides the errors of Q so far


class Descending(Protocol):
    """Functions of (P,) numbers; `rows` says which of them the rows of an argument belong to."""

    def values_and_gradients(self, at: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(S,), infinite where they are not defined, and (S, P)."""

    def precondition(self, vectors: Tensor) -> Tensor:
        """K v for vectors (m, P), K positive definite and the same for all."""


def falls(reached: Tensor, before: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Whether values are below those before a step by a share of its expected gain, up to rounding, (S,) of bool."""
    slack = 8.0 * eps * (1.0 + before.abs())
    return torch.isfinite(reached) & (reached <= before - 1e-4 * gain + slack)


def descend(objectives: Descending, start: Tensor, eps: float, room: int) -> tuple[Tensor, Tensor, Tensor, Inverses]:
    """Go down from each start until a step, shortened where the objective did not fall, gains less than rounding.

    Parameters
    ----------
    objectives : Descending
    start : Tensor, (S, P)
    eps : float
        Relative rounding of the objectives.
    room : int
        Bytes for vectors that are remembered; a few are in any case.

    Returns
    -------
    at : Tensor, (S, P)
    values : Tensor, (S,)
    steps : Tensor of int, (S,)
        That were taken.
    inverses : Inverses
        At the ends.
    """
    rows = torch.arange(len(start), device=start.device)
    ends, steps = start.clone(), torch.zeros_like(rows)
    at, (values, gradients) = start, objectives.values_and_gradients(start, rows)
    reached, size, raised = values.clone(), torch.ones_like(values), objectives.precondition(gradients)
    direction, inverses = -raised, Inverses(gradients, raised, room)
    for _ in range(tuning.QUASI_NEWTON_STEPS):
        gain = -(gradients * direction).sum(1)
        going = size * gain > 16.0 * eps * (1.0 + values.abs())
        if not bool(going.all()):
            ends[rows], reached[rows] = at, values
            order = inverses.keep(going)
            rows, at, values, gradients, raised, direction, size, gain = (
                one[order] for one in (rows, at, values, gradients, raised, direction, size, gain))
        if len(rows) == 0:
            break
        step = size.unsqueeze(1) * direction
        found, there = objectives.values_and_gradients(at + step, rows)
        good = falls(found, values, size * gain, eps)
        own, shorter = good.unsqueeze(1), _shorter(size, found - values, size * gain)
        at, values, gradients = (
            torch.where(one, new, old)
            for one, new, old in ((own, at + step, at), (good, found, values), (own, there, gradients)))
        if bool(good.any()):
            raised = objectives.precondition(gradients)
            direction = inverses.directions(torch.where(good, size, 0.0), gradients, raised)
        size = torch.where(good, 1.0, shorter)
        steps[rows] += good
    ends[rows], reached[rows] = at, values
    return ends, reached, steps, inverses


def _shorter(size: Tensor, rise: Tensor, gain: Tensor) -> Tensor:
    """The size where the parabola through both values and the slope is least, from a tenth to half of it, (S,)."""
    least = torch.where(torch.isfinite(rise), 0.5 * gain / (rise + gain), 0.0)
    return size * least.clamp(0.1, 0.5)


class Inverses:
    """H of each of S rows, as far as the steps of its descent have shown it.

    Rows that a descent has left stay, behind those that go on.

    Parameters
    ----------
    gradients, raised : Tensor, (S, P)
        g at the starts, and K g.
    room : int
        Bytes for the vectors of all rows; a few are kept in any case.

    Attributes
    ----------
    rows : Tensor of int, (S,)
        Which row is at each place.
    """

    def __init__(self, gradients: Tensor, raised: Tensor, room: int) -> None:
        count, size = gradients.shape
        self._most = min(size, remembered(gradients.nbytes, room))
        self.rows = torch.arange(count, device=gradients.device)
        self._counts = torch.ones_like(self.rows)
        self._basis = gradients.new_empty(count, self._most, size)  # Q; rows that are not used yet are zero up to _used
        self._reduced = torch.eye(self._most, dtype=gradients.dtype, device=gradients.device).repeat(count, 1, 1)  # T
        self._along = gradients.new_zeros(count, self._most)  # Q g
        self._along[:, 0] = (gradients * raised).sum(1).clamp_min(0.0).sqrt()
        self._ahead, norm = -self._along, self._along[:, :1]  # the direction is Qᵀ times it
        self._basis[:, 0], self._used = raised / torch.where(norm > 0, norm, 1.0), 1

    def keep(self, going: Tensor) -> Tensor:
        """Move those of the first rows that go on, a mask, to the front: their places before, in the new order."""
        count = int(going.sum())
        gaps, tail = (~going[:count]).nonzero().squeeze(1), count + going[count:].nonzero().squeeze(1)
        order = torch.arange(count, device=going.device).index_copy(0, gaps, tail)
        new, old = torch.cat([gaps, tail]), torch.cat([tail, gaps])
        for one in (self.rows, self._counts, self._basis[:, : self._used], self._reduced, self._along, self._ahead):
            one[new] = one[old]
        return order

    def directions(self, sizes: Tensor, gradients: Tensor, raised: Tensor) -> Tensor:
        """-H g, (S, P), of the first rows, from g and K g after steps of sizes (S,) along the directions before.

        A pair whose sᵀy is not positive is left out. A size of 0 is no step.
        """
        n, used = len(sizes), min(int(self._counts[: len(sizes)].max()) + 1, self._most)
        self._basis[:, self._used : used] = 0.0
        self._used = max(self._used, used)
        basis, reduced, counts = self._basis[:n, :used], self._reduced[:n, :used, :used], self._counts[:n]
        along, square = (gradients.unsqueeze(1) @ basis.mT).squeeze(1), (gradients * raised).sum(1)
        outside = square - along.square().sum(1)
        new = ((outside > _OUTSIDE * square) & (counts < self._most) & (sizes > 0)).nonzero().squeeze(1)
        place, length = counts[new], outside[new].sqrt().unsqueeze(1)
        along[new, place] = length.squeeze(1)
        _update(reduced, sizes.unsqueeze(1) * self._ahead[:n, :used], along - self._along[:n, :used])
        ahead = -(along.unsqueeze(1) @ reduced).squeeze(1)
        found, seen = (torch.stack([ahead, along], 1) @ basis).unbind(1)  # without the new vectors, which are zero yet
        fresh = (raised[new] - seen[new]) / length
        basis[new, place] = fresh
        found = found.index_add(0, new, ahead[new, place].unsqueeze(1) * fresh)
        self._along[:n, :used], self._ahead[:n, :used] = along, ahead
        counts[new] += 1
        if self._most < basis.shape[2]:
            for row in (counts == self._most).nonzero().squeeze(1).tolist():
                found[row] = self._shortened(row)
        return found

    def _shortened(self, row: int) -> Tensor:
        """Forget about half of the vectors of one row: the direction now, (P,)."""
        values, vectors = symmetric_eigen(self._reduced[row])
        kept = values.clamp_min(torch.finfo(values.dtype).tiny).log().abs().topk(self._most // 2).indices
        turn, values = vectors[:, kept].T, values[kept]
        along = turn @ self._along[row]
        rest = self._along[row] - along @ turn
        length = rest.norm()
        turn = torch.cat([turn, (rest / torch.where(length > 0, length, 1.0)).unsqueeze(0)])
        count = len(turn)
        self._basis[row, :count] = turn @ self._basis[row]
        self._basis[row, count:] = self._along[row] = self._ahead[row] = 0.0
        self._reduced[row] = torch.diag(torch.cat([values, values.new_ones(self._most - len(values))]))
        self._along[row, :count] = torch.cat([along, length.unsqueeze(0)])
        self._ahead[row] = -self._reduced[row] @ self._along[row]
        self._counts[row] = count
        return self._ahead[row, :count] @ self._basis[row, :count]

    def times(self, vectors: Tensor, raised: Tensor) -> Tensor:
        """H v, (S, P), of the first rows, from v and K v."""
        n, used = len(vectors), self._used
        basis = self._basis[:n, :used]
        along = vectors.unsqueeze(1) @ basis.mT
        return raised + ((along @ self._reduced[:n, :used, :used] - along) @ basis).squeeze(1)


def remembered(nbytes: int, room: int) -> int:
    """How many vectors of each row a descent remembers; one of all rows has `nbytes`."""
    return max(tuning.FEWEST_VECTORS, min(room // max(1, nbytes), tuning.MOST_VECTORS))


def _update(inverse: Tensor, steps: Tensor, changes: Tensor) -> None:
    """The BFGS update of inverses (S, n, n), in place, by pairs (S, n) whose product is positive."""
    bend, image = (steps * changes).sum(1, keepdim=True), (inverse @ changes.unsqueeze(2)).squeeze(2)
    bends = bend > tuning.LEAST_CURVATURE * changes.square().sum(1, keepdim=True)
    share = torch.where(bends, torch.where(bends, bend, 1.0).reciprocal(), 0.0)
    other = share * (0.5 * (1.0 + share * (changes * image).sum(1, keepdim=True)) * steps - image)
    inverse.addcmul_(other.unsqueeze(2), steps.unsqueeze(1)).addcmul_(steps.unsqueeze(2), other.unsqueeze(1))
