"""Wrong labels: which ranking of the training points finds them? Digits and breast cancer, labels flipped on purpose.

    python examples/attribution/mislabels.py --out mislabels

A tenth, a fifth and two fifths of the labels are flipped. Symmetric: any other class, at random. Asymmetric: every
digit may become the next one (a nine a zero), and benign tumors alone may be called malignant. The network of
digits.py (one hidden layer of 16 tanh units) is trained on those labels to a gradient below 1e-5, and the training
points are ranked by what one posterior says of them (`leave_one_out`), by the network's own loss, and by
cross-validated self-confidence, the probability of the given label by a network trained on four fifths of the others,
which costs five more trainings. Two ways to choose the weight decay: as digits.py has it, or, with `--evidence`, that
of five which has the largest evidence given the labels at hand, wrong ones included. AUROC, average precision and
precision among as many points as there are flips; means and standard errors over seeds, each its own part of the data,
flips and start. Each seed's result is kept in the folder: an interrupted run goes on where it stood.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.metrics import average_precision_score
from sklearn.model_selection import StratifiedKFold, cross_val_predict

from ntk_laplace import attribution

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _problems import PROBLEMS, Problem
from _shared import machine, parser, table, write

RATES = (0.1, 0.2, 0.4)
NAMES = ("digits", "cancer")
FOLDS = 5
DECAYS = (0.3, 1.0, 3.0, 10.0, 30.0)
COUNT = 300  # training points
SHOWN = {
    "leave-one-out log density": ("#0072b2", "o"), "self-influence": ("#56b4e9", "s"),
    "leverage": ("#9aa3ad", "v"), "loss": ("#d55e00", "^"), "5-fold self-confidence": ("#009e73", "D"),
}


def drawn(name: str, seed: int, small: bool) -> Problem:
    """All data of a problem in the order of a seed, the first so many to train on."""
    problem = PROBLEMS[name]()
    x, y = np.concatenate([problem.x, problem.x_test]), np.concatenate([problem.y, problem.y_test])
    order = np.random.default_rng(seed).permutation(len(x))
    count = 60 if small else COUNT
    train, test = order[:count], order[count:]
    return replace(problem, x=x[train], y=y[train], x_test=x[test], y_test=y[test], hidden=4 if small else 16)


def flipped(problem: Problem, kind: str, rate: float, seed: int) -> tuple[Problem, np.ndarray]:
    """The problem with wrong labels, and which they are (N,)."""
    generator = np.random.default_rng(1000 + seed)
    y, classes = problem.y.reshape(-1).astype(int), max(2, problem.outputs)
    may = np.arange(len(y)) if kind == "symmetric" or classes > 2 else np.flatnonzero(y == 1)
    chosen = generator.choice(may, round(rate * len(may)), replace=False)
    new = y.copy()
    steps = generator.integers(1, classes, len(chosen)) if kind == "symmetric" else 1
    new[chosen] = (y[chosen] + steps) % classes
    return replace(problem, y=new.reshape(problem.y.shape).astype(problem.y.dtype)), new != y


class Network(ClassifierMixin, BaseEstimator):
    """The problem's network for scikit-learn."""

    def __init__(self, problem: Problem | None = None) -> None:
        self.problem = problem

    def fit(self, x: np.ndarray, y: np.ndarray) -> Network:
        """Train to convergence."""
        targets = y.reshape(len(y), *self.problem.y.shape[1:]).astype(self.problem.y.dtype)
        own = replace(self.problem, x=x, y=targets)
        self.classes_, self.theta_ = np.arange(max(2, own.outputs)), own.train(np.arange(len(x)))
        return self

    def predict_proba(self, x: np.ndarray) -> np.ndarray:
        """Of all classes, (n, C)."""
        return probabilities(self.problem.f(self.theta_, x))

    def predict(self, x: np.ndarray) -> np.ndarray:
        """The likeliest class, (n,)."""
        return self.predict_proba(x).argmax(1)


def probabilities(f: np.ndarray) -> np.ndarray:
    """Of all classes, (n, C), also where there is one logit."""
    f = torch.as_tensor(f)
    p = torch.sigmoid(f) if f.shape[1] == 1 else torch.softmax(f, 1)
    return (torch.cat([1 - p, p], 1) if f.shape[1] == 1 else p).numpy()


def trained(problem: Problem, seed: int, evidence: bool) -> tuple[Problem, np.ndarray]:
    """The problem with its weight decay, and the weights."""
    everything, found = np.arange(len(problem.x)), []
    for delta in DECAYS if evidence else (problem.delta,):
        own = replace(problem, delta=delta)
        theta = own.train(everything, seed)
        score = own.posterior(theta, "full").log_marginal_likelihood().item() if evidence else 0.0
        found.append((score, own, theta))
    return max(found, key=lambda one: one[0])[1:]


