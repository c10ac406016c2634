"""Recurrent layers as the matrix products that they are made of, on every device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._decomp import get_decompositions
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from ntk_laplace.runtime.threads import ProcessWide
from ntk_laplace.runtime.torch_warnings import WITHOUT_TORCH_WARNINGS

_LAYERS = {getattr(torch, kind): getattr(torch.ops.aten, kind) for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")}
_STEPS = get_decompositions(list(_LAYERS.values()))
_SCRIPTED = {layer.__name__ for layer in (nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell)}


def _lstm_cell(
    x: Tensor, state: tuple[Tensor, Tensor], w_x: Tensor, w_h: Tensor, b_x: Tensor | None = None,
    b_h: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    h, c = state
    i, f, g, o = (linear(x, w_x, b_x) + linear(h, w_h, b_h)).chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru_cell(
    x: Tensor, h: Tensor, w_x: Tensor, w_h: Tensor, b_x: Tensor | None = None, b_h: Tensor | None = None
) -> Tensor:
    (r, z, n), (r_h, z_h, n_h) = linear(x, w_x, b_x).chunk(3, 1), linear(h, w_h, b_h).chunk(3, 1)
    n = (n + n_h * (r + r_h).sigmoid()).tanh()
    return (h - n) * (z + z_h).sigmoid() + n


def _plain_cell(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def cell(
        x: Tensor, h: Tensor, w_x: Tensor, w_h: Tensor, b_x: Tensor | None = None, b_h: Tensor | None = None
    ) -> Tensor:
        return activation(linear(x, w_x, b_x) + linear(h, w_h, b_h))

    return cell


# cells that torch fuses, or that vmap does not take apart
_CELLS = {
    torch.lstm_cell: _lstm_cell, torch.gru_cell: _gru_cell,
    torch.rnn_tanh_cell: _plain_cell(torch.tanh), torch.rnn_relu_cell: _plain_cell(torch.relu),
}


class _Unrolled(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LAYERS:
            # weights are the fourth argument of packed sequences, and the third of others
            kind = "data" if isinstance(args[3], (list, tuple)) else "input"
            with _WITHOUT_MKLDNN.entered():  # which would run torch's fused kernel in float32
                return _STEPS[getattr(_LAYERS[func], kind)](*args, **(kwargs or {}))
        return _CELLS.get(func, func)(*args, **(kwargs or {}))


@contextmanager
def _without(*backends: Any) -> Iterator[None]:
    with WITHOUT_TORCH_WARNINGS.entered(), ExitStack() as stack:
        for backend in backends:
            stack.enter_context(backend.flags(enabled=False))
        yield


@contextmanager
def unrolled(module: nn.Module) -> Iterator[None]:
    """Run recurrent layers step by step, so that rules find their weights and these have second derivatives.

    The fused kernels of cuDNN, CUDA and oneDNN take weights and biases apart, each in another way, or have no second
    derivative. Kronecker factors would depend on the device. In TorchScript the kernels of CUDA stay.
    """
    layers = list(module.modules())
    # TorchScript runs such a layer, whose calls no mode of torch functions sees
    scripted = any(getattr(layer, "original_name", None) in _SCRIPTED for layer in layers)
    if not scripted and not any(isinstance(layer, (nn.RNNBase, nn.RNNCellBase)) for layer in layers):
        yield
        return
    with _Unrolled(), _WITHOUT_KERNELS.entered() if scripted else nullcontext():
        yield


_WITHOUT_MKLDNN = ProcessWide(lambda: _without(torch.backends.mkldnn))
_WITHOUT_KERNELS = ProcessWide(lambda: _without(torch.backends.cudnn, torch.backends.mkldnn))
