"""Scalar tensors with a gradient that `float` converts without a warning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class Scalar(Tensor):
    """A tensor () with a gradient; ``float(value)`` returns its value without torch's warning about the lost gradient.

    Otherwise it is a normal tensor: optimizers, `torch.autograd.grad` and ``backward`` accept it, NumPy raises an error
    while it requires a gradient, and it is pickled and printed as a plain tensor. The result of a torch operation on it
    is a `Scalar` if it is one number with a gradient, else a plain tensor.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function on plain tensors; a result that is one number with a gradient becomes a `Scalar`."""
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
            return scalar(found) if type(found) is Tensor else found

    def __float__(self) -> float:
        return float(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]  # mypy reads torch's keyword as unnamed
        return plain(self).__repr__(**options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)


def scalar(value: Tensor) -> Tensor:
    """Return one number with a gradient as a `Scalar`, the same node of the graph; any other tensor as it is."""
    number = type(value) is Tensor and value.ndim == 0 and value.is_floating_point()  # other subclasses stay
    return value.as_subclass(Scalar) if number and value.requires_grad else value


def plain(value: Tensor) -> Tensor:
    """Return a `Scalar` as a tensor, the same node of the graph; its operations are faster. Others stay as they are."""
    if type(value) is not Scalar:
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(Tensor)
