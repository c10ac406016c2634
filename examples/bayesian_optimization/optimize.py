"""Bayesian optimization: a trained network beside a Gaussian process, laplace-bayesopt and Sobol points.

    python examples/bayesian_optimization/optimize.py --threads 1 --out optimize

Hartmann6, Branin and Ackley5 on the unit cube, and DNA sequences of 24 letters (see _problems.py). Twelve Sobol points
(random sequences), then forty steps: the model is fitted to all data, and the maximum of the log expected improvement
is evaluated next (5 starts of L-BFGS from 64 points; of sequences the best of 1,000 mutants of the ten best found, and
of three generations of 400 mutants of the ten with the largest acquisition). It prints the median over ten seeds of the
regret, the maximum less the best value found, and in how many seeds ours is below each other method's. The maximum of
the sequences is an upper bound. Each seed of each method is a file of its own in OUT, so that an interrupted run goes
on.

laplace-bayesopt needs another environment, with the library beside it:

    python -m venv peers && peers/bin/pip install laplace-bayesopt ntk_laplace
    peers/bin/python examples/bayesian_optimization/optimize.py --threads 1 --methods laplace-bayesopt --out optimize

The next run without ``--methods`` shows all methods whose files are there. It writes optimize.json and optimize.png.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from botorch.acquisition.analytic import LogExpectedImprovement
from botorch.optim import optimize_acqf
from matplotlib.figure import Figure
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _problems import GENERATIONS, PARENTS, PROBLEMS, Problem, problem
from _shared import machine, once, parser, table, write
from _surrogates import METHODS

BATCH, JOINT = 250, {"laplace-bayesopt": 50}  # sequences at a time: laplace-torch forms their joint covariance
START = 12
COLORS = {"ntk_laplace": "#0072B2", "laplace-bayesopt": "#D55E00", "SingleTaskGP": "#009E73", "Sobol": "0.45"}


def proposed(model: Any, x: Tensor, y: Tensor, task: Problem, small: bool, batch: int = BATCH) -> Tensor:
    """The next input, (1, d)."""
    acquisition = LogExpectedImprovement(model, y.max())
    if task.choices is None:
        bounds = torch.stack([torch.zeros(task.dimension), torch.ones(task.dimension)]).double()
        found, _ = optimize_acqf(acquisition, bounds, q=1, num_restarts=2 if small else 5,
                                 raw_samples=8 if small else 64, options={"maxiter": 5 if small else 50})
        return found.detach()
    parents, kept, values = x[y.squeeze(1).topk(PARENTS).indices], x[:0], y.new_zeros(0)
    for count in GENERATIONS:
        new = task.choices(parents, torch.cat([x, kept]), count)
        with torch.no_grad():
            values = torch.cat([values, *(acquisition(part.unsqueeze(1)) for part in new.split(batch))])
        values, order = values.topk(PARENTS)
        parents = kept = torch.cat([kept, new])[order]
    return kept[:1]


def regrets(name: str, method: str, seed: int, options: Any) -> dict[str, Any]:
    """Regret after each evaluation from the twelfth on."""
    task, total = problem(name, seed), START + options.steps
    torch.manual_seed(seed)
    x = task.start(total if METHODS[method] is None else START, seed)
    y, began = task.value(x), time.process_time()
    if METHODS[method] is not None:
        fit = METHODS[method](task, options)
        while len(y) < total:
            new = proposed(fit(x, y), x, y, task, options.small, JOINT.get(method, BATCH))
            x, y = torch.cat([x, new]), torch.cat([y, task.value(new)])
    seconds = (time.process_time() - began) / max(1, len(y) - START)
    best = y.squeeze(1).cummax(0).values[START - 1 :]
    return {"regret": (task.best - best).tolist(), "seconds": seconds}


def summary(runs: dict[str, dict[int, Any]]) -> list[list[str]]:
    """A row for each method: median of the last regret, seeds in which ours is below, seconds for a step."""
    rows, own = [], runs.get("ntk_laplace", {})
    for method, found in runs.items():
        last = {seed: run["regret"][-1] for seed, run in found.items()}
        both = [seed for seed in last if seed in own]
        won = sum(own[seed]["regret"][-1] < last[seed] for seed in both)
        rows.append([method, str(len(last)), f"{np.median(list(last.values())):.4g}",
                     "" if method == "ntk_laplace" else f"{won} of {len(both)}",
                     f"{np.median([run['seconds'] for run in found.values()]):.2f}"])
    return rows


def main() -> None:
    """Every seed of every method; then the table of all that are there."""
    arguments = parser(__doc__, "optimize")
    arguments.add_argument("--methods", default="ntk_laplace,SingleTaskGP,Sobol")
    arguments.add_argument("--problems", default=",".join(PROBLEMS))
    arguments.add_argument("--seeds", type=int, default=10)
    arguments.add_argument("--first", type=int, default=0, help="the first seed")
    arguments.add_argument("--steps", type=int, default=40)
    arguments.add_argument("--epochs", type=int, default=1000, help="of laplace-bayesopt, whose default this is")
    arguments.add_argument("--ours", type=json.loads, default={}, help="JSON: more arguments of fit")
    options = arguments.parse_args()
    if options.small:
        options.seeds, options.steps, options.epochs, options.ours = 2, 2, 5, {"steps": 5, "rounds": 1}
        options.ours["hidden_layer_sizes"] = [8]
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")  # of optimizers that stop early, and of laplace-torch
    names, methods = options.problems.split(","), options.methods.split(",")
    seeds = range(options.first, options.first + options.seeds)
    for seed in seeds:  # a run that is interrupted has all methods of the first seeds
        for name in names:
            for method in methods:
                given = [str(options.small), str(options.steps), method == "ntk_laplace" and json.dumps(options.ours),
                         method == "laplace-bayesopt" and str(options.epochs)]
                once(options.out / f"{name} {method} {seed}.json", [str(one) for one in given],
                     lambda n=name, m=method, s=seed: regrets(n, m, s, options))
    results: dict[str, Any] = {}
    figure = Figure(figsize=(4 * len(names), 3.5), layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, len(names)))
    for name, panel in zip(names, axes, strict=True):
        runs: dict[str, dict[int, Any]] = {}
        for method in METHODS:
            files = {seed: options.out / f"{name} {method} {seed}.json" for seed in seeds}
            runs[method] = {seed: json.loads(p.read_text())["result"] for seed, p in files.items() if p.exists()}
        runs = {method: found for method, found in runs.items() if found}
        for method, found in runs.items():
            curves = np.array([run["regret"] for run in found.values()])
            panel.plot(START + np.arange(curves.shape[1]), np.median(curves, 0), color=COLORS[method], label=method)
        panel.set(title=name, xlabel="evaluations", ylabel="median regret", yscale="log")
        results[name] = {method: {"regret": [run["regret"][-1] for run in found.values()],
                                  "seconds": [run["seconds"] for run in found.values()]}
                         for method, found in runs.items()}
        print(f"\n{name}\n")
        print(table(["method", "seeds", "median regret", "ours is below", "seconds a step"], summary(runs)))
    axes[-1].legend()
    figure.savefig(options.out / "optimize.png", dpi=120)
    write(options.out / "optimize.json", {"machine": machine(options.threads), "results": results})


if __name__ == "__main__":
    main()
