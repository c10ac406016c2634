"""Memory of predictions: the peak at 10,000 images beside that at 1,000.

Random images of 28 x 28, a small CNN with random weights (C = 10, P = 3,226), fitted to 300 of them, float32 with the
algebra in float64. Each figure is the peak of a fresh process, which holds imports, the fit and all images (31 MB at
10,000); in brackets, what it adds to what the process held just before the call, after a prediction of 16 images.
Command for the figures:

    python examples/benchmarks/prediction.py

Goal: the peak at 10,000 images is at most 1.2 times that at 1,000.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from functools import partial
from typing import Any

import torch
from _common import in_process, machine, parser, peak_bytes, resident_bytes, table, write
from torch import nn

import ntk_laplace as ntkl

STRUCTURES = ("gp", "full", "kfac", "ekfac", "inf", "diag")
METHODS = ("glm", "probit", "blr", "map", "nn")


def network() -> nn.Module:
    """Two convolutions and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2), nn.Tanh(), nn.Conv2d(4, 8, 3, stride=2), nn.Tanh(), nn.Flatten(),
        nn.Linear(288, 10),
    )


def measure(structure: str, method: str, count: int, samples: int, training: int) -> dict[str, float]:
    """Peak bytes of one prediction above what the process held before, and its seconds. Run in a fresh process."""
    torch.manual_seed(0)
    x = torch.randn(max(count, training), 1, 28, 28)
    data = x[:training], torch.arange(training) % 10
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ntkl.NTKLaplaceWarning)  # what INF's low rank exceeds
        posterior = ntkl.laplace(network(), data, ntkl.Categorical(), structure=structure)
    posterior.predict(x[:16], method, samples)
    before, start = resident_bytes(), time.perf_counter()
    posterior.predict(x[:count], method, samples)
    return {"base_bytes": before, "peak_bytes": peak_bytes(), "seconds": time.perf_counter() - start}


def in_a_process(options: argparse.Namespace, structure: str, method: str, count: int) -> dict[str, Any]:
    """The figures of one prediction."""
    given = ["--measure", structure, method, str(count), "--samples", str(options.samples), "--threads",
             str(options.threads)]
    job = partial(measure, structure, method, count, options.samples, options.training)
    return in_process(__file__, given, job, options.small)


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__, "prediction.json")
    arguments.add_argument("--counts", type=int, nargs=2, default=[1000, 10_000], help="images (default 1000 10000)")
    arguments.add_argument("--samples", type=int, default=100, help="draws of glm and nn (default 100)")
    arguments.add_argument("--structures", nargs="+", default=list(STRUCTURES), choices=STRUCTURES)
    arguments.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, help="of KFAC")
    arguments.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    options.training = 300
    if options.small:
        options.counts, options.samples, options.training = [20, 40], 4, 12
    if options.measure:
        structure, method, count = options.measure
        print(json.dumps(measure(structure, method, int(count), options.samples, options.training)))
        return
    few, many = options.counts
    pairs = [(structure, method) for structure in options.structures
             for method in (options.methods if structure == "kfac" else options.methods[:1])]
    result: dict[str, Any] = {"machine": machine(options.threads), "counts": options.counts, "samples": options.samples,
                              "predictions": []}
    rows = []
    for structure, method in pairs:
        found = [in_a_process(options, structure, method, count) for count in (few, many)]
        ratio = found[1]["peak_bytes"] / found[0]["peak_bytes"]
        result["predictions"].append({"structure": structure, "method": method, "runs": found, "ratio": ratio})
        figures = [f"{one['peak_bytes'] / 1e6:.0f} MB ({(one['peak_bytes'] - one['base_bytes']) / 1e6:.0f})"
                   for one in found]
        rows.append([structure, method, *figures, f"{ratio:.2f}x", f"{found[1]['seconds']:.1f} s"])
    head = ["structure", "method", f"peak, {few:,} images", f"peak, {many:,} images", "ratio", f"time, {many:,}"]
    print(f"{options.samples} draws where a method draws\n")
    print(table(head, rows))
    write(options.out, result)


if __name__ == "__main__":
    main()
