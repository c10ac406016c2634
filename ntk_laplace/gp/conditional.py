"""The conditional marginal likelihood as an objective of GPyTorch ([L22] Eq. 5, 19 and section 8.2)."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from gpytorch import settings
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import _GaussianLikelihoodBase
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.models import ExactGP
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor

from ntk_laplace.errors import DataError, HyperparameterError, UnsupportedError, is_number, require_whole
from ntk_laplace.gp.whitened import WhitenedGram
from ntk_laplace.posterior import Posterior
from ntk_laplace.runtime.known_gradients import require_first_derivative, with_gradients

_WHAT = "the conditional evidence"


class ConditionalMarginalLogLikelihood(ExactMarginalLogLikelihood):
    r"""Conditional marginal log likelihood of an exact GP, log p(other points given the first m), over random orders.

    With D_σ the n examples in the order σ, the value is

    .. math:: \frac{1}{(n - m) T} \Big( \text{other terms} + \frac{1}{|\sigma|} \sum_\sigma
              \log p(D_{\sigma(m+1)}, \dots, D_{\sigma(n)} \mid D_{\sigma(1)}, \dots, D_{\sigma(m)}) \Big)

    in nats per number predicted, where T is the number of tasks (1 without tasks). `ExactMarginalLogLikelihood` divides
    by the nT numbers that it predicts, so m = 0 gives its value exactly. The other terms are those of GPyTorch: the log
    densities of registered priors, and the added loss terms, each as a whole.

    It is called as `ExactMarginalLogLikelihood` is, with the output of the model in training mode at all training
    inputs, and is differentiable once. The model is not called again: anything that sees all inputs at once, such as
    `ScaleToBounds` or batch normalization, scales the m points as it scales all. Each order needs one Cholesky
    factorization of the covariance of all points, whose last rows give the conditional density without a difference of
    two evidences; no iterative method takes part, whatever ``max_cholesky_size`` is. All batches share the orders.

    For a `LaplaceGP` the order is over examples, and the value times (N - m)R is
    ``posterior.conditional_log_marginal_likelihood(m, ...)``: the evidences of the linearized model at fixed weights,
    both with correction. At the weights' optimum m = 0 is `ExactMarginalLogLikelihood`; elsewhere the correction is
    added. The gradient is that of the hyperparameters.

    Parameters
    ----------
    likelihood : gpytorch.likelihoods.GaussianLikelihood or another with Gaussian noise
    model : gpytorch.models.ExactGP
    share : float
        m is n times this, rounded down; at least 0, less than 1.
    orders : int or Tensor
        Number of random orders of a call; or given orders (K, n), each row a permutation of 0 to n - 1, such as
        ``torch.arange(n)[None]`` for a time series, whose last points are then predicted from the first.
    fresh : bool
        Draw new random orders at every call. False: the same at every call. A deep kernel overfits one fixed order
        ([L22] does not say so; the documentation has the numbers).
    seed : int
        Seed of the orders, which come from a generator of their own. The first call has the orders of
        ``posterior.conditional_log_marginal_likelihood(m, orders, seed)``.

    Raises
    ------
    HyperparameterError
        If `share` or `orders` is out of range, or no point is left to predict.
    UnsupportedError
        If the model is not an exact GP with Gaussian noise, or the output is not that of its training mode.
    """

    def __init__(
        self, likelihood: _GaussianLikelihoodBase, model: ExactGP, share: float = 0.9, orders: int | Tensor = 1, *,
        fresh: bool = True, seed: int = 0,
    ) -> None:
        if not isinstance(model, ExactGP) or not isinstance(likelihood, _GaussianLikelihoodBase):
            raise UnsupportedError(
                "an ExactGP with a likelihood of Gaussian noise",
                f"{type(model).__name__} with {type(likelihood).__name__}",
                "For other models draw samples given m points, and use ntkl.selection.conditional_from_samples.",
            )
        super().__init__(likelihood, model)
        if not is_number(share) or not 0 <= share < 1:
            raise HyperparameterError("share as a number of at least 0 and less than 1", repr(share),
                                      "Pass the part of the points to condition on, such as 0.9.")
        self.share, self.fresh = float(share), bool(fresh)
        remedy = "Pass the number of random orders, such as 1 or 10, or a tensor of orders."
        self.orders = _rows_of(orders) if isinstance(orders, Tensor) else require_whole("orders", orders, 1, remedy)
        self.seed = require_whole("seed", seed, 0, "Pass for instance seed=0.")
        self._generator = torch.Generator().manual_seed(self.seed)

    def num_given(self, num_examples: int) -> int:
        """Number m of points to condition on, of n.

        Raises
        ------
        HyperparameterError
            If it is all of them.
        """
        m = math.floor(self.share * num_examples + 1e-9)  # 0.29 of 100 is 29
        if m >= num_examples:
            raise HyperparameterError("at least one point to predict", f"{m} of {num_examples} to condition on",
                                      "Pass a smaller share.")
        return m

    def forward(self, function_dist: MultivariateNormal, target: Tensor, *params: Any, **kwargs: Any) -> Tensor:
        """The value, of the batch shape of the output, in nats per number predicted.

        Parameters
        ----------
        function_dist : MultivariateNormal
            ``model(*model.train_inputs)`` in training mode.
        target : Tensor
            ``model.train_targets``.
        *params, **kwargs
            For the likelihood, as in `ExactMarginalLogLikelihood`.

        Raises
        ------
        DataError
            If the targets have another shape.
        """
        self._require(function_dist)
        event = function_dist.event_shape
        if target.shape[-len(event) :] != event:  # GPyTorch would broadcast them
            raise DataError(f"targets (..., {', '.join(map(str, event))})", f"shape {tuple(target.shape)}",
                            "Pass model.train_targets.")
        if isinstance(function_dist.lazy_covariance_matrix, WhitenedGram):
            value, examples = self._of_laplace(function_dist, target, *params, **kwargs)
        else:
            output = self.likelihood(function_dist, *params, **kwargs)
            examples = output.event_shape[0]
            m = self.num_given(examples)
            value = torch.stack([_log_density(output, target, order, m) for order in self._drawn(examples)]).mean(0)
        numbers = event.numel() * (examples - self.num_given(examples)) // examples
        return self._add_other_terms(value, params).div(numbers)

    def _of_laplace(
        self, function_dist: MultivariateNormal, target: Tensor, *params: Any, **kwargs: Any
    ) -> tuple[Tensor, int]:
        """The conditional evidence of whitened rows without the log joint, which is an added loss term."""
        if bool(target.any()):
            raise UnsupportedError("targets of zero, those of whitened rows", "others", "Pass gp.train_targets.")
        posterior: Posterior = self.model.posterior
        n = posterior.num_examples
        m = self.num_given(n)
        value = self.likelihood(function_dist, *params, **kwargs).log_prob(target)
        value = value + posterior.evidence(correction=True).correction
        if m > 0:
            value = value - torch.stack([_evidence_of(posterior, order[:m]) for order in self._drawn(n)]).mean()
        return value, n

    def _drawn(self, num_examples: int) -> list[Tensor]:
        """The orders of this call."""
        if isinstance(self.orders, Tensor):
            if self.orders.shape[1] != num_examples:
                raise HyperparameterError(f"orders of {num_examples} examples", f"orders of {self.orders.shape[1]}",
                                          "Pass a permutation of all training examples in each row.")
            return list(self.orders)
        if not self.fresh:
            self._generator.manual_seed(self.seed)
        return [torch.randperm(num_examples, generator=self._generator, device="cpu") for _ in range(self.orders)]

    def _require(self, function_dist: MultivariateNormal) -> None:
        if not isinstance(function_dist, MultivariateNormal):
            raise UnsupportedError("a Gaussian output of the model", type(function_dist).__name__,
                                   "Pass model(*model.train_inputs).")
        if not self.model.training:
            raise UnsupportedError("the output of the model in training mode", "a model in eval mode",
                                   "Call model.train(), and pass model(*model.train_inputs).")
        if settings.observation_nan_policy.value() != "ignore":
            raise UnsupportedError("targets that are all observed",
                                   f'the policy "{settings.observation_nan_policy.value()}" for missing ones',
                                   "Leave the examples without a target out of the training data.")


def _rows_of(orders: Tensor) -> Tensor:
    """Given orders, each a permutation."""
    whole = orders.dim() == 2 and not orders.is_floating_point() and orders.numel() > 0
    if not whole or not bool((orders.sort(1).values.cpu() == torch.arange(orders.shape[1], device="cpu")).all()):
        raise HyperparameterError("orders (K, n) with a permutation of 0 to n - 1 in each row",
                                  f"a tensor of shape {tuple(orders.shape)} that is none",
                                  "Pass torch.arange(n)[None], or the number of random orders.")
    return orders.cpu().clone()


def _log_density(output: MultivariateNormal, target: Tensor, order: Tensor, m: int) -> Tensor:
    """log p(all but the first m examples given these), of the batch shape, from the last rows of one factor."""
    n, tasks = output.event_shape[0], output.event_shape[1:].numel()
    order, numbers = order.to(output.loc.device), torch.arange(n * tasks, device=output.loc.device)
    # GPyTorch's joint covariance has its layout in no public attribute
    apart = isinstance(output, MultitaskMultivariateNormal) and not output._interleaved
    rows = (numbers.view(tasks, n).T if apart else numbers.view(n, tasks))[order].flatten()
    offset = target - output.mean
    offset = offset.reshape(*offset.shape[: -len(output.event_shape)], n, tasks)[..., order, :].flatten(-2)
    covariance = output.covariance_matrix
    batch = torch.broadcast_shapes(offset.shape[:-1], covariance.shape[:-2])
    offset, covariance = offset.expand(*batch, -1), covariance.expand(*batch, -1, -1)
    density: Tensor = _ConditionalDensity.apply(offset, covariance, rows, m * tasks)
    return density


class _ConditionalDensity(torch.autograd.Function):
    """log N(offset; 0, K) less that of its first m entries, with its gradient in closed form.

    K[rows][:, rows] = L Lᵀ, z = L⁻¹ offset, and W are the last n - m rows of L⁻¹. Then K⁻¹ less the inverse of the
    first block, padded with zeros, is WᵀW, so that neither the value nor the gradient is a difference of two
    evidences, and the gradient costs n² (n - m) operations, a fraction of those of the factor's own derivative.
    """

    @staticmethod
    def forward(ctx: Any, offset: Tensor, covariance: Tensor, rows: Tensor, m: int) -> Tensor:
        factor = psd_safe_cholesky(covariance[..., rows, :][..., rows])
        residual = torch.linalg.solve_triangular(factor, offset.unsqueeze(-1), upper=False)
        ctx.save_for_backward(factor, residual, rows)
        ctx.m = m
        terms = 0.5 * residual.squeeze(-1).square() + factor.diagonal(dim1=-2, dim2=-1).log()
        return -(terms + 0.5 * math.log(2 * math.pi))[..., m:].sum(-1)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None, None]:
        require_first_derivative(_WHAT)
        factor, residual, rows = ctx.saved_tensors
        n, m = factor.shape[-1], ctx.m
        last = torch.eye(n, dtype=factor.dtype, device=factor.device)[:, m:].expand(*factor.shape[:-2], n, n - m)
        columns = torch.linalg.solve_triangular(factor.mT, last, upper=True)  # Wᵀ
        own = columns @ residual[..., m:, :]  # Wᵀz, from the rest
        before = torch.zeros_like(own)
        before[..., :m, :] = torch.linalg.solve_triangular(factor[..., :m, :m].mT, residual[..., :m, :], upper=True)
        slope = own @ (before + own).mT + before @ own.mT - columns @ columns.mT
        slope.mul_(0.5 * upstream[..., None, None])
        back = rows.argsort()
        return -upstream.unsqueeze(-1) * own.squeeze(-1), slope[..., back, :][..., back], None, None


def _evidence_of(posterior: Posterior, index: Tensor) -> Tensor:
    """Evidence, with correction, of some points, differentiable in the hyperparameters of all.

    The posterior of these points has hyperparameters of its own: their gradient is that of the originals.
    """
    part = posterior.subset(index)
    value = part.log_marginal_likelihood(correction=True)
    pairs = [
        (original, own)
        for there, here in ((posterior.prior, part.prior), (posterior.likelihood, part.likelihood))
        for original, own in zip(there.parameters(), here.parameters(), strict=True) if original.requires_grad
    ]
    if not pairs or not torch.is_grad_enabled():
        return value.detach()
    slopes = torch.autograd.grad(value, [own for _, own in pairs], allow_unused=True)
    used = [(original, slope) for (original, _), slope in zip(pairs, slopes, strict=True) if slope is not None]
    return with_gradients(value, _WHAT, *((tensor, functools.partial(torch.mul, slope)) for tensor, slope in used))
