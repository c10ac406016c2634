"""The network of the command: its weights from a checkpoint, and a run on two examples."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ntk_laplace.errors import DataError, NetworkError, NTKLaplaceError, first_line
from ntk_laplace.model.data import Inputs, describe_inputs, take
from ntk_laplace.model.network import Caller
from ntk_laplace.runtime.serialization import is_safetensors, read_tensors
from ntk_laplace.tools.cli.files import require_file
from ntk_laplace.tools.cli.words import first_few

_WRAPPERS = ("state_dict", "model", "model_state_dict")
_PREFIXES = ("module.", "_orig_mod.")  # added by DataParallel and torch.compile


def check_forward(network: nn.Module, x: Inputs, output: str | int | None = None) -> None:
    """Run the network on two examples, to report errors in it clearly (NetworkError)."""
    caller, few = Caller(network, output), take(x, slice(2))
    try:
        with torch.no_grad():
            caller(few)
    except NetworkError as cause:  # its remedy names the argument of Python
        remedy = re.sub(r"output='?(\w*)'?", lambda found: f"--output {found[1]}".rstrip(), cause.remedy)
        raise type(cause)(cause.expected, cause.got, remedy) from cause
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


def load_weights(network: nn.Module, path: Path) -> None:
    """Load a checkpoint's weights into the network, whose dtype does not change.

    The file has a state dict, or a dict that contains one under "state_dict", "model" or "model_state_dict", and is
    loaded with ``weights_only=True``, which cannot run code; or it is a ``.safetensors`` file, which may contain tied
    weights once. Refuse one without weights (DataError), and names and shapes that differ from the network's, up to one
    common prefix (NetworkError).
    """
    require_file(path, "a checkpoint")
    remedy = "Save it with torch.save(network.state_dict(), path)."
    try:
        found = read_tensors(path) if is_safetensors(path) else torch.load(path, map_location="cpu", weights_only=True)
    except NTKLaplaceError:
        raise
    except pickle.UnpicklingError as cause:
        raise DataError("a checkpoint of tensors alone, which loads without running code",
                        f"{path}, which torch.load(weights_only=True) refuses", remedy) from cause
    except Exception as cause:  # damaged bytes may raise anything
        raise DataError("a checkpoint that torch.load or safetensors can read", f"{path}, which it cannot "
                        f"({type(cause).__name__}: {first_line(cause)})", remedy) from cause
    state = _state_dict(found, path, remedy)
    wanted = network.state_dict()
    for prefix in _PREFIXES:
        if state and all(name.startswith(prefix) for name in state) and not set(state) <= set(wanted):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
    state = _fitting(wanted, state)
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


def _fitting(wanted: Mapping[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """Without the one prefix whose removal makes all names fit, such as that of a LightningModule's attribute."""
    own, first = _with_tied(wanted, state), next(iter(state))
    for name in wanted if set(own) != set(wanted) else ():
        prefix = first.removesuffix(f".{name}") + "."
        if all(one.startswith(prefix) for one in state):
            found = _with_tied(wanted, {one.removeprefix(prefix): value for one, value in state.items()})
            if set(found) == set(wanted):
                return found
    return own


def _with_tied(wanted: Mapping[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """With names of the network whose tensor is also that of another name, under which the file has it."""
    present = {value.data_ptr(): name for name, value in wanted.items() if name in state and isinstance(value, Tensor)}
    tied = {name: state[present[value.data_ptr()]] for name, value in wanted.items()
            if name not in state and isinstance(value, Tensor) and value.numel() and value.data_ptr() in present}
    return state | tied


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
    ]
    if other:
        raise NetworkError("weights of the network's shapes", f"{first_few(other, quote=False)} in {path}",
                           "Let the factory build the network that was trained, with its widths.")
