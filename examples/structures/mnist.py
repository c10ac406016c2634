"""MNIST, 60,000 images: evidence and predictives of structured posteriors, streamed, with their time and memory.

    python examples/structures/mnist.py --data DIR --out mnist

DIR holds ``mnist.npz`` (X_train, y_train, X_test, y_test). An MLP 784-1024-512-256-128-10 (P = 1,494,154) and a small
CNN (P = 11,978) are trained once, their weights kept under ``--out`` and used again. For each structure (KFAC, EKFAC,
INF, diagonal) and root (GGN, empirical Fisher), in a process of its own: a fit that reads the images through a
DataLoader, float32; the evidence at the precision of training; the precision of highest evidence
(``evidence_curve``); there, accuracy, mean log likelihood and expected calibration error of the predictives of the
10,000 test images: closed form (probit), sampled outputs of the linearized network (glm), and sampled weights of the
network itself (nn). Beside them stands the network alone (MAP); moments in closed form (blr) have the same mean.
Memory is the peak of the process above what it held before the fit (imports, images, network), at 30,000 images and at
60,000: only the outputs, N x 10, may grow. It writes mnist.json, and each process's result, which is not computed
again: an interrupted run goes on where it stood.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from _images import as_floats, build, load, loader, miniature, train_weights
from _shared import in_child, machine, parser, peak_bytes, resident_bytes, table, write
from torch.distributions import Distribution

import ntk_laplace as ntkl
from ntk_laplace import metrics

STRUCTURES, CURVATURES = ("kfac", "ekfac", "inf", "diag"), ("ggn", "ef")
METHODS = {"probit": {}, "glm": {"samples": 1000}, "nn": {"samples": 100}}
TEST_BATCH = 1000


def weights(options: argparse.Namespace, name: str) -> Path:
    """Train the network, unless its weights are there; where they are."""
    path = options.out / f"{name}.pt"
    if path.exists():
        return path
    split = miniature() if options.small else load(options.data)
    torch.manual_seed(0)
    start = time.perf_counter()
    network = train_weights(build(name, options.small), split, options.precision, options.epochs)
    print(f"{name}: trained for {options.epochs} epochs in {time.perf_counter() - start:.0f} s", flush=True)
    torch.save(network.state_dict(), path)
    return path


def scores(predictives: list[Distribution], labels: torch.Tensor) -> dict[str, float]:
    """Accuracy, mean log likelihood (nats) and expected calibration error over batches of predictives."""
    probabilities = torch.cat([p.probs for p in predictives])
    return {
        "accuracy": metrics.accuracy(probabilities, labels),
        "log_likelihood": metrics.mean_log_likelihood(torch.distributions.Categorical(probs=probabilities), labels),
        "ece": metrics.expected_calibration_error(probabilities, labels),
    }


def job(name: str, structure: str, curvature: str, num_examples: int, options: argparse.Namespace) -> dict[str, Any]:
    """One fit and what follows from it."""
    split = miniature() if options.small else load(options.data)
    network = build(name, options.small)
    network.load_state_dict(torch.load(weights(options, name), weights_only=True))
    network.eval()
    images = loader(split.x[:num_examples].clone(), split.y[:num_examples])
    x_test, y_test = as_floats(split.x_test[: options.test_examples]), split.y_test[: options.test_examples]
    del split
    chosen = ntkl.INF(rank=options.rank) if structure == "inf" else structure
    prior = ntkl.GaussianPrior(precision=options.precision)
    before = resident_bytes()
    start, start_cpu = time.perf_counter(), time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ntkl.NTKLaplaceWarning)  # INF says where it shrinks its low-rank part
        posterior = ntkl.laplace(
            network, images, ntkl.Categorical(), prior, chosen, curvature=curvature, dtype=torch.float32
        )
    found: dict[str, Any] = {"fit_seconds": time.perf_counter() - start, "fit_peak_bytes": peak_bytes() - before}
    found |= {"base_bytes": before, "fit_cpu_seconds": time.process_time() - start_cpu}
    found["evidence"] = posterior.log_marginal_likelihood().item()
    start = time.perf_counter()
    factors = torch.logspace(-3, 3, 121)
    curve = posterior.evidence_curve(factors)
    best = int(curve.argmax())
    posterior.prior.precision = options.precision * factors[best].item()
    found |= {"precision": posterior.prior.precision.item()}
    found |= {"best_evidence": posterior.log_marginal_likelihood().item()}
    found |= {"curve_seconds": time.perf_counter() - start, "log_det": posterior.log_det().item()}
    if num_examples < options.num_examples or options.fits_alone:
        return found
    for method, how in {"map": {}, **METHODS}.items():
        start, start_cpu = time.perf_counter(), time.process_time()
        # weights are drawn once for all images; they need no rows, whose memory is why the others go in parts
        parts = [x_test] if method == "nn" else x_test.split(TEST_BATCH)
        generator = torch.Generator().manual_seed(0)
        predictives = [posterior.predict(part, method, generator=generator, **how) for part in parts]
        spent = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - start_cpu}
        found[method] = scores(predictives, y_test) | spent
    found["peak_bytes"] = peak_bytes() - before
    return found


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__, "mnist")
    arguments.add_argument("--data", type=Path, help="folder with mnist.npz")
    arguments.add_argument("--networks", nargs="+", default=["mlp", "cnn"], choices=["mlp", "cnn"])
    arguments.add_argument("--structures", nargs="+", default=list(STRUCTURES), choices=STRUCTURES)
    arguments.add_argument("--curvatures", nargs="+", default=list(CURVATURES), choices=CURVATURES)
    arguments.add_argument("--rank", type=int, default=100, help="top eigenvalues that INF keeps per layer (100)")
    arguments.add_argument("--epochs", type=int, default=8, help="of training (default 8)")
    arguments.add_argument("--precision", type=float, default=10.0, help="weight decay in training (default 10)")
    arguments.add_argument("--num-examples", type=int, default=60_000, help="N (default 60,000)")
    arguments.add_argument("--test-examples", type=int, default=10_000, help="images to predict (default 10,000)")
    arguments.add_argument("--fits-alone", action="store_true", help="time and memory of the fits, no predictives")
    arguments.add_argument("--job", nargs=4, metavar=("NETWORK", "STRUCTURE", "ROOT", "N"), help="one fit, as JSON")
    options = arguments.parse_args()
    # weight decay drives weights that no image needs below 1e-38, where a float32 product takes many times as long
    torch.set_flush_denormal(True)
    torch.set_num_threads(options.threads)
    if options.data is None and not options.small:
        arguments.error("give the folder of mnist.npz with --data, or --small")
    if options.small:
        options.num_examples, options.test_examples, options.rank = 600, 100, 4
    if options.job:
        name, structure, curvature, count = options.job
        print(json.dumps(job(name, structure, curvature, int(count), options)))
        return
    if options.small:
        options.epochs = 30
    options.out.mkdir(parents=True, exist_ok=True)
    run(options)


def run(options: argparse.Namespace) -> None:
    """All fits, each in its process; half the images as well under the first root."""
    names = ("out", "rank", "precision", "num_examples", "test_examples", "threads")
    passed = [text for name in names for text in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]
    passed += ["--data", str(options.data), *["--fits-alone"] * options.fits_alone]
    results: list[dict[str, Any]] = []
    for name in options.networks:
        weights(options, name)
        for curvature in options.curvatures:
            for structure in options.structures:
                sizes = [options.num_examples]
                if curvature == options.curvatures[0]:
                    sizes.insert(0, options.num_examples // 2)
                for count in sizes:
                    if options.small:  # seconds matter there, and memory does not
                        found = job(name, structure, curvature, count, options)
                    else:
                        kept = options.out / f"{name}-{curvature}-{structure}-{count}.json"
                        found = in_child(__file__, ["--job", name, structure, curvature, str(count), *passed], kept)
                    what = {"network": name, "curvature": curvature, "structure": structure, "N": count}
                    results.append(what | found)
                    print(name, curvature, structure, count, f"fit {found['fit_seconds']:.1f} s,",
                          f"peak {found['fit_peak_bytes'] / 1e6:.0f} MB", flush=True)
    report(options, results)


def report(options: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    """Print the tables and write the JSON."""
    whole = [r for r in results if r["N"] == options.num_examples]
    rows = []
    for name in [] if options.fits_alone else options.networks:
        mine = [r for r in whole if r["network"] == name]
        best = mine[0]["map"]
        rows.append([name, "", "MAP", "", "", "", *(_scores(best)), "", "", "", ""])
        for r in mine:
            rows.append([
                name, r["curvature"], r["structure"], f"{r['evidence'] / r['N']:.4f}", f"{r['precision']:.3g}",
                f"{r['best_evidence'] / r['N']:.4f}", *_scores(r["probit"]),
                *_scores(r["glm"])[1:], *_scores(r["nn"])[1:],
            ])
    head = ["network", "root", "structure", f"evidence / N at {options.precision:g}", "best precision", "evidence / N",
            "accuracy", "log lik.", "ECE", "glm: log lik.", "ECE", "nn: log lik.", "ECE"]
    print(f"\nN={options.num_examples:,}; INF rank {options.rank}")
    if rows:
        print(f"\n{table(head, rows)}")
    costs = [
        [r["network"], r["curvature"], r["structure"], f"{r['N']:,}", f"{r['fit_seconds']:.1f}",
         f"{r['fit_cpu_seconds']:.1f}",
         f"{r['fit_peak_bytes'] / 1e6:.0f}", *(f"{r[m]['cpu_seconds']:.1f}" if m in r else "" for m in METHODS)]
        for r in results
    ]
    head = ["network", "root", "structure", "N", "fit, s", "CPU, s", "peak of the fit, MB",
            *(f"{m}, CPU s" for m in METHODS)]
    print(f"\n{options.threads} threads; predictives of {options.test_examples:,} images\n\n{table(head, costs)}")
    write(options.out / "mnist.json", {"machine": machine(options.threads), "rank": options.rank, "results": results})


def _scores(found: dict[str, float]) -> list[str]:
    return [f"{found['accuracy']:.4f}", f"{found['log_likelihood']:.4f}", f"{found['ece']:.4f}"]


if __name__ == "__main__":
    main()
