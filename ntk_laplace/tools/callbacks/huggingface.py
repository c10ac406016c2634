"""The evidence in a training by transformers; needs the extra ``huggingface``."""

from __future__ import annotations

import math
from typing import Any

from torch.utils.data import DataLoader

from ntk_laplace.errors import DataError, UnsupportedError, optional_package
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.structures import StructureSpec
from ntk_laplace.tools.callbacks.tracker import EvidenceTracker, TracksEvidence

with optional_package("transformers", 'Run pip install "ntk_laplace[huggingface]".'):
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

__all__ = ["EvidenceCallback"]


class EvidenceCallback(TracksEvidence, TrainerCallback):
    """Logs the evidence at the end of epochs through ``Trainer.log``; added by ``trainer.add_callback``.

    Parameters
    ----------
    trainer : transformers.Trainer
        A callback has no other access to the trainer's logger.
    likelihood, prior, structure, **options
        As in `EvidenceTracker`. Unless the options say otherwise, the data are ``trainer.train_dataset`` in its order,
        in batches of the trainer's collator, with ``output="logits"`` and ``targets="labels"``.

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
        self, trainer: Trainer, likelihood: Likelihood, prior: GaussianPrior | None = None,
        structure: str | StructureSpec = "kfac", **options: Any,
    ) -> None:
        if not isinstance(trainer, Trainer):
            raise UnsupportedError("a transformers.Trainer", f"a {type(trainer).__name__}",
                                   "Make the trainer first, then trainer.add_callback(EvidenceCallback(trainer, ...)).")
        self._trainer = trainer
        options = {"output": "logits", "targets": "labels"} | options
        if options.get("data") is None:
            options["data"] = _training_data(trainer)
        self.tracker = EvidenceTracker(likelihood=likelihood, prior=prior, structure=structure, **options)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **keywords: Any
    ) -> None:
        """Start anew."""
        self.start(args.world_size, "Start one process, or compute the evidence after the training.")

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **keywords: Any
    ) -> None:
        """Evaluate and log."""
        epoch = math.ceil((state.epoch or 0.0) - 1e-6)
        if self.tracker.due(epoch):
            self._trainer.log(self.tracker.evaluate(keywords["model"], epoch))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **keywords: Any
    ) -> None:
        """Restore the best weights, if that was asked for."""
        self.end(keywords["model"])


def _training_data(trainer: Trainer) -> DataLoader:
    """The training examples in their order, without the columns that the model does not take.

    The trainer's own loader belongs to accelerate, which counts on every iteration to be completed.
    """
    if trainer.train_dataset is None:
        raise DataError("a trainer with a train_dataset", "None", "Pass data=, the training data of the evidence.")
    loader = trainer.get_eval_dataloader(trainer.train_dataset)
    return DataLoader(loader.dataset, batch_size=trainer.args.eval_batch_size, collate_fn=loader.collate_fn)
