"""The networks that the benchmarks run, in plain torch, and the data that goes with them.

This file imports neither ntk_laplace nor any peer: every interpreter that takes part can load it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn


def mlp(widths: tuple[int, ...], activation: Callable[[], nn.Module] = nn.Tanh) -> nn.Sequential:
    """Fully connected network; ``widths`` runs from the inputs to the outputs."""
    layers: list[nn.Module] = []
    for i, (d_in, d_out) in enumerate(pairwise(widths)):
        layers.append(nn.Linear(d_in, d_out))
        if i < len(widths) - 2:
            layers.append(activation())
    return nn.Sequential(*layers)


def cnn() -> nn.Sequential:
    """28 x 28 inputs, conv 8@5, pool, conv 16@5, pool, fc 32, 10 outputs: 11,978 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 10),
    )


class Residual(nn.Module):
    """Two 3 x 3 convolutions with BatchNorm and a shortcut (1 x 1 where the shape changes)."""

    def __init__(self, d_in: int, d_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(d_in, d_out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(d_out)
        self.conv2 = nn.Conv2d(d_out, d_out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(d_out)
        self.shortcut = nn.Conv2d(d_in, d_out, 1, stride, bias=False) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return torch.relu(y + (x if self.shortcut is None else self.shortcut(x)))


def resnet() -> nn.Sequential:
    """Small ResNet for 3 x 32 x 32 inputs: 16, 32 and 64 channels, one residual block each."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )


class Transformer(nn.Module):
    """Token classifier: d = 64, two encoder layers of 4 heads and width 256, learnt positions, mean pooling."""

    def __init__(self, vocabulary: int = 64, length: int = 16, d: int = 64, outputs: int = 10) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, d)
        self.position = nn.Parameter(0.1 * torch.randn(length, d))
        layer = nn.TransformerEncoderLayer(d, 4, 4 * d, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(d, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens) + self.position).mean(1))


@dataclass(frozen=True)
class GramCase:
    """One Gram benchmark: a network in eval mode and its inputs."""

    name: str
    title: str
    network: nn.Module
    x: Tensor

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.network.parameters())


def gram_case(name: str, num_examples: int | None = None) -> GramCase:
    """The Gram benchmark called ``name``: mlp, cnn, resnet or transformer (float32, seed 0)."""
    torch.manual_seed(0)
    if name == "mlp":
        n = num_examples or 1000
        network: nn.Module = mlp((64, 256, 256, 10), nn.ReLU)
        x = digits()[0][:n].float()
    elif name == "cnn":
        n = num_examples or 300
        network, x = cnn(), torch.randn(n, 1, 28, 28)
    elif name == "resnet":
        n = num_examples or 32
        network, x = resnet(), torch.randn(n, 3, 32, 32)
        _settle_batchnorm(network)
    elif name == "transformer":
        n = num_examples or 64
        network, x = Transformer(), torch.randint(64, (n, 16))
    else:
        raise ValueError(f"expected mlp, cnn, resnet or transformer; got {name!r}")
    titles = {
        "mlp": f"MLP 64-256-256-10, N={n}",
        "cnn": f"CNN 28x28, conv 8@5, 16@5, fc 32, 10, N={n}",
        "resnet": f"ResNet 16/32/64, 3x32x32, N={n}",
        "transformer": f"transformer d=64, 2 layers, T=16, N={n}",
    }
    return GramCase(name, titles[name], network.eval(), x)


def _settle_batchnorm(network: nn.Module) -> None:
    """Give BatchNorm running statistics that are not 0 and 1, as after training."""
    network.train()
    with torch.no_grad():
        for _ in range(3):
            network(torch.randn(16, 3, 32, 32))


def digits() -> tuple[Tensor, Tensor]:
    """All 1,797 scikit-learn digits in a fixed random order, pixels in [0, 1], float64."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    return torch.as_tensor(data.data[order] / 16.0), torch.as_tensor(data.target[order])


def blobs(num_examples: int, d_in: int = 784, classes: int = 10) -> tuple[Tensor, Tensor]:
    """Vectors in [0, 1] of MNIST's size around one centre per class, with labels; float32, seed 0."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.rand(classes, d_in, generator=generator)
    y = torch.randint(classes, (num_examples,), generator=generator)
    noise = torch.rand(num_examples, d_in, generator=generator)
    return 0.15 * centres[y] + 0.85 * noise, y


def epoch(network: nn.Module, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer, batch: int = 128) -> None:
    """One pass of training over the data, mean cross entropy."""
    for start in range(0, len(y), batch):
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(network(x[start : start + batch]), y[start : start + batch]).backward()
        optimizer.step()


def train(network: nn.Module, x: Tensor, y: Tensor, precision: float = 1.0, steps: int = 300) -> nn.Module:
    """Adam on the negative log joint, full batch: enough for a realistic output Hessian."""
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(x), y, reduction="sum")
        loss = loss + 0.5 * precision * sum(p.square().sum() for p in network.parameters())
        loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    return network.eval()


def to_arrays(network: nn.Module) -> dict[str, np.ndarray]:
    """Parameters and buffers as arrays, the names prefixed by ``net/``."""
    return {f"net/{k}": v.numpy() for k, v in network.state_dict().items()}


def from_arrays(network: nn.Module, arrays: dict[str, np.ndarray]) -> nn.Module:
    """Load what :func:`to_arrays` gave into a network of the same shape."""
    state = {k[4:]: torch.as_tensor(v) for k, v in arrays.items() if k.startswith("net/")}
    network.load_state_dict(state)
    return network.eval()
