"""What `Batches` reads: tensors in memory, or a loader; a part of it; and the pairs (x, y) of its batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ntk_laplace.errors import DataError
from ntk_laplace.model.data.inputs import Inputs, as_tensors, num_examples, take
from ntk_laplace.model.data.loaders import (
    length_of,
    loader_of,
    random_samplers_of,
    require_every_example_once,
    tell_dropped,
    with_own_randomness,
    with_own_workers,
)
from ntk_laplace.model.data.parts import examples_of, index_loader, index_of, only_batches, subset_of
from ntk_laplace.model.data.weights import example_weights
from ntk_laplace.runtime.conversion import to_tensor
from ntk_laplace.runtime.panels import panels

_USUAL = ("labels", "label", "targets", "target", "y")  # keys of targets, for messages


@dataclass(frozen=True)
class TensorReader:
    """Tensors in memory, in batches of any size.

    Attributes
    ----------
    x, y : Inputs, Tensor
    weights : Tensor or None
        Of the examples.
    """

    x: Inputs
    y: Tensor
    weights: Tensor | None

    divisible = True
    shuffled = False

    @property
    def length(self) -> int:
        """Number of examples."""
        return len(self.y)

    def triples(self, batch_size: int) -> Iterator[tuple[Inputs, Tensor, Tensor | None]]:
        """Inputs, targets and weights of each batch."""
        for part in panels(len(self.y), 1, batch_size):
            yield take(self.x, part), self.y[part], None if self.weights is None else self.weights[part]

    def only(self, numbers: Tensor, indices: list[Any], total: int, batch_size: int) -> TensorReader:
        """The examples with these ascending numbers."""
        own = index_of(numbers)
        return TensorReader(take(self.x, own), self.y[own], None if self.weights is None else self.weights[own])


@dataclass(frozen=True)
class LoaderReader:
    """Batches of a loader.

    Attributes
    ----------
    loader : DataLoader
    targets : str or None
        The key of the targets in batches that are mappings.
    dataset : Dataset or None
        That of the loader, if its batches may be cut anywhere.
    keep : Tensor of bool or None
        Which examples of a stream are read.
    """

    loader: DataLoader
    targets: str | None
    dataset: Dataset | None = None
    keep: Tensor | None = None

    @property
    def length(self) -> int | None:
        """Number of examples of the loader's data set, if it is known."""
        return length_of(self.loader)

    @property
    def divisible(self) -> bool:
        """Whether its batches may be cut anywhere."""
        return self.dataset is not None

    @property
    def shuffled(self) -> bool:
        """Whether examples come in another order than that of the data set."""
        return bool(random_samplers_of(self.loader))

    def triples(self, batch_size: int) -> Iterator[tuple[Inputs, Tensor, Tensor | None]]:
        """Inputs, targets and weights of each batch, whose size is the loader's own."""
        seen = 0
        for batch in with_own_randomness(self.loader):
            pair, weights = example_weights(batch, seen)
            x, y = as_pair(pair, self.targets)
            n = len(y) if y.ndim else 1
            seen += n
            if self.keep is None or bool(self.keep[seen - n : seen].any()):
                yield x, y, weights

    def indices(self) -> list[Any] | None:
        """Lists of indices, one for each batch; None if the loader does not choose examples by index."""
        loader = index_loader(self.loader)
        return None if loader is None else list(with_own_randomness(loader))

    def only(self, numbers: Tensor, indices: list[Any], total: int, batch_size: int) -> LoaderReader:
        """The examples with these ascending numbers, of `total`; `indices` are those of all batches, if known."""
        if self.dataset is not None:
            few = subset_of(self.dataset, numbers)
            return replace(self, loader=loader_of(few, batch_size), dataset=few)
        if indices:
            return replace(self, loader=only_batches(self.loader, indices, numbers))
        return replace(self, keep=examples_of(numbers, total))


