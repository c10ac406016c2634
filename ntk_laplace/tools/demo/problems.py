"""The demo's problems: data, network, likelihood, and candidate hyperparameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

import ntk_laplace as ntkl
from ntk_laplace.tools.demo import data
from ntk_laplace.tools.demo.networks import cnn, mlp

DIGITS_PAIR, DIGITS, DIABETES = "digits_4_vs_9", "digits_ten_classes", "diabetes"


@dataclass(frozen=True)
class Problem:
    """One problem of the demo."""

    name: str  # key in ``summary.json``
    title: str
    network: str  # description of the architecture
    split: data.Split
    build: Callable[[], nn.Module]  # makes the untrained network
    likelihood: Callable[[float], ntkl.Likelihood]  # of a noise variance, which only the Gaussian uses
    precisions: tuple[float, ...]  # candidates for the figure of the scores that choose a prior
    noises: tuple[float, ...] = ()  # the same
    compares: bool = False  # whether to compute the evidence of all structures
    epochs: int = 300  # of the training with evidence

    @property
    def classifies(self) -> bool:
        """Whether targets are classes."""
        return bool(self.split.classes)

    @property
    def candidates(self) -> list[tuple[float, float | None]]:
        """All pairs of prior precision and noise variance (None where there is no noise)."""
        return [(precision, noise) for noise in self.noises or (None,) for precision in self.precisions]


def problems(seed: int) -> list[Problem]:
    """Digits 4 against 9, all ten digits, and a regression."""
    return [
        Problem(
            DIGITS_PAIR, "Digits 4 and 9", "CNN, 8-16 channels",
            data.digits(seed, 120, 240, (4, 9)), lambda: cnn((8, 16), 1), lambda noise: ntkl.Bernoulli(),
            (0.3, 1.0, 3.0, 10.0),
        ),
        Problem(
            DIGITS, "Digits 0 to 9", "MLP, 64-16-10",
            data.digits(seed, 300, 1400), lambda: mlp((64, 16, 10)), lambda noise: ntkl.Categorical(),
            (0.3, 1.0, 3.0, 10.0), compares=True,
        ),
        Problem(
            DIABETES, "Diabetes", "MLP, 10-24-1",
            data.diabetes(seed, 330), lambda: mlp((10, 24, 1)), lambda noise: ntkl.Gaussian(noise=noise),
            (5.0, 15.0, 50.0), (0.4, 0.5),
        ),
    ]


def toys(seed: int) -> tuple[Problem, Problem]:
    """A regression with one input and a gap in the data; a classification with two inputs and two classes."""
    wave = Problem("wave", "One input, with a gap in the data", "MLP, 1-16-16-1", data.wave(seed),
                   lambda: mlp((1, 16, 16, 1)), lambda noise: ntkl.Gaussian(noise=noise), (0.5,), (0.04,))
    moons = Problem("moons", "Two inputs, two classes", "MLP, 2-16-16-1", data.moons(seed), lambda: mlp((2, 16, 16, 1)),
                    lambda noise: ntkl.Bernoulli(), (0.3,))
    return wave, moons


def miniature(problem: Problem) -> Problem:
    """The same problem with 40 examples, 30 held-out ones and two candidates, which runs in seconds for a test."""
    split = problem.split
    small = replace(split, x_train=split.x_train[:40], y_train=split.y_train[:40], x_test=split.x_test[:30],
                    y_test=split.y_test[:30])
    return replace(problem, split=small, precisions=problem.precisions[-2:], noises=problem.noises[:1], epochs=60)
