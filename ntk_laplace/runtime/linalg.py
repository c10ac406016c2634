"""Dense linear algebra: in-place Cholesky factorization, triangular solves and roots.

A large matrix is stored once. Only its lower triangle is read, and the Cholesky factor overwrites it. Peak memory is
one matrix plus blocks on every device. The blocked algorithms are those of `lower_triangle`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ntk_laplace.errors import NumericalError
from ntk_laplace.runtime.lower_triangle import LowerTriangle, require_definite, require_full_precision


def cholesky_(matrix: Tensor) -> Tensor:
    """Factor a positive definite matrix (n, n) in place, ``A = L Lᵀ``, and return it.

    Only the lower triangle is read, and overwritten by L; the strict upper triangle is then undefined. If the matrix is
    not positive definite in its precision it is partly overwritten (NumericalError). UnsupportedError as
    `require_full_precision`.
    """
    if matrix.device.type == "cuda":
        require_full_precision(matrix.dtype, matrix.device)
        return cholesky_by_torch_(matrix)
    # the pages of an upper triangle that was never written are not backed by memory, and torch would write zeros there
    LowerTriangle.of(matrix).cholesky_()
    return matrix


def cholesky_by_torch_(matrix: Tensor) -> Tensor:
    """`cholesky_` by torch's own routine, which writes zeros above the diagonal.

    Only for an output in column-major order does torch factor in place; for others it allocates a second matrix. The
    transpose of a matrix in row-major order is such an output, and its upper triangle is the lower one of the matrix.
    """
    info = torch.empty((), dtype=torch.int32, device=matrix.device)
    torch.linalg.cholesky_ex(matrix.mT, upper=True, out=(matrix.mT, info))
    require_definite(info, 0, len(matrix), matrix.dtype)
    return matrix


def cholesky_of(matrix: Tensor) -> Tensor:
    """L with ``A = L Lᵀ`` for a small positive definite matrix (n, n), which is not overwritten; differentiable.

    NumericalError as `cholesky_`.
    """
    factor, info = torch.linalg.cholesky_ex(matrix)
    require_definite(info, 0, len(matrix), matrix.dtype)
    return factor


def add_outer_lower_(matrix: Tensor, rows: Tensor, *, scale: float = 1.0, keep: float = 1.0) -> None:
    """``matrix ← keep matrix + scale rowsᵀ rows`` in the lower triangle, for rows (m, n), at half of the cost.

    Diagonal blocks are full. With `keep` 0 the matrix may be uninitialized.
    """
    n = matrix.shape[0]
    height = max(96, min(1024, round(n / 160) * 32))  # of a panel: about n / 5, multiples of 32 suit the kernels
    for start in range(0, n, height):
        stop = min(start + height, n)
        matrix[start:stop, :stop].addmm_(rows[:, start:stop].T, rows[:, :stop], alpha=scale, beta=keep)


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


def mirror_lower_(matrix: Tensor) -> Tensor:
    """Copy the lower triangle to the upper one, in place, block by block."""
    n, block = len(matrix), 512
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
    values, vectors = symmetric_eigen(matrix)
    return vectors * values.clamp_min(0.0).sqrt().unsqueeze(-2)


def symmetric_eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (..., n), ascending, and eigenvectors (..., n, n) of symmetric matrices; lower triangles are read.

    NumericalError if they are not finite.
    """
    values, vectors = _finite(matrix, lambda lower: torch.linalg.eigh(lower, UPLO="L"))
    return values, vectors


def symmetric_eigenvalues(matrix: Tensor) -> Tensor:
    """The eigenvalues of `symmetric_eigen` alone, which are cheaper than both."""
    return _finite(matrix, lambda lower: [torch.linalg.eigvalsh(lower, UPLO="L")])[0]


def unique_null_space_(values: Tensor, vectors: Tensor) -> Tensor:
    """Give eigenvectors of semidefinite matrices, in place, a basis of each null space that depends on it alone.

    A routine may return any orthonormal basis of it, and returns others on other machines. This one is the Gram-Schmidt
    basis of the projections of fixed normal vectors. It takes the memory of two more matrices, as `symmetric_eigen`.

    Parameters
    ----------
    values : Tensor, (..., n)
        Eigenvalues, ascending: those at most n eps of the largest are zero.
    vectors : Tensor, (..., n, n)
        Eigenvectors, in columns.
    """
    n = vectors.shape[-1]
    limit = n * torch.finfo(values.dtype).eps * values[..., -1:]
    counts = (values <= limit).sum(-1).flatten().tolist()
    generator, most = torch.Generator().manual_seed(0), max(counts, default=0)
    # the same numbers on every device, in every floating type, whatever the default of torch
    fixed = torch.randn(n, most, generator=generator, dtype=torch.float32, device="cpu").to(vectors)
    for own, count in zip(vectors.view(-1, n, n), counts, strict=True):
        if count:
            null = own[:, :count]
            packed, scales = torch.geqrf(null.T @ fixed[:, :count])
            null.copy_(torch.ormqr(packed, scales, null, left=False) * packed.diagonal().sign())
    return vectors


def _finite(matrix: Tensor, decompose: Callable[[Tensor], Sequence[Tensor]]) -> Sequence[Tensor]:
    """The parts of a decomposition, eigenvalues first, in double precision where single precision fails.

    The divide-and-conquer routine of some LAPACK builds returns NaN for finite float32 matrices of low rank.
    """
    found = decompose(matrix)
    if found[0].isfinite().all():
        return found
    if matrix.dtype == torch.float32:
        again = decompose(matrix.double())
        if again[0].isfinite().all():
            return [part.to(matrix) for part in again]
    raise NumericalError("a symmetric matrix with finite eigenvalues", "NaN or infinite ones",
                         "Check inputs, targets and weights for values that are not finite, or are very large.")


def cross_approximation(matrix: Tensor, most: int) -> tuple[Tensor, Tensor] | None:
    """Approximate a smooth matrix by few outer products: Gaussian elimination with complete pivoting, stopped early.

    u (r, o) and v (r, i) in double precision. Every entry of ``u.T @ v`` is within 8 eps of the largest absolute entry,
    eps of the matrix's type. None if more than `most` products are needed.
    """
    left = matrix.double().clone()
    enough = 8 * torch.finfo(matrix.dtype).eps * left.abs().max()
    rows: list[Tensor] = []
    columns: list[Tensor] = []
    while True:
        j, k = divmod(int(left.abs().argmax()), left.shape[1])
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
