"""Relinearization: move the network to the optimum of a what-if by Gauss-Newton steps, and linearize it there.

A what-if displaces the weights of the linearized network by θ - θ*. Here a copy of the network takes this step, halved
until the objective F of `moving` decreases. Its Jacobians are recomputed, and the next Gauss-Newton step follows; many
steps amount to training.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ntk_laplace.errors import NumericalError, UnsupportedError, require_whole
from ntk_laplace.model.data import InputData, Source, fill_buffer
from ntk_laplace.model.network import Network
from ntk_laplace.runtime import tuning
from ntk_laplace.structures import FittedModel, LinearizedModel, Structure
from ntk_laplace.structures.data_passes import collected, shown
from ntk_laplace.structures.training_inputs import training_inputs
from ntk_laplace.structures.what_if.moving import fitted_with_remaining, moving_model, remaining_of, with_remaining


def relinearized(fitted: FittedModel, x: InputData | None, steps: int) -> FittedModel:
    """The model and its points after `steps` Gauss-Newton steps of the network.

    Parameters
    ----------
    fitted : FittedModel
        Exact, displaced by a what-if, or relinearized before.
    x : tensor, tuple or dict of tensors, optional
        Inputs of all training points in the order of the fit, added ones last; required in function space.
    steps : int

    Returns
    -------
    FittedModel
        Of a copy of the network. The remaining gradient of training is stored, for further steps.

    Raises
    ------
    DataError
        If inputs are needed and missing, or are not those of the fit.
    NumericalError
        If no step decreases the objective.
    UnsupportedError
        If nothing was changed.
    """
    require_whole("steps", steps, 1, "Pass how often the network is linearized anew, such as 3.")
    model = fitted.model
    if model.displacement is None and model.training_gradient is None:
        raise UnsupportedError("a posterior that a what-if changed, to relinearize", "one of the data it was fitted to",
                               "Ask remove, relabel, reweight or add first.")
    still = moving_model(fitted)
    with torch.no_grad():
        source = training_inputs(model, fitted.structure, x, "relinearize(x)")
        descent = _Descent(still, _at_the_network(fitted, still), source, model.displacement)
        for _ in shown(model, range(steps), "relinearizing", steps):
            if not descent.step():
                break
    return descent.fitted


def _at_the_network(fitted: FittedModel, still: LinearizedModel) -> Structure:
    """The structure of the changed points, with their outputs at the network's weights."""
    structure, points, displacement = fitted.structure, fitted.structure.points, fitted.model.displacement
    if displacement is None:
        return structure
    base = structure.trained_points
    f = torch.cat([base.f, (points.f - structure.jvp(still, displacement))[len(base.f) :]])
    return structure.changed(still, replace(points, f=f, expanded=None))


class _Descent:
    """Gauss-Newton iteration on the network; `step` makes one step.

    Parameters
    ----------
    model : LinearizedModel
        Without displacement: linearized at the current weights.
    structure : structure
        Of the changed points, at the current weights.
    source : Source
        Inputs of the points.
    direction : Tensor, (P,), optional
        The first step, if it is not the Newton step at the current weights.
    """

    def __init__(self, model: LinearizedModel, structure: Structure, source: Source, direction: Tensor | None) -> None:
        self._remaining, self._source, self._direction = remaining_of(model), source, direction
        self.fitted = FittedModel(with_remaining(model, self._remaining, structure.points), structure)

    def step(self) -> bool:
        """One descent step; False if the objective cannot decrease any more."""
        model, structure = self.fitted.model, self.fitted.structure
        theta, points = model.theta, structure.points
        pulled = structure.vjp(model, points.residual(model.likelihood))
        gradient = model.joint_gradient(pulled) - self._remaining
        direction = self._direction
        if direction is None:
            direction = -structure.solve_at(model, points, gradient)
        self._direction = None
        slope = float(gradient @ direction)
        value = self._value(theta, points.f)
        slack = 8 * torch.finfo(model.network.precision).eps * (1.0 + abs(value))
        if -slope <= slack:  # below the rounding of the objective
            return False
        there = self._search(theta, direction, slope, value, slack)
        self.fitted = fitted_with_remaining(model, structure, self._source, points, there)
        return True

    def _search(self, theta: Tensor, direction: Tensor, slope: float, value: float, slack: float) -> Tensor:
        """Backtracking line search: the full step, halved until the objective decreases."""
        size = 1.0
        for _ in range(tuning.HALVINGS):
            candidate = theta + size * direction
            f = _outputs(self.fitted.model, self._source, candidate)
            if self._value(candidate, f) <= value + 1e-4 * size * slope + slack:
                return candidate
            size /= 2
        raise NumericalError("a step of the network that makes its objective fall", f"none down to {size:.2g} of it",
                             "Ask what if with steps=1 before, or look for weights that are no optimum.")

    def _value(self, theta: Tensor, f: Tensor) -> float:
        """The objective, in nats; infinite instead of NaN."""
        model = self.fitted.model
        fit = replace(self.fitted.points, f=f, expanded=None).log_likelihood(model.likelihood)
        value = float(model.prior.energy(theta) - fit - self._remaining @ theta)
        return value if value == value else float("inf")


def _outputs(model: LinearizedModel, source: Source, theta: Tensor) -> Tensor:
    """Outputs of the network at θ, (N, C)."""
    network: Network = model.network
    found = fill_buffer((network.with_parameters(theta, x) for x, _ in source), source.length or 0)
    return collected(model, source, found.rows.to(model.jacobian_pass.dtype))
