"""Chunks: the inputs of a prediction, in chunks that fit in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ntk_laplace.errors import require_whole
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.model.data import InputBatches, InputData, Inputs, num_examples, take
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.resources import buffer_bytes
from ntk_laplace.structures import LinearizedModel, merged_batches
from ntk_laplace.structures.data_passes import shown


class Chunks:
    """Inputs from tensors, a loader or a dataset, chunk by chunk, in order.

    A chunk has `batch_size` examples at most; by default 512, or fewer if they exceed 16 MiB. Small batches of a loader
    are merged up to it, unless merging would change the network's outputs. `length` is the number of examples for
    tensors; None for a loader or a dataset.

    HyperparameterError if `batch_size` is not a positive integer; DataError or UnsupportedError as `InputBatches`.
    """

    def __init__(self, model: LinearizedModel, x: InputData, batch_size: int | None = None) -> None:
        if batch_size is not None:
            require_whole("batch_size", batch_size, 1, "Leave it out to have it chosen.")
        network = model.network
        self._model, self._chosen = model, batch_size
        self._batches = InputBatches(x, network.input_format, batch_size, network.device, network.input_dtype)
        self.length = self._batches.length

    def inputs(self, most: int | None = None) -> Iterator[tuple[int, Inputs]]:
        """(index of the first example, inputs) of chunks of at most `most` examples, to evaluate the network."""
        seen = 0
        for x in self._read():
            sizes = self._model.jacobian_pass.prepare(x)  # checks the network of a checkpoint at its first inputs
            own, n = None if self._chosen else sizes.evaluated, num_examples(x)
            step = min([n, *(size for size in (most, own) if size is not None)])
            for start in range(0, n, step):
                yield seen + start, take(x, slice(start, start + step)) if step < n else x
            seen += n

    def rows(self, each: int = 0) -> Iterator[Jacobian]:
        """Rows of J at each chunk; `each` is the size in bytes of the results computed per example.

        The caller should delete the rows of a chunk before it requests the next; otherwise two are in memory.
        """
        model, jacobian_pass = self._model, self._model.jacobian_pass
        step, seen = self._chosen, 0
        for x in shown(model, self._read(), "predictions", self.length, num_examples):
            n, start = num_examples(x), 0
            while start < n:
                if step is None:
                    step = self._first(x, each)
                left = n - start
                size = -(-left // -(-left // step))  # even chunks: the allocator reuses the memory
                part = x if size == n else take(x, slice(start, start + size))
                rows = jacobian_pass.rows(part, batch_size=self._chosen, offset=seen + start)
                start += rows.num_examples
                if self._chosen is None:
                    step = self._fitting(rows.nbytes // rows.num_examples, each)
                rows = rows if model.displacement is None else replace(rows, f=model.outputs(rows))
                yield rows
                del rows  # before the next are computed
            seen += n

    def _first(self, x: Inputs, each: int) -> int:
        """Examples of the first chunk, assuming dense rows: the size of a row is not known yet."""
        jacobian_pass, network = self._model.jacobian_pass, self._model.network
        written_out = network.num_parameters * network.num_outputs * jacobian_pass.dtype.itemsize
        fitting = self._fitting(written_out, each, tuning.FEWEST_CHUNK_EXAMPLES)
        return min(fitting, jacobian_pass.prepare(x).batch()[0])

    def _fitting(self, size: int, each: int, fewest: int = 1) -> int:
        """Examples that fit, if each takes `size` bytes of rows and `each` bytes of results."""
        room = buffer_bytes(tuning.CHUNK_BYTES, self._model.network.device)
        return max(1, min(self._batches.batch_size, max(fewest, room // max(1, size)), room // max(1, each)))

    def _read(self) -> Iterator[Inputs]:
        parts = self._batches if self.length is not None else merged_batches(self._batches, self._model.network)
        for (x,) in parts:
            yield x
