"""The linearized model: a network at its trained weights, with likelihood, prior and settings."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.curvature import CurvatureType
from ntk_laplace.errors import HyperparameterError, UnsupportedError, is_number, require_flags, require_whole
from ntk_laplace.jacobian import Jacobian, JacobianPass
from ntk_laplace.model.data import Batches
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.model.network import Network
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.runtime.distributed import ProcessGroupReducer
from ntk_laplace.runtime.reduction import Reducer, SingleProcess
from ntk_laplace.runtime.resources import available_memory, require_memory
from ntk_laplace.structures.points import TrainingPoints, unmoved


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
        Bytes the fit may use; by default the free memory of the device. A batch takes at most half of it.
    progress : bool, optional
        Show a progress bar; by default if stderr is a terminal.
    checkpoint : path, optional
        File to which a structured fit writes its state, every minute and when it is interrupted. Of several processes
        each writes its own, the first this one and the others with their number after the name.
    resume : path or object, optional
        That file, or the `state` of a `FitInterrupted`: the fit continues from it with the same data. The files of
        several processes are added up, and any number of processes continues.
    process_group : torch.distributed.ProcessGroup, optional
        Share the work among the processes of this group, that of `process_group()` for instance. All run the same
        script, with the same arguments, call the same methods in the same order, and have the same posterior.
    distributed : bool
        Share it among the processes of the default group.
    sharded : bool
        Each process gives its own share of the data, and training points are numbered in the order of the ranks. By
        default each gives all data, takes consecutive examples of them and reads no others.
    reducer : Reducer
        How the processes add up; it follows from the group. One process by default.

    Raises
    ------
    UnsupportedError
        If a group is asked for and torch.distributed is not initialized.
    """

    batch_size: int | None = None
    memory_budget: int | None = None
    progress: bool | None = None
    checkpoint: str | os.PathLike[str] | None = None
    resume: Any = None
    process_group: Any = None
    distributed: bool = False
    sharded: bool = False
    reducer: Reducer = field(default_factory=SingleProcess)

    def __post_init__(self) -> None:
        if self.batch_size is not None:
            require_whole("batch_size", self.batch_size, 1, "Leave it out to have it chosen.")
        budget = self.memory_budget
        if budget is not None and not (is_number(budget) and budget >= 0):
            raise HyperparameterError("a memory_budget in bytes", repr(budget), "Pass for instance 4 * 2**30.")
        shown = self.progress is not None and self.progress
        require_flags(progress=shown, distributed=self.distributed, sharded=self.sharded)
        if not isinstance(self.reducer, Reducer):
            raise UnsupportedError("a Reducer", repr(self.reducer), "Leave it out for one process.")
        if (self.distributed or self.process_group is not None) and isinstance(self.reducer, SingleProcess):
            vars(self)["reducer"] = ProcessGroupReducer(self.process_group)  # the class is frozen

    def own(self, batches: Batches) -> Batches:
        """What this process reads of the data that it was given."""
        alone = self.sharded or self.reducer.world_size == 1
        return batches if alone else batches.shared(self.reducer)

    def agreed(self, device: torch.device) -> Settings:
        """The settings with one memory budget on all processes: what one can refuse, all refuse.

        Processes on the CPU of one machine share its free memory.
        """
        if self.reducer.world_size == 1:
            return self
        budget = self.memory_budget
        if budget is None:
            beside = int(os.environ.get("LOCAL_WORLD_SIZE", self.reducer.world_size)) if device.type == "cpu" else 1
            budget = available_memory(device) // beside
        return replace(self, memory_budget=min(self.reducer.gather(budget)))

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
class RemainingGradient:
    """g0, the gradient of the objective that remained at the end of training, and what it is the gradient of.

    Attributes
    ----------
    value : Tensor, (P,)
    hyperparameters : tuple of Tensor
        As `present_values` gives them.
    points : TrainingPoints
        Whose optimum the network went to with it.
    """

    value: Tensor
    hyperparameters: tuple[Tensor, ...]
    points: TrainingPoints

    def holds(self, model: LinearizedModel, points: TrainingPoints) -> bool:
        """Whether data and hyperparameters are still the same."""
        return unmoved(self.hyperparameters, model.prior, model.likelihood) and points.same_data(self.points)

    def to(self, device: torch.device, dtype: torch.dtype) -> RemainingGradient:
        """The same on another device, with another dtype."""
        return replace(self, value=self.value.to(device, dtype), points=self.points.to(device, dtype))


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
    training_gradient : RemainingGradient, optional
        After a moving what-if or `relinearize`.
    fitted_at : tuple of Tensor, optional
        The hyperparameters at the fit, as `present_values` gives them.
    refitted : bool
        Whether the displacement led to the linearized model's own optimum: no gradient of training remains, and
        what-ifs start there.
    """

    network: Network
    likelihood: Likelihood
    prior: GaussianPrior
    curvature_type: CurvatureType
    jacobian_pass: JacobianPass
    settings: Settings
    displacement: Tensor | None = None
    training_gradient: RemainingGradient | None = None
    fitted_at: tuple[Tensor, ...] | None = None
    refitted: bool = False

    @property
    def theta(self) -> Tensor:
        """Weights θ of the linearized model, (P,), in the algebra's dtype: θ*, or the weights after a what-if."""
        theta = self.network.theta.to(self.jacobian_pass.dtype)
        return theta if self.displacement is None else theta + self.displacement

    @property
    def moved(self) -> Tensor:
        """θ - θ*, (P,), of the linearized model: zero without a displacement."""
        return torch.zeros_like(self.theta) if self.displacement is None else self.displacement

    @property
    def from_prior_mean(self) -> Tensor:
        """θ - μ0, (P,)."""
        theta = self.theta
        return theta - self.prior.flat_mean().to(theta)

    def outputs(self, rows: Jacobian) -> Tensor:
        """Outputs of the linearized model at rows of J, (n, C): f + J(θ - θ*), or f without a displacement."""
        return rows.f if self.displacement is None else rows.f + rows.jvp(self.network.unflatten(self.displacement))

    def joint_gradient(self, backprojected: Tensor) -> Tensor:
        """g = P0 (θ-μ0) - Jᵀr, (P,), the gradient of the negative log joint; `backprojected` is Jᵀr."""
        with torch.no_grad():
            distance = self.from_prior_mean
            return self.prior.flat_precision().to(distance) * distance - backprojected

    def require_memory(self, needed: int, what: str, remedy: str) -> None:
        """Raise MemoryBudgetError if so many bytes are more than the fit may use; see `resources.require_memory`."""
        require_memory(needed, self.network.device, what, remedy, self.settings.memory_budget)

    def at_weights(self, theta: Tensor) -> LinearizedModel:
        """The model with a copy of the network at other weights (P,)."""
        network = self.network.at(theta)
        return replace(self, network=network, jacobian_pass=self.jacobian_pass.on(network, self.jacobian_pass.dtype))

    def at(self, index: Tensor) -> LinearizedModel:
        """The model restricted to some training points: noise per point is restricted to them."""
        with torch.no_grad():  # a slice of a parameter must not keep its graph
            likelihood = self.likelihood.at(index)
        settings = replace(self.settings, checkpoint=None, resume=None)  # those belong to the whole fit
        return replace(self, likelihood=likelihood, settings=settings)

    def copied(self) -> LinearizedModel:
        """The model with copies of likelihood and prior: a change of their hyperparameters leaves this one as it is."""
        with torch.inference_mode(False):
            return replace(self, likelihood=copy.deepcopy(self.likelihood), prior=copy.deepcopy(self.prior))

    def to(self, device: torch.device, dtype: torch.dtype) -> LinearizedModel:
        """The model on another device, with another dtype for the algebra; hyperparameters move in place."""
        network = self.network.to(device)
        for module in (self.prior, self.likelihood):
            module.to(device)
        displacement = None if self.displacement is None else self.displacement.to(device, dtype)
        gradient = None if self.training_gradient is None else self.training_gradient.to(device, dtype)
        return replace(self, network=network, jacobian_pass=self.jacobian_pass.on(network, dtype),
                       displacement=displacement, training_gradient=gradient)
