"""Bytes of the tensors that are alive, counted at every operation: a measurement that repeats to the byte."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._dynamo  # the first operation under a mode imports it, and each search for garbage went through it
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """Counts tensors that are made within the block; what a library allocates within an operation is not seen.

    Tensors in cycles of references do not count, such as frames of torch leave under such a mode: garbage is collected
    at every number that is 5 % above the last. Nor do those that only a thread of torch.distributed still holds, whose
    sum is already known: it gets its turn first.

    Attributes
    ----------
    peak : int
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = self._collected = 0
        self._sizes: dict[int, int] = {}
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch wraps the method below otherwise, which takes longer than the method."""
        return False

    def __enter__(self) -> LiveBytes:
        gc.collect()
        gc.freeze()  # what is there is not looked at again, here and in later blocks: that took most of their time
        return super().__enter__()  # type: ignore[no-any-return]

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **kwargs) if kwargs else func(*args)
        for value in (out,) if isinstance(out, Tensor) else tree_iter(out):
            if isinstance(value, Tensor):
                self._count(value.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage.data_ptr()
        if key not in self._sizes and (size := storage.nbytes()):
            self._sizes[key] = size
            self._now += size
            self._storages[key] = weakref.ref(storage, partial(self._free, key))
            if self._now > 1.05 * self._collected:
                gc.collect()
                if dist.is_initialized():
                    time.sleep(1e-3)
                self._collected = max(self._collected, self._now)
            self.peak = max(self.peak, self._now)

    def _free(self, key: int, _: weakref.ref[torch.UntypedStorage]) -> None:
        self._now -= self._sizes.pop(key)
        del self._storages[key]
