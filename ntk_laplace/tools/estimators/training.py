"""The training of an estimator's network, and the calibration of its posterior."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from ntk_laplace.curvature import CurvatureType
from ntk_laplace.errors import (
    MemoryBudgetError,
    NonFiniteError,
    NTKLaplaceError,
    NumericalError,
    told_later,
    untold,
    warn,
)
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.posterior import Posterior
from ntk_laplace.posterior.calibrate import PredictiveFit
from ntk_laplace.posterior.fit import laplace
from ntk_laplace.posterior.lack_of_fit import LackOfFit
from ntk_laplace.runtime.conversion import to_tensor
from ntk_laplace.tools.estimators.held_out import calibrated, held_out
from ntk_laplace.tools.estimators.hyperparameters import integrated_evidence
from ntk_laplace.training import EvidenceHistory, EvidenceTraining, train_from_starts, train_with_evidence
from ntk_laplace.training.model import Model
from ntk_laplace.training.result import MISSES
from ntk_laplace.training.schedule import short_schedule
from ntk_laplace.training.starts import rank

_UNTRUSTED = "the fitted predictive is not to be trusted"
_FOLDS = 5  # of predictive="folds"
_FEWEST = 1_000  # of more examples some may be kept apart
_FEWEST_LEARNED = 300  # of so many too, without an exact posterior or where the targets were learned by heart
_OFTEN = 3  # times as many evaluations of the evidence where it is below that of one prediction for all inputs
_GAIN = 0.02  # nats a left-out point that piecewise linear features must gain: less may be chance
_LOSS = 0.01  # nats a left-out point that clipping may lose: leave-one-out hardly sees what it bounds
_BEHIND = 0.1  # nats a left-out point; perceptrons with them that are further behind after a training are dropped
_TIMES, _FEW = 3, 10_000  # times as many epochs where residuals are clearly alike, of so many examples at most


Waves = Sequence[tuple[int, float]]  # inputs and periods of Fourier features


@dataclass(frozen=True)
class Starts:
    """Prior precisions that trainings start from, each where residuals of those before are alike."""

    first: Sequence[float] | None  # None: that of the prior
    longer: Sequence[float] = ()  # with more epochs, where residuals are clearly alike


@dataclass(frozen=True)
class Design:
    """What an estimator's perceptron has beside its layers."""

    linear: bool = False  # a linear part
    pieces: bool = False  # piecewise linear features
    clipping: bool = False  # of inputs with extreme values


@dataclass(frozen=True)
class Designs:
    """The design that a perceptron has, and the parts that are tried the other way, each with those chosen before."""

    first: Design = Design()
    tried: Sequence[str] = ()

    @classmethod
    def like(cls, design: Design, tried: Sequence[str]) -> Designs:
        """A design, and the same without pieces, if these were tried."""
        if not (design.pieces and "pieces" in tried):
            return cls(design)
        return cls(replace(design, pieces=False), ("pieces",))


@dataclass(frozen=True)
class Form:
    """What makes a network of so many features for a design and waves, and its prior; what it misses, in words."""

    features: int
    described: Callable[[LackOfFit], str]
    new: Callable[[Design, Waves], nn.Module]
    prior: Callable[[Design, Waves], GaussianPrior]


@dataclass(frozen=True)
class Trained:
    """A trained network, and its posterior with a fitted predictive."""

    module: nn.Module
    posterior: Posterior
    history: EvidenceHistory | None
    predictive: PredictiveFit | None
    held_out: NDArray[np.intp]  # numbers of the examples that the training did not see, for the predictive
    waves: Waves = ()  # of the Fourier features that were added
    design: Design = Design()
    tried: Sequence[str] = ()  # parts of the design that were tried the other way
    by_folds: Callable[[], PredictiveFit] | None = None  # fits the predictive once more, in trainings without a fold


