"""The history of a training with evidence, one entry per evaluation."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass
class EvidenceHistory:
    """Evidence, loss and hyperparameters at every evaluation, and the loss of every epoch.

    Attributes
    ----------
    names : list of str
        Hyperparameters by name: ``precision[group]``, ``noise``, ``temperature``.
    epochs : list of int
        Epochs after which the evidence was computed, counted from 1.
    evidence : list of float
        Evidence in nats after the hyperparameter steps.
    evidence_before : list of float
        Evidence in nats before these steps.
    values : list of list of float
        Hyperparameters after the steps, in the order of `names`; precisions and variances, not their logarithms.
    examples : list of int
        M of every evaluation with ``evidence="subset"``: the evidences before the last are lower bounds. Else empty.
    loss : list of float
        For every epoch, the negative log joint in nats, averaged over the epoch's minibatches.
    """

    names: list[str] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    evidence: list[float] = field(default_factory=list)
    evidence_before: list[float] = field(default_factory=list)
    values: list[list[float]] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    examples: list[int] = field(default_factory=list)

    @property
    def best(self) -> int:
        """Index of the evaluation with the largest evidence; its epoch is ``epochs[best]``.

        Bounds from fewer examples are lower: of several M, only evaluations of the largest are compared.
        """
        most = max(self.examples, default=0)
        among = [i for i in range(len(self.evidence)) if not most or self.examples[i] == most]
        return max(among, key=self.evidence.__getitem__)

    @property
    def waited(self) -> int:
        """Number of evaluations since the best one."""
        return len(self) - 1 - self.best if self.evidence else 0

    def __len__(self) -> int:
        return len(self.evidence)

    def to_dataframe(self) -> pd.DataFrame:
        """One row per evaluation."""
        import pandas as pd

        frame = pd.DataFrame(self.values, columns=self.names)
        frame.insert(0, "epoch", self.epochs)
        frame.insert(1, "evidence", self.evidence)
        frame.insert(2, "evidence_before", self.evidence_before)
        frame.insert(3, "loss", [self.loss[epoch - 1] for epoch in self.epochs])
        if self.examples:
            frame.insert(4, "examples", self.examples)
        return frame

    def plot(self) -> Figure:
        """Evidence and loss over the epochs, and the hyperparameters on a log scale below."""
        from ntk_laplace.plotting import training_history

        return training_history(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        return asdict(self)
