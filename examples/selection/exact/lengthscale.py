"""[L22] section 8.1 and appendix H: the lengthscale that evidence and conditional evidence learn (Fig. 8 a, 22 a).

    python examples/selection/exact/lengthscale.py --data DIR --threads 1 --out lengthscale

100 data sets from a Gaussian process with a radial basis function kernel of lengthscale 4 and noise of standard
deviation 0.2, at x = 0 ... 149. From the first n points the lengthscale alone is learned, as by the authors: from the
truth, by 1,000 steps of Adam with rate 0.01 on GPyTorch's raw parameter, by the evidence, or by the conditional
evidence of a random tenth of the points in each step. All data sets are one batch. Beside these the maximum over
lengthscales from 0.05 to 60 of evidence, conditional evidence (20 subsets) and leave-one-out. It prints the mean of the
logarithm, the median and the share above the truth, and what a lengthscale costs: the log density of new points between
the first n under the true lengthscale, less that under the learned one. It writes lengthscale.json and lengthscale.png.
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from typing import Any

import torch
from _exact import (
    ask,
    authors,
    conditional,
    left_out,
    log_density,
    machine,
    means,
    once,
    orders,
    predictive,
    table,
    write,
)
from matplotlib.figure import Figure
from torch import Tensor

from ntk_laplace.plotting import BLUE, GREEN, GREY, ORANGE, png

LENGTH, NOISE, END, STEPS, RATE = 4.0, 0.2**2, 150, 1000, 0.01
COUNTS = (5, 10, 20, 50, 149)
GRID = torch.logspace(math.log10(0.05), math.log10(60), 120, dtype=torch.float64)


def radial(a: Tensor, b: Tensor, length: Tensor) -> Tensor:
    """Radial basis function kernel, (..., A, B), of lengthscales (..., 1, 1)."""
    return (-0.5 * (a[:, None] - b).square() / length.square()).exp()


def drawn(sets: int) -> tuple[Tensor, Tensor]:
    """Targets with noise at x = 0 ... 149, (sets, 150), and the function at x + ½, (sets, 150)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.arange(2 * END, dtype=torch.float64) / 2
    covariance = radial(x, x, torch.tensor(LENGTH, dtype=torch.float64)) + 1e-8 * torch.eye(len(x), dtype=torch.float64)
    f = torch.randn(sets, len(x), generator=generator, dtype=torch.float64) @ torch.linalg.cholesky(covariance).T
    noise = torch.randn(sets, END, generator=generator, dtype=torch.float64) * NOISE**0.5
    return f[:, ::2] + noise, f[:, 1::2]


def prior(n: int, length: Tensor) -> Tensor:
    """Covariance of the first n targets, (..., n, n)."""
    x = torch.arange(n, dtype=torch.float64)
    return radial(x, x, length) + NOISE * torch.eye(n, dtype=torch.float64)


def learned(y: Tensor, objective: str, steps: int) -> Tensor:
    """Lengthscales after Adam from the truth, (sets,): the authors' protocol."""
    n = y.shape[1]
    start = math.log(math.expm1(LENGTH))  # softplus of it is the lengthscale
    raw = torch.full((len(y), 1, 1), start, dtype=torch.float64, requires_grad=True)
    optimizer, generator = torch.optim.Adam([raw], lr=RATE), torch.Generator().manual_seed(3)
    for _ in range(steps):
        optimizer.zero_grad()
        covariance = prior(n, torch.nn.functional.softplus(raw))
        score = log_density(covariance, y) / n
        if objective == "conditional":
            known = torch.randperm(n, generator=generator)[: int(0.9 * n)]
            first = log_density(covariance[:, known[:, None], known], y[:, known])
            score = (n * score - first) / (n - len(known))
        (-score.sum()).backward()
        optimizer.step()
    return torch.nn.functional.softplus(raw.detach()).flatten()


def best(y: Tensor, objective: str) -> Tensor:
    """Lengthscales of the largest score on a grid, (sets,)."""
    n, asked = y.shape[1], orders(y.shape[1], 20, 4)
    scores = []
    for length in GRID:
        covariance = prior(n, length)
        if objective == "evidence":
            scores.append(log_density(covariance, y))
        elif objective == "left out":
            scores.append(left_out(covariance, y))
        else:
            scores.append(conditional(covariance, y, int(0.9 * n), asked))
    return GRID[torch.stack(scores).argmax(0)]


