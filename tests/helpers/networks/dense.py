"""Dense networks: depth, shapes of outputs, frozen, shared and unused weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from networks.case import Lambda, network, real


@network(outputs=5)
def deep_mlp():
    return nn.Sequential(
        nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6), nn.SiLU(), nn.Linear(6, 5)
    ), real(3)


@network(outputs=3)
def linear_model():
    return nn.Linear(4, 3), real(4)


@network(outputs=1, scalar=True, examples=9)
def scalar_outputs():
    return nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 1), Lambda(lambda f: f.squeeze(-1))), real(
        3
    )


@network(outputs=1, examples=9)
def one_column():
    return nn.Sequential(nn.Linear(2, 5), nn.Softplus(), nn.Linear(5, 1, bias=False)), real(2)


@network(outputs=3)
def dead_units():
    """Examples on which no unit of the hidden layer is alive have no derivative in the layers before it."""
    body = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    return body, lambda n: torch.cat(
        [torch.full((1, 2), -40.0), torch.randn(n - 2, 2), torch.full((1, 2), 40.0)]
    )


@network(outputs=3)
def frozen_part():
    body = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    body[0].requires_grad_(False)
    body[2].bias.requires_grad_(False)
    return body, real(3)


class LayerTwice(nn.Module):
    """A layer that is used three times, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.head = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 4)
        self.again = self.shared

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.head(torch.tanh(self.again(torch.tanh(self.shared(h)))) + self.shared(h))


@network(outputs=4, func=False)  # torch.func.functional_call leaves its values in a module with two names
def layer_twice():
    return LayerTwice(), real(3)


class Unused(nn.Module):
    """One parameter is never reached and one is reached through zeros alone."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare, self.closed, self.head = (
            nn.Linear(3, 4),
            nn.Linear(3, 2),
            nn.Linear(3, 4),
            nn.Linear(4, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.used(x)) + 0.0 * self.closed(x))


@network(outputs=2)
def unused_parameters():
    return Unused(), real(3)


class Positions(nn.Module):
    """Linear layers on (N, T, D) and (N, S, T, D), as many positions as examples."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(3, 4), nn.Linear(2, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.one(x)).unflatten(2, (2, 2))
        return self.head(torch.tanh(self.two(h)).mean(1).flatten(1))


@network(outputs=3, examples=6)
def shared_positions():
    return Positions(), real(6, 3)
