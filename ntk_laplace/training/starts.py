"""Training with evidence from several prior precisions, the results in the order of leave-one-out or evidence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ntk_laplace.errors import HyperparameterError, UnsupportedError, require_number, untold
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.model.network import private_copy, require_module
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.structures import Settings
from ntk_laplace.training.result import MISSES, EvidenceTraining
from ntk_laplace.training.train import train_with_evidence

_MISFIT = 0.05  # correlation of residuals of neighbors


def train_from_starts(
    network: nn.Module, data: Any, likelihood: Likelihood, prior: GaussianPrior | None = None, *,
    starts: Sequence[float] = (1.0, 0.01), misfit: float | None = _MISFIT, **options: Any,
) -> list[EvidenceTraining]:
    """Train copies of a network with evidence, each from other prior precisions, and sort the results.

    The evidence of a network has several maxima. From a strong prior the training can end at a function that is too
    smooth, with noise that is too large; from a weak one, at a function that follows its labels. Residuals of similar
    inputs are alike where the function is too smooth (`Posterior.lack_of_fit`). So a further start is tried only where
    those of the best so far are, or where its leave-one-out is not to be trusted (`PredictiveFit.trusted`).

    Parameters
    ----------
    network : nn.Module
        Every copy starts from its weights. At the end it has the weights and buffers of the best copy; an error or an
        interruption leaves it as it was.
    data, likelihood, prior
        As in `train_with_evidence`.
    starts : sequence of float
        Factors of the prior's precisions at the start of each training.
    misfit : float, optional
        Residuals are alike where the correlation of those of neighbors is above this, and more than a standard
        deviation above that of random pairs, or where they clearly are (`LackOfFit.clear`). None: all starts are
        tried; so they are where inputs are not one array of real numbers.
    options
        Of `train_with_evidence`, by default with ``predictive="loo"``. `optimizer` and `scheduler` are callables that
        make one.

    Returns
    -------
    list of EvidenceTraining
        One for each start that was tried, that with the largest mean leave-one-out log density (``predictive.after``)
        first, and those that have learned their targets last (`Reliability.learned_targets`), before those whose
        leave-one-out fails. If all are without it, under ``predictive=None`` or where no exact posterior fits in
        memory, that with the largest evidence of the training's structure is first.

    Raises
    ------
    HyperparameterError
        If a factor is not positive and finite, or `misfit` is not finite.
    UnsupportedError
        For a checkpoint, or an optimizer of the caller's network.
    """
    if isinstance(starts, str) or not isinstance(starts, Sequence) or not starts:
        raise HyperparameterError("factors of the prior's precisions", repr(starts), "Pass starts=(1.0, 0.01).")
    for factor in starts:
        require_number("positive finite starts", factor, "Pass starts=(1.0, 0.01).", above=0)
    if misfit is not None:
        require_number("a finite misfit, or None", misfit, f"Leave it out for {_MISFIT:g}.")
    _require_repeatable(options)
    prior, module = GaussianPrior.of(prior, groups="layer"), require_module(network)
    found: list[tuple[EvidenceTraining, nn.Module]] = []
    for factor in map(float, starts):
        copy = private_copy(module)
        with untold(pattern=MISSES):
            training = train_with_evidence(copy, data, likelihood, prior.scaled(factor),
                                           **{"predictive": "loo"} | options)
        found.append((training, copy))
        left_out = any(training.predictive is not None for training, _ in found)
        found.sort(key=lambda pair: rank(pair[0], left_out), reverse=True)
        if misfit is not None and _enough(found[0][0], misfit):
            break
    found[0][0].tell_misfit()
    best = found[0][1]
    with torch.no_grad():  # not by name: a wrapper of torch.compile adds to the names
        for own, other in zip((*network.parameters(), *network.buffers()), (*best.parameters(), *best.buffers()),
                              strict=True):
            own.copy_(other)
    return [training for training, _ in found]


def _enough(best: EvidenceTraining, misfit: float) -> bool:
    """Whether no further start is tried: its residuals are not alike, and nothing speaks against its leave-one-out."""
    lack, fit = best.lack_of_fit, best.predictive
    alike = lack is None or lack.clear or lack.above(misfit)
    return not alike and (fit is None or fit.trusted)


def rank(training: EvidenceTraining, left_out: bool) -> tuple[bool, float]:
    """The larger, the better: mean log density of left-out training points, or the best evidence, nats.

    One that has learned its targets comes after all others, as its left-out points are no score, and then one without.
    """
    fit = training.predictive
    if not left_out:
        return True, training.evidence
    if fit is None:
        return False, -math.inf
    return fit.reliability is None or not fit.reliability.learned_targets, fit.after


def _require_repeatable(options: dict[str, Any]) -> None:
    """Refuse options that belong to one training."""
    settings = Settings.of(options.get("settings"))
    if settings.checkpoint is not None or settings.resume is not None:
        raise UnsupportedError("settings without checkpoint and resume, for several trainings", "one of them",
                               "Leave it out, or call train_with_evidence for each start.")
    for name in ("optimizer", "scheduler"):
        given = options.get(name)
        if given is not None and (not callable(given) or isinstance(given, torch.optim.Optimizer)):
            raise UnsupportedError(f"what makes the {name} of each training", f"a {type(given).__name__}",
                                   "Pass torch.optim.Adam, or a function.")
