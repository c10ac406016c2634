"""Saturation, distance from the optimum, train mode and single precision."""

from __future__ import annotations

import torch
from torch import nn

from networks.case import network, real


@network(outputs=3, perturb=False)
def saturated():
    """Class probabilities down to 1e-12, and labels that hit them."""
    body = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3))
    with torch.no_grad():
        body[2].weight *= 0.5
        body[2].bias.copy_(torch.tensor([0.0, -48.0, 3.0]))
    return body, real(2)


@network(outputs=3, perturb=False)
def far_from_optimum():
    body = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    with torch.no_grad():
        for parameter in body.parameters():
            parameter *= 3
    return body, real(3)


@network(outputs=3, train=True)
def train_mode():
    """In train mode, without anything that would behave differently there."""
    return nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)), real(3)


@network(outputs=3, dtype=torch.float32)
def mlp_float32():
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), real(3)


@network(outputs=2, dtype=torch.float32)
def cnn_float32():
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(3, 4, 2, stride=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, 2),
    ), real(1, 4, 4)
