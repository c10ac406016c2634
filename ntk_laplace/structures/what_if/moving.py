"""What-ifs of the network itself: its own optimum for changed data, where Newton's method with its exact Hessian ends.

The objective is that of the changed data with the linear term -g0ᵀθ, where g0 is the gradient that remained after
training. Without a change of the data the weights do not move. After `refit`, g0 = 0:

    F(θ) = -Σ w_n log p(y_n | f(x_n; θ)) + ½ (θ-μ0)ᵀP0(θ-μ0) - g0ᵀθ.

Quasi-Newton steps, with one gradient each, go down; Newton steps, with products with the exact Hessian by two backward
passes, end the descent. Both are preconditioned by the posterior precision of the fit, corrected once at the trained
weights where its products with the exact Hessian show that it is most wrong: by the second derivatives of the network,
which the Gauss-Newton matrix leaves out. Many changes of the weights of examples are many objectives, whose networks
share each pass. They are worth the products that write out the exact Hessian at the trained weights.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ntk_laplace.errors import warn
from ntk_laplace.model.data import Joined, Replaced, Source
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.krylov import Deflated, Minima, WrittenOut, downward, minimize, remembered
from ntk_laplace.runtime.panels import panels
from ntk_laplace.runtime.resources import require_memory
from ntk_laplace.structures import FittedModel, LinearizedModel, Settings, Structure
from ntk_laplace.structures.data_passes import shown
from ntk_laplace.structures.model import RemainingGradient
from ntk_laplace.structures.points import TrainingPoints, present_values
from ntk_laplace.structures.training_inputs import training_inputs
from ntk_laplace.structures.weight_likelihood import (
    LocalCurvature,
    NetworkLikelihood,
    WeightedLikelihood,
    WeightLikelihood,
)

__all__ = ["ChangedObjectives", "at_minimum", "fitted_at", "is_written_out", "moved", "moving_model", "own_minimum",
           "remaining_gradient", "require_room", "tell_saddle", "tell_unreached", "with_remaining"]

_REMEDY = "Take fewer groups at a time, or fewer training points."

_MATRICES = 5  # (P, P), at the peak of a Hessian that is written out, inverted and rounded

# smallest curvatures of a Hessian that is written out, relative to the prior precision: of it at the trained weights,
# and for each share of the data that leaves, with which it is less true (halves of digits: 9 % fewer steps)
_SHIFT, _SHIFT_A_CHANGE = 0.05, 0.5


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
    inverse : callable, optional
        An approximate inverse Hessian times vectors (m, P); by default that of the fit's posterior precision.
    """

    def __init__(
        self, fitted: FittedModel, likelihood: WeightLikelihood, weights: Tensor, remaining: Tensor,
        inverse: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        prior, like = fitted.prior, fitted.theta
        self._fitted, self._likelihood, self._weights, self._remaining = fitted, likelihood, weights, remaining
        self._present: tuple[Tensor, WeightedLikelihood] | None = None
        self._eps = max(torch.finfo(dtype).eps for dtype in (like.dtype, fitted.network.precision))
        self._inverse = fitted.solver.solve if inverse is None else inverse
        self._room = room(fitted.settings)
        self._passes: _Passes | None = None  # while a descent goes on
        with torch.no_grad():
            self.precision, self._mean = prior.flat_precision().to(like), prior.flat_mean().to(like)

    def values_and_gradients(self, at: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """F, (S,), nats, and its gradients, (S, P)."""
        self._count(rows)
        away = at - self._mean
        pull = self.precision * away
        values, gradients = self._of(rows).values_and_gradients(at)
        return 0.5 * (pull * away).sum(1) - at @ self._remaining - values, pull - self._remaining - gradients

    def _of(self, rows: Tensor) -> WeightedLikelihood:
        """The likelihood with the weights of these rows; what it has read of the data is kept while they stay."""
        if self._present is None or self._present[0] is not rows:
            self._present = rows, self._likelihood.weighted(self._weights[rows])
        return self._present[1]

    def at_once(self) -> int:
        """Number of weights whose graphs fit in memory together, at least 1."""
        return self._likelihood.at_once()

    def precondition(self, vectors: Tensor, rounded: bool = False) -> Tensor:
        """An approximate inverse Hessian times vectors (m, P), `rounded` to single precision if it is written out."""
        return self._inverse(vectors, rounded) if isinstance(self._inverse, WrittenOut) else self._inverse(vectors)

    def preconditioned(self, at: Tensor, counts: Tensor) -> ChangedObjectives:
        """The same, preconditioned by the exact Hessian of F at θ (P,), for example weights (N,).

        Both are those of the fit: products with the Hessian are kept beside its factorization. For few changes they
        correct the fit's preconditioner. For many the Hessian is written out, and the likelihood's part has the share
        of the data that the changes leave. At a saddle point few products correct it too: steps that are as good as
        Newton's would stay there.
        """
        inverse: Callable[[Tensor], Tensor] | None = None
        if self._is_written_out():
            share = float(self._weights.sum() / (len(self._weights) * counts.sum()))
            shift = _SHIFT + _SHIFT_A_CHANGE * abs(1.0 - share)
            inverse = WrittenOut.of(self._hessian(at, counts, share), self.precision.rsqrt(), shift)
        if inverse is None:
            inverse = self._corrected(at, counts)
        return ChangedObjectives(self._fitted, self._likelihood, self._weights, self._remaining, inverse)

    def is_minimum(self, at: Tensor, counts: Tensor) -> bool:
        """Whether no curvature of F at θ (P,), for example weights (N,), is more negative than in a valley.

        Both are those of the fit, whose products with the Hessian precondition too. F has no gradient there. What they
        show is measured by one more product: along a direction of little curvature it has the least of rounding.
        """
        return self._fitted.once("at a minimum", lambda: self._is_minimum(at, counts))

    def _is_minimum(self, at: Tensor, counts: Tensor) -> bool:
        if self._is_written_out():
            scale = self.precision.rsqrt()
            turned = self._hessian(at, counts, 1.0).mul_(scale).mul_(scale.unsqueeze(1))
            turned.diagonal().add_(tuning.VALLEY)
            found = downward(turned)
            if found is None:
                return True
            lowest = scale * found
        else:
            lowest = self._corrected(at, counts).lowest
        with torch.no_grad():
            bend = lowest @ self._at_the_fit(at, counts, 1)(lowest[None])[0]
        return bool(bend >= -tuning.VALLEY * (self.precision @ lowest.square()))

    def _is_written_out(self) -> bool:
        return is_written_out(self._fitted.model, len(self._weights))

    def _hessian(self, at: Tensor, counts: Tensor, share: float) -> Tensor:
        """Of F, (P, P), where the likelihood counts with a share."""
        found = self._fitted.once("likelihood's Hessian", lambda: self._of_the_likelihood(at, counts))
        return (share * found).diagonal_scatter(share * found.diagonal() + self.precision)

    def _corrected(self, at: Tensor, counts: Tensor) -> Deflated:
        return self._fitted.once("deflated", lambda: self._deflated(at, counts))

    def _deflated(self, at: Tensor, counts: Tensor) -> Deflated:
        noise = torch.randn(at.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(at)
        with torch.no_grad():
            steps = min(tuning.DEFLATION, self._room // (2 * noise.nbytes))
            return Deflated(self._at_the_fit(at, counts, 1), self._inverse, noise, steps, self.precision)

    def _of_the_likelihood(self, at: Tensor, counts: Tensor) -> Tensor:
        """The Hessian of -log p(D | θ), (P, P), from its product with every unit vector."""
        together, found = min(tuning.GRAPH_GROUPS, self.at_once()), torch.diag(-self.precision)
        with torch.no_grad():
            products = self._at_the_fit(at, counts, together)
            for some in panels(len(at), 1, together):
                units = at.new_zeros(together, len(at))
                units.diagonal(some.start).fill_(1.0)
                found[some] += products(units)[: some.stop - some.start]
        return found

    def _at_the_fit(self, at: Tensor, counts: Tensor, together: int) -> Callable[[Tensor], Tensor]:
        """Products of so many vectors with the Hessian of F at θ (P,)."""
        rows = torch.zeros(together, dtype=torch.long, device=at.device)
        return self.changed(counts[None]).local(at.repeat(together, 1), rows).products

    def changed(self, weights: Tensor) -> ChangedObjectives:
        """For other example weights, (G, N)."""
        return ChangedObjectives(self._fitted, self._likelihood, weights, self._remaining, self._inverse)

    def of(self, likelihood: WeightLikelihood) -> ChangedObjectives:
        """Of other targets."""
        return ChangedObjectives(self._fitted, likelihood, self._weights, self._remaining, self._inverse)

    def local(self, at: Tensor, rows: Tensor) -> LocalCurvature:
        """Gradients, (S, P), and products with the Hessians."""
        found = self._of(rows).curvature(at)
        gradients = self.precision * (at - self._mean) - self._remaining - found.gradients

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
        found, likelihood = torch.empty_like(size), self._likelihood
        for some in panels(len(at), 1, self.at_once()):
            step = size[some, None] * directions[some]
            after, before = (likelihood.log_prob(likelihood.outputs(at[some] + own)) for own in (step, -step))
            found[some] = (after - before).norm(dim=1)
        return found / (2.0 * size)

    def minimize(self, start: Tensor) -> Minima:
        """The optimum of each change; a progress bar counts the gradients and the products with Hessians."""
        with torch.no_grad(), contextlib.closing(_Passes(self._fitted.model, len(start))) as self._passes:
            found = minimize(self, start, self._eps, self._room)
        self._passes = None
        return found


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


def room(settings: Settings) -> int:
    """Bytes for what descents remember of their steps, or of the Hessian at their start."""
    budget = settings.memory_budget
    return tuning.DESCENT_BYTES if budget is None else min(tuning.DESCENT_BYTES, int(budget) // 8)


def is_written_out(model: LinearizedModel, count: int) -> bool:
    """Whether descents of so many networks are worth the entries of the Hessian, and these fit in memory."""
    size = model.network.num_parameters
    return size <= tuning.WRITTEN_PER_GROUP * count and _MATRICES * size * model.theta.nbytes <= room(model.settings)


def require_room(model: LinearizedModel, count: int, held: int) -> int:
    """How many of `count` networks descend together, at most.

    Raises
    ------
    MemoryBudgetError
        If their weights do not fit in memory beside what else is held, in bytes, and what descents remember.
    """
    theta, left = model.theta, room(model.settings)
    one = theta.nbytes
    each = min(count, tuning.GROUPS, max(1, left // (tuning.FEWEST_VECTORS * one)))
    most, dtype = remembered(each, len(theta), theta.dtype, left)
    entry = dtype.itemsize + (dtype != theta.dtype) * theta.element_size()  # after the descent in the type of θ too
    learnt = each * most * (len(theta) * entry + most * theta.element_size())
    vectors = _MATRICES * model.network.num_parameters if is_written_out(model, count) else 3 * tuning.DEFLATION
    known = one * min(vectors, 3 * (left // (2 * one)))
    require_memory(held + (count + 12 * each) * one + learnt + known, model.network.device,
                   f"the weights of {count:,} networks", _REMEDY, model.settings.memory_budget)
    return each


def remaining_gradient(model: LinearizedModel, structure: Structure) -> Tensor:
    """g0, (P,): the gradient of the objective that remained at the end of training; zero after a refit.

    That of an earlier what-if is not the present one if points were added or left out since, or the prior has changed.
    """
    still = replace(model, displacement=None)
    if model.refitted:
        return torch.zeros_like(still.theta)
    points, known = structure.trained_points, model.training_gradient
    if known is not None and known.holds(model, points):
        return known.value
    with torch.no_grad():
        left = points.residual(model.likelihood)
        more = structure.points.num_examples - len(left)
        left = torch.cat([left, left.new_zeros(more, left.shape[1])])
        return still.joint_gradient(structure.vjp(still, left))


def moving_model(fitted: FittedModel) -> LinearizedModel:
    """The model at the network's weights, without displacement or files, whose remaining gradient is known."""
    model = fitted.model
    quiet = replace(model.settings, checkpoint=None, resume=None)
    remaining = remaining_gradient(model, fitted.structure)
    still = replace(model.copied(), displacement=None, refitted=False, settings=quiet)
    return with_remaining(still, remaining, fitted.structure.points)


def with_remaining(model: LinearizedModel, gradient: Tensor, points: TrainingPoints) -> LinearizedModel:
    """The model that goes to the optimum of these points with g0, (P,)."""
    kept = RemainingGradient(gradient, present_values(model.prior, model.likelihood), points)
    return replace(model, training_gradient=kept)


def fitted_at(model: LinearizedModel, structure: Structure, source: Source, points: TrainingPoints, theta: Tensor
              ) -> FittedModel:
    """The same structure, of a copy of the network at weights θ, fitted to points with their targets and weights."""
    model = model.at_weights(theta)
    changed = Replaced.of(source, points.targets, points.counts, model.settings.reducer)
    assert model.training_gradient is not None
    model = with_remaining(model, model.training_gradient.value, points)
    return FittedModel(model, structure.spec.fit(model, changed))


def moved(fitted: FittedModel, points: TrainingPoints, added: Source | None = None) -> FittedModel:
    """The network's own optimum for changed points, next to its weights, and the same structure fitted there.

    Parameters
    ----------
    fitted : FittedModel
        Of the points before the change.
    points : TrainingPoints
        After the change; their outputs are not read.
    added : Source, optional
        Inputs of the points that were added, which are the last.

    Returns
    -------
    FittedModel
        Of a copy of the network. A warning tells if the optimum was not reached.

    Raises
    ------
    DataError
        If the data of the fit cannot be read again, or are not the same any more.
    MemoryBudgetError
        If one example at one value of the weights does not fit in memory.
    """
    result, found = _moved(fitted, points, added)
    tell_unreached(found.converged, found.falling, found.steps)
    return result


def _moved(fitted: FittedModel, points: TrainingPoints, added: Source | None) -> tuple[FittedModel, Minima]:
    """As `moved`, and how the descent has ended."""
    model = moving_model(fitted)
    source = training_inputs(fitted.model, fitted.structure)
    source = source if added is None else Joined([source, added])
    require_room(model, 1, 0)
    own = replace(points, weights=None, expanded=None)
    likelihood = NetworkLikelihood(model, own, source, 1)
    likelihood.require_second_derivatives(model.theta)
    assert model.training_gradient is not None
    remaining = model.training_gradient.value
    unchanged, before, targets = fitted.structure.points_to_change, torch.zeros_like(points.counts), own.targets.clone()
    before[: unchanged.num_examples] = unchanged.counts  # added points do not count yet
    targets[: unchanged.num_examples] = unchanged.targets
    of_the_fit = replace(own, targets=targets)
    trained = likelihood if own.same_data(of_the_fit) else NetworkLikelihood(model, of_the_fit, source, 1)
    at_the_fit = ChangedObjectives(fitted, trained, points.counts[None], remaining).preconditioned(model.theta, before)
    if not fitted.model.refitted:
        tell_saddle(at_the_fit, model.theta, before)
    found = at_the_fit.of(likelihood).minimize(model.theta[None])
    return fitted_at(model, fitted.structure, source, points, found.at[0]), found


def own_minimum(fitted: FittedModel) -> FittedModel:
    """The same structure at the network's own minimum of its objective next to its weights: F with g0 = 0.

    A warning tells if it was not reached.

    Raises
    ------
    DataError, MemoryBudgetError
        As in `moved`.
    """
    result, found = _moved(fitted.derived(fitted.structure, replace(fitted.model, refitted=True)),
                           fitted.structure.points_to_change, None)
    if not bool(found.converged.all()):
        _tell_best("a minimum", found.steps, bool(found.falling.any()), "train the network to convergence first")
    if fitted.structure.base is None and fitted.model.training_gradient is None:  # no what-if: a fit like any other
        return result.derived(result.structure, replace(result.model, training_gradient=None))
    return result


def at_minimum(fitted: FittedModel) -> bool:
    """Whether the network's weights are at a minimum of F for the points as they are.

    Raises
    ------
    DataError, MemoryBudgetError
        As in `moved`.
    """
    model, points = moving_model(fitted), fitted.structure.points_to_change
    source = training_inputs(fitted.model, fitted.structure)
    likelihood = NetworkLikelihood(model, replace(points, weights=None, expanded=None), source, 1)
    likelihood.require_second_derivatives(model.theta)
    assert model.training_gradient is not None
    unchanged = ChangedObjectives(fitted, likelihood, points.counts[None], model.training_gradient.value)
    return unchanged.is_minimum(model.theta, points.counts)


def tell_saddle(objective: ChangedObjectives, theta: Tensor, counts: Tensor) -> None:
    """Warn where the weights of the fit, (P,), are at no minimum of F for its example weights, (N,)."""
    if not objective.is_minimum(theta, counts):
        warn("the network is not at a minimum of its objective, whose curvature is negative along some direction: this "
             "what-if contains the way to another minimum, whatever the change is. "
             'posterior.refit(linearization="moving") goes to a minimum first')


def tell_unreached(converged: Tensor, falling: Tensor, steps: Tensor) -> None:
    """Warn of changes, (G,), whose optimum was not reached."""
    missed = ~converged
    if not bool(missed.any()):
        return
    which = f"{int(missed.sum())} of {len(missed)} changes" if len(missed) > 1 else "the changed data"
    _tell_best(f"its optimum for {which}", steps[missed], bool(falling.any()),
               'train the network to convergence first, or call posterior.refit(linearization="moving")')


def _tell_best(where: str, steps: Tensor, falling: bool, remedy: str) -> None:
    why = (f"the objective still falls, as it does far from a minimum: {remedy}" if falling else
           "the objective has kinks or is flat there")
    warn(f"the network is not at {where} after up to {int(steps.max())} steps: {why}; "
         "the answer is that of the best weights found")
