"""Hyperparameters of a posterior as scikit-learn has them: one vector theta of logarithms, and the evidence at it.

And the evidence with the precisions of the inputs integrated out, which compares networks that learn many of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from ntk_laplace.errors import HyperparameterError
from ntk_laplace.posterior import Posterior
from ntk_laplace.runtime.conversion import to_tensor
from ntk_laplace.tools.estimators.tables import Array


def theta_of(posterior: Posterior) -> Array:
    """Logarithms of the prior precisions of each group, then those of the likelihood."""
    return torch.cat([parameter.detach().flatten().double() for parameter in _parameters(posterior)]).cpu().numpy()


def evidence_at(posterior: Posterior, theta: Any, gradient: bool) -> tuple[float, Array | None]:
    """The evidence at other hyperparameters, of the posterior's own if None, and its gradient; the posterior keeps its.

    HyperparameterError if theta is not one finite number for each.
    """
    own = _parameters(posterior)
    before = [parameter.detach().clone() for parameter in own]
    try:
        if theta is not None:
            _set(own, np.asarray(theta, dtype=np.float64))
        with torch.enable_grad():
            value = posterior.log_marginal_likelihood()
            slopes = torch.autograd.grad(value, own) if gradient else ()
        found = torch.cat([slope.flatten().double() for slope in slopes]).cpu().numpy() if gradient else None
        return float(value), found
    finally:
        with torch.no_grad():
            for parameter, value_before in zip(own, before, strict=True):
                parameter.copy_(value_before)


@torch.no_grad()
def integrated_evidence(posterior: Posterior) -> float:
    """Log evidence with the precisions δ_i of the inputs integrated out, in nats; the evidence where there are none.

    With ``log δ_i ~ N(m, spread²)``, m the mean of the learned ones, and the evidence's curvature in log δ_i about half
    of the effective parameters γ_i (MacKay 1992, Bayesian interpolation, section 4), Laplace's approximation is

        log p(D | δ) + log p(log δ | m) - ½ Σ_i log(1 + ½ spread² γ_i),

    the second term without its constant. So each input that the network uses costs what its precision was chosen from.
    """
    prior, value = posterior.prior, float(posterior.log_marginal_likelihood().detach())
    if not prior.has_hyperprior:
        return value
    used = posterior.fitted.precision.effective_parameters()[prior.inputs].double().clamp_min(0.0)
    return value + float(prior.log_hyperprior() - 0.5 * torch.log1p(0.5 * prior.spread**2 * used).sum())


def _parameters(posterior: Posterior) -> list[nn.Parameter]:
    return [*posterior.prior.parameters(), *posterior.likelihood.parameters()]


def _set(own: list[nn.Parameter], theta: Array) -> None:
    sizes = [parameter.numel() for parameter in own]
    with np.errstate(over="ignore", invalid="ignore"):
        values = np.exp(theta)
    if theta.shape != (sum(sizes),) or not (np.isfinite(values) & (values > 0)).all():
        got = f"shape {theta.shape}" if theta.shape != (sum(sizes),) else f"{theta.min():g} to {theta.max():g}"
        raise HyperparameterError(f"theta of shape ({sum(sizes)},), logarithms of finite numbers", got,
                                  "Pass an array like theta_.")
    with torch.no_grad():
        for parameter, part in zip(own, to_tensor(theta).split(sizes), strict=True):
            parameter.copy_(part.view_as(parameter))
