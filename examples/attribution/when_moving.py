"""When is the linearized network enough? Its what-ifs beside those of the network that moves, by leverage and by size.

    python examples/attribution/when_moving.py --threads 1 --out attribution

The problems of what_ifs.py. Training points with leverages from the least to the largest leave one by one, and random
groups of 1 to 50 % of the data together. The error of the fixed linearization is the norm of what it misses of the
change of all outputs at all test points, relative to the norm of the change of the network that moves. Single points
that do not come back are left out: their change is that between two minima. It prints the median error for ranges of
the leverage and for shares of the data, and writes when_moving.json and when_moving.png.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _problems import PROBLEMS, Problem, small
from _shared import machine, once, parser, table, write

import ntk_laplace as ntkl
from ntk_laplace import attribution

CASES = {"digits, δ = 0.1": ("digits", 0.1), "digits, δ = 1": ("digits", 1.0), "breast cancer": ("cancer", 0.5),
         "diabetes": ("diabetes", 5.0), "iris": ("iris", 0.5), "wine": ("wine", 1.0)}
EDGES = (0.0, 0.1, 0.3, 0.5, 1.0)
SHARES = (0.01, 0.03, 0.1, 0.25, 0.5)
COLORS = ("#0072B2", "#56B4E9", "#D55E00", "#009E73", "#E69F00", "#CC79A7")


def errors(problem: Problem, single: int, repeats: int) -> dict[str, Any]:
    """Leverages and errors of single points that come back, and errors of groups by their share of the data."""
    count = len(problem.x)
    theta = problem.train(np.arange(count))
    posterior = problem.posterior(theta, "full")
    leverage = posterior.leave_one_out().leverage.numpy()
    chosen = np.argsort(leverage)[np.linspace(0, count - 1, single).round().astype(int)]
    random, groups = np.random.default_rng(0), []
    for share in SHARES:
        groups += [random.permutation(count) < max(2, round(share * count)) for _ in range(repeats)]
    x, before = torch.as_tensor(problem.x_test), torch.as_tensor(problem.f(theta, problem.x_test))

    def compared(gone: np.ndarray) -> tuple[ntkl.WhatIfs, np.ndarray]:
        moving, fixed = (posterior.what_ifs(torch.as_tensor(gone), linearization=kind) for kind in ("moving", "fixed"))
        change, predicted = ((found.outputs(x) - before).flatten(1) for found in (moving, fixed))
        return moving, ((predicted - change).norm(dim=1) / change.norm(dim=1)).numpy()

    alone, error = compared(~attribution.without_each_in_turn(chosen, count))
    together, errors_together = compared(np.stack(groups))
    back = alone.comes_back().numpy()
    return {"leverage": leverage[chosen][back].tolist(), "single": error[back].tolist(), "away": int((~back).sum()),
            "groups": errors_together.reshape(len(SHARES), repeats).tolist(),
            "converged": bool(alone.converged.all() and together.converged.all())}


def rows(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Median errors by leverage and by share, of each problem."""
    result = []
    for name, one in found.items():
        leverage, single = np.array(one["leverage"]), np.array(one["single"])
        bins = [(leverage >= low) & (leverage < high) for low, high in pairwise(EDGES)]
        cells = [f"{np.median(single[own]):.2f} ({own.sum()})" if own.any() else "" for own in bins]
        result.append([name, *cells, *(f"{np.median(own):.2f}" for own in one["groups"])])
    return result


def picture(found: dict[str, dict[str, Any]]) -> Figure:
    """Error against leverage, one dot a point, and against the share of the data, medians."""
    figure = Figure(figsize=(10.5, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for (name, one), color in zip(found.items(), COLORS, strict=False):
        left.plot(one["leverage"], one["single"], "o", ms=4, mew=0, alpha=0.7, color=color, label=name)
        right.plot(SHARES, [np.median(own) for own in one["groups"]], "o-", ms=4, color=color, label=name)
    left.set(xlabel="leverage of the point", ylabel="error of the fixed linearization", yscale="log",
             title="Single points that come back")
    right.set(xlabel="share of the data that leaves", xscale="log", title="Random groups, medians")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*right.get_legend_handles_labels(), loc="outside right center", fontsize=8, frameon=False)
    return figure


def main() -> None:
    """Every problem; those whose file is there are read."""
    arguments = parser(__doc__, "attribution")
    arguments.add_argument("--problems", nargs="*", choices=CASES, default=list(CASES))
    arguments.add_argument("--single", type=int, default=60, help="points left out one by one (default 60)")
    arguments.add_argument("--repeats", type=int, default=8, help="groups of each size (default 8)")
    options = arguments.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    if options.small:
        options.single, options.repeats = 6, 2
    found: dict[str, dict[str, Any]] = {}
    for name in options.problems:
        kind, delta = CASES[name]
        problem = small(PROBLEMS[kind](delta)) if options.small else PROBLEMS[kind](delta)
        given = [str(options.small), str(options.single), str(options.repeats)]
        found[name] = once(options.out / f"when-{problem.name_of_files}.json", given,
                           lambda own=problem: errors(own, options.single, options.repeats))
    heads = [f"leverage {low:g} to {high:g}" for low, high in pairwise(EDGES)]
    print("median error of the fixed linearization (number of points)\n")
    print(table(["problem", *heads, *(f"{share:.0%} leave" for share in SHARES)], rows(found)))
    for name, one in found.items():
        print(f"{name}: {one['away']} points do not come back; all converged: {one['converged']}")
    picture(found).savefig(options.out / "when_moving.png", dpi=120)
    write(options.out / "when_moving.json", {"machine": machine(options.threads), "problems": found})


if __name__ == "__main__":
    main()
