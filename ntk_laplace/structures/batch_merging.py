"""Merge small batches of a loader to amortize the overhead per batch."""

from __future__ import annotations

from collections.abc import Iterator

from ntk_laplace.model.data import BATCH_BYTES, InputBatches, Source, alike, concatenate, num_bytes, num_examples
from ntk_laplace.model.network import Network, independent_of_batches


def merged_batches(batches: Source | InputBatches, network: Network) -> Iterator[tuple]:
    """Merge consecutive batches up to the source's batch size; the examples and their order do not change.

    A batch is a tuple whose first element is the input. Batches of different formats are not merged, nor are
    batches whose merging would change the network's outputs.
    """
    waiting: list[tuple] = []
    count = size = 0

    def full() -> bool:  # no capacity for another batch like the last
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
    """One merged batch if the network's outputs allow it. The list is emptied, which frees the parts early."""
    one = len(waiting) > 1 and independent_of_batches(network, [batch[0] for batch in waiting])
    found = [concatenate(waiting)] if one else list(waiting)
    waiting.clear()
    return found
