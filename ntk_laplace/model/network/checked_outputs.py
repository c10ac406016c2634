"""What is asked of a network's outputs: their shape, their number, finite values, and the same of every batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ntk_laplace.errors import DataError, NetworkError, NTKLaplaceError, first_line
from ntk_laplace.model.data import (
    Inputs,
    check_finite,
    describe_inputs,
    input_remedy,
    num_examples,
    same_input_format,
)
from ntk_laplace.model.network.caller import Caller
from ntk_laplace.runtime.resources import is_about_memory


class CheckedOutputs:
    """Outputs of a network's calls, each checked against those of earlier calls.

    Attributes
    ----------
    caller : Caller
        Calls the network.
    precision : torch.dtype
        The coarsest floating type that outputs are computed in. Its rounding is the tolerance of comparisons.
    scalar : bool
        Whether the module returns shape (N,).
    input_format : tensor, tuple or dict of tensors, or None
        Keys, shapes and types of inputs that were evaluated, with no examples; None before the first evaluation.
    """

    def __init__(self, caller: Caller, precision: torch.dtype) -> None:
        self.caller, self.precision = caller, precision
        self._num_outputs: int | None = None
        self.scalar = False
        self.input_format: Inputs | None = None

    @property
    def evaluated(self) -> bool:
        """Whether the number of outputs is known."""
        return self._num_outputs is not None

    @property
    def num_outputs(self) -> int:
        """C, the number of outputs; known from the first evaluation on (NetworkError)."""
        if self._num_outputs is None:
            raise NetworkError("a network whose number of outputs is known", "one that was not evaluated",
                               "Evaluate it on one input first.")
        return self._num_outputs

    @num_outputs.setter
    def num_outputs(self, number: int) -> None:
        self._num_outputs = number

    def outputs(self, call: Callable[[Inputs], Tensor], x: Inputs, offset: int) -> Tensor:
        """Outputs (N, C) of `call` at `x`, checked; `offset` is the index of the first example, for messages.

        Exceptions become DataError; out-of-memory errors are re-raised, and a TimeoutError, as an alarm raises it.

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
        n, known = num_examples(x), self.input_format
        try:
            out = call(x)
        except Exception as cause:
            if isinstance(cause, (NTKLaplaceError, TimeoutError)) or is_about_memory(cause):
                raise
            like = "" if known is None else f", such as {describe_inputs(known, 'n')}"
            where = f" in the batch from example {offset:,} on" if offset else ""
            remedy = (known is None and self.caller.remedy(x)) or input_remedy(x, known)
            got = f"{describe_inputs(x)}{where}, which raise {type(cause).__name__}: {first_line(cause)}"
            raise DataError(f"inputs that the network takes{like}", got, remedy) from cause
        if not out.is_floating_point() or out.ndim not in (1, 2) or len(out) != n:
            raise self._wrong(f"({n}, C) or ({n},), floating point", f"{tuple(out.shape)} ({out.dtype})", x)
        c = out.shape[1] if out.ndim == 2 else 1
        if c == 0:
            raise self._wrong(f"({n}, C), C at least 1", f"{tuple(out.shape)}", x)
        if not self.evaluated:
            self.num_outputs, self.scalar = c, out.ndim == 1
        if c != self.num_outputs:
            raise self._wrong(f"({n}, {self.num_outputs}), as before", f"{tuple(out.shape)}", x)
        out = out.unsqueeze(1) if out.ndim == 1 else out
        check_finite(out.detach(), "network outputs", "Look at that input, or at diverged weights.", offset)
        return out

    def _wrong(self, expected: str, got: str, x: Inputs) -> NTKLaplaceError:
        """A DataError if the format differs from that of successful inputs, else a NetworkError."""
        if self.input_format is None or same_input_format(x, self.input_format):
            return NetworkError(f"network outputs of shape {expected}", got,
                                "Wrap the network in a module that returns one row of outputs per example; for outputs "
                                "at pixels or tokens, use the likelihood Everywhere(likelihood).")
        known = describe_inputs(self.input_format, "n")
        return DataError(f"network outputs of shape {expected}, from inputs such as {known}",
                         f"{got} from {describe_inputs(x)}", input_remedy(x, self.input_format))

    def tolerance(self, outputs: Tensor) -> float:
        """Largest allowed difference of one example's outputs between two batches."""
        scale = float(outputs.abs().max()) or 1.0
        return scale * {torch.float64: 1e-9, torch.float32: 1e-4}.get(self.precision, 3e-2)

    def agree(self, one: Tensor, other: Tensor) -> bool:
        """Whether outputs of the same examples are equal up to that difference."""
        return bool((one.detach() - other.detach()).abs().max() <= self.tolerance(one))
