"""The demo's networks: small, float64, seeded, and smooth (tanh), which lets L-BFGS reach a stationary point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import nn

__all__ = ["cnn", "mlp", "seeded"]


def seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build a float64 network with initial weights from `seed`, without changing torch's random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
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
    return nn.Sequential(
        nn.Conv2d(1, first, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(first, second, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(second * 4, outputs),
    )
