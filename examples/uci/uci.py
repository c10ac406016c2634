"""Training with evidence on UCI data: [I21] tables 1, C2, C3 (regression) and C4 (two classes).

    python examples/uci/uci.py --data DIR --splits 3 --out uci

One hidden layer of 50 ReLU units, [I21]'s protocol: algorithm 1 for 10,000 epochs with F = K = 1, no burn-in, Adam at
1e-3 for weights and hyperparameters; a precision for each tensor and, in regression, the noise variance; the state of
highest evidence is kept. DIR holds ``boston.npz`` and the like, with ``train_idx_0`` ... in regression (90/10);
classification takes its own stratified splits, 70 % to train and 15 % to test, as the validation part is not needed.
All splits and structures of a data set are trained at once, by algebra of their own (`_batched.py`). At the end the
library fits each network anew: its evidence must be the same number, and its predictives are scored, MAP and, with the
posterior of the same structure, Bayesian (closed form in regression, the linearized network sampled for classes).
Scores are negative log likelihoods on test data in the original units, mean ± standard error over the splits, beside
the paper's. It writes uci.json, which it adds to: data sets that are there already with the same options are kept.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _batched import STRUCTURES, Networks, Problem, Protocol, train_with_evidence
from sklearn import datasets
from sklearn.model_selection import train_test_split
from torch import Tensor

import ntk_laplace as ntkl
from ntk_laplace import metrics

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _shared import machine, parser, table, write

REGRESSION, CLASSES = ("boston", "concrete", "energy", "yacht"), ("australian", "ionosphere")
# exact posteriors by whichever of function and weight space the library finds cheaper
STRUCTURE_SPECS = {"ggn": ("auto", "ggn"), "ef": ("auto", "ef"), "kfac": ("kfac", "ggn"), "diag-ggn": ("diag", "ggn"),
         "diag-ef": ("diag", "ef")}
# [I21] tables C2, C3, C4a, C4d: mean and standard error of the negative test log likelihood, Bayesian and MAP
PAPER: dict[str, dict[str, tuple[tuple[float, float], tuple[float, float]]]] = {
    "boston": {"ggn": ((2.68, 0.12), (2.69, 0.13)), "ef": ((2.60, 0.09), (2.62, 0.12)),
               "kfac": ((2.70, 0.08), (2.70, 0.09)), "diag-ggn": ((2.84, 0.05), (2.84, 0.05)),
               "diag-ef": ((2.90, 0.03), (2.89, 0.03))},
    "concrete": {"ggn": ((3.06, 0.05), (3.06, 0.05)), "ef": ((3.07, 0.04), (3.07, 0.04)),
                 "kfac": ((3.13, 0.06), (3.13, 0.06)), "diag-ggn": ((3.13, 0.04), (3.13, 0.04)),
                 "diag-ef": ((3.11, 0.02), (3.11, 0.02))},
    "energy": {"ggn": ((0.54, 0.11), (0.55, 0.11)), "ef": ((0.78, 0.13), (0.73, 0.15)),
               "kfac": ((0.54, 0.02), (0.53, 0.02)), "diag-ggn": ((0.70, 0.03), (0.69, 0.03)),
               "diag-ef": ((0.88, 0.05), (0.85, 0.05))},
    "yacht": {"ggn": ((3.51, 0.62), (5.89, 1.25)), "ef": ((1.29, 0.17), (2.43, 0.61)),
              "kfac": ((1.48, 0.07), (1.48, 0.07)), "diag-ggn": ((2.91, 0.04), (2.90, 0.04)),
              "diag-ef": ((3.16, 0.02), (3.15, 0.02))},
    "australian": {"ggn": ((0.31, 0.01), (0.31, 0.01)), "ef": ((0.34, 0.01), (0.31, 0.01)),
                   "kfac": ((0.32, 0.01), (0.31, 0.01)), "diag-ggn": ((0.35, 0.01), (0.33, 0.01)),
                   "diag-ef": ((0.34, 0.01), (0.32, 0.01))},
    "ionosphere": {"ggn": ((0.29, 0.02), (0.26, 0.03)), "ef": ((0.42, 0.01), (0.28, 0.04)),
                   "kfac": ((0.31, 0.02), (0.29, 0.02)), "diag-ggn": ((0.38, 0.01), (0.35, 0.01)),
                   "diag-ef": ((0.37, 0.01), (0.31, 0.02))},
}
AGREEMENT = 1e-6  # of the two evidences, relative: they share no code


def read(name: str, folder: Path | None) -> tuple[np.ndarray, np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """Inputs, responses or labels, and the given splits."""
    if folder is None:
        found = {"diabetes": datasets.load_diabetes, "breast_cancer": datasets.load_breast_cancer}[name]()
        return found.data, found.target, []
    with np.load(folder / f"{name}.npz") as found:
        splits = [(found[f"train_idx_{k}"], found[f"test_idx_{k}"]) for k in range(20) if f"train_idx_{k}" in found]
        return found["X"], found["y"], splits


def standardised(
    name: str, folder: Path | None, splits: int, most: int | None, responses: bool = True
) -> tuple[Problem, list[tuple[Tensor, Tensor, float]]]:
    """Training data of all splits, and of each the test inputs, responses or labels, and the responses' spread.

    Inputs are always standardized, responses unless they are asked for as they are.
    """
    x, y, given = read(name, folder)
    classes = y.dtype.kind in "iu" and len(np.unique(y)) == 2
    y = y.reshape(len(x))
    xs, ys, tests = [], [], []
    for number in range(splits):
        if given:
            train, test = given[number]
        elif classes:
            train, rest = train_test_split(np.arange(len(x)), train_size=0.7, stratify=y, random_state=number)
            test, _ = train_test_split(rest, train_size=0.5, stratify=y[rest], random_state=number)
        else:
            train, test = train_test_split(np.arange(len(x)), train_size=0.9, random_state=number)
        train = train[:most]
        center, spread = x[train].mean(0), x[train].std(0)
        spread = np.where(spread > 0, spread, 1.0)
        middle, scale = (y[train].mean(), y[train].std()) if responses and not classes else (0, 1)
        of_class = torch.long if classes else torch.float64
        xs.append(torch.as_tensor((x[train] - center) / spread))
        ys.append(torch.as_tensor((y[train] - middle) / scale).to(of_class))
        response = torch.as_tensor((y[test] - middle) / scale).to(of_class)
        tests.append((torch.as_tensor((x[test] - center) / spread), response, float(scale)))
    return Problem(torch.stack(xs), torch.stack(ys), classes), tests


def score(
    posterior: ntkl.Posterior, classes: bool, x: Tensor, y: Tensor, scale: float
) -> dict[str, dict[str, float]]:
    """Negative test log likelihood in the original units, and what else the paper's tables hold."""
    found = {}
    for predictive, method in (("MAP", "map"), ("Bayes", "glm")):
        prediction = posterior.predict(x, method)
        nll = -prediction.log_prob(y if classes else y[:, None]).mean().item() + math.log(scale)
        found[predictive] = {"nll": nll}
        if classes:
            found[predictive]["accuracy"] = metrics.accuracy(prediction.probs, y)
            found[predictive]["ece"] = metrics.expected_calibration_error(prediction.probs, y)
    return found


