"""Evidence and predictions from products with the curvature: accuracy, time and memory beside exact ones.

    python examples/benchmarks/scale.py --threads 2 --data DIR

DIR holds ``mnist.npz`` (X_train, y_train, X_test, y_test); without it vectors around one centre per class stand in for
the images. Scikit-learn's digits serve where a dense reference is needed. Each part is run with ``--parts NAME,...``:

* products: one product with the curvature, N=4,000, C=10, MLP 784-256-128-10 (P=235,146), blocks of 16 vectors,
  float32: rows kept and streamed, against the product's own matmuls, and against tiles of K.
* evidence: the same network and N, float64: structure "iterative" against "gp" (36,000 rows): time, memory, error.
* spread: the standard deviation of the evidence over seeds at an equal number of products, against linear_operator's
  `inv_quad_logdet` at its defaults and at larger preconditioners; digits, N=400.
* hyperparameters: precisions of each layer by "iterative" and by "gp", digits, N=400.
* rank: variances and evidence of "nystrom" at 1 to 5 times the effective parameters, digits, N=400, and with ``--peers
  PYTHON`` laplace-torch's ELLA.
* coverage: three networks by four likelihoods on 100 digits, a saturated classifier, and one whose low rank is of
  leading rows; 20 seeds each, with a low rank of little help: how often the exact evidence lies within two standard
  errors, and within the certain bounds.
* mnist: MLP 784-104-80-10 (P=90,850), 10,000 images (90,000 rows: B would take 65 GB): evidence with its bounds,
  precisions of each layer, predictions of 1,000 images, and KFAC's evidence. ``--examples 60000`` for all.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import best_times, machine, parser, peak_bytes, resident_bytes, run_python, table, write
from _networks import blobs, digits, mlp, to_arrays, train
from linear_operator import settings as operator_settings
from linear_operator.operators import AddedDiagLinearOperator, ConstantDiagLinearOperator, DenseLinearOperator
from torch import Tensor, nn

import ntk_laplace as ntkl
from ntk_laplace.jacobian.gram import gram, multiply
from ntk_laplace.jacobian.passes import JacobianPass
from ntk_laplace.model.network import Network
from ntk_laplace.runtime import tuning

PARTS = ("products", "evidence", "spread", "hyperparameters", "rank", "coverage", "mnist")


def images(options: argparse.Namespace, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Training images, labels and 1,000 test images, as vectors in [0, 1]."""
    if options.data is None:
        x, y = blobs(count + 1000)
        return x[:count], y[:count], x[count:]
    with np.load(options.data / "mnist.npz") as found:
        train_x, y, test_x = found["X_train"][:count], found["y_train"][:count], found["X_test"][:1000]
    x, test = (torch.as_tensor(part).float().flatten(1) / float(train_x.max()) for part in (train_x, test_x))
    return x, torch.as_tensor(y).long(), test


