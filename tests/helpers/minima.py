"""Posteriors of a small network at a minimum, for what-ifs."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

import ntk_laplace as ntkl
from refusals import inputs, labels, network

WEIGHTS = torch.linspace(0.5, 2.0, 9).double()


def parts(likelihood: str) -> tuple[Tensor, ntkl.Likelihood]:
    """Targets and a fresh likelihood."""
    classes = likelihood == "classes"
    return (labels(), ntkl.Categorical()) if classes else (inputs()[:, :3].sin(), ntkl.Gaussian(noise=0.3))


@functools.cache
def trained(likelihood: str, weighted: bool = False) -> nn.Module:
    """The network at a minimum."""
    y, own = parts(likelihood)
    data = (inputs(), y, WEIGHTS) if weighted else (inputs(), y)
    fitted = ntkl.laplace(network(), data, own, ntkl.GaussianPrior(3.0)).refit()
    return fitted.reweight(0, fitted.weights[0].item(), linearization="moving").network.module


def case(likelihood: str, structure: str = "gp", weighted: bool = False):
    x, (y, own) = inputs(), parts(likelihood)
    data = (x, y, WEIGHTS) if weighted else (x, y)
    return ntkl.laplace(trained(likelihood, weighted), data, own, ntkl.GaussianPrior(3.0), structure), x, y
