"""Structured posteriors beside curvlinops, asdl and laplace-torch: KFAC and diagonal fits, the KFAC predictive.

N=10,000 vectors of 784 pixels, MLP 784-256-128-10 (tanh, P=235,146) after one epoch, prior precision 1, float32 on
every side, the exact output Hessian everywhere. Command for all figures:

    python examples/benchmarks/structured.py --peers-python PEERS/bin/python

where PEERS is an environment with ``torch==2.13.0 laplace-torch`` (it brings curvlinops, asdl and BackPACK) and no
torchvision. A peer is given several batch sizes, and the one it is fastest with counts; ours is our default. Where it
says so, both sides read batches of 128, ours from a DataLoader. ``--rows`` chooses among
* fit: KFAC by laplace-torch with the backends asdl and curvlinops, and by ours, biases fused into the weights (our
  default) or apart, as they keep them. curvlinops and asdl by themselves stop at the factors, as our fit does.
  laplace-torch ends with eigenvalues and eigenvectors, which ours makes when they are first needed, and an evidence
  needs the eigenvalues alone: both sides with the evidence, and both with eigenvectors. A plain prototype with hooks,
  which ends with the log determinant, and one training epoch, stand beside;
* ekfac: against curvlinops by itself;
* predict: the KFAC predictive of 100 points (linearized, probit: their default), of a posterior that has been asked
  before, and together with the fit: ours makes its eigenvectors for the first of them;
* diagonal: laplace-torch's default backend under a time limit, and its two faster ones;
With ``--turns`` all of them take turns, process after process, and the best of each counts: a machine has good and bad
minutes, and they should meet both sides. Whatever the rows, it prints how well the answers agree: evidences, latent
covariances, probabilities; and on a small network the dense KFAC matrix against curvlinops' own.

Conventions found: with the summed loss all of them mean B ⊗ A / N with A = Σ aaᵀ and B = Σ bbᵀ over the data, whatever
the batches. laplace-torch keeps a bias apart from its weight, with the block B of its own, which is exact; we do the
same if weight and bias have precisions of their own (``groups="tensor"``). curvlinops fuses them on demand
(``separate_weight_and_bias=False``), as our default does.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from _common import best_times, machine, parser, ratio, run_python, seconds, table, write
from _networks import blobs, epoch, mlp, to_arrays
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

import ntk_laplace as ntkl

BIG, SMALL = (784, 256, 128, 10), (12, 8, 6, 3)
TINY_CHECK = (12, 8, 6, 3)  # a network whose dense matrix can be compared entry by entry


class Row(NamedTuple):
    """A line of the table: a peer's task and figure, our task, the goal for the ratio."""

    work: str
    peer: str
    key: str
    own: str
    goal: str = ""


ROWS = {
    "fit": (
        Row("KFAC factors", "asdl", "fit_seconds", "kfac", ">= 2.5x"),
        Row("KFAC factors", "curvlinops", "fit_seconds", "kfac", ">= 2.5x"),
        Row("KFAC fit and evidence", "laplace-asdl", "fit_evidence_seconds", "kfac_evidence", ">= 2.5x"),
        Row("KFAC fit and evidence", "laplace-curvlinops", "fit_evidence_seconds", "kfac_evidence", ">= 2.5x"),
        Row("KFAC factors and eigenvectors", "laplace-asdl", "fit_seconds", "kfac_eigen"),
        Row("KFAC factors and eigenvectors", "laplace-curvlinops", "fit_seconds", "kfac_eigen"),
        Row("KFAC factors, a loader's batches of 128", "asdl", "fit_seconds_128", "kfac_128"),
        Row("KFAC factors, a loader's batches of 128", "curvlinops", "fit_seconds_128", "kfac_128"),
    ),
    "ekfac": (Row("EKFAC fit (they: no predictive, no evidence)", "curvlinops-ekfac", "fit_seconds", "ekfac"),),
    "predict": (
        Row("KFAC predictive of 100", "laplace-asdl", "predict_seconds", "predict", ">= 100x"),
        Row("KFAC predictive of 100", "laplace-curvlinops", "predict_seconds", "predict", ">= 100x"),
        Row("KFAC fit and first predictive of 100", "laplace-asdl", "fit_predict_seconds", "kfac_predict"),
        Row("KFAC fit and first predictive of 100", "laplace-curvlinops", "fit_predict_seconds", "kfac_predict"),
    ),
    "diagonal": (
        Row("diagonal fit", "diag-curvlinops", "fit_seconds", "diag"),
        Row("diagonal fit", "diag-asdl", "fit_seconds", "diag"),
        Row("diagonal fit", "diag-backpack", "fit_seconds", "diag"),
    ),
}


