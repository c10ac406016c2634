"""Bernoulli: yes or no for each output, f the log odds."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Size, Tensor
from torch.nn.functional import logsigmoid

from ntk_laplace.likelihoods.base import Likelihood
from ntk_laplace.likelihoods.mixture import MixtureResponse
from ntk_laplace.likelihoods.responses import BernoulliResponse, Response
from ntk_laplace.likelihoods.targets import read_columns, require

__all__ = ["Bernoulli"]


class Bernoulli(Likelihood):
    """Bernoulli likelihood, ``p(y=1 given f) = σ(f)``; C outputs are C independent labels ([T20] Table 2.1).

    Targets are 0 or 1, of shape (N, C), or (N,) for one output.
    """

    classifies = True

    def targets(self, y: Any, num_examples: int, num_outputs: int) -> Tensor:
        """Check targets of 0 and 1, (N, C), and (N,) for one output."""
        y = read_columns(y, num_examples, num_outputs)
        remedy = "Map labels of -1 and 1 by (y + 1) / 2; use Categorical() for more classes."
        require((y == 0) | (y == 1), y, "targets that are 0 or 1", remedy)
        return y

    def event_shape(self, num_outputs: int) -> Size:
        """(C,)."""
        return Size((num_outputs,))

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Log probability of each example, summed over its outputs, (N,), nats."""
        y = y.to(f)
        return (y * logsigmoid(f) + (1 - y) * logsigmoid(-f)).sum(-1)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """``y - σ(f)`` ([T20] 2.5), (N, C), without cancellation where σ(f) is near y."""
        y = y.to(f)
        return y * torch.sigmoid(-f) - (1 - y) * torch.sigmoid(f)

    def hessian(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """``σ(f) σ(-f)`` on the diagonal ([T20] Table 2.1), (N, C, C)."""
        return torch.diag_embed(self.response_variance(f))

    def root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """``√(σ(f) σ(-f))`` on the diagonal, (N, C, C)."""
        # half the logarithm and not a square root: its gradient is finite at saturation
        return torch.diag_embed((0.5 * (logsigmoid(f) + logsigmoid(-f))).exp())

    def mean(self, f: Tensor) -> Tensor:
        """Probability of 1, ``σ(f)``, (N, C)."""
        return torch.sigmoid(f)

    def mean_jacobian(self, f: Tensor) -> Tensor:
        """``σ(f) σ(-f)`` on the diagonal, (N, C, C)."""
        return self.hessian(f)

    def response_covariance(self, f: Tensor) -> Tensor:
        """``σ(f) σ(-f)`` on the diagonal, (N, C, C)."""
        return self.hessian(f)

    def response_variance(self, f: Tensor) -> Tensor:
        """``σ(f) σ(-f)``, (N, C)."""
        return torch.sigmoid(f) * torch.sigmoid(-f)

    def distribution(self, f: Tensor, scalar: bool = False) -> Response:
        """Independent Bernoulli responses given f."""
        return BernoulliResponse(self, f, torch.zeros_like(f), self.response_variance(f), scalar)

    def average(self, f: Tensor, scalar: bool = False) -> Response:
        """Average over samples of f (S, n, C): of one output a Bernoulli, of more their joint mixture."""
        if f.shape[-1] > 1:  # outputs that share f's uncertainty are dependent
            return MixtureResponse(self, f, scalar)
        log_yes, log_no = (logsigmoid(s * f).logsumexp(0) - math.log(f.shape[0]) for s in (1, -1))
        epistemic = self.mean(f).var(0, correction=0)
        return BernoulliResponse(self, log_yes - log_no, epistemic, self.response_variance(f).mean(0), scalar)

    def probit(self, mean: Tensor, covariance: Tensor, scalar: bool = False) -> Response:
        """``σ(κ f)`` with ``κ = (1 + π v/8)^-½`` ([MacKay 1992])."""
        kappa = (1 + math.pi / 8 * covariance.diagonal(dim1=-2, dim2=-1)).rsqrt()
        logits = kappa * mean
        # E[σ'(f)] = d E[σ(f)]/d mean = κ σ'(κ f), which is the aleatoric part
        variance = self.response_variance(logits)
        return BernoulliResponse(self, logits, (1 - kappa) * variance, kappa * variance, scalar)
