"""The Laplace posterior as a GPyTorch model, with the same Jacobian and the same factorization."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from gpytorch import settings
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.mlls import AddedLossTerm
from gpytorch.models import ExactGP
from linear_operator.operators import ZeroLinearOperator
from torch import Size, Tensor, nn

from ntk_laplace.errors import UnsupportedError
from ntk_laplace.gp.input_format import InputFormat
from ntk_laplace.gp.likelihood import ResponseLikelihood
from ntk_laplace.gp.whitened import WhitenedGram, WhitenedNormal
from ntk_laplace.model.data import Inputs, refuse_input_gradients
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.posterior import Posterior
from ntk_laplace.posterior.fit import laplace, spec_of


class _LogJoint(AddedLossTerm):
    """The terms of the evidence other than -½ log det B: the log joint density and the constant of N(0; 0, B)."""

    def __init__(self, posterior: Posterior, rows: int) -> None:
        self.posterior, self.rows = posterior, rows

    def loss(self, *params: Any) -> Tensor:
        """Σ log p(y_n given f_n) - ½ (θ*-μ0)ᵀP0(θ*-μ0) + ½ NR log 2π, nats."""
        return self.posterior.log_joint() + 0.5 * self.rows * math.log(2 * math.pi)


class LaplaceGP(ExactGP):
    """A trained network as an exact GPyTorch GP: a view of a `Posterior`, not a second fit.

    The model is stored in whitened form: its training rows are those of SᵀJ (R per example, in the order n*R + r), its
    noise is 1, its targets are zero. Every curvature block Λ = S Sᵀ, also a singular one, then becomes unit noise.

    In training mode ``gp(*gp.train_inputs)`` is the prior over these rows, and
    ``ExactMarginalLogLikelihood(gp.likelihood, gp)`` times their number is the evidence, up to rounding. Its gradients
    in the prior's precisions and the likelihood's hyperparameters are exact for every ``max_cholesky_size``. In eval
    mode ``gp(x)`` is the posterior of f at `x`, and ``gp.likelihood(gp(x))`` that of responses, without a fitted
    predictive.

    Parameters
    ----------
    source : Posterior or nn.Module
        A posterior with ``structure="gp"``, which this model shares; or a trained network, which is fitted.
    data, likelihood, prior, **fit
        For a network: as in `ntk_laplace.laplace`.
    input_shape : tuple of int, optional
        Shape of one input, if `x` is flat, (n, features) or (..., n, features), as in GPyTorch. Without it inputs are
        passed to the network unchanged.
    input_dtype : torch.dtype, optional
        Dtype of the network's inputs, such as torch.long for token ids that are given as floats.

    Attributes
    ----------
    posterior : Posterior
        It shares its state with the model: an optimizer step over ``gp.parameters()`` and ``gp.to()`` change both.
    prior : GaussianPrior
    likelihood : ResponseLikelihood
    train_inputs : tuple of one Tensor, (N*R, 1)
        Indices of the whitened rows; inputs are not stored.

    Raises
    ------
    UnsupportedError
        If the posterior's structure is not "gp"; from methods of `ExactGP` that would need inputs.
    """

    def __init__(
        self, source: Posterior | nn.Module, data: Any = None, likelihood: Likelihood | None = None,
        prior: GaussianPrior | None = None, *, input_shape: tuple[int, ...] | Size | None = None,
        input_dtype: torch.dtype | None = None, **fit: Any,
    ) -> None:
        posterior = _posterior(source, data, likelihood, prior, fit)
        f, rows = posterior.f, len(posterior.fitted.function_space.factor)
        numbers = torch.arange(rows, dtype=f.dtype, device=f.device).unsqueeze(-1)
        super().__init__(numbers, f.new_zeros(rows), ResponseLikelihood(posterior.likelihood, posterior.network.scalar))
        self.prior = posterior.prior
        self.posterior = posterior  # a plain object, not a module: the network's weights are not hyperparameters
        self._form = InputFormat.of(input_shape, input_dtype)
        self.register_added_loss_term("log_joint")

    @classmethod
    def from_posterior(cls, posterior: Posterior, **options: Any) -> LaplaceGP:
        """The model of a posterior; the same as calling the class with it."""
        return cls(posterior, **options)

    # --- training mode: the evidence

    def forward(self, numbers: Tensor) -> MultivariateNormal:
        """Prior over the whitened training rows, N(0, SᵀKS)."""
        posterior, rows = self.posterior, len(numbers)
        covariance = WhitenedGram(posterior.prior.log_precision, posterior=posterior, size=rows)
        self.update_added_loss_term("log_joint", _LogJoint(posterior, rows))
        return WhitenedNormal(self.train_targets.new_zeros(rows), covariance)

    # --- eval mode: the posterior of f

    def __call__(self, *args: Inputs) -> MultivariateNormal:
        """The prior over whitened rows in training mode; the posterior of f at inputs, over (n, C), in eval mode."""
        if self.training:
            return super().__call__(*args)
        x = args[0] if len(args) == 1 else args
        if not isinstance(x, Tensor):
            return self._at(x)
        refuse_input_gradients(x)
        network, shape = self.posterior.network, self._form.shape
        if shape is None or x.shape[1:] == shape:
            return self._at(self._form.cast(x, network))
        x = x.unsqueeze(-1) if x.dim() == 1 else x
        batch, flat = x.shape[:-2], self._form.restore(x.reshape(-1, x.shape[-1]), network)
        if not batch:
            return self._at(flat)
        parts = [self._at(part) for part in flat.split(x.shape[-2])]
        mean = torch.stack([part.mean for part in parts])
        joint = torch.stack([part.covariance_matrix for part in parts])
        return MultitaskMultivariateNormal(mean.view(*batch, *mean.shape[1:]), joint.view(*batch, *joint.shape[1:]))

    def _at(self, x: Inputs) -> MultitaskMultivariateNormal:
        if settings.prior_mode.on():
            return self.posterior.prior_latent(x)
        if settings.skip_posterior_variances.on():
            mean = self.posterior.outputs(x)
            return MultitaskMultivariateNormal(mean, ZeroLinearOperator(mean.numel(), mean.numel(), dtype=mean.dtype))
        return self.posterior.latent(x)

    # --- state shared with the posterior

    def _apply(self, fn: Callable[[Tensor], Tensor]) -> LaplaceGP:
        super()._apply(fn)
        f = self.posterior.f
        there = fn(torch.empty(0, dtype=f.dtype, device=f.device))
        if (there.dtype, there.device) != (f.dtype, f.device):
            self.posterior.to(there.device, there.dtype)
        return self

    # --- methods of ExactGP that would need the training inputs

    def set_train_data(self, inputs: Any = None, targets: Any = None, strict: bool = True) -> None:
        """Not supported: the Jacobian and the curvature roots belong to the data of the fit."""
        raise UnsupportedError("the data of the fit", "other training data",
                               "Fit again: ntk_laplace.laplace(network, data, likelihood, prior).")

    def get_fantasy_model(self, inputs: Any, targets: Any, **kwargs: Any) -> ExactGP:
        """Not supported: the posterior takes them, ``LaplaceGP(gp.posterior.add(x, y))``."""
        raise UnsupportedError("the data of the fit", "fantasy observations",
                               "Give them to the posterior: LaplaceGP(gp.posterior.add(x, y)) is the model given them.")


def _posterior(source: Any, data: Any, likelihood: Any, prior: Any, fit: dict[str, Any]) -> Posterior:
    if isinstance(source, nn.Module):
        spec = spec_of(fit.get("structure", "gp"))
        if not spec.keeps_jacobian:
            raise UnsupportedError('structure="gp", the one that is a Gaussian process over examples',
                                   f"structure={fit['structure']!r}", "Leave structure= out.")
        return laplace(source, data, likelihood, prior, **fit)
    if not isinstance(source, Posterior) or not source.fitted.structure.spec.keeps_jacobian:
        got = f"structure={source.structure!r}" if isinstance(source, Posterior) else f"a {type(source).__name__}"
        raise UnsupportedError('a posterior with structure="gp", or a network with data and likelihood', got,
                               'Fit with ntk_laplace.laplace(..., structure="gp").')
    if data is not None or likelihood is not None or prior is not None or fit:
        raise UnsupportedError("a posterior alone", "a posterior and arguments of a fit",
                               "Pass the posterior, or the network with its data.")
    return source
