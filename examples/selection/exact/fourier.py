"""[L22] section 6: the evidence prefers a Fourier model of order 3, the conditional evidence the true order 9.

    python examples/selection/exact/fourier.py --data DIR --threads 1 --out fourier

y = Σ_d a_d sin(d x) + b_d cos(d x) + noise of sd 0.1, of order 9 with a_d, b_d ~ N(0, d⁻⁴). The inputs are those of the
authors' notebook, a grid of 500 points on [0, 10] in random order, of which the first 100 are trained on; weights,
order and noise have its seeds. (The paper prints Uniform[0, 1].) Linear networks of these features are trained to
their MAP and made Gaussian processes: order 3 and order 9 with a_d, b_d ~ N(0, 1), and order 9 with variance 1/d² (9c,
as in the notebook) or 1/d⁴ (9c as the paper prints it, the prior of the data). It prints evidence, conditional
evidence given 85 points (200 orders), joint and as a sum of marginals, leave-one-out, and the log likelihood of the
other 400 points; up to which n the evidence of the first n prefers order 3; the same over many data sets, and over data
sets with the inputs that the paper prints. With --data it compares with the authors' files. It writes fourier.json and
fourier.png.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from _exact import ask, authors, machine, means, once, shown, table, write
from matplotlib.figure import Figure
from torch import Tensor, nn

import ntk_laplace as ntkl
from ntk_laplace.metrics import mean_log_likelihood
from ntk_laplace.plotting import SERIES, VERMILION, png

NOISE, ORDER, POINTS, KNOWN = 0.1**2, 9, 100, 85
MODELS = {"order 3": (3, 0), "order 9": (9, 0), "order 9c, 1/d²": (9, 2), "order 9c, 1/d⁴": (9, 4)}
PAPER = {"order 3": ("53.8", "11.45"), "order 9": ("28.9", "28.9")}
FILES = {"order 3": "m3", "order 9": "m9", "order 9c, 1/d²": "m9c"}
SCORES = ("evidence", "conditional", "left_out", "test")


def features(x: Tensor, order: int) -> Tensor:
    """sin(d x) and cos(d x) for d = 1 ... order, (n, 2 order)."""
    angles = x[:, None] * torch.arange(1, order + 1, dtype=torch.float64)
    return torch.cat([angles.sin(), angles.cos()], 1)


@dataclass(frozen=True)
class Problem:
    """Points in the order of training, and the function without noise."""

    x: Tensor
    y: Tensor
    weights: Tensor

    @classmethod
    def of_paper(cls) -> Problem:
        """The authors' seeds: 15 for the weights, 6 for the order of the grid and the noise."""
        d = np.arange(ORDER) + 1
        weights = torch.as_tensor(np.random.RandomState(15).randn(2, ORDER) / d**2).reshape(-1)
        random, x = np.random.RandomState(6), np.linspace(0.0, 10.0, 500)
        random.shuffle(x)
        inputs = torch.as_tensor(x)
        return cls(inputs, features(inputs, ORDER) @ weights + torch.as_tensor(random.randn(500)) * NOISE**0.5, weights)

    @classmethod
    def drawn(cls, seed: int, printed: bool = False) -> Problem:
        """Another data set on the grid; or uniform on [0, 1], as the paper prints."""
        generator = torch.Generator().manual_seed(seed)
        d = torch.arange(1, ORDER + 1, dtype=torch.float64).repeat(2)
        weights = torch.randn(2 * ORDER, generator=generator, dtype=torch.float64) / d**2
        grid = torch.linspace(0, 10, 500, dtype=torch.float64)[torch.randperm(500, generator=generator)]
        x = torch.rand(500, generator=generator, dtype=torch.float64) if printed else grid
        noise = torch.randn(500, generator=generator, dtype=torch.float64) * NOISE**0.5
        return cls(x, features(x, ORDER) @ weights + noise, weights)

    def truth(self, x: Tensor) -> Tensor:
        """The function without noise."""
        return features(x, ORDER) @ self.weights

    def posterior(self, name: str, n: int = POINTS) -> ntkl.Posterior:
        """A linear network at its MAP on the first n points, as a Gaussian process."""
        order, power = MODELS[name]
        precision = torch.arange(1, order + 1, dtype=torch.float64).repeat(2) ** power
        x, y = features(self.x[:n], order), self.y[:n]
        network = nn.Linear(2 * order, 1, bias=False).double()
        with torch.no_grad():
            network.weight.copy_(torch.linalg.solve(x.T @ x / NOISE + precision.diag(), x.T @ y / NOISE))
        prior = ntkl.GaussianPrior(precision, groups="parameter") if power else ntkl.GaussianPrior(1.0)
        return ntkl.laplace(network, (x, y[:, None]), ntkl.Gaussian(NOISE), prior)

    def scores(self, orders: int, curves: int, long: int) -> dict[str, dict[str, Any]]:
        """All that one data set has to say."""
        found = {}
        for name, (order, _) in MODELS.items():
            model = self.posterior(name)
            predicted = model.predict(features(self.x[POINTS:], order))
            found[name] = {
                "evidence": model.log_marginal_likelihood().item(),
                "conditional": model.conditional_log_marginal_likelihood(KNOWN, orders).item(),
                "left_out": model.loo_log_density().item(),
                "test": mean_log_likelihood(predicted, self.y[POINTS:, None]),
                "terms": self.posterior(name, long).learning_curve(curves).mean.tolist() if curves else [],
            }
        return found


