"""Damping, the ablation of [I21] table A1 in small: KFAC evidence with and without, each choosing its precision.

    python examples/structures/damping.py [--data DIR] --out damping

Damping adds √δ to both Kronecker factors instead of δ to their product ([I21] A.3). On scikit-learn's digits (1,000
to train on, 797 to test, MLP 64-16-10), and with ``--data`` on 5,000 images of MNIST (MLP 784-100-100-10):
* after training: one network at precision 1; each evidence chooses the precision it finds best, and predicts there;
* online, [I21] algorithm 1 (``train_with_evidence``): every few epochs the precision climbs the evidence.
For the digits the exact evidence (``structure="full"``) at the chosen precision stands beside, and chooses too.
Accuracy, and test log likelihoods of the network (MAP) and of the linearized predictive (probit); evidences per
training example, in nats; means over seeds with their standard errors. It writes damping.json, and each
seed's result, which is not computed again: an interrupted run goes on where it stood.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from _images import load
from _shared import machine, mlp, once, parser, table, write
from torch import nn

import ntk_laplace as ntkl
from ntk_laplace import metrics

VARIANTS: dict[str, Callable[[], Any]] = {
    "undamped": lambda: ntkl.KFAC(),
    "damped": lambda: ntkl.KFAC(damped=True),
    "exact": lambda: "full",
}
Variants: TypeAlias = dict[str, dict[str, float]]
GRID = torch.logspace(-3, 4, 141)


class Problem:
    """Training and test data of one data set, and the network for it."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name = name
        if name == "digits":
            from sklearn.datasets import load_digits

            data = load_digits()
            order = np.random.default_rng(0).permutation(len(data.target))
            x, y = torch.as_tensor(data.data[order] / 16).float(), torch.as_tensor(data.target[order])
            count = 200 if options.small else 1000
            self.train, self.test = (x[:count], y[:count]), (x[1000:], y[1000:])
            self.widths: tuple[int, ...] = (64, 8, 10) if options.small else (64, 16, 10)
        else:
            split = load(options.data)
            self.train = split.x[:5000].flatten(1).float() / 255, split.y[:5000]
            self.test = split.x_test.flatten(1).float() / 255, split.y_test
            self.widths = (784, 100, 100, 10)

    @property
    def variants(self) -> list[str]:
        """The exact evidence needs a P x P matrix."""
        return list(VARIANTS) if self.name == "digits" else ["undamped", "damped"]


def fitted(network: nn.Module, problem: Problem, variant: str, precision: float) -> ntkl.Posterior:
    """Posterior of one variant at one precision."""
    prior = ntkl.GaussianPrior(precision=precision)
    return ntkl.laplace(network, problem.train, ntkl.Categorical(), prior, VARIANTS[variant]())


def choose(network: nn.Module, problem: Problem, variant: str) -> tuple[float, float]:
    """The precision of highest evidence among `GRID`, and that evidence per training example."""
    curve = fitted(network, problem, variant, 1.0).evidence_curve(GRID)
    best = int(curve.argmax())
    return GRID[best].item(), curve[best].item() / len(problem.train[1])


def train(network: nn.Module, problem: Problem, precision: float, epochs: int) -> None:
    """Adam on the mean of the negative log joint at one precision, batches of 100."""
    x, y = problem.train
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(epochs):
        for index in torch.randperm(len(y)).split(100):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(network(x[index]), y[index])
            decay = sum(p.square().sum() for p in network.parameters())
            (loss + 0.5 * precision / len(y) * decay).backward()
            optimizer.step()
    optimizer.zero_grad()


def outcome(network: nn.Module, problem: Problem, variant: str, precision: float) -> dict[str, float]:
    """Evidence per example at a precision, the exact one beside it, and the test scores."""
    posterior = fitted(network, problem, variant, precision)
    x, y = problem.test
    count = len(problem.train[1])
    found = {"precision": precision, "evidence": posterior.log_marginal_likelihood().item() / count}
    if "exact" in problem.variants:
        exact = fitted(network, problem, "exact", precision)
        found["exact_evidence"] = exact.log_marginal_likelihood().item() / count
    for method in ("map", "probit"):
        predictive = posterior.predict(x, method=method)
        found[method] = metrics.mean_log_likelihood(predictive, y)
        found[f"{method}_accuracy"] = metrics.accuracy(predictive.probs, y)
    return found


