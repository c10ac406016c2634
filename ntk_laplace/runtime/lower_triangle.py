"""The lower triangle of a symmetric matrix in panels of rows, and its Cholesky factorization in place.

Half of the matrix is never stored. The panels may also be views into a square matrix, so that both kinds of storage
share one factorization, one solve and one inverse. No operation copies more than a few panels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from ntk_laplace.errors import NumericalError, UnsupportedError
from ntk_laplace.runtime import tuning


class LowerTriangle:
    """A symmetric matrix A (n, n), or its Cholesky factor L, by its lower triangle.

    Parameters
    ----------
    panels : sequence of Tensor
        Rows start to stop of the matrix in its columns 0 to stop, (stop - start, stop), from the first row to the last.
        In the last stop - start columns, the diagonal block, only the lower triangle is read.
    """

    def __init__(self, panels: Sequence[Tensor]) -> None:
        self.panels = tuple(panels)

    @classmethod
    def empty(cls, n: int, unit: int, like: Tensor) -> LowerTriangle:
        """Uninitialized panels for n rows, with a multiple of `unit` rows each, with dtype and device of `like`."""
        return cls([like.new_empty(rows.stop - rows.start, rows.stop) for rows in _rows(n, unit, like.device)])

    @classmethod
    def of(cls, matrix: Tensor) -> LowerTriangle:
        """Views into a square matrix, as high as panels that are stored alone."""
        return cls([matrix[rows, : rows.stop] for rows in _rows(len(matrix), 1, matrix.device)])

    @staticmethod
    def predicted_bytes(n: int, unit: int, dtype: torch.dtype, device: torch.device) -> int:
        """Bytes of `empty`: (n² + n b)/2 numbers for panels of b rows."""
        return dtype.itemsize * sum((rows.stop - rows.start) * rows.stop for rows in _rows(n, unit, device))

    def __len__(self) -> int:
        return self.panels[-1].shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the panels."""
        return sum(panel.nbytes for panel in self.panels)

    @property
    def like(self) -> Tensor:
        """A tensor with its dtype and device."""
        return self.panels[0]

    def _placed(self) -> Iterator[tuple[int, Tensor]]:
        """The first row of each panel, and the panel."""
        for panel in self.panels:
            yield panel.shape[1] - panel.shape[0], panel

    def diagonal(self) -> Iterator[Tensor]:
        """The diagonal, in pieces that are views."""
        return (panel.diagonal(start) for start, panel in self._placed())

    def add_to_diagonal_(self, value: float) -> LowerTriangle:
        """Add a number to each diagonal entry."""
        for part in self.diagonal():
            part.add_(value)
        return self

    def trailing(self, start: int) -> LowerTriangle:
        """Rows and columns from `start` on, as views."""
        return LowerTriangle([panel[max(0, start - first) :, start:]
                              for first, panel in self._placed() if panel.shape[1] > start])

    def to_dense(self) -> Tensor:
        """The lower triangle as a new square matrix, zero above the diagonal."""
        dense = self.like.new_zeros(len(self), len(self))
        for start, panel in self._placed():
            stop = panel.shape[1]
            dense[start:stop, :stop] = panel.tril(start)
        return dense

    def multiply(self, right: Tensor) -> Tensor:
        """``A right`` as a new tensor (n, k)."""
        out = torch.zeros_like(right)
        for start, panel in self._placed():
            stop = panel.shape[1]
            own, before, here = panel[:, start:], right[:start], right[start:stop]
            out[:start].addmm_(panel[:, :start].mT, here)
            out[start:stop] += panel[:, :start] @ before + own.tril() @ here + own.tril(-1).mT @ here
        return out

    # --- factorization

    def cholesky_(self) -> LowerTriangle:
        """Overwrite A by L with ``A = L Lᵀ``, panel after panel; each reads only those before it.

        Errors as `linalg.cholesky_`.
        """
        require_full_precision(self.like.dtype, self.like.device)
        for i, (start, panel) in enumerate(self._placed()):
            for first, earlier in islice(self._placed(), i):
                own = panel[:, first : earlier.shape[1]]
                # L_ik = (A_ik - Σ_j<k L_ij L_kjᵀ) L_kk⁻ᵀ
                own.addmm_(panel[:, :first], earlier[:, :first].mT, alpha=-1.0)
                own.copy_(torch.linalg.solve_triangular(earlier[:, first:].mT, own, upper=True, left=False))
            own = panel[:, start:]
            own.addmm_(panel[:, :start], panel[:, :start].mT, alpha=-1.0)
            factor, info = torch.linalg.cholesky_ex(own)
            require_definite(info, start, len(self), own.dtype)
            own.copy_(factor)
        return self

    # --- of a factor L

    def log_det(self) -> Tensor:
        """Log determinant of ``L Lᵀ``: twice the sum of the logs of L's diagonal."""
        return 2.0 * torch.stack([part.log().sum() for part in self.diagonal()]).sum()

    def pivot_rounding(self) -> float:
        """About how far rounding of A moves `log_det`, as `pivot_rounding`."""
        total = sum(pivot_rounding(panel, start) for start, panel in self._placed())
        return float(total) * torch.finfo(self.like.dtype).eps

    def solve_lower_(self, right: Tensor, transpose: bool = False, shift: float = 0.0) -> Tensor:
        """``L⁻¹ right``, or ``L⁻ᵀ right`` with `transpose`, in place of `right` (n, k); of L + shift I for a `shift`.

        `torch.linalg.solve_triangular` copies a view; it gets only diagonal blocks here.
        """
        steps = list(self._solve_steps())
        for start, panel in reversed(steps) if transpose else steps:
            rows, diagonal = right[start : panel.shape[1]], panel[:, start:]
            if shift:
                diagonal = diagonal + shift * torch.eye(len(diagonal), dtype=diagonal.dtype, device=diagonal.device)
            if transpose:
                rows.copy_(torch.linalg.solve_triangular(diagonal.mT, rows, upper=True))
                right[:start].addmm_(panel[:, :start].mT, rows, alpha=-1.0)
            else:
                rows.addmm_(panel[:, :start], right[:start], alpha=-1.0)
                rows.copy_(torch.linalg.solve_triangular(diagonal, rows, upper=False))
        return right

    def _solve_steps(self) -> Iterator[tuple[int, Tensor]]:
        """The first row of each part of a panel that a solve takes at a time, and the part up to the diagonal."""
        most = tuning.SOLVE_ROWS if self.like.device.type == "cpu" else tuning.PANEL_DEVICE_ROWS
        for start, panel in self._placed():
            for rows in _cut(len(panel), most):
                yield start + rows.start, panel[rows, : start + rows.stop]

    def solve_lower(self, right: Tensor) -> Tensor:
        """``L⁻¹ right`` as a new tensor (n, k)."""
        return self.solve_lower_(right.clone())

    def solve(self, right: Tensor) -> Tensor:
        """``(L Lᵀ)⁻¹ right`` as a new tensor (n, k)."""
        return self.solve_lower_(self.solve_lower(right), transpose=True)

    def inverse(self) -> Tensor:
        """``(L Lᵀ)⁻¹`` as a new dense symmetric matrix (n, n)."""
        inverse = self.like.new_empty(len(self), len(self))
        for start, panel in self.inverse_panels(1):
            columns = slice(start, start + panel.shape[1])
            inverse[start:, columns] = panel
            inverse[columns, start:] = panel.T
        return inverse

    def inverse_panels(self, size: int) -> Iterator[tuple[int, Tensor]]:
        """``(L Lᵀ)⁻¹`` in panels of columns, without a second matrix; widths are multiples of `size`, as n must be.

        The first column `start` of a panel, and its rows from `start` on, (n - start, width). The rows above follow
        from earlier panels by symmetry. The panels share one buffer: copy them to keep them.
        """
        for start, half in self._inverse_factor(size):
            # (L Lᵀ)⁻¹ = L⁻ᵀL⁻¹: its rows from `start` on need only those of L
            yield start, self.trailing(start).solve_lower_(half, transpose=True)

    def inverse_diagonal(self, size: int) -> Tensor:
        """Diagonal blocks (n / size, size, size) of ``(L Lᵀ)⁻¹``, in panels, at half the cost of the full inverse."""
        blocks = self.like.new_zeros(len(self) // size, size, size)
        for start, half in self._inverse_factor(size):
            own = blocks[start // size : (start + half.shape[1]) // size]
            # a batched product copies what it reads
            for rows in half.unflatten(1, (-1, size)).split(tuning.SOLVE_ROWS):
                own.baddbmm_(rows.permute(1, 2, 0), rows.transpose(0, 1))
        return blocks

    def _inverse_factor(self, size: int) -> Iterator[tuple[int, Tensor]]:
        """L⁻¹ in panels of columns: the first column, and the rows from there on (those above are zero)."""
        n = len(self)
        columns = min(tuning.INVERSE_COLUMNS, max(384, n // 8))  # solves for few columns are slow
        width = max(1, min(max(1, columns // size) * size, n))  # n may be 0
        buffer = self.like.new_empty(n * width)
        for start in range(0, n, width):
            width = min(width, n - start)
            panel = buffer[: (n - start) * width].view(n - start, width).zero_()
            panel.diagonal().fill_(1.0)
            yield start, self.trailing(start).solve_lower_(panel)


def panel_rows(device: torch.device) -> int:
    """Rows of a panel, at most."""
    return tuning.PANEL_ROWS if device.type == "cpu" else tuning.PANEL_DEVICE_ROWS


def _rows(n: int, unit: int, device: torch.device) -> list[slice]:
    """Rows of the panels of n rows, with a multiple of `unit` each."""
    unit = max(1, unit)  # no rows at all, where there is nothing to learn of the outputs
    return _cut(n, max(1, panel_rows(device) // unit) * unit)


def _cut(n: int, height: int) -> list[slice]:
    return [slice(start, min(start + height, n)) for start in range(0, max(1, n), height)]


def pivot_rounding(rows: Tensor, start: int) -> Tensor:
    """Σ_i A_ii/L_ii² over these rows of L, the last len(rows) of whose columns are their own, from column `start`.

    Times the floating type's eps it tells how far rounding moves log det A. A pivot L_ii² is A_ii less the squares of
    the row's other entries, so rounding of A_ii is a relative error A_ii/L_ii² times as large in it.
    """
    own = rows[:, start:]
    before = torch.linalg.vector_norm(rows[:, :start], dim=1, dtype=torch.float64)
    whole = before.square() + torch.linalg.vector_norm(own.tril(), dim=1, dtype=torch.float64).square()
    return (whole / own.diagonal().double().square()).sum()


def more_digits(dtype: torch.dtype) -> str:
    """Remedy where rounding in this floating type hides the result."""
    double = "" if dtype == torch.float64 else "dtype=torch.float64, "
    other = 'another exact structure ("gp", "full")'
    return f"Use {double}inputs scaled to unit variance, a larger prior precision, or {other}."


def require_definite(info: Tensor, before: int, n: int, dtype: torch.dtype) -> None:
    """Raise NumericalError if `info` of a Cholesky factorization says so; `before` rows of the n have been factored."""
    if int(info) != 0:
        raise NumericalError("a positive definite matrix",
                             f"a leading minor of order {before + int(info)} of {n} that is not positive ({dtype})",
                             more_digits(dtype))


def require_full_precision(dtype: torch.dtype, device: torch.device) -> None:
    """Refuse products of float32 matrices that the caller's settings of torch round to fewer digits (UnsupportedError).

    TF32 and bfloat16 keep three digits and two. An error of 1e-3 of the largest eigenvalue of B exceeds its smallest,
    1: B would not be positive definite, or the evidence would be wrong without a sign of it.
    """
    setting = _product_precision(device)
    if dtype == torch.float32 and setting not in ("ieee", "none"):
        raise UnsupportedError(
            f"float32 matrix products with all digits on {device.type}, for the Gram matrix and its factor",
            f"torch's setting {setting!r}",
            'Call torch.set_float32_matmul_precision("highest"), or leave dtype= at float64.',
        )


def _product_precision(device: torch.device) -> str:
    """How torch rounds float32 matrix products: "ieee", "tf32", "bf16", or "none" where it is not set."""
    backend = {"cuda": torch.backends.cuda, "cpu": torch.backends.mkldnn}.get(device.type)
    return "none" if backend is None else str(backend.matmul.fp32_precision)
