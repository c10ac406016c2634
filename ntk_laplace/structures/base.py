"""Base of all structures: settings, the linearized model, and the interface of a structure."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ntk_laplace.curvature import CurvatureType
from ntk_laplace.data import Source
from ntk_laplace.errors import HyperparameterError, UnsupportedError, require_whole
from ntk_laplace.evidence import NewtonStep, PosteriorPrecision
from ntk_laplace.jacobian import Jacobian, JacobianPass
from ntk_laplace.likelihoods import Likelihood
from ntk_laplace.network import Network
from ntk_laplace.points import TrainingPoints, UnsavedPoints
from ntk_laplace.priors import GaussianPrior

__all__ = ["ExactStructure", "LinearizedModel", "Settings", "Structure", "require_unchanged"]


@dataclass(frozen=True)
class Settings:
    """Computational settings: batch size, memory, progress, checkpoints.

    Attributes
    ----------
    batch_size : int, optional
        Examples per pass through the network; by default as many as a working set of 128 MiB allows. Small batches of
        a loader are merged up to this number, by default at most 5,000 examples and 32 MiB, unless merging would
        change the network's outputs.
    memory_budget : int, optional
        Bytes the fit may use; by default the free memory of the device.
    progress : bool, optional
        Show a progress bar; by default if stderr is a terminal.
    checkpoint : path, optional
        File to which a structured fit writes its state, every minute and when it is interrupted.
    resume : path or object, optional
        That file, or the `state` of a `FitInterrupted`: the fit continues from it with the same data.
    """

    batch_size: int | None = None
    memory_budget: int | None = None
    progress: bool | None = None
    checkpoint: str | os.PathLike[str] | None = None
    resume: Any = None

    def __post_init__(self) -> None:
        if self.batch_size is not None:
            require_whole("batch_size", self.batch_size, 1, "Leave it out to have it chosen.")
        budget = self.memory_budget
        if budget is not None and not (isinstance(budget, (int, float)) and budget >= 0):
            raise HyperparameterError("a memory_budget in bytes", repr(budget), "Pass for instance 4 * 2**30.")

    @classmethod
    def of(cls, settings: Settings | None) -> Settings:
        """The given settings; the defaults for None.

        Raises
        ------
        UnsupportedError
            If it is neither.
        """
        if settings is not None and not isinstance(settings, Settings):
            raise UnsupportedError("a Settings object", repr(settings),
                                   "Use for instance ntk_laplace.Settings(batch_size=100).")
        return cls() if settings is None else settings


@dataclass(frozen=True)
class LinearizedModel:
    """The network linearized at its trained weights, with its likelihood and prior.

    Attributes
    ----------
    network : Network
        Private copy of the network at θ*.
    likelihood : Likelihood
    prior : GaussianPrior
    curvature_type : CurvatureType
        GGN, empirical Fisher or Monte-Carlo Fisher.
    jacobian_pass : JacobianPass
        Computes rows of the Jacobian at inputs.
    settings : Settings
    displacement : Tensor, (P,), optional
        θ - θ*, the displacement of the linearized model's weights by a what-if; the network itself does not move.
    training_gradient : Tensor, (P,), optional
        After `relinearize`, the gradient of the objective that remained at the end of training.
    fitted_at : tuple of Tensor, optional
        The hyperparameters at the fit, as `present_values` gives them.
    """

    network: Network
    likelihood: Likelihood
    prior: GaussianPrior
    curvature_type: CurvatureType
    jacobian_pass: JacobianPass
    settings: Settings
    displacement: Tensor | None = None
    training_gradient: Tensor | None = None
    fitted_at: tuple[Tensor, ...] | None = None

    @property
    def theta(self) -> Tensor:
        """Weights θ of the linearized model, (P,), in the algebra's dtype: θ*, or the weights after a what-if."""
        theta = self.network.theta.to(self.jacobian_pass.dtype)
        return theta if self.displacement is None else theta + self.displacement

    def outputs(self, rows: Jacobian) -> Tensor:
        """Outputs of the linearized model at rows of J, (n, C): f + J(θ - θ*), or f without a displacement."""
        return rows.f if self.displacement is None else rows.f + rows.jvp(self.network.unflatten(self.displacement))

    def at(self, index: Tensor) -> LinearizedModel:
        """The model restricted to some training points: noise per point is restricted to them."""
        with torch.no_grad():  # a slice of a parameter must not keep its graph
            likelihood = self.likelihood.at(index)
        settings = replace(self.settings, checkpoint=None, resume=None)  # those belong to the whole fit
        return replace(self, likelihood=likelihood, settings=settings)

    def to(self, device: torch.device, dtype: torch.dtype) -> LinearizedModel:
        """The model on another device, with another dtype for the algebra; hyperparameters move in place."""
        network = self.network.to(device)
        for module in (self.prior, self.likelihood):
            module.to(device)
        displacement, training_gradient = (None if v is None else v.to(device, dtype) for v in (self.displacement,
                                                                                                self.training_gradient))
        return replace(self, network=network, jacobian_pass=self.jacobian_pass.on(network, dtype),
                       displacement=displacement, training_gradient=training_gradient)


