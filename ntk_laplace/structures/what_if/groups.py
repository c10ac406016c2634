"""Many changes of the example weights at once: one optimum of the network, or of the linearized model, for each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ntk_laplace.jacobian import Jacobian
from ntk_laplace.model.data import Inputs, Source
from ntk_laplace.model.network import ManyWeights
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.krylov import Minima
from ntk_laplace.runtime.progress import track
from ntk_laplace.runtime.resources import require_memory
from ntk_laplace.structures import FittedModel, LinearizedModel
from ntk_laplace.structures.joint import LinearizedLikelihood, NetworkLikelihood
from ntk_laplace.structures.points import TrainingPoints
from ntk_laplace.structures.training_inputs import training_inputs
from ntk_laplace.structures.what_if.moving import ChangedObjectives, fitted_at, moving_model

__all__ = ["Groups"]

_REMEDY = "Ask for fewer groups at a time, or fewer training points."


@dataclass(frozen=True)
class Groups:
    """The optima of G changes.

    Attributes
    ----------
    model : LinearizedModel
        Whose network or linearization has moved.
    moving : bool
        Which of the two.
    thetas : Tensor, (G, P)
    weights : Tensor, (G, N)
        Example weights of each change.
    converged : Tensor of bool, (G,)
    steps : Tensor, (G,)
        Number of Newton steps.
    """

    model: LinearizedModel
    moving: bool
    thetas: Tensor
    weights: Tensor
    converged: Tensor
    steps: Tensor
    _likelihood: NetworkLikelihood | LinearizedLikelihood
    _source: Source | None

    @classmethod
    def of(cls, fitted: FittedModel, weights: Tensor, moving: bool) -> Groups:
        """Find the optima, as many at a time as fit in memory.

        Raises
        ------
        MemoryBudgetError
            If the weights of all networks, or the graph of one, do not fit.
        DataError
            If the data of the fit cannot be read again, where the network moves.
        """
        model, count = moving_model(fitted, "what-ifs of many groups"), len(weights)
        points = replace(fitted.structure.points_to_change, weights=None, expanded=None)
        source = training_inputs(fitted.model, fitted.structure, None, "relinearize(x)") if moving else None
        budget, device = model.settings.memory_budget, model.network.device
        held = weights.nbytes + (count + 8 * min(count, tuning.GROUPS)) * fitted.theta.nbytes
        require_memory(held, device, f"the weights of {count:,} networks", _REMEDY, budget)
        likelihood: NetworkLikelihood | LinearizedLikelihood
        if source is not None:
            likelihood = NetworkLikelihood(model, points, source, min(count, tuning.GROUPS))
            likelihood.require_second_derivatives(model.theta)
        else:
            likelihood = LinearizedLikelihood(fitted, min(count, tuning.GROUPS))
        start = model.theta if moving else fitted.theta
        assert model.training_gradient is not None
        each = min(tuning.GROUPS, likelihood.at_once())
        parts = track(weights.split(each), "ntk_laplace: what-ifs", count, model.settings.progress, len, 0.5)
        found: list[Minima] = []
        for some in parts:
            objective = ChangedObjectives(fitted, likelihood, some, model.training_gradient)
            found.append(objective.minimize(fitted, start.expand(len(some), -1)))
        thetas, converged, steps = (torch.cat([getattr(one, name) for one in found])
                                    for name in ("at", "converged", "steps"))  # fmt: skip
        return cls(model, moving, thetas, weights, converged, steps, likelihood, source)

    def outputs(self, x: Inputs) -> Tensor:
        """Outputs of the moved networks, (G, n, C), at inputs of n examples."""
        network = self.model.network
        many = ManyWeights(network, x, len(self.thetas) > 1)
        each, _ = many.at_once(x, tuning.CHAIN_BYTES)
        with torch.no_grad():
            return torch.cat([many(some, x).to(self.thetas) for some in self.thetas.split(each)])

    def linearized_outputs(self, rows: Jacobian) -> Tensor:
        """f + J(θ - θ*), (G, n, C), at rows of J."""
        shapes = self.model.network.shapes
        return rows.f + rows.products(shapes.parts(self.thetas - self.model.theta)).permute(2, 1, 0)

    def training_outputs(self) -> Iterator[tuple[slice, Tensor]]:
        """Groups, and their outputs at the training points, (S, N, C)."""
        each = min(tuning.GROUPS, self._likelihood.at_once())
        for start in range(0, len(self.thetas), each):
            some = slice(start, min(start + each, len(self.thetas)))
            yield some, self._likelihood.outputs(self.thetas[some])

    def log_prob(self) -> Tensor:
        """log p(y_n | f_n) of every training point after each change, (G, N), nats, each counted once."""
        with torch.no_grad():
            return torch.cat([self.log_prob_of(f) for _, f in self.training_outputs()])

    def log_prob_of(self, f: Tensor) -> Tensor:
        """log p(y_n | f_n), (S, N), nats, of outputs f (S, N, C) at the training points."""
        return self._likelihood.log_prob(f)

    def fitted(self, index: int, fitted: FittedModel) -> FittedModel:
        """The structure fitted at the optimum of one change of the moving network; `fitted` is that before."""
        assert self._source is not None
        points: TrainingPoints = replace(fitted.structure.points_to_change, weights=self.weights[index])
        return fitted_at(self.model, fitted.structure, self._source, points, self.thetas[index])
