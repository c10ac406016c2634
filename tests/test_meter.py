"""Meters against work of known size."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch

from ntk_laplace.runtime import meter
from ntk_laplace.runtime.meter import PeakMemory, Stopwatch

CPU, MIB = torch.device("cpu"), 2**20
on_linux = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")


def work(size: int) -> None:
    held = torch.ones(size // 8, dtype=torch.float64)  # ones and not empty: pages count when they are written
    time.sleep(0.02)
    del held


@pytest.mark.slow
@on_linux
@pytest.mark.parametrize("size", [48 * MIB, 8 * MIB])
def test_extra_memory_is_what_was_allocated(size: int) -> None:
    kept = torch.ones(16 * MIB)  # from before: not counted
    work(size)  # of the same size, freed again: counted nevertheless
    counts = []
    for _ in range(3):
        with PeakMemory(CPU) as memory:
            work(size)
        counts.append(memory.bytes)
    assert min(counts) > 0.95 * size
    assert min(counts) < size + 4 * MIB  # others in the process, and a slow system, may add to one of them
    assert len(kept) == 16 * MIB


@on_linux
def test_the_peak_counts_and_not_the_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statm = tmp_path / "statm"
    monkeypatch.setattr(meter, "_STATM", statm)

    def pages(resident: int) -> None:
        (tmp_path / "next").write_text(f"9999 {resident} 0 0 0 0 0\n")
        (tmp_path / "next").replace(statm)  # at once: the meter never reads half a file
        time.sleep(0.05)

    pages(1000)
    with PeakMemory(CPU) as memory:
        for resident in (1064, 1000, 1064, 1010):  # two blocks in turn; some memory stays
            pages(resident)
    assert memory.bytes == 64 * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_meter_stops_its_thread_when_the_work_fails() -> None:
    with pytest.raises(ValueError, match="the work"), PeakMemory(CPU) as memory:
        raise ValueError("the work")
    assert memory.bytes is None or memory.bytes >= 0
    assert not [thread for thread in threading.enumerate() if "memory meter" in thread.name]


@pytest.mark.slow
def test_without_proc_the_high_water_mark_counts_if_it_rises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter, "_STATM", Path("/nowhere"))
    for marks, expected in (([100, 140], 40), ([100, 100], None), ([None, None], None)):
        monkeypatch.setattr(meter, "_high_water_mark", iter(marks).__next__)
        with PeakMemory(CPU) as memory:
            pass
        assert memory.bytes == expected


def test_high_water_mark_is_in_bytes() -> None:
    held = torch.ones(64 * MIB // 8, dtype=torch.float64)
    assert 64 * MIB < meter._high_water_mark() < 100_000 * MIB
    del held


def test_stopwatch_measures_seconds() -> None:
    with Stopwatch(CPU) as watch:
        time.sleep(0.05)
    assert 0.05 <= watch.seconds < 10.0


@pytest.mark.slow
def test_on_cuda_the_allocator_is_asked_and_the_queue_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device, asked = torch.device("cuda", 1), []
    answers = {"memory_allocated": 100, "max_memory_allocated": 350}
    for name in ("reset_peak_memory_stats", "synchronize", *answers):
        answer = answers.get(name)
        monkeypatch.setattr(torch.cuda, name, lambda where, n=name, a=answer: asked.append((n, where)) or a)
    with PeakMemory(device) as memory, Stopwatch(device):
        asked.append(("the work", device))
    assert memory.bytes == 250 and {where for _, where in asked} == {device}
    assert [name for name, _ in asked] == [
        "reset_peak_memory_stats", "memory_allocated", "synchronize", "the work", "synchronize", "max_memory_allocated",
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda_torch_counts() -> None:
    device = torch.device("cuda")
    kept = torch.ones(MIB, device=device)
    with PeakMemory(device) as memory, Stopwatch(device):
        held = torch.ones(MIB, device=device)
        del held
    assert memory.bytes == 4 * MIB and len(kept) == MIB
