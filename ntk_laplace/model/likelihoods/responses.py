"""Distributions of a response: torch distributions that separate epistemic and aleatoric variance.

For a batch of n inputs each has batch shape (n,), so ``log_prob(y)`` is one number per input for any number of
outputs. By the law of total variance ``variance = epistemic + aleatoric``. Epistemic is the variance of the mean
response over the posterior of f; aleatoric is the mean over that posterior of the response's variance given f.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Size, Tensor
from torch import distributions as td
from typing_extensions import Self

from ntk_laplace.errors import TargetError, UnsupportedError
from ntk_laplace.model.likelihoods.covariances import cholesky, marginal_log_density, require_positive
from ntk_laplace.model.likelihoods.labels import label_log_prob
from ntk_laplace.model.likelihoods.normal_mixture import NormalMixture
from ntk_laplace.model.likelihoods.number_mixture import NumberMixture, checked_levels
from ntk_laplace.model.likelihoods.protocol import ObservationModel

_OF_EACH_NUMBER = "Take that of each number, response.univariate(), or response.quantiles(levels); of classes, probs."


class Response(td.Distribution):
    """Distribution of y given x, one per input; it accepts the same targets as the likelihood.

    Attributes
    ----------
    epistemic, aleatoric : Tensor, the shape of `mean`
        The two parts of `variance`: from the uncertainty of f, and from the noise of y given f.
    likelihood : Likelihood
        The likelihood of these responses.
    probs : Tensor, (n, C)
        Probabilities, of responses that are classes alone; others have no such attribute.
    """

    likelihood: ObservationModel
    num_outputs: int
    epistemic: Tensor
    aleatoric: Tensor
    if TYPE_CHECKING:  # responses of classes have it, and `hasattr` asks for it

        @property
        def probs(self) -> Tensor:
            """Probabilities, of responses that are classes."""

    def _own(self, likelihood: ObservationModel, num_outputs: int, epistemic: Tensor, aleatoric: Tensor) -> None:
        # a plain attribute: a distribution must not register the likelihood, which is a module. num_outputs is C
        self.likelihood, self.num_outputs = likelihood, num_outputs
        self.epistemic, self.aleatoric = epistemic, aleatoric

    @property
    def variance(self) -> Tensor:
        """Variance of each response: epistemic + aleatoric."""
        return self.epistemic + self.aleatoric

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density or probability of targets, in nats, one number per input.

        Parameters
        ----------
        value : Tensor, sample_shape + (n,) + event_shape
            Targets as the likelihood accepts them; with one output, (n,) and (n, 1) are both accepted. Missing targets
            contribute nothing: the density is that of the observed ones.

        Raises
        ------
        TargetError
            If shape, type or values do not fit.
        """
        return super().log_prob(self._read(value))

    def univariate(self) -> NumberMixture:
        """Distribution of each number of the response, with the shape of `mean` as its batch shape.

        Raises
        ------
        UnsupportedError
            If they are classes or of a density of your own, or are counts linearized through their link.
        """
        return self.likelihood.univariate(self.mean, self.epistemic)

    def quantiles(self, levels: float | Sequence[float]) -> Tensor:
        """Quantiles of each number of the response: y is below that of level q with probability q.

        Parameters
        ----------
        levels : float or sequence of float, (L,)
            Probabilities strictly between 0 and 1. Two are an interval: 0.05 and 0.95 one of 90 %.

        Returns
        -------
        Tensor, (L, n) or (L, n, C)

        Raises
        ------
        DataError
            If a level is not strictly between 0 and 1.
        UnsupportedError
            As `univariate`.
        """
        wanted, each = checked_levels(levels), self.univariate()
        return each.icdf(wanted.to(each.mean.device).reshape(-1, *(1 for _ in each.batch_shape)))

    def cdf(self, value: Tensor) -> Tensor:
        """Probability of a response of at most `value`, of responses that torch has it for.

        Raises
        ------
        UnsupportedError
            If torch has none for them.
        """
        with self._of_torch("a cumulative distribution function", _OF_EACH_NUMBER):
            return super().cdf(value)

    def icdf(self, value: Tensor) -> Tensor:
        """Quantile of the response, of responses that torch has it for.

        Raises
        ------
        UnsupportedError
            If torch has none for them.
        """
        with self._of_torch("quantiles of the whole response", _OF_EACH_NUMBER):
            return super().icdf(value)

    def entropy(self) -> Tensor:
        """Entropy in nats, of responses that have it in closed form.

        Raises
        ------
        UnsupportedError
            If they have not.
        """
        with self._of_torch("an entropy in closed form", "Average draws, "
                            "-response.log_prob(response.sample((1000,))).mean(0); of labels, take that of probs."):
            return super().entropy()

    def present(self, value: Any) -> Tensor | None:
        """Mask of inputs with at least one observed target in `value`, (n,); None if no target is missing."""
        y = torch.as_tensor(value, device=self._like.device)
        observed = self.likelihood.observed(self.likelihood.targets(y, self.batch_shape[0], self.num_outputs))
        return None if observed is None else observed.reshape(self.batch_shape[0], -1).any(1)

    def tempered(self, temperature: float | Tensor) -> Response:
        """Class probabilities to the power 1/T, normalized; the parts of the variance keep their ratio.

        Raises
        ------
        UnsupportedError
            If the response is not one of classes, or is a joint one of several outputs.
        """
        raise UnsupportedError("class probabilities, of one label, to temper", type(self).__name__,
                               'Use the temperature of each draw, temperature="draws".')

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Concatenate responses for consecutive batches of inputs."""
        return parts[0] if len(parts) == 1 else cls._join(parts)

    @classmethod
    def _join(cls, parts: Sequence[Self]) -> Self:
        raise no_join(cls)

    @contextmanager
    def _of_torch(self, what: str, remedy: str) -> Iterator[None]:
        """Name what a response lacks; torch raises an error without words."""
        try:
            yield
        except UnsupportedError:
            raise
        except NotImplementedError:
            raise UnsupportedError(f"a response with {what}", f"a {type(self).__name__} of "
                                   f"{type(self.likelihood).__name__}", remedy) from None

    @property
    def _like(self) -> Tensor:
        """A tensor of the response's device and dtype."""
        return self.epistemic

    def _epistemic_share(self) -> Tensor:
        """Epistemic over total variance; 0 where both vanish."""
        variance = self.variance
        return torch.where(variance > 0, self.epistemic / variance, torch.zeros_like(variance))

    def _read(self, y: Any) -> Tensor:
        """Check targets and convert them to canonical form, with shape sample_shape + (n,) + event_shape."""
        sample_shape, y = self._split(y)
        n = self.batch_shape[0]
        canonical = self.likelihood.targets(y, math.prod(sample_shape) * n, self.num_outputs)
        if canonical.is_floating_point():
            canonical = canonical.to(self._like.dtype)
        return canonical.reshape(sample_shape + self.batch_shape + self.event_shape)

    def _split(self, y: Any) -> tuple[Size, Tensor]:
        """Sample shape of `y`, and `y` with the sample dimensions flattened into the first one."""
        y = torch.as_tensor(y, device=self._like.device)
        n, event = self.batch_shape[0], self.event_shape
        if event == (1,) and y.shape == (n,):
            y = y.unsqueeze(-1)
        elif event == () and self.num_outputs == 1 and y.shape == (n, 1):
            y = y.squeeze(-1)
        inner = self.batch_shape + event
        if y.shape[max(y.dim() - len(inner), 0) :] != inner:
            raise TargetError(f"targets of shape {tuple(inner)}, with sample dimensions in front if any",
                              f"shape {tuple(y.shape)}", "Pass one target for each predicted input.")
        sample_shape = y.shape[: y.dim() - len(inner)]
        return sample_shape, y.reshape((math.prod(sample_shape) * n, *event))