def trained(widths: tuple[int, ...], x: Tensor, y: Tensor, precision: float, epochs: int = 40) -> nn.Module:
    """Trained with Adam to the MAP of a prior of this precision, nearly."""
    torch.manual_seed(0)
    network, batch = mlp(widths).to(x.dtype), 100
    steps = epochs * -(-len(x) // batch)
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(epochs):
        for index in torch.randperm(len(x)).split(batch):
            optimizer.zero_grad()
            decay = 0.5 * precision / len(x) * sum(p.square().sum() for p in network.parameters())
            (nn.functional.cross_entropy(network(x[index]), y[index]) + decay).backward()
            optimizer.step()
            schedule.step()
    return network


# --- the parts


def products(options: argparse.Namespace) -> list[list[str]]:
    """Seconds of one product, and ratios to its matmuls."""
    n, vectors = options.small or 4000, 16
    x, y, _ = images(options, n)
    torch.manual_seed(0)
    module = mlp((784, 256, 128, 10))
    network = Network(module)
    jacobian_pass = JacobianPass(network, torch.float32)
    with torch.no_grad():
        root = ntkl.Categorical().root(module(x), y)
    rows = jacobian_pass.rows(x)
    weighted, some = rows.weighted(root), rows.subset(slice(0, max(n // 16, 8))).weighted(root[: max(n // 16, 8)])
    w = torch.randn(vectors, network.num_parameters)
    outer = [(b.a[:, 0, 0], b.b.shape[-1]) for b in weighted.blocks]

    def product(jacobian: Any) -> Tensor:
        return jacobian.transposed_products(jacobian.products(network.shapes.parts(w)), network.shapes)

    def streamed() -> None:
        for batch in jacobian_pass.batches(x, root, None):
            product(batch)

    def matmuls() -> None:
        for a, width in outer:
            forward = a @ torch.randn(vectors * width, a.shape[1]).T
            forward.T @ a

    variances = {name: torch.ones(1) for name in network.shapes}
    column = torch.randn(some.num_examples * some.num_cotangents, 1)
    times = best_times({"matmuls": matmuls, "rows kept": lambda: product(weighted), "streamed": streamed,
                        "tiles of K": lambda: multiply(some, some, variances, column)}, options.repeats)
    times = {name: t / vectors for name, t in times.items()}
    times["tiles of K"] *= vectors * (n / some.num_examples) ** 2
    return [[name, f"{t:.3g} s", f"{t / times['matmuls']:.3g}x"] for name, t in times.items()]


def measured(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """Result, seconds, and GiB of the process's peak beyond what it held before."""
    before, start = resident_bytes(), time.perf_counter()
    found = work()
    return found, time.perf_counter() - start, max(0, peak_bytes() - before) / 2**30


def evidence(options: argparse.Namespace) -> list[list[str]]:
    """Iterative first: the peak of a process only grows."""
    n = options.small or 4000
    x, y, _ = images(options, n)
    network, rows = trained((784, 256, 128, 10), x, y, 1.0, 20), []
    values = {}
    for structure in ("iterative", "gp"):
        found, seconds, gib = measured(lambda s=structure: ntkl.laplace(
            network, (x, y), ntkl.Categorical(), structure=s).evidence())
        values[structure] = float(found)
        rows.append([structure, f"{float(found):.1f} ± {found.standard_error:.2g}", f"{seconds:.3g} s",
                     f"{gib:.2f} GiB"])
    rows.append(["difference", f"{100 * abs(values['iterative'] / values['gp'] - 1):.2g} %", "", ""])
    return rows


def digits_problem(options: argparse.Namespace) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """MLP 64-64-64-10 (P = 8,970) on N digits, and 200 others."""
    x, y = digits()
    n = options.small or 400
    torch.manual_seed(0)
    network = train(mlp((64, 64, 64, 10)).double(), x[:n], y[:n], steps=30 if options.small else 100)
    return network, x[:n], y[:n], x[n : n + 200]


def spread(options: argparse.Namespace) -> list[list[str]]:
    """Standard deviation over eight seeds, in nats, and the number of products."""
    network, x, y, _ = digits_problem(options)
    exact = ntkl.laplace(network, (x, y), ntkl.Categorical(), structure="gp")
    space, value = exact.fitted.function_space, float(exact.log_marginal_likelihood())
    kernel = gram(space.weighted, space.variances)
    joint, rows, seeds = float(exact.log_joint()), [], range(2 if options.small else 8)
    for rank, tolerance in ((15, 1.0), (100, 0.01)):
        found = []
        for seed in seeds:
            torch.manual_seed(seed)
            operator = AddedDiagLinearOperator(
                DenseLinearOperator(kernel), ConstantDiagLinearOperator(torch.ones(1).double(), len(kernel)))
            with (operator_settings.max_cholesky_size(0), operator_settings.min_preconditioning_size(1),
                  operator_settings.max_preconditioner_size(rank), operator_settings.cg_tolerance(tolerance),
                  operator_settings.num_trace_samples(10), operator_settings.max_lanczos_quadrature_iterations(20)):
                _, log_det = operator.inv_quad_logdet(torch.zeros(len(kernel), 1).double(), logdet=True)
            found.append(joint - 0.5 * float(log_det))
        rows.append(_spread(f"linear_operator, rank {rank}, tolerance {tolerance:g}", found, value, 10 * 20 + rank))
    for rank, probes in ((100, 10), (200, 8), (400, 8)):
        found, used = [], 0
        for seed in seeds:
            one = ntkl.laplace(network, (x, y), ntkl.Categorical(),
                               structure=ntkl.Iterative(rank=rank, probes=probes, seed=seed))
            found.append(float(one.evidence()))
            used = rank + probes * one.posterior_precision.estimate.steps
        rows.append(_spread(f"iterative, rank {rank}, {probes} probes", found, value, used))
    return rows


def _spread(name: str, found: list[float], exact: float, used: int) -> list[str]:
    values = torch.tensor(found)
    return [name, f"{used}", f"{float(values.std()):.3g}", f"{float(values.mean()) - exact:+.3g}", f"{exact:.1f}"]


def hyperparameters(options: argparse.Namespace) -> list[list[str]]:
    """Precisions of each layer."""
    network, x, y, _ = digits_problem(options)
    rows, fits, times = [], {}, {}
    for structure in ("gp", "iterative"):
        prior = ntkl.GaussianPrior(1.0, groups="layer")
        start = time.perf_counter()
        fits[structure] = ntkl.laplace(network, (x, y), ntkl.Categorical(), prior, structure)
        fits[structure].evidence()
        one = time.perf_counter() - start
        fits[structure].fit_hyperparameters()
        times[structure] = time.perf_counter() - start - one
        found = fits[structure].evidence()
        rows.append([structure, f"{float(found):.2f} ± {found.standard_error:.2g}",
                     ", ".join(f"{p:.4g}" for p in fits[structure].prior.precision.tolist()),
                     f"{one:.3g} s", f"{times[structure]:.3g} s"])
    return rows


def rank(options: argparse.Namespace) -> list[list[str]]:
    """Excess of variances and of the evidence, in percent."""
    network, x, y, test = digits_problem(options)
    exact = ntkl.laplace(network, (x, y), ntkl.Categorical(), structure="gp")
    value, used = float(exact.evidence()), float(exact.effective_parameters().sum())
    truth, rows = exact.latent_moments(test)[1].diagonal(dim1=1, dim2=2), []
    for times in (1, 2, 3, 5):
        start = time.perf_counter()
        small = ntkl.laplace(network, (x, y), ntkl.Categorical(),
                             structure=ntkl.Nystrom(rank=math.ceil(times * used)))
        found = small.latent_moments(test)[1].diagonal(dim1=1, dim2=2)
        rows.append(_excess(f"nystrom, {times} x {used:.0f}", found / truth - 1, float(small.evidence()) / value - 1,
                            time.perf_counter() - start))
    if options.peers:
        for eigenvalues in (20, math.ceil(3 * used)):
            arrays = to_arrays(network) | {"x": x.numpy(), "y": y.numpy(), "x_test": test.numpy()}
            found = run_python(options.peers, ["_peer_ella.py", "--eigenvalues", str(eigenvalues), "--threads",
                                               str(options.threads)], arrays)
            name = f"laplace-torch, ELLA, {eigenvalues} directions"
            if "error" in found:
                rows.append([name, found["error"].splitlines()[-1][:80], "", "", ""])
                continue
            ratio = torch.as_tensor(found["variances"]) / truth - 1
            rows.append(_excess(name, ratio, None, found["seconds"]))
    return rows


def _excess(name: str, ratio: Tensor, value: float | None, seconds: float) -> list[str]:
    return [name, f"{100 * float(ratio.median()):+.2g} %", f"{100 * float(ratio.abs().max()):.2g} %",
            "-" if value is None else f"{100 * abs(value):.2g} %", f"{seconds:.3g} s"]


def coverage(options: argparse.Namespace) -> list[list[str]]:
    """Seeds whose error bar and whose bounds hold."""
    x, y = (part[: options.small or 100] for part in digits())
    normed = x - x.mean(1, keepdim=True)
    likelihoods: dict[str, tuple[Callable[[], ntkl.Likelihood], Tensor, int]] = {
        "categorical": (ntkl.Categorical, y % 5, 5), "gaussian": (lambda: ntkl.Gaussian(0.05), x[:, 20:22], 2),
        "poisson": (ntkl.Poisson, (x > 0.5).sum(1).double() // 8, 1),
        "bernoulli": (ntkl.Bernoulli, (y > 4).double(), 1),
    }
    networks: dict[str, Callable[[int], nn.Module]] = {
        "MLP 64-16": lambda c: mlp((64, 16, c)),
        "CNN": lambda c: nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AvgPool2d(2),
                                       nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, c)),
        "deep MLP": lambda c: mlp((64, 12, 12, 12, c), nn.SiLU),
    }
    rows = []

    def row(name: str, network: nn.Module, data: tuple[Tensor, Tensor], likelihood: Callable[[], ntkl.Likelihood],
            rank: int | None) -> None:
        exact = float(ntkl.laplace(network, data, likelihood(), structure="full").log_marginal_likelihood())
        found = [ntkl.laplace(network, data, likelihood(),
                              structure=ntkl.Iterative(rank=rank, probes=16, relative_error=0.05, seed=seed)).evidence()
                 for seed in range(2 if options.small else 20)]
        inside = sum(abs(float(one) - exact) <= 2 * one.standard_error for one in found)
        bounded = sum(one.lower <= exact <= one.upper for one in found)
        rows.append([name, f"{exact:.1f}", f"{np.mean([one.standard_error for one in found]):.2g}",
                     f"{inside} of {len(found)}", f"{bounded} of {len(found)}"])
        print(rows[-1], flush=True)

    for name, build in networks.items():
        for which, (likelihood, targets, outputs) in likelihoods.items():
            torch.manual_seed(0)
            row(f"{name}, {which}", fitted(build(outputs).double(), normed, targets, likelihood()), (normed, targets),
                likelihood, 5)
    torch.manual_seed(0)
    sure = fitted(mlp((64, 16, 5)).double(), normed, y % 5, ntkl.Categorical(), precision=1e-3, steps=1000)
    row("MLP 64-16, categorical, saturated", sure, (normed, y % 5), ntkl.Categorical, 5)
    before, tuning.FIRST_LEADING = tuning.FIRST_LEADING, 8
    row("the same, leading rows", sure, (normed, y % 5), ntkl.Categorical, None)
    tuning.FIRST_LEADING = before
    return rows


def fitted(
    network: nn.Module, x: Tensor, y: Tensor, likelihood: ntkl.Likelihood, precision: float = 1.0, steps: int = 200
) -> nn.Module:
    """Trained by Adam, nearly to the MAP of a prior of this precision."""
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        decay = 0.5 * precision * sum(p.square().sum() for p in network.parameters())
        (decay - likelihood.log_prob(network(x), y).sum()).backward()
        optimizer.step()
    return network


def mnist(options: argparse.Namespace) -> list[list[str]]:
    """The headline: evidence with its bounds where no matrix fits."""
    n = options.small or options.examples
    x, y, test = images(options, n)
    test = test[: options.test]
    network, rows = trained((784, 104, 80, 10), x, y, 1.0, 40 if n <= 10_000 else 12), []
    dtype = getattr(torch, options.dtype)

    def fit(structure: Any, groups: str = "all") -> ntkl.Posterior:
        return ntkl.laplace(network, (x, y), ntkl.Categorical(), ntkl.GaussianPrior(1.0, groups=groups), structure,
                            dtype=dtype)

    def line(what: str, posterior: ntkl.Posterior, seconds: float, gib: float) -> None:
        found = posterior.evidence()
        bounds = "" if math.isinf(found.lower) else f"{found.lower:,.0f} to {found.upper:,.0f}"
        rows.append([what, f"{float(found):,.1f} ± {found.standard_error:.2g}", bounds, f"{seconds:.3g} s",
                     f"{gib:.2f} GiB"])
        print(rows[-1], flush=True)

    (plan,) = ntkl.plan(network, (x, y), ntkl.Categorical(), ntkl.GaussianPrior(1.0), ["iterative"], dtype=dtype).rows
    rows.append([f"forecast: {plan.note}", "", "", f"{plan.seconds:.3g} s", f"{(plan.memory or 0) / 2**30:.2f} GiB"])
    print(rows[-1], flush=True)
    before = resident_bytes()
    for rank in [None, *([options.rank] if options.rank else [])]:
        structure = ntkl.Iterative(rank, variance_error=options.variance_error)
        posterior, seconds, gib = measured(lambda s=structure: (p := fit(s), p.evidence())[0])
        line("iterative" if structure.rank is None else f"iterative, rank {structure.rank}", posterior, seconds, gib)
    if len(test):
        seconds = measured(lambda: posterior.predict(test))[1]
        precision = posterior.posterior_precision
        by = f"rank {precision.refined.probing.base.rank:,}" if precision.drawn_for_variances is None else "draws"
        rows.append([f"predictions of {len(test):,}, {by}",
                     f"γ = {float(posterior.effective_parameters().sum()):,.0f}", "", f"{seconds:.3g} s",
                     f"{max(0, peak_bytes() - before) / 2**30:.2f} GiB in all"])
        print(rows[-1], flush=True)
    if options.layers:
        start = time.perf_counter()
        posterior = fit(ntkl.Iterative(rank=options.rank), "layer")
        posterior.fit_hyperparameters()
        line("precisions " + ", ".join(f"{p:.3g}" for p in posterior.prior.precision.tolist()), posterior,
             time.perf_counter() - start, 0.0)
    posterior, seconds, gib = measured(lambda: fit("kfac"))
    line("kfac", posterior, seconds, gib)
    return rows


HEADS = {
    "products": ("one product of 16", "seconds", "over its matmuls"),
    "evidence": ("structure", "evidence", "seconds", "peak"),
    "spread": ("method", "products", "standard deviation", "mean error", "exact"),
    "hyperparameters": ("structure", "evidence", "precisions", "one evidence", "search"),
    "rank": ("rank", "variances, median", "worst", "evidence", "fit and predictions"),
    "coverage": ("network, likelihood", "exact evidence", "standard error", "within two", "within the bounds"),
    "mnist": ("what", "evidence", "certain bounds", "seconds", "peak"),
}


def main() -> None:
    arguments = parser(__doc__, "scale.json")
    arguments.add_argument("--parts", default=",".join(PARTS[:-1]), help="which, with commas between")
    arguments.add_argument("--data", type=Path, help="folder with mnist.npz")
    arguments.add_argument("--examples", type=int, default=10_000, help="images of the part mnist")
    arguments.add_argument("--test", type=int, default=1000, help="test images of the part mnist; 0: no predictions")
    arguments.add_argument("--rank", type=int, help="a second rank of the part mnist, for narrower bounds")
    arguments.add_argument("--variance-error", type=float, default=0.05, help="of predictions in the part mnist")
    arguments.add_argument("--layers", action="store_true", help="fit precisions of each layer in the part mnist")
    arguments.add_argument("--dtype", default="float32", choices=("float32", "float64"), help="of the part mnist")
    arguments.add_argument("--peers", help="interpreter with laplace-torch")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    options.small = 24 if options.small else 0
    warnings.simplefilter("ignore", ntkl.errors.NTKLaplaceWarning)
    result: dict[str, Any] = {"machine": machine(options.threads)}
    print(json.dumps(result["machine"]))
    for part in options.parts.split(","):
        rows = globals()[part](options)
        result[part] = rows
        print(f"\n{part}\n\n{table(HEADS[part], rows)}", flush=True)
        write(options.out, result)


if __name__ == "__main__":
    main()
