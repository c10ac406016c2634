"""Classes of noisy prototypes, and a trained network whose curvature has more directions than a small sketch."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

import ntk_laplace as ntkl


@functools.cache
def digits_like(num_examples: int = 150, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    """The network, inputs and labels."""
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(5, 12, generator=generator, dtype=torch.float64)
    y = torch.randint(5, (num_examples,), generator=generator)
    x = centers[y] + 0.8 * torch.randn(num_examples, 12, generator=generator, dtype=torch.float64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5)).double()
    optimizer = torch.optim.LBFGS(network.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        decay = 0.05 * sum(p.square().sum() for p in network.parameters())
        value = nn.functional.cross_entropy(network(x), y, reduction="sum") + decay
        value.backward()
        return value

    optimizer.step(loss)
    return network, x, y


def classes(structure: Any, prior: ntkl.GaussianPrior | None = None, **settings: Any) -> ntkl.Posterior:
    network, x, y = digits_like()
    prior = ntkl.GaussianPrior(0.1) if prior is None else prior
    return ntkl.laplace(network, (x, y), ntkl.Categorical(), prior, structure, settings=ntkl.Settings(**settings))
