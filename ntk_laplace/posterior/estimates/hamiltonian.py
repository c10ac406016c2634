"""Hamiltonian Monte Carlo of weights on a path of temperatures: many chains at once, preconditioned by a Gaussian."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from ntk_laplace.posterior.estimates.gaussians import WeightGaussian
from ntk_laplace.posterior.estimates.paths import Path, uniform
from ntk_laplace.runtime.progress import track
from ntk_laplace.structures.weight_likelihood import WeightLikelihood

_WISHED = 0.8  # acceptance that the steps are adapted to
_RATE = 0.5  # change of a log step for an acceptance that is off by 1
_PILOT_TEMPERATURES, _PILOT_CHAINS = 25, 16
_FIRST_TRIALS, _TRIALS = 20, 5  # transitions of the pilot at its first temperature, and at the others
_JITTER = 0.2  # relative width of a trajectory's step: fixed ones may return to where they began
_STUCK = 0.1  # share of accepted trajectories below which a chain is called stuck
_DIVERGED = 1000.0  # growth of the energy beyond which a trajectory has diverged


@dataclass(frozen=True)
class Weights:
    """States of S chains: weights, and the two log densities with their gradients.

    `base` is log q0, and `gain` Δ = log p(D, θ) - log q0; -inf where it is not finite.
    """

    theta: Tensor
    base: Tensor
    gain: Tensor
    base_slope: Tensor
    gain_slope: Tensor

    def slope(self, beta: float) -> Tensor:
        """Gradient of log f_β."""
        return self.base_slope + beta * self.gain_slope

    def log_density(self, beta: float) -> Tensor:
        """log f_β."""
        return self.base + beta * self.gain

    def where(self, chosen: Tensor, other: Weights) -> Weights:
        """Chains of this object where `chosen` (S,), else of the other."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Weights(*(torch.where(chosen if own.ndim == 1 else chosen.unsqueeze(1), own, its) for own, its in pairs))


class HamiltonianPath(Path[Weights]):
    """Leapfrog trajectories with velocities v ~ N(0, Q⁻¹), whose energy is ½ vᵀQv - log f_β.

    Q is that of q0, the `base`, which may be the same object as the prior. A trajectory has `leapfrog` steps. Their
    sizes are adapted on a pilot run of other chains, and fixed before the run.

    Attributes
    ----------
    steps : Tensor, (T,)
        Step at each temperature.
    acceptances : list of float
        Mean acceptance of each transition.
    divergences : list of float
        Share of the chains whose energy has diverged in each transition.
    accepted : Tensor, (S,)
        Transitions that each chain has accepted.
    """

    sampler = "Hamiltonian Monte Carlo of the weights"

    def __init__(
        self, likelihood: WeightLikelihood, prior: WeightGaussian, base: WeightGaussian, leapfrog: int
    ) -> None:
        self._likelihood, self._prior, self._base, self._leapfrog = likelihood, prior, base, leapfrog
        self.log_density_error = 0.5 * base.log_det_error
        self.steps = base.mean.new_zeros(0)
        self.forget()

    def forget(self) -> None:
        """Start to count acceptances and divergences anew."""
        self.acceptances: list[float] = []
        self.divergences: list[float] = []
        self.accepted = self._base.mean.new_zeros(0)

    def told(self) -> dict[str, Any]:
        """Acceptance, divergences and stuck chains of the transitions since `forget`."""
        seen = self.acceptances
        if not seen:
            return {}
        return {"acceptance": sum(seen) / len(seen), "lowest_acceptance": min(seen),
                "diverged": sum(self.divergences) / len(seen),
                "stuck": int((self.accepted < _STUCK * len(seen)).sum())}

    def start(self, count: int, generator: Generator) -> Weights:
        return self.at_weights(self._base.draws(count, generator))

    def at_weights(self, thetas: Tensor) -> Weights:
        base, base_slope = self._base.log_density_and_gradient(thetas)
        gain, gain_slope = self._likelihood.values_and_gradients(thetas)
        if self._base is not self._prior:
            prior, prior_slope = self._prior.log_density_and_gradient(thetas)
            gain, gain_slope = gain + prior - base, gain_slope + prior_slope - base_slope
        good = torch.isfinite(gain) & torch.isfinite(gain_slope).all(1)
        gain, gain_slope = torch.where(good, gain, -torch.inf), torch.where(good.unsqueeze(1), gain_slope, 0.0)
        return Weights(thetas, base, gain, base_slope, gain_slope)

    def move(self, state: Weights, number: int, beta: float, generator: Generator) -> Weights:
        """One trajectory for each chain."""
        return self._trajectory(state, beta, float(self.steps[number - 1]), generator)

    def _trajectory(self, state: Weights, beta: float, step: float, generator: Generator) -> Weights:
        count = len(state.theta)
        jitter = 1.0 + _JITTER * (2.0 * uniform(count, state.gain, generator) - 1.0)
        size = (step * jitter).unsqueeze(1)
        velocity = self._base.noise(count, generator)
        before = state.log_density(beta) - self._kinetic(velocity)
        velocity = velocity + 0.5 * size * self._base.solve(state.slope(beta))
        moved = state
        for number in range(self._leapfrog):
            moved = self.at_weights(moved.theta + size * velocity)
            share = 1.0 if number < self._leapfrog - 1 else 0.5
            velocity = velocity + share * size * self._base.solve(moved.slope(beta))
        change = moved.log_density(beta) - self._kinetic(velocity) - before
        change = torch.where(change.isnan(), -torch.inf, change)
        taken = uniform(count, change, generator).log() < change
        self.divergences.append(float((change < -_DIVERGED).double().mean()))
        self.acceptances.append(float(change.clamp_max(0.0).exp().mean()))
        self.accepted = taken.to(change) if len(self.accepted) != count else self.accepted + taken
        return moved.where(taken, state)

    def _kinetic(self, velocity: Tensor) -> Tensor:
        return 0.5 * (velocity * self._base.multiply(velocity)).sum(1)

    def adapt(self, betas: Tensor, chains: int, generator: Generator, shown: bool | None) -> None:
        """Find the steps on a pilot run whose chains are not used again: an acceptance of 0.8 at each temperature."""
        last = len(betas) - 1
        if last < 2:
            return
        count = max(1, min(last // 4, _PILOT_TEMPERATURES))
        places = torch.linspace(1, last - 1, count, dtype=torch.float64, device="cpu").round().long()
        state = self.start(min(chains, _PILOT_CHAINS), generator)
        log_step, found = -0.25 * math.log(len(self._base.mean)), list[float]()
        for place in track(places.tolist(), "ntk_laplace: adapting the steps of the chains", len(places), shown):
            for _ in range(_TRIALS if found else _FIRST_TRIALS):
                state = self._trajectory(state, float(betas[place]), math.exp(log_step), generator)
                log_step += _RATE * (self.acceptances[-1] - _WISHED)
            found.append(log_step)
        smooth = _smooth(torch.tensor(found, dtype=torch.float64, device="cpu"))
        self.steps = torch.from_numpy(np.interp(np.arange(1, last), places, smooth)).exp()
        self.forget()


def _smooth(values: Tensor) -> Tensor:
    """Means over five neighbors."""
    if len(values) < 5:
        return values
    padded = torch.cat([values[:1].expand(2), values, values[-1:].expand(2)])
    return padded.unfold(0, 5, 1).mean(1)
