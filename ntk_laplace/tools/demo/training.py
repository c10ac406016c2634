"""Training to the MAP: the objective that the Laplace approximation expands, to its optimum."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ntk_laplace.model.data import Batches
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.model.network import Caller
from ntk_laplace.model.objective import Objective
from ntk_laplace.model.optimum import Descent, Held
from ntk_laplace.model.priors import GaussianPrior

__all__ = ["train_map"]

_ITERATIONS = 20  # of L-BFGS between two looks


def train_map(
    network: nn.Module, data: tuple[Tensor, Tensor], likelihood: Likelihood, prior: GaussianPrior,
    tolerance: float = 1e-5, steps: int = 1000,
) -> None:
    """Train a network in place to the optimum of the log joint, from its present weights.

    Parameters
    ----------
    network : nn.Module
        In eval mode.
    data : (Tensor, Tensor)
        All inputs and targets.
    likelihood, prior
        With fixed hyperparameters.
    tolerance : float
        Stop where the bound of the Newton decrement is below it, nats per example.
    steps : int
        Iterations of L-BFGS at most.
    """
    with torch.no_grad():
        outputs = network(data[0])
    n, c = len(outputs), outputs[0].numel()
    likelihood.bind(n, c)
    prior.bind({name: parameter.shape for name, parameter in network.named_parameters()})
    objective = Objective(Caller(network), likelihood, prior, n, c)
    descent = Descent(objective, Held(Batches(data, None, outputs.device)), steps)
    for _ in range(0, steps, _ITERATIONS):
        if descent.bound <= tolerance or not descent.advance(_ITERATIONS):
            break
    descent.settle()
    network.zero_grad()
