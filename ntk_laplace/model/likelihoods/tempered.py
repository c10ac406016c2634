"""Tempered: a likelihood in which every example counts w times."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import wraps
from typing import Any

from torch import Tensor

from ntk_laplace.errors import UnsupportedError, require_number
from ntk_laplace.model.likelihoods.base import Likelihood
from ntk_laplace.model.likelihoods.diagonal_form import DiagonalForm
from ntk_laplace.model.likelihoods.mixture import plug_in
from ntk_laplace.model.likelihoods.registry import built, record_to_build, register_likelihood
from ntk_laplace.model.likelihoods.responses import Response


def _forwarded(name: str) -> Any:
    """A method of the likelihood without the weight, under its own name."""
    method = getattr(Likelihood, name)

    @wraps(method)
    def call(self: Tempered, *arguments: Any, **options: Any) -> Any:
        return getattr(self.likelihood, name)(*arguments, **options)

    return call


@register_likelihood
class Tempered(Likelihood):
    """The likelihood ``p(y given f)^w``: each example counts w times.

    Data augmentation increases the effective number of examples; [I21] section 4.3 uses w = 5 for it. With an integer
    w the evidence and the posterior are those of the data repeated w times. New responses are predicted by the
    likelihood without the weight.

    Parameters
    ----------
    likelihood : Likelihood
        Its hyperparameters are those of this likelihood.
    weight : float
        w.

    Raises
    ------
    HyperparameterError
        If the weight is not positive and finite.
    """

    def __init__(self, likelihood: Likelihood, weight: float) -> None:
        super().__init__()
        if not isinstance(likelihood, Likelihood) or isinstance(likelihood, Tempered):
            raise UnsupportedError("a likelihood that is not tempered yet", f"{likelihood!r}",
                                   "Multiply the weights instead.")
        self.weight = require_number("a positive finite weight", weight, "Pass for instance weight=5.", above=0)
        self.likelihood = likelihood
        self.classifies, self.is_density = likelihood.classifies, likelihood.is_density
        self.positions = likelihood.positions

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Any:
        """The hyperparameters of `likelihood`, under their own names."""
        return self.likelihood.named_parameters(prefix, recurse, remove_duplicate)

    def extra_repr(self) -> str:
        """The weight."""
        return f"weight={self.weight:g}"

    # --- validation

    def place(self, y: Any) -> None:
        """As the likelihood does."""
        self.likelihood.place(y)
        self.positions = self.likelihood.positions

    bind = _forwarded("bind")
    targets = _forwarded("targets")
    num_responses = _forwarded("num_responses")
    event_shape = _forwarded("event_shape")
    num_positions = _forwarded("num_positions")
    apart = _forwarded("apart")
    together = _forwarded("together")
    log_curvature_scale = _forwarded("log_curvature_scale")
    log_residual_scale = _forwarded("log_residual_scale")
    observed = _forwarded("observed")
    hidden = _forwarded("hidden")
    in_form_of = _forwarded("in_form_of")

    def at_position(self) -> Likelihood:
        """The likelihood's, without the weight."""
        return self if self.positions is None else self.likelihood.at_position()

    def at(self, index: Tensor | slice) -> Likelihood:
        """The likelihood of a subset of the examples, with the same weight."""
        own = self.likelihood.at(index)
        return self if own is self.likelihood else Tempered(own, self.weight)

    def for_new_points(self) -> Likelihood:
        """The likelihood without the weight: a new response counts once."""
        return self.likelihood.for_new_points()

    def counted_once(self) -> Likelihood:
        """The likelihood without the weight."""
        return self.likelihood

    def scaled_noise(self, factor: float) -> Likelihood:
        """A copy with the likelihood's noise multiplied by `factor`, and the same weight."""
        return Tempered(self.likelihood.scaled_noise(factor), self.weight)

    # --- the density and its derivatives in f

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """w times the log density of each example, (N,), nats."""
        return self.weight * self.likelihood.log_prob(f, y)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """w times the gradient in f, (N, C)."""
        return self.weight * self.likelihood.residual(f, y)

    def curvature(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """w times the likelihood's curvature, (N, C, C)."""
        return self.weight * self.likelihood.curvature(f, y)

    def diagonal_form(self, f: Tensor, y: Tensor | None = None) -> DiagonalForm | None:
        """w times the likelihood's."""
        found = self.likelihood.diagonal_form(f, y)
        return None if found is None else found.times(f.new_full((len(f),), self.weight))

    def root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """S (N, C, R) with ``S Sᵀ`` equal to `curvature`."""
        return math.sqrt(self.weight) * self.likelihood.root(f, y)

    def left_inverse(self, f: Tensor) -> Tensor | None:
        """The likelihood's left inverse, divided by √w."""
        found = self.likelihood.left_inverse(f)
        return None if found is None else found / math.sqrt(self.weight)

    rank = _forwarded("rank")
    identified = _forwarded("identified")

    # --- the response, which counts once

    mean = _forwarded("mean")
    mean_jacobian = _forwarded("mean_jacobian")
    response_covariance = _forwarded("response_covariance")
    response_variance = _forwarded("response_variance")
    additive_noise = _forwarded("additive_noise")
    average = _forwarded("average")
    keeps_samples = _forwarded("keeps_samples")
    integrates = _forwarded("integrates")
    integrate = _forwarded("integrate")
    univariate = _forwarded("univariate")
    univariate_of = _forwarded("univariate_of")
    linearize = _forwarded("linearize")
    probit = _forwarded("probit")
    probit_by_variance = _forwarded("probit_by_variance")

    def distribution(self, f: Tensor, scalar: bool = False) -> Response:
        """Return the response given f."""
        return plug_in(self.likelihood, f, scalar)

    def expected(self, mean: Tensor, covariance: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """w times the likelihood's expectations, if it has them without sampling."""
        found = self.likelihood.expected(mean, covariance, y)
        if found is None:
            return None
        log_prob, residual, curvature = found
        return self.weight * log_prob, self.weight * residual, self.weight * curvature

    def averaged_curvature(self, f: Tensor, y: Tensor) -> Tensor:
        """w times the likelihood's average."""
        return self.weight * self.likelihood.averaged_curvature(f, y)

    # --- saving

    def record(self) -> dict[str, Any]:
        """The weight, and the record of the likelihood."""
        return {"likelihood": record_to_build(self.likelihood), "weight": self.weight}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Likelihood:
        """Build the likelihood, and temper it."""
        if "likelihood" not in record:
            raise UnsupportedError("likelihood= the Tempered of the fit", "none",
                                   "An older checkpoint does not contain it: pass it to load().")
        return cls(built(**record["likelihood"]), record["weight"])
