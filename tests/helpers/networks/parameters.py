"""Norm layers, and parameters that no layer owns."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from networks.case import network, real


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (
            nn.LayerNorm((3, 4)),
            nn.RMSNorm(4),
            nn.InstanceNorm1d(3, affine=True),
        )
        self.four, self.out = nn.LayerNorm(4, bias=False), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.two(self.one(x).transpose(0, 1))).transpose(0, 1)
        return self.out(torch.tanh(self.four(self.three(h + x))).flatten(1))


@network(outputs=2)
def norms():
    return Norms(), real(3, 4)


class Direct(nn.Module):
    """Parameters that no layer owns: positions, scales, products, class token, slices."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 3)), nn.Parameter(torch.randn(4, 3))
        self.log_scale, self.matrix = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.randn(3, 4))
        self.heads, self.table = nn.Parameter(torch.randn(2, 4, 2)), nn.Parameter(torch.randn(6, 4))
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        h = torch.tanh((x * self.log_scale.exp()) @ self.matrix)
        heads = torch.einsum("ntd,hde->nthe", h, self.heads).flatten(2)
        return (
            self.gain * (torch.tanh(heads).mean(1) @ self.table[:4, 1:] + self.table[4, :3])
            + self.table[5, 1:]
        )


@network(outputs=3)
def direct_parameters():
    return Direct(), real(3, 3)


class LowRank(nn.Module):
    """A frozen weight plus a trained product of two factors, multiplied out and applied in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(4, 5).requires_grad_(False), nn.Linear(5, 3)
        self.down, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(F.linear(x, self.base.weight + self.up @ self.down, self.base.bias))
        return self.head(h + F.linear(F.linear(x, self.down), self.up))


@network(outputs=3)
def low_rank():
    return LowRank(), real(4)


@network(outputs=3)
def weight_normalized():
    return nn.Sequential(
        weight_norm(nn.Linear(3, 5)), nn.Tanh(), weight_norm(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 3)
    ), real(3)


class Activations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.shape_one = nn.Conv1d(1, 3, 2), nn.PReLU(3)
        self.bilinear, self.shape_two, self.out = nn.Bilinear(6, 4, 3), nn.PReLU(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.shape_one(self.one(x[:, None, :3])).flatten(1)
        return self.out(self.shape_two(self.bilinear(h, x)))


@network(outputs=2, func=False)
def prelu_bilinear():
    return Activations(), real(4)


class Cube(torch.autograd.Function):
    """x -> w x³, with a derivative of its own that no rule knows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return w * x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return 3 * g * w * x**2, (g * x**3).sum(0)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.w, self.out = nn.Linear(3, 4), nn.Parameter(torch.ones(4)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(Cube.apply(self.first(x), self.w)))


@network(outputs=2, func=False)
def custom_function():
    return Custom(), real(3)
