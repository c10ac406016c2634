"""Stochastic Lanczos quadrature with lower and upper values for every probe."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Quadrature:
    """Nodes and weights of zᵀ f(A) z = Σ_i w_i f(t_i) for each probe z, by Lanczos with full orthogonalization.

    Attributes
    ----------
    nodes, weights : Tensor, (m, k)
        Gauss. For f = log it is an upper value: the even derivatives of the logarithm are negative.
    radau_nodes, radau_weights : Tensor, (m, k + 1)
        Gauss-Radau with one node at `bound`, which is at most the smallest eigenvalue. For f = log it is a lower value.
    """

    nodes: Tensor
    weights: Tensor
    radau_nodes: Tensor
    radau_weights: Tensor

    def bracket(self, function: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """The Radau and the Gauss value of zᵀ f(A) z, (m,) each: lower and upper for a logarithm."""
        return ((function(self.radau_nodes) * self.radau_weights).sum(1), (function(self.nodes) * self.weights).sum(1))


def lanczos(
    operator: Callable[[Tensor], Tensor], probes: Tensor, bound: float, steps: int,
    enough: Callable[[Quadrature], bool],
) -> Quadrature:
    """Run Lanczos for all probes together, until `enough` says that the quadrature has converged.

    Parameters
    ----------
    operator : callable
        A v for vectors (m, d); A is symmetric, and no eigenvalue is below `bound`.
    probes : Tensor, (m, d)
    bound : float
    steps : int
        Most products.
    enough : callable
        Asked after every step.
    """
    norms = probes.norm(dim=1)
    basis = [probes / norms.unsqueeze(1)]
    diagonal: list[Tensor] = []
    beside: list[Tensor] = []
    tiny = torch.finfo(probes.dtype).eps * math.sqrt(probes.shape[1])
    while True:
        image = operator(basis[-1])
        diagonal.append(_inner(image, basis[-1]))
        size = image.norm(dim=1)
        for _ in range(2):  # the second pass removes what rounding left of the first
            for vector in basis:
                image.addcmul_(_inner(image, vector).unsqueeze(1), vector, value=-1)
        # an invariant subspace: the residual is rounding, and the quadrature is exact
        residual = image.norm(dim=1)
        residual = torch.where(residual > tiny * size, residual, torch.zeros_like(residual))
        found = _quadrature(torch.stack(diagonal, 1).double(), [b.double() for b in (*beside, residual)],
                            norms.double().square(), bound)
        if len(diagonal) >= min(steps, probes.shape[1]) or not bool(residual.any()) or enough(found):
            return found
        beside.append(residual)
        basis.append(image / residual.clamp_min(torch.finfo(probes.dtype).tiny).unsqueeze(1))


def _inner(first: Tensor, second: Tensor) -> Tensor:
    """Of each row with that of the other, (m,)."""
    return torch.einsum("md,md->m", first, second)


def _quadrature(diagonal: Tensor, beside: list[Tensor], mass: Tensor, bound: float) -> Quadrature:
    """Gauss from the tridiagonal matrix T, (m, k, k); Radau from T with one more row (Golub and Meurant, 6.2.2)."""
    k = diagonal.shape[1]
    matrix = torch.diag_embed(diagonal)
    if k > 1:
        off = torch.stack(beside[:-1], 1)
        matrix += torch.diag_embed(off, 1) + torch.diag_embed(off, -1)
    nodes, vectors = torch.linalg.eigh(matrix)
    last = beside[-1]
    # the last diagonal entry that makes `bound` an eigenvalue: bound + β² [(T - bound I)⁻¹]_kk; rounding may put an
    # eigenvalue of T on the bound or below it
    above = torch.maximum(nodes - bound, torch.finfo(nodes.dtype).eps * nodes[:, -1:].abs())
    entry = last.square() * (vectors[:, -1].square() / above).sum(1)
    larger = torch.zeros(len(matrix), k + 1, k + 1, dtype=matrix.dtype, device=matrix.device)
    larger[:, :k, :k] = matrix
    larger[:, k, k] = bound + entry
    larger[:, k, k - 1] = larger[:, k - 1, k] = last
    radau_nodes, radau_vectors = torch.linalg.eigh(larger)
    return Quadrature(nodes, vectors[:, 0].square() * mass.unsqueeze(1), radau_nodes,
                      radau_vectors[:, 0].square() * mass.unsqueeze(1))
