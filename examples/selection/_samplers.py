"""Posterior sampling of a network's weights by the library `posteriors`, or by its updates as they are written here."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

import ntk_laplace as ntkl

warnings.filterwarnings("ignore", category=FutureWarning)  # of what `posteriors` imports
try:
    import posteriors
except ImportError:
    posteriors = None

LIBRARY = "written out" if posteriors is None else f"posteriors {posteriors.__version__}"
CHAINS = 32
STEP = 0.1  # of SGLD, over 1/ω², and of SGHMC, over 1/ω with friction ω, for the largest curvature ω² of -log p
STABLE = 0.25  # of the splitting, over 1/ω

@dataclass(frozen=True)
class Problem:
    """Data whose first m points are known, a network trained on them, and its posterior for all of them."""

    name: str
    x: Tensor
    y: Tensor
    known: int
    network: nn.Module
    likelihood: ntkl.Likelihood
    precision: float

    @cached_property
    def posterior(self) -> ntkl.Posterior:
        """Of all points, at the weights of the first m."""
        return self._fitted(slice(None))

    @cached_property
    def given(self) -> ntkl.Posterior:
        """Of the first m points."""
        return self._fitted(slice(self.known))

    def _fitted(self, part: slice) -> ntkl.Posterior:
        return ntkl.laplace(self.network, (self.x[part], self.y[part]), self.likelihood,
                            ntkl.GaussianPrior(self.precision), structure="full",
                            settings=ntkl.Settings(progress=False))

    def outputs(self, thetas: Tensor, index: slice | Tensor) -> Tensor:
        """f(x_i, θ_s), (S, n, C)."""
        weights = dict(self.network.named_parameters())
        sizes = [w.numel() for w in weights.values()]

        def one(theta: Tensor) -> Tensor:
            parts = {name: part.view(w.shape) for (name, w), part in zip(weights.items(), theta.split(sizes),
                                                                         strict=True)}
            return torch.func.functional_call(self.network, parts, self.x[index])

        return torch.func.vmap(one)(thetas)

    def log_likelihood(self, thetas: Tensor, index: slice | Tensor) -> Tensor:
        """log p(y_i given θ_s), (S, n)."""
        f, y = self.outputs(thetas, index), self.y[index]
        if self.likelihood.classifies:
            return torch.log_softmax(f, 2).gather(2, y.expand(len(f), -1)[..., None]).squeeze(2)
        noise = float(self.likelihood.noise)
        return (-0.5 * ((y - f).square() / noise + math.log(2 * math.pi * noise))).squeeze(2)

    def log_posterior(self, thetas: Tensor, index: Tensor | None = None) -> Tensor:
        """log p(known points, θ_s) up to a constant, (S,); of a minibatch, scaled to all known points."""
        part = slice(self.known) if index is None else index
        share = 1.0 if index is None else self.known / len(index)
        return share * self.log_likelihood(thetas, part).sum(1) - 0.5 * self.precision * thetas.square().sum(1)

    def slope(self, thetas: Tensor, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Values (S,) and gradients (S, P) of `log_posterior`."""
        thetas = thetas.detach().requires_grad_()
        values = self.log_posterior(thetas, index)
        return values.detach(), torch.autograd.grad(values.sum(), thetas)[0]


class Sampler:
    """The state of one sampler, all chains at once: weights and momenta (chains, P)."""

    def __init__(self, problem: Problem, kind: str, rate: float, friction: float, theta: Tensor,
                 momenta: Tensor | None = None) -> None:
        self.problem, self.kind, self.rate, self.friction, self.theta = problem, kind, rate, friction, theta
        self.momenta = torch.randn_like(theta) if momenta is None else momenta

    def step(self, index: Tensor | None = None) -> None:
        """One step, with the gradient of all known points or of a minibatch."""
        raise NotImplementedError


