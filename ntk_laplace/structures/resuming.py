"""Resuming of a structured fit: its checkpoints while it runs, and what a resumed fit must share with it."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch

from ntk_laplace.errors import DataError, UnsupportedError
from ntk_laplace.runtime.serialization import Autosave, FileFormat
from ntk_laplace.structures.accumulation import Accumulation
from ntk_laplace.structures.block_spec import BlockSpec
from ntk_laplace.structures.data_passes import ModelSignature
from ntk_laplace.structures.model import LinearizedModel

__all__ = ["require_same_model", "resumed", "save_regularly"]

_FORMAT = FileFormat(
    "ntk_laplace fit", 1, "a checkpoint of an interrupted fit",
    "Pass the path that was given as Settings(checkpoint=...).", key="accumulation",
)  # fmt: skip


def save_regularly(accumulated: Accumulation, path: str | os.PathLike[str] | None) -> None:
    """Save an accumulation once a minute while it advances, and at an interruption.

    The file contains the training targets seen so far: a resumed fit needs them.

    Raises
    ------
    DataError
        If the path is not writable.
    """
    accumulated.checkpoint = partial(_save, Autosave(path))


def _save(save: Autosave, gathered: Accumulation, now: bool = False) -> None:
    save(lambda: _FORMAT.header | {"accumulation": gathered.record(include_data=True)}, now)


def resumed(resume: Any, spec: BlockSpec, device: torch.device) -> Accumulation | None:
    """The accumulation to resume, from a file or the `state` of a `FitInterrupted`.

    Raises
    ------
    DataError, UnsupportedError
        If it is not one, or belongs to another structure.
    """
    if resume is None:
        return None
    if isinstance(resume, (str, os.PathLike)):
        resume = Accumulation.from_record(_FORMAT.read(resume, device)["accumulation"])
    if not isinstance(resume, Accumulation):
        raise DataError("the state of an interrupted fit, or the file it was saved to", f"a {type(resume).__name__}",
                        "Pass Settings(resume=error.state) of a FitInterrupted, or its checkpoint's path.")
    if (resume.spec.name, resume.spec.options()) != (spec.name, spec.options()):
        raise UnsupportedError(f"to resume {resume.spec}, which was interrupted", str(spec),
                               "Pass the same structure with the same options.")
    return resume.copy()


def require_same_model(accumulated: Accumulation, model: LinearizedModel) -> None:
    """Refuse to resume a fit under a different model.

    Raises
    ------
    UnsupportedError
    """
    for what, now in ModelSignature(model).items():
        if accumulated.signature.get(what) != now:
            raise UnsupportedError(f"to resume with the {what} of the interrupted fit", "another",
                                   "Pass the same arguments, or start anew without resume=.")
