"""What [I21] leaves open in its UCI protocol, and what it does to the test scores.

    python examples/uci/protocol.py --data DIR --dataset energy --structures diag-ef --changes fisher --out protocol

`uci.py` trains with full batches, Adam's default rate of 1e-3 for the weights, the log precisions and log σ², and the
empirical Fisher of the likelihood. This script trains the networks of one data set with one of these changed at a time:
* none: as `uci.py` has it;
* minibatch, minibatch-256: minibatches of 64 or of 256;
* rate, hyper: ten times the rate for all, or for the hyperparameters alone;
* hyper-256, hyper-0.1, hyper-1: as hyper, with minibatches of 256, or at that rate;
* hyper-halved: as hyper and halved;
* decay: the weights' rate falls to 1e-6 by equal factors, for which the authors' published code has an option;
* layer, one: a precision for each layer, or one for all, instead of one for each tensor; one-hyper,
  one-halved: one, and hyper or halved;
* sigma: Adam on log σ, as in the code that the authors published, which moves log σ² twice as fast;
* fisher, halved: in regression with the structures "ef" and "diag-ef", the empirical Fisher of the squared error over
  σ², r²JᵀJ/σ²; or 2r²JᵀJ/σ², as in laplace-torch, which halves the products of the gradients of r²;
* mean, mean-hyper: the weights' loss in units of the mean squared error, as the authors published it; that and hyper;
* authors: sigma and, for an empirical Fisher, halved;
* single: the same in float32;
* raw: as authors, with responses in their own units instead of standardized ones;
* held: a tenth of the training data left out, as for a validation.
It prints the negative test log likelihoods, in the original units, of the MAP and the Bayesian predictive at the state
of highest evidence and at the last, as mean ± standard error over the splits and, in brackets, the distance from the
paper's in standard errors; and the noise of highest evidence. In regression "Bayes, f once" and "Bayes, f not" are
Bayesian predictives as slips in their units would make them: the variance of f brought to the original units by the
responses' deviation, or not at all, that of the noise by its square. It writes both states of each training, which it
does not train again, and protocol.json, also with the groups' precisions, effective parameters γ_g and δ_g‖θ_g‖² of
both.
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
from _batched import STRUCTURES, Networks, Problem, Protocol, evidence, train_with_evidence
from torch import Tensor
from torch.distributions import Categorical, Normal
from uci import PAPER, STRUCTURE_SPECS, mean_and_error, standardised

import ntk_laplace as ntkl

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _shared import machine, parser, table, write

CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("as in uci.py", {}),
    "minibatch": ("minibatches of 64", {"minibatch": 64}),
    "minibatch-256": ("minibatches of 256", {"minibatch": 256}),
    "rate": ("rate 0.01", {"rate": 1e-2}),
    "hyper": ("rate 0.01 for hyperparameters", {"hyper_rate": 1e-2}),
    "hyper-halved": ("rate 0.01 for hyperparameters, twice the Fisher of the squared error / σ²",
                     {"hyper_rate": 1e-2, "squared_error_fisher": 2.0}),
    "hyper-256": ("rate 0.01 for hyperparameters, minibatches of 256", {"hyper_rate": 1e-2, "minibatch": 256}),
    "hyper-0.1": ("rate 0.1 for hyperparameters", {"hyper_rate": 0.1}),
    "hyper-1": ("rate 1 for hyperparameters", {"hyper_rate": 1.0}),
    "decay": ("rate of weights falls to 1e-6", {"last_rate": 1e-6}),
    "layer": ("a precision for each layer", {"groups": (0, 0, 1, 1)}),
    "one": ("one precision", {"groups": (0, 0, 0, 0)}),
    "one-hyper": ("one precision, rate 0.01 for hyperparameters", {"groups": (0, 0, 0, 0), "hyper_rate": 1e-2}),
    "one-halved": ("one precision, twice the Fisher of the squared error / σ²",
                   {"groups": (0, 0, 0, 0), "squared_error_fisher": 2.0}),
    "sigma": ("Adam on log σ", {"noise_speed": 2.0}),
    "fisher": ("Fisher of the squared error / σ²", {"squared_error_fisher": 1.0}),
    "halved": ("twice that Fisher", {"squared_error_fisher": 2.0}),
    "mean": ("loss in units of the mean squared error", {"mean_loss": True}),
    "mean-hyper": ("loss in units of the mean squared error, rate 0.01 for hyperparameters",
                   {"mean_loss": True, "hyper_rate": 1e-2}),
    "authors": ("as the authors' code", {"noise_speed": 2.0, "squared_error_fisher": 2.0}),
    "single": ("as the authors' code, float32",
               {"noise_speed": 2.0, "squared_error_fisher": 2.0, "single": True}),
    "raw": ("as the authors' code, responses as they are", {"noise_speed": 2.0, "squared_error_fisher": 2.0}),
    "held": ("as the authors' code, a tenth left out", {"noise_speed": 2.0, "squared_error_fisher": 2.0}),
}
NOISE = ("sigma", "fisher", "halved", "hyper-halved", "one-halved", "mean", "mean-hyper", "authors", "raw")
PREDICTIVES = ("Bayes", "MAP", "Bayes, f once", "Bayes, f not")


def variants(changes: list[str], structure: str, classes: bool, epochs: int) -> dict[str, Protocol]:
    """Those of the changes that make a difference to a structure."""
    found = {}
    for change in changes:
        label, what = CHANGES[change]
        if change in ("fisher", "halved", "hyper-halved", "one-halved", "sigma") and not structure.endswith("ef"):
            continue  # nothing, or the same as "authors"
        if classes and change in NOISE:
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
    form, curvature = STRUCTURE_SPECS[structure]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ntkl.NTKLaplaceWarning)
        return ntkl.laplace(network, (problem.x[split], y), likelihood, prior, form, curvature)


def scores(
    networks: Networks, hyper: list[Tensor], problem: Problem, structure: str, squared_error: float | None,
    tests: list[tuple[Tensor, Tensor, float]],
) -> dict[str, list[float]]:
    """Negative log likelihoods of each split's test data, MAP and Bayesian predictives, original units."""
    found: dict[str, list[float]] = {name: [] for name in (PREDICTIVES[:2] if problem.classes else PREDICTIVES)}
    for split, (x, y, spread) in enumerate(tests):
        noise = hyper[1][split].double().exp().item()
        # c r²/σ² is c σ² times the likelihood's r²/σ⁴; so are H and the inverse of V with precisions over c σ²
        scale = 1.0 if squared_error is None or not structure.endswith("ef") else squared_error * noise
        posterior = posterior_of(networks, hyper, problem, structure, split, scale)
        if problem.classes:
            densities = [posterior.predict(x, "glm"), Categorical(logits=networks.one(split)(x))]
        else:
            mean, covariance = posterior.latent_moments(x)
            mean, variance = mean.squeeze(-1), covariance.flatten() / scale
            # var[f] s + σ²s², or var[f] + σ²s², instead of (var[f] + σ²)s²: var[f]/s or /s² for standardized responses
            scaled = [variance / spread**power + noise for power in range(3)]
            variances = scaled[0], torch.full_like(mean, noise), *scaled[1:]
            densities = [Normal(mean, both.sqrt()) for both in variances]
        for name, density in zip(found, densities, strict=True):
            found[name].append(math.log(spread) - density.log_prob(y).mean().item())
    return found


