"""One study: train with evidence, fit in both spaces, calibrate by leave-one-out, and evaluate beside the network."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Distribution

import ntk_laplace as ntkl
from ntk_laplace import metrics
from ntk_laplace.errors import untold
from ntk_laplace.tools.demo.networks import seeded, train_map
from ntk_laplace.tools.demo.problems import Problem

Report = Callable[[str], None]
LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
BINS = 10
"""Number of confidence bins; small, because there are few held-out images."""
POINTS = 256
"""Number of quasi-Monte-Carlo points for scoring a candidate; they give three digits."""
PRECISION = 1.0
"""Prior precision, that is weight decay, of the network as it is usually trained."""
_QUIET = ntkl.Settings(progress=False)  # the demo has its own progress display


@dataclass(frozen=True)
class Candidate:
    """One setting of the hyperparameters with its scores, in nats per example."""

    precision: float  # of the prior
    noise: float | None  # variance of a Gaussian likelihood
    evidence: float  # log marginal likelihood of the training data
    leave_one_out: float  # mean log predictive density of each training point given the others, in closed form
    held_out_log_likelihood: float  # only for the figure, never used for selection


@dataclass(frozen=True)
class Choice:
    """A network trained to its MAP at one setting of the hyperparameters."""

    network: nn.Module
    likelihood: ntkl.Likelihood
    precision: float

    def posterior(self, problem: Problem, structure: str) -> ntkl.Posterior:
        """Fit the Laplace posterior to the training data."""
        data = (problem.split.x_train, problem.split.y_train)
        prior = ntkl.GaussianPrior(self.precision)
        return ntkl.laplace(self.network, data, self.likelihood, prior, structure, settings=_QUIET)


@dataclass(frozen=True)
class Study:
    """Results of a study; `summary` contains the numbers, the other fields are for the figures."""

    problem: Problem
    posterior: ntkl.Posterior  # of the network trained with evidence, calibrated by leave-one-out
    network: ntkl.Posterior  # of the network as it is usually trained, at `PRECISION`; for its own outputs alone
    predictive: Distribution  # of the held-out data, by `posterior`
    map_predictive: Distribution  # by `network` alone
    calibrated_predictive: Distribution  # by that with a temperature, or noise, from a tenth of the training data
    candidates: list[Candidate]
    comparison: ntkl.EvidenceComparison | None
    summary: dict[str, Any] = field(repr=False)


def settled(problem: Problem, seed: int, report: Report) -> Choice:
    """Train a problem with one candidate."""
    ((precision, noise),) = problem.candidates
    report(f"{problem.title}: training")
    return _trained(problem, seed, precision, noise)


def score_candidates(problem: Problem, seed: int, report: Report) -> list[Candidate]:
    """Train every candidate from the same initial weights, and score it by evidence and leave-one-out, for the figure.

    Leave-one-out measures how well the posterior predicts, as the held-out scores do; the evidence measures how well
    the prior predicts ([L22]). Both use only training data, and the figures show both.
    """
    split, found = problem.split, []
    for precision, noise in problem.candidates:
        report(f"{problem.title}: prior precision {precision:g}" + (f", noise {noise:g}" if noise else ""))
        candidate = _trained(problem, seed, precision, noise)
        posterior, cheaper = (candidate.posterior(problem, structure) for structure in ("gp", "auto"))
        evidence = posterior.log_marginal_likelihood().item() / posterior.num_examples
        left_out = posterior.leave_one_out().log_density.mean().item()
        held_out = metrics.mean_log_likelihood(_predict(cheaper, split.x_test, seed, samples=POINTS), split.y_test)
        found.append(Candidate(precision, noise, evidence, left_out, held_out))
    return found


def _trained(
    problem: Problem, seed: int, precision: float, noise: float | None, part: slice = slice(None)
) -> Choice:
    """A network trained to its MAP on a part of the training data."""
    network, likelihood = seeded(problem.build, seed), problem.likelihood(noise or 1.0)
    data = (problem.split.x_train[part], problem.split.y_train[part])
    prior = ntkl.GaussianPrior(precision * len(data[0]) / len(problem.split.x_train))
    train_map(network, data, likelihood, prior)
    return Choice(network, likelihood, precision)


def _usual(problem: Problem, seed: int) -> tuple[ntkl.Posterior, ntkl.PredictiveFit]:
    """The network as it is usually trained, and its calibration: by nine tenths of the data, on the last tenth."""
    split = problem.split
    kept = slice(None, -max(1, len(split.x_train) // 10))
    held = slice(kept.stop, None)
    found = []
    for part in (slice(None), kept):
        one = _trained(problem, seed, PRECISION, None, part)
        x, y = split.x_train[part], split.y_train[part]
        likelihood = one.likelihood
        if not problem.classifies:  # its noise is its mean squared error
            likelihood = problem.likelihood(float((one.network(x).detach() - y).square().mean()))
        prior = ntkl.GaussianPrior(PRECISION)
        found.append(ntkl.laplace(one.network, (x, y), likelihood, prior, "auto", settings=_QUIET))
    with untold():  # few held-out examples may all be right
        fit = found[1].calibrate((split.x_train[held], split.y_train[held]), temperature="network")
    found[0].predictive = fit.calibration
    return found[0], fit


def study(problem: Problem, seed: int, report: Report) -> Study:
    """Run a whole study; the seed is that of initial weights and of the integration points of the predictive."""
    begin, split = time.perf_counter(), problem.split
    data = split.x_train, split.y_train
    candidates = score_candidates(problem, seed, report)
    seconds = {"candidates": time.perf_counter() - begin}

    @contextmanager
    def part(name: str, words: str) -> Iterator[None]:
        report(f"{problem.title}: {words}")
        start = time.perf_counter()
        yield
        seconds[name] = time.perf_counter() - start

    with part("network_and_calibration", "the network as it is usually trained"):
        network, usual = _usual(problem, seed)
    trained = seeded(problem.build, seed)
    with part("training_with_evidence", "training with evidence"), untold():  # the summary has what it would warn of
        training = ntkl.train_with_evidence(trained, data, problem.likelihood(1.0), epochs=problem.epochs,
                                            batch_size=None, predictive="loo", settings=_QUIET)
    own = training.posterior
    fit = training.predictive or own.fit_predictive(strict=False)
    posteriors, evidences = {}, {}
    for structure, words in (("gp", "function space"), ("full", "weight space")):
        with part(f"fit_and_evidence_{structure}", f"evidence in {words}"):
            found = ntkl.laplace(trained.eval(), data, own.likelihood, own.prior, structure, settings=_QUIET)
            posteriors[structure], evidences[structure] = found, found.log_marginal_likelihood().item()
    comparison = None
    if problem.compares:
        with part("comparison", "evidence under every structure"):
            comparison = ntkl.compare_evidence(trained, data, own.likelihood, own.prior, settings=_QUIET)
    with part("prediction", f"predicting {len(split.x_test)} held-out examples"):
        posterior = posteriors["gp"]
        posterior.predictive = own.predictive
        predictive = _predict(posterior, split.x_test, seed)
        map_predictive = network.predict(split.x_test, method="map")
        calibrated = network.predict(split.x_test)
    (_, first), (_, second) = (one.latent_moments(split.x_test[:50]) for one in posteriors.values())  # covariances
    noise = float(own.likelihood.noise) if isinstance(own.likelihood, ntkl.Gaussian) else None
    summary = {
        "evidence_gp": evidences["gp"],
        "evidence_full": evidences["full"],
        "relative_difference": abs(evidences["gp"] - evidences["full"]) / abs(evidences["full"]),
        "variance_relative_difference": float((first - second).abs().max() / second.abs().max()),
        "n": posterior.num_examples,
        "n_held_out": len(split.x_test),
        "outputs": posterior.num_outputs,
        "parameters": posterior.num_parameters,
        "effective_parameters": float(posterior.effective_parameters().sum()),
        "prior_precisions": own.prior.precision.tolist(),
        "noise_variance": noise,
        "newton_decrement": None if fit.reliability is None else fit.reliability.decrement,
        "calibration": vars(fit.calibration),
        "leave_one_out": fit.after,
        "leave_one_out_before": fit.before,
        "leave_one_out_doubts": list(fit.reasons),
        "usual_calibration": vars(usual.calibration),
        **evaluate(problem, predictive),
        **{f"map_{name}": value for name, value in evaluate(problem, map_predictive).items()},
        **{f"calibrated_{name}": value for name, value in evaluate(problem, calibrated).items()},
        **_unseen(problem, posterior, network, seed),
        **({} if comparison is None else {"structures": {row.structure: vars(row) for row in comparison.rows}}),
        "candidates": [vars(candidate) for candidate in candidates],
        "seconds": time.perf_counter() - begin,
        "seconds_of_parts": seconds,
    }
    return Study(problem, posterior, network, predictive, map_predictive, calibrated, candidates, comparison, summary)


def evaluate(problem: Problem, predictive: Distribution) -> dict[str, float]:
    """Score a prediction of the held-out data: accuracy and ECE for classes, RMSE and coverage for a regression."""
    truth = problem.split.y_test
    scores = metrics.held_out_scores(predictive, truth, BINS)
    if not problem.classifies:
        (scores["coverage_90"],) = metrics.interval_coverage(
            predictive.mean, predictive.variance, truth, [0.9]
        ).tolist()
    return scores


def _predict(
    posterior: ntkl.Posterior, x: Tensor, seed: int, method: str = "glm", samples: int = 1000, calibrated: bool = True
) -> Distribution:
    generator = torch.Generator().manual_seed(seed)
    return posterior.predict(x, method=method, samples=samples, generator=generator, calibrated=calibrated)


def _unseen(problem: Problem, posterior: ntkl.Posterior, network: ntkl.Posterior, seed: int) -> dict[str, float]:
    """Confidence on out-of-distribution inputs, and the AUROC for detecting them among held-out ones.

    By the posterior as it is: the scale is fitted to inputs like the training data.
    """
    if problem.split.x_unseen is None:
        return {}
    scores = {}
    for prefix, one, method in (("", posterior, "glm"), ("map_", network, "map")):
        known, strange = (confidence(one, x, seed, method) for x in (problem.split.x_test, problem.split.x_unseen))
        scores[f"{prefix}unseen_confidence"] = float(strange.mean())
        scores[f"{prefix}unseen_auroc"] = metrics.detection_auroc(-known, -strange)
    return scores


def confidence(posterior: ntkl.Posterior, x: Tensor, seed: int, method: str = "glm") -> np.ndarray:
    """Probability of the predicted class at each input by the posterior as it is, (n,)."""
    return metrics.class_probabilities(_predict(posterior, x, seed, method, calibrated=False).mean).max(1)
