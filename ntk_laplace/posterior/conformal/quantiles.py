"""Levels, ranks and the words of a guarantee."""

from __future__ import annotations

import math
from fractions import Fraction

from ntk_laplace.errors import require_number

_PLUS = (
    "jackknife+: if each left-out model is the one fitted without its point, points are exchangeable and the fit is "
    "symmetric in them, a new target is covered with a probability of at least {low:.3g} (1 - 2a for level 1 - a), "
    "typically {level:.3g}",
    "here a left-out model is one Newton step of the linearized model: the theorem is exact for a model linear in its "
    "weights with a Gaussian likelihood, trained to its optimum, its hyperparameters chosen without these data; "
    "otherwise it does not apply, because features and hyperparameters have seen the left-out point",
)
_SPLIT = (
    "split conformal: if held-out points and new points are exchangeable, and the model was made without the held-out "
    "ones, a new target is covered with a probability of at least {level:.3g}, on average over both; for every "
    "structure and likelihood",
)


def checked_level(level: object) -> float:
    """A level strictly between 0 and 1. HyperparameterError if it is something else."""
    return require_number("a level between 0 and 1, without these", level, "Pass for instance level=0.9.", above=0,
                          below=1)


def rank_of(level: float, count: int) -> int:
    """⌈level (n + 1)⌉, in decimal arithmetic: 0.55 of 99 points is 55, which floating point rounds up to 56."""
    return math.ceil(Fraction(repr(level)) * (count + 1))


def fewest_points(level: float) -> int:
    """Points from which the level has finite ends: level/(1 - level), rounded up."""
    exact = Fraction(repr(level))
    return math.ceil(exact / (1 - exact))


def words_of(method: str, level: float, fewest: int, everything: str) -> tuple[str, ...]:
    """What is guaranteed, and what is not; `fewest` points were scored."""
    texts = _PLUS if method == "jackknife+" else _SPLIT
    words = [text.format(level=level, low=max(0.0, 2 * level - 1)) for text in texts]
    return (*words, *too_few(level, fewest, everything))


def too_few(level: float, fewest: int, everything: str) -> tuple[str, ...]:
    """What follows from too few points for the level; nothing if they are enough."""
    if rank_of(level, fewest) <= fewest:
        return ()
    needed = fewest_points(level)
    return (f"{fewest} points are too few for level {level:g}, which needs {needed}: {everything}",)
