"""Data made of other data: joined, selected, with other targets and weights, or missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from ntk_laplace.errors import DataError
from ntk_laplace.model.data.batches import Batches, changed
from ntk_laplace.model.data.inputs import Inputs, take
from ntk_laplace.runtime.reduction import Reducer


class Joined:
    """Several sources in sequence, with the interface of `Batches`.

    Parameters
    ----------
    sources : sequence of Source
        Those that are joined already are taken apart: data that arrive one by one are one sequence, not one in another.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        parts = (source.sources if isinstance(source, Joined) else (source,) for source in sources)
        self.sources: tuple[Source, ...] = tuple(chain.from_iterable(parts))

    def on(self, device: torch.device) -> Joined:
        """The same data with batches on another device."""
        return Joined([source.on(device) for source in self.sources])

    @property
    def device(self) -> torch.device:
        """Device of the batches."""
        return self.sources[0].device

    @property
    def read(self) -> int:
        """Number of examples read so far, in any pass."""
        return sum(source.read for source in self.sources)

    @property
    def weights(self) -> Tensor | None:
        """Weights of the examples read, 1 for sources without weights; None if no source has weights."""
        found = [(source.weights, source.read) for source in self.sources]
        if all(weights is None for weights, _ in found):
            return None
        ones = [torch.ones(read, dtype=torch.float64, device=self.device) for _, read in found]
        return torch.cat([one if weights is None else weights for (weights, _), one in zip(found, ones, strict=True)])

    @property
    def length(self) -> int | None:
        """Number of examples, if all sources know theirs."""
        lengths = [source.length for source in self.sources]
        known = [length for length in lengths if length is not None]
        return sum(known) if len(known) == len(lengths) else None

    @property
    def shuffled(self) -> bool:
        """Whether some source is."""
        return any(source.shuffled for source in self.sources)

    @property
    def batch_size(self) -> int:
        """Batch size of the first source."""
        return self.sources[0].batch_size

    def numbers(self, reducer: Reducer) -> tuple[Tensor, int]:
        """Global numbers of this process's examples: all processes' examples of a source precede the next source's."""
        found, total = [], 0
        for source in self.sources:
            own, count = source.numbers(reducer)
            found.append(own + total)
            total += count
        return torch.cat(found), total

    def __iter__(self) -> Iterator[tuple[Inputs, Tensor]]:
        for source in self.sources:
            yield from source


class _Derived:
    """Examples of another source, in its order and in its batches; it must always have as many examples (DataError).

    Attributes
    ----------
    source : Source
    """

    def __init__(self, source: Source) -> None:
        self.source = source

    @property
    def device(self) -> torch.device:
        """Device of the batches."""
        return self.source.device

    @property
    def shuffled(self) -> bool:
        """Whether the source is."""
        return self.source.shuffled

    @property
    def batch_size(self) -> int:
        """Batch size of the source."""
        return self.source.batch_size

    def _numbered(self, count: int) -> Iterator[tuple[slice, Inputs, Tensor]]:
        """Batches of the source, which must have `count` examples (DataError), and their numbers there."""
        seen = 0
        for x, y in self.source:
            yield slice(seen, seen + len(y)), x, y
            seen += len(y)
        if seen != count:
            raise changed(count, seen)