class Structure(Protocol):
    """Interface of a structure: how the posterior precision is stored and computed.

    Attributes
    ----------
    name : str
    points : TrainingPoints
        Outputs and targets at the training points.
    """

    name: str
    points: TrainingPoints | UnsavedPoints

    def posterior_precision(self, model: LinearizedModel) -> PosteriorPrecision:
        """The factorized posterior precision at the current hyperparameters."""

    def vjp(self, model: LinearizedModel, residual: Tensor) -> Tensor:
        """Jᵀr over the training points, (P,)."""

    def jvp(self, model: LinearizedModel, vector: Tensor) -> Tensor:
        """J v at the training points, (N, C)."""

    def sensitivity(self, model: LinearizedModel, precision: PosteriorPrecision) -> Tensor:
        """∂ log det B/∂Λ_n, (N, C, C); equal to V_nn if the curvature is exact."""

    def newton_step(self, model: LinearizedModel, precision: PosteriorPrecision, gradient: Tensor) -> NewtonStep:
        """z = H⁻¹g with the terms that the correction needs."""

    def merged(self, model: LinearizedModel, other: Structure) -> Structure:
        """The structure fitted to the union of both data sets."""

    def refit_on(self, model: LinearizedModel, batches: Source) -> Structure:
        """The same kind of structure fitted to other data, so that the two can be merged."""

    def subset(self, model: LinearizedModel, index: Tensor) -> Structure:
        """The structure of some of its examples, ascending; `model` is the model of those."""

    def rows_at(self, model: LinearizedModel, index: Tensor) -> Iterator[Jacobian]:
        """Rows of J at some of its examples, ascending, in batches."""

    def state(self, model: LinearizedModel, include_data: bool) -> dict[str, Any]:
        """Serializable state at the current hyperparameters, as plain containers of tensors."""

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move the stored tensors."""


def require_unchanged(model: LinearizedModel, base: TrainingPoints | None) -> None:
    """Refuse to save the result of a what-if; `base` are the points before it, if there was one.

    Raises
    ------
    UnsupportedError
        If there was one, or if the network was relinearized after one.
    """
    if base is not None or model.training_gradient is not None:
        raise UnsupportedError("a posterior of the data it was fitted to, to save", "one that a what-if changed",
                               "Save the original, and ask what if again after loading it.")


class ExactStructure:
    """Common part of the exact structures, in function and weight space: H = P0 + JᵀΛJ.

    Attributes
    ----------
    points : TrainingPoints
    base : TrainingPoints or None
        The points the network was trained on, if a what-if has changed them since.
    """

    points: TrainingPoints | UnsavedPoints
    base: TrainingPoints | None = None

    def _merged_base(self, model: LinearizedModel, other: ExactStructure) -> TrainingPoints | None:
        """Base after new points were added: conditioning never moves the weights, also after a what-if."""
        if self.base is None:
            return None
        added = self.points.subset(slice(self.base.num_examples, None))
        added = replace(added, weights=added.f.new_zeros(len(added.f)))  # added points: no training residual
        return self.base.joined(model.likelihood, added).joined(model.likelihood, other.points)

    def _base_at(self, index: Tensor) -> TrainingPoints | None:
        """Base of some points. Points that were added come last and have none."""
        return None if self.base is None else self.base.subset(index[index < self.base.num_examples])

    def newton_step(self, model: LinearizedModel, precision: PosteriorPrecision, gradient: Tensor) -> NewtonStep:
        """z = H⁻¹g and J z."""
        z = precision.solve(gradient)
        return NewtonStep(z, self.jvp(model, z))

    def refit_on(self, model: LinearizedModel, batches: Source) -> Structure:
        """The same kind of structure fitted to other data."""
        return type(self)(model, batches)