def run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One data set: train all, fit all again with the library, score."""
    problem, tests = standardised(name, options.data, options.splits, 60 if options.small else None)
    count, copies = options.splits, len(STRUCTURES)
    whole = Problem(problem.x.repeat(copies, 1, 1), problem.y.repeat(copies, 1), problem.classes)
    parts = {structure: slice(i * count, (i + 1) * count) for i, structure in enumerate(STRUCTURES)}
    networks = Networks(whole, count)
    start = time.perf_counter()

    def tell(epoch: int) -> None:
        took = time.perf_counter() - start
        print(f"{name}: epoch {epoch:,} of {options.epochs:,}, {took:.0f} s", file=sys.stderr, flush=True)

    best = train_with_evidence(whole, networks, parts, Protocol(options.epochs, options.rate), tell)
    with torch.no_grad():
        for parameter, kept in zip(networks.parameters(), best.tensors, strict=False):
            parameter.copy_(kept)
    log_precision, log_noise = best.tensors[-2:]
    rows: dict[str, list[dict[str, Any]]] = {structure: [] for structure in STRUCTURES}
    largest = 0.0
    for structure, part in parts.items():
        form, curvature = STRUCTURE_SPECS[structure]
        for split in range(count):
            at = part.start + split
            network = networks.one(at)
            names = [n for n, _ in network.named_parameters()]
            precision = log_precision[at].exp().tolist()
            prior = ntkl.GaussianPrior(dict(zip(names, precision, strict=True)), groups="tensor")
            likelihood = ntkl.Categorical() if problem.classes else ntkl.Gaussian(noise=log_noise[at].exp().item())
            y = problem.y[split] if problem.classes else problem.y[split][:, None]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ntkl.NTKLaplaceWarning)
                posterior = ntkl.laplace(
                    network, (problem.x[split], y), likelihood, prior, form, curvature
                )
            value = posterior.log_marginal_likelihood().item()
            difference = abs(value - best.evidence[at].item()) / (1.0 + abs(value))
            largest = max(largest, difference)
            rows[structure].append({
                "evidence": value, "epoch": int(best.epoch[at]), "noise": log_noise[at].exp().item(),
                "precision": precision, **score(posterior, problem.classes, *tests[split]),
            })
    took = time.perf_counter() - start
    return {"seconds": took, "N": problem.x.shape[1], "largest_difference": largest, "splits": rows}


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean and its standard error."""
    spread = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(np.mean(values)), spread


