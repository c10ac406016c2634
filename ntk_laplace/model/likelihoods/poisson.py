"""Poisson: counts; f is the log rate."""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributions as td

from ntk_laplace.model.likelihoods.counts import CountResponse, Counts
from ntk_laplace.model.likelihoods.diagonal_form import DiagonalForm
from ntk_laplace.model.likelihoods.registry import register_likelihood
from ntk_laplace.model.likelihoods.responses import Response


@register_likelihood
class Poisson(Counts):
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

    @property
    def dispersion(self) -> Tensor:
        """0, ()."""
        return torch.zeros((), dtype=torch.float64, device="cpu")

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Log probability of each example, summed over its outputs, (N,), nats."""
        filled = self._filled(f, y)
        return self._known(filled * f - f.exp() - torch.lgamma(filled + 1), y).sum(-1)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """``y - exp(f)`` ([T20] 2.5), (N, C)."""
        return self._known(self._filled(f, y) - self._rate(f), y)

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

    def response_variance(self, f: Tensor) -> Tensor:
        """``exp(f)``, (N, C)."""
        return f.exp()

    def distribution(self, f: Tensor, scalar: bool = False) -> Response:
        """Independent Poisson responses given f."""
        rate = self._rate(f)
        base = td.Poisson(rate.squeeze(-1) if scalar else rate, validate_args=False)
        return CountResponse(self, base, torch.zeros_like(rate), rate, scalar)

    def expected(self, mean: Tensor, covariance: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Those of f = `mean` with the expected rate ``E exp(f) = exp(mean + v/2)``."""
        if type(self) is not Poisson:
            return None  # a subclass may override the density
        rate = self._rate(mean + 0.5 * covariance.diagonal(dim1=-2, dim2=-1))
        filled = self._filled(mean, y)
        terms = self._known(filled * mean - rate - torch.lgamma(filled + 1), y)
        return terms.sum(-1), self._known(filled - rate, y), torch.diag_embed(self._known(rate, y))
