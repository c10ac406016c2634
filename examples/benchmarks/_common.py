"""What the benchmarks share: timing, memory, peers in their own interpreters, the table at the end."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent


def best_times(tasks: dict[str, Callable[[], Any]], repeats: int, warmup: int = 1) -> dict[str, float]:
    """Shortest wall time of each task in seconds.

    The tasks take turns, so that a busy moment of the machine meets all of them; the shortest of several
    turns is the figure least disturbed by other processes.
    """
    best = dict.fromkeys(tasks, float("inf"))
    for turn in range(warmup + repeats):
        for name, task in tasks.items():
            start = time.perf_counter()
            result = task()
            seconds = time.perf_counter() - start
            del result
            if turn >= warmup:
                best[name] = min(best[name], seconds)
    return best


def resident_bytes() -> int:
    """Memory the process holds now."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def peak_bytes() -> int:
    """The most memory the process ever held (``ru_maxrss`` of the process itself).

    On Linux ``getrusage`` also counts what the parent held at the fork, so its status file is asked first.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def in_process(
    script: str, arguments: Sequence[str], job: Callable[[], Any] | None = None, small: bool = False,
    variables: Mapping[str, str] | None = None,
) -> Any:
    """What a script prints as JSON on its last line, in a process of its own, whose memory peak is that of one job.

    In miniature the job runs here, and its memory is no figure. `variables` are added to the environment.
    """
    if small and job is not None:
        return job()
    command = [sys.executable, script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | (variables or {}))
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    sys.stderr.write(done.stderr)
    return json.loads(done.stdout.strip().splitlines()[-1])


def run_python(python: str, arguments: Sequence[str], arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Run one script of this folder in an interpreter; arrays go there and back as ``.npz``.

    The script is called as ``script input.npz output.npz [options]``. Its scalars and arrays come back in a
    dictionary; a failure comes back as ``{"error": last lines}`` because a peer that crashes is a result too.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "in.npz"), Path(folder, "out.npz")
        np.savez(source, **arrays)
        script, *options = arguments
        command = [python, str(HERE / script), str(source), str(target), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return {"error": "\n".join(done.stderr.strip().splitlines()[-3:])}
        with np.load(target) as found:
            return {k: v.item() if v.ndim == 0 else v for k, v in found.items()}


def parser(description: str | None, out: str) -> argparse.ArgumentParser:
    """Arguments every benchmark takes."""
    arguments = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", type=Path, default=Path(out), help=f"JSON file to write (default {out})")
    arguments.add_argument("--repeats", type=int, default=5, help="turns per task, the best counts (default 5)")
    arguments.add_argument("--threads", type=int, default=2, help="torch threads (default 2)")
    arguments.add_argument("--small", action="store_true", help="everything in miniature, in seconds: no figures")
    return arguments


def machine(threads: int) -> dict[str, Any]:
    """What the figures were measured on."""
    import torch

    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": threads,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
    }


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns."""
    lines = [list(head), *[list(row) for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = ["| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines]
    text.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(text)


def write(path: Path, result: dict[str, Any]) -> None:
    """Write the figures as JSON and say where."""
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"\nwritten to {path}")


def seconds(value: float | None) -> str:
    """Three figures and the unit, or a dash."""
    return "-" if value is None else f"{value:.3g} s"


def ratio(value: float | None, base: float) -> str:
    """``value / base`` with a times sign, or a dash."""
    return "-" if value is None else f"{value / base:.3g}x"
