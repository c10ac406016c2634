"""The optimized hyperparameters as one flat vector of logarithms, and the evidence as a function of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ntk_laplace.curvature import LogDetTerm
from ntk_laplace.errors import HyperparameterError, UnsupportedError
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.runtime.scalars import plain

__all__ = ["Evidence", "Variables", "local_evidence", "spectral_evidence", "with_hyperprior"]


class Evidence(Protocol):
    """The interface of a posterior that the optimizers use."""

    @property
    def prior(self) -> GaussianPrior:
        """The prior."""

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood."""

    @property
    def dtype(self) -> torch.dtype:
        """Floating type of the algebra."""

    @property
    def f(self) -> Tensor:
        """Outputs at the training points, (N, C)."""

    @property
    def targets(self) -> Tensor:
        """Training targets."""

    @property
    def weights(self) -> Tensor:
        """Example weights, (N,)."""

    def log_likelihood(self) -> Tensor:
        """Σ log p(y_n given f_n), differentiable in the likelihood's hyperparameters."""

    def log_scale(self) -> Tensor | None:
        """Log of the scalar by which the likelihood's hyperparameters multiply the curvature; None if not a scalar."""

    def log_det_terms(self) -> Sequence[LogDetTerm] | None:
        """Terms whose sum is log det B at any precisions; None if the structure has none."""

    def local_log_det(self) -> Callable[[Tensor], Tensor] | None:
        """log det B in changes of the log precisions, near the present ones; None where it is not estimated."""

    def log_marginal_likelihood(self, correction: bool = False) -> Tensor:
        """Evidence in nats, differentiable in the hyperparameters."""

    def effective_parameters(self) -> Tensor:
        """γ_g, (G,)."""


