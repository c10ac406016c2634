"""One cell of the architecture study: a network trained at a prior on N images, and every score of it."""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _networks_l22 import network, precision_per_parameter, train
from torch import Tensor, nn
from torch.func import functional_call

import ntk_laplace as ntkl
from ntk_laplace.metrics import accuracy
from ntk_laplace.model.calibration import CalibratedPredictive, Calibration
from ntk_laplace.tools.comparison.priors import check_prior

__all__ = ["Cell", "Images", "images", "trained_and_scored"]

_DRAWS = 20  # of weights, as in [L22]
_SCALES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)  # of the covariance that they are drawn from
_POINTS = 256  # of f for each prediction
_QUIET = ntkl.Settings(progress=False)
_LAYERWISE = {"parameters": ["precision"], "steps": 20, "tolerance": 1e-4, "bounds": (1e-4, 1e5)}


@dataclass(frozen=True)
class Images:
    """Flat images and their labels; the last fifth of `train` is what a network trained on the rest is asked."""

    side: int
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    def split(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """80, 5 and 15 %: to train on, to tune on, to score on."""
        count = len(self.train[1])
        sizes = [round(0.8 * count), round(0.05 * count)]
        parts = [part.split([*sizes, count - sum(sizes)]) for part in self.train]
        return tuple(zip(*parts, strict=True))


def images(name: str, count: int, asked: int, seed: int, data: Path | None) -> Images:
    """`count` training images and `asked` test images, float32, with pixels of mean about 0 and variance about 1."""
    if name == "digits":
        from sklearn.datasets import load_digits

        digits = load_digits()
        order = np.random.default_rng(seed).permutation(len(digits.target))
        x = torch.as_tensor(digits.data[order] / 16 - 0.3).float() / 0.38
        y = torch.as_tensor(digits.target[order]).long()
        return Images(8, (x[:count], y[:count]), (x[count : count + asked], y[count : count + asked]))
    if data is None:
        raise SystemExit("MNIST needs --data DIR with mnist.npz")
    with np.load(data / "mnist.npz") as file:
        index = np.random.default_rng(seed).permutation(len(file["y_train"]))[:count]
        pairs = [(file["X_train"][index], file["y_train"][index]), (file["X_test"][:asked], file["y_test"][:asked])]
    ready = []
    for image, label in pairs:
        halved = nn.functional.avg_pool2d(torch.as_tensor(image).float().unsqueeze(1) / 255, 2)
        ready.append(((halved.flatten(1) - 0.13) / 0.29, torch.as_tensor(label).long()))
    return Images(14, *ready)


@dataclass(frozen=True)
class Cell:
    """What is trained and scored."""

    data: str
    count: int
    prior: str  # a precision, or "layerwise"
    network: str
    seed: int
    steps: int
    batch: int
    asked: int
    structures: tuple[str, ...]

    def arguments(self) -> list[str]:
        return [f"{key}={value}" for key, value in asdict(self).items()]

    @property
    def label(self) -> str:
        return "_".join(str(v) for v in (self.data, self.count, self.seed, self.prior, self.network)).replace(" ", "")


def trained_and_scored(cell: Cell, problem: Images, weights: Path) -> dict[str, Any]:
    """Scores of both networks, the one of 80 % and the one that was trained on with all; they are kept at `weights`."""
    begin = time.process_time()
    given, tuned, rest = problem.split()
    module = network(cell.network, problem.side, cell.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ntkl.NTKLaplaceWarning)  # short trainings stop beside the optimum
        blind, precision = _fitted(module, given, cell, cell.steps)
        kept = {"blind": {k: v.clone() for k, v in module.state_dict().items()}}
        told = {s: _told(blind[s], module, tuned, rest) for s in cell.structures}
        module.train()
        whole, precision = _fitted(module, problem.train, cell, cell.steps // 2, precision)
        torch.save(kept | {"whole": module.state_dict(), "precision": precision}, weights)
        scored = {s: told[s] | _scored(whole[s], problem.test, told[s]) for s in cell.structures}
        loo = ntkl.laplace(module, problem.train, ntkl.Categorical(), _last_layer(precision), "full",
                           parameters="last_layer", settings=_QUIET).loo_log_density()  # fmt: skip
    x, y = problem.train
    with torch.no_grad():
        fit = -nn.functional.cross_entropy(module(x), y, reduction="sum").item()
    return {
        "parameters": sum(w.numel() for w in module.parameters()), "fit": fit, "loo": loo.item(),
        "precision": precision, "structures": scored, "seconds": time.process_time() - begin,
    }  # fmt: skip


def _last_layer(precision: dict[str, float] | float) -> ntkl.GaussianPrior:
    return ntkl.GaussianPrior(precision if isinstance(precision, float) else list(precision.values())[-1])


def _fitted(
    module: nn.Module, data: tuple[Tensor, Tensor], cell: Cell, steps: int,
    precision: dict[str, float] | float | None = None,
) -> tuple[dict[str, ntkl.Posterior], dict[str, float] | float]:  # fmt: skip
    """The network trained (on), and its posteriors; layerwise precisions are those of KFAC's evidence, in two rounds."""
    def posterior(structure: str, prior: ntkl.GaussianPrior) -> ntkl.Posterior:
        return ntkl.laplace(module, data, ntkl.Categorical(), prior, structure, settings=_QUIET)

    if cell.prior != "layerwise":
        precision = float(cell.prior)
        train(module, data, precision_per_parameter(module, precision), steps, cell.batch)
        return {s: posterior(s, ntkl.GaussianPrior(precision)) for s in cell.structures}, precision
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name, _ in module.named_parameters()))
    found = precision if precision is not None else dict.fromkeys(layers, 1.0)
    for _ in range(2):
        train(module, data, precision_per_parameter(module, found), steps, cell.batch)
        prior = ntkl.GaussianPrior(1.0, groups="layer")
        fit = posterior("kfac", prior)
        with torch.no_grad():
            fit.prior.log_precision.copy_(torch.tensor([found[_layer(n)] for n in fit.prior.group_names]).log())
        fit.fit_hyperparameters(**_LAYERWISE)
        values = fit.prior.precision.tolist()
        found = {_layer(name): value for name, value in zip(fit.prior.group_names, values, strict=True)}
        steps = math.ceil(steps / 2)
    others = {s: posterior(s, fit.prior) for s in cell.structures if s != "kfac"}
    return {"kfac": fit} | others, found
