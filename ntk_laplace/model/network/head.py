"""The head: the module that owns all chosen parameters, evaluated alone at stored inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Size, Tensor, nn


def owner_of(names: Sequence[str]) -> str:
    """Name of the innermost module that owns all parameters of these names; empty for the whole network."""
    shared = names[0].split(".")[:-1]
    for name in names[1:]:
        own = name.split(".")[:-1]
        agree = [one == other for one, other in zip(shared, own, strict=False)]
        shared = shared[: agree.index(False) if False in agree else len(agree)]
    return ".".join(shared)


class Head:
    """A module whose output is the network's output, with the arguments of its call.

    Parameters
    ----------
    module : nn.Module
    prefix : str
        Prefix of its parameters' names in the network.
    arguments : tuple of (positional arguments, keyword arguments)
        Arguments of the recorded call.
    shape : torch.Size
        Shape of the network's outputs, (N, C).
    """

    def __init__(self, module: nn.Module, prefix: str, arguments: tuple[tuple, dict[str, Any]], shape: Size) -> None:
        self._module, self._prefix, self._arguments, self._shape = module, prefix, arguments, shape

    @classmethod
    def of(cls, network: nn.Module, names: Sequence[str], evaluate: Callable[[], Tensor]) -> Head | None:
        """The head that owns all parameters with these names; None if there is none.

        Parameters
        ----------
        network : nn.Module
        names : sequence of str
        evaluate : callable
            Runs the network once, without a graph, and returns its outputs (N, C).
        """
        owner = owner_of(names)
        if not owner:
            return None
        module, calls = network.get_submodule(owner), []

        def keep(_: nn.Module, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
            calls.append(((args, kwargs), out, out._version if isinstance(out, Tensor) else 0))

        hook = module.register_forward_hook(keep, with_kwargs=True)
        try:
            found = evaluate()
        finally:
            hook.remove()
        if len(calls) != 1:
            return None
        arguments, out, version = calls[0]
        return cls(module, owner + ".", arguments, found.shape) if _same(out, version, found) else None

    def __call__(self, values: Mapping[str, Tensor]) -> Tensor:
        """Outputs (N, C) at other parameter values, given by their names in the network."""
        own = {name.removeprefix(self._prefix): value for name, value in values.items()}
        return torch.func.functional_call(self._module, own, *self._arguments).reshape(self._shape)


def _same(out: Any, version: int, found: Tensor) -> bool:
    """Whether the network's outputs are the module's output tensor, up to a reshape."""
    return (
        isinstance(out, Tensor) and out.is_contiguous() and found.is_contiguous() and out.numel() == found.numel()
        and out.data_ptr() == found.data_ptr() and out.dtype == found.dtype and out._version == version
    )
