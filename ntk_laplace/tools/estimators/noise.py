"""Which noise fits the targets: a normal one, one with heavy tails, or one that depends on the inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch

from ntk_laplace.errors import NTKLaplaceError, told_later, untold, warn
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.posterior import Posterior
from ntk_laplace.runtime import tuning
from ntk_laplace.tools.estimators.tables import Array
from ntk_laplace.tools.estimators.training import Design, Trained

_DF = np.array([2.1, 2.5, 3.0, 4.0, 6.0, 10.0, 20.0])  # degrees of freedom that are tried
_STEPS = 50  # of the scale, each a weighted mean
# nats by which Student's t must fit the residuals better than a normal distribution, for another training: by chance
# two parameters gain 5 in 1 of 150 data sets. The second is a point: less is not worth a training
_GAIN, _GAIN_A_POINT = 5.0, 0.02
_CHANCE, _LARGER, _LARGEST = 2.0, 1.05, 1.5  # standard errors of a change of squared errors, and ratios of these
_TIED = 0.5  # of the targets, that may be equal
_MOST_OF_COUNTS = 50.0  # the mean of targets; larger whole numbers are often rounded, and nearly continuous
_BIAS, _BIAS_SHARE = 3.0, 0.02  # standard errors of a mean error, and its share of the squared errors


def chosen_noise(
    run: Callable[[Likelihood, Sequence[Design]], Trained], normal: Likelihood, others: Sequence[Likelihood],
    designs: Sequence[Design],
) -> Trained:
    """Train under a normal likelihood, and if its residuals have heavy tails under others; the evidence chooses.

    `run` takes the designs among which it chooses too; under the others the network has that of the first one. One
    with pieces is tried without them too, if that was among the first: a normal likelihood gets them for its noise.

    Another is not taken if it has learned its targets by heart and the normal one has not, if its squared errors are
    larger, or if its errors have a mean: of skewed targets the center of Student's t is not the mean, which people ask
    for. None is tried where many targets are equal: a density has no bound there as its noise falls to 0, that of ν
    degrees of freedom if more than ν/(ν + 1) of them are.
    """
    with told_later() as told:
        found = run(normal, designs)
    errors = Errors.of(found.posterior)
    tried = [design for design in designs if design in (found.design, replace(found.design, pieces=False))]
    for likelihood in others if errors.have_tails else ():
        with suppress(NTKLaplaceError), untold(), told_later() as of_other:  # the first training is a result
            other = run(likelihood, tried)
            own = Errors.of(other.posterior)
            if not (own.biased or own.larger_than(errors)) and rank_of(other) > rank_of(found):
                found, told = other, of_other
    for message in dict.fromkeys(told):
        warn(message)
    return found


def may_be_counts(targets: Array, weights: Array | None) -> bool:
    """Whether targets (N, D) are small whole numbers from 0 that vary at least as much as counts of one mean."""
    mean = np.average(targets, 0, weights)
    whole = (targets >= 0) & (targets == np.floor(targets))
    if not (whole.all() and mean.all() and (mean <= _MOST_OF_COUNTS).all()):
        return False
    return bool((np.average((targets - mean) ** 2, 0, weights) >= mean).all())


@dataclass(frozen=True)
class Errors:
    """Errors of training points; where the posterior is exact, some of many, each predicted from all others."""

    error: Array  # (N, C)
    deviation: Array  # what the prediction says of its size, (N, C)
    weights: Array  # (N,)
    tied: float = 0.0  # the largest share of a target that has one value

    @classmethod
    def of(cls, posterior: Posterior) -> Errors:
        """Of the posterior as it is, without a calibration."""
        fitted, likelihood, points = posterior.fitted, posterior.likelihood, posterior.fitted.points
        f, targets, counts, variance = posterior.f, points.targets, points.counts, torch.zeros_like(posterior.f)
        if fitted.exact:
            with untold():  # the fit of the predictive tells
                left_out = posterior.leave_one_out(tuning.LEFT_OUT_ERRORS if len(f) > tuning.LEFT_OUT_ERRORS else None)
            f, variance = left_out.mean, left_out.covariance.diagonal(dim1=-2, dim2=-1)
            targets, counts = targets[left_out.index], counts[left_out.index]
        mean = likelihood.mean(f)  # outputs themselves; those of log variances come after
        targets = targets.reshape(mean.shape)
        variance = variance[:, : mean.shape[1]] + likelihood.response_variance(f)
        parts = targets - mean, variance.sqrt(), counts, targets
        error, deviation, weights, values = (part.detach().cpu().double().numpy() for part in parts)
        return cls(error, deviation, weights, max(_largest_share(column, weights) for column in values.T))

    @property
    def squared(self) -> Array:
        """Weighted mean of squared errors of each target, (C,)."""
        return np.asarray(np.average(self.error**2, 0, self.weights))

    def larger_than(self, other: Errors) -> bool:
        """Whether mean squared errors of a target are larger, and not by chance; or much larger."""
        own, reference = self.squared, other.squared
        beyond = np.full(own.shape, len(self.error) != len(other.error))
        if not beyond.any():
            change, share = self.error**2 - other.error**2, self.weights / self.weights.sum()
            mean = share @ change
            beyond = mean > _CHANCE * np.sqrt(share @ (change - mean) ** 2 / self.weights.sum())
        return bool(((own > _LARGEST * reference) | (beyond & (own > _LARGER * reference))).any())

    @property
    def biased(self) -> bool:
        """Whether the mean error of a target is not 0, and counts."""
        mean = np.average(self.error, 0, self.weights)
        return bool((mean**2 > max(_BIAS_SHARE, _BIAS**2 / self.weights.sum()) * self.squared).any())

    @property
    def have_tails(self) -> bool:
        """Whether Student's t fits them better than a normal distribution, and has a best scale."""
        if self.tied > _TIED:
            return False
        gain = sum(tail_gain(column, self.weights) for column in (self.error / self.deviation).T)
        return gain > max(_GAIN, _GAIN_A_POINT * self.weights.sum())


def _largest_share(values: Array, weights: Array) -> float:
    """Of the weight, that of the most frequent value."""
    _, which = np.unique(values, return_inverse=True)
    return float(np.bincount(which, weights).max() / weights.sum())


def tail_gain(residual: Array, weights: Array) -> float:
    """Log likelihood of Student's t less that of a normal distribution, both with the best scale, in nats.

    The scale of t is a fixed point: the mean of ``r² (ν + 1)/(ν + r²/s²)`` is s².
    """
    from scipy.special import gammaln  # the import changes warning filters

    square, share = residual**2, weights / weights.sum()
    normal = square @ share
    if not normal > 0:
        return 0.0
    scale = np.full(len(_DF), normal)
    for _ in range(_STEPS):
        scale = (share * square * (_DF[:, None] + 1) / (_DF[:, None] + square / scale[:, None])).sum(1)
    terms = 0.5 * (_DF[:, None] + 1) * np.log1p(square / (_DF * scale)[:, None])
    student = gammaln((_DF + 1) / 2) - gammaln(_DF / 2) - 0.5 * np.log(np.pi * _DF * scale) - terms @ share
    return float(weights.sum() * (student.max() + 0.5 * np.log(2 * np.pi * normal) + 0.5))


def rank_of(found: Trained) -> tuple[bool, float]:
    """The larger, the better: the evidence a point, nats."""
    fit, posterior = found.predictive, found.posterior
    learned = fit is not None and fit.reliability is not None and fit.reliability.learned_targets
    return not learned, float(posterior.log_marginal_likelihood().detach()) / posterior.fitted.total
