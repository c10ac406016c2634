"""What each process of examples/benchmarks/processes.py does; in a module, so that a started process can import it."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ntk_laplace as ntkl
from ntk_laplace.runtime import tuning


def start(ranks: int, folder: Path, work: Callable[..., None], *arguments: Any) -> list[Any]:
    """Start `work(rank, ...)` in so many processes of a gloo group."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "ntk_laplace", "_processes"])  # imported once for all
    group = folder / f"group-{time.time_ns()}"
    processes = [context.Process(target=_run, args=(rank, ranks, group, work, arguments)) for rank in range(ranks)]
    for process in processes:
        process.start()
    return processes


def _run(rank: int, ranks: int, group: Path, work: Callable[..., None], arguments: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{group}", rank=rank, world_size=ranks)
    work(rank, *arguments)
    dist.destroy_process_group()


# --- time


def problem(n: int, widths: Sequence[int], seed: int = 0) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A multilayer perceptron of float32 and data of noise: the work does not depend on them."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inner, outer in itertools.pairwise(widths):
        layers += [nn.Linear(inner, outer), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).eval(), (torch.randn(n, widths[0]), torch.randint(widths[-1], (n,)))


def timed(rank: int, structure: str, n: int, widths: Sequence[int], repeats: int, out: Path) -> None:
    """Times of a fit, or for "gp" of the Gram matrix and its factor, and numbers to compare.

    Times are the wall's, and the processor's of the process that took most: what two free cores would need, without
    waiting.
    """
    network, data = problem(n, widths)
    settings = ntkl.Settings(distributed=True, progress=False)

    def fit() -> ntkl.Posterior:
        return ntkl.laplace(network, data, ntkl.Categorical(), structure=structure, settings=settings)

    posterior = fit()
    fitted = posterior.fitted
    seconds, processor = [], []
    for _ in range(repeats):
        dist.barrier()
        before = time.perf_counter(), time.process_time()
        _ = fitted.structure.posterior_precision(fitted.model) if structure == "gp" else fit()
        used = torch.tensor(time.process_time() - before[1], dtype=torch.float64)
        dist.barrier()
        seconds.append(time.perf_counter() - before[0])
        dist.all_reduce(used, dist.ReduceOp.MAX)
        processor.append(float(used))
    numbers = torch.stack([posterior.log_marginal_likelihood().double(), posterior.log_det().double()]).detach()
    blocks = posterior.latent_moments(data[0][:50])[1].double()
    if rank == 0:
        # covariances in units of the variances: one near 0 is a difference of larger numbers
        scale = blocks.diagonal(dim1=1, dim2=2).rsqrt()
        correlations = blocks * scale.unsqueeze(2) * scale.unsqueeze(1)
        numbers = torch.cat([numbers, scale.flatten(), 2.0 + correlations.flatten()])
        torch.save({"seconds": min(seconds), "processor": min(processor), "numbers": numbers}, out)


# --- death


def fit_small(rank: int, structure: str, n: int, out: Path, checkpoint: Path | None, resume: Path | None) -> None:
    """Fit a small network slowly, one example at a time, with a checkpoint after each batch; save what is compared."""
    tuning.AUTOSAVE_SECONDS = 0.0
    network, (x, y) = problem(n, (8, 12, 4))
    settings = ntkl.Settings(batch_size=4, distributed=True, progress=False, checkpoint=checkpoint, resume=resume)
    try:
        posterior = ntkl.laplace(network.double(), (x.double(), y), ntkl.Categorical(), structure=structure,
                                 settings=settings)
    except ntkl.ProcessLostError as error:
        (out.parent / f"lost.{rank}").write_text(str(error))
        raise SystemExit(3) from None
    numbers = torch.stack([posterior.log_marginal_likelihood(), posterior.log_det()]).detach()
    found = torch.cat([numbers, *(part.flatten() for part in posterior.latent_moments(x[:9].double()))])
    torch.save(found, out.with_name(f"{out.name}.{rank}"))


def result(ranks: int, folder: Path, structure: str, n: int, resume: Path | None = None) -> list[Tensor]:
    """What every process of an undisturbed fit, or of a resumed one, finds."""
    out = folder / "found"
    for process in start(ranks, folder, fit_small, structure, n, out, resume, resume):
        process.join()
        assert process.exitcode == 0, process.exitcode
    return [torch.load(f"{out}.{rank}") for rank in range(ranks)]


def kill_one(folder: Path, structure: str, n: int, seconds: float, ranks: int = 2) -> float | None:
    """Kill -9 one of the processes of a fit at a random moment; how long the others then took to say so.

    None if the fit had ended before.
    """
    checkpoint = folder / "fit.pt"
    for old in folder.glob("fit.pt*"):
        old.unlink()
    for old in folder.glob("lost.*"):
        old.unlink()
    processes = start(ranks, folder, fit_small, structure, n, folder / "killed", checkpoint, None)
    victim = random.randrange(ranks)
    own = checkpoint if victim == 0 else checkpoint.with_name(f"fit.pt.{victim}")
    while not own.exists() and processes[victim].is_alive():
        time.sleep(0.002)
    time.sleep(random.uniform(0.0, seconds))
    if not processes[victim].is_alive():
        for process in processes:
            process.join()
        return None
    os.kill(processes[victim].pid, signal.SIGKILL)
    killed = time.perf_counter()
    for process in processes:
        process.join(120)
    took = time.perf_counter() - killed
    if processes[victim].exitcode != -signal.SIGKILL:
        return None
    for rank, process in enumerate(processes):
        if rank != victim and process.exitcode != 3:
            return None if process.exitcode == 0 else float("inf")
    return took


def done(folder: Path) -> str:
    """The pass of each file that is left, and how many examples of it are done."""
    records = [torch.load(path, weights_only=True)["accumulation"] for path in sorted(folder.glob("fit.pt*"))
               if not path.name.endswith(".part")]
    return " and ".join(f"{record['stage']} {len(record['done'])}" for record in records)
