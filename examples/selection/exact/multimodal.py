"""[L22] section 5.1: a Gaussian at one mode, and an evidence with many (Fig. 3).

    python examples/selection/exact/multimodal.py --data DIR --threads 1 --out multimodal

50 points x ~ N(sin w, 1) with w = -1.3 and the prior w ~ U[-α, α]: with α the number of modes of the posterior grows.
As a network with a Gaussian prior it has one weight z ~ N(0, 1), w = α erf(z/√2), and the output sin w. At the mode
next to zero, for α from 2 to 10⁴: the evidence by quadrature; Laplace's evidence in w, with the Hessian of the data, by
the paper's Eq. 9, and that of the library in z, with the generalized Gauss-Newton curvature; the lower bound (ELBO) of
Laplace's Gaussian and of the best Gaussian (VOGGN); importance sampling from Laplace's Gaussian; and annealed
importance sampling from the prior and from the posterior. Then how far Laplace is from the truth over many data sets.
With --data the evidence of the authors' data set, found again from the log posterior in their file. It writes
multimodal.json and multimodal.png.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from _exact import LOG_2PI, ask, authors, machine, once, table, write
from matplotlib.figure import Figure
from torch import Tensor, nn

import ntk_laplace as ntkl
from ntk_laplace.plotting import SERIES, VERMILION, png

N, TRUE = 50, -1.3
ALPHAS = (2.0, 3.0, 5.0, 7.0, 10.0, 30.0, 100.0, 1000.0, 10000.0)
COLUMNS = ("truth", "Laplace in w", "Laplace", "ELBO", "best ELBO", "importance", "AIS, posterior", "AIS, prior")


class Wave(nn.Module):
    """sin w at every input, with w = α erf(z/√2): uniform on [-α, α] if z is standard normal."""

    def __init__(self, alpha: float, w: float) -> None:
        super().__init__()
        self.alpha = alpha
        self.z = nn.Parameter(math.sqrt(2) * torch.erfinv(torch.tensor([w / alpha], dtype=torch.float64)))

    def forward(self, x: Tensor) -> Tensor:
        """The same output at each input."""
        return (self.alpha * torch.erf(self.z / math.sqrt(2))).sin() * torch.ones_like(x)


def paper_data() -> Tensor:
    """50 points; the paper's seed is not known."""
    return torch.as_tensor(math.sin(TRUE) + np.random.RandomState(0).normal(size=N))


def log_likelihood(w: Tensor, x: Tensor) -> Tensor:
    """log p(x given w) at each w, from the sums of the data."""
    spread = (x - x.mean()).square().sum()
    return -0.5 * (len(x) * LOG_2PI + spread + len(x) * (x.mean() - w.sin()).square())


def truth(alpha: float, log_density: Callable[[Tensor], Tensor]) -> float:
    """Mean of a density over [-α, α] by the trapezoidal rule, 1,000 points in each period."""
    steps = int(alpha * 1000 / math.pi) + 1000
    w = torch.linspace(-alpha, alpha, steps + 1, dtype=torch.float64)
    weights = torch.full_like(w, 1.0 / steps)
    weights[[0, -1]] /= 2
    return float(torch.logsumexp(log_density(w) + weights.log(), 0))


def mode(x: Tensor) -> float:
    """The maximum of the likelihood next to zero."""
    return math.asin(max(-1.0, min(1.0, float(x.mean()))))


def laplace_in_w(alpha: float, x: Tensor) -> float:
    """[L22] Eq. 9 with the density 1/(2α) of the prior and the Hessian of the log likelihood."""
    w = torch.tensor(mode(x), dtype=torch.float64)
    hessian = len(x) * (w.cos().square() + (x.mean() - w.sin()) * w.sin())
    return float(log_likelihood(w, x) - math.log(2 * alpha) + 0.5 * LOG_2PI - 0.5 * hessian.log())


def at_mode(alpha: float, x: Tensor) -> tuple[Wave, ntkl.Posterior]:
    """The network at the mode next to zero, and Laplace's Gaussian there."""
    network = Wave(alpha, mode(x))
    optimizer = torch.optim.LBFGS(network.parameters(), max_iter=100, line_search_fn="strong_wolfe")
    inputs, targets = torch.zeros(len(x), 1).double(), x[:, None]

    def objective() -> Tensor:
        optimizer.zero_grad()
        loss = -ntkl.Gaussian(1.0).log_prob(network(inputs), targets).sum() + 0.5 * network.z.square().sum()
        loss.backward()
        return loss

    optimizer.step(objective)
    optimizer.zero_grad()
    return network, ntkl.laplace(network, (inputs, targets), ntkl.Gaussian(1.0), ntkl.GaussianPrior(1.0), "full")


