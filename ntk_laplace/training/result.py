"""The result of a training with evidence, and the state passed to its callbacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import nn

from ntk_laplace.errors import NTKLaplaceError, warn
from ntk_laplace.posterior import Posterior
from ntk_laplace.posterior.calibrate import PredictiveFit
from ntk_laplace.posterior.lack_of_fit import LackOfFit
from ntk_laplace.training.history import EvidenceHistory

if TYPE_CHECKING:
    from matplotlib.figure import Figure


MISSES = "the network misses a part of what its inputs determine"


@dataclass
class TrainingState:
    """The state passed to a callback after an epoch; `stop` ends the training.

    Attributes
    ----------
    network : nn.Module
        The network in training, in train mode, at its current weights.
    optimizer : torch.optim.Optimizer
    epoch : int
        Number of finished epochs.
    epochs : int
        Maximum number of epochs.
    loss : float
        Negative log joint in nats, averaged over this epoch's minibatches.
    posterior : Posterior or None
        The posterior at these weights, if it was fitted after this epoch (with ``evidence="subset"`` it is not, but
        possibly the last time). Its prior and likelihood are the ones being trained.
    history : EvidenceHistory
    stopped : str
        Why the training ends here; empty if it continues.
    """

    network: nn.Module
    optimizer: torch.optim.Optimizer
    epoch: int
    epochs: int
    loss: float
    posterior: Posterior | None
    history: EvidenceHistory
    stopped: str = ""

    def stop(self, reason: str = "a callback stopped it") -> None:
        """End the training after this epoch."""
        self.stopped = reason


Callback = Callable[[TrainingState], object]


@dataclass(frozen=True)
class EvidenceTraining:
    """A network trained with evidence.

    The caller's network has the weights of the posterior as well.

    Attributes
    ----------
    posterior : Posterior
        Posterior at the weights and hyperparameters of the best evidence; with ``predictive="loo"`` at the optimum of
        these hyperparameters, with a calibration.
    history : EvidenceHistory
    stopped : str
        Why the training ended.
    predictive : PredictiveFit or None
        The fit of the posterior's calibration; None without one, or where a warning has said why it cannot be fitted.
    """

    posterior: Posterior
    history: EvidenceHistory
    stopped: str
    predictive: PredictiveFit | None = None

    @property
    def evidence(self) -> float:
        """The best evidence, nats."""
        return self.history.evidence[self.history.best]

    @property
    def best_epoch(self) -> int:
        """The epoch of the best evidence, counted from 1."""
        return self.history.epochs[self.history.best]

    @cached_property
    def lack_of_fit(self) -> LackOfFit | None:
        """How alike residuals of similar inputs are (`Posterior.lack_of_fit`); None where nothing says so.

        It is unknown of few points, and where inputs are not one array of real numbers.
        """
        try:
            return self.posterior.lack_of_fit()
        except NTKLaplaceError:
            return None

    def tell_misfit(self) -> None:
        """Warn where these residuals are clearly alike."""
        found = self.lack_of_fit
        if found is not None and found.clear:
            wave = "" if found.period is None else f", such as FourierFeatures([({found.input}, {found.period:.4g})])"
            warn(f"{MISSES}: {found}; train it longer, or from a weaker prior (in Python, train_from_starts), take a "
                 f"wider network, or add the inputs that are missing{wave}")

    def plot(self) -> Figure:
        """Evidence, log joint and hyperparameters over the epochs."""
        return self.history.plot()

    def __str__(self) -> str:
        history = self.history
        shown = zip(history.names[:6], history.values[history.best], strict=False)
        found = ", ".join(f"{name} = {value:.4g}" for name, value in shown)
        more = f" and {len(history.names) - 6} more" if len(history.names) > 6 else ""
        used = f" from {history.examples[history.best]:,} examples" if history.examples else ""
        words = (f"{len(history.loss)} epochs ({self.stopped}); best evidence {self.evidence:.4f} nats{used} after "
                 f"epoch {self.best_epoch}; {found}{more}")
        if self.predictive is None:
            return words
        with torch.no_grad():  # of another structure, at weights that were trained on
            own = float(self.posterior.log_marginal_likelihood())
        return f"{words}; evidence {own:.4f} nats of the posterior; {self.predictive}"
