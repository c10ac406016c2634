"""Annealed importance sampling: chains on a path of temperatures from a Gaussian to a model (Neal 2001).

The path is f_β = q0^(1-β) p(D, ·)^β. With Δ = log p(D, ·) - log q0, the weight of a chain that visits the states
s_0 ~ q0, s_1, ... is

    log w = Σ_t (β_t - β_(t-1)) Δ(s_(t-1)),    E w = p(D),    E log w <= log p(D).

A chain in the opposite order that starts at an exact draw of the posterior has E log w >= log p(D) (Grosse, Ghahramani
and Adams 2015), if each transition is reversible.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Generator, Tensor

from ntk_laplace.runtime.progress import track

_STEEPNESS = 4.0  # of the sigmoid: the first step of 1,000 is 1e-4, and the largest 2e-3


class HasGain(Protocol):
    """States of several chains."""

    @property
    def gain(self) -> Tensor:
        """Δ of each chain, (S,)."""


State = TypeVar("State", bound=HasGain)


class Path(ABC, Generic[State]):
    """Distributions f_β with a reversible transition for each."""

    sampler: str  # its name
    log_density_error: float = 0.0  # standard error of log q0, if its normalizer is an estimate

    def adapt(self, betas: Tensor, chains: int, generator: Generator, shown: bool | None) -> None:
        """Choose what the transitions need to know, before the run."""

    @abstractmethod
    def at_weights(self, thetas: Tensor) -> State:
        """The states at weights (S, P)."""

    def told(self) -> dict[str, Any]:
        """What the transitions tell of a run: fields of an `AnnealedEvidence`."""
        return {}

    @abstractmethod
    def start(self, count: int, generator: Generator) -> State:
        """Exact draws from q0 = f_0."""

    @abstractmethod
    def move(self, state: State, number: int, beta: float, generator: Generator) -> State:
        """One transition that leaves f_β invariant; `number` is that of the temperature, from 1."""


def schedule(temperatures: int) -> Tensor:
    """β_0 = 0 to β_T = 1, (T + 1,), close to each other at both ends."""
    points = torch.sigmoid(torch.linspace(-_STEEPNESS, _STEEPNESS, temperatures + 1, dtype=torch.float64, device="cpu"))
    return (points - points[0]) / (points[-1] - points[0])


def forward(path: Path[State], betas: Tensor, count: int, generator: Generator, shown: bool | None) -> Tensor:
    """Log weights of chains from q0 to the model, (count,)."""
    state, last = path.start(count, generator), len(betas) - 1
    total = torch.zeros_like(state.gain)
    for t in track(range(1, last + 1), f"ntk_laplace: {path.sampler}", last, shown):
        total += float(betas[t] - betas[t - 1]) * state.gain
        if t < last:
            state = path.move(state, t, float(betas[t]), generator)
    return total


def backward(path: Path[State], betas: Tensor, state: State, generator: Generator, shown: bool | None) -> Tensor:
    """Log weights of chains from exact draws of the model back to q0, in the order of `forward`'s, (count,)."""
    total, last = torch.zeros_like(state.gain), len(betas) - 1
    for t in track(range(last, 0, -1), f"ntk_laplace: {path.sampler}, backwards", last, shown):
        total += float(betas[t] - betas[t - 1]) * state.gain
        if t > 1:
            state = path.move(state, t - 1, float(betas[t - 1]), generator)
    return total


def uniform(count: int, like: Tensor, generator: Generator) -> Tensor:
    """Numbers in (0, 1), (count,)."""
    found = torch.rand(count, dtype=like.dtype, device=generator.device, generator=generator)
    return found.clamp_min(torch.finfo(like.dtype).tiny).to(like.device)
