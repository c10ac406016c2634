"""Bytes of the tensors that are alive, counted at every operation: a measurement that repeats to the byte."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """Counts tensors that are made within the block; what a library allocates within an operation is not seen.

    Attributes
    ----------
    peak : int
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_iter(out):
            if isinstance(value, Tensor):
                self._count(value.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage.data_ptr()
        if key not in self._sizes and storage.nbytes():
            self._sizes[key] = storage.nbytes()
            self._now += storage.nbytes()
            self.peak = max(self.peak, self._now)
            weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self._now -= self._sizes.pop(key, 0)
