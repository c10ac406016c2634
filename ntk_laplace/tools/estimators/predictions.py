"""Predictions of a regressor's targets in their own units: real numbers, and counts."""

from __future__ import annotations

import copy
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ntk_laplace.model.likelihoods import (
    HeteroscedasticGaussian,
    Likelihood,
    LogNormalMixture,
    NormalMixture,
    StudentT,
)
from ntk_laplace.model.likelihoods.counts import Counts
from ntk_laplace.model.likelihoods.number_mixture import NumberMixture
from ntk_laplace.posterior import Posterior
from ntk_laplace.runtime.conversion import to_tensor
from ntk_laplace.runtime.linalg import symmetric_root
from ntk_laplace.runtime.panels import panels
from ntk_laplace.tools.estimators.tables import Array, Standardized, StandardizedLogs

ROWS = 2048  # of which predictions are computed together: points of f of several targets may be many
_CERTAIN = 1e15  # a rate whose counts differ from it by a share of 1e-7; NumPy draws none above 1e18


@dataclass(frozen=True)
class Predictions:
    """Those of a posterior of standardized targets, at the network's inputs; D is the number of targets."""

    posterior: Posterior
    targets: Standardized

    @classmethod
    def of(cls, posterior: Posterior, targets: Standardized) -> Predictions:
        """Those of counts, if the likelihood is one of counts, or of numbers whose logarithms are standardized."""
        if isinstance(targets, StandardizedLogs):
            return LogPredictions(posterior, targets)
        kind = CountPredictions if isinstance(posterior.likelihood, Counts) else Predictions
        return kind(posterior, targets)

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood with the factor of the calibration, in float64."""
        posterior = self.posterior
        found = posterior.likelihood if posterior.predictive is None else posterior.predictive.likelihood(
            posterior.likelihood)
        return copy.deepcopy(found).requires_grad_(False).to("cpu", torch.float64)

    def mean(self, x: Tensor) -> Array:
        """Predictive mean, (n, D)."""
        f = self.posterior.outputs(x).detach().cpu().double().numpy()
        return self.targets.undone(f.reshape(len(x), -1)[:, : self._count])

    def moments(self, x: Tensor) -> tuple[Array, Array]:
        """Predictive mean and standard deviation, noise included, (n, D) each."""
        parts = []
        for rows in panels(len(x), 1, ROWS):
            response = self.posterior.predict(x[rows])
            parts.append(torch.stack([response.mean, response.variance]).detach().cpu().double())
        mean, variance = torch.cat(parts, 1).reshape(2, len(x), -1).numpy()
        return self.targets.undone(mean), np.sqrt(variance) * self.targets.scale

    def covariance(self, x: Tensor) -> tuple[Array, Array]:
        """Predictive mean (n, D), and covariances between the inputs, noise included, (n, n, D)."""
        mean, covariance = self._latent(x)
        own = np.einsum("icjc->ijc", covariance[:, : self._count, :, : self._count])
        own *= self.targets.scale**2
        np.einsum("iic->ic", own)[...] += self.noise_at(x)
        return self.targets.undone(mean[:, : self._count]), own

    def noise_at(self, x: Tensor) -> Array:
        """Mean variance of the noise at inputs, (n, D)."""
        parts = [self.posterior.predict(x[rows]).aleatoric for rows in panels(len(x), 1, ROWS)]
        found: Array = torch.cat(parts).detach().cpu().double().reshape(len(x), -1).numpy()
        return found * self.targets.scale**2

    def noise(self, x: Tensor, counts: Tensor) -> Array:
        """Variance of the noise, (D,); where it depends on the inputs, the mean over x with these weights."""
        likelihood = self.likelihood
        if not self._depends_on_inputs:  # it is the same at all f
            found: Array = likelihood.response_variance(to_tensor(self.targets.scale[None]))[0].numpy()
            return found * self.targets.scale**2
        weights = counts.double().cpu().numpy()
        mean: Array = (weights / weights.sum()) @ self.noise_at(x)
        return mean

    def distribution(self, x: Tensor, method: str = "glm") -> NumberMixture:
        """Distribution of each target of each input by itself, (n, D)."""
        with torch.no_grad():
            response = self.posterior.predict(x, method, likelihood=self.likelihood if method == "map" else None)
            each = response.univariate().to("cpu", torch.float64).reshaped(len(response.mean), self._count)
            return self._in_units(each)

    def draws(self, x: Tensor, count: int, generator: Any) -> Array:
        """Draws of the targets of all inputs together, by a random state of NumPy, (n, D, count)."""
        mean, covariance = self._latent(x)
        n, c = mean.shape
        root = symmetric_root(to_tensor(covariance.reshape(n * c, n * c))).numpy()
        f = mean[..., None] + (root @ generator.standard_normal((n * c, count))).reshape(n, c, count)
        return self._drawn(f, generator)

    # --- inside

    @property
    def _count(self) -> int:
        return len(self.targets.scale)

    @property
    def _scale(self) -> float:
        """Of the covariances of the outputs, by the calibration."""
        return 1.0 if self.posterior.predictive is None else float(self.posterior.predictive.scale)

    @property
    def _depends_on_inputs(self) -> bool:
        return isinstance(self.posterior.likelihood, HeteroscedasticGaussian)

    def _in_units(self, each: NumberMixture) -> NumberMixture:
        assert isinstance(each, NormalMixture)
        return each.affine(to_tensor(self.targets.scale), to_tensor(self.targets.mean))

    def _drawn(self, f: Array, generator: Any) -> Array:
        """Targets (n, D, S) of draws of f (n, C, S)."""
        likelihood, targets = self.likelihood, self._count
        shape = len(f), targets, f.shape[2]
        if isinstance(likelihood, StudentT):
            deviation = likelihood.noise.sqrt().expand(targets).numpy()[:, None]
            noise = deviation * generator.standard_t(float(likelihood.df), shape)
        elif isinstance(likelihood, HeteroscedasticGaussian):
            noise = np.exp(0.5 * f[:, targets:]) * generator.standard_normal(shape)
        else:
            deviation = likelihood.response_variance(to_tensor(f[..., 0])).sqrt().numpy()[..., None]
            noise = deviation * generator.standard_normal(shape)
        return np.moveaxis(self.targets.undone(np.moveaxis(f[:, :targets] + noise, 1, -1)), -1, 1)

    def _latent(self, x: Tensor) -> tuple[Array, Array]:
        """Mean (n, C) and covariance (n, C, n, C) of the network's outputs, with the scale of the calibration."""
        found = self.posterior.latent(x)
        mean = found.mean.detach().cpu().double().numpy().reshape(len(x), -1)
        covariance = found.covariance_matrix.detach().cpu().double()  # of `found` alone: changed in place, not copied
        covariance.mul_(self._scale)
        return mean, covariance.numpy().reshape(mean.shape * 2)


