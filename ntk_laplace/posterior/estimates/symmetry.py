"""Symmetries of a network: changes of its weights that change neither its outputs nor the prior's density."""

from __future__ import annotations

import math

import torch
from torch import nn

from ntk_laplace.model.network import Network
from ntk_laplace.model.priors import GaussianPrior

_ODD = (nn.Tanh, nn.Softsign, nn.Tanhshrink, nn.Softshrink, nn.Hardshrink)
_ELEMENTWISE = (nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.ELU, nn.SELU, nn.Softplus, nn.Mish, nn.LeakyReLU, *_ODD)


def log_symmetries(network: Network, prior: GaussianPrior) -> float | None:
    """Σ log 2^M M! over the hidden layers of M units of a multilayer perceptron, nats.

    An odd activation lets the signs of a unit's weights change, and any elementwise one lets units change places. None
    if the network is not an `nn.Sequential` of linear layers and activations whose parameters are all chosen and in one
    layer each, or if the prior tells hidden units apart.
    """
    module = network.module
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        return None
    layers = [layer for layer in module if not isinstance(layer, (nn.Flatten, nn.Identity, nn.Dropout))]
    linear, between = [layer for layer in layers[::2] if type(layer) is nn.Linear], layers[1::2]
    if len(layers) < 3 or len(layers) % 2 == 0 or len(linear) <= len(between):
        return None
    weights = [id(weight) for layer in linear for weight in layer.parameters()]
    if len(set(weights)) < len(weights) or not all(isinstance(layer, _ELEMENTWISE) for layer in between):
        return None
    if set(network.names) != {name for name, _ in module.named_parameters()} or not _exchangeable(network, prior):
        return None
    total = 0.0
    for layer, activation in zip(linear, between, strict=False):
        units = layer.out_features
        total += math.lgamma(units + 1) + (units * math.log(2.0) if isinstance(activation, _ODD) else 0.0)
    return total


def _exchangeable(network: Network, prior: GaussianPrior) -> bool:
    """Whether the prior has mean zero, and one precision for each tensor."""
    with torch.no_grad():
        alike = all(bool((own == own.flatten()[0]).all()) for own in network.unflatten(prior.flat_precision()).values())
        return alike and not bool(prior.flat_mean().any())
