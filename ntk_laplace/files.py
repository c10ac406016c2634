"""Files of plain containers of tensors: written atomically, read without executing code."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ntk_laplace.errors import DataError

__all__ = ["opened", "require_place", "write"]


def write(content: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Save atomically: a reader never sees a partial file."""
    path = Path(path)
    partial = path.with_name(path.name + ".block")
    torch.save(dict(content), partial)
    partial.replace(path)


def opened(path: str | os.PathLike[str], what: str, remedy: str, device: torch.device) -> Any:
    """Content of a file that `write` made; no code in it is executed.

    Raises
    ------
    DataError
        If it is not such a file.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise DataError(f"a path of {what}", repr(path), remedy)
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError as error:
        raise DataError(f"{what} at {path}", "no such file", remedy) from error
    except Exception as error:  # unpickling foreign bytes may raise anything
        raise DataError(f"{what} at {path}", f"what cannot be read as one ({type(error).__name__})", remedy) from error


def require_place(path: Any) -> None:
    """Refuse a path that is not writable, before the computation to be saved.

    Raises
    ------
    DataError
    """
    remedy = "Make its folder first, and pass the path of a file in it."
    if not isinstance(path, (str, os.PathLike)):
        raise DataError("a path as checkpoint", repr(path), remedy)
    path = Path(path)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise DataError("a checkpoint in an existing, writable folder", f"{path}", remedy)