def suspicions(problem: Problem, seed: int, evidence: bool) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Every ranking, large where a label is doubted, with the seconds it took beyond training."""
    problem, theta = trained(problem, seed, evidence)
    spent, begun = {}, time.perf_counter()
    found = problem.posterior(theta, "full").leave_one_out()
    spent["one posterior"] = time.perf_counter() - begun
    own = {
        "leave-one-out log density": found.suspicion, "the same, plug-in": -found.plug_in_log_density,
        "self-influence": found.self_influence, "leverage": found.leverage, "information": found.information,
        "residual": found.importance,
    }
    begun = time.perf_counter()
    kfac = problem.posterior(theta, "kfac").leave_one_out(strict=False)  # as a ranking
    spent["KFAC posterior"] = time.perf_counter() - begun
    own["leave-one-out log density, KFAC"] = kfac.suspicion
    scores = {name: values.numpy() for name, values in own.items()}
    scores["loss"] = problem.loss(problem.f(theta, problem.x), problem.y)[0]
    begun, y = time.perf_counter(), problem.y.reshape(-1).astype(int)
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
    p = cross_val_predict(Network(problem), problem.x, y, cv=folds, method="predict_proba")
    spent[f"{FOLDS}-fold self-confidence"] = time.perf_counter() - begun
    scores[f"{FOLDS}-fold self-confidence"] = -p[np.arange(len(y)), y]
    right = probabilities(problem.f(theta, problem.x_test)).argmax(1) == problem.y_test.reshape(-1)
    return scores, spent | {"weight decay": problem.delta, "test accuracy": float(right.mean())}


def measured(suspicion: np.ndarray, wrong: np.ndarray) -> dict[str, float]:
    """How well one ranking finds them."""
    flips = int(wrong.sum())
    worst = np.argsort(-suspicion, kind="stable")[:flips]
    return {"auroc": attribution.mislabel_auroc(suspicion, wrong),
            "average precision": float(average_precision_score(wrong, suspicion)),
            "precision": float(wrong[worst].mean())}


def result(name: str, kind: str, rate: float, seed: int, options: argparse.Namespace) -> dict:
    """One seed; kept."""
    way = "evidence" if options.evidence else "given"
    file = options.out / f"{name}-{kind}-{rate:g}-{way}-{seed}.json"
    if file.exists():
        return json.loads(file.read_text())
    problem, wrong = flipped(drawn(name, seed, options.small), kind, rate, seed)
    scores, more = suspicions(problem, seed, options.evidence)
    found = {"scores": {words: measured(values, wrong) for words, values in scores.items()}, "more": more}
    file.write_text(json.dumps(found))
    return found


def summary(runs: list[dict]) -> dict:
    """Mean and standard error of everything over the seeds."""

    def over(values: list[float]) -> list[float]:
        return [float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(len(values)))]

    first = runs[0]
    return {
        "scores": {words: {m: over([run["scores"][words][m] for run in runs]) for m in own}
                   for words, own in first["scores"].items()},
        "more": {words: over([run["more"][words] for run in runs]) for words in first["more"]},
    }


def draw(found: dict[str, dict], rates: tuple[float, ...], path: Path) -> None:
    """Average precision over the share of flips."""
    figure = Figure(figsize=(9.4, 6.4), layout="constrained")
    panels = figure.subplots(len(NAMES), 2, sharex=True, sharey=True)
    for line, name in zip(panels, NAMES, strict=True):
        for axes, kind in zip(line, ("symmetric", "asymmetric"), strict=True):
            for number, (words, (color, marker)) in enumerate(SHOWN.items()):
                values = [found[f"{name} {kind} {rate:g}"]["scores"][words]["average precision"] for rate in rates]
                at = np.array(rates) + 0.003 * (number - 2)
                axes.errorbar(at, [v[0] for v in values], [v[1] for v in values], color=color, marker=marker, ms=5,
                              capsize=2, label=words)
            flips = 1.0 if kind == "symmetric" or name == "digits" else (PROBLEMS[name]().y == 1).mean()  # benign alone
            axes.plot(rates, flips * np.array(rates), color="0.6", ls=":", label="chance")
            axes.set_title(f"{'breast cancer' if name == 'cancer' else name}, {kind} flips", fontsize=10)
            axes.set(ylim=(0, 1.02), xticks=rates)
            axes.spines[["top", "right"]].set_visible(False)
        line[0].set_ylabel("average precision")
    for axes in panels[-1]:
        axes.set_xlabel("share of labels that are wrong")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Flip, train, rank, compare."""
    arguments = parser(__doc__, "mislabels")
    arguments.add_argument("--seeds", type=int, default=5, help="(default 5)")
    arguments.add_argument("--evidence", action="store_true", help="choose the weight decay by the evidence")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    seeds, rates = (2, RATES[:1]) if options.small else (options.seeds, RATES)
    found = {}
    for name in NAMES:
        for kind in ("symmetric", "asymmetric"):
            for rate in rates:
                runs = [result(name, kind, rate, seed, options) for seed in range(seeds)]
                found[f"{name} {kind} {rate:g}"] = summary(runs)
                print(name, kind, rate, "done", flush=True)
    rankings = list(next(iter(found.values()))["scores"])
    for measure in ("auroc", "average precision", "precision"):
        rows = [[where, *(f"{one['scores'][r][measure][0]:.3f} ± {one['scores'][r][measure][1]:.3f}" for r in rankings)]
                for where, one in found.items()]
        print(f"\n{measure}\n{table(['flips', *rankings], rows)}")
    rows = [[where, *(f"{mean:.3g} ± {error:.2g}" for mean, error in one["more"].values())]
            for where, one in found.items()]
    print(f"\n{table(['flips', *next(iter(found.values()))['more']], rows)}")
    way = "evidence" if options.evidence else "given"
    draw(found, rates, options.out / f"mislabels-{way}.png")
    write(options.out / f"mislabels-{way}.json", {"machine": machine(options.threads), "seeds": seeds, "found": found})


if __name__ == "__main__":
    main()
