"""Noise of every form that a Gaussian takes, for N = 7 examples of C = 3 outputs; and normal numbers by a seed."""

from __future__ import annotations

import torch
from torch import Tensor

N, C = 7, 3


COVARIANCE = torch.tensor([[0.5, 0.2, -0.1], [0.2, 0.9, 0.3], [-0.1, 0.3, 0.4]], dtype=torch.float64)
PER_OUTPUT = torch.tensor([0.2, 0.7, 1.5], dtype=torch.float64)
PER_POINT = torch.linspace(0.1, 2.0, N, dtype=torch.float64)
PER_ENTRY = torch.linspace(0.1, 3.0, N * C, dtype=torch.float64).reshape(N, C)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