class ShapedResponse(Response):
    """A response of any likelihood, with events in the shape of the network's outputs.

    Attributes
    ----------
    scalar : bool
        The network's outputs have shape (N,): events are scalars.
    """

    scalar: bool

    @property
    def probs(self) -> Tensor:
        """Probability of 1, for each output, or of each class."""
        if not self.likelihood.classifies:
            raise AttributeError(f"{type(self.likelihood).__name__} responses have no class probabilities")
        return self.mean

    def _drop(self, moments: Tensor) -> Tensor:
        return moments.squeeze(-1) if self.scalar else moments


def no_join(kind: type) -> UnsupportedError:
    """The error for responses that cannot be concatenated."""
    return UnsupportedError("responses whose parts can be put together", kind.__name__,
                            "Define its class method join(parts), or predict as many inputs in one go, "
                            "predict(x, batch_size=len(x)).")


def _concatenated(parts: Sequence[Response], *names: str) -> list[Tensor]:
    return [torch.cat([getattr(part, name) for part in parts]) for name in names]


class NormalResponse(Response, td.Normal):
    """Normal response of a network whose outputs have shape (N,)."""

    def __init__(self, likelihood: ObservationModel, mean: Tensor, epistemic: Tensor, aleatoric: Tensor) -> None:
        variance = epistemic + aleatoric
        require_positive(variance)
        super().__init__(mean, variance.sqrt(), validate_args=False)
        self._own(likelihood, 1, epistemic, aleatoric)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density; see `Response.log_prob`."""
        y = self._read(value)
        return td.Normal.log_prob(self, y).masked_fill(y.isnan(), 0.0)

    def univariate(self) -> NormalMixture:
        """The same numbers as a mixture of one normal."""
        return NormalMixture.normal(self.mean, self.variance)

    @classmethod
    def _join(cls, parts: Sequence[Self]) -> Self:
        return cls(parts[0].likelihood, *_concatenated(parts, "loc", "epistemic", "aleatoric"))


class MultivariateNormalResponse(Response, td.MultivariateNormal):
    """Normal response of C outputs, with covariance = latent covariance + noise."""

    def __init__(self, likelihood: ObservationModel, mean: Tensor, latent: Tensor, noise: Tensor) -> None:
        super().__init__(mean, scale_tril=cholesky(latent + noise), validate_args=False)
        self.latent_covariance, self._noise = latent, noise
        parts = (latent.diagonal(dim1=-2, dim2=-1), noise.diagonal(dim1=-2, dim2=-1))
        self._own(likelihood, mean.shape[-1], *parts)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of the observed targets; see `Response.log_prob`."""
        y = self._read(value)
        there = ~y.isnan()
        if bool(there.all()):
            return td.MultivariateNormal.log_prob(self, y)
        return marginal_log_density(y - self.loc, self.covariance_matrix, there)

    def univariate(self) -> NormalMixture:
        """Normals of each output."""
        return NormalMixture.normal(self.mean, self.variance)

    @classmethod
    def _join(cls, parts: Sequence[Self]) -> Self:
        return cls(parts[0].likelihood, *_concatenated(parts, "loc", "latent_covariance", "_noise"))


