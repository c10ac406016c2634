"""Outputs of a network as a function of its parameters, at given inputs: of the network itself, and linearized."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ntk_laplace.errors import NTKLaplaceError
from ntk_laplace.model.data import Inputs
from ntk_laplace.model.network.frozen import Network
from ntk_laplace.model.network.head import head_of
from ntk_laplace.runtime.random_state import preserved_rng


def varying(network: Network, x: Inputs, offset: int = 0) -> Callable[[Tensor], Tensor]:
    """Outputs (N, C) at `x` as a function of the chosen parameters' values (P,), as `with_parameters`.

    If all of these parameters belong to one module whose outputs are the network's, the layers before that module
    are evaluated once. The first values are also evaluated with the whole network. If the two disagree, because
    the network uses a parameter elsewhere for example, the whole network is evaluated every time.
    """
    with torch.inference_mode(False), torch.no_grad(), network.threads.writing():
        head = head_of(network.module, network.names, lambda: network.outputs(network.call, x, offset))
    tried = False

    def outputs(theta: Tensor) -> Tensor:
        nonlocal head, tried
        if (known := head) is None:
            return network.with_parameters(theta, x)
        with torch.inference_mode(False), torch.no_grad(), network.caller.autocast.entered(), network.arithmetic():
            values = network.values(theta)
            with network.threads.writing():
                found = network.outputs(lambda _: known(values), x, offset)
            if tried:
                return found
            tried, whole = True, network.with_parameters(theta, x)
            head = known if network.agree(whole, found) else None
        return whole

    return outputs


def linearized(network: Network, x: Inputs, offset: int = 0) -> Callable[[Tensor], Tensor]:
    """Outputs (N, C) at `x` of the network linearized at θ*, as a function of θ (P,): f + J(θ-θ*).

    Each is one pass of forward-mode differentiation; no rows of J are stored.
    """
    own = {name: parameter.detach() for name, parameter in network.parameters.items()}

    def outputs(theta: Tensor) -> Tensor:
        step = network.values(theta - network.theta)

        def moved(x: Inputs) -> Tensor:
            found = torch.func.jvp(lambda values: network.call_at(values, x), (own,), (step,))
            return found[0] + found[1]

        with torch.inference_mode(False), torch.no_grad(), network.arithmetic():
            return network.outputs(moved, x, offset)

    return outputs


def linear_at(network: Network, x: Inputs) -> bool:
    """Whether the outputs at `x` are linear in all parameters, f(θ* + d) = f + J d, tried at one random d.

    False if parameters of the module were not chosen: what depends on them may be nonlinear in them.
    """
    if network.num_parameters < sum(parameter.numel() for parameter in network.module.parameters()):
        return False
    own = network.theta
    draw = torch.randn(len(own), generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu").to(own)
    moved = own + (1.0 + own.abs()) * draw
    try:
        with preserved_rng(network.device), torch.inference_mode(False):
            found, linear = network.with_parameters(moved, x), linearized(network, x)(moved)
    except NTKLaplaceError:  # no forward-mode derivative, or outputs that overflow
        return False
    return network.agree(found, linear)
