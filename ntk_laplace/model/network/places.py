"""Where a module's parameters are registered, and calls of it with other values there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn


def places_of(module: nn.Module) -> dict[str, list[str]]:
    """One name of every place where a parameter is registered, by the parameter's name: several if it is tied.

    A place in a module that is registered twice has two names. `torch.func.functional_call` with ``tie_weights=True``
    uses both, and afterwards restores the value that it put there itself.
    """
    found: dict[int, list[str]] = {}
    for prefix, part in module.named_modules():
        own = part.named_parameters(prefix, False, False), part.named_buffers(prefix, False, False)
        for name, tensor in chain(*own):
            found.setdefault(id(tensor), []).append(name)
    return {name: found[id(parameter)] for name, parameter in module.named_parameters()}


def call_with(
    module: nn.Module, places: Mapping[str, Sequence[str]], values: Mapping[str, Tensor], *arguments: Any
) -> Any:
    """What a module returns with these values, by name, in all places of its parameters; `arguments` are torch's."""
    named = {place: value for name, value in values.items() for place in places[name]}
    return torch.func.functional_call(module, named, *arguments, tie_weights=False)
