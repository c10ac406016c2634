"""Three optimizers of the evidence from precisions of 1e-3 to 1e3, at fixed weights: do they meet? [I21] figure 4.

    python examples/selection/optimizers.py [--data DIR] --out optimizers

200 points like Snelson's (made; with ``--data`` his own, from DIR/snelson.npz) without a gap and a fourth kept for
testing, as in i21_regression.py; a network of three hidden layers of 50 tanh units, trained once by L-BFGS. From each
of seven precisions, `fit_hyperparameters` moves precisions and noise by "lbfgs", "adam" and "mackay", under one
precision or one for each layer, in several structures. For each structure and grouping the table holds how many runs
converged, the largest difference in evidence between any two of them, the largest ratio of a precision or the noise,
and each method's median number of steps. optimizers.png shows, for one precision and exact function space, how far each
run is below the maximum, over the precision and over the steps. It writes optimizers.json.
"""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from i21_regression import Problem
from matplotlib.figure import Figure
from torch import Tensor, nn

import ntk_laplace as ntkl
from ntk_laplace.plotting import BLUE, ORANGE, VERMILION, png
from ntk_laplace.posterior.hyperparameters import METHODS

from _shared import machine, mlp, parser, table, write  # isort: skip (i21_regression knows where it is)

STRUCTURES = {"gp": "gp", "kfac": "kfac", "ekfac": "ekfac", "inf": ntkl.INF(rank=20), "diag": "diag"}
COLORS = {"lbfgs": BLUE, "adam": ORANGE, "mackay": VERMILION}
STEPS = 1000  # at most
FLOOR = 1e-6  # nats, which the logarithmic axes end at


def trained(problem: Problem, width: int, steps: int) -> nn.Module:
    """A network near its MAP under precision 0.3 and noise of variance 0.09."""
    torch.manual_seed(0)
    network = mlp((1, width, width, width, 1)).double()
    weights, (x, y) = list(network.parameters()), problem.train
    optimizer = torch.optim.LBFGS(weights, max_iter=steps, tolerance_grad=1e-5, line_search_fn="strong_wolfe")

    def objective() -> Tensor:
        optimizer.zero_grad()
        loss = 0.5 * (network(x) - y).square().sum() / 0.09 + 0.15 * sum(p.square().sum() for p in weights)
        loss.backward()
        return loss

    optimizer.step(objective)
    optimizer.zero_grad()
    return network.eval()


def climb(posterior: ntkl.Posterior, method: str, start: float, tolerance: float) -> dict[str, Any]:
    """One run from one precision for all groups and a noise of 1; where it went."""
    posterior.prior.precision, posterior.likelihood.noise = start, 1.0
    begin = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ntkl.NTKLaplaceWarning)  # what did not converge is counted
        history = posterior.fit_hyperparameters(method, steps=STEPS, tolerance=tolerance)
    return {
        "method": method, "start": start, "converged": history.converged, "steps": len(history) - 1,
        "seconds": time.perf_counter() - begin, "evidence": history.evidence[history.best],
        "values": history.values[history.best], "trace": [row[0] for row in history.values],
        "evidences": history.evidence,
    }


def profile(posterior: ntkl.Posterior, count: int) -> dict[float, float]:
    """The evidence over precisions, each with its best noise."""
    found = {}
    for precision in torch.logspace(-4, 4, count).tolist():
        posterior.prior.precision = precision
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ntkl.NTKLaplaceWarning)
            history = posterior.fit_hyperparameters(parameters="noise", tolerance=1e-4)
        found[precision] = history.evidence[history.best]
    return found


def picture(runs: list[dict[str, Any]], found: dict[float, float]) -> Figure:
    """Nats below the maximum: traces from both ends over the precision, and of all runs over the steps."""
    top = max(run["evidence"] for run in runs)
    figure = Figure(figsize=(9.5, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    left.plot(list(found), [top - value for value in found.values()], color="black", lw=1, label="at its best noise")
    ends = runs[0]["start"], runs[-1]["start"]
    for run in runs:
        gaps = [top - value + FLOOR for value in run["evidences"]]
        color, label = COLORS[run["method"]], run["method"] if run["start"] == ends[0] else None
        if run["start"] in ends:
            left.plot(run["trace"], gaps, ".-", color=color, ms=4, lw=0.8, label=label)
        right.plot(range(1, len(gaps) + 1), gaps, color=color, lw=0.9, label=label)
    left.set(xscale="log", yscale="log", xlabel="precision", ylabel="nats below the maximum", ylim=(1e6, FLOOR / 2))
    right.set(xscale="log", xlabel="step")
    for axes in (left, right):
        axes.legend(fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__, "optimizers")
    arguments.add_argument("--data", type=Path, help="folder with snelson.npz; without it the points are made")
    arguments.add_argument("--structures", nargs="+", default=list(STRUCTURES), choices=list(STRUCTURES))
    arguments.add_argument("--groups", nargs="+", default=["all", "layer"], choices=["all", "layer"])
    arguments.add_argument("--width", type=int, default=50, help="of the three hidden layers (default 50)")
    arguments.add_argument("--starts", type=int, default=7, help="precisions from 1e-3 to 1e3 (default 7)")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    tolerance, count, steps = 1e-6, 41, 2000
    if options.small:
        options.starts, options.width, tolerance, count, steps = 2, 6, 1e-4, 5, 300
        options.structures, options.groups = ["gp"], ["all"]
    options.out.mkdir(parents=True, exist_ok=True)
    problem = Problem(options)
    network = trained(problem, options.width, steps)
    results, rows = [], []
    for groups in options.groups:
        for name in options.structures:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ntkl.NTKLaplaceWarning)  # INF says where it shrinks
                posterior = ntkl.laplace(
                    network, problem.train, ntkl.Gaussian(), ntkl.GaussianPrior(groups=groups), STRUCTURES[name]
                )
            starts = torch.logspace(-3, 3, options.starts).tolist()
            runs = [climb(posterior, method, start, tolerance) for start in starts for method in METHODS]
            if (groups, name) == ("all", "gp"):
                figure = picture(runs, profile(posterior, count))
                (options.out / "optimizers.png").write_bytes(png(figure))
            rows.append([groups, name, *line(runs)])
            results.append({"groups": groups, "structure": name, "runs": [
                {key: value for key, value in run.items() if key not in ("trace", "evidences")} for run in runs
            ]})
            print(rows[-1], flush=True)
    heads = ["precisions", "structure", "converged", "evidence", "largest difference", "largest ratio", "noise",
             *(f"{method}: steps" for method in METHODS)]
    print(f"\n{len(problem.train[1])} points, starts {starts[0]:g} to {starts[-1]:g}\n\n{table(heads, rows)}")
    write(options.out / "optimizers.json", {"machine": machine(options.threads), "results": results})


def line(runs: list[dict[str, Any]]) -> list[str]:
    """What a structure's runs have in common."""
    evidences = [run["evidence"] for run in runs]
    values = np.array([run["values"] for run in runs])
    ratios = (values.max(0) / values.min(0)).max()
    best = max(runs, key=lambda run: run["evidence"])
    steps = [f"{np.median([run['steps'] for run in runs if run['method'] == method]):.0f}" for method in METHODS]
    converged = f"{sum(run['converged'] for run in runs)} of {len(runs)}"
    return [converged, f"{max(evidences):.3f}", f"{max(evidences) - min(evidences):.2g}", f"{ratios:.4f}",
            f"{best['values'][-1]:.4f}", *steps]


if __name__ == "__main__":
    main()
