"""Preconditioners from products with a Hessian: one that few of them correct, and one that is written out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ntk_laplace.runtime.linalg import symmetric_eigen

_FLOOR = 0.05  # of an eigenvalue of M⁻¹H: a step along a direction with less, or with negative curvature, stays bounded
_CONVERGED = 0.1  # residual of a Ritz vector, relative to its value
_SINGLE = 1e5  # bound of the largest eigenvalue over the least, up to which an inverse is of use in single precision


class Deflated:
    """M⁻¹ + Z (|t|⁻¹ - 1) Zᵀ with Ritz vectors Z of M⁻¹H and their values t, ZᵀMZ = I: inverse of |H| along Z.

    Lanczos with full orthogonalization in the inner product of M⁻¹; a root of M is not needed.

    Parameters
    ----------
    products : callable
        H v for vectors (m, P), H symmetric.
    solve : callable
        M⁻¹ v for vectors (m, P), M positive definite.
    probe : Tensor, (P,)
        Of which the Krylov space is taken.
    steps : int
        Products, at most.
    metric : Tensor, (P,)
        A diagonal D, positive.

    Attributes
    ----------
    lowest : Tensor, (P,)
        The Ritz vector v of the smallest vᵀHv / vᵀDv. M may be far above D, and M⁻¹H next to zero where D⁻¹H is not.
    """

    def __init__(
        self, products: Callable[[Tensor], Tensor], solve: Callable[[Tensor], Tensor], probe: Tensor, steps: int,
        metric: Tensor,
    ) -> None:
        self._solve, steps = solve, min(steps, len(probe))
        basis, duals = (probe.new_zeros(steps, len(probe)) for _ in range(2))  # rows z and M z
        values, dual, used = probe.new_zeros(steps, steps), probe, 0
        raised = solve(dual[None])[0]
        norm = first = (raised @ dual).clamp_min(0.0).sqrt()
        tiny = torch.finfo(probe.dtype).eps * len(probe) ** 0.5
        while used < steps and bool(norm > 100.0 * tiny * first):
            basis[used], duals[used] = raised / norm, dual / norm
            dual = products(basis[used : used + 1])[0]
            for _ in range(2):  # the second pass removes what rounding left of the first
                along = basis[: used + 1] @ dual
                dual = dual - along @ duals[: used + 1]
                values[: used + 1, used] += along
            used += 1
            raised = solve(dual[None])[0]
            norm, first = (raised @ dual).clamp_min(0.0).sqrt(), values[used - 1, used - 1].abs()
        found, turn = symmetric_eigen(values[:used, :used].triu().T)
        last = turn[-1] if used else found
        good = norm * last.abs() <= _CONVERGED * found.abs()
        del duals
        vectors = turn.T @ basis[:used]
        self.lowest = vectors[(found / (vectors.square() @ metric)).argmin()].clone() if used else probe
        self._vectors = vectors[good]
        self._weights = found[good].abs().clamp_min(_FLOOR).reciprocal() - 1.0

    def __call__(self, vectors: Tensor) -> Tensor:
        """For vectors (m, P)."""
        return self._solve(vectors) + (vectors @ self._vectors.T * self._weights) @ self._vectors


class WrittenOut:
    """(H + s D⁻²)⁻¹ of a positive definite matrix H that is known in all entries, with a diagonal D.

    Where its condition allows it, products may be rounded to single precision, in half of the time.

    Parameters
    ----------
    inverse : Tensor, (P, P)
    single : Tensor, (P, P)
        The same for products that are rounded.
    """

    def __init__(self, inverse: Tensor, single: Tensor) -> None:
        self._inverse, self._single = inverse, single

    @classmethod
    def of(cls, hessian: Tensor, scale: Tensor, shift: float) -> WrittenOut | None:
        """None if H is not positive definite.

        Parameters
        ----------
        hessian : Tensor, (P, P)
        scale : Tensor, (P,)
            The diagonal of D.
        shift : float
            s: steps along directions with less curvature stay bounded.
        """
        turned = scale.unsqueeze(1) * hessian * scale
        if bool(torch.linalg.cholesky_ex(turned)[1]):
            return None
        turned.diagonal().add_(shift)
        inverse = scale.unsqueeze(1) * torch.cholesky_inverse(torch.linalg.cholesky(turned)) * scale
        return cls(inverse, inverse.float() if float(turned.norm()) <= _SINGLE * shift else inverse)

    def __call__(self, vectors: Tensor, rounded: bool = False) -> Tensor:
        """For vectors (m, P)."""
        inverse = self._single if rounded else self._inverse
        return (vectors.to(inverse) @ inverse).to(vectors)


def downward(matrix: Tensor) -> Tensor | None:
    """A direction v with vᵀAv ≤ 0 of a symmetric matrix A, (P, P), from the pivot where its factorization ends.

    None if A is positive definite.
    """
    end = int(torch.linalg.cholesky_ex(matrix)[1]) - 1
    if end < 0:
        return None
    found = matrix.new_zeros(len(matrix))
    root = torch.linalg.cholesky_ex(matrix[:end, :end])[0]
    found[:end] = -torch.cholesky_solve(matrix[:end, end : end + 1], root).squeeze(1)
    found[end] = 1.0
    return found
