"""Where variational inference starts: at an optimum of the log joint, at a posterior, or at a given precision."""

from __future__ import annotations

from dataclasses import replace
from numbers import Real

import torch
from torch import Tensor

from ntk_laplace.curvature import FunctionSpacePrecision
from ntk_laplace.errors import DataError, HyperparameterError, UnsupportedError
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.model.data import Batches, take
from ntk_laplace.model.objective import Objective
from ntk_laplace.model.optimum import Held
from ntk_laplace.posterior import Posterior
from ntk_laplace.posterior.convergence import converged
from ntk_laplace.posterior.explain.reliability import MOST_DECREMENT
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.resources import require_memory
from ntk_laplace.structures import FittedModel, FullWeightSpace, FunctionSpace, LinearizedModel
from ntk_laplace.variational_inference.algorithms import OGGN
from ntk_laplace.variational_inference.examples import Examples
from ntk_laplace.variational_inference.states import DataTerms, DenseState, FunctionSpaceState, VariationalState

__all__ = ["Start", "checked_start", "moved", "require_memory_for", "started"]

Start = str | float | Posterior
"""ntk_laplace.variational(start=...)."""

_STEPS = 1000  # iterations of L-BFGS, at most
_AIM = 0.1 * MOST_DECREMENT


def checked_start(start: object) -> Start:
    """Return a start unchanged.

    Raises
    ------
    HyperparameterError, UnsupportedError
        If it is none.
    """
    if isinstance(start, Posterior) or start == "map":
        return start  # type: ignore[return-value]  # the comparison says that it is this string
    if isinstance(start, Real) and not isinstance(start, bool):
        if not 0 < float(start) < float("inf"):
            raise HyperparameterError("a positive, finite precision as start", repr(start),
                                      "Pass start=10.0 for H = 10 I at the network's weights.")
        return float(start)
    raise UnsupportedError('start="map", a Posterior of this network, or a precision', repr(start)[:80],
                           'Use start="map".')


def moved(model: LinearizedModel, theta: Tensor) -> LinearizedModel:
    """The model with the network at other weights (P,), in a copy."""
    network = model.network.at(theta)
    return replace(model, network=network, jacobian_pass=model.jacobian_pass.on(network, model.jacobian_pass.dtype))


def require_same_network(posterior: Posterior, model: LinearizedModel) -> None:
    """Refuse a posterior of another network, or of other parameters of it.

    Raises
    ------
    DataError
    """
    own, given = model.network.shapes, posterior.network.shapes
    if list(own.items()) != list(given.items()):
        words = [f"{len(shapes)} tensors with {shapes.num_parameters:,} parameters" for shapes in (own, given)]
        first = next((f"; {name!r} is among one of them only, or has another shape" for name in {**own, **given}
                      if own.get(name) != given.get(name)), "; their order differs")
        raise DataError(f"a start that is a posterior of this network ({words[0]})", f"one of {words[1]}{first}",
                        'Fit the same parameters of this network with laplace(), or pass start="map".')


def started(
    model: LinearizedModel, batches: Batches, examples: Examples, start: Start, dense: bool, row_tolerance: float
) -> VariationalState:
    """The state before the first step.

    Raises
    ------
    UnsupportedError
        If the state is to have rows, and the start is a posterior whose H is a matrix of the parameters.
    """
    theta = model.theta
    ones = torch.ones_like(model.prior.precision.detach())
    if isinstance(start, float):
        if dense:
            return DenseState.isotropic(theta, start, model.prior, model.network.shapes)
        return _with_rows(model, theta, _no_rows(model, batches), start / model.prior.precision.detach(), row_tolerance)
    if isinstance(start, Posterior):
        return _continued(model, start, examples, dense, row_tolerance)
    theta = _optimum(model, batches, dense)
    terms = _terms(model, theta, examples)
    if dense:
        return _dense(model, theta, terms)
    return _with_rows(model, theta, Jacobian.concatenate([part.rows for part in terms]), ones, row_tolerance)


def _terms(model: LinearizedModel, theta: Tensor, examples: Examples) -> list[DataTerms]:
    """Terms of all examples at θ, whose rows give the Laplace-GGN posterior's H."""
    state = DenseState(theta, theta.new_zeros(0, 0), model.prior, model.network.shapes)
    generator = torch.Generator(device=theta.device)
    with torch.no_grad():
        return list(OGGN().terms(model, state, examples.all(), generator))


def _dense(model: LinearizedModel, theta: Tensor, terms: list[DataTerms]) -> DenseState:
    state = DenseState(theta, theta.new_zeros(len(theta), len(theta)), model.prior, model.network.shapes)
    state.add(terms)
    return state


def _with_rows(
    model: LinearizedModel, theta: Tensor, rows: Jacobian, ratio: Tensor, row_tolerance: float
) -> FunctionSpaceState:
    with torch.no_grad():
        return FunctionSpaceState(theta, rows, ratio, model.prior, model.network.shapes, row_tolerance)


