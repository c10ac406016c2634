"""The evidence: the log marginal likelihood of the Laplace-GGN, for every structure.

[I21] Eq. 3, 8 and A.1: log q(D) = Σ log p(y_n | f_n) - ½ (θ*-μ0)ᵀP0(θ*-μ0) - ½ log det B  (+ ½ gᵀH⁻¹g).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ntk_laplace.curvature import CurvatureType
from ntk_laplace.likelihoods import Likelihood
from ntk_laplace.points import TrainingPoints, UnsavedPoints
from ntk_laplace.priors import GaussianPrior

__all__ = [
    "Evidence",
    "NewtonStep",
    "PosteriorPrecision",
    "correction",
    "joint_gradient",
    "log_det",
    "log_joint",
]


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


class PosteriorPrecision(Protocol):
    """A factorized posterior precision, in function or weight space, as evidence and predictive use it.

    Attributes
    ----------
    homogeneous : bool
        Whether scaling Λ and P0 by c scales H by c.
    """

    homogeneous: bool

    def log_det(self) -> Tensor:
        """log det B = log det H - log det P0, a scalar."""

    def effective_parameters(self) -> Tensor:
        """γ_g = tr(B⁻¹ SᵀK_gS) for each prior group, (G,)."""

    def log_det_curve(self, factors: Tensor) -> Tensor:
        """log det B with all prior precisions multiplied by each of `factors` (m,); (m,)."""

    def solve(self, gradient: Tensor) -> Tensor:
        """H⁻¹ g, (P,) -> (P,)."""

    def covariance_blocks(self, rows: Any) -> Tensor:
        """Blocks of V at `rows`, (n, C, C)."""

    def covariance(self, rows: Any) -> Tensor:
        """V at `rows`, joint and interleaved, (nC, nC)."""


class _LogDet(torch.autograd.Function):
    """log det B with its exact gradient: -γ_g in each log precision, V_nn in each Λ_n, or Σ γ_g in log c, Λ = c Λ'."""

    @staticmethod
    def forward(
        ctx: Any, log_precision: Tensor, hessian: Tensor, precision: PosteriorPrecision, blocks: Callable[[],
                                                                                                          Tensor] | None
    ):
        ctx.precision, ctx.blocks = precision, blocks
        ctx.like = log_precision, hessian
        return precision.log_det().to(log_precision)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor):
        log_precision, hessian = ctx.like
        by_precision = by_hessian = used = None
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


def log_joint(points: TrainingPoints, likelihood: Likelihood, prior: GaussianPrior, theta: Tensor) -> Tensor:
    """Σ log p(y_n | f_n) - ½ (θ*-μ0)ᵀP0(θ*-μ0); log det B includes the prior's normalizer ([I21] Eq. 8)."""
    log_likelihood = points.log_likelihood(likelihood)
    return log_likelihood - prior.energy(theta).to(log_likelihood)


def log_det(
    points: TrainingPoints, likelihood: Likelihood, prior: GaussianPrior, curvature_type: CurvatureType,
    precision: PosteriorPrecision, blocks: Callable[[], Tensor],
) -> Tensor:  # fmt: skip
    """Differentiable log det B = log det H - log det P0, from an existing factorization.

    Parameters
    ----------
    points : TrainingPoints
    likelihood, prior
        The gradient is with respect to their hyperparameters.
    curvature_type : CurvatureType
    precision : PosteriorPrecision
    blocks : callable
        Computes ∂ log det B/∂Λ_n, (N, C, C), which is V_nn if the curvature is exact; called only in the backward
        pass.
    """
    kept = not isinstance(points, UnsavedPoints) and precision.homogeneous
    scale = curvature_type.log_scale(likelihood) if kept else None
    if scale is not None:
        return _LogDet.apply(prior.log_precision, scale, precision, None)
    hessian = points.curvature(curvature_type, likelihood)
    return _LogDet.apply(prior.log_precision, hessian, precision, blocks)


def joint_gradient(backprojected: Tensor, prior: GaussianPrior, theta: Tensor) -> Tensor:
    """g = P0 (θ*-μ0) - Jᵀr, (P,), the gradient of the negative log joint; `backprojected` is Jᵀr."""
    with torch.no_grad():
        return prior.flat_precision().to(theta) * (theta - prior.flat_mean().to(theta)) - backprojected


@dataclass(frozen=True)
class NewtonStep:
    """z = H⁻¹g and the terms that the correction needs.

    Attributes
    ----------
    z : Tensor, (P,)
    pushed : Tensor, (N, C)
        J z at the training points.
    own : tuple, or None
        If H - P0 is an approximation of JᵀΛJ: zᵀ(H - P0)z, its derivative in the log precisions, (G,), and a callable
        that computes its derivative in each Λ_n, (N, C, C).
    """

    z: Tensor
    pushed: Tensor
    own: tuple[Tensor, Tensor, Callable[[], Tensor]] | None = None

    def curve(self, log_precision: Tensor, hessian: Tensor) -> Tensor:
        """zᵀ(H - P0)z, differentiable in the log precisions and in Λ."""
        if self.own is None:
            return torch.einsum("nc,ncd,nd->", self.pushed, hessian, self.pushed)
        return _Curve.apply(log_precision, hessian, *self.own)


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
    def backward(ctx: Any, upstream: Tensor):
        by_precision = upstream.to(ctx.slope) * ctx.slope if ctx.needs_input_grad[0] else None
        by_hessian = upstream * ctx.by_hessian().to(upstream) if ctx.needs_input_grad[1] else None
        return by_precision, by_hessian, None, None, None


def correction(
    points: TrainingPoints, likelihood: Likelihood, prior: GaussianPrior, theta: Tensor,
    curvature_type: CurvatureType, step: NewtonStep
) -> Tensor:
    """½ gᵀH⁻¹g ([I21] A.1), differentiable in the hyperparameters.

    Computed as the maximum ½ gᵀH⁻¹g = max_z zᵀg - ½ zᵀHz. Its gradient at z = H⁻¹g is exact with z fixed.
    """
    precision = prior.flat_precision().to(theta)
    residual = points.residual(likelihood)
    hessian = points.curvature(curvature_type, likelihood)
    slope = (step.z * precision * (theta - prior.flat_mean().to(theta))).sum() - (step.pushed * residual).sum()
    curve = (precision * step.z.square()).sum() + step.curve(prior.log_precision, hessian)
    return _Once.apply(slope - 0.5 * curve)
