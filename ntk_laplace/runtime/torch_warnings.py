"""Warnings of torch that tell nothing here, without which several threads may run a block."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from ntk_laplace.runtime.threads import ProcessWide

_TELL_NOTHING = (
    "TF32 acceleration",  # its context of flags warns itself
    "The given NumPy array is not writable",  # nothing writes into it: a network that would is given a copy
    "There is a performance drop",  # of a vmap without a rule for an operation, which is exact
)


@contextmanager
def _ignored() -> Iterator[None]:
    with warnings.catch_warnings():
        for message in _TELL_NOTHING:
            warnings.filterwarnings("ignore", message=message)
        yield


# one for all blocks: two that each restored the filters that they found would leave some behind
WITHOUT_TORCH_WARNINGS = ProcessWide(_ignored)
