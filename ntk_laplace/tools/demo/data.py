"""The demo's data: three data sets included in scikit-learn and two toy problems. No downloads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from sklearn.datasets import load_diabetes, load_digits, make_moons
from sklearn.model_selection import train_test_split
from torch import Tensor

from ntk_laplace.runtime.conversion import to_tensor


@dataclass(frozen=True)
class Split:
    """Training data, and held-out data that are never used for fitting: float64, and labels of classes from 0."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: tuple[str, ...] = ()  # names; none for regression
    x_unseen: Tensor | None = None  # out-of-distribution inputs, such as other digits


def digits(seed: int, train: int, held_out: int, pair: tuple[int, int] | None = None) -> Split:
    """Handwritten digits, 8 x 8 pixels with gray values in [0, 1], as images (N, 1, 8, 8): some of 1,797, stratified.

    With a pair of digits there are only these, labeled 0 and 1 in this order. Three hundred images of the other digits
    then become `x_unseen`.
    """
    bunch = load_digits()
    images, labels = bunch.images[:, None] / 16.0, bunch.target
    classes = tuple(range(10)) if pair is None else pair
    chosen = np.isin(labels, classes)
    others = None
    if pair is not None:
        order = np.random.default_rng(seed).permutation(np.flatnonzero(~chosen))
        others = to_tensor(images[order[:300]])
    images, labels = images[chosen], np.searchsorted(classes, labels[chosen])
    parts = train_test_split(images, labels, train_size=train, test_size=held_out, stratify=labels, random_state=seed)
    x_train, x_test, y_train, y_test = (to_tensor(part) for part in parts)
    return Split(x_train, y_train, x_test, y_test, tuple(str(c) for c in classes), others)


def diabetes(seed: int, train: int) -> Split:
    """Disease progression of 442 patients from ten measurements, standardized with the training data."""
    x, y = load_diabetes(return_X_y=True)
    parts = train_test_split(x, y[:, None], train_size=train, random_state=seed)
    x_train, x_test, y_train, y_test = (to_tensor(part) for part in parts)
    x_mean, x_std = x_train.mean(0), x_train.std(0)
    y_mean, y_std = y_train.mean(0), y_train.std(0)
    return Split((x_train - x_mean) / x_std, (y_train - y_mean) / y_std, (x_test - x_mean) / x_std,
                 (y_test - y_mean) / y_std)


def wave(seed: int) -> Split:
    """Sixty noisy points of a wave with a gap in the middle, (N, 1) -> (N, 1); noise of standard deviation 0.15."""
    rng = np.random.default_rng(seed)
    x = np.sort(np.concatenate([rng.uniform(-4.0, -1.2, 35), rng.uniform(1.4, 3.6, 25)]))
    grid = np.linspace(-5.2, 4.8, 400)
    y = _wave(x) + 0.15 * rng.standard_normal(x.size)
    inputs, targets = to_tensor(x)[:, None], to_tensor(y)[:, None]
    return Split(inputs, targets, to_tensor(grid)[:, None], to_tensor(_wave(grid))[:, None])


def _wave(x: np.ndarray) -> np.ndarray:
    return np.sin(1.6 * x) + 0.25 * x


def moons(seed: int) -> Split:
    """Two interleaved half circles, 120 points in the plane; the held-out inputs are a grid of 70 x 60 points."""
    points, labels = make_moons(120, noise=0.16, random_state=seed)
    across, up = np.meshgrid(np.linspace(-3.0, 4.0, 70), np.linspace(-2.7, 3.2, 60))
    grid = np.stack([across.ravel(), up.ravel()], axis=1)
    unknown = torch.zeros(len(grid), dtype=torch.long, device="cpu")
    return Split(to_tensor(points), to_tensor(labels), to_tensor(grid), unknown, ("upper", "lower"))