class Library(Sampler):
    """The transform of `posteriors`, on all chains as one parameter."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = {} if self.kind == "sgld" else {"alpha": self.friction}
        starts = {} if self.kind == "sgld" else {"momenta": self.momenta}
        self._transform = getattr(posteriors.sgmcmc, self.kind).build(self._log_posterior, lr=self.rate, **options,
                                                                      **starts)
        self._state = self._transform.init(self.theta)

    def _log_posterior(self, theta: Tensor, index: Tensor | None) -> tuple[Tensor, Tensor]:
        values = self.problem.log_posterior(theta, index)
        return values.sum(), values

    def step(self, index: Tensor | None = None) -> None:
        self._state, _ = self._transform.update(self._state, index)
        self.theta = self._state.params
        if self.kind != "sgld":
            self.momenta = self._state.momenta


class Written(Sampler):
    """The same updates in plain torch."""

    def step(self, index: Tensor | None = None) -> None:
        rate, theta, noise = self.rate, self.theta, torch.randn_like(self.theta)
        slope = self.problem.slope(theta, index)[1]
        if self.kind == "sgld":
            self.theta = theta + rate * slope + (2 * rate) ** 0.5 * noise
        elif self.kind == "sghmc":
            self.theta = theta + rate * self.momenta
            kept = self.momenta - rate * self.friction * self.momenta
            self.momenta = kept + rate * slope + (2 * self.friction * rate) ** 0.5 * noise
        else:
            kept = math.exp(-self.friction * rate)
            before = self.momenta + rate * slope
            self.momenta = kept * before + (1 - kept**2) ** 0.5 * noise
            self.theta = theta + rate / 2 * (before + self.momenta)


sampler = Written if posteriors is None else Library


def stochastic(problem: Problem, kind: str, draws: int, warmup: int, every: int, share: float = 1.0) -> Tensor:
    """SGHMC (Chen et al. 2014) or SGLD (Welling and Teh 2011) of many chains; the step from the largest curvature."""
    given = problem.given
    matrix = given.posterior_precision.multiply(torch.eye(given.num_parameters).double())
    largest = float(torch.linalg.eigvalsh(matrix)[-1])
    # SGHMC's update is an explicit Euler step: it needs a step below friction/ω², and gains nothing by less friction
    rate, friction = (STEP / largest**0.5, largest**0.5) if kind == "sghmc" else (STEP / largest, 0.0)
    size = max(1, round(share * problem.known))
    chains, kept = sampler(problem, kind, rate, friction, given.sample(CHAINS)), []
    for number in range((warmup + draws) * every):
        chains.step(None if share == 1.0 else torch.randperm(problem.known)[:size])
        if number >= warmup * every and number % every == every - 1:
            kept.append(chains.theta)
    return torch.stack(kept, 1)


@dataclass(frozen=True)
class Chains:
    """Draws of `underdamped`, (draws, chains, P), and what says whether they are draws of the posterior.

    Attributes
    ----------
    warmup : int
        Steps before the first draw is kept.
    virial : float
        -E[θᵀ∇log p(θ, known points)] / P, which is 1 for draws of the posterior, by partial integration. Of weights
        that still grow towards the prior's spread it is below 1.
    kinetic : float
        The mean square of the momenta, 1 where the step is short enough.
    """

    draws: Tensor
    warmup: int
    virial: float
    kinetic: float


def underdamped(problem: Problem, theta: Tensor, kept: int, every: int, most: int) -> Chains:
    """SGHMC's dynamics with full gradients, by the splitting of Leimkuhler and Matthews (2015): `baoa` of `posteriors`.

    SGHMC's own update, an explicit Euler step, needs so much friction that weights which the data leave free move as
    slowly as by SGLD. The splitting is stable below 2/ω at any friction: here the step is .25/ω for the largest
    curvature ω² at any of the states so far, measured every 25 steps, and the friction is critical for the prior's
    curvature. The warmup ends when the virial of two blocks of steps in a row is within .03 of 1, and the momenta's
    mean square within .05, or after `most` steps.

    Parameters
    ----------
    theta : Tensor
        Starts, (chains, P).
    kept, every : int
        Steps after the warmup, of which each `every`-th is kept.
    """
    friction = 2 * problem.precision**0.5
    largest, direction = curvature(problem, theta, torch.randn_like(theta), 20)
    chains = sampler(problem, "baoa", STABLE / largest**0.5, friction, theta)

    def block(steps: int) -> tuple[list[Tensor], float, float]:
        """States, virial and kinetic energy of some steps."""
        nonlocal chains, largest, direction
        draws, virials, energies = [], [], []
        for number in range(steps):
            if number % 25 == 0:
                found, direction = curvature(problem, chains.theta, direction, 5)
                if found > largest:
                    largest = found
                    rate = STABLE / largest**0.5
                    chains = sampler(problem, "baoa", rate, friction, chains.theta, chains.momenta)
            chains.step()
            if number % every == every - 1:
                draws.append(chains.theta)
                virials.append(virial(problem, chains.theta))
                energies.append(float(chains.momenta.square().mean()))
        return draws, sum(virials) / len(virials), sum(energies) / len(energies)

    warmup = settled = 0
    while settled < 2 and warmup < most:
        _, ratio, energy = block(max(every, kept // 4))
        warmup += max(every, kept // 4)
        settled = settled + 1 if abs(ratio - 1) < 0.03 and abs(energy - 1) < 0.05 else 0
    draws, ratio, energy = block(kept)
    return Chains(torch.stack(draws), warmup, ratio, energy)


def curvature(problem: Problem, theta: Tensor, direction: Tensor, steps: int) -> tuple[float, Tensor]:
    """The largest absolute eigenvalue of the Hessians of log p at the states (S, P), by power iteration from (S, P)."""
    theta = theta.detach().requires_grad_()
    slope = torch.autograd.grad(problem.log_posterior(theta).sum(), theta, create_graph=True)[0]
    for _ in range(steps):
        product = torch.autograd.grad(slope, theta, direction, retain_graph=True)[0]
        largest = float((product.norm(dim=1) / direction.norm(dim=1)).max())
        direction = product / product.norm(dim=1, keepdim=True)
    return largest, direction


def virial(problem: Problem, theta: Tensor) -> float:
    """-θᵀ∇log p / P, the mean over the states."""
    return float(-(theta * problem.slope(theta)[1]).sum(1).mean() / theta.shape[1])
