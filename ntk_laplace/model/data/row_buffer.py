"""A growing buffer that collects a few rows from each batch in one tensor."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ntk_laplace.errors import DataError


class RowBuffer:
    """Rows that are appended batch by batch to one preallocated tensor.

    One small tensor per batch would fragment the memory between the large temporary ones, and memory would grow with
    the number of batches.

    Parameters
    ----------
    room : int
        Expected number of rows, if known; otherwise the capacity doubles as needed.
    """

    def __init__(self, room: int = 0) -> None:
        self._room, self._count = room, 0
        self._rows: Tensor | None = None

    def __len__(self) -> int:
        return self._count

    def append(self, rows: Tensor) -> None:
        """Copy the rows of one batch, (n, ...), of the shape of earlier ones (DataError)."""
        end = self._count + len(rows)
        if self._rows is None:
            self._rows = rows.new_empty(max(self._room, end), *rows.shape[1:])
        if rows.shape[1:] != self._rows.shape[1:]:
            raise DataError(f"rows of shape {tuple(self._rows.shape[1:])}, as in the batches before",
                            f"{tuple(rows.shape[1:])}", "Give targets, and network outputs, one shape in all batches.")
        dtype = torch.promote_types(rows.dtype, self._rows.dtype)
        if end > len(self._rows) or dtype != self._rows.dtype:
            grown = self._rows.new_empty(max(len(self._rows), 2 * end), *rows.shape[1:], dtype=dtype)
            grown[: self._count] = self._rows[: self._count]
            self._rows = grown
        self._rows[self._count : end] = rows
        self._count = end

    @property
    def rows(self) -> Tensor:
        """All rows so far, (N, ...), without spare capacity."""
        if self._rows is None:
            return torch.empty(0, device="cpu")
        return self._rows if self._count == len(self._rows) else self._rows[: self._count].clone()

    @property
    def so_far(self) -> Tensor:
        """The same rows as a view of the buffer."""
        return torch.empty(0, device="cpu") if self._rows is None else self._rows[: self._count]

    def copy(self) -> RowBuffer:
        """A copy of the buffer that can grow independently."""
        return fill_buffer([self.rows] if self._count else [], self._room)


def fill_buffer(parts: Iterable[Tensor], room: int = 0) -> RowBuffer:
    """A buffer with the rows of all given tensors, in order."""
    found = RowBuffer(room)
    for part in parts:
        found.append(part)
    return found