def kept(out: Path, name: str, structure: str, change: str, splits: int, epochs: int) -> Path:
    """Where the states of one training are."""
    return out / f"{name}_{structure}_{change}_{splits}_{epochs}.pt"


def load(networks: Networks, state: list[Tensor]) -> Networks:
    """The weights of a state, whose hyperparameters come last, put into the networks."""
    with torch.no_grad():
        for parameter, own in zip(networks.parameters(), state, strict=False):
            parameter.copy_(own)
    return networks


def states(problem: Problem, structure: str, protocol: Protocol, file: Path) -> dict[str, Any]:
    """Train the splits' networks, unless the file holds them: the states of highest evidence and the last."""
    if file.exists():
        return torch.load(file)
    count, start = len(problem.x), time.perf_counter()

    def tell(epoch: int) -> None:
        took = time.perf_counter() - start
        print(f"{structure}, {protocol}: epoch {epoch:,}, {took:.0f} s", file=sys.stderr, flush=True)

    networks = Networks(problem, count)
    best = train_with_evidence(problem, networks, {structure: slice(0, count)}, protocol, tell)
    found = {"best": best.tensors, "last": best.last, "epoch": best.epoch}
    torch.save(found, file)
    return found


def run(problem: Problem, tests: list[Any], structure: str, protocol: Protocol, file: Path) -> dict[str, Any]:
    """Scores of the last states, and of those of highest evidence."""
    trained = states(problem, structure, protocol, file)
    networks = Networks(problem, len(tests))
    found: dict[str, Any] = {"noise": trained["best"][-1].exp().tolist(), "epoch": trained["epoch"].tolist()}
    for state in ("best", "last"):
        load(networks, trained[state])
        twice = protocol.squared_error_fisher if not problem.classes else None
        hyper = [tensor.double() for tensor in trained[state][-2:]]
        found[state] = scores(networks, hyper, problem, structure, twice, tests)
        value, slope, _ = evidence(problem, networks, {structure: slice(0, len(tests))}, *hyper, twice)
        found[state] |= norms_and_effective(hyper[0], networks.squares().detach(), slope) | {"evidence": value.tolist()}
    return found


