"""[L22] section 6: the evidence prefers a Fourier model of order 3, the conditional evidence the true order 9.

    python examples/selection/fourier.py --out fourier

y = Σ_d a_d sin(d s x) + b_d cos(d s x) + noise of sd 0.1, of order 9 with a_d, b_d ~ N(0, d⁻⁴), at 100 uniform inputs
in [0, 1]. The paper prints no factor s; with s = 1 the interval is a sixth of the longest period, and any smooth
function there is one of order 3. So both: s = 1 as printed, and s = 2π, whole periods. Three linear networks of these
features are trained to their MAP and made Gaussian processes: order 3 and order 9 with a_d, b_d ~ N(0, 1), and order 9
with the prior that made the data (9c). Per seed: evidence, conditional evidence given 85 points (200 orders), test log
likelihood of 1,000 new points; their means and standard errors over seeds. The terms log p(point n given those before)
of 400 points (10 orders) say up to which n the evidence prefers the smaller model. It writes fourier.json and
fourier.png, the picture for s = 2π.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _shared import machine, parser, table, write

import ntk_laplace as ntkl
from ntk_laplace.metrics import mean_log_likelihood
from ntk_laplace.plotting import SERIES, png

NOISE = 0.1**2
ORDER = 9
SCALES = {"s = 1": 1.0, "s = 2π": 2 * torch.pi}
MODELS = {"order 3": (3, False), "order 9": (9, False), "order 9c": (9, True)}  # order; whether the prior is the data's
PAPER = {"order 3": (53.8, 11.45), "order 9": (28.9, 28.9), "order 9c": (None, None)}


def features(x: Tensor, order: int, scale: float) -> Tensor:
    """sin(d s x) and cos(d s x) for d = 1 ... order, (n, 2 order)."""
    angles = scale * x * torch.arange(1, order + 1, dtype=torch.float64)
    return torch.cat([angles.sin(), angles.cos()], 1)


def precisions(order: int, corrected: bool) -> Tensor:
    """One over the prior variance of each weight: 1, or d⁴."""
    d = torch.arange(1, order + 1, dtype=torch.float64).repeat(2)
    return d**4 if corrected else torch.ones_like(d)


class Problem:
    """Training and test points of one seed."""

    def __init__(self, seed: int, n: int, scale: float) -> None:
        self.scale, generator = scale, torch.Generator().manual_seed(seed)
        weights = torch.randn(2 * ORDER, 1, generator=generator, dtype=torch.float64)
        self.weights = weights / precisions(ORDER, True).sqrt().unsqueeze(1)
        self.x = torch.rand(n, 1, generator=generator, dtype=torch.float64)
        self.x_test = torch.rand(1000, 1, generator=generator, dtype=torch.float64)
        noise = torch.randn(n + 1000, 1, generator=generator, dtype=torch.float64) * NOISE**0.5
        self.y = features(self.x, ORDER, scale) @ self.weights + noise[:n]
        self.y_test = features(self.x_test, ORDER, scale) @ self.weights + noise[n:]


def posterior(problem: Problem, order: int, corrected: bool, n: int) -> ntkl.Posterior:
    """A linear network at its MAP on the first n points, as a Gaussian process."""
    x, y, precision = features(problem.x[:n], order, problem.scale), problem.y[:n], precisions(order, corrected)
    network = nn.Linear(2 * order, 1, bias=False).double()
    with torch.no_grad():
        best = torch.linalg.solve(x.T @ x / NOISE + precision.diag(), x.T @ y / NOISE)
        network.weight.copy_(best.T)
    prior = ntkl.GaussianPrior(precision, groups="parameter")
    return ntkl.laplace(network, (x, y), ntkl.Gaussian(NOISE), prior)


def scores(seed: int, scale: float, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """All that one seed has to say."""
    found, m = {}, round(0.85 * options.points)
    problem = Problem(seed, max(options.long, options.points), scale)
    for name, (order, corrected) in MODELS.items():
        model = posterior(problem, order, corrected, options.points)
        predicted = model.predict(features(problem.x_test, order, scale))
        curve = posterior(problem, order, corrected, options.long).learning_curve(options.curves)
        found[name] = {
            "evidence": model.log_marginal_likelihood().item(),
            "conditional": model.conditional_log_marginal_likelihood(m, options.orders).item(),
            "test_log_likelihood": mean_log_likelihood(predicted, problem.y_test),
            "terms": curve.mean.tolist(),
        }
    return found


def crossings(runs: list[dict[str, Any]]) -> list[int]:
    """For each seed the last n up to which the evidence of the first n points, over the orders, prefers order 3."""
    lasts = []
    for run in runs:
        ahead = [torch.tensor(run[name]["terms"]).cumsum(0) for name in ("order 3", "order 9")]
        preferred = (ahead[0] > ahead[1]).nonzero().flatten()
        lasts.append(int(preferred[-1]) + 1 if len(preferred) else 0)
    return lasts


def picture(runs: list[dict[str, Any]], options: argparse.Namespace) -> Figure:
    """Fits of the first seed, and the learning curve over all seeds, as in [L22] Fig. 4 (d) and (e)."""
    figure = Figure(figsize=(10.4, 6.2), layout="constrained")
    grid = figure.add_gridspec(2, 3)
    scale, x = 2 * torch.pi, torch.linspace(0, 1.0, 200).double()
    problem = Problem(options.seeds_from, max(options.long, options.points), scale)
    truth = features(x[:, None], ORDER, scale) @ problem.weights
    for column, (name, (order, corrected)) in enumerate(MODELS.items()):
        axes = figure.add_subplot(grid[0, column])
        prediction = posterior(problem, order, corrected, options.points).predict(features(x[:, None], order, scale))
        mean, sd = prediction.mean.detach().flatten(), prediction.variance.detach().sqrt().flatten()
        color, at = SERIES[column][0], problem.x[: options.points]
        low, high = (mean - 2 * sd - truth.flatten(), mean + 2 * sd - truth.flatten())
        axes.fill_between(x, low, high, color=color, alpha=0.25, lw=0)
        axes.plot(x, mean - truth.flatten(), color=color)
        axes.axhline(0.0, color="black", lw=1, ls=(0, (4, 2)))
        noise = problem.y[: options.points] - features(at, ORDER, scale) @ problem.weights
        axes.plot(at, noise, ".", ms=3, color="#5B6470")
        first = runs[0][name]
        axes.set_title(f"{name}: evidence {first['evidence']:.1f}, conditional {first['conditional']:.1f}", fontsize=9)
        axes.set(ylim=(-0.6, 0.6), xlabel="x", ylabel="prediction less truth" if column == 0 else "")
    terms, total = figure.add_subplot(grid[1, :2]), figure.add_subplot(grid[1, 2])
    for (name, _), (color, _, line) in zip(MODELS.items(), SERIES, strict=False):
        curves = torch.tensor([run[name]["terms"] for run in runs], dtype=torch.float64)
        n = range(1, curves.shape[1] + 1)
        smooth = torch.nn.functional.avg_pool1d(curves.mean(0)[None], 9, 1, 4, count_include_pad=False)[0]
        shown = torch.where(torch.arange(len(smooth)) < 9, curves.mean(0), smooth)  # the first terms change quickly
        terms.plot(n, shown, line, color=color, label=name, lw=1.4)
        total.plot(n, curves.cumsum(1).mean(0), line, color=color, lw=1.4)
    best = torch.tensor(runs[0]["order 9c"]["terms"]).max().item()
    terms.set(xscale="log", ylim=(-1.5, max(best, 0.9) + 0.1), xlabel="n", ylabel="log p(point n given those before)")
    terms.set_title(f"learning curve, mean of {options.curves} orders, {len(runs)} seeds and 9 terms", fontsize=9)
    terms.legend(frameon=False, fontsize=9)
    total.set_title("evidence of the first n", fontsize=9)
    total.set(xlabel="n", ylabel="nats")
    return figure


def main() -> None:
    arguments = parser(__doc__, "fourier")
    arguments.add_argument("--seeds", type=int, default=10, help="data sets (default 10)")
    arguments.add_argument("--seeds-from", type=int, default=0, help="the first seed (default 0)")
    arguments.add_argument("--orders", type=int, default=200, help="orders of the data (default 200)")
    options = arguments.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.points, options.long, options.curves = (30, 40, 2) if options.small else (100, 400, 10)
    if options.small:
        options.seeds, options.orders = 2, 5
    torch.set_num_threads(options.threads)
    found = {}
    for words, scale in SCALES.items():
        seeds = range(options.seeds_from, options.seeds_from + options.seeds)
        runs = [scores(seed, scale, options) for seed in seeds]
        found[words] = report(words, runs, options) | {"runs": runs}
    # one point more or less costs this much at best: the noise's own entropy
    bound = (options.points - round(0.85 * options.points)) * -0.5 * math.log(2 * math.pi * math.e * NOISE)
    print(f"\nno model's conditional evidence can exceed {bound:.2f} nats on average: the noise's entropy")
    kept = {"machine": machine(options.threads), "paper": PAPER, "bound": bound, "results": found}
    write(options.out / "fourier.json", kept)
    (options.out / "fourier.png").write_bytes(png(picture(found["s = 2π"]["runs"], options)))


def report(words: str, runs: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Print what the seeds say together."""

    def summary(name: str, score: str) -> tuple[float, float]:
        values = torch.tensor([run[name][score] for run in runs], dtype=torch.float64)
        return values.mean().item(), values.std().item() / len(values) ** 0.5

    means = {name: {score: summary(name, score) for score in ("evidence", "conditional", "test_log_likelihood")}
             for name in MODELS}  # fmt: skip
    rows = []
    for name, (evidence, conditional) in PAPER.items():
        own = means[name]
        rows.append([
            name, f"{own['evidence'][0]:.1f} ± {own['evidence'][1]:.1f}", "-" if evidence is None else str(evidence),
            f"{own['conditional'][0]:.2f} ± {own['conditional'][1]:.2f}",
            "-" if conditional is None else str(conditional), f"{own['test_log_likelihood'][0]:.4f}",
        ])  # fmt: skip
    heads = ["model", "evidence", "paper", "conditional evidence", "paper", "test log likelihood"]
    print(f"\n{words}\n{table(heads, rows)}")

    def wins(first: str, second: str, score: str) -> int:
        return sum(run[first][score] > run[second][score] for run in runs)

    counts = {
        "evidence prefers order 3": wins("order 3", "order 9", "evidence"),
        "conditional evidence prefers order 9": wins("order 9", "order 3", "conditional"),
        "test log likelihood prefers order 9": wins("order 9", "order 3", "test_log_likelihood"),
    }
    for statement, count in counts.items():
        print(f"{statement} in {count} of {len(runs)} seeds")
    lasts = crossings(runs)
    print(f"of the first n points the evidence prefers order 3 up to n = {sorted(lasts)[len(lasts) // 2]} (median of "
          f"{len(lasts)} seeds, {min(lasts)} to {max(lasts)}; {options.long} is the end)")
    return {"means": means, "counts": counts, "prefers_order_3_up_to": lasts}


if __name__ == "__main__":
    main()
