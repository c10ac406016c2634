"""log p(D | f(θ)) of the network itself: several weights in one pass, batch by batch of the data."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ntk_laplace.errors import UnsupportedError
from ntk_laplace.model.data import InputData, Inputs, Source, num_bytes, num_examples, take
from ntk_laplace.model.network import ManyWeights, autograd_nodes, twice_differentiable
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.resources import require_memory
from ntk_laplace.structures.batch_merging import merged_batches
from ntk_laplace.structures.fitted_model import FittedModel
from ntk_laplace.structures.model import LinearizedModel
from ntk_laplace.structures.points import TrainingPoints
from ntk_laplace.structures.training_inputs import training_inputs
from ntk_laplace.structures.weight_likelihood.base import (
    REMEDY,
    GradientGraph,
    LocalCurvature,
    WeightedLikelihood,
    WeightLikelihood,
    differentiated,
    no_second_derivatives,
)
from ntk_laplace.structures.weight_likelihood.many_points import ChosenPoints, ManyPoints

_SECOND = 2  # bytes of a gradient's graph, relative to those of the outputs' graph
_DISAGREEMENT = 0.2  # relative gap of a product and a difference of gradients; kinks and float32 make a few percent
# operations of the graph whose derivative jumps; ELU has a jump unless α = 1
_KINKS = re.compile(r"[Rr]elu|^Elu|shrink|Threshold|Hard|Clamp|Abs|Max|Min|Sort|Topk|Kthvalue|Median")
# where they are compared: distances from the weights, over their root mean square. At an optimum of ReLU units inputs
# may lie on a kink, where no difference of gradients is a derivative; a wrong product is wrong everywhere
_PLACES = (0.0, 0.01, 0.03)
_FEW = 8  # examples, behind kinks
_SMALL = 1e-6  # of the root mean square of all weights; smaller parameters say nothing of their size
_SMALLER = 2  # times that a difference may shrink to a tenth: it is wrong behind a normalization of small inputs


class NetworkLikelihood(WeightLikelihood):
    """log p(D | f(θ)) of the network itself: several weights in one pass, batch by batch of the data.

    Several processes each read a share of the data, and add up; all have the same numbers.

    Parameters
    ----------
    model : LinearizedModel
        Its network and likelihood.
    points : TrainingPoints
        Targets and weights of all data; the outputs are not read.
    source : Source
        The inputs of this process's share.
    count : int
        Weights at a time, at most, for the prediction of the memory.

    Raises
    ------
    MemoryBudgetError
        If one example at one value of the weights does not fit in memory, or the weights and their outputs do not.
    """

    @classmethod
    def of(cls, fitted: FittedModel, x: InputData | None, count: int) -> NetworkLikelihood:
        """Of the training points, at the inputs of the fit, or at `x` if the structure does not keep the data.

        Raises
        ------
        DataError
            If inputs are needed and missing, or are not those of the fit.
        """
        return cls(fitted.model, fitted.points, training_inputs(fitted.model, fitted.structure, x, "x="), count)

    def __init__(self, model: LinearizedModel, points: TrainingPoints, source: Source, count: int) -> None:
        self._dtype, self._reducer = model.jacobian_pass.dtype, model.settings.reducer
        self._batches: list[Inputs] = [inputs for inputs, _ in merged_batches(source, model.network)]
        self._share = self._points = ManyPoints(model.likelihood, points)
        self._numbers: Tensor | slice = slice(None)  # of the share
        if self._reducer.world_size > 1:
            self._numbers = source.numbers(self._reducer)[0].to(points.f.device)
            self._share = ManyPoints(model.likelihood.at(self._numbers), points.subset(self._numbers))
        self._network = ManyWeights(model.network, self._batches[0], count > 1)
        budget = model.settings.memory_budget
        self._room = tuning.CHAIN_BYTES if budget is None else min(tuning.CHAIN_BYTES, int(budget))
        largest = max(self._batches, key=num_examples)
        one = tuning.GRAPH_FACTOR * self._network.saved_bytes(take(largest, slice(0, 1)))
        n, c = points.num_examples, points.num_outputs
        held = 4 * self._dtype.itemsize * count * (model.network.num_parameters + n * c)
        self._at_once = [self._network.at_once(inputs, self._room) for inputs in self._batches]
        passing = max(one * few * min(many, count) for many, few in self._at_once)
        what = f"the network's outputs and gradients at {count:,} weights"
        require_memory(held + passing, model.network.device, what, REMEDY, budget)
        self._spare = max(0, self._room - passing)  # for inputs that are kept between passes
        saved = sum(self._network.saved_bytes(inputs) for inputs in self._batches)
        fitting = max(1, self._room // (_SECOND * tuning.GRAPH_FACTOR * max(1, saved)))
        self._fitting = min(self._reducer.gather(fitting))

    def values(self, thetas: Tensor) -> Tensor:
        total = thetas.new_zeros(len(thetas))
        with torch.no_grad():
            for some, part, x in self._passes(thetas):
                total[some] += self._share.values(self._network(thetas[some], x).to(self._dtype), part)
        self._reducer.sum_(total)
        return total

    def outputs(self, thetas: Tensor) -> Tensor:
        f = thetas.new_empty(len(thetas), *self._share.shape)
        with torch.no_grad():
            for some, part, x in self._passes(thetas):
                f[some, part] = self._network(thetas[some], x).to(f)
        if self._share is self._points:
            return f
        found = f.new_zeros(len(f), *self._points.shape)
        found[:, self._numbers] = f
        self._reducer.sum_(found)
        return found

    def weighted(self, weights: Tensor) -> WeightedLikelihood:
        return _WeightedNetwork(self, weights[:, self._numbers])

    def require_second_derivatives(self, theta: Tensor) -> None:
        """Compare a product with the Hessian with a difference of gradients, at θ (P,) or else near it.

        An operation whose backward pass cannot be differentiated may lose a part of the Hessian without an error.

        Raises
        ------
        UnsupportedError
            If they differ, or the network runs in half precision, where no such difference is known.
        """
        precision = self._network.network.precision
        if torch.finfo(precision).bits < 32:
            raise UnsupportedError("a network in float32 or float64, for Newton steps with its exact Hessian",
                                   f"one in {precision}", 'Use linearization="fixed", or network.float().')
        generator, size = torch.Generator().manual_seed(0), self._sizes(theta)
        gaps = list[float]()
        for examples in (None, _FEW) if self.has_kinks(theta) else (None,):
            for distance in _PLACES:
                drawn = torch.randn(2, len(theta), generator=generator, dtype=torch.float64, device="cpu")
                away, noise = size * drawn.to(theta)
                gaps.append(self.hessian_gap(theta + distance * away, noise / size.max(), examples))
                if gaps[-1] <= _DISAGREEMENT:
                    return
        raise no_second_derivatives(f"products with the Hessian that differ by {min(gaps):.2g} from the gradient's "
                                     "difference")

    def _sizes(self, theta: Tensor) -> Tensor:
        """Root mean square of each weight's parameter, (P,); of all weights where it is 0, and 1 if all are.

        A step of one length for all would turn off or on every unit of a layer whose weights a prior has made small.
        """
        parts = theta.split(list(self._network.network.shapes.sizes.values()))
        each = torch.stack([part.square().mean().sqrt() for part in parts])
        whole = theta.square().mean().sqrt()
        each = torch.where(each > _SMALL * whole, each, whole if whole > 0 else torch.ones_like(whole))
        return torch.cat([one.expand(len(part)) for one, part in zip(each, parts, strict=True)])

    def has_kinks(self, theta: Tensor) -> bool:
        """Whether an operation of the network's graph at θ, (P,), has a derivative that jumps."""
        with torch.enable_grad():
            f = self._network(theta[None].detach().requires_grad_(), take(self._batches[0], slice(0, 2)))
        return any(_KINKS.search(node.name()) for node in autograd_nodes(f))

    def hessian_gap(self, theta: Tensor, noise: Tensor, examples: int | None = None) -> float:
        """Relative gap of a product with the Hessian at θ and a difference of gradients along the same direction.

        The difference shrinks as long as the gap is large, and the difference is another one than before. It may be
        that of some examples, about as many as asked for: behind kinks a difference of many examples is no derivative,
        as some are at a kink between its ends, and the smaller it is, the more each of them adds.
        """
        size = torch.finfo(self._network.network.precision).eps ** (1 / 3) * (1.0 + theta.abs().max())
        total = self._points.shape[0]
        weights = theta.new_zeros(1, total)
        weights[:, :: 1 if examples is None else max(1, total // examples)] = 1.0
        once = self.weighted(weights)
        found = once.curvature(theta[None]).products(noise[None])[0]

        def difference(size: Tensor) -> Tensor:
            after, before = (once.curvature((theta + own * noise)[None]).gradients[0] for own in (size, -size))
            return (after - before) / (2.0 * size)

        truth = difference(size)
        for _ in range(_SMALLER):
            if _gap(found, truth) <= _DISAGREEMENT:
                break
            size, larger = size / 10.0, truth
            truth = difference(size)
            if _gap(larger, truth) <= _DISAGREEMENT:
                break
        return _gap(found, truth) if examples is None or bool(truth.any()) else math.inf

    def at_once(self) -> int:
        return self._fitting

    def values_and_gradients(self, thetas: Tensor) -> tuple[Tensor, Tensor]:
        return self._summed(thetas, lambda _, part, x: _Examples(None, part, x, False))

    def _summed(
        self, thetas: Tensor, examples: Callable[[slice, slice, Inputs], _Examples]
    ) -> tuple[Tensor, Tensor]:
        """Values and gradients of all passes, each of some examples."""
        total, gradients = thetas.new_zeros(len(thetas)), torch.zeros_like(thetas)
        for some, part, x in self._passes(thetas):
            theta, own = thetas[some].detach().requires_grad_(), examples(some, part, x)
            with torch.enable_grad():
                f = self._network(theta, own.x, own.apart)
            values, residual = self._share.values_and_residuals(f.to(self._dtype), own.points, own.weights)
            total[some] += values
            gradients[some] += torch.autograd.grad(f, theta, residual.to(f))[0]
        self._reducer.sum_(total, gradients)
        return total, gradients

    def _passes(
        self, thetas: Tensor, share: int = 1, most: int | None = None
    ) -> Iterator[tuple[slice, slice, Inputs]]:
        """Weights, at most so many, points and inputs of each pass, which takes a share of the memory for one."""
        seen = 0
        for x, (many, few) in zip(self._batches, self._at_once, strict=True):
            n = num_examples(x)
            many, few = (max(1, many // share), few) if many > 1 else (1, max(1, few // share))
            many = many if most is None else min(many, most)
            for first in range(0, n, few):
                last = min(first + few, n)
                inputs = x if few >= n else take(x, slice(first, last))
                for start in range(0, len(thetas), many):
                    yield slice(start, start + many), slice(seen + first, seen + last), inputs
            seen += n


@dataclass(frozen=True)
class _Examples:
    """Some of the examples for some rows: their weights (S, n), their points, and the network's inputs.

    Without weights those of the data count. `apart` says whether each row has examples of its own.
    """

    weights: Tensor | None
    points: slice | ChosenPoints
    x: Inputs
    apart: bool


class _WeightedNetwork(WeightedLikelihood):
    """Each row reads those of the examples alone that have a weight in it, if they are few enough.

    They are gathered once, and kept as long as they fit in the memory for a pass.
    """

    def __init__(self, of: NetworkLikelihood, weights: Tensor) -> None:
        self._of, self._weights = of, weights
        self._kept: dict[tuple[int, int, int, int], _Examples] = {}
        self._left = of._spare

    def values_and_gradients(self, thetas: Tensor) -> tuple[Tensor, Tensor]:
        return self._of._summed(thetas, self._examples)

    def curvature(self, thetas: Tensor) -> LocalCurvature:
        """Gradients and exact Hessians, by two backward passes.

        The graphs are kept between products if they fit in memory, and built again for each product if not.

        Raises
        ------
        UnsupportedError
            If an operation of the network has no second derivative.
        """
        of = self._of
        kept = len(thetas) <= of.at_once()
        gradients, graphs = torch.zeros_like(thetas), list[GradientGraph]()
        for one in self._graphs(thetas, kept):
            gradients[one.some] += one.gradient.detach()
            graphs += [one] if kept else []
        of._reducer.sum_(gradients)

        def products(vectors: Tensor) -> Tensor:
            found = torch.zeros_like(thetas)
            for one in graphs if kept else self._graphs(thetas, False):
                if bool(vectors[one.some].any()):  # those of problems that are solved are zero
                    found[one.some] += one.product(vectors[one.some])
            of._reducer.sum_(found)
            return found

        return LocalCurvature(gradients, products)

    def _graphs(self, thetas: Tensor, kept: bool) -> Iterator[GradientGraph]:
        """Gradients of each pass with their graphs."""
        of = self._of
        for some, part, x in of._passes(thetas, 1 if kept else _SECOND, tuning.GRAPH_GROUPS):
            theta, own = thetas[some].detach().requires_grad_(), self._examples(some, part, x)
            with torch.enable_grad(), twice_differentiable(of._network.network.module):
                f = of._network(theta, own.x, own.apart).to(of._dtype)
                assert own.weights is not None
                value = of._share.log_prob(f, own.points, own.weights).sum()
                yield GradientGraph(some, theta, differentiated(value, theta, None))

    def _examples(self, some: slice, part: slice, x: Inputs) -> _Examples:
        key = some.start, some.stop, part.start, part.stop
        if key in self._kept:
            return self._kept[key]
        weights, numbers = _counting(self._weights[some, part])
        if numbers is None:
            found = _Examples(weights, part, x, False)
        else:
            points = self._of._share.chosen(numbers + part.start)
            found = _Examples(weights, points, take(x, numbers), True)
        size = weights.nbytes if numbers is None else 2 * weights.nbytes + num_bytes(found.x)
        if size <= self._left:
            self._kept[key], self._left = found, self._left - size
        return found


def _gap(found: Tensor, truth: Tensor) -> float:
    """Relative, infinite where it is not finite."""
    gap = float((found - truth).norm() / truth.norm().clamp_min(torch.finfo(truth.dtype).tiny))
    return gap if math.isfinite(gap) else math.inf


def _counting(weights: Tensor) -> tuple[Tensor, Tensor | None]:
    """Weights and numbers, (S, n), of the examples that have a weight in a row (S, N).

    Rows with fewer are filled up by examples of weight zero. If some row has most of the examples, all rows have all
    of them: the weights as they are, and None.
    """
    counting = weights != 0
    counts = counting.sum(1)
    most = max(1, int(counts.max()))
    if most > tuning.CHOSEN_SHARE * weights.shape[1]:
        return weights, None
    rows, found = counting.nonzero().unbind(1)
    numbers = counting.byte().argmin(1, keepdim=True).repeat(1, most)
    numbers[rows, torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]] = found
    return weights.gather(1, numbers), numbers
