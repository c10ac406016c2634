"""Validation of targets: shape, type and values; errors name the first bad example."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ntk_laplace.errors import DataError, NonFiniteError, TargetError
from ntk_laplace.model.data import as_tensor

MISSING_LABEL = -100  # the default `ignore_index` of torch.nn.CrossEntropyLoss
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-4}  # tolerance of a sum of probabilities; larger for 16-bit types
_REMEDY = "Remove or impute examples with missing targets."
_NOT_COMPARED = (torch.uint16, torch.uint32, torch.uint64)  # torch has almost no operations for these
_SHOWN = 8  # targets of an example in a message, at most


def read(y: Any, num_examples: int, missing: bool = False, remedy: str = _REMEDY) -> Tensor:
    """Targets as a tensor with one row per example, finite; NaN is allowed as a missing target if `missing`.

    TargetError if `y` is not an array of numbers, is empty, or has another number of rows. NonFiniteError, with this
    remedy, if an entry is infinite, or NaN and not allowed.
    """
    try:
        y = as_tensor(y)
    except DataError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise TargetError("targets as a tensor or an array of numbers", type(y).__name__,
                          "Convert the targets to a tensor.") from error
    y = y.double() if y.dtype in _NOT_COMPARED else y
    if y.is_complex():
        raise TargetError("real targets", f"dtype {y.dtype}", "Pass real and imaginary part as two outputs.")
    if y.dim() == 0 or y.shape[0] != num_examples or y.numel() == 0:
        raise TargetError(
            f"targets for {num_examples} examples" if num_examples else "targets for at least one example",
            f"shape {tuple(y.shape)}",
            "Pass one row of targets for each input, in the same order.",
        )
    if y.is_floating_point():
        good = ~y.isinf() if missing else y.isfinite()
        if not good.all():
            index = first_bad(~good)
            raise NonFiniteError("finite targets", f"{_row(y, index, good)} at example {index}", remedy)
    return y


def read_columns(
    y: Any, num_examples: int, num_responses: int, missing: bool = False, remedy: str = _REMEDY
) -> Tensor:
    """Read floating targets of shape (N, D), or (N,) for one response. Integers become float64."""
    y = read(y, num_examples, missing, remedy)
    if num_responses == 1 and y.dim() == 1:
        y = y.unsqueeze(1)
    if y.shape != (num_examples, num_responses):
        wanted = f"({num_examples}, {num_responses})"
        raise TargetError(f"targets of shape {wanted}" + (f" or ({num_examples},)" if num_responses == 1 else ""),
                          f"shape {tuple(y.shape)}", "Give each example one target per network output.")
    return y if y.is_floating_point() else y.double()


def require_columns(like: Tensor, y: Tensor) -> None:
    """TargetError if targets (N,) meet outputs (N, D): torch would pair each target with each example."""
    if y.shape[-1:] != like.shape[-1:] or (y.dim() < 2 <= like.dim()):
        raise TargetError(f"targets (N, D), with a column per response, of shape {tuple(like.shape)}",
                          f"shape {tuple(y.shape)}",
                          "Pass y.unsqueeze(1) for one response, or likelihood.targets(y, N, C).")


def read_labels(y: Any, num_examples: int, num_classes: int) -> Tensor:
    """Class labels of shape (N,), int64 in 0..C-1, or -100 if missing; accepts whole numbers of any dtype."""
    y = read(y, num_examples, remedy=f"{_REMEDY} A missing class label is {MISSING_LABEL}.")
    if y.dim() != 1:
        one_hot = y.shape == (num_examples, num_classes)
        raise TargetError(
            f"class labels of shape ({num_examples},)",
            f"shape {tuple(y.shape)}",
            "Turn one-hot rows into labels with y.argmax(1); probabilities of the classes are floating numbers."
            if one_hot else "Pass one label per example.",
        )
    if y.is_floating_point():
        require(y == y.floor(), y, "class labels that are whole numbers",
                "Regression targets want another likelihood, such as Gaussian().")
    remedy = f"Number the classes from 0, one network output per class; {MISSING_LABEL} is a missing label."
    good = ((y >= 0) & (y < num_classes)) | (y == MISSING_LABEL)
    require(good, y, f"class labels in 0..{num_classes - 1}", remedy)
    return y.long()


def read_probabilities(y: Tensor, num_examples: int, num_classes: int) -> Tensor:
    """Soft labels, (N, C): rows of probabilities; a row of -100 is a missing label."""
    y = read(y, num_examples, remedy=f"{_REMEDY} A row of {MISSING_LABEL} is a missing label.")
    tolerance = _ROUNDING.get(y.dtype, 2e-2)
    good = (y >= 0).all(1) & ((y.sum(1) - 1).abs() <= tolerance)
    remedy = f"Divide each row by its sum; a row of {MISSING_LABEL} is a missing label."
    require(good | (y == MISSING_LABEL).all(1), y, "rows of probabilities that sum to 1", remedy)
    return y


def require(good: Tensor, y: Tensor, expected: str, remedy: str) -> None:
    """Raise a `TargetError` that names the first example where `good` fails."""
    if not good.all():
        index = first_bad(~good)
        raise TargetError(expected, f"{_row(y, index, good)} at example {index}", remedy)


def first_bad(bad: Tensor) -> int:
    """Index of the first row (example) with a true entry."""
    return int(bad.flatten(1).any(1).int().argmax()) if bad.dim() > 1 else int(bad.int().argmax())


def _row(y: Tensor, index: int, good: Tensor) -> str:
    """The targets of an example; of many, the first that is not good, or the first few."""
    row = y[index].flatten()
    if len(row) > _SHOWN and good.shape == y.shape:
        row = row[~good[index].flatten()][:1]
    words = ", ".join(f"{value:g}" for value in row[:_SHOWN].tolist())
    return words if len(row) == 1 else f"[{words}{', ...' if len(row) > _SHOWN else ''}]"
