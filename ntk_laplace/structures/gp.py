"""structure="gp": rows of the Jacobian are kept, and every answer is algebra on them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.curvature import FunctionSpace
from ntk_laplace.data import Batches, Gathered
from ntk_laplace.errors import UnsupportedError
from ntk_laplace.factors import Rows, rows_from, rows_record
from ntk_laplace.points import ForgottenPoints, TrainingPoints
from ntk_laplace.resources import format_bytes, require_memory
from ntk_laplace.structures.base import ExactStructure, Trained, require_unchanged
from ntk_laplace.structures.reading import read_batches

__all__ = ["FunctionSpaceStructure"]


class FunctionSpaceStructure(ExactStructure):
    """Exact function space over stored rows; training inputs are not kept.

    Parameters
    ----------
    trained : Trained
    batches : Batches
        Read once.

    Attributes
    ----------
    rows : Rows
        Of J at the training points.
    """

    name = "gp"

    def __init__(self, trained: Trained, batches: Batches) -> None:
        parts: list[Rows] = []
        targets = Gathered(batches.length or 0)
        for x, y in read_batches(trained, batches, "Jacobians"):
            parts.append(trained.factors.rows(x, batch_size=trained.settings.batch_size, offset=_count(parts)))
            targets.append(y)
            if len(parts) == 1:
                self.require_memory_for(trained, batches.length or parts[0].num_examples, parts[0])
        self.rows = Rows.concatenate(parts)
        parts.clear()
        f = trained.outputs(self.rows)
        self.points = TrainingPoints.checked(trained.likelihood, f, targets.rows, batches.weights)
        self.require_memory_for(trained, self.rows.num_examples, None)

    @staticmethod
    def require_memory_for(trained: Trained, n: int, first: Rows | None) -> None:
        """Refuse N examples if B, which is N R x N R, does not fit, and rows like the first ones on top."""
        c = trained.network.num_outputs
        size = trained.root.columns(trained.likelihood, c) * n
        element = trained.factors.dtype.itemsize
        rows = 0 if first is None else 2 * first.nbytes * n // max(1, first.num_examples)
        p = trained.network.num_parameters
        full = 2 * p * p * element
        require_memory(
            size * size * element + rows, trained.network.device,
            f"B of {size:,} x {size:,} (N = {n:,}, C = {c}) and its rows",
            f'Fit with structure="full", which takes {format_bytes(full)} (P = {p:,}), with structure="kfac", whose '
            'memory does not grow with N, or with curvature="ef", parameters="last_layer", fewer points or '
            "dtype=torch.float32.",
            trained.settings.memory_budget,
        )  # fmt: skip

    def curvature(self, trained: Trained) -> FunctionSpace:
        """Factor B at the present hyperparameters, without a new Jacobian."""
        root = self.points.root(trained.root, trained.likelihood).detach()
        return FunctionSpace(self.rows, root, trained.prior, trained.network.shapes)

    def backproject(self, trained: Trained, residual: Tensor) -> Tensor:
        """Jᵀr, (P,)."""
        return self.rows.vjp(residual, trained.network.shapes)

    def push(self, trained: Trained, vector: Tensor) -> Tensor:
        """J v, (N, C)."""
        return self.rows.jvp(trained.network.unflatten(vector))

    def sensitivity(self, trained: Trained, curvature: FunctionSpace) -> Tensor:
        """∂ log det B/∂Λ_n = V_nn, (N, C, C), or what stands for it where Λ_n keeps its range."""
        left_inverse = self.points.left_inverse(trained.root, trained.likelihood)
        return curvature.moments(self.rows) if left_inverse is None else curvature.sensitivity(left_inverse)

    def merged(self, trained: Trained, other: FunctionSpaceStructure) -> FunctionSpaceStructure:
        """Rows of both data sets."""
        total = copy.copy(self)
        total.rows = Rows.concatenate([self.rows, other.rows])
        total.points = self.points.joined(trained.likelihood, other.points)
        total.base = self._merged_base(trained, other)
        total.require_memory_for(trained, total.rows.num_examples, None)
        return total

    def changed(
        self, trained: Trained, points: TrainingPoints, more: FunctionSpaceStructure | None = None
    ) -> FunctionSpaceStructure:
        """The same model of other points, the last of them those of `more`; what the network saw stays known."""
        other = copy.copy(self)
        other.rows = self.rows if more is None else Rows.concatenate([self.rows, more.rows])
        other.points = points
        other.base = self.points if self.base is None else self.base
        return other

    def newton_at(self, trained: Trained, points: TrainingPoints, gradient: Tensor) -> Tensor:
        """H⁻¹g with the curvature of these points, (P,); points that count for nothing take no part."""
        root = points.root(trained.root, trained.likelihood)
        active = (points.counts > 0).nonzero().squeeze(1)
        everything = len(active) == len(root)
        rows = self.rows if everything else self.rows.part(active)
        root = root if everything else root[active]
        return FunctionSpace(rows, root, trained.prior, trained.network.shapes).newton(gradient)

    def part(self, trained: Trained, index: Tensor) -> FunctionSpaceStructure:
        """Their rows; no new pass."""
        some = copy.copy(self)
        some.rows, some.points = self.rows.part(index), self.points.part(index)
        some.base = self._base_at(index)
        return some

    def rows_at(self, trained: Trained, index: Tensor) -> Iterator[Rows]:
        """Rows that are kept."""
        yield self.rows.part(index)

    def state(self, trained: Trained, include_data: bool) -> dict[str, Any]:
        """The rows."""
        require_unchanged(trained, self.base)
        if not include_data:
            raise UnsupportedError(
                'include_data=True to save structure="gp"', "include_data=False",
                "Function space is made of its training points: their rows hold the inputs of the first layer.",
            )  # fmt: skip
        return rows_record(self.rows)

    @classmethod
    def restored(
        cls, trained: Trained, saved: dict[str, Any], points: TrainingPoints | ForgottenPoints, batches: Batches | None
    ) -> FunctionSpaceStructure:
        """From a checkpoint."""
        made = cls.__new__(cls)
        made.rows, made.points = rows_from(saved), points
        return made

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move the rows; none is made anew."""
        self.rows, self.points = self.rows.to(dtype, device), self.points.to(device, dtype)
        self.base = None if self.base is None else self.base.to(device, dtype)


def _count(parts: list[Rows]) -> int:
    return sum(part.num_examples for part in parts)
