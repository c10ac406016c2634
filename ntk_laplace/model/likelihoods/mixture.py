"""The response averaged over samples of f: an exact mixture with equal weights."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Size, Tensor
from typing_extensions import Self

from ntk_laplace.errors import UnsupportedError
from ntk_laplace.model.likelihoods.importance import NormalOutputs
from ntk_laplace.model.likelihoods.number_mixture import NumberMixture
from ntk_laplace.model.likelihoods.protocol import ObservationModel
from ntk_laplace.model.likelihoods.responses import Response, ShapedResponse
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.panels import panels


class MixtureResponse(ShapedResponse):
    """Equal mixture over S samples of f: ``p(y) = 1/S Σ_s p(y given f_s)``, jointly over the outputs ([T20] 3.15).

    With `normal` the density is that of infinitely many samples, more accurately than by these.

    Parameters
    ----------
    likelihood : Likelihood
    f : Tensor, (S, n, C)
    scalar : bool
        The network's outputs have shape (N,): events are scalars.
    normal : NormalOutputs, optional
        The normal f that the samples are of: the density is then averaged over points that depend on the target.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(
        self, likelihood: ObservationModel, f: Tensor, scalar: bool = False, normal: NormalOutputs | None = None
    ) -> None:
        num_outputs = f.shape[-1]
        event = Size() if scalar else likelihood.event_shape(num_outputs)
        self.f, self.scalar, self._graph = f, scalar, torch.is_grad_enabled()
        self._normal = normal
        self._exact: tuple[Tensor, Tensor, Tensor] | None = None  # mean, epistemic, aleatoric
        self.likelihood, self.num_outputs, self._event = likelihood, num_outputs, event
        super().__init__(Size((f.shape[1],)), Size() if event is None else event, validate_args=False)

    @cached_property
    def _means(self) -> Tensor:
        return self._at_samples(lambda likelihood, f: likelihood.mean(f))

    def _at_samples(self, moment: Callable[[ObservationModel, Tensor], Tensor]) -> Tensor:
        """A moment of the response given each sample of f, (S, n, ...)."""
        f = self.f
        index = torch.arange(f.shape[1], device=f.device).repeat(f.shape[0])
        with self._recorded():
            return self._drop(moment(self.likelihood.at(index), f.flatten(0, 1)).unflatten(0, f.shape[:2]))

    def with_moments(self, mean: Tensor, epistemic: Tensor, aleatoric: Tensor) -> Self:
        """A copy with the moments (n, D) of infinitely many samples, where these are known."""
        found = copy.copy(self)
        found._exact = self._drop(mean), self._drop(epistemic), self._drop(aleatoric)
        return found

    @property
    def _like(self) -> Tensor:
        return self.f  # the moments are computed only if they are asked for

    @property
    def mean(self) -> Tensor:
        """Mean response."""
        return self._means.mean(0) if self._exact is None else self._exact[0]

    @cached_property
    def epistemic(self) -> Tensor:  # type: ignore[override]  # other responses assign it
        """Variance over the samples of the mean response."""
        return self._means.var(0, correction=0) if self._exact is None else self._exact[1]

    @cached_property
    def aleatoric(self) -> Tensor:  # type: ignore[override]  # other responses assign it
        """Mean over the samples of the response's variance."""
        if self._exact is not None:
            return self._exact[2]
        return self._at_samples(lambda likelihood, f: likelihood.response_variance(f)).mean(0)

    def univariate(self) -> NumberMixture:
        """Those of a normal f where they are known; else those given f, mixed over its samples."""
        if self._normal is not None:
            found = self.likelihood.univariate_of(self._normal.mean, self._normal.root @ self._normal.root.mT)
            if found is not None:
                return found.reshaped(*self.mean.shape)
        samples, n, _ = self.f.shape
        index = torch.arange(n, device=self.f.device).repeat(samples)
        given = plug_in(self.likelihood.at(index), self.f.flatten(0, 1), self.scalar)
        if isinstance(given, MixtureResponse):
            return super().univariate()  # a log density alone
        return given.univariate().over_samples(samples)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log of the average density in nats, one number per input; see `Response.log_prob`."""
        samples, n, _ = self.f.shape
        if self._event is None:  # a user-defined likelihood reads its own targets
            sample_shape, y = Size(), torch.as_tensor(value, device=self.f.device)
        else:
            sample_shape, y = self._split(value)
        repeats = math.prod(sample_shape)
        y = self.likelihood.targets(y, repeats * n, self.num_outputs)
        if self._normal is not None:
            total = self._by_importance(self._normal, y, repeats)
            return total.reshape(sample_shape + self.batch_shape)
        chunk = max(1, tuning.MIXTURE_OUTPUTS // (repeats * n * self.num_outputs))
        with self._recorded():
            scores = [self._joint(f, y, repeats).logsumexp(0) for f in self.f.split(chunk)]
        total = torch.stack(scores).logsumexp(0) - math.log(samples)
        return total.reshape(sample_shape + self.batch_shape)

    @classmethod
    def _join(cls, parts: Sequence[Self]) -> Self:
        known = [part._normal for part in parts if part._normal is not None]
        normal = NormalOutputs.joined(known) if len(known) == len(parts) else None
        found = cls(parts[0].likelihood, torch.cat([part.f for part in parts], 1), parts[0].scalar, normal)
        found._graph = all(part._graph for part in parts)
        exact = [part._exact for part in parts if part._exact is not None]
        if len(exact) == len(parts):
            mean, epistemic, aleatoric = map(torch.cat, zip(*exact, strict=True))
            found._exact = mean, epistemic, aleatoric
        return found

    def _by_importance(self, normal: NormalOutputs, y: Tensor, repeats: int) -> Tensor:
        """Log mean densities of (repeats n) targets."""
        index = torch.arange(len(normal.mean), device=y.device).repeat(repeats)
        with self._recorded():
            found = [normal.at(index[here]).log_mean(self.likelihood.at(index[here]), y[here])
                     for here in panels(len(index), normal.points.numel(), tuning.MIXTURE_OUTPUTS)]
        return torch.cat(found)

    def _joint(self, f: Tensor, y: Tensor, repeats: int) -> Tensor:
        """Log densities of (repeats n) targets under each sample, (S', repeats n)."""
        samples, n, outputs = f.shape
        index = torch.arange(n, device=f.device).repeat(samples * repeats)
        f = f.unsqueeze(1).expand(samples, repeats, n, outputs).reshape(-1, outputs)
        y = y.expand(samples, *y.shape).flatten(0, 1)
        return self.likelihood.at(index).log_prob(f, y).reshape(samples, repeats * n)

    @property
    def has_rsample(self) -> bool:  # type: ignore[override]  # torch declares a class attribute
        """Whether draws are differentiable: of one sample of f, under a response given f whose draws are."""
        if len(self.f) > 1:  # which sample is drawn is not differentiable
            return False
        response = _given(self.likelihood, self.f[0], self.scalar)
        return not isinstance(response, MixtureResponse) and response.has_rsample

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw responses: one sample of f each, then y given f."""
        return self._drawn(sample_shape, "sample")

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """The same draws, differentiable in the likelihood's hyperparameters.

        Raises
        ------
        UnsupportedError
            If `has_rsample` is False.
        """
        if not self.has_rsample:
            raise UnsupportedError("one sample of f, and a likelihood with differentiable draws, for rsample",
                                   f"{len(self.f):,} samples of f under {type(self.likelihood).__name__}",
                                   "Use sample().")
        return self._drawn(sample_shape, "rsample")

    def _drawn(self, sample_shape: Any, method: str) -> Tensor:
        samples, n, _ = self.f.shape
        shape = Size(sample_shape)
        repeats = math.prod(shape)
        index = torch.arange(n, device=self.f.device).repeat(repeats)
        pick = torch.randint(samples, (repeats * n,), device=self.f.device)
        response = _given(self.likelihood.at(index), self.f[pick, index], self.scalar)
        if isinstance(response, MixtureResponse):  # a log density alone defines no sampler
            raise UnsupportedError("a likelihood that can draw responses", type(self.likelihood).__name__,
                                   "Override distribution(f).")
        y: Tensor = getattr(response, method)()
        if not isinstance(response, Response):  # of a user's class, which knows nothing of outputs of shape (N,)
            y = self._drop(y)
        return y.reshape(shape + self.batch_shape + y.shape[1:])

    def _recorded(self) -> torch.set_grad_enabled:
        """Record a graph only if one was recorded when this response was made; predictions have none."""
        return torch.set_grad_enabled(self._graph and torch.is_grad_enabled())


def plug_in(likelihood: ObservationModel, f: Tensor, scalar: bool = False) -> Response:
    """The response given f (n, C), also of a class whose `distribution` takes f alone or returns one of torch."""
    found = _given(likelihood, f, scalar)
    return found if isinstance(found, Response) else MixtureResponse(likelihood, f.unsqueeze(0), scalar)


def _given(likelihood: ObservationModel, f: Tensor, scalar: bool) -> torch.distributions.Distribution:
    if len(inspect.signature(likelihood.distribution).parameters) > 1:
        return likelihood.distribution(f, scalar)
    return likelihood.distribution(f)
