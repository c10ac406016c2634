"""Inputs: a tensor, or nested tuples, lists and dicts of tensors that share their first axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ntk_laplace.errors import DataError, NonFiniteError, UnsupportedError
from ntk_laplace.runtime.conversion import to_tensor
from ntk_laplace.runtime.torch_warnings import WITHOUT_TORCH_WARNINGS

# what a network takes; tensors share their first axis
Inputs: TypeAlias = Tensor | Mapping[str, "Inputs"] | Sequence["Inputs"]


_Nested = TypeVar("_Nested")


class SupportsArray(Protocol):
    """An array or a table, of NumPy or pandas for example."""

    def __array__(self) -> np.ndarray: ...


# what is converted to `Inputs`: also arrays, tables, rows of numbers, and data sets whose batches contain inputs
InputData: TypeAlias = Inputs | SupportsArray | Sequence[float | Sequence[float]] | DataLoader | Dataset


def map_tensors(function: Callable[[Tensor], Any], x: Inputs) -> Any:
    """Apply `function` to every tensor of a nested input; other leaves do not change."""
    if isinstance(x, Tensor):
        return function(x)
    if isinstance(x, Mapping):
        # a BatchEncoding and similar types become a plain dict with the same keys
        return {key: map_tensors(function, value) for key, value in x.items()}
    if isinstance(x, (tuple, list)):
        return with_members(x, [map_tensors(function, value) for value in x])
    return x


def with_members(x: Any, members: list[Any]) -> Any:
    """A list or tuple of the same type, which may be a named tuple, with other members."""
    return type(x)(*members) if hasattr(x, "_fields") else type(x)(members)


def leaves(x: Inputs) -> list[Tensor]:
    """The tensors of a nested input, in order."""
    found: list[Tensor] = []
    map_tensors(found.append, x)
    return found


def num_examples(x: Inputs) -> int:
    """Length of the first axis that all tensors of an input share.

    Raises
    ------
    DataError
        If there is no tensor, or a tensor lacks such an axis or cannot be sliced along it.
    """
    tensors = leaves(x)
    if not tensors:
        many = isinstance(x, (DataLoader, Dataset))
        raise DataError("inputs that are a tensor, or a tuple or dict of tensors", f"a {type(x).__name__}",
                        "Pass the inputs of one batch at a time." if many
                        else "Convert them, torch.tensor(numpy.array(X, dtype=float)), which wants numbers in rows of "
                        "one length.")
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
            kind = "nested" if tensor.is_nested else "meta" if tensor.is_meta else str(tensor.layout)
            raise DataError("dense tensors with values as inputs", f"a {kind.removeprefix('torch.')} one",
                            "Convert it, x.to_dense(), or pad it; a meta tensor holds no values.")
    lengths = {len(tensor) if tensor.ndim else -1 for tensor in tensors}
    if len(lengths) != 1 or -1 in lengths:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise DataError("input tensors that share their first axis, one row per example", f"shapes {shapes}",
                        "Give every tensor of the input one row per example.")
    return lengths.pop()


def num_bytes(x: Inputs) -> int:
    """Total bytes of all tensors of an input."""
    return sum(tensor.nbytes for tensor in leaves(x))


def take(x: Inputs, index: slice | Tensor | Sequence[int]) -> Inputs:
    """The examples of `x` at `index`."""
    return map_tensors(lambda tensor: tensor[index], x)


def concatenate(parts: Sequence[_Nested]) -> _Nested:
    """Concatenate nested inputs, all of the same form, along their first axis."""
    return _concatenated(parts)


def _concatenated(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(parts))
    if isinstance(first, Mapping):
        return {key: _concatenated([part[key] for part in parts]) for key in first}
    if isinstance(first, (tuple, list)):
        return with_members(first, [_concatenated([part[i] for part in parts]) for i in range(len(first))])
    return first


def alike(x: Inputs, other: Inputs) -> bool:
    """Whether two nested inputs contain only tensors and differ at most in their number of examples."""
    if isinstance(x, Tensor) and isinstance(other, Tensor):
        return x.shape[1:] == other.shape[1:] and x.dtype == other.dtype
    if type(x) is not type(other):
        return False
    if isinstance(x, Mapping) and isinstance(other, Mapping):
        return x.keys() == other.keys() and all(alike(value, other[key]) for key, value in x.items())
    if isinstance(x, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(x) == len(other) and all(map(alike, x, other))
    return False


@dataclass(frozen=True)
class InputDtype:
    """The floating types that a network takes as inputs.

    Attributes
    ----------
    default : torch.dtype
        Taken by floating inputs of any other type.
    kept : frozenset of torch.dtype
        Types that inputs keep: those of the network's own weights, as in a bfloat16 network with float32 adapters.
    """

    default: torch.dtype
    kept: frozenset[torch.dtype]

    def of(self, tensor: Tensor) -> torch.dtype:
        """The type that a tensor takes."""
        return tensor.dtype if not tensor.is_floating_point() or tensor.dtype in self.kept else self.default


def to_device(x: Inputs, device: torch.device, dtype: InputDtype | None = None) -> Inputs:
    """Move to a device; floating tensors also take the type of `dtype`, if given."""

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device=device, dtype=tensor.dtype if dtype is None else dtype.of(tensor))

    with torch.inference_mode(False):
        return map_tensors(move, differentiable(x))


def differentiable(x: Inputs) -> Inputs:
    """The same inputs, with copies of inference-mode tensors, which cannot enter an autograd graph."""
    with torch.inference_mode(False):
        return map_tensors(lambda tensor: tensor.clone() if tensor.is_inference() else tensor, x)


def refuse_input_gradients(
    x: Inputs,
    instead: str = "a posterior's latent and latent_moments have gradients in inputs with differentiable=True.",
) -> None:
    """Refuse inputs that require gradients, if these are enabled (UnsupportedError).

    Jacobians have no graph to them, so gradients would be zero. `instead` ends the message: what else a caller can do.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in leaves(x)):
        raise UnsupportedError("inputs that require no gradient", "x.requires_grad=True",
                               f"Pass x.detach(), or call under torch.no_grad(); {instead}")


