"""What a response distribution needs of its likelihood: a module below both, so that neither imports the other."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Size, Tensor
from torch import distributions as td

from ntk_laplace.model.likelihoods.normal_mixture import NormalMixture
from ntk_laplace.model.likelihoods.number_mixture import NumberMixture


class ObservationModel(Protocol):
    """The part of `Likelihood` that responses use; its methods are documented there."""

    classifies: bool
    scales_noise: bool

    def targets(self, y: Any, num_examples: int, num_outputs: int) -> Tensor:
        """Canonical targets."""

    def event_shape(self, num_outputs: int) -> Size | None:
        """Shape of one canonical target."""

    def observed(self, y: Tensor) -> Tensor | None:
        """Mask of observed targets."""

    def at(self, index: Tensor | slice) -> ObservationModel:
        """The likelihood of a subset of the examples."""

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Log density of each example."""

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """Gradient of the log density in f."""

    def curvature(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Λ."""

    def mean(self, f: Tensor) -> Tensor:
        """Mean response."""

    def response_variance(self, f: Tensor) -> Tensor:
        """Variance of each response."""

    def univariate(self, mean: Tensor, variance: Tensor) -> NormalMixture:
        """Distribution of each number for a normal f."""

    def univariate_of(self, mean: Tensor, covariance: Tensor) -> NumberMixture | None:
        """`univariate` for correlated outputs, (n, C)."""

    def distribution(self, f: Tensor, scalar: bool = False) -> td.Distribution:
        """The response given f."""
