"""Leave-one-out of every training point, from one factorization."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ntk_laplace.curvature import FunctionSpace
from ntk_laplace.explain.algebra import leverage_blocks, leverages, without_each
from ntk_laplace.predictive import predictive
from ntk_laplace.structures import Structure, Trained

__all__ = ["LeaveOneOut", "leave_one_out"]


@dataclass(frozen=True)
class LeaveOneOut:
    """Predictions at each training point from all the others.

    Attributes
    ----------
    mean : Tensor, (N, C)
        Mean of f_i without point i.
    covariance : Tensor, (N, C, C)
        Covariance of f_i without point i.
    log_density : Tensor, (N,)
        log p(y_i | the others), f_i integrated out, in nats.
    plug_in_log_density : Tensor, (N,)
        log p(y_i | mean).
    leverage : Tensor, (N,)
        Largest eigenvalue of SᵀVS, in [0, 1): how much the fit at i rests on i.
    """

    mean: Tensor
    covariance: Tensor
    log_density: Tensor
    plug_in_log_density: Tensor
    leverage: Tensor


def leave_one_out(trained: Trained, structure: Structure, space: FunctionSpace, samples: int = 1000) -> LeaveOneOut:
    """Compute means, covariances, log densities and leverages."""
    points, likelihood = structure.points, trained.likelihood
    mean, covariance = without_each(space, points, likelihood)
    targets = points.targets.squeeze(-1) if trained.network.scalar and points.targets.ndim == 2 else points.targets
    generator = torch.Generator(device=mean.device).manual_seed(0)
    with torch.no_grad():
        plug_in = likelihood.log_prob(mean, points.targets)
        integrated = predictive(likelihood, mean, covariance, "glm", samples, generator, trained.network.scalar)
        log_density = integrated.log_prob(targets)
    return LeaveOneOut(mean, covariance, log_density, plug_in, leverages(leverage_blocks(space))[:, -1])
