"""The head: the module that owns all chosen parameters, evaluated alone at stored inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ntk_laplace.model.network.places import call_with, places_of


def owner_of(names: Sequence[str]) -> str:
    """Name of the innermost module that owns all parameters of these names; empty for the whole network."""
    shared = names[0].split(".")[:-1]
    for name in names[1:]:
        own = name.split(".")[:-1]
        agree = [one == other for one, other in zip(shared, own, strict=False)]
        shared = shared[: agree.index(False) if False in agree else len(agree)]
    return ".".join(shared)


def head_of(
    network: nn.Module, names: Sequence[str], evaluate: Callable[[], Tensor]
) -> Callable[[Mapping[str, Tensor]], Tensor] | None:
    """Outputs (N, C) at other values of these parameters, by name, from the module that owns them alone.

    None if no one module does, it is called several times, or its output is not the network's: `evaluate` runs the
    network once, without a graph, and returns its outputs.
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
    (arguments, out, version), shape = calls[0], found.shape

    places = places_of(module)

    def outputs(values: Mapping[str, Tensor]) -> Tensor:
        own = {name.removeprefix(f"{owner}."): value for name, value in values.items()}
        return call_with(module, places, own, *arguments).reshape(shape)

    return outputs if _same(out, version, found) else None


def _same(out: Any, version: int, found: Tensor) -> bool:
    """Whether the network's outputs are the module's output tensor, up to a reshape."""
    return (
        isinstance(out, Tensor) and out.is_contiguous() and found.is_contiguous() and out.numel() == found.numel()
        and out.data_ptr() == found.data_ptr() and out.dtype == found.dtype and out._version == version
    )
