"""Example weights: the number of times each example counts, the third member of (x, y, w)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ntk_laplace.errors import DataError, is_number
from ntk_laplace.model.data.inputs import as_tensors


def example_weights(data: Any, seen: int = 0) -> tuple[Any, Tensor | None]:
    """Split (x, y, w) into (x, y) and one weight per example, float64; other data are returned with None.

    A tuple or list of three is (x, y, w) if w are numbers (N,). As many as targets are expected, real, finite and at
    least 0 (DataError, which counts examples from `seen`).
    """
    if not isinstance(data, (tuple, list)) or len(data) != 3:
        return data, None
    x, y, weights = data[0], as_tensors(data[1]), _in_double_precision(data[2])
    if not isinstance(y, Tensor) or not isinstance(weights, Tensor) or y.ndim == 0:
        return data, None
    if weights.ndim == 0 or weights.shape[1:].numel() > 1:
        return data, None  # of two inputs and targets, perhaps
    if weights.shape != y.shape[:1] or weights.dtype == torch.bool or weights.is_complex():
        raise DataError(f"example weights w as real numbers of shape ({len(y)},) in (x, y, w)",
                        f"{str(weights.dtype).removeprefix('torch.')} of shape {tuple(weights.shape)}",
                        "Pass one weight per example; group several inputs as one, ((x1, x2), y).")
    weights = weights.detach().double()
    bad = ~(torch.isfinite(weights) & (weights >= 0))
    if bool(bad.any()):
        first = int(bad.int().argmax())
        raise DataError("example weights w that are finite and at least 0 in (x, y, w)",
                        f"{float(weights[first]):g} at example {seen + first}",
                        "Pass one weight per example; group several inputs as one, ((x1, x2), y).")
    return (x, y), weights


def _in_double_precision(weights: Any) -> Any:
    """Python numbers as float64 (torch would use its default dtype); other values as `as_tensors` reads them."""
    numbers = isinstance(weights, (tuple, list)) and all(map(is_number, weights))
    return torch.tensor(weights, dtype=torch.float64, device="cpu") if numbers else as_tensors(weights)
