"""Words of the command's messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def first_few(names: Sequence[Any], quote: bool = True, most: int = 3) -> str:
    """The first names and the number of others."""
    shown = [repr(name) if quote else str(name) for name in names[:most]]
    return ", ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "")


def row_words(row: int) -> str:
    """Where a value of a table is, at the end of a phrase."""
    return f" in row {row}, counted from 0 below the names"
