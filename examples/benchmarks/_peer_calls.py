"""laplace-torch's answers for laplace_torch.py, whose networks and data it gets.

usage: _peer_calls.py input.npz output.npz
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from _networks import from_arrays, mlp
from laplace import Laplace


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("source")
    arguments.add_argument("target")
    options = arguments.parse_args()
    torch.set_default_dtype(torch.float64)
    with np.load(options.source) as found:
        arrays = dict(found)
    x, x_new = torch.as_tensor(arrays["x"]), torch.as_tensor(arrays["x_new"])
    precision, noise = float(arrays["precision"]), float(arrays["noise"])
    result = {}
    for task in ("regression", "classification"):
        own = {name.removeprefix(f"{task}/"): value for name, value in arrays.items() if name.startswith(f"{task}/")}
        y = torch.as_tensor(own.pop("y"))
        network = from_arrays(mlp(tuple(own.pop("widths"))), own)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=len(x))
        for subset, structure in (("all", "full"), ("all", "kron"), ("all", "diag"), ("last_layer", "full")):
            options_of = {"sigma_noise": noise**0.5} if task == "regression" else {}
            posterior = Laplace(network, task, subset, structure, prior_precision=precision, **options_of)
            posterior.fit(loader)
            name = f"{task}/{subset}/{structure}"
            result[f"{name}/evidence"] = posterior.log_marginal_likelihood().item()
            found = posterior(x_new)  # regression: mean and variance of f; classification: probit probabilities
            mean, variance = found if task == "regression" else (found, torch.zeros(0))
            result[f"{name}/mean"], result[f"{name}/variance"] = mean.detach().numpy(), variance.detach().numpy()
    np.savez(options.target, **result)


if __name__ == "__main__":
    main()
