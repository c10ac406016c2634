"""Signals during a fit: Ctrl-C between batches alone, and SIGTERM of another process as Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence

from ntk_laplace.runtime.reduction import Reducer


@contextlib.contextmanager
def terminable(reducer: Reducer) -> Iterator[None]:
    """Take SIGTERM for Ctrl-C: torchrun sends it to the others when one process dies."""
    main = threading.current_thread() is threading.main_thread()
    if reducer.world_size == 1 or not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer Ctrl-C to the end of the block, so that a batch is counted either fully or not at all."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    waiting: list[Sequence[object]] = []
    signal.signal(signal.SIGINT, lambda *arguments: waiting.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if waiting:
        raise KeyboardInterrupt
