"""The evidence: the log marginal likelihood of the Laplace-GGN, for every structure.

[I21] Eq. 3, 8 and A.1: log q(D) = Σ log p(y_n | f_n) - ½ (θ*-μ0)ᵀP0(θ*-μ0) - ½ log det B  (+ ½ gᵀH⁻¹g).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from ntk_laplace.curvature import PosteriorPrecision
from ntk_laplace.errors import MemoryBudgetError, UnsupportedError
from ntk_laplace.model.likelihoods import DiagonalForm, Likelihood
from ntk_laplace.runtime.known_gradients import Gradient, scaled_by, with_gradients
from ntk_laplace.runtime.scalars import scalar
from ntk_laplace.structures import FittedModel
from ntk_laplace.structures.forecast import memory_of
from ntk_laplace.structures.points import UnsavedPoints, present_values, unmoved


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
    used = functools.cache(precision.effective_parameters)
    # ∂ log det B / ∂ log δ_g = -γ_g
    by_precision = prior.log_precision, scaled_by(lambda: -used())
    found = with_gradients(_value(precision).to(prior.log_precision), "the evidence", by_precision,
                           *_by_likelihood(fitted, used), check=_same_hyperparameters(fitted))
    return scalar(found)


def _value(precision: PosteriorPrecision) -> Tensor:
    with torch.no_grad():
        found = precision.log_det()
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise UnsupportedError(f"a scalar tensor of {type(precision).__name__}.log_det", f"{found!r}"[:80],
                               "Correct the method.")
    return found


def _by_likelihood(fitted: FittedModel, used: Callable[[], Tensor]) -> list[tuple[Tensor, Gradient]]:
    """What of the likelihood log det B depends on, log c, numbers of Λ or Λ, and the derivative in it."""
    kept = not isinstance(fitted.points, UnsavedPoints) and fitted.precision.homogeneous
    scale = fitted.log_scale() if kept else None
    if scale is not None:
        # Λ = c Λ': ∂ log det B / ∂ log c = Σ γ_g, as if every prior precision were divided by c
        return [(scale, scaled_by(lambda: used().sum()))]
    form = _form(fitted)
    if form is not None:
        return [(form.values, scaled_by(lambda: fitted.form_sensitivity(form)))]
    if _outgrows_memory(fitted):
        return [(parameter, _refused) for parameter in fitted.likelihood.parameters()]
    # exact curvature: ∂ log det B / ∂ Λ_n = V_nn
    return [(_hessian(fitted), scaled_by(fitted.sensitivity))]


def _refused(upstream: Tensor) -> NoReturn:
    raise MemoryBudgetError("the curvature of all positions to fit in memory, for the evidence's gradient in the "
                            "likelihood's hyperparameters", "outputs at too many positions", _FIXED)


def _same_hyperparameters(fitted: FittedModel) -> Callable[[], None]:
    """A check that the hyperparameters are still those of now."""
    modules = fitted.prior, fitted.likelihood
    values = present_values(*modules)

    def check() -> None:
        if not unmoved(values, *modules):
            raise UnsupportedError("hyperparameters as they were when the evidence was computed",
                                   "others, changed in place since then",
                                   "Call backward() before the change, or compute the evidence again.")

    return check


def evidence(fitted: FittedModel, with_correction: bool = False) -> Evidence:
    """The evidence and its terms at the present hyperparameters ([I21] Eq. 3, 8), differentiable in these."""
    likelihood_term, det = log_likelihood(fitted), log_det(fitted)
    prior_term = scalar(log_prior(fitted).to(likelihood_term))
    value = likelihood_term + prior_term - 0.5 * det.to(likelihood_term)  # [I21] Eq. 8
    added = torch.zeros_like(value, requires_grad=False)
    if with_correction:
        added = _correction(fitted)
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
        fitted.model.require_memory(_hessian_bytes(fitted), "the curvature of all positions", _FIXED)
    hessian = fitted.points.curvature(fitted.curvature_type, fitted.likelihood)
    return hessian if _moves(fitted.likelihood) else hessian.detach()


def _hessian_bytes(fitted: FittedModel) -> int:
    """Bytes of Λ and of its gradient."""
    return 2 * fitted.num_examples * fitted.points.num_outputs**2 * fitted.theta.element_size()


def _outgrows_memory(fitted: FittedModel) -> bool:
    """Whether outputs are at so many positions that Λ does not fit in memory."""
    if fitted.likelihood.positions is None or isinstance(fitted.points, UnsavedPoints):
        return False
    return _hessian_bytes(fitted) > memory_of(fitted.model)


def _form(fitted: FittedModel) -> DiagonalForm | None:
    """Λ_n in O(C) numbers, as `_hessian`; None if it has no such form."""
    form = fitted.points.diagonal_form(fitted.curvature_type, fitted.likelihood)
    return form if form is None or _moves(fitted.likelihood) else form.detach()


def _moves(likelihood: Likelihood) -> bool:
    return any(parameter.requires_grad for parameter in likelihood.parameters())


def _curve(fitted: FittedModel, gradient: Tensor, z: Tensor, pushed: Tensor) -> Tensor:
    """zᵀ(H - P0)z from g, z = H⁻¹g and J z, differentiable in the log precisions and in Λ."""
    if not fitted.structure.spec.exact:  # an approximation has its own H
        structure, precision, hessian = fitted.structure, fitted.precision, _hessian(fitted)
        value, slope = precision.quadratic(z, gradient), precision.quadratic_slope(z)
        by_precision = fitted.prior.log_precision, scaled_by(lambda: slope)
        by_hessian = hessian, scaled_by(lambda: structure.curve_sensitivity(fitted.model, precision, z))
        return with_gradients(value.to(hessian), "the evidence", by_precision, by_hessian)
    form = _form(fitted)
    if form is not None:
        return form.quadratic(pushed)
    return torch.einsum("nc,ncd,nd->", pushed, _hessian(fitted), pushed)


def _correction(fitted: FittedModel) -> Tensor:
    """½ gᵀH⁻¹g ([I21] A.1), differentiable in the hyperparameters.

    Computed as the maximum ½ gᵀH⁻¹g = max_z zᵀg - ½ zᵀHz. Its gradient at z = H⁻¹g is exact with z fixed.
    """
    prior, theta = fitted.prior, fitted.theta
    gradient = fitted.joint_gradient()
    z = fitted.precision.solve(gradient)
    precision, pushed = prior.flat_precision().to(theta), fitted.jvp(z)
    residual = fitted.points.residual(fitted.likelihood)
    slope = (z * precision * fitted.from_prior_mean).sum() - (pushed * residual).sum()
    curve = (precision * z.square()).sum() + _curve(fitted, gradient, z, pushed)
    found = slope - 0.5 * curve
    # identity: z is fixed, so that only the first derivatives are exact
    unchanged = _same_hyperparameters(fitted)
    return with_gradients(found, "the evidence", (found, lambda upstream: upstream), check=unchanged)