@dataclass(frozen=True)
class Problem:
    """The network after one epoch, training data, and 100 further inputs."""

    widths: tuple[int, ...]
    network: nn.Module
    x: Tensor
    y: Tensor
    x_test: Tensor


def problem(widths: tuple[int, ...], num_examples: int) -> Problem:
    x, y = blobs(num_examples + 100, widths[0], widths[-1])
    torch.manual_seed(0)
    network = mlp(widths)
    epoch(network, x[:num_examples], y[:num_examples], torch.optim.Adam(network.parameters()))
    return Problem(widths, network.eval(), x[:num_examples], y[:num_examples], x[num_examples:])


def fit(network: nn.Module, x: Tensor, y: Tensor, structure: str, groups: str = "all") -> ntkl.Posterior:
    """Our posterior with algebra in float32, the peers' type."""
    prior = ntkl.GaussianPrior(precision=1.0, groups=groups)
    return ntkl.laplace(network, (x, y), ntkl.Categorical(), prior, structure, dtype=torch.float32)


def eigenvectors(posterior: ntkl.Posterior) -> list[Any]:
    """Those of all layers, which would be made when they are first needed."""
    return [eigenbasis.basis for eigenbasis in posterior.fitted.structure.eigenbases]


def with_hooks(network: nn.Module, x: Tensor) -> Tensor:
    """log det H - log det P0 as one would write it in an afternoon: hooks, one batch, C backward passes."""
    layers = [m for m in network.modules() if isinstance(m, nn.Linear)]
    seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen[module] = (inputs[0].detach(), output)

    handles = [layer.register_forward_hook(keep) for layer in layers]
    f = network(x)
    for handle in handles:
        handle.remove()
    p = f.detach().softmax(1)
    # Λ = L Lᵀ with L = diag(√p) - p √pᵀ
    root = torch.diag_embed(p.sqrt()) - p.unsqueeze(2) * p.sqrt().unsqueeze(1)
    factors = [(seen[m][0].T @ seen[m][0] / len(x), torch.zeros(m.out_features, m.out_features)) for m in layers]
    for k in range(f.shape[1]):
        gradients = torch.autograd.grad(f, [seen[m][1] for m in layers], root[:, :, k], retain_graph=True)
        for (_, b_factor), b in zip(factors, gradients, strict=True):
            b_factor += b.T @ b
    total = torch.zeros((), dtype=torch.float64)
    for factor_a, factor_b in factors:
        alpha, beta = (torch.linalg.eigh(factor)[0].clamp_min(0.0) for factor in (factor_a, factor_b))
        # weights, then the bias, at precision 1
        total += torch.log1p(torch.outer(beta, alpha)).sum() + torch.log1p(beta).sum()
    return total


def ours(case: Problem, repeats: int, wanted: set[str]) -> dict[str, Any]:
    """Best times of our fits and of the predictive, with the prototype and a training epoch in turns; the answers."""
    network, x, y, x_test = case.network, case.x, case.y, case.x_test
    apart = fit(network, x, y, "kfac", "tensor")
    loader = DataLoader(TensorDataset(x, y), sampler=BatchSampler(range(len(x)), 128, drop_last=False), batch_size=None)
    other = mlp(case.widths)
    optimizer = torch.optim.Adam(other.parameters())
    tasks: dict[str, Callable[[], Any]] = {
        "kfac_apart": lambda: fit(network, x, y, "kfac", "tensor"),
        "kfac": lambda: fit(network, x, y, "kfac"),
        "kfac_evidence": lambda: fit(network, x, y, "kfac").log_marginal_likelihood(),
        "kfac_eigen": lambda: eigenvectors(fit(network, x, y, "kfac")),
        "kfac_predict": lambda: fit(network, x, y, "kfac").predict(x_test, method="probit").probs,
        "kfac_128": lambda: ntkl.laplace(
            network, loader, ntkl.Categorical(), ntkl.GaussianPrior(1.0), "kfac", dtype=torch.float32
        ),
        "ekfac": lambda: fit(network, x, y, "ekfac"),
        "diag": lambda: fit(network, x, y, "diag"),
        "prototype": lambda: with_hooks(network, x),
        "epoch": lambda: epoch(other, x, y, optimizer),
        "predict": lambda: apart.predict(x_test, method="probit").probs,
    }
    wanted = wanted | {"kfac", "kfac_apart", "prototype", "epoch"}
    found: dict[str, Any] = {"seconds": best_times({k: v for k, v in tasks.items() if k in wanted}, repeats)}
    found["turn"] = lambda: best_times({k: v for k, v in tasks.items() if k in wanted}, repeats)
    diagonal = fit(network, x, y, "diag")
    found["answers"] = {
        "evidence": apart.log_marginal_likelihood().item(),
        "log_det": apart.log_det().item(),
        "prototype_log_det": with_hooks(network, x).item(),
        "probabilities": apart.predict(x_test, method="probit").probs.numpy(),
        "variances": apart.latent_moments(x_test[:10])[1].numpy(),
        "diagonal_evidence": diagonal.log_marginal_likelihood().item(),
    }
    return found


