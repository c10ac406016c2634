"""What the examples of this folder share: the benchmarks' habits, training, a child process for memory."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from _common import in_process, machine, peak_bytes, resident_bytes, seconds, table, write
from _networks import cnn, mlp

__all__ = [
    "cnn",
    "in_child",
    "machine",
    "mlp",
    "once",
    "parser",
    "peak_bytes",
    "resident_bytes",
    "seconds",
    "table",
    "train",
    "write",
]


def parser(description: str | None, out: str) -> argparse.ArgumentParser:
    """Arguments every example takes."""
    arguments = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", type=Path, default=Path(out), help=f"folder for figures and pictures ({out})")
    arguments.add_argument("--threads", type=int, default=2, help="torch threads (default 2)")
    arguments.add_argument("--small", action="store_true", help="everything in miniature, in seconds")
    return arguments


def train(network: nn.Module, x: Tensor, y: Tensor, noise: float, precision: float, steps: int) -> nn.Module:
    """Adam, full batch, on the negative log joint of a regression with Gaussian noise of this variance."""
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = 0.5 * (network(x) - y).square().sum() / noise
        loss = loss + 0.5 * precision * sum(p.square().sum() for p in network.parameters())
        loss.backward()
        optimizer.step()
        schedule.step()
    optimizer.zero_grad()
    return network.eval()


def once(kept: Path, arguments: Sequence[str], compute: Callable[[], Any]) -> Any:
    """The result that a file keeps, if these arguments made it; else it is computed, and kept as JSON.

    A long run that was interrupted goes on where it stood. Other arguments start anew.
    """
    if kept.exists():
        before = json.loads(kept.read_text())
        if before["arguments"] == list(arguments):
            return before["result"]
    result = compute()
    kept.write_text(json.dumps({"arguments": list(arguments), "result": result}))
    return result


def in_child(script: str, arguments: Sequence[str], kept: Path) -> dict[str, Any]:
    """`once`, in a process of its own; its last line is JSON."""
    return once(kept, arguments, lambda: in_process(script, arguments))
