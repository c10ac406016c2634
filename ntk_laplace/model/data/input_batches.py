"""Batches of inputs without targets, from tensors or from a loader or dataset whose batches may contain targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ntk_laplace.errors import DataError
from ntk_laplace.model.data.batches import BATCH_BYTES
from ntk_laplace.model.data.input_format import describe_inputs
from ntk_laplace.model.data.inputs import (
    InputDtype,
    Inputs,
    as_tensors,
    map_tensors,
    num_bytes,
    num_examples,
    refuse_input_gradients,
    take,
    to_device,
    with_members,
)
from ntk_laplace.model.data.loaders import batches_of, loader_of, random_samplers_of
from ntk_laplace.runtime import tuning

_READ = 64  # examples of a dataset that are collated at a time
_MOST_MEMBERS = 3  # of a batch that is a tuple: inputs, targets and weights


class InputBatches:
    """Batches of inputs in their order on one device; every iteration is one pass.

    The format of the inputs at the fit decides which part of a loader's batch is the input. It is the whole batch if
    that has the format, the first member of a pair or triple if that has it, and the format's keys of a mapping that
    has more keys. Formats agree if keys, numbers of axes and kinds of dtype (floating or not) agree.

    Parameters
    ----------
    x : tensor, tuple or dict of tensors, DataLoader or Dataset
        A loader keeps its batches and their order. A dataset is read in its order, with torch's default `collate_fn`.
    form : tensor, or nested tuples, lists and dicts of them, optional
        Format of the inputs at the fit, with no examples. If it is not given, the first member of a tuple of up to
        three is the input.
    batch_size : int, optional
        Maximum examples per batch; tensors and larger batches are split. By default 512 examples and 32 MiB.
    device : torch.device
        Where batches go.
    dtype : InputDtype
        Taken by floating inputs.

    Attributes
    ----------
    length : int or None
        Number of examples of tensors; None for a loader or a dataset.
    batch_size : int
        Maximum examples per batch.

    Raises
    ------
    DataError
        If `x` is not a valid input, or a loader shuffles; from a pass, if there are no inputs, or a batch does not
        contain inputs of that format.
    UnsupportedError
        If a gradient in the inputs is requested; for a loader's inputs, the error comes from a pass.
    """

    def __init__(
        self, x: Any, form: Inputs | None, batch_size: int | None, device: torch.device, dtype: InputDtype
    ) -> None:
        self._input_format, self._device, self._dtype = form, device, dtype
        self.batch_size, self._most_bytes = batch_size or tuning.PREDICTED_EXAMPLES, None if batch_size else BATCH_BYTES
        self._with_gradients = torch.is_grad_enabled()
        self.length: int | None = None
        if isinstance(x, DataLoader):
            _require_order(x)
            self._source: DataLoader | Inputs = x
        elif isinstance(x, Dataset):
            self._source = loader_of(x, min(self.batch_size, _READ))
        else:
            self._source = as_tensors(x)
            self.length = num_examples(self._source)
            refuse_input_gradients(self._source)
            if self.length == 0:
                raise _none()

    def __iter__(self) -> Iterator[tuple[Inputs]]:
        empty = True
        for x in self._wholes():
            n = num_examples(x)
            step = self.batch_size
            if self._most_bytes is not None:
                step = min(step, max(1, self._most_bytes * n // max(1, num_bytes(x))))
            for start in range(0, n, step):
                empty = False
                part = map_tensors(Tensor.detach, take(x, slice(start, start + step)))
                yield (to_device(part, self._device, self._dtype),)
        if empty:
            raise _none()

    def _wholes(self) -> Iterator[Inputs]:
        if not isinstance(self._source, DataLoader):
            yield self._source
            return
        for batch in batches_of(self._source):
            x = self._inputs(batch)
            with torch.set_grad_enabled(self._with_gradients):  # the caller's grad mode at construction
                refuse_input_gradients(x)
            yield x

    def _inputs(self, batch: Any) -> Inputs:
        """The input part of a loader's batch."""
        pair = isinstance(batch, (tuple, list)) and 0 < len(batch) <= _MOST_MEMBERS
        if self._input_format is None:
            return as_tensors(batch[0] if pair else batch)
        found = _part_like(batch, self._input_format)
        if found is None and pair:
            found = _part_like(batch[0], self._input_format)
        if found is None:
            form = describe_inputs(self._input_format, "n")
            raise DataError(f"batches that are inputs such as {form}, or tuples whose first member is that",
                            describe_inputs(batch), "Give the loader batches of the form that the fit's had.")
        return found


def _part_like(x: Any, form: Inputs) -> Inputs | None:
    """The part of `x` with the given format: `x` itself, or for mappings the format's keys; None if there is none."""
    if isinstance(form, Tensor):
        fits = isinstance(x, Tensor) and x.ndim == form.ndim and x.is_floating_point() == form.is_floating_point()
        return x if fits else None
    if isinstance(form, Mapping):
        if not isinstance(x, Mapping) or not form.keys() <= x.keys():
            return None
        parts: dict[str, Any] = {key: _part_like(x[key], own) for key, own in form.items()}
        return None if any(parts[key] is None and form[key] is not None for key in form) else parts
    if isinstance(form, (tuple, list)):  # collating makes lists of tuples
        if not isinstance(x, (tuple, list)) or len(x) != len(form):
            return None
        members: list[Any] = [_part_like(one, own) for one, own in zip(x, form, strict=True)]
        if any(one is None and own is not None for one, own in zip(members, form, strict=True)):
            return None
        return with_members(form, members)
    return x


def _require_order(loader: DataLoader) -> None:
    """Raise an error for a loader whose examples come in an unknown order (DataError)."""
    for sampler in random_samplers_of(loader):
        raise DataError("a loader that keeps the order of its data, so that results can be matched by position",
                        f"one that shuffles ({type(sampler).__name__})",
                        "Pass DataLoader(dataset, batch_size=..., shuffle=False), or the dataset itself.")


def _none() -> DataError:
    return DataError("at least one input", "none", "Pass one or more inputs.")
