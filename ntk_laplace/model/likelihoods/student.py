"""Student's t: real responses with outliers."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributions as td

from ntk_laplace.errors import HyperparameterError, require_number
from ntk_laplace.model.likelihoods.base import Likelihood
from ntk_laplace.model.likelihoods.diagonal_form import DiagonalForm
from ntk_laplace.model.likelihoods.noise import numbers, positive
from ntk_laplace.model.likelihoods.normal_mixture import NormalMixture
from ntk_laplace.model.likelihoods.one_number import NumberResponse
from ntk_laplace.model.likelihoods.per_output import PerOutput
from ntk_laplace.model.likelihoods.quadrature import expectation_by_output, gamma_points
from ntk_laplace.model.likelihoods.registry import register_likelihood
from ntk_laplace.model.likelihoods.responses import FactorizedResponse, Response
from ntk_laplace.runtime.scalars import scalar

_LEAST_DF = 2.1  # where the variance of y is 21 σ²; at 2 it is infinite, and outliers draw df there


@register_likelihood
class StudentT(PerOutput):
    """Student's t likelihood ``y = f + σ t``, independent over outputs, where t has `df` degrees of freedom.

    Outliers pull the outputs less than under `Gaussian`: the residual of an error e is ``(ν + 1) e/(ν σ² + e²)``. The
    log density is not concave, so the curvature is the Fisher information, ``(ν + 1)/((ν + 3) σ²)``, the same at all f.
    Targets are real numbers of shape (N, C), or (N,) for one output.

    Parameters
    ----------
    noise : float or Tensor
        σ², in squared units of y: one number, or one for each output (C,). The variance of y is ``σ² ν/(ν - 2)``.
    df : float
        ν, above 2.1, so that the variance of y is below 21 σ². Below 5 outliers are frequent; above 30 y is nearly
        normal. Where it is learned, a start at 4 takes what the network has not learned yet for outliers.
    missing : str, optional
        "nan": a NaN target is missing and contributes nothing to log p, its gradient and its curvature. By default a
        NaN is an error.

    Attributes
    ----------
    log_noise : nn.Parameter
        Logarithms of σ², in the shape of `noise`.
    log_excess : nn.Parameter
        Logarithm of ν - 2.1. `train_with_evidence` moves both, and `fit_hyperparameters` all likelihood's.

    Raises
    ------
    HyperparameterError
        If a variance is not positive, `df` is not above 2.1, or `missing` has another value.
    """

    is_density = scales_noise = True

    def __init__(self, noise: float | Tensor = 1.0, df: float = 10.0, missing: str | None = None) -> None:
        super().__init__(missing)
        values = positive(numbers(noise))
        if values.dim() > 1:
            raise HyperparameterError("noise as one number, or one for each output (C,)",
                                      f"shape {tuple(values.shape)}", "Pass one variance for each output.")
        require_number(f"degrees of freedom above {_LEAST_DF}", df, "Pass df=10.", above=_LEAST_DF)
        self.log_noise = nn.Parameter(values.log())
        self.log_excess = nn.Parameter(torch.tensor(float(df) - _LEAST_DF, dtype=torch.float64, device="cpu").log())

    @property
    def noise(self) -> Tensor:
        """σ², in the given shape."""
        return scalar(self.log_noise.exp())

    @property
    def df(self) -> Tensor:
        """ν, ()."""
        return scalar(_LEAST_DF + self.log_excess.exp())

    def bind(self, num_examples: int, num_outputs: int) -> None:
        """Check that there is one variance, or one for each output."""
        if self.log_noise.numel() not in (1, num_outputs):
            raise HyperparameterError(f"noise as one number, or of shape ({num_outputs},), one for each output",
                                      f"shape {tuple(self.log_noise.shape)}", "Pass one variance for each output.")

    def scaled_noise(self, factor: float) -> Likelihood:
        """Return a copy with σ² multiplied by `factor`."""
        scaled = copy.deepcopy(self)
        with torch.no_grad():
            scaled.log_noise.add_(math.log(factor))
        return scaled

    def log_curvature_scale(self) -> Tensor | None:
        """Return log((ν + 1)/((ν + 3) σ²)) for one variance of all outputs."""
        return self._log_information(self.log_noise) if self.log_noise.dim() == 0 else None

    # --- the density and its derivatives in f ---------------------------------------------------------------

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Log density of each example, summed over its observed targets, (N,), nats."""
        df, spread = self._df(f), self._df(f) * self.log_noise.to(f).exp()
        exact = self._df(self.log_noise.double())  # two large numbers, whose difference has no digits left in float32
        constant = torch.lgamma((exact + 1) / 2) - torch.lgamma(exact / 2) - 0.5 * (math.pi * exact).log()
        constant = (constant - 0.5 * self.log_noise.double()).to(f)
        return self._known(constant - 0.5 * (df + 1) * (self._error(f, y).square() / spread).log1p(), y).sum(-1)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """``(ν + 1) e/(ν σ² + e²)`` for the error ``e = y - f``, 0 where a target is missing, (N, C)."""
        df, error = self._df(f), self._error(f, y)
        return (df + 1) * error / (df * self.log_noise.to(f).exp() + error.square())

    def curvature(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """The Fisher information ``(ν + 1)/((ν + 3) σ²)`` on the diagonal, 0 where a target is missing, (N, C, C)."""
        return torch.diag_embed(self._information(f, y))

    def diagonal_form(self, f: Tensor, y: Tensor | None = None) -> DiagonalForm | None:
        """d = (ν + 1)/((ν + 3) σ²), 0 where a target is missing."""
        if type(self) is not StudentT:
            return None  # a subclass may override the curvature
        return DiagonalForm.of(self._information(f, y))

    def root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """The root of the information on the diagonal, 0 where a target is missing, (N, C, C)."""
        root = (0.5 * self._log_information(self.log_noise.to(f))).exp()
        return torch.diag_embed(self._known(root.expand(f.shape), y))

    def left_inverse(self, f: Tensor) -> Tensor | None:
        """One over the root of the information on the diagonal, (N, C, C)."""
        if type(self) is not StudentT:
            return None  # a subclass may override the curvature
        return torch.diag_embed((-0.5 * self._log_information(self.log_noise.to(f))).exp().expand(f.shape))

    # --- the response -----------------------------------------------------------------------------------------

    def mean(self, f: Tensor) -> Tensor:
        """Return f itself, (N, C)."""
        return f

    def mean_jacobian(self, f: Tensor) -> Tensor:
        """Identity, (N, C, C)."""
        return torch.eye(f.shape[-1], dtype=f.dtype, device=f.device).expand(*f.shape, -1)

    def response_variance(self, f: Tensor) -> Tensor:
        """``σ² ν/(ν - 2)``, (N, C)."""
        return (self.log_noise.to(f).exp() * self._df(f) / (self._df(f) - 2.0)).expand(f.shape)

    def distribution(self, f: Tensor, scalar: bool = False) -> Response:
        """Independent responses of Student's t given f."""
        at = f.squeeze(-1) if scalar else f
        scale = (0.5 * self.log_noise.to(f)).exp().expand(f.shape).reshape(at.shape)
        base = td.StudentT(self._df(f).expand(at.shape), at, scale, validate_args=False)
        return FactorizedResponse(self, base, torch.zeros_like(f), self.response_variance(f), scalar)

    def response_moments(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Mean and variance of f, and the variance of y given f, the same at all f."""
        if type(self) is not StudentT:
            return None  # a subclass may override the moments
        return mean, covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0.0), self.response_variance(mean)

    def univariate(self, mean: Tensor, variance: Tensor) -> NormalMixture:
        """Mixtures of N(mean, variance + σ²/λ) over λ ~ Γ(ν/2, ν/2), by the trapezoidal rule in log λ."""
        if type(self) is not StudentT:
            return super().univariate(mean, variance)  # a subclass may override the density
        log_weights, noise = self._noises(mean)
        return NormalMixture(log_weights, mean.unsqueeze(-1), (variance.unsqueeze(-1) + noise).sqrt())

    def integrates(self, num_outputs: int) -> bool:
        """Whether there is one output, whose response is a mixture of normals."""
        return num_outputs == 1 and type(self) is StudentT

    def integrate(self, mean: Tensor, covariance: Tensor, scalar: bool = False) -> Response | None:
        """Response of one output for f ~ N(mean, covariance), a mixture of normals."""
        if not self.integrates(mean.shape[-1]):
            return None  # a subclass may override the density
        log_weights, noise = self._noises(mean)
        variance = covariance.reshape(mean.shape).clamp_min(0.0)
        moments = mean, variance, self.response_variance(mean)
        return StudentTResponse(self, moments, (mean, variance), log_weights, noise.flatten(), scalar=scalar)

    def expected(self, mean: Tensor, covariance: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """E log p and E r by quadrature, output by output; Λ is constant."""
        if type(self) is not StudentT:
            return None  # a subclass may override the density
        distance = float((self.df * self.log_noise.exp()).detach().min().sqrt())  # log p is singular at y ± i √ν σ
        log_prob = expectation_by_output(self, lambda own, f, y: own.log_prob(f, y), mean, covariance, y, distance)
        residual = expectation_by_output(self, lambda own, f, y: own.residual(f, y), mean, covariance, y, distance)
        return log_prob, residual, self.curvature(mean, y)

    def record(self) -> dict[str, Any]:
        """Noise and degrees of freedom, and the mark of missing targets."""
        return {"noise": self.noise.detach(), "df": float(self.df.detach()), **super().record()}

    # --- private --------------------------------------------------------------------------------------------------

    def _noises(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Log weights (K,) of the mixture of normals, and the variances (K,), or (C, K), of their noise."""
        log_weights, precision = gamma_points(self.df)
        return log_weights.to(f), self.log_noise.to(f).exp().unsqueeze(-1) / precision.to(f)

    def _df(self, f: Tensor) -> Tensor:
        return _LEAST_DF + self.log_excess.to(f).exp()

    def _error(self, f: Tensor, y: Tensor) -> Tensor:
        """``y - f``, zero where a target is missing."""
        return self._known(self._filled(f, y) - f, y)

    def _log_information(self, log_noise: Tensor) -> Tensor:
        """log((ν + 1)/((ν + 3) σ²)) in the shape of the noise."""
        df = self._df(log_noise)
        return ((df + 1) / (df + 3)).log() - log_noise

    def _information(self, f: Tensor, y: Tensor | None) -> Tensor:
        """The diagonal of the curvature, (N, C)."""
        return self._known(self._log_information(self.log_noise.to(f)).exp().expand(f.shape), y)


class StudentTResponse(NumberResponse):
    """Response ``y = f + σ t`` for f ~ N(mean, variance), of which it keeps both; points are variances of the noise."""

    @staticmethod
    def normals(points: Tensor, *kept: Tensor) -> tuple[Tensor, Tensor]:
        """N(mean, variance + σ²/λ)."""
        mean, variance = kept
        return mean, variance + points