class Selected(_Derived):
    """A subset of a source in the source's order, with the interface of `Batches`.

    Parameters
    ----------
    source : Source
        It is read again in every pass and must give the same examples in the same order each time.
    keep : Tensor of bool, (N,)
        Which of the source's examples are kept.
    share : (Tensor, int), optional
        If several processes read the data: what `numbers` returns.
    """

    def __init__(self, source: Source, keep: Tensor, share: tuple[Tensor, int] | None = None) -> None:
        super().__init__(source)
        self.keep, self._share = keep.cpu(), share

    @classmethod
    def of(cls, source: Source, keep: Tensor, reducer: Reducer) -> Selected:
        """The examples for which `keep`, in the global numbers of all processes, is true."""
        if reducer.world_size == 1:
            return cls(source, keep)
        numbers, _ = source.numbers(reducer)
        own = keep[numbers]
        return cls(source, own, ((keep.cumsum(0) - 1)[numbers[own]], int(keep.sum())))

    def numbers(self, reducer: Reducer) -> tuple[Tensor, int]:
        """Global numbers of this process's kept examples among all kept ones, and how many these are."""
        return (torch.arange(self.length, device="cpu"), self.length) if self._share is None else self._share

    def on(self, device: torch.device) -> Selected:
        """The same data with batches on another device."""
        return Selected(self.source.on(device), self.keep, self._share)

    @property
    def read(self) -> int:
        """Number of kept examples read so far, in any pass."""
        return int(self.keep[: self.source.read].sum())

    @property
    def weights(self) -> Tensor | None:
        """Weights of the kept examples read; None if the data have no weights."""
        weights = self.source.weights
        return None if weights is None else weights[self.keep[: len(weights)].to(weights.device)]

    @property
    def length(self) -> int:
        """Number of kept examples."""
        return int(self.keep.sum())

    def __iter__(self) -> Iterator[tuple[Inputs, Tensor]]:
        for numbers, x, y in self._numbered(len(self.keep)):
            here = self.keep[numbers].nonzero().squeeze(1).to(y.device)
            if len(here):
                yield take(x, here), y[here]


class Replaced(_Derived):
    """The inputs of a source with other targets and example weights, with the interface of `Batches`.

    Parameters
    ----------
    source : Source
    targets : Tensor, (N, ...)
        In the order of the source.
    given : Tensor, (N,)
        Weights.
    """

    def __init__(self, source: Source, targets: Tensor, given: Tensor) -> None:
        super().__init__(source.source if isinstance(source, Replaced) else source)
        self.targets, self._given = targets, given

    @classmethod
    def of(cls, source: Source, targets: Tensor, given: Tensor, reducer: Reducer) -> Replaced:
        """Targets and weights of all processes' examples, in their global numbers, for this process's share."""
        if reducer.world_size == 1:
            return cls(source, targets, given)
        numbers = source.numbers(reducer)[0].to(given.device)
        return cls(source, targets[numbers], given[numbers])

    def numbers(self, reducer: Reducer) -> tuple[Tensor, int]:
        """As those of the source."""
        return self.source.numbers(reducer)

    def on(self, device: torch.device) -> Replaced:
        """The same data with batches on another device."""
        return Replaced(self.source.on(device), self.targets.to(device), self._given.to(device))

    @property
    def read(self) -> int:
        """Number of examples read so far, in any pass."""
        return self.source.read

    @property
    def weights(self) -> Tensor:
        """Weights of the examples read."""
        return self._given[: self.read]

    @property
    def length(self) -> int:
        """Number of examples."""
        return len(self.targets)

    def __iter__(self) -> Iterator[tuple[Inputs, Tensor]]:
        for numbers, x, _ in self._numbered(len(self.targets)):
            if numbers.stop > len(self.targets):
                raise changed(len(self.targets), numbers.stop)
            yield x, self.targets[numbers]


class Missing:
    """Placeholder for data that a checkpoint does not contain; any pass over it raises an error."""

    length: int | None = None
    weights: Tensor | None = None
    read = 0
    shuffled = False

    @property
    def device(self) -> torch.device:
        """Refused: there are no batches."""
        raise _missing()

    @property
    def batch_size(self) -> int:
        """Refused: there are no batches."""
        raise _missing()

    def numbers(self, reducer: Reducer) -> tuple[Tensor, int]:
        """Refused: there are no examples."""
        raise _missing()

    def on(self, device: torch.device) -> Missing:
        """Itself."""
        return self

    def __iter__(self) -> Iterator[tuple[Inputs, Tensor]]:
        raise _missing()


Source = Batches | Joined | Selected | Replaced | Missing


def _missing() -> DataError:
    return DataError("the training data, for another pass over them", "a checkpoint, which does not contain the inputs",
                     "Load it with ntk_laplace.load(path, network, data=...).")
