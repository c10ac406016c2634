"""Sources of batches: a loader, a dataset or a pair (X, y) becomes batches of (x, y) on one device.

Example weights, given as (X, y, w) or as batches (x, y, w), are collected during the first pass.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from itertools import chain
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ntk_laplace.errors import DataError
from ntk_laplace.model.data.inputs import (
    InputDtype,
    Inputs,
    check_finite,
    leaves,
    num_bytes,
    num_examples,
    to_device,
)
from ntk_laplace.model.data.parts import dealt, examples_of
from ntk_laplace.model.data.readers import LoaderReader, TensorReader, number_of_pairs, reader_of
from ntk_laplace.model.data.row_buffer import RowBuffer
from ntk_laplace.runtime.reduction import Reducer

_BATCH = 512  # default batch size
_LARGEST_BATCH = 5_000  # largest batch size for small examples, if their use allows it
_UNKNOWN_BATCH = 2048  # largest batch size until `limit_batch_size` is called
BATCH_BYTES = 32 * 2**20  # target size of a batch's inputs, in bytes


class Batches:
    """Batches of inputs and targets on one device; every iteration is one pass over the data.

    Parameters
    ----------
    data : DataLoader, Dataset, (X, y), (X, y, w), or a mapping
        A loader keeps its batches, sampler and `collate_fn`. A dataset or tensors are split into batches of
        `batch_size` in their order. A mapping, of all data or of one batch, has its targets under the key `targets`.
        Batches and items may also be (x, y, w), w one weight per example.
    batch_size : int, optional
        Examples per batch; by default 512, and more for tensors with small examples.
    device : torch.device
        Where batches go.
    dtype : InputDtype, optional
        Taken by floating inputs: the network's own.
    targets : str, optional
        The key of the targets in batches that are mappings; pairs need none.

    Raises
    ------
    DataError
        If the data are empty or cannot be read as pairs; from a pass, if the number of examples or the order of the
        targets differs from that of the first pass.
    """

    _sums: list[float] | None = None  # of the first example of each batch of a loader, in the pass before

    def __init__(
        self, data: Any, batch_size: int | None, device: torch.device, dtype: InputDtype | None = None,
        targets: str | None = None,
    ) -> None:
        self._begun: Iterator[tuple[Inputs, Tensor]] | None = None
        self._total: int | None = None
        self._share: tuple[Tensor, int] | None = None  # global numbers of these examples, and of how many
        self._parts: dict[tuple[int, int], Batches] = {}  # shares of the data by rank and number of processes
        self._whole: Batches | None = None  # the data of which these are a part
        self._order = 0, 0  # checksums of the targets and of the weights, in reading order
        self._weights: RowBuffer | None = None
        self.read = 0
        self._chosen = batch_size is not None
        self._fitting = _LARGEST_BATCH  # batch size at which the inputs fill BATCH_BYTES
        self.device, self.batch_size, self.dtype = device, batch_size or _BATCH, dtype
        self._source = reader_of(data, self.batch_size, targets)
        self._length: int | None = self._source.length
        if self._length == 0:
            raise _empty()
        if isinstance(self._source, TensorReader):
            each = num_bytes(self._source.x) // len(self._source.y)
            self._fitting = min(_LARGEST_BATCH, BATCH_BYTES // max(1, each))
        self.limit_batch_size(_UNKNOWN_BATCH)

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_dataset" in state:  # of an earlier version
            own, given, keep = state["_source"], state["_given"], state["_keep"]
            state["_source"] = (LoaderReader(own, state["_targets"], state["_dataset"], keep)
                                if isinstance(own, DataLoader) else TensorReader(own[0], own[1], given))
        vars(self).update(state)

    def limit_batch_size(self, most: int) -> None:
        """Split tensors in memory into even batches of at most `most` examples (or 512 if that is more).

        Interrupts are handled between batches, so the batch size bounds the delay. A size chosen by the caller does
        not change. A loader keeps its batches; readers may merge small ones up to `batch_size`.
        """
        if self._chosen:
            return
        self.batch_size = max(_BATCH, min(self._fitting, most))
        if isinstance(self._source, TensorReader):
            n = len(self._source.y)
            self.batch_size = -(-n // max(1, -(-n // self.batch_size)))
            self.close()

    @property
    def length(self) -> int | None:
        """Number of examples if it is known without a pass (a loader that drops its last batch yields fewer)."""
        return self._length

    @property
    def shuffled(self) -> bool:
        """Whether a loader gives its examples in another order than that of its data set."""
        return self._source.shuffled if self._whole is None else self._whole.shuffled

    def numbers(self, reducer: Reducer) -> tuple[Tensor, int]:
        """Global numbers of this process's examples in reading order, and the number of examples of all processes.

        A loader that was not read to its end yet is read once to count its examples.
        """
        if self._share is None:
            start, end, total = reducer.share(self._count())
            self._share = torch.arange(start, end, device="cpu"), total
        return self._share

    def _count(self) -> int:
        """Number of examples; a loader is read once to count them."""
        if self._total is None and not self._source.divisible:
            for _ in self:
                pass
        count = self._length if self._total is None else self._total
        assert count is not None  # only a loader's length may be unknown before a pass
        return count

    # --- a part of data of which every process has all

    def shared(self, reducer: Reducer) -> Batches:
        """The share of this process: consecutive examples, about equally many, in whole batches of a loader.

        Raises
        ------
        DataError
            If there are fewer examples or batches than processes, or the loaders of two processes differ.
        """
        at = reducer.rank, reducer.world_size
        if at not in self._parts:
            indices, sizes, total = self._layout()
            order = len(indices), crc32(repr(indices).encode())
            if any(other != order for other in reducer.gather(order)):
                raise DataError("the same batches in the same order in every process", "different ones",
                                "Give each process the same loader, its random generator seeded alike; or its own "
                                "share with Settings(sharded=True).")
            parts = dealt(torch.arange(total, device="cpu"), sizes, reducer.world_size)
            if not all(len(part) for part in parts):
                batches = "examples" if sizes is None else "batches"
                raise DataError(f"at least one of the {batches} for each of {reducer.world_size} processes",
                                f"{total if sizes is None else len(sizes)}",
                                "Start fewer processes, or pass (X, y) or a Dataset, which may be cut anywhere.")
            self._parts[at] = self._only(parts[reducer.rank], indices, total)
        return self._parts[at]

    def without(self, done: Tensor, reducer: Reducer) -> Batches:
        """What this process reads of the examples other than those with the global numbers `done`.

        If every process has all data, what is left is dealt anew; else it is what is left of its own.

        Raises
        ------
        DataError
            If `done` ends within a batch of a loader, or beyond the data.
        """
        self.close()
        if self._whole is not None:
            return self._whole._left(done, reducer.rank, reducer.world_size)
        return self._left(done, 0, 1)

    def _left(self, done: Tensor, rank: int, ranks: int) -> Batches:
        indices, sizes, count = self._layout()
        first, total = 0, count
        if self._share is not None:  # one process's own data
            first, total = int(self._share[0][0]), self._share[1]
            done = done[(done >= first) & (done < first + count)]
        left = (~examples_of(done - first, count)).nonzero().squeeze(1)
        part = self._only(dealt(left, sizes, ranks)[rank], indices, count)
        assert part._share is not None
        part._share = part._share[0] + first, total
        return part

    def _layout(self) -> tuple[list[Any], list[int] | None, int]:
        """Indices of each batch of a loader, sizes of batches that are not to be cut, and the number of examples."""
        if isinstance(self._source, TensorReader) or self._source.divisible:
            return [], None, self._count()
        indices = self._source.indices()
        sizes = [num_examples(x) for x, _ in self] if indices is None else list(map(len, indices))
        return indices or [], sizes, sum(sizes)

    def _only(self, numbers: Tensor, indices: list[Any], total: int) -> Batches:
        part = copy.copy(self)
        part._begun = part._total = part._weights = None
        part._order, part.read, part._parts, part._whole = (0, 0), 0, {}, self
        part._share, part._length = (numbers, total), len(numbers)
        part._source = self._source.only(numbers, indices, total, self.batch_size)
        return part

    @property
    def weights(self) -> Tensor | None:
        """Weights of the first `read` examples, the most that any pass has read; None if the data have no weights."""
        return None if self._weights is None else self._weights.so_far

    def first(self) -> tuple[Inputs, Tensor]:
        """The first batch. The next pass yields it again, so a stream that can be read only once loses no batch."""
        begun = iter(self)
        pair = next(begun)
        self._begun = chain([pair], begun)
        return pair

    def on(self, device: torch.device) -> Batches:
        """The same data with batches on another device."""
        if device == self.device:
            return self
        moved = copy.copy(self)
        moved.device, moved._begun = device, None
        return moved

    def close(self) -> None:
        """Discard a pass that `first` has begun."""
        self._begun = None

    def __iter__(self) -> Iterator[tuple[Inputs, Tensor]]:
        begun, self._begun = self._begun, None
        return self._pass() if begun is None else begun

    def _pass(self) -> Iterator[tuple[Inputs, Tensor]]:
        seen, order, sums = 0, (0, 0), list[float]()
        expected = self._total if self._whole is None else self._length
        for x, y, weights in self._source.triples(self.batch_size):
            n = number_of_pairs(x, y)
            if n == 0:
                continue
            for tensor in leaves(x):
                check_finite(tensor, "inputs", "Remove or impute that example.", seen)
            self._note(weights, seen, n)
            seen += n
            if expected is not None and seen > expected:  # before the batch meets what is known of other examples
                raise changed(expected, seen)
            order = _checksum(y, order[0]), _checksum(weights, order[1])
            if isinstance(self._source, LoaderReader):
                sums.append(_first_sum(x))
            yield to_device(x, self.device, self.dtype), y.to(self.device)
        if expected not in (None, seen):
            raise changed(expected, seen)
        if seen == 0 and self._whole is None:
            raise _empty()
        if self._total is not None and order != self._order:
            raise DataError("the same examples in the same order in every pass over the data", "another order",
                            "Pass a loader that does not shuffle, or whose sampler has its own torch.Generator.")
        if self._total is not None and not _close(sums, self._sums):
            raise DataError("the same examples in every pass over the data", "other inputs with the same targets",
                            "Leave out random transformations of the data set, or draw them from torch alone, whose "
                            "random numbers are the same in every pass.")
        self._total, self._order, self._sums = seen, order, sums

    def _note(self, weights: Tensor | None, seen: int, n: int) -> None:
        """Store a batch's weights, once per example."""
        if seen and (weights is None) != (self._weights is None):
            raise DataError("example weights in all batches, or in none",
                            f"a batch {'without' if weights is None else 'with'} them after {seen:,} examples",
                            "Give every example a weight, 1 where it counts once.")
        if seen + n <= self.read:
            return
        if weights is not None:
            self._weights = RowBuffer(self._length or 0) if self._weights is None else self._weights
            self._weights.append(weights[self.read - seen :].to(self.device))
        self.read = seen + n


