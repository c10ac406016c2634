"""Variational inference: what a step costs, and how large a network it takes.

    python examples/benchmarks/variational.py --threads 2 --data DIR

DIR holds ``mnist.npz`` (X_train, y_train, X_test, y_test); without it vectors around one centre per class stand in for
the images. Each part is run with ``--parts NAME,...``:

* step: one VOGGN step with a pair of samples in weight space, against its two Jacobian passes, one symmetric product
  (SYRK) of 300 rows and one Cholesky factorization of a P x P matrix, each timed alone; [T20] 5.4's network, five
  hidden layers of 25 tanh units (P=2,676), N=150.
* rows: a VOGGN step in function space with so many rows kept, against one in weight space; the same network, N=15.
* sites: a step of anchored LGVA with one site per training point against one evaluation of the evidence at other
  precisions; digits, N=300, C=10, MLP 64-64-64-10.
* kfac: VOGGN with Kronecker factors, and with a diagonal, from the Laplace posterior of the same structure, in
  minibatches: MLP 784-128-10 (P=101,770) on 5,000 images, and a CNN (P=9,930) on 1,297 digits; seconds a step, log
  likelihoods and accuracy of predictions by weight samples ("nn") and by the linearized network ("glm").
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import best_times, machine, parser, table, write
from _networks import blobs, digits, mlp, train
from torch import Tensor, nn

import ntk_laplace as ntkl
from ntk_laplace.model.data import Batches
from ntk_laplace.runtime.linalg import add_outer_lower_, cholesky_
from ntk_laplace.structures import FittedModel
from ntk_laplace.variational_inference import representations
from ntk_laplace.variational_inference.algorithms import VOGGN
from ntk_laplace.variational_inference.examples import Examples
from ntk_laplace.variational_inference.iteration import SampledIteration
from ntk_laplace.variational_inference.sites import AnchoredSites

Rows = list[list[str]]
STEP_SIZE = 0.01


def regression(options: argparse.Namespace, count: int) -> tuple[FittedModel, tuple[Tensor, Tensor]]:
    """The network at random weights, with a sine to fit."""
    torch.manual_seed(0)
    widths = [1, *[5 if options.small else 25] * 5]
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    network = nn.Sequential(*layers, nn.Linear(widths[-1], 1)).double()
    x = torch.linspace(-3, 3, count, dtype=torch.float64).unsqueeze(1)
    data = x, (2 * x).sin() + 0.3 * torch.randn(count, 1, dtype=torch.float64)
    # the structure is not used, but gives the linearized model
    return ntkl.laplace(network, data, ntkl.Gaussian(0.1), ntkl.GaussianPrior(0.63), "diag").fitted, data


def running(fitted: FittedModel, data: tuple[Tensor, Tensor], form: representations.Representation) -> SampledIteration:
    """VOGGN with a pair of samples, from H = 10 I."""
    model = fitted.model
    examples = Examples(model, Batches(data, None, model.network.device, model.network.input_dtype), None)
    state = form.isotropic(model, model.jacobian_pass.rows(data[0][:2]), 10.0)
    return SampledIteration(model, examples, VOGGN(2), state, seed=0)


def once(task: Callable[[], Any]) -> float:
    """Wall time in seconds."""
    start = time.perf_counter()
    task()
    return time.perf_counter() - start


def step(options: argparse.Namespace) -> Rows:
    """The parts of a step, and the step; they take turns, and the shortest of each counts."""
    fitted, data = regression(options, options.small or 150)
    run, model = running(fitted, data, representations.Matrix()), fitted.model
    p, n = model.network.num_parameters, len(data[0])
    matrix, some = torch.eye(p, dtype=torch.float64), torch.randn(2 * n, p, dtype=torch.float64)
    found: dict[str, list[float]] = {}
    with torch.no_grad():
        for _ in range(options.repeats + 1):
            thetas = run.mean + run.state.draw(2)
            copy = matrix.clone()
            tasks: dict[str, Callable[[], Any]] = {
                "two passes": lambda: [model.jacobian_pass.rows(data[0], theta=theta) for theta in thetas],  # noqa: B023
                "SYRK": lambda: add_outer_lower_(matrix, some, scale=1e-6),
                "Cholesky": lambda: cholesky_(copy),  # noqa: B023
                "VOGGN step": lambda: run.step(STEP_SIZE),
            }
            for name, task in tasks.items():
                found.setdefault(name, []).append(once(task))
    best = {name: min(times[1:]) for name, times in found.items()}
    parts = sum(best[name] for name in ("two passes", "SYRK", "Cholesky"))
    ratios = [row["VOGGN step"] / sum(row[name] for name in ("two passes", "SYRK", "Cholesky"))
              for row in (dict(zip(found, turn, strict=True)) for turn in zip(*found.values(), strict=True))]
    lines = [[name, f"{1e3 * value:.1f} ms"] for name, value in best.items()]
    return [*lines, ["step over its parts", f"{best['VOGGN step'] / parts:.2f}"],
            ["the same, median of the turns", f"{statistics.median(ratios[1:]):.2f}"], ["P, N", f"{p:,}, {n:,}"]]


def rows(options: argparse.Namespace) -> Rows:
    """Steps in function space as rows accumulate, beside those in weight space."""
    fitted, data = regression(options, options.small or 15)
    few, dense = running(fitted, data, representations.Rows()), running(fitted, data, representations.Matrix())
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


def sites(options: argparse.Namespace) -> Rows:
    """Seconds of an evaluation of the evidence and of a step, and their ratio."""
    x, y = digits()
    x, y = x[: options.small or 300], y[: options.small or 300]
    torch.manual_seed(0)
    network = train(mlp((64, 64, 64, 10)).double(), x, y, 1.0)
    posterior = ntkl.laplace(network, (x, y), ntkl.Categorical(), ntkl.GaussianPrior(1.0))
    iteration, number = AnchoredSites(posterior.fitted), iter(range(1, 10_000))

    def evaluation() -> float:
        posterior.prior.precision = 1.0 + 1e-6 * next(number)  # another one each time: nothing is cached
        return posterior.log_marginal_likelihood().item()

    times = best_times({"evidence": evaluation, "step": lambda: iteration.step(0.5)}, options.repeats)
    return [["evaluation of the evidence", f"{times['evidence']:.3g} s", ""],
            ["step of anchored LGVA", f"{times['step']:.3g} s", f"{times['step'] / times['evidence']:.3g}x"]]


def images(options: argparse.Namespace, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, and 1,000 test images and labels, as vectors in [0, 1]."""
    if options.data is None:
        x, y = blobs(count + 1000)
        return x[:count], y[:count], x[count:], y[count:]
    with np.load(options.data / "mnist.npz") as found:
        parts = found["X_train"][:count], found["y_train"][:count], found["X_test"][:1000], found["y_test"][:1000]
    x, test = (torch.as_tensor(part).float().flatten(1) / 255.0 for part in parts[::2])
    return x, torch.as_tensor(parts[1]).long(), test, torch.as_tensor(parts[3]).long()


