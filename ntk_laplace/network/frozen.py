"""The network behind the door: outputs with or without a graph, parameters by name, probes of good conduct."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from ntk_laplace.data import (
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
from ntk_laplace.errors import DataError, MixedExamplesError, NetworkError, NonDeterministicError, NTKLaplaceError
from ntk_laplace.network.caller import Caller
from ntk_laplace.network.choice import ParameterChoice, choose
from ntk_laplace.network.copying import private_copy, require_module
from ntk_laplace.network.head import Head
from ntk_laplace.network.precision import DtypesSeen, Products, computation_dtype
from ntk_laplace.resources import is_about_memory

__all__ = ["Network", "preserved_rng"]

_AT_A_TIME = 2048  # examples in one forward pass whose graph is not wanted
_FIRST = 4  # examples that are evaluated together, then every other one of them alone
_EVAL = "Call network.eval() before the fit (and keep dropout off)."


@contextmanager
def preserved_rng(device: torch.device) -> Iterator[None]:
    """Run a block and put the random state of the CPU, and of `device`, back as it was."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield


class Network:
    """A network frozen at its trained weights, as a function of inputs and of chosen parameters.

    Parameters
    ----------
    module : nn.Module
        Maps a batch of N examples to outputs of shape (N, C) or (N,). Copied, with its weights, buffers and the
        mode of every submodule.
    parameters : optional
        Which parameters are linearized: None (all that require gradients), "last_layer" (those of the last module
        that has some), names or module prefixes, or a predicate ``(name, parameter) -> bool``. Parameters with
        ``requires_grad=False`` are left out in any case.
    output, targets : optional
        Which tensor of what the module returns, and which key of dict inputs it is not given: see `Caller`.

    Attributes
    ----------
    module : nn.Module
        The private copy; only the chosen parameters require gradients.
    caller : Caller
        How it is called; holds `output` and `targets`.
    names : list of str
        Names of the chosen parameters, in the module's order.
    shapes : dict of str to torch.Size
        Their shapes.
    theta : Tensor, (P,)
        Their values, flat, in this order.
    num_outputs : int or None
        C, known after the first evaluation.
    scalar : bool
        Whether the module returns shape (N,).
    precision : torch.dtype
        The coarsest floating type that outputs are computed in, known after `probe`; what is compared with autograd
        is compared up to the rounding of this type.

    Raises
    ------
    NetworkError
        If the module cannot be copied, or no parameter is left, or a name is unknown.
    """

    def __init__(
        self, module: nn.Module, parameters: ParameterChoice = None, output: str | int | None = None,
        targets: str | None = None,
    ) -> None:  # fmt: skip
        self.module = private_copy(require_module(module))
        self.caller = Caller(self.module, output, targets)
        chosen = choose(self.module, parameters)
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(name in chosen)
        self._parameters = {n: p for n, p in self.module.named_parameters() if n in chosen}
        first = next(iter(self._parameters.values()))
        self.device, self.dtype = first.device, first.dtype
        self.precision = first.dtype
        own = {p.dtype for p in self.module.parameters() if p.is_floating_point()}
        self.input_dtype = InputDtype(first.dtype, frozenset(own))
        self.num_outputs: int | None = None
        self.scalar = False
        self._input_format: Inputs | None = None  # of inputs that it took
        self._channels_last = False

    @property
    def output(self) -> str | int | None:
        """Which tensor of what the module returns; None if it returns one."""
        return self.caller.output

    @property
    def targets(self) -> str | None:
        """The key of the targets in batches that are one mapping, if they are."""
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
    def shapes(self) -> dict[str, torch.Size]:
        """Shapes of the chosen parameters."""
        return {name: parameter.shape for name, parameter in self._parameters.items()}

    @property
    def num_parameters(self) -> int:
        """P, the number of chosen parameters."""
        return sum(parameter.numel() for parameter in self._parameters.values())

    @property
    def theta(self) -> Tensor:
        """The chosen parameters, flat, (P,)."""
        return torch.cat([parameter.detach().flatten() for parameter in self._parameters.values()])

    @property
    def input_format(self) -> Inputs | None:
        """Keys, shapes and types of inputs that it took, without an example; None as long as it took none."""
        return self._input_format

    @input_format.setter
    def input_format(self, form: Inputs | None) -> None:
        self._input_format = form

    def to(self, device: torch.device) -> Network:
        """The same network on another device; itself if it is there."""
        if device == self.device:
            return self
        moved = copy.deepcopy(self)
        moved.module.to(device)
        moved.device = next(iter(moved._parameters.values())).device
        return moved

    def at(self, theta: Tensor) -> Network:
        """A copy whose chosen parameters have the values (P,)."""
        moved = copy.deepcopy(self)
        with torch.no_grad():
            for name, value in moved.unflatten(theta).items():
                moved._parameters[name].copy_(value)
        return moved

    def slices(self) -> dict[str, slice]:
        """Where each chosen parameter lies in a flat vector of length P."""
        found, start = {}, 0
        for name, parameter in self._parameters.items():
            found[name] = slice(start, start + parameter.numel())
            start += parameter.numel()
        return found

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """A flat vector (..., P) as tensors by name."""
        shapes = self.shapes
        return {n: vector[..., s].reshape((*vector.shape[:-1], *shapes[n])) for n, s in self.slices().items()}

    def arithmetic(self) -> AbstractContextManager:
        """What a pass runs in: products of 16-bit types are fast in it on every processor."""
        return Products() if Products.helps(self.device, self.precision) else nullcontext()

    def evaluate(self, x: Inputs, offset: int = 0) -> Tensor:
        """Outputs (N, C) with their autograd graph; `offset` is the index of the first example, for messages.

        Raises
        ------
        DataError
            If the network fails on these inputs.
        NetworkError
            If the outputs are not a floating tensor of shape (N, C) or (N,), with one C in all batches, or none are
            found under `output`.
        NonFiniteError
            If an output is NaN or infinite.
        """
        with torch.enable_grad():
            return self._outputs(self._call, x, offset)

    def without_grad(self, x: Inputs, offset: int = 0) -> Tensor:
        """Outputs (N, C) without a graph, so many examples at a time that activations stay small."""
        return self._in_parts(self._call, x, offset)

    def independent_of_batches(self, parts: Sequence[Inputs]) -> bool:
        """Whether examples give the same outputs among those of other batches as among their own.

        Of each batch a pair is looked at: a network that takes its way by what a whole batch has in common shows then.
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
        """Outputs (N, C) at other values (P,) of the chosen parameters, as `without_grad`."""
        values = {f"module.{n}": v.to(self.dtype) for n, v in self.unflatten(theta).items()}
        return self._in_parts(lambda part: torch.func.functional_call(self.caller, values, (part,)), x, 0)

    def varying(self, x: Inputs, offset: int = 0) -> Callable[[Tensor], Tensor]:
        """Outputs (N, C) at `x` as a function of the chosen parameters' values (P,), as `with_parameters`.

        Where all of these parameters belong to one module whose outputs are the network's, what comes before that
        module is evaluated once. The first values are given to the whole network too: where it does not agree, as
        where it uses a parameter elsewhere as well, the whole network is evaluated for all of them.
        """
        with torch.inference_mode(False), torch.no_grad():
            head = Head.of(self.module, self.names, lambda: self._outputs(self._call, x, offset))
        tried = False

        def outputs(theta: Tensor) -> Tensor:
            nonlocal head, tried
            if head is None:
                return self.with_parameters(theta, x)
            with torch.inference_mode(False), torch.no_grad(), self.caller.autocast.entered(), self.arithmetic():
                values = {name: value.to(self.dtype) for name, value in self.unflatten(theta).items()}
                found = self._outputs(lambda _: head(values), x, offset)
                if tried:
                    return found
                tried, whole = True, self.with_parameters(theta, x)
                head = head if _gap(found, whole) <= self._tolerance(whole) else None
            return whole

        return outputs

    def _in_parts(self, call: Callable[[Inputs], Tensor], x: Inputs, offset: int) -> Tensor:
        starts = range(0, max(1, num_examples(x)), _AT_A_TIME)
        with torch.no_grad(), self.arithmetic():
            parts = [x] if len(starts) == 1 else [take(x, slice(start, start + _AT_A_TIME)) for start in starts]
            found = [self._outputs(call, p, offset + i).detach() for i, p in zip(starts, parts, strict=True)]
        return found[0] if len(found) == 1 else torch.cat(found)

    def probe(self, x: Inputs) -> Tensor:
        """Hold the network to what linearization needs, on the first examples of `x`, and lay its weights out.

        Two of the first four examples, evaluated by themselves, must give those rows of the four's outputs, and buffers
        must not move. Convolution weights are laid out channels last where that is faster and the network bears it:
        backward passes of float32 convolutions on a CPU take half the time then. A network whose code asks for
        contiguous activations (``x.view(n, -1)``) raises; it stays as it was.

        Returns
        -------
        Tensor, (2, C)
            Outputs of the two with their autograd graph, in the layout that was chosen.

        Raises
        ------
        NonDeterministicError, MixedExamplesError
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
        self.module.to(memory_format=memory_format)
        self._channels_last = memory_format is torch.channels_last

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
                self._to_format(torch.channels_last)  # that was not it
                raise

    def _probe_few(self, x: Inputs) -> Tensor:
        before = {name: b.clone() for name, b in self.module.named_buffers()}
        with DtypesSeen() as seen:
            first = self.without_grad(x)
        self.precision = computation_dtype(self.module, first, seen.found)
        if self._channels_last_is_faster():
            self._to_format(torch.channels_last)
        with self.arithmetic():  # so that the graph is that of later passes
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
            # the other examples matter, or the same batch twice would not agree either
            again = 0.0 if moved else _gap(first, self.without_grad(x))
            if again > tolerance:
                raise NonDeterministicError("a deterministic network",
                                            f"outputs that differ by {again:.2g} between two evaluations of the same "
                                            "batch", _EVAL)
            got = "outputs that change with the other examples of the batch"
            got = f"batch statistics in use (buffers {', '.join(moved[:3])} move)" if moved else got
            raise MixedExamplesError("a network whose outputs depend on their own example alone", got, _EVAL)
        if moved:
            raise NetworkError("a network that leaves its buffers alone",
                               f"buffers that a forward pass changes: {', '.join(moved[:3])}", _EVAL)
        return alone

    def _channels_last_is_faster(self) -> bool:
        spatial = any(isinstance(layer, nn.Conv2d) for layer in self.module.modules())
        return spatial and self.device.type == "cpu" and self.dtype == torch.float32

    def _tolerance(self, outputs: Tensor) -> float:
        """How far outputs of one example may be apart in two batches."""
        scale = float(outputs.abs().max()) or 1.0
        return scale * {torch.float64: 1e-9, torch.float32: 1e-4}.get(self.precision, 3e-2)

    def _outputs(self, call: Callable[[Inputs], Tensor], x: Inputs, offset: int) -> Tensor:
        """What the network gives, (N, C); what it fails on is told as bad inputs, or handed on if memory ran out."""
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
        if self.num_outputs is None:
            self.num_outputs, self.scalar = c, out.ndim == 1
        if c != self.num_outputs:
            raise self._wrong_outputs(f"({n}, {self.num_outputs}), as before", f"{tuple(out.shape)}", x)
        out = out.unsqueeze(1) if out.ndim == 1 else out
        check_finite(out.detach(), "network outputs", "Look at that input, or at diverged weights.", offset)
        return out

    def _wrong_outputs(self, expected: str, got: str, x: Inputs) -> NTKLaplaceError:
        """Inputs of another form than those that went well are to blame, else the network."""
        if self._input_format is None or same_input_format(x, self._input_format):
            return NetworkError(f"network outputs of shape {expected}", got,
                                "Wrap the network in a module that returns one row of outputs per example.")
        known = describe_inputs(self._input_format, "n")
        return DataError(f"network outputs of shape {expected}, from inputs such as {known}",
                         f"{got} from {describe_inputs(x)}", input_remedy(x, self._input_format))


def _first_line(cause: Exception) -> str:
    return (str(cause).strip().splitlines() or ["no message"])[0].rstrip(".")


def _gap(one: Tensor, other: Tensor) -> float:
    return float((one.detach() - other.detach()).abs().max())


def _every_other(x: Inputs) -> Inputs:
    return take(x, torch.arange(0, num_examples(x), 2))  # not strided: the graph is that of later batches
