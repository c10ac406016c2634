"""torch's Adam in one kernel where there is one: steps of small networks are ruled by the number of calls."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

__all__ = ["adam"]


def adam(parameters: Iterable[nn.Parameter], learning_rate: float) -> torch.optim.Adam:
    """Adam with torch's default decay rates."""
    parameters = list(parameters)
    fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)
    return torch.optim.Adam(parameters, lr=learning_rate, fused=fused or None)
