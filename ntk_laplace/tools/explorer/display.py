"""Numbers as the page holds them."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor


def rounded(value: Any) -> Any:
    """Round numbers to four digits; None for one that is not finite."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().tolist()
    if isinstance(value, list):
        return [rounded(entry) for entry in value]
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    return value
