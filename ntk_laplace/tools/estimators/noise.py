"""Which noise fits the targets: normal, with heavy tails, dependent on the inputs, of counts, or by factors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ntk_laplace.errors import NTKLaplaceError, told_later, untold, warn
from ntk_laplace.posterior import Posterior
from ntk_laplace.runtime import tuning
from ntk_laplace.tools.estimators.tables import Array, Standardized
from ntk_laplace.tools.estimators.training import Design, Trained

NEGATIVE_BINOMIAL, LOG_NORMAL = "negative-binomial", "log-normal"  # of targets that are not standardized as they are
HETEROSCEDASTIC = "heteroscedastic-gaussian"
_DF = np.array([2.1, 2.5, 3.0, 4.0, 6.0, 10.0, 20.0])  # degrees of freedom that are tried
_STEPS = 50  # of the scale, each a weighted mean
# nats by which Student's t must fit the residuals better than a normal distribution, for another training: by chance
# two parameters gain 5 in 1 of 150 data sets. The second is a point: less is not worth a training
_GAIN, _GAIN_A_POINT = 5.0, 0.02
_CHANCE, _LARGER, _LARGEST = 2.0, 1.05, 1.5  # standard errors of a change of squared errors, and ratios of these
_LARGEST_OF_FACTORS = 1000.0  # the last ratio for log-normal noise, where one error may be most of the sum
_TIED = 0.5  # of the targets, that may be equal
_MOST_OF_COUNTS = 50.0  # the mean of targets; larger whole numbers are often rounded, and nearly continuous
_ROUNDED = 0.1  # of the smallest target, that the step may be which targets are rounded to
_POWERS, _WHOLE = 10.0 ** np.arange(12, -13, -1), 1e-6  # steps that are looked for, and how whole their multiples are
_BIAS, _BIAS_SHARE = 3.0, 0.02  # standard errors of a mean error, and its share of the squared errors


@dataclass(frozen=True)
class Candidate:
    """A training under a named likelihood, of targets that are standardized for it."""

    likelihood: str
    trained: Trained
    targets: Standardized

    @property
    def rank(self) -> tuple[bool, float]:
        """The larger, the better: the evidence a point of targets in their own units, nats."""
        fit, posterior = self.trained.predictive, self.trained.posterior
        learned = fit is not None and fit.reliability is not None and fit.reliability.learned_targets
        points = posterior.fitted.points
        own = self.targets.undone(_numbers(points.targets).reshape(len(points.targets), -1))
        units = self.targets.log_jacobian(own, _numbers(points.counts))
        return not learned, (float(posterior.log_marginal_likelihood().detach()) + units) / posterior.fitted.total

    @property
    def without_noise(self) -> bool:
        """Whether leave-one-out finds the smallest share of the training's noise that is looked for to be the best."""
        fit = self.trained.predictive
        return fit is not None and "noise" in fit.at_bounds and fit.calibration.noise < 1.0

    @property
    def errors(self) -> Errors:
        """Those of its training points."""
        return Errors.of(self.trained.posterior, self.targets)


def chosen_noise(
    run: Callable[[str, Design | None], Candidate], targets: Array, weights: Array | None, own_network: bool
) -> Candidate:
    """Train under a normal likelihood, and under others if its residuals have heavy tails; the evidence chooses.

    `run` takes a likelihood and the design that a network has, else any of those that are tried: Student's t and noise
    that depends on the inputs have that of the first, or the same without pieces, which a normal likelihood may get
    for its noise. They are not tried if targets (N, D) that may be counts, or vary by factors, are better as such. A
    network of the caller's is what it is: it is tried with Student's t alone.

    Pieces can follow outliers, and leave-one-out, whose features know these, then finds next to no noise. Where a
    network without them has residuals with heavy tails, it takes their place, and other likelihoods are tried.

    Another is not taken if it has learned its targets by heart and the normal one has not, if its squared errors are
    larger, or if its errors have a mean: of skewed targets the center of Student's t is not the mean, which people ask
    for. Those of factors may be larger, as one error may be most of the sum, but not by orders of magnitude: where many
    targets are at a limit of detection, their logarithms vary so much that means are far above all targets. None is
    tried where many targets are equal: a density has no bound there as its noise falls to 0, that of ν degrees of
    freedom if more than ν/(ν + 1) of them are.
    """
    with told_later() as told:
        best = run("gaussian", None)
    errors, design = best.errors, best.trained.design
    if design.pieces and "pieces" in best.trained.tried and best.without_noise:
        with suppress(NTKLaplaceError), untold(), told_later() as of_other:
            plain = run("gaussian", replace(design, pieces=False))
            if plain.errors.have_tails:
                best, errors, told = plain, plain.errors, of_other
    names = ["student-t"] * errors.have_tails
    if not own_network:
        names += [HETEROSCEDASTIC] * errors.have_tails
        if may_be_counts(targets, weights):
            names.insert(0, NEGATIVE_BINOMIAL)
        elif errors.have_tails and may_vary_by_factors(targets):
            names.insert(0, LOG_NORMAL)
    for name in names:
        scaled = name in (NEGATIVE_BINOMIAL, LOG_NORMAL)
        with suppress(NTKLaplaceError), untold(), told_later() as of_other:  # the first training is a result
            other = run(name, None if scaled else design)
            own = other.errors
            most = _LARGEST_OF_FACTORS if name == LOG_NORMAL else _LARGEST
            if not (own.biased or own.larger_than(errors, most)) and other.rank > best.rank:
                best, told = other, of_other
                if scaled and not (name == LOG_NORMAL and own.have_tails):
                    break
    for message in dict.fromkeys(told):
        warn(message)
    return best


