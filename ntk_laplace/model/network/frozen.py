"""The frozen network: outputs with or without a graph, parameters by name, and checks before linearization."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Size, Tensor, nn

from ntk_laplace.errors import DataError, MixedExamplesError, NetworkError, NonDeterministicError, NTKLaplaceError
from ntk_laplace.model.data import (
    InputDtype,
    Inputs,
    check_finite,
    concatenate,
    describe_inputs,
    format_of,
    input_remedy,
    num_examples,
    same_input_format,
    take,
)
from ntk_laplace.model.network.caller import Caller
from ntk_laplace.model.network.choice import ParameterChoice, choose
from ntk_laplace.model.network.copying import private_copy, require_module
from ntk_laplace.model.network.head import Head
from ntk_laplace.model.network.precision import DtypesSeen, Products, computation_dtype, whole_convolutions
from ntk_laplace.model.network.recurrent import unrolled
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.parameter_layout import ParameterLayout
from ntk_laplace.runtime.resources import is_about_memory

__all__ = ["Network", "preserved_rng", "seeded_rng"]

_FIRST = 4  # examples that are evaluated together; every other one is then evaluated again without the rest
_EVAL = "Call network.eval() before the fit (and keep dropout off)."


@contextmanager
def preserved_rng(device: torch.device) -> Iterator[None]:
    """Run a block, then restore the random state of the CPU and of `device`."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield


@contextmanager
def seeded_rng(device: torch.device, seed: int) -> Iterator[None]:
    """Run a block from this seed on the CPU and on `device`, then restore their random state.

    `torch.manual_seed` moves the state of every accelerator, and nothing would restore that of the others. Before an
    accelerator is used, each call of it also adds an entry to a list that torch keeps, with the stack as text.
    """
    with preserved_rng(device):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


