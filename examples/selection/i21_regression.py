"""[I21] figures 1, 4 and C.1: a regression toy whose depth, prior and noise the training evidence chooses.

    python examples/selection/i21_regression.py [--data DIR] --out i21

200 points like Snelson's (made; with ``--data`` his own, from DIR/snelson.npz), those with 1.5 < x < 3 left out, every
fourth of the rest for testing. Networks of 50 tanh units a layer, Adam at rate 0.01 on all points at once, Algorithm 1
in function space with a rate of 0.01 for the hyperparameters too. The paper takes F = K = 1 for 1,000 epochs; here
F = K = 5 by default, as many hyperparameter steps for a fifth of the fits.
* figure1.png: one and three hidden layers, a precision for each layer, the noise learned; the evidence and the
  predictive, its epistemic part (darker) and all of it.
* training.png: along the epochs, evidence and log joint, hyperparameters, and the test log likelihood of the network
  alone (MAP) and of the linearized predictive.
* figure4.png: three hidden layers under one precision. Held at each of a grid, the noise learned: the evidence at the
  end and the test log likelihoods. Learned, from three starts: where it goes. Below, the predictives at both ends of
  the grid.
It writes regression.json.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _shared import machine, mlp, parser, table, write

import ntk_laplace as ntkl
from ntk_laplace.metrics import mean_log_likelihood
from ntk_laplace.plotting import BLUE, GREY, ORANGE, VERMILION, png

GAP = (1.5, 3.0)
STARTS = {1e-3: ORANGE, 1.0: BLUE, 1e2: VERMILION}


class Problem:
    """Training and test points on a line."""

    def __init__(self, options: argparse.Namespace) -> None:
        if options.data is None:
            generator = torch.Generator().manual_seed(0)
            x = 6 * torch.rand(200, generator=generator, dtype=torch.float64)
            y = torch.sin(2.2 * x + 0.5) * (0.5 + 0.12 * x) + 0.25 * torch.randn(
                200, generator=generator, dtype=torch.float64
            )
        else:
            with np.load(options.data / "snelson.npz") as found:
                x, y = (torch.as_tensor(found[f"train_{name}"], dtype=torch.float64) for name in ("inputs", "outputs"))
        kept = (x < GAP[0]) | (x > GAP[1])
        order = x[kept].argsort()
        x, y = x[kept][order].unsqueeze(1), y[kept][order].unsqueeze(1)
        test = torch.arange(len(x)) % 4 == 2
        self.train, self.test = (x[~test], y[~test]), (x[test], y[test])
        self.grid = torch.linspace(-1.5, 7.5, 181, dtype=torch.float64).unsqueeze(1)


def test_scores(posterior: ntkl.Posterior, problem: Problem) -> dict[str, float]:
    """Test log likelihood per point, nats, of the network alone and of the linearized predictive."""
    x, y = problem.test
    return {m: mean_log_likelihood(posterior.predict(x, method=m), y) for m in ("map", "glm")}


def train(
    depth: int, prior: ntkl.GaussianPrior, problem: Problem, options: argparse.Namespace, moving: Any = None,
) -> tuple[ntkl.EvidenceTraining, list[dict[str, float]]]:
    """Algorithm 1; the test scores after each evaluation stand beside."""
    torch.manual_seed(0)
    network = mlp((1, *[options.width] * depth, 1)).double()
    scores: list[dict[str, float]] = []

    def watch(state: ntkl.TrainingState) -> None:
        if state.posterior is not None and state.epoch % options.watch == 0:
            scores.append({"epoch": state.epoch} | test_scores(state.posterior, problem))

    training = ntkl.train_with_evidence(
        network, problem.train, ntkl.Gaussian(noise=1.0), prior, "gp",
        optimizer=lambda p: torch.optim.Adam(p, lr=0.01), epochs=options.epochs, batch_size=None, callbacks=watch,
        schedule=ntkl.EvidenceSchedule(options.every, options.every, learning_rate=0.01, hyperparameters=moving),
    )
    return training, scores


def draw_predictive(axes: Axes, posterior: ntkl.Posterior, problem: Problem, title: str) -> None:
    """Two standard deviations of the function, and with the noise."""
    prediction = posterior.predict(problem.grid)
    grid, mean = problem.grid.flatten(), prediction.mean.flatten()
    for variance, shade, label in (
        (prediction.variance, 0.15, "with noise"), (prediction.epistemic, 0.35, "epistemic")
    ):
        width = 2 * variance.flatten().sqrt()
        axes.fill_between(grid, mean - width, mean + width, color=BLUE, alpha=shade, lw=0, label=label)
    axes.plot(grid, mean, color=BLUE, lw=1.5)
    axes.plot(*problem.train, ".", color="black", ms=4, label="training")
    axes.plot(*problem.test, "x", color=VERMILION, ms=4, label="test")
    axes.set(ylim=(-3.2, 3.2), title=title)
    axes.title.set_fontsize(10)


def figure1(problem: Problem, options: argparse.Namespace) -> dict[str, Any]:
    """Depth, and what happens along the epochs."""
    found: dict[str, Any] = {}
    first, second = (Figure(figsize=size, layout="constrained") for size in ((9.0, 3.4), (9.0, 7.2)))
    left = first.subplots(1, 2, sharey=True)
    panels = second.subplots(3, 2, sharex=True, sharey="row")
    for column, depth in enumerate((3, 1)):
        training, scores = train(depth, ntkl.GaussianPrior(1.0, groups="layer"), problem, options)
        name = f"{depth} hidden layer" + "s" * (depth > 1)
        draw_predictive(left[column], training.posterior, problem, f"{name}: evidence {training.evidence:.1f} nats")
        draw_training(panels[:, column], training, scores, name)
        found[name] = {"evidence": training.evidence, "epoch": training.best_epoch} | {
            "noise": training.posterior.likelihood.noise.item(),
            "precisions": training.posterior.prior.precision.tolist(),
        } | test_scores(training.posterior, problem)
    left[1].legend(fontsize=8, loc="lower right")
    (options.out / "figure1.png").write_bytes(png(first))
    (options.out / "training.png").write_bytes(png(second))
    return found


def draw_training(axes: Any, training: ntkl.EvidenceTraining, scores: list[dict[str, float]], name: str) -> None:
    """Evidence, hyperparameters, test scores over the epochs."""
    history = training.history
    axes[0].plot(history.epochs, history.evidence, color=BLUE, label="evidence")
    axes[0].plot(range(1, len(history.loss) + 1), [-v for v in history.loss], color=GREY, lw=1, label="log joint")
    axes[0].set_title(name, fontsize=10)
    axes[0].set_ylim(bottom=min(history.evidence[len(history) // 20 :]) - 20)
    for number, label in enumerate(history.names):
        style = {"color": VERMILION, "lw": 2} if label == "noise" else {"lw": 1}
        axes[1].semilogy(history.epochs, [row[number] for row in history.values], label=label, **style)
    for method, color in (("map", GREY), ("glm", BLUE)):
        axes[2].plot([s["epoch"] for s in scores], [s[method] for s in scores], color=color,
                     label={"map": "network alone", "glm": "linearized predictive"}[method])
    axes[2].set_ylim(bottom=min(s["map"] for s in scores[len(scores) // 4 :]) - 0.2)
    axes[2].set_xlabel("epoch")
    for panel, label in zip(axes, ("nats", "precision, noise variance", "test log likelihood"), strict=True):
        panel.set_ylabel(label)
        panel.legend(fontsize=7)


def figure4(problem: Problem, options: argparse.Namespace) -> dict[str, Any]:
    """One precision: held on a grid, and learned from three starts."""
    held, online = {}, {}
    ends: dict[float, ntkl.Posterior] = {}
    for precision in torch.logspace(-3, 3, options.grid, dtype=torch.float64).tolist():
        training, _ = train(3, ntkl.GaussianPrior(precision), problem, options, "noise")
        held[precision] = {"evidence": training.evidence} | test_scores(training.posterior, problem)
        ends[precision] = training.posterior
    for start in STARTS:
        training, _ = train(3, ntkl.GaussianPrior(start), problem, options)
        trace = [row[0] for row in training.history.values]
        online[start] = {"trace": trace, "evidences": training.history.evidence, "evidence": training.evidence,
                         "precision": training.posterior.prior.precision.item()}
    figure = Figure(figsize=(9.0, 6.4), layout="constrained")
    top, bottom = figure.subplots(2, 2)
    grid = list(held)
    top[0].semilogx(grid, [own["evidence"] for own in held.values()], "o-", color="black", ms=4, label="held")
    for start, own in online.items():
        color = STARTS[start]
        top[0].semilogx(own["trace"], own["evidences"], color=color, lw=1, alpha=0.7)
        top[0].plot(own["precision"], own["evidence"], "*", color=color, ms=11, label=f"learned from {start:g}")
    ends_at = [own["evidence"] for own in (*held.values(), *online.values())]
    top[0].set(xlabel="precision", ylabel="evidence, nats", ylim=(min(ends_at) - 40, max(ends_at) + 40))
    top[0].legend(fontsize=8)
    for method, color, style in (("map", GREY, "s--"), ("glm", BLUE, "o-")):
        label = {"map": "network alone", "glm": "linearized predictive"}[method]
        top[1].semilogx(grid, [own[method] for own in held.values()], style, color=color, ms=4, label=label)
    top[1].set(xlabel="precision", ylabel="test log likelihood")
    top[1].legend(fontsize=8)
    for axes, precision in zip(bottom, (grid[0], grid[-1]), strict=True):
        title = f"precision {precision:g}: evidence {held[precision]['evidence']:.1f} nats"
        draw_predictive(axes, ends[precision], problem, title)
    (options.out / "figure4.png").write_bytes(png(figure))
    for own in online.values():
        del own["trace"], own["evidences"]
    return {"held": held, "learned": online}


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__, "i21")
    arguments.add_argument("--data", type=Path, help="folder with snelson.npz; without it the points are made")
    arguments.add_argument("--epochs", type=int, default=1000, help="of each training (default 1,000)")
    arguments.add_argument("--figures", nargs="+", type=int, default=[1, 4], choices=[1, 4], help="which of the two")
    arguments.add_argument("--every", type=int, default=5, help="F and K (default 5; the paper 1)")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    options.width, options.grid, options.watch = 50, 9, 25
    if options.small:
        options.epochs, options.width, options.grid, options.watch = 20, 6, 2, 10
    options.out.mkdir(parents=True, exist_ok=True)
    problem = Problem(options)
    found = {}
    if 1 in options.figures:
        found["figure 1"] = figure1(problem, options)
        report1(found["figure 1"])
    if 4 in options.figures:
        found["figure 4"] = figure4(problem, options)
        report4(found["figure 4"])
    write(options.out / "regression.json", {"machine": machine(options.threads), "results": found})


def report1(found: dict[str, Any]) -> None:
    """Depth."""
    rows = [
        [name, f"{own['evidence']:.1f}", f"{own['noise']:.4f}", f"{own['map']:.3f}", f"{own['glm']:.3f}"]
        for name, own in found.items()
    ]
    print(table(["network", "evidence", "noise", "test log lik., network", "linearized"], rows), flush=True)


def report4(found: dict[str, Any]) -> None:
    """The precision."""
    rows = [
        [f"{precision:g}", f"{own['evidence']:.1f}", f"{own['map']:.3f}", f"{own['glm']:.3f}"]
        for precision, own in found["held"].items()
    ]
    print("\n" + table(["precision held", "evidence", "test log lik., network", "linearized"], rows) + "\n")
    learned = found["learned"].items()
    rows = [[f"{start:g}", f"{own['precision']:.4g}", f"{own['evidence']:.1f}"] for start, own in learned]
    print(table(["precision at the start", "learned", "evidence"], rows))


if __name__ == "__main__":
    main()