def may_be_counts(targets: Array, weights: Array | None) -> bool:
    """Whether targets (N, D) are small whole numbers from 0 that vary at least as much as counts of one mean."""
    mean = np.average(targets, 0, weights)
    whole = (targets >= 0) & (targets == np.floor(targets))
    if not (whole.all() and mean.all() and (mean <= _MOST_OF_COUNTS).all()):
        return False
    return bool((np.average((targets - mean) ** 2, 0, weights) >= mean).all())


def may_vary_by_factors(targets: Array) -> bool:
    """Whether targets (N, D) are positive, and told so finely that the logarithms of the smallest are no rounding."""
    steps = np.array([_common_step(column) for column in targets.T])
    return bool((targets > 0).all() and (steps <= _ROUNDED * targets.min(0)).all())


def _common_step(values: Array) -> float:
    """What all values (N,) were rounded to, a power of ten or their smallest difference; 0 if they were not."""
    distinct = np.unique(values)
    least = float(np.diff(distinct).min(initial=np.inf))
    steps = [step for step in _POWERS if step < 2 * distinct[0] and _are_whole(distinct / step)][:1]
    return max(steps + [least] * _are_whole((distinct - distinct[0]) / least), default=0.0)


def _are_whole(numbers: Array) -> bool:
    """Whether numbers are whole, up to rounding."""
    rounding = _WHOLE + 8 * np.finfo(np.float64).eps * np.abs(numbers)
    return bool((np.abs(numbers - np.round(numbers)) <= rounding).all())


@dataclass(frozen=True)
class Errors:
    """Errors of training points; where the posterior is exact, some of many, each predicted from all others."""

    error: Array  # in units of the targets, (N, D)
    residual: Array  # of standardized targets, over the deviation that their prediction has, (N, D)
    weights: Array  # (N,)
    tied: float = 0.0  # the largest share of a target that has one value

    @classmethod
    def of(cls, posterior: Posterior, units: Standardized) -> Errors:
        """Of the posterior as it is, without a calibration."""
        fitted, likelihood, points = posterior.fitted, posterior.likelihood, posterior.fitted.points
        f, targets, counts, variance = posterior.f, points.targets, points.counts, torch.zeros_like(posterior.f)
        if fitted.exact:
            with untold():  # the fit of the predictive tells
                left_out = posterior.leave_one_out(tuning.LEFT_OUT_ERRORS if len(f) > tuning.LEFT_OUT_ERRORS else None)
            f, variance = left_out.mean, left_out.covariance.diagonal(dim1=-2, dim2=-1)
            targets, counts = targets[left_out.index], counts[left_out.index]
        mean = likelihood.mean(f)  # outputs themselves; those of log variances come after
        noise = likelihood.response_variance(f)
        given = targets.reshape(mean.shape), mean, variance[:, : mean.shape[1]] + noise, noise, counts
        values, center, total, own, weights = map(_numbers, given)
        return cls(units.undone(values) - units.expected(center, own), (values - center) / np.sqrt(total), weights,
                   max(_largest_share(column, weights) for column in values.T))

    @property
    def squared(self) -> Array:
        """Weighted mean of squared errors of each target, (C,)."""
        return np.asarray(np.average(self.error**2, 0, self.weights))

    def larger_than(self, other: Errors, most: float = _LARGEST) -> bool:
        """Whether mean squared errors of a target are larger, and not by chance; or `most` times as large."""
        unit = np.abs(other.error).max(0)
        unit = np.where(unit > 0, unit, 1.0)  # fourth powers of targets in a unit of theirs may be 0 or infinite
        first, second = (replace(found, error=found.error / unit) for found in (self, other))
        own, reference = first.squared, second.squared
        beyond = np.full(own.shape, len(self.error) != len(other.error))
        if not beyond.any():
            change, share = first.error**2 - second.error**2, self.weights / self.weights.sum()
            mean = share @ change
            beyond = mean > _CHANCE * np.sqrt(share @ (change - mean) ** 2 / self.weights.sum())
        return bool(((own > most * reference) | (beyond & (own > _LARGER * reference))).any())

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
        gain = sum(tail_gain(column, self.weights) for column in self.residual.T)
        return bool(gain > max(_GAIN, _GAIN_A_POINT * self.weights.sum()))


def _numbers(values: Tensor) -> Array:
    found: Array = values.detach().cpu().double().numpy()
    return found


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
