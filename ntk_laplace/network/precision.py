"""Floating precision: what a forward pass rounds to, and the state of `torch.autocast` that it runs under."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Autocast", "DtypesSeen", "Products", "computation_dtype", "outside_autocast"]

_DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps")
_PRODUCTS = {
    getattr(torch.ops.aten, name).default
    for name in ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")
}


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

        Weights are cast anew at each use: the cache of an outer context would hand casts of an earlier pass, with
        their graph, to a later one.
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


@contextmanager
def outside_autocast() -> Iterator[None]:
    """Run a block (or, as a decorator, a function) outside of the caller's `torch.autocast`.

    It would round the algebra's matrix products where they are in float32. The network is called under the state of
    the fit all the same.
    """
    with Autocast().entered():
        yield


class _Mode(TorchDispatchMode):
    """A dispatch mode without torch's wrapper: that imports the compiler, in seconds, and slows every operation."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class DtypesSeen(_Mode):
    """Floating types of the results of all operations in a block: those of frozen layers too, which no graph shows."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.found |= _floating(tree_leaves(result))
        return result


class Products(_Mode):
    """Matrix products and convolutions of 16-bit types, done in float32 and rounded to the type of their operands.

    Processors with instructions for such products do the same: they add up in float32 and round once. On a CPU that
    has none, torch's own kernels take ten times as long and more.
    """

    @staticmethod
    def helps(device: torch.device, dtype: torch.dtype) -> bool:
        """Whether the device has no instructions for products of this type."""
        supported = {
            torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
            torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
        }
        return device.type == "cpu" and dtype in supported and not supported[dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        dtypes = _floating(args) if func in _PRODUCTS else set()
        if len(dtypes) != 1 or next(iter(dtypes)).itemsize != 2:
            return func(*args, **kwargs)
        (dtype,) = dtypes
        found = func(*(value.float() if _is_floating(value) else value for value in args), **kwargs)
        if isinstance(found, Tensor):
            return found.to(dtype)
        return tuple(value if value is None else value.to(dtype) for value in found)


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


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _floating(values: Iterable[Any]) -> set[torch.dtype]:
    return {value.dtype for value in values if _is_floating(value)}


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
