"""What an interrupted training must share with the one that resumes it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from ntk_laplace.errors import DataError, UnsupportedError
from ntk_laplace.runtime.serialization import FileFormat

__all__ = ["FORMAT", "optimizer_words", "read", "require_same"]

FORMAT = FileFormat(
    "ntk_laplace training", 1, "a checkpoint of a training",
    "Pass Settings(resume=error.state) of a TrainingInterrupted, or the path of Settings(checkpoint=path).",
)


def optimizer_words(optimizer: torch.optim.Optimizer) -> str:
    """The optimizer's class and initial options; the current learning rate is not included, nor which kernel runs."""
    plain = {name: value for name, value in optimizer.defaults.items()
             if isinstance(value, (int, float, str, tuple)) and name != "fused"}
    return f"{type(optimizer).__name__}({', '.join(f'{name}={value!r}' for name, value in plain.items())})"


def read(resume: Any, device: torch.device) -> dict[str, Any]:
    """Return a training state, or load it from a file.

    Raises
    ------
    DataError
        If it is not a training state.
    """
    if isinstance(resume, (str, os.PathLike)):
        return FORMAT.read(resume, device)
    if not FORMAT.matches(resume):
        raise DataError("the state of an interrupted training, or the file it was saved to",
                        f"a {type(resume).__name__}", FORMAT.remedy)
    return FORMAT.supported(resume)


def require_same(saved: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Check that a resumed training has the settings of the interrupted one.

    Raises
    ------
    UnsupportedError
    """
    for what, value in now.items():
        if saved.get(what) != value:
            raise UnsupportedError(f"to resume with the {what} of the interrupted training, {saved.get(what)}", value,
                                   "Pass the same arguments, or start anew without resume=.")
