"""Slow dense references, each derived another way than the library derives it.

Jacobians come from one example and one output at a time; likelihoods from a log density written by hand
and differentiated by autograd; posteriors from the P x P precision matrix; and [T20] Theorem 3.3 from
Gaussian-process regression, in a form that needs no inverse and no root of the output Hessian. No name of
the library is used here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, vmap


def call(network: nn.Module, x: Any) -> Tensor:
    """Networks of the table take a dict by keyword and a tuple as one argument."""
    return network(**x) if isinstance(x, dict) else network(x)


def take(x: Any, index: Any) -> Any:
    """Return the examples ``index`` of a tensor, a tuple or a dict."""
    if isinstance(x, dict):
        return {key: value[index] for key, value in x.items()}
    return tuple(part[index] for part in x) if isinstance(x, tuple) else x[index]


def num_examples(x: Any) -> int:
    first = next(iter(x.values())) if isinstance(x, dict) else x[0] if isinstance(x, tuple) else x
    return len(first)


def join(x: Any, z: Any) -> Any:
    """Return the examples of ``x`` followed by those of ``z``."""
    if isinstance(x, dict):
        return {key: torch.cat([x[key], z[key]]) for key in x}
    return tuple(map(torch.cat, zip(x, z, strict=True))) if isinstance(x, tuple) else torch.cat([x, z])


def outputs(network: nn.Module, x: Any) -> Tensor:
    """f, (N, C), in float64."""
    with torch.no_grad():
        f = call(network, x).double()
    return f[:, None] if f.dim() == 1 else f


def jacobian(network: nn.Module, x: Any) -> Tensor:
    """J, (N, C, P): a batch of one, one output, one backward pass at a time."""
    weights = [p for p in network.parameters() if p.requires_grad]
    rows = []
    for n in range(num_examples(x)):
        f = call(network, take(x, slice(n, n + 1))).reshape(-1)
        grads = (
            torch.autograd.grad(f_c, weights, retain_graph=True, materialize_grads=True, allow_unused=True) for f_c in f
        )
        rows.append(torch.stack([torch.cat([g.reshape(-1) for g in each]) for each in grads]))
    return torch.stack(rows).double()


def jacobian_by_func(network: nn.Module, x: Any) -> Tensor:
    """J, (N, C, P), by ``vmap(jacrev)``."""
    weights = {name: p.detach() for name, p in network.named_parameters() if p.requires_grad}

    def single(weights: dict[str, Tensor], x: Any) -> Tensor:
        batch = take(x, None)
        arguments, keywords = ((), batch) if isinstance(batch, dict) else ((batch,), {})
        return functional_call(network, weights, arguments, keywords).reshape(-1)

    jac = vmap(jacrev(single), (None, 0))(weights, x)
    return torch.cat([each.reshape(*each.shape[:2], -1) for each in jac.values()], 2).double()


def relative_error(value: Tensor, truth: Tensor) -> float:
    """Largest absolute error over largest absolute value; NaN or another shape is an infinite error."""
    if value.shape != truth.shape:
        return float("inf")
    value, truth = value.detach().double(), truth.detach().double()
    error = (value - truth).abs().max() / truth.abs().max()
    return error.item() if error.isfinite() else float("inf")


@dataclass(frozen=True)
class Dense:
    """The linearized model at θ*, with every matrix written out.

    Attributes
    ----------
    log_prob : Tensor, (N,)
    residual : Tensor, (N, C), gradient of the log density in f, by autograd
    hessian : Tensor, (N, C, C), minus its second derivative, by autograd
    jac : Tensor, (N, C, P)
    offset : Tensor, (P,), θ* - μ0
    precision : Tensor, (P,), the diagonal of P0

    """

    log_prob: Tensor
    residual: Tensor
    hessian: Tensor
    jac: Tensor
    offset: Tensor
    precision: Tensor

    @functools.cached_property
    def posterior_precision(self) -> Tensor:
        """H = JᵀΛJ + P0, (P, P)."""
        return torch.einsum("ncp,ncd,ndq->pq", self.jac, self.hessian, self.jac) + torch.diag(self.precision)

    @functools.cached_property
    def gradient(self) -> Tensor:
        """g = -Jᵀr + P0 (θ* - μ0), (P,): the gradient of the negative log joint density."""
        return -torch.einsum("ncp,nc->p", self.jac, self.residual) + self.precision * self.offset

    @functools.cached_property
    def step(self) -> Tensor:
        """θ̄ - θ* = -H⁻¹g, (P,)."""
        return -torch.linalg.solve(self.posterior_precision, self.gradient)

    @functools.cached_property
    def covariance(self) -> Tensor:
        """H⁻¹, (P, P)."""
        return torch.linalg.inv(self.posterior_precision)

    def evidence(self, correction: bool = False) -> Tensor:
        """Log evidence in nats by the P x P determinant, [I21] Eq. 8 and, with the correction, A.1."""
        log_det = torch.linalg.slogdet(self.posterior_precision).logabsdet - self.precision.log().sum()
        energy = (self.precision * self.offset**2).sum()
        value = self.log_prob.sum() - 0.5 * energy - 0.5 * log_det
        return value - 0.5 * self.gradient @ self.step if correction else value

    @property
    def _stacked(self) -> tuple[Tensor, Tensor, Tensor]:
        """J as (NC, P), Λ as (NC, NC), r as (NC,)."""
        return self.jac.flatten(0, 1), torch.block_diag(*self.hessian), self.residual.reshape(-1)

    @property
    def gram(self) -> Tensor:
        """K = J P0⁻¹ Jᵀ, (NC, NC), rows in the order n*C + c."""
        jac = self.jac.flatten(0, 1)
        return (jac / self.precision) @ jac.T

    def regression_evidence(self) -> Tensor:
        """[T20] Theorem 3.3 in a form that survives a singular Λ.

        The theorem subtracts log N(f + Λ⁻¹r; f, Λ⁻¹) from log N(f + Λ⁻¹r; m, K + Λ⁻¹). With d = f - m and
        (K + Λ⁻¹)⁻¹ = (I + ΛK)⁻¹Λ the inverses of Λ cancel: what is left is
        -½ log det(I + ΛK) + ½ rᵀK(I + ΛK)⁻¹r - dᵀ(I + ΛK)⁻¹r - ½ dᵀ(I + ΛK)⁻¹Λd.
        """
        jac, noise_inverse, r = self._stacked
        d = jac @ self.offset
        factor = torch.eye(len(r), dtype=r.dtype) + noise_inverse @ self.gram
        right = torch.linalg.solve(factor, torch.stack([r, noise_inverse @ d], 1))
        log_det = torch.linalg.slogdet(factor).logabsdet
        quadratic = 0.5 * (self.gram @ r) @ right[:, 0] - d @ right[:, 0] - 0.5 * d @ right[:, 1]
        return self.log_prob.sum() - 0.5 * log_det + quadratic

    def regression_evidence_literally(self) -> Tensor:
        """[T20] Theorem 3.3 as printed, for a regular Λ: pseudo-targets f + Λ⁻¹r with noise Λ⁻¹."""
        jac, noise_inverse, r = self._stacked
        noise = torch.linalg.inv(noise_inverse)
        pseudo = noise @ r  # relative to f, as is the prior mean below
        prior_mean = -jac @ self.offset

        def log_normal(y: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
            return torch.distributions.MultivariateNormal(mean, 0.5 * (covariance + covariance.T)).log_prob(y)

        correction = self.log_prob.sum() - log_normal(pseudo, torch.zeros_like(r), noise)
        return log_normal(pseudo, prior_mean, self.gram + noise) + correction

    def latent_mean(self, f: Tensor, jac: Tensor) -> Tensor:
        """Mean of the refitted linear model at outputs ``f`` (n, C) and Jacobians ``jac`` (n, C, P)."""
        return f + jac @ self.step

    def latent_covariance(self, jac: Tensor) -> Tensor:
        """Joint covariance J* H⁻¹ J*ᵀ, (nC, nC), at Jacobians ``jac`` (n, C, P)."""
        jac = jac.flatten(0, 1)
        return jac @ torch.linalg.solve(self.posterior_precision, jac.T)


def differentiate(
    log_density: Callable[[Tensor, Tensor], Tensor], f: Tensor, y: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """log p (N,), its gradient r (N, C) and minus its second derivative Λ (N, C, C) in ``f`` (N, C), by autograd."""
    y = y.double() if y.is_floating_point() else y
    y = y[:, None] if y.dim() == 1 and y.is_floating_point() else y
    return vmap(log_density)(f, y), vmap(grad(log_density))(f, y), -vmap(hessian(log_density))(f, y)


def difference(value: Callable[[], Tensor], parameter: Tensor, direction: Tensor, step: float = 2e-3) -> Tensor:
    """Central difference of fourth order along a direction: its error is of the order step⁴ and rounding / step."""

    def at(scale: float) -> Tensor:
        with torch.no_grad():
            parameter.add_(scale * step * direction)
            result = value()
            parameter.sub_(scale * step * direction)
        return result.detach().clone()

    return (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * step)
