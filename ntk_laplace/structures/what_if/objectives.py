"""The objectives of changed data and their exact Hessian at the fit, which preconditions the descents; their memory.

    F(θ) = -Σ w_n log p(y_n | f(x_n; θ)) + ½ (θ-μ0)ᵀP0(θ-μ0) - g0ᵀθ,

with g0 the gradient that remained after training. Many changes of the weights of examples are many objectives, whose
networks share each pass. They are worth the products that write out the exact Hessian at the trained weights.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from ntk_laplace.errors import MemoryBudgetError, NonFiniteError, NumericalError, warn
from ntk_laplace.model.data import Replaced, Source, take
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.krylov import Deflated, Minima, WrittenOut, downward, minimize, remembered
from ntk_laplace.runtime.panels import panels
from ntk_laplace.structures import FittedModel, LinearizedModel, Settings, Structure
from ntk_laplace.structures.data_passes import shown
from ntk_laplace.structures.forecast import Problem, memory_of
from ntk_laplace.structures.points import TrainingPoints
from ntk_laplace.structures.weight_likelihood import (
    LocalCurvature,
    NetworkLikelihood,
    WeightedLikelihood,
    WeightLikelihood,
)

_REMEDY = "Take fewer groups at a time, or fewer training points."

_GRADIENT = 6  # flops of a gradient for each example and parameter

_MATRICES = 5  # (P, P), at the peak of a Hessian that is written out, inverted and rounded

# smallest curvatures of a Hessian that is written out, relative to the prior precision: of it at the trained weights,
# and for each share of the data that leaves, with which it is less true (halves of digits: 9 % fewer steps)
_SHIFT, _SHIFT_A_CHANGE = 0.05, 0.5


def fitted_at(model: LinearizedModel, structure: Structure, source: Source, points: TrainingPoints, theta: Tensor
              ) -> FittedModel:
    """The same structure, of a copy of the network at weights θ, fitted to points with their targets and weights."""
    changed = Replaced.of(source, points.targets, points.counts, model.settings.reducer)
    moved = model.at_weights(theta)
    return FittedModel(moved, structure.spec.fit(moved, changed))


@dataclass(frozen=True)
class Refit:
    """Fits the structure at weights that a descent has reached, where its precision preconditions better.

    Attributes
    ----------
    fitted : FittedModel
        At the weights where descents start.
    model : LinearizedModel
        Of the network that moves.
    source : Source
        Of all points.
    points : TrainingPoints
        With their targets, each counted once.
    """

    fitted: FittedModel
    model: LinearizedModel
    source: Source
    points: TrainingPoints

    @classmethod
    def of(
        cls, fitted: FittedModel, likelihood: NetworkLikelihood, model: LinearizedModel, source: Source,
        points: TrainingPoints,
    ) -> Refit | None:
        """None of a network with kinks: at each its steps shorten, and every fit begins them anew."""
        return None if likelihood.has_kinks(model.theta) else cls(fitted, model, source, points)

    def __call__(self, theta: Tensor, weights: Tensor) -> FittedModel:
        """The same structure, of a copy of the network at weights θ (P,), with example weights (N,)."""
        points = replace(self.points, weights=weights)
        return fitted_at(self.model, self.fitted.structure, self.source, points, theta)

    @property
    def stretch(self) -> int | None:
        """Gradients that take as long as a fit, at least; None if that is not known, too many, or out of memory."""
        found = self.fitted.once("gradients of a fit", self._gradients)
        return None if found > tuning.MOST_QUASI_NEWTON_STEPS else max(tuning.STRETCH, math.ceil(found))

    def _gradients(self) -> float:
        model, n = self.fitted.model, self.points.num_examples
        if model.settings.reducer.world_size > 1:
            return math.inf
        few = take(next(iter(self.source))[0], slice(0, 2))
        problem = Problem(model, n, model.jacobian_pass.rows(few))
        forecast = self.fitted.structure.spec.forecast(problem)
        if forecast is None or forecast.work is None or forecast.required > memory_of(model):
            return math.inf
        work = forecast.work
        rows = (work.passes * problem.num_columns + work.products) / n
        return rows + work.algebra / (_GRADIENT * n * problem.num_parameters)


@dataclass(eq=False)
class ChangedObjectives:
    """F for several changes of the example weights, at weights θ (S, P).

    Parameters
    ----------
    fitted : FittedModel
        Its prior.
    likelihood : WeightLikelihood
        Of all points, each counted once.
    weights : Tensor, (G, N)
        Example weights of each change.
    remaining : Tensor, (P,)
        g0.
    inverse : callable
        An approximate inverse Hessian times vectors (m, P), such as that of the fit's posterior precision.
    refit : Refit, optional
        Where the weights have gone far, the precision of the structure fitted there is closer.
    """

    fitted: FittedModel
    likelihood: WeightLikelihood
    weights: Tensor
    remaining: Tensor
    inverse: Callable[[Tensor], Tensor]
    refit: Refit | None = None
    _present: tuple[Tensor, WeightedLikelihood] | None = field(default=None, init=False)
    _passes: _Passes | None = field(default=None, init=False)  # while a descent goes on
    _constant: Tensor | None = field(default=None, init=False)  # (G,), added to F meanwhile

    def __post_init__(self) -> None:
        prior, like = self.fitted.prior, self.fitted.theta
        self._eps = max(torch.finfo(dtype).eps for dtype in (like.dtype, self.fitted.network.precision))
        with torch.no_grad():
            self.precision, self._mean = prior.flat_precision().to(like), prior.flat_mean().to(like)

    def values_and_gradients(self, at: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """F, (S,), nats, and its gradients, (S, P)."""
        self._count(rows)
        away = at - self._mean
        pull = self.precision * away
        values, gradients = self._of(rows).values_and_gradients(at)
        found = 0.5 * (pull * away).sum(1) - at @ self.remaining - values
        found = found if self._constant is None else found + self._constant[rows]
        return found, pull - self.remaining - gradients

    def _of(self, rows: Tensor) -> WeightedLikelihood:
        """The likelihood with the weights of these rows; what it has read of the data is kept while they stay."""
        if self._present is None or self._present[0] is not rows:
            self._present = rows, self.likelihood.weighted(self.weights[rows])
        return self._present[1]

    def at_once(self) -> int:
        """Number of weights whose graphs fit in memory together, at least 1."""
        return self.likelihood.at_once()

    def precondition(self, vectors: Tensor, rounded: bool = False) -> Tensor:
        """An approximate inverse Hessian times vectors (m, P), `rounded` to single precision if it is written out."""
        return self.inverse(vectors, rounded) if isinstance(self.inverse, WrittenOut) else self.inverse(vectors)

    @property
    def renewal(self) -> int | None:
        """Gradients that take as long as a fit of the structure at other weights, at least."""
        return None if self.refit is None else self.refit.stretch

    def renewed(self, at: Tensor, row: int) -> ChangedObjectives:
        """The same, preconditioned by the structure fitted to one change at weights (P,), where that is possible."""
        assert self.refit is not None
        own = copy.copy(self)
        with contextlib.suppress(MemoryBudgetError, NonFiniteError, NumericalError):
            own.inverse = self.refit(at, self.weights[row]).solver.solve
        return own

    def local(self, at: Tensor, rows: Tensor) -> LocalCurvature:
        """Gradients, (S, P), and products with the Hessians."""
        found = self._of(rows).curvature(at)
        gradients = self.precision * (at - self._mean) - self.remaining - found.gradients

        def products(vectors: Tensor) -> Tensor:
            self._count(rows)
            return self.precision * vectors - found.products(vectors)

        return LocalCurvature(gradients, products)

    def _count(self, rows: Tensor) -> None:
        if self._passes is not None:
            self._passes.add(len(rows))

    def changes(self, at: Tensor, directions: Tensor) -> Tensor:
        """Root of the sum of squares of how the log densities of all points change along directions (S, P), (S,)."""
        size = self._eps ** (1 / 3) / (self.precision * directions.square()).sum(1).sqrt()
        found, likelihood = torch.empty_like(size), self.likelihood
        for some in panels(len(at), 1, self.at_once()):
            step = size[some, None] * directions[some]
            after, before = (likelihood.log_prob(likelihood.outputs(at[some] + own)) for own in (step, -step))
            found[some] = (after - before).norm(dim=1)
        return found / (2.0 * size)

    def minimize(self, start: Tensor) -> Minima:
        """The optimum of each change; a progress bar counts the gradients and the products with Hessians."""
        with torch.no_grad(), contextlib.closing(_Passes(self.fitted.model, len(start))) as self._passes:
            self._constant = constant = self._cancelled(start)
            found = minimize(self, start, self._eps, _room(self.fitted.settings))
        self._passes = self._constant = None
        return replace(found, values=found.values - constant)

    def _cancelled(self, at: Tensor) -> Tensor:
        """Twice what terms of F below zero take off the others at weights (G, P) of all changes, (G,).

        The rounding of F is that of its terms, which may be large where F is near zero. With this constant, F is as
        large as they are.
        """
        found = torch.zeros_like(at[:, 0])
        for some in panels(len(at), 1, self.at_once()):
            log_prob = self.likelihood.log_prob(self.likelihood.outputs(at[some]))
            terms = -self.weights[some] * log_prob, -at[some] * self.remaining
            found[some] = -2.0 * sum(each.clamp(max=0.0).sum(1) for each in terms)
        return found


@dataclass(frozen=True, eq=False)
class CurvatureAtFit:
    """The exact Hessian of F at the weights of the fit, for its own targets and example weights.

    Products with it are kept beside the factorization of the fit. They correct its preconditioner for descents, and
    show whether they start at a minimum. For many descents the Hessian is written out.

    Attributes
    ----------
    fitted : FittedModel
    likelihood : WeightLikelihood
        Of all points, each counted once.
    theta : Tensor, (P,)
    counts : Tensor, (N,)
        The example weights.
    count : int
        Number of descents.
    """

    fitted: FittedModel
    likelihood: WeightLikelihood
    theta: Tensor
    counts: Tensor
    count: int

    def inverse(self, weights: Tensor) -> Callable[[Tensor], Tensor]:
        """Approximate inverse Hessian times vectors (m, P), for descents with example weights (G, N).

        If the Hessian is written out, the likelihood's part has the share of the data that the changes leave. At a
        saddle point few products correct it too: steps that are as good as Newton's would stay there.
        """
        if self._is_written_out:
            share = float(weights.sum() / (len(weights) * self.counts.sum()))
            shift = _SHIFT + _SHIFT_A_CHANGE * abs(1.0 - share)
            found = WrittenOut.of(self._hessian(share), self._precision.rsqrt(), shift)
            if found is not None:
                return found
        return self._corrected()

    def is_minimum(self) -> bool:
        """Whether no curvature of F is more negative than in a valley.

        F has no gradient there. What the products that precondition show is measured by one more product: along a
        direction of little curvature it has the least of rounding.
        """
        return self.fitted.once("at a minimum", self._is_minimum)

    def tell_saddle(self) -> None:
        """Warn where the weights are at no minimum of F."""
        if not self.fitted.model.refitted and not self.is_minimum():
            warn("the network is not at a minimum of its objective, whose curvature is negative along some direction: "
                 "this what-if contains the way to another minimum, whatever the change is. "
                 'posterior.refit(linearization="moving") goes to a minimum first')

    def _is_minimum(self) -> bool:
        if self._is_written_out:
            scale = self._precision.rsqrt()
            turned = self._hessian(1.0).mul_(scale).mul_(scale.unsqueeze(1))
            turned.diagonal().add_(tuning.VALLEY)
            found = downward(turned)
            if found is None:
                return True
            lowest = scale * found
        else:
            lowest = self._corrected().lowest
        with torch.no_grad():
            bend = lowest @ self._products(1)(lowest[None])[0]
        return bool(bend >= -tuning.VALLEY * (self._precision @ lowest.square()))

    @property
    def _is_written_out(self) -> bool:
        return _is_written_out(self.fitted.model, self.count)

    @cached_property
    def _precision(self) -> Tensor:
        with torch.no_grad():
            return self.fitted.prior.flat_precision().to(self.theta)

    def _hessian(self, share: float) -> Tensor:
        """Of F, (P, P), where the likelihood counts with a share."""
        found = self.fitted.once("likelihood's Hessian", self._of_the_likelihood)
        return (share * found).diagonal_scatter(share * found.diagonal() + self._precision)

    def _corrected(self) -> Deflated:
        return self.fitted.once("deflated", self._deflated)

    def _deflated(self) -> Deflated:
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(self.theta.shape, generator=generator, dtype=torch.float64, device="cpu").to(self.theta)
        with torch.no_grad():
            steps = min(tuning.DEFLATION, _room(self.fitted.settings) // (2 * noise.nbytes))
            return Deflated(self._products(1), self.fitted.solver.solve, noise, steps, self._precision)

    def _of_the_likelihood(self) -> Tensor:
        """The Hessian of -log p(D | θ), (P, P), from its product with every unit vector."""
        size, found = len(self.theta), torch.diag(-self._precision)
        together = min(tuning.GRAPH_GROUPS, self.likelihood.at_once())
        with torch.no_grad():
            products = self._products(together)
            for some in panels(size, 1, together):
                units = self.theta.new_zeros(together, size)
                units.diagonal(some.start).fill_(1.0)
                found[some] += products(units)[: some.stop - some.start]
        return found

    def _products(self, together: int) -> Callable[[Tensor], Tensor]:
        """Products of so many vectors with the Hessian of F."""
        found = self.likelihood.weighted(self.counts.repeat(together, 1)).curvature(self.theta.repeat(together, 1))
        return lambda vectors: self._precision * vectors - found.products(vectors)


class _Passes:
    """A progress bar of the passes of a descent, whose number is not known before."""

    def __init__(self, model: LinearizedModel, count: int) -> None:
        self._count, self._left, self._number = count, count, 0
        self._bar = shown(model, itertools.count(1), self._words, None)

    def _words(self) -> str:
        return f"{self._left:,} of {self._count:,} networks descend, pass {self._number:,}"

    def add(self, left: int) -> None:
        """A pass of so many networks."""
        self._left, self._number = left, next(self._bar)

    def close(self) -> None:
        """The bar disappears."""
        self._bar.close()


def _room(settings: Settings) -> int:
    """Bytes for what descents remember of their steps, or of the Hessian at their start."""
    budget = settings.memory_budget
    return tuning.DESCENT_BYTES if budget is None else min(tuning.DESCENT_BYTES, int(budget) // 8)


def _is_written_out(model: LinearizedModel, count: int) -> bool:
    """Whether descents of so many networks are worth the entries of the Hessian, and these fit in memory."""
    size = model.network.num_parameters
    return size <= tuning.WRITTEN_PER_GROUP * count and _MATRICES * size * model.theta.nbytes <= _room(model.settings)


def require_room(model: LinearizedModel, count: int, held: int) -> int:
    """How many of `count` networks descend together, at most.

    Raises
    ------
    MemoryBudgetError
        If their weights do not fit in memory beside what else is held, in bytes, and what descents remember.
    """
    theta, left = model.theta, _room(model.settings)
    one = theta.nbytes
    each = min(count, tuning.GROUPS, max(1, left // (tuning.FEWEST_VECTORS * one)))
    most, dtype = remembered(each, len(theta), theta.dtype, left)
    entry = dtype.itemsize + (dtype != theta.dtype) * theta.element_size()  # after the descent in the type of θ too
    learnt = each * most * (len(theta) * entry + most * theta.element_size())
    vectors = _MATRICES * model.network.num_parameters if _is_written_out(model, count) else 3 * tuning.DEFLATION
    known = one * min(vectors, 3 * (left // (2 * one)))
    model.require_memory(held + (count + 12 * each) * one + learnt + known, f"the weights of {count:,} networks",
                         _REMEDY)
    return each
