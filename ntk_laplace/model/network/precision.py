"""Floating precision: the rounding of a forward pass, and the state of torch that it runs under."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ntk_laplace.model.network.readings import autograd_nodes
from ntk_laplace.runtime.threads import ProcessWide

_CPU = torch.device("cpu")
_DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps")
_PRODUCTS = {
    getattr(torch.ops.aten, name).default
    for name in ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")
}


@dataclass(frozen=True)
class Autocast:
    """A recorded state of `torch.autocast`, and of torch's default device, which can be restored.

    Attributes
    ----------
    dtypes : tuple of (str, torch.dtype or None)
        For each device type, the dtype of autocast; None where autocast is off.
    device : torch.device
        Where torch makes tensors that are given no device.
    """

    dtypes: tuple[tuple[str, torch.dtype | None], ...] = tuple((kind, None) for kind in _DEVICE_TYPES)
    device: torch.device = _CPU

    @classmethod
    def present(cls) -> Autocast:
        """The current state."""
        return cls(tuple((kind, _autocast_dtype(kind)) for kind in _DEVICE_TYPES), torch.get_default_device())

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run a block in this state.

        Weights are cast anew at each use: the cache of an outer context would hand casts of an earlier pass, with
        their graph, to a later one.
        """
        cached = torch.is_autocast_cache_enabled()
        with ExitStack() as stack:
            if self.device != torch.get_default_device():
                stack.enter_context(self.device)
            for kind, dtype in self.dtypes:
                if dtype != _autocast_dtype(kind):
                    own = torch.get_autocast_dtype(kind) if dtype is None else dtype
                    stack.enter_context(torch.autocast(kind, own, dtype is not None, cache_enabled=False))
            try:
                torch.set_autocast_cache_enabled(False)
                yield
            finally:
                torch.set_autocast_cache_enabled(cached)


def _autocast_dtype(kind: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


@contextmanager
def outside_autocast() -> Iterator[None]:
    """Run a block (or, as a decorator, a function) outside of the caller's `torch.autocast` and default device.

    Autocast would round float32 matrix products of the linear algebra; random numbers from a seed, and indices, are
    made on the CPU. Network calls still use the state of the fit.
    """
    with Autocast().entered():
        yield


class _Mode(TorchDispatchMode):
    """A dispatch mode without torch's wrapper, which imports the compiler (seconds) and slows every operation."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Watched(_Mode):
    """Shows `see` every tensor that an operation in a block returns, also of frozen layers, which are in no graph."""

    def __init__(self, see: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return result


class Products(_Mode):
    """Computes 16-bit matrix products and convolutions in float32 and rounds the result to the operands' type.

    Processors with 16-bit instructions do the same: they accumulate in float32 and round once. On a CPU without them,
    torch's own kernels take at least ten times as long.
    """

    @staticmethod
    def helps(device: torch.device, dtype: torch.dtype) -> bool:
        """Whether the device lacks instructions for matrix products of this type."""
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


def whole_convolutions() -> AbstractContextManager[None]:
    """Run a block in which cuDNN convolves float32 numbers with all their digits; torch rounds them to TF32 by default.

    Three digits differ between algorithms, and so between batches: rows would not be those that are checked.
    """
    return _WHOLE_CONVOLUTIONS.entered()


@contextmanager
def _without_tf32() -> Iterator[None]:
    cudnn: Any = torch.backends.cudnn
    parts = cudnn.conv, cudnn.rnn
    before = [part.fp32_precision for part in parts]
    if "tf32" not in before:
        yield
        return
    try:
        cudnn.allow_tf32 = False  # sets both: torch refuses to read it where only these are set
        for part in parts:
            if part.fp32_precision == "tf32":  # which it has from the setting for all operations
                part.fp32_precision = "ieee"
        yield
    finally:
        cudnn.allow_tf32 = True
        for part, own in zip(parts, before, strict=True):
            if part.fp32_precision != own:
                part.fp32_precision = own


_WHOLE_CONVOLUTIONS = ProcessWide(_without_tf32)


def computation_dtype(module: nn.Module, out: Tensor, seen: Iterable[torch.dtype]) -> torch.dtype:
    """The coarsest floating type that the outputs are computed in.

    Parameters
    ----------
    module : nn.Module
    out : Tensor
        Outputs with their graph; every dtype in the graph counts.
    seen : iterable of torch.dtype
        Dtypes of the forward pass. Floating types of 16 bits or fewer and those of the module's parameters count.
        Others do not: a float64 network may contain a float32 constant.
    """
    own = _floating(module.parameters())
    found = {d for d in seen if d in own or (d.is_floating_point and d.itemsize <= 2)} | _graph_dtypes(out)
    return max(found, key=lambda dtype: torch.finfo(dtype).eps)


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _floating(values: Iterable[Any]) -> set[torch.dtype]:
    return {value.dtype for value in values if _is_floating(value)}


def _graph_dtypes(out: Tensor) -> set[torch.dtype]:
    found = {out.dtype}
    for node in autograd_nodes(out):
        if not hasattr(node, "variable"):
            dtypes = {meta.dtype for meta in getattr(node, "_input_metadata", ())}
            found |= {dtype.to_real() for dtype in dtypes if dtype.is_floating_point or dtype.is_complex}
    return found
