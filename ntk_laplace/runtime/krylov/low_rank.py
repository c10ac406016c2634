"""A low-rank factor of a positive semidefinite matrix from products with it, which it dominates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.linalg import symmetric_eigen
from ntk_laplace.runtime.panels import panels


@dataclass(frozen=True)
class LowRank:
    """F with FᵀF at most A, in the order of semidefinite matrices; rows of F are vectors.

    With C a root of A (A = CᵀC) and Q an orthonormal basis of C Ωᵀ, F = QᵀC: the Nyström approximation of A. The basis
    is that of orthogonal rows of F diag(s).

    Attributes
    ----------
    values : Tensor, (r,)
        Eigenvalues of diag(s) FᵀF diag(s), ascending: the squared lengths of the rows of F diag(s).
    factor : Tensor, (r, d)
        F.
    mixing : Tensor, (r, m)
        W with F = W Ω A and W Ω A Ωᵀ Wᵀ = I.
    """

    values: Tensor
    factor: Tensor
    mixing: Tensor


def low_rank(
    operator: Callable[[Tensor], Tensor], tests: Tensor, scale: Tensor, together: int | None = None,
    least: Tensor | None = None,
) -> LowRank:
    """Nyström approximation A Ωᵀ (Ω A Ωᵀ)⁻¹ Ω A for test vectors, the rows of Ω (m, d), from one product each.

    Directions in which Ω A Ωᵀ is zero up to rounding are left out, so that nothing is divided by rounding errors: r is
    then below m. The operator's result is overwritten: beside Ω there is one tensor of its size.

    Parameters
    ----------
    operator : callable
        A v for vectors (m, d).
    tests : Tensor, (m, d)
        Ω.
    scale : Tensor, (d,)
        s.
    together : int, optional
        F takes the place of Ω, with so many products at a time: Ω A Ωᵀ is symmetric, and the vectors whose products are
        still to come are all that one half of it needs.
    least : Tensor, (m,), optional
        Values of ω A ω up to which a test vector ω is left out: differences of larger vectors have a rounding of those.
    """
    if together is None:
        factor = operator(tests)
        core = (tests @ factor.T).double()
    else:
        factor, core = tests, tests.new_zeros(len(tests), len(tests), dtype=torch.float64)
        for some in panels(len(tests), 1, together):
            images = operator(tests[some])
            core[some.start :, some] = (tests[some.start :] @ images.T).double()
            factor[some] = images
            del images  # before the next
        core = core.tril() + core.tril(-1).T
    # an image is wrong by a share of its own size: in units of these sizes rounding is the same everywhere
    squares = core.diagonal()
    seen = squares > (0.0 if least is None else least)
    units = torch.where(seen, squares.clamp_min(0.0).sqrt(), torch.inf).reciprocal()
    values, vectors = torch.linalg.eigh(0.5 * (core + core.T) * units * units.unsqueeze(1))
    kept = values > 8.0 * len(values) * torch.finfo(tests.dtype).eps
    root = (units.unsqueeze(1) * vectors[:, kept] * values[kept].rsqrt()).to(tests)
    factor = turned_(root, factor)
    values, turn = symmetric_eigen(inner(factor, factor, scale.square()))
    clear = values > len(values) * torch.finfo(tests.dtype).eps * values[-1:].clamp_min(0.0)
    values, turn = values[clear], turn[:, clear]
    return LowRank(values, turned_(turn, factor), (root @ turn).T)


def inner(first: Tensor, second: Tensor, weights: Tensor) -> Tensor:
    """First diag(w) secondᵀ for vectors (m, d), (k, d), in tiles: (m, k)."""
    found = first.new_zeros(len(first), len(second))
    for tile in _tiles(first):
        found.addmm_(first[:, tile] * weights[tile], second[:, tile].T)
    return found


def turned_(turn: Tensor, vectors: Tensor) -> Tensor:
    """turnᵀ V, (r, d), for turn (m, r) with r at most m, in the place of the vectors V (m, d)."""
    rank = turn.shape[1]
    for tile in _tiles(vectors):
        vectors[:rank, tile] = turn.T @ vectors[:, tile]
    return vectors if rank == len(vectors) else vectors[:rank].clone()


def _tiles(vectors: Tensor) -> Iterator[slice]:
    return panels(vectors.shape[1], len(vectors) * vectors.element_size(), tuning.PRODUCT_BYTES)
