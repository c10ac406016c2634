"""One study: select hyperparameters without held-out data, train to the MAP, fit in both spaces, evaluate."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Distribution

import ntk_laplace as ntkl
from ntk_laplace import metrics
from ntk_laplace.tools.demo.networks import seeded
from ntk_laplace.tools.demo.problems import Problem
from ntk_laplace.tools.demo.training import Training, train_map

__all__ = ["Candidate", "Choice", "Study", "choose", "confidence", "settled", "study"]

Report = Callable[[str], None]
LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
BINS = 10
"""Number of confidence bins; small, because there are few held-out images."""
POINTS = 256
"""Number of quasi-Monte-Carlo points for scoring a candidate; they give three digits."""
ROUGH, FINE = 0.05, 1e-4
"""Gradient norms at which training stops, for candidates and for the chosen one."""
_QUIET = ntkl.Settings(progress=False)  # the demo has its own progress display


@dataclass(frozen=True)
class Candidate:
    """One setting of the hyperparameters with its scores, in nats per example.

    Attributes
    ----------
    precision : float
        Prior precision.
    noise : float or None
        Noise variance of a Gaussian likelihood.
    evidence : float
        Log marginal likelihood of the training data.
    leave_one_out : float
        Mean log predictive density of each training point given the others, in closed form.
    held_out_log_likelihood : float
        Score of the posterior predictive; only for the figure, never used for selection.
    """

    precision: float
    noise: float | None
    evidence: float
    leave_one_out: float
    held_out_log_likelihood: float


@dataclass(frozen=True)
class Choice:
    """The chosen candidate, trained to its MAP."""

    network: nn.Module
    likelihood: ntkl.Likelihood
    precision: float
    noise: float | None
    training: Training
    candidates: list[Candidate]

    def posterior(self, problem: Problem, structure: str) -> ntkl.Posterior:
        """Fit the Laplace posterior to the training data."""
        data = (problem.split.x_train, problem.split.y_train)
        prior = ntkl.GaussianPrior(self.precision)
        return ntkl.laplace(self.network, data, self.likelihood, prior, structure, settings=_QUIET)

    def comparison(self, problem: Problem) -> ntkl.EvidenceComparison:
        """Compute the evidence under every structure, exact and approximate."""
        data = (problem.split.x_train, problem.split.y_train)
        prior = ntkl.GaussianPrior(self.precision)
        return ntkl.compare_evidence(self.network, data, self.likelihood, prior, settings=_QUIET)


@dataclass(frozen=True)
class Study:
    """Results of a study; `summary` contains the numbers, the other fields are for the figures."""

    problem: Problem
    choice: Choice
    posterior: ntkl.Posterior
    predictive: Distribution
    map_predictive: Distribution
    comparison: ntkl.EvidenceComparison | None
    summary: dict[str, Any] = field(repr=False)


def settled(problem: Problem, seed: int, report: Report, max_evaluations: int = 1000) -> Choice:
    """Train a problem with one candidate to moderate accuracy, which is sufficient for a figure."""
    ((precision, noise),) = problem.candidates
    report(f"{problem.title}: training")
    network, likelihood = seeded(problem.build, seed), problem.likelihood(noise or 1.0)
    data = (problem.split.x_train, problem.split.y_train)
    training = train_map(network, data, likelihood, ntkl.GaussianPrior(precision), ROUGH, max_evaluations)
    return Choice(network, likelihood, precision, noise, training, [])


def choose(problem: Problem, seed: int, report: Report, tolerance: float = FINE) -> Choice:
    """Train every candidate from the same initial weights; select the best by leave-one-out, and finish its training.

    Leave-one-out measures how well the posterior predicts, as the held-out scores do; the evidence measures how well
    the prior predicts ([L22]). Both use only training data, and the figures show both.
    """
    split, found = problem.split, []
    data = (split.x_train, split.y_train)
    for precision, noise in problem.candidates:
        report(f"{problem.title}: prior precision {precision:g}" + (f", noise {noise:g}" if noise else ""))
        network, likelihood = seeded(problem.build, seed), problem.likelihood(noise or 1.0)
        training = train_map(network, data, likelihood, ntkl.GaussianPrior(precision), max(ROUGH, tolerance))
        candidate = Choice(network, likelihood, precision, noise, training, [])
        posterior, cheaper = (candidate.posterior(problem, structure) for structure in ("gp", "auto"))
        evidence = posterior.log_marginal_likelihood().item() / posterior.num_examples
        left_out = posterior.leave_one_out().log_density.mean().item()
        predicted = _predict(cheaper, split.x_test, seed, samples=POINTS)
        held_out = metrics.mean_log_likelihood(predicted, split.y_test)
        scored = Candidate(precision, noise, evidence, left_out, held_out)
        found.append((scored, network, likelihood))
    best, network, likelihood = max(found, key=lambda item: item[0].leave_one_out)
    report(f"{problem.title}: training to the MAP at precision {best.precision:g}")
    training = train_map(network, data, likelihood, ntkl.GaussianPrior(best.precision), tolerance)
    return Choice(network, likelihood, best.precision, best.noise, training, [candidate for candidate, *_ in found])


def study(problem: Problem, seed: int, report: Report) -> Study:
    """Run a whole study.

    Parameters
    ----------
    problem : Problem
    seed : int
        Random seed of initial weights and of the integration points of the predictive.
    report : callable
        Called with progress messages.
    """
    begin = time.perf_counter()
    choice = choose(problem, seed, report)
    seconds = {"selection_and_training": time.perf_counter() - begin}
    posteriors, evidences = {}, {}
    for structure, words in (("gp", "function space"), ("full", "weight space")):
        report(f"{problem.title}: evidence in {words}")
        start = time.perf_counter()
        posteriors[structure] = choice.posterior(problem, structure)
        evidences[structure] = posteriors[structure].log_marginal_likelihood().item()
        seconds[f"fit_and_evidence_{structure}"] = time.perf_counter() - start
    comparison = None
    if problem.compares:
        report(f"{problem.title}: evidence under every structure")
        start = time.perf_counter()
        comparison = choice.comparison(problem)
        seconds["comparison"] = time.perf_counter() - start
    report(f"{problem.title}: predicting {len(problem.split.x_test)} held-out examples")
    start = time.perf_counter()
    posterior = posteriors["gp"]
    predictive = _predict(posterior, problem.split.x_test, seed)
    map_predictive = posterior.predict(problem.split.x_test, method="map")
    seconds["prediction"] = time.perf_counter() - start
    summary = {
        "evidence_gp": evidences["gp"],
        "evidence_full": evidences["full"],
        "relative_difference": abs(evidences["gp"] - evidences["full"]) / abs(evidences["full"]),
        "variance_relative_difference": _variance_difference(posteriors, problem.split.x_test[:50]),
        "n": posterior.num_examples,
        "n_held_out": len(problem.split.x_test),
        "outputs": posterior.num_outputs,
        "parameters": posterior.num_parameters,
        "effective_parameters": float(posterior.effective_parameters().sum()),
        "prior_precision": choice.precision,
        "noise_variance": choice.noise,
        "gradient_norm": choice.training.gradient_norm,
        **evaluate(problem, predictive),
        **{f"map_{name}": value for name, value in evaluate(problem, map_predictive).items()},
        **_unseen(problem, posterior, seed),
        **({} if comparison is None else {"structures": {row.structure: vars(row) for row in comparison.rows}}),
        "candidates": [vars(candidate) for candidate in choice.candidates],
        "seconds": time.perf_counter() - begin,
        "seconds_of_parts": seconds,
    }
    return Study(problem, choice, posterior, predictive, map_predictive, comparison, summary)


def evaluate(problem: Problem, predictive: Distribution) -> dict[str, float]:
    """Score a prediction of the held-out data: accuracy and ECE for classes, RMSE and coverage for a regression."""
    truth = problem.split.y_test
    scores = metrics.held_out_scores(predictive, truth, BINS)
    if not problem.classifies:
        (scores["coverage_90"],) = metrics.interval_coverage(
            predictive.mean, predictive.variance, truth, [0.9]
        ).tolist()
    return scores


def _predict(posterior: ntkl.Posterior, x: Tensor, seed: int, method: str = "glm", samples: int = 1000) -> Distribution:
    generator = torch.Generator().manual_seed(seed)
    return posterior.predict(x, method=method, samples=samples, generator=generator)


def _unseen(problem: Problem, posterior: ntkl.Posterior, seed: int) -> dict[str, float]:
    """Confidence on out-of-distribution inputs, and the AUROC for detecting them among held-out ones."""
    if problem.split.x_unseen is None:
        return {}
    scores = {}
    for prefix, method in (("", "glm"), ("map_", "map")):
        known, strange = (
            confidence(posterior, x, seed, method) for x in (problem.split.x_test, problem.split.x_unseen)
        )
        scores[f"{prefix}unseen_confidence"] = float(strange.mean())
        scores[f"{prefix}unseen_auroc"] = metrics.detection_auroc(-known, -strange)
    return scores


def confidence(posterior: ntkl.Posterior, x: Tensor, seed: int, method: str = "glm") -> np.ndarray:
    """Probability of the predicted class at each input, (n,)."""
    return metrics.class_probabilities(_predict(posterior, x, seed, method).probs).max(1)


def _variance_difference(posteriors: dict[str, ntkl.Posterior], x: Tensor) -> float:
    """Largest difference of the covariances of f between the two spaces, relative to the largest entry."""
    (_, first), (_, second) = (posterior.latent_moments(x) for posterior in posteriors.values())
    return float((first - second).abs().max() / second.abs().max())
