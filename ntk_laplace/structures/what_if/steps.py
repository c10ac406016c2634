"""What-ifs: other example weights, labels or points, by Newton's method on the linearized model, without retraining.

The linearized network f + J(θ - θ*) with a log-concave likelihood has one optimum. A change of the data moves the
optimum; one or more Newton steps from the trained weights follow it. The gradient at θ* that remained after training is
kept fixed: without a change the weights do not move. With r* the residuals of training, and w, r the example weights
and residuals after the change, the weights minimize

    -Σ w_n log p(y_n | f_n) + Σ r*_nᵀ(f_n - f*_n) + ½ (θ-θ*)ᵀP0(θ-θ*),   gradient P0(θ-θ*) - Jᵀ(w r - r*).

A refit goes to the linearized model's own optimum, where no gradient remains; what-ifs after it minimize its objective.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import torch

from ntk_laplace.errors import NonFiniteError, warn
from ntk_laplace.structures import FittedModel, FunctionSpaceStructure, Structure
from ntk_laplace.structures.points import TrainingPoints
from ntk_laplace.structures.what_if.changed_precision import HIGH_LEVERAGE, ChangedPrecision
from ntk_laplace.structures.what_if.changed_structure import ChangedStructure, changed_structure
from ntk_laplace.structures.what_if.newton import Iterate, Objective, descend


def stepped(
    fitted: FittedModel, points: TrainingPoints, added: Structure | None, steps: int | None
) -> FittedModel:
    """Newton steps of an exact linearized model for changed training points.

    Parameters
    ----------
    fitted : FittedModel
        Of the points before the change.
    points : TrainingPoints
        After the change, with their outputs `f` from before.
    added : Structure, optional
        Of the added points, which are the last of `points`.
    steps : int or None
        Number of full Newton steps; None continues to the optimum, with steps halved if the objective would increase.

    Returns
    -------
    FittedModel
        Displaced, with outputs of its points at the new weights. Their curvature is taken at the start of the last
        step, as in the closed forms of one step; with ``steps=None`` at the optimum.

    Raises
    ------
    NumericalError
        If the optimum is not reached.
    """
    model, structure = fitted.model, fitted.structure
    with torch.no_grad():
        changed = FittedModel(model, structure.changed(model, points, added))
        problem = (Objective.own(changed) if model.refitted else
                   Objective.tilted(changed, points, structure.trained_points))
        start = Iterate(model.moved, points.f)
        before, at = descend(problem, start, steps)
        if steps is not None and fitted.exact:
            _warn_of_rise(problem, start, at)
    moved = replace(points, f=at.f, expanded=None if steps is None else before.f)
    return fitted.derived(structure.changed(model, moved, added), replace(model, displacement=at.displacement))


def _warn_of_rise(problem: Objective, start: Iterate, at: Iterate) -> None:
    """Warn of full Newton steps that have gone too far: with the changed data the objective is larger than before."""
    value, reached = problem.value(start), math.inf
    with contextlib.suppress(NonFiniteError):
        reached = problem.value(at)
    if not reached <= value + math.sqrt(torch.finfo(at.f.dtype).eps) * (1.0 + abs(value)):
        warn(f"Newton's method goes too far: it raises the objective of the changed data from {value:.4g} to "
             f'{reached:.4g} nats. Use steps=None for the optimum of the linearized network, or linearization="moving"')


def at_optimum(fitted: FittedModel) -> FittedModel:
    """The linearized model at its own optimum: argmin of -Σ w_n log p(y_n | f_n + J_n(θ-θ*)) + ½ (θ-μ0)ᵀP0(θ-μ0).

    Raises
    ------
    NumericalError
        If the optimum is not reached.
    """
    model, structure = fitted.model, fitted.structure
    with torch.no_grad():
        problem = Objective.own(fitted)
        before, at = descend(problem, Iterate(model.moved, problem.points.f), None)
    points = replace(problem.points, f=at.f, expanded=before.f)
    return fitted.derived(structure.changed(model, points), replace(model, displacement=at.displacement, refitted=True))


def stepped_once(
    fitted: FittedModel, unmoved_points: TrainingPoints, added: FunctionSpaceStructure | None
) -> FittedModel:
    """One joint Newton step of an approximate posterior for changed training points.

    In the function space of the changed points, with the structure's V = J_G H⁻¹ J_Gᵀ instead of the exact one:
    θ moves by H'⁻¹ J_Gᵀ(r' - r), H' = H + J_Gᵀ(Λ' - Λ)J_G. If the removed group's leverage exceeds `HIGH_LEVERAGE`,
    its curvature is not subtracted, as in a ranking, and a warning is issued.

    Parameters
    ----------
    unmoved_points : TrainingPoints
        All points after the change, outputs at the trained weights.
    added : FunctionSpaceStructure, optional
        Of the added points, which are the last.

    Raises
    ------
    MemoryBudgetError
        If there are too many changed points.
    """
    start, structure = replace(fitted.model, displacement=None).copied(), fitted.structure
    if isinstance(structure, ChangedStructure):
        changed = structure.changed(start, unmoved_points, added)
    else:
        together = () if added is None else (added,)
        changed = changed_structure(start, structure, unmoved_points, HIGH_LEVERAGE, together)
    move, changed = changed.stepped(start)
    precision = changed.posterior_precision(start)
    if isinstance(precision, ChangedPrecision) and precision.partial:
        warn(f"the removed points have a leverage of {precision.leverage:.3g} in this approximate precision, above "
             f"{HIGH_LEVERAGE}: nothing is subtracted from it, so the covariance does not change, and the mean moves "
             "to first order")
    return FittedModel(replace(start, displacement=move), changed)