def estimates(alpha: float, x: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """All estimates at one α; None where the library does not trust one."""
    data, prior = (torch.zeros(len(x), 1).double(), x[:, None]), ntkl.GaussianPrior(1.0)
    network, model = at_mode(alpha, x)
    best = ntkl.variational(network, data, ntkl.Gaussian(1.0), prior, steps=options.steps, samples=8,
                            step_size=0.1, settings=ntkl.Settings(progress=False))
    generator = torch.Generator().manual_seed(0)
    annealed = partial(model.annealed_evidence, options.temperatures, options.chains, generator=generator)
    sampled = {
        "importance": model.importance_evidence(options.draws, generator=generator),
        "AIS, posterior": annealed(start="posterior"), "AIS, prior": annealed(start="prior"),
    }
    bounds = [one.elbo("nn", options.draws, generator=generator) for one in (model, best.posterior)]
    return {
        "alpha": alpha, "truth": truth(alpha, partial(log_likelihood, x=x)), "Laplace in w": laplace_in_w(alpha, x),
        "Laplace": model.log_marginal_likelihood().item(), "ELBO": float(bounds[0]), "best ELBO": float(bounds[1]),
        "errors": {name: one.standard_error for name, one in sampled.items()},
        "trusted": {name: one.trusted for name, one in sampled.items()},
        **{name: float(one) for name, one in sampled.items()},
    }


def slopes(rows: list[dict[str, Any]], least: float = 10.0) -> dict[str, float]:
    """Change of each column a decade of α, by least squares over α from `least`."""
    kept = [row for row in rows if row["alpha"] >= least]
    decades = np.log10([row["alpha"] for row in kept])
    return {name: float(np.polyfit(decades, [row[name] for row in kept], 1)[0]) for name in COLUMNS}


def many_data_sets(count: int) -> dict[str, Any]:
    """Laplace less the truth at α = 5 and 100; how often the mean is outside of what sin w can be."""
    generator = torch.Generator().manual_seed(0)
    inside, flat = [], []
    for _ in range(count):
        x = math.sin(TRUE) + torch.randn(N, generator=generator, dtype=torch.float64)
        values = [truth(alpha, partial(log_likelihood, x=x)) for alpha in (5.0, 7.0, 10.0, 30.0, 100.0)]
        flat.append(max(values) - min(values))
        if abs(float(x.mean())) < 1:
            inside.append([laplace_in_w(5.0, x) - values[0], laplace_in_w(100.0, x) - values[-1]])
    gaps = torch.tensor(inside)
    return {
        "outside": 1 - len(inside) / count, "flat": [float(np.median(flat)), max(flat)],
        "median": gaps.median(0).values.tolist(), "smallest": gaps.min(0).values.tolist(),
        "largest": gaps.max(0).values.tolist(),
    }


def recovered(options: argparse.Namespace) -> dict[str, Any]:
    """The authors' data: their log posterior is quadratic in sin w, and so gives the mean of the data."""
    theirs = authors(options.data, "laplace")
    s = theirs["ws"].sin()
    powers = torch.stack([torch.ones_like(s), s, s.square()], 1)
    logs = theirs["log_posterior"] + math.log(20)  # without the density of their prior, U[-10, 10]
    constant, slope, square = torch.linalg.lstsq(powers, logs[:, None]).solution.flatten()
    kept = (theirs["alphas"] >= 5) & (theirs["alphas"] <= 1e4)
    alphas, given = theirs["alphas"][kept], theirs["lmls"][kept]
    values = torch.tensor([truth(float(alpha), lambda w: constant + slope * w.sin() + square * w.sin().square())
                           for alpha in alphas])
    slope_of = np.polyfit(alphas.log10(), theirs["laplace_lmls"][kept], 1)[0]
    return {
        "n": float(-2 * square), "mean": float(-slope / (2 * square)), "w_map": float(theirs["w_map"][0]),
        "slope": float(slope_of), "alphas": alphas.tolist(), "truth": values.tolist(), "theirs": given.tolist(),
        "laplace": theirs["laplace_lmls"][kept].tolist(),
    }


def picture(rows: list[dict[str, Any]], x: Tensor) -> Figure:
    """The posterior with Laplace's Gaussian, and the estimates against α: [L22] Fig. 3."""
    figure = Figure(figsize=(10.4, 3.7), layout="constrained")
    left, right = figure.subplots(1, 2)
    w = torch.linspace(-10, 10, 2001, dtype=torch.float64)
    values, best = log_likelihood(w, x), torch.tensor(mode(x), dtype=torch.float64)
    left.fill_between(w, (values - values.max()).exp(), color="#C9D3DC", label="posterior")
    hessian = len(x) * best.cos().square()
    left.plot(w, (-0.5 * hessian * (w - best).square()).exp(), color=VERMILION, label="Laplace, same height")
    left.set(xlabel="w", yticks=[], ylim=(0, 1.3), title="posterior at α = 10")
    left.legend(frameon=False, fontsize=8, loc="upper right")
    alphas = [row["alpha"] for row in rows]
    right.plot(alphas, [row["truth"] for row in rows], color="black", label="truth, by quadrature")
    styles = [(VERMILION, "d", "-."), *SERIES]
    names = ("Laplace", "best ELBO", "AIS, prior", "AIS, posterior")
    for name, (color, marker, line) in zip(names, styles, strict=True):
        own = [row[name] for row in rows]
        shape = {"color": color, "marker": marker, "ms": 5, "label": name}
        right.plot(alphas, own, ls="none" if "prior" in name else line, **shape)  # on the truth
    right.set(xscale="log", xlabel="α", ylabel="log evidence, nats", title="evidence under U[-α, α]")
    right.legend(frameon=False, fontsize=8)
    return figure


def pair(values: list[float]) -> str:
    """Two numbers for a sentence."""
    return "{:+.2f} and {:+.2f}".format(*values)


def main() -> None:
    options = ask(__doc__, "multimodal", 1000).parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.steps, options.temperatures, options.chains, options.draws = 100, 300, 256, 2000
    alphas = ALPHAS
    if options.small:
        options.steps, options.temperatures, options.chains, options.draws, alphas = 4, 12, 64, 100, (10.0, 100.0)
        options.sets = min(options.sets, 10)
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore", ntkl.NTKLaplaceWarning)  # what is not to be trusted has a star in the table
    x = paper_data()
    rows = [once(options.out / f"alpha-{alpha:g}.json", [str(options.steps), str(options.temperatures)],
                 partial(estimates, alpha, x, options)) for alpha in alphas]
    shown = [[f"{row['alpha']:g}", *(f"{row[name]:.3f}" + ("" if row["trusted"].get(name, True) else "*")
                                     for name in COLUMNS)] for row in rows]
    print(table(["α", *COLUMNS], shown))
    found = slopes(rows)
    print("nats a decade, α from 10: " + ", ".join(f"{name} {value:+.3f}" for name, value in found.items())
          + f" (-log 10 is {-math.log(10):.3f})")
    values = [row["truth"] for row in rows if row["alpha"] >= 5]
    print(f"truth at α of 5 and more: within {max(values) - min(values):.3f} nats")
    averages = many_data_sets(options.sets)
    print(f"""
{options.sets} data sets: in {averages['outside']:.0%} the mean is below -1, and the curvature of Laplace vanishes
in the others, Laplace less the truth at α = 5 and at α = 100: median {pair(averages['median'])}, smallest
{pair(averages['smallest'])}, largest {pair(averages['largest'])}
the truth from α = 5 to 100 varies by {averages['flat'][0]:.3f} (median), {averages['flat'][1]:.3f} at most""")
    kept = {"machine": machine(options.threads), "rows": rows, "slopes": found, "averages": averages}
    if options.data:
        kept["authors"] = theirs = recovered(options)
        exact, given = torch.tensor(theirs["truth"]), torch.tensor(theirs["theirs"])
        print(f"""
the authors' file: n = {theirs['n']:.2f}, mean {theirs['mean']:.4f}; w_MAP {theirs['w_map']:.4f}, exactly
{math.asin(theirs['mean']):.4f}; Laplace {theirs['slope']:+.4f} a decade. For α from 5 to 10⁴ the truth varies by
{float(exact.max() - exact.min()):.3f}, their estimate of it by {float(given.max() - given.min()):.3f}; they differ by
{float((given - exact).abs().max()):.3f} at most""")
    write(options.out / "multimodal.json", kept)
    (options.out / "multimodal.png").write_bytes(png(picture(rows, x)))


if __name__ == "__main__":
    main()
