"""Recurrent layers and cells step by step: torch's own values and gradients, for every kind and every option."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import ntk_laplace as ntkl
from ntk_laplace.model.network import ManyWeights
from ntk_laplace.model.network.recurrent import unrolled
from reference import relative_error

KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "tanh": nn.RNN, "relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k)}
OPTIONS = {
    "one layer": {}, "two": {"num_layers": 2}, "both directions": {"bidirectional": True, "num_layers": 2},
    "batch first": {"batch_first": True}, "no biases": {"bias": False},
}
CELLS = {
    "lstm": nn.LSTMCell, "gru": nn.GRUCell, "tanh": nn.RNNCell,
    "relu": lambda *a, **k: nn.RNNCell(*a, nonlinearity="relu", **k),
}


def flat(out: object) -> Tensor:
    """All tensors of an output in one vector."""
    if isinstance(out, PackedSequence):
        return out.data.flatten()
    return out.flatten() if isinstance(out, Tensor) else torch.cat([flat(part) for part in out])  # type: ignore[attr-defined]


def both(module: nn.Module, *inputs: object) -> list[list[Tensor]]:
    """Outputs and gradients in all parameters, by torch and unrolled."""
    found = []
    for own in (False, True):
        if own:
            with unrolled(nn.Sequential(module)):
                out = flat(module(*inputs))
        else:
            out = flat(module(*inputs))
        weights = torch.linspace(1, 2, len(out), dtype=out.dtype)
        found.append([out, *torch.autograd.grad((out * weights).sum(), list(module.parameters()))])
    return found


def same(module: nn.Module, *inputs: object) -> None:
    for one, other in zip(*both(module.double(), *inputs), strict=True):
        assert relative_error(other, one) < 1e-13


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_layers(kind, options, packed):
    layer, x = KINDS[kind](3, 4, **options), torch.randn(5, 2, 3).double()
    if options.get("batch_first"):
        x = x.transpose(0, 1)
    same(layer, pack_padded_sequence(x, torch.tensor([5, 3]), options.get("batch_first", False)) if packed else x)


def test_a_projected_state_and_a_first_state():
    same(nn.LSTM(3, 4, proj_size=2), torch.randn(5, 2, 3).double())
    state = torch.randn(1, 2, 4).double()
    same(nn.GRU(3, 4), torch.randn(5, 2, 3).double(), state)
    same(nn.LSTM(3, 4), torch.randn(5, 2, 3).double(), (state, state + 1))
    same(nn.LSTM(3, 4), torch.randn(5, 3).double())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", CELLS)
def test_cells(kind, bias):
    cell, x = CELLS[kind](3, 4, bias=bias), torch.randn(2, 3).double()
    state = torch.randn(2, 4).double()
    same(cell, x, (state, state + 1) if kind == "lstm" else state)


@pytest.mark.parametrize("module", [nn.LSTM(3, 4), nn.GRU(3, 4), nn.LSTMCell(3, 4), nn.GRUCell(3, 4)])
def test_no_fused_kernel_is_in_the_graph(module):
    """Products, sums and functions of entries alone: rules find every weight in a product."""
    with unrolled(module):
        out = module(torch.randn(2, 3))
    kinds, stack = set(), [(out if isinstance(out, Tensor) else out[0]).grad_fn]
    while stack:
        node = stack.pop()
        if node is not None:
            kinds.add(node.name().split("Backward")[0])
            stack += [before for before, _ in node.next_functions]
    assert "Addmm" in kinds and not {kind for kind in kinds if "nn" in kind.lower()}, kinds  # Rnn, thnn, mkldnn


class Sequence(nn.Module):
    """A layer, of which the last output counts."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.last = layer, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x)[0][:, -1])


class Stepped(nn.Module):
    """A cell over the steps of a sequence."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell, self.last = cell, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.last(state[0] if isinstance(state, tuple) else state)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning", "ignore:.torch.jit.trace")
@pytest.mark.parametrize("scripted", [torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(2, 5, 3))])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_torchscript_has_the_same_factors(layer, scripted):
    """No mode sees its calls; without oneDNN and cuDNN its kernels are products too."""
    network, x, y = Sequence(layer(3, 4, batch_first=True)), torch.randn(8, 5, 3), torch.arange(8) % 2
    found = [float(ntkl.laplace(one, (x, y), ntkl.Categorical(), structure="kfac").log_marginal_likelihood())
             for one in (network, scripted(network))]
    assert found[1] == pytest.approx(found[0], rel=1e-6)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_dropout_between_layers_is_refused(layer):
    """The steps have none, but outputs without a graph do: in training mode the two differ."""
    network, x = Sequence(layer(3, 4, num_layers=2, dropout=0.5, batch_first=True)), torch.randn(8, 5, 3)
    with pytest.raises(ntkl.NonDeterministicError, match=r"Call network\.eval"):
        ntkl.laplace(network.train(), (x, torch.arange(8) % 2), ntkl.Categorical())
    ntkl.laplace(network.eval(), (x, torch.arange(8) % 2), ntkl.Categorical())


@pytest.mark.parametrize("kind", CELLS)
def test_cells_at_many_weights_share_a_pass(kind):
    """torch has no batching rule for its fused cells: it warns, and takes one value of the weights at a time."""
    network, x = Stepped(CELLS[kind](3, 4)).double(), torch.randn(6, 5, 3).double()
    found = ntkl.laplace(network, (x, torch.randn(6, 2)), ntkl.Gaussian()).network
    thetas = torch.stack([found.theta, 0.9 * found.theta]).requires_grad_()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        outputs = ManyWeights(found, x)(thetas, x)
        gradient, = torch.autograd.grad(outputs.square().sum(), thetas)
    assert not told
    for theta, own, slope in zip(thetas.detach(), outputs, gradient, strict=True):
        torch.nn.utils.vector_to_parameters(theta, network.parameters())
        alone = network(x)
        expected = torch.autograd.grad(alone.square().sum(), list(network.parameters()))
        assert relative_error(own, alone) < 1e-13 and relative_error(slope, flat(expected)) < 1e-12
