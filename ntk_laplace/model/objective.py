"""The training loss: the negative log joint of a minibatch or of all examples, and its gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ntk_laplace.errors import DataError, UnsupportedError
from ntk_laplace.model.data import Inputs, num_examples
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.model.network import Caller
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.runtime.parameter_layout import ParameterLayout


class Objective:
    """The negative log joint ([I21] Eq. 6), divided by the number of examples to match the scale of a mean loss.

    ``-Σ w_n log p(y_n given f_n) + ½ (θ-μ0)ᵀP0(θ-μ0)``, where the sum over a minibatch of b examples is multiplied by
    N/b; w_n are the example weights, 1 by default.

    Parameters
    ----------
    caller : Caller
        Calls the caller's network, whose gradients are set.
    likelihood : Likelihood
    prior : GaussianPrior
        Bound to the network.
    num_examples, num_outputs : int
        N and C.
    weight : float, optional
        Σ w_n over the data of the evidence, if they have example weights.

    Raises
    ------
    UnsupportedError
        If the likelihood has noise per point.
    """

    def __init__(
        self, caller: Caller, likelihood: Likelihood, prior: GaussianPrior, num_examples: int, num_outputs: int,
        weight: float | None = None,
    ) -> None:
        if likelihood.at(slice(0, 1)) is not likelihood:
            raise UnsupportedError("a likelihood that is the same for every example", "noise per point",
                                   "Minibatches do not know the indices of their points: give one variance, or one per "
                                   "output.")
        self._caller = caller
        self._likelihood, self._prior = likelihood, prior
        self.num_examples, self._c, self._weight = num_examples, num_outputs, weight
        self.parameters = {name: p for name, p in caller.module.named_parameters() if p.requires_grad}
        self._weights, self._hyperparameters = list(self.parameters.values()), list(likelihood.parameters())
        self._layout = ParameterLayout({name: p.shape for name, p in self.parameters.items()})
        means = self._layout.named(prior.flat_mean())
        self._means = [means[name].to(p) if bool(means[name].any()) else None for name, p in self.parameters.items()]
        self._pull: list[Tensor | float] = []
        self._settled: Tensor | None = None

    @property
    def scale(self) -> float:
        """Divisor of the loss: N or Σ w_n, times the weight of a tempered likelihood."""
        return self.total * self._likelihood.weight

    @property
    def total(self) -> float:
        """N, or Σ w_n."""
        return self.num_examples if self._weight is None else self._weight

    @property
    def words(self) -> str:
        """A description of the number of examples and their weights."""
        often = "" if self._weight is None else f", whose weights add up to {self._weight:g}"
        return f"{self.num_examples:,}" + often

    def settle(self) -> None:
        """Read the current precisions; must be called after they change."""
        with torch.no_grad():
            now = self._prior.precision
            if self._settled is not None and torch.equal(now, self._settled):
                return
            self._settled, own = now, (now / self.scale).cpu()
            places = map(self._prior.group_of, self.parameters)
            self._pull = [own[place].view(p.shape).to(p) if isinstance(place, Tensor) else float(own[place])
                          for place, p in zip(places, self.parameters.values(), strict=True)]

    def gradient(self, x: Inputs, y: Tensor, weights: Tensor | None = None) -> Tensor:
        """Set the parameters' gradients from one minibatch; return its negative log likelihood, scaled to N, nats.

        Gradients that are there are replaced.

        Raises
        ------
        DataError
            If only the minibatch or only the data of the evidence have example weights.
        """
        if (weights is None) != (self._weight is None):
            raise DataError("example weights in the minibatches and in the data of the evidence, or in neither",
                            f"them in {'the evidence data' if weights is None else 'the minibatches'} alone",
                            "Pass (X, y, w) for both.")
        self._clear()
        loss = self._add_fit(x, y, weights, self.num_examples / num_examples(x))
        self._add_pull()
        return loss

    def likelihood_gradient(self, batches: Iterable[tuple[Inputs, Tensor, Tensor | None]]) -> float:
        """Set the parameters' gradients from all examples, without the prior's; return the negative log likelihood."""
        self._clear()
        fit = [self._add_fit(x, y, weights, 1.0).double() for x, y, weights in batches]
        return float(torch.stack(fit).sum())

    def _clear(self) -> None:
        for parameter in self._weights:
            parameter.grad = None

    def _add_fit(self, x: Inputs, y: Tensor, weights: Tensor | None, factor: float) -> Tensor:
        """Add the gradient of a batch's negative log likelihood times `factor`; return this product, nats."""
        n = num_examples(x)
        f = self._caller(x)
        f = f.unsqueeze(1) if f.ndim == 1 else f
        targets = self._likelihood.targets(y, n, self._c)
        with constant(self._hyperparameters):  # a graph through them would cost half of a small network's
            log_prob = self._likelihood.log_prob(f, targets)
        log_prob = log_prob if weights is None else log_prob * weights.to(log_prob)
        loss = -factor * log_prob.sum()
        # gradients of anything else, such as inputs, must not change
        (loss / self.scale).backward(inputs=self._weights)
        return loss.detach()

    def _add_pull(self) -> None:
        """Add the prior's gradient, P0 (θ - μ0)."""
        with torch.no_grad():
            for parameter, away, pull in self._away():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                if isinstance(pull, float):
                    parameter.grad.add_(away, alpha=pull)
                else:
                    parameter.grad.addcmul_(pull, away)

    def _away(self) -> Iterator[tuple[nn.Parameter, Tensor, Tensor | float]]:
        """Each parameter θ_i, θ_i - μ0_i, and its precision over the scale of the loss."""
        for parameter, mean, pull in zip(self._weights, self._means, self._pull, strict=True):
            yield parameter, parameter if mean is None else parameter - mean, pull

    # --- the weights as a flat vector, (P,), float64

    def theta(self) -> Tensor:
        """The weights θ."""
        return self._layout.flat(self.parameters).detach().double()

    @torch.no_grad()
    def move_to(self, theta: Tensor) -> None:
        """Set the weights."""
        for name, value in self._layout.named(theta).items():
            self.parameters[name].copy_(value)

    def flat_gradient(self) -> Tensor:
        """The gradient that `gradient` or `likelihood_gradient` has set, nats; zero where the outputs do not depend."""
        named = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in self.parameters.items()}
        return self._layout.flat(named).double() * self.scale

    def units(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the prior."""
        with torch.no_grad():
            device = self.theta().device
            return self._prior.flat_mean().to(device), self._prior.flat_precision().rsqrt().to(device)

    def energy(self) -> Tensor:
        """½ (θ-μ0)ᵀP0(θ-μ0) at the current weights and the precisions of `settle`, nats, float64."""
        with torch.no_grad():
            parts = [(pull * away.double().square()).sum() for _, away, pull in self._away()]
            return 0.5 * self.scale * torch.stack(parts).sum()


@contextmanager
def constant(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Treat parameters as constants within a block."""
    moving = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in moving:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in moving:
            parameter.requires_grad_(True)


@contextmanager
def in_mode(network: nn.Module, training: bool) -> Iterator[None]:
    """Set train or eval mode for a block, then restore the mode of every submodule."""
    before = [(module, module.training) for module in network.modules()]
    network.train(training)
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode
