"""log p(D | θ) and its gradient at many weights at once, of the network and of the linearized model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ntk_laplace.errors import NonFiniteError
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.model.data import InputData, Inputs, num_examples, take
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.model.network import ManyWeights
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.resources import require_memory
from ntk_laplace.structures import FittedModel, merged_batches
from ntk_laplace.structures.points import TrainingPoints
from ntk_laplace.structures.training_inputs import training_inputs

__all__ = ["LinearizedLikelihood", "ManyPoints", "NetworkLikelihood", "WeightLikelihood", "all_rows", "likelihood_of"]

_REMEDY = "Take fewer chains or samples at a time, or fewer training points."


class ManyPoints:
    """log p(y_n | f_n) of training points at many outputs at once, with the example weights.

    Parameters
    ----------
    likelihood : Likelihood
    points : TrainingPoints
    """

    def __init__(self, likelihood: Likelihood, points: TrainingPoints) -> None:
        self._likelihood, self._points = likelihood, points
        self._repeats: dict[tuple[int, int, int], tuple[Likelihood, TrainingPoints]] = {}

    def values(self, f: Tensor, part: slice = slice(None)) -> Tensor:
        """Σ log p(y_n | f_n) over some of the points, (S,), nats, for their f (S, n, C); -inf if it is not finite."""
        return self._found(f, part, residuals=False)[0]

    def values_and_residuals(self, f: Tensor, part: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """`values`, and their gradients in f, (S, n, C); zero where an output is not finite."""
        return self._found(f, part, residuals=True)

    def _found(self, f: Tensor, part: slice, residuals: bool) -> tuple[Tensor, Tensor]:
        """Values, and residuals or zeros; outputs that the likelihood refuses have no density."""
        likelihood, points, good = self._repeated(f, part)
        try:
            with torch.no_grad():
                values = points.log_prob(likelihood).view(good.shape)
                slopes = points.residual(likelihood).view(f.shape) if residuals else torch.zeros_like(f)
        except NonFiniteError:  # of at least one chain: the others are evaluated without it
            if len(f) == 1:
                return points.f.new_full((1,), -torch.inf), torch.zeros_like(f)
            halves = [self._found(half, part, residuals) for half in f.chunk(2)]
            values, slopes = (torch.cat(both) for both in zip(*halves, strict=True))
            return values, slopes
        values = torch.where(good & ~values.isnan(), values, -torch.inf).sum(1)
        return values, torch.where(good.unsqueeze(-1), slopes, 0.0)

    def _repeated(self, f: Tensor, part: slice) -> tuple[Likelihood, TrainingPoints, Tensor]:
        """The points S times over, the likelihood of all of them, and a mask of those whose outputs are finite."""
        good, (start, stop, _) = torch.isfinite(f).all(-1), part.indices(self._points.num_examples)
        key = len(f), start, stop
        if key not in self._repeats:
            self._repeats = {kept: value for kept, value in self._repeats.items() if kept[0] == len(f)}
            self._repeats[key] = self._repeat(*key)
        likelihood, points = self._repeats[key]
        f = torch.where(good.unsqueeze(-1), f.detach(), 0.0).flatten(0, 1)
        return likelihood, replace(points, f=f), good

    def _repeat(self, count: int, start: int, stop: int) -> tuple[Likelihood, TrainingPoints]:
        own = self._points.subset(slice(start, stop))
        index = torch.arange(start, stop, device=own.f.device).repeat(count)
        targets = own.targets.repeat(count, *[1] * (own.targets.ndim - 1))
        weights = None if own.weights is None else own.weights.repeat(count)
        return self._likelihood.at(index), TrainingPoints(own.f, targets, weights)


class WeightLikelihood(ABC):
    """log p(D | θ) as a function of weights (S, P)."""

    @abstractmethod
    def values(self, thetas: Tensor) -> Tensor:
        """log p(D | θ_s), (S,), nats; -inf where it is not finite."""

    @abstractmethod
    def values_and_gradients(self, thetas: Tensor) -> tuple[Tensor, Tensor]:
        """log p(D | θ_s), (S,), and its gradients, (S, P)."""


def likelihood_of(fitted: FittedModel, model: str, x: InputData | None, count: int) -> WeightLikelihood:
    """That of the network, "nn", or of the linearized model, "glm", with room for `count` weights at a time."""
    return NetworkLikelihood(fitted, x, count) if model == "nn" else LinearizedLikelihood(fitted, count)


class NetworkLikelihood(WeightLikelihood):
    """log p(D | f(θ)) of the network itself: several weights in one pass, batch by batch of the data.

    Parameters
    ----------
    fitted : FittedModel
    x : optional
        The training inputs, if the structure does not keep the data.
    count : int
        Weights at a time, at most, for the prediction of the memory.

    Raises
    ------
    DataError
        If inputs are needed and missing, or are not those of the fit.
    MemoryBudgetError
        If one example at one value of the weights does not fit in memory, or the weights and their outputs do not.
    """

    def __init__(self, fitted: FittedModel, x: InputData | None, count: int) -> None:
        model = fitted.model
        source = training_inputs(model, fitted.structure, x, "x=")
        self._dtype = model.jacobian_pass.dtype
        self._batches: list[Inputs] = [inputs for inputs, _ in merged_batches(source, model.network)]
        self._points = ManyPoints(fitted.likelihood, fitted.points)
        self._network = ManyWeights(model.network, self._batches[0])
        budget = model.settings.memory_budget
        self._room = tuning.CHAIN_BYTES if budget is None else min(tuning.CHAIN_BYTES, int(budget))
        largest = max(self._batches, key=num_examples)
        one = tuning.GRAPH_FACTOR * self._network.saved_bytes(take(largest, slice(0, 1)))
        n, c = fitted.points.num_examples, fitted.points.num_outputs
        held = 4 * self._dtype.itemsize * count * (model.network.num_parameters + n * c)
        require_memory(held + max(one, min(self._room, one * n * count)), model.network.device,
                       f"the network's outputs and gradients at {count:,} weights", _REMEDY, budget)
        self._at_once = [self._network.at_once(inputs, self._room) for inputs in self._batches]

    def values(self, thetas: Tensor) -> Tensor:
        """log p(D | θ_s), (S,), nats; -inf where it is not finite."""
        total = thetas.new_zeros(len(thetas))
        with torch.no_grad():
            for some, part, x in self._passes(thetas):
                total[some] += self._points.values(self._network(thetas[some], x).to(self._dtype), part)
        return total

    def values_and_gradients(self, thetas: Tensor) -> tuple[Tensor, Tensor]:
        """log p(D | θ_s), (S,), and its gradients, (S, P)."""
        total, gradients = thetas.new_zeros(len(thetas)), torch.zeros_like(thetas)
        for some, part, x in self._passes(thetas):
            own = thetas[some].detach().requires_grad_()
            with torch.enable_grad():
                f = self._network(own, x)
            values, residual = self._points.values_and_residuals(f.to(self._dtype), part)
            total[some] += values
            gradients[some] += torch.autograd.grad(f, own, residual.to(f))[0]
        return total, gradients

    def _passes(self, thetas: Tensor) -> Iterator[tuple[slice, slice, Inputs]]:
        """Weights, points and inputs of each pass."""
        seen = 0
        for x, (many, few) in zip(self._batches, self._at_once, strict=True):
            n = num_examples(x)
            for first in range(0, n, few):
                last = min(first + few, n)
                inputs = x if few >= n else take(x, slice(first, last))
                for start in range(0, len(thetas), many):
                    yield slice(start, start + many), slice(seen + first, seen + last), inputs
            seen += n


class LinearizedLikelihood(WeightLikelihood):
    """log p(D | f + J(θ - θ*)) of the linearized model, from rows of J at all training points.

    Parameters
    ----------
    fitted : FittedModel
    count : int
        Weights at a time, at most, for the prediction of the memory.

    Raises
    ------
    MemoryBudgetError
        If the rows, or outputs at so many weights, do not fit in memory.
    """

    def __init__(self, fitted: FittedModel, count: int) -> None:
        model, points = fitted.model, fitted.points
        self._f, self._theta, self._shapes = points.f.detach(), model.theta, model.network.shapes
        self._points = ManyPoints(fitted.likelihood, points)
        held = 4 * count * (model.network.num_parameters + points.f.numel()) * points.f.element_size()
        require_memory(held, model.network.device, f"outputs and gradients at {count:,} weights", _REMEDY,
                       model.settings.memory_budget)
        self._rows = all_rows(fitted)

    def outputs(self, thetas: Tensor) -> Tensor:
        """f + J(θ_s - θ*), (S, N, C)."""
        return self._f + self._rows.products(self._shapes.parts(thetas - self._theta)).permute(2, 1, 0)

    def values(self, thetas: Tensor) -> Tensor:
        """log p(D | θ_s), (S,), nats."""
        return self._points.values(self.outputs(thetas))

    def values_and_gradients(self, thetas: Tensor) -> tuple[Tensor, Tensor]:
        """log p(D | θ_s), (S,), and its gradients, (S, P)."""
        values, residual = self._points.values_and_residuals(self.outputs(thetas))
        return values, self._rows.transposed_products(residual.permute(2, 1, 0), self._shapes)


def all_rows(fitted: FittedModel) -> Jacobian:
    """Rows of J at all training points, in blocks.

    Raises
    ------
    MemoryBudgetError
        After the first batch, if the rows of all points do not fit in memory.
    """
    n, parts = fitted.num_examples, list[Jacobian]()
    for rows in fitted.rows_at(torch.arange(n)):
        if not parts and rows.num_examples < n:
            needed = 2 * rows.nbytes * -(-n // rows.num_examples)
            require_memory(needed, fitted.network.device, f"rows of J at {n:,} training points", _REMEDY,
                           fitted.settings.memory_budget)
        parts.append(rows)
    return Jacobian.concatenate(parts)
