"""[L22] section 6 and appendix E: the evidence and the mean of a Gaussian (Fig. 4 a to c, Fig. 11).

    python examples/selection/exact/density.py --threads 1 --out density

x ~ N(u, 1) with the prior u ~ N(μ, σ²), 40 training points from N(1, 1) with the paper's seed and 960 test points. A
linear network of one weight on a constant input is this model, and its evidence is exact. M_MML has σ² = 1 and the mean
of the data as μ; M_1 is vague, σ² = 10⁶; M_2 is wrong with confidence, σ² = 0.07. The paper prints μ = 2 for M_2, the
authors' notebook has μ = -0.4. It prints evidence, conditional evidence given 34 points (200 orders), leave-one-out
and the mean log likelihood of the test points, for the paper's data set and over many data sets, and the first terms of
learning curves. It writes density.json and density.png.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import numpy as np
import torch
from _exact import ask, conditional, left_out, log_density, machine, means, normal, orders, shown, table, write
from matplotlib.figure import Figure
from torch import Tensor, nn

import ntk_laplace as ntkl
from ntk_laplace.metrics import mean_log_likelihood
from ntk_laplace.plotting import SERIES, VERMILION, png

N, TEST, KNOWN = 40, 960, 34
MODELS = {"M_MML": (1.0, None), "M_1": (1e6, 1.0), "M_2, μ = -0.4": (0.07, -0.4), "M_2, μ = 2": (0.07, 2.0)}
VARIANCES = {"σ² = 0.6": 0.6, "σ² = 10": 10.0, "σ² = 10⁶": 1e6}  # of Fig. 11 (e), at μ = 0


def paper_data() -> tuple[Tensor, Tensor]:
    """Training and test points with the paper's seed."""
    x = torch.as_tensor(np.random.RandomState(2).normal(size=N + TEST) + 1.0)
    return x[:N], x[N:]


def posterior(x: Tensor, variance: float, mean: float) -> ntkl.Posterior:
    """The mean of a Gaussian as the weight of a linear network, at its maximum a posteriori."""
    network = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        network.weight.fill_((x.sum() + mean / variance) / (len(x) + 1 / variance))
    prior = ntkl.GaussianPrior(1 / variance, mean=mean)
    return ntkl.laplace(network, (torch.ones_like(x)[:, None], x[:, None]), ntkl.Gaussian(1.0), prior)


def predictions(x: Tensor, variance: float, mean: Tensor | float) -> tuple[Tensor, Tensor]:
    """Mean and variance of the next point given the first n of each row, n = 0 to all: [L22] Eq. 22."""
    n = torch.arange(x.shape[-1] + 1)
    total = torch.cat([torch.zeros_like(x[..., :1]), x.cumsum(-1)], -1)
    own = 1 / (n + 1 / variance)
    return own * (total + mean / variance), 1 + own


def one_data_set(options: argparse.Namespace) -> dict[str, Any]:
    """The paper's data set: every score, from the library."""
    train, test = paper_data()
    found, models = {}, {}
    warnings.simplefilter("ignore", ntkl.NTKLaplaceWarning)  # the vague priors, which are printed
    for name, (variance, given) in MODELS.items():
        mean = float(train.mean()) if given is None else given
        model = models[name] = posterior(train, variance, mean)
        predicted = model.predict(torch.ones(1, 1).double())
        found[name] = {
            "evidence": model.log_marginal_likelihood().item(),
            "conditional": model.conditional_log_marginal_likelihood(KNOWN, options.orders).item(),
            "left_out": model.loo_log_density().item(),
            "test": mean_log_likelihood(model.predict(torch.ones(TEST, 1).double()), test[:, None]),
            "predictive": [predicted.mean.item(), predicted.variance.item()],
            "terms": model.learning_curve(options.curves).mean.tolist(),
        }
    compared = ntkl.compare_models(models)
    return {"models": found, "vague": list(compared.vague), "warning": compared.warning}