def _checksum(values: Tensor | None, before: int) -> int:
    """Running checksum of the values, independent of how they are split into batches."""
    if values is None:
        return before
    # a copy: one number with any stride counts as contiguous, and is no view of bytes
    flat = values.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format)
    return crc32(flat.unsqueeze(-1).view(torch.uint8).numpy().tobytes(), before)


def _first_sum(x: Inputs) -> float:
    """A number that tells whether the first example of a batch is the same: a weighted mean of its floating values."""
    total = 0.0
    for leaf in leaves(x):
        if leaf.is_floating_point() and leaf.layout == torch.strided and not leaf.is_nested and leaf.ndim:
            row = leaf[0].detach().double().flatten()
            weights = torch.linspace(1.0, 2.0, len(row), dtype=torch.float64, device=row.device)  # a flip changes it
            total += float(row @ weights) / max(1, len(row))
    return total


def _close(sums: list[float], before: list[float] | None) -> bool:
    """Whether first examples are equal but for rounding; also where those of an earlier version are not known."""
    return all(math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-6) for a, b in zip(sums, before or (), strict=False))


def _empty() -> DataError:
    return DataError("at least one example", "empty data", "Pass data with one or more (input, target) pairs.")


def changed(before: int, now: int) -> DataError:
    """The error for data that are not the same in every pass."""
    return DataError(f"the same {before:,} examples in every pass over the data", f"{now:,} examples",
                     "Pass data that can be read again, such as (X, y) or a loader over a map-style dataset.")