@dataclass(frozen=True)
class _Attempt:
    """A training that may not be the last, with its warnings and what it trained."""

    training: EvidenceTraining
    told: list[str]
    module: nn.Module
    design: Design
    waves: Waves = ()
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Recipe:
    """How networks are trained, on all of the data or on parts; `options_of` is that of `trained`."""

    form: Form
    likelihood: Likelihood
    starts: Starts
    predictive: str | None  # of `train_with_evidence`
    quiet: bool  # about a training without a predictive
    most_waves: int
    options_of: Callable[[int], Mapping[str, Any]]

    def run(
        self, data: tuple[Tensor, ...], module: nn.Module, prior: GaussianPrior, **other: Any
    ) -> EvidenceTraining:
        """Train a module."""
        options = {**self.options_of(1), "predictive": self.predictive, **other}
        with _untrusted_untold(later=self.quiet):
            if self.starts.first is None:
                return train_with_evidence(module, data, self.likelihood, prior, **options)
            return train_from_starts(module, data, self.likelihood, prior,
                                     **{"starts": self.starts.first} | options)[0]

    def attempt(
        self, data: tuple[Tensor, ...], design: Design, waves: Waves = (), module: nn.Module | None = None,
        **options: Any,
    ) -> _Attempt:
        """A training of a new network of this design, or of the given one."""
        module = self.form.new(design, waves) if module is None else module
        with told_later() as told:
            training = self.run(data, module, self.form.prior(design, waves), **options)
            return _Attempt(training, told, module, design, waves, options)

    def best(self, data: tuple[Tensor, ...], design: Design, module: nn.Module | None = None) -> _Attempt:
        """The best training of a design, with waves, for longer, or with more evaluations where it needs them."""
        return self._improved(data, self.attempt(data, design, module=module))

    def better(self, data: tuple[Tensor, ...], part: str, best: _Attempt) -> _Attempt:
        """The better of the best training so far and that with a part the other way, dropped if it is far behind."""
        design = replace(best.design, **{part: not getattr(best.design, part)})
        if part == "linear":
            other = self.best(data, design)
            return other if _by_evidence(other) > _by_evidence(best) else best
        other = self.attempt(data, design, best.waves)
        if rank(other.training, left_out=True)[1] + _BEHIND > rank(best.training, left_out=True)[1]:
            other = self._improved(data, other)
        gain = _GAIN if part == "pieces" else -_LOSS
        return other if _trusted(other) and _left_out(other) > _left_out(best, gain) else best

    def _improved(self, data: tuple[Tensor, ...], attempt: _Attempt) -> _Attempt:
        return self._again(data, self._with_waves(data, attempt))

    def _with_waves(self, data: tuple[Tensor, ...], best: _Attempt) -> _Attempt:
        """A training with Fourier features of the waves that its residuals show, one after the other, or the given one.

        The best of M waves gains log M nats by chance, and M is about the number of inputs times that of examples.
        """
        chance = math.log(data[0][0].numel() * len(data[1])) / len(data[1])
        with suppress(NTKLaplaceError), untold():  # also where a callable makes networks of this many inputs alone
            while len(best.waves) < self.most_waves and (wave := self._wave(best.training)) is not None:
                again = self.attempt(data, best.design, (*best.waves, wave))
                unlearned, density = rank(best.training, left_out=True)
                if rank(again.training, left_out=True) <= (unlearned, density + chance):
                    break
                best = again
        return best

    def _wave(self, training: EvidenceTraining) -> tuple[int, float] | None:
        """Feature and period of the strongest wave in left-out residuals; None where there is none beyond chance."""
        found = None if training.predictive is None else training.lack_of_fit
        if found is None or found.input is None or found.period is None or found.input >= self.form.features:
            return None
        return found.input, found.period

    def _again(self, data: tuple[Tensor, ...], best: _Attempt) -> _Attempt:
        """The better by leave-one-out of a training and another with other options, if it needs one.

        For longer where left-out residuals of similar inputs are clearly alike, or with more evaluations of the
        evidence where it is below that of one prediction for all inputs: noise was learned between evaluations.
        """
        found, options = best.training, self.options_of(1)
        if found.predictive is None:
            return best
        longer = bool(self.starts.longer) and len(data[1]) <= _FEW
        doubts, lack = found.predictive.reliability, found.lack_of_fit if longer else None
        schedule = options.get("schedule") or short_schedule(options["epochs"])
        often = replace(schedule, frequency=max(1, schedule.frequency // _OFTEN))
        more: dict[str, Any] = {}
        if lack is not None and lack.clear:
            more = {**self.options_of(_TIMES), "starts": self.starts.longer}
        elif doubts is not None and doubts.below_one_prediction and often != schedule:
            more = {"schedule": often}
        if more:
            with suppress(NumericalError, NonFiniteError), untold():  # the first training is a result
                again = self.attempt(data, best.design, best.waves, **more)
                sure = self.likelihood.classifies and "starts" in more and _looks_sure(again.training, found)
                if not sure and rank(again.training, left_out=True) > rank(found, left_out=True):
                    return again
        return best


def taken(
    module: nn.Module, data: tuple[Tensor, ...], likelihood: Likelihood, prior: GaussianPrior, predictive: str | None,
    options: Mapping[str, Any],
) -> Trained:
    """The network as it is; hyperparameters are fitted at its weights. The arguments are those of `trained`."""
    posterior = laplace(module, data, likelihood, prior, options["structure"], options["curvature"],
                        settings=options["settings"])
    posterior.fit_hyperparameters()
    fit = None
    if predictive is not None:
        with _untrusted_untold():
            fit = posterior.fit_predictive(predictive, strict=False)
    return Trained(module, posterior, None, fit, np.zeros(0, dtype=np.intp))


def trained(
    form: Form, designs: Designs, data: tuple[Tensor, ...], likelihood: Likelihood, starts: Starts,
    predictive: str | None, seed: int, most_waves: int, options_of: Callable[[int], Mapping[str, Any]],
) -> Trained:
    """Train a network with evidence, or from several precisions.

    Of networks with and without a linear part the evidence chooses, with the inputs' precisions integrated out; of
    those with and without clipping or piecewise linear features leave-one-out. The first design is taken where examples
    are kept apart from the start, because no posterior is exact. `predictive` is that of `LaplaceRegressor`;
    `options_of` has the options of `train_with_evidence` for so many times as many epochs. Where left-out residuals
    have a wave along one input, the network gets its sine and cosine, of at most `most_waves`, as long as leave-one-out
    gains more than chance. Folds are left to the caller, who may not need them of every likelihood.
    """
    many, folds = predictive == "loo" and len(data[1]) >= _FEWEST_LEARNED, predictive == "folds"
    recipe = _Recipe(form, likelihood, starts, predictive and "loo", many or folds, most_waves, options_of)
    design, options = designs.first, options_of(1)
    module, curvature = form.new(design, ()), CurvatureType.of(options["curvature"])
    prior, settings = form.prior(design, ()), options["settings"]
    sized = Model(module, likelihood, prior, data, options["structure"], curvature, None, settings)
    held = np.zeros(0, dtype=np.intp)
    waves: Waves = ()
    better: Mapping[str, Any] = {}
    apart = many and not sized.has_exact()
    if not apart:
        best = recipe.best(data, design, module)
        for part in designs.tried:
            # the first training is a result
            with suppress(NumericalError, NonFiniteError, MemoryBudgetError), untold():
                best = recipe.better(data, part, best)
        found, module, design, waves, better = best.training, best.module, best.design, best.waves, best.options
        posterior, fit = found.posterior, found.predictive
        apart = many and (fit is None or _learned(found) or (len(data[1]) > _FEWEST and not fit.trusted))
        for message in () if apart else dict.fromkeys(best.told):
            warn(_in_columns(message, found, form))
    if apart:  # calibrated with data that the training does not see
        module, given, held = form.new(design, waves), data, held_out(data[1], likelihood.classifies, seed)
        kept = to_tensor(np.setdiff1d(np.arange(len(data[1])), held))
        data = tuple(part[kept] for part in given)
        found = recipe.run(data, module, form.prior(design, waves), **{**better, "predictive": None})
        posterior, fit = calibrated(found.posterior, module, data, tuple(part[held] for part in given))

    def by_folds() -> PredictiveFit:
        with untold():
            return posterior.cross_calibrate(lambda part: recipe.best(part, design).training.posterior, data,
                                             min(_FOLDS, len(data[1])), seed=seed)

    return Trained(module, posterior, found.history, fit, held, waves, design, designs.tried,
                   by_folds if folds else None)


def _in_columns(message: str, training: EvidenceTraining, form: Form) -> str:
    """What a training warns of; of an input that the network misses by its column, and with what is left to do."""
    if not message.startswith(MISSES) or training.lack_of_fit is None:
        return message
    return (f"{MISSES}: {form.described(training.lack_of_fit)}; add columns that are missing, or train with more "
            "hidden units, for more epochs, from a smaller precision or with Fourier features, as far as that was not "
            "tried")


def _trusted(attempt: _Attempt) -> bool:
    """Whether its leave-one-out is to be trusted."""
    fit = attempt.training.predictive
    return fit is not None and fit.trusted


def _left_out(attempt: _Attempt, more: float = 0.0) -> tuple[bool, bool, float]:
    """The larger, the better: leave-one-out and more, of trainings where it is to be trusted before others."""
    unlearned, density = rank(attempt.training, left_out=True)
    return _trusted(attempt), unlearned, density + more


def _by_evidence(attempt: _Attempt) -> tuple[bool, float]:
    """The larger, the better: the evidence, of trainings that have not learned their targets by heart before others."""
    return not _learned(attempt.training), integrated_evidence(attempt.training.posterior)


def _learned(training: EvidenceTraining) -> bool:
    fit = training.predictive
    return fit is not None and fit.reliability is not None and fit.reliability.learned_targets


def _looks_sure(weak: EvidenceTraining, other: EvidenceTraining) -> bool:
    """Whether a training from a weak prior only looks better than another: its posterior as it is predicts worse.

    Leave-one-out keeps the features, which know each label. From a weak prior the network alone looks sure of all
    labels that are left out, where the posterior, whose variances are large, says that it knows next to nothing.
    """
    fits = weak.predictive, other.predictive
    return fits[0] is not None and fits[1] is not None and fits[0].before < fits[1].before


def _untrusted_untold(later: bool = False) -> AbstractContextManager[None]:
    """Without the warning of a predictive that is not to be trusted: `predictive_fit_` tells, and it is not used.

    If one is fitted later to other data, also without that of none.
    """
    return untold(pattern=f"{_UNTRUSTED}|no predictive is fitted" if later else _UNTRUSTED)
