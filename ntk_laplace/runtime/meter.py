"""Measurement of wall time and peak memory of a block, as precisely as the machine allows."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from pathlib import Path
from types import TracebackType

import torch

_STATM = Path("/proc/self/statm")
_PERIOD = 0.002  # seconds between two samples of the resident memory


class Stopwatch:
    """Wall time of a block; on a GPU it waits for queued work.

    Attributes
    ----------
    seconds : float
        Available after the block.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.seconds = device, 0.0

    def __enter__(self) -> Stopwatch:
        self._wait()
        self._begin = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._wait()
        self.seconds = time.perf_counter() - self._begin

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class PeakMemory:
    """Peak memory of a block, beyond the memory allocated before it.

    On CUDA it is exact and comes from torch's allocator; the device's peak statistics are reset. On other devices it is
    an estimate for the whole process. Where ``/proc`` exists, a thread samples the resident memory every two
    milliseconds; shorter peaks, and memory that the allocator reuses, may be missed. Elsewhere it is the operating
    system's high-water mark, which is informative only if the block raises it.

    Parameters
    ----------
    device : torch.device

    Attributes
    ----------
    bytes : int or None
        Available after the block; None if the machine does not report it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.bytes: int | None = None

    def __enter__(self) -> PeakMemory:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
            return self
        _give_back_freed_memory()
        self._sampler = _Sampler() if _STATM.exists() else None
        self._before = (_high_water_mark() or 0) if self._sampler is None else self._sampler.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self._device) - self._before
        elif self._sampler is not None:
            self.bytes = max(0, self._sampler.stop() - self._before)
        else:
            mark = _high_water_mark()
            self.bytes = mark - self._before if mark is not None and mark > self._before else None


class _Sampler:
    """A thread that records the largest resident memory it samples."""

    def __init__(self) -> None:
        self._most, self._done = 0, threading.Event()
        self._thread = threading.Thread(target=self._run, name="ntk_laplace memory meter", daemon=True)

    def start(self) -> int:
        """Start; return the resident bytes at the start."""
        # the thread's own stack counts as memory at the start
        self._thread.start()
        self._most = _resident()
        return self._most

    def stop(self) -> int:
        """Stop; return the largest resident bytes sampled."""
        self._done.set()
        self._thread.join()
        return max(self._most, _resident())

    def _run(self) -> None:
        while not self._done.wait(_PERIOD):
            self._most = max(self._most, _resident())


def _resident() -> int:
    # second field: resident set size in pages
    return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _high_water_mark() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if os.uname().sysname == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _give_back_freed_memory() -> None:
    """Make the C library return freed memory; reused memory would not count as memory of the block."""
    try:
        trim = ctypes.CDLL(None).malloc_trim  # only in glibc
    except (AttributeError, OSError, TypeError):
        return
    trim(0)
