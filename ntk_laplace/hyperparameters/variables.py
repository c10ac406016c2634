"""The hyperparameters that move, as one flat vector of logarithms, and the evidence as a function of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from ntk_laplace.errors import HyperparameterError
from ntk_laplace.likelihoods import Gaussian, Likelihood
from ntk_laplace.priors import GaussianPrior

__all__ = ["Evidence", "Variables", "spectral_evidence"]


class Evidence(Protocol):
    """What an optimizer asks of a posterior."""

    prior: GaussianPrior
    likelihood: Likelihood

    def log_joint(self) -> Tensor:
        """First part of the evidence, differentiable."""

    def log_marginal_likelihood(self, correction: bool = False) -> Tensor:
        """Evidence in nats, differentiable in the hyperparameters."""

    def effective_parameters(self) -> Tensor:
        """γ_g, (G,)."""


class Variables:
    """Log precisions and the likelihood's log hyperparameters that are to move.

    Parameters
    ----------
    posterior : Evidence
    which : sequence of str
        Of "precision", "noise", "temperature", or names of the likelihood's own parameters; "likelihood" is all of
        those. None: all there are.
    """

    def __init__(self, posterior: Evidence, which: Sequence[str] | None) -> None:
        there: dict[str, nn.Parameter] = {"precision": posterior.prior.log_precision}
        own = dict(posterior.likelihood.named_parameters())
        for name, parameter in own.items():
            there[name.removeprefix("log_")] = parameter
        chosen = list(there) if which is None else [which] if isinstance(which, str) else list(which)
        if "likelihood" in chosen:
            chosen = [c for c in chosen if c != "likelihood"] + [n for n in there if n != "precision"]
        unknown = [name for name in chosen if name not in there]
        if unknown or not chosen:
            raise HyperparameterError(f"hyperparameters among {', '.join(there)}", f"{unknown or 'none'}",
                                      f"This likelihood is {type(posterior.likelihood).__name__}.")
        self.posterior = posterior
        self.parameters = {name: there[name] for name in dict.fromkeys(chosen)}

    @property
    def names(self) -> list[str]:
        """One name per number."""
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
        """Present logarithms, flat, float64."""
        return torch.cat([p.detach().double().flatten().cpu() for p in self.parameters.values()])

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Nothing else asks for a gradient: one in the likelihood may cost a pass over the data."""
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
        """Move to these logarithms."""
        start = 0
        for parameter in self.parameters.values():
            own = values[start : start + parameter.numel()]
            parameter.copy_(own.reshape(parameter.shape))
            start += parameter.numel()

    def box(self, bounds: tuple[float, float]) -> tuple[Tensor, Tensor]:
        """Lower and upper bounds of the logarithms; a number without a log is free."""
        low, high = (torch.tensor(bound, dtype=torch.float64).log() for bound in bounds)
        free = torch.cat([torch.full((p.numel(),), name == "coupling") for name, p in self.parameters.items()])
        infinite = torch.full((len(free),), float("inf"), dtype=torch.float64)
        return torch.where(free, -infinite, low), torch.where(free, infinite, high)

    def shown(self, values: Tensor) -> list[float]:
        """Variances, precisions, temperatures for the logarithms; a number without a log stays itself."""
        found, start = [], 0
        for name, parameter in self.parameters.items():
            own = values[start : start + parameter.numel()]
            found += (own if name == "coupling" else own.exp()).tolist()
            start += parameter.numel()
        return found

    def value_and_gradient(self, evidence: Callable[[], Tensor]) -> tuple[float, Tensor]:
        """Evidence at the present values, and its gradient in the logarithms."""
        with torch.enable_grad():
            value = evidence()
            gradients = torch.autograd.grad(value, list(self.parameters.values()), allow_unused=True)
        flat = [
            torch.zeros_like(p) if g is None else g for p, g in zip(self.parameters.values(), gradients, strict=True)
        ]
        return value.item(), torch.cat([g.detach().double().flatten().cpu() for g in flat])


def spectral_evidence(posterior: Evidence, which: Sequence[str]) -> Callable[[], Tensor] | None:
    """The evidence from one eigendecomposition, where everything that moves scales B - I by one number.

    One precision δ, and a Gaussian's one noise variance σ²: SᵀKS is proportional to 1/(δσ²). None if more moves.
    """
    prior, likelihood = posterior.prior, posterior.likelihood
    noise = isinstance(likelihood, Gaussian) and likelihood.kind == "scalar"
    moving = set(which) - {"precision"}
    if prior.log_precision.numel() != 1 or (moving and not (noise and moving == {"noise"})):
        return None
    spectrum_of = getattr(posterior, "spectrum", None)
    spectrum: Tensor | None = None if spectrum_of is None else spectrum_of()
    if spectrum is None:
        return None
    spectrum = spectrum.clamp_min(0.0).double()  # rounding leaves those of a semidefinite matrix a little below zero
    log_precision = prior.log_precision.detach().clone()
    log_noise = likelihood.log_noise.detach().clone() if noise else None

    def evidence() -> Tensor:
        shift = (prior.log_precision - log_precision).double().squeeze()
        if log_noise is not None:
            shift = shift + (likelihood.log_noise - log_noise).double().squeeze()
        joint = posterior.log_joint()
        return joint - 0.5 * torch.log1p(spectrum * torch.exp(-shift)).sum().to(joint)  # [I21] Eq. 8

    return evidence

