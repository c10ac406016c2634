"""Tables and images with the networks trained on them, and inputs that no training example is like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from _shared import cnn
from sklearn import datasets
from torch import Tensor, nn

__all__ = ["FILES", "IMAGES", "TABLES", "Problem", "Recipe", "load", "trained"]

BUNDLED = {
    "diabetes": lambda: datasets.load_diabetes(return_X_y=True),
    "breast_cancer": lambda: datasets.load_breast_cancer(return_X_y=True),
    "wine": lambda: datasets.load_wine(return_X_y=True),
    "digits": lambda: datasets.load_digits(return_X_y=True),
    "friedman": lambda: datasets.make_friedman1(900, noise=1.0, random_state=0),
    "moons": lambda: datasets.make_moons(900, noise=0.3, random_state=0),
    "clusters": lambda: datasets.make_classification(
        900, 20, n_informative=6, n_classes=3, flip_y=0.05, random_state=0
    ),
    # added last, and run once
    "friedman2": lambda: datasets.make_friedman2(900, noise=100.0, random_state=0),
    "friedman3": lambda: datasets.make_friedman3(900, noise=0.1, random_state=0),
    "spheres": lambda: datasets.make_hastie_10_2(900, random_state=0),
    "quantiles": lambda: datasets.make_gaussian_quantiles(
        n_samples=900, n_features=4, n_classes=3, random_state=0
    ),
    "iris": lambda: datasets.load_iris(return_X_y=True),
}
FILES = ("boston", "concrete", "energy", "yacht", "snelson", "australian", "ionosphere", "banana")
REGRESSION = ("boston", "concrete", "energy", "yacht", "snelson", "diabetes", "friedman", "friedman2", "friedman3")
TABLES = (*FILES, *BUNDLED)
# images and a network: mnist-1000-small, ...
IMAGES = tuple(f"mnist-{count}-{name}" for count in (1000, 5000, 60000) for name in ("small", "cnn", "residual"))
FEW = {"digits": 150}
EPOCHS = {1000: 60, 5000: 30, 60000: 8}  # of images


@dataclass(frozen=True)
class Recipe:
    """How a network is trained: Adam with a rate that falls to 0 as a cosine; full batches if `batch` is None."""

    epochs: int = 600
    rate: float = 1e-2
    batch: int | None = None


@dataclass(frozen=True)
class Problem:
    """Standardized data; `classes` is None for a regression, whose responses are (N, 1)."""

    name: str
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    strange: Tensor
    classes: int | None
    build: Callable[[float], nn.Module]
    recipe: Recipe

    def network(self, seed: int, dropout: float = 0.0) -> nn.Module:
        """Untrained."""
        torch.manual_seed(seed)
        return self.build(dropout).to(self.x.dtype)

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """Mean loss: cross entropy, or half the squared error."""
        return nn.functional.cross_entropy(f, y) if self.classes else 0.5 * (f - y).square().mean()


def trained(
    problem: Problem, decay: float, seed: int, rows: Tensor | None = None, dropout: float = 0.0
) -> nn.Module:
    """Adam with coupled weight decay of the mean loss, on these rows of the training data."""
    network, recipe = problem.network(seed, dropout), problem.recipe
    x, y = (problem.x, problem.y) if rows is None else (problem.x[rows], problem.y[rows])
    size = recipe.batch or len(y)
    optimizer = torch.optim.Adam(network.parameters(), lr=recipe.rate, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.epochs)
    network.train()
    for _ in range(recipe.epochs):
        for index in torch.randperm(len(y)).split(size) if size < len(y) else (slice(None),):
            optimizer.zero_grad()
            problem.loss(network(x[index]), y[index]).backward()
            optimizer.step()
        schedule.step()
    optimizer.zero_grad()
    return network.eval()


def load(name: str, folder: Path | None, seed: int, small: bool = False) -> Problem:
    """A problem with a split of this seed; training points are at most 200 of a table, and test points 400."""
    if name in IMAGES:
        return _images(name, folder, seed, small)
    if name in BUNDLED:
        x, y = BUNDLED[name]()
    else:
        with np.load(folder / f"{name}.npz") as found:
            keys = ("X", "y") if "X" in found else ("train_inputs", "train_outputs")
            x, y = found[keys[0]].astype(float), found[keys[1]]
    x, y = x.reshape(len(y.ravel()), -1), y.ravel()
    random = np.random.default_rng(seed)
    order = random.permutation(len(x))
    count = 40 if small else min(FEW.get(name, 200), 2 * len(x) // 3)
    train, test = order[:count], order[count : count + (60 if small else 400)]
    spread = x[train].std(0)
    x = (x - x[train].mean(0)) / np.where(spread > 1e-8, spread, 1.0)
    # three times test inputs whose columns were shuffled apart: familiar margins, unfamiliar points
    strange = 3.0 * np.column_stack([random.permutation(column) for column in x[test].T])
    if name in REGRESSION:
        classes, y = None, torch.as_tensor((y - y[train].mean()) / y[train].std())[:, None]
    else:
        y = torch.as_tensor(np.unique(y, return_inverse=True)[1])
        classes = int(y.max()) + 1
    activation = nn.ReLU if (TABLES.index(name) + seed) % 2 else nn.Tanh
    widths = (x.shape[1], *((5, 5) if small else (50, 50)), classes or 1)
    x, strange = torch.as_tensor(x), torch.as_tensor(strange)
    return Problem(
        name, x[train], y[train], x[test], y[test], strange, classes,
        lambda dropout: _mlp(widths, activation, dropout), Recipe(epochs=30 if small else 600),
    )


def _mlp(widths: tuple[int, ...], activation: type[nn.Module], dropout: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), activation()] + ([nn.Dropout(dropout)] if dropout else [])
    return nn.Sequential(*layers[: -2 if dropout else -1])


class Residual(nn.Module):
    """Two 3 x 3 convolutions with a shortcut; without BatchNorm, whose scales a Gaussian prior contradicts."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(d_in, d_out, 3, 2, 1)
        self.second = nn.Conv2d(d_out, d_out, 3, 1, 1)
        self.shortcut = nn.Conv2d(d_in, d_out, 1, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))) + self.shortcut(x))


