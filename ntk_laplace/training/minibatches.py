"""What an epoch reads: minibatches of the caller's data, in the caller's random order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ntk_laplace.data import Batches, Inputs, as_tensors, num_examples, take, to_device
from ntk_laplace.errors import DataError

__all__ = ["Minibatches", "count_examples"]


class Minibatches:
    """One epoch's minibatches, each time anew.

    Tensors and datasets are cut into minibatches of nearly equal size in an order drawn from torch's global random
    state, so that ``torch.manual_seed`` settles it; a loader keeps its own ways.

    Parameters
    ----------
    data : DataLoader, Dataset, or (X, y)
    batch_size : int, optional
        The largest minibatch of a dataset or of tensors; None is all of them at once, in their order.
    device, dtype
        Where minibatches go, and the floating type of inputs.
    """

    def __init__(self, data: Any, batch_size: int | None, device: torch.device, dtype: torch.dtype) -> None:
        if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
            raise DataError("a batch size of at least 1, or None for all examples at once", f"{batch_size!r}",
                            "Leave it out for 128.")
        self._device, self._dtype, self._batch_size = device, dtype, batch_size
        self._tensors: tuple[Inputs, Tensor] | None = None
        self._loader: DataLoader | None = None
        if isinstance(data, DataLoader):
            self._loader = data
        elif isinstance(data, Dataset):
            shuffle = not isinstance(data, IterableDataset)
            self._loader = DataLoader(data, batch_size or len(data), shuffle=shuffle)
        else:
            x, y = data
            self._tensors = to_device(as_tensors(x), device, dtype), torch.as_tensor(y).to(device)

    def __iter__(self) -> Iterator[tuple[Inputs, Tensor]]:
        if self._tensors is None:
            for x, y in self._loader:
                yield to_device(x, self._device, self._dtype), torch.as_tensor(y).to(self._device)
            return
        x, y = self._tensors
        if self._batch_size is None or self._batch_size >= len(y):
            yield x, y
            return
        order = torch.randperm(len(y))
        for index in order.tensor_split(-(-len(y) // self._batch_size)):
            index = index.to(self._device)
            yield take(x, index), y[index]

    @property
    def generators(self) -> list[torch.Generator]:
        """Random generators of the loader and of its sampler, which a checkpoint must hold."""
        if self._loader is None:
            return []
        owners = self._loader, self._loader.sampler, self._loader.batch_sampler
        found = [getattr(owner, "generator", None) for owner in owners]
        return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def count_examples(data: Any, batches: Batches) -> int:
    """N, the number of examples that one pass of the evidence reads.

    Raises
    ------
    DataError
        If a loader leaves some of them out.
    """
    if not isinstance(data, DataLoader):
        return batches.length or _counted(batches)
    if data.batch_sampler is None or isinstance(data.dataset, IterableDataset):
        return _counted(batches)
    try:
        n = len(data.sampler)
    except TypeError:
        return _counted(batches)
    if data.drop_last and n % data.batch_size:
        raise DataError("evidence data that are read to their end",
                        f"a loader that drops {n % data.batch_size} of {n:,} examples",
                        "Pass the same data without drop_last as evidence_data=.")
    return n if type(data.batch_sampler) is torch.utils.data.BatchSampler else _counted(batches)


def _counted(batches: Batches) -> int:
    return sum(num_examples(x) for x, _ in batches)
