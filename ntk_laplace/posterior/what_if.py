"""Verbs of change: the posterior that other training data would have given."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.data import Batches, Inputs
from ntk_laplace.errors import NTKLaplaceWarning, UnsupportedError
from ntk_laplace.explain import (
    Indices,
    positions,
    relabeled,
    relinearized,
    require_steps,
    reweighted,
    stepped,
    stepped_once,
)
from ntk_laplace.points import TrainingPoints
from ntk_laplace.posterior.fitted import Fitted
from ntk_laplace.structures import ChangedStructure, FullStructure, FunctionSpaceStructure

__all__ = ["WhatIfVerbs"]


class WhatIfVerbs(Fitted):
    """What if the training data were others? Answered by the linearized network, without training it again.

    Each verb returns a new posterior with the same verbs; this one stays as it is. Training points keep their numbers,
    removed ones too, so that changes can follow one another. The mean is that of the linearized network at weights θ
    that have moved, f + J(θ - θ*). ``steps=1`` is one Newton step, in closed form; more iterate, and ``steps=None``
    goes on to the optimum of the convex linearized model, its exact refit. Where training stopped short of its own
    optimum, what was left undone is held fixed, so that changing nothing moves nothing: ``remove([], steps=None)`` is
    no refit, and a warning says so. ``predict(x, mean="posterior")`` has the mean at the linearized model's optimum.

    Structures "gp" and "full" answer for the linearized model itself. The structured ones ("kfac" and so on) answer for
    theirs: one Newton step in the function space of the points that change, V = J H⁻¹ Jᵀ with the structure's H, which
    is no refit; changes that follow one another are there one joint step from the trained weights. Where H holds too
    little of what is to leave, a leverage above 0.9, nothing is taken out of it, as in a ranking; a warning says so.
    """

    def remove(self, indices: Indices, steps: int | None = 1) -> WhatIfVerbs:
        """Posterior without some training points, all of them together.

        Parameters
        ----------
        indices : int, sequence of int, or Tensor
            Numbers of training points, or a mask.
        steps : int or None
            Newton steps; None for the exact refit of the linearized model. Structured posteriors, and curvatures
            other than the GGN, have one step.

        Returns
        -------
        Posterior
            In one step f(x) moves by -V_xM (I - Λ_M V_MM)⁻¹ r_M, V by V_xM (I - Λ_M V_MM)⁻¹ Λ_M V_Mx.

        Raises
        ------
        DataError
            If an index is out of range or repeated, or no point is left.
        UnsupportedError
            If more than one step is asked of a structured posterior, or of another curvature than the GGN.
        MemoryBudgetError
            If they are too many for a structured posterior.
        """
        return self.reweight(indices, 0.0, steps)

    def reweight(self, indices: Indices, weights: Tensor | float, steps: int | None = 1) -> WhatIfVerbs:
        """Posterior in which some training points count otherwise.

        Parameters
        ----------
        indices : int, sequence of int, or Tensor
        weights : float or Tensor, (m,)
            At least 0, in place of those they have: 0 removes a point, 2 counts it twice.
        steps : int or None
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
        return self._moved(reweighted(self._points(), chosen, weights), steps)

    def relabel(self, indices: Indices, y: Any, steps: int | None = 1) -> WhatIfVerbs:
        """Posterior in which some training points have other targets.

        Parameters
        ----------
        indices : int, sequence of int, or Tensor
        y : number, sequence or Tensor
            One target per point, or one for all of them.
        steps : int or None
            As in `remove`.

        Returns
        -------
        Posterior
            In one step f(x) moves by V_xM (r_M(y) - r_M), and V stays, if the likelihood's curvature knows no targets.

        Raises
        ------
        DataError, UnsupportedError
            As in `remove`.
        TargetError
            If a target does not fit the likelihood.
        """
        chosen = positions(indices, self.num_examples)
        return self._moved(relabeled(self._model, self._points(), chosen, y), steps)

    def add(self, x: Inputs, y: Any, steps: int | None = 1) -> WhatIfVerbs:
        """Posterior given new training points as well, whose pull on the mean is followed, unlike in `condition`.

        Parameters
        ----------
        x : tensor, tuple or dict of tensors
            m inputs; they become training points N, N+1, and so on.
        y : Tensor
            Their targets.
        steps : int or None
            As in `remove`.

        Returns
        -------
        Posterior
            In one step f(x) moves by V_xM (I + Λ_M V_MM)⁻¹ r_M.

        Raises
        ------
        DataError, TargetError, UnsupportedError
            If inputs and targets do not fit the network and the likelihood.
        """
        if self._model.curvature_type.kind == "mc":
            raise UnsupportedError('curvature="ggn" or "ef" to add points to', 'curvature="mc", whose labels are drawn',
                                   "Fit with one of the two; the other changes are there.")
        model = self._model if self.structure in ("gp", "full") else replace(self._model, displacement=None)
        batches = Batches((x, y), model.settings.batch_size, model.network.device, model.network.input_dtype)
        with torch.inference_mode(False):
            read = FullStructure if self.structure == "full" else FunctionSpaceStructure
            added = read(model, batches)
            return self._moved(self._points().joined(model.likelihood, added.points), steps, added)

    def relinearize(self, x: Inputs | None = None, steps: int = 1) -> WhatIfVerbs:
        """Let a copy of the network follow this what-if, and linearize it where it arrives.

        The first step takes it to the weights that the what-if implies, each further one to the optimum of the network
        linearized where it is then: Gauss-Newton steps, halved until the objective of the changed data falls. Many of
        them are training; the result can go on with `relinearize`, and be request what if again. What training had left
        undone stays held, as it is by `remove`. The caller's network, and this posterior, stay as they are.

        Parameters
        ----------
        x : tensor, tuple or dict of tensors, optional
            Inputs of all training points in the order of the fit, removed ones too, those that were added last.
            Structure "gp" keeps no inputs and needs them; "full" reads its data again.
        steps : int
            At most; it ends sooner where nothing moves any more.

        Returns
        -------
        Posterior
            Of the moved network (``posterior.network.theta`` are its weights), with the same structure, numbers of
            points, weights and targets.

        Raises
        ------
        DataError
            If inputs are needed and not there, or are not those of the fit.
        NumericalError
            If no step makes the objective fall.
        UnsupportedError
            If nothing was changed, or the structure is not "gp" or "full", or the curvature not the GGN.
        """
        if self.structure not in ("gp", "full") or self._model.curvature_type.kind != "ggn":
            raise UnsupportedError('structure="gp" or "full" and curvature="ggn" for Gauss-Newton steps',
                                   f"structure={self.structure!r}, curvature={self._model.curvature_type.kind!r}",
                                   "Fit one of them, or train the network again.")
        with torch.inference_mode(False):
            model, structure = relinearized(self._model, self._structure, x, steps)
        return type(self)(model, structure, self.reason)

    def _points(self) -> TrainingPoints:
        """The points to change: where the next step starts."""
        structure = self._structure
        return structure.unmoved_points if isinstance(structure, ChangedStructure) else structure.points

    def _warn_of_nothing(self, points: TrainingPoints, steps: int | None) -> None:
        """Say that several steps are no refit where no training point is, or was, changed."""
        now = self._points()
        same = len(points.f) == len(now.f) and torch.equal(points.counts, now.counts)
        if steps == 1 or self._model.displacement is not None or not same or not torch.equal(points.targets,
                                                                                             now.targets):
            return
        warnings.warn(
            "no training point is changed, so nothing moves: a what-if holds what training left undone. The posterior "
            'comes back as it was, not refitted; predict(x, mean="posterior") has the mean at the optimum of the '
            "linearized model", NTKLaplaceWarning, stacklevel=5,
        )  # fmt: skip

    def _moved(self, points: TrainingPoints, steps: int | None, added: Any = None) -> WhatIfVerbs:
        require_steps(steps)
        self._warn_of_nothing(points, steps)
        exact = self.structure in ("gp", "full")
        if steps != 1 and not (exact and self._model.curvature_type.kind == "ggn"):
            raise UnsupportedError(
                f'steps=1 for structure={self.structure!r} and curvature={self._model.curvature_type.kind!r}',
                f"steps={steps}", 'Fit with structure="gp" (or "full") and curvature="ggn" for more of them.',
            )  # fmt: skip
        with torch.inference_mode(False):
            if exact:
                model, structure = stepped(self._model, self._structure, points, added, steps)
            else:
                model, structure = stepped_once(self._model, self._structure, points, added)
        return type(self)(model, structure, self.reason)
