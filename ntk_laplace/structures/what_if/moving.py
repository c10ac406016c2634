"""What-ifs of the network itself: its own optimum for changed data, where Newton's method with its exact Hessian ends.

The objective is that of the changed data with the linear term -g0ᵀθ, where g0 is the gradient that remained after
training. Without a change of the data the weights do not move. After `refit`, g0 = 0:

    F(θ) = -Σ w_n log p(y_n | f(x_n; θ)) + ½ (θ-μ0)ᵀP0(θ-μ0) - g0ᵀθ.

Quasi-Newton steps, with one gradient each, go down; Newton steps, with products with the exact Hessian by two backward
passes, end the descent. Both are preconditioned by the posterior precision of the fit, corrected once at the trained
weights where its products with the exact Hessian show that it is most wrong: by the second derivatives of the network,
which the Gauss-Newton matrix leaves out. The precision of the structure fitted again on the way takes its place where a
descent goes far, unless the network has kinks: there each fit would begin the steps anew.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ntk_laplace.errors import warn
from ntk_laplace.model.data import Joined, Source
from ntk_laplace.runtime.krylov import Minima
from ntk_laplace.structures import FittedModel, LinearizedModel, Structure
from ntk_laplace.structures.model import RemainingGradient
from ntk_laplace.structures.points import TrainingPoints, present_values
from ntk_laplace.structures.training_inputs import training_inputs
from ntk_laplace.structures.weight_likelihood import NetworkLikelihood
from ntk_laplace.structures.what_if.objectives import ChangedObjectives, CurvatureAtFit, Refit, fitted_at, require_room


def _remaining_gradient(model: LinearizedModel, structure: Structure) -> Tensor:
    """g0, (P,): the gradient of the objective that remained at the end of training; zero after a refit.

    That of an earlier what-if is not the present one if points were added or left out since, or the prior has changed.
    """
    still = replace(model, displacement=None)
    if model.refitted:
        return torch.zeros_like(still.theta)
    points, known = structure.trained_points, model.training_gradient
    if known is not None and known.holds(model, points):
        return known.value
    with torch.no_grad():
        left = points.residual(model.likelihood)
        more = structure.points.num_examples - len(left)
        left = torch.cat([left, left.new_zeros(more, left.shape[1])])
        return still.joint_gradient(structure.vjp(still, left))


def moving_model(fitted: FittedModel) -> LinearizedModel:
    """The model at the network's weights, without displacement or files, whose remaining gradient is known."""
    model = fitted.model
    quiet = replace(model.settings, checkpoint=None, resume=None)
    remaining = _remaining_gradient(model, fitted.structure)
    still = replace(model.copied(), displacement=None, refitted=False, settings=quiet)
    return with_remaining(still, remaining, fitted.structure.points)


def with_remaining(model: LinearizedModel, gradient: Tensor, points: TrainingPoints) -> LinearizedModel:
    """The model that goes to the optimum of these points with g0, (P,)."""
    kept = RemainingGradient(gradient, present_values(model.prior, model.likelihood), points)
    return replace(model, training_gradient=kept)


def remaining_of(model: LinearizedModel) -> Tensor:
    """g0, (P,), of a model that has it."""
    assert model.training_gradient is not None
    return model.training_gradient.value


def checked_likelihood(
    model: LinearizedModel, points: TrainingPoints, source: Source, count: int
) -> NetworkLikelihood:
    """That of the network at up to `count` weights, of points each counted once; its second derivatives are checked."""
    found = NetworkLikelihood(model, replace(points, weights=None, expanded=None), source, count)
    found.require_second_derivatives(model.theta)
    return found


def fitted_with_remaining(
    model: LinearizedModel, structure: Structure, source: Source, points: TrainingPoints, theta: Tensor
) -> FittedModel:
    """As `fitted_at`; the model goes on to the optimum of these points with its g0."""
    return fitted_at(with_remaining(model, remaining_of(model), points), structure, source, points, theta)


