"""Where variational inference starts: at an optimum of the log joint, at a posterior, or at a given precision."""

from __future__ import annotations

from numbers import Real

import torch

from ntk_laplace.errors import DataError, UnsupportedError, require_number
from ntk_laplace.model.data import Batches
from ntk_laplace.model.objective import Objective
from ntk_laplace.model.optimum import Held
from ntk_laplace.posterior import Posterior
from ntk_laplace.posterior.convergence import converged
from ntk_laplace.posterior.explain.reliability import MOST_DECREMENT
from ntk_laplace.structures import FittedModel, LinearizedModel, StructureSpec

Start = str | float | Posterior
"""``start=`` of ntk_laplace.variational."""

_STEPS = 1000  # iterations of L-BFGS, at most
_AIM = 0.1 * MOST_DECREMENT


def checked_start(start: object) -> float | Posterior | None:
    """The precision or the posterior of a start; None for the optimum of the log joint.

    HyperparameterError or UnsupportedError if it is none of these.
    """
    if isinstance(start, Posterior):
        return start
    if isinstance(start, Real) and not isinstance(start, bool):
        return require_number("a positive, finite precision as start", start,
                              "Pass start=10.0 for H = 10 I at the network's weights.", above=0)
    if not isinstance(start, str) or start != "map":
        raise UnsupportedError('start="map", a Posterior of this network, or a precision', repr(start)[:80],
                               'Use start="map".')
    return None


def require_same_network(posterior: Posterior, model: LinearizedModel) -> None:
    """Refuse a posterior of another network, or of other parameters of it (DataError)."""
    own, given = model.network.shapes, posterior.network.shapes
    if list(own.items()) != list(given.items()):
        words = [f"{len(shapes)} tensors with {shapes.num_parameters:,} parameters" for shapes in (own, given)]
        first = next((f"; {name!r} is among one of them only, or has another shape" for name in {**own, **given}
                      if own.get(name) != given.get(name)), "; their order differs")
        raise DataError(f"a start that is a posterior of this network ({words[0]})", f"one of {words[1]}{first}",
                        'Fit the same parameters of this network with laplace(), or pass start="map".')


def optimum(model: LinearizedModel, batches: Batches, spec: StructureSpec) -> FittedModel:
    """The Laplace posterior at an optimum of the log joint, by L-BFGS from the network's weights.

    UnsupportedError if the likelihood has noise per point.
    """
    if model.likelihood.at(slice(0, 1)) is not model.likelihood:
        raise UnsupportedError('a likelihood that is the same for every example, for start="map"', "noise per point",
                               "Pass start=laplace(network, data, likelihood, prior) of a trained network, or a "
                               "precision such as start=10.0.")
    model = model.at_weights(model.network.theta)
    held, network = Held(batches), model.network
    objective = Objective(network.caller, model.likelihood, model.prior, held.num_examples, network.num_outputs,
                          held.sum_of_weights)

    def fit() -> FittedModel:
        # a copy: the fit keeps its weights while the objective's network moves on
        return FittedModel.of(model.at_weights(network.theta), spec, batches)

    with torch.inference_mode(False), torch.enable_grad():
        return converged(objective, held, fit, _STEPS, MOST_DECREMENT, _AIM, model.settings.progress,
                         "start from a network that is trained further")
