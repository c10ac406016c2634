"""What-if methods of a posterior: the posterior that other training data would have given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from ntk_laplace.errors import HyperparameterError, UnsupportedError, require_choice, warn
from ntk_laplace.model.data import InputData
from ntk_laplace.posterior.calibrate import with_left_out_hyperparameters
from ntk_laplace.posterior.fitted import Fitted
from ntk_laplace.posterior.other_data import require_noise_of_new_points
from ntk_laplace.structures import FunctionSpace
from ntk_laplace.structures.data_passes import read_points
from ntk_laplace.structures.points import TrainingPoints
from ntk_laplace.structures.what_if import (
    Indices,
    at_optimum,
    moved,
    own_minimum,
    positions,
    relabeled,
    relinearized,
    require_left,
    require_steps,
    reweighted,
    stepped,
    stepped_once,
)


class WhatIfVerbs(Fitted):
    """Posteriors for changed training data, without retraining: of the linearized network, or of a copy that moves.

    Each method returns a new posterior; this one does not change. With ``linearization="moving"`` it is that of a copy
    of the network at its own optimum for the changed data; the following is about ``"fixed"``, the default.
    Training points keep their indices, removed ones too,
    so changes can be chained. The mean is that of the linearized network at the new weights θ, f + J(θ - θ*).
    ``steps=1`` is one Newton step, in closed form; more steps iterate; ``steps=None`` continues to the optimum of the
    convex linearized model, its exact refit. A warning tells where limited steps raise the objective of the changed
    data. If training stopped before its optimum, the remaining gradient is kept
    fixed: without a change of the data the weights do not move. So ``remove([], steps=None)`` is not a refit, and a
    warning is issued; `refit` is one, and what-ifs after it leave no gradient.

    Structures "gp" and "full" are exact for the linearized model. The structured ones ("kfac" and so on) make one
    Newton step in the function space of the changed points, with V = J H⁻¹ Jᵀ from the structure's H, which is not a
    refit; chained changes are one joint step from the trained weights. If the removed group's leverage exceeds 0.9,
    its curvature is not subtracted, as in a ranking, and a warning is issued.
    """

    def remove(self, indices: Indices, steps: int | None = 1, *, linearization: str = "fixed") -> Self:
        """Posterior without some training points, removed jointly.

        Parameters
        ----------
        indices : int, sequence of int, or Tensor
            Indices of training points, or a mask.
        steps : int or None
            Newton steps; None for the exact refit of the linearized model. Structured posteriors and curvatures
            other than the GGN support only one step. With a moving linearization leave it out.
        linearization : str
            "fixed" keeps the network at its weights: the answer is the linearized model's. "moving" takes a copy of
            the network to its own optimum for the changed data, the one next to its weights, and linearizes it there.

        Returns
        -------
        Posterior
            One step changes f(x) by -V_xM (I - Λ_M V_MM)⁻¹ r_M and V by V_xM (I - Λ_M V_MM)⁻¹ Λ_M V_Mx.

        Raises
        ------
        DataError
            If an index is out of range or repeated, or no point with a target is left.
        UnsupportedError
            If `steps` is not 1 for a structured posterior, or for a curvature other than the GGN.
        MemoryBudgetError
            If there are too many for a structured posterior.
        """
        return self.reweight(indices, 0.0, steps, linearization=linearization)

    def reweight(
        self, indices: Indices, weights: Tensor | float, steps: int | None = 1, *, linearization: str = "fixed"
    ) -> Self:
        """Posterior in which some training points have other weights.

        Parameters
        ----------
        indices : int, sequence of int, or Tensor
        weights : float or Tensor, (m,)
            At least 0; they replace the current weights: 0 removes a point, 2 counts it twice.
        steps : int or None
        linearization : str
            As in `remove`.

        Returns
        -------
        Posterior

        Raises
        ------
        DataError, UnsupportedError
            As in `remove`.
        HyperparameterError
            If a weight is negative or not finite.
        """
        chosen = positions(indices, self.num_examples)
        return self._changed(reweighted(self._points(), chosen, weights), steps, linearization)

    def relabel(self, indices: Indices, y: Any, steps: int | None = 1, *, linearization: str = "fixed") -> Self:
        """Posterior in which some training points have other targets.

        Parameters
        ----------
        indices : int, sequence of int, or Tensor
        y : number, sequence or Tensor
            One target per point, or one number for all of them, where a target is one number.
        steps : int or None
        linearization : str
            As in `remove`.

        Returns
        -------
        Posterior
            If Λ does not depend on the targets, one step changes f(x) by V_xM (r_M(y) - r_M) and V does not change.

        Raises
        ------
        DataError, UnsupportedError
            As in `remove`.
        TargetError
            If a target does not fit the likelihood.
        """
        chosen = positions(indices, self.num_examples)
        return self._changed(relabeled(self._fitted.model, self._points(), chosen, y), steps, linearization)

    def add(self, x: InputData, y: Any, steps: int | None = 1, *, linearization: str = "fixed") -> Self:
        """Posterior given new training points as well, with a new mean; `condition` keeps the mean.

        Parameters
        ----------
        x : tensor, tuple or dict of tensors
            m inputs; they become training points N, N+1, ...
        y : Tensor
            Their targets.
        steps : int or None
        linearization : str
            As in `remove`.

        Returns
        -------
        Posterior
            One step changes f(x) by V_xM (I + Λ_M V_MM)⁻¹ r_M.

        Raises
        ------
        DataError, TargetError, UnsupportedError
            If inputs and targets do not fit the network and the likelihood.
        """
        if self.curvature_type.kind == "mc":
            raise UnsupportedError('curvature="ggn" or "ef" to add points to', 'curvature="mc", whose labels are drawn',
                                   "Fit with one of the two; the other changes are available.")
        model = self._fitted.model
        model.settings.reducer.require_one("points to add, which belong to no process's share",
                                           "Use condition(data), to which each process gives its share.")
        require_noise_of_new_points(model.likelihood)
        batches = model.network.batches((x, y), model.settings.batch_size)
        with torch.inference_mode(False):
            if is_moving(linearization, steps):
                more = read_points(replace(model, displacement=None), batches)
                return self._derived(moved(self._fitted, self._points().joined(model.likelihood, more), batches))
            exact = self._fitted.structure.spec.exact
            model = model if exact else replace(model, displacement=None)
            added = self._fitted.structure.refit_on(model, batches) if exact else FunctionSpace().fit(model, batches)
            return self._at_fixed(self._points().joined(model.likelihood, added.points), steps, added)

    def refit(self, objective: str | None = None, *, linearization: str = "fixed") -> Self:
        """Posterior at the optimum of the linearized model, without training the network; or at one of the network.

        Its mean is f + J(θ̄-θ*), with θ̄ the argmin of -Σ log p(y_n | f_n + J_n(θ-θ*)) + ½ (θ-μ0)ᵀP0(θ-μ0). Evidence,
        leave-one-out and what-ifs are those of the linear model there: no gradient of training remains.

        Parameters
        ----------
        objective : str, optional
            None keeps the hyperparameters. "loo", for a Gaussian likelihood: one factor of all prior precisions and one
            of the noise maximize the mean log density of each training point given all others, each at the optimum of
            the linear model; one eigendecomposition.
        linearization : str
            "fixed" is the above. "moving" takes a copy of the network to the minimum next to its weights of
            -Σ log p(y_n | f(x_n; θ)) + ½ (θ-μ0)ᵀP0(θ-μ0), by the steps of moving what-ifs, and linearizes it there,
            for every structure. Moving what-ifs of the result are about their change alone.

        Returns
        -------
        Posterior

        Raises
        ------
        UnsupportedError
            If the structure or the curvature is not exact, where the network does not move or the objective is "loo";
            if the likelihood is not Gaussian for "loo".
        NumericalError
            If the optimum of the linearized model is not reached.
        """
        require_choice(objective, (None, "loo"), 'objective None or "loo"', "Leave it out to keep hyperparameters.")
        moving = is_moving(linearization, None)
        if not moving or objective is not None:
            kept = "" if objective is None else " with the hyperparameters as they are"
            self._fitted.require_exact(" for a refit",
                                       f'Fit one of them, or move the network{kept}, linearization="moving".')
        with torch.inference_mode(False):
            fitted = self._fitted if objective is None else with_left_out_hyperparameters(self._fitted)
            return self._derived(own_minimum(fitted) if moving else at_optimum(fitted))

    def relinearize(self, x: InputData | None = None, steps: int = 1) -> Self:
        """Move a copy of the network to the weights of this what-if, and linearize it there.

        The first step goes to the weights of the what-if, each further one to the optimum of the network linearized at
        its current weights: Gauss-Newton steps, halved until the objective of the changed data decreases. Many steps
        amount to training. The result supports further `relinearize` and what-ifs. The gradient that remained after
        training is kept fixed, as in `remove`. The caller's network and this posterior do not change.

        Parameters
        ----------
        x : tensor, tuple or dict of tensors, optional
            Inputs of all training points in the order of the fit, removed ones too, added ones last; by default the
            data of the fit are read again. A checkpoint that was loaded without data needs them.
        steps : int
            Maximum number; it stops earlier if the weights no longer move.

        Returns
        -------
        Posterior
            Of the moved network (its weights are ``posterior.network.theta``), with the same structure, indices of
            points, weights and targets.

        Raises
        ------
        DataError
            If inputs are needed and missing, or are not those of the fit.
        NumericalError
            If no step decreases the objective.
        UnsupportedError
            If nothing was changed, the structure is not "gp", "full" or "iterative", or the curvature is not the GGN.
        """
        self._fitted.require_exact(" for Gauss-Newton steps", "Fit one of them, or train the network again.")
        with torch.inference_mode(False):
            return self._derived(relinearized(self._fitted, x, steps))

    def _points(self) -> TrainingPoints:
        """The points to change, at the start of the next step."""
        return self._fitted.structure.points_to_change

    def _warn_of_nothing(self, points: TrainingPoints, steps: int | None) -> None:
        """Warn that several steps are not a refit if no training point is or was changed."""
        if steps == 1 or self._fitted.model.displacement is not None or not points.same_data(self._points()):
            return
        warn("no training point is changed, so nothing moves: a what-if keeps the gradient that training left. The "
             "posterior is unchanged; refit() goes to the optimum of the linearized model")

    def _changed(self, points: TrainingPoints, steps: int | None, linearization: str) -> Self:
        self._fitted.warn_of_order()
        require_left(points.counts, points.present(self.likelihood))
        if not is_moving(linearization, steps):
            return self._at_fixed(points, steps)
        with torch.inference_mode(False):
            return self._derived(moved(self._fitted, points))

    def _at_fixed(self, points: TrainingPoints, steps: int | None, added: Any = None) -> Self:
        require_steps(steps)
        self._warn_of_nothing(points, steps)
        if steps != 1 and not self._fitted.exact:
            raise UnsupportedError(
                f'steps=1 for structure={self.structure!r} and curvature={self.curvature_type.kind!r}',
                f"steps={steps}", 'Fit with structure="gp" (or "full") and curvature="ggn" for more of them, or use '
                'linearization="moving".',
            )
        with torch.inference_mode(False):
            if self._fitted.structure.spec.exact:
                return self._derived(stepped(self._fitted, points, added, steps))
            return self._derived(stepped_once(self._fitted, points, added))


def is_moving(linearization: object, steps: int | None) -> bool:
    """Whether the network moves.

    UnsupportedError if `linearization` is not known; HyperparameterError if steps are limited where the network moves
    to its optimum.
    """
    require_choice(linearization, ("fixed", "moving"), 'linearization="fixed" or "moving"',
                   'Use "moving" for the optimum of the network itself.')
    if linearization == "moving" and steps not in (1, None):
        raise HyperparameterError('no steps= with linearization="moving", which goes to the optimum',
                                  f"steps={steps!r}",
                                  "Leave steps= out; relinearize(steps=...) takes so many Gauss-Newton steps.")
    return linearization == "moving"
