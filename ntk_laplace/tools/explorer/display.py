"""Numbers as the page holds them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

_DIGITS = 4
_ROUNDING = 1e-12  # relative error of inputs that were standardized, at most


def rounded(value: Any, spread: float = 0.0) -> Any:
    """Round numbers to four digits, of their size or of their spread; None for one that is not finite.

    Digits before the point stay, those of a whole number below 2^53 and of another one below 10^5: the page shows them,
    and codes, dates and amounts among the inputs would be others. A whole number is one up to the rounding of inputs
    that were standardized. The value is a number, a text, a tensor, or a list of these. The spread is the range of the
    numbers that the page shows beside it, such as a column of degrees of longitude, which are close to each other and
    far from 0.
    """
    if isinstance(value, Tensor):
        value = value.detach().cpu().tolist()
    if isinstance(value, list):
        return [rounded(entry, spread) for entry in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        whole, size = float(round(value)), abs(value)
        near = min(_ROUNDING * size, 1e-3 * spread or math.inf)
        if abs(value - whole) <= near and size < 2**53:
            return whole
        if size <= _ROUNDING * spread:
            return 0.0
        close = size > spread > _ROUNDING * size
        order = math.floor(math.log10(size))
        digits = _DIGITS + (order - math.floor(math.log10(spread)) if close else 0)
        return float(f"{value:.{max(digits, order + 1 if size < 1e5 else 0)}g}")
    return value


def in_digits(value: float, spread: float = 0.0) -> str:
    """A number as `rounded`, in words; infinity and NaN too."""
    return f"{rounded(float(value), spread):.15g}" if math.isfinite(value) else f"{value}"


def rounded_each(values: Any, spreads: Sequence[float]) -> Any:
    """Round a list or a tensor of numbers, each by its own spread; one number by the only one.

    Without a spread for each, all are rounded to four digits of their size.
    """
    values = values.detach().cpu().tolist() if isinstance(values, Tensor) else values
    if not isinstance(values, list):
        return rounded(values, spreads[0] if len(spreads) == 1 else 0.0)
    known = len(values) == len(spreads)
    return [rounded(value, spreads[i] if known else 0.0) for i, value in enumerate(values)]


def spread_of(values: Sequence[Any]) -> float:
    """Range of those of the values that are finite numbers; 0 if there are none."""
    known = [value for value in values if isinstance(value, (int, float)) and math.isfinite(value)]
    return float(max(known) - min(known)) if known else 0.0
