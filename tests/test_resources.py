"""Sizes of buffers on each device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ntk_laplace as ntkl
from ntk_laplace.jacobian import JacobianPass, batch_size
from ntk_laplace.jacobian.blocks.outer_products import add_pulled_, add_pushed_
from ntk_laplace.model.network import Network
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.resources import buffer_bytes

GIB = 2**30


@pytest.mark.parametrize(("memory", "multiple"), [(1, 1), (8, 4), (24, 12), (80, 16), (140, 16)])
def test_buffers_grow_with_the_memory_of_a_gpu(memory: int, multiple: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=memory * GIB))
    assert buffer_bytes(100, torch.device("cuda", 0)) == 100 * multiple
    assert buffer_bytes(100, torch.device("cpu")) == 100


def test_batches_of_a_pass_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples of a batch are limited by buffers of the network's device."""
    asked = set()

    def larger(size: int, device: torch.device) -> int:
        asked.add(device)
        return 4 * size

    monkeypatch.setattr(tuning, "WORKING_SET_BYTES", 8192)
    x, found = torch.randn(3, 8), []
    for sizes in (buffer_bytes, larger):
        monkeypatch.setattr(batch_size, "buffer_bytes", sizes)
        network = Network(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)))
        found.append(JacobianPass(network, torch.float32).prepare(x).batch()[0])
    assert found[0] > 1 and 4 * found[0] <= found[1] < 4 * (found[0] + 1) and asked == {torch.device("cpu")}


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that an operation returns."""

    bytes = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        found = operation(*args, **(kwargs or {}))
        for value in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(value, Tensor) and value.layout is torch.strided:
                self.bytes = max(self.bytes, value.untyped_storage().nbytes())
        return found


class Tied(nn.Module):
    """Classifies the words of a sentence by the table that embeds them."""

    def __init__(self, words: int, size: int) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(words, size), nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(self.table(x).mean(1))) @ self.table.weight.T


@pytest.mark.filterwarnings("ignore:no Kronecker factors fit")
@pytest.mark.parametrize("structure", ["diag", "kfac", "ekfac"])
def test_rows_of_a_tied_weight_are_written_a_few_examples_at_a_time(
    structure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, size, n = 40, 30, 25
    torch.manual_seed(0)
    x, y = torch.randint(0, words, (n, 4)), torch.randint(0, words, (n,))
    one = words * words * size * 4  # bytes of the rows of one example
    monkeypatch.setattr(tuning, "WRITTEN_BYTES", 3 * one)
    monkeypatch.setattr(tuning, "CHUNK_BYTES", one)
    with Largest() as largest:
        posterior = ntkl.laplace(Tied(words, size), (x, y), ntkl.Categorical(), structure=structure)
        posterior.predict(x)
    assert one < largest.bytes < n * one / 2  # output gradients and covariances are the largest


def test_products_with_factors_stay_in_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of one factor are small tensors, however many examples there are, and their sums are those of rows."""
    count, m, o, i = 300, 32, 4, 3
    shapes = (2, count, 1, 1, o), (count, 1, 1, i), (2, count, m)
    b, a, cotangents = (torch.randn(*shape).double() for shape in shapes)
    vectors, out = torch.randn(m, 1, o, i).double(), torch.zeros(2, count, m).double()
    weights, biases = torch.zeros(m, 1, o, i).double(), torch.zeros(m, 1, o).double()
    monkeypatch.setattr(tuning, "FACTOR_BYTES", out.nbytes)
    with Largest() as largest:
        add_pushed_(out, b, a, vectors, None)
        add_pulled_(weights, biases, b, a, cotangents)
    assert largest.bytes == out.nbytes < count * m * o * 8
    rows = torch.einsum("kngto,ngti->knoi", b, a).flatten(0, 1).flatten(1)
    assert torch.allclose(out.flatten(0, 1), rows @ vectors.flatten(1).T, rtol=1e-9)
    assert torch.allclose(weights.flatten(1), cotangents.flatten(0, 1).T @ rows, rtol=1e-9)


@pytest.mark.parametrize("structure", ["diag", "kfac", "ekfac"])
@pytest.mark.parametrize("weights", [False, True])
def test_a_batch_is_small_where_its_root_is_large(
    structure: str, weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    classes, n = 50, 100
    torch.manual_seed(0)
    x, y = torch.randn(n, 3), torch.arange(n) % classes
    monkeypatch.setattr(tuning, "WORKING_SET_BYTES", 400_000)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, classes))
    data = (x, y, torch.rand(n) + 0.5) if weights else (x, y)
    with Largest() as largest:
        ntkl.laplace(network, data, ntkl.Categorical(), structure=structure)
    # S of all examples has 1 MB
    assert largest.bytes < 400_000