def norms_and_effective(log_precision: Tensor, squares: Tensor, slope: Tensor) -> dict[str, list[list[float]]]:
    """δ_g‖θ_g‖² and γ_g of each network's groups, whose difference is twice the evidence's slope in log δ_g."""
    precision = log_precision.exp()
    found = {"precision": precision, "norms": precision * squares, "effective": precision * squares + 2 * slope}
    return {name: value.tolist() for name, value in found.items()}


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
            for predictive in PREDICTIVES:
                if predictive not in own[state]:
                    cells.append("")
                    continue
                mean, error = mean_and_error(own[state][predictive])
                cells.append(f"{mean:.2f} ± {error:.2f}")
                if paper is not None:
                    theirs = paper[predictive == "MAP"]
                    cells[-1] += f" ({(mean - theirs[0]) / math.hypot(error, theirs[1]):+.1f})"
        noise = torch.tensor(own["noise"]).median().item()
        epoch = torch.tensor(own["epoch"]).median().item()
        rows.append([*cells, f"{noise:.2g}", str(epoch)])
    if paper is not None:
        scores_of_paper = [f"{mean:.2f} ± {error:.2f}" for mean, error in paper]
        rows.append([structure, "[I21]", *scores_of_paper, *[""] * (2 * len(PREDICTIVES))])
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
              CHANGES["raw"][0]: standardised(*arguments_of_data, responses=False)}
    options.out.mkdir(parents=True, exist_ok=True)
    report = options.out / "protocol.json"
    chosen = {"dataset": name, "splits": options.splits, "epochs": options.epochs}
    results: dict[str, Any] = {}
    if report.exists() and (before := json.loads(report.read_text()))["options"] == chosen:
        results = before["results"]
    shown: dict[str, Any] = {}
    short = {label: change for change, (label, _) in CHANGES.items()}
    for structure in options.structures:
        shown[structure] = {}
        for label, protocol in variants(options.changes, structure, classes, options.epochs).items():
            file = kept(options.out, name, structure, short[label], options.splits, options.epochs)
            found = run(*others.get(label, usual), structure, protocol, file)
            results.setdefault(structure, {})[label] = shown[structure][label] = found
            write(report, {"machine": machine(options.threads), "options": chosen, "results": results})
            print(lines(name, structure, shown[structure]), file=sys.stderr, flush=True)
    print(f"{name}, {options.splits} splits, {options.epochs:,} epochs\n")
    header = ["structure", "protocol", *PREDICTIVES, *(f"{one}, last epoch" for one in PREDICTIVES), "σ²", "best epoch"]
    print(table(header, [row for structure, found in shown.items() for row in lines(name, structure, found)]))


if __name__ == "__main__":
    main()
