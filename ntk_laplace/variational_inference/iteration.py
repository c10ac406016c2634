"""What the loop of variational inference repeats: one step of one algorithm on one representation of q."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ntk_laplace.curvature import PosteriorPrecision

__all__ = ["Iteration"]


class Iteration(ABC):
    """An algorithm with its state. The loop calls `step`, and knows nothing else about either."""

    @property
    @abstractmethod
    def mean(self) -> Tensor:
        """μ, (P,)."""

    @property
    @abstractmethod
    def precision(self) -> PosteriorPrecision:
        """H of the present q."""

    @abstractmethod
    def step(self, step_size: float) -> float:
        """Take one natural-gradient step of size γ; return the norm sqrt(gᵀH⁻¹g) of the natural gradient.

        The step is random where the algorithm samples: the iteration owns its generator, and `record` contains it.
        """

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """Copies of all tensors that another process needs to continue with the same numbers."""

    @abstractmethod
    def restore(self, record: Mapping[str, Any]) -> None:
        """Continue from a record, to bit-identical steps."""

    @property
    def rows_kept(self) -> int | None:
        """Number of rows that represent H; None if it is a matrix of parameters."""
        return None