def small_cnn() -> nn.Sequential:
    """8 x 8 inputs, conv 16@3, conv 32@3, pool, 10 outputs."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10),
    )


def trained(network: nn.Module, x: Tensor, y: Tensor, precision: float, epochs: int) -> nn.Module:
    """Trained with Adam to the MAP of a prior of this precision, nearly."""
    steps = epochs * -(-len(x) // 100)
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(epochs):
        for index in torch.randperm(len(x)).split(100):
            optimizer.zero_grad()
            decay = 0.5 * precision / len(x) * sum(p.square().sum() for p in network.parameters())
            (nn.functional.cross_entropy(network(x[index]), y[index]) + decay).backward()
            optimizer.step()
            schedule.step()
    return network


def scores(posterior: Any, x: Tensor, y: Tensor) -> list[str]:
    """Mean log likelihood and accuracy of the predictions."""
    found = []
    for method in ("nn", "glm"):
        response = posterior.predict(x, method, 100, generator=torch.Generator().manual_seed(0))
        right = (response.probs.argmax(1) == y).double().mean()
        found.append(f"{float(response.log_prob(y).mean()):.3f} ({float(right):.1%})")
    return found


def kfac(options: argparse.Namespace) -> Rows:
    """Predictions before and after, and seconds of a step."""
    count, digit_count = options.small or 5000, options.small or 1297
    x, y = digits()
    cases: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, Tensor, Tensor, Tensor]]] = {
        "MLP, images": (lambda: mlp((784, 128, 10)), images(options, count)),
        "CNN, digits": (small_cnn, (x[:digit_count].float(), y[:digit_count], x[1297:].float(), y[1297:])),
    }
    rows = []
    for name, (build, (x, y, x_test, y_test)) in cases.items():
        torch.manual_seed(0)
        prior, epochs = ntkl.GaussianPrior(options.precision), 2 if options.small else 40
        network = trained(build(), x, y, options.precision, epochs).eval()
        for structure in options.structures.split(","):
            start = time.perf_counter()
            laplace = ntkl.laplace(network, (x, y), ntkl.Categorical(), prior, structure, dtype=torch.float32)
            seconds = time.perf_counter() - start
            rows.append([name, f"laplace, {structure}", f"{seconds:.3g} s", *scores(laplace, x_test, y_test)])
            start = time.perf_counter()
            fit = ntkl.variational(
                network, (x, y), ntkl.Categorical(), prior, structure, start=laplace, step_size=options.step_size,
                steps=options.steps, batch_size=min(250, len(x)), elbo_every=0, dtype=torch.float32,
                decay=options.decay,
            )
            seconds = time.perf_counter() - start
            rows.append([name, f"VOGGN, {structure}", f"{seconds:.3g} s, {seconds / options.steps:.3g} s a step",
                         *scores(fit.posterior, x_test, y_test)])
            print("\n".join("  ".join(row) for row in rows[-2:]), flush=True)
    return rows


PARTS: dict[str, tuple[Callable[[argparse.Namespace], Rows], list[str]]] = {
    "step": (step, ["task", "time"]),
    "rows": (rows, ["rows", "function space", "weight space", "times faster"]),
    "sites": (sites, ["task", "time", "ratio"]),
    "kfac": (kfac, ["network", "q", "time", "nn: log likelihood (accuracy)", "glm: log likelihood (accuracy)"]),
}


def main() -> None:
    """Run the parts, print their tables, write them."""
    arguments = parser(__doc__, "variational.json")
    arguments.add_argument("--parts", default=",".join(PARTS), help="comma-separated")
    arguments.add_argument("--data", type=Path, help="folder with mnist.npz")
    arguments.add_argument("--structures", default="kfac,diag", help="part kfac")
    arguments.add_argument("--steps", type=int, default=500, help="part kfac")
    arguments.add_argument("--step-size", type=float, default=0.005, help="part kfac")
    arguments.add_argument("--decay", type=float, help="part kfac, in steps")
    arguments.add_argument("--precision", type=float, default=1.0, help="part kfac, of the prior")
    options = arguments.parse_args()
    options.small = 12 if options.small else 0  # examples
    torch.set_num_threads(options.threads)
    found = {}
    for part in options.parts.split(","):
        work, head = PARTS[part]
        found[part] = work(options)
        print(f"\n{part}\n\n{table(head, found[part])}", flush=True)
    write(options.out, {"machine": machine(options.threads), "parts": found})


if __name__ == "__main__":
    main()
