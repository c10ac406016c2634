"""Convolutions of every kind, and the norms that stand beside them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from networks.case import Lambda, network, real


@network(outputs=3)
def cnn_groups():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2, groups=2), nn.GroupNorm(3, 6), nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3),
    ), real(2, 6, 5)


@network(outputs=2)
def conv_padding():
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1, padding_mode="circular"), nn.Tanh(),
        nn.Conv2d(3, 3, (3, 2), padding=(2, 1), stride=(2, 1), padding_mode="reflect", groups=3), nn.Tanh(),
        nn.Conv2d(3, 2, 3, dilation=(1, 2), padding="same"), nn.Tanh(),
        nn.Conv2d(2, 2, 2, padding=1, padding_mode="replicate", bias=False), nn.MaxPool2d(2),
        Lambda(lambda x: x.mean((2, 3))),
    ), real(1, 5, 6)


@network(outputs=3)
def conv1d():
    return nn.Sequential(
        nn.Conv1d(2, 4, 3, stride=2, padding=1, dilation=2), nn.Tanh(),
        nn.Conv1d(4, 4, 2, padding="same", groups=4), nn.Tanh(),
        nn.Conv1d(4, 3, 1), Lambda(lambda x: x.sum(2)),
    ), real(2, 9)


@network(outputs=2)
def conv3d():
    return nn.Sequential(
        nn.Conv3d(1, 2, 2, stride=(1, 2, 1)), nn.Tanh(),
        nn.Conv3d(2, 2, (1, 2, 2), groups=2, padding=(0, 1, 0)), nn.Flatten(), nn.Tanh(), nn.Linear(24, 2),
    ), real(1, 3, 4, 4)


@network(outputs=2)
def conv_transpose1d():
    return nn.Sequential(
        nn.ConvTranspose1d(4, 4, 3, stride=2, padding=1, output_padding=1, groups=2), nn.Tanh(),
        nn.ConvTranspose1d(4, 2, 2, dilation=2), Lambda(lambda x: x.square().mean(2)),
    ), real(4, 4)


@network(outputs=3)
def conv_transpose2d():
    return nn.Sequential(
        nn.ConvTranspose2d(2, 4, 3, stride=(2, 1), padding=(1, 0), output_padding=(1, 0), groups=2),
        nn.Tanh(),
        nn.ConvTranspose2d(4, 3, 2, stride=2, dilation=(1, 2), bias=False),
        Lambda(lambda x: 3 * torch.tanh(x).mean((2, 3))),
    ), real(2, 3, 2)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one, self.bn_one = (
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.two, self.bn_two = (
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn_two(self.two(F.relu(self.bn_one(self.one(x)), inplace=True))))


@network(outputs=3)
def resnet_batchnorm():
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=2), nn.BatchNorm2d(3), nn.ReLU(), Residual(3),
        nn.Flatten(), nn.Linear(12, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 3),
    ), real(1, 6, 6)
