"""Many changes of the example weights at once: one optimum of the network, or of the linearized model, for each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ntk_laplace.jacobian import Jacobian
from ntk_laplace.model.data import Inputs, Source, num_examples
from ntk_laplace.model.network import ManyWeights
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.krylov import Minima
from ntk_laplace.runtime.panels import panels
from ntk_laplace.structures import FittedModel, LinearizedModel
from ntk_laplace.structures.data_passes import shown
from ntk_laplace.structures.points import TrainingPoints
from ntk_laplace.structures.training_inputs import training_inputs
from ntk_laplace.structures.weight_likelihood import LinearizedLikelihood, NetworkLikelihood
from ntk_laplace.structures.what_if.moving import checked_likelihood, fitted_with_remaining, moving_model, remaining_of
from ntk_laplace.structures.what_if.objectives import ChangedObjectives, CurvatureAtFit, Refit, require_room

_SAME = 0.01  # nats: a larger change of a training point's log likelihood is that of another minimum


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
    converged, falling : Tensor of bool, (G,)
        As in `Minima`.
    steps : Tensor, (G,)
        Number of steps.
    """

    model: LinearizedModel
    moving: bool
    thetas: Tensor
    weights: Tensor
    converged: Tensor
    falling: Tensor
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
        model, count, points = moving_model(fitted), len(weights), fitted.structure.points_to_change
        source = training_inputs(fitted.model, fitted.structure) if moving else None
        each = require_room(model, count, weights.nbytes)
        likelihood: NetworkLikelihood | LinearizedLikelihood
        refit: Refit | None = None
        if source is not None:
            likelihood, start = checked_likelihood(model, points, source, each), model.theta
            refit = Refit.of(fitted, likelihood, model, source, points)
            at_the_fit = CurvatureAtFit(fitted, likelihood, start, points.counts, count)
            inverse = at_the_fit.inverse(weights)
            at_the_fit.tell_saddle()
        else:  # of the linearized model the fit is the Hessian
            likelihood, start, inverse = LinearizedLikelihood(fitted, each), fitted.theta, fitted.solver.solve
        objective = ChangedObjectives(fitted, likelihood, weights, remaining_of(model), inverse, refit)
        found = _minima(model, each, objective, start.expand(count, -1), "what-ifs")
        return cls(model, moving, found.at, weights, found.converged, found.falling, found.steps, likelihood, source)

    def come_back(self, fitted: FittedModel) -> Tensor:
        """Whether each optimum leads back to the trained network if the change is undone, (G,).

        The descent goes from the optimum of the change to one of the unchanged data. It is the trained network's if
        the log likelihood of every training point, counted once, is as before, to .01 nats and the rounding of the
        optimum: minima that differ by a symmetry of the weights are one network.

        Parameters
        ----------
        fitted : FittedModel
            Before the changes.
        """
        if not self.moving:  # one minimum, for a log-concave likelihood
            return torch.ones_like(self.converged)
        model, likelihood, count = self.model, self._likelihood, len(self.thetas)
        each = require_room(model, count + 1, 2 * self.thetas.nbytes)
        start = torch.cat([model.theta[None], self.thetas])
        points = fitted.structure.points_to_change
        counts = points.counts.to(self.weights)
        unchanged = counts.expand(len(start), -1)
        inverse = CurvatureAtFit(fitted, likelihood, model.theta, counts, len(start)).inverse(unchanged)
        assert self._source is not None and isinstance(likelihood, NetworkLikelihood)
        refit = Refit.of(fitted, likelihood, model, self._source, points)
        objective = ChangedObjectives(fitted, likelihood, unchanged, remaining_of(model), inverse, refit)
        reached = _minima(model, each, objective, start, "points put back").at
        eps = max(torch.finfo(dtype).eps for dtype in (reached.dtype, model.network.precision))
        with torch.no_grad():
            home = self.log_prob_of(likelihood.outputs(reached[:1]))
            # an optimum is known to where a step gains eps |F|, a log likelihood to its square root
            rounding = eps * (1.0 / model.likelihood.weight + float(home.abs().sum()))
            tolerance = _SAME + (20 * rounding) ** 0.5
            found = [(self.log_prob_of(likelihood.outputs(some)) - home).abs().amax(1) <= tolerance
                     for some in reached[1:].split(self._each)]
        return torch.cat(found)

    @property
    def _each(self) -> int:
        return min(tuning.GROUPS, self._likelihood.at_once())

    def outputs(self, x: Inputs) -> Tensor:
        """Outputs of the moved networks, (G, n, C), at inputs of n examples."""
        network, thetas = self.model.network, self.thetas
        f = thetas.new_empty(len(thetas), num_examples(x), network.num_outputs)
        with torch.no_grad():
            for some, part, own in ManyWeights(network, x, len(thetas) > 1).passes(thetas, x, tuning.CHAIN_BYTES):
                f[some, part] = own
        return f

    def linearized_outputs(self, rows: Jacobian) -> Tensor:
        """f + J(θ - θ*), (G, n, C), at rows of J."""
        shapes = self.model.network.shapes
        return rows.f + rows.products(shapes.parts(self.thetas - self.model.theta)).permute(2, 1, 0)

    def training_outputs(self) -> Iterator[tuple[slice, Tensor]]:
        """Groups, and their outputs at the training points, (S, N, C)."""
        for some in panels(len(self.thetas), 1, self._each):
            yield some, self._likelihood.outputs(self.thetas[some])

    def log_prob(self) -> Tensor:
        """log p(y_n | f_n) of every training point after each change, (G, N), nats, each counted once."""
        with torch.no_grad():
            return torch.cat([self.log_prob_of(f) for _, f in self.training_outputs()])

    def log_prob_of(self, f: Tensor) -> Tensor:
        """log p(y_n | f_n), (S, N), nats, of outputs f (S, N, C) at the training points, each counted once."""
        return self._likelihood.log_prob(f) / self.model.likelihood.weight

    def fitted(self, index: int, fitted: FittedModel) -> FittedModel:
        """The structure fitted at the optimum of one change of the moving network; `fitted` is that before."""
        assert self._source is not None
        points: TrainingPoints = replace(fitted.structure.points_to_change, weights=self.weights[index])
        return fitted_with_remaining(self.model, fitted.structure, self._source, points, self.thetas[index])


def _minima(
    model: LinearizedModel, each: int, objective: ChangedObjectives, start: Tensor, what: str
) -> Minima:
    """Optima of all changes from their starts (G, P); at most `each` of them descend together."""
    each = min(each, objective.at_once())
    pairs = list(zip(objective.weights.split(each), start.split(each), strict=True))
    some = shown(model, pairs, what, len(start), lambda pair: len(pair[0]))
    return Minima.joined([replace(objective, weights=weights).minimize(own) for weights, own in some])
