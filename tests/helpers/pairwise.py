"""Cases that cover pairs of values, in place of every combination of all values.

A mistake in one value, or in two values that meet, shows in such a table as it does in the full one, at a cost that
grows with the two longest axes and not with the product of all. Which cases come is drawn by a seed, so a table is the
same in every run and changes only with its axes.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from typing import Any

Case = tuple[Any, ...]


def _anything(*case: Any) -> bool:
    return True


def pairwise(*axes: Iterable[Any], allowed: Callable[..., bool] = _anything, seed: int = 0,
             given: Iterable[Case] = ()) -> list[Case]:
    """Cases in which any two values of two axes meet, if an allowed case has them; sorted as the axes are.

    Those of `given` cases that are allowed are among them, such as cases of which something is computed anyway.
    """
    every = [case for case in itertools.product(*axes) if allowed(*case)]
    drawn = random.Random(seed).sample(every, len(every))
    pairs = {case: set(itertools.combinations(enumerate(case), 2)) for case in every}
    chosen = {case for case in given if case in pairs}
    left = set().union(*pairs.values()).difference(*(pairs[case] for case in chosen))
    for new in range(len(next(iter(pairs.values()))), 0, -1):  # first the cases that bring the most pairs
        for case in drawn:
            if len(pairs[case] & left) >= new:
                left -= pairs[case]
                chosen.add(case)
    return [case for case in every if case in chosen]


def one_each(first: Iterable[Any], *axes: Iterable[Any], allowed: Callable[..., bool] = _anything,
             seed: int = 0) -> list[Case]:
    """One case for each value of the first axis; the combinations of the others are drawn without replacement."""
    every = list(itertools.product(*axes))
    drawn, found = random.Random(seed), []
    deck: list[Case] = []
    for value in first:
        while not any(allowed(value, *rest) for rest in deck):
            deck += drawn.sample(every, len(every))
        place = next(i for i, rest in enumerate(deck) if allowed(value, *rest))
        found.append((value, *deck.pop(place)))
    return found
