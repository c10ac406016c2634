"""This library at each step of its path, from the network as it was trained to training with evidence."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from _baselines import Baselines
from _problems import Problem
from _scores import Method, of_moments, of_probabilities
from torch import Tensor, nn

import ntk_laplace as ntkl
import _standin

__all__ = ["Ours", "Path"]


@dataclass(frozen=True)
class Path:
    """Settings of the training with evidence; found on the development sets."""

    epochs: int = 600
    rate: float = 1e-2
    frequency: int = 20
    burn_in: int = 100
    steps: int = 50
    groups: str = "layer"
    last: int = 0
    lbfgs: int = 5
    minibatch_frequency: int = 2
    minibatch_burn_in: int = 5
    start: float = 1.0
    learning_rate: float = 0.1
    structure: str = "kfac"


def _predictor(posterior: Any, calibrated: bool, classes: int | None) -> Callable[[Tensor], Any]:
    def predict(x: Tensor) -> torch.distributions.Distribution:
        found = _standin.predict(posterior, x, calibrated)
        return of_probabilities(found.probs) if classes else of_moments(found.mean, found.variance)

    return predict


class Ours:
    """Methods of one problem, weight decay and seed, on the networks of the baselines."""

    def __init__(self, baselines: Baselines, path: Path | None = None) -> None:
        self.baselines, self.problem, self.path = baselines, baselines.problem, path or Path()
        self.data = (self.problem.x, self.problem.y)
        self._kept: dict[str, Any] = {}

    def _once(self, name: str, compute: Callable[[], Any]) -> Any:
        if name not in self._kept:
            start = time.process_time()
            found = compute()
            self._kept[name] = (found, time.process_time() - start)
        return self._kept[name]

    def likelihood(self, noise: float | None = None) -> ntkl.Likelihood:
        return ntkl.Categorical() if self.problem.classes else ntkl.Gaussian(noise)

    def _method(self, posterior: Any, seconds: float, notes: dict[str, Any] | None = None) -> Method:
        classes, fitted = self.problem.classes, _standin.fitted(posterior)
        uncalibrated = _predictor(posterior, False, classes) if fitted else None
        return Method(_predictor(posterior, True, classes), seconds, uncalibrated, notes or {})

    # --- the network as it was trained

    def as_trained(self) -> ntkl.Posterior:
        """Exact, at the precision that its weight decay is."""
        own, count = self.baselines.whole[0], len(self.problem.y)
        with torch.no_grad():
            noise = None if self.problem.classes else float((own(self.problem.x) - self.problem.y).square().mean())
        precision = self.baselines.decay * count / (noise or 1.0)
        return ntkl.laplace(own, self.data, self.likelihood(noise), ntkl.GaussianPrior(precision))

    def posterior(self) -> Method:
        found, seconds = self._once("as trained", self.as_trained)
        return self._method(found, self.baselines.whole[1] + seconds)

    def hyperparameters(self) -> Method:
        """Precision and noise by the evidence at fixed weights."""
        start = time.process_time()
        found = self.as_trained()
        found.fit_hyperparameters(parameters=["precision"] if self.problem.classes else ["precision", "noise"],
                                  bounds=(1e-6, 1e6))  # fmt: skip
        return self._method(found, self.baselines.whole[1] + time.process_time() - start)

    def leave_one_out(self) -> Method:
        """Scale and temperature by leave-one-out, trusted or not."""
        start = time.process_time()
        found = self.as_trained()
        notes = _standin.fit_predictive(found)
        return self._method(found, self.baselines.whole[1] + time.process_time() - start, notes)

    # --- training with evidence

    def train(self) -> tuple[nn.Module, Any]:
        """A new network with its prior and noise; at the end the weights are at the optimum of what was found."""
        problem, path, recipe = self.problem, self.path, self.problem.recipe
        network = problem.network(self.baselines.seed)
        full = recipe.batch is None
        epochs = recipe.epochs if not full else min(path.epochs, recipe.epochs)
        schedule = ntkl.EvidenceSchedule(
            path.frequency if full else path.minibatch_frequency, path.steps,
            min(path.burn_in, epochs // 2) if full else path.minibatch_burn_in, path.learning_rate,
        )  # fmt: skip
        settings = ntkl.Settings(progress=False)
        prior = ntkl.GaussianPrior(path.start, groups=path.groups)
        common = {"batch_size": recipe.batch, "settings": settings}
        found = ntkl.train_with_evidence(
            network, self.data, self.likelihood(1.0), prior, path.structure, epochs=epochs, schedule=schedule,
            optimizer=lambda own: torch.optim.Adam(own, lr=path.rate if full else recipe.rate),
            scheduler=lambda own: torch.optim.lr_scheduler.CosineAnnealingLR(own, epochs), **common,
        )  # fmt: skip
        for optimizer, more in (
            (lambda own: torch.optim.Adam(own, lr=path.rate / 3), path.last),
            (lambda own: torch.optim.LBFGS(own, max_iter=20, line_search_fn="strong_wolfe"), path.lbfgs if full else 0),
        ):
            if more:
                held = ntkl.EvidenceSchedule(frequency=more, steps=0)
                rate = None if more == path.lbfgs else (lambda own, more=more: torch.optim.lr_scheduler.CosineAnnealingLR(own, more))
                found = ntkl.train_with_evidence(
                    network, self.data, found.posterior.likelihood, found.posterior.prior, path.structure, epochs=more, schedule=held,
                    optimizer=optimizer, scheduler=rate, **common,
                )  # fmt: skip
        return network, found

    @property
    def evidence(self) -> tuple[nn.Module, Any]:
        return self._once("evidence", self.train)[0]

    def evidence_network(self) -> Method:
        """The network that training with evidence gives, alone."""
        (_, found), seconds = self._once("evidence", self.train)
        posterior = found.posterior

        def predict(x: Tensor) -> torch.distributions.Distribution:
            answer = posterior.predict(x, "map")
            return of_probabilities(answer.probs) if self.problem.classes else of_moments(answer.mean, answer.variance)

        return Method(predict, seconds, notes=self._found(found))

    def online(self) -> Method:
        """The posterior of the training itself, KFAC."""
        (_, found), seconds = self._once("evidence", self.train)
        return self._method(found.posterior, seconds)

    def exact(self) -> ntkl.Posterior:
        network, found = self.evidence
        return ntkl.laplace(network, self.data, found.posterior.likelihood, found.posterior.prior)

    def evidence_posterior(self) -> Method:
        """Exact, at the hyperparameters of the training."""
        _, seconds = self._once("evidence", self.train)
        found, more = self._once("exact", self.exact)
        return self._method(found, seconds + more)

    def recommended(self) -> Method:
        """The path: training with evidence, exact posterior, leave-one-out."""
        _, seconds = self._once("evidence", self.train)
        found, more = self._once("exact", self.exact)
        start = time.process_time()
        found = copy.copy(found)
        notes = _standin.fit_predictive(found)
        return self._method(found, seconds + more + time.process_time() - start, notes)

    def _found(self, training: Any) -> dict[str, Any]:
        posterior = training.posterior
        notes = {"precision": posterior.prior.precision.detach().flatten().tolist(), "epoch": training.best_epoch}
        return notes if self.problem.classes else notes | {"noise": float(posterior.likelihood.noise)}

    # --- the network people bring

    def retrained(self) -> Method:
        """One round of evidence at fixed weights and of training at its precisions, then leave-one-out."""
        start = time.process_time()
        found, network = _standin.retrain(self.as_trained(), self.baselines.whole[0], self.problem)
        notes = _standin.fit_predictive(found)
        return self._method(found, self.baselines.whole[1] + time.process_time() - start, notes)
