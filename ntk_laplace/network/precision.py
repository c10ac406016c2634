"""Floating precision: what a forward pass rounds to, and the state of `torch.autocast` that it runs under."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Autocast", "DtypesSeen", "computation_dtype", "without_autocast"]

_DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps")

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Autocast:
    """A state of `torch.autocast`, which can be entered again.

    Attributes
    ----------
    dtypes : tuple of (str, torch.dtype or None)
        For each device type the type that autocast computes in; None where it is off.
    """

    dtypes: tuple[tuple[str, torch.dtype | None], ...] = tuple((kind, None) for kind in _DEVICE_TYPES)

    @classmethod
    def present(cls) -> Autocast:
        """The state of this moment."""
        return cls(tuple((kind, _autocast_dtype(kind)) for kind in _DEVICE_TYPES))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run a block in this state, whatever the present one is.

        Weights are cast anew at each use: the cache of an outer context would keep casts that were made without a
        graph, and a later pass would find no gradient behind them.
        """
        cached = torch.is_autocast_cache_enabled()
        with ExitStack() as stack:
            for kind, dtype in self.dtypes:
                if dtype != _autocast_dtype(kind):
                    own = torch.get_autocast_dtype(kind) if dtype is None else dtype
                    stack.enter_context(torch.autocast(kind, own, dtype is not None, cache_enabled=False))
            torch.set_autocast_cache_enabled(False)
            try:
                yield
            finally:
                torch.set_autocast_cache_enabled(cached)


def _autocast_dtype(kind: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def without_autocast(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """The function, run outside of the caller's `torch.autocast`, which would round matrix products in float32."""

    @functools.wraps(function)
    def wrapped(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if not any(torch.is_autocast_enabled(kind) for kind in _DEVICE_TYPES):
            return function(*args, **kwargs)
        with Autocast().entered():
            return function(*args, **kwargs)

    return wrapped


class DtypesSeen(TorchDispatchMode):
    """Floating types of the results of all operations in a block: those of frozen layers too, which no graph shows."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.found |= _floating(tree_leaves(result))
        return result


def computation_dtype(module: nn.Module, out: Tensor, seen: Iterable[torch.dtype]) -> torch.dtype:
    """The coarsest floating type that the outputs are computed in.

    Parameters
    ----------
    module : nn.Module
    out : Tensor
        Outputs with their graph: every type in it counts.
    seen : iterable of torch.dtype
        Of the forward pass. Among them those of 16 bits count, and those of the module's parameters; a float64
        network may well hold a constant in float32.
    """
    own = _floating(module.parameters())
    found = {dtype for dtype in seen if dtype.itemsize <= 2 or dtype in own} | _graph_dtypes(out)
    return max(found, key=lambda dtype: torch.finfo(dtype).eps)


def _floating(values: Iterable[Any]) -> set[torch.dtype]:
    return {value.dtype for value in values if isinstance(value, Tensor) and value.is_floating_point()}


def _graph_dtypes(out: Tensor) -> set[torch.dtype]:
    found, stack, known = {out.dtype}, [out.grad_fn], {None}
    while stack:
        node: Any = stack.pop()
        if node in known:
            continue
        known.add(node)
        if not hasattr(node, "variable"):
            dtypes = {meta.dtype for meta in getattr(node, "_input_metadata", ())}
            found |= {dtype.to_real() for dtype in dtypes if dtype.is_floating_point or dtype.is_complex}
        stack.extend(before for before, _ in node.next_functions)
    return found
