"""Images of digits and the networks trained on them, shared by mnist.py and damping.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from _shared import cnn, mlp
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

__all__ = ["Split", "build", "load", "loader", "miniature", "train_weights"]

WIDTHS = (784, 1024, 512, 256, 128, 10)


@dataclass(frozen=True)
class Split:
    """Grey images (N, 28, 28) as bytes, and their labels."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor


class Images(Dataset):
    """Bytes stay bytes; a batch becomes floats in [0, 1] when it is asked for."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: Sequence[int]) -> tuple[Tensor, Tensor]:
        return as_floats(self.x[index]), self.y[index]


def as_floats(x: Tensor) -> Tensor:
    """(N, 28, 28) bytes as (N, 1, 28, 28) in [0, 1]."""
    return x.unsqueeze(1).float() / 255


def load(folder: Path) -> Split:
    """MNIST from ``mnist.npz``: arrays X_train, y_train, X_test, y_test, uint8."""
    with np.load(folder / "mnist.npz") as found:
        x, y, x_test, y_test = (torch.as_tensor(found[k]) for k in ("X_train", "y_train", "X_test", "y_test"))
    return Split(x, y.long(), x_test, y_test.long())


def miniature() -> Split:
    """scikit-learn's digits, each pixel three by three, with a border: for runs in seconds."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = np.kron(data.images * (255 / 16), np.ones((3, 3)))
    images = np.pad(images, ((0, 0), (2, 2), (2, 2))).astype(np.uint8)
    x, y = torch.as_tensor(images), torch.as_tensor(data.target)
    return Split(x[:600], y[:600], x[600:800], y[600:800])


def loader(x: Tensor, y: Tensor, batch: int = 512) -> DataLoader:
    """Batches in their order; a batch is read at once, not image by image."""
    images = Images(x, y)
    return DataLoader(images, batch_size=None, sampler=BatchSampler(SequentialSampler(images), batch, drop_last=False))


def build(name: str, small: bool = False) -> nn.Module:
    """Return "mlp", 784-1024-512-256-128-10 with ReLU, or "cnn", two convolutions and two linear layers, P = 11,978."""
    if name == "mlp":
        return nn.Sequential(nn.Flatten(), *mlp((784, 24, 16, 10) if small else WIDTHS, nn.ReLU))
    return cnn()


def shuffled(num_examples: int, batch: int) -> Iterator[Tensor]:
    """Indices of one epoch's batches."""
    yield from torch.randperm(num_examples).split(batch)


def train_weights(network: nn.Module, split: Split, precision: float, epochs: int, batch: int = 256) -> nn.Module:
    """Adam on the mean of the negative log joint: its `weight_decay` is the gradient of the prior's energy over N."""
    num_examples = len(split.y)
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3, weight_decay=precision / num_examples, fused=True)
    steps = epochs * -(-num_examples // batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(epochs):
        for index in shuffled(num_examples, batch):
            optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(network(as_floats(split.x[index])), split.y[index]).backward()
            optimizer.step()
            schedule.step()
    optimizer.zero_grad()
    return network.eval()
