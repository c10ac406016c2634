"""What searches over hyperparameters maximize, without the prior's hyperprior: the evidence, and its gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from ntk_laplace.curvature import LogDetTerm
from ntk_laplace.errors import UnsupportedError
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.runtime.scalars import plain
from ntk_laplace.structures import FittedModel


class Evidence(Protocol):
    """The interface of a posterior that the optimizers use."""

    @property
    def prior(self) -> GaussianPrior:
        """The prior."""

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood."""

    @property
    def fitted(self) -> FittedModel:
        """What was fitted, at the weights of the evidence."""

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

    def local_log_det(self) -> Sequence[LogDetTerm] | None:
        """Terms of log det B near the present precisions; None where it is not estimated."""

    def log_marginal_likelihood(self, correction: bool = False) -> Tensor:
        """Evidence in nats, differentiable in the hyperparameters."""

    def effective_parameters(self) -> Tensor:
        """γ_g, (G,)."""


def distances_of(posterior: Evidence) -> Tensor:
    """‖θ_g - μ0_g‖² of each prior group, (G,)."""
    return posterior.prior.group_distances(posterior.fitted.theta)


class SearchObjective(ABC):
    """A function of a posterior's present hyperparameters."""

    @abstractmethod
    def value(self) -> Tensor:
        """In nats, 0-d."""

    @abstractmethod
    def value_and_gradients(self, parameters: Mapping[str, nn.Parameter]) -> tuple[Tensor, list[Tensor]]:
        """The value, and its gradient in each of these, which `Variables` names.

        UnsupportedError if the value does not depend on one of them.
        """


def _gradients(value: Tensor, parameters: Mapping[str, nn.Parameter]) -> list[Tensor]:
    there = {name: p for name, p in parameters.items() if value.requires_grad and p.requires_grad}
    slopes = torch.autograd.grad(value, list(there.values()), allow_unused=True) if there else ()
    found = dict(zip(there, slopes, strict=True))
    unused = [name for name in parameters if found.get(name) is None]
    if unused:  # a checkpoint without data, a frozen parameter, or a likelihood that does not use its own
        raise UnsupportedError(f"an evidence that depends on {', '.join(unused)}", "one that does not",
                               "Name those that move, parameters=[...]; load a checkpoint with its data, data=...; or "
                               "undo requires_grad_(False).")
    return [found[name] for name in parameters]


class Differentiable(SearchObjective):
    """An objective that autograd differentiates; the callable returns its value with the graph."""

    def __init__(self, evidence: Callable[[], Tensor]) -> None:
        self._evidence = evidence

    def value(self) -> Tensor:
        """Without a graph."""
        with torch.no_grad():
            return plain(self._evidence())

    def value_and_gradients(self, parameters: Mapping[str, nn.Parameter]) -> tuple[Tensor, list[Tensor]]:
        """By one backward pass."""
        with torch.enable_grad():
            value = plain(self._evidence())
            return value.detach(), _gradients(value, parameters)


class SpectralEvidence(SearchObjective):
    """The evidence from terms of log det B that are known at any precisions ([I21] Eq. 8, 9), or near the present ones.

    The first holds for one precision for all parameters, and for Kronecker factors and diagonals in weight space; the
    second where log det B is estimated. The likelihood may be optimized too if it only multiplies Λ by a scalar (a
    Gaussian's single noise variance); a fixed likelihood is evaluated once. A step costs O(P), or O(N R), and one
    eigendecomposition of the first layer's inputs if each has a precision of its own. Autograd differentiates the log
    likelihood alone, if it is `moving`: a graph of the other few numbers would take longer than they do.
    """

    def __init__(self, posterior: Evidence, terms: Sequence[LogDetTerm], moving: bool) -> None:
        self._posterior, self._terms, self._moving = posterior, terms, moving
        self._prior, scale = posterior.prior, posterior.log_scale() if moving else None
        with torch.no_grad():
            self._log_precision, self._distances = self._prior.log_precision.detach().clone(), distances_of(posterior)
            self._log_scale = None if scale is None else scale.detach().clone()
            self._log_likelihood = plain(posterior.log_likelihood())

    @classmethod
    def of(cls, posterior: Evidence, which: Sequence[str], local: bool = False) -> SpectralEvidence | None:
        """Over the hyperparameters of these names, near their values if `local`; None where no terms tell it."""
        moving = bool(set(which) - {"precision"})
        if moving and posterior.log_scale() is None:
            return None
        terms = posterior.local_log_det() if local else posterior.log_det_terms()
        return None if terms is None else cls(posterior, terms, moving)

    def value(self) -> Tensor:
        """One pass over the terms."""
        with torch.no_grad():
            rest, _, _ = self._rest(self._posterior.log_scale() if self._moving else None)
            joint = plain(self._posterior.log_likelihood()) if self._moving else self._log_likelihood
            return joint + rest.to(joint)

    def value_and_gradients(self, parameters: Mapping[str, nn.Parameter]) -> tuple[Tensor, list[Tensor]]:
        """From the same pass."""
        likelihood = {name: parameter for name, parameter in parameters.items() if name != "precision"}
        with torch.enable_grad():
            scale = self._posterior.log_scale() if self._moving else None
            rest, by_precision, by_scale = self._rest(scale)
            joint, others = self._log_likelihood, iter(list[Tensor]())
            if scale is not None:
                joint = plain(self._posterior.log_likelihood())
                others = iter(_gradients(joint + by_scale.to(joint) * scale.to(joint), likelihood))
        value = joint.detach() + rest.to(joint)
        return value, [by_precision if name == "precision" else next(others) for name in parameters]

    @torch.no_grad()
    def _rest(self, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """-½ Σ δ_g d_g - ½ log det B, and its derivatives in the log precisions, (G,), and in log c."""
        now = self._prior.log_precision
        shift = (now - self._log_precision).double()
        if scale is not None and self._log_scale is not None:
            shift = shift - (scale - self._log_scale).double()
        parts = [term.value_and_slope(shift) for term in self._terms]
        slope = sum((own for _, own in parts), torch.zeros_like(shift))
        energies = now.exp().to(self._distances) * self._distances
        value = energies.sum() + sum((value for value, _ in parts), shift.new_zeros(()))
        return -0.5 * value, -0.5 * (energies + slope), 0.5 * slope.sum()

