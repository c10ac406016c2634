"""Which row of a table to label next: RMSE against the number of labels, after the active learning of [S20].

    python examples/active/tables.py [--problems boston,energy --data DIR] --threads 1 --out labels

scikit-learn's diabetes, or Boston and energy (DIR/*.npz). As in [S20, section 5.2]: 20 labels at the
start, 100 test points, 100 more for validation, and one row of the rest labeled in each of twenty rounds. No validation
is needed here, because the evidence chooses precisions and noise, and these rows are left aside. In each round a
perceptron with 50 tanh units is trained with its evidence (200 epochs) on all labels so far. The next row is any, or
the one of most "information", which is that of the largest variance here, under the exact posterior, KFAC and a
diagonal; or that of the largest "epig", the default, with the rows of the pool as targets. It prints RMSE in the
original units and log likelihoods (glm, standardized); means and paired standard errors over ten seeds of rows and
weights. It writes tables.json and tables.png.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from torch import Tensor

import ntk_laplace as ntkl

sys.path.append(str(Path(__file__).resolve().parent))

from labels import START, Choice, main, mlp

ASIDE = 100


def at_random(posterior: ntkl.Posterior, x: Tensor, y: Tensor, rest: Tensor, generator: torch.Generator) -> Tensor:
    """Any row."""
    return torch.randperm(len(rest), generator=generator)[:1]


def largest(method: str, structure: str) -> Choice:
    """The row of the largest score, under a posterior of this structure with the same hyperparameters."""

    def choice(posterior: ntkl.Posterior, x: Tensor, y: Tensor, rest: Tensor, generator: torch.Generator) -> Tensor:
        own = posterior
        if structure != "gp":
            network, likelihood, prior = posterior.network.module, posterior.likelihood, posterior.prior
            own = ntkl.laplace(network, (x, y), likelihood, prior, structure)
        return ntkl.active.score(own, rest, method).topk(1).indices

    return choice


WAYS: dict[str, Choice] = {
    "random": at_random, "information": largest("information", "gp"), "epig": largest("epig", "gp"),
    "information, kfac": largest("information", "kfac"), "information, diag": largest("information", "diag"),
}


def rows(name: str, folder: Path | None) -> tuple[Tensor, Tensor]:
    """Standardized inputs, and targets (N, 1)."""
    if name == "diabetes":
        x, y = load_diabetes(return_X_y=True)
    else:
        with np.load(Path(str(folder)) / f"{name}.npz") as found:
            x, y = found["X"], found["y"]
    inputs = torch.as_tensor(x, dtype=torch.float64)
    return (inputs - inputs.mean(0)) / inputs.std(0), torch.as_tensor(y, dtype=torch.float64).reshape(-1, 1)


def labeled(name: str, choice: Choice, seed: int, options: Any) -> dict[str, list[float]]:
    """Test scores after each round."""
    x, y = rows(name, options.data)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=generator)
    x, y, x_test, y_test = x[order[2 * ASIDE :]], y[order[2 * ASIDE :]], x[order[:ASIDE]], y[order[:ASIDE]]
    scale = y[:START].std()
    y, y_test = ((one - y[:START].mean()) / scale for one in (y, y_test))
    known, found = list(range(START)), {"labels": [], "rmse": [], "log_likelihood": []}
    schedule = ntkl.EvidenceSchedule(frequency=20, steps=10)
    while True:
        torch.manual_seed(seed)
        network = mlp((x.shape[1], 50, 1)).double()
        posterior = ntkl.train_with_evidence(
            network, (x[known], y[known]), ntkl.Gaussian(noise=0.1), structure="gp", schedule=schedule,
            epochs=10 if options.small else 200, settings=ntkl.Settings(progress=False),
        ).posterior
        response = posterior.predict(x_test)
        found["labels"].append(len(known))
        found["rmse"].append(float(scale * (response.mean - y_test).square().mean().sqrt()))
        found["log_likelihood"].append(response.log_prob(y_test).mean().item())
        if len(found["labels"]) > options.rounds:
            return found
        rest = [i for i in range(len(x)) if i not in set(known)]
        known.append(rest[int(choice(posterior, x[known], y[known], x[rest], generator))])


if __name__ == "__main__":
    main(WAYS, __doc__, "tables", scored=labeled, score="rmse", problems=("diabetes", "boston", "energy"), rounds=20)
