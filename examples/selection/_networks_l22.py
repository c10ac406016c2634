"""The networks of the architecture study after [L22] appendix F, for small gray images, and their training."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["NETWORKS", "SIX", "network", "precision_per_parameter", "train"]

_DEPTHS, _WIDTHS = (1, 2, 3, 4, 5), (2, 4, 8, 12, 16)
_RATE = 2e-2


class Residual(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut. The second starts at zero, as in fixup, instead of a batch norm."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = _convolution(before, width, stride)
        self.second = _convolution(width, width)
        nn.init.zeros_(self.second.weight)
        self.shortcut = nn.Conv2d(before, width, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))) + self.shortcut(x))


def _convolution(before: int, width: int, stride: int = 1) -> nn.Conv2d:
    layer = nn.Conv2d(before, width, 3, stride, 1)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    nn.init.zeros_(layer.bias)
    return layer


def _cnn(depth: int, width: int, side: int) -> nn.Sequential:
    """3 x 3 convolutions with ReLU, average pools after the first and the third (or last), one linear layer."""
    layers: list[nn.Module] = [nn.Unflatten(1, (1, side, side))]
    for number in range(depth):
        layers += [_convolution(width if number else 1, width), nn.ReLU()]
        if number in (0, 2):
            layers.append(nn.AvgPool2d(2))
    if depth < 3:
        layers.append(nn.AvgPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width * (side // 4) ** 2, 10))


def _resnet(blocks: int, width: int, side: int) -> nn.Sequential:
    """A convolution of stride 2, two stages of residual blocks with `width` and twice as many channels, mean pool."""
    layers: list[nn.Module] = [nn.Unflatten(1, (1, side, side)), _convolution(1, width, 2), nn.ReLU()]
    layers += [Residual(width, width, 1) for _ in range(blocks)]
    layers += [Residual(2 * width if number else width, 2 * width, 1 if number else 2) for number in range(blocks)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10))


NETWORKS = {
    **{f"conv {depth} x {width}": (_cnn, depth, width) for depth in _DEPTHS for width in _WIDTHS},
    **{f"res {4 * blocks + 2} x {width}": (_resnet, blocks, width) for blocks in (1, 2) for width in (4, 8)},
}
"""25 CNNs, depth x width, and four residual networks, layers x width."""

SIX = ("conv 1 x 4", "conv 1 x 16", "conv 3 x 4", "conv 3 x 8", "conv 5 x 8", "res 6 x 8")
"""Those of the large data sets."""


def network(name: str, side: int, seed: int) -> nn.Sequential:
    """A network of `NETWORKS` for flat images of side x side pixels."""
    torch.manual_seed(seed)
    make, depth, width = NETWORKS[name]
    return make(depth, width, side)


def precision_per_parameter(module: nn.Module, precision: dict[str, float] | float) -> list[float]:
    """One precision for each parameter: the same for all, or by the name of its module."""
    if isinstance(precision, float):
        return [precision for _ in module.parameters()]
    return [precision[name.rpartition(".")[0]] for name, _ in module.named_parameters()]


def train(
    module: nn.Module, data: tuple[Tensor, Tensor], precisions: list[float], steps: int, batch: int, rate: float = _RATE
) -> nn.Module:
    """Adam with one cycle of the learning rate on the negative log joint, minibatches without replacement."""
    (x, y), weights = data, list(module.parameters())
    optimizer = torch.optim.Adam(weights, lr=rate, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    order, at = torch.randperm(len(y)), 0
    for _ in range(steps):
        if at + batch > len(y):
            order, at = torch.randperm(len(y)), 0
        index = order[at : at + batch]
        at += batch
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(x[index]), y[index])
        penalty = sum(p * w.square().sum() for p, w in zip(precisions, weights, strict=True))
        (loss + 0.5 * penalty / len(y)).backward()
        optimizer.step()
        schedule.step()
    optimizer.zero_grad()
    return module.eval()
