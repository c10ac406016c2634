"""Preconditioned BFGS for many objectives at once, which share each evaluation of values and gradients.

All steps lie in the span of the vectors K g so far, with K the preconditioner and g the gradients. With rows of Q a
basis of this span, orthonormal in the inner product of K⁻¹, the inverse is

    H = K + Qᵀ(T - I)Q,

and a pair of a step s = Qᵀσ and a change y of the gradient updates T as BFGS does for σ and Qy (Gill and Leonard,
2001). A step takes one vector of memory, and two products with Q. Where memory ends, Q is turned to eigenvectors of T:
those with the eigenvalues furthest from 1 stay, beside the direction of the present gradient.

Minima need not be isolated: where layers meet without an activation, and in attention, weights may be rotated against
each other. A descent may end where its steps begin to go along such a valley.

Where Q does not fit in a cache, its products wait for memory, and take much of the time of a descent. Then Q is in
single precision until the descent ends, and so are products with K. Rounding changes the steps, and no optimum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.linalg import symmetric_eigen

# share of gᵀKg outside the span from which g adds to it, in double and in single precision: its root divides the errors
# of Q so far. With these Q stays orthonormal to 1e-6 and to .1 (1e-4 in the median) over 128 vectors of what-ifs
_OUTSIDE, _OUTSIDE_SINGLE = 1e-3, 0.03
# least eigenvalue of T after a descent in single precision: with it H is positive definite
_LEAST = 0.05


class Descending(Protocol):
    """Functions of (P,) numbers; `rows` says which of them the rows of an argument belong to."""

    @property
    def precision(self) -> Tensor:
        """(P,), positive: a small share of it is a small curvature."""

    def values_and_gradients(self, at: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(S,), infinite where they are not defined, and (S, P)."""

    def changes(self, at: Tensor, directions: Tensor) -> Tensor:
        """How much the outcome changes along directions (S, P), in roots of the objectives' unit, (S,)."""

    def precondition(self, vectors: Tensor, rounded: bool = False) -> Tensor:
        """K v for vectors (m, P), K positive definite and the same for all; `rounded` allows single precision."""


