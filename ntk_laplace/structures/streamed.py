"""Structures that keep the training data for further passes, instead of rows of the Jacobian."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from ntk_laplace.curvature import PosteriorPrecision
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.model.data import Missing, Source
from ntk_laplace.runtime import tuning
from ntk_laplace.structures.data_passes import jvp, per_example, read_rows, selected, vjp
from ntk_laplace.structures.model import LinearizedModel
from ntk_laplace.structures.points import TrainingPoints
from ntk_laplace.structures.structure import Structure, StructureSpec


@dataclass
class StreamedStructure(Structure):
    """The training data, read again for whatever needs rows of J.

    Attributes
    ----------
    spec : StructureSpec
    data : Source
    points : TrainingPoints
    base : TrainingPoints, optional
        The points the network was trained on, if a what-if has changed them since.
    """

    spec: StructureSpec
    data: Source
    points: TrainingPoints
    base: TrainingPoints | None = None

    @property
    def source(self) -> Source | None:
        """The training data, for another pass; None if they are missing."""
        return None if isinstance(self.data, Missing) else self.data

    def displaced(self, model: LinearizedModel) -> Self:
        """The structure with the outputs of the linearized network at the model's displacement."""
        if model.displacement is None:
            return self
        f = self.points.f + self.jvp(model, model.displacement)
        return replace(self, points=replace(self.points, f=f))

    def vjp(self, model: LinearizedModel, residual: Tensor) -> Tensor:
        """Jᵀr, (P,), in one pass with cotangent r."""
        return vjp(model, self.data, residual, self._batch(model, 1))

    def jvp(self, model: LinearizedModel, vector: Tensor) -> Tensor:
        """J v, (N, C)."""
        return jvp(model, self.data, vector, self._batch(model, model.network.num_outputs))

    def training_covariances(self, model: LinearizedModel, precision: PosteriorPrecision) -> Tensor:
        """V_nn at the training points, (N, C, C), in one pass."""
        batch = self._batch(model, model.network.num_outputs)
        return per_example(model, self.data, batch, "Jacobians", precision.covariance_blocks)

    def read_at(self, model: LinearizedModel, index: Tensor) -> Source:
        """The training data at some of the points, ascending."""
        n = self.points.num_examples
        return self.data if len(index) == n else selected(model, self.data, index, n)

    def rows_at(self, model: LinearizedModel, index: Tensor) -> Iterator[Jacobian]:
        """Rows of J, from another pass."""
        batch = self._batch(model, model.network.num_outputs)
        return read_rows(model, self.read_at(model, index), None, batch, "Jacobians")

    def subset(self, model: LinearizedModel, index: Tensor) -> Self:
        """The structure of some points, from other passes; what was computed of all points is not theirs."""
        source = selected(model, self.data, index, self.points.num_examples)
        return type(self)(self.spec, source, self.points.subset(index), self._base_at(index))

    def _batch(self, model: LinearizedModel, cotangents: int) -> int | None:
        """Examples at a time; None leaves the batches as they are."""
        return max_batch(model, cotangents)

    def _moved(self, device: torch.device, dtype: torch.dtype, **own: Any) -> Self:
        """The structure with data and points on another device, and with its own parts moved."""
        base = None if self.base is None else self.base.to(device, dtype)
        return replace(self, data=self.data.on(device), points=self.points.to(device, dtype), base=base, **own)


def max_batch(model: LinearizedModel, cotangents: int) -> int:
    """Examples whose dense rows fit in memory at a time."""
    each = model.network.num_parameters * cotangents * model.jacobian_pass.dtype.itemsize
    most = max(1, tuning.FULL_ROWS_BYTES // each)
    return min(most, model.settings.batch_size or most)
