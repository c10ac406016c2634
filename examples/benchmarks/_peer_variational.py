"""IVON and posteriors' variational inference: called by variational.py with the peers' interpreter.

usage: _peer_variational.py input.npz output.npz --peer ivon|diag|dense --settings JSON --steps K [--threads T]
Input: ``net/*``, ``x``, ``y``, ``noise``, ``precision``. Output: seconds, mean (P,), and precision (P,) or root (P, P)
of the covariance of the Gaussian it found; or ``failed``, the words of its error.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from typing import Any

import numpy as np
import torch
from _networks import from_arrays, mlp
from torch import Tensor, nn
from torch.func import functional_call


def ivon(network: nn.Module, x: Tensor, y: Tensor, noise: float, precision: float, steps: int,
         lr: float, hess_init: float, samples: int, beta2: float) -> dict[str, Tensor]:
    """A cosine schedule, the whole data at each step, as its README has it."""
    from ivon import IVON

    n = len(x)
    optimizer = IVON(network.parameters(), lr=lr, ess=n, hess_init=hess_init, beta2=beta2,
                     weight_decay=precision / n, mc_samples=samples)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        for _ in range(samples):
            with optimizer.sampled_params(train=True):
                optimizer.zero_grad()
                (0.5 * (network(x) - y).square().sum() / noise / n).backward()
        optimizer.step()
        schedule.step()
    group = optimizer.param_groups[0]
    mean = torch.cat([p.detach().flatten() for p in network.parameters()])
    return {"mean": mean, "precision": n * (group["hess"] + group["weight_decay"])}


def posteriors_vi(network: nn.Module, x: Tensor, y: Tensor, noise: float, precision: float, steps: int,
                  kind: str, lr: float, samples: int, initial: float) -> dict[str, Tensor]:
    """`posteriors.vi.diag` or `vi.dense` with Adam."""
    import posteriors
    import torchopt

    parameters = {name: p.detach().clone() for name, p in network.named_parameters()}

    def log_posterior(theta: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        f = functional_call(network, theta, (batch[0],))
        squares = sum(p.square().sum() for p in theta.values())
        return -0.5 * (f - batch[1]).square().sum() / noise - 0.5 * precision * squares, f

    module = posteriors.vi.diag if kind == "diag" else posteriors.vi.dense
    start = {"init_log_sds": float(np.log(initial))} if kind == "diag" else {"init_L": initial}
    transform = module.build(log_posterior, torchopt.adam(lr=lr), n_samples=samples, **start)
    state = transform.init(parameters)
    for _ in range(steps):
        state, _ = transform.update(state, (x, y))
    mean = torch.cat([p.detach().flatten() for p in state.params.values()])
    if kind == "diag":
        logs = torch.cat([p.detach().flatten() for p in state.log_sd_diag.values()])
        return {"mean": mean, "precision": (-2 * logs).exp()}
    return {"mean": mean, "root": posteriors.L_from_flat(state.L_factor.detach())}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("source")
    arguments.add_argument("target")
    arguments.add_argument("--peer", choices=("ivon", "diag", "dense"), required=True)
    arguments.add_argument("--settings", type=json.loads, default={})
    arguments.add_argument("--steps", type=int, default=5000)
    arguments.add_argument("--threads", type=int, default=1)
    options = arguments.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    with np.load(options.source) as found:
        arrays = dict(found)
    network = from_arrays(mlp((1, 25, 25, 1)), arrays)
    x, y = torch.as_tensor(arrays["x"]), torch.as_tensor(arrays["y"])
    common = network, x, y, float(arrays["noise"]), float(arrays["precision"]), options.steps
    settings: dict[str, Any] = options.settings
    start = time.perf_counter()
    try:
        if options.peer == "ivon":
            result = ivon(*common, **settings)
        else:
            result = posteriors_vi(*common, kind=options.peer, **settings)
    except (RuntimeError, ValueError) as error:  # LinAlgError among them
        np.savez(options.target, failed=f"{type(error).__name__}: {error}"[:200])
        return
    np.savez(options.target, seconds=time.perf_counter() - start, **{k: v.numpy() for k, v in result.items()})


if __name__ == "__main__":
    main()