def gap(mine: Any, theirs: Any) -> float:
    """Largest absolute difference over the largest entry."""
    mine, theirs = np.asarray(mine, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    return float(np.abs(mine - theirs).max() / np.abs(theirs).max())


def agreement(answers: dict[str, Any], theirs: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Relative differences to the prototype, and to each peer that gave an answer."""
    found = {"prototype log det": gap(answers["log_det"], answers["prototype_log_det"])}
    for task, result in theirs.items():
        if task.startswith("laplace-") and "evidence" in result:
            for name in {"evidence", "variances", "probabilities"} & set(result):
                found[f"{task} {name}"] = gap(answers[name], result[name])
        elif task.startswith("diag-") and "evidence" in result:
            found[f"{task} evidence"] = gap(answers["diagonal_evidence"], result["evidence"])
    return found


def dense_agreement(python: str, threads: int) -> dict[str, float]:
    """Our dense KFAC matrix of a small network against curvlinops' own, biases apart and fused."""
    case = problem(TINY_CHECK, 200)
    theirs = peer(python, case, "factors", ["--threads", str(threads)])
    if "error" in theirs:
        print("curvlinops' dense matrix failed:", theirs["error"])
        return {}
    pairs = {"separate": "tensor", "joint": "all"}
    found = {}
    for name, groups in pairs.items():
        information = fit(case.network, case.x, case.y, "kfac", groups).posterior_precision.information()
        found[f"curvlinops dense matrix, {name}"] = gap(information, theirs[name])
    return found


def peer(python: str, case: Problem, task: str, options: list[str]) -> dict[str, Any]:
    """One peer in its own interpreter."""
    arrays = to_arrays(case.network) | {"x": case.x.numpy(), "y": case.y.numpy(), "x_test": case.x_test.numpy()}
    script = ["_peer_structured.py", "--task", task, "--widths", *map(str, case.widths)]
    start = time.perf_counter()
    found = run_python(python, [*script, *options], arrays)
    print(f"{task}: {time.perf_counter() - start:.0f} s in all", flush=True)
    if "error" in found:
        print(f"{task} failed: {found['error']}")
    return found


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__, "structured.json")
    arguments.add_argument("--peers-python", help="interpreter that has laplace-torch; without it ours alone")
    arguments.add_argument("--num-examples", type=int, help="N (default 10,000)")
    arguments.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS), help="what to measure")
    arguments.add_argument("--peers", nargs="+", help="of those rows, the peers to run (default: all)")
    arguments.add_argument("--turns", type=int, default=1, help="of ours and every peer (default 1)")
    arguments.add_argument("--batch-sizes", nargs="+", default=["128", "1000", "10000"], help="that a peer may choose")
    arguments.add_argument("--limit", type=float, default=60.0, help="seconds given to one peer's fit (default 60)")
    options: argparse.Namespace = arguments.parse_args()
    torch.set_num_threads(options.threads)

    widths = SMALL if options.small else BIG
    num_examples = options.num_examples or (200 if options.small else 10_000)
    case = problem(widths, num_examples)
    theirs: dict[str, dict[str, Any]] = {}
    rows = [row for name in options.rows for row in ROWS[name] if row.peer in (options.peers or [row.peer])]
    mine = ours(case, options.repeats, {row.own for row in rows})
    if options.peers_python:
        passed = ["--threads", str(options.threads), "--limit", str(options.limit)]
        passed += ["--repeats", str(options.repeats), "--batch-sizes", *options.batch_sizes]
        for turn, task in product(range(options.turns), dict.fromkeys(row.peer for row in rows)):
            # laplace-torch's default diagonal makes dense C x P Jacobians: small batches fit, and one turn is enough
            slow = ["--batch-sizes", "100", "--repeats", "1"] if task == "diag-curvlinops" else []
            predict = ["--predict"] if "predict" in options.rows and task.startswith("laplace-") else []
            found = peer(options.peers_python, case, task, [*passed, *slow, *predict])
            theirs[task] = found if turn == 0 else sooner(theirs[task], found)
            mine["seconds"] = sooner(mine["seconds"], mine["turn"]()) if options.turns > 1 else mine["seconds"]
        checks = dense_agreement(options.peers_python, options.threads)
    else:
        checks = {}
        print("peers left out: give their interpreter with --peers-python")
    checks |= agreement(mine["answers"], theirs)
    report(options, case, rows, mine, theirs, checks)


