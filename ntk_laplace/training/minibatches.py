"""Minibatches of the caller's data for each epoch, in the caller's random order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from operator import length_hint
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ntk_laplace.errors import DataError, is_whole
from ntk_laplace.model.data import (
    Batches,
    InputDtype,
    Inputs,
    as_pair,
    as_tensor,
    as_tensors,
    dropped_by,
    example_weights,
    generators_of,
    loader_of,
    num_examples,
    take,
    to_device,
)


class Minibatches:
    """Minibatches of one epoch per iteration.

    Tensors and datasets are split into minibatches of nearly equal size. Their order is drawn from torch's global
    random state, so ``torch.manual_seed`` determines it; without a batch size there is one batch of all examples, in
    their order. A loader keeps its batches and its order. `targets` is the key of the targets in batches that are
    mappings.
    """

    def __init__(
        self, data: Any, batch_size: int | None, device: torch.device, dtype: InputDtype, targets: str | None = None
    ) -> None:
        if batch_size is not None and not is_whole(batch_size, 1):
            raise DataError("a batch size of at least 1, or None for all examples at once", f"{batch_size!r}",
                            "Pass None, or leave it out for the default.")
        if not isinstance(data, DataLoader):  # a loader may resample, if the evidence has other data
            Batches(data, batch_size, device, dtype, targets)  # raises an error for invalid data
        self._device, self.dtype, self._batch_size, self._targets = device, dtype, batch_size, targets
        self._source: DataLoader | tuple[Inputs, Tensor, Tensor | None]
        if isinstance(data, DataLoader):
            self._source = data
        elif isinstance(data, Dataset):
            stream = isinstance(data, IterableDataset)
            if stream and batch_size is None:
                raise DataError("a batch size for an IterableDataset, whose length is not known", "batch_size=None",
                                "Pass a number, or leave it out for the default.")
            self._source = loader_of(data, batch_size or len(cast(Sized, data)), shuffle=not stream)
        else:
            pair, weights = example_weights(data)
            x, y = as_pair(pair, targets) if isinstance(pair, Mapping) else pair
            self._source = to_device(as_tensors(x), device, dtype), as_tensor(y).to(device), weights

    def __iter__(self) -> Iterator[tuple[Inputs, Tensor, Tensor | None]]:
        if isinstance(self._source, DataLoader):
            for batch in self._source:
                pair, weights = example_weights(batch)
                x, y = as_pair(pair, self._targets)
                yield to_device(x, self._device, self.dtype), y.to(self._device), weights
            return
        x, y, weights = self._source
        if self._batch_size is None or self._batch_size >= len(y):
            yield x, y, weights
            return
        order = torch.randperm(len(y), device="cpu")
        for index in order.tensor_split(-(-len(y) // self._batch_size)):
            own = None if weights is None else weights[index.to(weights.device)]
            index = index.to(self._device)
            yield take(x, index), y[index], own

    @property
    def count(self) -> int | None:
        """Number of minibatches per epoch, if it is known."""
        if not isinstance(self._source, DataLoader):
            n = len(self._source[1])
            return -(-n // min(n, self._batch_size or n))
        try:
            return len(self._source)
        except TypeError:
            return None

    def __str__(self) -> str:
        if isinstance(self._source, DataLoader):
            return f"{self._source.batch_size or 'its own'} by a loader"
        return "all examples at once" if self._batch_size is None else f"{self._batch_size}"

    @property
    def generators(self) -> list[torch.Generator]:
        """Random generators of the loader and of its samplers, whose states a checkpoint must contain."""
        return generators_of(self._source) if isinstance(self._source, DataLoader) else []


def require_whole_data(data: Any) -> None:
    """Refuse data of the evidence of which a loader leaves out some (DataError)."""
    left = dropped_by(data) if isinstance(data, DataLoader) else 0
    if left:
        raise DataError("evidence data that are read to their end", f"a loader that drops {left:,} examples",
                        "Pass the same data without drop_last as evidence_data=.")


def count_examples(data: Any, batches: Batches) -> int:
    """N, the number of examples in one pass over the data of the evidence."""
    if not isinstance(data, DataLoader):
        return batches.length or _counted(batches)
    if data.batch_sampler is None or isinstance(data.dataset, IterableDataset):
        return _counted(batches)
    n = length_hint(data.sampler, -1)
    if n < 0:
        return _counted(batches)
    return n if type(data.batch_sampler) is torch.utils.data.BatchSampler else _counted(batches)


def sum_of_weights(batches: Batches) -> float | None:
    """Σ w_n, from a pass over data whose first batch has been read; None if they have no example weights.

    DataError if all of them are 0.
    """
    if batches.weights is None:
        return None
    _counted(batches)
    total = float(batches.weights.sum())
    if total == 0.0:
        raise DataError("example weights of which one at least is positive, to train with", "zeros alone",
                        "Give the examples that count a weight of 1.")
    return total


def _counted(batches: Batches) -> int:
    return sum(num_examples(x) for x, _ in batches)
