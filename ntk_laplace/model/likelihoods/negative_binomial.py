"""Negative binomial: counts whose variance is larger than their mean."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributions as td

from ntk_laplace.errors import require_number
from ntk_laplace.model.likelihoods.count_mass import log1p_exp, log_mass
from ntk_laplace.model.likelihoods.counts import CountResponse, Counts
from ntk_laplace.model.likelihoods.diagonal_form import DiagonalForm
from ntk_laplace.model.likelihoods.quadrature import expected_by_output
from ntk_laplace.model.likelihoods.registry import register_likelihood
from ntk_laplace.model.likelihoods.responses import Response
from ntk_laplace.runtime.scalars import scalar

_NONE = -300.0  # log of a root of the information that is 0


@register_likelihood
class NegativeBinomial(Counts):
    """Negative binomial likelihood of counts with mean ``μ = exp(f)`` and variance ``μ + α μ²``, output by output.

    A count is Poisson with the rate ``μ λ``, where λ has mean 1 and variance α, the dispersion: rates differ for
    reasons that the inputs do not tell. `Poisson` is the limit α = 0. The curvature is the Fisher information,
    ``μ/(1 + α μ)``. Targets are nonnegative whole numbers of shape (N, C), or (N,) for one output.

    Parameters
    ----------
    dispersion : float
        α, at the start if it is learned.
    missing : str, optional
        "nan": a NaN count is missing and contributes nothing to log p, its gradient and its curvature. By default a
        NaN is an error.

    Attributes
    ----------
    log_dispersion : nn.Parameter
        Logarithm of α. `train_with_evidence` and `fit_hyperparameters` move it.

    Raises
    ------
    HyperparameterError
        If the dispersion is not positive, or `missing` has another value.
    """

    def __init__(self, dispersion: float = 0.1, missing: str | None = None) -> None:
        super().__init__(missing)
        require_number("a positive dispersion", dispersion, "Pass dispersion=0.1.", above=0)
        self.log_dispersion = nn.Parameter(torch.tensor(float(dispersion), dtype=torch.float64, device="cpu").log())

    @property
    def dispersion(self) -> Tensor:
        """α, ()."""
        return scalar(self.log_dispersion.exp())

    # --- the density and its derivatives in f ---------------------------------------------------------------

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Log probability of each example, summed over its outputs, (N,), nats.

        With r = 1/α and u = f + log α it is
        ``log Γ(y + r) - log Γ(r) - y log r - log y! + y f - (y + r) log(1 + eᵘ)``.
        """
        return self._known(log_mass(self._filled(f, y), f, self.log_dispersion), y).sum(-1)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """``(y - μ)/(1 + α μ)``, 0 where a count is missing, (N, C)."""
        u = self._logit(f)
        return self._known(self._filled(f, y) * torch.sigmoid(-u) - self._size(f) * torch.sigmoid(u), y)

    def curvature(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """The Fisher information ``μ/(1 + α μ)`` on the diagonal, 0 where a count is missing, (N, C, C)."""
        return torch.diag_embed(self._information(f, y))

    def diagonal_form(self, f: Tensor, y: Tensor | None = None) -> DiagonalForm | None:
        """d = μ/(1 + α μ), 0 where a count is missing."""
        if type(self) is not NegativeBinomial:
            return None  # a subclass may override the curvature
        return DiagonalForm.of(self._information(f, y))

    def root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """The root of the information on the diagonal, 0 where a count is missing, (N, C, C)."""
        return torch.diag_embed(self._known((0.5 * self._log_information(f)).exp(), y))

    def left_inverse(self, f: Tensor) -> Tensor | None:
        """One over the root of the information on the diagonal, 0 where that is 0, (N, C, C)."""
        if type(self) is not NegativeBinomial:
            return None  # a subclass may override the curvature
        log_root = 0.5 * self._log_information(f)
        return torch.diag_embed(torch.where(log_root > _NONE, (-log_root.clamp_min(_NONE)).exp(), 0.0))

    # --- the response -----------------------------------------------------------------------------------------

    def distribution(self, f: Tensor, scalar: bool = False) -> Response:
        """Independent negative binomial responses given f."""
        self._rate(f)
        at = f.squeeze(-1) if scalar else f
        size = self._size(f).expand(at.shape)
        base = td.NegativeBinomial(size, logits=self._logit(at), validate_args=False)
        return CountResponse(self, base, torch.zeros_like(f), self.response_variance(f), scalar)

    def expected(self, mean: Tensor, covariance: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """E log p, E r and E Λ by quadrature, output by output; log p is singular at -log α ± iπ."""
        if type(self) is not NegativeBinomial:
            return None  # a subclass may override the density
        return expected_by_output(self, mean, covariance, y, math.pi)

    def record(self) -> dict[str, Any]:
        """The dispersion, and the mark of missing counts."""
        return {"dispersion": float(self.dispersion.detach()), **super().record()}

    # --- private --------------------------------------------------------------------------------------------------

    def _size(self, f: Tensor) -> Tensor:
        """r = 1/α."""
        return (-self.log_dispersion.to(f)).exp()

    def _logit(self, f: Tensor) -> Tensor:
        """log(α μ)."""
        return f + self.log_dispersion.to(f)

    def _log_information(self, f: Tensor) -> Tensor:
        return f - log1p_exp(self._logit(f))

    def _information(self, f: Tensor, y: Tensor | None) -> Tensor:
        """The diagonal of the curvature, (N, C)."""
        return self._known(self._log_information(f).exp(), y)
