"""structure="full": the data pass by, and JᵀΛJ stays.

A correction asks for another pass over the data, and so does a change of the likelihood's hyperparameters, unless it
multiplies all Λ_n by one number (a Gaussian's noise); predictions and changes of the prior do not.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.curvature import FullWeightSpace, accumulate_ggn
from ntk_laplace.data import Batches, Joined, Source, gather, kept_or_missing
from ntk_laplace.evidence import Curvature
from ntk_laplace.factors import Rows
from ntk_laplace.likelihoods import Likelihood
from ntk_laplace.points import ForgottenPoints, TrainingPoints, present_values, unmoved
from ntk_laplace.resources import require_memory
from ntk_laplace.structures.base import ExactStructure, Trained, require_unchanged
from ntk_laplace.structures.reading import backproject, common_factor, push, read_outputs, read_rows, selected

__all__ = ["FullStructure"]

_ROWS = 256 * 2**20  # bytes of dense rows at a time


class FullStructure(ExactStructure):
    """Exact weight space over all P parameters.

    Parameters
    ----------
    trained : Trained
    batches : Source
        Read once here, and again when the likelihood moves.
    """

    name = "full"

    def __init__(self, trained: Trained, batches: Source) -> None:
        self._batches = batches
        p, element = trained.network.num_parameters, trained.factors.dtype.itemsize
        require_memory(
            2 * p * p * element, trained.network.device, f"the {p:,} x {p:,} matrices of weight space",
            'Use structure="gp" (memory (N C)²), structure="kfac" (approximate) or parameters="last_layer".',
            trained.settings.memory_budget,
        )
        f, targets = read_outputs(trained, batches)
        if trained.move is not None:
            f = f + push(trained, batches, trained.move, self._most(trained, trained.network.num_outputs))
        self.points = TrainingPoints.checked(trained.likelihood, f, targets, batches.weights)
        self._ggn: Tensor | None = None
        self._likelihood: Likelihood | None = None  # as it was when JᵀΛJ was summed

    @property
    def source(self) -> Source:
        """The data, to be read again."""
        return self._batches

    def curvature(self, trained: Trained) -> FullWeightSpace:
        """Factor H at the present hyperparameters."""
        self._follow(trained)
        return FullWeightSpace(self._ggn, trained.prior, trained.network.shapes, trained.theta)

    def _follow(self, trained: Trained) -> None:
        """Bring JᵀΛJ to the likelihood's present hyperparameters."""
        if self._ggn is None:
            self._ggn, self._likelihood = self._accumulate(trained), copy.deepcopy(trained.likelihood)
        if unmoved(present_values(self._likelihood), trained.likelihood):
            return
        known = isinstance(self.points, TrainingPoints)
        factor = common_factor(trained, self._likelihood, self.points) if known else None
        self._ggn = self._accumulate(trained) if factor is None else self._ggn * factor
        self._likelihood = copy.deepcopy(trained.likelihood)

    def _accumulate(self, trained: Trained) -> Tensor:
        p = trained.network.num_parameters
        root = self.points.root(trained.root, trained.likelihood).detach()
        ggn = root.new_zeros(p, p)
        for rows in read_rows(trained, self._batches, root, self._most(trained, root.shape[2]), "curvature"):
            accumulate_ggn(ggn, rows, trained.network.shapes)
        return ggn

    def _most(self, trained: Trained, seeds: int) -> int:
        """Examples whose rows may be written out at a time."""
        most = max(1, _ROWS // (trained.network.num_parameters * seeds * trained.factors.dtype.itemsize))
        return min(most, trained.settings.batch_size or most)

    def backproject(self, trained: Trained, residual: Tensor) -> Tensor:
        """Jᵀr, (P,): one pass, seeded with r."""
        return backproject(trained, self._batches, residual, self._most(trained, 1))

    def push(self, trained: Trained, vector: Tensor) -> Tensor:
        """J v, (N, C)."""
        return push(trained, self._batches, vector, self._most(trained, trained.network.num_outputs))

    def sensitivity(self, trained: Trained, curvature: Curvature) -> Tensor:
        """∂ log det B/∂Λ_n = V_nn, (N, C, C)."""
        most = self._most(trained, trained.network.num_outputs)
        passes = read_rows(trained, self._batches, None, most, "training covariances")
        return gather((curvature.moments(rows) for rows in passes), self.points.num_examples).rows

    def merged(self, trained: Trained, other: FullStructure) -> FullStructure:
        """JᵀΛJ of both data sets."""
        for one in (self, other):
            one._follow(trained)  # to the same hyperparameters
        total = copy.copy(self)
        total._ggn = self._ggn + other._ggn
        total._batches = Joined([self._batches, other._batches])
        total.points = self.points.joined(trained.likelihood, other.points)
        total.base = self._merged_base(trained, other)
        return total

    def changed(
        self, trained: Trained, points: TrainingPoints, more: FullStructure | None = None
    ) -> FullStructure:
        """The same model of other points, the last of them those of `more`; what the network saw stays known."""
        self._follow(trained)
        other = copy.copy(self)
        other.points = points
        other.base = self.points if self.base is None else self.base
        if more is not None:
            other._batches = Joined([self._batches, more._batches])
        other._ggn = self._downdated(trained, other)
        return other

    def _downdated(self, trained: Trained, other: FullStructure) -> Tensor | None:
        """JᵀΛJ of the other points from those whose Λ has changed; None if that is the better part of them."""
        root, before = (points.root(trained.root, trained.likelihood) for points in (other.points, self.points))
        own = torch.cat([before, before.new_zeros(len(root) - len(before), *before.shape[1:])])
        moved = (root != own).flatten(1).any(1).nonzero().squeeze(1)
        if 2 * len(moved) > len(root):
            return None
        ggn = self._ggn.clone()
        if len(moved) == 0:
            return ggn
        gone = torch.zeros_like(ggn)
        batches = selected(other._batches, moved, len(root))
        most = self._most(trained, trained.network.num_outputs)
        start = 0
        for rows in read_rows(trained, batches, None, most, "curvature"):
            here = moved[start : start + rows.num_examples]
            accumulate_ggn(ggn, rows.weighted(root[here]), trained.network.shapes)
            accumulate_ggn(gone, rows.weighted(own[here]), trained.network.shapes)
            start += rows.num_examples
        return ggn.sub_(gone)

    def newton_at(self, trained: Trained, points: TrainingPoints, gradient: Tensor) -> Tensor:
        """H⁻¹g with the curvature of these points, (P,)."""
        return self.changed(trained, points).curvature(trained).newton(gradient)

    def part(self, trained: Trained, index: Tensor) -> FullStructure:
        """JᵀΛJ of those, from another pass."""
        some = FullStructure(trained, selected(self._batches, index, self.points.num_examples))
        some.points, some.base = self.points.part(index), self._base_at(index)
        return some

    def rows_at(self, trained: Trained, index: Tensor) -> Iterator[Rows]:
        """From another pass."""
        batches = selected(self._batches, index, self.points.num_examples)
        most = self._most(trained, trained.network.num_outputs)
        yield from read_rows(trained, batches, None, most, "Jacobians")

    def state(self, trained: Trained, include_data: bool) -> dict[str, Any]:
        """JᵀΛJ at the present likelihood, its lower triangle."""
        require_unchanged(trained, self.base)
        self._follow(trained)
        return {"ggn": self._ggn}

    @classmethod
    def restored(
        cls, trained: Trained, saved: dict[str, Any], points: TrainingPoints | ForgottenPoints, batches: Batches | None
    ) -> FullStructure:
        """From a checkpoint."""
        made = cls.__new__(cls)
        made._batches, made.points, made._ggn = kept_or_missing(batches), points, saved["ggn"]
        made._likelihood = copy.deepcopy(trained.likelihood)
        return made

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move JᵀΛJ, and where batches go."""
        self._batches.device, self.points = device, self.points.to(device, dtype)
        self.base = None if self.base is None else self.base.to(device, dtype)
        self._ggn = None if self._ggn is None else self._ggn.to(device, dtype)
        if self._likelihood is not None:
            self._likelihood.to(device)
