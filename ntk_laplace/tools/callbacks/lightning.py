"""The evidence in a training by Lightning; needs the extra ``lightning``."""

from __future__ import annotations

from typing import Any

from ntk_laplace.errors import optional_package
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.structures import StructureSpec
from ntk_laplace.tools.callbacks.tracker import EvidenceTracker, TracksEvidence

with optional_package("lightning", 'Run pip install "ntk_laplace[lightning]".'):
    from lightning.pytorch import Callback, LightningModule, Trainer

__all__ = ["EvidenceCallback"]


class EvidenceCallback(TracksEvidence, Callback):
    """Logs the evidence at the end of training epochs through ``LightningModule.log``.

    With ``every=1``, `EarlyStopping` and `ModelCheckpoint` find it as ``monitor="log_evidence", mode="max"``, the first
    with ``check_on_train_epoch_end=True``, the second with ``save_on_train_epoch_end=True``.

    Parameters
    ----------
    data, likelihood, prior, structure, **options
        As in `EvidenceTracker`. `data` are tensors, a dataset or a loader, not a `LightningDataModule`. By default the
        network is the `LightningModule`, whose `forward` returns the outputs.

    Attributes
    ----------
    tracker : EvidenceTracker
        With `history`, and `restore` for weights that were not restored at the end.

    Raises
    ------
    NTKLaplaceError
        As `EvidenceTracker`; at the start of a training by several processes, an `UnsupportedError`.

    Notes
    -----
    A resumed training starts without an earlier best.
    """

    def __init__(
        self, data: Any, likelihood: Likelihood, prior: GaussianPrior | None = None,
        structure: str | StructureSpec = "kfac", **options: Any,
    ) -> None:
        super().__init__()
        self.tracker = EvidenceTracker(data, likelihood, prior, structure, **options)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start anew."""
        self.start(trainer.world_size, "Pass devices=1, or compute the evidence after the training.")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate and log."""
        epoch = trainer.current_epoch + 1
        if self.tracker.due(epoch):
            pl_module.log_dict(self.tracker.evaluate(pl_module, epoch), on_step=False, on_epoch=True, batch_size=1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the best weights, if that was asked for."""
        self.end(pl_module)
