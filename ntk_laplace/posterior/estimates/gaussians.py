"""Gaussians over weights: the prior, the posterior N(θ, c H⁻¹), and metrics of Hamiltonian Monte Carlo."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Generator, Tensor

from ntk_laplace.curvature import PosteriorPrecision
from ntk_laplace.curvature.posterior_precision import checked_form
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.linalg import cholesky_of
from ntk_laplace.runtime.sampling import normal
from ntk_laplace.structures import FittedModel

_LOG_2PI = math.log(2 * math.pi)


class WeightGaussian(ABC):
    """N(m, Q⁻¹) over weights (P,), with log det Q."""

    log_det_error: float = 0.0  # standard error of `log_det`, if it is an estimate

    def __init__(self, mean: Tensor, log_det: float) -> None:
        self.mean, self.log_det = mean, log_det

    @abstractmethod
    def noise(self, count: int, generator: Generator) -> Tensor:
        """Draws from N(0, Q⁻¹), (count, P)."""

    @abstractmethod
    def multiply(self, vectors: Tensor) -> Tensor:
        """Q v for vectors (m, P)."""

    @abstractmethod
    def solve(self, vectors: Tensor) -> Tensor:
        """Q⁻¹ v for vectors (m, P)."""

    def log_density(self, thetas: Tensor) -> Tensor:
        """log N(θ; m, Q⁻¹), (S,), nats."""
        return self.log_density_and_gradient(thetas)[0]

    def log_density_and_gradient(self, thetas: Tensor) -> tuple[Tensor, Tensor]:
        """log N(θ; m, Q⁻¹), (S,), and its gradient -Q(θ - m), (S, P)."""
        away = thetas - self.mean
        pull = self.multiply(away)
        constant = 0.5 * (self.log_det - len(self.mean) * _LOG_2PI)
        return constant - 0.5 * (away * pull).sum(1), -pull

    def draws(self, count: int, generator: Generator) -> Tensor:
        """Draws from N(m, Q⁻¹), (count, P)."""
        return self.mean + self.noise(count, generator)


class DiagonalGaussian(WeightGaussian):
    """With a diagonal Q (P,)."""

    def __init__(self, mean: Tensor, precision: Tensor) -> None:
        super().__init__(mean, float(precision.double().log().sum()))
        self._precision = precision

    def noise(self, count: int, generator: Generator) -> Tensor:
        return normal((count, len(self.mean)), self.mean, generator) * self._precision.rsqrt()

    def multiply(self, vectors: Tensor) -> Tensor:
        return vectors * self._precision

    def solve(self, vectors: Tensor) -> Tensor:
        return vectors / self._precision


class DenseGaussian(WeightGaussian):
    """With Q (P, P) written out."""

    def __init__(self, mean: Tensor, matrix: Tensor, log_det: float) -> None:
        super().__init__(mean, log_det)
        self._matrix = 0.5 * (matrix + matrix.T)
        eye = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        self._root = torch.linalg.solve_triangular(cholesky_of(self._matrix), eye, upper=False)  # L⁻¹
        self._inverse = self._root.T @ self._root

    def noise(self, count: int, generator: Generator) -> Tensor:
        return normal((count, len(self.mean)), self.mean, generator) @ self._root

    def multiply(self, vectors: Tensor) -> Tensor:
        return vectors @ self._matrix

    def solve(self, vectors: Tensor) -> Tensor:
        return vectors @ self._inverse


class StructuredGaussian(WeightGaussian):
    """N(m, c H⁻¹) for the H of any structure."""

    def __init__(self, mean: Tensor, precision: PosteriorPrecision, log_det: float, inflation: float) -> None:
        super().__init__(mean, log_det)
        self._precision, self._inflation = precision, inflation
        self.log_det_error = precision.standard_error

    def noise(self, count: int, generator: Generator) -> Tensor:
        """Draws from N(0, c H⁻¹), (count, P)."""
        found = self._precision.sample(count, generator)
        found = checked_form(self._precision, "sample", found, (count, len(self.mean)), self.mean)
        return found * self._inflation**0.5

    def multiply(self, vectors: Tensor) -> Tensor:
        """H v / c for vectors (m, P)."""
        found = self._precision.multiply(vectors)
        return checked_form(self._precision, "multiply", found, vectors.shape, vectors) / self._inflation

    def solve(self, vectors: Tensor) -> Tensor:
        """c H⁻¹ v for vectors (m, P)."""
        found = self._precision.solve(vectors)
        return checked_form(self._precision, "solve", found, vectors.shape, vectors) * self._inflation


def prior_gaussian(fitted: FittedModel) -> DiagonalGaussian:
    """The prior of the weights."""
    prior, like = fitted.prior, fitted.theta
    with torch.no_grad():
        return DiagonalGaussian(prior.flat_mean().to(like), prior.flat_precision().to(like))


def posterior_gaussian(
    fitted: FittedModel, mean: Tensor, inflation: float = 1.0, dense: bool = False
) -> WeightGaussian:
    """N(m, c H⁻¹) for the H of the posterior's structure; `dense` writes H out if it is small."""
    precision = fitted.precision
    with torch.no_grad():
        log_det = float(precision.log_det()) + float(fitted.prior.log_det()) - len(mean) * math.log(inflation)
    found = StructuredGaussian(mean, precision, log_det, inflation)
    if not dense or len(mean) > tuning.DENSE_METRIC:
        return found
    eye = torch.eye(len(mean), dtype=mean.dtype, device=mean.device)
    written = DenseGaussian(mean, found.multiply(eye), log_det)
    written.log_det_error = found.log_det_error
    return written
