"""A Gaussian over the weights that was found elsewhere: its precision is given, and does not follow from the prior."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ntk_laplace.curvature import GivenPrecision, PosteriorPrecision, given_precision
from ntk_laplace.curvature.given_records import moved_precision, no_record, restored_precision
from ntk_laplace.errors import UnsupportedError
from ntk_laplace.model.data import Missing, Source
from ntk_laplace.runtime.parameter_layout import ParameterLayout
from ntk_laplace.structures.data_passes import digest, read_points
from ntk_laplace.structures.model import LinearizedModel
from ntk_laplace.structures.registry import register_structure
from ntk_laplace.structures.streamed import StreamedStructure
from ntk_laplace.structures.structure import Saved, Structure, StructureSpec, require_laplace


@register_structure
@dataclass(frozen=True)
class GivenGaussian(StructureSpec):
    """The structure of `gaussian_posterior`.

    Parameters
    ----------
    precision : Tensor, mapping or PosteriorPrecision
        H, as in `gaussian_posterior`.
    """

    name: ClassVar[str] = "gaussian"
    laplace: ClassVar[bool] = False
    offered: ClassVar[bool] = False
    scales: ClassVar[bool] = False
    precision: Any = field(default=None, compare=False, repr=False)

    def fit(self, model: LinearizedModel, source: Source) -> GaussianStructure:
        """Check and factorize H, then read outputs and targets."""
        if self.precision is None:
            raise UnsupportedError("the precision of a Gaussian", "none",
                                   "Use ntk_laplace.gaussian_posterior(network, data, likelihood, prior, "
                                   "precision=...).")
        shapes, budget = model.network.shapes, model.settings.memory_budget
        inner = given_precision(self.precision, shapes, model.theta, budget)
        reducer = model.settings.reducer
        if reducer.world_size > 1:  # all processes have one posterior
            reducer.require_equal("precision", digest(inner.solve(torch.ones_like(model.theta))))
        spec = GivenGaussian()  # the caller's tensor is not kept
        return GaussianStructure(spec, source, read_points(model, source), inner=inner).displaced(model)

    def restored(self, model: LinearizedModel, saved: Saved) -> GaussianStructure:
        """From the precision of a checkpoint."""
        inner = restored_precision(saved.state, ParameterLayout.of(model.network.shapes))
        found = GaussianStructure(self, saved.source, saved.points, inner=inner)
        return found if isinstance(saved.source, Missing) else found.displaced(model)

    def options(self) -> dict[str, Any]:
        """None: the precision is part of the state."""
        return {}


@dataclass
class GaussianStructure(StreamedStructure):
    """A given H, and the training data for further passes.

    Attributes
    ----------
    inner : PosteriorPrecision
        H, relative to a prior of its own.
    """

    inner: PosteriorPrecision = field(kw_only=True)

    def displaced(self, model: LinearizedModel) -> GaussianStructure:
        found = super().displaced(model)
        return found if found is self else replace(found, base=self.points)

    def posterior_precision(self, model: LinearizedModel) -> GivenPrecision:
        """H beside the present prior."""
        return GivenPrecision(self.inner, model.prior)

    def subset(self, model: LinearizedModel, index: Tensor) -> GaussianStructure:
        """Refused: H does not follow from the data."""
        require_laplace(self.spec, "the posterior of some of the points")
        return self

    def merged(self, model: LinearizedModel, other: Structure) -> GaussianStructure:
        """Refused: H does not follow from the data."""
        require_laplace(self.spec, "the posterior of more data")
        return self

    def state(self, model: LinearizedModel, include_data: bool) -> dict[str, Any]:
        """The precision."""
        record = self.inner.record()
        if record is None:
            raise no_record(self.inner, "to save")
        if self.inner.made_of_data and not include_data:
            raise UnsupportedError("include_data=True to save a precision in function space", "include_data=False",
                                   "It is made of rows of J at training points, which contain their inputs.")
        return record

    def to(self, device: torch.device, dtype: torch.dtype) -> GaussianStructure:
        like = self.inner.prior_precision
        same = (like.device, like.dtype) == (device, dtype)
        inner = self.inner if same else moved_precision(self.inner, device, dtype)
        return self._moved(device, dtype, inner=inner)
