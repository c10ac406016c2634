"""The evidence: the log marginal likelihood of the Laplace-GGN, for every structure.

[I21] Eq. 3, 8 and A.1: log q(D) = Σ log p(y_n | f_n) - ½ (θ*-μ0)ᵀP0(θ*-μ0) - ½ log det B  (+ ½ gᵀH⁻¹g).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from ntk_laplace.curvature import PosteriorPrecision
from ntk_laplace.errors import MemoryBudgetError, UnsupportedError
from ntk_laplace.model.likelihoods import DiagonalForm, Likelihood
from ntk_laplace.runtime.resources import available_memory, require_memory
from ntk_laplace.runtime.scalars import scalar
from ntk_laplace.structures import FittedModel, NewtonStep
from ntk_laplace.structures.points import UnsavedPoints

__all__ = ["Evidence", "evidence", "log_det", "log_likelihood", "log_prior"]


@dataclass(frozen=True)
class Evidence:
    """An evidence and its terms, in nats: value = log_likelihood + log_prior - ½ log_det + correction ([I21] Eq. 8).

    Attributes
    ----------
    value : Tensor, ()
    standard_error : float
        Of a stochastic estimate of `value`; 0 where `log_det` is computed without sampling.
    lower, upper : float
        Certain bounds on the evidence of the linearized model: `value` itself for the exact structures with
        curvature type "ggn", and -inf and inf for an approximation, which bounds nothing.
    log_likelihood : Tensor, ()
        Σ log p(y_n given f_n).
    log_prior : Tensor, ()
        -½ (θ*-μ0)ᵀP0(θ*-μ0); the prior's normalizer is part of `log_det`.
    log_det : Tensor, ()
        log det B = log det H - log det P0.
    correction : Tensor, ()
        ½ gᵀH⁻¹g ([I21] A.1), or 0 where it was not asked for.
    """

    value: Tensor
    standard_error: float
    lower: float
    upper: float
    log_likelihood: Tensor
    log_prior: Tensor
    log_det: Tensor
    correction: Tensor

    def __float__(self) -> float:
        return float(self.value.detach())

    def __str__(self) -> str:
        error = f" ± {self.standard_error:.3g}" if self.standard_error else ""
        terms = f"log likelihood {float(self.log_likelihood.detach()):,.3f}, "
        terms += f"log prior {float(self.log_prior.detach()):,.3f}, log det {float(self.log_det.detach()):,.3f}"
        added = float(self.correction.detach())
        return f"{float(self):,.3f}{error} nats ({terms}" + (f", correction {added:,.3f})" if added else ")")


class _LogDet(torch.autograd.Function):
    """log det B with its exact gradient: -γ_g in each log precision, V_nn in each Λ_n, or Σ γ_g in log c, Λ = c Λ'.

    Λ_n is given in full, or by the numbers of its `DiagonalForm`, with `blocks` the derivative in them.
    """

    @staticmethod
    def forward(
        ctx: Any, log_precision: Tensor, hessian: Tensor, precision: PosteriorPrecision,
        blocks: Callable[[], Tensor] | None,
    ) -> Tensor:  # fmt: skip
        ctx.precision, ctx.blocks = precision, blocks
        ctx.like = log_precision, hessian
        found = precision.log_det()
        if not isinstance(found, Tensor) or found.numel() != 1:
            raise UnsupportedError(f"a scalar tensor of {type(precision).__name__}.log_det", f"{found!r}"[:80],
                                   "Correct the method.")
        # a copy: autograd would put its graph into a tensor that the precision keeps
        return found.to(log_precision, copy=True)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        log_precision, hessian = ctx.like
        by_precision = by_hessian = None
        if ctx.needs_input_grad[0] or ctx.blocks is None:
            used = ctx.precision.effective_parameters()
        if ctx.needs_input_grad[0]:
            # ∂ log det B / ∂ log δ_g = -γ_g
            by_precision = -upstream * used.to(log_precision)
        if ctx.needs_input_grad[1] and ctx.blocks is None:
            # Λ = c Λ': ∂ log det B / ∂ log c = Σ γ_g, as if every prior precision were divided by c
            by_hessian = upstream.to(hessian) * used.sum().to(hessian)
        elif ctx.needs_input_grad[1]:
            # exact curvature: ∂ log det B / ∂ Λ_n = V_nn
            by_hessian = upstream.to(hessian) * ctx.blocks().to(hessian)
        return by_precision, by_hessian, None, None


class _Once(torch.autograd.Function):
    """Identity that refuses a second derivative: the wrapped terms have exact first derivatives only."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        return upstream


class _NoGradient(torch.autograd.Function):
    """A zero whose gradient in the likelihood's hyperparameters is refused."""

    @staticmethod
    def forward(ctx: Any, *hyperparameters: Tensor) -> Tensor:
        return torch.zeros((), dtype=torch.float64)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> NoReturn:
        raise MemoryBudgetError("the curvature of all positions to fit in memory, for the evidence's gradient in the "
                                "likelihood's hyperparameters", "outputs at too many positions", _FIXED)


_FIXED = "Keep them as they are: posterior.likelihood.requires_grad_(False)."


def log_likelihood(fitted: FittedModel) -> Tensor:
    """Σ log p(y_n | f_n), nats; differentiable in the likelihood's hyperparameters."""
    return scalar(fitted.points.log_likelihood(fitted.likelihood))


def log_prior(fitted: FittedModel) -> Tensor:
    """-½ (θ*-μ0)ᵀP0(θ*-μ0), nats; log det B includes the prior's normalizer ([I21] Eq. 8)."""
    return scalar(-fitted.prior.energy(fitted.theta))


