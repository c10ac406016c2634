"""Functions run on several processes of torch.distributed."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ntk_laplace.runtime.distributed import ProcessGroupReducer
from ntk_laplace.runtime.reduction import Reducer


def on_processes(world_size: int, run: Callable[[Reducer], Any], folder: Path) -> list[Any]:
    """What `run`, a function of a module, returns on each of several processes with gloo."""
    _start(world_size, _process, world_size, run, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(world_size)]


def commands(world_size: int, calls: Sequence[list[str]], folder: Path) -> list[list[tuple[int, str, str]]]:
    """Exit codes and what is printed of calls of the command, on each of several processes, as under torchrun."""
    # served here, as by torchrun: a port that is free now may be taken when the processes are there
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in calls]
    _start(world_size, _command, world_size, calls, folder, [store.port for store in stores])
    return [torch.load(folder / f"{rank}.pt") for rank in range(world_size)]


def _start(world_size: int, target: Callable[..., None], *arguments: Any) -> None:
    context = multiprocessing.get_context("forkserver")
    # imported once for all; pytest is for the modules of tests, torch._dynamo for `live_bytes`
    context.set_forkserver_preload(["torch.distributed", "ntk_laplace.tools.cli.evidence", "pytest", "torch._dynamo"])
    processes = [context.Process(target=target, args=(rank, *arguments)) for rank in range(world_size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * world_size


def _command(rank: int, world_size: int, calls: Sequence[list[str]], folder: Path, ports: Sequence[int]) -> None:
    from ntk_laplace.tools import cli

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1",
                   "TORCHELASTIC_USE_AGENT_STORE": "True"}
    found = []
    for port, call in zip(ports, calls, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main(call)
        found.append((code, out.getvalue(), err.getvalue()))
    torch.save(found, folder / f"{rank}.pt")


def _process(rank: int, world_size: int, run: Callable[[Reducer], Any], folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'group'}", rank=rank, world_size=world_size)
    try:
        torch.save(run(ProcessGroupReducer()), folder / f"{rank}.pt")
    finally:
        dist.destroy_process_group()