def _no_rows(model: LinearizedModel, batches: Batches) -> Jacobian:
    """Rows of no examples, in the form of later ones."""
    x, _ = batches.first()
    rows = model.jacobian_pass.rows(take(x, slice(0, 2)))
    rank = model.likelihood.rank(model.network.num_outputs)
    return rows.weighted(rows.f.new_zeros(*rows.f.shape, rank)).subset(slice(0, 0))


def _continued(
    model: LinearizedModel, posterior: Posterior, examples: Examples, dense: bool, row_tolerance: float
) -> VariationalState:
    """μ and H of a posterior."""
    fitted = posterior.fitted
    theta = fitted.theta.to(model.theta)
    with torch.inference_mode(False), torch.no_grad():
        precision = fitted.precision
        precision = getattr(precision, "inner", precision)
        if not dense:
            if not isinstance(precision, FunctionSpacePrecision):
                raise UnsupportedError('a posterior of structure "gp" as the start of structure="gp"',
                                       f"{posterior.structure!r}", 'Pass structure="full", or another start.')
            ratio = _ratio(model, precision.prior_precision)
            return _with_rows(model, theta, precision.weighted, ratio, row_tolerance)
        p = len(theta)
        matrix = torch.zeros(p, p, dtype=theta.dtype, device=theta.device)
        step = max(1, tuning.COVARIANCE_BYTES // (p * theta.element_size()))
        for first in range(0, p, step):
            unit = theta.new_zeros(min(step, p - first), p)
            unit[:, first:].fill_diagonal_(1.0)
            matrix[first : first + step] = precision.multiply(unit.to(precision.prior_precision)).to(theta)
        matrix = 0.5 * (matrix + matrix.T)
        matrix.diagonal().sub_(model.prior.flat_precision().to(matrix))
        return DenseState(theta, matrix, model.prior, model.network.shapes)


def _ratio(model: LinearizedModel, diagonal: Tensor) -> Tensor:
    """d / P0 by group, from d (P,).

    Raises
    ------
    UnsupportedError
        If d has several values within a group of the prior.
    """
    own = model.prior.flat_precision().to(diagonal)
    groups = torch.cat([_numbers(model, name) for name in model.network.shapes]).to(diagonal.device)
    ratio = torch.ones_like(model.prior.precision.detach()).to(diagonal)
    ratio[groups] = diagonal / own
    if not torch.allclose(ratio[groups] * own, diagonal, rtol=1e-9):
        raise UnsupportedError("a start whose prior has the same groups", "precisions that differ within a group",
                               'Fit the start with the same prior, or pass start="map".')
    return ratio


def _numbers(model: LinearizedModel, name: str) -> Tensor:
    group, count = model.prior.group_of(name), model.network.shapes[name].numel()
    return torch.arange(group.start, group.stop) if isinstance(group, slice) else torch.full((count,), group)


def _optimum(model: LinearizedModel, batches: Batches, dense: bool) -> Tensor:
    """Weights at an optimum of the log joint, by L-BFGS from the network's, (P,)."""
    spec = FullWeightSpace() if dense else FunctionSpace()
    model = moved(replace(model, settings=replace(model.settings, checkpoint=None, resume=None)), model.network.theta)
    held, network = Held(batches), model.network
    objective = Objective(network.caller, model.likelihood, model.prior, held.num_examples, network.num_outputs,
                          held.sum_of_weights)

    def fit() -> FittedModel:
        # another network object of the same weights: the fit keeps its own
        return FittedModel.of(moved(model, network.theta), spec, batches)

    with torch.inference_mode(False), torch.enable_grad():
        return converged(objective, held, fit, _STEPS, MOST_DECREMENT, _AIM, model.settings.progress).theta


def require_memory_for(
    model: LinearizedModel, sample: Jacobian, rows_per_step: int, kept: int, dense: bool, automatic: bool
) -> None:
    """Refuse a state that does not fit in memory.

    Raises
    ------
    MemoryBudgetError
        Nothing was allocated.
    """
    p, element = model.network.num_parameters, model.jacobian_pass.dtype.itemsize
    settings, device = model.settings, model.network.device
    if dense:
        require_memory(
            3 * p * p * element, device, f"three {p:,} x {p:,} matrices: H, its factor, and a copy to resume from",
            'Use structure="gp" or "kfac", parameters="last_layer", or dtype=torch.float32.', settings.memory_budget,
        )  # fmt: skip
        return
    rows = rows_per_step * kept
    rows = min(rows, p) if automatic else rows
    each = sample.nbytes // max(1, sample.num_examples * sample.num_cotangents)
    require_memory(
        3 * rows * rows * element + 3 * rows * each, device,
        f"{rows:,} rows of {rows_per_step:,} a step, with three matrices over them",
        'Pass row_tolerance=1e-3, which drops old rows and says so, structure="auto" or "full", or fewer steps.',
        settings.memory_budget,
    )  # fmt: skip
