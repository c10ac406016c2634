"""Bernoulli: a binary target for each output; f is the log odds."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ntk_laplace.model.likelihoods.diagonal_form import DiagonalForm
from ntk_laplace.model.likelihoods.mixture import MixtureResponse
from ntk_laplace.model.likelihoods.per_output import PerOutput
from ntk_laplace.model.likelihoods.quadrature import expected_by_output
from ntk_laplace.model.likelihoods.registry import register_likelihood
from ntk_laplace.model.likelihoods.responses import BernoulliResponse, Response
from ntk_laplace.model.likelihoods.targets import require


@register_likelihood
class Bernoulli(PerOutput):
    """Bernoulli likelihood, ``p(y=1 given f) = σ(f)``; C outputs are C independent labels ([T20] Table 2.1).

    Targets are 0 or 1, of shape (N, C), or (N,) for one output. A soft label y in (0, 1) is the probability that the
    label is 1: ``log p = y log σ(f) + (1 - y) log σ(-f)``. Its residual is ``y - σ(f)``; its curvature is the same as
    for hard labels.

    Parameters
    ----------
    missing : str, optional
        "nan": a NaN target is a missing label, which contributes nothing to log p, its gradient and its curvature.
        By default a NaN is an error.

    Raises
    ------
    HyperparameterError
        If `missing` has another value.
    """

    classifies = True
    is_density = False

    def targets(self, y: Any, num_examples: int, num_outputs: int) -> Tensor:
        """Check targets in [0, 1], (N, C), or (N,) for one output."""
        y = super().targets(y, num_examples, num_outputs)
        remedy = "Map labels of -1 and 1 by (y + 1) / 2; use Categorical() for more classes."
        good = ((y >= 0) & (y <= 1)) | y.isnan()
        require(good, y, "targets that are 0 or 1, or a probability of 1", remedy)
        return y

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Log probability of each example, summed over its outputs, (N,), nats."""
        filled = self._filled(f, y)
        return self._known(filled * logsigmoid(f) + (1 - filled) * logsigmoid(-f), y).sum(-1)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """``y - σ(f)`` ([T20] 2.5), (N, C), without cancellation where σ(f) is near y."""
        filled = self._filled(f, y)
        return self._known(filled * torch.sigmoid(-f) - (1 - filled) * torch.sigmoid(f), y)

    def curvature(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """``σ(f) σ(-f)`` on the diagonal ([T20] Table 2.1), 0 where a label is missing, (N, C, C)."""
        return torch.diag_embed(self._known(self.response_variance(f), y))

    def diagonal_form(self, f: Tensor, y: Tensor | None = None) -> DiagonalForm | None:
        """d = σ(f) σ(-f), 0 where a label is missing."""
        if type(self) is not Bernoulli:
            return None  # a subclass may override the curvature
        return DiagonalForm.of(self._known(self.response_variance(f), y))

    def root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """``√(σ(f) σ(-f))`` on the diagonal, 0 where a label is missing, (N, C, C)."""
        # exp of half the logarithm, not a square root: its gradient is finite at saturation
        return torch.diag_embed(self._known((0.5 * (logsigmoid(f) + logsigmoid(-f))).exp(), y))

    def mean(self, f: Tensor) -> Tensor:
        """Probability of 1, ``σ(f)``, (N, C)."""
        return torch.sigmoid(f)

    def mean_jacobian(self, f: Tensor) -> Tensor:
        """``σ(f) σ(-f)`` on the diagonal, (N, C, C)."""
        return self.curvature(f)

    def response_variance(self, f: Tensor) -> Tensor:
        """``σ(f) σ(-f)``, (N, C)."""
        return torch.sigmoid(f) * torch.sigmoid(-f)

    def distribution(self, f: Tensor, scalar: bool = False) -> Response:
        """Independent Bernoulli responses given f."""
        return BernoulliResponse.of(self, f, torch.zeros_like(f), self.response_variance(f), scalar)

    def average(self, f: Tensor, scalar: bool = False) -> Response:
        """Average over samples of f (S, n, C): a Bernoulli for one output, a joint mixture for several."""
        if self.keeps_samples(f.shape[-1]):  # outputs are dependent through the uncertainty of f
            return MixtureResponse(self, f, scalar)
        log_yes, log_no = (logsigmoid(s * f).logsumexp(0) - math.log(f.shape[0]) for s in (1, -1))
        epistemic = self.mean(f).var(0, correction=0)
        return BernoulliResponse.of(self, log_yes - log_no, epistemic, self.response_variance(f).mean(0), scalar)

    def keeps_samples(self, num_outputs: int) -> bool:
        """Of several outputs."""
        return num_outputs > 1

    def expected(self, mean: Tensor, covariance: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """By quadrature, output by output: log p is a sum over outputs."""
        if type(self) is not Bernoulli:
            return None  # a subclass may override the density
        return expected_by_output(self, mean, covariance, y)

    def probit(self, mean: Tensor, covariance: Tensor, scalar: bool = False) -> Response:
        """``σ(κ f)`` with ``κ = (1 + π v/8)^-½`` ([MacKay 1992])."""
        return self._probit(mean, covariance.diagonal(dim1=-2, dim2=-1), scalar)

    def probit_by_variance(self, mean: Tensor, variance: Tensor, scalar: bool = False) -> Response | None:
        """`probit`, which depends on the variances alone."""
        return self._probit(mean, variance, scalar) if type(self) is Bernoulli else None  # a subclass may override it

    def _probit(self, mean: Tensor, variance: Tensor, scalar: bool) -> Response:
        kappa = (1 + math.pi / 8 * variance).rsqrt()
        logits = kappa * mean
        # E[σ'(f)] = d E[σ(f)]/d mean = κ σ'(κ f), which is the aleatoric part
        total = self.response_variance(logits)
        return BernoulliResponse.of(self, logits, (1 - kappa) * total, kappa * total, scalar)
