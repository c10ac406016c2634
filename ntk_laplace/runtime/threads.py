"""What threads of one process share: objects that a block changes for a while, and settings of the whole process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any


class ReadersAndWriters:
    """Blocks that read an object run side by side; a block that changes it, and changes it back, runs alone.

    A block may contain others in the same thread. One that reads and then writes does not count as a reader while
    it waits: it finds the object as it was. A copy, or one from a pickle, is a lock of its own.
    """

    def __init__(self) -> None:
        self._entry, self._empty = threading.RLock(), threading.Condition()
        self._readers = 0
        self._own = threading.local()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Run a block beside those of other readers."""
        if self._depth == 0:
            with self._entry:  # taken while a writer is inside or waits
                self._add(1)
        self._own.depth = self._depth + 1
        try:
            yield
        finally:
            self._own.depth -= 1
            if self._own.depth == 0:
                self._add(-1)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Run a block alone."""
        depth = self._depth
        if depth:
            self._add(-1)
        try:
            with self._entry:
                with self._empty:
                    self._empty.wait_for(lambda: self._readers == 0)
                self._own.depth = 0
                yield
        finally:
            self._own.depth = depth
            if depth:
                with self._entry:
                    self._add(1)

    @property
    def _depth(self) -> int:
        """How many blocks that read contain this one."""
        depth: int = getattr(self._own, "depth", 0)
        return depth

    def _add(self, count: int) -> None:
        with self._empty:
            self._readers += count
            self._empty.notify_all()

    def __deepcopy__(self, memo: dict[int, Any]) -> ReadersAndWriters:
        return ReadersAndWriters()

    def __reduce__(self) -> tuple[type[ReadersAndWriters], tuple[()]]:
        return ReadersAndWriters, ()


class ProcessWide:
    """A context that changes the whole process: the first thread inside enters it, the last one leaves it.

    Two threads that each restored what they found would leave the change behind.
    """

    def __init__(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        self._context, self._entered = context, ExitStack()
        self._lock, self._inside = threading.Lock(), 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run a block in the context."""
        with self._lock:
            if self._inside == 0:
                self._entered.enter_context(self._context())
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    self._entered.close()
