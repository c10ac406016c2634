"""Dense linear algebra: in-place Cholesky factorization, triangular solves, inverses and roots.

A large matrix is stored once. Only its lower triangle is read, and the Cholesky factor overwrites it. Peak memory is
one matrix plus blocks on every device; `torch.linalg.cholesky` allocates a second matrix even with `out=`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ntk_laplace.errors import NumericalError
from ntk_laplace.runtime import tuning

__all__ = [
    "add_outer_lower_",
    "cholesky_",
    "cholesky_log_det",
    "cholesky_of",
    "cross_approximation",
    "inverse_diagonal",
    "inverse_from_cholesky",
    "inverse_panels",
    "log_det_curve",
    "mirror_lower_",
    "solve_lower",
    "solve_lower_",
    "solve_spd",
    "symmetric_root",
]


def cholesky_(matrix: Tensor, block: int = 768) -> Tensor:
    """Factor a positive definite matrix in place, ``A = L Lᵀ``, by a blocked right-looking Cholesky.

    Parameters
    ----------
    matrix : Tensor, (n, n)
        Only the lower triangle is read. It is overwritten by L; the strict upper triangle is then undefined.
    block : int
        Width of a panel.

    Returns
    -------
    Tensor, (n, n)
        The same storage; only its lower triangle is valid.

    Raises
    ------
    NumericalError
        If the matrix is not positive definite in its precision; it is then partly overwritten.
    """
    n = matrix.shape[0]
    for start in range(0, n, block):
        stop = min(start + block, n)
        diagonal = matrix[start:stop, start:stop]
        factor, info = torch.linalg.cholesky_ex(diagonal)
        _require_definite(info, start, matrix)
        diagonal.copy_(factor)
        if stop == n:
            break
        panel = matrix[stop:, start:stop]
        # L21 = A21 L11⁻ᵀ
        panel.copy_(torch.linalg.solve_triangular(factor.mT, panel, upper=True, left=False))
        # A22 <- A22 - L21 L21ᵀ, lower blocks only
        for row in range(stop, n, block):
            end = min(row + block, n)
            rows = matrix[row:end, start:stop]
            matrix[row:end, stop:end].addmm_(rows, matrix[stop:end, start:stop].mT, alpha=-1.0)
    return matrix


def cholesky_of(matrix: Tensor) -> Tensor:
    """L with ``A = L Lᵀ`` for a small positive definite matrix (n, n), which is not overwritten; differentiable.

    Raises
    ------
    NumericalError
        As `cholesky_`.
    """
    factor, info = torch.linalg.cholesky_ex(matrix)
    _require_definite(info, 0, matrix)
    return factor


def _require_definite(info: Tensor, before: int, matrix: Tensor) -> None:
    if int(info) != 0:
        raise NumericalError(
            "a positive definite matrix",
            f"a leading minor of order {before + int(info)} of {len(matrix)} that is not positive ({matrix.dtype})",
            "Use dtype=torch.float64, or a larger prior precision.",
        )


def add_outer_lower_(matrix: Tensor, rows: Tensor, block: int | None = None) -> None:
    """``matrix += rowsᵀ rows`` in the lower triangle (full diagonal blocks), at half the cost of the full product.

    Parameters
    ----------
    matrix : Tensor, (n, n)
    rows : Tensor, (m, n)
    block : int, optional
        Height of a panel; by default about n / 5, between 96 and 1024.
    """
    n = matrix.shape[0]
    block = max(96, min(1024, round(n / 160) * 32)) if block is None else block  # multiples of 32 suit the kernels
    for start in range(0, n, block):
        stop = min(start + block, n)
        matrix[start:stop, :stop].addmm_(rows[:, start:stop].T, rows[:, :stop])


def cholesky_log_det(factor: Tensor) -> Tensor:
    """Log determinant of ``L Lᵀ``: twice the sum of the logs of L's diagonal."""
    return 2.0 * factor.diagonal().log().sum()


def log_det_curve(spectrum: Tensor, factors: Tensor) -> Tensor:
    """log det (I + M/factor) for each of `factors` (m,), where `spectrum` contains M's eigenvalues: (m,)."""
    # rounding makes eigenvalues of a semidefinite matrix slightly negative: clamp them to zero
    return torch.log1p(spectrum.clamp_min(0.0) / factors.unsqueeze(1)).sum(1)


def solve_lower(factor: Tensor, right: Tensor, transpose: bool = False) -> Tensor:
    """``L⁻¹ right``, or ``L⁻ᵀ right`` with `transpose`; `right` is (n, k)."""
    if transpose:
        return torch.linalg.solve_triangular(factor.mT, right, upper=True)
    return torch.linalg.solve_triangular(factor, right, upper=False)


def solve_spd(factor: Tensor, right: Tensor) -> Tensor:
    """``(L Lᵀ)⁻¹ right``; `right` is (n, k)."""
    return solve_lower(factor, solve_lower(factor, right), transpose=True)


def solve_lower_(factor: Tensor, right: Tensor, transpose: bool = False, block: int = tuning.SOLVE_ROWS) -> Tensor:
    """`solve_lower` in place of `right`, without a copy of a factor that is a view into a larger matrix.

    Parameters
    ----------
    factor : Tensor, (n, n)
        Only the lower triangle is read. `torch.linalg.solve_triangular` copies all of a strided view; here it gets
        only diagonal blocks, and products with the other blocks read the view directly.
    right : Tensor, (n, k)
    transpose : bool
        Solve with Lᵀ.
    block : int
        Rows at a time.

    Returns
    -------
    Tensor, (n, k)
        `right`, overwritten.
    """
    n = len(factor)
    starts = range(0, n, block)
    for start in reversed(starts) if transpose else starts:
        stop = min(start + block, n)
        rows, diagonal = right[start:stop], factor[start:stop, start:stop]
        if transpose:
            rows.addmm_(factor[stop:, start:stop].mT, right[stop:], alpha=-1.0)
        else:
            rows.addmm_(factor[start:stop, :start], right[:start], alpha=-1.0)
        rows.copy_(solve_lower(diagonal, rows, transpose))
    return right


