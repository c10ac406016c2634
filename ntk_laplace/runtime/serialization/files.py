"""Files of records: written atomically, read without executing code; by torch, or as safetensors by their name."""

from __future__ import annotations

import os
import secrets
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ntk_laplace.errors import DataError, UnsupportedError
from ntk_laplace.runtime.serialization.safetensors_file import (
    is_safetensors,
    read_record,
    require_safetensors,
    write_record,
)


def write(record: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Save atomically: a reader never sees a partial file, nor one of two writers that of the other."""
    path = Path(path)
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    try:
        if is_safetensors(path):
            write_record(record, partial)
        else:
            torch.save(dict(record), partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@dataclass(frozen=True)
class FileFormat:
    """A kind of file, which its record names.

    Attributes
    ----------
    name : str
        The record's entry "format".
    version : int
        The latest version, which is the record's entry "version".
    what : str
        Name of such a file in messages.
    remedy : str
        How to get one.
    key : str, optional
        An entry that every record of this kind has. Early files have it and no header.
    """

    name: str
    version: int
    what: str
    remedy: str
    key: str | None = None

    @property
    def header(self) -> dict[str, Any]:
        """The entries of a record that name its format."""
        return {"format": self.name, "version": self.version}

    def matches(self, record: Any) -> bool:
        """Whether an object is a record of this kind, of any version."""
        return isinstance(record, dict) and (record.get("format") == self.name or self.key in record)

    def read(self, path: str | os.PathLike[str], device: torch.device) -> dict[str, Any]:
        """The record in a file that `write` made; no code in it is executed.

        Raises
        ------
        DataError
            If it is not such a file, if it is damaged, or if it is one of a later version.
        """
        if not isinstance(path, (str, os.PathLike)):
            raise DataError(f"a path of {self.what}", repr(path), self.remedy)
        place = f"{self.what} at {path}"
        try:
            record = read_record(path, device) if is_safetensors(path) else torch.load(
                path, map_location=device, weights_only=True)
            damaged = _damaged(path)
        except FileNotFoundError as error:
            raise DataError(place, "no such file", self.remedy) from error
        except DataError:
            raise
        except Exception as error:  # unpickling foreign bytes may raise anything
            raise DataError(place, f"what cannot be read as one ({type(error).__name__})", self.remedy) from error
        if not self.matches(record):
            raise DataError(place, "another file", self.remedy)
        if damaged is not None:
            raise DataError(place, f"a damaged one, whose {damaged} has another checksum", "Copy or save it again.")
        return self.supported(record)

    def state(self, resume: Any, device: torch.device, run: str) -> dict[str, Any]:
        """The state of an interrupted run, given as a record or as the path of its file (DataError)."""
        if isinstance(resume, (str, os.PathLike)):
            return self.read(resume, device)
        if not self.matches(resume):
            raise DataError(f"the state of an interrupted {run}, or the file it was saved to",
                            f"a {type(resume).__name__}", self.remedy)
        return self.supported(resume)

    def supported(self, record: dict[str, Any]) -> dict[str, Any]:
        """The record, if its version is not later than this one (DataError)."""
        if record.get("version", 1) > self.version:
            raise DataError(f"a checkpoint of version {self.version} or older", f"version {record['version']}",
                            "Update ntk_laplace.")
        return record


def _damaged(path: str | os.PathLike[str]) -> str | None:
    """The first entry of torch's file that has another checksum; torch reads it, unless it was told to write none."""
    if is_safetensors(path) or not torch.serialization.get_crc32_options() or not zipfile.is_zipfile(path):
        return None
    with zipfile.ZipFile(path) as archive:
        return archive.testzip()


def require_same(saved: Mapping[str, str], now: Mapping[str, str], run: str) -> None:
    """Check that what resumes has the settings of the interrupted run (UnsupportedError)."""
    for what, value in now.items():
        if saved.get(what) != value:
            raise UnsupportedError(f"to resume with the {what} of the interrupted {run}, {saved.get(what)}", value,
                                   "Pass the same arguments, or start anew without resume=.")


def require_writable(path: Any) -> None:
    """Refuse a path that is not writable, before the computation to be saved (DataError)."""
    remedy = "Make its folder first, and pass the path of a file in it."
    if not isinstance(path, (str, os.PathLike)):
        raise DataError("a path as checkpoint", repr(path), remedy)
    path = Path(path)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise DataError("a checkpoint in an existing, writable folder", f"{path}", remedy)
    if is_safetensors(path):
        require_safetensors(path)
