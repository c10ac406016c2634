"""How long does a weight sample take? [S20] table 5: ResNet-18 and ResNet-50 shapes, all structures.

    python examples/structures/sampling.py --out sampling

Random weights, and a fit on a few small random images (time to sample depends on the shapes alone): one Monte-Carlo
label per image, float32. INF keeps the ``--rank`` largest eigenvalues of each layer (100), and with them every pair
of their eigenvectors: L of them, whose largest over the layers is printed. Every structure has a process of its own.
The table holds the mean and standard deviation of the time of ``posterior.sample(1)``, its mean time on the processor
(with one thread the better figure where other work goes on), that of P random numbers
beside it, the fit's time, and the process's peak memory. It writes sampling.json, and each process's result, which is
not computed again.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from typing import Any

import numpy as np
import torch
from _resnets import resnet
from _shared import in_child, machine, parser, peak_bytes, table, write

import ntk_laplace as ntkl

STRUCTURES = ("diag", "kfac", "ekfac", "inf")


def job(network_name: str, structure: str, options: argparse.Namespace) -> dict[str, Any]:
    """Fit one structure and time its samples."""
    torch.manual_seed(0)
    tiny = network_name == "tiny"
    network = resnet(network_name, classes=10 if tiny else 1000, width=8 if tiny else 64)
    x = torch.randn(options.num_images, 3, options.pixels, options.pixels)
    y = torch.randint(10, (options.num_images,))
    chosen = ntkl.INF(rank=options.rank) if structure == "inf" else structure
    start, start_cpu = time.perf_counter(), time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ntkl.NTKLaplaceWarning)  # large norm layers keep their diagonal, INF shrinks
        posterior = ntkl.laplace(
            network, (x, y), ntkl.Categorical(), structure=chosen, curvature=ntkl.CurvatureType("mc", 1),
            dtype=torch.float32
        )
    fitted, fitted_cpu = time.perf_counter() - start, time.process_time() - start_cpu
    drawn, drawn_cpu, floor = [], [], []
    for _ in range(options.draws + 1):
        start, start_cpu = time.perf_counter(), time.process_time()
        sample = posterior.sample(1)
        drawn.append(time.perf_counter() - start)
        drawn_cpu.append(time.process_time() - start_cpu)
        start_cpu = time.process_time()
        torch.randn(posterior.num_parameters)
        floor.append(time.process_time() - start_cpu)
    if not bool(torch.isfinite(sample).all()):
        raise ArithmeticError(f"{structure} on {network_name} drew a sample that is not finite")
    low = [algebra.low.size for algebra in posterior.posterior_precision.algebras if hasattr(algebra, "low")]
    # the first draw makes what later ones reuse
    return {
        "parameters": posterior.num_parameters, "fit_seconds": fitted, "fit_cpu_seconds": fitted_cpu,
        "first_seconds": drawn[0], "cpu_seconds": float(np.mean(drawn_cpu[1:])),
        "cpu_deviation": float(np.std(drawn_cpu[1:])),
        "seconds": float(np.mean(drawn[1:])), "deviation": float(np.std(drawn[1:])),
        "floor_seconds": float(np.mean(floor[1:])), "peak_bytes": peak_bytes(), "largest_low_rank": max(low, default=0),
    }


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__, "sampling")
    arguments.add_argument("--networks", nargs="+", default=["resnet18", "resnet50"], help="resnet18, resnet50, tiny")
    arguments.add_argument("--structures", nargs="+", default=list(STRUCTURES), choices=STRUCTURES)
    arguments.add_argument("--rank", type=int, default=100, help="top eigenvalues that INF keeps per layer (100)")
    arguments.add_argument("--num-images", type=int, default=32, help="images of the fit (default 32)")
    arguments.add_argument("--pixels", type=int, default=64, help="their height and width (default 64)")
    arguments.add_argument("--draws", type=int, default=20, help="timed samples (default 20)")
    arguments.add_argument("--job", nargs=2, metavar=("NETWORK", "STRUCTURE"), help="one fit, printed as JSON")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    if options.job:
        print(json.dumps(job(*options.job, options)))
        return
    if options.small:
        options.networks, options.draws, options.pixels, options.rank = ["tiny"], 2, 16, 3
    options.out.mkdir(parents=True, exist_ok=True)
    names = ("rank", "num_images", "pixels", "draws", "threads")
    passed = [text for name in names for text in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]
    found: dict[str, dict[str, Any]] = {}
    for network in options.networks:
        found[network] = {}
        for structure in options.structures:
            if options.small:  # seconds matter there, and memory does not
                found[network][structure] = job(network, structure, options)
            else:
                kept = options.out / f"{network}-{structure}.json"
                found[network][structure] = in_child(__file__, ["--job", network, structure, *passed], kept)
            print(network, structure, found[network][structure], flush=True)
    rows = [
        [network, f"{values['parameters']:,}", f"{structure}{_low(values)}", _milliseconds(values),
         f"{1e3 * values['cpu_seconds']:.1f} ± {1e3 * values['cpu_deviation']:.1f}",
         f"{1e3 * values['floor_seconds']:.1f}", f"{values['fit_seconds']:.1f}", f"{values['fit_cpu_seconds']:.1f}",
         f"{values['peak_bytes'] / 1e6:,.0f}"]
        for network, structures in found.items()
        for structure, values in structures.items()
    ]
    head = ["network", "P", "structure", "sample, ms", "CPU, ms", "P random numbers, CPU ms", "fit, s",
            "CPU, s", "peak, MB"]
    print(f"\n{options.threads} threads; INF rank {options.rank}\n\n{table(head, rows)}")
    result = {"machine": machine(options.threads), "rank": options.rank, "results": found}
    write(options.out / "sampling.json", result)


def _low(values: dict[str, Any]) -> str:
    return f" (L <= {values['largest_low_rank']:,})" if values["largest_low_rank"] else ""


def _milliseconds(values: dict[str, Any]) -> str:
    return f"{1e3 * values['seconds']:.1f} ± {1e3 * values['deviation']:.1f}"


if __name__ == "__main__":
    main()
