"""Log densities of points under calibrated moments, cheap to evaluate again at other calibrations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ntk_laplace.errors import DataError
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.model.likelihoods.covariances import cholesky, covariance_root, diagonal_blocks
from ntk_laplace.model.likelihoods.importance import NormalOutputs
from ntk_laplace.model.predictive import mixture, normal_points
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.panels import panels
from ntk_laplace.structures.points import TrainingPoints

_SAMPLES = 1000  # points of f, as `predict` takes them
_GRID_SAMPLES, _FEWEST_SAMPLES = 50, 128  # of a search's grid, and of a search over many points

Setting = dict[str, Tensor]
"""Positive numbers by name, such as those of a `Calibration`: tensors (), differentiable; 1 if absent."""


@dataclass(frozen=True)
class LeftOut:
    """Moments of f at points that do not contribute to them, and their targets."""

    mean: Tensor  # (N, C)
    covariance: Tensor  # (N, C, C), or (N, L, C/L, C/L) at L positions
    targets: Tensor  # as the response takes them
    weights: Tensor  # (N,), of the examples; 0 for a point that is removed or has no target
    scalar: bool = False  # whether the network's outputs have shape (N,)

    @classmethod
    def of(
        cls, points: TrainingPoints, likelihood: Likelihood, mean: Tensor, covariance: Tensor, scalar: bool = False
    ) -> LeftOut:
        """Moments beside the points' targets and weights, 0 without a target."""
        weights = points.observed_counts(likelihood)
        targets = points.targets.squeeze(-1) if scalar and points.targets.ndim == 2 else points.targets
        return cls(mean, covariance, targets, weights, scalar)

    @classmethod
    def joined(cls, parts: Sequence[LeftOut], order: Tensor) -> LeftOut:
        """All of the parts, whose points one after the other have these numbers (N,), in the order of the numbers."""
        place = order.argsort()
        columns = ([getattr(part, name) for part in parts] for name in ("mean", "covariance", "targets", "weights"))
        mean, covariance, targets, weights = (torch.cat(column)[place.to(column[0].device)] for column in columns)
        return cls(mean, covariance, targets, weights, parts[0].scalar)

    def by_position(self, likelihood: Likelihood) -> tuple[Likelihood, LeftOut]:
        """Each position as a point of its own, with its likelihood: predictions add up the densities of positions.

        Without positions, the points as they are. Covariances are (N, C, C), or blocks at positions (N, L, C/L, C/L).
        """
        if likelihood.positions is None:
            return likelihood, self
        one, (mean, targets) = likelihood.at_position(), likelihood.apart(self.mean, self.targets)
        blocks = self.covariance if self.covariance.ndim == 4 else diagonal_blocks(self.covariance, mean.shape[1])
        weights, observed = self.weights.repeat_interleave(len(mean) // len(self.mean)), one.observed(targets)
        if observed is not None:
            weights = weights * observed.reshape(len(weights), -1).any(1)
        return one, LeftOut(mean, blocks.flatten(0, 1), targets, weights)


class Objective(Protocol):
    """A mean log density as a function of a few positive numbers."""

    # points of f for the grid of a search, and for one search after the other; None for all, or if there are none
    samples: tuple[int | None, ...]

    def parts(self, setting: Setting, samples: int | None = None) -> Iterator[Tensor]:
        """Terms of the weighted mean of log p(y_n), nats per point, in order and in parts that fit in memory.

        If it is averaged over points of f, `samples` is their number at most.
        """
        ...


class Densities(Objective, Protocol):
    """Log densities of all points as a function of the calibration."""

    shares: Tensor  # (N,), weights of the mean, with sum 1

    @property
    def names(self) -> tuple[str, ...]:
        """What `fit_calibration` fits by default."""
        ...


def densities(likelihood: Likelihood, points: LeftOut) -> Densities:
    """The log densities of some points (DataError if none has a target and a positive weight)."""
    total = points.weights.sum()
    if not bool(total > 0):
        raise DataError("at least one point with a target and a positive weight", "none",
                        "Look at how missing targets are marked, and at the example weights.")
    noise = likelihood.additive_noise(points.mean)
    if noise is not None:
        observed = likelihood.observed(points.targets)
        return NormalDensities(points, noise.detach(), observed)
    return SampledDensities(likelihood, points)


class NormalDensities:
    """log N(y; m, c V + s Σ) in closed form, from one eigendecomposition of Σ^-½ V Σ^-½ for each point.

    With Σ = L Lᵀ, L⁻¹V L⁻ᵀ = Q diag(λ) Qᵀ and e = Qᵀ L⁻¹(y - m),
    log p = -½ Σ_j [log(c λ_j + s) + e_j²/(c λ_j + s)] - ½ log det Σ - C/2 log 2π.
    """

    names: tuple[str, ...] = ("scale", "noise")
    samples: tuple[int | None, ...] = None, None

    def __init__(self, points: LeftOut, noise: Tensor, observed: Tensor | None) -> None:
        error = points.targets.reshape(points.mean.shape).to(points.mean) - points.mean
        there = torch.ones_like(error, dtype=torch.bool) if observed is None else observed.reshape(error.shape)
        both = there.unsqueeze(-1) & there.unsqueeze(-2)
        eye = torch.eye(error.shape[1], dtype=error.dtype, device=error.device)
        factor = cholesky(torch.where(both, noise, eye))  # identity over missing outputs
        half = torch.linalg.solve_triangular(factor, points.covariance * both, upper=False)
        whitened = torch.linalg.solve_triangular(factor, half.mT, upper=False)
        values, vectors = torch.linalg.eigh(0.5 * (whitened + whitened.mT))
        error = torch.linalg.solve_triangular(factor, error.masked_fill(~there, 0.0).unsqueeze(-1), upper=False)
        self._values = values.clamp_min(0.0)  # λ, (N, C)
        self._squares = (vectors.mT @ error).squeeze(-1).square()  # e², (N, C)
        log_det = 2.0 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        observed_outputs = there.sum(-1).to(error)
        self._constant = -0.5 * (log_det + observed_outputs * math.log(2 * math.pi))
        self._missing = there.shape[1] - observed_outputs
        self.shares = points.weights / points.weights.sum()

    def parts(self, setting: Setting, samples: int | None = None) -> Iterator[Tensor]:
        """All terms, in one part."""
        one = self._values.new_ones(())
        scale, noise = setting.get("scale", one), setting.get("noise", one)
        variance = scale * self._values + noise
        # a missing output adds log s to the sum
        terms = (variance.log() + self._squares / variance).sum(-1) - self._missing * noise.log()
        yield self.shares * (self._constant - 0.5 * terms)

    def common(self) -> float:
        """k that maximizes the mean log density for c = s = k: the mean of e²/(λ + 1) over observed outputs."""
        observed = self._squares.shape[1] - self._missing
        found = (self.shares * (self._squares / (self._values + 1.0)).sum(-1)).sum()
        return float(found / (self.shares * observed).sum())


class SampledDensities:
    """log E p(y given f/T), in closed form if there is one, or averaged over the points of f that `predict` uses.

    Noise that is √s times as large makes an error e as likely as e/√s is without it, times s^-½ for each output.
    """

    def __init__(self, likelihood: Likelihood, points: LeftOut) -> None:
        self._likelihood, self._points = likelihood, points
        n, c = points.mean.shape
        searched = min(_SAMPLES, max(_FEWEST_SAMPLES, tuning.SEARCHED_OUTPUTS // (n * c)))
        self.samples: tuple[int | None, ...] = _GRID_SAMPLES, *sorted({_FEWEST_SAMPLES, searched})
        if likelihood.integrates(c):
            self.samples = None, None
        z = normal_points(_SAMPLES, c).to(points.mean)
        self._outputs = NormalOutputs(points.mean, covariance_root(points.covariance), z)
        self.shares = points.weights / points.weights.sum()
        second = "temperature" if likelihood.classifies else "noise" if likelihood.scales_noise else None
        self.names: tuple[str, ...] = ("scale", *([second] if second else []))
        y = points.targets
        # the density of a soft label is that of the averaged response, and so is one at a temperature of the average
        self._soft = likelihood.classifies and y.is_floating_point() and bool(((y > 0) & (y < 1)).any())

    def parts(self, setting: Setting, samples: int | None = None) -> Iterator[Tensor]:
        """The terms, in parts."""
        n, outputs = len(self._points.mean), self._calibrated(setting, samples)
        for here in panels(n, 1, tuning.AVERAGED_OUTPUTS // outputs.points.numel()):
            likelihood = self._likelihood if here.stop - here.start == n else self._likelihood.at(here)
            own, y = outputs.at(here), self._points.targets[here]
            own, lost = _with_noise(likelihood, own, y, setting["noise"]) if "noise" in setting else (own, 0.0)
            yield self.shares[here] * (self._log_prob(likelihood, own, y, setting) - lost)

    def _calibrated(self, setting: Setting, samples: int | None) -> NormalOutputs:
        """f with covariances times the scale, divided by the temperature; without a covariance one point is enough."""
        own, one = self._outputs, self._outputs.mean.new_ones(())
        scale, temperature = setting.get("scale", one), setting.get("temperature", one)
        points = own.points[:samples] if bool(scale > 0) else own.points[:1] * 0.0
        return NormalOutputs(own.mean / temperature, own.root * (scale.sqrt() / temperature), points)

    def _log_prob(self, likelihood: Likelihood, outputs: NormalOutputs, y: Tensor, setting: Setting) -> Tensor:
        average = "average_temperature" in setting
        if not (average or self._soft):
            closed = likelihood.integrate(outputs.mean, outputs.root @ outputs.root.mT, self._points.scalar)
            response = mixture(likelihood, outputs, self._points.scalar) if closed is None else closed
            return response.log_prob(y)
        response = likelihood.average(outputs.samples(), self._points.scalar)
        return (response.tempered(setting["average_temperature"]) if average else response).log_prob(y)


def _with_noise(
    likelihood: Likelihood, outputs: NormalOutputs, y: Tensor, factor: Tensor
) -> tuple[NormalOutputs, Tensor]:
    """Outputs whose errors are these over the root of the factor, and the log density that is lost, (n,)."""
    mean, observed = outputs.mean, likelihood.observed(y)
    targets = y.reshape(mean.shape).to(mean)
    there = torch.ones_like(targets, dtype=torch.bool) if observed is None else observed.reshape(mean.shape)
    targets, root = targets.masked_fill(~there, 0.0), factor.sqrt()
    found = NormalOutputs(targets + (mean - targets) / root, outputs.root / root, outputs.points)
    return found, 0.5 * there.to(mean).sum(-1) * factor.log()