class Network:
    """A network frozen at its trained weights, as a function of inputs and of the chosen parameters.

    Parameters
    ----------
    module : nn.Module
        Maps a batch of N examples to outputs of shape (N, C) or (N,). It is copied with its weights, its buffers and
        the mode of every submodule.
    parameters : optional
        Which parameters are linearized: None (all that require gradients), "last_layer" (those of the last module
        that has any), names or module prefixes, or a predicate ``(name, parameter) -> bool``. Parameters with
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
    scalar : bool
        Whether the module returns shape (N,).
    precision : torch.dtype
        The coarsest floating type that outputs are computed in, known after `probe`. Its rounding is the tolerance of
        comparisons with autograd.

    Raises
    ------
    NetworkError
        If the module cannot be copied, no parameter is left, or a name is unknown.
    """

    def __init__(
        self, module: nn.Module, parameters: ParameterChoice = None, output: str | int | None = None,
        targets: str | None = None, positions: Size | None = None,
    ) -> None:  # fmt: skip
        self.module = private_copy(require_module(module))
        self.caller = Caller(self.module, output, targets, positions)
        chosen = choose(self.module, parameters)
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(name in chosen)
        self._parameters = {n: p for n, p in self.module.named_parameters() if n in chosen}
        self.shapes = ParameterLayout({name: parameter.shape for name, parameter in self._parameters.items()})
        first = next(iter(self._parameters.values()))
        self.device, self.dtype = first.device, first.dtype
        self.precision = first.dtype
        own = {p.dtype for p in self.module.parameters() if p.is_floating_point()}
        self.input_dtype = InputDtype(first.dtype, frozenset(own))
        self._num_outputs: int | None = None
        self.scalar = False
        self._input_format: Inputs | None = None  # of inputs that were evaluated successfully
        self._channels_last = False

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
    def names(self) -> list[str]:
        """Names of the chosen parameters."""
        return list(self._parameters)

    @property
    def evaluated(self) -> bool:
        """Whether the number of outputs is known."""
        return self._num_outputs is not None

    @property
    def num_outputs(self) -> int:
        """C, the number of outputs.

        Raises
        ------
        NetworkError
            Before the first evaluation.
        """
        if self._num_outputs is None:
            raise NetworkError("a network whose number of outputs is known", "one that was not evaluated",
                               "Evaluate it on one input first.")
        return self._num_outputs

    @num_outputs.setter
    def num_outputs(self, number: int) -> None:
        self._num_outputs = number

    @property
    def num_parameters(self) -> int:
        """P, the number of chosen parameters."""
        return self.shapes.num_parameters

    @property
    def theta(self) -> Tensor:
        """The chosen parameters, flat, (P,)."""
        return self.shapes.flat(self._parameters).detach()

    @property
    def input_format(self) -> Inputs | None:
        """Keys, shapes and types of evaluated inputs, with no examples; None before the first evaluation."""
        return self._input_format

    @input_format.setter
    def input_format(self, form: Inputs | None) -> None:
        self._input_format = form

    def to(self, device: torch.device) -> Network:
        """The same network on another device; this object if it is already on that device."""
        if device == self.device:
            return self
        moved = copy.deepcopy(self)
        moved.module.to(device)
        moved.device = next(iter(moved._parameters.values())).device
        return moved

    def at(self, theta: Tensor) -> Network:
        """A copy whose chosen parameters have the values (P,)."""
        moved = copy.deepcopy(self)
        moved.move_to(theta)
        return moved

    def move_to(self, theta: Tensor) -> None:
        """Give the chosen parameters the values (P,), in new memory: results that share the old one keep it."""
        with torch.no_grad():
            for name, value in self.unflatten(theta).items():
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
        own, form = {name: parameter.data for name, parameter in self._parameters.items()}, self._channels_last
        try:
            self.move_to(theta)
            yield
        finally:
            for name, parameter in self._parameters.items():
                parameter.data = own[name]
            if self._channels_last != form:  # a call failed with weights in channels last, and changed the format
                self._to_format(torch.channels_last if self._channels_last else torch.contiguous_format)

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Split a flat vector (..., P) into tensors by name."""
        return self.shapes.named(vector)

    def arithmetic(self) -> AbstractContextManager:
        """Context of a forward or backward pass: fast 16-bit products everywhere, and all digits of float32 ones."""
        if self.device.type == "cuda":
            return whole_convolutions()
        return Products() if Products.helps(self.device, self.precision) else nullcontext()

    def evaluate(self, x: Inputs, offset: int = 0) -> Tensor:
        """Outputs (N, C) with their autograd graph; `offset` is the index of the first example, for messages.

        Raises
        ------
        DataError
            If the network fails on these inputs.
        NetworkError
            If the outputs are not a floating tensor of shape (N, C) or (N,), C differs between batches, or there is no
            tensor under `output`.
        NonFiniteError
            If an output is NaN or infinite.
        """
        with torch.enable_grad(), unrolled(self.module):
            return self._outputs(self._call, x, offset)

    def evaluate_at(self, values: Mapping[str, Tensor], x: Inputs) -> Tensor:
        """Outputs (N, C) with their graph in `x` and in `values` of the chosen parameters, by name; see `evaluate`."""
        with torch.enable_grad(), unrolled(self.module):
            return self._outputs(lambda x: self._call_at(values, x), x, 0)

    def without_grad(self, x: Inputs, offset: int = 0) -> Tensor:
        """Outputs (N, C) without a graph, computed in chunks to bound the memory of activations."""
        return self._in_parts(self._call, x, offset)

    def independent_of_batches(self, parts: Sequence[Inputs]) -> bool:
        """Whether examples give the same outputs when they are batched with examples of other batches.

        The check uses two examples of each batch. It detects a network whose control flow depends on a property
        shared by the whole batch.
        """
        pairs = [take(x, torch.tensor([0, num_examples(x) - 1])) for x in parts]
        try:
            with preserved_rng(self.device):
                apart = torch.cat([self.without_grad(pair) for pair in pairs])
                whole = self.without_grad(concatenate(pairs))
        except NTKLaplaceError:
            return False
        return _gap(apart, whole) <= self._tolerance(apart)

    def with_parameters(self, theta: Tensor, x: Inputs) -> Tensor:
        """Outputs (N, C) without a graph, at other values (P,) of the chosen parameters."""
        values = self._values(theta)
        return self._in_parts(lambda part: self._call_at(values, part), x, 0)

    def varying(self, x: Inputs, offset: int = 0) -> Callable[[Tensor], Tensor]:
        """Outputs (N, C) at `x` as a function of the chosen parameters' values (P,), as `with_parameters`.

        If all of these parameters belong to one module whose outputs are the network's, the layers before that module
        are evaluated once. The first values are also evaluated with the whole network. If the two disagree, because
        the network uses a parameter elsewhere for example, the whole network is evaluated every time.
        """
        with torch.inference_mode(False), torch.no_grad():
            head = Head.of(self.module, self.names, lambda: self._outputs(self._call, x, offset))
        tried = False

        def outputs(theta: Tensor) -> Tensor:
            nonlocal head, tried
            if (known := head) is None:
                return self.with_parameters(theta, x)
            with torch.inference_mode(False), torch.no_grad(), self.caller.autocast.entered(), self.arithmetic():
                values = self._values(theta)
                found = self._outputs(lambda _: known(values), x, offset)
                if tried:
                    return found
                tried, whole = True, self.with_parameters(theta, x)
                head = known if _gap(found, whole) <= self._tolerance(whole) else None
            return whole

        return outputs

    def linearized(self, x: Inputs, offset: int = 0) -> Callable[[Tensor], Tensor]:
        """Outputs (N, C) at `x` of the network linearized at θ*, as a function of θ (P,): f + J(θ-θ*).

        Each is one pass of forward-mode differentiation; no rows of J are stored.
        """
        own = {name: parameter.detach() for name, parameter in self._parameters.items()}

        def outputs(theta: Tensor) -> Tensor:
            step = self._values(theta - self.theta)

            def moved(x: Inputs) -> Tensor:
                found = torch.func.jvp(lambda values: self._call_at(values, x), (own,), (step,))
                return found[0] + found[1]

            with torch.inference_mode(False), torch.no_grad(), self.arithmetic():
                return self._outputs(moved, x, offset)

        return outputs

    def linear_at(self, x: Inputs) -> bool:
        """Whether the outputs at `x` are linear in all parameters, f(θ* + d) = f + J d, tried at one random d.

        False if parameters of the module were not chosen: what depends on them may be nonlinear in them.
        """
        if self.num_parameters < sum(parameter.numel() for parameter in self.module.parameters()):
            return False
        own = self.theta
        draw = torch.randn(len(own), generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(own)
        moved = own + (1.0 + own.abs()) * draw
        try:
            with preserved_rng(self.device), torch.inference_mode(False):
                found, linear = self.with_parameters(moved, x), self.linearized(x)(moved)
        except NTKLaplaceError:  # no forward-mode derivative, or outputs that overflow
            return False
        return _gap(found, linear) <= self._tolerance(found)

    def _values(self, theta: Tensor) -> dict[str, Tensor]:
        """Values (P,) of the chosen parameters, by name and in their dtype."""
        return {name: value.to(self.dtype) for name, value in self.unflatten(theta).items()}

    def _in_parts(self, call: Callable[[Inputs], Tensor], x: Inputs, offset: int) -> Tensor:
        step = tuning.FORWARD_EXAMPLES
        starts = range(0, max(1, num_examples(x)), step)
        with torch.no_grad(), self.arithmetic():
            parts = [x] if len(starts) == 1 else [take(x, slice(start, start + step)) for start in starts]
            found = [self._outputs(call, p, offset + i).detach() for i, p in zip(starts, parts, strict=True)]
        return found[0] if len(found) == 1 else torch.cat(found)

    def probe(self, x: Inputs) -> Tensor:
        """Check the network on the first examples of `x`, and choose the memory format of its weights.

        Two of the first four examples, evaluated alone, must give the same outputs as in the batch of four, and the
        buffers must not change. Convolution weights become channels last where this is faster and the network supports
        it: backward passes of float32 convolutions on a CPU then take half the time. A network that requires
        contiguous activations (``x.view(n, -1)``) raises with channels last; its weights then stay contiguous.

        Returns
        -------
        Tensor, (2, C)
            Outputs of the two examples with their autograd graph, in the chosen memory format.

        Raises
        ------
        NonDeterministicError, MixedExamplesError
        NetworkError
            If buffers change, or outputs have no graph.
        """
        n = num_examples(x)
        if n == 0:
            raise DataError("at least one example", "an empty batch", "Pass one or more inputs.")
        x = take(x, slice(0, _FIRST) if n >= _FIRST else torch.arange(_FIRST).clamp_max(n - 1))
        with preserved_rng(self.device):
            found = self._probe_few(x)
        self._input_format = format_of(x)
        return found

    def _to_format(self, memory_format: torch.memory_format) -> None:
        self.module.to(memory_format=memory_format)  # type: ignore[call-overload]  # missing in torch's stubs
        self._channels_last = memory_format is torch.channels_last

    def _call_at(self, values: Mapping[str, Tensor], x: Inputs) -> Tensor:
        """The network's outputs at these values of the chosen parameters, by name."""
        named = {f"module.{name}": value for name, value in values.items()}
        found: Tensor = torch.func.functional_call(self.caller, named, (x,))
        return found

    def _call(self, x: Inputs) -> Tensor:
        try:
            return self.caller(x)
        except RuntimeError:
            if not self._channels_last:
                raise
            self._to_format(torch.contiguous_format)
            try:
                return self.caller(x)
            except RuntimeError:
                self._to_format(torch.channels_last)  # the memory format was not the cause
                raise

    def _probe_few(self, x: Inputs) -> Tensor:
        before = {name: b.clone() for name, b in self.module.named_buffers()}
        with DtypesSeen() as seen:
            first = self.without_grad(x)
        self.precision = computation_dtype(self.module, first, seen.found)
        if self._channels_last_is_faster():
            self._to_format(torch.channels_last)
        with self.arithmetic():  # to get the same graph as later passes
            alone = self.evaluate(_every_other(x))  # back to contiguous if that raises
        self.precision = computation_dtype(self.module, alone, seen.found)
        tolerance = self._tolerance(first)
        if self._channels_last and _gap(alone, first[::2]) > tolerance:
            self._to_format(torch.contiguous_format)
            alone = self.evaluate(_every_other(x))
        moved = [m for m, b in self.module.named_buffers() if not torch.equal(b, before[m])]
        with torch.no_grad():
            for name in moved:
                self.module.get_buffer(name).copy_(before[name])
        if _gap(alone, first[::2]) > tolerance:
            # either the other examples matter, or the same batch gives other outputs the second time
            again = 0.0 if moved else _gap(first, self.without_grad(x))
            if again > tolerance:
                raise NonDeterministicError("a deterministic network",
                                            f"outputs that differ by {again:.2g} between two evaluations of the same "
                                            "batch", _EVAL)
            got = "outputs that change with the other examples of the batch"
            got = f"batch statistics in use (buffers {', '.join(moved[:3])} move)" if moved else got
            raise MixedExamplesError("a network whose outputs depend on their own example alone", got, _EVAL)
        if moved:
            raise NetworkError("a network that does not change its buffers",
                               f"buffers that a forward pass changes: {', '.join(moved[:3])}", _EVAL)
        if not alone.requires_grad:
            raise NetworkError("outputs that autograd can follow to the chosen parameters", "outputs without a graph",
                               "Remove torch.no_grad(), .detach() and .numpy() from forward(), or choose others by "
                               "parameters=.")  # fmt: skip
        return alone

    def _channels_last_is_faster(self) -> bool:
        layers = [layer for layer in self.module.modules() if isinstance(layer, nn.Conv2d)]
        # the weight gradient of a strided 1 x 1 convolution in channels last writes past its buffer on a CPU with AVX2
        # and no AVX-512 (torch 2.13)
        strided = any(set(layer.kernel_size) == {1} and max(layer.stride) > 1 for layer in layers)
        return bool(layers) and not strided and self.device.type == "cpu" and self.dtype == torch.float32

    def _tolerance(self, outputs: Tensor) -> float:
        """Largest allowed difference of one example's outputs between two batches."""
        scale = float(outputs.abs().max()) or 1.0
        return scale * {torch.float64: 1e-9, torch.float32: 1e-4}.get(self.precision, 3e-2)

    def _outputs(self, call: Callable[[Inputs], Tensor], x: Inputs, offset: int) -> Tensor:
        """Network outputs (N, C). Exceptions become DataError; out-of-memory errors are re-raised."""
        n = num_examples(x)
        try:
            out = call(x)
        except Exception as cause:
            if isinstance(cause, NTKLaplaceError) or is_about_memory(cause):
                raise
            like = "" if self._input_format is None else f", such as {describe_inputs(self._input_format, 'n')}"
            where = f" in the batch from example {offset:,} on" if offset else ""
            remedy = (self._input_format is None and self.caller.remedy(x)) or input_remedy(x, self._input_format)
            got = f"{describe_inputs(x)}{where}, which raise {type(cause).__name__}: {_first_line(cause)}"
            raise DataError(f"inputs that the network takes{like}", got, remedy) from cause
        if not out.is_floating_point() or out.ndim not in (1, 2) or len(out) != n:
            raise self._wrong_outputs(f"({n}, C) or ({n},), floating point", f"{tuple(out.shape)} ({out.dtype})", x)
        c = out.shape[1] if out.ndim == 2 else 1
        if c == 0:
            raise self._wrong_outputs(f"({n}, C), C at least 1", f"{tuple(out.shape)}", x)
        if not self.evaluated:
            self.num_outputs, self.scalar = c, out.ndim == 1
        if c != self.num_outputs:
            raise self._wrong_outputs(f"({n}, {self.num_outputs}), as before", f"{tuple(out.shape)}", x)
        out = out.unsqueeze(1) if out.ndim == 1 else out
        check_finite(out.detach(), "network outputs", "Look at that input, or at diverged weights.", offset)
        return out

    def _wrong_outputs(self, expected: str, got: str, x: Inputs) -> NTKLaplaceError:
        """A DataError if the format differs from that of successful inputs, else a NetworkError."""
        if self._input_format is None or same_input_format(x, self._input_format):
            return NetworkError(f"network outputs of shape {expected}", got,
                                "Wrap the network in a module that returns one row of outputs per example; for outputs "
                                "at pixels or tokens, use the likelihood Everywhere(likelihood).")
        known = describe_inputs(self._input_format, "n")
        return DataError(f"network outputs of shape {expected}, from inputs such as {known}",
                         f"{got} from {describe_inputs(x)}", input_remedy(x, self._input_format))


def _first_line(cause: Exception) -> str:
    return (str(cause).strip().splitlines() or ["no message"])[0].rstrip(".")


def _gap(one: Tensor, other: Tensor) -> float:
    return float((one.detach() - other.detach()).abs().max())


def _every_other(x: Inputs) -> Inputs:
    return take(x, torch.arange(0, num_examples(x), 2))  # indexed, not strided, to get the same graph as later batches
