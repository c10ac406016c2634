"""The evidence in a training by Lightning; needs the extra ``lightning``."""

from __future__ import annotations

from typing import Any

from ntk_laplace.errors import MissingPackageError, UnsupportedError
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.structures import StructureSpec
from ntk_laplace.tools.callbacks.tracker import EvidenceTracker, TrackedEvidence

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ModuleNotFoundError as cause:
    if cause.name not in ("lightning", "lightning.pytorch"):
        raise
    remedy = 'Run pip install "ntk_laplace[lightning]".'
    raise MissingPackageError("the package lightning", "none installed", remedy) from cause

__all__ = ["EvidenceCallback"]


class EvidenceCallback(Callback):
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
    ) -> None:  # fmt: skip
        super().__init__()
        self.tracker = EvidenceTracker(data, likelihood, prior, structure, **options)

    @property
    def best(self) -> TrackedEvidence | None:
        """The highest evidence so far, with its epoch."""
        return self.tracker.best

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start anew."""
        if trainer.world_size > 1:
            raise UnsupportedError("a training by one process", f"{trainer.world_size} processes",
                                   "Pass devices=1, or compute the evidence after the training.")
        self.tracker.start()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate and log."""
        epoch = trainer.current_epoch + 1
        if self.tracker.due(epoch):
            pl_module.log_dict(self.tracker.evaluate(pl_module, epoch), on_step=False, on_epoch=True, batch_size=1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the best weights, if that was asked for."""
        if self.tracker.restore_best:
            self.tracker.restore(pl_module)
