"""What threads of one process share: objects that a block changes for a while, and settings of the whole process.

A process that was forked has one thread: it waits for none of the others, has no settings of theirs, and finds no
object changed, since a fork waits for writers. An interrupt (Ctrl-C), wherever it comes, leaves no other thread
waiting.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import ref


class _Shared:
    """What threads share; in a process that was forked it begins anew."""

    def __init__(self) -> None:
        self._begin()
        _EVERYTHING.add(ref(self, _EVERYTHING.discard))

    def _begin(self) -> None:
        raise NotImplementedError

    def _keep(self, seconds: float) -> Callable[[], None] | None:
        """Keep it as it was until the returned function is called; None if it is not so within this time."""
        return _nothing


_EVERYTHING = set["ref[_Shared]"]()  # a WeakSet cannot be listed while another thread adds to it
_KEPT: dict[int, list[Callable[[], None]]] = {}  # by the thread that forks


def _nothing() -> None:
    """Release what needs no release."""


def _everything() -> list[_Shared]:
    return [one for reference in list(_EVERYTHING) if (one := reference()) is not None]


def _before_fork() -> None:
    """Keep everything as it was, but nothing while another is waited for, whose thread may wait for what is kept."""
    kept, until, busy = _KEPT.setdefault(threading.get_ident(), []), time.monotonic() + _PATIENCE, None
    while True:
        left = max(0.0, until - time.monotonic())
        for one in sorted(_everything(), key=lambda one: one is not busy):
            release = one._keep(left if one is busy else 0.0)
            if release is not None:
                kept.append(release)
            elif left:
                busy = one
                break
        else:
            return
        while kept:
            kept.pop()()


def _in_parent() -> None:
    for release in _KEPT.pop(threading.get_ident(), []):
        release()


def _in_child() -> None:
    _KEPT.clear()
    for one in _everything():
        one._begin()


if hasattr(os, "register_at_fork"):  # no process is forked on Windows
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)


_PATIENCE = 10.0  # seconds that a fork waits for a writer
_INTERRUPTED = 0.1  # seconds after which a writer looks by itself: an interrupt may come before it is told


class ReadersAndWriters(_Shared):
    """Blocks that read an object run side by side; a block that changes it, and changes it back, runs alone.

    A block may contain others in the same thread. One that reads and then writes does not count as a reader while
    it waits: it finds the object as it was. A copy, or one from a pickle, is a lock of its own.
    """

    def _begin(self) -> None:
        self._entry, self._told = threading.RLock(), threading.RLock()
        self._left = threading.Condition(self._told)
        # the thread of each block that reads, and of each that writes, which does not count as a reader
        self._readers, self._writers = dict[object, int](), dict[object, int]()

    def _keep(self, seconds: float) -> Callable[[], None] | None:
        if threading.get_ident() in self._readers.values():  # no writer is inside
            return _nothing
        return self._entry.release if self._entry.acquire(timeout=seconds) else None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Run a block beside those of other readers."""
        block, thread = object(), threading.get_ident()
        try:
            if thread in self._readers.values():
                self._readers[block] = thread
            else:
                with self._entry:  # taken while a writer is inside or waits
                    self._readers[block] = thread
            yield
        finally:
            self._readers.pop(block, None)
            self._tell()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Run a block alone."""
        block, thread = object(), threading.get_ident()
        try:
            self._writers[block] = thread
            self._tell()
            with self._entry:
                with self._told:
                    while set(self._readers.values()) - set(self._writers.values()):
                        self._left.wait(_INTERRUPTED)
                yield
        finally:
            try:
                with self._entry:  # another writer counts on it
                    pass
            finally:
                self._writers.pop(block, None)

    def _tell(self) -> None:
        with self._told:
            self._left.notify_all()

    def __deepcopy__(self, memo: dict[int, Any]) -> ReadersAndWriters:
        return ReadersAndWriters()

    def __reduce__(self) -> tuple[type[ReadersAndWriters], tuple[()]]:
        return ReadersAndWriters, ()


class ProcessWide(_Shared):
    """A context that changes the whole process: the first thread inside enters it, the last one leaves it.

    Two threads that each restored what they found would leave the change behind.
    """

    def __init__(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        self._context = context
        self._entered: AbstractContextManager[Any] | None = None
        super().__init__()

    def _begin(self) -> None:
        self._lock, self._inside = threading.Lock(), set[object]()
        self._close()  # where another thread was inside, which a forked process does not have

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run a block in the context."""
        one = object()
        try:
            with self._lock:
                if not self._inside:
                    context = self._context()
                    context.__enter__()
                    self._entered = context
                self._inside.add(one)
            yield
        finally:
            try:
                self._leave(one)
            except BaseException:  # interrupted
                self._leave(one)
                raise

    def _leave(self, one: object) -> None:
        with self._lock:
            self._inside.discard(one)
            if not self._inside:
                self._close()

    def _close(self) -> None:
        if self._entered is not None:
            self._entered.__exit__(None, None, None)
            self._entered = None