def sooner(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Shorter times of two turns; all else is the first one's."""
    return {k: min(v, other.get(k, v)) if isinstance(v, float) and k != "evidence" else v for k, v in one.items()}


def line(row: Row, own: dict[str, float], found: dict[str, Any], num_examples: int) -> list[str]:
    """A row with its figures."""
    mine, theirs = own[row.own], found.get(row.key)
    if "over_limit" in found:
        read = f"> {found['over_limit']:.0f} s ({found['examples_read']:,} of {num_examples:,} read)"
        return [row.work, row.peer, read, seconds(mine), f"> {found['over_limit'] / mine:.0f}x", row.goal]
    by_size = {k.rpartition("_")[2]: v for k, v in found.items() if k.startswith("fit_seconds_")}
    shown = ", ".join(f"{seconds(v)} at {int(size):,}" for size, v in by_size.items())
    batches = f" ({shown})" if row.key == "fit_seconds" and shown else ""
    return [row.work, row.peer, f"{seconds(theirs)}{batches}", seconds(mine), ratio(theirs, mine), row.goal]


def report(
    options: argparse.Namespace, case: Problem, rows: list[Row], mine: dict[str, Any],
    theirs: dict[str, dict[str, Any]], checks: dict[str, float],
) -> None:
    """Print the tables and write the JSON."""
    own, num_examples, widths = mine["seconds"], len(case.y), case.widths
    print(f"\nN={num_examples:,}, MLP {'-'.join(map(str, widths))}, float32, {options.threads} threads\n")
    lines = [line(row, own, theirs.get(row.peer, {}), num_examples) for row in rows]
    print(table(["work", "peer", "theirs", "ours", "ratio", "goal"], lines))
    names = {"kfac": "KFAC fit, biases fused (default)", "kfac_apart": "KFAC fit, biases apart (as the peers)",
             "kfac_evidence": "KFAC fit and evidence", "kfac_eigen": "KFAC fit and eigenvectors",
             "kfac_predict": "KFAC fit and first predictive of 100", "diag": "diagonal fit (goal: at most 1.2x)",
             "prototype": "a prototype with hooks, biases apart",
             "epoch": "one training epoch (Adam, batches of 128)"}
    beside = [[text, seconds(own[k]), ratio(own[k], own["kfac"])] for k, text in names.items() if k in own]
    print("\n" + table(["beside", "time", "over our KFAC fit"], beside))
    print("\nlargest difference over the largest entry, in float32:")
    for name, value in checks.items():
        print(f"  {name}: {value:.1e}")
    result = {"machine": machine(options.threads), "num_examples": num_examples, "widths": list(widths)}
    result |= {"seconds": own, "evidence": mine["answers"]["evidence"], "agreement": checks}
    result["diagonal_evidence"] = mine["answers"]["diagonal_evidence"]
    result["peers"] = {
        task: {k: v for k, v in found.items() if not isinstance(v, np.ndarray)} for task, found in theirs.items()
    }
    write(options.out, result)


if __name__ == "__main__":
    main()