def many_data_sets(options: argparse.Namespace) -> dict[str, dict[str, Tensor]]:
    """Scores of each data set, (sets,), for the models; and of the variances at μ = 0."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(options.sets, N + TEST, generator=generator, dtype=torch.float64) + 1.0
    train, test, asked = x[:, :N], x[:, N:], orders(N, 20, 0)
    found = {}
    for name, (variance, given) in MODELS.items():
        mean = train.mean(1, keepdim=True) if given is None else torch.full((options.sets, 1), given).double()
        covariance = (torch.eye(N).double() + variance).expand(options.sets, N, N)
        ahead, spread = predictions(train, variance, mean)
        found[name] = {
            "evidence": log_density(covariance, train - mean),
            "conditional": conditional(covariance, train - mean, KNOWN, asked),
            "left_out": left_out(covariance, train - mean),
            "test": normal(test, ahead[:, -1:], spread[-1:]).mean(1),
            # before the first point the test points are predicted from the prior
            "curve": torch.stack([normal(test, a[:, None], s).mean(1) for a, s in zip(ahead.T, spread, strict=True)]),
        }
    return found


def by_variance(train: Tensor, test: Tensor, variances: Tensor) -> tuple[Tensor, Tensor]:
    """Evidence and mean test log likelihood at μ = 0 of one data set, (V,) each: Fig. 4 (a)."""
    evidence = log_density(torch.eye(len(train)).double() + variances[:, None, None], train.expand(len(variances), -1))
    ahead = [predictions(train, float(v), 0.0) for v in variances]
    return evidence, torch.stack([normal(test, mean[-1], spread[-1]).mean() for mean, spread in ahead])


def picture(found: dict[str, Any], averages: dict[str, dict[str, Tensor]]) -> Figure:
    """Fig. 4 (a) of this data set; (c) of it and over all data sets."""
    train, test = paper_data()
    figure = Figure(figsize=(11.4, 3.5), layout="constrained")
    first, second, third = figure.subplots(1, 3)
    variances = torch.logspace(-2, 6, 161, dtype=torch.float64)
    evidence, predicted = by_variance(train, test, variances)
    first.plot(variances, evidence, color=SERIES[1][0], label="evidence (left)")
    twin = first.twinx()
    twin.plot(variances, predicted, "--", color=SERIES[0][0], label="test log likelihood (right)")
    first.set(xscale="log", xlabel="prior variance σ²", ylabel="nats")
    twin.set_ylabel("nats a point")
    lines = [*first.get_lines(), *twin.get_lines()]
    first.legend(lines, [line.get_label() for line in lines], frameon=False, fontsize=8, loc="lower center")
    first.set_title("μ = 0: the prior's variance", fontsize=10)
    styles = [*SERIES, (VERMILION, "d", "-.")]
    for (name, own), (color, _, line) in zip(found.items(), styles, strict=True):
        second.plot(range(1, N + 1), own["terms"], line, color=color, label=name, lw=1.4)
        third.plot(range(N + 1), averages[name]["curve"].mean(1), line, color=color, label=name, lw=1.4)
    second.set(xscale="log", ylim=(-4.2, -1.0), xlabel="n", ylabel="log p(point n given those before)")
    second.set_title("the paper's data set: terms of the evidence", fontsize=10)
    third.set(xscale="symlog", ylim=(-3.2, -1.35), xlim=(0, N), xlabel="points seen", ylabel="test log likelihood")
    third.set_title("mean of many data sets", fontsize=10)
    second.legend(frameon=False, fontsize=8, loc="lower right")
    return figure


def main() -> None:
    arguments = ask(__doc__, "density", 1000)
    options = arguments.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.orders, options.curves = (5, 3) if options.small else (200, 100)
    options.sets = min(options.sets, 20) if options.small else options.sets
    torch.set_num_threads(options.threads)
    one, averages = one_data_set(options), many_data_sets(options)
    own = one["models"]
    heads = ["model", "evidence", "conditional", "LOO", "test", "predictive"]
    rows = [
        [name, f"{s['evidence']:.2f}", f"{s['conditional']:.2f}", f"{s['left_out']:.2f}", f"{s['test']:.4f}",
         "N({:.3f}, {:.3f})".format(*s["predictive"])] for name, s in own.items()
    ]
    print(f"the paper's data set\n{table(heads, rows)}\ncompare_models: {one['warning']}")
    print(f"\nmean of {options.sets} data sets")
    scores = ("evidence", "conditional", "left_out", "test")
    rows = [[name, *(shown(s[score], 4 if score == "test" else 2) for score in scores)]
            for name, s in averages.items()]
    print(table(["model", "evidence", "conditional", "LOO", "test"], rows))
    counts = {}
    for second in ("M_2, μ = -0.4", "M_2, μ = 2"):
        counts[second] = {s: float((averages[second][s] > averages["M_1"][s]).double().mean()) for s in scores}
        words = ", ".join(f"{score} {share:.0%}" for score, share in counts[second].items())
        print(f"{second} is above M_1 in: {words}")
    train, test = paper_data()
    grid = torch.cat([torch.arange(0.01, 2, 0.01), torch.logspace(0.4, 6, 50)]).double()
    evidence, _ = by_variance(train, test, grid)
    best, closed = float(grid[evidence.argmax()]), float(train.mean().square() - 1 / N)
    print(f"\nμ = 0: the evidence is largest at σ² = {best:.2f} (closed form, mean² - 1/n: {closed:.3f}; paper 0.6)")
    points = by_variance(train, test, torch.tensor([0.6, 10.0, 1e3, 1e6]).double())
    for v, e, t in zip((0.6, 10, 1e3, 1e6), *points, strict=True):
        print(f"  σ² = {v:g}: evidence {e:.2f}, test {t:.5f}")
    curves = {}
    for name, variance in VARIANCES.items():
        curves[name] = posterior(train, variance, 0.0).learning_curve(options.curves).mean
        print(f"  {name}: log p(point n given those before) at n = 1, 2, 5, 40: "
              + ", ".join(f"{curves[name][n - 1]:.3f}" for n in (1, 2, 5, 40)))
    kept = {
        "machine": machine(options.threads), "models": own, "vague": one["vague"], "above_m1": counts,
        "means": {name: {s: means(value[s]) for s in scores} for name, value in averages.items()}, "sets": options.sets,
        "best_variance": [best, closed], "by_variance": [[float(v) for v in values] for values in points],
        "curves": {name: values.tolist() for name, values in curves.items()},
    }
    write(options.out / "density.json", kept)
    (options.out / "density.png").write_bytes(png(picture(own, averages)))


if __name__ == "__main__":
    main()