class FactorizedResponse(Response, td.Independent):
    """Independent responses: a torch distribution of batch shape (n, D).

    `num_outputs` is C, if it is not D. For a network with outputs of shape (N,) (`scalar`) the parameters have shape
    (n, 1) and the public batch (n,).
    """

    def __init__(
        self, likelihood: ObservationModel, base: td.Distribution, epistemic: Tensor, aleatoric: Tensor, scalar: bool,
        num_outputs: int | None = None,
    ) -> None:
        num_outputs = epistemic.shape[-1] if num_outputs is None else num_outputs
        if scalar:
            epistemic, aleatoric = epistemic.squeeze(-1), aleatoric.squeeze(-1)
        super().__init__(base, 0 if scalar else 1, validate_args=False)
        self._own(likelihood, num_outputs, epistemic, aleatoric)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log probability of the observed targets, y log p + (1 - y) log(1 - p) for soft labels, one per input."""
        y = self._read(value)
        missing = y.isnan()
        scores = self.base_dist.log_prob(y.masked_fill(missing, 0.0)).masked_fill(missing, 0.0)
        return scores.sum(-1) if self.reinterpreted_batch_ndims else scores

    def univariate(self) -> NumberMixture:
        """The independent responses themselves, if they are normal."""
        normal = isinstance(self.base_dist, td.Normal)
        return NormalMixture.normal(self.mean, self.variance) if normal else super().univariate()

    @classmethod
    def _join(cls, parts: Sequence[Self]) -> Self:
        bases = [part.base_dist for part in parts]
        names = [name for name in type(bases[0]).arg_constraints if name != "probs"]  # logits are equivalent
        values = {name: torch.cat([getattr(base, name) for base in bases]) for name in names}
        base = type(bases[0])(**values, validate_args=False)
        return parts[0]._with(base, *_concatenated(parts, "epistemic", "aleatoric"))

    def _with(self, base: td.Distribution, epistemic: Tensor, aleatoric: Tensor) -> Self:
        """Responses in the form of these, with another base and parts of the variance."""
        scalar = self.event_shape == ()
        epistemic, aleatoric = (part.unsqueeze(-1) if scalar else part for part in (epistemic, aleatoric))
        return type(self)(self.likelihood, base, epistemic, aleatoric, scalar, self.num_outputs)


class BernoulliResponse(FactorizedResponse):
    """Independent binary responses, one per output."""

    @classmethod
    def of(
        cls, likelihood: ObservationModel, logits: Tensor, epistemic: Tensor, aleatoric: Tensor, scalar: bool = False
    ) -> BernoulliResponse:
        """From the log odds (n, C)."""
        base = td.Bernoulli(logits=logits.squeeze(-1) if scalar else logits, validate_args=False)
        return cls(likelihood, base, epistemic, aleatoric, scalar)

    def tempered(self, temperature: float | Tensor) -> BernoulliResponse:
        """Log odds divided by T; the parts of the variance keep their ratio."""
        logits, share = self.logits / temperature, self._epistemic_share()
        variance = torch.sigmoid(logits) * torch.sigmoid(-logits)
        return self._with(td.Bernoulli(logits=logits, validate_args=False), share * variance, (1 - share) * variance)

    @property
    def probs(self) -> Tensor:
        """Probability of 1, for each output, (n, C) or (n,)."""
        return self.base_dist.probs

    @property
    def logits(self) -> Tensor:
        """Log odds of 1, for each output, (n, C) or (n,)."""
        return self.base_dist.logits


class CategoricalResponse(Response, td.Categorical):
    """Response that is one of C classes; `probs` (n, C), and `log_prob` takes labels (n,).

    Mean and variance are those of the class indicators (n, C): the probabilities and p (1 - p).
    """

    def __init__(self, likelihood: ObservationModel, logits: Tensor, epistemic: Tensor, aleatoric: Tensor) -> None:
        super().__init__(logits=logits, validate_args=False)
        self._own(likelihood, logits.shape[-1], epistemic, aleatoric)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log probability of labels: Σ_c y_c log p_c if soft (…, n, C), 0 if missing, one per input."""
        y, soft = torch.as_tensor(value, device=self.logits.device), self.logits.shape
        if y.is_floating_point() and y.shape[-2:] == soft:
            sample_shape, y = y.shape[:-2], y.reshape(-1, soft[-1])
        else:
            sample_shape, y = self._split(y)
        y = self.likelihood.targets(y, len(y), self.num_outputs)
        log_p = self.logits.expand(sample_shape + soft).reshape(-1, soft[-1])
        return label_log_prob(log_p, y).reshape(sample_shape + self.batch_shape)

    def tempered(self, temperature: float | Tensor) -> CategoricalResponse:
        """Log probabilities divided by T, normalized; the parts of the variance keep their ratio."""
        logits, share = torch.log_softmax(self.logits / temperature, -1), self._epistemic_share()
        variance = -torch.expm1(logits) * logits.exp()
        return CategoricalResponse(self.likelihood, logits, share * variance, (1 - share) * variance)

    @property
    def mean(self) -> Tensor:
        """Mean of the class indicators, (n, C): the probabilities."""
        return self.probs

    @classmethod
    def _join(cls, parts: Sequence[Self]) -> Self:
        return cls(parts[0].likelihood, *_concatenated(parts, "logits", "epistemic", "aleatoric"))
