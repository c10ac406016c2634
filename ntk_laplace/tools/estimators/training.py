"""The training of an estimator's network, and the calibration of its posterior."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
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
class Trained:
    """A trained network, and its posterior with a fitted predictive."""

    module: nn.Module
    posterior: Posterior
    history: EvidenceHistory | None
    predictive: PredictiveFit | None
    held_out: NDArray[np.intp]  # numbers of the examples that the training did not see, for the predictive
    waves: Waves = ()  # of the Fourier features that were added


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
    new: Callable[[Waves], nn.Module], data: tuple[Tensor, ...], likelihood: Likelihood,
    prior: GaussianPrior, starts: Starts, predictive: str | None, seed: int, most_waves: int,
    options_of: Callable[[int], Mapping[str, Any]],
) -> Trained:
    """Train a network that `new` makes with evidence, or from several precisions.

    `predictive` is that of `LaplaceRegressor`; `options_of` has the options of `train_with_evidence` for so many times
    as many epochs. Where left-out residuals have a wave along one input, the network gets its sine and cosine, of at
    most `most_waves`, as long as leave-one-out gains more than chance.
    """
    waves: Waves = ()
    module = new(waves)
    many, folds = predictive == "loo" and len(data[1]) >= _FEWEST_LEARNED, predictive == "folds"
    options = {**options_of(1), "predictive": predictive and "loo"}

    def run(own: nn.Module, **other: Any) -> EvidenceTraining:
        with _untrusted_untold(later=many or folds):
            if starts.first is None:
                return train_with_evidence(own, data, likelihood, prior, **options | other)
            return train_from_starts(own, data, likelihood, prior, **{"starts": starts.first} | options | other)[0]

    curvature = CurvatureType.of(options["curvature"])
    sized = Model(module, likelihood, prior, data, options["structure"], curvature, None, options["settings"])
    held, better = np.zeros(0, dtype=np.intp), dict[str, Any]()  # options of a later training that was better
    apart = many and not sized.has_exact()
    if not apart:
        found, told = _recorded(run, module)
        found, told, module, waves = _with_waves(run, new, (found, told, module, waves), data, most_waves)
        doubts = None if found.predictive is None else found.predictive.reliability
        schedule = options.get("schedule") or short_schedule(options["epochs"])
        often = replace(schedule, frequency=max(1, schedule.frequency // _OFTEN))
        more: dict[str, Any] = {}
        lack = found.lack_of_fit if doubts is not None and starts.longer and len(data[1]) <= _FEW else None
        if lack is not None and lack.clear:
            more = {**options_of(_TIMES), "starts": starts.longer}
        elif doubts is not None and doubts.below_one_prediction and often != schedule:
            more = {"schedule": often}  # noise was learned between evaluations
        if more:
            other = new(waves)
            with suppress(NumericalError, NonFiniteError), untold():  # the first training is a result
                again, of_again = _recorded(run, other, **more)
                sure = likelihood.classifies and "starts" in more and _looks_sure(again, found)
                if not sure and rank(again, left_out=True) > rank(found, left_out=True):
                    found, told, module = again, of_again, other
                    better = more
        posterior, fit = found.posterior, found.predictive
        learned = fit is not None and fit.reliability is not None and fit.reliability.learned_targets
        apart = many and (fit is None or learned or (len(data[1]) > _FEWEST and not fit.trusted))
        for message in () if apart else dict.fromkeys(told):
            warn(message)
    if apart:  # calibrated with data that the training does not see
        module, given, held = new(waves), data, held_out(data[1], likelihood.classifies, seed)
        kept = to_tensor(np.setdiff1d(np.arange(len(data[1])), held))
        data, options["predictive"] = tuple(part[kept] for part in given), None
        found = run(module, **better)
        posterior, fit = calibrated(found.posterior, module, data, tuple(part[held] for part in given))
    if folds:
        options |= {name: value for name, value in better.items() if name != "starts"}
        options["schedule"] = EvidenceSchedule(options["epochs"], steps=0)  # the hyperparameters stay

        def train(part: tuple[Tensor, ...]) -> Posterior:
            own = copy.deepcopy((posterior.likelihood, posterior.prior))
            return train_with_evidence(new(waves), part, *own, **options).posterior

        with _untrusted_untold(later=True):
            fit = posterior.cross_calibrate(train, data, min(_FOLDS, len(data[1])), seed=seed)
    return Trained(module, posterior, found.history, fit, held, waves)


def _looks_sure(weak: EvidenceTraining, other: EvidenceTraining) -> bool:
    """Whether a training from a weak prior only looks better than another: its posterior as it is predicts worse.

    Leave-one-out keeps the features, which know each label. From a weak prior the network alone looks sure of all
    labels that are left out, where the posterior, whose variances are large, says that it knows next to nothing.
    """
    fits = weak.predictive, other.predictive
    return fits[0] is not None and fits[1] is not None and fits[0].before < fits[1].before


_Candidate = tuple[EvidenceTraining, list[str], nn.Module, Waves]  # with its warnings


def _with_waves(
    run: Callable[..., EvidenceTraining], new: Callable[[Waves], nn.Module], best: _Candidate,
    data: tuple[Tensor, ...], most: int,
) -> _Candidate:
    """A training with Fourier features of the waves that its residuals show, one after the other, or the given one.

    The best of M waves gains log M nats by chance, and M is about the number of inputs times that of examples.
    """
    chance = math.log(data[0][0].numel() * len(data[1])) / len(data[1])
    with suppress(NTKLaplaceError), untold():  # also where a callable makes networks of this many inputs alone
        while len(best[3]) < most and (wave := _wave(best[0])) is not None:
            waves = *best[3], wave
            module = new(waves)
            again = *_recorded(run, module), module, waves
            unlearned, density = rank(best[0], left_out=True)
            if rank(again[0], left_out=True) <= (unlearned, density + chance):
                break
            best = again
    return best


def _wave(training: EvidenceTraining) -> tuple[int, float] | None:
    """Input and period of the strongest wave in left-out residuals; None where there is none beyond chance."""
    found = None if training.predictive is None else training.lack_of_fit
    return None if found is None or found.input is None or found.period is None else (found.input, found.period)


def _recorded(
    run: Callable[..., EvidenceTraining], module: nn.Module, **options: Any
) -> tuple[EvidenceTraining, list[str]]:
    """A training that may not be the last, and its warnings."""
    with told_later() as told:
        return run(module, **options), told


def _untrusted_untold(later: bool = False) -> AbstractContextManager[None]:
    """Without the warning of a predictive that is not to be trusted: `predictive_fit_` tells, and it is not used.

    If one is fitted later to other data, also without that of none.
    """
    return untold(pattern=f"{_UNTRUSTED}|no predictive is fitted" if later else _UNTRUSTED)
