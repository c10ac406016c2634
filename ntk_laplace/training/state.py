"""What an interrupted training must share with the one that resumes it."""

from __future__ import annotations

import torch

from ntk_laplace.runtime.serialization import FileFormat

__all__ = ["FORMAT", "optimizer_words"]

FORMAT = FileFormat(
    "ntk_laplace training", 1, "a checkpoint of a training",
    "Pass Settings(resume=error.state) of a TrainingInterrupted, or the path of Settings(checkpoint=path).",
)


def optimizer_words(optimizer: torch.optim.Optimizer) -> str:
    """The optimizer's class and initial options; the current learning rate is not included, nor which kernel runs."""
    plain = {name: value for name, value in optimizer.defaults.items()
             if isinstance(value, (int, float, str, tuple)) and name != "fused"}
    return f"{type(optimizer).__name__}({', '.join(f'{name}={value!r}' for name, value in plain.items())})"
