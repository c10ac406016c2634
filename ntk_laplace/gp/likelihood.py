"""The GPyTorch likelihood: unit noise on whitened rows in training, responses of the observation model elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import _GaussianLikelihoodBase
from gpytorch.likelihoods.noise_models import Noise
from linear_operator.operators import ConstantDiagLinearOperator, LinearOperator
from torch import Generator, Size, Tensor
from torch.distributions import Distribution

from ntk_laplace.errors import UnsupportedError
from ntk_laplace.gp.whitened import WhitenedGram, WhitenedNormal
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.model.likelihoods.mixture import plug_in
from ntk_laplace.model.predictive import predictive


class _UnitNoise(Noise):
    """Noise 1, not a hyperparameter: the curvature root S contains the noise."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("one", torch.ones(1, dtype=torch.float64, device="cpu"), persistent=False)

    def forward(self, *params: Any, shape: Size | None = None, **kwargs: Any) -> LinearOperator:
        if shape is None:
            raise UnsupportedError("the shape of the noise", "none", "Pass shape=, as GPyTorch does.")
        return ConstantDiagLinearOperator(self.one.expand(*shape[:-1], 1), diag_shape=shape[-1])


class ResponseLikelihood(_GaussianLikelihoodBase):
    """The likelihood of a `LaplaceGP`.

    Parameters
    ----------
    observation : Likelihood
        Likelihood of the responses given f. Its hyperparameters are those of this module.
    scalar : bool
        The network's outputs have shape (N,).
    """

    def __init__(self, observation: Likelihood, scalar: bool = False) -> None:
        super().__init__(_UnitNoise())
        self.observation, self.scalar = observation, scalar

    @property
    def noise(self) -> Tensor:
        """Noise variance of the observation model, as it has it; assign to change it in place.

        Raises
        ------
        AttributeError
            If the likelihood has none.
        """
        found: Tensor = self._noisy().noise
        return found

    @noise.setter
    def noise(self, value: float | Tensor) -> None:
        self._noisy().noise = value

    def _noisy(self) -> Any:
        if not hasattr(self.observation, "noise"):
            name = type(self.observation).__name__
            raise AttributeError(f"expected a Gaussian likelihood, for its noise; got a {name}. Its hyperparameters "
                                 "are those of likelihood.observation.")
        return self.observation

    def __getattr__(self, name: str) -> Any:
        if name == "noise":  # the property failed, and torch would say that the class has none
            self._noisy()
        return super().__getattr__(name)

    def marginal(
        self, function_dist: MultivariateNormal, *params: Any, method: str = "glm", samples: int = 1000,
        generator: Generator | None = None, likelihood: Likelihood | None = None, **kwargs: Any,
    ) -> Distribution:
        """Whitened rows with unit noise for the evidence, or responses for the posterior of f at new inputs.

        Parameters
        ----------
        function_dist : MultivariateNormal
            The model's result: ``gp(*gp.train_inputs)`` in training mode, or ``gp(x)`` in eval mode.
        method, samples, generator, likelihood
            As in `Posterior.predict`, for responses.

        Returns
        -------
        Distribution
            Jointly Gaussian over (n, C) if the likelihood adds Gaussian noise to f; else one response per input.
        """
        covariance = function_dist.lazy_covariance_matrix
        if isinstance(covariance, WhitenedGram):
            return WhitenedNormal(function_dist.loc, covariance.with_noise())
        if not isinstance(function_dist, MultitaskMultivariateNormal):
            raise UnsupportedError("what the LaplaceGP returned", type(function_dist).__name__,
                                   "Pass gp(*gp.train_inputs) in training mode or gp(x) in eval mode.")
        likelihood = self.observation.for_new_points() if likelihood is None else likelihood
        if method == "glm":
            with torch.no_grad():
                noise = likelihood.additive_noise(function_dist.mean.reshape(-1, function_dist.event_shape[1]))
            if noise is not None:
                return _with_noise(function_dist, noise)
        if function_dist.batch_shape:
            raise UnsupportedError("one batch of inputs", f"batch shape {tuple(function_dist.batch_shape)}",
                                   "Call the model and this likelihood for one batch at a time.")
        blocks = _blocks(function_dist.covariance_matrix, *function_dist.event_shape).permute(2, 0, 1)
        with torch.no_grad():
            return predictive(likelihood, function_dist.mean, blocks, method, samples, generator, self.scalar)

    def forward(self, function_samples: Tensor, *params: Any, **kwargs: Any) -> Distribution:
        """Responses given f (n, C)."""
        if function_samples.dim() != 2:
            raise UnsupportedError("one sample of f, (n, C)", f"shape {tuple(function_samples.shape)}",
                                   "Pass one sample at a time.")
        return plug_in(self.observation.for_new_points(), function_samples, self.scalar)

    def log_marginal(
        self, observations: Tensor, function_dist: MultivariateNormal, *params: Any, **kwargs: Any
    ) -> Tensor:
        """Log density of responses under `marginal`; joint for a Gaussian likelihood, else one per input."""
        return self.marginal(function_dist, *params, **kwargs).log_prob(observations)

    def expected_log_prob(self, target: Tensor, input: MultivariateNormal, *params: Any, **kwargs: Any) -> Tensor:
        """Not supported: the posterior is exact for the linearized model and needs no variational objective."""
        raise UnsupportedError("the evidence as objective", "expected_log_prob, of variational inference",
                               "Use ExactMarginalLogLikelihood(gp.likelihood, gp).")


def _blocks(joint: Tensor, n: int, c: int) -> Tensor:
    """View the diagonal blocks of an interleaved joint covariance, one per input, (..., C, C, n)."""
    return joint.view(*joint.shape[:-2], n, c, n, c).diagonal(dim1=-4, dim2=-2)


def _with_noise(latent: MultitaskMultivariateNormal, noise: Tensor) -> MultitaskMultivariateNormal:
    """y = f + noise: add the noise covariance to each input's diagonal block ([T20] 3.15, in closed form)."""
    n, c = latent.event_shape
    joint = latent.covariance_matrix.clone()
    _blocks(joint, n, c).add_(noise.reshape(*latent.batch_shape, n, c, c).movedim(-3, -1))
    return MultitaskMultivariateNormal(latent.mean, joint)
