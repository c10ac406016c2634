"""New observations of the linearized network: batches of them, by the Schur complement of the joint covariance."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ntk_laplace.curvature import PosteriorPrecision
from ntk_laplace.errors import NumericalError

ROUNDING = 256  # units of rounding of the prior variance that are added to variances before a Cholesky factorization


@dataclass(frozen=True)
class Observations:
    """Observations y = f(x) + ε in batches, with rows of J at their inputs; numbers are (..., n m), interleaved.

    y and the noise may have more batch dimensions than f. What follows from them is computed once, with its graph, and
    holds for one H: `at` gives the observations at the present one.
    """

    precision: PosteriorPrecision  # H, without the observations
    f: Tensor
    jac: Tensor  # (..., n m, P)
    y: Tensor
    noise: Tensor  # covariance of ε, (..., n m, n m)

    def at(self, precision: PosteriorPrecision, like: Tensor) -> Observations:
        """These observations at another H, in the dtype and on the device of `like`."""
        parts = self.f, self.jac, self.y, self.noise
        return self if precision is self.precision else Observations(precision, *(part.to(like) for part in parts))

    @property
    def batch_shape(self) -> torch.Size:
        """Of the posterior given the observations."""
        return torch.broadcast_shapes(self.f.shape[:-1], self.y.shape[:-1], self.noise.shape[:-2])

    @cached_property
    def solved(self) -> Tensor:
        """H⁻¹ J', (..., n m, P)."""
        with _with_graph():
            return self.precision.differentiable_solve(self.jac)

    @cached_property
    def factor(self) -> Tensor:
        """L with L Lᵀ = J' H⁻¹ J'ᵀ + noise."""
        with _with_graph():
            joint = self.jac @ self.solved.mT
            found, failed = torch.linalg.cholesky_ex(0.5 * (joint + joint.mT) + self.noise)
        if bool(failed.any()):
            raise NumericalError("observations of different points, or with noise", "one that the others determine",
                                 "Pass noise=, such as 1e-6 of the variance, or each point once.")
        return found

    def weights(self, error: Tensor) -> Tensor:
        """(V' + noise)⁻¹ e for e (..., n m)."""
        return torch.cholesky_solve(error.unsqueeze(-1), self.factor).squeeze(-1)

    @cached_property
    def log_density(self) -> Tensor:
        """log N(y; f, V' + noise), (...), of the posterior without these observations."""
        with _with_graph():
            half = torch.linalg.solve_triangular(self.factor, (self.y - self.f).unsqueeze(-1), upper=False)
            size = half.shape[-2] * math.log(2.0 * math.pi)
            return -0.5 * (half.square().sum((-2, -1)) + size) - self.factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def moments(self, f: Tensor, jac: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (..., k) and what the observations take of the covariance (..., k, k) at rows J (..., k, P)."""
        cross = jac @ self.solved.mT
        half = torch.linalg.solve_triangular(self.factor, cross.mT, upper=False)
        moved = cross @ self.weights(self.y - self.f).unsqueeze(-1)
        return f + moved.squeeze(-1), half.mT @ half

    def directions(self, draws: Tensor, noise: Tensor) -> Tensor:
        """Draws from the posterior of θ - θ*, (..., P), given draws without the observations and of ε ([T20] 3.13).

        Matheron's rule: δ + H⁻¹J'ᵀ (V' + noise)⁻¹ (y - f - J'δ - ε).
        """
        seen = (self.jac @ draws.unsqueeze(-1)).squeeze(-1)
        weights = self.weights(self.y - self.f - seen - noise)
        return draws + (self.solved.mT @ weights.unsqueeze(-1)).squeeze(-1)

    def joined(self, other: Observations) -> Observations:
        """These and others, together."""
        n, m = self.f.shape[-1], other.f.shape[-1]
        noisy = torch.broadcast_shapes(self.noise.shape[:-2], other.noise.shape[:-2])
        noise = self.noise.new_zeros(*noisy, n + m, n + m)
        noise[..., :n, :n], noise[..., n:, n:] = self.noise, other.noise
        found = Observations(self.precision, concatenated(self.f, other.f, 1),
                             concatenated(self.jac, other.jac, 2, -2), concatenated(self.y, other.y, 1), noise)
        if "solved" in vars(self):  # so that one observation after another solves for each once
            vars(found)["solved"] = concatenated(self.solved, other.solved, 2, -2)
        return found


@contextmanager
def _with_graph() -> Iterator[None]:
    """A result that is kept serves later calls in every mode of autograd."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def concatenated(one: Tensor, two: Tensor, axes: int, dim: int = -1) -> Tensor:
    """Both along one of their last `axes` dimensions; those before are batches, which are broadcast."""
    batch = torch.broadcast_shapes(one.shape[:-axes], two.shape[:-axes])
    return torch.cat([part.expand(*batch, *part.shape[-axes:]) for part in (one, two)], dim)
