"""Autosave: periodic checkpoints of a running computation."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.serialization.files import require_writable, write


class Autosave:
    """Saves a record once a minute, and on request.

    Parameters
    ----------
    path : path or None
        None saves nothing; any other must be writable (DataError).
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        if path is not None:
            require_writable(path)
        self._path, self._last = path, time.monotonic()

    def __call__(self, record: Callable[[], Mapping[str, Any]], now: bool = False) -> None:
        """Save what `record` returns if a minute has elapsed, or `now`."""
        if self._path is None or not (now or time.monotonic() - self._last > tuning.AUTOSAVE_SECONDS):
            return
        write(record(), self._path)
        self._last = time.monotonic()
