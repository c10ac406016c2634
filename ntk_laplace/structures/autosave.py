"""Autosave: periodic checkpoints of a running fit."""

from __future__ import annotations

import os
import time

from ntk_laplace import tuning
from ntk_laplace.files import require_place, write
from ntk_laplace.structures.accumulation import Accumulation
from ntk_laplace.structures.records import record

__all__ = ["Autosave"]


class Autosave:
    """Saves an accumulation once a minute, and at an interruption.

    Parameters
    ----------
    path : path or None
        None saves nothing. The file contains the training targets seen so far: a resumed fit needs them.

    Raises
    ------
    DataError
        If the path is not writable.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        if path is not None:
            require_place(path)
        self._path, self._last = path, time.monotonic()

    def __call__(self, gathered: Accumulation, now: bool = False) -> None:
        """Save if a minute has elapsed, or `now`."""
        if self._path is None or not (now or time.monotonic() - self._last > tuning.AUTOSAVE_SECONDS):
            return
        write({"accumulation": record(gathered, include_data=True)}, self._path)
        self._last = time.monotonic()