class Variables:
    """The log precisions and the likelihood's log hyperparameters to optimize.

    Parameters
    ----------
    posterior : Evidence
    which : sequence of str
        "precision", "noise", "temperature", or names of the likelihood's parameters; "likelihood" is all of those.
        None: all but a temperature, which must be named.
    """

    def __init__(self, posterior: Evidence, which: Sequence[str] | None) -> None:
        there: dict[str, nn.Parameter] = {"precision": posterior.prior.log_precision}
        own = dict(posterior.likelihood.named_parameters())
        for name, parameter in own.items():
            there[name.removeprefix("log_")] = parameter
        known = f"hyperparameters among {', '.join(there)}"
        if not (which is None or isinstance(which, (str, Sequence))):
            raise HyperparameterError(known, repr(which), "Pass their names, or leave them out for the default.")
        default = [name for name in there if name != "temperature"]
        chosen = default if which is None else [which] if isinstance(which, str) else list(which)
        if "likelihood" in chosen:
            chosen = [c for c in chosen if c != "likelihood"] + [n for n in there if n != "precision"]
        unknown = [name for name in chosen if name not in there]
        if unknown or not chosen:
            raise HyperparameterError(known, f"{unknown or 'none'}",
                                      f"This likelihood is {type(posterior.likelihood).__name__}.")
        self.posterior = posterior
        self.parameters = {name: there[name] for name in dict.fromkeys(chosen)}
        if any(parameter.is_inference() for parameter in self.parameters.values()):
            raise HyperparameterError("hyperparameters that can change", "tensors made in torch.inference_mode()",
                                      "Copy the posterior outside of it.")

    @property
    def names(self) -> list[str]:
        """One name per entry."""
        found: list[str] = []
        for name, parameter in self.parameters.items():
            if name == "precision":
                found += [f"precision[{group}]" for group in self.posterior.prior.group_names]
            elif parameter.numel() == 1:
                found.append(name)
            else:
                found += [f"{name}[{i}]" for i in range(parameter.numel())]
        return found

    def get(self) -> Tensor:
        """Current logarithms, flat, float64."""
        return torch.cat([p.detach().double().flatten().cpu() for p in self.parameters.values()])

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Disable all other gradients: one in the likelihood may need a pass over the data."""
        posterior = self.posterior
        moving = {id(parameter) for parameter in self.parameters.values()}
        others = [p for m in (posterior.prior, posterior.likelihood) for p in m.parameters() if id(p) not in moving]
        before = [p.requires_grad for p in others]
        for parameter in others:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter, asked in zip(others, before, strict=True):
                parameter.requires_grad_(asked)

    @torch.no_grad()
    def set(self, values: Tensor) -> None:
        """Set the hyperparameters to these logarithms."""
        start = 0
        for parameter in self.parameters.values():
            own = values[start : start + parameter.numel()]
            parameter.copy_(own.reshape(parameter.shape))
            start += parameter.numel()

    def box(self, bounds: tuple[float, float]) -> tuple[Tensor, Tensor]:
        """Lower and upper bounds of the logarithms; parameters without a logarithm are unbounded."""
        low, high = (torch.tensor(bound, dtype=torch.float64).log() for bound in bounds)
        free = torch.cat([torch.full((p.numel(),), name == "coupling") for name, p in self.parameters.items()])
        infinite = torch.full((len(free),), float("inf"), dtype=torch.float64)
        return torch.where(free, -infinite, low), torch.where(free, infinite, high)

    def shown(self, values: Tensor) -> list[float]:
        """Variances, precisions, temperatures for the logarithms; parameters without a logarithm as they are."""
        found, start = [], 0
        for name, parameter in self.parameters.items():
            own = values[start : start + parameter.numel()]
            found += (own if name == "coupling" else own.exp()).tolist()
            start += parameter.numel()
        return found

    def value_and_gradient(self, evidence: Callable[[], Tensor]) -> tuple[float, Tensor]:
        """Evidence at the current values, and its gradient in the logarithms."""
        with torch.enable_grad():
            value = plain(evidence())
            gradients = torch.autograd.grad(value, list(self.parameters.values()), allow_unused=True)
        unused = [name for name, g in zip(self.parameters, gradients, strict=True) if g is None]
        if unused:  # a checkpoint without data, or a likelihood that does not use its parameter
            raise UnsupportedError(f"an evidence that depends on {', '.join(unused)}", "one that does not",
                                   "Name those that move, parameters=[...]; load a checkpoint with its data, data=....")
        return value.item(), torch.cat([g.detach().double().flatten().cpu() for g in gradients])


def with_hyperprior(evidence: Callable[[], Tensor], prior: GaussianPrior) -> Callable[[], Tensor]:
    """What searches maximize: the evidence, and the hyperprior of the precisions if there is one."""
    if not prior.has_hyperprior:
        return evidence

    def objective() -> Tensor:
        value = evidence()
        return value + prior.log_hyperprior().to(value)

    return objective


def spectral_evidence(posterior: Evidence, theta: Tensor, which: Sequence[str]) -> Callable[[], Tensor] | None:
    """The evidence from terms of log det B that are known at any precisions.

    This holds for one precision for all parameters, and for Kronecker factors and diagonals in weight space. The
    likelihood may be optimized too if it only multiplies Λ by a scalar (a Gaussian's single noise variance); a fixed
    likelihood is evaluated once. A step costs O(P), or O(N R), and one eigendecomposition of the first layer's inputs
    if each has a precision of its own. None in other cases.
    """
    prior = posterior.prior
    moving = set(which) - {"precision"}
    scale = posterior.log_scale()
    if moving and scale is None:
        return None
    terms = posterior.log_det_terms()
    if terms is None:
        return None
    with torch.no_grad():
        log_precision, distances = prior.log_precision.detach().clone(), prior.group_distances(theta)
        log_scale = None if scale is None else scale.detach().clone()
        log_likelihood = plain(posterior.log_likelihood())

    def evidence() -> Tensor:
        joint = plain(posterior.log_likelihood()) if moving else log_likelihood
        now = posterior.log_scale() if moving else None
        rest = _PriorAndLogDet.apply(prior.log_precision, now, log_precision, log_scale, distances, terms)
        return joint + rest.to(joint)  # [I21] Eq. 8, 9

    return evidence


class _PriorAndLogDet(torch.autograd.Function):
    """-½ Σ δ_g d_g - ½ log det B at log precisions and at a log c by which Λ is multiplied, if it moves.

    Its derivatives come from the same pass: a graph of the few numbers takes longer than they do.
    """

    @staticmethod
    def forward(
        ctx: Any, log_precision: Tensor, log_scale: Tensor | None, log_precision_before: Tensor,
        log_scale_before: Tensor | None, distances: Tensor, terms: Sequence[LogDetTerm],
    ) -> Tensor:  # fmt: skip
        shift = (log_precision - log_precision_before).double()
        if log_scale is not None and log_scale_before is not None:
            shift = shift - (log_scale - log_scale_before).double()
        parts = [term.value_and_slope(shift) for term in terms]
        slope = sum((own for _, own in parts), torch.zeros_like(shift))
        energies = log_precision.exp().to(distances) * distances
        ctx.by_precision = -0.5 * (energies + slope)
        ctx.by_scale = None if log_scale is None else (0.5 * slope.sum()).to(log_scale)
        return -0.5 * (energies.sum() + sum((value for value, _ in parts), shift.new_zeros(())))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        by_scale = None if ctx.by_scale is None else upstream * ctx.by_scale
        return upstream * ctx.by_precision, by_scale, None, None, None, None


def local_evidence(posterior: Evidence, theta: Tensor, which: Sequence[str]) -> Callable[[], Tensor] | None:
    """The evidence near the present hyperparameters, for an estimated log det B; None where it is not estimated.

    The likelihood may be optimized too if it only multiplies Λ by a scalar.
    """
    prior, scale = posterior.prior, posterior.log_scale()
    moving = bool(set(which) - {"precision"})
    log_det = None if moving and scale is None else posterior.local_log_det()
    if log_det is None:
        return None
    with torch.no_grad():
        log_precision, distances = prior.log_precision.detach().clone(), prior.group_distances(theta)
        log_scale = None if scale is None else scale.detach().clone()

    def evidence() -> Tensor:
        shift = (prior.log_precision - log_precision).double()
        now = posterior.log_scale() if moving else None
        if now is not None and log_scale is not None:
            shift = shift - (now - log_scale).double()
        joint = plain(posterior.log_likelihood())
        joint = joint - 0.5 * (prior.precision.to(distances) * distances).sum().to(joint)
        return joint - 0.5 * log_det(shift).to(joint)  # [I21] Eq. 8

    return evidence
