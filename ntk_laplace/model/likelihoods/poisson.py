"""Poisson: counts; f is the log rate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributions as td

from ntk_laplace.errors import NonFiniteError
from ntk_laplace.model.likelihoods.diagonal_form import DiagonalForm
from ntk_laplace.model.likelihoods.per_output import PerOutput
from ntk_laplace.model.likelihoods.registry import register_likelihood
from ntk_laplace.model.likelihoods.responses import FactorizedResponse, Response
from ntk_laplace.model.likelihoods.targets import first_bad, require


@register_likelihood
class Poisson(PerOutput):
    """Poisson likelihood of counts, ``rate = exp(f)``, independent over outputs ([T20] Table 2.1).

    Targets are nonnegative whole numbers of shape (N, C), or (N,) for one output.

    Parameters
    ----------
    missing : str, optional
        "nan": a NaN count is missing and contributes nothing to log p, its gradient and its curvature. By default a
        NaN is an error.

    Raises
    ------
    HyperparameterError
        If `missing` has another value.
    """

    is_density = False

    def targets(self, y: Any, num_examples: int, num_outputs: int) -> Tensor:
        """Check counts, (N, C), or (N,) for one output."""
        y = super().targets(y, num_examples, num_outputs)
        remedy = "Poisson() is for counts; continuous targets want another likelihood, such as Gaussian()."
        good = ((y >= 0) & (y == y.floor())) | y.isnan()
        require(good, y, "targets that are whole numbers from 0", remedy)
        return y

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Log probability of each example, summed over its outputs, (N,), nats."""
        filled = self._filled(f, y)
        return self._known(filled * f - f.exp() - torch.lgamma(filled + 1), y).sum(-1)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """``y - exp(f)`` ([T20] 2.5), (N, C)."""
        return self._known(y.to(f) - self._rate(f), y)

    def curvature(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """``exp(f)`` on the diagonal ([T20] Table 2.1), 0 where a count is missing, (N, C, C)."""
        return torch.diag_embed(self._known(self._rate(f), y))

    def diagonal_form(self, f: Tensor, y: Tensor | None = None) -> DiagonalForm | None:
        """d = exp(f), 0 where a count is missing."""
        if type(self) is not Poisson:
            return None  # a subclass may override the curvature
        return DiagonalForm.of(self._known(self._rate(f), y))

    def root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """``exp(f/2)`` on the diagonal, 0 where a count is missing, (N, C, C)."""
        self._rate(f)
        return torch.diag_embed(self._known((0.5 * f).exp(), y))

    def mean(self, f: Tensor) -> Tensor:
        """Rate, ``exp(f)``, (N, C)."""
        return f.exp()

    def mean_jacobian(self, f: Tensor) -> Tensor:
        """``exp(f)`` on the diagonal, (N, C, C)."""
        return torch.diag_embed(f.exp())

    def response_variance(self, f: Tensor) -> Tensor:
        """``exp(f)``, (N, C)."""
        return f.exp()

    def distribution(self, f: Tensor, scalar: bool = False) -> Response:
        """Independent Poisson responses given f."""
        rate = self._rate(f)
        base = td.Poisson(rate.squeeze(-1) if scalar else rate, validate_args=False)
        return FactorizedResponse(self, base, torch.zeros_like(rate), rate, scalar)

    def response_moments(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """The rate is lognormal: its mean is ``exp(mean + v/2)``, its variance ``exp(2 mean + v) (exp(v) - 1)``."""
        if type(self) is not Poisson:
            return None  # a subclass may override the moments
        variance = covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0.0)
        rate = (mean + 0.5 * variance).exp()
        return rate, (2 * (mean + variance) + (-torch.expm1(-variance)).log()).exp(), rate

    def expected(self, mean: Tensor, covariance: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Those of f = `mean` with the expected rate ``E exp(f) = exp(mean + v/2)``."""
        if type(self) is not Poisson:
            return None  # a subclass may override the density
        rate = self._rate(mean + 0.5 * covariance.diagonal(dim1=-2, dim2=-1))
        filled = self._filled(mean, y)
        terms = self._known(filled * mean - rate - torch.lgamma(filled + 1), y)
        return terms.sum(-1), self._known(filled - rate, y), torch.diag_embed(self._known(rate, y))

    def _rate(self, f: Tensor) -> Tensor:
        rate = f.exp()
        if not rate.isfinite().all():
            index = first_bad(~rate.isfinite())
            raise NonFiniteError(f"rates exp(f) within {f.dtype}",
                                 f"f = {float(f.detach()[index].max()):.3g} at example {index}",
                                 "Scale the network's output, or use float64.")
        return rate
