"""Scalars that carry a gradient and still are plain numbers to Python: `float` reads one without a warning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Scalar", "scalar"]


class Scalar(Tensor):
    """A tensor () with a gradient. ``float(value)`` reads its value, where torch warns of the gradient that it leaves.

    It is a tensor in everything else: optimizers, `torch.autograd.grad` and ``backward`` take it, NumPy refuses it as
    long as it carries a gradient, and it is pickled and printed as the plain tensor it is. What torch makes of it is
    such a scalar again if it is one number with a gradient, and a plain tensor otherwise.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """Call the function on plain tensors; of its result, one number with a gradient becomes a scalar."""
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
            return scalar(found) if type(found) is Tensor else found

    def __float__(self) -> float:
        return float(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __repr__(self, *, tensor_contents: str | None = None) -> str:
        return self._plain().__repr__(tensor_contents=tensor_contents)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def _plain(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)


def scalar(value: Tensor) -> Tensor:
    """Return one number with a gradient as a `Scalar`, the same node of the graph; any other tensor as it is."""
    number = type(value) is Tensor and value.ndim == 0 and value.is_floating_point()  # other subclasses stay
    return value.as_subclass(Scalar) if number and value.requires_grad else value
