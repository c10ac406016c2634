"""What searches over hyperparameters maximize, without the prior's hyperprior: the evidence, and its gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from ntk_laplace.curvature import LogDetTerm, joined
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
    second where log det B is estimated. The likelihood may be optimized too if it only multiplies Λ by a scalar c (a
    Gaussian's single noise variance). A step costs O(P), or O(N R), and one eigendecomposition of the first layer's
    inputs if each has a precision of its own. Derivatives are written out where they are known: a graph of few numbers
    would take longer than they do.
    """

    def __init__(self, posterior: Evidence, terms: Sequence[LogDetTerm], likelihood: _LogLikelihood) -> None:
        self._terms, self._likelihood, self._prior = joined(terms), likelihood, posterior.prior
        with torch.no_grad():
            self._log_precision, self._distances = self._prior.log_precision.detach().clone(), distances_of(posterior)

    @classmethod
    def of(
        cls, posterior: Evidence, parameters: Mapping[str, nn.Parameter], local: bool = False
    ) -> SpectralEvidence | None:
        """Over these hyperparameters, near their values if `local`; None where no terms tell it."""
        likelihood = {name: parameter for name, parameter in parameters.items() if name != "precision"}
        if likelihood and posterior.log_scale() is None:
            return None
        terms = posterior.local_log_det() if local else posterior.log_det_terms()
        return None if terms is None else cls(posterior, terms, _log_likelihood_of(posterior, likelihood))

    @torch.no_grad()
    def value(self) -> Tensor:
        """One pass over the terms."""
        rest, _, _ = self._rest(self._likelihood.change())
        return _sum(self._likelihood.value(), rest)

    def value_and_gradients(self, parameters: Mapping[str, nn.Parameter]) -> tuple[Tensor, list[Tensor]]:
        """From the same pass."""
        with torch.no_grad():
            rest, by_precision, by_scale = self._rest(self._likelihood.change())
        value, others = self._likelihood.value_and_gradients(by_scale)
        return _sum(value, rest), [others.get(name, by_precision) for name in parameters]

    def _rest(self, change: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """-½ Σ δ_g d_g - ½ log det B, and its derivatives in the log precisions, (G,), and in log c."""
        now = self._prior.log_precision
        shift = (now - self._log_precision).double()
        if change is not None:
            shift -= change
        energies = now.exp().to(self._distances) * self._distances
        value, total = energies.sum(), torch.zeros_like(shift)
        for term in self._terms:
            own, slope = term.value_and_slope(shift)
            value, total = value + own, total + slope
        return -0.5 * value, -0.5 * (energies + total), 0.5 * total.sum()


def _sum(value: Tensor, rest: Tensor) -> Tensor:
    return value + rest.to(value)


class _LogLikelihood(ABC):
    """Σ log p(y_n given f_n), in a search."""

    @abstractmethod
    def change(self) -> Tensor | None:
        """By how much log c is larger than at first, 0-d, float64, without a graph; None if it does not move."""

    @abstractmethod
    def value(self) -> Tensor:
        """At the present hyperparameters, 0-d."""

    @abstractmethod
    def value_and_gradients(self, by_scale: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The value, and derivatives in the hyperparameters of it and of a term whose one in log c is `by_scale`."""


class _Fixed(_LogLikelihood):
    """One that does not move, evaluated once."""

    def __init__(self, posterior: Evidence) -> None:
        with torch.no_grad():
            self._value = plain(posterior.log_likelihood())

    def change(self) -> None:
        return None

    def value(self) -> Tensor:
        return self._value

    def value_and_gradients(self, by_scale: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self._value, {}


class _Differentiated(_LogLikelihood):
    """One that autograd differentiates."""

    def __init__(self, posterior: Evidence, parameters: Mapping[str, nn.Parameter]) -> None:
        self._posterior, self._parameters = posterior, parameters
        self._start = self._scale().detach().clone()

    def _scale(self) -> Tensor:
        found = self._posterior.log_scale()
        assert found is not None
        return found.reshape(())

    def change(self) -> Tensor:
        return (self._scale().detach() - self._start).double()

    def value(self) -> Tensor:
        return plain(self._posterior.log_likelihood())

    def value_and_gradients(self, by_scale: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.enable_grad():
            joint, scale = self.value(), self._scale()
            slopes = _gradients(joint + by_scale.to(joint) * scale.to(joint), self._parameters)
        return joint.detach(), dict(zip(self._parameters, slopes, strict=True))


class _Scaled(_LogLikelihood):
    """``k + ½ (m s - q eˢ)``, where a scale's logarithm, linear in one hyperparameter, is larger by s than at first.

    k, m and q are sums over the examples (`Likelihood.density_by_scale`). The scale of the curvature is another power
    of it where the curvature is of gradients.
    """

    def __init__(self, posterior: Evidence, terms: tuple[Tensor, ...], name: str, parameter: nn.Parameter) -> None:
        self._name, self._parameter, self._start = name, parameter, parameter.detach().clone()
        weights = posterior.weights.double()
        self._constant, self._count, self._distance = (torch.dot(weights, own.double()) for own in terms)
        with torch.enable_grad():
            scales = posterior.likelihood.log_curvature_scale(), posterior.log_scale()
            self._slope, self._curvature_slope = (_gradients(scale.sum(), {name: parameter})[0] for scale in scales
                                                  if scale is not None)

    def _moved(self) -> Tensor:
        return self._parameter.detach() - self._start

    def change(self) -> Tensor:
        return (self._moved() * self._curvature_slope).sum().double()

    def _parts(self) -> tuple[Tensor, Tensor]:
        """s, and q eˢ."""
        s = (self._moved() * self._slope).sum().to(self._distance)
        return s, self._distance * s.exp()

    def value(self) -> Tensor:
        s, distance = self._parts()
        return self._constant + 0.5 * (self._count * s - distance)

    def value_and_gradients(self, by_scale: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        _, distance = self._parts()
        slope = self._slope * (0.5 * (self._count - distance)).to(self._slope)
        slope += self._curvature_slope * by_scale.to(self._slope)
        return self.value(), {self._name: slope}


def _log_likelihood_of(posterior: Evidence, parameters: Mapping[str, nn.Parameter]) -> _LogLikelihood:
    """With these of its hyperparameters moving."""
    if not parameters:
        return _Fixed(posterior)
    with torch.no_grad():
        terms = posterior.likelihood.density_by_scale(posterior.f, posterior.targets)
    if terms is None or len(parameters) > 1:
        return _Differentiated(posterior, parameters)
    (name, parameter), = parameters.items()
    return _Scaled(posterior, terms, name, parameter)
