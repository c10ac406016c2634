"""The demo's networks, small, float64, seeded and smooth (tanh), and L-BFGS to the optimum of their log joint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from ntk_laplace.model.data import Batches
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.model.network import Caller
from ntk_laplace.model.objective import Objective
from ntk_laplace.model.optimum import Descent, Held
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.runtime.random_state import seeded_rng

_ITERATIONS = 20  # of L-BFGS between two looks


def seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build a float64 network with initial weights from `seed`, without changing torch's random state."""
    with seeded_rng(torch.device("cpu"), seed):
        return build().double()


def mlp(widths: Sequence[int]) -> nn.Module:
    """Linear layers of the given widths (including input and output) with tanh between; images are flattened."""
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def cnn(channels: tuple[int, int], outputs: int) -> nn.Module:
    """Two convolutions of stride two and a linear head, for images (N, 1, 8, 8)."""
    first, second = channels
    return nn.Sequential(nn.Conv2d(1, first, 3, stride=2, padding=1), nn.Tanh(),
                         nn.Conv2d(first, second, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten(),
                         nn.Linear(second * 4, outputs))


def train_map(
    network: nn.Module, data: tuple[Tensor, Tensor], likelihood: Likelihood, prior: GaussianPrior,
    tolerance: float = 1e-5, steps: int = 1000,
) -> None:
    """Train a network, in eval mode and in place, to the optimum of the log joint, from its present weights.

    The data are all inputs and targets; hyperparameters are fixed. The training ends where the bound of the Newton
    decrement is below the tolerance, in nats per example, or after so many steps of L-BFGS.
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
