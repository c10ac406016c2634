"""Files of the command: what one is, whether one is there to be read, or can be written, before the work."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from ntk_laplace.errors import DataError


def is_estimator(path: Path) -> bool:
    """Whether the name is that of an estimator's file."""
    return path.suffix.lower() == ".joblib"


def require_file(path: Path, what: str) -> None:
    """Refuse a path where there is no file (DataError)."""
    if path.is_dir():
        raise DataError(what, f"the directory {path}", "Name a file in it.")
    if not path.is_file():
        raise DataError(what, f"{path}, where there is no file", "Check the path.")


def require_writable(options: argparse.Namespace, *paths: Path | None, made: bool = False) -> None:
    """Refuse a path that cannot be written (OSError), and one of the files that the command reads (DataError).

    `made` says whether the command makes missing directories on the way to the paths.
    """
    network = options.network[0] if options.network else None
    given = (network, *(getattr(options, name, None) for name in ("data", "checkpoint", "inputs", "held_out")))
    for path in filter(None, paths):
        if path.exists() and any(file.exists() and path.samefile(file) for file in given if file is not None):
            raise DataError("another name for what is written", f"{path}, which is an input",
                            "It would be overwritten: choose another --out, --json or --plot.")
        place = path.resolve().parent
        while made and not place.exists():
            place = place.parent
        try:
            if path.exists():
                path.open("ab").close()
            else:
                tempfile.TemporaryFile(dir=place).close()  # some systems of files take none, whatever permissions say
        except OSError as cause:
            raise OSError(cause.errno, os.strerror(cause.errno or 0), str(path)) from cause
