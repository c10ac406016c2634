"""Problems to maximize: functions on the unit cube, and DNA sequences that a motif binds to."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from botorch.test_functions import Ackley, Branin, Hartmann
from torch import Tensor, nn
from torch.quasirandom import SobolEngine

LENGTH, LETTERS, POOL = 24, 4, 3000


@dataclass(frozen=True)
class Problem:
    """A function (n, d) -> (n, 1) to maximize.

    Attributes
    ----------
    dimension : int
    best : float
        Its maximum.
    value : callable
    pool : Tensor, (N, d), optional
        The inputs there are; None: the unit cube.
    """

    dimension: int
    best: float
    value: Callable[[Tensor], Tensor]
    pool: Tensor | None = None

    def start(self, count: int, seed: int) -> Tensor:
        """Inputs of the first evaluations, (count, d)."""
        if self.pool is None:
            return SobolEngine(self.dimension, scramble=True, seed=seed).draw(count, dtype=torch.float64)
        generator = torch.Generator().manual_seed(seed)
        return self.pool[torch.randperm(len(self.pool), generator=generator)[:count]]


def cube(function: Callable[..., object], bounds: Tensor) -> Callable[[Tensor], Tensor]:
    """A function of BoTorch on the unit cube."""
    low, high = bounds.double()
    return lambda x: function(low + (high - low) * x).unsqueeze(-1)


class Binding(nn.Module):
    """Convolution over a sequence, the log mean exponential of each filter's responses, and a linear layer."""

    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.filters, self.last = nn.Conv2d(LETTERS, 24, (1, 7)), nn.Linear(24, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Sequences (n, letters * length), one-hot."""
        responses = self.filters(x.view(len(x), LETTERS, 1, LENGTH)).flatten(2)
        return self.last(responses.logsumexp(2) - math.log(responses.shape[2]))


def sequences() -> Problem:
    """Random DNA of 24 letters, with how well two motifs bind to it wherever they are; 3,000 sequences to choose from.

    The binding of a motif is the log of the summed odds over all places; the value is the sum over the two motifs.
    """
    generator = torch.Generator().manual_seed(0)
    letters = torch.randint(LETTERS, (POOL, LENGTH), generator=generator)
    pool = nn.functional.one_hot(letters, LETTERS).mT.double()
    motifs = 1.5 * torch.randn(2, LETTERS, 7, generator=generator, dtype=torch.float64)

    def value(x: Tensor) -> Tensor:
        return nn.functional.conv1d(x.view(-1, LETTERS, LENGTH), motifs).logsumexp(2).sum(1, keepdim=True)

    return Problem(LETTERS * LENGTH, float(value(pool).max()), value, pool.flatten(1))


def problem(name: str) -> Problem:
    """The problem of a name."""
    if name == "sequences":
        return sequences()
    found = {"hartmann6": Hartmann(dim=6, negate=True), "branin": Branin(negate=True),
             "ackley5": Ackley(dim=5, negate=True, bounds=[(-32.768, 32.768)] * 5)}[name]  # fmt: skip
    return Problem(found.dim, float(found.optimal_value), cube(found, found.bounds))


PROBLEMS = ("hartmann6", "branin", "ackley5", "sequences")
