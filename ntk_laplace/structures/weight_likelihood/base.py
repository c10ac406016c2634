"""log p(D | θ) as a function of many weights: values, gradients, and products with exact Hessians."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ntk_laplace.errors import UnsupportedError, first_line
from ntk_laplace.runtime.resources import is_about_memory
from ntk_laplace.structures.weight_likelihood.many_points import ManyPoints

REMEDY = "Take fewer chains or samples at a time, or fewer training points."


@dataclass(frozen=True)
class LocalCurvature:
    """Derivatives of log p(D | θ) at weights (S, P).

    Attributes
    ----------
    gradients : Tensor, (S, P)
    products : callable
        Hessians times vectors, (S, P) to (S, P).
    """

    gradients: Tensor
    products: Callable[[Tensor], Tensor]


class WeightLikelihood(ABC):
    """log p(D | θ) as a function of weights (S, P)."""

    _points: ManyPoints

    @abstractmethod
    def values(self, thetas: Tensor) -> Tensor:
        """log p(D | θ_s), (S,), nats; -inf where it is not finite."""

    @abstractmethod
    def outputs(self, thetas: Tensor) -> Tensor:
        """Outputs at the training points, (S, N, C)."""

    def log_prob(self, f: Tensor) -> Tensor:
        """log p(y_n | f_n), (S, N), nats, of outputs f (S, N, C), each point counted once."""
        return self._points.each(f)

    @abstractmethod
    def weighted(self, weights: Tensor) -> WeightedLikelihood:
        """With example weights (S, N) of each value of the weights, which replace those of the data."""

    @abstractmethod
    def at_once(self) -> int:
        """Number of weights whose graphs of a curvature fit in memory together, at least 1."""

    @abstractmethod
    def values_and_gradients(self, thetas: Tensor) -> tuple[Tensor, Tensor]:
        """`values`, and their gradients, (S, P)."""


class WeightedLikelihood(ABC):
    """Σ w_sn log p(y_n | θ_s) as a function of weights (S, P), with example weights (S, N)."""

    @abstractmethod
    def values_and_gradients(self, thetas: Tensor) -> tuple[Tensor, Tensor]:
        """(S,), nats, -inf where it is not finite, and its gradients, (S, P)."""

    @abstractmethod
    def curvature(self, thetas: Tensor) -> LocalCurvature:
        """Gradients and exact Hessians."""


@dataclass(frozen=True)
class GradientGraph:
    """A gradient in some of the weights, (S, P), with its graph, or one in outputs."""

    some: slice
    at: Tensor
    gradient: Tensor

    def product(self, vectors: Tensor) -> Tensor:
        """The gradient's derivative along vectors of its shape."""
        if not self.gradient.requires_grad:  # linear: there is no second derivative
            return torch.zeros_like(vectors)
        return differentiated(self.gradient, self.at, vectors.to(self.gradient)).to(vectors)


def differentiated(value: Tensor, at: Tensor, cotangent: Tensor | None) -> Tensor:
    """The gradient of a value, with its graph; or the product of a gradient's derivative with a cotangent."""
    try:
        return torch.autograd.grad(value, at, cotangent, retain_graph=True, create_graph=cotangent is None)[0]
    except RuntimeError as error:
        if is_about_memory(error):
            raise
        got = f"a second backward pass that raises {type(error).__name__}: {first_line(error)}"
        raise no_second_derivatives(got) from error


def no_second_derivatives(got: str) -> UnsupportedError:
    """The error of a network, or of an operation, that cannot be differentiated twice."""
    return UnsupportedError("a network with second derivatives, for Newton steps with its exact Hessian", got,
                            'Use linearization="fixed", and relinearize() for Gauss-Newton steps.')
