"""Products of output gradients and inputs over positions, without written-out rows where that is cheaper.

Output gradients b are (K, N, G, T, o), and inputs a are (N, G, T, i): K cotangents, N examples, G groups, T positions.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ntk_laplace.jacobian.blocks.base import steps
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.panels import panels


def factors_are_cheaper(b: Tensor, a: Tensor, count: int) -> bool:
    """Whether `count` products with factors take fewer multiply-adds than writing rows out and products with these.

    To write rows out takes as long as `tuning.WRITTEN_VECTORS` products with them, or longer.
    """
    k, t, i = b.shape[0], b.shape[3], a.shape[3]
    return count * t * (i + k) <= (count + tuning.WRITTEN_VECTORS) * k * i


def add_pushed_(out: Tensor, b: Tensor, a: Tensor, weights: Tensor, biases: Tensor | None) -> None:
    """Add Σ_t b_kntᵀ(V a_nt + v) for m vectors V (m, G, o, i) and v (m, G, o) to `out` (K, N, m).

    Per group this is one product with the inputs, and one with the output gradients.
    """
    for part in _example_panels(b, len(weights)):
        for g in range(b.shape[2]):
            own = a[part, g]  # (n, T, i)
            forward = own.flatten(0, 1) @ weights[:, g].flatten(0, 1).T
            forward = forward.view(*own.shape[:2], *weights[:, g].shape[:2])  # (n, T, m, o)
            if biases is not None:
                forward += biases[:, g]
            gradients = b[:, part, g].transpose(0, 1).flatten(2)  # (n, K, T o)
            out[:, part] += (gradients @ forward.transpose(2, 3).flatten(1, 2)).transpose(0, 1)


def add_pulled_(weights: Tensor, biases: Tensor, b: Tensor, a: Tensor, cotangents: Tensor) -> None:
    """Add Σ_nt (Σ_k c_kn b_knt) a_ntᵀ for m cotangents (K, N, m) to (m, G, o, i), and the sums without a to (m, G, o).

    These are the products of `add_pushed_` in reverse.
    """
    t, o = b.shape[3:]
    for part in _example_panels(b, len(weights)):
        mixing = cotangents[:, part].permute(1, 2, 0)  # (n, m, K)
        for g in range(b.shape[2]):
            backward = mixing @ b[:, part, g].transpose(0, 1).flatten(2)  # (n, m, T o)
            backward = backward.unflatten(2, (t, o)).transpose(1, 2).flatten(0, 1)  # (n T, m, o)
            biases[:, g] += backward.sum(0)
            weights[:, g] += (backward.flatten(1).T @ a[part, g].flatten(0, 1)).view(weights[:, g].shape)


def _example_panels(b: Tensor, vectors: int) -> Iterator[slice]:
    """Slices of examples whose products with one factor, (n, T, m, o), stay in cache for the product with the other."""
    each = vectors * b.shape[3] * b.shape[4] * b.element_size()
    return panels(b.shape[1], each, tuning.FACTOR_BYTES) if b.is_cpu else steps(b.shape[1], each, b.device)


def position_product(left: Tensor, right: Tensor) -> Tensor:
    """Σ_t left_kngto right_ngti -> (K, N, G*o*i), examples first in memory, the layout of `Dense`.

    One product per example covers all cotangents. It needs no copy if the cotangents are next to the examples in
    memory, which is how `Gradients` stores them.
    """
    k, n, g, t, o = left.shape
    if t == 1:
        return (left.squeeze(3).unsqueeze(-1) * right.squeeze(2).unsqueeze(-2)).flatten(2)
    few = _few_rows(k, left, right)
    left = left.permute(1, 2, 0, 4, 3).reshape(n, g, k * o, t)
    # read both operands contiguously: transposing a small result is cheaper
    rows = (right.mT @ left.mT).mT.contiguous() if few else left @ right
    i = right.shape[-1]
    rows = rows.view(n, g, k, o * i).transpose(1, 2).reshape(n, k, g * o * i)  # n may be 0
    return rows.transpose(0, 1)


def summed_product(left: Tensor, right: Tensor) -> Tensor:
    """Σ_nt left_ngto right_ngti -> (G, o, i)."""
    if left.shape[1:3] == (1, 1):
        return (left[:, 0, 0].T @ right[:, 0, 0]).unsqueeze(0)
    if _few_rows(1, left, right):
        return (right.mT @ left).sum(0).mT
    return torch.einsum("ngto,ngti->goi", left, right)


def separated(b: Tensor, a: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Σ_r (b_knᵀ l_mr)(a_nᵀ h_mr) for b (K, N, o), a (N, i), l (m, r, o) and h (m, r, i): (K, N, m)."""
    out = b.new_empty(*b.shape[:2], len(left))
    outputs, inner = left.flatten(0, 1).T, right.flatten(0, 1).T
    for part in steps(len(a), 2 * inner.shape[1] * b.element_size(), b.device):
        inputs = a[part] @ inner
        for k, own in enumerate(b[:, part]):
            out[k, part] = (own @ outputs).mul_(inputs).view(-1, *left.shape[:2]).sum(2)
    return out


def projected(b: Tensor, a: Tensor, weights: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """leftᵀ (w ∘ b aᵀ) right for b (K, N, G, o), a (N, G, i) and bases (G, o, p) and (G, i, q): (N, K, G, p, q)."""
    (k, n, g, o), i, p, q = b.shape, a.shape[2], left.shape[2], right.shape[2]
    out = b.new_empty(n, k, g, p, q)
    numbers = g * (k * o * p + q * (o + i) + k * p * q)  # per example
    for part in steps(n, numbers * b.element_size(), b.device):
        inner = weights @ (a[part].unsqueeze(-1) * right)  # (n, G, o, q)
        few = b[:, part].permute(1, 2, 3, 0).contiguous()  # small, unlike a copy of its products
        own = (few.unsqueeze(-1) * left.unsqueeze(2)).flatten(3)  # (n, G, o, K p)
        out[part] = (own.mT @ inner).unflatten(2, (k, p)).transpose(1, 2)
        del inner, own  # before the next are computed
    return out


def _few_rows(k: int, left: Tensor, right: Tensor) -> bool:
    """Whether the rows of k cotangents are small beside factors whose inputs are contiguous over positions."""
    t, o, i = left.shape[-2], left.shape[-1], right.shape[-1]
    return right.stride(-2) == 1 and t * (k * o + i) > 2 * k * o * i
