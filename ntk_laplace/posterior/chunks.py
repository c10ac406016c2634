"""Chunks: inputs of a prediction, as many at a time as what is made of them leaves memory for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ntk_laplace.data import InputBatches, Inputs, num_examples, take
from ntk_laplace.errors import require_whole
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.structures import LinearizedModel, merged_batches

__all__ = ["Chunks"]

_HELD = 16 * 2**20  # bytes of rows, and of what is made of them, at a time
_FEWEST = 16  # examples whose rows show how large those of the others are


class Chunks:
    """Inputs from tensors, a loader or a dataset, a chunk at a time, in their order.

    Parameters
    ----------
    model : LinearizedModel
    x : tensor, tuple or dict of tensors, DataLoader or Dataset
    batch_size : int, optional
        Most examples of a chunk; by default 512, and as many as take 16 MiB. Small batches of a loader are read
        together up to it, unless the network treats their examples otherwise then.

    Attributes
    ----------
    length : int or None
        Number of examples of tensors; None of a loader or a dataset.

    Raises
    ------
    HyperparameterError
        If `batch_size` is no positive whole number.
    DataError, UnsupportedError
        As `InputBatches`.
    """

    def __init__(self, model: LinearizedModel, x: Any, batch_size: int | None = None) -> None:
        if batch_size is not None:
            require_whole("batch_size", batch_size, 1, "Leave it out to have it chosen.")
        network = model.network
        self._model, self._chosen = model, batch_size
        self._batches = InputBatches(x, network.input_format, batch_size, network.device, network.input_dtype)
        self.length = self._batches.length

    def inputs(self, most: int | None = None) -> Iterator[tuple[int, Inputs]]:
        """(number of the first example, inputs) of chunks to evaluate the network at, of at most so many examples."""
        own = None if self._chosen else self._model.jacobian_pass.evaluated_at_once()
        bounds, seen = [size for size in (most, own) if size is not None], 0
        for x in self._read():
            n = num_examples(x)
            step = min([n, *bounds])
            for start in range(0, n, step):
                yield seen + start, take(x, slice(start, start + step)) if step < n else x
            seen += n

    def rows(self, each: int = 0) -> Iterator[Jacobian]:
        """Rows of J at each chunk; `each` is how many bytes are made of those of one example.

        Whoever asks gives the rows of a chunk up before asking for the next, or two chunks are held at a time.
        """
        model, factors = self._model, self._model.jacobian_pass
        step, seen = self._chosen, 0
        for x in self._read():
            n, start = num_examples(x), 0
            while start < n:
                if step is None:
                    step = self._first(x, each)
                left = n - start
                size = -(-left // -(-left // step))  # even chunks: memory of one serves the next
                part = x if size == n else take(x, slice(start, start + size))
                rows = factors.rows(part, batch_size=self._chosen, offset=seen + start)
                start += rows.num_examples
                if self._chosen is None:
                    step = self._fitting(rows.nbytes // rows.num_examples, each)
                rows = rows if model.displacement is None else replace(rows, f=model.outputs(rows))
                yield rows
                del rows  # before the next are made
            seen += n

    def _first(self, x: Inputs, each: int) -> int:
        """Examples of the first chunk: as if their rows were written out, since nothing is known of them yet."""
        factors, network = self._model.jacobian_pass, self._model.network
        written_out = network.num_parameters * network.num_outputs * factors.dtype.itemsize
        return min(self._fitting(written_out, each, _FEWEST), factors.examples_at_once(x, network.num_outputs))

    def _fitting(self, size: int, each: int, fewest: int = 1) -> int:
        """Examples that fit, if the rows of each take so many bytes, and what is made of them `each`."""
        return max(1, min(self._batches.batch_size, max(fewest, _HELD // max(1, size)), _HELD // max(1, each)))

    def _read(self) -> Iterator[Inputs]:
        parts = self._batches if self.length is not None else merged_batches(self._batches, self._model.network)
        for (x,) in parts:
            yield x
