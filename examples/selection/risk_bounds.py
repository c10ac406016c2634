"""[L22] section 9: bounds of the error of a random network (PAC-Bayes), and what they say beside the evidence.

    python examples/selection/risk_bounds.py --threads 1 --out risk_bounds

digits: 1,297 training images of scikit-learn's digits, of which a prior has seen the first 648 (`--first`); 500 test
images; softmax regression and an MLP of 16 tanh units. Each Gaussian over the weights gets its Seeger bound (δ = 0.05
in all, 2,000 draws), its divergence, its error on the other images and on the test images (500 draws):

    fixed prior     the Laplace posterior of all images; the prior N(0, I/λ) has seen none
    trained on all  the same, beside the Laplace posterior of the first half as prior
    refit           around the optimum of the network linearized at the first half's weights, given all images
    linearized      the linearized network itself in place of the network there: its features have seen the first half;
                    for softmax regression both equal "trained on all" and are left out
    VOGGN           variational inference on the other half; the prior is N(weights of the first half, I/λ) with the
                    best λ of two (models=2)
    prior alone     that prior, not updated: divergence 0
    half, tested    no bound of PAC-Bayes: the network of the first half, tested on the other images

Precisions of the Laplace posteriors are those of a Tempered likelihood and of the prior: 1 for softmax regression, 10
(covariances divided by 10) for the MLP.

curves: labels of ten groups with a probability each, p = 0.01 + 0.98 σ(w); every integral over a weight is a sum over a
grid, so that posterior, evidence and risk are exact, and -log p is in [-log 0.99, -log 0.01]. Evidence, conditional
evidence given 80 % of the data, [L22] Eq. 17 and 18, and Seeger's bound, over the breadth of the prior and over n.

unbounded: [L22] Eq. 15 with the log loss of a Gaussian, which has no bounds, on data with heavy tails.

It writes risk_bounds.json and risk_bounds.png; a split that is done is kept, and an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.special import expit, logsumexp
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, vmap

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _shared import machine, once, parser, table, write

import ntk_laplace as ntkl
from ntk_laplace.plotting import BLUE, GREEN, GREY, ORANGE, VERMILION, png
from ntk_laplace.selection import pac_bayes

DELTA = 0.05
Data = tuple[Tensor, Tensor]
Array = NDArray[np.float64]

# --- digits


def softmax_regression() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 10))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {"softmax regression": (softmax_regression, 1),
                                                            "MLP 64-16-10": (mlp, 10)}
GRID = (100.0, 1000.0)  # precisions of the prior around the first half's weights
ROWS = ("fixed prior", "trained on all", "refit", "linearized", "VOGGN", "prior alone", "half, tested")


def train(network: nn.Module, data: Data) -> nn.Module:
    """To the maximum of the log joint under the precision 1."""
    weights = list(network.parameters())
    optimizer = torch.optim.LBFGS(weights, max_iter=400, tolerance_grad=1e-6, line_search_fn="strong_wolfe")

    def objective() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(data[0]), data[1], reduction="sum")
        loss = loss + 0.5 * sum(p.square().sum() for p in weights)
        loss.backward()
        return loss

    optimizer.step(objective)
    return network.eval()


def moved(network: nn.Module, theta: Tensor) -> nn.Module:
    """A copy at other weights."""
    found = copy.deepcopy(network)
    nn.utils.vector_to_parameters(theta, found.parameters())
    return found


def posterior(network: nn.Module, data: Data, power: int) -> ntkl.Posterior:
    """Laplace posterior whose precision is `power` times that of the log joint under precision 1."""
    likelihood = ntkl.Categorical() if power == 1 else ntkl.Tempered(ntkl.Categorical(), power)
    return ntkl.laplace(network, data, likelihood, ntkl.GaussianPrior(float(power)), structure="full")


def gibbs_error(q: ntkl.Posterior, data: Data, draws: int) -> float:
    """Mean error of networks drawn from a Gaussian."""
    network, thetas = q.network, q.sample(draws, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        outputs = vmap(lambda theta: functional_call(network.module, network.unflatten(theta), (data[0],)))(thetas)
    return float((outputs.argmax(-1) != data[1]).double().mean())


def split(seed: int, name: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """All rows for one network and one split of the images."""
    digits, order = load_digits(), np.random.default_rng(seed).permutation(1797)
    x, y = torch.tensor(digits.data[order] / 16.0), torch.tensor(digits.target[order])
    n, m = (160, 80) if options.small else (1297, options.first)
    first, others, everything, test = ((x[a:b], y[a:b]) for a, b in ((0, m), (m, n), (0, n), (1297, 1797)))
    make, power = NETWORKS[name]
    torch.manual_seed(seed)
    half = train(make().double(), first)
    whole = train(copy.deepcopy(half), everything)
    prior, own = posterior(half, first, power), posterior(whole, everything, power)
    linear = prior.condition(others).refit()
    # the likelihood's weight and the prior's precision do not enter a bound with a prior posterior: H alone does
    refit = ntkl.gaussian_posterior(moved(half, linear.fitted.theta), others, ntkl.Categorical(),
                                    precision=linear.posterior_precision)
    found: dict[str, dict[str, float]] = {}

    def note(row: str, q: ntkl.Posterior, data: Data, given: ntkl.Posterior | None, **more: Any) -> None:
        """A row, unless a model of the grid before it was better."""
        kept = ntkl.risk_bound(q, data, given, delta=DELTA, draws=options.draws, **more)
        if row not in found or kept.value < found[row]["bound"]:
            linearized = more.get("model") == "glm"
            tested = ntkl.risk_bound(q, test, given, draws=options.draws // 4, model="glm").risk if linearized else (
                gibbs_error(q, test, options.draws // 4))
            found[row] = {"bound": kept.value, "kl": kept.kl, "risk": kept.risk, "test": tested}

    note("fixed prior", own, everything, None)
    note("trained on all", own, others, prior)
    if len(half) > 1:  # a network without a hidden layer is linear, and these are "trained on all"
        note("refit", refit, others, prior)
        note("linearized", linear, others, prior, model="glm")
    mean = prior.network.theta
    for precision in GRID:
        around = ntkl.GaussianPrior(precision, mean=mean)
        fit = ntkl.variational(half, others, ntkl.Categorical(), around, "diag", start=precision, step_size=0.1,
                               steps=options.steps, elbo_every=0, settings=ntkl.Settings(progress=False))
        note("VOGGN", fit.posterior, others, None, models=len(GRID))
        # the same mean as a prior is refused, because it cannot be told from weights that were trained on the data
        alone = ntkl.gaussian_posterior(half, first, ntkl.Categorical(), precision=torch.full_like(mean, precision))
        note("prior alone", alone, others, alone, models=len(GRID))
    wrong, missed = (float((half(a).argmax(1) != b).double().mean()) for a, b in (others, test))
    bound = pac_bayes.inverse_divergence(wrong, math.log(1 / DELTA) / len(others[1]))
    found["half, tested"] = {"bound": bound, "kl": 0.0, "risk": wrong, "test": missed}
    return found


def digits_study(options: argparse.Namespace) -> dict[str, Any]:
    """Rows of all networks and splits, and their table."""
    kept: dict[str, Any] = {}
    for name in NETWORKS:
        for seed in range(options.splits):
            file = options.out / f"{name.split()[0].lower()}_{seed}.json"
            run = once(file, [str(options.small), str(options.draws), str(options.steps), str(options.first)],
                       lambda name=name, seed=seed: split(seed, name, options))
            kept.setdefault(name, []).append(run)
            bounds = [f"{row} {run[row]['bound']:.3f}" for row in ROWS if row in run]
            print(f"{name}, split {seed}: {', '.join(bounds)}", flush=True)
    rows = []
    for name, runs in kept.items():
        for row in [row for row in ROWS if row in runs[0]]:
            values = {key: np.array([run[row][key] for run in runs]) for key in ("bound", "kl", "risk", "test")}
            holds = int((values["test"] <= values["bound"]).sum())
            rows.append([name, row, f"{values['bound'][0]:.3f}", f"{values['bound'].mean():.3f}",
                         f"{values['bound'].max():.3f}", f"{values['kl'].mean():.1f}", f"{values['risk'].mean():.3f}",
                         f"{values['test'].mean():.3f}", f"{holds} of {len(runs)}"])
    heads = ["network", "Gaussian", "bound, split 0", "mean", "largest", "divergence", "error, other half",
             "test error", "holds"]
    print("\n" + table(heads, rows))
    return kept


# --- exact curves: ten groups of points, one weight each

GROUPS, LEAST = 10, 0.01
LOW, HIGH = -math.log(1 - LEAST), -math.log(LEAST)
SPAN = HIGH - LOW
SCALES = ("evidence", "conditional", "germain", "germain_given", "seeger", "seeger_given", "risk", "catoni_gap")


class Exact:
    """Posteriors of a weight on a grid, for priors N(0, α²).

    Parameters
    ----------
    breadths : array, (A,)
        α.
    """

    def __init__(self, breadths: Array, points: int) -> None:
        t = np.linspace(-1.0, 1.0, points) * np.arcsinh(6 * breadths.max() / 0.05)
        w, step = 0.05 * np.sinh(t), 0.05 * np.cosh(t) * (t[1] - t[0])
        p = LEAST + (1 - 2 * LEAST) * expit(w)
        self.logs = np.stack([np.log(p), np.log1p(-p)])  # (2, G)
        prior = np.log(step) - 0.5 * (w / breadths[:, None]) ** 2
        self.prior = prior - logsumexp(prior, 1, keepdims=True)  # (A, G)

    def scores(self, counts: Array, first: Array, truth: Array, shares: Array) -> dict[str, Array]:
        """Scores (A,) of data given by counts (K, 2) of ones and zeros, of which `first` come first."""
        n, m = counts.sum(), first.sum()
        start = self.prior[:, None] + first @ self.logs  # (A, K, G)
        whole = self.prior[:, None] + counts @ self.logs
        of_first, of_all = logsumexp(start, 2), logsumexp(whole, 2)
        q = np.exp(whole - of_all[..., None])
        losses = -np.einsum("akg,cg->akc", q, self.logs)  # of a one and of a zero, (A, K, 2)
        evidence, conditional = of_all.sum(1), (of_all - of_first).sum(1)
        seen, later = ((losses * part).sum((1, 2)) for part in (counts, counts - first))
        risk = (losses * np.stack([truth, 1 - truth], 1) * shares[:, None]).sum((1, 2))
        found = {"evidence": evidence, "conditional": conditional, "risk": risk}
        for name, log_z, size, total in (("", evidence, n, seen), ("_given", conditional, n - m, later)):
            kl = np.maximum(-log_z - total, 0.0)
            found["germain" + name] = np.array([pac_bayes.germain(z, size, DELTA, LOW, HIGH) for z in log_z])
            scaled = (total / size - LOW) / SPAN
            found["seeger" + name] = LOW + SPAN * np.array([
                pac_bayes.seeger(r, k, size, DELTA) for r, k in zip(scaled, kl, strict=True)
            ])
            same = LOW + SPAN * np.array([pac_bayes.catoni(r, k, size, DELTA, SPAN)
                                          for r, k in zip(scaled, kl, strict=True)])
            found["catoni_gap"] = np.abs(same - found["germain" + name])
        return found


def drawn(n: int, truth: Array, generator: np.random.Generator) -> tuple[Array, Array]:
    """Counts of ones and zeros in each group, of all points and of the first 80 %."""
    group, one = generator.integers(GROUPS, size=n), generator.random(n)
    label = (one >= truth[group]).astype(int)  # 0 is a one
    found = []
    for size in (n, round(0.8 * n)):
        counts = np.zeros((GROUPS, 2))
        np.add.at(counts, (group[:size], label[:size]), 1.0)
        found.append(counts)
    return found[0], found[1]


def curves_study(options: argparse.Namespace) -> dict[str, Any]:
    """Means over data sets: over the breadth of the prior at n = 200, and over n at breadth 1; and violations."""
    shares, sets = np.full(GROUPS, 1 / GROUPS), options.sets
    breadths = np.logspace(-2, 3, 26)

    def mean(exact: Exact, n: int) -> dict[str, Any]:
        runs = []
        for seed in range(sets):
            generator = np.random.default_rng([n, seed])
            truth = LEAST + (1 - 2 * LEAST) * expit(generator.standard_normal(GROUPS))
            runs.append(exact.scores(*drawn(n, truth, generator), truth, shares))
        stacked = {key: np.stack([run[key] for run in runs]) for key in SCALES}
        risk = stacked["risk"]
        broken = {key: int((stacked[key] < risk).any(1).sum()) for key in SCALES if key[:4] in ("germ", "seeg")}
        # the rank of a prior by the evidence is its rank by the bound; not by the risk
        order = [np.argmax(stacked["evidence"], 1), np.argmin(stacked["germain"], 1)]
        best = {"evidence": breadths[order[0]] if risk.shape[1] > 1 else [],
                "conditional": breadths[np.argmax(stacked["conditional"], 1)] if risk.shape[1] > 1 else [],
                "risk": breadths[np.argmin(risk, 1)] if risk.shape[1] > 1 else []}
        return {"mean": {key: value.mean(0).tolist() for key, value in stacked.items()}, "broken": broken,
                "same choice": int((order[0] == order[1]).sum()), "gap": float(stacked["catoni_gap"].max()),
                "best": {key: [float(v) for v in value] for key, value in best.items()}}

    over_breadth = mean(Exact(breadths, 801 if options.small else 4001), 200)
    sizes = [20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000][: 2 if options.small else None]
    alone = Exact(np.array([1.0]), 2001)
    over_n = [mean(alone, n) for n in sizes]
    rows = []
    for i in range(0, len(breadths), 5):
        own = {key: value[i] for key, value in over_breadth["mean"].items()}
        rows.append([f"{breadths[i]:.3g}", f"{own['evidence']:.1f}", f"{own['conditional']:.1f}",
                     *(f"{own[key]:.3f}" for key in ("germain", "germain_given", "seeger", "seeger_given", "risk"))])
    heads = ["prior breadth", "evidence", "conditional", "(17)", "(18)", "Seeger", "Seeger, given 80 %", "true risk"]
    print(f"\nn = 200, means of {sets} data sets\n{table(heads, rows)}")
    rows = [[f"{n:,}", *(f"{run['mean'][key][0]:.3f}" for key in
                         ("germain", "germain_given", "seeger", "seeger_given", "risk"))]
            for n, run in zip(sizes, over_n, strict=True)]
    print("\n" + table(["n", *heads[3:]], rows))
    limit = LOW + SPAN * math.expm1(LOW - over_n[-1]["mean"]["risk"][0]) / math.expm1(LOW - HIGH)
    print(f"(17) tends to {limit:.3f}; it is Catoni's at β = {SPAN:.2f}: largest gap {over_breadth['gap']:.1e}")
    print(f"evidence and (17) choose the same breadth in {over_breadth['same choice']} of {sets} data sets; medians: "
          + ", ".join(f"{key} {np.median(value):.3g}" for key, value in over_breadth["best"].items()))
    print(f"data sets that violate a bound at any breadth: {over_breadth['broken']}")
    return {"breadths": breadths.tolist(), "over breadth": over_breadth, "sizes": sizes, "over n": over_n,
            "limit": limit, "sets": sets}


# --- a loss without bounds


def unbounded_study(options: argparse.Namespace) -> dict[str, float]:
    """Share of data sets of 20 points in which [L22] Eq. 15 with the log loss is below the expected log loss."""
    n, sets, freedom = 20, 200 if options.small else 2000, 2.2
    generator, below = np.random.default_rng(0), 0
    for _ in range(sets):  # mean of a Gaussian with variance 1, prior N(0, 1)
        y = generator.standard_t(freedom, n)
        variance = 1 / (1 + n)
        mean = variance * y.sum()
        risk = 0.5 * math.log(2 * math.pi) + 0.5 * float(np.mean((y - mean) ** 2) + variance)
        kl = 0.5 * (variance + mean**2 - 1 - math.log(variance))
        true = 0.5 * math.log(2 * math.pi) + 0.5 * (freedom / (freedom - 2) + mean**2 + variance)
        below += pac_bayes.mcallester(risk, kl, n, DELTA) < true
    print(f"\n[L22] Eq. 15 with an unbounded log loss is violated in {below / sets:.1%} of {sets:,} data sets; "
          f"δ = {DELTA}")
    return {"violated": below / sets, "sets": sets}


# --- the picture


def picture(found: dict[str, Any]) -> Figure:
    """Curves above, the digits below."""
    figure = Figure(figsize=(11, 7.6), layout="constrained")
    axes = figure.subplots(2, 2)
    if "curves" in found:
        _curves(axes[0], found["curves"])
    if "digits" in found:
        for panel, (name, runs) in zip(axes[1], found["digits"].items(), strict=True):
            shown = [row for row in reversed(ROWS) if row in runs[0]]
            for place, row in enumerate(shown):
                for key, color, marker in (("bound", BLUE, "|"), ("test", ORANGE, ".")):
                    values = [run[row][key] for run in runs]
                    panel.plot(values, [place] * len(values), marker, color=color, ms=9, ls="",
                               label=f"{'bound' if key == 'bound' else 'test error'}" if place == 0 else None)
            panel.set_yticks(range(len(shown)), shown, fontsize=9)
            panel.set(xlim=(0, None), xlabel="error of a random network")
            panel.set_title(f"digits, {name}: {len(runs)} splits", fontsize=10)
            panel.grid(axis="x", alpha=0.3)
        axes[1, 0].legend(frameon=False, fontsize=9)
    return figure


def _curves(axes: Any, found: dict[str, Any]) -> None:
    own, breadths = found["over breadth"]["mean"], found["breadths"]
    styles = {"germain": ("(17), from the evidence", VERMILION, "-"),
              "germain_given": ("(18), from the conditional", VERMILION, "--"),
              "seeger": ("Seeger", BLUE, "-"), "seeger_given": ("Seeger, given 80 %", BLUE, "--"),
              "risk": ("true risk", "black", "-")}
    first, second = axes
    first.plot(breadths, -np.array(own["evidence"]) / 200, color=GREEN, label="-evidence / n")
    first.plot(breadths, -np.array(own["conditional"]) / 40, "--", color=GREEN, label="-conditional / (n - m)")
    for key, (label, color, line) in styles.items():
        first.plot(breadths, own[key], line, color=color, label=label)
    first.set(xscale="log", xlabel="breadth α of the prior N(0, α²)", ylabel="nats per point", ylim=(0.4, 3.4))
    first.set_title(f"ten weights, n = 200, mean of {found['sets']} data sets", fontsize=10)
    first.legend(frameon=False, fontsize=7.5, ncol=2, loc="upper left")
    for key, (_, color, line) in styles.items():
        second.plot(found["sizes"], [run["mean"][key][0] for run in found["over n"]], line, color=color)
    second.axhline(found["limit"], color=GREY, lw=1, ls=":")
    second.text(found["sizes"][0], found["limit"], " limit of (17)", va="bottom", fontsize=8, color=GREY)
    second.set(xscale="log", xlabel="n", ylabel="nats per point", ylim=(0.4, 3.4))
    second.set_title("the true prior, α = 1", fontsize=10)


PARTS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "curves": curves_study, "unbounded": unbounded_study, "digits": digits_study}


def main() -> None:
    arguments = parser(__doc__, "risk_bounds")
    arguments.add_argument("--parts", default=",".join(PARTS), help="of these, with commas (default all)")
    arguments.add_argument("--splits", type=int, default=20, help="of the images (default 20)")
    arguments.add_argument("--first", type=int, default=648, help="images that a prior has seen (default 648)")
    arguments.add_argument("--sets", type=int, default=100, help="data sets of the curves (default 100)")
    options = arguments.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.draws, options.steps = (50, 5) if options.small else (2000, 60)
    if options.small:
        options.splits, options.sets = 1, 3
    torch.set_num_threads(options.threads)
    found = {part: PARTS[part](options) for part in options.parts.split(",")}
    write(options.out / "risk_bounds.json", {"machine": machine(options.threads), "delta": DELTA, **found})
    (options.out / "risk_bounds.png").write_bytes(png(picture(found)))


if __name__ == "__main__":
    main()
