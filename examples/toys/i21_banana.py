"""A classification toy of [I21]: figures 3 and C.1b, with prior and temperature learned, beside an overfitting network.

    python examples/toys/i21_banana.py [--data DIR] --out i21_banana

265 points of the banana data (with ``--data``, from DIR/banana.npz; without it, two moons of scikit-learn) and the rest
for testing. A network with one hidden layer of 50 tanh units and two outputs (P = 252) is trained twice from the same
weights, Adam at rate 0.01 on all points at once, evidence of the full GGN:
* online: [I21] Algorithm 1 with F = K = 1 and a rate of 0.01 for the hyperparameters, one precision for each weight and
  bias, and the temperature of the softmax, for ``--epochs``;
* weak: one precision of 1e-4 that stays, temperature 1, for ten times as many.
Step 1 of the figure: evidence and hyperparameters along the epochs. Step 2: the two networks, their evidences, and
accuracies on training and test points. Below, the predictives of both: the network alone (MAP) and the average over
1,000 samples of the linearized network's outputs (glm); `confidence` is the mean probability of the likelier class, at
the test points and along the picture's frame, away from all data. It writes i21_banana.png and i21_banana.json.
"""

from __future__ import annotations

import argparse
import copy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from sklearn.datasets import make_moons
from torch import Tensor, nn

import ntk_laplace as ntkl
from ntk_laplace.metrics import held_out_scores
from ntk_laplace.plotting import BLUE, GREY, ORANGE, VERMILION, png

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _shared import machine, mlp, parser, table, write

WEAK = 1e-4
TIMES = 10  # epochs of the weak prior for one of the online training
METHODS = {"map": "network alone", "glm": "linearized predictive"}


@dataclass(frozen=True)
class Problem:
    """Points of the plane, standardized, with labels 0 and 1; a grid around them and its frame."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    side: Tensor

    @classmethod
    def of(cls, folder: Path | None, small: bool) -> Problem:
        """265 training points, drawn with seed 0."""
        if folder is None:
            x, y = make_moons(1500, noise=0.35, random_state=0)
        else:
            with np.load(folder / "banana.npz") as found:
                x, y = found["X"], found["y"]
        order = np.random.default_rng(0).permutation(len(y))
        x, y = torch.as_tensor((x - x.mean(0)) / x.std(0))[order], torch.as_tensor(y)[order]
        n = 60 if small else 265
        side = torch.linspace(-4.5, 4.5, 13 if small else 91, dtype=torch.float64)
        return cls((x[:n], y[:n]), (x[n:], y[n:]), side)

    @property
    def plane(self) -> Tensor:
        """All points of the grid, row by row."""
        return torch.cartesian_prod(self.side, self.side).flip(1)

    @property
    def frame(self) -> Tensor:
        """The grid's outermost points."""
        return self.plane[self.plane.abs().amax(1) == self.side[-1]]


def train(network: nn.Module, problem: Problem, options: argparse.Namespace, online: bool) -> ntkl.EvidenceTraining:
    """Algorithm 1, or the same at a prior that stays, whose evidence is read once, at the end."""
    epochs = options.epochs if online else TIMES * options.epochs
    schedule = ntkl.EvidenceSchedule(1, 1, learning_rate=0.01, hyperparameters=("precision", "temperature"))
    prior = ntkl.GaussianPrior(1.0, groups="tensor") if online else ntkl.GaussianPrior(WEAK)
    return ntkl.train_with_evidence(
        network, problem.train, ntkl.Categorical(), prior, "full",
        optimizer=lambda p: torch.optim.Adam(p, lr=0.01), epochs=epochs, batch_size=None,
        schedule=schedule if online else ntkl.EvidenceSchedule(epochs, 0),
    )


def judge(posterior: ntkl.Posterior, problem: Problem) -> dict[str, Any]:
    """Accuracies and log likelihoods, and how sure the predictives are near the data and far away."""
    found: dict[str, Any] = {"evidence": posterior.log_marginal_likelihood().item()}
    found["train_accuracy"] = held_out_scores(posterior.predict(problem.train[0], method="map"), problem.train[1])[
        "accuracy"
    ]
    for method in METHODS:
        torch.manual_seed(0)
        at_test = posterior.predict(problem.test[0], method=method)
        found[method] = held_out_scores(at_test, problem.test[1])
        found[method]["confidence"] = at_test.probs.amax(1).mean().item()
        found[method]["confidence_away"] = posterior.predict(problem.frame, method).probs.amax(1).mean().item()
    return found


