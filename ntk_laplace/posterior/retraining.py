"""Retraining: the network trained on to the optimum of a log joint whose hyperparameters the evidence has chosen."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from typing_extensions import Self

from ntk_laplace.errors import (
    DataError,
    NTKLaplaceError,
    RetrainingInterrupted,
    UnsupportedError,
    require_choice,
    require_number,
    require_whole,
    warn,
)
from ntk_laplace.model.objective import Objective
from ntk_laplace.model.optimum import Held
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.posterior.alternation import alternate
from ntk_laplace.posterior.calibrate import PredictiveFit
from ntk_laplace.posterior.calibration import CalibrationVerbs
from ntk_laplace.posterior.convergence import WatchedFit, converged
from ntk_laplace.posterior.evidence import EvidenceVerbs
from ntk_laplace.posterior.explain.reliability import MOST_DECREMENT
from ntk_laplace.structures import KFAC, FittedModel, LinearizedModel, StructureSpec
from ntk_laplace.structures.data_passes import read_points
from ntk_laplace.structures.points import coarsest

_AIM = 0.1  # of the tolerance
_WIDE = 1024  # inputs or outputs of a layer


class RetrainingVerbs(EvidenceVerbs, CalibrationVerbs):
    """A posterior of the network after more training."""

    def retrain(
        self, data: Any, *, rounds: int = 10, steps: int = 1000, tolerance: float = MOST_DECREMENT,
        groups: str | None = "layer", evidence_steps: int = 20, predictive: str | None = "loo",
    ) -> Self:
        """Posterior of the network trained on at hyperparameters that the evidence chooses; for overfitted networks.

        A copy of the network goes on from its weights. The evidence is maximized over precisions and noise; then rounds
        of Adam's minibatch steps and of ascent steps on the evidence follow each other, as in `train_with_evidence`
        ([I21] Algorithm 1). At the end the copy is trained to an optimum of the log joint, by L-BFGS over all examples,
        and the predictive is fitted by leave-one-out. The random order of the minibatches is always the same. All is in
        the mode of the fit (dropout off and batch statistics frozen under ``eval()``). Above 8,192 examples minibatches
        precede L-BFGS. The caller's network and this posterior do not change.

        Parameters
        ----------
        data : DataLoader, Dataset, (X, y), (X, y, w), or a mapping
            The training data, as for `laplace`.
        rounds : int
            How often minibatches follow the evidence. All rounds together take at least 1,000 steps, and one pass over
            the data each.
        steps : int
            Iterations of L-BFGS, at most.
        tolerance : float
            In nats per point: the largest Newton decrement ½ gᵀH⁻¹g/N that gives no warning. A gradient g that is left
            keeps a part of each point's own label in its leave-one-out prediction. Training goes on to a tenth of it,
            because weights that know the labels by heart take longer to forget them, or until twice the iterations take
            less than a quarter off it, as where outputs have kinks.
        groups : str or None
            Groups that the precision of a prior with only one is given to, as in `GaussianPrior`; None leaves it one.
        evidence_steps : int
            Ascent steps in each round; before the first at most ten times as many of L-BFGS. The evidence is that of
            the structure, or of "kfac" where the structure is exact and no layer is wider than 1,024 and than the
            number of examples. 0 leaves the prior and the noise as they are: the copy is only trained to the optimum.
        predictive : str or None
            "loo" calls ``fit_predictive("loo", strict=False)`` where leave-one-out is exact: structure "gp", "full" or
            "iterative", curvature "ggn"; where that is not possible, a warning says why. None does not.

        Returns
        -------
        Posterior
            Of the copy, with the same structure. Its weights are ``posterior.network.theta``. Warnings tell of an
            optimum that was not reached, or that has less evidence than the weights before L-BFGS, and of leave-one-out
            that is not to be trusted.

        Raises
        ------
        DataError
            If the data have another number of examples or another log likelihood than those of the fit.
        UnsupportedError
            If a what-if has changed the posterior, or several processes share it.
        NumericalError
            If training does not decrease the negative log joint.
        RetrainingInterrupted
            On Ctrl-C, with the network so far.
        """
        require_whole("rounds", rounds, 1, "Leave it out for 10.")
        require_whole("steps", steps, 1, "Leave it out for 1000.")
        require_whole("evidence_steps", evidence_steps, 0, "Leave it out for 20; 0 keeps the hyperparameters.")
        require_number("a positive tolerance, nats per point", tolerance, "Leave it out for the default.", above=0)
        require_predictive(predictive)
        model, structure = self._fitted.model, self._fitted.structure
        same = model.refitted and structure.points.same_data(structure.trained_points)
        if (model.displacement is not None and not same) or model.training_gradient is not None:
            raise UnsupportedError("a posterior of unchanged training data, to retrain", f"{self!r}",
                                   "Retrain first, and ask what if afterwards.")
        model.settings.reducer.require_one("retraining", "Train the network, and fit it with all of them.")
        with torch.inference_mode(False), torch.enable_grad():
            found = self._retrained(data, rounds, steps, tolerance, groups, evidence_steps)
        if predictive is not None and found.fitted.exact:
            fitted_if_possible(found, predictive)
        return found

    def _retrained(
        self, data: Any, rounds: int, steps: int, tolerance: float, groups: str | None, evidence_steps: int
    ) -> Self:
        shown, model = self._fitted.settings.progress, self._fitted.model.copied()
        model = replace(model, displacement=None, refitted=False)  # from the network's weights
        settings = replace(model.settings, progress=False, checkpoint=None, resume=None)
        prior = _divided(model, groups) if evidence_steps and groups is not None else model.prior
        model = replace(model, prior=prior, settings=settings)
        network, spec = model.network, self._fitted.structure.spec
        batches = network.batches(data, settings.batch_size)
        held = Held(batches)
        if held.num_examples != self.num_examples:
            raise DataError(f"the {self.num_examples:,} training examples of the fit", f"{held.num_examples:,}",
                            "Pass the data of the fit, or fit the network to these with laplace().")
        before = float(self._fitted.structure.trained_points.log_likelihood(self.likelihood).detach())
        precision = coarsest(network.precision, self._fitted.points.precision)
        read_points(model, batches).require_log_likelihood(model.likelihood, before, precision)
        model = model.at_weights(network.theta)
        network, fit = model.network, partial(FittedModel.of, model)
        objective = Objective(network.caller, model.likelihood, model.prior, held.num_examples, self.num_outputs,
                              held.sum_of_weights)
        try:
            if evidence_steps:
                own = _of_the_evidence(spec, objective)
                alternate(lambda: self._derived(fit(own, batches)), objective, held, rounds, evidence_steps, shown)
            watched = WatchedFit(partial(fit, spec, batches))
            fitted = converged(objective, held, watched, steps, tolerance, _AIM * tolerance, shown,
                               f"pass more than steps={steps}")
            if evidence_steps:
                watched.tell_fall(fitted, "compare the network with the one before, on held-out data")
        except KeyboardInterrupt as cause:
            raise RetrainingInterrupted(network.module, model.likelihood, model.prior) from cause
        model = fitted.model
        return self._derived(FittedModel(replace(model, settings=replace(settings, progress=shown)), fitted.structure))


def _of_the_evidence(spec: StructureSpec, objective: Objective) -> StructureSpec:
    """KFAC in place of an exact structure, unless its factors would be the largest matrices."""
    layers = [p for p in objective.parameters.values() if p.ndim > 1]
    widest = max((max(len(p), p[0].numel()) for p in layers), default=0)
    return KFAC() if spec.exact and widest <= max(_WIDE, objective.num_examples) else spec


def _divided(model: LinearizedModel, groups: str) -> GaussianPrior:
    """The prior; with one precision, the same in these groups."""
    prior = model.prior
    first = float(prior.precision.detach().flatten()[0])
    found = GaussianPrior(first, prior.flat_mean().detach(), groups).bind(model.network.shapes)
    return prior if len(prior.precision) > 1 else found.to(model.network.device)


def require_predictive(predictive: object) -> None:
    """Refuse a way to fit the predictive that is not known (UnsupportedError)."""
    require_choice(predictive, (None, "loo"), 'predictive="loo" or None',
                   "For other data, call fit_predictive(data) on the posterior afterwards.")


def fitted_if_possible(posterior: CalibrationVerbs, predictive: str) -> PredictiveFit | None:
    """Fit the predictive, trusted or not; where it cannot be fitted a warning says why: the training stays."""
    try:
        return posterior.fit_predictive(predictive, strict=False)
    except NTKLaplaceError as error:
        warn(f"no predictive is fitted, because leave-one-out fails: {error}")
        return None
