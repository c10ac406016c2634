"""structure="gp": function space, with stored rows of the Jacobian."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.curvature import FunctionSpace
from ntk_laplace.data import Batches, RowBuffer
from ntk_laplace.errors import UnsupportedError
from ntk_laplace.jacobian import Jacobian, jacobian_from_record, jacobian_record
from ntk_laplace.points import TrainingPoints, UnsavedPoints
from ntk_laplace.resources import format_bytes, require_memory
from ntk_laplace.structures.base import ExactStructure, LinearizedModel, require_unchanged
from ntk_laplace.structures.data_passes import read_batches

__all__ = ["FunctionSpaceStructure"]


class FunctionSpaceStructure(ExactStructure):
    """Exact inference in function space over stored rows; training inputs are not stored.

    Parameters
    ----------
    model : LinearizedModel
    batches : Batches
        Read once.

    Attributes
    ----------
    rows : Jacobian
        Rows of J at the training points.
    """

    name = "gp"

    def __init__(self, model: LinearizedModel, batches: Batches) -> None:
        parts: list[Jacobian] = []
        targets = RowBuffer(batches.length or 0)
        for x, y in read_batches(model, batches, "Jacobians"):
            parts.append(model.jacobian_pass.rows(x, batch_size=model.settings.batch_size, offset=_count(parts)))
            targets.append(y)
            if len(parts) == 1:
                self.require_memory_for(model, batches.length or parts[0].num_examples, parts[0])
        self.rows = Jacobian.concatenate(parts)
        parts.clear()
        f = model.outputs(self.rows)
        self.points = TrainingPoints.checked(model.likelihood, f, targets.rows, batches.weights)
        self.require_memory_for(model, self.rows.num_examples, None)

    @staticmethod
    def require_memory_for(model: LinearizedModel, n: int, first: Jacobian | None) -> None:
        """Refuse N examples if B (N R x N R) and rows like `first` for all of them do not fit in memory."""
        c = model.network.num_outputs
        size = model.curvature_type.columns(model.likelihood, c) * n
        element = model.jacobian_pass.dtype.itemsize
        rows = 0 if first is None else 2 * first.nbytes * n // max(1, first.num_examples)
        p = model.network.num_parameters
        full = 2 * p * p * element
        require_memory(
            size * size * element + rows, model.network.device,
            f"B of {size:,} x {size:,} (N = {n:,}, C = {c}) and its rows",
            f'Fit with structure="full", which takes {format_bytes(full)} (P = {p:,}), with structure="kfac", whose '
            'memory does not grow with N, or with curvature="ef", parameters="last_layer", fewer points or '
            "dtype=torch.float32.",
            model.settings.memory_budget,
        )  # fmt: skip

    def posterior_precision(self, model: LinearizedModel) -> FunctionSpace:
        """Factorize B at the current hyperparameters, without a new Jacobian."""
        root = self.points.root(model.curvature_type, model.likelihood).detach()
        return FunctionSpace(self.rows, root, model.prior, model.network.shapes)

    def vjp(self, model: LinearizedModel, residual: Tensor) -> Tensor:
        """Jᵀr, (P,)."""
        return self.rows.vjp(residual, model.network.shapes)

    def jvp(self, model: LinearizedModel, vector: Tensor) -> Tensor:
        """J v, (N, C)."""
        return self.rows.jvp(model.network.unflatten(vector))

    def sensitivity(self, model: LinearizedModel, precision: FunctionSpace) -> Tensor:
        """∂ log det B/∂Λ_n = V_nn, (N, C, C), or its equal on the range of Λ_n if that is constant."""
        left_inverse = self.points.left_inverse(model.curvature_type, model.likelihood)
        return precision.covariance_blocks(self.rows) if left_inverse is None else precision.sensitivity(left_inverse)

    def merged(self, model: LinearizedModel, other: FunctionSpaceStructure) -> FunctionSpaceStructure:
        """Rows of both data sets."""
        total = copy.copy(self)
        total.rows = Jacobian.concatenate([self.rows, other.rows])
        total.points = self.points.joined(model.likelihood, other.points)
        total.base = self._merged_base(model, other)
        total.require_memory_for(model, total.rows.num_examples, None)
        return total

    def changed(
        self, model: LinearizedModel, points: TrainingPoints, added: FunctionSpaceStructure | None = None
    ) -> FunctionSpaceStructure:
        """The structure of changed points, those of `added` last; `base` remembers the training points."""
        other = copy.copy(self)
        other.rows = self.rows if added is None else Jacobian.concatenate([self.rows, added.rows])
        other.points = points
        other.base = self.points if self.base is None else self.base
        return other

    def solve_at(self, model: LinearizedModel, points: TrainingPoints, gradient: Tensor) -> Tensor:
        """H⁻¹g, (P,), with the curvature of `points`; points of weight zero are skipped."""
        root = points.root(model.curvature_type, model.likelihood)
        active = (points.counts > 0).nonzero().squeeze(1)
        everything = len(active) == len(root)
        rows = self.rows if everything else self.rows.subset(active)
        root = root if everything else root[active]
        return FunctionSpace(rows, root, model.prior, model.network.shapes).solve(gradient)

    def subset(self, model: LinearizedModel, index: Tensor) -> FunctionSpaceStructure:
        """The stored rows of some points; no pass over the data."""
        some = copy.copy(self)
        some.rows, some.points = self.rows.subset(index), self.points.subset(index)
        some.base = self._base_at(index)
        return some

    def rows_at(self, model: LinearizedModel, index: Tensor) -> Iterator[Jacobian]:
        """The stored rows."""
        yield self.rows.subset(index)

    def state(self, model: LinearizedModel, include_data: bool) -> dict[str, Any]:
        """The rows."""
        require_unchanged(model, self.base)
        if not include_data:
            raise UnsupportedError(
                'include_data=True to save structure="gp"', "include_data=False",
                "Function space is made of its training points: their rows hold the inputs of the first layer.",
            )  # fmt: skip
        return jacobian_record(self.rows)

    @classmethod
    def restored(
        cls, model: LinearizedModel, saved: dict[str, Any], points: TrainingPoints | UnsavedPoints,
        batches: Batches | None
    ) -> FunctionSpaceStructure:
        """Restore from a checkpoint."""
        made = cls.__new__(cls)
        made.rows, made.points = jacobian_from_record(saved), points
        return made

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move the rows; none is recomputed."""
        self.rows, self.points = self.rows.to(dtype, device), self.points.to(device, dtype)
        self.base = None if self.base is None else self.base.to(device, dtype)


def _count(parts: list[Jacobian]) -> int:
    return sum(part.num_examples for part in parts)
