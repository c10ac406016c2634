"""One row of many_outputs.py, in a process of its own: the last layer by ntk_laplace or by laplace-torch.

usage: _outputs.py input.npz output.npz --package ours|laplace-torch [--structure gp|kfac|...]
Input: ``net/*``, ``x``, ``y``, ``x_test``, ``widths``. Output: processor seconds of the fit and of a prediction per
input, peak bytes, evidence, probabilities.
"""

from __future__ import annotations

import argparse
import importlib
import time
from typing import Any

import numpy as np
import torch
from _common import peak_bytes
from _networks import from_arrays, mlp
from torch import Tensor, nn


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("source")
    arguments.add_argument("target")
    arguments.add_argument("--package", default="ours")
    arguments.add_argument("--structure", default="gp")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    with np.load(options.source) as found:
        arrays = dict(found)
    network = from_arrays(mlp(tuple(arrays["widths"].tolist())), arrays)
    x, y, x_test = (torch.as_tensor(arrays[name]) for name in ("x", "y", "x_test"))
    importlib.import_module("ntk_laplace" if options.package == "ours" else "laplace")  # the import is not timed
    fit = ours if options.package == "ours" else laplace_torch
    x_test = x_test if options.package == "ours" else x_test[:2]  # laplace-torch: a gigabyte for each
    few = torch.randn(6, 4), torch.arange(6) % 3
    predicted(fit(mlp((4, 4, 3)), *few, options.structure)[0], few[0])  # what is imported on first use is not timed
    base, start = peak_bytes(), time.process_time()
    posterior, evidence = fit(network, x, y, options.structure)
    fitted, after = time.process_time(), peak_bytes()
    probabilities = predicted(posterior, x_test)
    np.savez(options.target, fit_seconds=fitted - start, fit_bytes=after - base, evidence=float(evidence),
             predict_seconds=(time.process_time() - fitted) / len(x_test), predict_bytes=peak_bytes() - base,
             probabilities=probabilities.detach().numpy())


def ours(network: nn.Module, x: Tensor, y: Tensor, structure: str) -> tuple[Any, Tensor]:
    """The posterior of the last layer and its evidence."""
    import ntk_laplace as ntkl

    posterior = ntkl.laplace(network, (x, y), ntkl.Categorical(), structure=structure, parameters="last_layer")
    return posterior, posterior.log_marginal_likelihood()


def laplace_torch(network: nn.Module, x: Tensor, y: Tensor, structure: str) -> tuple[Any, Tensor]:
    """The same by laplace-torch."""
    from laplace import Laplace

    posterior = Laplace(network, "classification", subset_of_weights="last_layer", hessian_structure=structure,
                        prior_precision=1.0)
    posterior.fit(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=20))
    return posterior, posterior.log_marginal_likelihood()


def predicted(posterior: Any, x: Tensor) -> Tensor:
    """Class probabilities by the probit approximation; laplace-torch's in parts that fit in memory."""
    if hasattr(posterior, "network"):
        return posterior.predict(x, "probit").probs
    return torch.cat([posterior(part, pred_type="glm", link_approx="probit") for part in x.split(1)])


if __name__ == "__main__":
    main()
