"""Arrays of the command: ``.npz`` files, and tensors that ``torch.save`` wrote."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from ntk_laplace.errors import DataError, first_line
from ntk_laplace.model.data import Inputs
from ntk_laplace.runtime.conversion import to_tensor
from ntk_laplace.tools.cli.files import require_file
from ntk_laplace.tools.cli.tables import COMPRESSED, TABLES
from ntk_laplace.tools.cli.words import first_few

_TABLES = {  # formats of other tables, with the pandas function that reads each
    ".tsv": "read_csv({}, sep='\\t')",
    ".txt": "read_csv({}, sep=None, engine='python')",
    ".xlsx": "read_excel({})",
    ".json": "read_json({})",
    ".jsonl": "read_json({}, lines=True)",
    ".ndjson": "read_json({}, lines=True)",
}
_FORMATS = (*_TABLES, ".npy")
_SAVED = (".pt", ".pth")
_WEIGHTS = ("w", "weight", "weights", "sample_weight", "sample_weights")  # without them the result is another one
_TARGETS = ("labels", "label", "targets", "target", "y")  # usual names
ARRAYS = (".npz", *_SAVED)


class _OtherContent(ValueError):
    """The file can be read, and contains something else."""


def load_data(
    path: Path, dtype: torch.dtype, targets: str | None = None, what: str = "the training data",
    sources: str | None = None, by_name: bool = False,
) -> tuple[Inputs, Tensor]:
    """X and y of a file, as tensors; floating arrays are cast to `dtype`, whole numbers become int64.

    An ``.npz`` file has the arrays X and y; a ``.pt`` file has a pair (X, y) of tensors, a `TensorDataset` of two, or a
    dict of tensors by name, and is loaded with ``weights_only=True``, which cannot run code. Other files, and other
    arrays than numbers, are refused (DataError).

    If the array of the targets is named, all others are the network's inputs by name, except that of the sources.
    `by_name` says whether the command has ``--targets``, as a remedy for a file without X and y; `what` says in
    messages what the file contains.
    """
    arrays = _read(path, what, ("X", "y") if targets is None else (targets,), targets, by_name)
    arrays.pop(sources or "", None)
    weights = next((name for name in _WEIGHTS if targets is None and name in arrays), None)
    if weights is not None:
        raise DataError(f"X and y in {path}, whose examples count once each", f"{weights} too",
                        "Fit weighted examples in Python, ntkl.laplace(network, (X, y, w), ...); or leave it out.")
    return _inputs(arrays, dtype, targets), _tensor(targets or "y", arrays[targets or "y"], dtype)


def load_inputs(
    path: Path, dtype: torch.dtype, targets: str | None = None, what: str = "the inputs",
    sources: str | None = None,
) -> tuple[Inputs, Tensor | None]:
    """X of a file, and y if the file has it, read as in `load_data`; a ``.pt`` file may contain X alone."""
    arrays = _read(path, what, ("X",) if targets is None else (), targets)
    arrays.pop(sources or "", None)
    y = arrays.get(targets or "y")
    return _inputs(arrays, dtype, targets), None if y is None else _tensor(targets or "y", y, dtype)


def load_sources(path: Path, name: str) -> list[Any]:
    """The labels of an array of names or whole numbers, one per example (DataError if it has others)."""
    array = _read(path, "the training data", (name,), name)[name]
    if array.ndim != 1 or array.dtype.kind not in "USiub":
        raise DataError(f"{name} to be an array of names or whole numbers, one per example",
                        f"shape {array.shape} and type {array.dtype}",
                        f"Convert it before it is saved: {name} = {name}.astype(str).")
    return array.astype(str).tolist() if array.dtype.kind == "S" else array.tolist()


def _inputs(arrays: Mapping[str, np.ndarray], dtype: torch.dtype, targets: str | None) -> Inputs:
    """X, or a dict of all arrays except the targets."""
    if targets is None:
        return _tensor("X", arrays["X"], dtype)
    found = {name: _tensor(name, array, dtype) for name, array in arrays.items() if name != targets}
    if not found:
        raise DataError(f"arrays of inputs beside {targets!r}", "none", "Save each input under its name in forward().")
    return found


def _read(
    path: Path, what: str, needed: Sequence[str], targets: str | None, by_name: bool = False
) -> dict[str, np.ndarray]:
    """Arrays of a file that has the needed ones: X and y, or all arrays if `targets` is given."""
    saved = _format(path) in _SAVED
    kind = "a .pt file" if saved else "an .npz file"
    require_file(path, f"{kind} of {what}")
    words = " and ".join(needed) or "by name"
    expected = f"{kind} with {'tensors' if saved else 'arrays'} {words}{'' if saved else ' of numbers'}"
    remedy = _conversion(path, [f"{name}={name}" for name in needed] + ["**inputs"] * (targets is not None))
    try:
        arrays = _saved_tensors(path) if saved else _arrays(path, None if targets else ("X", "y"))
    except pickle.UnpicklingError as cause:
        raise DataError(f"{expected} alone, which loads without running code",
                        f"{path}, which torch.load(weights_only=True) refuses", remedy) from cause
    except (ValueError, EOFError, OSError, RuntimeError, KeyError, zipfile.BadZipFile) as cause:
        raise DataError(expected, _told(path, cause), remedy) from cause
    missing = [name for name in needed if name not in arrays]
    if missing and _format(path) in _FORMATS:  # some of these formats are zip archives
        raise DataError(expected, str(path), remedy)
    if missing:
        there = first_few(list(arrays)) if arrays else "nothing"
        arguments = "X" not in arrays and len(arrays) > 1 and all(map(str.isidentifier, arrays))  # weights have points
        if by_name and targets is None and arguments:
            named = next((name for name in _TARGETS if name in arrays), "NAME")
            remedy = f"If the network takes the arrays by name, pass --targets {named}, that of the targets. {remedy}"
        raise DataError(f"{'tensors' if saved else 'arrays'} {words} in {path}",
                        f"{there}, and no {' and no '.join(missing)}", remedy)
    return arrays


def _told(path: Path, cause: Exception) -> str:
    if _format(path) in _FORMATS:
        return str(path)
    if "Object arrays" in str(cause):
        return f"{path}, which contains Python objects"
    readable = zipfile.is_zipfile(path) or isinstance(cause, _OtherContent)
    return f"{path} ({first_line(cause)})" if readable else f"{path}, which is no such file"


def _format(path: Path) -> str:
    """The file extension in lower case, without a compression suffix."""
    endings = [ending.lower() for ending in path.suffixes]
    return endings[-2] if len(endings) > 1 and endings[-1] in COMPRESSED else endings[-1] if endings else ""


def _conversion(path: Path, saved: Sequence[str]) -> str:
    """How to convert this file to .npz, as one line of Python if possible; `saved` has arguments such as "X=X"."""
    kind = _format(path)
    stem = path.name[: path.name.lower().rindex(kind)] if kind else path.name
    source, target = repr(str(path)), repr(str(path.with_name(f"{stem}.npz")))
    arrays = ", ".join(saved)
    if kind == ".npy":
        columns = [argument.partition("=")[0] for argument in saved if not argument.startswith("**")] or ["X"]
        loaded = ", ".join(f"{name}=numpy.load({f'{name}.npy'!r})" for name in columns)
        return f"An .npy file contains one array: numpy.savez({target}, {loaded}) puts several into one file."
    if kind in _SAVED:
        names = [argument.partition("=")[0] for argument in saved]
        entries = ", ".join(name if name.startswith("**") else f"{name!r}: {name}" for name in names)
        return f"Save it with torch.save({{{entries}}}, {source})."
    if kind in _TABLES:
        table = repr(str(path.with_name(f"{stem}.csv")))
        line = f"pandas.{_TABLES[kind].format(source)}.to_csv({table}, index=False)"
        return f"A table can be {TABLES}, with --target COLUMN. Convert it in Python: {line}."
    return f"Save it with numpy.savez({target}, {arrays})."


def _arrays(path: Path, wanted: Sequence[str] | None) -> dict[str, np.ndarray]:
    """Arrays of the wanted names, or of all; an empty one for every other name in the file."""
    loaded = np.load(path, allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        raise _OtherContent("it contains one array without a name")
    with loaded as archive:
        return {name: archive[name] if wanted is None or name in wanted else np.empty(0) for name in archive.files}


def _saved_tensors(path: Path) -> dict[str, np.ndarray]:
    """Tensors that ``torch.save`` wrote, as arrays: a pair is X and y, one tensor X."""
    with torch.serialization.safe_globals([TensorDataset]):
        found = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(found, TensorDataset):
        found = found.tensors
    if isinstance(found, Tensor):
        found = (found,)
    if isinstance(found, (list, tuple)) and 0 < len(found) <= 2:
        found = dict(zip(("X", "y"), found, strict=False))
    if not isinstance(found, Mapping):
        size = f" of {len(found)}" if isinstance(found, (list, tuple)) else ""
        raise _OtherContent(f"it contains a {type(found).__name__}{size}")
    other = [name for name, value in found.items() if not isinstance(value, Tensor) or value.layout != torch.strided]
    if other:
        raise _OtherContent(f"{first_few(other)} in it {'is no tensor' if len(other) == 1 else 'are no tensors'}")
    return {
        str(name): (value.detach().double() if value.is_floating_point() else value.detach()).numpy()
        for name, value in found.items()
    }


def _tensor(name: str, array: np.ndarray, dtype: torch.dtype) -> Tensor:
    if array.dtype.kind not in "fiub" or array.ndim == 0:
        raise DataError(f"{name} to be an array of numbers with one row per example",
                        f"shape {array.shape} and type {array.dtype}", _as_numbers(name, array))
    if array.dtype.kind == "f":
        return to_tensor(array.astype(np.float64)).to(dtype)
    if array.dtype.kind == "u" and array.size and int(array.max()) >= 2**63:
        raise DataError(f"whole numbers below 2^63 in {name}", f"{int(array.max())}",
                        f"Convert it before it is saved: {name} = {name}.astype(float).")
    return to_tensor(array.astype(np.int64))


def _as_numbers(name: str, array: np.ndarray) -> str:
    """How an array is converted before it is saved."""
    if array.ndim == 0:
        return "Save an array with one row per example."
    if array.dtype.kind in "US" and array.ndim == 1:
        return f"Number the names before they are saved: names, {name} = numpy.unique({name}, return_inverse=True)."
    if array.dtype.kind in "USO":
        return f"Convert it before it is saved: {name} = {name}.astype(float)."
    if array.dtype.kind == "c":
        return f"Save real and imaginary parts: {name} = numpy.stack([{name}.real, {name}.imag], -1)."
    return f"Convert it to numbers before it is saved, such as {name} = {name}.astype(int)."
