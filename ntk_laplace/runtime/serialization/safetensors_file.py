"""Records in safetensors files: the tensors as they are, and everything else as JSON in the file's metadata."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.errors import DataError, UnsupportedError

_ENDING = ".safetensors"
_KEY = "ntk_laplace record"
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def is_safetensors(path: Any) -> bool:
    """Whether the name of the file ends with ``.safetensors``."""
    return isinstance(path, (str, os.PathLike)) and Path(path).suffix.lower() == _ENDING


def require_safetensors(path: str | os.PathLike[str]) -> ModuleType:
    """The package safetensors, if it is installed (DataError)."""
    try:
        import safetensors
        import safetensors.torch
    except ImportError as cause:
        raise DataError("the package safetensors, for files of this name", f"{path} without it",
                        "Install it, pip install safetensors, or choose a name that ends with .pt.") from cause
    package: ModuleType = safetensors
    return package


def read_tensors(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """The tensors of a file, by name."""
    found: dict[str, Tensor] = require_safetensors(path).torch.load_file(path, device=str(device))
    return found


def write_record(record: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a record: plain containers of tensors, numbers, strings, dtypes and None.

    Raises
    ------
    DataError
        If the package safetensors is not installed.
    UnsupportedError
        If the record contains another type.
    """
    package = require_safetensors(path)
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_to_json(dict(record), "", tensors))
    # the format has no views: each entry gets memory of its own
    own = {name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}
    package.torch.save_file(own, path, metadata={"format": "pt", _KEY: text})


def read_record(path: str | os.PathLike[str], device: torch.device) -> dict[str, Any]:
    """The record of a file that `write_record` made.

    Raises
    ------
    DataError
        If the package safetensors is not installed, or the file has no record.
    """
    with require_safetensors(path).safe_open(path, framework="pt", device=str(device)) as file:
        text = (file.metadata() or {}).get(_KEY)
        if text is None:
            raise DataError("a record of ntk_laplace in the metadata of the file", f"{path} without one",
                            "Write the file with save(path).")
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    found: dict[str, Any] = _from_json(json.loads(text), tensors)
    return found


def _to_json(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A value of the record as JSON; its tensors are collected by their place in the record.

    Lists stay lists. Types that JSON does not have are objects of one entry, which names the type.
    """
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Tensor):
        while name in tensors:  # a key with a point, beside a key with a mapping
            name += "'"
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return {"dict": [[_to_json(key, name, tensors), _to_json(one, _below(name, key), tensors)]
                         for key, one in value.items()]}
    if isinstance(value, (list, tuple)):
        entries = [_to_json(one, _below(name, index), tensors) for index, one in enumerate(value)]
        return entries if isinstance(value, list) else {"tuple": entries}
    raise UnsupportedError("a record of tensors, numbers and texts", f"a {type(value).__name__} in {name!r}",
                           "Choose a name that ends with .pt.")


def _below(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def _from_json(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_from_json(one, tensors) for one in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dtype":
        return _DTYPES[content]
    if kind == "dict":
        return {_from_json(key, tensors): _from_json(one, tensors) for key, one in content}
    return tuple(_from_json(one, tensors) for one in content)
