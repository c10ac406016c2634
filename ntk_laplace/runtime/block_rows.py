"""A large symmetric matrix in block rows that are dealt to processes: Cholesky factorization and solves.

A process keeps some block rows, each from its first column to its diagonal block: n² / (2 W) numbers of W processes. A
factorization, or a solve with any number of right sides, sends each block row once: n² / 2 numbers to each process.
While the next row travels, the present one is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ntk_laplace.errors import NumericalError
from ntk_laplace.runtime.linalg import solve_lower
from ntk_laplace.runtime.lower_triangle import more_digits, pivot_rounding
from ntk_laplace.runtime.reduction import Reducer


class BlockRows:
    """The lower triangle of a symmetric (n, n) matrix, or its Cholesky factor, in block rows.

    All processes call the same methods in the same order.

    Parameters
    ----------
    bounds : sequence of int
        First rows of the blocks, and n.
    reducer : Reducer
    like : Tensor
        Gives dtype and device.

    Attributes
    ----------
    rows : dict of int to Tensor
        This process's block rows by number: block i is (bounds[i+1] - bounds[i], bounds[i+1]). Of its last, square
        block only the lower triangle counts. The caller fills them in.
    """

    def __init__(self, bounds: Sequence[int], reducer: Reducer, like: Tensor) -> None:
        self.bounds, self.reducer, self._like = list(bounds), reducer, like
        self.rows: dict[int, Tensor] = {}

    @property
    def size(self) -> int:
        """n."""
        return self.bounds[-1]

    @property
    def blocks(self) -> int:
        """Number of block rows."""
        return len(self.bounds) - 1

    @property
    def own(self) -> list[int]:
        """Numbers of this process's blocks."""
        return [i for i in range(self.blocks) if self.owner(i) == self.reducer.rank]

    def owner(self, i: int) -> int:
        """The process of block row i. They are dealt to and fro, because later rows are longer."""
        turn, place = divmod(i, self.reducer.world_size)
        return self.reducer.world_size - 1 - place if turn % 2 else place

    def cholesky_(self) -> None:
        """Factor the matrix in place, ``A = L Lᵀ``.

        Row k of L is finished by its owner and sent to all. Each then computes column k of its later rows,
        ``L_ik = (A_ik - L_i,:k L_k,:kᵀ) L_kk⁻ᵀ``; the owner of row k + 1 begins with that and sends it.

        Raises
        ------
        NumericalError
            On all processes, if the matrix is not positive definite in its precision; it is partly overwritten.
        """
        self._finish(0)
        coming = self._send(0)
        for k in range(self.blocks):
            wait, row = coming
            wait()
            self._require_definite(k, row)
            later = [i for i in self.own if i > k]
            if later[:1] == [k + 1]:
                self._eliminate(later.pop(0), k, row)
            if k + 1 < self.blocks:
                self._finish(k + 1)
                coming = self._send(k + 1)
            for i in later:
                self._eliminate(i, k, row)

    def log_det(self) -> Tensor:
        """log det A from the factor: the same bits on all processes."""
        total = self._like.new_zeros(())
        for i, row in self.rows.items():
            total += 2.0 * row[:, self.bounds[i] :].diagonal().log().sum()
        return self.reducer.sum(total)

    def pivot_rounding(self) -> float:
        """As `LowerTriangle.pivot_rounding`, on all processes."""
        total = self._like.new_zeros((), dtype=torch.float64)
        for i, row in self.rows.items():
            total += pivot_rounding(row, self.bounds[i])
        return float(self.reducer.sum(total)) * torch.finfo(self._like.dtype).eps

    def sweep(self, reverse: bool = False, first: int = 0) -> Iterator[tuple[int, Tensor]]:
        """The block rows from number `first` on, one after the other on every process: their numbers and rows.

        A row is valid until the next one. All of them have to be taken.
        """
        order = range(first, self.blocks)
        order = order[::-1] if reverse else order
        coming = self._send(order[0])
        for number, k in enumerate(order):
            wait, row = coming
            wait()
            if number + 1 < len(order):
                coming = self._send(order[number + 1])
            yield k, row

    def solve(self, right: Tensor) -> Tensor:
        """``L⁻¹ right`` for this process's own right sides (n, m), in place."""
        for k, row in self.sweep():
            self._forward(k, row, right, 0)
        return right

    def solve_transposed(self, right: Tensor) -> Tensor:
        """``L⁻ᵀ right`` for this process's own right sides (n, m), in place."""
        for k, row in self.sweep(reverse=True):
            self._backward(k, row, right, 0)
        return right

    def inverse_columns(self, first: int, last: int, factor_only: bool = False) -> dict[int, Tensor]:
        """Columns of ``(L Lᵀ)⁻¹`` that belong to this process's blocks, from `first` to `last` (exclusive).

        By number of the block i, the rows from its diagonal block on, (n - bounds[i], width). With `factor_only` they
        are columns of L⁻¹, at half the cost.
        """
        found = {}
        for i in self.own:
            if first <= i < last:
                start, stop = self.bounds[i : i + 2]
                found[i] = self._like.new_zeros(self.size - start, stop - start)
                found[i][: stop - start].fill_diagonal_(1.0)
        for k, row in self.sweep(first=first):
            for i, panel in found.items():
                if i <= k:
                    self._forward(k, row, panel, self.bounds[i])
        if not factor_only:
            for k, row in self.sweep(reverse=True, first=first):
                for i, panel in found.items():
                    if i <= k:
                        self._backward(k, row, panel, self.bounds[i])
        return found

    def whole(self) -> Tensor:
        """The matrix (n, n) on every process, zero above its diagonal."""
        found = self._like.new_zeros(self.size, self.size)
        for k, row in self.sweep():
            start, stop = self.bounds[k : k + 2]
            found[start:stop, :stop] = row
            found[start:stop, start:stop].tril_()
        return found

    # --- steps

    def _finish(self, k: int) -> None:
        """Factor the diagonal block of row k at its owner; NaN in the first entry means that it failed."""
        if self.owner(k) != self.reducer.rank:
            return
        start, row = self.bounds[k], self.rows[k]
        diagonal = row[:, start:]
        if start:
            diagonal.addmm_(row[:, :start], row[:, :start].mT, alpha=-1.0)
        factor, info = torch.linalg.cholesky_ex(diagonal)
        diagonal.copy_(factor)
        if int(info):
            diagonal[0, 0] = torch.nan

    def _require_definite(self, k: int, row: Tensor) -> None:
        start, stop = self.bounds[k : k + 2]
        if bool(row[0, start].isnan()):
            raise NumericalError(
                "a positive definite matrix",
                f"a leading minor of order {start + 1} to {stop} of {self.size} that is not positive ({row.dtype})",
                more_digits(row.dtype),
            )

    def _eliminate(self, i: int, k: int, row: Tensor) -> None:
        """Column k of row i."""
        start, stop = self.bounds[k : k + 2]
        own = self.rows[i]
        part = own[:, start:stop]
        if start:
            part.addmm_(own[:, :start], row[:, :start].mT, alpha=-1.0)
        part.copy_(torch.linalg.solve_triangular(row[:, start:stop].mT, part, upper=True, left=False))

    def _forward(self, k: int, row: Tensor, right: Tensor, start: int) -> None:
        """Rows of block k of ``L⁻¹ right``, whose rows begin with row `start` of the matrix."""
        low, high = self.bounds[k] - start, self.bounds[k + 1] - start
        part = right[low:high]
        if low:
            part.addmm_(row[:, start : start + low], right[:low], alpha=-1.0)
        part.copy_(solve_lower(row[:, start + low :], part))

    def _backward(self, k: int, row: Tensor, right: Tensor, start: int) -> None:
        """Rows of block k of ``L⁻ᵀ right``, and what they contribute to those above."""
        low, high = self.bounds[k] - start, self.bounds[k + 1] - start
        part = right[low:high]
        part.copy_(solve_lower(row[:, start + low :], part, transpose=True))
        if low:
            right[:low].addmm_(row[:, start : start + low].mT, part, alpha=-1.0)

    def _send(self, k: int) -> tuple[Callable[[], None], Tensor]:
        """Begin to send block row k to all."""
        start, stop = self.bounds[k : k + 2]
        own = self.owner(k) == self.reducer.rank
        row = self.rows[k] if own else self._like.new_empty(stop - start, stop)
        return self.reducer.broadcast_(row, self.owner(k)), row
