"""Problems to maximize: functions on the unit cube, and DNA sequences that two motifs bind to."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from botorch.test_functions import Ackley, Branin, Hartmann
from torch import Tensor, nn
from torch.quasirandom import SobolEngine

LENGTH, LETTERS, MOTIF = 24, 4, 7
# sequences of each generation of a step: mutants of the best found, then three times of the best by the acquisition
GENERATIONS = (1000, 400, 400, 400)
PARENTS, CHANGED = 10, 0.1


@dataclass(frozen=True)
class Problem:
    """A function (n, d) -> (n, 1) to maximize.

    Attributes
    ----------
    dimension : int
    best : float
        Its maximum, or an upper bound of it.
    value : callable
    choices : callable, optional
        As many new inputs near given parents, without known ones, which are given too; None: the unit cube.
    """

    dimension: int
    best: float
    value: Callable[[Tensor], Tensor]
    choices: Callable[[Tensor, Tensor, int], Tensor] | None = None

    def start(self, count: int, seed: int) -> Tensor:
        """Inputs of the first evaluations, (count, d)."""
        if self.choices is None:
            return SobolEngine(self.dimension, scramble=True, seed=seed).draw(count, dtype=torch.float64)
        generator = torch.Generator().manual_seed(seed)
        return one_hot(torch.randint(LETTERS, (count, LENGTH), generator=generator))


def cube(function: Callable[..., object], bounds: Tensor) -> Callable[[Tensor], Tensor]:
    """A function of BoTorch on the unit cube."""
    low, high = bounds.double()
    return lambda x: function(low + (high - low) * x).unsqueeze(-1)


class Binding(nn.Module):
    """Convolution over a sequence, the log mean exponential of each filter's responses, and a linear layer."""

    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.filters, self.last = nn.Conv2d(LETTERS, 24, (1, MOTIF)), nn.Linear(24, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Sequences (n, letters * length), one-hot."""
        responses = self.filters(x.view(len(x), LETTERS, 1, LENGTH)).flatten(2)
        return self.last(responses.logsumexp(2) - math.log(responses.shape[2]))


def one_hot(letters: Tensor) -> Tensor:
    """Sequences (..., length) as rows (..., letters * length)."""
    return nn.functional.one_hot(letters, LETTERS).mT.double().flatten(-2)


def mutants(parents: Tensor, known: Tensor, count: int) -> Tensor:
    """New sequences: copies of parents in which each letter is drawn anew with probability 0.1."""
    letters = parents.view(-1, LETTERS, LENGTH).argmax(1)[torch.randint(len(parents), (count,))]
    letters = torch.where(torch.rand(letters.shape) < CHANGED, torch.randint(LETTERS, letters.shape), letters)
    made = one_hot(letters).unique(dim=0)
    return made[~(made.unsqueeze(1) == known).all(-1).any(1)]


def bound(motifs: Tensor) -> float:
    """An upper bound of the sequences' values.

    With A and B the summed odds of the two motifs, the value is log A + log B = min_t 2 log ½(eᵗ A + e⁻ᵗ B). At each t
    the sum in it is a sum over places, whose maximum over all sequences is found place by place (Viterbi).
    """
    windows = torch.cartesian_prod(*[torch.arange(LETTERS)] * MOTIF)
    odds = motifs[:, windows, torch.arange(MOTIF)].sum(2).exp()  # of each motif at each window
    bounds = []
    for t in torch.linspace(-6, 6, 121, dtype=torch.float64):
        gain = (t.exp() * odds[0] + (-t).exp() * odds[1]).view(-1, LETTERS)
        most = gain.new_zeros(len(gain))  # by the last six letters
        for _ in range(LENGTH - MOTIF + 1):
            most = (most.unsqueeze(1) + gain).view(LETTERS, -1).amax(0)
        bounds.append(2 * float((most.max() / 2).log()))
    return min(bounds)


def sequences(seed: int) -> Problem:
    """DNA of 24 letters, with how well two random motifs bind to it wherever they are.

    The binding of a motif is the log of the summed odds over all places; the value is the sum over the two motifs.
    """
    motifs = 1.5 * torch.randn(2, LETTERS, MOTIF, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def value(x: Tensor) -> Tensor:
        return nn.functional.conv1d(x.view(-1, LETTERS, LENGTH), motifs).logsumexp(2).sum(1, keepdim=True)

    return Problem(LETTERS * LENGTH, bound(motifs), value, mutants)


def problem(name: str, seed: int) -> Problem:
    """The problem of a name; of the sequences each seed has motifs of its own."""
    if name == "sequences":
        return sequences(seed)
    found = {"hartmann6": Hartmann(dim=6, negate=True), "branin": Branin(negate=True),
             "ackley5": Ackley(dim=5, negate=True, bounds=[(-32.768, 32.768)] * 5)}[name]
    return Problem(found.dim, float(found.optimal_value), cube(found, found.bounds))


PROBLEMS = ("hartmann6", "branin", "ackley5", "sequences")
