"""When the evidence is computed during training, and how the hyperparameters are updated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ntk_laplace.errors import HyperparameterError, require_bounds, require_number, require_whole
from ntk_laplace.model.likelihoods import Likelihood


@dataclass(frozen=True)
class EvidenceSchedule:
    """F, K, B and γ of [I21] Algorithm 1, and the rule for early stopping.

    Attributes
    ----------
    frequency : int
        F: the evidence is computed after every F-th epoch, and after the last.
    steps : int
        K: Adam steps on the logarithms of the hyperparameters at each evaluation. With 0 the hyperparameters are fixed
        and the evidence is only recorded.
    burn_in : int
        B: the evidence is not computed in the first B epochs.
    learning_rate : float
        γ, in log units.
    hyperparameters : sequence of str, optional
        Which hyperparameters are updated: "precision", "noise", "temperature", or "likelihood" for all of the
        likelihood's. By default the precisions, and noise and excess of `Gaussian` and `StudentT`, and the dispersion
        of `NegativeBinomial`. Each step of a temperature or dispersion costs a pass over the data.
    bounds : tuple of float
        Lower and upper bound of every precision, variance and temperature.
    patience : int, optional
        Stop after this many consecutive evaluations without a better evidence.

    Raises
    ------
    HyperparameterError
        If a number is invalid.
    """

    frequency: int = 5
    steps: int = 100
    burn_in: int = 0
    learning_rate: float = 0.1
    hyperparameters: Sequence[str] | str | None = None
    bounds: tuple[float, float] = (1e-10, 1e10)
    patience: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("frequency", 1), ("steps", 0), ("burn_in", 0), ("patience", 1)):
            if name != "patience" or self.patience is not None:
                require_whole(name, getattr(self, name), least,
                              f"Pass for instance EvidenceSchedule({name}={max(least, 1)}).")
        require_number("a positive learning rate", self.learning_rate,
                       "Between 0.01 and 1 works; see [I21] section 3.4.", above=0)
        require_bounds(self.bounds)
        named = self.hyperparameters
        listed = isinstance(named, Sequence) and len(named) > 0 and all(isinstance(name, str) for name in named)
        if named is not None and not listed:
            raise HyperparameterError("names of the hyperparameters that move", repr(named),
                                      'Pass for instance ["precision", "noise"]; with steps=0 none moves.')

    def due(self, epoch: int, last: int) -> bool:
        """Whether the evidence is computed after this epoch, counted from 1 ([I21] Algorithm 1, line 5)."""
        return epoch == last or (epoch > self.burn_in and epoch % self.frequency == 0)

    def left(self, epoch: int, last: int) -> int:
        """Number of evaluations after this epoch's."""
        return sum(self.due(later, last) for later in range(epoch + 1, last + 1))

    def moving(self, likelihood: Likelihood) -> list[str]:
        """Names of the hyperparameters that are updated."""
        if self.hyperparameters is None:
            own = dict(likelihood.named_parameters())
            return ["precision", *(name for name in ("noise", "excess", "dispersion") if f"log_{name}" in own)]
        return [self.hyperparameters] if isinstance(self.hyperparameters, str) else list(self.hyperparameters)


def short_schedule(epochs: int) -> EvidenceSchedule:
    """Ten evaluations of 20 steps, each step about as expensive as a minibatch of a small network."""
    return EvidenceSchedule(max(1, epochs // 10), 20)
