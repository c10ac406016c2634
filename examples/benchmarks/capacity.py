"""What `plan` says beside what happens: peak memory and time of fit, evidence and predictions, of every structure.

Command for both figures of docs/capacity.md:

    python examples/benchmarks/capacity.py

    python examples/benchmarks/capacity.py --paper

Each case of the first runs in fresh processes: `plan`, then fit, evidence and 600 predictions, under the library's
meter. Sizes are chosen so that matrices are above 100 MB and each case takes under a minute. The forecast is of the
bytes that are allocated. A process has more, where its C library keeps freed blocks: on Linux each case runs again
with the variables of glibc under which it returns them (`RETURNING`). Goal: predicted bytes within 20 % of the measured
ones. Times are estimates from a probe of a second, and have no goal.

The second prints the same formulas for problems that no machine here can hold, at the rates of an H200 as its vendor
states them, of which a share is assumed (`SHARE`): nothing of it is measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from _common import in_process, machine, parser, table, write
from torch import Tensor, nn

import ntk_laplace as ntkl
from ntk_laplace.posterior.fit import linearized
from ntk_laplace.runtime.meter import PeakMemory, Stopwatch
from ntk_laplace.runtime.resources import format_bytes
from ntk_laplace.structures.forecast import Problem, Work
from ntk_laplace.tools.comparison.plan import duration

CLASSES, TESTED = 10, 600
RETURNING = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}  # fixed: glibc raises them else
PRECISION = 1e3  # few effective parameters: random data would need a rank of all of them


def mlp(*widths: int) -> nn.Sequential:
    """Fully connected, with tanh."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def conv(width: int) -> nn.Sequential:
    """Two convolutions of 8 x 8 images, then a linear layer."""
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, width, 3, padding=1), nn.Tanh(),
                         nn.Conv2d(width, width, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten(),
                         nn.Linear(16 * width, CLASSES))


def sure(scale: float, *widths: int) -> nn.Sequential:
    """An MLP with larger last weights: it is sure of most inputs, and few rows have most of the curvature."""
    network = mlp(*widths)
    with torch.no_grad():
        network[-1].weight *= scale
    return network


class Recurrent(nn.Module):
    """A GRU over the rows of an image: each weight has eight uses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cells, self.last = nn.GRU(8, width, batch_first=True), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Classes of images (n, 64)."""
        return self.last(self.cells(x.unflatten(1, (8, 8)))[0][:, -1])


class Attention(nn.Module):
    """Two layers of a transformer over the rows of an image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True)
        self.first, self.layers = nn.Linear(8, width), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Classes of images (n, 64)."""
        return self.last(self.layers(self.first(x.unflatten(1, (8, 8)))).mean(1))


NETWORKS = {
    "MLP 64-128-128-10": lambda: mlp(64, 128, 128, CLASSES),
    "MLP 64-256-256-10": lambda: mlp(64, 256, 256, CLASSES),
    "sure MLP 64-128-128-10": lambda: sure(100.0, 64, 128, 128, CLASSES),
    "sure MLP 64-256-256-10": lambda: sure(100.0, 64, 256, 256, CLASSES),
    "MLP 64-64-32-10": lambda: mlp(64, 64, 32, CLASSES),
    "MLP 64-2000-2000-10": lambda: mlp(64, 2000, 2000, CLASSES),
    "MLP 64-3000-1000-10": lambda: mlp(64, 3000, 1000, CLASSES),
    "CNN 16": lambda: conv(16),
    "CNN 8": lambda: conv(8),
    "CNN 64": lambda: conv(64),
    "CNN 200": lambda: conv(200),
    "GRU 96": lambda: Recurrent(96),
    "transformer 64": lambda: Attention(64),
}
CASES = [  # structure, network, N
    ("gp", "MLP 64-128-128-10", 600),
    ("gp", "MLP 64-256-256-10", 1000),
    ("gp", "CNN 16", 700),
    ("full", "MLP 64-64-32-10", 500),
    ("full", "CNN 16", 300),
    ("iterative", "MLP 64-256-256-10", 1000),
    ("iterative", "CNN 64", 300),
    ("leading rows", "sure MLP 64-128-128-10", 3000),
    ("leading rows", "sure MLP 64-256-256-10", 2000),
    ("nystrom", "MLP 64-256-256-10", 1000),
    ("nystrom", "CNN 64", 300),
    ("kfac", "MLP 64-2000-2000-10", 400),
    ("kfac", "MLP 64-3000-1000-10", 400),
    ("kfac", "CNN 200", 200),
    ("ekfac", "MLP 64-2000-2000-10", 400),
    ("ekfac", "CNN 200", 200),
    ("inf", "MLP 64-2000-2000-10", 400),
    ("inf", "MLP 64-3000-1000-10", 400),
    ("inf", "CNN 200", 200),
    ("diag", "MLP 64-2000-2000-10", 400),
    ("diag", "MLP 64-3000-1000-10", 400),
    *((name, network, 600) for network in ("GRU 96", "transformer 64") for name in ("kfac", "ekfac", "diag")),
]
SMALL = [(name, "CNN 8", 20) for name in ("gp", "full", "iterative", "nystrom", "kfac", "ekfac", "inf", "diag")]


