"""Which cases ``pytest -m fast`` runs: of every test a few, on a few networks, and none that starts a process."""

from __future__ import annotations

import multiprocessing.process
import os
import random
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from unittest import mock

import pytest

from networks import NETWORKS

# plain layers, convolutions, a tied weight in attention, outputs of shape (N,), a layer used twice, a large gradient
FEW = frozenset({"deep_mlp", "cnn_groups", "transformer_tied", "scalar_outputs", "layer_twice", "far_from_optimum"})
CASES = 2


def networks_in(value: Any) -> set[str]:
    """Names of the registry's networks in the values of a case."""
    if isinstance(value, (tuple, list, set, frozenset)):
        return set().union(*map(networks_in, value))
    return {value} if isinstance(value, str) and value in NETWORKS else set()


def networks_of(item: pytest.Item) -> set[str]:
    """Names of the registry's networks in the values of an item's case."""
    callspec = getattr(item, "callspec", None)
    return networks_in(tuple(callspec.params.values())) if callspec else set()


def choose(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Of every test that is not marked slow, `CASES` cases on networks of `FEW`, or one case where none has a network.

    The draw depends on the test's cases alone, so a test has the same fast cases in every run.
    """
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") is None:
            tests[item.nodeid.partition("[")[0]].append(item)
    chosen = []
    for name, cases in tests.items():
        few = [item for item in cases if networks_of(item) <= FEW]
        among = few or cases[:1]
        count = CASES if any(map(networks_of, among)) else 1
        chosen += random.Random(name).sample(among, min(count, len(among)))
    return chosen


class ProcessStarted(AssertionError):
    """A test that counts as fast has started a process."""


@contextmanager
def no_process() -> Iterator[None]:
    """Refuse every way in which Python starts a process, and fail at the end if that was caught on the way."""
    started: list[str] = []
    ways = [
        (subprocess.Popen, "__init__"), (multiprocessing.process.BaseProcess, "start"), (os, "system"), (os, "fork"),
        (os, "posix_spawn"),
    ]

    def refuse(name: str) -> Any:
        def start(*_: Any, **__: Any) -> NoReturn:
            started.append(name)
            raise ProcessStarted(f"{name} in a fast test: mark the test slow, or do without a process")

        return start

    with ExitStack() as patches:
        for owner, name in ways:
            if hasattr(owner, name):
                patches.enter_context(mock.patch.object(owner, name, refuse(f"{owner.__name__}.{name}")))
        yield
    if started:
        raise ProcessStarted(f"{', '.join(started)} in a fast test, caught by what called it")
