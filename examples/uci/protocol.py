"""What [I21] leaves open in its UCI protocol, and what it does to the test scores.

    python examples/uci/protocol.py --data DIR --dataset energy --structures diag-ef --changes fisher --out protocol

`uci.py` trains with full batches, Adam's default rate of 1e-3 for the weights, the log precisions and log σ², and the
empirical Fisher of the likelihood. This script trains the networks of one data set with one of these changed at a time:
* none: as `uci.py` has it;
* minibatch, rate, hyper: minibatches of 64; ten times the rate for all, or for the hyperparameters alone;
* sigma: Adam on log σ, as in the code that the authors published, which moves log σ² twice as fast;
* fisher, halved: in regression with the structures "ef" and "diag-ef", the empirical Fisher of the squared error over
  σ², r²JᵀJ/σ²; or 2r²JᵀJ/σ², as in laplace-torch, which halves the products of the gradients of r²;
* authors: sigma and, for an empirical Fisher, halved;
* single: the same in float32;
* raw: as authors, with responses in their own units instead of standardized ones;
* held: a tenth of the training data left out, as for a validation.
It prints the negative test log likelihoods, in the original units, of the MAP and the Bayesian predictive at the state
of highest evidence and at the last, as mean ± standard error over the splits and, in brackets, the distance from the
paper's in standard errors; and the noise of highest evidence. It writes protocol.json, which it adds to: what is there
already with the same splits and epochs is kept.
"""

from __future__ import annotations

import json
import math
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from _batched import STRUCTURES, Networks, Problem, Protocol, train_with_evidence
from torch import Tensor
from torch.distributions import Categorical, Normal
from uci import FORMS, PAPER, mean_and_error, standardised

import ntk_laplace as ntkl

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _shared import machine, parser, table, write

CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("as in uci.py", {}),
    "minibatch": ("minibatches of 64", {"minibatch": 64}),
    "rate": ("rate 0.01", {"rate": 1e-2}),
    "hyper": ("rate 0.01 for hyperparameters", {"hyper_rate": 1e-2}),
    "sigma": ("Adam on log σ", {"noise_speed": 2.0}),
    "fisher": ("Fisher of the squared error / σ²", {"squared_error_fisher": 1.0}),
    "halved": ("twice that Fisher", {"squared_error_fisher": 2.0}),
    "authors": ("as the authors' code", {"noise_speed": 2.0, "squared_error_fisher": 2.0}),
    "single": ("as the authors' code, float32",
               {"noise_speed": 2.0, "squared_error_fisher": 2.0, "single": True}),
    "raw": ("as the authors' code, responses as they are", {"noise_speed": 2.0, "squared_error_fisher": 2.0}),
    "held": ("as the authors' code, a tenth left out", {"noise_speed": 2.0, "squared_error_fisher": 2.0}),
}  # fmt: skip


def variants(changes: list[str], structure: str, classes: bool, epochs: int) -> dict[str, Protocol]:
    """Those of the changes that make a difference to a structure."""
    found = {}
    for change in changes:
        label, what = CHANGES[change]
        if change in ("fisher", "halved", "sigma") and not structure.endswith("ef"):
            continue  # nothing, or the same as "authors"
        if classes and change not in ("none", "minibatch", "rate", "hyper", "single", "held"):
            continue  # there is no σ
        found[label] = Protocol(epochs, **what)
    return found


def posterior_of(
    networks: Networks, hyper: list[Tensor], problem: Problem, structure: str, split: int, scale: float
) -> ntkl.Posterior:
    """The library's posterior of one split with all precisions divided by `scale`."""
    log_precision, log_noise = (tensor[split] for tensor in hyper)
    network = networks.one(split)
    names = [name for name, _ in network.named_parameters()]
    precision = (log_precision.double().exp() / scale).tolist()
    prior = ntkl.GaussianPrior(dict(zip(names, precision, strict=True)), groups="tensor")
    likelihood = ntkl.Categorical() if problem.classes else ntkl.Gaussian(noise=log_noise.double().exp().item())
    y = problem.y[split] if problem.classes else problem.y[split][:, None]
    form, curvature = FORMS[structure]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ntkl.NTKLaplaceWarning)
        return ntkl.laplace(network, (problem.x[split], y), likelihood, prior, form, curvature)


def scores(
    networks: Networks, hyper: list[Tensor], problem: Problem, structure: str, squared_error: float | None,
    tests: list[tuple[Tensor, Tensor, float]],
) -> dict[str, list[float]]:
    """Negative log likelihoods of each split's test data, MAP and Bayesian predictive, original units."""
    found: dict[str, list[float]] = {"MAP": [], "Bayes": []}
    for split, (x, y, spread) in enumerate(tests):
        noise = hyper[1][split].double().exp().item()
        # c r²/σ² is c σ² times the likelihood's r²/σ⁴; so are H and the inverse of V with precisions over c σ²
        scale = 1.0 if squared_error is None or not structure.endswith("ef") else squared_error * noise
        posterior = posterior_of(networks, hyper, problem, structure, split, scale)
        if problem.classes:
            both = Categorical(logits=networks.one(split)(x)), posterior.predict(x, "glm")
        else:
            mean, covariance = posterior.latent_moments(x)
            mean, variance = mean.squeeze(-1), covariance.flatten() / scale
            both = Normal(mean, math.sqrt(noise)), Normal(mean, (variance + noise).sqrt())
        for name, density in zip(found, both, strict=True):
            found[name].append(math.log(spread) - density.log_prob(y).mean().item())
    return found


