"""The frozen network: outputs with or without a graph, and parameters by name."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Size, Tensor, nn

from ntk_laplace.errors import NetworkError, NTKLaplaceError, is_choice
from ntk_laplace.model.data import Batches, InputDtype, Inputs, map_tensors, num_examples, take
from ntk_laplace.model.network.caller import Caller
from ntk_laplace.model.network.checked_outputs import CheckedOutputs
from ntk_laplace.model.network.choice import ParameterChoice, choose
from ntk_laplace.model.network.copying import compressed_copies, dense_parts, private_copy, require_module
from ntk_laplace.model.network.places import call_with, places_of
from ntk_laplace.model.network.precision import Products, whole_convolutions
from ntk_laplace.model.network.recurrent import unrolled
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.parameter_layout import ParameterLayout
from ntk_laplace.runtime.resources import is_about_memory
from ntk_laplace.runtime.threads import ReadersAndWriters


class Network(CheckedOutputs):
    """A network frozen at its trained weights, as a function of inputs and of the chosen parameters.

    Parameters
    ----------
    module : nn.Module
        Maps a batch of N examples to outputs of shape (N, C) or (N,). It is copied with its weights, its buffers and
        the mode of every submodule.
    parameters : optional
        Which parameters are linearized: None (all that require gradients), "last_layer" (those of the module that is
        registered last), names or module prefixes, or a predicate ``(name, parameter) -> bool``. Parameters with
        ``requires_grad=False`` are always left out.
    output, targets, positions : optional
        Which returned tensor is the output, which key of dict inputs is not passed to the module, and the shape of the
        positions at which each example has outputs: see `Caller`.

    Attributes
    ----------
    module : nn.Module
        The private copy; only the chosen parameters require gradients.
    caller : Caller
        Calls the copy; stores `output` and `targets`.
    names : list of str
        Names of the chosen parameters, in the module's order.
    shapes : ParameterLayout
        Their shapes; converts flat vectors to tensors by name.
    theta : Tensor, (P,)
        Their values as a flat vector, in this order.
    num_outputs : int
        C, known after the first evaluation; `evaluated` says whether there was one.
    before_last : set of str
        The parameters that "last_layer" leaves out; empty for any other choice.
    precision : torch.dtype
        As in `CheckedOutputs`; known after `probe`.
    constant_rows : dict of str to Tensor
        Rows of embeddings that `substituted` leaves alone, found by `probe`.
    follows_values : bool
        Whether outputs follow values that replace the parameters where these are registered, known after `probe`.
    threads : ReadersAndWriters
        A block that puts other values in place of the parameters, or watches the module, is alone (`writing`).

    Raises
    ------
    NetworkError
        If the module cannot be copied, no parameter is left, or a name is unknown.
    """

    follows_values: bool = True
    _follows_gradients: bool | None = None  # None before the first question

    def __init__(
        self, module: nn.Module, parameters: ParameterChoice = None, output: str | int | None = None,
        targets: str | None = None, positions: Size | None = None,
    ) -> None:
        self.module = private_copy(require_module(module))
        caller = Caller(self.module, output, targets, positions)
        chosen = choose(self.module, parameters)
        free = {name for name, parameter in self.module.named_parameters() if parameter.requires_grad}
        self.before_last = free - chosen if is_choice(parameters, ("last_layer",)) else set()
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(name in chosen)
        self._parameters = {n: p for n, p in self.module.named_parameters() if n in chosen}
        self.shapes = ParameterLayout({name: parameter.shape for name, parameter in self._parameters.items()})
        first = next(iter(self._parameters.values()))
        self.device, self.dtype = first.device, first.dtype
        super().__init__(caller, first.dtype)
        own = {p.dtype for p in self.module.parameters() if p.is_floating_point()}
        self.input_dtype = InputDtype(first.dtype, frozenset(own))
        self._channels_last = False
        self.constant_rows: dict[str, Tensor] = {}
        self.threads = ReadersAndWriters()
        # of the caller's network; without them when it is pickled
        self._given = {id(p): (name, weakref.ref(p)) for name, p in module.named_parameters()}

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_given": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        earlier = {"constant_rows": {}, "_given": {}, "input_format": state.pop("_input_format", None),
                   "threads": ReadersAndWriters()}
        vars(self).update(earlier | state)

    @property
    def output(self) -> str | int | None:
        """Which returned tensor is the output; None if the module returns one tensor."""
        return self.caller.output

    @property
    def targets(self) -> str | None:
        """The key of the targets in batches that are mappings; None for pairs."""
        return self.caller.targets

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The chosen parameters of the private copy, by name."""
        return self._parameters

    @property
    def fixed(self) -> list[Tensor]:
        """What the outputs depend on beside the chosen parameters: the others, and saved floating-point buffers."""
        saved = self.module.state_dict()
        found: list[Tensor] = [one for name, one in self.module.named_parameters() if name not in self.shapes]
        found += [buffer for name, buffer in self.module.named_buffers()
                  if name in saved and (buffer.is_floating_point() or buffer.is_complex())]
        return [part for one in found for part in dense_parts(one)]

    @property
    def names(self) -> list[str]:
        """Names of the chosen parameters."""
        return list(self._parameters)

    @property
    def num_parameters(self) -> int:
        """P, the number of chosen parameters."""
        return self.shapes.num_parameters

    @property
    def theta(self) -> Tensor:
        """The chosen parameters, flat, (P,)."""
        with self.threads.reading():
            return self.shapes.flat(self._parameters).detach()

    @property
    def channels_last(self) -> bool:
        """Whether weights of convolutions are channels last: a call that raises with them makes them contiguous."""
        return self._channels_last

    @channels_last.setter
    def channels_last(self, chosen: bool) -> None:
        memory_format = torch.channels_last if chosen else torch.contiguous_format
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            if tensor.ndim == 4:  # module.to(memory_format=...) refuses those of five axes beside them
                tensor.data = tensor.data.to(memory_format=memory_format)
        self._channels_last = chosen

    def __deepcopy__(self, memo: dict[int, Any]) -> Network:
        memo.update(compressed_copies(self.module))
        found = memo[id(self)] = copy.copy(self)
        with self.threads.reading():
            vars(found).update(copy.deepcopy(vars(self), memo))
        return found

    def to(self, device: torch.device) -> Network:
        """The same network on another device; this object if it is already on that device."""
        if device == self.device:
            return self
        moved = copy.deepcopy(self)
        moved.module.to(device)
        moved.device = next(iter(moved._parameters.values())).device
        return moved

    def take_findings(self, other: Network) -> None:
        """Take over what evaluations and `probe` found of the same module at other weights."""
        self.num_outputs, self.scalar, self.input_format = other.num_outputs, other.scalar, other.input_format
        self.precision, self.caller.copies_inputs = other.precision, other.caller.copies_inputs
        self.follows_values, self.constant_rows = other.follows_values, other.constant_rows
        if other.channels_last:
            self.channels_last = True

    def batches(self, data: Any, batch_size: int | None = None) -> Batches:
        """Data as batches for this network: on its device, in its type of inputs, with its key of targets.

        `Batches` are returned unchanged, so that several readers detect a changing source.
        """
        given = isinstance(data, Batches)
        return data if given else Batches(data, batch_size, self.device, self.input_dtype, self.targets)

    def at(self, theta: Tensor) -> Network:
        """A copy whose chosen parameters have the values (P,)."""
        moved = copy.deepcopy(self)
        moved.move_to(theta)
        return moved

    def move_to(self, theta: Tensor) -> None:
        """Give the chosen parameters the values (P,), in new memory: results that share the old one keep it."""
        with torch.no_grad():
            for name, value in self.substituted(self.unflatten(theta)).items():
                parameter = self._parameters[name]
                parameter.data = torch.empty_like(parameter).copy_(value)  # in the same memory format

    @contextmanager
    def with_theta(self, theta: Tensor | None) -> Iterator[None]:
        """Run a block with the chosen parameters at the values (P,); then their own come back, in the same memory.

        None changes nothing.
        """
        if theta is None:
            yield
            return
        with self.threads.writing():
            own, form = {name: parameter.data for name, parameter in self._parameters.items()}, self._channels_last
            try:
                self.move_to(theta)
                yield
            finally:
                for name, parameter in self._parameters.items():
                    parameter.data = own[name]
                if self._channels_last != form:  # a call failed with weights in channels last, and changed the format
                    self.channels_last = self._channels_last

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Split a flat vector (..., P) into tensors by name."""
        return self.shapes.named(vector)

    def arithmetic(self) -> AbstractContextManager:
        """Context of a forward or backward pass: fast 16-bit products everywhere, and all digits of float32 ones."""
        if self.device.type == "cuda":
            return whole_convolutions()
        return Products() if Products.helps(self.device, self.precision) else nullcontext()

    def evaluate(self, x: Inputs, offset: int = 0) -> Tensor:
        """Outputs (N, C) with their autograd graph; see `outputs`."""
        with torch.enable_grad(), unrolled(self.module):
            return self.outputs(self.call, x, offset)

    def evaluate_at(self, values: Mapping[str, Tensor], x: Inputs) -> Tensor:
        """Outputs (N, C) with their graph in `x` and in `values` of the chosen parameters, by name; see `outputs`."""
        with torch.enable_grad(), unrolled(self.module):
            found = self.outputs(lambda x: self.call_at(values, x), x, 0)
        self.require_gradients_followed(x)  # last, for inputs that the network takes
        return found

    def without_grad(self, x: Inputs, offset: int = 0) -> Tensor:
        """Outputs (N, C) without a graph, computed in chunks to bound the memory of activations."""
        return self._in_parts(self.call, x, offset)

    def with_parameters(self, theta: Tensor, x: Inputs) -> Tensor:
        """Outputs (N, C) without a graph, at other values (P,) of the chosen parameters."""
        values = self.values(theta)
        return self._in_parts(lambda part: self.call_at(values, part), x, 0)

    def values(self, theta: Tensor) -> dict[str, Tensor]:
        """Values (P,) of the chosen parameters, by name, in their dtype and each in memory of its own.

        As in a module: views of one vector begin anywhere, and `torch.view_as_complex` takes no odd beginning.
        """
        return {name: value.to(self.dtype, copy=True) for name, value in self.unflatten(theta).items()}

    def _in_parts(self, call: Callable[[Inputs], Tensor], x: Inputs, offset: int) -> Tensor:
        step = tuning.FORWARD_EXAMPLES
        starts = range(0, max(1, num_examples(x)), step)
        with torch.no_grad(), self.arithmetic():
            parts = [x] if len(starts) == 1 else [take(x, slice(start, start + step)) for start in starts]
            found = [self.outputs(call, p, offset + i).detach() for i, p in zip(starts, parts, strict=True)]
        return found[0] if len(found) == 1 else torch.cat(found)

    def call_at(self, values: Mapping[str, Tensor], x: Inputs) -> Tensor:
        """The network's outputs at these values of the chosen parameters, which they must follow (NetworkError)."""
        self.require_values_followed()
        return self.called_with(self.substituted(values), x)

    def called_with(self, values: Mapping[str, Tensor], x: Inputs) -> Tensor:
        """What the private copy returns with these values, by name, where the parameters are registered."""
        named = {f"module.{name}": value for name, value in values.items()}
        with self.threads.writing():
            found: Tensor = call_with(self.caller, self._places, named, (x,))
        return found

    @cached_property
    def _places(self) -> dict[str, list[str]]:
        with self.threads.reading():
            return places_of(self.caller)

    def substituted(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Values of parameters by name, in which rows that torch defines as constants are the network's own."""
        found = dict(values)
        for name, rows in self.constant_rows.items():
            if name in found:
                own = self._parameters[name].detach().to(found[name])
                found[name] = torch.where(rows.to(own.device), own, found[name])
        return found

    def require_values_followed(self) -> None:
        """Refuse a network that reads its parameters elsewhere than where they are registered (NetworkError)."""
        if not self.follows_values:
            raise NetworkError("a network that reads its parameters where they are registered, for other weights",
                               "one whose outputs do not follow values that replace them",
                               "Register layers as attributes or in nn.ModuleList, not in a plain list.")

    def require_gradients_followed(self, x: Inputs) -> None:
        """Refuse gradients at other weights of a network that they do not follow (NetworkError)."""
        if not self.follows_gradients(x):
            raise NetworkError("a network whose backward pass reads the weights of its forward pass, for gradients at "
                               "other weights", "one whose backward pass reads its own, as with torch.utils.checkpoint",
                               "Turn gradient checkpointing off; in a torch.autograd.Function use save_for_backward.")

    def follows_gradients(self, x: Inputs) -> bool:
        """Whether gradients at values in place of the parameters read these alone, and not the network's own weights.

        A backward pass may find those, as checkpoints do that run parts of the network again. Gradients of two examples
        are computed twice, the second time with NaN as the network's own weights. The answer is kept, unless these
        examples have no gradient and show nothing.
        """
        if self._follows_gradients is None:
            few = map_tensors(torch.Tensor.detach, take(x, slice(0, 2)))
            self._follows_gradients = self._reads_values_alone(few)
        return self._follows_gradients is not False

    def _reads_values_alone(self, x: Inputs) -> bool | None:
        """As `follows_gradients`; None if the outputs have no gradient. They may be infinite."""
        values = {name: value.requires_grad_() for name, value in self.values(self.theta).items()}
        inputs = list(values.values())
        with torch.enable_grad(), self.arithmetic(), unrolled(self.module):
            out = self.call_at(values, x)
            if not out.requires_grad:
                return None
            try:
                right = _gradients(out, inputs)
                with self.with_theta(self.theta.new_tensor(torch.nan).expand(self.num_parameters)):
                    found = _gradients(self.call_at(values, x), inputs)
            except (RuntimeError, NTKLaplaceError) as error:  # such as that of a reentrant checkpoint
                if is_about_memory(error):
                    raise
                return False
        if not all(map(torch.equal, map(torch.isfinite, found), map(torch.isfinite, right))):
            return False
        scale, apart = _norm(right), _norm([one - other for one, other in zip(found, right, strict=True)])
        return apart <= torch.finfo(self.precision).eps ** 0.5 * scale if scale else None

    def read_from_caller(self, parameters: Iterable[Tensor]) -> str | None:
        """The name of the first of these that is a parameter of the caller's network itself, not of the copy."""
        for parameter in parameters:
            name, known = self._given.get(id(parameter), ("", None))
            if known is not None and known() is parameter:
                return name
        return None

    def call(self, x: Inputs) -> Tensor:
        """What the private copy returns; its weights become contiguous if it needs them so."""
        try:
            with self.threads.reading():
                return self.caller(x)
        except RuntimeError:
            if not self._channels_last:
                raise
        with self.threads.writing():
            self.channels_last = False
            try:
                return self.caller(x)
            except RuntimeError:
                self.channels_last = True  # the memory format was not the cause
                raise


def _gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Of the sum of the outputs with different factors."""
    factors = torch.linspace(1.0, 2.0, out.numel(), dtype=out.dtype, device=out.device).view_as(out)
    found = torch.autograd.grad(out, inputs, factors, allow_unused=True, materialize_grads=True)
    return [each.to_dense() for each in found]


def _norm(parts: list[Tensor]) -> float:
    """Of all together, without what is not finite."""
    return float(torch.stack([part.nan_to_num(0.0, 0.0, 0.0).double().norm() for part in parts]).norm())