def report(results: dict[str, Any]) -> str:
    """Ours beside the paper's; a star where the two differ by more than two standard errors."""
    header = ["data", "structure", "Bayes", "paper", "MAP", "paper ", "best epoch"]
    lines = []
    for name, found in results.items():
        for structure, splits in found["splits"].items():
            cells = [name, structure]
            for place, predictive in enumerate(("Bayes", "MAP")):
                mean, error = mean_and_error([row[predictive]["nll"] for row in splits])
                paper = PAPER.get(name, {}).get(structure)
                far = paper is not None and abs(mean - paper[place][0]) > 2 * math.hypot(error, paper[place][1])
                cells += [f"{mean:.2f} ± {error:.2f}{' *' if far else ''}",
                          "-" if paper is None else f"{paper[place][0]:.2f} ± {paper[place][1]:.2f}"]
            lines.append([*cells, f"{np.median([row['epoch'] for row in splits]):.0f}"])
    text = table(header, lines)
    classes = [(name, found) for name, found in results.items() if "accuracy" in found["splits"]["ggn"][0]["MAP"]]
    if not classes:
        return text
    more = []
    for name, found in classes:
        for structure, splits in found["splits"].items():
            cells = [name, structure]
            for predictive in ("Bayes", "MAP"):
                for score_name, factor in (("accuracy", 100), ("ece", 1)):
                    mean, error = mean_and_error([row[predictive][score_name] * factor for row in splits])
                    digits = 1 if factor == 100 else 2
                    cells.append(f"{mean:.{digits}f} ± {error:.{digits}f}")
            more.append(cells)
    header = ["data", "structure", "Bayes accuracy", "Bayes ECE", "MAP accuracy", "MAP ECE"]
    return text + "\n\n" + table(header, more)


def main() -> None:
    """Run the data sets, one after the other."""
    arguments = parser(__doc__, "uci")
    arguments.add_argument("--data", type=Path, help="folder of the .npz files; scikit-learn's data otherwise")
    arguments.add_argument("--datasets", nargs="+", help="some of them (default all)")
    arguments.add_argument("--splits", type=int, default=3)
    arguments.add_argument("--epochs", type=int, default=10_000)
    arguments.add_argument("--rate", type=float, default=1e-3, help="Adam's, for weights and hyperparameters")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    if options.small:
        options.splits, options.epochs = min(options.splits, 2), min(options.epochs, 150)
    names = options.datasets or (["diabetes", "breast_cancer"] if options.data is None else [*REGRESSION, *CLASSES])
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / "uci.json"
    chosen = {"splits": options.splits, "epochs": options.epochs, "rate": options.rate}
    results: dict[str, Any] = {}
    if kept.exists() and (before := json.loads(kept.read_text()))["options"] == chosen:
        results = before["results"]
    for name in names:
        if name not in results:
            results[name] = run(name, options)
        write(kept, {"machine": machine(options.threads), "options": chosen, "results": results})
    print(report({name: results[name] for name in names}))
    apart = {name: results[name]["largest_difference"] for name in names}
    if max(apart.values()) > AGREEMENT:
        sys.exit(f"the library's evidence differs from the batched program's, relative to 1 + its size: {apart}")


if __name__ == "__main__":
    main()
