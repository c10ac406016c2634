"""Preconditioned conjugate gradients for many right-hand sides that share each product."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ntk_laplace.errors import NumericalError

_ROUNDING = 64  # units of it in a product, whose sums are over the data


def conjugate_gradients(
    operator: Callable[[Tensor], Tensor], right: Tensor, precondition: Callable[[Tensor], Tensor], tolerance: float,
    norm: float, steps: int,
) -> tuple[Tensor, Tensor]:
    """Solve A x = b for each row b of `right`.

    Parameters
    ----------
    operator : callable
        A v for vectors (m, d); A is symmetric and positive definite.
    right : Tensor, (m, d)
    precondition : callable
        M⁻¹ v for vectors (m, d), with M close to A.
    tolerance : float
        Each row ends where its residual, recomputed from x, is at most this share of b, or where it falls no further
        and is rounding, a few units of it in A x: x then solves a system whose A differs by that, as a factorization's
        solution does.
    norm : float
        Of A, at most.
    steps : int
        Most products.

    Returns
    -------
    solution : Tensor, (m, d)
    residual : Tensor, (m, d)
        b - A x, of the same.

    Raises
    ------
    NumericalError
        If a row does not get there.
    """
    solution, residual, size, used = torch.zeros_like(right), right.clone(), right.norm(dim=1), 0
    left = (size > 0).nonzero().squeeze(1)
    goal = 0.5 * tolerance * size

    def small(r: Tensor, product: Tensor, left: Tensor) -> Tensor:
        return ~(r.norm(dim=1) > goal[left])  # NaN ends a row

    while len(left):
        before = residual[left].norm(dim=1)
        used += _descend(operator, residual, solution, left, precondition, small, steps - used)
        # the recursive residual drifts from the true one: where the true one is not small enough, start again from it
        residual[left] = right[left] - operator(solution[left])
        now, used = residual[left].norm(dim=1), used + 1
        going = now > tolerance * size[left]
        ended = going & ((now > 0.5 * before) | (used >= steps))
        rounding = _ROUNDING * torch.finfo(right.dtype).eps * norm * solution[left].norm(dim=1)
        if bool((ended & (now > rounding)).any()):
            raise NumericalError(f"a solve with a residual of {tolerance:.1g} of the right-hand side",
                                 f"{float((now / size[left]).max()):.2g} after {used} products", _remedy(right))
        left = left[going & ~ended]
    return solution, residual


def nearly_solved(
    operator: Callable[[Tensor], Tensor], right: Tensor, precondition: Callable[[Tensor], Tensor], share: float,
    steps: int,
) -> Tensor:
    """Solve A x = b for each row b of `right`, with an error e of (eᵀAe)^½ at most this share of (bᵀA⁻¹b)^½.

    With the residual r, eᵀAe = rᵀA⁻¹r is at most rᵀM⁻¹r, and bᵀA⁻¹b is at least bᵀx.

    Parameters
    ----------
    operator, right, steps
        As for `conjugate_gradients`.
    precondition : callable
        M⁻¹ v for vectors (m, d), with A - M positive semidefinite.
    share : float
        Well above rounding: residuals are not computed again.

    Raises
    ------
    NumericalError
        If a row does not get there.
    """
    solution, left = torch.zeros_like(right), (right != 0).any(1).nonzero().squeeze(1)
    if not len(left):
        return solution

    def small(r: Tensor, product: Tensor, left: Tensor) -> Tensor:
        return ~(product > share**2 * (right[left] * solution[left]).sum(1))  # NaN ends a row

    used = _descend(operator, right, solution, left, precondition, small, steps)
    if used > steps:
        raise NumericalError(f"a solve with an error of {share:.1g} of its norm",
                             f"a larger one after {steps} products", _remedy(right))
    return solution


def _descend(
    operator: Callable[[Tensor], Tensor], residual: Tensor, solution: Tensor, left: Tensor,
    precondition: Callable[[Tensor], Tensor], small: Callable[[Tensor, Tensor, Tensor], Tensor], steps: int,
) -> int:
    """Steps of conjugate gradients from the present residuals; `solution` changes in place; the number of products.

    One more than `steps` where these were not enough. `small` says which residuals r are, from r, rᵀM⁻¹r and the rows.
    """
    r = residual[left]
    z = precondition(r)
    direction, product = z.clone(), (r * z).sum(1)
    for used in range(max(1, steps)):
        image = operator(direction)
        size = product / (direction * image).sum(1)
        solution[left] += size.unsqueeze(1) * direction
        r -= size.unsqueeze(1) * image
        z, before = precondition(r), product
        product = (r * z).sum(1)
        going = ~small(r, product, left)
        if not bool(going.any()):
            return used + 1
        direction = z + (product / before).unsqueeze(1) * direction
        if not bool(going.all()):  # columns that have converged need no more products
            left, r, direction, product = left[going], r[going], direction[going], product[going]
    return max(1, steps) + 1


def _remedy(right: Tensor) -> str:
    double = "" if right.dtype == torch.float64 else "dtype=torch.float64, "
    return f"Use {double}a larger prior precision, or a larger rank."