def after_training(problem: Problem, seed: int, options: argparse.Namespace) -> Variants:
    """One network; every variant chooses its precision."""
    torch.manual_seed(seed)
    network = mlp(problem.widths)
    train(network, problem, 1.0, options.epochs)
    return {v: outcome(network, problem, v, choose(network, problem, v)[0]) for v in problem.variants}


def online(problem: Problem, seed: int, options: argparse.Namespace) -> Variants:
    """[I21] algorithm 1: a network for each variant, trained at the precisions that it chose on the way."""
    found = {}
    for variant in problem.variants:
        torch.manual_seed(seed)
        network = mlp(problem.widths)
        training = ntkl.train_with_evidence(
            network, problem.train, ntkl.Categorical(), ntkl.GaussianPrior(1.0), VARIANTS[variant](),
            optimizer=lambda parameters: torch.optim.Adam(parameters, lr=3e-3), epochs=options.epochs, batch_size=100,
            schedule=ntkl.EvidenceSchedule(options.every, steps=options.steps, learning_rate=0.1),
        )
        found[variant] = outcome(network, problem, variant, training.posterior.prior.precision.item())
    return found


Protocol: TypeAlias = Callable[[Problem, int, argparse.Namespace], Variants]


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__, "damping")
    arguments.add_argument("--data", type=Path, help="folder with mnist.npz; without it the digits alone")
    arguments.add_argument("--seeds", type=int, default=5, help="networks (default 5)")
    arguments.add_argument("--epochs", type=int, default=60, help="of training (default 60)")
    arguments.add_argument("--every", type=int, default=5, help="epochs between two choices of the precision (5)")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    options.steps = 100  # of each choice
    if options.small:
        options.seeds, options.epochs, options.every, options.steps = 2, 10, 5, 20
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, list[Variants]]] = {}
    for name in ("digits", "mnist") if options.data and not options.small else ("digits",):
        problem = Problem(name, options)
        found[name] = {
            protocol.__name__: [seed_of(protocol, problem, seed, options) for seed in range(options.seeds)]
            for protocol in (after_training, online)
        }
        report(name, found[name])
    write(options.out / "damping.json", {"machine": machine(options.threads), "results": found})


def seed_of(protocol: Protocol, problem: Problem, seed: int, options: argparse.Namespace) -> Variants:
    """One seed; kept."""
    chosen = [f"epochs={options.epochs}", f"every={options.every}", f"small={options.small}"]
    kept = options.out / f"{problem.name}-{protocol.__name__}-{seed}.json"
    return once(kept, chosen, lambda: protocol(problem, seed, options))


def report(name: str, protocols: dict[str, list[Variants]]) -> None:
    """One table for a data set, and in how many runs the damped evidence is the lower one."""
    rows = []
    measures = ("precision", "evidence", "exact_evidence", "map_accuracy", "map", "probit")
    for protocol, runs in protocols.items():
        for variant in runs[0]:
            values = [[run[variant].get(measure, float("nan")) for run in runs] for measure in measures]
            rows.append([protocol.replace("_", " "), variant, *(_mean_error(v) for v in values)])
    head = ["", "KFAC", "precision", "its evidence / N", "exact evidence / N", "accuracy", "log lik., MAP", "probit"]
    print(f"\n{name}\n\n{table(head, rows)}\n")
    for protocol, runs in protocols.items():
        worse = sum(run["damped"]["evidence"] < run["undamped"]["evidence"] for run in runs)
        print(f"{name}, {protocol.replace('_', ' ')}: damped evidence is lower in {worse} of {len(runs)} runs")


def _mean_error(values: list[float]) -> str:
    mean, error = np.mean(values), np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return "" if np.isnan(mean) else f"{mean:.4g} ± {error:.1g}"


if __name__ == "__main__":
    main()
