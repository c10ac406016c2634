"""One cell of the architecture study: a network trained at a prior on N images, and every score of it."""

from __future__ import annotations

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
_POINTS = 128  # of f for each prediction
_TUNED = 500
_FEW = 5000  # images at most, for leave-one-out and the bound
_QUIET = ntkl.Settings(progress=False)
_LAYERWISE = {"parameters": ["precision"], "steps": 20, "tolerance": 1e-4, "bounds": (1e-4, 1e5)}


@dataclass(frozen=True)
class Images:
    """Flat images and their labels; the last fifth of `train` is what a network trained on the rest is asked."""

    side: int
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    def split(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """80, 5 and 15 %: to train on, to tune on and to score on; of the last two at most 500 and 1,500."""
        count = len(self.train[1])
        given, tuned = round(0.8 * count), min(round(0.05 * count), _TUNED)
        rest = min(count - given - tuned, 3 * _TUNED)
        parts = [part[: given + tuned + rest].split([given, tuned, rest]) for part in self.train]
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
        """All fields: another cell is another computation."""
        return [f"{key}={value}" for key, value in asdict(self).items()]

    @property
    def label(self) -> str:
        """A file name."""
        more = [s for s in self.structures if s != "kfac"]
        parts = (self.data, self.count, self.seed, self.prior, self.network, *more)
        return "_".join(str(part) for part in parts).replace(" ", "")


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
        scored = {s: told[s] | _scored(whole[s], problem, told[s]) for s in cell.structures}
        loo = _loo(module, problem.train, precision) if cell.count <= _FEW else None
    x, y = problem.train
    with torch.no_grad():
        fit = -nn.functional.cross_entropy(module(x), y, reduction="sum").item()
    return {
        "parameters": sum(w.numel() for w in module.parameters()), "fit": fit, "loo": loo,
        "precision": precision, "structures": scored, "seconds": time.process_time() - begin,
    }


def _loo(module: nn.Module, data: tuple[Tensor, Tensor], precision: dict[str, float] | float) -> float:
    """Leave-one-out, in nats: exact for the last layer, with the others fixed."""
    prior = ntkl.GaussianPrior(precision if isinstance(precision, float) else list(precision.values())[-1])
    last = ntkl.laplace(module, data, ntkl.Categorical(), prior, "full", parameters="last_layer", settings=_QUIET)
    return float(last.loo_log_density())


def _fitted(
    module: nn.Module, data: tuple[Tensor, Tensor], cell: Cell, steps: int,
    precision: dict[str, float] | float | None = None,
) -> tuple[dict[str, ntkl.Posterior], dict[str, float] | float]:
    """The network trained (on), and its posteriors; layerwise precisions maximize KFAC's evidence, in two rounds."""
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
        fit = posterior("kfac", ntkl.GaussianPrior(1.0, groups="layer"))
        with torch.no_grad():
            fit.prior.log_precision.copy_(torch.tensor([found[name] for name in fit.prior.group_names]).log())
        fit.fit_hyperparameters(**_LAYERWISE)
        found = dict(zip(fit.prior.group_names, fit.prior.precision.tolist(), strict=True))
        steps = steps // 2
    others = {s: posterior(s, fit.prior) for s in cell.structures if s != "kfac"}
    return {"kfac": fit} | others, found


def _told(
    blind: ntkl.Posterior, module: nn.Module, tuned: tuple[Tensor, Tensor], rest: tuple[Tensor, Tensor]
) -> dict[str, Any]:
    """What the posterior of 80 % says of the others, in nats a point."""
    calibration = blind.calibrate(tuned).calibration  # scale and temperature
    x, y = (torch.cat(pair) for pair in zip(tuned, rest, strict=True))
    mean, covariance = blind.latent_moments(x)
    found = {"scale": calibration.scale, "temperature": calibration.temperature}
    found["map_validation"] = _log_likelihood(Calibration(scale=0.0), mean, covariance, y)[0]
    found["bma_validation"] = _log_likelihood(Calibration(), mean, covariance, y)[0]
    asked = len(tuned[1])
    found["clml"] = _log_likelihood(calibration, mean[asked:], covariance[asked:], y[asked:])[0]
    generator = torch.Generator().manual_seed(0)
    away = blind.sample(_DRAWS, generator=generator) - torch.cat([w.detach().flatten() for w in module.parameters()])
    weights = {name: w.detach() for name, w in module.named_parameters()}
    best = None
    for scale in _SCALES:
        own = []
        for step in away * scale**0.5:
            parts = step.float().split([w.numel() for w in weights.values()])
            drawn = {name: w + part.view_as(w) for (name, w), part in zip(weights.items(), parts, strict=True)}
            with torch.no_grad():
                own.append(torch.log_softmax(functional_call(module, drawn, (x,)), 1).gather(1, y[:, None])[:, 0])
        table = torch.stack(own).double()
        value = float(ntkl.selection.conditional_from_samples(table[:, :asked], "marginal").value)
        if best is None or value > best[0]:
            best = value, scale, table[:, asked:]
        if scale == 1.0:
            found["clml_draws_unscaled"] = _joint(table[:, asked:])
    return found | {"clml_draws": _joint(best[2]), "draws_scale": best[1]}


def _joint(table: Tensor) -> float:
    return float(ntkl.selection.conditional_from_samples(table, "joint").value) / table.shape[1]


def _scored(whole: ntkl.Posterior, problem: Images, told: dict[str, Any]) -> dict[str, Any]:
    """Evidence, the check of the prior, the bound, and test scores."""
    evidence = whole.evidence()
    used = whole.effective_parameters()
    check = check_prior(whole, used, evidence)
    mean, covariance = whole.latent_moments(problem.test[0])
    found = {
        "lml": float(evidence), "effective": float(used.sum()), "vague": check.vague, "narrow": check.narrow,
        "gap": check.gap, "prior_words": check.words,
    } | _bound(whole, problem.train)
    tuned = Calibration(told["scale"], told["temperature"])
    kinds = {"map": Calibration(scale=0.0), "bma": Calibration(), "scaled": tuned}
    for kind, calibration in kinds.items():
        values = _log_likelihood(calibration, mean, covariance, problem.test[1])
        found |= dict(zip((f"{kind}_log_likelihood", f"{kind}_accuracy"), values, strict=True))
    return found


def _bound(whole: ntkl.Posterior, data: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Gibbs risk and divergence from the prior; none for many images, or precisions that the evidence chose."""
    if len(whole.prior.log_precision) > 1 or len(data[1]) > _FEW:
        return {}
    bound = ntkl.risk_bound(whole, data, draws=_DRAWS)
    return {"bound": float(bound), "gibbs_risk": bound.risk, "kl": bound.kl}


def _log_likelihood(calibration: Calibration, mean: Tensor, covariance: Tensor, y: Tensor) -> tuple[float, float]:
    """Mean log likelihood and accuracy of the averaged, calibrated prediction."""
    response = CalibratedPredictive(calibration, ntkl.Categorical(), samples=_POINTS)(mean, covariance)
    return float(response.log_prob(y).mean()), accuracy(response.probs.numpy(), y.numpy())
