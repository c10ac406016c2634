"""Call conventions of a module: how inputs become arguments of `forward`, and which returned tensor is the output."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Size, Tensor, nn

from ntk_laplace.errors import NetworkError, is_whole
from ntk_laplace.model.data import Inputs, map_tensors
from ntk_laplace.model.network.precision import Autocast
from ntk_laplace.runtime.threads import ProcessWide


class Caller(nn.Module):
    """Calls a module on one input, or unpacks a tuple or dict if its `forward` accepts the parts as arguments.

    Every call runs under the `torch.autocast` state in which this object was created, the state of the fit. Attention
    is computed alike with and without gradients: torch's fast path without them gives padded positions other outputs.

    Parameters
    ----------
    module : nn.Module
    output : str or int, optional
        Which returned tensor is the output: a key of a mapping, a field of a dataclass, named tuple or other object,
        or a position in a tuple or list. By default the module returns one tensor.
    targets : str, optional
        The key of the targets in batches that are mappings. It is not passed to the module.
    positions : torch.Size, optional
        Shape of the positions that each example has outputs at, (N, C, *positions) or (N, *positions, C). They become
        rows (N, L C), with the outputs of one position side by side.

    Attributes
    ----------
    copies_inputs : bool
        Whether the module is given a copy of its inputs, for one that writes into them.

    Raises
    ------
    NetworkError
        If `output` or `targets` has another type; from a call, if the module returns no such tensor, or it does not
        have these positions.
    """

    copies_inputs: bool = False
    _attends: bool = True  # of objects that an earlier version has pickled

    def __init__(
        self, module: nn.Module, output: str | int | None = None, targets: str | None = None,
        positions: Size | None = None,
    ) -> None:
        super().__init__()
        if not (output is None or isinstance(output, str) or is_whole(output, 0)):
            raise NetworkError("output= as the name of one of the network's outputs, or its position",
                               repr(output), 'Pass for instance output="logits", or output=0.')
        if not (targets is None or isinstance(targets, str)):
            raise NetworkError("targets= as the key of the targets in a batch", repr(targets),
                               'Pass for instance targets="labels".')
        self.module, self.output, self.targets, self.positions = module, output, targets, positions
        self.autocast = Autocast.present()
        self._attends = any(isinstance(part, _ATTENTION) for part in module.modules())
        self._signature = _signature(module)

    def forward(self, x: Inputs) -> Tensor:
        """The module's output tensor; one row per example if it has positions."""
        x = map_tensors(torch.clone, x) if self.copies_inputs else x
        with self.autocast.entered(), _PLAIN_ATTENTION.entered() if self._attends else nullcontext():
            found = self._tensor(self._returned(x))
        return found if self.positions is None else _rows(found, self.positions)

    def _tensor(self, found: Any) -> Tensor:
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
        """Whether `forward` cannot take a dict as its only argument."""
        if self._signature is None or not all(isinstance(key, str) for key in x):
            return False
        try:
            self._signature.bind(x)
        except TypeError:
            return True
        return False

    def remedy(self, x: Inputs) -> str:
        """Advice for a dict on which the module fails; empty if `forward` names all of its keys."""
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


@contextmanager
def _without_fast_path() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


_PLAIN_ATTENTION = ProcessWide(_without_fast_path)
_ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)


def _signature(module: nn.Module) -> inspect.Signature | None:
    """Signature of the innermost `forward`; wrappers accept any arguments."""
    while (inner := _wrapped(module)) is not None:
        module = inner
    try:
        return inspect.signature(module.forward)
    except (TypeError, ValueError):
        return None


def _wrapped(module: nn.Module) -> nn.Module | None:
    """The module inside a wrapper of torch.compile, DataParallel or peft."""
    inner = getattr(module, "_orig_mod", None)
    if isinstance(module, nn.DataParallel):
        inner = module.module
    elif callable(base := getattr(module, "get_base_model", None)):
        inner = base()
    return inner if isinstance(inner, nn.Module) and inner is not module else None


def _binds(signature: inspect.Signature | None, args: tuple, kwargs: dict) -> bool:
    """Whether `forward` names all of these arguments; ``*args`` and ``**kwargs`` do not count as names."""
    if signature is None or not all(isinstance(key, str) for key in kwargs):
        return False
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return False
    kinds = {signature.parameters[name].kind for name in bound.arguments}
    return not kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


# --- what a module returns


def channels_fit(shape: Size, positions: Size) -> tuple[bool, bool]:
    """Whether a shape is (N, C, *positions), and whether it is (N, *positions, C)."""
    axes = len(shape) == len(positions) + 2
    return axes and shape[2:] == positions, axes and shape[1:-1] == positions


def _rows(found: Tensor, positions: Size) -> Tensor:
    """Outputs (N, C, *positions), (N, *positions, C) or (N, *positions) as rows (N, L C), position by position.

    Rows stay as they are.
    """
    first, last = channels_fit(found.shape, positions)
    if found.shape[1:] == positions or (found.dim() == 2 and found.shape[1] % positions.numel() == 0):
        return found.flatten(1)
    if first == last:
        shape = ", ".join(map(str, positions))
        got = f"shape {tuple(found.shape)}" + (", which fits both" if first else "")
        remedy = "Pass the positions of the network's outputs; pad inputs of other shapes to those of the fit."
        if first:
            remedy = "Wrap the network in a module that returns rows (N, L * C), position by position."
        elif positions[0] == 1 and any(channels_fit(found.shape, positions[1:])):
            remedy = "Pass the targets without their second axis, y.squeeze(1)."
        expected = f"network outputs of shape (N, C, {shape}) or (N, {shape}, C), for Everywhere()"
        raise NetworkError(expected, got, remedy)
    return (found.movedim(1, -1) if first else found).flatten(1)


def _part(found: Any, output: str | int) -> Any:
    """The returned value with this name or at this position; None if there is none."""
    if isinstance(found, Mapping):  # includes a ModelOutput of transformers
        return found.get(output)
    if isinstance(output, str):
        return getattr(found, output, None)
    return found[output] if isinstance(found, (tuple, list)) and output < len(found) else None


def _tensors(found: Any) -> list[str | int]:
    """Names or positions of the tensors among a module's return values."""
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
    """The error for a module that returned no tensor, or none under `output`."""
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
