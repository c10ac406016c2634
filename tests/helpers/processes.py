"""Functions run on several processes of torch.distributed."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ntk_laplace.runtime.distributed import ProcessGroupReducer
from ntk_laplace.runtime.reduction import Reducer


def on_processes(world_size: int, run: Callable[[Reducer], Any], folder: Path) -> list[Any]:
    """What `run`, a function of a module, returns on each of several processes with gloo."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "ntk_laplace"])  # imported once for all of them
    processes = [context.Process(target=_process, args=(rank, world_size, run, folder)) for rank in range(world_size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * world_size
    return [torch.load(folder / f"{rank}.pt") for rank in range(world_size)]


def _process(rank: int, world_size: int, run: Callable[[Reducer], Any], folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'group'}", rank=rank, world_size=world_size)
    try:
        torch.save(run(ProcessGroupReducer()), folder / f"{rank}.pt")
    finally:
        dist.destroy_process_group()
