"""What retraining says, kept in a folder; and the weights that relinearized steps of the library lead to."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from _problems import Problem

import ntk_laplace as ntkl
from ntk_laplace import attribution

__all__ = ["halves", "put_back", "relinearized", "singles", "without"]

_PUSH, _PUSHES = 1e-2, 5  # length of a push off a saddle point, and how often


def halves(problem: Problem, folder: Path, processes: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Masks of random halves (M, N), and the target at the test points after training on them, (2 seeds, M, n)."""
    kept = attribution.random_halves(problem.halves, len(problem.x))
    return kept, attribution.retrain(problem.outcome, kept, (0, 1), folder=folder, processes=processes)


def singles(
    problem: Problem, theta: np.ndarray, many: int, folder: Path, processes: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of training points, (m,), and outputs at the test points after training on from θ without each of them.

    Training goes on from the weights of the whole, so that the minimum is the one next to them. (m, n, C)
    """
    count = len(problem.x)
    chosen = np.random.default_rng(7).choice(count, many, replace=False)
    kept = attribution.without_each_in_turn(chosen, count)
    return chosen, attribution.retrain(partial(problem.moved, theta), kept, folder=folder, processes=processes)[0]


def without(problem: Problem, theta: np.ndarray, many: int, folder: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """`singles` at minima, and how many had other outputs at the saddle point where L-BFGS stopped first.

    L-BFGS may stop at a stationary point with negative curvature, which training with any noise would leave. There the
    weights are pushed along the direction of the least eigenvalue, both ways, and training goes on to the lower end.
    """
    count = len(problem.x)
    chosen, stationary = singles(problem, theta, many, folder)
    kept = attribution.without_each_in_turn(chosen, count)
    outputs = attribution.retrain(partial(_settled, problem, theta), kept, folder=Path(f"{folder}-minima"))[0]
    moved = np.abs(outputs - stationary).max((1, 2)) > 1e-2 * np.abs(stationary).max()
    return chosen, outputs, int(moved.sum())


def _settled(problem: Problem, start: np.ndarray, indices: np.ndarray, seed: int) -> np.ndarray:
    """Outputs at the test points, (n, C), at a minimum next to the start."""
    theta = problem.train(indices, start=start)
    for _ in range(_PUSHES):
        curvatures, directions = np.linalg.eigh(problem.hessian(theta, indices))
        if curvatures[0] > 0:
            break
        ends = [problem.train(indices, start=theta + push * directions[:, 0]) for push in (_PUSH, -_PUSH)]
        theta = min(ends, key=lambda end: problem.objective(end, indices)[0])
    return problem.f(theta, problem.x_test)


def put_back(
    problem: Problem, theta: np.ndarray, chosen: np.ndarray, folder: Path, processes: int = 1
) -> np.ndarray:
    """Outputs at the test points after training without each point, and then on with all, (m, n, C).

    Where they are not those of θ, training without the point left the minimum of θ for another one.
    """
    kept = attribution.without_each_in_turn(chosen, len(problem.x))
    return attribution.retrain(partial(problem.returned, theta), kept, folder=folder, processes=processes)[0]


def relinearized(posterior: ntkl.Posterior, gone: np.ndarray | int, steps: int) -> Iterator[np.ndarray]:
    """Weights after each of some Gauss-Newton steps of the network itself, without the points that are `gone`."""
    without = posterior.remove(torch.as_tensor(gone))
    for _ in range(steps):
        without = without.relinearize()
        yield without.network.theta.numpy()
