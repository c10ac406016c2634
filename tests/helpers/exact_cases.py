"""Exact fits over the registry, networks x likelihoods x priors, beside their dense references, computed once."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.func import functional_call, grad, hessian, vmap

import ntk_laplace as ntkl
from pairwise import one_each, pairwise
from reference import Dense
from registry import LIKELIHOODS, NETWORKS, PRIORS, Problem, fresh, problem, targets
from registry_cases import derivatives, jacobians, offered

STRUCTURES = ("gp", "full")


def admits(network: str, likelihood: str, *_: str) -> bool:
    return likelihood in offered(network)


# one likelihood and one prior for each network; all pairs of these two occur
TURNS = one_each(NETWORKS, LIKELIHOODS, PRIORS, allowed=admits, seed=1)
# every network with every likelihood and with every prior, and every likelihood with every prior; those above too,
# whose fits and dense references many tests need
CASES = pairwise(NETWORKS, LIKELIHOODS, PRIORS, allowed=admits, given=TURNS)


def ids(case: tuple[str, ...]) -> str:
    return "-".join(case)


@functools.cache
def truth(network: str, likelihood: str, prior: str) -> Dense:
    precision, mean = PRIORS[prior].dense(problem(network))
    offset = problem(network).theta - mean
    return Dense(*derivatives(network, likelihood), jacobians(network)[0], offset, precision)


@functools.cache
def fit(network: str, likelihood: str, prior: str, structure: str):
    case = problem(network)
    y = targets(LIKELIHOODS[likelihood], case)
    model = LIKELIHOODS[likelihood].build()
    return ntkl.laplace(case.network, (case.x, y), model, prior=PRIORS[prior].build(case), structure=structure)


@functools.cache
def trained(likelihood: str) -> tuple[Problem, Tensor]:
    """Bring a network to its MAP under the scalar prior by Newton's method, to a gradient of rounding size."""
    case, density = fresh("far_from_optimum"), LIKELIHOODS[likelihood].log_density
    y, weights = targets(LIKELIHOODS[likelihood], case), dict(case.network.named_parameters())

    def loss(theta: Tensor) -> Tensor:
        parts = theta.split([w.numel() for w in weights.values()])
        values = {name: part.view_as(w) for (name, w), part in zip(weights.items(), parts, strict=True)}
        f = functional_call(case.network, values, (case.x,))
        return 0.35 * theta.square().sum() - vmap(density)(f, y).sum()

    theta = case.theta.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([theta], max_iter=200, tolerance_change=0, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(theta)
        value.backward()
        return value

    optimizer.step(closure)
    theta = theta.detach()
    for _ in range(6):
        theta = theta - torch.linalg.solve(hessian(loss)(theta), grad(loss)(theta))
    torch.nn.utils.vector_to_parameters(theta, case.network.parameters())
    return case, y
