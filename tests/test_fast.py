"""The fast cases: every module of laws has some, they are on a few networks, and they start no process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fast
from fast import CASES, FEW, ProcessStarted, choose, networks_of, no_process
from networks import NETWORKS

HERE = Path(__file__).parent
# modules of laws: those that test the library against a slow reference, or over the registry's networks
LAWS = sorted(
    path.name for path in HERE.glob("test_*.py")
    if re.search(r"^from (reference\w*|registry|\w+_cases|networks)\b", path.read_text(), re.MULTILINE)
    and path.name != Path(__file__).name
)
# they need what an extra installs, or a process for each of their cases
WITHOUT = {"test_huggingface.py", "test_transformers.py", "test_botorch.py", "test_callbacks.py"}


def collected(session: pytest.Session, name: str) -> list[pytest.Item]:
    module = pytest.Module.from_parent(session, path=HERE / name)
    return list(session.genitems(module))


def test_the_modules_of_laws_are_found() -> None:
    assert {"test_identities.py", "test_structured.py", "test_gram.py", "test_factors.py"} <= set(LAWS)
    assert len(LAWS) >= 20


@pytest.mark.parametrize("name", [name for name in LAWS if name not in WITHOUT])
def test_every_law_has_fast_cases(name: str, request: pytest.FixtureRequest) -> None:
    """Each of the module's tests, unless it is marked slow, on networks of the few wherever it has any of them."""
    items = collected(request.session, name)
    chosen = choose(items)
    assert chosen, "a module of laws without a fast case"
    tests, met = ({item.nodeid.partition("[")[0] for item in each} for each in (items, chosen))
    slow = {item.nodeid.partition("[")[0] for item in items if item.get_closest_marker("slow")}
    assert met >= tests - slow
    assert 2 * len(slow) <= len(tests), "most of a module's laws should be fast"
    for item in chosen:
        others = [each for each in items if each.nodeid.partition("[")[0] == item.nodeid.partition("[")[0]]
        assert networks_of(item) <= FEW or not any(networks_of(each) <= FEW for each in others)


def test_the_choice_is_bounded_and_the_same_in_every_run(request: pytest.FixtureRequest) -> None:
    items = collected(request.session, "test_identities.py")
    chosen = [item.nodeid for item in choose(items)]
    assert chosen == [item.nodeid for item in choose(items)]
    names = [node.partition("[")[0] for node in chosen]
    assert max(names.count(name) for name in names) <= CASES < len(items) / len(set(names))
    assert set(NETWORKS) >= FEW


def test_the_hook_marks_what_is_chosen(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        if item.get_closest_marker("slow"):
            assert item.get_closest_marker("fast") is None
    assert request.node.get_closest_marker("fast")


START = {
    "Popen": lambda: subprocess.Popen([sys.executable, "-c", ""]),
    "run": lambda: subprocess.run([sys.executable, "-c", ""], check=True),
    "fork": lambda: multiprocessing.get_context("fork").Process(target=print).start(),
    "spawn": lambda: multiprocessing.get_context("spawn").Process(target=print).start(),
    "forkserver": lambda: multiprocessing.get_context("forkserver").Process(target=print).start(),
    "system": lambda: os.system("true"),
    "os.fork": lambda: os.fork(),
}


@pytest.mark.parametrize("way", START)
def test_a_process_in_a_fast_test_fails(way: str) -> None:
    with pytest.raises(ProcessStarted, match="mark the test slow"), no_process():
        START[way]()


def test_a_process_in_a_fast_test_fails_where_its_error_is_caught() -> None:
    with pytest.raises(ProcessStarted, match="caught by what called it"), no_process():
        with contextlib.suppress(AssertionError):
            subprocess.run(["true"], check=True)


def test_every_fast_test_runs_without_processes(request: pytest.FixtureRequest) -> None:
    """This one is fast, so the guard is on: see `conftest._no_process`."""
    assert subprocess.Popen.__init__.__module__ == fast.__name__


def test_no_test_is_marked_fast_by_hand() -> None:
    """The hook chooses; a mark in a file would say nothing about its cases."""
    for path in HERE.glob("test_*.py"):
        assert not re.search(r"^\s*(@|pytestmark = .*)pytest\.mark\.fast\b", path.read_text(), re.MULTILINE), path.name
