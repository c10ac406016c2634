"""Parameters by name: their groups, and flattening of values given by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ntk_laplace.errors import HyperparameterError, is_choice, is_whole
from ntk_laplace.runtime.conversion import to_tensor
from ntk_laplace.runtime.parameter_layout import ParameterLayout

Value = float | Tensor
GROUPS = ("all", "layer", "tensor", "input", "parameter")


def assign(groups: str | Mapping[str, Sequence[str]], names: list[str]) -> tuple[dict[str, int], list[str]]:
    """Index of each parameter's group, and the groups' names."""
    if isinstance(groups, Mapping):
        return _assign_by_mapping(groups, names)
    label = {"all": lambda name: "all", "layer": lambda name: name.rpartition(".")[0]}.get(groups, lambda name: name)
    order = list(dict.fromkeys(map(label, names)))
    return {name: order.index(label(name)) for name in names}, order


def _assign_by_mapping(groups: Mapping[str, Sequence[str]], names: list[str]) -> tuple[dict[str, int], list[str]]:
    order = list(groups)
    owners: dict[str, list[str]] = {name: [] for name in names}
    for group, members in groups.items():
        for member in members:
            found = [name for name in names if name == member or name.startswith(f"{member}.")]
            if not found:
                raise unknown("parameter or module", member, names)
            for name in found:
                owners[name].append(group)
    for name, owner in owners.items():
        if len(owner) != 1:
            raise HyperparameterError(f"every parameter in one group; {name!r} once",
                                      f"it in groups {owner}" if owner else f"{name!r} in none of {shorten(order)}",
                                      "List each parameter, or the module that contains it, in exactly one group.")
    return {name: order.index(owner[0]) for name, owner in owners.items()}, order


def flat_mean(given: Value | Mapping[str, Value], shapes: ParameterLayout) -> Tensor:
    """μ0 as one number (1,) or one per parameter (P,)."""
    if isinstance(given, Mapping):
        return flatten(given, shapes, "mean")
    size, given = shapes.num_parameters, to_tensor(given)
    if given.numel() != 1 and given.shape != (size,):
        raise HyperparameterError(
            f"one mean, or a flat one of shape ({size},)",
            f"shape {tuple(given.shape)}",
            "Concatenate the means of all parameters in the network's order, or pass a mapping by name.",
        )
    return given.flatten()


def flatten(given: Mapping[str, Value], shapes: ParameterLayout, what: str) -> Tensor:
    """Values by parameter name, flat (P,)."""
    missing = [name for name in shapes if name not in given]
    if missing:
        raise HyperparameterError(f"a {what} for every parameter", f"none for {shorten(missing)}",
                                  "Add them, a number or a tensor each.")
    parts = []
    for name, shape in shapes.items():
        value = to_tensor(given[name], dtype=torch.float64)
        if value.numel() != 1 and value.shape != shape:
            raise HyperparameterError(f"a {what} of shape {tuple(shape)} for {name!r}, or one number",
                                      f"shape {tuple(value.shape)}", "Pass a tensor of the parameter's shape.")
        parts.append(value.flatten().expand(shape.numel()))
    return torch.cat(parts)


def checked_precision(value: Any) -> Any:
    """Float64 copies of precisions, in the given format; each must be positive and finite."""
    return _checked(value, lambda v: (v > 0) & v.isfinite(), "precisions that are positive and finite")


def checked_mean(value: Any) -> Any:
    """Float64 copies of means, in the given format; each must be finite."""
    return _checked(value, torch.isfinite, "prior means that are finite")


def checked_input_groups(given: Any, groups: Any) -> tuple[int, ...]:
    """Numbers of the precisions of inputs, all of 0, 1, ... up to the largest, for ``groups="input"``."""
    numbers = given.tolist() if isinstance(given, (Tensor, np.ndarray)) else given
    if not (isinstance(numbers, Sequence) and numbers and all(is_whole(number, 0) for number in numbers)):
        raise HyperparameterError("input_groups of whole numbers from 0, one for each input", repr(given)[:80],
                                  "Pass [0, 0, 1], where the first two inputs share a precision.")
    if len(set(numbers)) <= max(numbers):
        missing = min(set(range(len(numbers))).difference(numbers))
        raise HyperparameterError(f"input_groups that use each number up to {max(numbers)}", f"none that is {missing}",
                                  "Number the precisions from 0 without gaps.")
    if not is_choice(groups, ("input",)):
        raise HyperparameterError('groups="input" for input_groups', repr(groups)[:80], "Pass it, or leave them out.")
    return tuple(map(int, numbers))


def _checked(value: Any, good: Any, expected: str) -> Any:
    """Detached float64 copies; every entry must be `good`."""
    if isinstance(value, Mapping):
        return {str(key): _checked(part, good, f"{expected}, for {key!r} too") for key, part in value.items()}
    try:
        numbers = to_tensor(value, dtype=torch.float64).detach().clone()
    except (TypeError, ValueError, RuntimeError) as error:
        remedy = "Pass a number, a tensor, or a mapping from names to them."
        raise HyperparameterError(expected, repr(value)[:80], remedy) from error
    bad = ~good(numbers)
    if bad.any() or numbers.numel() == 0:
        got = f"{float(numbers[bad][0]):g}" if numbers.numel() else "an empty tensor"
        raise HyperparameterError(expected, got, "Pass such numbers; weight decay 1e-4 is a precision of 1e-4.")
    return numbers


def names_of(group: str, members: Any) -> list[str]:
    """Names of parameters or modules that a mapping lists for a group."""
    listed = isinstance(members, Iterable) and not isinstance(members, str)
    if not listed or not all(isinstance(member, str) for member in members):
        raise HyperparameterError(f"a list of names for group {group!r}", f"{members!r}",
                                  f"Write {{{group!r}: [name, ...]}}.")
    return list(members)


def unknown(what: str, name: str, known: Any) -> HyperparameterError:
    """The error for a name that does not occur in the network."""
    return HyperparameterError(f"the name of a {what}", f"{name!r}",
                               f"The network has {shorten(list(known))}; frozen ones are left out.")


def describe(shapes: ParameterLayout) -> str:
    """Describe the size of a network."""
    return f"{len(shapes)} tensors with {shapes.num_parameters} parameters"


def shorten(names: Sequence[str]) -> str:
    """The first eight names, and the number of further ones."""
    rest = len(names) - 8
    return ", ".join(map(repr, names[:8])) + (f" and {rest} more" if rest > 0 else "")
