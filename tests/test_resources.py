"""Sizes of buffers on each device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ntk_laplace.jacobian import JacobianPass, passes
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
        monkeypatch.setattr(passes, "buffer_bytes", sizes)
        network = Network(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)))
        found.append(JacobianPass(network, torch.float32).examples_at_once(x))
    assert found[0] > 1 and 4 * found[0] <= found[1] < 4 * (found[0] + 1) and asked == {torch.device("cpu")}
