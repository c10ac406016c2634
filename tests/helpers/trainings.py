"""Small trainings with evidence: networks, data, and `train` with defaults that take a fraction of a second."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import ntk_laplace as ntkl

F64 = torch.float64


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def mlp(*widths: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for d_in, d_out in pairwise(widths):
        layers += [nn.Linear(d_in, d_out), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def sine(n: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.linspace(-2, 2, n, dtype=F64).unsqueeze(1)
    return x, torch.sin(3 * x) + 0.2 * torch.randn(n, 1, generator=generator, dtype=F64)


def classes(n: int = 30) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(n, 3, generator=generator, dtype=F64)
    return x, (x[:, 0] + 0.5 * x[:, 1].square() > 0.3).long() + (x[:, 2] > 1).long()


def flat(network: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in network.parameters()])


def train(network: nn.Module, data: Any = None, likelihood: ntkl.Likelihood | None = None, **options: Any):
    options = {"optimizer": adam, "epochs": 6, "schedule": ntkl.EvidenceSchedule(2, 4)} | options
    return ntkl.train_with_evidence(
        network, sine() if data is None else data, ntkl.Gaussian(0.5) if likelihood is None else likelihood, **options
    )
