"""A training function that fresh processes can import: ridge regression, in closed form."""

from __future__ import annotations

import numpy as np


def data() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs (20, 3), targets (20,) and test inputs (6, 3)."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(20, 3))
    y = x @ np.array([1.0, -2.0, 0.5]) + 0.3 * generator.normal(size=20)
    return x, y, generator.normal(size=(6, 3))


def weights(indices: np.ndarray) -> np.ndarray:
    """Ridge regression of noise variance 0.3 and precision 0.7."""
    x, y, _ = data()
    x, y = x[indices], y[indices]
    return np.linalg.solve(x.T @ x / 0.3 + 0.7 * np.eye(3), x.T @ y / 0.3)


def ridge(indices: np.ndarray, seed: int) -> np.ndarray:
    """Predictions at the test inputs; a seed moves them a little."""
    return data()[2] @ weights(indices) + 1e-3 * seed * np.arange(6)
