"""Calibration methods of a posterior: predictions fitted to left-out training points or to held-out data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.errors import DataError, NumericalError, UnsupportedError, require_choice, require_flags, warn
from ntk_laplace.model.calibration import Calibration
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.posterior.calibrate import LeftOut, PredictiveFit, densities, fit_calibration, log_density_terms
from ntk_laplace.posterior.conditional import TEMPERATURES
from ntk_laplace.posterior.explain import Reliability, leave_one_out, leave_some_out
from ntk_laplace.posterior.explain.reliability import MOST_DECREMENT, newton_decrement
from ntk_laplace.posterior.folds import fold_of_each, parts_of
from ntk_laplace.posterior.prediction import PredictionVerbs
from ntk_laplace.runtime.means import error_of_mean
from ntk_laplace.runtime.progress import track
from ntk_laplace.structures import FittedModel
from ntk_laplace.structures.points import TrainingPoints
from ntk_laplace.structures.what_if import Indices, at_optimum, drawn

# training points that are left out at most: of an exact structure, and of others, which are fitted again without them
_MOST_LEFT_OUT, _LEFT_OUT = 50_000, 300
_TEMPERATURES = {**TEMPERATURES, "network": "temperature"}


class CalibrationVerbs(PredictionVerbs):
    """Predictions whose scale, temperature or noise is fitted."""

    def fit_predictive(
        self, objective: Any = "loo", parameters: Sequence[str] | None = None, *, points: Indices | None = None,
        seed: int = 0, strict: bool = True,
    ) -> PredictiveFit:
        """Fit the calibration of predictions: it maximizes the mean log density of points that were left out.

        The response at x is that of f/T for f ~ N(m(x), c V(x)), with the noise multiplied by s. The numbers are fitted
        to p(y_n given all other training points) in closed form, without a validation set, and compared with the
        network alone, c = 0. With normal noise, weights whose Newton decrement is above 0.02 nats a point are at no
        optimum: points are then left out of the linearized model at its own, where that is exact, and the numbers are
        used for the network's function, unless it explains the targets worse. `predict` uses them until a
        hyperparameter changes; the latent moments, the evidence and explanations do not change. Posteriors of other
        data start without.

        Parameters
        ----------
        objective : str or data
            "loo": leave-one-out of the training points, with curvature "ggn"; or held-out data, (X, y), a DataLoader
            or a Dataset.
        parameters : sequence of str, optional
            "scale" (c), "temperature" (T), "average_temperature" (of the averaged probabilities), "noise" (s, a factor
            of the noise covariance), or "common" alone (one factor for c and s, in closed form). By default scale and
            temperature of classes, scale and noise of `Gaussian` and `StudentT`, the scale of others.
        points, seed : optional
            Which training points are left out, as in `leave_one_out`. By default all for an exact structure, but of
            more than 50,000 as many drawn at random; and 300 drawn for the others, which are fitted again without them.
            None is drawn that has weight 0 or no target.
        strict : bool
            Raise an error if leave-one-out is not to be trusted. False fits all the same, and warns.

        Returns
        -------
        PredictiveFit
            Numbers, mean log densities before, after and of the network alone, and whether they can be trusted.

        Raises
        ------
        UnsupportedError
            If the curvature is not the GGN, if leave-one-out is not to be trusted, or if the likelihood has no such
            parameter.
        DataError
            If no point has a target, or the data cannot be read again.
        """
        require_flags(strict=strict)
        if isinstance(objective, str):
            if objective != "loo":
                raise UnsupportedError('objective "loo", or held-out data', repr(objective),
                                       'Pass (X, y) or a DataLoader, or "loo".')
            fit = self._left_out_at_optimum(points, seed, parameters)
            if fit is None:
                left_out, likelihood, found, _ = self._left_out_moments(self._fitted, points, seed)
                fit = self._fitted_calibration(left_out, likelihood, "loo", parameters, found)
            if strict and not fit.trusted:
                raise UnsupportedError(
                    "leave-one-out predictions that approximate retraining", "; ".join(fit.reasons),
                    'Train at these hyperparameters, with retrain(data) or train_with_evidence(predictive="loo"), or '
                    "pass held-out data, calibrate(data); strict=False fits all the same.",
                )
            return self._used(fit)
        if points is not None:
            raise UnsupportedError('points= with objective="loo", which leaves them out', "held-out data",
                                   "Leave points= out.")
        likelihood = self.likelihood.for_new_points()
        held_out = self._held_out(objective, likelihood)
        return self._used(self._fitted_calibration(held_out, likelihood, "held-out data", parameters))

    def calibrate(self, data: Any, temperature: str = "draws") -> PredictiveFit:
        """Fit the calibration of predictions to held-out data; as `fit_predictive`, for every structure.

        Parameters
        ----------
        data : DataLoader, Dataset, (X, y), (X, y, w), or a mapping
            Data that the network was not trained on.
        temperature : str
            Of classes: "draws" divides each draw of f, E softmax(f/T); "average" divides the log of the averaged
            probabilities, softmax(log E softmax(f) / T). "network" is temperature scaling of the network alone, or the
            additive noise alone: the scale is 0.

        Returns
        -------
        PredictiveFit
        """
        require_choice(temperature, _TEMPERATURES, 'temperature "draws", "average" or "network"')
        likelihood = self.likelihood.for_new_points()
        held_out = self._held_out(data, likelihood)
        names = [_TEMPERATURES[temperature]] if likelihood.classifies else ["noise"]
        if temperature == "network":
            scaled = likelihood.scales_noise or likelihood.additive_noise(held_out.mean) is not None
            if not (likelihood.classifies or scaled):
                raise UnsupportedError('classes, or additive noise, for temperature="network"',
                                       f"a {type(likelihood).__name__} likelihood, whose network has no such number",
                                       "Leave temperature out: the scale is fitted.")
            return self._used(
                self._fitted_calibration(held_out, likelihood, "held-out data", names, scale=0.0))
        parameters = ["scale", *names] if likelihood.classifies else None
        return self._used(self._fitted_calibration(held_out, likelihood, "held-out data", parameters))

    def cross_calibrate(
        self, train: Callable[[Any], CalibrationVerbs], data: Any, folds: int | Any = 5, *, seed: int = 0
    ) -> PredictiveFit:
        """Fit the calibration of predictions to folds of the training data, each left out of a training of its own.

        Leave-one-out keeps the features that the network has learned from all labels, so it can be too sure of them.
        Here the features are learned without the fold. It costs as many trainings as there are folds, and no data.

        Parameters
        ----------
        train : callable
            Trains a new network on part of the data, and returns its posterior:
            ``train((X, y))``, ``train((X, y, w))``, or ``train(dataset)``, as `data` are given. Let it take the
            hyperparameters of this posterior, or fit them again.
        data : (X, y), (X, y, w), or a Dataset
            The training data, as for `laplace`, in the order of the fit where the noise is per point.
        folds : int or array of int, (N,)
            Number of folds, drawn at random and of about equal size; or the fold of each point.
        seed : int
            Of the random folds.

        Returns
        -------
        PredictiveFit
            As from `fit_predictive`, with the objective "folds". `predict` uses it from now on.

        Raises
        ------
        DataError
            If the data are not as many as the training points, or a loader; or if the folds are not at least two.
        UnsupportedError
            If `train` returns no posterior of as many outputs.
        """
        if not callable(train):
            raise UnsupportedError("train, a function that takes part of the data", f"{train!r}"[:80],
                                   "Pass for example lambda part: train_with_evidence(network(), part, ...).posterior.")
        count, part_of = parts_of(data)
        if count != self.num_examples:
            raise DataError(f"the {self.num_examples:,} training examples of the fit", f"{count:,}",
                            "Pass the data of the fit.")
        numbers = fold_of_each(folds, count, seed)
        names, parts, order = numbers.unique().tolist(), [], []
        for name in track(names, lambda: "ntk_laplace: trainings without a fold", len(names),
                          self._fitted.settings.progress):
            own = numbers == name
            found = train(part_of((~own).nonzero().squeeze(1)))
            if not isinstance(found, CalibrationVerbs) or found.num_outputs != self.num_outputs:
                got = f"one of {found.num_outputs}" if isinstance(found, CalibrationVerbs) else f"{found!r}"[:80]
                raise UnsupportedError(f"a posterior of {self.num_outputs} outputs from train(data)", got,
                                       "Return laplace(...), or the posterior of train_with_evidence(...).")
            order.append(own.nonzero().squeeze(1))
            parts.append(found._held_out(part_of(order[-1]), self.likelihood.at(order[-1]).counted_once()))
        points = LeftOut.joined(parts, torch.cat(order))
        return self._used(self._fitted_calibration(points, self.likelihood.counted_once(), "folds", None))

    # --- inside

    def _fitted_calibration(
        self, points: LeftOut, likelihood: Likelihood, objective: str, parameters: Sequence[str] | None,
        reliability: Reliability | None = None, **fixed: float,
    ) -> PredictiveFit:
        with torch.inference_mode(False):
            likelihood, parts = points.by_position(likelihood)
            found = densities(likelihood, parts)
            calibration, at_bounds = fit_calibration(found, parameters, fixed, self._fitted.total)
            # the positions of an example are not independent: their terms are added up
            shape = len(points.mean), -1
            before, after, network = (
                log_density_terms(found, one).view(shape).sum(1)
                for one in (Calibration(), calibration, Calibration(scale=0.0)))
            shares = found.shares.view(shape).sum(1)
        if reliability is not None:
            reliability = replace(reliability, density=float(after.sum()))
        return PredictiveFit(
            calibration, objective, float(before.sum()), float(after.sum()), float(network.sum()),
            int((parts.weights > 0).sum()), error_of_mean(after, shares), error_of_mean(after - network, shares),
            at_bounds, reliability)

    def _used(self, fit: PredictiveFit) -> PredictiveFit:
        """Use a calibration in predictions, with a warning if it is not to be trusted."""
        if fit.reasons:
            warn(f"the fitted predictive is not to be trusted: {'; '.join(fit.reasons)}; train with evidence, "
                 "or fit it to held-out data")
        self.predictive = fit.calibration
        return fit

    def _left_out_at_optimum(
        self, points: Indices | None, seed: int, parameters: Sequence[str] | None
    ) -> PredictiveFit | None:
        """The calibration by points that are left out of the linearized model at its own optimum.

        None where the weights are at an optimum, or leave-one-out is not exact at it; and where the network's function
        explains its training targets worse than the linearized model those that it has not seen: then its errors are
        others.
        """
        fitted = self._fitted
        alone = fitted.settings.reducer.world_size == 1
        additive = fitted.likelihood.additive_noise(fitted.points.f) is not None
        if not (alone and additive and fitted.exact and fitted.curvature_type.kind == "ggn"):
            return None
        decrement = newton_decrement(fitted)
        if decrement <= MOST_DECREMENT:
            return None
        try:
            with torch.inference_mode(False):
                optimum = at_optimum(fitted)
        except NumericalError:  # rounding: the weights are what is left
            return None
        left_out, likelihood, found, index = self._left_out_moments(optimum, points, seed)
        found = replace(found, decrement=decrement, at_optimum=True, refitted=False)
        fit = self._fitted_calibration(left_out, likelihood, "loo", parameters, found)
        own = replace(left_out, mean=fitted.points.subset(index).f)
        with torch.inference_mode(False):
            likelihood, parts = own.by_position(likelihood)
            explained = float(log_density_terms(densities(likelihood, parts), fit.calibration).sum())
        return fit if explained >= fit.after else None

    def _left_out_moments(
        self, fitted: FittedModel, points: Indices | None, seed: int
    ) -> tuple[LeftOut, Likelihood, Reliability, Tensor | slice]:
        """Moments of training points given all others, the likelihood of these points, and their numbers."""
        if fitted.curvature_type.kind != "ggn":
            raise UnsupportedError('curvature="ggn" for the objective "loo"', f"curvature={self.curvature_type.kind!r}",
                                   "Pass held-out data, calibrate(data).")
        counted = fitted.points.observed_counts(self.likelihood).nonzero().flatten().cpu()  # others predict nothing
        most = _MOST_LEFT_OUT if fitted.exact else _LEFT_OUT
        if points is None and fitted.exact and len(counted) <= most:
            index: Tensor | slice = slice(None)
            found = leave_one_out(fitted, samples=1)  # the draws are for its densities, which are not used here
        else:
            chosen = (counted[drawn(min(most, len(counted)), len(counted), seed)] if points is None
                      else drawn(points, self.num_examples, seed))
            found = leave_some_out(fitted, chosen, samples=1)
            index = found.index
        likelihood, scalar = self.likelihood.at(index).counted_once(), self.network.scalar
        kept = LeftOut.of(fitted.points.subset(index), likelihood, found.mean, found.covariance, scalar)
        return kept, likelihood, found.reliability, index

    def _held_out(self, data: Any, likelihood: Likelihood) -> LeftOut:
        """Moments of held-out points, in one pass over them."""
        batches = self.network.batches(data, self._fitted.settings.batch_size)
        means, covariances, targets = [], [], []
        for x, y in batches:
            mean, covariance = self.latent_moments(x, per_position=likelihood.positions is not None)
            means.append(mean.flatten(1))
            covariances.append(covariance)
            targets.append(y)
        f = torch.cat(means)
        weights = batches.weights
        points = TrainingPoints(f, likelihood.targets(torch.cat(targets), *f.shape).to(f.device),
                                None if weights is None else weights.to(f))
        return LeftOut.of(points, likelihood, f, torch.cat(covariances), self.network.scalar)
