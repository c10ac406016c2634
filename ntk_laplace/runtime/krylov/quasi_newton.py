"""Preconditioned L-BFGS for many objectives at once, which share each evaluation of values and gradients.

The compact form of the inverse (Byrd, Nocedal and Schnabel, 1994), with K the preconditioner, steps s and changes y of
the gradient in the columns of S and Y, R the upper triangle of SᵀY and D its diagonal:

    H = K + [S, KY] [[R⁻ᵀ(D + YᵀKY)R⁻¹, -R⁻ᵀ], [-R⁻¹, 0]] [S, KY]ᵀ.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ntk_laplace.runtime import tuning

__all__ = ["Descending", "Pairs", "descend", "falls"]


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


def descend(objectives: Descending, start: Tensor, eps: float, room: int) -> tuple[Tensor, Tensor, Tensor]:
    """Go down from each start until a step gains less than rounding, or is halved too often.

    Parameters
    ----------
    objectives : Descending
    start : Tensor, (S, P)
    eps : float
        Relative rounding of the objectives.
    room : int
        Bytes for steps that are remembered; a few are in any case.

    Returns
    -------
    at : Tensor, (S, P)
    values : Tensor, (S,)
    steps : Tensor of int, (S,)
        That were taken.
    """
    rows = torch.arange(len(start), device=start.device)
    ends, steps = start.clone(), torch.zeros_like(rows)
    at, (values, gradients) = start, objectives.values_and_gradients(start, rows)
    reached, size, pairs = values.clone(), torch.ones_like(values), Pairs(start, room)
    raised = objectives.precondition(gradients)
    direction = -raised
    for _ in range(tuning.QUASI_NEWTON_STEPS):
        gain = -(gradients * direction).sum(1)
        going = (gain > 16.0 * eps * (1.0 + values.abs())) & (size > 2.0**-tuning.HALVINGS)
        if not bool(going.all()):
            ends[rows], reached[rows] = at, values
            pairs.keep(going)
            rows, at, values, gradients, raised, direction, size, gain = (
                one[going] for one in (rows, at, values, gradients, raised, direction, size, gain))  # fmt: skip
        if len(rows) == 0:
            break
        step = size.unsqueeze(1) * direction
        found, there = objectives.values_and_gradients(at + step, rows)
        good = falls(found, values, size * gain, eps)
        own, shorter = good.unsqueeze(1), _shorter(size, found - values, size * gain)
        step, change = torch.where(own, step, 0.0), torch.where(own, there - gradients, 0.0)
        at, values, gradients = at + step, torch.where(good, found, values), gradients + change
        if bool(good.any()):
            before, raised = raised, objectives.precondition(gradients)
            ahead = -pairs.solved(step, change, raised - before, gradients, raised)
            direction = torch.where(own, ahead, direction)
        size = torch.where(good, 1.0, shorter)
        steps[rows] += good
    ends[rows], reached[rows] = at, values
    return ends, reached, steps


def _shorter(size: Tensor, rise: Tensor, gain: Tensor) -> Tensor:
    """The size where the parabola through both values and the slope is least, from a tenth to half of it, (S,)."""
    least = torch.where(torch.isfinite(rise), 0.5 * gain / (rise + gain), 0.0)
    return size * least.clamp(0.1, 0.5)


class Pairs:
    """The last pairs (s, y) of each row, and products with H. A place that is not used yet is zero, with 1 in R."""

    def __init__(self, start: Tensor, room: int) -> None:
        most = room // max(1, 2 * start.nbytes)
        self._most = min(max(most, tuning.FEWEST_PAIRS), tuning.MOST_PAIRS)
        count, size = start.shape
        self._counts = torch.zeros(count, dtype=torch.long, device=start.device)
        self._steps, self._images = (start.new_zeros(count, self._most, size) for _ in range(2))  # S and KY
        self._inner = start.new_zeros(count, self._most, self._most)  # YᵀKY
        self._upper = torch.eye(self._most, dtype=start.dtype, device=start.device).repeat(count, 1, 1)  # R

    def keep(self, rows: Tensor) -> None:
        """Those of some rows, a mask."""
        used = self._used()
        self._counts, self._upper, self._inner = self._counts[rows], self._upper[rows], self._inner[rows]
        for name in ("_steps", "_images"):
            old = getattr(self, name)
            new = old.new_zeros(len(self._upper), *old.shape[1:])
            new[:, :used] = old[rows, :used]
            setattr(self, name, new)

    def _used(self) -> int:
        return min(int(self._counts.max()), self._most) if len(self._counts) else 0

    def solved(self, step: Tensor, change: Tensor, image: Tensor, gradients: Tensor, raised: Tensor) -> Tensor:
        """H g, (S, P), from g and K g, after one more pair s, y with K y, which is left out if sᵀy is not positive."""
        bend = (step * change).sum(1)
        rows = (bend > tuning.LEAST_CURVATURE * (image * change).sum(1)).nonzero().squeeze(1)
        new = self._counts[rows] % self._most
        self._counts[rows] += 1
        used = self._used()
        self._steps[rows, new], self._images[rows, new] = step[rows], image[rows]
        right = torch.stack([change, gradients], 2)
        forward, back = self._steps[:, :used] @ right, self._images[:, :used] @ right  # (S, used, 2)
        self._upper[rows, new, :used], self._upper[rows, :used, new] = 0.0, forward[rows, :, 0]
        self._upper[rows, new, new] = bend[rows]
        self._inner[rows, new, :used] = self._inner[rows, :used, new] = back[rows, :, 0]
        upper, inner = self._upper[:, :used, :used], self._inner[:, :used, :used]
        forward, back = forward[..., 1:], back[..., 1:]
        place = old = torch.arange(used, device=step.device).expand(len(step), -1)
        if used == self._most:  # by age
            start = torch.where(self._counts >= used, self._counts, 0).unsqueeze(1)
            old, place = (old + start) % used, (old - start) % used
            upper, inner = (_reordered(_reordered(one, old).mT, old).mT for one in (upper, inner))
            forward, back = _reordered(forward, old), _reordered(back, old)
        t = torch.linalg.solve_triangular(upper, forward, upper=True)
        p = upper.diagonal(dim1=1, dim2=2).unsqueeze(2) * t + inner @ t - back
        p = torch.linalg.solve_triangular(upper.mT, p, upper=False)
        along = _reordered(p, place).mT @ self._steps[:, :used]
        against = _reordered(t, place).mT @ self._images[:, :used]
        return raised + (along - against).squeeze(1)


def _reordered(values: Tensor, index: Tensor) -> Tensor:
    """values[s, index[s]], of shape (S, n, m), with index (S, n)."""
    return values.gather(1, index.unsqueeze(2).expand(-1, -1, values.shape[2]))
