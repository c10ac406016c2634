"""Numbers as the page holds them."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor


def rounded(value: Any) -> Any:
    """Round numbers to four digits; None for one that is not finite.

    Whole numbers, up to the rounding of inputs that were standardized, keep their digits below 2^53: the page shows
    these in full, and codes and dates among the inputs would be others.
    """
    if isinstance(value, Tensor):
        value = value.detach().cpu().tolist()
    if isinstance(value, list):
        return [rounded(entry) for entry in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        whole = float(round(value))
        return whole if abs(value - whole) <= 1e-12 * abs(value) < 1e-12 * 2**53 else float(f"{value:.4g}")
    return value
