"""Loaders: batches that are the same in every pass, drawn without moving the caller's random state."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from operator import length_hint
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from ntk_laplace.errors import DataError, first_line, warn

_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def loader_of(data: Dataset, batch_size: int, shuffle: bool = False) -> DataLoader:
    """Batches of a data set, whose items are stacked as torch does (DataError if they cannot be)."""
    return DataLoader(data, batch_size, shuffle, collate_fn=_stacked)


def _stacked(items: list[Any]) -> Any:
    try:
        return default_collate(items)
    except (RuntimeError, TypeError) as cause:
        raise DataError("items of one type and shape from the data set, which make a batch", first_line(cause),
                        "Pad them to one shape, or pass a DataLoader whose collate_fn does; if they are batches, "
                        "DataLoader(data, batch_size=None).") from cause


def batches_of(loader: DataLoader) -> Iterator[Any]:
    """A loader's batches, the same in every pass; the caller's random state does not change."""
    return with_own_randomness(with_own_workers(loader))


def with_own_workers(loader: DataLoader) -> DataLoader:
    """The loader without persistent workers.

    Persistent workers break reproducible passes, disturb the caller's iterator and cannot be copied.
    """
    if loader.persistent_workers:
        loader = copy.copy(loader)
        vars(loader).update(persistent_workers=False, _iterator=None)  # a loader does not allow assigning these
    return loader


def with_own_randomness(loader: DataLoader) -> Iterator[Any]:
    """Batches drawn from a private random stream, the same in every pass.

    A shuffling loader then has the same order in every pass, and the caller's random state does not change.
    """
    ours = torch.Generator().manual_seed(0).get_state()
    own = [(generator, generator.get_state()) for generator in generators_of(loader)]
    iterator: Iterator[Any] | None = None
    try:
        while True:
            theirs = torch.get_rng_state()
            torch.set_rng_state(ours)
            try:
                iterator = iter(loader) if iterator is None else iterator
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                ours = torch.get_rng_state()
                torch.set_rng_state(theirs)
            yield batch
    finally:
        for generator, state in own:
            generator.set_state(state)


def generators_of(loader: DataLoader) -> list[torch.Generator]:
    """Random generators owned by a loader or by one of its samplers."""
    owned = (value for owner in (loader, *samplers_of(loader)) for value in _attributes(owner))
    return list({id(value): value for value in owned if isinstance(value, torch.Generator)}.values())


def samplers_of(loader: DataLoader) -> list[Any]:
    """A loader's samplers, including samplers nested in other samplers."""
    found = [sampler for sampler in (loader.sampler, loader.batch_sampler) if sampler is not None]
    for owner in found:  # the list grows during the loop
        inner = (value for value in _attributes(owner) if isinstance(value, Sampler))
        found += [sampler for sampler in inner if all(sampler is not one for one in found)]
    return found


def random_samplers_of(loader: DataLoader) -> list[Any]:
    """Those of a loader's samplers that shuffle."""
    return [sampler for sampler in samplers_of(loader)
            if isinstance(sampler, _RANDOM) or getattr(sampler, "shuffle", False) is True]


def _attributes(owner: Any) -> list[Any]:
    return list(vars(owner).values()) if hasattr(owner, "__dict__") else []


def require_every_example_once(loader: DataLoader) -> None:
    """Refuse a sampler that draws examples with replacement: other data in every pass."""
    sampler = loader.sampler if loader.batch_sampler is None else getattr(loader.batch_sampler, "sampler", None)
    if getattr(sampler, "replacement", False):
        raise DataError("a loader that reads every example once", f"{type(sampler).__name__} with replacement",
                        "Pass a loader without it; weights of the examples are (X, y, w).")


def dropped_by(loader: DataLoader) -> int:
    """Examples that a loader leaves out, because its last batch is not full; 0 where their number is not known."""
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler or not batches.drop_last:
        return 0
    return length_hint(batches.sampler, 0) % batches.batch_size


def tell_dropped(loader: DataLoader) -> None:
    """Warn of examples that a loader leaves out, unless it gives none."""
    count = dropped_by(loader)
    if count and len(loader):
        warn(f"the DataLoader leaves out {count:,} of its examples, because it has drop_last=True. Pass one without "
             "it, or the data set, for all of them.")


def length_of(data: Any) -> int | None:
    """Examples of a data set or of a loader's; None if they are not known."""
    data = data.dataset if isinstance(data, DataLoader) else data
    try:
        return len(data)
    except TypeError:
        return None