def spec(structure: str) -> str | ntkl.StructureSpec:
    """A given rank where the choice of one would be compared with it; leading rows have none."""
    given = {"iterative": ntkl.Iterative(rank=256), "nystrom": ntkl.Nystrom(rank=256), "leading rows": "iterative"}
    return given.get(structure, structure)


def problem(name: str, n: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A network with random weights, and images with a class each."""
    torch.manual_seed(0)
    return NETWORKS[name]().double().eval(), torch.randn(n, 64, dtype=torch.float64), torch.arange(n) % CLASSES


def work(network: nn.Module, x: Tensor, y: Tensor, structure: str) -> float:
    """Fit, evidence, predictions; seconds of the first two."""
    prior = ntkl.GaussianPrior(precision=PRECISION)
    with Stopwatch(x.device) as watch, torch.no_grad():
        posterior = ntkl.laplace(network, (x, y), ntkl.Categorical(), prior, spec(structure))
        posterior.log_marginal_likelihood()
    posterior.predict(x[:TESTED])
    return watch.seconds


def measured(structure: str, name: str, n: int, device: str) -> dict[str, float]:
    """The plan's row and the measurements. Run in a fresh process."""
    network, x, y = problem(name, n)
    network, x, y = network.to(device), x.to(device), y.to(device)
    prior = ntkl.GaussianPrior(precision=PRECISION)
    (row,) = ntkl.plan(network, (x, y), ntkl.Categorical(), prior, [spec(structure)]).rows
    work(network, x[:20], y[:20], structure)  # loads libraries
    with PeakMemory(x.device) as memory:
        seconds = work(network, x, y, structure)
    assert row.memory is not None and row.seconds is not None and memory.bytes is not None
    return {"predicted_bytes": row.memory, "bytes": memory.bytes, "predicted_seconds": row.seconds, "seconds": seconds}


# --- on paper

PEAK, SHARE, MEMORY = 67e12, 0.5, 139 * 2**30  # flop/s of an H200 in float64 and float32; assumed; bytes
EIGH_FLOPS, EIGH_RATE = 9.0, 1e12  # n³ of them for eigenvectors; flop/s, a guess
GAMMA = 1000  # effective parameters, assumed: eigenvalues fall as 1/k²
PROBLEMS: dict[str, tuple[tuple[int, ...], int]] = {  # widths, N
    "9e4 rows, P = 1e7": ((3072, 2048, 1600, CLASSES), 10_000),
    "1e6 rows, P = 1e7": ((3072, 2048, 1600, CLASSES), 111_111),
    "N = 1e6, P = 1e8": ((3072, 8600, 8600, CLASSES), 1_000_000),
}
DEVICES = (1, 8, 64)


def paper(widths: tuple[int, ...], n: int) -> list[list[str]]:
    """Memory of each structure on one, 8 and 64 devices, and the time where it fits."""
    network, x = mlp(*widths).eval(), torch.randn(2, widths[0])
    settings = ntkl.Settings(memory_budget=MEMORY)
    likelihood, prior = ntkl.Categorical(), ntkl.GaussianPrior()
    lines = []
    for name in ntkl.structures.structure_names():
        one = ntkl.structures.structure_of(name, {})
        model, _ = linearized(network, (x, torch.arange(2)), likelihood, prior, one, "ggn", dtype=torch.float32,
                              settings=settings)
        model.jacobian_pass.prepare(x)
        p, c = model.network.num_parameters, CLASSES
        k = torch.arange(1, 200_000, dtype=torch.float64)
        given = Problem(model, n, model.jacobian_pass.rows(x), 1, (GAMMA * 2 / torch.pi / k).square(), -1e-2 * n)
        speed = PEAK * SHARE
        rates = Work(passes=speed / (2 * (1 + c) * p), products=speed / (4 * p), matmul=speed, cholesky=speed,
                     eigh=EIGH_RATE / EIGH_FLOPS)
        cells, notes = [name], []
        for processes in DEVICES:
            found = one.forecast(replace(given, processes=processes))
            assert found is not None and found.work is not None
            fits = found.bytes <= MEMORY
            notes.append(found.note)
            time = f", {duration(found.work.seconds(rates))}" if fits else ""
            cells.append(f"{'' if fits else 'no: '}{format_bytes(found.bytes)}{time}")
        lines.append([*cells, "; ".join(dict.fromkeys(filter(None, notes)))])
    return lines


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__, "capacity.json")
    arguments.add_argument("--device", default="cpu", help="as torch names it (default cpu)")
    arguments.add_argument("--paper", action="store_true", help="larger problems, on paper")
    arguments.add_argument("--only", nargs="*", metavar="STRUCTURE", help="some of the structures")
    arguments.add_argument("--case", nargs=3, metavar="X", help="print the figures of one case as JSON and stop")
    options: argparse.Namespace = arguments.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore", ntkl.NTKLaplaceWarning)
    if options.case:
        structure, name, n = options.case
        print(json.dumps(measured(structure, name, int(n), options.device)))
        return
    if options.paper:
        for title, (widths, n) in PROBLEMS.items():
            widths = (8, 6, CLASSES) if options.small else widths
            print(f"\n{title}\n")
            print(table(["structure", *(f"{k} H200" for k in DEVICES), "note"], paper(widths, n)), flush=True)
        return
    cases: list[dict[str, Any]] = []
    for structure, name, n in SMALL if options.small else CASES:
        if options.only and structure not in options.only:
            continue
        given = ["--threads", str(options.threads), "--device", options.device, "--case", structure, name, str(n)]
        one = partial(measured, structure, name, n, options.device)
        found = in_process(__file__, given, one, options.small)
        again = in_process(__file__, given, one, options.small, RETURNING)
        found |= {"bytes_returning": again["bytes"], "seconds_returning": again["seconds"]}
        cases.append({"structure": structure, "network": name, "num_examples": n} | found)
        print(f"{structure}, {name}: {found}", file=sys.stderr, flush=True)
    rows = [
        [case["structure"], case["network"], f"{case['num_examples']:,}", f"{case['predicted_bytes'] / 1e6:.0f} MB",
         *(cell for bytes in (case["bytes_returning"], case["bytes"])
           for cell in (f"{bytes / 1e6:.0f} MB", f"{case['predicted_bytes'] / max(1, bytes) - 1:+.0%}")),
         f"{case['predicted_seconds']:.2g} s", f"{case['seconds']:.2g} s"] for case in cases
    ]
    heads = ["structure", "network", "N", "predicted", "allocated", "off by", "resident", "off by", "predicted",
             "measured"]
    print(table(heads, rows))
    for kind, words in {"bytes_returning": "freed blocks returned", "bytes": "glibc as it is"}.items():
        near = sum(abs(case["predicted_bytes"] / max(1, case[kind]) - 1) <= 0.2 for case in cases)
        print(f"{words}: {near} of {len(cases)} forecasts within 20 %")
    slower = sum(case["seconds_returning"] for case in cases) / sum(case["seconds"] for case in cases)
    print(f"time of fits and evidences with freed blocks returned: {slower:.2f} times the others")
    write(options.out, {"machine": machine(options.threads), "cases": cases})


if __name__ == "__main__":
    main()
