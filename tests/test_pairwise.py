"""The tables of cases cover what they say: every pair of values that an allowed case has, and each value once."""

from __future__ import annotations

import itertools

from pairwise import one_each, pairwise

AXES = range(9), "abc", (True, False), range(4)


def odd_with_a(number: int, letter: str, *_: object) -> bool:
    return letter != "a" or number % 2 == 1


def pairs(cases: list[tuple]) -> set:
    return {pair for case in cases for pair in itertools.combinations(enumerate(case), 2)}


def test_every_allowed_pair_meets() -> None:
    every = [case for case in itertools.product(*AXES) if odd_with_a(*case)]
    found = pairwise(*AXES, allowed=odd_with_a)
    assert set(found) <= set(every) and pairs(found) == pairs(every)
    assert len(found) == len(set(found)) < len(every) / 4
    assert pairs(found[1:]) != pairs(every) or pairs(found[:-1]) != pairs(every), "a table with cases to spare"


def test_given_cases_are_among_them() -> None:
    given = [(3, "a", True, 1), (4, "b", False, 2), (4, "a", True, 0)]  # the last is not allowed
    found = pairwise(*AXES, allowed=odd_with_a, given=given)
    assert set(given[:2]) < set(found) and given[2] not in found
    assert pairs(found) == pairs(pairwise(*AXES, allowed=odd_with_a)) and len(found) < len(AXES[0]) * len(AXES[3]) + 9


def test_a_seed_gives_the_same_table() -> None:
    assert pairwise(*AXES) == pairwise(*AXES) != pairwise(*AXES, seed=1)
    assert one_each(*AXES) == one_each(*AXES) != one_each(*AXES, seed=1)


def test_one_case_each_uses_the_rest_up_before_it_repeats() -> None:
    found = one_each(range(24), "abc", (True, False), range(4))
    assert [case[0] for case in found] == list(range(24))
    assert len({case[1:] for case in found}) == 24
    limited = one_each(range(9), "abc", allowed=odd_with_a)
    assert all(odd_with_a(*case) for case in limited) and [case[0] for case in limited] == list(range(9))
