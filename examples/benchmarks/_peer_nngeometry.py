"""nngeometry's Gram matrix: called by gram.py with the peers' interpreter.

usage: _peer_nngeometry.py input.npz output.npz --case mlp [--repeats 3]
Input: ``net/*``, ``x``. Output: seconds, the Gram of the first 8 examples in interleaved order.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from _networks import from_arrays, gram_case
from nngeometry.gram import GramMatrix


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("source")
    arguments.add_argument("target")
    arguments.add_argument("--case", required=True)
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--threads", type=int, default=2)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    with np.load(options.source) as found:
        arrays = dict(found)
    network = from_arrays(gram_case(options.case, 8).network, arrays)
    x = torch.as_tensor(arrays["x"])
    data = torch.utils.data.TensorDataset(x, torch.zeros(len(x)))
    best, gram = float("inf"), None
    for _ in range(options.repeats):
        gram = None
        loader = torch.utils.data.DataLoader(data, batch_size=len(x))  # one batch: its fastest setting
        start = time.perf_counter()
        gram = GramMatrix(network, loader).to_torch()
        best = min(best, time.perf_counter() - start)
    assert gram is not None
    corner = gram[:, :8, :, :8].permute(1, 0, 3, 2)  # (C, N, C, N) -> interleaved
    size = corner.shape[0] * corner.shape[1]
    np.savez(options.target, seconds=best, corner=corner.reshape(size, size).detach().numpy())


if __name__ == "__main__":
    main()
