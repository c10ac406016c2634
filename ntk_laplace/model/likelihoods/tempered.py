"""Tempered: a likelihood in which every example counts w times."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Size, Tensor

from ntk_laplace.errors import HyperparameterError, UnsupportedError, is_number
from ntk_laplace.model.likelihoods.base import Likelihood
from ntk_laplace.model.likelihoods.diagonal_form import DiagonalForm
from ntk_laplace.model.likelihoods.mixture import plug_in
from ntk_laplace.model.likelihoods.registry import built, likelihood_record, register_likelihood
from ntk_laplace.model.likelihoods.responses import Response

__all__ = ["Tempered"]


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
        if not is_number(weight, above=0):
            raise HyperparameterError("a positive finite weight", f"{weight!r}", "Pass for instance weight=5.")
        self.weight = float(weight)
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

    def bind(self, num_examples: int, num_outputs: int) -> None:
        """As the likelihood does."""
        self.likelihood.bind(num_examples, num_outputs)

    def targets(self, y: Any, num_examples: int, num_outputs: int) -> Tensor:
        """As the likelihood does."""
        return self.likelihood.targets(y, num_examples, num_outputs)

    def num_responses(self, num_outputs: int) -> int:
        """The likelihood's."""
        return self.likelihood.num_responses(num_outputs)

    def event_shape(self, num_outputs: int) -> Size | None:
        """The likelihood's."""
        return self.likelihood.event_shape(num_outputs)

    def num_positions(self, num_outputs: int) -> int:
        """The likelihood's."""
        return self.likelihood.num_positions(num_outputs)

    def at_position(self) -> Likelihood:
        """The likelihood's, without the weight."""
        return self if self.positions is None else self.likelihood.at_position()

    def apart(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """As the likelihood does."""
        return self.likelihood.apart(f, y)

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

    def log_curvature_scale(self) -> Tensor | None:
        """The likelihood's."""
        return self.likelihood.log_curvature_scale()

    # --- missing targets

    def observed(self, y: Tensor) -> Tensor | None:
        """As the likelihood does."""
        return self.likelihood.observed(y)

    def hidden(self, y: Tensor, observed: Tensor) -> Tensor:
        """As the likelihood does."""
        return self.likelihood.hidden(y, observed)

    def in_form_of(self, y: Tensor, other: Tensor) -> Tensor:
        """As the likelihood does."""
        return self.likelihood.in_form_of(y, other)

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

    def rank(self, num_outputs: int) -> int:
        """The likelihood's."""
        return self.likelihood.rank(num_outputs)

    def identified(self, num_outputs: int) -> Tensor | None:
        """The likelihood's."""
        return self.likelihood.identified(num_outputs)

    # --- the response, delegated to the likelihood

    def mean(self, f: Tensor) -> Tensor:
        """Mean response."""
        return self.likelihood.mean(f)

    def mean_jacobian(self, f: Tensor) -> Tensor:
        """Derivative of `mean` in f."""
        return self.likelihood.mean_jacobian(f)

    def response_covariance(self, f: Tensor) -> Tensor:
        """Covariance of the response given f."""
        return self.likelihood.response_covariance(f)

    def response_variance(self, f: Tensor) -> Tensor:
        """Variance of each response given f."""
        return self.likelihood.response_variance(f)

    def additive_noise(self, f: Tensor) -> Tensor | None:
        """The likelihood's."""
        return self.likelihood.additive_noise(f)

    def distribution(self, f: Tensor, scalar: bool = False) -> Response:
        """Return the response given f."""
        return plug_in(self.likelihood, f, scalar)

    def average(self, f: Tensor, scalar: bool = False) -> Response:
        """Average the response over samples of f."""
        return self.likelihood.average(f, scalar)

    def integrate(self, mean: Tensor, covariance: Tensor, scalar: bool = False) -> Response | None:
        """Response for f ~ N(mean, covariance) in closed form, if there is one."""
        return self.likelihood.integrate(mean, covariance, scalar)

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

    def linearize(self, mean: Tensor, covariance: Tensor, scalar: bool = False) -> Response:
        """Moments of the response for f ~ N(mean, covariance)."""
        return self.likelihood.linearize(mean, covariance, scalar)

    def probit(self, mean: Tensor, covariance: Tensor, scalar: bool = False) -> Response:
        """Class probabilities for f ~ N(mean, covariance) by MacKay's probit approximation."""
        return self.likelihood.probit(mean, covariance, scalar)

    def probit_by_variance(self, mean: Tensor, variance: Tensor, scalar: bool = False) -> Response | None:
        """The likelihood's."""
        return self.likelihood.probit_by_variance(mean, variance, scalar)

    # --- saving

    def record(self) -> dict[str, Any]:
        """The weight, and the record of the likelihood."""
        inner = likelihood_record(self.likelihood)
        return {"likelihood": {"name": inner["name"], "options": inner["options"]}, "weight": self.weight}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Likelihood:
        """Build the likelihood, and temper it."""
        if "likelihood" not in record:
            raise UnsupportedError("likelihood= the Tempered of the fit", "none",
                                   "An older checkpoint does not contain it: pass it to load().")
        return cls(built(**record["likelihood"]), record["weight"])
