"""Hyperparameters of a posterior as scikit-learn has them: one vector theta of logarithms, and the evidence at it."""

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
