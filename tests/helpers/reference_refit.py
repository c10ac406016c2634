"""The slow truth about changed training data: the linearized model refitted in weight space, every matrix written out.

Nothing of the library is used: weights move by Newton's method on dense Jacobians, with derivatives by autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from reference import differentiate

__all__ = ["Linearized"]


@dataclass(frozen=True)
class Linearized:
    """f_n(δ) = f_n + J_n δ, log densities of y_n, prior precision of δ, and the residuals that training left (or zero).

    Attributes
    ----------
    density : callable, log density of one example (f (C,), y) -> ()
    f : Tensor, (N, C)
    jac : Tensor, (N, C, P)
    precision : Tensor, (P,)
    offset : Tensor, (P,), θ* - μ0
    """

    density: Callable[[Tensor, Tensor], Tensor]
    f: Tensor
    jac: Tensor
    precision: Tensor
    offset: Tensor

    def gradient(self, move: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient of -Σ w log p + ½ (θ-μ0)ᵀP0(θ-μ0) in θ, and its Hessian H."""
        _, residual, hessian = differentiate(self.density, self.f + self.jac @ move, y)
        gradient = self.precision * (self.offset + move) - torch.einsum("ncp,nc,n->p", self.jac, residual, weights)
        curvature = torch.einsum("ncp,ncd,ndq,n->pq", self.jac, hessian, self.jac, weights)
        return gradient, curvature + torch.diag(self.precision)

    def refit(self, y: Tensor, weights: Tensor, steps: int | None, held: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
        """δ after so many Newton steps (None: until nothing moves), and H at the start of the last of them.

        `held` is a gradient that stays, so that δ = 0 is the optimum of what it was taken from.
        """
        move = torch.zeros_like(self.precision)
        for _ in range(steps or 60):
            gradient, curvature = self.gradient(move, y, weights)
            step = torch.linalg.solve(curvature, gradient - held)
            # far out a whole Newton step can overshoot; the optimum does not depend on how it is reached
            move = move - (step if steps else step * min(1.0, 2.0 / float((self.jac @ step).abs().max())))
            if steps is None and step.abs().max() < 1e-12:  # quadratic convergence: the next step is rounding
                break
        if steps is None:
            gradient, _ = self.gradient(move, y, weights)
            assert (gradient - held).abs().max() < 1e-9, "the reference did not converge"
        return move, curvature
