"""How a module is called: on one input, or on its parts; and which part of what it returns is its output."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn

from ntk_laplace.data import Inputs
from ntk_laplace.errors import NetworkError, is_whole
from ntk_laplace.network.precision import Autocast

__all__ = ["Caller"]


class Caller(nn.Module):
    """Calls a module on one input, or on the parts of a tuple or dict where its `forward` takes them apart.

    Always under the state of `torch.autocast` that it was made in: the fit's.

    Parameters
    ----------
    module : nn.Module
    output : str or int, optional
        Which tensor of what the module returns: a key of a mapping, a field of a dataclass, a named tuple or another
        object, or a position in a tuple or list. By default the module returns the tensor itself.
    targets : str, optional
        The key of the targets in batches that are one mapping: the module is never given it.

    Raises
    ------
    NetworkError
        If `output` or `targets` are neither; from a call, if the module returns no tensor there.
    """

    def __init__(self, module: nn.Module, output: str | int | None = None, targets: str | None = None) -> None:
        super().__init__()
        if not (output is None or isinstance(output, str) or is_whole(output, 0)):
            raise NetworkError("output= as the name of one of the network's outputs, or its position",
                               repr(output), 'Pass for instance output="logits", or output=0.')
        if not (targets is None or isinstance(targets, str)):
            raise NetworkError("targets= as the key of the targets in a batch", repr(targets),
                               'Pass for instance targets="labels".')
        self.module, self.output, self.targets = module, output, targets
        self.autocast = Autocast.present()
        self._signature = _signature(module)

    def forward(self, x: Inputs) -> Tensor:
        """The tensor of outputs, as the module gives it."""
        with self.autocast.entered():
            found = self._returned(x)
        if self.output is None and isinstance(found, Tensor):
            return found
        value = None if self.output is None or isinstance(found, Tensor) else _part(found, self.output)
        if not isinstance(value, Tensor):
            raise _no_output(found, self.output)
        return value

    def _returned(self, x: Inputs) -> Any:
        if isinstance(x, dict):
            if self.targets is not None:
                x = {key: value for key, value in x.items() if key != self.targets}
            if _binds(self._signature, (), x) or self._takes_no_dict(x):
                return self.module(**x)
        if isinstance(x, (tuple, list)) and _binds(self._signature, tuple(x), {}):
            return self.module(*x)
        return self.module(x)

    def _takes_no_dict(self, x: dict) -> bool:
        """Whether `forward` has no single argument that a dict could be."""
        if self._signature is None or not all(isinstance(key, str) for key in x):
            return False
        try:
            self._signature.bind(x)
        except TypeError:
            return True
        return False

    def remedy(self, x: Inputs) -> str:
        """What to do about a dict on which the module fails, if `forward` does not name all of its keys; or nothing."""
        if not isinstance(x, dict) or self._signature is None:
            return ""
        starred = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
        named = {name for name, own in self._signature.parameters.items() if own.kind not in starred}
        rest = [key for key in x if key not in named and key != self.targets]
        if not rest:
            return ""
        if named & x.keys():
            return f"Leave out {', '.join(map(repr, rest))}, which the network's forward() does not name."
        return "Its forward() names none of these keys and was given the dict: rename them, or wrap the network."


def _signature(module: nn.Module) -> inspect.Signature | None:
    """Of the `forward` that a call comes to; wrappers around it take anything."""
    while (inner := _wrapped(module)) is not None:
        module = inner
    try:
        return inspect.signature(module.forward)
    except (TypeError, ValueError):
        return None


def _wrapped(module: nn.Module) -> nn.Module | None:
    """The module inside torch.compile's wrapper, inside DataParallel, or inside adapters of peft."""
    inner = getattr(module, "_orig_mod", None)
    if isinstance(module, nn.DataParallel):
        inner = module.module
    elif callable(base := getattr(module, "get_base_model", None)):
        inner = base()
    return inner if isinstance(inner, nn.Module) and inner is not module else None


def _binds(signature: inspect.Signature | None, args: tuple, kwargs: dict) -> bool:
    """Whether `forward` names these arguments; a bare ``*args`` or ``**kwargs`` names nothing."""
    if signature is None or not all(isinstance(key, str) for key in kwargs):
        return False
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return False
    kinds = {signature.parameters[name].kind for name in bound.arguments}
    return not kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


# --- what a module returns


def _part(found: Any, output: str | int) -> Any:
    """The part of that name or at that position; None if there is none."""
    if isinstance(found, Mapping):  # a ModelOutput of transformers is one
        return found.get(output)
    if isinstance(output, str):
        return getattr(found, output, None)
    return found[output] if isinstance(found, (tuple, list)) and output < len(found) else None


def _tensors(found: Any) -> list[str | int]:
    """Names, or positions, of the tensors in what a module returns."""
    parts: dict[Any, Any] = {}
    if isinstance(found, Mapping):
        parts = dict(found)
    elif is_dataclass(found):
        parts = {entry.name: getattr(found, entry.name) for entry in fields(found)}
    elif isinstance(found, (tuple, list)):
        parts = dict(zip(getattr(found, "_fields", range(len(found))), found, strict=True))
    elif hasattr(found, "__dict__"):
        parts = vars(found)
    return [name for name, value in parts.items() if isinstance(value, Tensor)]


def _no_output(found: Any, output: str | int | None) -> NetworkError:
    """The module returned no tensor, or none where it was looked for."""
    if isinstance(found, Tensor):
        return NetworkError(f"a network that returns several outputs, to take output={output!r} of",
                            f"a Tensor of shape {tuple(found.shape)}", "Leave output= out.")
    names = _tensors(found)
    expected = "network outputs as one tensor" if output is None else f"a tensor {output!r} in what the network returns"
    if not names:
        return NetworkError(expected, f"a {type(found).__name__} without tensors",
                            "Wrap the network in a module that returns one row of outputs per example.")
    best = "logits" if "logits" in names else names[0]
    return NetworkError(expected, f"a {type(found).__name__} with the tensors {', '.join(map(repr, names))}",
                        f"Name the outputs to linearize, output={best!r}.")