def costs(y: Tensor, f: Tensor, length: Tensor) -> Tensor:
    """Log density of new targets at x + ½ between the first n, a point, under the truth less under these: (sets,)."""
    n, x = y.shape[1], torch.arange(y.shape[1], dtype=torch.float64)
    new, values = x[:-1] + 0.5, []
    for each in (length[:, None, None], torch.full((len(y), 1, 1), LENGTH, dtype=torch.float64)):
        mean, spread = predictive(prior(n, each), y, radial(new, x, each), radial(new, new, each))
        variance = spread.diagonal(dim1=-2, dim2=-1) + NOISE
        # the expectation over the noise of the new target
        gap = (f[:, : n - 1] - mean).square() + NOISE
        values.append((-0.5 * (variance.log() + gap / variance)).mean(1))
    return values[1] - values[0]


def study(n: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Lengthscales and their costs from the first n points."""
    y, f = drawn(options.sets)
    found = {f"Adam, {name}": learned(y[:, :n], name, options.steps) for name in ("evidence", "conditional")}
    if n <= options.longest:
        found |= {f"maximum, {name}": best(y[:, :n], name) for name in ("evidence", "conditional", "left out")}
    kept = {name: length.tolist() for name, length in found.items()}
    return kept | {f"cost of {name}": costs(y[:, :n], f, length).tolist() for name, length in found.items()}


def picture(found: dict[int, dict[str, list[float]]], theirs: dict[str, Tensor]) -> Figure:
    """Mean log lengthscale against n, [L22] Fig. 8 (a), with medians and the authors' curves."""
    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    axes = figure.add_subplot()
    styles = {"evidence": (ORANGE, "s"), "conditional": (BLUE, "o"), "left out": (GREEN, "^")}
    for name, values in theirs.items():
        axes.plot(range(2, values.shape[1] + 1), values[:, 1:].log().mean(0), color=styles[name][0], lw=1, alpha=0.7,
                  label=f"{name}, the authors' file")
    for kind, shift in (("Adam", 0.97), ("maximum", 1.03)):
        for name, (color, marker) in styles.items():
            key = f"{kind}, {name}"
            own = {n: torch.tensor(row[key]).log() for n, row in found.items() if key in row}
            if own:
                middles, errors = zip(*(means(values) for values in own.values()), strict=True)
                axes.errorbar([shift * n for n in own], middles, errors, fmt=marker, ms=5, color=color, capsize=2,
                              mfc=color if kind == "Adam" else "white", label=f"{name}, {kind}")
    axes.axhline(math.log(LENGTH), color=GREY, ls="--", lw=1, label="truth")
    axes.set(xscale="log", xlabel="n", ylabel="mean log lengthscale")
    axes.legend(frameon=False, fontsize=8)
    return figure


def main() -> None:
    options = ask(__doc__, "lengthscale", 100).parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.steps, options.longest, counts = STEPS, 50, COUNTS
    if options.small:
        options.steps, options.sets, counts = 20, min(options.sets, 6), (5, 10)
    torch.set_num_threads(options.threads)
    files = {"evidence": ("human_kernel_results", "lengthscales"),
             "conditional": ("human_kernel_results_cmll", "clml_lengthscales")}
    theirs = {name: authors(options.data, file)[key] for name, (file, key) in files.items() if options.data}
    arguments = [str(options.steps), str(options.sets)]
    found = {n: once(options.out / f"n-{n}.json", arguments, partial(study, n, options)) for n in counts}
    kept: dict[str, Any] = {"machine": machine(options.threads), "truth": math.log(LENGTH), "found": {}}
    rows = []
    for n, own in found.items():
        for name in (name for name in own if not name.startswith("cost")):
            length, cost = torch.tensor(own[name]), means(1000 * torch.tensor(own[f"cost of {name}"]))
            middle, error = means(length.log())
            row = {"mean": middle, "error": error, "median": float(length.log().median()), "cost": cost,
                   "above": float((length > LENGTH).double().mean())}
            shown = ["-", "-"]
            objective = name.removeprefix("Adam, ")
            if objective in theirs:
                values = theirs[objective][:, n - 1].log()
                row["authors"], row["authors_error"] = means(values)
                apart = (middle - row["authors"]) / math.hypot(error, row["authors_error"])
                shown = [f"{row['authors']:.3f} ± {row['authors_error']:.3f}", f"{apart:+.1f}"]
            kept["found"][f"{n}, {name}"] = row
            rows.append([str(n), name, f"{middle:.3f} ± {error:.3f}", *shown, f"{row['median']:.3f}",
                         f"{row['above']:.0%}", "{:.1f} ± {:.1f}".format(*cost)])
    heads = ["n", "by", "mean log ℓ", "authors' file", "apart, standard errors", "median", "above the truth",
             "cost, millinats a point"]
    print(f"log lengthscales of {options.sets} data sets; truth {math.log(LENGTH):.3f}\n{table(heads, rows)}")
    write(options.out / "lengthscale.json", kept)
    (options.out / "lengthscale.png").write_bytes(png(picture(found, theirs)))


if __name__ == "__main__":
    main()
