"""A device without hardware. Its tensors are CPU tensors in a wrapper, and to mix them with others is refused.

Run as a script it prints, as JSON, how far answers on that device are from those on the CPU. A process of its own:
torch takes note of devices once.
"""

from __future__ import annotations

import functools
import json
import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from registry import LIKELIHOODS, fresh, targets
from verbs import VERBS, answers, gap, moved

NAME = "elsewhere"
SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
aten = torch.ops.aten
CROSSING = {aten._to_copy.default, aten.copy_.default}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


class Elsewhere(Tensor):
    """A tensor on that device."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Elsewhere:
        """Wrap a CPU tensor."""
        return Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        return self.inner.tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def numpy(self, **options: Any) -> None:
        raise TypeError("can't convert a tensor of another device to numpy: use Tensor.cpu() first")

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            twin = Elsewhere(self.inner.clone())
            parameter = isinstance(self, nn.Parameter)
            memo[id(self)] = nn.Parameter(twin, self.requires_grad) if parameter else twin
        return memo[id(self)]

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return run(operation, args, kwargs or {})


def unwrapped(value: Any, tensors: list[Tensor]) -> Any:
    """The CPU's tensors in place of those elsewhere; all tensors are added to the list.

    torch's own maps over containers take half of the time here: arguments are plain lists, tuples and mappings.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.inner if isinstance(value, Elsewhere) else value
    if type(value) in (list, tuple):
        return type(value)([unwrapped(part, tensors) for part in value])
    return {key: unwrapped(part, tensors) for key, part in value.items()} if type(value) is dict else value


def run(operation: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Do it on the CPU, wrap what belongs elsewhere, and refuse what CUDA would refuse."""
    tensors: list[Tensor] = []
    inner, options = unwrapped((args, kwargs), tensors)
    there = any(isinstance(tensor, Elsewhere) for tensor in tensors)
    wanted = kwargs.get("device")
    here = [t for t in tensors if not isinstance(t, Elsewhere) and t.ndim]  # numbers may come from the CPU
    whole = all(t.dtype in (torch.int64, torch.bool) for t in here)
    indexed = operation in INDEXING and isinstance(args[0], Elsewhere) and whole
    if there and here and operation not in CROSSING and not indexed:
        raise RuntimeError(f"{operation}: tensors on two devices, {[tuple(t.shape) for t in here]} on the CPU")
    if operation is aten.copy_.default:
        inner[0].copy_(inner[1])
        return args[0]
    out = operation(*inner, **(options if wanted is None else options | {"device": torch.device("cpu")}))
    if not (there if wanted is None else torch.device(wanted).type == NAME):
        return out
    if type(out) is Tensor:
        out = Elsewhere(out)
    else:
        out = tree_map(lambda leaf: Elsewhere(leaf) if isinstance(leaf, Tensor) else leaf, out)
    return out if wanted is not None else handed_in(operation, args, kwargs, out)


@functools.cache
def written_to(operation: Any) -> tuple[tuple[tuple[int, str], ...], tuple[int | None, ...]]:
    """Arguments that an operation writes to, by position and name; and which of them each of its results is."""
    places, sets = [], []
    for position, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            places.append((position, argument.name))
            sets.append(frozenset(argument.alias_info.before_set))
    returned = [r.alias_info for r in operation._schema.returns]
    results = (sets.index(frozenset(r.before_set)) if r is not None and r.is_write else None for r in returned)
    return tuple(places), tuple(results)


def handed_in(operation: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> Any:
    """What an operation writes to is what it returns."""
    places, results = written_to(operation)
    if not places or not results:
        return out
    given = [args[position] if position < len(args) else kwargs.get(name) for position, name in places]
    found = [o if number is None else given[number]
             for number, o in zip(results, [out] if len(results) == 1 else out, strict=True)]
    return found[0] if len(results) == 1 else tuple(found)


class Operations(TorchDispatchMode):
    """Makes tensors there."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch wraps the method below otherwise, which takes a tenth of the time."""
        return False

    def __torch_dispatch__(self, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return run(operation, args, kwargs or {})


class Making(TorchFunctionMode):
    """`torch.tensor` and `Tensor.new_tensor` fill memory behind the dispatcher's back."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        wanted = kwargs.get("device")
        if function in (torch.tensor, torch.as_tensor) and wanted is not None and torch.device(wanted).type == NAME:
            return function(*args, **(kwargs | {"device": "cpu"})).to(wanted)
        if function == SET_DATA and isinstance(args[0], Elsewhere):
            args[0].inner = args[1].inner
        if function is Tensor.new_tensor and isinstance(args[0], Elsewhere):
            return torch.tensor(args[1], dtype=args[0].dtype).to(args[0].device)
        return function(*args, **kwargs)


_Generator = torch.Generator


class Everywhere:
    """Random numbers of that device are the CPU's."""

    def __new__(cls, device: Any = "cpu") -> torch.Generator:
        """A generator of the CPU."""
        return _Generator()


def main() -> None:
    """Compare each verb of each structure on both devices."""
    warnings.simplefilter("ignore")
    _setup_privateuseone_for_python_backend(NAME)
    torch.Generator = Everywhere
    devices = torch.device("cpu"), torch.device(NAME, 0)
    found: dict[str, dict[str, float | str]] = {}
    for name, structure in json.loads(sys.argv[1]):
        case = fresh(name)
        y = targets(LIKELIHOODS["categorical"], case)
        here = answers(case, y, structure, devices[0])
        with Operations(), Making():
            there = answers(case, y, structure, devices[1])
            found[f"{name} {structure}"] = {verb: gap(here[verb], there[verb]) for verb in VERBS}
    ends = {likelihood: moved(likelihood, devices[0]) for likelihood in ("gaussian", "classes")}
    with Operations(), Making():
        moves = {likelihood: gap(end, moved(likelihood, devices[1])) for likelihood, end in ends.items()}
    print(json.dumps({"verbs": found, "moves": moves}))


if __name__ == "__main__":
    main()
