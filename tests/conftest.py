"""Seeds and threads that every test starts from, and which cases are fast."""

from __future__ import annotations

import gc
import os
import random
import warnings
from collections.abc import Iterator

import pytest

# the networks are tiny: threads would only wait for each other, in NumPy and in processes that tests start as well
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from fast import choose, no_process

torch.set_num_threads(1)

# torch says once per process that such a convolution pads a copy: here, and not in whichever test comes first
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.nn.Conv1d(1, 1, 2, padding="same")(torch.zeros(1, 1, 4))


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Start every test from the same random numbers, and hold it to the default dtype and the one thread it found.

    With two threads per process the tiny networks of all later tests take five times the processor time.
    """
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 -- scikit-learn and pandas read the global state
    # torch.manual_seed also notes the stack as text for every kind of accelerator, each time
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)
    before = torch.get_default_dtype()
    yield
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert torch.get_default_dtype() == before
    assert threads == 1, "pass --threads 1 to the script"


@pytest.fixture
def one_perceptron(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let estimators train no second perceptron, in pieces: half of the time of tests that are not about it."""
    from ntk_laplace.runtime import tuning

    monkeypatch.setattr(tuning, "EXAMPLES_IN_PIECES", 0)


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> None:
    """Let searches for garbage pass over what stands before a module: torch and thousands of tests, nothing of its own.

    The library looks for garbage before it measures memory, and each time that took longer than most fits here.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the fast cases of every test, for ``pytest -m fast``."""
    for item in choose(items):
        item.add_marker("fast")


@pytest.fixture(autouse=True)
def _no_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """Hold fast tests to one process, in every run."""
    if request.node.get_closest_marker("fast") is None:
        yield
        return
    with no_process():
        yield