def falls(reached: Tensor, before: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Whether values are below those before a step by a share of its expected gain, up to rounding, (S,) of bool."""
    slack = 8.0 * eps * (1.0 + before.abs())
    return torch.isfinite(reached) & (reached <= before - 1e-4 * gain + slack)


def is_level(bend: Tensor, square: Tensor, gain: Tensor, values: Tensor, eps: float) -> Tensor:
    """Whether the objective F neither bends nor falls much along steps s, (S,), from sᵀHs, sᵀP0s, gains and F."""
    return (bend.abs() <= tuning.VALLEY * square) & (
        gain <= max(tuning.VALLEY_GAIN, eps**0.5) * (1.0 + values.abs()))


def outcomes(objectives: Descending, at: Tensor, steps: Tensor, which: Tensor) -> Tensor:
    """Squares of how much the outcome changes along steps (S, P) of a mask (S,); NaN for the others."""
    found, some = torch.full_like(steps[:, 0], torch.nan), which.nonzero().squeeze(1)
    if len(some):
        found[some] = objectives.changes(at[some], steps[some]).square()
    return found


@dataclass(frozen=True)
class Descent:
    """How some of S rows have gone down.

    Attributes
    ----------
    values : Tensor, (S,)
        Infinite for the others.
    steps : Tensor of int, (S,)
        That were taken.
    soft : Tensor of bool, (S,)
        Whether the descent has ended in a valley.
    going : Tensor of int
        The rows that have not come to an end.
    inverses : Inverses
        At the ends.
    """

    values: Tensor
    steps: Tensor
    soft: Tensor
    going: Tensor
    inverses: Inverses


def descend(
    objectives: Descending, at: Tensor, rows: Tensor, eps: float, room: int, patience: int,
    stretch: int = tuning.MOST_QUASI_NEWTON_STEPS,
) -> Descent:
    """Go down until a step, shortened where the objective did not fall, gains less than rounding.

    Parameters
    ----------
    objectives : Descending
    at : Tensor, (S, P)
        Starts, which the ends replace.
    rows : Tensor of int
        Which of them go down.
    eps : float
        Relative rounding of the objectives.
    room : int
        Bytes for vectors that are remembered; a few are in any case.
    patience : int
        Steps in a row along what may be a valley, after which the descent ends there; -1 for never.
    stretch : int
        Gradients after which it ends.
    """
    reached, soft = at.new_full((len(at),), torch.inf), torch.zeros(len(at), dtype=torch.bool, device=at.device)
    here, steps = at[rows], torch.zeros_like(soft, dtype=torch.long)
    values, gradients = objectives.values_and_gradients(here, rows)
    size, along = torch.ones_like(values), torch.zeros_like(rows)
    most, dtype = remembered(len(rows), at.shape[1], at.dtype, room)
    rounded = dtype != at.dtype
    raised = objectives.precondition(gradients, rounded)
    direction, inverses = -raised, Inverses(gradients, raised, rows, most, dtype)
    before = values
    for count in range(stretch):
        gain = -(gradients * direction).sum(1)
        valley = along == patience
        going = (size * gain > 16.0 * eps * (1.0 + values.abs())) & ~valley
        if count % tuning.STRETCH == 0:
            going &= (before - values > tuning.STRETCH_FALL) | (count < tuning.QUASI_NEWTON_STEPS)
            before = values
        if not bool(going.all()):
            at[rows], reached[rows], soft[rows] = here, values, valley
            order = inverses.keep(going)
            rows, here, values, before, gradients, raised, direction, size, gain, along = (
                one[order] for one in (rows, here, values, before, gradients, raised, direction, size, gain, along))
        if len(rows) == 0:
            break
        step = size.unsqueeze(1) * direction
        found, there = objectives.values_and_gradients(here + step, rows)
        good = falls(found, values, size * gain, eps)
        square = (objectives.precision * step.square()).sum(1)
        level = is_level((step * (there - gradients)).sum(1), square, size * gain, values, eps)
        along = torch.where(good, torch.where(level, along + 1, 0), along)
        along[outcomes(objectives, here, step, along == patience) > tuning.VALLEY_OUTCOME * square] = 0
        own, shorter = good.unsqueeze(1), _shorter(size, found - values, size * gain)
        here, values, gradients = (
            torch.where(one, new, old)
            for one, new, old in ((own, here + step, here), (good, found, values), (own, there, gradients)))
        if bool(good.any()):
            raised = objectives.precondition(gradients, rounded)
            direction = inverses.directions(torch.where(good, size, 0.0), gradients, raised)
        size = torch.where(good, 1.0, shorter)
        steps[rows] += good
    at[rows], reached[rows] = here, values
    return Descent(reached, steps, soft, rows, inverses)


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
    rows : Tensor of int, (S,)
        Which rows go down.
    most : int
        Vectors of each row.
    dtype : torch.dtype
        Of Q; until `sharpen`, if it is single.

    Attributes
    ----------
    rows : Tensor of int, (S,)
        Which row is at each place.
    dtype : torch.dtype
    """

    def __init__(self, gradients: Tensor, raised: Tensor, rows: Tensor, most: int, dtype: torch.dtype) -> None:
        self._most, (count, size) = most, gradients.shape
        self.dtype, self._outside = dtype, _OUTSIDE_SINGLE if dtype == torch.float32 else _OUTSIDE
        self.rows = rows.clone()
        self._counts = torch.ones_like(self.rows)
        # Q; rows that are not used yet are zero up to _used
        self._basis = gradients.new_empty(count, self._most, size, dtype=dtype)
        self._reduced = torch.eye(self._most, dtype=gradients.dtype, device=gradients.device).repeat(count, 1, 1)  # T
        self._along = gradients.new_zeros(count, self._most)  # Q g
        self._along[:, 0] = (gradients * raised).sum(1).clamp_min(0.0).sqrt()
        self._ahead, norm = -self._along, self._along[:, :1]  # the direction is Qᵀ times it
        self._basis[:, 0], self._used = (raised / torch.where(norm > 0, norm, 1.0)).to(dtype), 1

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
        along, square = _coordinates(gradients, basis), (gradients * raised).sum(1)
        outside = square - along.square().sum(1)
        new = ((outside > self._outside * square) & (counts < self._most)).nonzero().squeeze(1)
        place, length = counts[new], outside[new].sqrt().unsqueeze(1)
        along[new, place] = length.squeeze(1)
        _update(reduced, sizes.unsqueeze(1) * self._ahead[:n, :used], along - self._along[:n, :used])
        ahead = -(along.unsqueeze(1) @ reduced).squeeze(1)
        # without the new vectors, which are zero yet
        found, seen = _spanned(torch.stack([ahead, along], 1), basis).unbind(1)
        fresh = (raised[new] - seen[new]) / length
        basis[new, place] = fresh.to(basis)
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
        self._basis[row, :count] = _spanned(turn, self._basis[row]).to(self._basis)
        self._basis[row, count:] = self._along[row] = self._ahead[row] = 0.0
        self._reduced[row] = torch.diag(torch.cat([values, values.new_ones(self._most - len(values))]))
        self._along[row, :count] = torch.cat([along, length.unsqueeze(0)])
        self._ahead[row] = -self._reduced[row] @ self._along[row]
        self._counts[row] = count
        return _spanned(self._ahead[row, :count], self._basis[row, :count])

    def sharpen(self) -> None:
        """Give Q the precision of T, and T no eigenvalue that the errors of Q could make negative in H.

        Products with H are those of one symmetric matrix then, as conjugate gradients need them.
        """
        if self.dtype == self._reduced.dtype:
            return
        self.dtype = self._reduced.dtype
        self._basis = self._basis[:, : self._used].to(self.dtype)
        self._raise(torch.arange(len(self.rows), device=self.rows.device), _LEAST)

    def forget(self, which: Tensor) -> None:
        """Forget curvatures above that of K for some of the first rows, a mask: then H is positive definite."""
        self._raise(which.nonzero().squeeze(1), 1.0)

    def _raise(self, rows: Tensor, least: float) -> None:
        """Raise the eigenvalues of T of some rows to a bound, where they are less."""
        reduced = self._reduced[:, : self._used, : self._used]
        eye = torch.eye(self._used, dtype=reduced.dtype, device=reduced.device)
        for row in rows[torch.linalg.cholesky_ex(reduced[rows] - least * eye)[1] != 0].tolist():
            values, vectors = symmetric_eigen(reduced[row])
            reduced[row] = vectors * values.clamp_min(least) @ vectors.T

    def times(self, vectors: Tensor, raised: Tensor) -> Tensor:
        """H v, (S, P), of the first rows, from v and K v."""
        n, used = len(vectors), self._used
        basis = self._basis[:n, :used]
        along = _coordinates(vectors, basis).unsqueeze(1)
        return raised + _spanned(along @ self._reduced[:n, :used, :used] - along, basis).squeeze(1)


def remembered(count: int, size: int, dtype: torch.dtype, room: int) -> tuple[int, torch.dtype]:
    """How many vectors (size,) each of `count` descents remembers, and in which type: single, where they are large.

    `dtype` is that of the objectives. All vectors take `room` bytes; a few are kept in any case.
    """
    for own in (dtype, torch.float32):
        one = count * size * own.itemsize
        most = min(size, max(tuning.FEWEST_VECTORS, min(room // one, tuning.MOST_VECTORS)))
        if most * one <= tuning.SINGLE_BYTES:
            break
    return most, own


def _coordinates(vectors: Tensor, basis: Tensor) -> Tensor:
    """Q v, (S, n), for v (S, P) and Q (S, n, P)."""
    return (vectors.to(basis).unsqueeze(1) @ basis.mT).squeeze(1).to(vectors)


def _spanned(coordinates: Tensor, basis: Tensor) -> Tensor:
    """Qᵀc, (S, m, P) or (P,), for c (S, m, n) or (n,)."""
    return (coordinates.to(basis) @ basis).to(coordinates)


def _update(inverse: Tensor, steps: Tensor, changes: Tensor) -> None:
    """The BFGS update of inverses (S, n, n), in place, by pairs (S, n) whose product is positive."""
    bend, image = (steps * changes).sum(1, keepdim=True), (inverse @ changes.unsqueeze(2)).squeeze(2)
    bends = bend > tuning.LEAST_CURVATURE * changes.square().sum(1, keepdim=True)
    share = torch.where(bends, torch.where(bends, bend, 1.0).reciprocal(), 0.0)
    other = share * (0.5 * (1.0 + share * (changes * image).sum(1, keepdim=True)) * steps - image)
    inverse.addcmul_(other.unsqueeze(2), steps.unsqueeze(1)).addcmul_(steps.unsqueeze(2), other.unsqueeze(1))
