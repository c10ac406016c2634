"""Blocks that leave torch's random state as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
