"""What the loop of variational inference repeats: one step of one algorithm on one representation of q."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.curvature import PosteriorPrecision
from ntk_laplace.structures import LinearizedModel
from ntk_laplace.variational_inference.algorithms import Algorithm
from ntk_laplace.variational_inference.examples import Examples
from ntk_laplace.variational_inference.states import FunctionSpaceState, VariationalState


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

    @property
    def dropped(self) -> float:
        """What H lacks because rows were dropped, as `FunctionSpaceState.dropped`."""
        return 0.0


class SampledIteration(Iteration):
    """An algorithm that relinearizes the network in every step, on a state of any kind.

    A state in function space becomes one in weight space before a step that would make more than `most_rows` rows.
    """

    def __init__(
        self, model: LinearizedModel, examples: Examples, algorithm: Algorithm, state: VariationalState, seed: int,
        most_rows: int | None = None,
    ) -> None:
        self._model, self._examples, self._algorithm, self._most = model, examples, algorithm, most_rows
        self.state = state
        self._generator = torch.Generator(device=state.mean.device).manual_seed(seed)

    @property
    def mean(self) -> Tensor:
        return self.state.mean

    @property
    def precision(self) -> PosteriorPrecision:
        return self.state.precision

    @property
    def rows_kept(self) -> int | None:
        return self.state.rows_kept

    @property
    def dropped(self) -> float:
        return self.state.dropped

    def step(self, step_size: float) -> float:
        """Take one step; the norm of the natural gradient is an estimate if the algorithm samples."""
        with torch.inference_mode(False), torch.no_grad():
            self._settle()
            parts = self._examples.next(self._generator)
            terms = self._algorithm.terms(self._model, self.state, parts, self._generator)
            return self.state.update(step_size, terms)

    def _settle(self) -> None:
        state = self.state
        if self._most is None or not isinstance(state, FunctionSpaceState):
            return
        rank = self._model.likelihood.rank(self._model.network.num_outputs)
        if state.rows_kept + self._examples.per_step * rank * self._algorithm.rows_per_example > self._most:
            self.state = state.dense()

    def record(self) -> dict[str, Any]:
        """Copies of the state, the random generator and the place in the data."""
        return {
            "state": self.state.record(), "dense": self.state.rows_kept is None,
            "generator": self._generator.get_state(), "examples": self._examples.record(),
        }

    def restore(self, record: Mapping[str, Any]) -> None:
        if record["dense"] and isinstance(self.state, FunctionSpaceState):
            self.state = self.state.dense()
        self.state.restore(record["state"])
        self._generator.set_state(record["generator"].cpu())
        self._examples.restore(record["examples"])
