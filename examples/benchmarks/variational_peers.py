"""VOGGN beside IVON and posteriors: the ELBO that each reaches, and in which time.

    python examples/benchmarks/variational_peers.py --data DIR --peers PYTHON

Snelson's data (DIR/snelson.npz) without the points of 1.6 < x < 3.0: 110 to train on, 40 to test inside and 50 in the
gap. A tanh network with two hidden layers of 25 units (P = 726), prior precision 0.63, noise variance 0.1. VOGGN starts
at the MAP, and its time contains that of the MAP, or at the initial weights. IVON runs with 12 settings, and
posteriors' diagonal and dense variational inference with six each. Each Gaussian is brought in by
`gaussian_posterior`, so all ELBOs are computed by the same code.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from _common import machine, table, write
from _networks import mlp, to_arrays
from torch import Tensor, nn

import ntk_laplace as ntkl

PRECISION, NOISE = 0.63, 0.1
GAP = 1.6, 3.0
IVON = [{"lr": lr, "hess_init": 1.0, "samples": s, "beta2": b}
        for lr, s, b in itertools.product((0.01, 0.03), (1, 4), (0.99, 0.995, 0.999))]
POSTERIORS = {
    "diag": [{"lr": lr, "samples": s, "initial": 0.1} for lr, s in itertools.product((1e-3, 3e-3, 1e-2), (1, 4))],
    "dense": [{"lr": lr, "samples": s, "initial": 0.1} for lr, s in itertools.product((3e-4, 1e-3, 3e-3), (1, 4))],
}


@dataclass
class Row:
    """What one Gaussian gives."""

    name: str
    seconds: float
    posterior: ntkl.Posterior | None
    words: str = ""


class Problem:
    """The data, split, and the network at its start."""

    def __init__(self, folder: Path | None, small: bool) -> None:
        torch.manual_seed(0)
        if folder is None:
            x = torch.rand(200, 1).double() * 6
            y = torch.sin(2 * x) + 0.3 * torch.randn(200, 1)
        else:
            with np.load(folder / "snelson.npz") as found:
                x, y = (torch.as_tensor(found[key]).double().reshape(-1, 1)
                        for key in ("train_inputs", "train_outputs"))
        away = (x[:, 0] > GAP[0]) & (x[:, 0] < GAP[1])
        order = torch.randperm(int((~away).sum()))
        x_in, y_in = x[~away][order], y[~away][order]
        n = len(x_in) - 40
        self.x, self.y = x_in[:n], y_in[:n]
        self.tests = {"inside": (x_in[n:], y_in[n:]), "gap": (x[away], y[away])}
        torch.manual_seed(0)
        self.network = mlp((1, 5, 5, 1) if small else (1, 25, 25, 1)).double()

    def gaussian(self, mean: Tensor, precision: Tensor) -> ntkl.Posterior:
        """A Gaussian over the weights, found elsewhere."""
        nn.utils.vector_to_parameters(mean, self.network.parameters())
        return ntkl.gaussian_posterior(self.network, (self.x, self.y), ntkl.Gaussian(noise=NOISE),
                                       ntkl.GaussianPrior(precision=PRECISION), precision=precision)


def peer(problem: Problem, arrays: dict[str, np.ndarray], kind: str, settings: dict[str, float], steps: int,
         options: argparse.Namespace) -> Row:
    """One run of a peer, in its own process."""
    name = f"{'IVON' if kind == 'ivon' else f'posteriors, {kind}'} {settings}"
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "in.npz"), Path(folder, "out.npz")
        np.savez(source, **arrays)
        command = [options.peers, str(Path(__file__).with_name("_peer_variational.py")), str(source), str(target),
                   "--peer", kind, "--settings", json.dumps(settings), "--steps", str(steps),
                   "--threads", str(options.threads)]
        try:
            subprocess.run(command, check=True, timeout=options.limit, capture_output=True)
        except subprocess.TimeoutExpired:
            return Row(name, float("nan"), None, f"not done in {options.limit} s")
        with np.load(target) as found:
            if "failed" in found:
                return Row(name, float("nan"), None, str(found["failed"]))
            result = {key: torch.as_tensor(found[key]) for key in found}
    if "root" in result:  # of the covariance
        precision = torch.cholesky_inverse(result["root"].tril())
    else:
        precision = result["precision"]
    return Row(name, float(result["seconds"]), problem.gaussian(result["mean"], precision))


def judge(problem: Problem, row: Row, samples: int, draws: int) -> dict[str, float | str]:
    """ELBO of the network, and mean log likelihoods of the test points by weight samples."""
    found: dict[str, float | str] = {"name": row.name, "seconds": row.seconds, "words": row.words}
    if row.posterior is None:
        return found | {"elbo": -float("inf")}
    generator = torch.Generator().manual_seed(0)
    elbo = row.posterior.elbo("nn", samples=samples, generator=generator)
    found |= {"elbo": float(elbo), "error": elbo.standard_error}
    for part, (x, y) in problem.tests.items():
        for method in ("nn", "glm"):
            shown = row.posterior.predict(x, method, samples=draws, generator=torch.Generator().manual_seed(0))
            found[f"{part} {method}"] = shown.log_prob(y).mean().item()
    return found


def main() -> None:
    """VOGGN, then the peers, and the best of each."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--data", type=Path, help="folder with snelson.npz; made data without it")
    arguments.add_argument("--peers", help="interpreter with ivon-opt and posteriors")
    arguments.add_argument("--steps", type=int, default=1000, help="of VOGGN")
    arguments.add_argument("--peer-steps", type=int, default=5000)
    arguments.add_argument("--limit", type=float, default=300.0, help="seconds of one run of a peer")
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--small", action="store_true", help="a few steps of a small network, without peers")
    arguments.add_argument("--out", type=Path, default=Path("variational_peers.json"))
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    steps, samples, draws = (20, 50, 50) if options.small else (options.steps, 4000, 1000)
    problem = Problem(options.data, options.small)
    arrays = to_arrays(problem.network) | {"x": problem.x.numpy(), "y": problem.y.numpy(),
                                           "noise": np.array(NOISE), "precision": np.array(PRECISION)}
    model = problem.network, (problem.x, problem.y), ntkl.Gaussian(noise=NOISE), ntkl.GaussianPrior(precision=PRECISION)
    start = time.perf_counter()
    laplace = ntkl.variational(*model, algorithm="oggn", start="map", steps=1, elbo_every=0).posterior
    rows = [Row("Laplace", time.perf_counter() - start, laplace)]
    fit = ntkl.variational(*model, algorithm="voggn", start=laplace, steps=steps, elbo_every=0)
    rows.append(Row("VOGGN, one pair, from Laplace", time.perf_counter() - start, fit.posterior))
    for seed in range(3):
        start = time.perf_counter()
        fit = ntkl.variational(*model, algorithm="voggn", start=laplace, step_size=0.15, steps=3 * steps // 10,
                               decay=steps / 25, elbo_every=0, seed=seed)
        rows.append(Row(f"VOGGN, one pair, larger steps at first, seed {seed}",
                        rows[0].seconds + time.perf_counter() - start, fit.posterior))
    start = time.perf_counter()
    fit = ntkl.variational(*model, algorithm="voggn", start=laplace, samples=10, step_size=0.05, steps=steps // 5,
                           decay=steps / 20, elbo_every=0)
    rows.append(Row("VOGGN, five pairs, from Laplace", rows[0].seconds + time.perf_counter() - start, fit.posterior))
    start = time.perf_counter()
    fit = ntkl.variational(*model, algorithm="voggn", start=10.0, samples=10, step_size=0.05, steps=steps // 3,
                           decay=steps / 15, elbo_every=0)
    rows.append(Row("VOGGN, five pairs, from scratch", time.perf_counter() - start, fit.posterior))
    if options.peers:
        tasks = [("ivon", one) for one in IVON]
        tasks += [(kind, one) for kind, ones in POSTERIORS.items() for one in ones]
        for kind, settings in tasks:
            rows.append(peer(problem, arrays, kind, settings, options.peer_steps, options))
            print(rows[-1].name, rows[-1].seconds, rows[-1].words, flush=True)
    found = [judge(problem, row, samples, draws) for row in rows]
    names = ["name", "elbo", "seconds", "inside nn", "inside glm", "gap nn", "gap glm", "words"]

    def shown(value: float | str | None) -> str:
        return value if isinstance(value, str) else "-" if value is None else f"{value:.4g}"

    print(table(names, [[shown(one.get(name)) for name in names] for one in found]))
    write(options.out, {"machine": machine(options.threads), "results": found})


if __name__ == "__main__":
    main()
