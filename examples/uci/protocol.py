"""What [I21] leaves open in its UCI protocol, and what it does to the test scores.

    python examples/uci/protocol.py --data DIR --dataset energy --structure diag-ef --out protocol

`uci.py` trains with full batches, Adam's default rate of 1e-3, and the empirical Fisher of the likelihood. This script
trains the networks of one data set and structure with one of these changed at a time: minibatches of 64; ten times the
rate; in regression, the empirical Fisher of the squared error divided by σ² (structures "ef" and "diag-ef"). It prints
the negative test log likelihoods of the MAP predictive, in the original units, at the state of highest evidence and at
the last, and the noise found, as mean ± standard error over the splits, and writes protocol.json.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
from _batched import STRUCTURES, Networks, Problem, Protocol, train_with_evidence
from torch import Tensor
from torch.distributions import Categorical, Normal
from uci import PAPER, mean_and_error, standardised

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _shared import machine, parser, table, write

CHANGES = {
    "minibatch": ("minibatches of 64", {"minibatch": 64}),
    "rate": ("rate 0.01", {"rate": 1e-2}),
    "fisher": ("Fisher of the squared error / σ²", {"unit_noise_fisher": True}),
}


def variants(changes: list[str], structure: str, classes: bool, epochs: int) -> dict[str, Protocol]:
    """As `uci.py` has it, and one thing changed at a time."""
    found = {"as in uci.py": Protocol(epochs)}
    for change in changes:
        if change != "fisher" or (structure.endswith("ef") and not classes):
            label, what = CHANGES[change]
            found[label] = Protocol(epochs, **what)
    return found


def scores(
    networks: Networks, log_noise: Tensor, classes: bool, tests: list[tuple[Tensor, Tensor, float]]
) -> list[float]:
    """Negative log likelihood of each split's test data, MAP predictive, original units."""
    found = []
    for split, (x, y, scale) in enumerate(tests):
        with torch.no_grad():
            f = networks.one(split)(x)
        deviation = (0.5 * log_noise[split]).exp()
        density = Categorical(logits=f) if classes else Normal(f.squeeze(-1), deviation)
        found.append(math.log(scale) - density.log_prob(y).mean().item())
    return found


def run(problem: Problem, tests: list[Any], structure: str, protocol: Protocol) -> dict[str, Any]:
    """Train the splits' networks and score the last states, and those of highest evidence."""
    count = len(tests)
    networks = Networks(problem, count)
    best = train_with_evidence(problem, networks, {structure: slice(0, count)}, protocol, lambda epoch: None)
    found: dict[str, Any] = {"last": scores(networks, best.last[-1], problem.classes, tests)}
    with torch.no_grad():
        for parameter, kept in zip(networks.parameters(), best.tensors, strict=False):
            parameter.copy_(kept)
    noise = best.tensors[-1]
    found["nll"] = scores(networks, noise, problem.classes, tests)
    return found | {"noise": noise.exp().tolist(), "epoch": best.epoch.tolist()}


def main() -> None:
    """One data set and structure, all variants or some."""
    arguments = parser(__doc__, "protocol")
    arguments.add_argument("--data", type=Path, help="folder of the .npz files; scikit-learn's diabetes otherwise")
    arguments.add_argument("--dataset", default=None, help="boston, ... or ionosphere")
    arguments.add_argument("--structure", choices=STRUCTURES, default="diag-ef")
    arguments.add_argument("--changes", nargs="+", choices=CHANGES, default=list(CHANGES), help="some of them (all)")
    arguments.add_argument("--splits", type=int, default=3)
    arguments.add_argument("--epochs", type=int, default=10_000)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    if options.small:
        options.splits, options.epochs = 2, 40
    name = options.dataset or ("diabetes" if options.data is None else "energy")
    problem, tests = standardised(name, options.data, options.splits, 60 if options.small else None)
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    for label, protocol in variants(options.changes, options.structure, problem.classes, options.epochs).items():
        results[label] = run(problem, tests, options.structure, protocol)
        print(f"{label}: {results[label]['nll']}", file=sys.stderr, flush=True)
    lines = []
    for label, found in results.items():
        (nll, error), (last, wide) = mean_and_error(found["nll"]), mean_and_error(found["last"])
        noise = "" if problem.classes else f"{mean_and_error(found['noise'])[0]:.2g}"
        epoch = torch.tensor(found["epoch"]).median().item()
        lines.append([label, f"{nll:.2f} ± {error:.2f}", noise, str(epoch), f"{last:.2f} ± {wide:.2f}"])
    paper = PAPER.get(name, {}).get(options.structure)
    if paper is not None:
        lines.append(["[I21]", f"{paper[1][0]:.2f} ± {paper[1][1]:.2f}", "", "", ""])
    print(f"{name}, {options.structure}, {options.splits} splits, {options.epochs:,} epochs\n")
    header = ["protocol", "MAP, negative log likelihood", "σ², standardised", "best epoch", "MAP, last epoch"]
    print(table(header, lines))
    write(options.out / "protocol.json", {"machine": machine(options.threads), "results": results})


if __name__ == "__main__":
    main()
