"""Training with evidence beside plain training: KFAC, F = 10, K = 100, on MNIST or in miniature on digits.

    python examples/benchmarks/training.py --data DIR [--examples 10000]

DIR holds ``mnist.npz`` (X_train, y_train, X_test, y_test). The MLP of [I21], 784-1024-512-256-128-10 (P = 1,494,154),
Adam at rate 1e-3, minibatches of 128, float32. In one run, with the same start and the same order of minibatches:
* plain training: cross entropy, Adam's own weight decay at precision 1;
* ``train_with_evidence`` with KFAC and one precision for each layer, evidence every 10 epochs, 100 hyperparameter steps
  at rate 1 ([I21] section 4.3), with the exact GGN, a Monte-Carlo root and the empirical Fisher.
The paper trains for 300 epochs; here it is a stretch of 20, with two evidences, and the likelihoods are those of 20
epochs. The ratio is that of F epochs and one evaluation to F plain epochs, from the median epoch and evaluation, so
that a shorter stretch (``--epochs 3``: the last epoch is always followed by an evidence) measures it too. Times are
wall time and the time the process was on a processor, which other work on the machine disturbs less.
The test log likelihood is that of the network alone (MAP, nats per image) with the standard error over images; a
root's difference to the exact GGN stands in units of that error. ``--small`` takes scikit-learn's digits and an MLP
64-32-16-10.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from _common import machine, parser, table, write
from _networks import digits, mlp
from torch import Tensor, nn

import ntk_laplace as ntkl

WIDTHS, SMALL = (784, 1024, 512, 256, 128, 10), (64, 32, 16, 10)
GOALS = {"ggn": "<= 1.35x", "mc": "<= 1.15x", "ef": "<= 1.15x"}


@dataclass(frozen=True)
class Problem:
    """Training and test images as rows of floats, and the network's widths."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    widths: tuple[int, ...]


def problem(options: argparse.Namespace) -> Problem:
    """MNIST's first images, or the digits."""
    if options.small:
        x, y = digits()
        return Problem(x[:1000].float(), y[:1000], x[1000:].float(), y[1000:], SMALL)
    with np.load(options.data / "mnist.npz") as found:
        x, y, x_test, y_test = (torch.as_tensor(found[k]) for k in ("X_train", "y_train", "X_test", "y_test"))
    x, x_test = x.flatten(1)[: options.examples].float() / 255, x_test.flatten(1).float() / 255
    return Problem(x, y.long()[: options.examples], x_test, y_test.long(), WIDTHS)


class Clock:
    """Wall and processor seconds of each epoch."""

    def __init__(self) -> None:
        self.laps: list[tuple[float, float]] = []
        self.start()

    def start(self) -> None:
        """Begin an epoch."""
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def lap(self) -> None:
        """End it."""
        self.laps.append((time.perf_counter() - self._wall, time.process_time() - self._cpu))
        self.start()


def network_of(case: Problem, seed: int) -> nn.Module:
    """The start that all variants share."""
    torch.manual_seed(seed)
    return mlp(case.widths, nn.ReLU)


def adam(parameters: Any, decay: float = 0.0) -> torch.optim.Optimizer:
    """The same optimizer for all."""
    return torch.optim.Adam(parameters, lr=1e-3, weight_decay=decay)


