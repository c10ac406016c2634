"""The density averaged over a normal f, by points of f and points of its posterior given the target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Self

from ntk_laplace.errors import NonFiniteError
from ntk_laplace.model.likelihoods.protocol import ObservationModel

_STEPS = 20  # Newton steps, each halved at most as often
_FAR = 3.0  # longest step, in standard deviations of f: further away densities may overflow
_CLOSE = 1e-6  # standard deviations of f: the density is continuous in the calibration up to their square


@dataclass(frozen=True)
class NormalOutputs:
    """f = m + W z at n inputs, for standard normal z, with the points z of quadrature that all inputs share."""

    mean: Tensor  # m, (n, C)
    root: Tensor  # W, (n, C, C)
    points: Tensor  # (S, C)

    def at(self, index: Tensor | slice) -> Self:
        """At some of the inputs."""
        return type(self)(self.mean[index], self.root[index], self.points)

    def samples(self) -> Tensor:
        """f at all points, (S, n, C)."""
        return self.mean + torch.einsum("ncd,sd->snc", self.root, self.points)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """At the inputs of all parts, which share their points."""
        return cls(torch.cat([part.mean for part in parts]), torch.cat([part.root for part in parts]), parts[0].points)

    def log_mean(self, likelihood: ObservationModel, y: Tensor) -> Tensor:
        """log E p(y given f) of one canonical target at each input, (n,), nats.

        Half of the points are those of f. The other half are those of N(z*, A⁻¹), Laplace's approximation of z given
        y: z* is the maximum of log p(y | f) - ½ zᵀz and A = I + WᵀΛW. Densities are weighted for the mixture of both
        (Veach and Guibas 1995), so no weight exceeds 2.
        """
        with torch.no_grad():
            mode, values, vectors = self._approximation(likelihood, y)
            first, second = self.points.tensor_split(2)  # of evenly spread points, two parts are evenly spread
            scaled = (vectors * values.rsqrt().unsqueeze(-2)) @ vectors.mT  # A^-½, the root that is continuous in A
            away = mode + torch.einsum("ncd,sd->snc", scaled, second)
            z = torch.cat([first.unsqueeze(1).expand(-1, len(mode), -1), away])
            back = ((z - mode).unsqueeze(-2) @ vectors).squeeze(-2).square() * values
            excess = 0.5 * (z.square() - back + values.log()).sum(-1)  # log N(z*, A⁻¹) - log N(0, I)
            share = len(second) / len(z)
            log_weight = -torch.logaddexp(excess.new_tensor(1.0 - share).log(), math.log(share) + excess)
        scores = self._scores(likelihood, self.mean + torch.einsum("ncd,snd->snc", self.root, z), y)
        return (scores + log_weight).logsumexp(0) - math.log(len(z))

    def _approximation(self, likelihood: ObservationModel, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """z* (n, C), and eigenvalues (n, C) and eigenvectors (n, C, C) of A."""
        root, z = self.root, torch.zeros_like(self.mean)
        value, moves = self._objective(likelihood, z, y), torch.ones_like(z[:, :1], dtype=torch.bool)
        for _ in range(_STEPS):
            f = self.outputs(z)
            slope = (root.mT @ likelihood.residual(f, y).unsqueeze(-1)).squeeze(-1) - z
            values, vectors = self._precision(likelihood, f, y)
            step = (vectors @ ((slope.unsqueeze(-2) @ vectors).squeeze(-2) / values).unsqueeze(-1)).squeeze(-1) * moves
            step = step * (_FAR / step.abs().amax(1, keepdim=True)).clamp_max(1.0)
            for _ in range(_STEPS):
                tried = self._objective(likelihood, z + step, y)
                worse = ~(tried >= value)
                if not bool(worse.any()):
                    break
                step = torch.where(worse.unsqueeze(1), 0.5 * step, step)
            step = step.masked_fill(worse.unsqueeze(1), 0.0)
            z, value = z + step, torch.where(worse, value, tried)
            moves = (step.abs() > _CLOSE).any(1, keepdim=True)  # an input's steps do not depend on the others
            if not bool(moves.any()):
                break
        return z, *self._precision(likelihood, self.outputs(z), y)

    def outputs(self, z: Tensor) -> Tensor:
        """f at points z (n, C)."""
        return self.mean + (self.root @ z.unsqueeze(-1)).squeeze(-1)

    def _objective(self, likelihood: ObservationModel, z: Tensor, y: Tensor) -> Tensor:
        try:
            return likelihood.log_prob(self.outputs(z), y) - 0.5 * z.square().sum(1)
        except NonFiniteError:  # a step to where the density is refused: all steps are halved
            return z.new_full((len(z),), -torch.inf)

    def _precision(self, likelihood: ObservationModel, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Eigenvalues and eigenvectors of A, at least 1 where the log density is not concave, I where Λ overflows."""
        product = self.root.mT @ likelihood.curvature(f, y) @ self.root
        finite = product.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
        values, vectors = torch.linalg.eigh(torch.where(finite, 0.5 * (product + product.mT), 0.0))
        return 1.0 + values.clamp_min(0.0), vectors

    def _scores(self, likelihood: ObservationModel, f: Tensor, y: Tensor) -> Tensor:
        """Log densities at points of f (S, n, C), (S, n)."""
        index = torch.arange(f.shape[1], device=f.device).repeat(len(f))
        flat = likelihood.at(index).log_prob(f.flatten(0, 1), y[index])
        return flat.reshape(f.shape[:2])
