"""The response linearized through the inverse link: a Gaussian with the linearized moments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Size, Tensor
from torch import distributions as td
from typing_extensions import Self

from ntk_laplace.model.likelihoods.covariances import cholesky, covariance_root, marginal_log_density
from ntk_laplace.model.likelihoods.labels import as_probabilities
from ntk_laplace.model.likelihoods.normal_mixture import NormalMixture
from ntk_laplace.model.likelihoods.protocol import ObservationModel
from ntk_laplace.model.likelihoods.responses import ShapedResponse


class LinearizedResponse(ShapedResponse):
    """The Gaussian response after linearization through the inverse link ([T20] 3.16).

    `log_prob` is the density of this Gaussian at the response. For classes the response is the vector of
    indicators, whose covariance is singular. The density is then that of the first C-1 indicators; it does not
    depend on which indicator is left out. It is not comparable with a log probability; use `probs` for that.
    `num_outputs` is C, if it is not the number of responses D.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}
    has_rsample = True

    def __init__(
        self, likelihood: ObservationModel, mean: Tensor, latent: Tensor, noise: Tensor, scalar: bool = False,
        num_outputs: int | None = None,
    ) -> None:
        self.loc, self.covariance_matrix, self.scalar = mean, latent + noise, scalar
        # copies, because views would keep both matrices in memory
        parts = (latent.diagonal(dim1=-2, dim2=-1).clone(), noise.diagonal(dim1=-2, dim2=-1).clone())
        num_outputs = mean.shape[-1] if num_outputs is None else num_outputs
        self._own(likelihood, num_outputs, *(self._drop(part) for part in parts))
        labels = likelihood.classifies and likelihood.event_shape(num_outputs) == ()
        self._free = mean.shape[-1] - 1 if labels else mean.shape[-1]  # the indicators of all classes sum to 1
        super().__init__(mean.shape[:1], Size() if scalar else mean.shape[1:], validate_args=False)

    @property
    def mean(self) -> Tensor:
        """Mean response, the inverse link at the mean of f."""
        return self._drop(self.loc)

    def univariate(self) -> NormalMixture:
        """Normals of each response."""
        return NormalMixture.normal(self.mean, self.variance)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of the Gaussian at responses, or at labels (…, n), which are converted to indicators."""
        y = torch.as_tensor(value, device=self.loc.device)
        if self.likelihood.event_shape(self.num_outputs) == () and not y.is_floating_point():
            classes = self.num_outputs
            labels = self.likelihood.targets(y.flatten(), y.numel(), classes)
            y = as_probabilities(labels, classes, self.loc).reshape(*y.shape, classes)
        sample_shape, y = self._split(y)
        y = y.to(self.loc).reshape(*sample_shape, *self.loc.shape)
        free, responses = self._free, self.loc.shape[-1]
        there = self.likelihood.observed(y.reshape(-1, responses))
        if there is not None:
            there = there.reshape(*y.shape[:-1], -1).expand_as(y)[..., :free]
            return marginal_log_density((y - self.loc)[..., :free], self.covariance_matrix[:, :free, :free], there)
        factor = cholesky(self.covariance_matrix[:, :free, :free])
        density = td.MultivariateNormal(self.loc[:, :free], scale_tril=factor, validate_args=False)
        return density.log_prob(y[..., :free])

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draw from the Gaussian; its covariance may be singular."""
        root = covariance_root(self.covariance_matrix)
        noise = torch.randn(Size(sample_shape) + self.loc.shape, dtype=self.loc.dtype, device=self.loc.device)
        return self._drop(self.loc + (root @ noise.unsqueeze(-1)).squeeze(-1))

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw from the Gaussian, without gradients."""
        with torch.no_grad():
            return self.rsample(sample_shape)

    @classmethod
    def _join(cls, parts: Sequence[Self]) -> Self:
        first, mean = parts[0], torch.cat([part.loc for part in parts])
        nothing = mean.new_zeros(()).expand(*mean.shape, mean.shape[-1])
        whole = cls(first.likelihood, mean, nothing, nothing, first.scalar, first.num_outputs)
        for name in ("covariance_matrix", "epistemic", "aleatoric"):  # the parts cannot be recovered from their sum
            setattr(whole, name, torch.cat([getattr(part, name) for part in parts]))
        return whole
