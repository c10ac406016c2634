"""Input files of the command: a checkpoint of the network's weights, arrays of data."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch
from pandas.api.types import is_integer_dtype
from torch import Tensor, nn

from ntk_laplace.errors import DataError, NetworkError, NTKLaplaceError
from ntk_laplace.model.data import Inputs, describe_inputs, take
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.model.network import Caller
from ntk_laplace.tools.cli.python_files import first_few, first_line, require_file
from ntk_laplace.tools.cli.tables import (
    input_columns,
    is_table,
    named_classes,
    numbers,
    read_table,
    require_column,
    target_classes,
)

__all__ = ["Files", "check_forward", "load_data", "load_inputs", "load_weights"]

_WRAPPERS = ("state_dict", "model", "model_state_dict")
_PREFIXES = ("module.", "_orig_mod.")  # added by DataParallel and torch.compile
_TABLES = {  # formats of other tables, with the pandas function that reads each
    ".tsv": "read_csv({}, sep='\\t')",
    ".txt": "read_csv({}, sep=None, engine='python')",
    ".feather": "read_feather({})",
    ".xlsx": "read_excel({})",
}
_FORMATS = (*_TABLES, ".npy", ".pt", ".pth")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")


# --- the network


def check_forward(network: nn.Module, x: Inputs, output: str | int | None = None) -> None:
    """Run the network on two examples, to report errors in it clearly.

    Raises
    ------
    NetworkError
        If it fails on them, or returns no tensor of outputs.
    """
    caller, few = Caller(network, output), take(x, slice(2))
    try:
        with torch.no_grad():
            caller(few)
    except NTKLaplaceError:
        raise
    except Exception as cause:
        remedy, words = "Give X the network's shape.", f"arrays {describe_inputs(few)}"
        remedy += " A network that makes float32 tensors needs --float32."
        if isinstance(x, Tensor):
            words = f"X of shape {(2, *x.shape[1:])} and type {x.dtype}"
        if isinstance(x, Tensor) and not x.is_floating_point():
            remedy = "Whole numbers are passed as they are (token numbers, say): save X as floats if they are values."
        raise NetworkError(f"a network that takes {words}",
                           f"{type(cause).__name__}: {first_line(cause)}", caller.remedy(few) or remedy) from cause


# --- its weights


def load_weights(network: nn.Module, path: Path) -> None:
    """Load a checkpoint's weights into the network; the names must match exactly.

    Parameters
    ----------
    network : nn.Module
        Its dtype does not change.
    path : Path
        File with a state dict, or with a dict that contains one under "state_dict", "model" or "model_state_dict". It
        is loaded with ``weights_only=True``, which cannot run code.

    Raises
    ------
    DataError
        If the file is missing or contains no weights.
    NetworkError
        If names or shapes differ from the network's.
    """
    require_file(path, "a checkpoint")
    remedy = "Save it with torch.save(network.state_dict(), path)."
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as cause:
        raise DataError("a checkpoint of tensors alone, which loads without running code",
                        f"{path}, which torch.load(weights_only=True) refuses", remedy) from cause
    except (EOFError, RuntimeError, ValueError, KeyError, zipfile.BadZipFile) as cause:
        raise DataError("a checkpoint that torch.load can read", f"{path}, which it cannot "
                        f"({type(cause).__name__}: {first_line(cause)})", remedy) from cause
    state = _state_dict(found, path, remedy)
    wanted = network.state_dict()
    for prefix in _PREFIXES:
        if state and all(name.startswith(prefix) for name in state) and not set(state) <= set(wanted):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
    _require_same(wanted, state, path)
    network.load_state_dict(state)


def _state_dict(found: Any, path: Path, remedy: str) -> dict[str, Any]:
    for key in _WRAPPERS:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping):
        raise DataError("a state dict: names and tensors", f"a {type(found).__name__} in {path}", remedy)
    other = [name for name, value in found.items() if not isinstance(value, Tensor) and "_extra_state" not in str(name)]
    if other or not found:
        got = f"{first_few(other)} in {path}, which are no tensors" if other else f"an empty dict in {path}"
        raise DataError("a state dict: names and tensors", got, f"{remedy} One under a key {_WRAPPERS} is found too.")
    return {str(name): value for name, value in found.items()}


def _require_same(wanted: Mapping[str, Any], state: Mapping[str, Any], path: Path) -> None:
    missing = [name for name in wanted if name not in state]
    extra = [name for name in state if name not in wanted]
    if missing or extra:
        got = [f"{first_few(missing)} missing"] if missing else []
        got += [f"{first_few(extra)} that it does not know"] if extra else []
        raise NetworkError(f"a checkpoint with the network's {len(wanted)} tensors",
                           f"{path} with {', and '.join(got)}",
                           "Let the factory build the network that was trained.")
    other = [
        f"{name} {tuple(state[name].shape)} instead of {tuple(value.shape)}" for name, value in wanted.items()
        if isinstance(value, Tensor) and value.shape != state[name].shape
    ]  # fmt: skip
    if other:
        raise NetworkError("weights of the network's shapes", f"{first_few(other, quote=False)} in {path}",
                           "Let the factory build the network that was trained, with its widths.")


# --- the data


class _OneArray(ValueError):
    """The file contains a single array."""


def load_data(
    path: Path, dtype: torch.dtype, targets: str | None = None, what: str = "the training data"
) -> tuple[Inputs, Tensor]:
    """X and y of an ``.npz`` file, as tensors; floating arrays are cast to `dtype`, integers keep their dtype.

    Parameters
    ----------
    path : Path
    dtype : torch.dtype
    targets : str, optional
        Name of the targets' array. All other arrays are then the network's inputs by name, instead of X and y.
    what : str
        What the file contains, for messages.

    Raises
    ------
    DataError
        If the file is missing or not an ``.npz`` file, or its arrays are not numeric.
    """
    arrays = _read(path, f"an .npz file of {what}", ("X", "y") if targets is None else (targets,), targets)
    return _inputs(arrays, dtype, targets), _tensor(targets or "y", arrays[targets or "y"], dtype)


def load_inputs(
    path: Path, dtype: torch.dtype, targets: str | None = None, what: str = "inputs to explain"
) -> tuple[Inputs, Tensor | None]:
    """X of an ``.npz`` file, and y if the file has it, read as in `load_data`.

    Raises
    ------
    DataError
        As in `load_data`.
    """
    arrays = _read(path, f"an .npz file of {what}", ("X",) if targets is None else (), targets)
    y = arrays.get(targets or "y")
    return _inputs(arrays, dtype, targets), None if y is None else _tensor(targets or "y", y, dtype)


class Files:
    """The data files of one command, ``.npz`` files or tables; its tables have the columns of the training data.

    Parameters
    ----------
    dtype : torch.dtype
        Of floating numbers.
    likelihood : Likelihood
        Names in the column of the targets become class numbers if it classifies.
    targets : str, optional
        Of ``.npz`` files, as in `load_data`.
    target : str, optional
        Column of a table's targets.

    Attributes
    ----------
    features : list of str or None
        Names of the input columns of the training data; None if these are no table.
    classes : list of str or None
        Names of the classes, sorted, if the training data have names.
    """

    def __init__(
        self, dtype: torch.dtype, likelihood: Likelihood, targets: str | None = None, target: str | None = None
    ) -> None:  # fmt: skip
        self.dtype, self.likelihood, self.targets, self.target = dtype, likelihood, targets, target
        self.features: list[str] | None = None
        self.classes: list[str] | None = None

    def training(self, path: Path) -> tuple[Inputs, Tensor]:
        """Inputs and targets of the training data.

        Raises
        ------
        DataError
            If the file cannot be read as such.
        """
        what = "the training data"
        if not is_table(path):
            return load_data(path, self.dtype, self.targets, what)
        frame = self._frame(path, what, required=True)
        self.features = input_columns(frame, path, self.target, None)
        if self.likelihood.classifies and named_classes(frame[self.target]):
            self.classes = target_classes(frame[self.target], path, None)[1]
        x, y = self._pair(frame, path)
        assert y is not None
        return x, y

    def data(self, path: Path, what: str) -> tuple[Inputs, Tensor]:
        """Inputs and targets of other data; read `training` first.

        Raises
        ------
        DataError
            As in `training`; or if the columns or classes of a table differ from the training data's.
        """
        if not is_table(path):
            return load_data(path, self.dtype, self.targets, what)
        x, y = self._pair(self._frame(path, what, required=True), path)
        assert y is not None
        return x, y

    def inputs(self, path: Path, what: str) -> tuple[Inputs, Tensor | None]:
        """Inputs of other data, and targets if the file has them; read `training` first.

        Raises
        ------
        DataError
            As in `data`.
        """
        if not is_table(path):
            return load_inputs(path, self.dtype, self.targets, what)
        return self._pair(self._frame(path, what, required=False), path)

    def _frame(self, path: Path, what: str, required: bool) -> pandas.DataFrame:
        """The table, with the target if that is required."""
        frame = read_table(path, what)
        if self.targets is not None:
            raise DataError("--target COLUMN, for a table", f"--targets {self.targets} and {path}",
                            "--targets names an array of an .npz file.")  # fmt: skip
        if required:
            require_column(frame, path, self.target)
        return frame

    def _pair(self, frame: pandas.DataFrame, path: Path) -> tuple[Tensor, Tensor | None]:
        x = numbers(frame, path, input_columns(frame, path, self.target, self.features))
        inputs = torch.as_tensor(x).to(self.dtype)
        if self.target is None or self.target not in frame.columns:
            return inputs, None
        column = frame[self.target]
        if self.classes is not None:
            return inputs, torch.as_tensor(target_classes(column, path, self.classes)[0])
        missing = getattr(self.likelihood, "missing", None) is not None
        y = numbers(frame, path, [self.target], missing)[:, 0]
        if is_integer_dtype(column.dtype) and not column.isna().any():
            return inputs, torch.as_tensor(column.to_numpy(np.int64, copy=True))
        return inputs, torch.as_tensor(y).to(self.dtype)


def _inputs(arrays: Mapping[str, np.ndarray], dtype: torch.dtype, targets: str | None) -> Inputs:
    """X, or a dict of all arrays except the targets."""
    if targets is None:
        return _tensor("X", arrays["X"], dtype)
    found = {name: _tensor(name, array, dtype) for name, array in arrays.items() if name != targets}
    if not found:
        raise DataError(f"arrays of inputs beside {targets!r}", "none", "Save each input under its name in forward().")
    return found


def _read(path: Path, what: str, needed: Sequence[str], targets: str | None) -> dict[str, np.ndarray]:
    """Arrays of a file that has the needed ones: X and y, or all arrays if `targets` is given."""
    require_file(path, what)
    words = " and ".join(needed) or "by name"
    expected = f"an .npz file with arrays {words} of numbers"
    remedy = _conversion(path, [f"{name}={name}" for name in needed] + ["**inputs"] * (targets is not None))
    try:
        arrays = _arrays(path, None if targets else ("X", "y"))
    except (ValueError, EOFError, OSError, zipfile.BadZipFile) as cause:
        raise DataError(expected, _told(path, cause), remedy) from cause
    missing = [name for name in needed if name not in arrays]
    if missing and _format(path) in _FORMATS:  # some of these formats are zip archives
        raise DataError(expected, str(path), remedy)
    if missing:
        there = first_few(list(arrays)) if arrays else "nothing"
        raise DataError(f"arrays {words} in {path}", f"{there}, and no {' and no '.join(missing)}", remedy)
    return arrays


def _told(path: Path, cause: Exception) -> str:
    if _format(path) in _FORMATS:
        return str(path)
    if "Object arrays" in str(cause):
        return f"{path}, which contains Python objects"
    readable = zipfile.is_zipfile(path) or isinstance(cause, _OneArray)
    return f"{path} ({first_line(cause)})" if readable else f"{path}, which is no such file"


def _format(path: Path) -> str:
    """The file extension in lower case, without a compression suffix."""
    endings = [ending.lower() for ending in path.suffixes]
    return endings[-2] if len(endings) > 1 and endings[-1] in _COMPRESSED else endings[-1] if endings else ""


def _conversion(path: Path, saved: Sequence[str]) -> str:
    """How to convert this file to .npz, as one line of Python if possible.

    Parameters
    ----------
    path : Path
    saved : sequence of str
        Keyword arguments for numpy.savez, such as "X=X".
    """
    kind = _format(path)
    stem = path.name[: path.name.lower().rindex(kind)] if kind else path.name
    source, target = repr(str(path)), repr(str(path.with_name(f"{stem}.npz")))
    arrays = ", ".join(saved)
    if kind == ".npy":
        columns = [argument.partition("=")[0] for argument in saved if not argument.startswith("**")] or ["X"]
        loaded = ", ".join(f"{name}=numpy.load({f'{name}.npy'!r})" for name in columns)
        return f"An .npy file contains one array: numpy.savez({target}, {loaded}) puts several into one file."
    if kind in (".pt", ".pth"):
        return f"Load its tensors with torch.load, and save them: numpy.savez({target}, {arrays})."
    if kind in _TABLES:
        table = repr(str(path.with_name(f"{stem}.csv")))
        line = f"pandas.{_TABLES[kind].format(source)}.to_csv({table}, index=False)"
        return f"A table can be .csv or .parquet, with --target COLUMN. Convert it in Python: {line}."
    return f"Save it with numpy.savez({target}, {arrays})."


def _arrays(path: Path, wanted: Sequence[str] | None) -> dict[str, np.ndarray]:
    """Arrays of the wanted names, or of all; an empty one for every other name in the file."""
    loaded = np.load(path, allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        raise _OneArray("it contains one array without a name")
    with loaded as archive:
        return {name: archive[name] if wanted is None or name in wanted else np.empty(0) for name in archive.files}


def _tensor(name: str, array: np.ndarray, dtype: torch.dtype) -> Tensor:
    if array.dtype.kind not in "fiub" or array.ndim == 0:
        raise DataError(f"{name} to be an array of numbers with one row per example",
                        f"shape {array.shape} and type {array.dtype}", "Convert it before it is saved.")
    if array.dtype.kind == "f":
        return torch.as_tensor(array.astype(np.float64)).to(dtype)
    return torch.as_tensor(array.astype(np.int64))


# --- texts
