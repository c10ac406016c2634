"""[L22] 8.2 and appendix I: deep kernels trained by the evidence, and by what is to replace it.

    python examples/selection/deep_kernels.py --data DIR --out deep_kernels
    python examples/selection/deep_kernels.py --data DIR --sizes 300 --splits 5 --objectives "LML;CLML" --steps 100,500

A network [D, 50, 50, 2] with ReLU, `ScaleToBounds` and a scaled RBF kernel with two lengthscales, all of GPyTorch,
trained by Adam at rate 0.01 on n points of boston, energy and concrete (DIR/boston.npz ... with X and y), normalized by
the n points. Objectives: the LML; the CLML of the last tenth given nine tenths, in a new random order at each step, or
in one order throughout; GPyTorch's leave-one-out pseudo likelihood; the LML of new random nine tenths at each step; and
the CLML as the authors released it, in which the features of the nine tenths have bounds of their own and the mean is
zero. The splits of a data set and the
initializations of the network are one batch of models: they see the same orders. Root mean squared error and negative
log likelihood of all other points, in units of the normalized targets, after some numbers of steps; differences from
the LML are paired, and their standard errors are over splits. Results are kept per job, so that an interrupted run goes
on. It writes deep_kernels.json and deep_kernels.png.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _deep import OBJECTIVES, DeepKernel, Networks, objective, standard_error
from _shared import machine, once, parser, table, write

from ntk_laplace.plotting import SERIES, png

SETS = ("boston", "energy", "concrete")
SCORES = {"rmse": "RMSE", "nll": "negative log likelihood"}


def points(folder: Path, name: str, small: bool) -> tuple[Tensor, Tensor]:
    """A data set; in miniature a made one of 60 points."""
    if small:
        x = torch.randn(60, 3, generator=torch.Generator().manual_seed(len(name)), dtype=torch.float64)
        return x, x[:, 0].sin() * x[:, 1]
    with np.load(folder / f"{name}.npz") as data:
        return torch.as_tensor(data["X"], dtype=torch.float64), torch.as_tensor(data["y"]).double().flatten()


def problem(x: Tensor, y: Tensor, n: int, splits: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test points of each split, normalized by the training points: (S, n, D), (S, n) and the others'."""
    parts: list[list[Tensor]] = [[], [], [], []]
    for split in range(splits):
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(split))
        train, test = order[:n], order[n:]
        center, scale = x[train].mean(0), x[train].std(0).clamp(min=1e-9)
        middle, size = y[train].mean(), y[train].std()
        found = ((x[train] - center) / scale, (y[train] - middle) / size,
                 (x[test] - center) / scale, (y[test] - middle) / size)
        for part, value in zip(parts, found, strict=True):
            part.append(value)
    x, y, x_test, y_test = (torch.stack(part) for part in parts)
    return x, y, x_test, y_test


