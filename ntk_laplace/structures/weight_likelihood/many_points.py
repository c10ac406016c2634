"""log p(y_n | f_n) of training points at many outputs at once."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ntk_laplace.errors import NonFiniteError
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.structures.points import TrainingPoints

__all__ = ["ManyPoints"]


class ManyPoints:
    """log p(y_n | f_n) of training points at many outputs at once, with the example weights.

    A part of the points is the same for all rows, a slice, or each row has its own, numbers (S, n).

    Parameters
    ----------
    likelihood : Likelihood
    points : TrainingPoints
    """

    def __init__(self, likelihood: Likelihood, points: TrainingPoints) -> None:
        self._likelihood, self._points = likelihood, points
        self.shape = points.num_examples, points.num_outputs
        self._repeats: dict[tuple[int, int, int], tuple[Likelihood, TrainingPoints]] = {}

    def values(self, f: Tensor, part: slice | Tensor = slice(None), weights: Tensor | None = None) -> Tensor:
        """Σ log p(y_n | f_n) over some of the points, (S,), nats, for their f (S, n, C); -inf if it is not finite.

        Example weights (S, n) replace those of the points.
        """
        return self._found(f, part, residuals=False, weights=weights)[0]

    def log_prob(self, f: Tensor, part: slice | Tensor, weights: Tensor) -> Tensor:
        """Σ w_n log p(y_n | f_n), (S,), with its graph, for finite outputs f (S, n, C) and weights (S, n)."""
        return (weights * self.each(f, part).masked_fill(weights == 0, 0.0)).sum(1)

    def each(self, f: Tensor, part: slice | Tensor = slice(None)) -> Tensor:
        """log p(y_n | f_n), (S, n), nats, each point counted once."""
        likelihood, points, _ = self._repeated(f, part)
        try:
            return replace(points, weights=None).log_prob_at(likelihood, f.flatten(0, 1)).view(f.shape[:2])
        except NonFiniteError:
            if len(f) == 1:
                raise
            return torch.cat([self.each(own, part) for own in f.split(1)])  # raises with the number of the example

    def values_and_residuals(
        self, f: Tensor, part: slice | Tensor = slice(None), weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`values`, and their gradients in f, (S, n, C); zero where an output is not finite."""
        return self._found(f, part, residuals=True, weights=weights)

    def _found(
        self, f: Tensor, part: slice | Tensor, residuals: bool, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Values, and residuals or zeros; outputs that the likelihood refuses have no density."""
        likelihood, points, good = self._repeated(f, part)
        if weights is not None:
            points, good = replace(points, weights=weights.flatten()), good | (weights == 0)
        try:
            with torch.no_grad():
                values = points.log_prob(likelihood).view(good.shape)
                slopes = points.residual(likelihood).view(f.shape) if residuals else torch.zeros_like(f)
        except NonFiniteError:  # of at least one chain: the others are evaluated without it
            if len(f) == 1:
                return points.f.new_full((1,), -torch.inf), torch.zeros_like(f)
            half = -(-len(f) // 2)
            each = [None, None] if weights is None else weights.split(half)
            parts = part.split(half) if isinstance(part, Tensor) else [part, part]
            halves = [self._found(g, own, residuals, counts)
                      for g, own, counts in zip(f.split(half), parts, each, strict=True)]
            values, slopes = (torch.cat(both) for both in zip(*halves, strict=True))
            return values, slopes
        values = torch.where(good & ~values.isnan(), values, -torch.inf).sum(1)
        return values, torch.where(good.unsqueeze(-1), slopes, 0.0)

    def _repeated(self, f: Tensor, part: slice | Tensor) -> tuple[Likelihood, TrainingPoints, Tensor]:
        """The points of all rows, the likelihood of all of them, and a mask of those whose outputs are finite."""
        good = torch.isfinite(f).all(-1)
        likelihood, points = self._chosen(part.flatten()) if isinstance(part, Tensor) else self._copies(len(f), part)
        return likelihood, replace(points, f=torch.where(good.unsqueeze(-1), f.detach(), 0.0).flatten(0, 1)), good

    def _copies(self, count: int, part: slice) -> tuple[Likelihood, TrainingPoints]:
        """Some of the points `count` times over; kept for the next evaluation."""
        start, stop, _ = part.indices(self._points.num_examples)
        key = count, start, stop
        if key not in self._repeats:
            self._repeats = {kept: value for kept, value in self._repeats.items() if kept[0] == count}
            index = torch.arange(start, stop, device=self._points.f.device).repeat(count)
            self._repeats[key] = self._chosen(index)
        return self._repeats[key]

    def _chosen(self, index: Tensor) -> tuple[Likelihood, TrainingPoints]:
        """Points, without their outputs, and their likelihood."""
        points = self._points
        weights = None if points.weights is None else points.weights[index]
        return self._likelihood.at(index), TrainingPoints(points.f[:0], points.targets[index], weights)
