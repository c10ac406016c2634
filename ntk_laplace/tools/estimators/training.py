"""The training of an estimator's network, and the calibration of its posterior."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from ntk_laplace.curvature import CurvatureType
from ntk_laplace.errors import NonFiniteError, NTKLaplaceError, NumericalError, told_later, untold, warn
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.posterior import Posterior
from ntk_laplace.posterior.calibrate import PredictiveFit
from ntk_laplace.posterior.fit import laplace
from ntk_laplace.runtime.conversion import to_tensor
from ntk_laplace.tools.estimators.held_out import calibrated, held_out
from ntk_laplace.tools.estimators.hyperparameters import integrated_evidence
from ntk_laplace.training import (
    EvidenceHistory,
    EvidenceSchedule,
    EvidenceTraining,
    train_from_starts,
    train_with_evidence,
)
from ntk_laplace.training.model import Model
from ntk_laplace.training.schedule import short_schedule
from ntk_laplace.training.starts import rank

_UNTRUSTED = "the fitted predictive is not to be trusted"
_FOLDS = 5  # of predictive="folds"
_FEWEST = 1_000  # of more examples some may be kept apart
_FEWEST_LEARNED = 300  # of so many too, without an exact posterior or where the targets were learned by heart
_OFTEN = 3  # times as many evaluations of the evidence where it is below that of one prediction for all inputs
_TIMES, _FEW = 3, 10_000  # times as many epochs where residuals are clearly alike, of so many examples at most


Waves = Sequence[tuple[int, float]]  # inputs and periods of Fourier features


@dataclass(frozen=True)
class Starts:
    """Prior precisions that trainings start from, each where residuals of those before are alike."""

    first: Sequence[float] | None  # None: that of the prior
    longer: Sequence[float] = ()  # with more epochs, where residuals are clearly alike


@dataclass(frozen=True)
class Form:
    """A network, made for these waves, and its prior."""

    new: Callable[[Waves], nn.Module]
    prior: GaussianPrior
    linear: bool = False  # whether it has a linear part


@dataclass(frozen=True)
class Trained:
    """A trained network, and its posterior with a fitted predictive."""

    module: nn.Module
    posterior: Posterior
    history: EvidenceHistory | None
    predictive: PredictiveFit | None
    held_out: NDArray[np.intp]  # numbers of the examples that the training did not see, for the predictive
    waves: Waves = ()  # of the Fourier features that were added
    linear: bool = False  # whether the network has a linear part


@dataclass(frozen=True)
class _Attempt:
    """A training that may not be the last, with its warnings and what it trained."""

    training: EvidenceTraining
    told: list[str]
    module: nn.Module
    form: Form
    waves: Waves = ()
    options: Mapping[str, Any] = field(default_factory=dict)


_Run = Callable[..., EvidenceTraining]  # of a module under a prior


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
    forms: Sequence[Form], data: tuple[Tensor, ...], likelihood: Likelihood, starts: Starts, predictive: str | None,
    seed: int, most_waves: int, options_of: Callable[[int], Mapping[str, Any]],
) -> Trained:
    """Train a network with evidence, or from several precisions.

    Of several forms the evidence with the inputs' precisions integrated out chooses; where no posterior is exact, the
    first is taken. `predictive` is that of `LaplaceRegressor`; `options_of` has the options of `train_with_evidence`
    for so many times as many epochs. Where left-out residuals have a wave along one input, the network gets its sine
    and cosine, of at most `most_waves`, as long as leave-one-out gains more than chance.
    """
    many, folds = predictive == "loo" and len(data[1]) >= _FEWEST_LEARNED, predictive == "folds"
    options = {**options_of(1), "predictive": predictive and "loo"}

    def run(own: nn.Module, prior: GaussianPrior, **other: Any) -> EvidenceTraining:
        with _untrusted_untold(later=many or folds):
            if starts.first is None:
                return train_with_evidence(own, data, likelihood, prior, **options | other)
            return train_from_starts(own, data, likelihood, prior, **{"starts": starts.first} | options | other)[0]

    form, curvature = forms[0], CurvatureType.of(options["curvature"])
    module = form.new(())
    sized = Model(module, likelihood, form.prior, data, options["structure"], curvature, None, options["settings"])
    held = np.zeros(0, dtype=np.intp)
    waves: Waves = ()
    better: Mapping[str, Any] = {}
    apart = many and not sized.has_exact()
    if not apart:
        schedule = options.get("schedule") or short_schedule(options["epochs"])
        often = replace(schedule, frequency=max(1, schedule.frequency // _OFTEN))
        longer = {**options_of(_TIMES), "starts": starts.longer} if starts.longer and len(data[1]) <= _FEW else {}
        again = longer, {"schedule": often} if often != schedule else {}

        def improved(first: _Attempt) -> _Attempt:
            return _trained_again(run, _with_waves(run, first, data, most_waves), *again)

        best = improved(_attempt(run, form, module=module))
        for other in forms[1:]:
            with suppress(NumericalError, NonFiniteError), untold():  # the first training is a result
                best = max(best, improved(_attempt(run, other)), key=_rank_of_form)
        found, module, form, waves, better = best.training, best.module, best.form, best.waves, best.options
        posterior, fit = found.posterior, found.predictive
        apart = many and (fit is None or _learned(found) or (len(data[1]) > _FEWEST and not fit.trusted))
        for message in () if apart else dict.fromkeys(best.told):
            warn(message)
    if apart:  # calibrated with data that the training does not see
        module, given, held = form.new(waves), data, held_out(data[1], likelihood.classifies, seed)
        kept = to_tensor(np.setdiff1d(np.arange(len(data[1])), held))
        data, options["predictive"] = tuple(part[kept] for part in given), None
        found = run(module, form.prior, **better)
        posterior, fit = calibrated(found.posterior, module, data, tuple(part[held] for part in given))
    if folds:
        options |= {name: value for name, value in better.items() if name != "starts"}
        options["schedule"] = EvidenceSchedule(options["epochs"], steps=0)  # the hyperparameters stay

        def train(part: tuple[Tensor, ...]) -> Posterior:
            own = copy.deepcopy((posterior.likelihood, posterior.prior))
            return train_with_evidence(form.new(waves), part, *own, **options).posterior

        with _untrusted_untold(later=True):
            fit = posterior.cross_calibrate(train, data, min(_FOLDS, len(data[1])), seed=seed)
    return Trained(module, posterior, found.history, fit, held, waves, form.linear)


def _rank_of_form(attempt: _Attempt) -> tuple[bool, float]:
    """The larger, the better: the evidence, of trainings that have not learned their targets by heart before others."""
    return not _learned(attempt.training), integrated_evidence(attempt.training.posterior)


def _learned(training: EvidenceTraining) -> bool:
    fit = training.predictive
    return fit is not None and fit.reliability is not None and fit.reliability.learned_targets


def _trained_again(run: _Run, best: _Attempt, longer: Mapping[str, Any], often: Mapping[str, Any]) -> _Attempt:
    """The better by leave-one-out of a training and another, if it needs one, with one of two sets of options.

    For longer where left-out residuals of similar inputs are clearly alike, or with more evaluations of the evidence
    where it is below that of one prediction for all inputs: noise was learned between evaluations.
    """
    found = best.training
    if found.predictive is None:
        return best
    doubts, lack = found.predictive.reliability, found.lack_of_fit if longer else None
    alike = lack is not None and lack.clear
    more = longer if alike else often if doubts is not None and doubts.below_one_prediction else {}
    if more:
        with suppress(NumericalError, NonFiniteError), untold():  # the first training is a result
            again = _attempt(run, best.form, best.waves, **more)
            sure = found.posterior.likelihood.classifies and alike and _looks_sure(again.training, found)
            if not sure and rank(again.training, left_out=True) > rank(found, left_out=True):
                return again
    return best


def _looks_sure(weak: EvidenceTraining, other: EvidenceTraining) -> bool:
    """Whether a training from a weak prior only looks better than another: its posterior as it is predicts worse.

    Leave-one-out keeps the features, which know each label. From a weak prior the network alone looks sure of all
    labels that are left out, where the posterior, whose variances are large, says that it knows next to nothing.
    """
    fits = weak.predictive, other.predictive
    return fits[0] is not None and fits[1] is not None and fits[0].before < fits[1].before


def _with_waves(run: _Run, best: _Attempt, data: tuple[Tensor, ...], most: int) -> _Attempt:
    """A training with Fourier features of the waves that its residuals show, one after the other, or the given one.

    The best of M waves gains log M nats by chance, and M is about the number of inputs times that of examples.
    """
    chance = math.log(data[0][0].numel() * len(data[1])) / len(data[1])
    with suppress(NTKLaplaceError), untold():  # also where a callable makes networks of this many inputs alone
        while len(best.waves) < most and (wave := _wave(best.training)) is not None:
            again = _attempt(run, best.form, (*best.waves, wave))
            unlearned, density = rank(best.training, left_out=True)
            if rank(again.training, left_out=True) <= (unlearned, density + chance):
                break
            best = again
    return best


def _wave(training: EvidenceTraining) -> tuple[int, float] | None:
    """Input and period of the strongest wave in left-out residuals; None where there is none beyond chance."""
    found = None if training.predictive is None else training.lack_of_fit
    return None if found is None or found.input is None or found.period is None else (found.input, found.period)


def _attempt(
    run: _Run, form: Form, waves: Waves = (), module: nn.Module | None = None, **options: Any
) -> _Attempt:
    """A training of a new network of this form, or of the given one."""
    module = form.new(waves) if module is None else module
    with told_later() as told:
        return _Attempt(run(module, form.prior, **options), told, module, form, waves, options)


def _untrusted_untold(later: bool = False) -> AbstractContextManager[None]:
    """Without the warning of a predictive that is not to be trusted: `predictive_fit_` tells, and it is not used.

    If one is fitted later to other data, also without that of none.
    """
    return untold(pattern=f"{_UNTRUSTED}|no predictive is fitted" if later else _UNTRUSTED)
