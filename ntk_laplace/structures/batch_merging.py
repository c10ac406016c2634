"""Small batches of a loader read as one: every batch has a price of its own, whatever its size."""

from __future__ import annotations

from collections.abc import Iterator

from ntk_laplace.data import BATCH_BYTES, InputBatches, Source, alike, concatenate, num_bytes, num_examples
from ntk_laplace.network import Network

__all__ = ["merged_batches"]


def merged_batches(batches: Source | InputBatches, network: Network) -> Iterator[tuple]:
    """The same examples in the same order; neighboring batches joined up to the size that suits the source.

    A batch is a tuple whose first member is input.
    A loader may have put examples into one batch because they belong together: batches of different forms stay apart,
    and so do those whose examples the network would treat otherwise in one batch.
    """
    waiting: list[tuple] = []
    count = size = 0

    def full() -> bool:  # no room for another like the last: it is not waited for
        return count + n > batches.batch_size or size + nbytes > BATCH_BYTES

    for batch in batches:
        n, nbytes = num_examples(batch[0]), num_bytes(batch[0])
        if waiting and (full() or not alike(waiting[0], batch)):
            yield from _joined(waiting, network)
            count = size = 0
        waiting.append(batch)
        count, size = count + n, size + nbytes
        if full():
            yield from _joined(waiting, network)
            count = size = 0
    if waiting:
        yield from _joined(waiting, network)


def _joined(waiting: list[tuple], network: Network) -> list[tuple]:
    """One batch if the network bears it; the list is emptied, so that nothing holds the parts while it is in use."""
    one = len(waiting) > 1 and network.independent_of_batches([batch[0] for batch in waiting])
    found = [concatenate(waiting)] if one else list(waiting)
    waiting.clear()
    return found
