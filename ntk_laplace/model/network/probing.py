"""Checks of a network on a few examples: before it is linearized, and before batches are merged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ntk_laplace.errors import DataError, MixedExamplesError, NetworkError, NonDeterministicError, NTKLaplaceError
from ntk_laplace.model.data import Inputs, concatenate, format_of, leaves, map_tensors, num_examples, take
from ntk_laplace.model.network.choice import owner
from ntk_laplace.model.network.copying import dense_parts
from ntk_laplace.model.network.frozen import Network
from ntk_laplace.model.network.precision import Watched, computation_dtype
from ntk_laplace.model.network.readings import padding_rows, readers
from ntk_laplace.runtime.random_state import preserved_rng

_FIRST = 4  # examples that are evaluated together; every other one is then evaluated again without the rest
_EVAL = "Call network.eval() before the fit (and keep dropout off)."


def probe(network: Network, x: Inputs) -> Tensor:
    """Check the network on the first examples of `x`, and choose the memory format of its weights.

    Two of the first four examples, evaluated alone, must give the same outputs as in the batch of four, and the
    buffers must not change. Convolution weights become channels last where this is faster and the network supports
    it: backward passes of float32 convolutions on a CPU then take half the time. A network that requires
    contiguous activations (``x.view(n, -1)``) raises with channels last; its weights then stay contiguous.

    Returns
    -------
    Tensor, (2, C)
        Outputs of the two examples with their autograd graph, in the chosen memory format.

    Raises
    ------
    NonDeterministicError, MixedExamplesError
    NetworkError
        If buffers change, outputs have no graph, or a module runs after the one that "last_layer" has chosen.
    """
    n = num_examples(x)
    if n == 0:
        raise DataError("at least one example", "an empty batch", "Pass one or more inputs.")
    few = take(x, slice(0, _FIRST) if n >= _FIRST else torch.arange(_FIRST, device="cpu").clamp_max(n - 1))
    with preserved_rng(network.device):
        found = _probed(network, few)
        if not found.requires_grad:
            found = _followed(network, x)
        _require_last(network, few)
        network.constant_rows = padding_rows(network.module, network.names, found)
        network.follows_values = _follows_values(network, few)
    network.input_format = format_of(few)
    return found


def _follows_values(network: Network, x: Inputs) -> bool:
    """Whether outputs at values in place of the parameters lead to none of the parameters themselves."""
    values = {name: parameter.detach().requires_grad_() for name, parameter in network.parameters.items()}
    try:
        with torch.enable_grad():
            out = network.outputs(lambda x: network.called_with(values, x), _every_other(x), 0)
    except NTKLaplaceError:  # a network may ask for an nn.Parameter
        return False
    found = readers(out)
    return not any(id(parameter) in found for parameter in network.parameters.values())


def _followed(network: Network, x: Inputs) -> Tensor:
    """Outputs (2, C) with a graph, of two examples: others may take a way around the chosen parameters.

    NetworkError if all examples do.
    """
    with network.arithmetic():
        found, n = network.evaluate(x), num_examples(x)
        if not found.requires_grad:
            count = "" if n == 1 else f" in the first {n:,} examples"
            raise NetworkError("outputs that autograd can follow to the chosen parameters",
                               f"outputs without a graph{count}",
                               "Remove torch.no_grad(), .detach() and .numpy() from forward(), or choose others by "
                               "parameters=. If few examples use them, begin the data with one that does.")
        while n > 2:
            half = take(x, slice(0, (n + 1) // 2))
            x = half if network.evaluate(half).requires_grad else take(x, slice(n // 2, n))
            n = num_examples(x)
        return network.evaluate(take(x, torch.arange(2, device="cpu").clamp_max(n - 1)))


def _require_last(network: Network, x: Inputs) -> None:
    """Refuse "last_layer" where the module that is registered last does not run last.

    Modules around the chosen one do not count, nor do those whose forward() is not called.
    """
    ran: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *_: ran.append(name)

    chosen = owner(network.names[0])
    others = {name for name in map(owner, network.before_last) if name and not chosen.startswith(f"{name}.")}
    with contextlib.ExitStack() as hooks:
        for name, module in network.module.named_modules() if others else ():
            if name in others or name == chosen:
                hooks.callback(module.register_forward_hook(note(name)).remove)
        if others:
            network.without_grad(x)
    if chosen in ran and ran[-1] != chosen:
        raise NetworkError('the module that is registered last to run last, for parameters="last_layer"',
                           f"{ran[-1]!r}, which runs after {chosen!r}", f"Pass parameters={ran[-1]!r}.")


def _probed(network: Network, x: Inputs) -> Tensor:
    before = {name: b.clone() for name, b in network.module.named_buffers()}
    own = map_tensors(torch.clone, x)
    seen: set[torch.dtype] = set()
    with Watched(lambda result: seen.add(result.dtype)):
        first = network.without_grad(own)
    if not all(map(torch.equal, leaves(own), leaves(x))):
        network.caller.copies_inputs = True
    network.precision = computation_dtype(network.module, first, seen)
    if _channels_last_is_faster(network):
        network.channels_last = True
    with network.arithmetic():  # to get the same graph as later passes
        alone = network.evaluate(_every_other(x))  # back to contiguous if that raises
    network.precision = computation_dtype(network.module, alone, seen)
    tolerance = network.tolerance(first)
    if network.channels_last and _gap(alone, first[::2]) > tolerance:
        network.channels_last = False
        alone = network.evaluate(_every_other(x))
    moved = [m for m, b in network.module.named_buffers()
             if not all(map(torch.equal, dense_parts(b), dense_parts(before[m])))]
    with torch.no_grad():
        for name in moved:
            network.module.get_buffer(name).copy_(before[name])
    if _gap(alone, first[::2]) > tolerance:
        # either the other examples matter, or the same batch gives other outputs the second time
        again = 0.0 if moved else _gap(first, network.without_grad(x))
        if again > tolerance:
            raise NonDeterministicError("a deterministic network",
                                        f"outputs that differ by {again:.2g} between two evaluations of the same "
                                        "batch", _EVAL)
        got = "outputs that change with the other examples of the batch"
        got = f"batch statistics in use (buffers {', '.join(moved[:3])} move)" if moved else got
        raise MixedExamplesError("a network whose outputs depend on their own example alone", got, _EVAL)
    if moved:
        raise NetworkError("a network that does not change its buffers",
                           f"buffers that a forward pass changes: {', '.join(moved[:3])}", _EVAL)
    return alone


def _channels_last_is_faster(network: Network) -> bool:
    layers = [layer for layer in network.module.modules() if isinstance(layer, nn.Conv2d)]
    # the weight gradient of a strided 1 x 1 convolution in channels last writes past its buffer on a CPU with AVX2
    # and no AVX-512 (torch 2.13)
    strided = any(set(layer.kernel_size) == {1} and max(layer.stride) > 1 for layer in layers)
    return bool(layers) and not strided and network.device.type == "cpu" and network.dtype == torch.float32


def independent_of_batches(network: Network, parts: Sequence[Inputs]) -> bool:
    """Whether examples give the same outputs when they are batched with examples of other batches.

    The check uses two examples of each batch. It detects a network whose control flow depends on a property
    shared by the whole batch.
    """
    pairs = [take(x, torch.tensor([0, num_examples(x) - 1], device="cpu")) for x in parts]
    try:
        with preserved_rng(network.device):
            apart = torch.cat([network.without_grad(pair) for pair in pairs])
            whole = network.without_grad(concatenate(pairs))
    except NTKLaplaceError:
        return False
    return network.agree(apart, whole)


def _gap(one: Tensor, other: Tensor) -> float:
    return float((one.detach() - other.detach()).abs().max())


def _every_other(x: Inputs) -> Inputs:
    # indexed, not strided, to get the same graph as later batches
    return take(x, torch.arange(0, num_examples(x), 2, device="cpu"))
