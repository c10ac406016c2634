"""Newton's method on the linearized model; the objective is convex if the likelihood is log-concave.

With f = f* + J(θ-θ*) at the training points and example weights w, the weights of the linearized model minimize

    -Σ w_n log p(y_n | f_n) + ½ (θ-θ*)ᵀP0(θ-θ*) + h·(f-f*) + sᵀ(θ-θ*),   gradient P0(θ-θ*) - Jᵀ(w r - h) + s.

The unchanged model has h = 0 and s = P0(θ*-μ0), the linear part of its prior. What-ifs keep the gradient that remained
after training fixed: h are the training residuals, s = 0, and θ* is optimal for the original points.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ntk_laplace.errors import NonFiniteError, NumericalError
from ntk_laplace.runtime import tuning
from ntk_laplace.structures import FittedModel
from ntk_laplace.structures.points import TrainingPoints

_LEAST_CURVATURE = 0.01  # over the prior's, of a move that corrects H


@dataclass(frozen=True)
class Iterate:
    """θ - θ* (P,) and the training outputs at θ (N, C)."""

    displacement: Tensor
    f: Tensor

    def along(self, direction: tuple[Tensor, Tensor], size: float) -> Iterate:
        """The point θ - size · direction."""
        return Iterate(self.displacement - size * direction[0], self.f - size * direction[1])


class Objective:
    """The negative log joint of a linearized model, up to a linear term and a constant.

    Parameters
    ----------
    fitted : FittedModel
        Exact, fitted to these points.
    points : TrainingPoints
    linear : Tensor, (N, C)
        h.
    slope : Tensor, (P,) or a number
        s.
    start : Tensor, (N, C)
        f*.
    """

    def __init__(
        self, fitted: FittedModel, points: TrainingPoints, linear: Tensor, slope: Tensor | float, start: Tensor
    ) -> None:
        self.fitted, self.points = fitted, points
        self.linear, self.slope, self.start = linear, slope, start
        self.precision = fitted.prior.flat_precision().to(fitted.theta)

    @classmethod
    def tilted(cls, fitted: FittedModel, points: TrainingPoints, base: TrainingPoints) -> Objective:
        """The objective of changed points, for which θ* is optimal at `base`, the original points."""
        linear = base.residual(fitted.likelihood)
        linear = torch.cat([linear, linear.new_zeros(len(points.f) - len(linear), linear.shape[1])])
        return cls(fitted, points, linear, 0.0, torch.cat([base.f, points.f[len(base.f) :]]))

    @classmethod
    def own(cls, fitted: FittedModel) -> Objective:
        """The objective of the linearized model, with h = 0."""
        f = fitted.points.f
        points = replace(fitted.points, expanded=None)
        weights = fitted.network.theta.to(fitted.theta)  # θ*, without the displacement of a what-if
        slope = fitted.prior.flat_precision().to(weights) * (weights - fitted.prior.flat_mean().to(weights))
        return cls(fitted, points, torch.zeros_like(f), slope, f)

    def value(self, at: Iterate) -> float:
        """The objective, in nats."""
        fit = replace(self.points, f=at.f).log_likelihood(self.fitted.likelihood)
        linear = (self.linear * (at.f - self.start)).sum() + (self.slope * at.displacement).sum()
        return float(linear - fit + 0.5 * (self.precision * at.displacement.square()).sum())

    def gradient(self, at: Iterate) -> Tensor:
        """g, (P,)."""
        pull = replace(self.points, f=at.f, expanded=None).residual(self.fitted.likelihood) - self.linear
        return self.precision * at.displacement - self.fitted.vjp(pull) + self.slope

    def direction(
        self, at: Iterate, gradient: Tensor, seen: Sequence[tuple[Iterate, Tensor]] = ()
    ) -> tuple[tuple[Tensor, Tensor], float]:
        """H⁻¹g, J H⁻¹g, and the decrement gᵀH⁻¹g, where moves and changes of g that were `seen` correct H (BFGS)."""
        fitted, rest, shares = self.fitted, gradient, []
        for move, change in reversed(seen):
            shares.append((move.displacement @ rest) / (move.displacement @ change))
            rest = rest - shares[-1] * change
        step = fitted.structure.solve_at(fitted.model, replace(self.points, f=at.f, expanded=None), rest)
        output = fitted.jvp(step)
        for (move, change), share in zip(seen, reversed(shares), strict=True):
            more = share - (change @ step) / (move.displacement @ change)
            step, output = step + more * move.displacement, output + more * move.f
        return (step, output), float(gradient @ step)

    def curved(self, move: Iterate, change: Tensor) -> bool:
        """Whether a change of the gradient shows a positive curvature along a move: not where it is far from convex."""
        prior = (self.precision * move.displacement.square()).sum()
        return bool(move.displacement @ change > _LEAST_CURVATURE * prior)

    def search(self, at: Iterate, direction: tuple[Tensor, Tensor], decrement: float) -> tuple[Iterate, float]:
        """Backtracking line search: the full step, halved until the objective decreases."""
        value, size = self.value(at), 1.0
        slack = 8 * torch.finfo(at.f.dtype).eps * (1.0 + abs(value))
        for _ in range(tuning.HALVINGS):
            candidate = at.along(direction, size)
            try:
                reached = self.value(candidate)
            except NonFiniteError:  # too far for this likelihood's densities
                reached = math.inf
            if math.isfinite(reached) and reached <= value - 1e-4 * size * decrement + slack:
                return candidate, size
            size /= 2
        raise NumericalError("a Newton step that makes the objective fall", f"none down to {size:.2g} of it",
                             "The likelihood may not be log-concave: use steps=1, or mean=\"map\".")


def descend(problem: Objective, start: Iterate, steps: int | None) -> tuple[Iterate, Iterate]:
    """`steps` full Newton steps; None continues to the optimum, with steps halved if the objective would increase.

    Where the curvature is a Fisher information, H is not the Hessian and steps converge linearly, too slowly for heavy
    tails: after the first ones the changes of the gradient correct H, as in BFGS.

    Returns
    -------
    Iterate, Iterate
        The start and the end of the last step.

    Raises
    ------
    NumericalError
        If the optimum is not reached.
    """
    before, last = start, float("inf")
    gradient, seen = torch.zeros_like(start.displacement), deque[tuple[Iterate, Tensor]](maxlen=tuning.FEWEST_VECTORS)
    at, eps = start, [torch.finfo(dtype).eps for dtype in (start.f.dtype, problem.fitted.network.precision)]
    for taken in range(tuning.NEWTON_STEPS if steps is None else steps):
        former, gradient = gradient, problem.gradient(at)
        if steps is None and taken >= tuning.LINEAR_STEPS:
            move = Iterate(at.displacement - before.displacement, at.f - before.f)
            if problem.curved(move, gradient - former):
                seen.append((move, gradient - former))
        before = at
        direction, decrement = problem.direction(at, gradient, seen)
        scale = 1.0 + abs(problem.value(at))
        if decrement < -math.sqrt(eps[0]) * scale:  # gᵀH⁻¹g of a positive definite H
            raise NumericalError("a Newton step that makes the objective fall",
                                 f"one whose Newton decrement is {decrement:.2g}: the solve has lost its digits",
                                 "Use a larger precision, or mean=\"map\" of a prediction. A heteroscedastic model may "
                                 "explain a point by a noise of zero.")
        # the gain of a step below the rounding of the objective: no line search can see it
        reached = decrement <= eps[0] * scale and decrement <= 4 * last
        if steps is not None or reached:
            at = at.along(direction, 1.0)
            if reached and steps is None:
                return before, at
            continue
        at, size = problem.search(at, direction, decrement)
        # rounding in a float32 network's rows stops the decrement earlier; if it grows, no optimum is near
        if size == 1.0 and last / 4 <= decrement <= eps[1] * scale:
            return before, at
        last = decrement
    if steps is None:
        raise NumericalError(f"the linearized model's optimum within {tuning.NEWTON_STEPS} Newton steps",
                             f"a Newton decrement of {decrement:.2g}",
                             "Use a larger precision; or steps=1 of a change, or mean=\"map\" of a prediction.")
    return before, at


def refitted(fitted: FittedModel) -> Tensor:
    """θ - θ̄, (P,), with θ̄ the optimum of the linearized model under its prior; Newton starts at θ.

    Raises
    ------
    NumericalError
        If it is not reached.
    """
    start = fitted.model.moved
    with torch.no_grad():
        problem = Objective.own(fitted)
        _, end = descend(problem, Iterate(start, problem.points.f), None)
    return start - end.displacement
