"""[L22] section 8.1 and appendix H: the shape of a kernel under a wrong noise (Fig. 8 b, 22 b, 23).

    python examples/selection/exact/rational_quadratic.py --data DIR --threads 1 --out rational_quadratic

Data from a Gaussian process with a rational quadratic kernel of α = 0.05 and noise of standard deviation 0.1: 50 of 200
points on [0, 1] are trained on, 150 are for the test. α is chosen by evidence, conditional evidence given 45 points (20
orders) or leave-one-out, with the right noise and with one of 0.2; nothing else is learned. Lengthscale and output
scale are those of the authors' notebook, 0.3 and log 2, or as printed, 0.5 and 1. It prints the regret, which is the
best mean test log likelihood over the grid less that at the chosen α, rank correlations over the grid with test log
likelihoods (the mean of marginals, and the joint density, which the authors plot), and the chosen α, over many data
sets. With --data it computes the curves of the authors' data set, and the learning curves of Fig. 23 (c). It writes
rational_quadratic.json and rational_quadratic.png.
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from typing import Any

import torch
from _exact import (
    LOG_2PI,
    ask,
    authors,
    conditional,
    left_out,
    log_density,
    machine,
    means,
    normal,
    once,
    orders,
    predictive,
    spearman,
    table,
    write,
)
from matplotlib.figure import Figure
from torch import Tensor

from ntk_laplace.plotting import SERIES, png

TRUE, NOISE, N, ALL, KNOWN = 0.05, 0.1, 50, 200, 45
KERNELS = {"notebook": (0.3, math.log(2)), "printed": (0.5, 1.0)}  # lengthscale, output scale
NOISES = (0.1, 0.2)  # of the model, standard deviations
FILES = {0.2: "gp_rq_alpha_optimization_big_noise", 0.1: "gp_rq_alpha_optimization_small_noise"}
NAMES = ("evidence", "conditional", "left out")
ASKED = {0.2: 50, 0.1: 150}  # points of the test density in the authors' files
GRID = torch.linspace(0.002, 0.3, 40, dtype=torch.float64)


def kernel(a: Tensor, b: Tensor, alpha: float | Tensor, length: float, scale: float) -> Tensor:
    """Rational quadratic kernel, (A, B)."""
    return scale * (1 + (a[:, None] - b).square() / (2 * alpha * length**2)) ** (-alpha)


def scores(prior: Tensor, y: Tensor, noise: float, asked: Tensor) -> dict[str, Tensor]:
    """Scores of a batch: covariance of the function at all points, the first N of them trained on; (...,) each."""
    own = prior[..., :N, :N] + noise**2 * torch.eye(N, dtype=torch.float64)
    mean, spread = predictive(own, y[..., :N], prior[..., N:, :N], prior[..., N:, N:])
    spread = spread + noise**2 * torch.eye(spread.shape[-1], dtype=torch.float64)
    return {
        "evidence": log_density(own, y[..., :N]), "left out": left_out(own, y[..., :N]),
        "conditional": conditional(own, y[..., :N], KNOWN, asked),
        "test": normal(y[..., N:], mean, spread.diagonal(dim1=-2, dim2=-1)).mean(-1),
        "joint": log_density(spread, y[..., N:] - mean) / spread.shape[-1],
    }


def study(words: str, noise: float, sets: int, count: int) -> dict[str, list[list[float]]]:
    """Scores of data sets over the grid, (sets, grid) each."""
    length, scale = KERNELS[words]
    generator, x = torch.Generator().manual_seed(0), torch.linspace(0, 1, ALL, dtype=torch.float64)
    root = torch.linalg.cholesky(kernel(x, x, TRUE, length, scale) + 1e-8 * torch.eye(ALL, dtype=torch.float64))
    draws = torch.randn(2, sets, ALL, generator=generator, dtype=torch.float64)
    chosen = torch.stack([torch.randperm(ALL, generator=generator) for _ in range(sets)])
    y = (draws[0] @ root.T + NOISE * draws[1]).gather(1, chosen)
    found: dict[str, list[Tensor]] = {}
    for alpha in GRID:
        prior = kernel(x, x, alpha, length, scale)[chosen[:, :, None], chosen[:, None, :]]
        for name, values in scores(prior, y, noise, orders(N, count, 0)).items():
            found.setdefault(name, []).append(values)
    return {name: torch.stack(values, 1).tolist() for name, values in found.items()}


def summary(found: dict[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Regret in millinats a point, rank correlations and the median of the chosen α, by score."""
    kept, test = {}, found["test"]
    for name in NAMES:
        best = found[name].argmax(1)
        regret = 1000 * (test.max(1).values - test.gather(1, best[:, None])[:, 0])
        kept[name] = {
            "regret": means(regret), "first 50": means(regret[:50]), "test": means(spearman(found[name], test)),
            "joint": means(spearman(found[name], found["joint"])), "alpha": float(GRID[best].median()),
            "regrets": regret.tolist(),
        }
    kept["test"] = {"alpha": float(GRID[test.argmax(1)].median())}
    return kept


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """The authors' 50 points: their curves over α and learning curves, beside these."""
    data = authors(options.data, "gp_rq_data")
    x, y = torch.cat([data["x_train"], data["x_test"]]), torch.cat([data["y_train"], data["y_test"]])
    length, scale = KERNELS["notebook"]
    kept: dict[str, Any] = {}
    for noise in NOISES:
        theirs = authors(options.data, FILES[noise])
        own = [scores(kernel(x, x, a, length, scale), y, noise, orders(N, 100, 0)) for a in theirs["alpha"][1:]]
        curves = {name: torch.stack([one[name] for one in own]) for name in own[0]}
        # what they call test likelihood: the joint density, at the wrong noise of the first 50 test points alone
        part, alphas = N + ASKED[noise], theirs["alpha"][1:]
        joint = torch.stack([
            scores(kernel(x[:part], x[:part], a, length, scale), y[:part], noise, orders(N, 1, 0))["joint"]
            for a in alphas
        ]) * ASKED[noise]
        at = {"evidence": theirs["mll"][1:], "conditional": theirs["cmll"][1:], "joint": theirs["test_likelihood"][1:]}
        kept[str(noise)] = {
            "alpha": alphas.tolist(), "own": {name: values.tolist() for name, values in curves.items()},
            "authors": {name: values.tolist() for name, values in at.items()},
            "largest": {name: [float(alphas[v.argmax()]), float(v.max())] for name, v in (curves | at).items()},
            "own_largest": {name: [float(alphas[v.argmax()]), float(v.max())] for name, v in curves.items()},
            "evidence_at": float(curves["evidence"][at["conditional"].argmax()]),
            "difference": {"evidence": float((curves["evidence"] - at["evidence"]).abs().max()),
                           "conditional": float((curves["conditional"] - at["conditional"]).abs().max()),
                           "joint": float((joint - at["joint"]).abs().max())},
            "spearman": {name: float(spearman(at[name], at["joint"])) for name in ("evidence", "conditional")}
            | {f"own {name}": float(spearman(curves[name], curves["test"])) for name in NAMES},
        }
    files = authors(options.data, "gp_rq_learning_curve")
    kept["curves"] = {}
    for name, alpha in (("mlls_0001", 0.001), ("mlls_001", 0.01), ("mlls_01", 0.1), ("mlls_03", 0.3)):
        prior, terms = kernel(x, x, alpha, length, scale) + 0.2**2 * torch.eye(ALL, dtype=torch.float64), []
        for order in orders(ALL, 100, 0):
            factor = torch.linalg.cholesky(prior[order[:, None], order])
            z = torch.linalg.solve_triangular(factor, y[order, None], upper=False)[:, 0]
            terms.append(-0.5 * LOG_2PI - factor.diagonal().log() - 0.5 * z.square())
        own = torch.stack(terms).mean(0).cumsum(0)
        kept["curves"][f"{alpha:g}"] = {"own": own.tolist(), "authors": files[name].tolist()}
    return kept


