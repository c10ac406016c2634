"""What a training with evidence returns, and what its callbacks see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from ntk_laplace.posterior import Posterior
from ntk_laplace.training.history import EvidenceHistory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Callback", "EvidenceTraining", "TrainingState"]


@dataclass
class TrainingState:
    """What a callback sees after an epoch; with `stop` it ends the training.

    Attributes
    ----------
    network : nn.Module
        The one in training, in train mode; at the present weights.
    optimizer : torch.optim.Optimizer
    epoch : int
        Epochs done.
    epochs : int
        Epochs to do at most.
    loss : float
        Negative log joint in nats, as this epoch's minibatches saw it.
    posterior : Posterior or None
        At these weights, if the evidence was computed after this epoch. Its prior and likelihood are those that
        train.
    history : EvidenceHistory
    stopped : str
        Why the training ends here, if it does.
    """

    network: nn.Module
    optimizer: torch.optim.Optimizer
    epoch: int
    epochs: int
    loss: float
    posterior: Posterior | None
    history: EvidenceHistory
    stopped: str = field(default="")

    def stop(self, reason: str = "a callback stopped it") -> None:
        """End the training after this epoch."""
        self.stopped = reason


Callback = Callable[[TrainingState], object]


@dataclass(frozen=True)
class EvidenceTraining:
    """A network trained with evidence.

    The network itself, its prior and its likelihood are left at the best evidence too.

    Attributes
    ----------
    posterior : Posterior
        At the weights and hyperparameters of the best evidence.
    history : EvidenceHistory
    stopped : str
        Why it ended, in words.
    """

    posterior: Posterior
    history: EvidenceHistory
    stopped: str

    @property
    def evidence(self) -> float:
        """The best evidence, nats."""
        return self.history.evidence[self.history.best]

    @property
    def best_epoch(self) -> int:
        """The epoch of the best evidence, counted from 1."""
        return self.history.epochs[self.history.best]

    def plot(self) -> Figure:
        """Evidence, log joint and hyperparameters over the epochs."""
        return self.history.plot()

    def __str__(self) -> str:
        history = self.history
        shown = zip(history.names[:6], history.values[history.best], strict=False)
        found = ", ".join(f"{name} = {value:.4g}" for name, value in shown)
        more = f" and {len(history.names) - 6} more" if len(history.names) > 6 else ""
        return (
            f"{len(history.loss)} epochs ({self.stopped}); best evidence {self.evidence:.4f} nats after epoch "
            f"{self.best_epoch}; {found}{more}"
        )