def train(data: tuple[Tensor, Tensor], n: int, what: str, options: argparse.Namespace) -> dict[str, Any]:
    """All splits and initializations of one data set by one objective: scores after each number of steps."""
    start, inits = time.process_time(), options.initializations
    found = problem(*data, n, options.splits)
    x, y, x_test, y_test = (part.repeat_interleave(inits, 0) for part in found)
    network = Networks((x.shape[-1], 50, 50, 2), list(range(inits)) * options.splits)
    model = DeepKernel(x, y, network, 2, zero_mean=what == "released").double()
    value = objective(what, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    kept = {}
    for step in range(1, max(options.steps) + 1):
        optimizer.zero_grad()
        (-value().sum()).backward()
        optimizer.step()
        if step in options.steps:
            kept[str(step)] = model.scores(x_test, y_test)
    return {"scores": kept, "seconds": time.process_time() - start}


def paired(runs: dict[str, Any], what: str, step: int, score: str, inits: int) -> tuple[float, float, float, int]:
    """Mean, mean difference from the LML, its standard error over splits, and splits in which it is below."""

    def by_split(name: str) -> Tensor:
        return torch.tensor(runs[name]["scores"][str(step)][score], dtype=torch.float64).view(-1, inits).mean(1)

    own, difference = by_split(what), by_split(what) - by_split("LML")
    return own.mean().item(), difference.mean().item(), standard_error(difference), int((difference < 0).sum())


def report(name: str, n: int, runs: dict[str, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Print a table for one data set and size; its numbers."""
    rows, kept = [], []
    for step in options.steps:
        for what in options.objectives:
            row = [str(step), what]
            noise = np.median(runs[what]["scores"][str(step)]["noise"])
            for score in SCORES:
                mean, difference, error, below = paired(runs, what, step, score, options.initializations)
                row.append(f"{mean:.3f}")
                row.append("" if what == "LML" else f"{difference:+.3f} ± {error:.3f} ({below}/{options.splits})")
                kept.append({"data": name, "n": n, "steps": step, "objective": what, "score": score, "mean": mean,
                             "difference": difference, "standard_error": error, "below": below})
            rows.append([*row, f"{noise:.4f}"])
    heads = ["steps", "objective", "RMSE", "less LML's", "NLL", "less LML's", "noise"]
    print(f"\n{name}, n = {n}: {options.splits} splits x {options.initializations} initializations; in parentheses "
          f"splits below the LML\n{table(heads, rows)}", flush=True)
    return kept


def picture(found: list[dict[str, Any]], sizes: list[int], names: list[str]) -> Figure:
    """The LML, the CLML in new orders and in one, and the LML of new subsets: both scores against steps."""
    figure = Figure(figsize=(max(6.4, 3.2 * len(names)), 5.0), layout="constrained")  # room for the legend
    axes = figure.subplots(2, len(names), squeeze=False, sharex=True)
    shown = dict(zip(("LML", "CLML", "CLML, one order"), SERIES, strict=True))
    shown["LML, new subset"] = ("#CC79A7", "d", "-.")
    for column, name in enumerate(names):
        for row, (score, words) in enumerate(SCORES.items()):
            ax = axes[row][column]
            for what, (color, marker, line) in shown.items():
                own = [r for r in found if (r["data"], r["n"], r["score"], r["objective"])
                       == (name, sizes[0], score, what)]
                if own:
                    steps, means = [r["steps"] for r in own], [r["mean"] for r in own]
                    ax.plot(steps, means, line, marker=marker, ms=4, color=color, lw=1.4, label=what)
            ax.set(xscale="log", yscale="symlog" if score == "nll" else "linear")
            ax.set_xticks(steps, [str(step) for step in steps])
            ax.minorticks_off()
            ax.set_title(f"{name}, n = {sizes[0]}" if row == 0 else "", fontsize=10)
            ax.set_xlabel("steps of Adam" if row else "")
            ax.set_ylabel(words if column == 0 else "")
            ax.margins(0.08)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    return figure


def main() -> None:
    arguments = parser(__doc__, "deep_kernels")
    arguments.add_argument("--data", type=Path, default=Path("data"), help="folder of boston.npz, energy.npz, ...")
    arguments.add_argument("--sets", default=",".join(SETS), help="data sets, separated by commas")
    arguments.add_argument("--sizes", default="100", help="numbers of training points, separated by commas")
    arguments.add_argument("--objectives", default=";".join(OBJECTIVES), help="separated by semicolons, the LML first")
    arguments.add_argument("--splits", type=int, default=10, help="splits (default 10)")
    arguments.add_argument("--initializations", type=int, default=3, help="of each network (default 3)")
    arguments.add_argument("--steps", default="100,200,500,1000,2000", help="when to score, separated by commas")
    options = arguments.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    names, sizes = options.sets.split(","), [int(n) for n in options.sizes.split(",")]
    options.objectives = options.objectives.split(";")
    options.steps = [int(step) for step in options.steps.split(",")]
    if options.small:
        sizes, options.splits, options.initializations, options.steps = [20], 2, 2, [3, 6]
    found = []
    for name in names:
        data = points(options.data, name, options.small)
        for n in sizes:
            if len(data[1]) <= n:
                print(f"\n{name} has no {n} points to train on and others to test")
                continue
            runs, settings = {}, [str(options.splits), str(options.initializations), str(options.steps)]
            for what in options.objectives:
                kept = options.out / f"{name}_{n}_{what.replace(', ', '_').replace(' ', '_')}.json"
                job = (data, n, what, options)
                runs[what] = once(kept, settings, lambda job=job: train(*job))
            found += report(name, n, runs, options)
    write(options.out / "deep_kernels.json", {"machine": machine(options.threads), "results": found})
    (options.out / "deep_kernels.png").write_bytes(png(picture(found, sizes, names)))


if __name__ == "__main__":
    main()