def log_det(fitted: FittedModel) -> Tensor:
    """log det B = log det H - log det P0, differentiable in the hyperparameters, from the present factorization."""
    precision, prior = fitted.precision, fitted.prior
    if not fitted.structure.spec.laplace:
        return precision.log_det()  # H does not follow from the hyperparameters
    kept = not isinstance(fitted.points, UnsavedPoints) and precision.homogeneous
    scale = fitted.log_scale() if kept else None
    if scale is not None:
        return scalar(_LogDet.apply(prior.log_precision, scale, precision, None))
    form = _form(fitted)
    if form is not None:
        return scalar(_LogDet.apply(prior.log_precision, form.values, precision, lambda: fitted.form_sensitivity(form)))
    if _outgrows_memory(fitted):
        refused = _NoGradient.apply(*fitted.likelihood.parameters())
        return scalar(_LogDet.apply(prior.log_precision, refused, precision, None))
    return scalar(_LogDet.apply(prior.log_precision, _hessian(fitted), precision, fitted.sensitivity))


def evidence(fitted: FittedModel, with_correction: bool = False) -> Evidence:
    """The evidence and its terms at the present hyperparameters ([I21] Eq. 3, 8), differentiable in these."""
    likelihood_term, det = log_likelihood(fitted), log_det(fitted)
    prior_term = scalar(log_prior(fitted).to(likelihood_term))
    value = likelihood_term + prior_term - 0.5 * det.to(likelihood_term)  # [I21] Eq. 8
    added = torch.zeros_like(value, requires_grad=False)
    if with_correction:
        added = _correction(fitted, fitted.newton_step())
        value = value + added.to(value)
    error = 0.5 * fitted.precision.standard_error
    lower, upper = _bounds(fitted, float(value), float(det))
    return Evidence(value, error, lower, upper, likelihood_term, prior_term, det, scalar(added))


def _bounds(fitted: FittedModel, value: float, det: float) -> tuple[float, float]:
    """Certain bounds of the evidence."""
    if not fitted.exact:
        return -math.inf, math.inf
    low, high = fitted.precision.log_det_bounds or (det, det)
    return value - 0.5 * (high - det), value + 0.5 * (det - low)


def _hessian(fitted: FittedModel) -> Tensor:
    """Λ_n, (N, C, C), with a graph only if a hyperparameter of the likelihood has one."""
    if _outgrows_memory(fitted):
        require_memory(_hessian_bytes(fitted), fitted.theta.device, "the curvature of all positions", _FIXED,
                       fitted.settings.memory_budget)
    hessian = fitted.points.curvature(fitted.curvature_type, fitted.likelihood)
    return hessian if _moves(fitted.likelihood) else hessian.detach()


def _hessian_bytes(fitted: FittedModel) -> int:
    """Bytes of Λ and of its gradient."""
    return 2 * fitted.num_examples * fitted.points.num_outputs**2 * fitted.theta.element_size()


def _outgrows_memory(fitted: FittedModel) -> bool:
    """Whether outputs are at so many positions that Λ does not fit in memory."""
    if fitted.likelihood.positions is None or isinstance(fitted.points, UnsavedPoints):
        return False
    budget = fitted.settings.memory_budget
    return _hessian_bytes(fitted) > (available_memory(fitted.theta.device) if budget is None else budget)


def _form(fitted: FittedModel) -> DiagonalForm | None:
    """Λ_n in O(C) numbers, as `_hessian`; None if it has no such form."""
    form = fitted.points.diagonal_form(fitted.curvature_type, fitted.likelihood)
    return form if form is None or _moves(fitted.likelihood) else form.detach()


def _moves(likelihood: Likelihood) -> bool:
    return any(parameter.requires_grad for parameter in likelihood.parameters())


def _curve(fitted: FittedModel, step: NewtonStep) -> Tensor:
    """zᵀ(H - P0)z, differentiable in the log precisions and in Λ."""
    if step.own is not None:
        return _Curve.apply(fitted.prior.log_precision, _hessian(fitted), *step.own)
    form = _form(fitted)
    if form is not None:
        return form.quadratic(step.pushed)
    return torch.einsum("nc,ncd,nd->", step.pushed, _hessian(fitted), step.pushed)


class _Curve(torch.autograd.Function):
    """A known value with known gradients; the gradient in Λ is computed only if needed."""

    @staticmethod
    def forward(
        ctx: Any, log_precision: Tensor, hessian: Tensor, value: Tensor, slope: Tensor, by_hessian: Callable[[], Tensor]
    ) -> Tensor:
        ctx.slope, ctx.by_hessian = slope.to(log_precision), by_hessian
        return value.to(hessian)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        by_precision = upstream.to(ctx.slope) * ctx.slope if ctx.needs_input_grad[0] else None
        by_hessian = upstream * ctx.by_hessian().to(upstream) if ctx.needs_input_grad[1] else None
        return by_precision, by_hessian, None, None, None


def _correction(fitted: FittedModel, step: NewtonStep) -> Tensor:
    """½ gᵀH⁻¹g ([I21] A.1), differentiable in the hyperparameters.

    Computed as the maximum ½ gᵀH⁻¹g = max_z zᵀg - ½ zᵀHz. Its gradient at z = H⁻¹g is exact with z fixed.
    """
    prior, theta = fitted.prior, fitted.theta
    precision = prior.flat_precision().to(theta)
    residual = fitted.points.residual(fitted.likelihood)
    slope = (step.z * precision * (theta - prior.flat_mean().to(theta))).sum() - (step.pushed * residual).sum()
    curve = (precision * step.z.square()).sum() + _curve(fitted, step)
    return _Once.apply(slope - 0.5 * curve)