def marginals(problem: Problem, orders: int) -> dict[str, float]:
    """Conditional evidence as the sum of marginals, Σ log p(y_i given 85 points)."""
    models = {name: problem.posterior(name) for name in MODELS}
    return {name: model.conditional_log_marginal_likelihood(KNOWN, orders, method="average", scale=1.0).item()
            for name, model in models.items()}


def prefers(found: dict[str, dict[str, Any]]) -> int:
    """The last n up to which the evidence of the first n points, over the orders, prefers order 3."""
    ahead = [torch.tensor(found[name]["terms"]).cumsum(0) for name in ("order 3", "order 9")]
    return last(ahead[0], ahead[1])


def last(first: Tensor, second: Tensor) -> int:
    """The last n at which the first curve is above the second."""
    preferred = (first > second).nonzero().flatten()
    return int(preferred[-1]) + 1 if len(preferred) else 0


def crossing(first: Tensor, second: Tensor, window: int = 15) -> int:
    """The first n from which the terms of the second, averaged over a window, are above those of the first."""
    smooth = nn.functional.avg_pool1d((second - first)[None], window, 1, window // 2, count_include_pad=False)[0]
    return int((smooth > 0).nonzero()[0]) + 1


def compare(problem: Problem, found: dict[str, Any], options: Any) -> dict[str, Any]:
    """The authors' training points, predictions and learning curves beside these."""
    curves = authors(options.data, "fourier_cmll_results")
    kept: dict[str, Any] = {"up_to": last(curves["m3_cmlls"], curves["m9_cmlls"])}
    for name, short in FILES.items():
        theirs = authors(options.data, f"fourier_{short}")
        order, _ = MODELS[name]
        same = Problem(theirs["x_train"], theirs["y_train"], problem.weights).posterior(name)
        predicted = same.predict(features(theirs["x_test"], order))
        kept[name] = {
            "points": float((theirs["x_train"] - problem.x[:POINTS]).abs().max()),
            "targets": float((theirs["y_train"] - problem.y[:POINTS]).abs().max()),
            "evidence": same.log_marginal_likelihood().item(),
            "mean": float((predicted.mean.flatten() - theirs["pred_mu"]).abs().max()),
            # the sum of the first n terms over their orders
            "evidence_100": float(curves[f"{short}_cmlls"][POINTS - 1]),
            "later": float(curves[f"{short}_cmlls"][POINTS - 1] - curves[f"{short}_cmlls"][KNOWN - 1]),
        }
        own = torch.tensor(found[name]["terms"]).cumsum(0)
        kept[name]["own_100"] = float(own[POINTS - 1])
    return kept


def picture(problem: Problem, found: dict[str, Any]) -> Figure:
    """Fits of the paper's data set less the truth, terms and their sum: [L22] Fig. 4 (e) and (d)."""
    figure = Figure(figsize=(10.4, 6.2), layout="constrained")
    grid = figure.add_gridspec(2, 3)
    x = torch.linspace(-2, 12, 400).double()
    styles = [*SERIES, (VERMILION, "d", "-.")]
    for column, name in enumerate(list(MODELS)[:3]):
        axes = figure.add_subplot(grid[0, column])
        prediction = problem.posterior(name).predict(features(x, MODELS[name][0]))
        mean, sd = prediction.mean.flatten() - problem.truth(x), prediction.variance.sqrt().flatten()
        color, at = styles[column][0], problem.x[:POINTS]
        axes.fill_between(x, mean - 2 * sd, mean + 2 * sd, color=color, alpha=0.25, lw=0)
        axes.plot(x, mean, color=color)
        axes.axhline(0.0, color="black", lw=1, ls=(0, (4, 2)))
        axes.plot(at, problem.y[:POINTS] - problem.truth(at), ".", ms=3, color="#5B6470")
        own = found[name]
        axes.set_title(f"{name}: evidence {own['evidence']:.1f}, conditional {own['conditional']:.1f}", fontsize=9)
        axes.set(ylim=(-0.5, 0.5), xlabel="x", ylabel="prediction less truth" if column == 0 else "")
    terms, total = figure.add_subplot(grid[1, :2]), figure.add_subplot(grid[1, 2])
    for name, (color, _, line) in zip(MODELS, styles, strict=True):
        curve = torch.tensor(found[name]["terms"])
        n = range(1, len(curve) + 1)
        smooth = nn.functional.avg_pool1d(curve[None], 9, 1, 4, count_include_pad=False)[0]
        shown = torch.where(torch.arange(len(smooth)) < 9, curve, smooth)  # the first terms change quickly
        terms.plot(n, shown, line, color=color, label=name, lw=1.4)
        total.plot(n, (curve - torch.tensor(found["order 9"]["terms"])).cumsum(0), line, color=color, lw=1.4)
    terms.set(xscale="log", ylim=(-2.2, 1.0), xlabel="n", ylabel="log p(point n given those before)")
    terms.set_title("learning curves of the paper's data set, running mean of 9 terms", fontsize=9)
    terms.legend(frameon=False, fontsize=9)
    total.set_title("evidence of the first n less that of order 9", fontsize=9)
    total.set(xlabel="n", ylabel="nats")
    return figure


def report(words: str, runs: list[dict[str, Any]], long: int) -> dict[str, Any]:
    """Print what data sets say together."""
    stacked = {name: {s: torch.tensor([run[name][s] for run in runs], dtype=torch.float64) for s in SCORES}
               for name in MODELS}
    rows = [[name, *(shown(own[s], 3 if s == "test" else 2) for s in SCORES)] for name, own in stacked.items()]
    print(f"\n{words}\n{table(['model', 'evidence', 'conditional', 'LOO', 'test'], rows)}")
    counts = {s: float((stacked["order 9"][s] > stacked["order 3"][s]).double().mean()) for s in SCORES}
    print("order 9 is above order 3 in: " + ", ".join(f"{s} {share:.0%}" for s, share in counts.items()))
    kept: dict[str, Any] = {"counts": counts, "means": {n: {s: means(own[s]) for s in SCORES}
                                                        for n, own in stacked.items()}}
    lasts = sorted(prefers(run) for run in runs if run["order 3"]["terms"])
    if lasts:
        print(f"the evidence of the first n prefers order 3 up to n = {lasts[len(lasts) // 2]} (median; {lasts[0]} to "
              f"{lasts[-1]}, {long} is the end)")
        kept["up_to"] = lasts
    return kept


def main() -> None:
    options = ask(__doc__, "fourier", 40).parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    orders, curves, long = (4, 2, 120) if options.small else (200, 200, 500)
    options.sets = min(options.sets, 2) if options.small else options.sets
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore", ntkl.NTKLaplaceWarning)  # the vague priors, which are printed
    problem = Problem.of_paper()
    found, summed = problem.scores(orders, curves, long), marginals(problem, 1 if options.small else 20)
    rows = []
    for name, own in found.items():
        paper = PAPER.get(name, ("-", "-"))
        rows.append([name, f"{own['evidence']:.4f}", paper[0], f"{own['conditional']:.2f}", paper[1],
                     f"{summed[name]:.2f}", f"{own['left_out']:.2f}", f"{own['test']:.4f}"])
    heads = ["model", "evidence", "paper", "conditional", "paper", "sum of marginals", "LOO", "test"]
    print(f"the paper's data set\n{table(heads, rows)}")
    # one point more or less costs this much at best: the noise's own entropy
    bound = (POINTS - KNOWN) * -0.5 * math.log(2 * math.pi * math.e * NOISE)
    compared = ntkl.compare_models({name: problem.posterior(name) for name in MODELS})
    print(f"compare_models: {compared.warning or 'no warning'}")
    print(f"no model's conditional evidence can exceed {bound:.2f} nats on average: the noise's entropy")
    up_to = prefers(found)
    cross = crossing(*(torch.tensor(found[name]["terms"]) for name in ("order 3", "order 9")))
    print(f"the evidence prefers order 3 up to n = {up_to} (paper 296 or 297); terms cross at n = {cross} (paper 50)")
    kept: dict[str, Any] = {
        "machine": machine(options.threads), "paper": PAPER, "bound": bound, "one": found, "marginals": summed,
        "up_to": up_to, "cross": cross, "warning": compared.warning, "vague": list(compared.vague),
    }
    if options.data:
        kept["authors"] = theirs = compare(problem, found, options)
        rows = [[name, f"{s['points']:.1g}", f"{s['targets']:.1g}", f"{s['evidence']:.4f}", f"{s['mean']:.1g}",
                 f"{s['own_100']:.2f}", f"{s['evidence_100']:.2f}", f"{s['later']:.2f}"]
                for name, s in theirs.items() if name in MODELS]
        heads = ["model", "points differ by", "targets", "evidence of theirs", "predictions differ by",
                 "first 100 terms", "theirs", "their terms 86 to 100"]
        print(f"\nthe authors' files\n{table(heads, rows)}\ntheir curves prefer order 3 up to n = {theirs['up_to']}")
    for words, printed in (("on the grid", False), ("uniform on [0, 1], as printed", True)):
        runs = [
            once(options.out / f"{'printed' if printed else 'grid'}-{seed}.json", [str(orders), str(long)],
                 lambda seed=seed, printed=printed: Problem.drawn(seed, printed).scores(
                     min(orders, 50), 0 if printed else min(curves, 10), long))
            for seed in range(options.sets)
        ]
        kept[words] = report(f"mean of {options.sets} data sets {words}", runs, long)
    write(options.out / "fourier.json", kept)
    (options.out / "fourier.png").write_bytes(png(picture(problem, found)))


if __name__ == "__main__":
    main()
