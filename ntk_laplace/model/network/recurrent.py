"""Recurrent layers as the matrix products that they are made of, on every device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._decomp import get_decompositions
from torch.overrides import TorchFunctionMode

__all__ = ["unrolled"]

_KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_KERNELS = {getattr(torch, kind): getattr(torch.ops.aten, kind) for kind in _KINDS}
_STEPS = get_decompositions(list(_KERNELS.values()))


class _Unrolled(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KERNELS:
            # weights are the fourth argument of packed sequences, and the third of others
            kind = "data" if isinstance(args[3], (list, tuple)) else "input"
            func = _STEPS[getattr(_KERNELS[func], kind)]
        return func(*args, **(kwargs or {}))


@contextmanager
def unrolled(module: nn.Module) -> Iterator[None]:
    """Run recurrent layers step by step, so that rules find their weights and these have second derivatives.

    The fused kernels of cuDNN, CUDA and oneDNN take weights and biases apart, each in another way, or have no second
    derivative. Kronecker factors would depend on the device.
    """
    if not any(isinstance(layer, nn.RNNBase) for layer in module.modules()):
        yield
        return
    with _Unrolled():
        yield