def inverse_from_cholesky(factor: Tensor, block: int | None = None) -> Tensor:
    """``(L Lᵀ)⁻¹`` as a new dense symmetric matrix, computed in panels of `block` columns."""
    inverse = factor.new_empty(factor.shape)
    for start, panel in inverse_panels(factor, 1, block):
        inverse[start:, start : start + panel.shape[1]] = panel
    return mirror_lower_(inverse)


def inverse_panels(factor: Tensor, size: int, block: int | None = None) -> Iterator[tuple[int, Tensor]]:
    """``(L Lᵀ)⁻¹`` in panels of columns, without allocating a second n x n matrix.

    Parameters
    ----------
    factor : Tensor, (n, n)
        L; only the lower triangle is read.
    size : int
        The number of columns of each panel is a multiple of `size`; so must n be.
    block : int, optional
        Approximate number of columns of a panel; by default n / 8, between 384 and 1024.

    Yields
    ------
    (int, Tensor)
        The first column `start` of a panel, and its rows from `start` on, (n - start, width). The rows above follow
        from earlier panels by symmetry. The panels share one buffer: copy them to keep them.
    """
    for start, half in _inverse_factor(factor, size, block):
        # (L Lᵀ)⁻¹ = L⁻ᵀL⁻¹: its rows from `start` on need only those of L
        yield start, solve_lower_(factor[start:, start:], half, transpose=True)


def inverse_diagonal(factor: Tensor, size: int, block: int | None = None) -> Tensor:
    """Diagonal blocks (n / size, size, size) of ``(L Lᵀ)⁻¹``, in panels, at half the cost of the full inverse."""
    blocks = factor.new_zeros(len(factor) // size, size, size)
    for start, half in _inverse_factor(factor, size, block):
        own = blocks[start // size : (start + half.shape[1]) // size]
        for rows in half.unflatten(1, (-1, size)).split(tuning.SOLVE_ROWS):  # a batched product copies what it reads
            own.baddbmm_(rows.permute(1, 2, 0), rows.transpose(0, 1))
    return blocks


def _inverse_factor(factor: Tensor, size: int, block: int | None) -> Iterator[tuple[int, Tensor]]:
    """L⁻¹ in panels of columns: the first column of each panel, and its rows from there on (those above are zero)."""
    n = len(factor)
    block = min(tuning.INVERSE_COLUMNS, max(384, n // 8)) if block is None else block  # solves for few columns are slow
    width = min(max(1, block // size) * size, n)
    buffer = factor.new_empty(n * width)
    for start in range(0, n, width):
        width = min(width, n - start)
        panel = buffer[: (n - start) * width].view(n - start, width).zero_()
        panel.diagonal().fill_(1.0)
        yield start, solve_lower_(factor[start:, start:], panel)


def mirror_lower_(matrix: Tensor, block: int = 512) -> Tensor:
    """Copy the lower triangle to the upper one, in place, block by block."""
    n = len(matrix)
    for start in range(0, n, block):
        stop = min(start + block, n)
        diagonal = matrix[start:stop, start:stop]
        diagonal.copy_(diagonal.tril() + diagonal.tril(-1).T)
        for first in range(stop, n, block):
            last = min(first + block, n)
            matrix[start:stop, first:last] = matrix[first:last, start:stop].T
    return matrix


def symmetric_root(matrix: Tensor) -> Tensor:
    """A root W with ``A = W Wᵀ`` for batched positive semidefinite matrices A, which may be singular.

    Negative eigenvalues, which rounding causes, are set to zero; they are of the order of machine precision times the
    largest eigenvalue. A root needs no inverse, so no jitter is added.
    """
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.clamp_min(0.0).sqrt().unsqueeze(-2)


def cross_approximation(matrix: Tensor, most: int) -> tuple[Tensor, Tensor] | None:
    """Approximate a smooth matrix by few outer products: Gaussian elimination with complete pivoting, stopped early.

    Parameters
    ----------
    matrix : Tensor, (o, i)
    most : int
        Maximum number of outer products.

    Returns
    -------
    (Tensor, Tensor) or None
        u (r, o) and v (r, i) in double precision. Every entry of ``u.T @ v`` is within 8 eps of the largest absolute
        entry, eps of the matrix's type. None if more than `most` products are needed.
    """
    left = matrix.double().clone()
    enough = 8 * torch.finfo(matrix.dtype).eps * left.abs().max()
    rows, columns = [], []
    for _ in range(most + 1):
        place = int(left.abs().argmax())
        j, k = divmod(place, left.shape[1])
        pivot = left[j, k].clone()
        if abs(pivot) <= enough:
            empty = left.new_zeros(1, 1)
            return (torch.stack(columns), torch.stack(rows)) if rows else (
                empty.expand(1, left.shape[0]), empty.expand(1, left.shape[1]))
        if len(rows) == most:
            return None
        rows.append(left[j] / pivot)
        columns.append(left[:, k].clone())
        left -= torch.outer(columns[-1], rows[-1])
    return None
