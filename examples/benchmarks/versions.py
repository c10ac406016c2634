"""An older version of the library beside this one: exact evidence, Gram matrices, KFAC, diagonal, explanations.

    git worktree add OLD COMMIT
    python examples/benchmarks/versions.py --old OLD --threads 1

Each task runs in a process of its own, old and new in turns; the shortest processor time of all turns counts, and the
largest resident memory. Ratios are new over old. The answers of both versions are compared as well.

* evidence: fit, evidence and its gradient in function space, 300 digits-like inputs, MLP 64-64-32-10, float64;
* rows: the same for 300 inputs of the CNN of ``gram.py``, float32;
* kfac, diagonal: fit of 10,000 inputs, MLP 784-256-128-10, float32; "+ evidence", "+ predictive" of 100 points;
* explain, ranking: effects of 300 training points on 50 predictions, in function space, and under KFAC.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _common import machine, parser, peak_bytes, table, write
from _networks import cnn, mlp
from torch import nn

import ntk_laplace as ntkl

Task = Callable[[], torch.Tensor]


def _data(n: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, *shape, generator=generator), torch.randint(10, (n,), generator=generator)


def _fit(network: nn.Module, data: tuple[torch.Tensor, torch.Tensor], structure: str, dtype: torch.dtype):
    settings = ntkl.Settings(progress=False)
    return ntkl.laplace(network, data, ntkl.Categorical(), ntkl.GaussianPrior(groups="layer"), structure, dtype=dtype,
                        settings=settings)


def tasks() -> dict[str, Task]:
    """Every task returns numbers that must agree between the versions."""
    torch.manual_seed(0)
    small, large, images = mlp((64, 64, 32, 10)).double().eval(), mlp((784, 256, 128, 10)).eval(), cnn().eval()
    few, many, pictures = _data(300, 64), _data(10_000, 784), _data(300, 1, 28, 28)
    few = few[0].double(), few[1]
    asked, points = torch.randn(50, 64).double(), torch.randn(100, 784)

    def gradient(posterior: ntkl.Posterior) -> torch.Tensor:
        return torch.autograd.grad(posterior.log_marginal_likelihood(), posterior.prior.log_precision)[0]

    def kfac() -> ntkl.Posterior:
        return _fit(large, many, "kfac", torch.float32)

    return {
        "evidence": lambda: gradient(_fit(small, few, "gp", torch.float64)),
        "rows": lambda: gradient(_fit(images, pictures, "gp", torch.float32)),
        "kfac": lambda: kfac().f.mean(),
        "kfac + evidence": lambda: kfac().log_marginal_likelihood().detach(),
        "kfac + predictive": lambda: kfac().predict(points, "probit").probs,
        "diagonal": lambda: _fit(large, many, "diag", torch.float32).log_marginal_likelihood().detach(),
        "explain": lambda: _fit(small, few, "gp", torch.float64).removal_effects(asked),
        "ranking": lambda: _fit(small, few, "kfac", torch.float64).removal_effects(asked),
    }


def run(name: str, repeats: int, threads: int) -> None:
    """The child: the shortest processor time of one task, its peak memory and its numbers."""
    torch.set_num_threads(threads)
    task, best, found = tasks()[name], float("inf"), torch.empty(0)
    for _ in range(repeats + 1):  # the first is a warm-up
        start = time.process_time()
        found = task()
        seconds = time.process_time() - start
        best = seconds if best == float("inf") else min(best, seconds)
    print(json.dumps({"seconds": best, "peak": peak_bytes(), "numbers": found.double().flatten()[:1000].tolist()}))


def child(root: Path, name: str, options: argparse.Namespace) -> dict:
    """One process with the library of `root`."""
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": str(options.threads)}
    command = [sys.executable, __file__, "--run", name, "--repeats", str(options.repeats), "--threads",
               str(options.threads)]  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Run all tasks in turns and print the table."""
    arguments = parser(__doc__, "versions.json")
    arguments.add_argument("--old", type=Path, help="checkout of the older version")
    arguments.add_argument("--turns", type=int, default=3, help="processes of each version and task (default 3)")
    arguments.add_argument("--tasks", nargs="+", choices=tasks().keys(), default=list(tasks()))
    arguments.add_argument("--run", choices=tasks().keys(), help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.run:
        run(options.run, options.repeats, options.threads)
        return
    if options.old is None:
        arguments.error("--old is required: a checkout of the older version")
    new = Path(__file__).resolve().parents[2]
    rows, result = [], {"machine": machine(options.threads), "tasks": {}}
    for name in options.tasks:
        found = {"old": [], "new": []}
        for _ in range(options.turns):
            for version, root in (("old", options.old), ("new", new)):
                found[version].append(child(root, name, options))
        time_old, time_new = (min(one["seconds"] for one in found[v]) for v in ("old", "new"))
        peak_old, peak_new = (max(one["peak"] for one in found[v]) for v in ("old", "new"))
        numbers = [torch.tensor(found[v][0]["numbers"], dtype=torch.float64) for v in ("old", "new")]
        gap = float((numbers[0] - numbers[1]).norm() / numbers[0].norm())
        rows.append([name, f"{time_old:.3g} s", f"{time_new:.3g} s", f"{time_new / time_old:.2f}",
                     f"{peak_new / peak_old:.2f}", f"{gap:.1g}"])  # fmt: skip
        result["tasks"][name] = {"old": time_old, "new": time_new, "peak_old": peak_old, "peak_new": peak_new,
                                 "difference": gap}  # fmt: skip
        print(rows[-1], flush=True)
    print("\n" + table(["task", "old", "new", "new / old", "peak new / old", "difference"], rows))
    write(options.out, result)


if __name__ == "__main__":
    main()