def plain(case: Problem, options: argparse.Namespace, seed: int, clock: Clock) -> nn.Module:
    """As one trains without the library: the precision is Adam's weight decay."""
    network, n = network_of(case, seed), len(case.y)
    optimizer = adam(network.parameters(), 1.0 / n)
    clock.start()
    for _ in range(options.epochs):
        for index in torch.randperm(n).tensor_split(-(-n // options.batch)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(case.x[index]), case.y[index]).backward()
            optimizer.step()
        clock.lap()
    return network


def with_evidence(root: str) -> Callable[[Problem, argparse.Namespace, int, Clock], Any]:
    """Algorithm 1 with one root."""

    def train(case: Problem, options: argparse.Namespace, seed: int, clock: Clock) -> ntkl.EvidenceTraining:
        network = network_of(case, seed)
        schedule = ntkl.EvidenceSchedule(options.frequency, options.steps, learning_rate=options.rate)
        clock.start()
        return ntkl.train_with_evidence(
            network, (case.x, case.y), ntkl.Categorical(), ntkl.GaussianPrior(1.0, groups="layer"), options.structure,
            root, optimizer=adam, epochs=options.epochs, batch_size=options.batch, schedule=schedule,
            dtype=torch.float32, callbacks=lambda state: clock.lap(), settings=ntkl.Settings(progress=False),
        )

    return train


def scores(network: nn.Module, case: Problem) -> Tensor:
    """Log likelihood of each test image, nats."""
    with torch.no_grad():
        return -nn.functional.cross_entropy(network.eval()(case.x_test), case.y_test, reduction="none").double()


def measure(case: Problem, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Every variant in turn, seed by seed."""
    variants = {"plain": plain} | {root: with_evidence(root) for root in options.roots}
    found: dict[str, dict[str, Any]] = {name: {"scores": [], "laps": []} for name in variants}
    for seed in range(options.seeds):
        for name, train in variants.items():
            clock = Clock()
            trained = train(case, options, seed, clock)
            network = trained if name == "plain" else trained.posterior.network.module
            found[name]["scores"].append(scores(network, case))
            found[name]["laps"].append(clock.laps)
            found[name]["training"] = None if name == "plain" else trained
            lap = median(wall for wall, _ in clock.laps)
            print(f"{name}, seed {seed}: {lap:.2f} s an epoch, log likelihood "
                  f"{found[name]['scores'][-1].mean():.4f}", flush=True)
    return found


def summary(found: dict[str, dict[str, Any]], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Seconds of an epoch, of an evaluation and of all; likelihoods with their errors."""
    due = [e for e in range(options.epochs) if (e + 1) % options.frequency == 0 or e + 1 == options.epochs]
    results: dict[str, dict[str, Any]] = {}
    for name, run in found.items():
        values = torch.stack(run["scores"])
        own: dict[str, Any] = {
            "log_likelihood": values.mean().item(),
            "standard_error": values.mean(0).std().item() / values.shape[1] ** 0.5,
        }
        for number, kind in enumerate(("wall", "cpu")):
            laps = [[lap[number] for lap in seed] for seed in run["laps"]]
            others = [t for seed in laps for epoch, t in enumerate(seed) if name == "plain" or epoch not in due]
            own[f"{kind}_epoch"] = median(others)
            if name != "plain":
                own[f"{kind}_evaluation"] = median(seed[e] for seed in laps for e in due) - own[f"{kind}_epoch"]
            with_it = options.frequency * own[f"{kind}_epoch"] + own.get(f"{kind}_evaluation", 0.0)
            own[f"{kind}_ratio"] = with_it / (options.frequency * (results or {name: own})["plain"][f"{kind}_epoch"])
        if run["training"] is not None:
            history = run["training"].history
            own |= {"evidence": history.evidence, "precisions": history.values[-1], "best_epoch": history.epochs}
        results[name] = own
    return results


def report(results: dict[str, dict[str, Any]], case: Problem, options: argparse.Namespace) -> None:
    """The tables."""
    rows, exact = [], results.get("ggn", results["plain"])
    for name, own in results.items():
        difference = (own["log_likelihood"] - exact["log_likelihood"]) / exact["standard_error"]
        evidence = f"{own['evidence'][-1] / len(case.y):.4f}" if "evidence" in own else ""
        rows.append([
            name, *(f"{own[key]:.3g}" if key in own else "" for key in ("cpu_epoch", "cpu_evaluation")),
            f"{own['cpu_ratio']:.2f}x", f"{own['wall_ratio']:.2f}x",
            GOALS.get(name, ""), f"{own['log_likelihood']:.4f} ± {own['standard_error']:.4f}",
            f"{difference:+.2f}" if "ggn" in results else "", evidence,
        ])
    head = ["training", "epoch, s", "evaluation, s", "ratio, processor", "wall", "goal", "test log likelihood",
            "from GGN, in errors", "evidence / N"]
    widths = "-".join(map(str, case.widths))
    print(f"\nN={len(case.y):,}, MLP {widths}, {options.structure}, F={options.frequency}, K={options.steps}, "
          f"minibatches of {options.batch}, {options.epochs} epochs, {options.seeds} seed(s)\n\n{table(head, rows)}")


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__, "training.json")
    arguments.add_argument("--data", type=Path, help="folder with mnist.npz")
    arguments.add_argument("--examples", type=int, default=60_000, help="images to train on, the first ones (60,000)")
    arguments.add_argument("--epochs", type=int, default=20, help="of the stretch (default 20)")
    arguments.add_argument("--frequency", type=int, default=10, help="F (default 10)")
    arguments.add_argument("--steps", type=int, default=100, help="K (default 100)")
    arguments.add_argument("--rate", type=float, default=1.0, help="step size of the hyperparameters (default 1)")
    arguments.add_argument("--batch", type=int, default=128, help="minibatch (default 128)")
    arguments.add_argument("--seeds", type=int, default=1, help="networks (default 1)")
    arguments.add_argument("--structure", default="kfac", help="default kfac")
    arguments.add_argument("--roots", nargs="+", default=["ggn", "mc", "ef"], choices=["ggn", "mc", "ef"])
    options = arguments.parse_args()
    if options.data is None and not options.small:
        arguments.error("give the folder of mnist.npz with --data, or --small")
    # weight decay drives weights that no image needs below 1e-38, where a float32 product takes many times as long
    torch.set_flush_denormal(True)
    torch.set_num_threads(options.threads)
    case = problem(options)
    results = summary(measure(case, options), options)
    report(results, case, options)
    write(options.out, {"machine": machine(options.threads), "N": len(case.y), "results": results})


if __name__ == "__main__":
    main()
