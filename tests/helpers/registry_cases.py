"""What the tests ask of one problem of the registry: its dense Jacobians and likelihood derivatives, computed once."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from reference import differentiate, jacobian, outputs
from registry import LIKELIHOODS, NETWORKS, problem, targets


def offered(network: str) -> list[str]:
    """Likelihoods that a network's number of outputs admits."""
    return [name for name, case in LIKELIHOODS.items() if NETWORKS[network].outputs >= case.least_outputs]


def tolerance(name: str, double: float) -> float:
    """A float32 network rounds its own outputs and Jacobians."""
    return double if NETWORKS[name].dtype == torch.float64 else 2e-5


@functools.cache
def jacobians(network: str) -> tuple[Tensor, Tensor]:
    case = problem(network)
    return jacobian(case.network, case.x), jacobian(case.network, case.x_new)


@functools.cache
def derivatives(network: str, likelihood: str) -> tuple[Tensor, Tensor, Tensor]:
    case = problem(network)
    y = targets(LIKELIHOODS[likelihood], case)
    return differentiate(LIKELIHOODS[likelihood].log_density, outputs(case.network, case.x), y)
