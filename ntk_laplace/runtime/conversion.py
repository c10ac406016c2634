"""Numbers as tensors, whatever torch's default device is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def to_tensor(values: Any, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor on its own device, and anything else, such as an array or a number, on the CPU; shared where it can be.

    TypeError, ValueError or RuntimeError of torch if it is none of these.
    """
    return torch.as_tensor(values, dtype=dtype, device=values.device if isinstance(values, Tensor) else "cpu")
