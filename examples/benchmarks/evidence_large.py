"""Exact classification evidence where nobody else gives one: time and memory against their floors.

Scikit-learn digits, N=1,000, C=10, MLP 64-256-256-10 (P=85,002), float64, prior precision 1: B has 9,000 rows.
Command for both figures:

    python examples/benchmarks/evidence_large.py

* time: fit + evidence, against the sum of two things measured in turns with it: one ``torch.linalg.cholesky`` of a
  9,000 x 9,000 matrix, and the Gram's own matmuls, ``b @ b.T`` into a matrix that is already there for the output
  gradients b (9,000 x 256) of the two hidden layers, the full square. Goal: at most 1.5 times the sum. The same with
  the evidence's gradients in precision and temperature, for one precision and for one of each layer.
* memory: the peak of a fresh process minus what it held just before the call (imports, data, network and one
  small evidence done), against one dense B (9,000² x 8 bytes). Goal: at most 1.6 times; 1.25 times with gradients.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

import torch
from _common import best_times, in_process, machine, parser, peak_bytes, resident_bytes, table, write
from _networks import digits, mlp, train
from torch import Tensor, nn

import ntk_laplace as ntkl

WORKS = {  # what it is called, the goal of its time, the goal of its memory
    "evidence": ("fit + evidence", "<= 1.5x", "<= 1.6x"),
    "gradients": ("fit + evidence + gradients", "", "<= 1.25x"),
    "layers": ("the same with a precision for each layer", "", "<= 1.25x"),
}


def problem(num_examples: int, hidden: int) -> tuple[nn.Module, Tensor, Tensor]:
    """The trained network and its data."""
    x, y = digits()
    x, y = x[:num_examples], y[:num_examples]
    torch.manual_seed(0)
    network = train(mlp((64, hidden, hidden, 10)).double(), x, y, steps=100)
    return network, x, y


def evidence(network: nn.Module, x: Tensor, y: Tensor, work: str = "evidence") -> float:
    """Fit and evidence in function space, and its gradients in precisions and temperature if the work has them."""
    prior = ntkl.GaussianPrior(precision=1.0, groups="layer" if work == "layers" else "all")
    posterior = ntkl.laplace(network, (x, y), ntkl.Categorical(), prior=prior, structure="gp")
    value = posterior.log_marginal_likelihood()
    if work != "evidence":
        value.backward()
    return value.item()


def times(num_examples: int, hidden: int, repeats: int) -> dict[str, float]:
    """Best times of the evidence, of one Cholesky and of the Gram's matmuls, in turns."""
    network, x, y = problem(num_examples, hidden)
    rows = 9 * num_examples
    backward = torch.randn(rows, hidden, dtype=torch.float64)
    gram = torch.empty(rows, rows, dtype=torch.float64)

    def matmuls() -> None:
        for _ in range(2):
            torch.mm(backward, backward.T, out=gram)

    def cholesky() -> Tensor:
        return torch.linalg.cholesky(gram)

    def shift() -> None:
        gram.diagonal().add_(rows)

    tasks = {"gram": matmuls, "shift": shift, "cholesky": cholesky}
    tasks |= {work: lambda work=work: evidence(network, x, y, work) for work in WORKS}
    found = best_times(tasks, repeats)
    del found["shift"]
    return found


def memory(num_examples: int, hidden: int, work: str) -> dict[str, float]:
    """Peak bytes of one evidence above what the process held before. Run in a fresh process."""
    network, x, y = problem(num_examples, hidden)
    evidence(network, x[:20], y[:20], work)
    before = resident_bytes()
    value = evidence(network, x, y, work)
    return {"base_bytes": before, "peak_bytes": peak_bytes(), "evidence": value}


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__, "evidence_large.json")
    arguments.add_argument("--num-examples", type=int, default=1000, help="N (default 1000)")
    arguments.add_argument("--memory-only", choices=list(WORKS), help="print its memory figures as JSON and stop")
    options: argparse.Namespace = arguments.parse_args()
    torch.set_num_threads(options.threads)
    if options.small:
        options.num_examples, options.repeats = 20, 1
    n, hidden = options.num_examples, 8 if options.small else 256
    if options.memory_only:
        print(json.dumps(memory(n, hidden, options.memory_only)))
        return
    # The children come first: on Linux a process's peak begins with its parent's.
    given = ["--num-examples", str(n), "--threads", str(options.threads), "--memory-only"]
    children = {work: in_process(__file__, [*given, work], partial(memory, n, hidden, work), options.small)
                for work in WORKS}
    found = times(n, hidden, options.repeats)
    one = (9 * n) ** 2 * 8
    floor = found["cholesky"] + found["gram"]
    result: dict[str, Any] = {"machine": machine(options.threads), "num_examples": n, "seconds": found}
    result |= {"memory": children, "time_ratios": {}, "memory_ratios": {}}
    rows, more = [], []
    for work, (text, time_goal, memory_goal) in WORKS.items():
        extra = children[work]["peak_bytes"] - children[work]["base_bytes"]
        result["time_ratios"][work], result["memory_ratios"][work] = found[work] / floor, extra / one
        rows.append([text, f"{found[work]:.2f} s", f"{floor:.2f} s ({found['cholesky']:.2f} + {found['gram']:.2f})",
                     f"{found[work] / floor:.2f}x", time_goal])
        more.append([f"peak memory, {text}", f"{extra / 1e6:.0f} MB", f"{one / 1e6:.3g} MB", f"{extra / one:.2f}x",
                     memory_goal])
    value = children["evidence"]["evidence"]
    print(f"N={n}, C=10, MLP 64-{hidden}-{hidden}-10, float64; evidence {value:.6f} nats\n")
    print(table(["work", "ours", "floor (Cholesky + Gram matmuls; one B)", "ratio", "goal"], rows + more))
    write(options.out, result)


if __name__ == "__main__":
    main()