def draw_trace(axes: Any, training: ntkl.EvidenceTraining, online: float, weak: float) -> None:
    """Step 1: the evidence and the hyperparameters over the epochs."""
    history = training.history
    axes[0].plot(history.epochs, history.evidence, color=BLUE, label="evidence, online")
    axes[0].plot(history.epochs, [-loss for loss in history.loss], color=GREY, lw=1, label="log joint")
    axes[0].axhline(online, color=BLUE, ls=":", lw=1)
    axes[0].axhline(weak, color=VERMILION, ls="--", label="evidence of the weak prior at its end")
    low = min(weak, history.evidence[len(history) // 20])
    axes[0].set(xlabel="epoch", ylabel="nats", ylim=(low - 15, max(online, -min(history.loss)) + 15))
    for number, (name, color) in enumerate(zip(history.names, (BLUE, "#56B4E9", "#084c7d", GREY, ORANGE), strict=True)):
        width = 2.5 if name == "temperature" else 1.2
        axes[1].semilogy(history.epochs, [row[number] for row in history.values], color=color, lw=width, label=name)
    axes[1].set(xlabel="epoch", ylabel="precision, temperature")
    for panel in axes:
        panel.legend(fontsize=7)
        panel.spines[["top", "right"]].set_visible(False)


def draw_plane(axes: Axes, problem: Problem, posterior: ntkl.Posterior, method: str) -> Any:
    """Probability of class 1, and the training points."""
    torch.manual_seed(0)
    count = len(problem.side)
    values = posterior.predict(problem.plane, method=method).probs[:, 1].reshape(count, count)
    side = problem.side.numpy()
    picture = axes.contourf(side, side, values.numpy(), levels=np.linspace(0, 1, 21), cmap="coolwarm", alpha=0.9)
    axes.contour(side, side, values.numpy(), levels=[0.5], colors="black", linewidths=1)
    x, y = problem.train
    for label, color, marker in ((0, "#2c3a8c", "o"), (1, "#8c0f22", "^")):
        axes.plot(*x[y == label].T, marker, color=color, ms=3.5, mec="white", mew=0.4)
    axes.set(xticks=[], yticks=[], aspect="equal")
    return picture


def draw_models(figure: SubFigure, problem: Problem, trained: dict[str, ntkl.Posterior], found: dict[str, Any]) -> None:
    """Step 2 above, the Bayesian predictives (C.1b) below."""
    axes = figure.subplots(2, len(trained))
    for column, (name, posterior) in enumerate(trained.items()):
        own = found[name]
        for panel, (method, words) in zip(axes[:, column], METHODS.items(), strict=True):
            picture, scores = draw_plane(panel, problem, posterior, method), own[method]
            panel.set_title(
                f"{name}, {words}: test accuracy {scores['accuracy']:.3f},\nlog likelihood "
                f"{scores['log_likelihood']:.3f}; far away {scores['confidence_away']:.0%} sure", fontsize=9,
            )
    figure.colorbar(picture, ax=axes, label="probability of class 1", shrink=0.7)


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__, "i21_banana")
    arguments.add_argument("--data", type=Path, help="folder with banana.npz; without it two moons")
    arguments.add_argument("--epochs", type=int, default=200, help="of the online training (default 200)")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    width = 50
    if options.small:
        options.epochs, width = 25, 6
    options.out.mkdir(parents=True, exist_ok=True)
    problem = Problem.of(options.data, options.small)
    torch.manual_seed(0)
    start = mlp((2, width, 2)).double()
    runs = {name: train(copy.deepcopy(start), problem, options, name == "online") for name in ("online", "weak")}
    trained = {name: run.posterior for name, run in runs.items()}
    found = {name: judge(posterior, problem) for name, posterior in trained.items()}
    learned = runs["online"].history
    found["online"] |= dict(zip(learned.names, learned.values[learned.best], strict=True))
    figure = Figure(figsize=(9.5, 11.5), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(1, 2.6))
    draw_trace(upper.subplots(1, 2), runs["online"], found["online"]["evidence"], found["weak"]["evidence"])
    draw_models(lower, problem, trained, found)
    (options.out / "i21_banana.png").write_bytes(png(figure, dpi=100))
    heads = ["training", "evidence", "training accuracy", "predictive", "test accuracy", "test log lik.", "ECE",
             "confidence", "far away"]
    rows = [[
        name, f"{own['evidence']:.1f}", f"{own['train_accuracy']:.3f}", words,
        *(f"{own[method][key]:.3f}" for key in ("accuracy", "log_likelihood", "ece", "confidence", "confidence_away")),
    ] for name, own in found.items() for method, words in METHODS.items()]
    print(table(heads, rows))
    print(runs["online"])
    write(options.out / "i21_banana.json", {"machine": machine(options.threads), "results": found})


if __name__ == "__main__":
    main()
