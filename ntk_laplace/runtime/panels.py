"""Panels: consecutive parts of a long axis, each within a budget."""

from __future__ import annotations

from collections.abc import Iterator


def panels(count: int, each: int, most: int) -> Iterator[slice]:
    """Slices of `count` rows: as many rows as `most` numbers or bytes allow if a row takes `each`, but at least one."""
    step = max(1, most // max(1, each))
    return (slice(start, min(start + step, count)) for start in range(0, count, step))
