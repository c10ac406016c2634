"""laplace-torch's full GGN posterior: called by evidence_digits.py with the peers' interpreter.

usage: _peer_laplace_torch.py input.npz output.npz --dtype float32|float64 [--structure full] [--predict]
Input: ``net/*``, ``x``, ``y``, ``x_test``, ``precision``. Output: seconds, evidence, predicted probabilities.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from _networks import from_arrays, mlp
from laplace import Laplace


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("source")
    arguments.add_argument("target")
    arguments.add_argument("--dtype", default="float32")
    arguments.add_argument("--structure", default="full")
    arguments.add_argument("--predict", action="store_true")
    arguments.add_argument("--threads", type=int, default=2)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_default_dtype(getattr(torch, options.dtype))
    with np.load(options.source) as found:
        arrays = dict(found)
    dtype = torch.get_default_dtype()
    network = from_arrays(mlp((64, 64, 64, 10)), arrays)
    x, x_test = torch.as_tensor(arrays["x"]).to(dtype), torch.as_tensor(arrays["x_test"]).to(dtype)
    data = torch.utils.data.TensorDataset(x, torch.as_tensor(arrays["y"]))
    loader = torch.utils.data.DataLoader(data, batch_size=len(x))

    start = time.perf_counter()
    posterior = Laplace(
        network, "classification", subset_of_weights="all", hessian_structure=options.structure,
        prior_precision=float(arrays["precision"]),
    )
    posterior.fit(loader)
    fitted = time.perf_counter()
    evidence = posterior.log_marginal_likelihood()
    result = {
        "fit_seconds": fitted - start,
        "evidence_seconds": time.perf_counter() - fitted,
        "evidence": float(evidence),
    }
    if options.predict:
        start = time.perf_counter()
        probabilities = posterior(x_test)  # the package's default: glm with the probit approximation
        result["predict_seconds"] = time.perf_counter() - start
        result["probabilities"] = probabilities.detach().numpy()
    np.savez(options.target, **result)


if __name__ == "__main__":
    main()
