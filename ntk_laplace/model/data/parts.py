"""Parts of a data set: which examples each process reads, without padding and without reading those of others."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from ntk_laplace.errors import DataError


def dealt(left: Tensor, sizes: Sequence[int] | None, ranks: int) -> list[Tensor]:
    """Numbers of examples for each of several processes: consecutive, about equally many, whole batches.

    Of ascending numbers `left` (n,). Batches of these `sizes`, those of all data, are not cut (DataError if only a part
    of one is in `left`); with None, data may be cut anywhere.
    """
    ends = torch.arange(1, len(left) + 1, device="cpu")
    if sizes is not None:
        count = torch.zeros(len(sizes), dtype=torch.long, device="cpu")
        batch = torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), torch.tensor(sizes, device="cpu"))
        count.index_add_(0, batch[left], torch.ones_like(left))
        partly = (count > 0) & (count < torch.tensor(sizes, device="cpu"))
        if bool(partly.any()):
            raise _other_batches()
        ends = count[count > 0].cumsum(0)
    cuts = [0]
    for rank in range(1, ranks):
        wish = rank * len(left) / ranks
        cuts.append(int(ends[(ends - wish).abs().argmin()]) if len(ends) and wish else 0)
    return [left[start:max(start, stop)] for start, stop in zip(cuts, [*cuts[1:], len(left)], strict=True)]


class _Indices(Dataset):
    """The index of each example, in place of the example."""

    def __getitem__(self, index: Any) -> Any:
        return index


def index_loader(loader: DataLoader) -> DataLoader | None:
    """A loader of lists of indices, the batches of `loader`; None if it does not choose examples by index."""
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        return None
    found = copy.copy(loader)
    # a loader does not allow assigning these
    vars(found).update(dataset=_Indices(), collate_fn=list, num_workers=0, prefetch_factor=None, pin_memory=False,
                       worker_init_fn=None, multiprocessing_context=None, timeout=0, persistent_workers=False)
    return found


def only_batches(loader: DataLoader, batches: Sequence[Sequence[Any]], numbers: Tensor) -> DataLoader:
    """The loader with those of its batches, lists of indices, that consist of the examples `numbers`.

    A batch must not have some of them and others (DataError).
    """
    keep = examples_of(numbers, sum(map(len, batches)))
    kept, start = [], 0
    for batch in batches:
        here = keep[start : start + len(batch)]
        if bool(here.any()) != bool(here.all()):
            raise _other_batches()
        if len(here) and bool(here.all()):
            kept.append(list(batch))
        start += len(batch)
    found = copy.copy(loader)
    vars(found).update(batch_sampler=kept)  # a loader does not allow assigning it
    return found


def subset_of(data: Dataset, numbers: Tensor) -> Dataset:
    """Some examples of a data set, by ascending number."""
    index = index_of(numbers)
    return Subset(data, range(index.start, index.stop) if isinstance(index, slice) else index.tolist())


def index_of(numbers: Tensor) -> slice | Tensor:
    """Ascending numbers as an index: a slice, which needs no copy, where they are consecutive."""
    consecutive = len(numbers) and len(numbers) == int(numbers[-1] - numbers[0]) + 1
    return slice(int(numbers[0]), int(numbers[-1]) + 1) if consecutive else numbers


def examples_of(numbers: Tensor, total: int) -> Tensor:
    """Which of `total` examples have these numbers, (total,); no number is larger (DataError)."""
    if len(numbers) and int(numbers.max()) >= total:
        raise DataError(f"at least {int(numbers.max()) + 1:,} examples, as in the interrupted fit", f"{total:,}",
                        "Resume with the same data.")
    keep = torch.zeros(total, dtype=torch.bool, device="cpu")
    keep[numbers] = True
    return keep


def _other_batches() -> DataError:
    return DataError("batches that end where the interrupted fit stopped", "a batch of which it has read a part",
                     "Resume with the same data in the same batches.")
