"""Reduction: how processes that each read a share of the training data add up, collect and agree.

Every place that sums over the data goes through a `Reducer`. The default is one process, which reads everything;
`runtime.distributed` has the reducer of torch.distributed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

import torch
from torch import Tensor

from ntk_laplace.errors import DataError, UnsupportedError

_Value = TypeVar("_Value")


class collective_property(Generic[_Value]):
    """A cached property whose computation may exchange data between processes.

    `functools.cached_property` holds a lock during the computation in Python before 3.12: processes that run as threads
    of one would wait for each other forever.
    """

    def __init__(self, compute: Callable[[Any], _Value]) -> None:
        self._compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> collective_property[_Value]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> _Value: ...

    def __get__(self, instance: object | None, owner: type) -> collective_property[_Value] | _Value:
        if instance is None:
            return self
        value = self._compute(instance)
        vars(instance)[self._name] = value  # found before this descriptor from now on
        return value


class Reducer(ABC):
    """Collective operations of a group of processes; each process calls them in the same order.

    A subclass defines the four abstract members. The others follow from these; a subclass may replace `concat` and
    `broadcast_` by faster ones.
    """

    @property
    @abstractmethod
    def rank(self) -> int:
        """Number of this process, from 0."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Number of processes."""

    @abstractmethod
    def sum_(self, *tensors: Tensor) -> None:
        """Replace each tensor by its sum over the processes, in place; the same bits on every process."""

    @abstractmethod
    def gather(self, value: _Value) -> list[_Value]:
        """The values of all processes in rank order, on every process; a value can be pickled.

        Tensors may arrive on another device than the sender's.
        """

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over the processes, on every process; the argument does not change."""
        total = tensor.clone(memory_format=torch.contiguous_format)
        self.sum_(total)
        return total

    def concat(self, rows: Tensor) -> Tensor:
        """Rows (n, ...) of all processes in rank order, of one shape (DataError), on the device of `rows`."""
        parts = self.gather(rows)
        filled = [part.to(rows.device) for part in parts if len(part)]
        shapes = {tuple(part.shape[1:]) for part in filled}
        if len(shapes) > 1:
            raise DataError("rows of one shape on all processes", " and ".join(map(str, sorted(shapes))),
                            "Give targets, and network outputs, one shape on all processes.")
        return torch.cat(filled) if filled else rows

    def broadcast_(self, tensor: Tensor, source: int = 0) -> Callable[[], None]:
        """Begin to overwrite a contiguous tensor by that of the rank `source`; the result waits for the end.

        Until then nobody may write the tensor, nor read it but at the source.
        """
        found = self.gather(tensor if self.rank == source else None)[source]
        if found is not None:
            tensor.copy_(found)
        return lambda: None

    def broadcast(self, value: Tensor) -> Tensor:
        """The tensor of rank 0, on the device of `value`; it has one shape on all processes."""
        copied = value.clone(memory_format=torch.contiguous_format)
        self.broadcast_(copied)()
        return copied

    def share(self, count: int) -> tuple[int, int, int]:
        """Global numbers of this process's `count` examples, first and last + 1, and how many all processes have."""
        counts = self.gather(count)
        return sum(counts[: self.rank]), sum(counts[: self.rank + 1]), sum(counts)

    def require_one(self, what: str, remedy: str) -> None:
        """Refuse what several processes cannot do (UnsupportedError)."""
        if self.world_size > 1:
            raise UnsupportedError(f"one process for {what}", f"a group of {self.world_size}", remedy)

    def require_equal(self, what: str, value: Any) -> None:
        """Check that a value is the same on all processes (UnsupportedError)."""
        if any(other != value for other in self.gather(value)):
            raise UnsupportedError(f"the same {what} on all processes", "different ones",
                                   "Run the same script, with the same arguments, in every process.")


@dataclass(frozen=True)
class SingleProcess(Reducer):
    """One process with all the data: sums and rows stay as they are."""

    @property
    def rank(self) -> int:
        """0."""
        return 0

    @property
    def world_size(self) -> int:
        """1."""
        return 1

    def sum_(self, *tensors: Tensor) -> None:
        """Nothing to add."""

    def gather(self, value: _Value) -> list[_Value]:
        """The value."""
        return [value]

    def concat(self, rows: Tensor) -> Tensor:
        """The rows themselves."""
        return rows
