"""log p(y_n | f_n) of training points at many outputs at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ntk_laplace.errors import NonFiniteError
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.structures.points import TrainingPoints


@dataclass(frozen=True)
class ChosenPoints:
    """Points of each of S rows.

    Attributes
    ----------
    numbers : Tensor of int, (S, n)
    likelihood : Likelihood
        Of all of them, row by row.
    points : TrainingPoints
        The same, without outputs.
    """

    numbers: Tensor
    likelihood: Likelihood
    points: TrainingPoints


class ManyPoints:
    """log p(y_n | f_n) of training points at many outputs at once, with the example weights.

    A part of the points is the same for all rows, a slice, or each row has its own, `chosen`.

    Parameters
    ----------
    likelihood : Likelihood
    points : TrainingPoints
    """

    def __init__(self, likelihood: Likelihood, points: TrainingPoints) -> None:
        self._likelihood, self._points = likelihood, points
        self.shape = points.num_examples, points.num_outputs
        self._repeats: dict[tuple[int, int, int], ChosenPoints] = {}

    def chosen(self, numbers: Tensor) -> ChosenPoints:
        """Points of each row by number, (S, n)."""
        points, index = self._points, numbers.flatten()
        weights = None if points.weights is None else points.weights[index]
        return ChosenPoints(numbers, self._likelihood.at(index),
                            TrainingPoints(points.f[:0], points.targets[index], weights))

    def values(self, f: Tensor, part: slice | ChosenPoints = slice(None), weights: Tensor | None = None) -> Tensor:
        """Σ log p(y_n | f_n) over some of the points, (S,), nats, for their f (S, n, C); -inf if it is not finite.

        Example weights (S, n) replace those of the points.
        """
        return self._found(f, part, residuals=False, weights=weights)[0]

    def log_prob(self, f: Tensor, part: slice | ChosenPoints, weights: Tensor) -> Tensor:
        """Σ w_n log p(y_n | f_n), (S,), with its graph, for finite outputs f (S, n, C) and weights (S, n)."""
        return (weights * self.each(f, part).masked_fill(weights == 0, 0.0)).sum(1)

    def each(self, f: Tensor, part: slice | ChosenPoints = slice(None)) -> Tensor:
        """log p(y_n | f_n), (S, n), nats, each point counted once."""
        own = self._of(len(f), part)
        try:
            return replace(own.points, weights=None).log_prob_at(own.likelihood, f.flatten(0, 1)).view(f.shape[:2])
        except NonFiniteError:
            if len(f) == 1:
                raise
            # raises with the number of the example
            return torch.cat([self.each(one, self.chosen(row)) for one, row in zip(f.split(1), own.numbers.split(1),
                                                                                   strict=True)])

    def values_and_residuals(
        self, f: Tensor, part: slice | ChosenPoints = slice(None), weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`values`, and their gradients in f, (S, n, C); zero where an output is not finite."""
        return self._found(f, part, residuals=True, weights=weights)

    def _found(
        self, f: Tensor, part: slice | ChosenPoints, residuals: bool, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Values, and residuals or zeros; outputs that the likelihood refuses have no density."""
        f, own = f.detach(), self._of(len(f), part)
        good = None if bool(f.sum().isfinite()) else torch.isfinite(f).all(-1)  # (S, n), if some are not finite
        points = replace(own.points, f=_filled(f, good).flatten(0, 1))
        if weights is not None:
            points, good = replace(points, weights=weights.flatten()), None if good is None else good | (weights == 0)
        try:
            with torch.no_grad():
                values, slopes = (points.log_prob_and_residual(own.likelihood) if residuals else
                                  (points.log_prob(own.likelihood), torch.zeros_like(f)))
        except NonFiniteError:  # of at least one chain: the others are evaluated without it
            if len(f) == 1:
                return self._points.f.new_full((1,), -torch.inf), torch.zeros_like(f)
            half = -(-len(f) // 2)
            each = [None, None] if weights is None else weights.split(half)
            halves = [self._found(g, self.chosen(numbers), residuals, counts)
                      for g, numbers, counts in zip(f.split(half), own.numbers.split(half), each, strict=True)]
            values, slopes = (torch.cat(both) for both in zip(*halves, strict=True))
            return values, slopes
        values, slopes = values.view(f.shape[:2]), slopes.view(f.shape)
        values = torch.where(values.isnan(), -torch.inf, values)
        values = _filled(values.unsqueeze(-1), good, -torch.inf).sum((1, 2), dtype=torch.float64).to(self._points.f)
        return values, _filled(slopes, good)

    def _of(self, count: int, part: slice | ChosenPoints) -> ChosenPoints:
        """The points of `count` rows; those that all have are kept for the next evaluation."""
        if isinstance(part, ChosenPoints):
            return part
        start, stop, _ = part.indices(self._points.num_examples)
        key = count, start, stop
        if key not in self._repeats:
            self._repeats = {kept: value for kept, value in self._repeats.items() if kept[0] == count}
            index = torch.arange(start, stop, device=self._points.f.device)
            self._repeats[key] = self.chosen(index.expand(count, -1))
        return self._repeats[key]


def _filled(values: Tensor, good: Tensor | None, by: float = 0.0) -> Tensor:
    """Entries (S, n, ...) of points that are not good, (S, n), replaced; None if all are."""
    return values if good is None else torch.where(good.unsqueeze(-1), values, by)
