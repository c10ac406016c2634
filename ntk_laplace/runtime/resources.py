"""Memory checks: the available memory of a device, and an error before a computation that would exceed it."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from ntk_laplace.errors import MemoryBudgetError
from ntk_laplace.runtime import tuning

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_CGROUP_USAGE = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")


def _read_number(paths: tuple[str, ...]) -> int | None:
    for path in paths:
        try:
            return int(Path(path).read_text())
        except (OSError, ValueError):
            continue
    return None


def _free_host_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        # macOS and others: total physical memory is the best portable estimate
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, used = _read_number(_CGROUP_LIMITS), _read_number(_CGROUP_USAGE)
    if limit is not None and used is not None:
        free = min(free, max(limit - used, 0))
    return free


def available_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`, within container limits."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # memory that torch's caching allocator reserves but does not use is also available
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return _free_host_memory()


def buffer_bytes(size: int, device: torch.device) -> int:
    """A size of `tuning` on this device: more on a GPU, which takes longer to start work than to do a little of it."""
    if device.type != "cuda":
        return size
    multiple = torch.cuda.get_device_properties(device).total_memory // tuning.BUFFERED_BYTES
    return size * min(max(1, multiple), tuning.MOST_BUFFERS)


def format_bytes(count: float) -> str:
    """Human-readable bytes: ``format_bytes(2**31) == '2.0 GiB'``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def require_memory(needed: int, device: torch.device, what: str, remedy: str, budget: int | None = None) -> None:
    """Raise an error before allocation if the predicted memory does not fit.

    Parameters
    ----------
    needed : int
        Predicted bytes.
    device : torch.device
        Device of the allocation.
    what : str
        What would be allocated.
    remedy : str
        What to do instead, as a full sentence.
    budget : int, optional
        The caller's limit in bytes; by default the free memory of the device, which is not asked for where little is
        needed: the answer takes longer than many computations of that size.

    Raises
    ------
    MemoryBudgetError
        If `needed` exceeds the budget.
    """
    if budget is None and needed <= tuning.ASSUMED_FREE_BYTES:
        return
    limit = available_memory(device) if budget is None else budget
    if needed > limit:
        raise MemoryBudgetError(f"{what} to fit into {format_bytes(limit)} on {device}",
                                f"a predicted need of {format_bytes(needed)}", remedy)


def is_about_memory(error: BaseException) -> bool:
    """Whether an error means out of memory; torch's CPU allocator raises a plain RuntimeError."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
