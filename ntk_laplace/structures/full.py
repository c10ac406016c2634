"""structure="full": JᵀΛJ over all P parameters, summed over streaming data.

A correction needs another pass over the data, and so does a change of the likelihood's hyperparameters, unless it
multiplies all Λ_n by one number (a Gaussian's noise). Predictions and changes of the prior need none.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ntk_laplace import tuning
from ntk_laplace.curvature import FullWeightSpace, accumulate_ggn
from ntk_laplace.data import Batches, Joined, Source, fill_buffer, kept_or_missing
from ntk_laplace.evidence import PosteriorPrecision
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.likelihoods import Likelihood
from ntk_laplace.points import TrainingPoints, UnsavedPoints, present_values, unmoved
from ntk_laplace.resources import require_memory
from ntk_laplace.structures.base import ExactStructure, LinearizedModel, require_unchanged
from ntk_laplace.structures.data_passes import common_factor, jvp, read_outputs, read_rows, selected, vjp

__all__ = ["FullStructure"]


class FullStructure(ExactStructure):
    """Exact weight space over all P parameters.

    Parameters
    ----------
    model : LinearizedModel
    batches : Source
        Read once here, and again when the likelihood's hyperparameters change.
    """

    name = "full"

    def __init__(self, model: LinearizedModel, batches: Source) -> None:
        self._batches = batches
        p, element = model.network.num_parameters, model.jacobian_pass.dtype.itemsize
        require_memory(
            2 * p * p * element, model.network.device, f"the {p:,} x {p:,} matrices of weight space",
            'Use structure="gp" (memory (N C)²), structure="kfac" (approximate) or parameters="last_layer".',
            model.settings.memory_budget,
        )
        f, targets = read_outputs(model, batches)
        if model.displacement is not None:
            f = f + jvp(model, batches, model.displacement, self._max_batch(model, model.network.num_outputs))
        self.points = TrainingPoints.checked(model.likelihood, f, targets, batches.weights)
        self._ggn: Tensor | None = None
        self._likelihood: Likelihood | None = None  # at which JᵀΛJ was summed

    @property
    def source(self) -> Source:
        """The training data, for another pass."""
        return self._batches

    def posterior_precision(self, model: LinearizedModel) -> FullWeightSpace:
        """Factorize H at the current hyperparameters."""
        self._follow(model)
        return FullWeightSpace(self._ggn, model.prior, model.network.shapes, model.theta)

    def _follow(self, model: LinearizedModel) -> None:
        """Update JᵀΛJ to the likelihood's current hyperparameters."""
        if self._ggn is None:
            self._ggn, self._likelihood = self._accumulate(model), copy.deepcopy(model.likelihood)
        if unmoved(present_values(self._likelihood), model.likelihood):
            return
        known = isinstance(self.points, TrainingPoints)
        factor = common_factor(model, self._likelihood, self.points) if known else None
        self._ggn = self._accumulate(model) if factor is None else self._ggn * factor
        self._likelihood = copy.deepcopy(model.likelihood)

    def _accumulate(self, model: LinearizedModel) -> Tensor:
        p = model.network.num_parameters
        root = self.points.root(model.curvature_type, model.likelihood).detach()
        ggn = root.new_zeros(p, p)
        for rows in read_rows(model, self._batches, root, self._max_batch(model, root.shape[2]), "curvature"):
            accumulate_ggn(ggn, rows, model.network.shapes)
        return ggn

    def _max_batch(self, model: LinearizedModel, cotangents: int) -> int:
        """Examples whose dense rows fit in memory at a time."""
        each = model.network.num_parameters * cotangents * model.jacobian_pass.dtype.itemsize
        max_batch = max(1, tuning.FULL_ROWS_BYTES // each)
        return min(max_batch, model.settings.batch_size or max_batch)

    def vjp(self, model: LinearizedModel, residual: Tensor) -> Tensor:
        """Jᵀr, (P,), in one pass with cotangent r."""
        return vjp(model, self._batches, residual, self._max_batch(model, 1))

    def jvp(self, model: LinearizedModel, vector: Tensor) -> Tensor:
        """J v, (N, C)."""
        return jvp(model, self._batches, vector, self._max_batch(model, model.network.num_outputs))

    def sensitivity(self, model: LinearizedModel, precision: PosteriorPrecision) -> Tensor:
        """∂ log det B/∂Λ_n = V_nn, (N, C, C)."""
        max_batch = self._max_batch(model, model.network.num_outputs)
        passes = read_rows(model, self._batches, None, max_batch, "training covariances")
        return fill_buffer((precision.covariance_blocks(rows) for rows in passes), self.points.num_examples).rows

    def merged(self, model: LinearizedModel, other: FullStructure) -> FullStructure:
        """JᵀΛJ of both data sets."""
        for one in (self, other):
            one._follow(model)  # at the same hyperparameters
        total = copy.copy(self)
        total._ggn = self._ggn + other._ggn
        total._batches = Joined([self._batches, other._batches])
        total.points = self.points.joined(model.likelihood, other.points)
        total.base = self._merged_base(model, other)
        return total

    def changed(
        self, model: LinearizedModel, points: TrainingPoints, added: FullStructure | None = None
    ) -> FullStructure:
        """The structure of changed points, those of `added` last; `base` remembers the training points."""
        self._follow(model)
        other = copy.copy(self)
        other.points = points
        other.base = self.points if self.base is None else self.base
        if added is not None:
            other._batches = Joined([self._batches, added._batches])
        other._ggn = self._downdated(model, other)
        return other

    def _downdated(self, model: LinearizedModel, other: FullStructure) -> Tensor | None:
        """JᵀΛJ of the other points by updating the points whose Λ has changed; None if more than half have."""
        root, before = (points.root(model.curvature_type, model.likelihood) for points in (other.points, self.points))
        own = torch.cat([before, before.new_zeros(len(root) - len(before), *before.shape[1:])])
        moved = (root != own).flatten(1).any(1).nonzero().squeeze(1)
        if 2 * len(moved) > len(root):
            return None
        ggn = self._ggn.clone()
        if len(moved) == 0:
            return ggn
        gone = torch.zeros_like(ggn)
        batches = selected(other._batches, moved, len(root))
        max_batch = self._max_batch(model, model.network.num_outputs)
        start = 0
        for rows in read_rows(model, batches, None, max_batch, "curvature"):
            here = moved[start : start + rows.num_examples]
            accumulate_ggn(ggn, rows.weighted(root[here]), model.network.shapes)
            accumulate_ggn(gone, rows.weighted(own[here]), model.network.shapes)
            start += rows.num_examples
        return ggn.sub_(gone)

    def solve_at(self, model: LinearizedModel, points: TrainingPoints, gradient: Tensor) -> Tensor:
        """H⁻¹g, (P,), with the curvature of `points`."""
        return self.changed(model, points).posterior_precision(model).solve(gradient)

    def subset(self, model: LinearizedModel, index: Tensor) -> FullStructure:
        """JᵀΛJ of some points, from another pass."""
        some = FullStructure(model, selected(self._batches, index, self.points.num_examples))
        some.points, some.base = self.points.subset(index), self._base_at(index)
        return some

    def rows_at(self, model: LinearizedModel, index: Tensor) -> Iterator[Jacobian]:
        """Rows of J, from another pass."""
        batches = selected(self._batches, index, self.points.num_examples)
        max_batch = self._max_batch(model, model.network.num_outputs)
        yield from read_rows(model, batches, None, max_batch, "Jacobians")

    def state(self, model: LinearizedModel, include_data: bool) -> dict[str, Any]:
        """The lower triangle of JᵀΛJ at the current likelihood."""
        require_unchanged(model, self.base)
        self._follow(model)
        return {"ggn": self._ggn}

    @classmethod
    def restored(
        cls, model: LinearizedModel, saved: dict[str, Any], points: TrainingPoints | UnsavedPoints,
        batches: Batches | None
    ) -> FullStructure:
        """Restore from a checkpoint."""
        made = cls.__new__(cls)
        made._batches, made.points, made._ggn = kept_or_missing(batches), points, saved["ggn"]
        made._likelihood = copy.deepcopy(model.likelihood)
        return made

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move JᵀΛJ, and set the device of later batches."""
        self._batches.device, self.points = device, self.points.to(device, dtype)
        self.base = None if self.base is None else self.base.to(device, dtype)
        self._ggn = None if self._ggn is None else self._ggn.to(device, dtype)
        if self._likelihood is not None:
            self._likelihood.to(device)