def picture(found: dict[str, Tensor], theirs: dict[str, Any] | None) -> Figure:
    """With the wrong noise: the scores of the authors' data set over α, and what each chooses on many data sets."""
    figure = Figure(figsize=(10.4, 3.7), layout="constrained")
    *first, axes = figure.subplots(1, 2 if theirs else 1, squeeze=False)[0]
    lines = [*zip(NAMES, SERIES, strict=True), ("test", ("black", "", "-"))]
    for name, (color, _, line) in lines:
        chosen = GRID[found[name].argmax(1)].sort().values
        share = torch.arange(1, len(chosen) + 1) / len(chosen)
        words = "test log likelihood" if name == "test" else name
        axes.step(chosen, share, where="post", ls=line, color=color, lw=1.6, label=words)
        for other in first:
            one = theirs["0.2"]
            other.plot(one["alpha"], unit(torch.tensor(one["own"][name])), line, color=color, lw=1.6)
            other.set(xlabel="α", ylabel="score, from lowest to highest", yticks=[0, 1])
            other.set_title("the authors' data set", fontsize=10)
    axes.set(xlabel="α", ylabel="share of data sets with a smaller choice", ylim=(0, 1))
    axes.set_title(f"the best α of {len(chosen)} data sets", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    for each in (*first, axes):
        each.axvline(TRUE, color="#9AA3AD", lw=1, ls=":")
    return figure


def unit(values: Tensor) -> Tensor:
    """Moved and scaled to [0, 1]."""
    return (values - values.min()) / (values.max() - values.min())


def main() -> None:
    options = ask(__doc__, "rational_quadratic", 200).parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    count = 2 if options.small else 20
    options.sets = min(options.sets, 4) if options.small else options.sets
    torch.set_num_threads(options.threads)
    kept: dict[str, Any] = {"machine": machine(options.threads), "sets": options.sets, "results": {}}
    rows, wrong = [], {}
    for words in KERNELS:
        for noise in NOISES:
            values = once(options.out / f"{words}-{noise}.json", [str(options.sets), str(count)],
                          partial(study, words, noise, options.sets, count))
            found = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
            wrong = found if (words, noise) == ("notebook", 0.2) else wrong
            own = kept["results"][f"{words}, noise {noise}"] = summary(found)
            for name in NAMES:
                one, less = own[name], torch.tensor(own["evidence"]["regrets"]) - torch.tensor(own[name]["regrets"])
                rows.append([words, str(noise), name, pm(one["regret"], 1), pm(one["first 50"], 1),
                             pm(means(less), 1), pm(one["test"], 2), pm(one["joint"], 2), f"{one['alpha']:.3f}",
                             f"{own['test']['alpha']:.3f}"])
    heads = ["kernel", "noise", "by", "regret, millinats a point", "first 50", "less than evidence's by",
             "ρ with test", "ρ with joint", "median α", "of test"]
    print(f"{options.sets} data sets, α = {TRUE}, noise {NOISE}\n{table(heads, rows)}")
    theirs = compare(options) if options.data else None
    if theirs:
        kept["authors"] = theirs
        for noise in NOISES:
            one = theirs[str(noise)]
            print(f"\nthe authors' data set, noise {noise}: (α, score) of the largest\n" + "\n".join(
                f"  {name}: theirs ({one['largest'][name][0]:.3f}, {one['largest'][name][1]:.3f}), here "
                f"({one['own_largest'][name][0]:.3f}, {one['own_largest'][name][1]:.3f})"
                for name in ("evidence", "conditional")) + f"""
  test: theirs, a joint density of {ASKED[noise]} points, α = {one['largest']['joint'][0]:.3f}; here, the mean of
    marginals of 150, {one['own_largest']['test'][0]:.3f}; their joint of 150, {one['own_largest']['joint'][0]:.3f}
  evidence at their α of largest conditional evidence: {one['evidence_at']:.3f}
  largest difference of the curves: """ + ", ".join(f"{k} {v:.2g}" for k, v in one["difference"].items()) + """
  Spearman's ρ: """ + ", ".join(f"{k} {v:.2f}" for k, v in one["spearman"].items()))
        rows = [[alpha, *(f"{one[who][n - 1]:.2f}" for n in (15, 50, 200) for who in ("own", "authors"))]
                for alpha, one in theirs["curves"].items()]
        heads = ["α", *(f"first {n}, {who}" for n in (15, 50, 200) for who in ("own", "theirs"))]
        print(f"\nFig. 23 (c), sums of the learning curves, nats (theirs begin with a zero)\n{table(heads, rows)}")
    write(options.out / "rational_quadratic.json", kept)
    (options.out / "rational_quadratic.png").write_bytes(png(picture(wrong, theirs)))


def pm(value: tuple[float, float], digits: int) -> str:
    """Mean and standard error for a table."""
    return f"{value[0]:.{digits}f} ± {value[1]:.{digits}f}"


if __name__ == "__main__":
    main()
