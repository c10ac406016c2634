"""GPyTorch: NTKKernel and LaplaceGP against dense references, GPyTorch's own suite, and the posterior they stand for."""

from __future__ import annotations

import unittest
from typing import Any

import gpytorch
import torch
from gpytorch.test.base_kernel_test_case import BaseKernelTestCase
from torch import nn

import ntk_laplace as ntkl
from ntk_laplace.gp import NTKKernel


def mlp(features: int, outputs: int, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(features, 6), nn.Tanh(), nn.Linear(6, outputs)).to(dtype).eval()


class _Suite(BaseKernelTestCase):
    """GPyTorch's own cases, in float32 as they come; the network takes as many features as the case has."""

    outputs: int

    def create_kernel_no_ard(self, **kwargs: Any) -> NTKKernel:
        return NTKKernel(_AnyWidth(self.outputs), ntkl.GaussianPrior(2.0, groups="layer"), **kwargs)


class _AnyWidth(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.lift, self.out = nn.Parameter(torch.randn(5)), nn.Linear(5, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(x.sum(1, keepdim=True) * self.lift))


class TestOneOutput(_Suite, unittest.TestCase):
    outputs = 1


class TestThreeOutputs(_Suite, unittest.TestCase):
    outputs = 3
