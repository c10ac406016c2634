"""What a structure is: how training data become precision, and what is kept of them."""

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
    """How to spend the machine.

    Attributes
    ----------
    batch_size : int, optional
        Examples per pass; by default as many as a working set of 128 MiB allows. Small batches of a loader are read
        together up to this number, by default at most 5,000 and 32 MiB, unless the network treats their examples
        otherwise then.
    memory_budget : int, optional
        Bytes the fit may take; the free memory of the device by default.
    progress : bool, optional
        Show a progress bar; by default if the error stream is a terminal.
    checkpoint : path, optional
        Where a structured fit writes what it has gathered, every minute and when it is interrupted.
    resume : path or object, optional
        That file, or the `state` of a `FitInterrupted`: the fit goes on from there with the same data.
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
        """Settings as they are; the defaults for None.

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
    """A trained network and the model it was trained under.

    Attributes
    ----------
    network : Network
        The private copy at θ*.
    likelihood : Likelihood
    prior : GaussianPrior
    curvature_type : CurvatureType
        Which precision.
    jacobian_pass : JacobianPass
        Makes rows at inputs.
    settings : Settings
    displacement : Tensor, (P,), optional
        θ - θ*, how far a what-if has moved the weights of the linearized model; the network itself stays.
    training_gradient : Tensor, (P,), optional
        Once the network itself has followed a what-if (relinearized), the gradient that training had left.
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
        """Weights of the linearized model, (P,), in the algebra's floating type: θ*, or where a what-if moved them."""
        theta = self.network.theta.to(self.jacobian_pass.dtype)
        return theta if self.displacement is None else theta + self.displacement

    def outputs(self, rows: Jacobian) -> Tensor:
        """f of the linearized model at rows of J, (n, C): the network's outputs, or f + J(θ - θ*) after a move."""
        return rows.f if self.displacement is None else rows.f + rows.jvp(self.network.unflatten(self.displacement))

    def at(self, index: Tensor) -> LinearizedModel:
        """The same model of some of the training points: noise per point is theirs alone."""
        with torch.no_grad():  # a part of a parameter is none, and must not hold on to its graph
            likelihood = self.likelihood.at(index)
        settings = replace(self.settings, checkpoint=None, resume=None)  # those belong to the whole fit
        return replace(self, likelihood=likelihood, settings=settings)

    def to(self, device: torch.device, dtype: torch.dtype) -> LinearizedModel:
        """The same on another device, its algebra in another floating type; hyperparameters move in place."""
        network = self.network.to(device)
        for module in (self.prior, self.likelihood):
            module.to(device)
        displacement, training_gradient = (None if v is None else v.to(device, dtype) for v in (self.displacement,
                                                                                                self.training_gradient))
        return replace(self, network=network, jacobian_pass=self.jacobian_pass.on(network, dtype),
                       displacement=displacement, training_gradient=training_gradient)


class Structure(Protocol):
    """The verbs of a structure.

    Attributes
    ----------
    name : str
    points : TrainingPoints
        Outputs and targets at the training points.
    """

    name: str
    points: TrainingPoints | UnsavedPoints

    def posterior_precision(self, model: LinearizedModel) -> PosteriorPrecision:
        """Algebra at the present hyperparameters."""

    def vjp(self, model: LinearizedModel, residual: Tensor) -> Tensor:
        """Jᵀr over the training points, (P,)."""

    def jvp(self, model: LinearizedModel, vector: Tensor) -> Tensor:
        """J v at the training points, (N, C)."""

    def sensitivity(self, model: LinearizedModel, precision: PosteriorPrecision) -> Tensor:
        """∂ log det B/∂Λ_n, (N, C, C): V at the training points, where the curvature is exact."""

    def newton_step(self, model: LinearizedModel, precision: PosteriorPrecision, gradient: Tensor) -> NewtonStep:
        """z = H⁻¹g with what the correction asks of it."""

    def merged(self, model: LinearizedModel, other: Structure) -> Structure:
        """The structure of both data sets together."""

    def refit_on(self, model: LinearizedModel, batches: Source) -> Structure:
        """The same structure fitted to other data, so that the two can be merged."""

    def subset(self, model: LinearizedModel, index: Tensor) -> Structure:
        """The same structure of some of its examples, ascending; `model` is the model of those."""

    def rows_at(self, model: LinearizedModel, index: Tensor) -> Iterator[Jacobian]:
        """Rows of J at some of its examples, ascending, in pieces."""

    def state(self, model: LinearizedModel, include_data: bool) -> dict[str, Any]:
        """What is kept, at the present hyperparameters, as plain containers of tensors."""

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move what is kept."""


def require_unchanged(model: LinearizedModel, base: TrainingPoints | None) -> None:
    """Refuse to write down a what-if; `base` are the points before it, if there was one.

    Raises
    ------
    UnsupportedError
        If there was, or if the network itself has followed one.
    """
    if base is not None or model.training_gradient is not None:
        raise UnsupportedError("a posterior of the data it was fitted to, to save", "one that a what-if changed",
                               "Save the original, and ask what if again after loading it.")


class ExactStructure:
    """What function space and the whole weight space do alike: H is P0 + JᵀΛJ itself.

    Attributes
    ----------
    points : TrainingPoints
    base : TrainingPoints or None
        The points the network was trained on, if a what-if has changed them since.
    """

    points: TrainingPoints | UnsavedPoints
    base: TrainingPoints | None = None

    def _merged_base(self, model: LinearizedModel, other: ExactStructure) -> TrainingPoints | None:
        """After a what-if too, new points leave the weights where they are: all of their pull is held."""
        if self.base is None:
            return None
        added = self.points.subset(slice(self.base.num_examples, None))
        added = replace(added, weights=added.f.new_zeros(len(added.f)))  # of those that a what-if added, nothing is
        return self.base.joined(model.likelihood, added).joined(model.likelihood, other.points)

    def _base_at(self, index: Tensor) -> TrainingPoints | None:
        """Of some points; those that were added come last, and belong to no base."""
        return None if self.base is None else self.base.subset(index[index < self.base.num_examples])

    def newton_step(self, model: LinearizedModel, precision: PosteriorPrecision, gradient: Tensor) -> NewtonStep:
        """z = H⁻¹g and J z."""
        z = precision.solve(gradient)
        return NewtonStep(z, self.jvp(model, z))

    def refit_on(self, model: LinearizedModel, batches: Source) -> Structure:
        """The same of other data."""
        return type(self)(model, batches)
