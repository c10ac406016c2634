"""Lower bounds of the evidence from blocks ([I23] theorems 1 to 3), and training with one of them, on digits.

    python examples/benchmarks/bounds.py --threads 1

Scikit-learn's digits, the first N = 300, MLP 64-64-64-10 (tanh, P = 8,970), float64, one precision for each layer. It
prints
* the bounds beside the exact evidence of a trained network: M = N, N/2, N/4 and N/10 examples in a block, one output
  for each example, the parameters layer by layer and one by one, with the seconds of each;
* the seconds of one hyperparameter step (evidence and gradient) from all examples and from M = N/10, each with a fit;
* two trainings with the same start and minibatches: hyperparameter steps on the exact evidence, and on the bound from
  M = N/10 examples that grows at the end. Goals: a step takes at most a tenth of a whole evidence's time, and the
  exact evidence after the last epoch is within 2 %. The best evidence of the training is beside it.
``--small`` takes 60 digits and an MLP 64-8-10.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from _common import best_times, machine, parser, ratio, seconds, table, write
from _networks import digits, mlp, train
from torch import Tensor, nn

import ntk_laplace as ntkl

WIDTHS, SMALL = (64, 64, 64, 10), (64, 8, 10)


def network_of(widths: tuple[int, ...]) -> nn.Module:
    """The start that all trainings share."""
    torch.manual_seed(0)
    return mlp(widths).double()


def prior() -> ntkl.GaussianPrior:
    """One precision for each layer."""
    return ntkl.GaussianPrior(1.0, groups="layer")


def fit(network: nn.Module, x: Tensor, y: Tensor) -> ntkl.Posterior:
    """The exact posterior in function space."""
    return ntkl.laplace(network, (x, y), ntkl.Categorical(), prior(), settings=ntkl.Settings(progress=False))


def bounds(posterior: ntkl.Posterior) -> list[dict[str, Any]]:
    """Every bound with its seconds; all blocks are used, so that each is certain."""
    n, found = posterior.num_examples, []
    cases: list[tuple[str, dict[str, Any]]] = [(f"M = N/{k}" if k > 1 else "M = N", {"examples": -(-n // k)})
                                               for k in (1, 2, 4, 10)]
    quarter = {"examples": -(-n // 4)}
    cases += [("one output, M = N", {"outputs": "one"}), ("one output, M = N/4", quarter | {"outputs": "one"}),
              ("layers", {"parameters": "layers"}), ("diagonal", {"parameters": "diagonal"}),
              ("layers, M = N/4", quarter | {"parameters": "layers"})]
    for name, options in cases:
        start = time.perf_counter()
        bound = posterior.evidence_bound(**options)
        found.append({"name": name, "value": float(bound), "seconds": time.perf_counter() - start,
                      "blocks": bound.num_blocks})
    return found


def step(network: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    """Fit, evidence and its gradient, nothing cached before."""

    def run() -> Tensor:
        posterior = fit(network, x, y)
        return torch.autograd.grad(posterior.log_det(), posterior.prior.log_precision)[0]

    return run


def trained(x: Tensor, y: Tensor, options: argparse.Namespace, **evidence: Any) -> dict[str, Any]:
    """One training; the exact evidence at its end, and its seconds."""
    network = network_of(options.widths)
    schedule = ntkl.EvidenceSchedule(options.frequency, options.steps)
    start = time.perf_counter()
    result = ntkl.train_with_evidence(
        network, (x, y), ntkl.Categorical(), prior(), "gp", epochs=options.epochs, batch_size=options.batch,
        schedule=schedule, optimizer=lambda p: torch.optim.Adam(p, lr=2e-3), settings=ntkl.Settings(progress=False),
        **evidence,
    )
    return {
        "seconds": time.perf_counter() - start, "evidence": float(result.posterior.evidence()),
        "precisions": result.posterior.prior.precision.tolist(), "history": result.history.to_dict(),
    }


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__, "bounds.json")
    arguments.add_argument("--examples", type=int, default=300, help="N (default 300)")
    arguments.add_argument("--subset", type=int, help="M of the steps (default N/10)")
    arguments.add_argument("--epochs", type=int, default=200, help="of the trainings (default 200)")
    arguments.add_argument("--frequency", type=int, default=10, help="F (default 10)")
    arguments.add_argument("--steps", type=int, default=10, help="K (default 10)")
    arguments.add_argument("--batch", type=int, default=64, help="minibatch (default 64)")
    options = arguments.parse_args()
    options.widths = WIDTHS
    if options.small:
        options.examples, options.widths, options.epochs, options.frequency = 60, SMALL, 6, 2
    torch.set_num_threads(options.threads)
    n = options.examples
    x, y = (each[:n] for each in digits())
    network = network_of(options.widths)
    train(network, x, y, 1.0)
    posterior = fit(network, x, y)
    exact = float(posterior.evidence())
    found = bounds(posterior)
    widths = "-".join(map(str, options.widths))
    print(f"N={n:,}, MLP {widths}, P={posterior.num_parameters:,}; exact evidence {exact:.3f} nats\n")
    rows = [[each["name"], f"{each['blocks']}", f"{each['value']:.2f}",
             f"{100 * (exact - each['value']) / abs(exact):.1f} %", seconds(each["seconds"])]
            for each in found]
    print(table(["bound", "blocks", "nats", "below the exact evidence", "time"], rows))

    m = options.subset or max(1, n // 10)
    times = best_times({
        "evidence": lambda: fit(network, x, y).log_det(), "step": step(network, x, y),
        "subset step": step(network, x[:m], y[:m]),
    }, options.repeats)
    print(f"\nwhole evidence {seconds(times['evidence'])}, with its gradient {seconds(times['step'])}; from M = {m} "
          f"{seconds(times['subset step'])}, {ratio(times['subset step'], times['evidence'])} of the whole evidence "
          "(goal: at most 0.1x)\n")

    runs = {"exact": trained(x, y, options), f"M = {m}": trained(x, y, options, evidence="subset", examples=m)}
    ends = {name: run["history"]["evidence"][-1] for name, run in runs.items()}
    whole = ends["exact"]
    rows = [[name, f"{ends[name]:.2f}", f"{100 * (ends[name] - whole) / abs(whole):+.2f} %",
             f"{run['evidence']:.2f}", seconds(run["seconds"]),
             ", ".join(f"{value:.3g}" for value in run["precisions"]),
             ", ".join(map(str, run["history"]["examples"])) or "all"] for name, run in runs.items()]
    print(table(["steps on", "exact evidence, last", "above the first", "best", "time", "precisions", "M"], rows))
    print("\ngoal: at the end within 2 % of the exact schedule")
    result = {"exact": exact, "bounds": found, "times": times, "trainings": runs, "examples": n, "m": m}
    write(options.out, {"machine": machine(options.threads)} | result)


if __name__ == "__main__":
    main()
