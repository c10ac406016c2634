"""What a structure is: how training data become curvature, and what is kept of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ntk_laplace.curvature import Root
from ntk_laplace.evidence import Curvature, TrainingPoints
from ntk_laplace.factors import FactorPass
from ntk_laplace.likelihoods import Likelihood
from ntk_laplace.network import Network
from ntk_laplace.priors import GaussianPrior

__all__ = ["Settings", "Structure", "Trained"]


@dataclass(frozen=True)
class Settings:
    """How to spend the machine.

    Attributes
    ----------
    batch_size : int, optional
        Examples per pass; by default as many as a working set of 128 MiB allows.
    memory_budget : int, optional
        Bytes the fit may take; the free memory of the device by default.
    progress : bool, optional
        Show a progress bar; by default if the error stream is a terminal.
    """

    batch_size: int | None = None
    memory_budget: int | None = None
    progress: bool | None = None


@dataclass(frozen=True)
class Trained:
    """A trained network and the model it was trained under.

    Attributes
    ----------
    network : Network
        The private copy at θ*.
    likelihood : Likelihood
    prior : GaussianPrior
    root : Root
        Which curvature.
    factors : FactorPass
        Makes rows at inputs.
    settings : Settings
    """

    network: Network
    likelihood: Likelihood
    prior: GaussianPrior
    root: Root
    factors: FactorPass
    settings: Settings

    @property
    def theta(self) -> Tensor:
        """θ*, (P,), in the algebra's floating type."""
        return self.network.theta.to(self.factors.dtype)

    def hyperparameters(self) -> tuple[Tensor, ...]:
        """Present values of everything that may move, to see whether it has."""
        return tuple(
            tensor.detach().clone()
            for module in (self.prior, self.likelihood)
            for tensor in (*module.parameters(), *module.buffers())
        )


class Structure(Protocol):
    """The verbs of a structure.

    Attributes
    ----------
    name : str
    points : TrainingPoints
        Outputs and targets at the training points.
    """

    name: str
    points: TrainingPoints

    def curvature(self, trained: Trained) -> Curvature:
        """Algebra at the present hyperparameters."""

    def backproject(self, trained: Trained, residual: Tensor) -> Tensor:
        """Jᵀr over the training points, (P,)."""

    def push(self, trained: Trained, vector: Tensor) -> Tensor:
        """J v at the training points, (N, C)."""

    def training_moments(self, trained: Trained, curvature: Curvature) -> Tensor:
        """V at the training points, (N, C, C)."""

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move what is kept."""
