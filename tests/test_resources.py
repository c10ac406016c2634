"""Sizes of buffers on each device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ntk_laplace.runtime.resources import buffer_bytes

GIB = 2**30


@pytest.mark.parametrize(("memory", "multiple"), [(1, 1), (8, 4), (24, 12), (80, 16), (140, 16)])
def test_buffers_grow_with_the_memory_of_a_gpu(memory: int, multiple: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=memory * GIB))
    assert buffer_bytes(100, torch.device("cuda", 0)) == 100 * multiple
    assert buffer_bytes(100, torch.device("cpu")) == 100
