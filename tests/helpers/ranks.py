"""Several ranks in threads of one process, of which one runs at a time, and a reducer between them.

A rank runs until a collective operation and then hands over to the next one, so global state (the random generator,
warnings) is never shared between two ranks at once, and what a rank has done before another one dies is the same in
every run. Values travel pickled, as between processes.
"""

from __future__ import annotations

import itertools
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.runtime.reduction import Reducer


class _Group:
    def __init__(self, world_size: int) -> None:
        self.slots: list[Any] = [None] * world_size
        self.running = threading.Lock()
        self.barrier = threading.Barrier(world_size, lambda: self.hand_to(0), timeout=20)
        self._turn, self._turned = 0, threading.Condition()

    def hand_to(self, rank: int) -> None:
        """Let this rank run next; after an error all run, one after the other."""
        with self._turned:
            self._turn = rank
            self._turned.notify_all()

    def wait_for(self, rank: int) -> None:
        """Wait until it is this rank's turn."""
        with self._turned:
            self._turned.wait_for(lambda: self._turn == rank or self.barrier.broken, timeout=20)


class ThreadReducer(Reducer):
    """One rank of a group of threads."""

    def __init__(self, group: _Group, rank: int) -> None:
        self._group, self._rank = group, rank
        self.calls: list[str] = []

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return len(self._group.slots)

    def gather(self, value: Any) -> list[Any]:
        return self._exchange("gather", value)

    def sum_(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            parts = self._exchange("sum", tensor)
            assert len({(part.shape, part.dtype) for part in parts}) == 1, "each rank sums another tensor"
            tensor.copy_(sum(parts[1:], parts[0]))

    def _exchange(self, call: str, value: Any) -> list[Any]:
        group = self._group
        group.slots[self._rank] = pickle.dumps((call, value))
        group.running.release()
        group.hand_to(self._rank + 1)
        try:
            group.barrier.wait()
            found = [pickle.loads(slot) for slot in group.slots]
            group.barrier.wait()  # all have read
            group.wait_for(self._rank)
        finally:
            group.running.acquire()
        assert {one for one, _ in found} == {call}, "each rank calls another collective operation"
        self.calls.append(call)
        return [value for _, value in found]


def on_ranks(world_size: int, run: Callable[[Reducer], Any]) -> list[Any]:
    """What `run` returns on each rank; the first error of a rank, if there is one."""
    group = _Group(world_size)
    found: list[Any] = [None] * world_size
    errors: dict[int, BaseException] = {}

    def target(rank: int) -> None:
        group.wait_for(rank)
        with group.running:
            try:
                found[rank] = run(ThreadReducer(group, rank))
            except BaseException as error:  # a test reads it in its own thread
                errors[rank] = error
                group.barrier.abort()
        group.hand_to(rank + 1)

    threads = [threading.Thread(target=target, args=(rank,), name=f"rank {rank}") for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    own = [error for error in errors.values() if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise [*own, *errors.values()][0]
    return found


def shares(n: int, world_size: int) -> list[slice]:
    """Unequal shares of n examples, the first the smallest."""
    weights = torch.arange(1, world_size + 1).cumsum(0).double()
    ends = [0, *(round(float(w / weights[-1]) * n) for w in weights)]
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


def take_all(values: Sequence[Tensor], part: slice) -> tuple[Tensor, ...]:
    """That part of each tensor."""
    return tuple(value[part] for value in values)