def moved(fitted: FittedModel, points: TrainingPoints, added: Source | None = None) -> FittedModel:
    """The network's own optimum for changed points, next to its weights, and the same structure fitted there.

    Parameters
    ----------
    fitted : FittedModel
        Of the points before the change.
    points : TrainingPoints
        After the change; their outputs are not read.
    added : Source, optional
        Inputs of the points that were added, which are the last.

    Returns
    -------
    FittedModel
        Of a copy of the network. A warning tells if the optimum was not reached.

    Raises
    ------
    DataError
        If the data of the fit cannot be read again, or are not the same any more.
    MemoryBudgetError
        If one example at one value of the weights does not fit in memory.
    """
    result, found = _moved(fitted, points, added)
    tell_unreached(found.converged, found.falling, found.steps)
    return result


def _moved(fitted: FittedModel, points: TrainingPoints, added: Source | None) -> tuple[FittedModel, Minima]:
    """As `moved`, and how the descent has ended."""
    model = moving_model(fitted)
    source = training_inputs(fitted.model, fitted.structure)
    source = source if added is None else Joined([source, added])
    require_room(model, 1, 0)
    likelihood, weights = checked_likelihood(model, points, source, 1), points.counts[None]
    unchanged, before, targets = fitted.structure.points_to_change, torch.zeros_like(weights[0]), points.targets.clone()
    before[: unchanged.num_examples] = unchanged.counts  # added points do not count yet
    targets[: unchanged.num_examples] = unchanged.targets
    own = replace(points, weights=None, expanded=None)
    of_the_fit = replace(own, targets=targets)
    trained = likelihood if own.same_data(of_the_fit) else NetworkLikelihood(model, of_the_fit, source, 1)
    at_the_fit = CurvatureAtFit(fitted, trained, model.theta, before, 1)
    inverse = at_the_fit.inverse(weights)
    at_the_fit.tell_saddle()
    refit = Refit.of(fitted, likelihood, model, source, points)
    found = ChangedObjectives(fitted, likelihood, weights, remaining_of(model), inverse, refit).minimize(
        model.theta[None])
    return fitted_with_remaining(model, fitted.structure, source, points, found.at[0]), found


def own_minimum(fitted: FittedModel) -> FittedModel:
    """The same structure at the network's own minimum of its objective next to its weights: F with g0 = 0.

    A warning tells if it was not reached.

    Raises
    ------
    DataError, MemoryBudgetError
        As in `moved`.
    """
    result, found = _moved(fitted.derived(fitted.structure, replace(fitted.model, refitted=True)),
                           fitted.structure.points_to_change, None)
    if not bool(found.converged.all()):
        _tell_best("a minimum", found.steps, bool(found.falling.any()), "train the network to convergence first")
    if fitted.structure.base is None and fitted.model.training_gradient is None:  # no what-if: a fit like any other
        return result.derived(result.structure, replace(result.model, training_gradient=None))
    return result


def at_minimum(fitted: FittedModel) -> bool:
    """Whether the network's weights are at a minimum of F for the points as they are.

    Raises
    ------
    DataError, MemoryBudgetError
        As in `moved`.
    """
    model, points = moving_model(fitted), fitted.structure.points_to_change
    likelihood = checked_likelihood(model, points, training_inputs(fitted.model, fitted.structure), 1)
    return CurvatureAtFit(fitted, likelihood, model.theta, points.counts, 1).is_minimum()


def tell_unreached(converged: Tensor, falling: Tensor, steps: Tensor) -> None:
    """Warn of changes, (G,), whose optimum was not reached."""
    missed = ~converged
    if not bool(missed.any()):
        return
    which = f"{int(missed.sum())} of {len(missed)} changes" if len(missed) > 1 else "the changed data"
    _tell_best(f"its optimum for {which}", steps[missed], bool(falling.any()),
               'train the network to convergence first, or call posterior.refit(linearization="moving")')


def _tell_best(where: str, steps: Tensor, falling: bool, remedy: str) -> None:
    why = (f"the objective still falls, as it does far from a minimum: {remedy}" if falling else
           "the objective has kinks or is flat there")
    warn(f"the network is not at {where} after up to {int(steps.max())} steps: {why}; "
         "the answer is that of the best weights found")
