"""A response that is one number, in closed form: a mixture of normals at each input."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Size, Tensor
from typing_extensions import Self

from ntk_laplace.model.likelihoods.normal_mixture import NormalMixture
from ntk_laplace.model.likelihoods.protocol import ObservationModel
from ntk_laplace.model.likelihoods.responses import ShapedResponse
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.panels import panels


class NumberResponse(ShapedResponse):
    """One number at each input, for a normal f. A subclass makes the normals, which are many times as many numbers.

    Parameters
    ----------
    likelihood : Likelihood
    moments : tuple of Tensor, (n, 1)
        Mean, epistemic and aleatoric variance of the response.
    kept : tuple of Tensor, (n, 1)
        What `normals` takes of each input.
    log_weights, points : Tensor, (K,)
        Log weights of the normals, and the points of the quadrature that they belong to.
    num_outputs : int
        C.
    scalar : bool
        The network's outputs have shape (N,): events are scalars.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(
        self, likelihood: ObservationModel, moments: Sequence[Tensor], kept: Sequence[Tensor], log_weights: Tensor,
        points: Tensor, num_outputs: int = 1, scalar: bool = False,
    ) -> None:
        self.scalar, self._log_weights, self._points, self._kept = scalar, log_weights, points, tuple(kept)
        self._moments = mean, epistemic, aleatoric = tuple(moments)
        self._own(likelihood, num_outputs, self._drop(epistemic), self._drop(aleatoric))
        super().__init__(mean.shape[:1], Size() if scalar else Size((1,)), validate_args=False)

    @staticmethod
    @abstractmethod
    def normals(points: Tensor, *kept: Tensor) -> tuple[Tensor, Tensor]:
        """Means (n, K) or (n, 1), and variances (n, K), of the normals."""

    @property
    def mean(self) -> Tensor:
        """Mean response."""
        return self._drop(self._moments[0])

    def univariate(self) -> NormalMixture:
        """The mixture of normals."""
        return self._mixture(slice(None)).reshaped(*self.mean.shape)

    def _mixture(self, rows: slice) -> NormalMixture:
        """That of some inputs, (m,)."""
        mean, variance = self.normals(self._points, *(part[rows] for part in self._kept))
        return NormalMixture(self._log_weights, mean, variance.sqrt())

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of the observed targets; see `Response.log_prob`."""
        y = self._read(value)
        y = y if self.scalar else y.squeeze(-1)
        missing, mean = y.isnan(), self._moments[0][:, 0]
        filled, each = torch.where(missing, mean, y), len(self._points) * max(1, y.numel() // max(1, len(mean)))
        parts = [self._mixture(rows).log_prob(filled[..., rows])
                 for rows in panels(len(mean), each, tuning.MIXTURE_OUTPUTS)]
        return torch.cat([filled[..., :0], *parts], -1).masked_fill(missing, 0.0)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw responses."""
        with torch.no_grad():
            drawn = self._mixture(slice(None)).sample(Size(sample_shape))
        return drawn if self.scalar else drawn.unsqueeze(-1)

    @classmethod
    def _join(cls, parts: Sequence[Self]) -> Self:
        first = max(parts, key=lambda part: len(part._points))  # the finest rule is right for all
        moments, kept = ([torch.cat(each) for each in zip(*(getattr(part, name) for part in parts), strict=True)]
                         for name in ("_moments", "_kept"))
        return cls(first.likelihood, moments, kept, first._log_weights, first._points, first.num_outputs, first.scalar)
