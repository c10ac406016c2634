"""Structured posteriors of curvlinops, asdl, BackPACK, laplace-torch: called by structured.py with the peers' Python.

usage: _peer_structured.py input.npz output.npz --task TASK [--widths 784 256 128 10] [--batch-sizes 250 1000 10000]
Tasks: ``laplace-asdl``, ``laplace-curvlinops`` (Kronecker posterior: fit, evidence, predictive), ``curvlinops``,
``asdl`` (the factors alone), ``curvlinops-ekfac`` (eigenbasis and corrected eigenvalues), ``diag-asdl``,
``diag-backpack``, ``diag-curvlinops`` (laplace-torch's diagonal posterior), ``factors`` (curvlinops' factors as a dense
matrix, for a small network). The batch size that is fastest counts. A fit that passes the limit stops, and says how
many examples it had read. Input: ``net/*``, ``x``, ``y``, ``x_test``. float32 throughout.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import curvlinops
import laplace
import laplace.curvature
import numpy as np
import torch
from _networks import from_arrays, mlp
from asdl.fisher import FisherConfig, get_fisher_maker
from asdl.grad_maker import LOSS_CROSS_ENTROPY
from asdl.matrices import FISHER_EXACT, SHAPE_KRON
from torch import Tensor, nn

Pair = tuple[Tensor, Tensor]
BACKENDS = {"asdl": "AsdlGGN", "backpack": "BackPackGGN", "curvlinops": "CurvlinopsGGN"}


class OutOfTimeError(Exception):
    """The limit has passed."""


class Batches:
    """What laplace-torch asks of a loader: batches, their number, and a dataset; stops when the time is over."""

    def __init__(self, x: Tensor, y: Tensor, size: int, limit: float) -> None:
        self.dataset = torch.utils.data.TensorDataset(x, y)
        self.size, self.limit = size, limit
        self.seen, self.started = 0, time.perf_counter()

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.size)

    def __iter__(self) -> Iterator[Pair]:
        self.seen = 0
        for start in range(0, len(self.dataset), self.size):
            if time.perf_counter() - self.started > self.limit:
                raise OutOfTimeError
            yield self.dataset[start : start + self.size]
            self.seen = min(start + self.size, len(self.dataset))


def posterior(network: nn.Module, structure: str, backend: str) -> Any:
    """laplace-torch's posterior over all weights, not yet fitted."""
    return laplace.Laplace(
        network, "classification", subset_of_weights="all", hessian_structure=structure, prior_precision=1.0,
        backend=getattr(laplace.curvature, BACKENDS[backend]),
    )


def fit_laplace(structure: str, backend: str) -> Callable[[nn.Module, Batches], Any]:
    def task(network: nn.Module, batches: Batches) -> Any:
        fitted = posterior(network, structure, backend)
        fitted.fit(batches)
        return fitted

    return task


def fit_curvlinops(network: nn.Module, batches: Batches, ekfac: bool = False, separate: bool = True) -> Any:
    """curvlinops' factors with the exact output Hessian ("type-2"), and nothing else."""
    kind = curvlinops.EKFACLinearOperator if ekfac else curvlinops.KFACLinearOperator
    operator = kind(
        network, nn.CrossEntropyLoss(reduction="sum"), list(network.parameters()), batches,
        fisher_type=curvlinops.FisherType.TYPE2, check_deterministic=False, num_data=len(batches.dataset),
        num_per_example_loss_terms=1, separate_weight_and_bias=separate,
    )
    operator.compute_kronecker_factors()
    if ekfac:
        operator.compute_eigenvalue_correction()
    return operator


def fit_asdl(network: nn.Module, batches: Batches) -> None:
    """asdl's factors with the exact output Hessian, added up by asdl itself."""
    config = FisherConfig(FISHER_EXACT, [SHAPE_KRON], loss_type=LOSS_CROSS_ENTROPY, data_size=1)
    maker = get_fisher_maker(network, config)
    for i, (x, _) in enumerate(batches):
        maker.setup_model_call(network, x)
        maker.forward_and_backward(accumulate=i > 0)


TASKS: dict[str, Callable[[nn.Module, Batches], Any]] = {
    "laplace-asdl": fit_laplace("kron", "asdl"),
    "laplace-curvlinops": fit_laplace("kron", "curvlinops"),
    "curvlinops": fit_curvlinops,
    "curvlinops-ekfac": lambda network, batches: fit_curvlinops(network, batches, ekfac=True),
    "asdl": fit_asdl,
    "diag-asdl": fit_laplace("diag", "asdl"),
    "diag-backpack": fit_laplace("diag", "backpack"),
    "diag-curvlinops": fit_laplace("diag", "curvlinops"),
}


def timed(options: argparse.Namespace, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Shortest fit over batch sizes and turns; evidence and predictive of the last one."""
    x, y, x_test = (torch.as_tensor(arrays[name]) for name in ("x", "y", "x_test"))
    best, result, fitted, seen = float("inf"), {}, None, 0
    for size in options.batch_sizes:
        for _ in range(options.repeats):
            network = from_arrays(mlp(tuple(options.widths)), arrays)
            start = time.perf_counter()
            batches = Batches(x, y, min(size, len(x)), options.limit)
            try:
                fitted = TASKS[options.task](network, batches)
            except OutOfTimeError:
                seen = max(seen, batches.seen)
                break
            seconds = time.perf_counter() - start
            name = f"fit_seconds_{size}"
            result[name] = min(seconds, result.get(name, seconds))
            if seconds < best:
                best, result["batch_size"] = seconds, size
    if best == float("inf"):
        return {"over_limit": options.limit, "examples_read": seen}
    result["fit_seconds"] = best
    if not options.task.startswith(("laplace-", "diag-")):
        return result
    start = time.perf_counter()
    result["evidence"] = float(fitted.log_marginal_likelihood())
    result["fit_evidence_seconds"] = best + time.perf_counter() - start
    if options.predict:
        start = time.perf_counter()
        probabilities = fitted(x_test)  # the package's default: glm with the probit approximation
        result["predict_seconds"] = time.perf_counter() - start
        result["fit_predict_seconds"] = best + result["predict_seconds"]
        result["probabilities"] = probabilities.detach().numpy()
        few = x_test[:10]  # a second pass over all of them would take as long
        result["variances"] = fitted._glm_predictive_distribution(few)[1].detach().numpy()
    return result


def dense(options: argparse.Namespace, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """curvlinops' KFAC as a dense matrix: weight and bias apart, and in one block."""
    batches = Batches(torch.as_tensor(arrays["x"]), torch.as_tensor(arrays["y"]), 10**9, options.limit)
    found = {}
    for name, separate in (("separate", True), ("joint", False)):
        network = from_arrays(mlp(tuple(options.widths)), arrays)
        operator = fit_curvlinops(network, batches, separate=separate)
        found[name] = (operator @ torch.eye(operator.shape[1])).detach().numpy()
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("source")
    arguments.add_argument("target")
    arguments.add_argument("--task", required=True, choices=[*TASKS, "factors"])
    arguments.add_argument("--widths", type=int, nargs="+", default=[784, 256, 128, 10])
    arguments.add_argument("--batch-sizes", type=int, nargs="+", default=[250, 1000, 10000])
    arguments.add_argument("--predict", action="store_true", help="time the predictive too")
    arguments.add_argument("--limit", type=float, default=60.0)
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--threads", type=int, default=2)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")  # asdl's hooks are of a deprecated kind
    with np.load(options.source) as found:
        arrays = dict(found)
    np.savez(options.target, **(dense if options.task == "factors" else timed)(options, arrays))


if __name__ == "__main__":
    main()
