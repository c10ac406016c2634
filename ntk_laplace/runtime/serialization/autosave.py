"""Autosave: periodic checkpoints of a running computation, and the record that an interruption leaves."""

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


class Snapshots:
    """The latest record of a run that may be interrupted, in memory and, as by `Autosave`, in the file of a path.

    `take` returns a record of the present state, in copies. It is called when the last record is old.
    """

    def __init__(self, take: Callable[[], dict[str, Any]], path: str | os.PathLike[str] | None) -> None:
        self._take, self._save = take, Autosave(path)
        self._refresh()

    def _refresh(self) -> None:
        begin = time.monotonic()
        self.latest = self._take()
        self._last = time.monotonic()
        self._wait = max(tuning.SNAPSHOT_SECONDS, tuning.SNAPSHOT_SHARE * (self._last - begin))

    def after_step(self) -> None:
        """Take a record if the last is old, and save one if a minute has elapsed."""
        if time.monotonic() - self._last > self._wait:
            self._refresh()
        self._save(self._take)

    def finish(self) -> None:
        """Take and save the record of a run that has ended; a longer one may continue from it."""
        self.latest = self._take() | {"stopped": ""}
        self.save()

    def save(self) -> None:
        """Save the latest record."""
        self._save(lambda: self.latest, now=True)
