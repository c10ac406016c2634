"""Reading the training data: batches behind a progress bar."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ntk_laplace.data import Batches, Inputs, Joined
from ntk_laplace.progress import track
from ntk_laplace.structures.base import Trained

__all__ = ["read_batches"]


def read_batches(
    trained: Trained, batches: Batches | Joined, what: str
) -> Iterator[tuple[Inputs, Tensor]]:
    """One pass over the data; `what` is being computed."""
    return track(batches, f"ntk_laplace: {what}", batches.num_batches, trained.settings.progress)