def _small() -> nn.Sequential:
    """Two convolutions and one linear layer, 2,026 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, 2), nn.ReLU(), nn.Conv2d(6, 8, 5, 2), nn.ReLU(), nn.Flatten(), nn.Linear(128, 10),
    )


def _residual() -> nn.Sequential:
    """A convolution and two residual blocks, 8 and 16 channels."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), Residual(8, 8), Residual(8, 16), nn.Flatten(), nn.Linear(256, 10)
    )


def _with_dropout(network: nn.Sequential, dropout: float) -> nn.Sequential:
    """Dropout after each activation but the last layer's."""
    if not dropout:
        return network
    after = (nn.ReLU, Residual)
    layers = [m for layer in network for m in ((layer, nn.Dropout(dropout)) if isinstance(layer, after) else (layer,))]
    return nn.Sequential(*layers)


def _images(name: str, folder: Path | None, seed: int, small: bool) -> Problem:
    """MNIST; or scikit-learn's digits, enlarged, in miniature."""
    _, words, kind = name.split("-")
    random, count = np.random.default_rng(seed), int(words)
    if small:
        found = datasets.load_digits()
        x = np.pad(np.kron(found.images * (255 / 16), np.ones((3, 3))), ((0, 0), (2, 2), (2, 2)))
        y, count, epochs = found.target, 100, 3
        order = random.permutation(len(y))
        pairs = [(x[order[:count]], y[order[:count]]), (x[order[count : count + 100]], y[order[count : count + 100]])]
    else:
        with np.load(folder / "mnist.npz") as arrays:
            order, epochs = random.permutation(60000)[:count], EPOCHS[count]
            pairs = [(arrays["X_train"][order], arrays["y_train"][order]), (arrays["X_test"], arrays["y_test"])]
    grey = [(torch.as_tensor(images).float()[:, None] / 255, torch.as_tensor(y).long()) for images, y in pairs]
    (x, y), (x_test, y_test) = grey
    part = torch.as_tensor(random.permutation(len(y_test))[:2000])
    x_test, y_test = x_test[part], y_test[part]
    # collages: each quarter of another test image
    strange, half = torch.empty_like(x_test), 14
    for rows in (slice(None, half), slice(half, None)):
        for columns in (slice(None, half), slice(half, None)):
            other = torch.as_tensor(random.permutation(len(x_test)))
            strange[:, :, rows, columns] = x_test[other][:, :, rows, columns]
    builders = {"small": _small, "cnn": cnn, "residual": _residual}
    return Problem(
        name, x, y, x_test, y_test, strange, 10, lambda dropout: _with_dropout(builders[kind](), dropout),
        Recipe(epochs, 2e-3 if count == 60000 else 5e-3, 128),
    )