def run(problem: Problem, tests: list[Any], structure: str, protocol: Protocol) -> dict[str, Any]:
    """Train the splits' networks and score the last states, and those of highest evidence."""
    count, start = len(tests), time.perf_counter()

    def tell(epoch: int) -> None:
        took = time.perf_counter() - start
        print(f"{structure}, {protocol}: epoch {epoch:,}, {took:.0f} s", file=sys.stderr, flush=True)

    networks = Networks(problem, count)
    best = train_with_evidence(problem, networks, {structure: slice(0, count)}, protocol, tell)
    states = {"best": best.tensors, "last": [tensor.clone() for tensor in best.last]}
    found: dict[str, Any] = {"noise": best.tensors[-1].exp().tolist(), "epoch": best.epoch.tolist()}
    for state, tensors in states.items():
        with torch.no_grad():
            for parameter, kept in zip(networks.parameters(), tensors, strict=False):
                parameter.copy_(kept)
        twice = protocol.squared_error_fisher if not problem.classes else None
        found[state] = scores(networks, tensors[-2:], problem, structure, twice, tests)
    return found


def without_a_tenth(problem: Problem) -> Problem:
    """The first nine tenths; the order is random already."""
    kept = round(0.9 * problem.y.shape[1])
    return Problem(problem.x[:, :kept], problem.y[:, :kept], problem.classes)


def lines(name: str, structure: str, found: dict[str, Any]) -> list[list[str]]:
    """A row for each protocol: scores with their distances from the paper's, noise, epoch."""
    rows = []
    paper = PAPER.get(name, {}).get(structure)
    for label, own in found.items():
        cells = [structure, label]
        for state in ("best", "last"):
            for place, predictive in enumerate(("Bayes", "MAP")):
                mean, error = mean_and_error(own[state][predictive])
                cells.append(f"{mean:.2f} ± {error:.2f}")
                if paper is not None:
                    cells[-1] += f" ({(mean - paper[place][0]) / math.hypot(error, paper[place][1]):+.1f})"
        noise = torch.tensor(own["noise"]).median().item()
        epoch = torch.tensor(own["epoch"]).median().item()
        rows.append([*cells, f"{noise:.2g}", str(epoch)])
    if paper is not None:
        scores_of_paper = [f"{mean:.2f} ± {error:.2f}" for mean, error in paper]
        rows.append([structure, "[I21]", *scores_of_paper, "", "", "", ""])
    return rows


def main() -> None:
    """One data set; some structures, all variants or some."""
    arguments = parser(__doc__, "protocol")
    arguments.add_argument("--data", type=Path, help="folder of the .npz files; scikit-learn's diabetes otherwise")
    arguments.add_argument("--dataset", default=None, help="boston, ... or ionosphere")
    arguments.add_argument("--structures", nargs="+", choices=STRUCTURES, default=["diag-ef"])
    arguments.add_argument("--changes", nargs="*", choices=CHANGES, default=list(CHANGES), help="some of them (all)")
    arguments.add_argument("--splits", type=int, default=3)
    arguments.add_argument("--epochs", type=int, default=10_000)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    if options.small:
        options.splits, options.epochs = 2, 40
    name = options.dataset or ("diabetes" if options.data is None else "energy")
    arguments_of_data = name, options.data, options.splits, 60 if options.small else None
    usual = standardised(*arguments_of_data)
    classes = usual[0].classes
    others = {CHANGES["held"][0]: (without_a_tenth(usual[0]), usual[1]),
              CHANGES["raw"][0]: standardised(*arguments_of_data, responses=False)}  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / "protocol.json"
    chosen = {"dataset": name, "splits": options.splits, "epochs": options.epochs}
    results: dict[str, Any] = {}
    if kept.exists() and (before := json.loads(kept.read_text()))["options"] == chosen:
        results = before["results"]
    shown: dict[str, Any] = {}
    for structure in options.structures:
        known = results.setdefault(structure, {})
        shown[structure] = {}
        for label, protocol in variants(options.changes, structure, classes, options.epochs).items():
            if label not in known:
                known[label] = run(*others.get(label, usual), structure, protocol)
                write(kept, {"machine": machine(options.threads), "options": chosen, "results": results})
            shown[structure][label] = known[label]
            print(lines(name, structure, shown[structure]), file=sys.stderr, flush=True)
    print(f"{name}, {options.splits} splits, {options.epochs:,} epochs\n")
    header = ["structure", "protocol", "Bayes", "MAP", "Bayes, last epoch", "MAP, last epoch", "σ²", "best epoch"]
    print(table(header, [row for structure, found in shown.items() for row in lines(name, structure, found)]))


if __name__ == "__main__":
    main()
