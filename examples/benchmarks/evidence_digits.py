"""Exact GGN evidence and prediction of a small classifier, beside laplace-torch's full posterior.

Scikit-learn digits, N=300, C=10, MLP 64-64-64-10 (tanh, P=8,970), prior precision 1. Command for all figures:

    python examples/benchmarks/evidence_digits.py --peers-python PEERS/bin/python

where PEERS is an environment with ``torch==2.13.0 laplace-torch`` and no torchvision. It prints
* the time of fit + evidence and of the predictive of 100 points, ours and theirs, for a float32 network (the
  peer computes in float32, we do the algebra in float64), and their ratios. The predictive is the peer's
  default (linearised, probit) in both; ours with 1,000 samples through the softmax is beside it;
* the evidence of both for a float64 network, and the relative difference.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from _common import best_times, machine, parser, ratio, run_python, seconds, table, write
from _networks import digits, mlp, to_arrays, train
from torch import Tensor, nn

import ntk_laplace as ntkl

PRECISION = 1.0


def fit(
    network: nn.Module, x: Tensor, y: Tensor, structure: str = "gp", dtype: torch.dtype = torch.float64
) -> Any:
    """Our posterior, with algebra in ``dtype`` (the library's default is float64, for float32 networks as well)."""
    prior = ntkl.GaussianPrior(precision=PRECISION)
    return ntkl.laplace(network, (x, y), ntkl.Categorical(), prior=prior, structure=structure, dtype=dtype)


def fit_evidence(network: nn.Module, x: Tensor, y: Tensor, dtype: torch.dtype = torch.float64) -> float:
    """Fit and evidence, nothing cached before."""
    return fit(network, x, y, dtype=dtype).log_marginal_likelihood().item()


def ours(
    network: nn.Module, x: Tensor, y: Tensor, x_test: Tensor, repeats: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Best times of a fit with evidence and of the two predictives."""
    posterior = fit(network, x, y, dtype=dtype)
    tasks = {
        "fit_evidence_seconds": lambda: fit_evidence(network, x, y, dtype),
        "predict_probit_seconds": lambda: posterior.predict(x_test, method="probit").probs,
        "predict_glm_seconds": lambda: posterior.predict(x_test, method="glm", samples=1000).probs,
    }
    found: dict[str, Any] = best_times(tasks, repeats, warmup=2)
    found["probabilities"] = posterior.predict(x_test, method="probit").probs
    return found


def peer(python: str, network: nn.Module, x: Tensor, y: Tensor, x_test: Tensor, *options: str) -> dict[str, Any]:
    """laplace-torch in its own interpreter."""
    arrays = to_arrays(network)
    arrays |= {"x": x.numpy(), "y": y.numpy(), "x_test": x_test.numpy(), "precision": torch.tensor(PRECISION)}
    start = time.perf_counter()
    found = run_python(python, ["_peer_laplace_torch.py", *options], arrays)
    print(f"laplace-torch {' '.join(options)}: {time.perf_counter() - start:.0f} s in all", flush=True)
    return found


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__, "evidence_digits.json")
    arguments.add_argument("--peers-python", help="interpreter that has laplace-torch; without it ours alone")
    options: argparse.Namespace = arguments.parse_args()
    torch.set_num_threads(options.threads)

    x, y = digits()
    n, widths = 300, (64, 64, 64, 10)
    if options.small:
        n, widths, options.repeats, options.peers_python = 12, (64, 8, 10), 1, None
    x, y, x_test = x[:n], y[:n], x[n : n + 100]
    torch.manual_seed(0)
    network = train(mlp(widths).double(), x, y, PRECISION)
    double = {
        "gp": fit_evidence(network, x, y),
        "full": fit(network, x, y, "full").log_marginal_likelihood().item(),
    }
    theirs_double: dict[str, Any] = {}
    if options.peers_python:
        theirs_double = peer(options.peers_python, network, x, y, x_test, "--dtype", "float64")

    network, x, x_test = network.float(), x.float(), x_test.float()
    mine = ours(network, x, y, x_test, options.repeats, torch.float32)
    mine["float64"] = ours(network, x, y, x_test, options.repeats, torch.float64)
    theirs: dict[str, Any] = {}
    if options.peers_python:
        theirs = peer(options.peers_python, network, x, y, x_test, "--dtype", "float32", "--predict")
    else:
        print("laplace-torch left out: give its interpreter with --peers-python", file=sys.stderr)
    title = f"N={n}, C=10, P={sum(p.numel() for p in network.parameters()):,}"
    report(options, title, mine, theirs, double, theirs_double)


def report(
    options: argparse.Namespace,
    title: str,
    mine: dict[str, Any],
    theirs: dict[str, Any],
    double: dict[str, float],
    theirs_double: dict[str, Any],
) -> None:
    """Print the table and write the JSON."""
    for found in (theirs, theirs_double):
        if "error" in found:
            print("laplace-torch failed:", found["error"])
    fit_theirs = theirs["fit_seconds"] + theirs["evidence_seconds"] if "fit_seconds" in theirs else None
    predict_theirs = theirs.get("predict_seconds")
    fit_mine, predict_mine = mine["fit_evidence_seconds"], mine["predict_probit_seconds"]
    glm = mine["predict_glm_seconds"]
    rows = [
        ["fit + evidence, float32", seconds(fit_theirs), seconds(fit_mine), ratio(fit_theirs, fit_mine), ">= 100x"],
        ["predict 100 (probit), float32", seconds(predict_theirs), seconds(predict_mine),
         ratio(predict_theirs, predict_mine), ">= 100x"],
        ["predict 100 (glm, 1,000 samples), float32", "-", seconds(glm), ratio(predict_theirs, glm), ""],
    ]
    labels = {"fit_evidence_seconds": "fit + evidence", "predict_probit_seconds": "predict 100 (probit)",
              "predict_glm_seconds": "predict 100 (glm, 1,000 samples)"}
    for key, label in labels.items():
        theirs_seconds = fit_theirs if key.startswith("fit") else predict_theirs
        own = mine["float64"][key]
        rows.append([f"{label}, our float64 against their float32", seconds(theirs_seconds), seconds(own),
                     ratio(theirs_seconds, own), ""])
    print(f"\n{title}, float32 network\n")
    print(table(["work", "laplace-torch full", "ours", "ratio", "goal"], rows))
    result: dict[str, Any] = {"machine": machine(options.threads), "ours_float64": double}
    result["ours"] = {k: v for k, v in mine.items() if k not in ("probabilities", "float64")}
    result["ours_float64_algebra"] = {k: v for k, v in mine["float64"].items() if k != "probabilities"}
    between = abs(double["gp"] - double["full"]) / abs(double["full"])
    print(f"\nevidence in float64, nats: function space {double['gp']:.10f}, weight space {double['full']:.10f}")
    print(f"relative difference between our two spaces {between:.1e}")
    if "evidence" in theirs_double:
        difference = abs(double["gp"] - theirs_double["evidence"]) / abs(theirs_double["evidence"])
        print(f"laplace-torch full {theirs_double['evidence']:.10f}, relative difference {difference:.1e} (goal 1e-8)")
        result["relative_difference_to_laplace_torch"] = difference
    if "probabilities" in theirs:
        gap = (mine["probabilities"] - torch.as_tensor(theirs["probabilities"])).abs().max().item()
        print(f"largest difference of a predicted probability (float32): {gap:.1e}")
        result["largest_probability_difference"] = gap
    result["laplace_torch"] = {k: v for k, v in theirs.items() if k != "probabilities"}
    result["laplace_torch_float64"] = theirs_double
    result["ratios"] = {
        "fit_evidence": fit_theirs and fit_theirs / fit_mine,
        "predict": predict_theirs and predict_theirs / predict_mine,
    }
    write(options.out, result)


if __name__ == "__main__":
    main()
