"""The private copy of a network, without backward hooks, stored graphs and torch.compile wrappers."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ntk_laplace.errors import NetworkError

_BY_ROW, _BY_COLUMN = (Tensor.crow_indices, Tensor.col_indices), (Tensor.ccol_indices, Tensor.row_indices)
_COMPRESSED = {torch.sparse_csr: _BY_ROW, torch.sparse_bsr: _BY_ROW, torch.sparse_csc: _BY_COLUMN,
               torch.sparse_bsc: _BY_COLUMN}


def dense_parts(values: Tensor) -> tuple[Tensor, ...]:
    """The tensor, or the dense ones that a sparse tensor is made of."""
    if values.layout == torch.sparse_coo:
        values = values.coalesce()
        return values.indices(), values.values()
    if values.layout in _COMPRESSED:
        return *(indices(values) for indices in _COMPRESSED[values.layout]), values.values()
    return (values,)


def compressed_copies(module: nn.Module) -> dict[int, Any]:
    """The memo of a deepcopy with copies of compressed sparse buffers, which torch's own deepcopy refuses."""
    return {id(one): one.clone() for one in module.buffers() if one.layout in _COMPRESSED}


def require_module(module: Any) -> nn.Module:
    """The module, if it is one, and not a lazy one without values (NetworkError)."""
    if not isinstance(module, nn.Module):
        raise NetworkError("a torch.nn.Module", f"a {type(module).__name__}",
                           "Wrap the function in a module whose parameters are registered.")
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise NetworkError("parameters with values", f"{name!r} of a lazy module that has seen no input",
                               "Call network(x) once, and train it.")
    return module


def private_copy(module: nn.Module) -> nn.Module:
    """A copy of the module with its weights and modes, without state of the caller's (NetworkError if it cannot)."""
    memo: dict[int, Any] = compressed_copies(module)
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            if type(value) is OrderedDict and not value:
                memo[id(value)] = OrderedDict()  # every module has many, for hooks, and deepcopy is slow on them
            elif name not in ("_parameters", "_buffers", "_modules"):
                memo |= _left_behind(value, f"{prefix}.{name}" if prefix else name)
    try:
        with torch.inference_mode(False), torch.no_grad():
            twin = copy.deepcopy(module, memo)
    except (RuntimeError, TypeError) as cause:
        raise NetworkError("a module that copy.deepcopy can copy", f"{type(cause).__name__}: {cause}",
                           "Keep only parameters, buffers and plain values on the module.") from cause
    for ours, theirs in zip(twin.parameters(), module.parameters(), strict=True):
        ours.requires_grad_(theirs.requires_grad)  # a TorchScript copy loses this flag
    twin = _uncompiled(twin)
    for part in twin.modules():
        part._backward_hooks.clear()  # they belong to the caller's training and could change our gradients
        part._backward_pre_hooks.clear()
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            # sparse gradients have no rules, and scaled ones mix the examples
            part.sparse = part.scale_grad_by_freq = False
    return twin


class _Stale:
    """Placeholder for a tensor with a graph that a forward pass stored on the module (attention maps, for example).

    A network that overwrites the attribute never reads the placeholder. Reading it raises an error, because the
    network would be linearized through an old graph.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        raise _reads(next((a.name for a in arguments if isinstance(a, cls)), "a tensor"))

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # copy and pickle look these up
            raise AttributeError(attribute)
        raise _reads(self.name)

    def _read(self, *_: Any) -> Any:
        raise _reads(self.name)

    __getitem__ = __iter__ = __len__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _read
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __neg__ = __float__ = __lt__ = __gt__ = _read


def _reads(name: str) -> NetworkError:
    return NetworkError("a network that computes its outputs from inputs, parameters and buffers",
                        f"one that reads {name} of an earlier forward pass",
                        "Compute it in forward() each time, or register it as a buffer.")


def _left_behind(value: Any, name: str) -> dict[int, _Stale]:
    """Tensors with a graph among a module's plain attributes, by id; copy.deepcopy refuses them."""
    if isinstance(value, Tensor):
        return {} if value.grad_fn is None else {id(value): _Stale(name)}
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return {key: stale for part in parts for key, stale in _left_behind(part, name).items()}


class _Eager(nn.Module):
    """Replacement of torch.compile's wrapper, whose fused node would hide the layers; names do not change."""

    def __init__(self, compiled: nn.Module) -> None:
        super().__init__()
        self._orig_mod: nn.Module = compiled.get_submodule("_orig_mod")
        self.training = compiled.training

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_orig_mod"), name)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self._orig_mod(*arguments, **keywords)


def _uncompiled(module: nn.Module) -> nn.Module:
    """Replace torch.compile's wrappers by eager modules, in place."""
    for part in list(module.modules()):
        for name, child in part._modules.items():
            if child is not None and _is_compiled(child):
                part._modules[name] = _Eager(child)
    return _Eager(module) if _is_compiled(module) else module


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" and isinstance(getattr(module, "_orig_mod", None), nn.Module)
