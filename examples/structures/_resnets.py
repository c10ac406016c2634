"""ResNet-18 and ResNet-50 as published (He et al. 2016), for 1,000 classes, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["LAYOUTS", "resnet"]

# name: (blocks in each of the four stages, whether they are bottlenecks)
LAYOUTS = {"resnet18": ((2, 2, 2, 2), False), "resnet50": ((3, 4, 6, 3), True), "tiny": ((1, 1), False)}


def conv(d_in: int, d_out: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    """A convolution without bias and its norm."""
    return [nn.Conv2d(d_in, d_out, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(d_out)]


class Residual(nn.Module):
    """Two 3 x 3 convolutions, or 1 x 1, 3 x 3 and 1 x 1 with four times the width, and a shortcut."""

    def __init__(self, d_in: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        d_out = 4 * width if bottleneck else width
        if bottleneck:
            first, middle = conv(d_in, width, 1), [*conv(width, width, 3, stride), nn.ReLU()]
        else:
            first, middle = conv(d_in, width, 3, stride), []
        self.branch = nn.Sequential(*first, nn.ReLU(), *middle, *conv(width, d_out, 1 if bottleneck else 3))
        same = d_in == d_out and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*conv(d_in, d_out, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.branch(x) + self.shortcut(x))


def resnet(name: str, classes: int = 1000, width: int = 64) -> nn.Sequential:
    """Random weights, in eval mode; "tiny" has two stages of one block and is for tests."""
    blocks, bottleneck = LAYOUTS[name]
    layers: list[nn.Module] = [*conv(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    d_in = width
    for stage, count in enumerate(blocks):
        for i in range(count):
            layers.append(Residual(d_in, width * 2**stage, 2 if stage > 0 and i == 0 else 1, bottleneck))
            d_in = width * 2**stage * (4 if bottleneck else 1)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(d_in, classes)).eval()