def check_finite(values: Tensor, what: str, remedy: str, offset: int = 0) -> None:
    """Raise if `values` contain a NaN or an infinity, and name the first such example.

    Raises
    ------
    NonFiniteError
        With the index of the first bad example; `offset` is the index of `values[0]` in the data.
    """
    if not values.is_floating_point():
        return
    # one reduction in the common case: a sum of finite numbers is finite unless it overflows
    if bool(torch.isfinite(values.sum())):
        return
    bad = ~torch.isfinite(values).reshape(len(values), -1).all(dim=1)
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        entry = values[first]
        kind = "NaN" if bool(torch.isnan(entry).any()) else "infinity"
        raise NonFiniteError(f"finite {what}", f"{kind} at example {first + offset}", remedy)


def as_tensor(x: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Convert an array, a table, a column of numbers or nested lists to one tensor.

    Raises
    ------
    DataError
        If entries are masked.
    TypeError, ValueError, RuntimeError
        If `x` cannot be converted.
    """
    if np.ma.is_masked(x):
        raise DataError("arrays without masked entries", f"{np.ma.count_masked(x):,} of {x.size:,} masked",
                        "Impute inputs; mark missing targets as NaN, y.filled(numpy.nan), for a likelihood with "
                        'missing="nan".')
    # torch treats a pandas column as a sequence and looks up its row named 0
    foreign = hasattr(x, "__array__") and not isinstance(x, (Tensor, np.ndarray))
    array = np.array(x) if foreign else x
    if isinstance(array, np.ndarray) and (min(array.strides, default=0) < 0 or not array.dtype.isnative):
        array = array.astype(array.dtype.newbyteorder("="), order="C")  # torch takes neither
    read_only = isinstance(array, np.ndarray) and not array.flags.writeable
    with WITHOUT_TORCH_WARNINGS.entered() if read_only else nullcontext():
        found = to_tensor(array, dtype=dtype)
    if dtype is None and isinstance(x, (list, tuple)) and found.is_floating_point():
        return to_tensor(x, dtype=torch.float64)  # which Python's numbers have; torch took its default
    return found


def as_tensors(x: Any) -> Inputs:
    """Convert arrays, tables and nested lists of numbers to tensors; tuples and dicts of tensors do not change."""
    if isinstance(x, (Tensor, Mapping)) or (isinstance(x, (tuple, list)) and leaves(x)):
        return x
    try:
        return as_tensor(x)
    except DataError:
        raise
    except (TypeError, ValueError, RuntimeError):
        return x
