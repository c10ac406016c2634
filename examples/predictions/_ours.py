"""The library at each step of its path, from the network as it was trained to training with evidence."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _baselines import Baselines
from _scores import Method, Predictor, of_moments, of_probabilities
from torch import Tensor, nn
from torch.optim import Adam

import ntk_laplace as ntkl

__all__ = ["Ours"]

LARGEST = 10_000  # rows and columns of an exact posterior's matrix
BOUNDS = (1e-6, 1e6)
EPOCHS = 300  # of full batches, with evidence; half of the plain training's
QUIET = ntkl.Settings(progress=False)


class Ours:
    """Methods of one problem, weight decay and seed, on the networks of the baselines."""

    def __init__(self, baselines: Baselines) -> None:
        self.baselines, self.problem = baselines, baselines.problem
        self.data = (self.problem.x, self.problem.y)
        self.moving = ["precision"] if self.problem.classes else ["precision", "noise"]
        self._kept: dict[str, tuple[Any, float]] = {}

    def _once(self, compute: Callable[[], Any]) -> tuple[Any, float]:
        """A result, and the seconds it took when it was computed."""
        name = compute.__name__
        if name not in self._kept:
            start = time.process_time()
            found = compute()
            self._kept[name] = found, time.process_time() - start
        return self._kept[name]

    def _likelihood(self, noise: float = 1.0) -> ntkl.Likelihood:
        return ntkl.Categorical() if self.problem.classes else ntkl.Gaussian(noise)

    def _predictor(self, posterior: ntkl.Posterior, calibrated: bool = False, method: str = "glm") -> Predictor:
        def predict(x: Tensor) -> torch.distributions.Distribution:
            found = posterior.predict(x, method, calibrated=calibrated)
            return of_probabilities(found.probs) if self.problem.classes else of_moments(found.mean, found.variance)

        return predict

    @property
    def exact(self) -> bool:
        """Whether the exact posterior is cheap: NR or P is small."""
        weights = sum(p.numel() for p in self.problem.network(0).parameters())
        rows = len(self.problem.y) * max((self.problem.classes or 2) - 1, 1)
        return min(weights, rows) <= LARGEST

    def laplace(self, network: nn.Module, likelihood: ntkl.Likelihood, prior: ntkl.GaussianPrior) -> ntkl.Posterior:
        """Exact if that is cheap, else KFAC."""
        structure = "auto" if self.exact else "kfac"
        return ntkl.laplace(network, self.data, likelihood, prior, structure, settings=QUIET)

    def _fitted(self, posterior: ntkl.Posterior, seconds: float, **notes: Any) -> Method:
        """With the calibration that was fitted."""
        own = vars(posterior.predictive) if posterior.predictive else {}
        return Method(self._predictor(posterior, calibrated=True), seconds, self._predictor(posterior), own | notes)

    # --- the network as it was trained

    def as_trained(self) -> ntkl.Posterior:
        """At the precision that its weight decay is."""
        own, count = self.baselines.whole[0], len(self.problem.y)
        with torch.no_grad():
            noise = 1.0 if self.problem.classes else float((own(self.problem.x) - self.problem.y).square().mean())
        precision = self.baselines.decay * count / noise
        return self.laplace(own, self._likelihood(noise), ntkl.GaussianPrior(precision))

    def posterior(self) -> Method:
        """Nothing tuned."""
        found, seconds = self._once(self.as_trained)
        return Method(self._predictor(found), self.baselines.whole[1] + seconds)

    def leave_one_out(self) -> Method:
        """Scale and temperature, or noise, by leave-one-out, trusted or not."""
        start = time.process_time()
        found = self.as_trained()
        fit = found.fit_predictive("loo", strict=False)
        seconds = self.baselines.whole[1] + time.process_time() - start
        return self._fitted(found, seconds, after=fit.after, trusted=fit.trusted, reasons=fit.reasons)

    def hyperparameters(self) -> Method:
        """Precision and noise by the evidence at fixed weights."""
        start = time.process_time()
        found = self.as_trained()
        found.fit_hyperparameters(parameters=self.moving, bounds=BOUNDS, progress=False)
        return Method(self._predictor(found), self.baselines.whole[1] + time.process_time() - start)

    def retrained(self) -> Method:
        """For the network people bring: evidence at fixed weights, training at its precisions, leave-one-out."""
        start = time.process_time()
        found = self.as_trained().retrain(self.data, groups=self.groups)
        return self._fitted(found, self.baselines.whole[1] + time.process_time() - start)

    # --- training with evidence

    @property
    def groups(self) -> str:
        """Which weights share a precision: of a table those of each column, of images those of each layer."""
        return "layer" if self.problem.recipe.batch else "input"

    def with_evidence(self, rows: Tensor | None = None, groups: str | None = None) -> ntkl.EvidenceTraining:
        """A new network, trained together with its prior and noise.

        At the end its exact posterior with leave-one-out, if that is cheap, else that of the training.
        """
        recipe, network = self.problem.recipe, self.problem.network(self.baselines.seed)
        data = self.data if rows is None else (self.problem.x[rows], self.problem.y[rows])
        images = {"optimizer": partial(Adam, lr=recipe.rate)} if recipe.batch else {}
        prior = ntkl.GaussianPrior(groups=groups or self.groups)
        return ntkl.train_with_evidence(
            network, data, self._likelihood(), prior, epochs=recipe.epochs if images else min(EPOCHS, recipe.epochs),
            batch_size=recipe.batch, predictive="loo" if self.exact else None, settings=QUIET, **images,
        )

    def evidence_network(self) -> Method:
        """The network that training with evidence gives, alone."""
        found, seconds = self._once(self.with_evidence)
        posterior = found.posterior
        notes = {"precision": posterior.prior.precision.detach().tolist(), "epoch": found.best_epoch}
        if not self.problem.classes:
            notes["noise"] = float(posterior.likelihood.noise)
        return Method(self._predictor(posterior, method="map"), seconds, notes=notes)

    def online(self) -> Method:
        """The KFAC posterior of the training itself."""
        found, seconds = self._once(self.with_evidence)
        own = found.posterior
        if self.exact:
            network = own.network.module
            own = ntkl.laplace(network, self.data, own.likelihood, own.prior, "kfac", settings=QUIET)
        return Method(self._predictor(own), seconds)

    def evidence_posterior(self) -> Method:
        """Exact where that is cheap, at the hyperparameters of the training."""
        found, seconds = self._once(self.with_evidence)
        return Method(self._predictor(found.posterior), seconds)

    def recommended(self) -> Method:
        """The path: training with evidence, exact posterior, leave-one-out.

        Where an exact posterior is too large: training on 90 %, KFAC, and the other 10 % for scale and temperature.
        """
        if self.exact:
            found, seconds = self._once(self.with_evidence)
            return self._fitted(found.posterior, seconds)
        start = time.process_time()
        posterior = self.with_evidence(self.baselines.kept).posterior
        fit = posterior.calibrate((self.problem.x[self.baselines.held], self.problem.y[self.baselines.held]))
        return self._fitted(posterior, time.process_time() - start, after=fit.after)

    def folds(self) -> Method:
        """The path, calibrated by five trainings at its hyperparameters, each without a fold."""
        start = time.process_time()
        posterior = self.with_evidence().posterior

        def train(part: tuple[Tensor, Tensor]) -> ntkl.Posterior:
            likelihood, prior = copy.deepcopy((posterior.likelihood, posterior.prior))
            schedule = ntkl.EvidenceSchedule(frequency=EPOCHS, steps=0)
            network = self.problem.network(self.baselines.seed)
            return ntkl.train_with_evidence(network, part, likelihood, prior, epochs=EPOCHS, batch_size=None,
                                            schedule=schedule, predictive="loo", settings=QUIET).posterior

        fit = posterior.cross_calibrate(train, self.data)
        return self._fitted(posterior, time.process_time() - start, after=fit.after)

    def by_layer(self) -> Method:
        """The path with one precision for each layer."""
        start = time.process_time()
        found = self.with_evidence(groups="layer")
        return self._fitted(found.posterior, time.process_time() - start)

    def two_starts(self) -> Method:
        """The path from two prior precisions at the start; leave-one-out chooses."""
        start, recipe = time.process_time(), self.problem.recipe
        best = ntkl.train_from_starts(
            self.problem.network(self.baselines.seed), self.data, self._likelihood(),
            ntkl.GaussianPrior(groups=self.groups), epochs=min(EPOCHS, recipe.epochs), batch_size=recipe.batch,
            settings=QUIET,
        )[0]
        return self._fitted(best.posterior, time.process_time() - start)

    def refitted(self) -> Method:
        """The path, then the linear model's optimum, and of a Gaussian its precision and noise by leave-one-out."""
        found, seconds = self._once(self.with_evidence)
        start = time.process_time()
        posterior = found.posterior.refit(None if self.problem.classes else "loo")
        fit = posterior.fit_predictive("loo", strict=False)
        return self._fitted(posterior, seconds + time.process_time() - start, after=fit.after)