def reader_of(data: Any, batch_size: int, targets: str | None) -> TensorReader | LoaderReader:
    """What reads data: a loader, a data set in batches of this size, (X, y), (X, y, w) or a mapping (DataError)."""
    data, weights = example_weights(data)
    if isinstance(data, Mapping):
        data = as_pair(data, targets)
    if isinstance(data, (tuple, list)) and len(data) == 2:
        x, y = as_tensors(data[0]), as_tensors(data[1])
        if not isinstance(y, Tensor):
            raise DataError("targets as one tensor or array of numbers in (X, y)", f"a {type(y).__name__}",
                            "Number classes from 0 if these are their names; make columns of several types one "
                            "array, frame.to_numpy(float) or torch.stack([time, event], 1); pass "
                            "DataLoader(batches, batch_size=None) if these are batches, one (X, y) after the other.")
        number_of_pairs(x, y)
        return TensorReader(x, y, weights)
    if isinstance(data, DataLoader):
        require_every_example_once(data)
        tell_dropped(data)
        return LoaderReader(with_own_workers(data), targets)
    if isinstance(data, Dataset):
        whole = None if isinstance(data, IterableDataset) else data
        return LoaderReader(loader_of(data, batch_size), targets, whole)
    remedy = "Wrap it in torch.utils.data.DataLoader, or pass (X, y), or (X, y, w) with weights w (N,)."
    if isinstance(data, (list, tuple, Iterator)):
        remedy = ("Pass (X, y), or (X, y, w) with weights w (N,); DataLoader(batches, batch_size=None) for a list of "
                  "batches (X, y), DataLoader(pairs, batch_size=100) for one of single examples. Make a list of an "
                  "iterator first: most fits read the data again.")
    raise DataError("data as a DataLoader, a Dataset, or a pair (X, y)", f"a {type(data).__name__}", remedy)


def number_of_pairs(x: Inputs, y: Tensor) -> int:
    """Examples of inputs that have as many targets (DataError)."""
    n = num_examples(x)
    if y.ndim == 0 or len(y) != n:
        raise DataError("as many targets as inputs", f"{n} inputs and targets of shape {tuple(y.shape)}",
                        "Give one target (row) per input.")
    return n


def as_pair(batch: Any, targets: str | None = None) -> tuple[Inputs, Tensor]:
    """Inputs and targets of a batch, which is a pair or a mapping with the targets under the key `targets`.

    Raises
    ------
    DataError
        If the batch is neither, or the mapping lacks that key.
    """
    if isinstance(batch, Mapping):
        return _apart(batch, targets)
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        x, y = batch
        return x, to_tensor(y)
    got = f"a {type(batch).__name__}" + (f" of length {len(batch)}" if hasattr(batch, "__len__") else "")
    raise DataError("batches that are pairs (inputs, targets), or (inputs, targets, weights)", got,
                    "Leave out what is neither, such as names; group several inputs as one: ((x1, x2), y) or "
                    "({'x1': x1, 'x2': x2}, y).")


def _apart(batch: Mapping[str, Any], targets: str | None) -> tuple[Inputs, Tensor]:
    """Split a mapping into inputs and targets."""
    got = f"a {type(batch).__name__} with the keys {', '.join(map(repr, batch))}"
    if targets is None:
        likely = next((key for key in _USUAL if key in batch), _USUAL[0])
        raise DataError("batches that are pairs (inputs, targets)", got,
                        f"Name the key of the targets, targets={likely!r} for instance.")
    if targets not in batch:
        raise DataError(f"targets under the key {targets!r} of each batch", got,
                        "Name the key of the targets with targets=, and let every batch have it.")
    y = as_tensors(batch[targets])
    if not isinstance(y, Tensor):
        raise DataError(f"targets under the key {targets!r} as one tensor or array of numbers",
                        f"a {type(y).__name__}", "Number classes from 0 if these are their names.")
    return {key: as_tensors(value) for key, value in batch.items() if key != targets}, y
