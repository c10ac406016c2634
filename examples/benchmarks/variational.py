"""Steps of variational inference against the passes, products and factorizations that they consist of.

    python examples/benchmarks/variational.py --threads 1

The network is that of [T20] 5.4, five hidden layers of ``--width`` tanh units (P = 2,676 at 25), with N = 150 examples of
one input, float64. Each part is run with ``--parts NAME,...``:

* step: one VOGGN step with a pair of samples in weight space, against its two Jacobian passes, one symmetric product
  (SYRK) of 300 rows and one Cholesky factorization of a P x P matrix, each timed alone.
* rows: one VOGGN step in function space with so many rows kept, against one in weight space; NR rows of a small data
  set per sample, so that the number of rows grows slowly.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from _common import machine, parser, table, write
from torch import Tensor, nn

import ntk_laplace as ntkl
from ntk_laplace.model.data import Batches
from ntk_laplace.runtime.linalg import add_outer_lower_, cholesky_
from ntk_laplace.structures import FittedModel
from ntk_laplace.variational_inference.algorithms import VOGGN
from ntk_laplace.variational_inference.examples import Examples
from ntk_laplace.variational_inference.iteration import SampledIteration
from ntk_laplace.variational_inference.representations import Matrix, Representation, Rows

PARTS = ("step", "rows")
STEP_SIZE = 0.01


def regression(options: argparse.Namespace, count: int) -> tuple[FittedModel, tuple[Tensor, Tensor]]:
    """The network at random weights, with a sine to fit."""
    torch.manual_seed(0)
    widths = [1, *[options.width] * 5]
    layers: list[nn.Module] = []
    for inputs, outputs in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    network = nn.Sequential(*layers, nn.Linear(widths[-1], 1)).double()
    x = torch.linspace(-3, 3, count, dtype=torch.float64).unsqueeze(1)
    data = x, (2 * x).sin() + 0.3 * torch.randn(count, 1, dtype=torch.float64)
    # the structure is not used, but gives the linearized model
    return ntkl.laplace(network, data, ntkl.Gaussian(0.1), ntkl.GaussianPrior(0.63), "diag").fitted, data


def running(fitted: FittedModel, data: tuple[Tensor, Tensor], form: Representation) -> SampledIteration:
    """VOGGN with a pair of samples, from H = 10 I."""
    model = fitted.model
    examples = Examples(model, Batches(data, None, model.network.device, model.network.input_dtype), None)
    return SampledIteration(model, examples, VOGGN(2), form.isotropic(model, examples, 10.0), seed=0)


def once(task: Callable[[], Any]) -> float:
    """Wall time in seconds."""
    start = time.perf_counter()
    task()
    return time.perf_counter() - start


def step(options: argparse.Namespace) -> list[list[str]]:
    """The parts of a step, and the step; they take turns, and the shortest of each counts."""
    fitted, data = regression(options, options.examples)
    run, model = running(fitted, data, Matrix()), fitted.model
    p, n = model.network.num_parameters, options.examples
    matrix, rows = torch.eye(p, dtype=torch.float64), torch.randn(2 * n, p, dtype=torch.float64)
    found: dict[str, list[float]] = {}
    with torch.no_grad():
        for _ in range(options.repeats + 1):
            thetas = run.mean + run.state.draw(2)
            copy = matrix.clone()
            tasks: dict[str, Callable[[], Any]] = {
                "two passes": lambda: [model.jacobian_pass.rows(data[0], theta=theta) for theta in thetas],  # noqa: B023
                "SYRK": lambda: add_outer_lower_(matrix, rows, scale=1e-6),
                "Cholesky": lambda: cholesky_(copy),  # noqa: B023
                "VOGGN step": lambda: run.step(STEP_SIZE),
            }
            for name, task in tasks.items():
                found.setdefault(name, []).append(once(task))
    best = {name: min(times[1:]) for name, times in found.items()}
    parts = sum(best[name] for name in ("two passes", "SYRK", "Cholesky"))
    ratios = [row["VOGGN step"] / sum(row[name] for name in ("two passes", "SYRK", "Cholesky"))
              for row in (dict(zip(found, turn, strict=True)) for turn in zip(*found.values(), strict=True))]
    rows_ = [[name, f"{1e3 * value:.1f} ms"] for name, value in best.items()]
    return [*rows_, ["step over its parts", f"{best['VOGGN step'] / parts:.2f}"],
            ["the same, median of the turns", f"{statistics.median(ratios[1:]):.2f}"], ["P, N", f"{p:,}, {n:,}"]]


def rows(options: argparse.Namespace) -> list[list[str]]:
    """Steps in function space as rows accumulate, beside those in weight space."""
    fitted, data = regression(options, max(4, options.examples // 10))
    few, dense = running(fitted, data, Rows()), running(fitted, data, Matrix())
    p, each = fitted.network.num_parameters, 2 * len(data[0])
    found, marks = [], [p // 8, p // 4, p // 2, p]
    for target in marks:
        while (few.rows_kept or 0) + each * options.repeats < target:
            few.step(STEP_SIZE)
        times = [(once(lambda: few.step(STEP_SIZE)), once(lambda: dense.step(STEP_SIZE)))
                 for _ in range(options.repeats)]
        gp, full = (min(column) for column in zip(*times, strict=True))
        found.append([f"{few.rows_kept:,}", f"{1e3 * gp:.1f} ms", f"{1e3 * full:.1f} ms", f"{full / gp:.2f}"])
    return found


def main() -> None:
    """Measure the parts and print their tables."""
    arguments = parser(__doc__, "variational.json")
    arguments.add_argument("--parts", default=",".join(PARTS), help="parts to run")
    arguments.add_argument("--width", type=int, default=25, help="units of a hidden layer (default 25)")
    arguments.add_argument("--examples", type=int, default=150, help="N (default 150)")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    result: dict[str, Any] = {"machine": machine(options.threads)}
    heads = {"step": ["", "time"], "rows": ["rows", "function space", "weight space", "times faster"]}
    for part in options.parts.split(","):
        result[part] = {"step": step, "rows": rows}[part](options)
        print(f"\n{part}\n{table(heads[part], result[part])}")
    write(options.out, result)


if __name__ == "__main__":
    main()
