"""laplace-torch's ELLA: called by scale.py with the peers' interpreter.

usage: _peer_ella.py input.npz output.npz --eigenvalues K [--threads T]
Input: ``net/*``, ``x``, ``y``, ``x_test``. Output: seconds of fit and predictions, variances of the latent outputs.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from _networks import from_arrays, mlp
from laplace import ELLA


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("source")
    arguments.add_argument("target")
    arguments.add_argument("--eigenvalues", type=int, default=20)
    arguments.add_argument("--threads", type=int, default=2)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_default_dtype(torch.float64)
    with np.load(options.source) as found:
        arrays = dict(found)
    network = from_arrays(mlp((64, 64, 64, 10)), arrays)
    x, x_test = torch.as_tensor(arrays["x"]), torch.as_tensor(arrays["x_test"])
    data = torch.utils.data.TensorDataset(x, torch.as_tensor(arrays["y"]))
    loader = torch.utils.data.DataLoader(data, batch_size=100)
    start = time.perf_counter()
    posterior = ELLA(network, "classification", subsample_size=len(x), n_eigenvalues=min(options.eigenvalues, len(x)))
    posterior.fit(loader)
    _, covariance = posterior._glm_predictive_distribution(x_test)
    variances = covariance.diagonal(dim1=1, dim2=2)
    np.savez(options.target, seconds=time.perf_counter() - start, variances=variances.detach().numpy())


if __name__ == "__main__":
    main()