class _PositivePredictions(Predictions):
    """Those of targets whose mean μ given the network's outputs is an exponential of them; moments are of first order.

    So they are at the network's outputs: ``E exp(f)`` grows with the exponential of the variance, and is next to
    infinite where the data say little.
    """

    def mean(self, x: Tensor) -> Array:
        """Mean of the targets given the network's outputs, (n, D)."""
        f = self.posterior.outputs(x).detach().cpu().double().numpy()
        return self._mean(f.reshape(len(x), -1))

    def moments(self, x: Tensor) -> tuple[Array, Array]:
        """That mean, and the deviation ``√((dμ/df)² var f + var(y given f))``."""
        f, covariance = self.posterior.latent_moments(x)
        f, covariance = (part.detach().cpu().double() for part in (f, covariance))
        mean = self._mean(f.numpy())
        variance = self._scale * covariance.diagonal(dim1=-2, dim2=-1).numpy()
        return mean, np.hypot(mean * self._log_slope * np.sqrt(variance), np.sqrt(self._noise(mean)))

    def covariance(self, x: Tensor) -> tuple[Array, Array]:
        """That mean, and ``dμ_i/df_i dμ_j/df_j cov(f_i, f_j)``, with the noise."""
        f, covariance = self._latent(x)
        own = np.einsum("icjc->ijc", covariance)
        mean = self._mean(f)
        slope = mean * self._log_slope
        own *= slope[:, None] * slope[None]
        np.einsum("iic->ic", own)[...] += self._noise(mean)
        return mean, own

    def noise_at(self, x: Tensor) -> Array:
        """Variance of the noise given the network's outputs, (n, D)."""
        return self._noise(self.mean(x))

    @property
    def _depends_on_inputs(self) -> bool:
        return True

    @property
    def _log_slope(self) -> Array:
        """d log μ / df, (D,)."""
        return self.targets.scale

    @abstractmethod
    def _mean(self, f: Array) -> Array:
        """μ of outputs, (n, D)."""

    @abstractmethod
    def _noise(self, mean: Array) -> Array:
        """Variance of targets of these means, (n, D)."""


class CountPredictions(_PositivePredictions):
    """Those of counts."""

    def _mean(self, f: Array) -> Array:
        return np.exp(f)

    def _noise(self, mean: Array) -> Array:
        return mean + self._dispersion * mean**2

    @property
    def _dispersion(self) -> float:
        return float(self.likelihood.dispersion)  # type: ignore[arg-type]  # of counts

    def _in_units(self, each: NumberMixture) -> NumberMixture:
        return each

    def _drawn(self, f: Array, generator: Any) -> Array:
        rate, dispersion = np.exp(f), self._dispersion
        if dispersion > 0:
            rate = rate * generator.gamma(1.0 / dispersion, dispersion, f.shape)
        found: Array = generator.poisson(np.where(rate < _CERTAIN, rate, 0.0)).astype(np.float64)
        return np.where(rate < _CERTAIN, found, np.floor(rate))


class LogPredictions(_PositivePredictions):
    """Those of positive numbers, whose logarithms are normal."""

    def _mean(self, f: Array) -> Array:
        return self.targets.expected(f, self._variance)

    def _noise(self, mean: Array) -> Array:
        """``μ² (exp(σ²) - 1)`` for the variance σ² of the logarithm."""
        return mean**2 * np.expm1(self.targets.scale**2 * self._variance)

    @property
    def _variance(self) -> Array:
        """Of the noise of standardized logarithms, (D,)."""
        found: Array = self.likelihood.response_variance(to_tensor(self.targets.scale[None]))[0].numpy()
        return found

    def _in_units(self, each: NumberMixture) -> NumberMixture:
        assert isinstance(each, NormalMixture)
        scale, mean = to_tensor(self.targets.scale), to_tensor(self.targets.mean)
        return LogNormalMixture(each.log_weights, *each.affine(scale, mean).parts)
