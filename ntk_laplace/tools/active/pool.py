"""The posterior covariance at a pool of inputs, given the labels of those that were chosen."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ntk_laplace.errors import NumericalError
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.posterior import Posterior
from ntk_laplace.runtime.lower_triangle import more_digits


class Pool:
    """Posterior covariance V of f at n inputs, and its whitened form A = SᵀVS, with S Sᵀ = Λ at the network's outputs.

    Each output is a response of unit noise then. A label at x tells ½ log det(I + A_xx) about the weights: exactly for
    a Gaussian likelihood, to second order in f otherwise.
    """

    def __init__(self, posterior: Posterior, rows: Jacobian, likelihood: Likelihood) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.likelihood, self._model = likelihood, posterior.fitted.model
            self.mean, self._rows, self._precision = rows.f, rows, posterior.posterior_precision
            self.root = self.likelihood.root(self.mean).to(rows.f)  # S, (n, C, R)
            self.covariance = self._precision.covariance_blocks(rows)  # V given the labels observed so far, (n, C, C)
        self._halves: list[Tensor] = []  # V_ni S_i (I + A_ii)^-½ of each observed i, given those before it, (n, C, R)

    def __len__(self) -> int:
        return len(self.mean)

    def blocks(self) -> Tensor:
        """A_nn given the labels observed so far, (n, R, R)."""
        return self.root.mT @ self.covariance @ self.root

    def crossed(self, other: Pool) -> Tensor:
        """A_ni between these inputs and another pool's, without labels, (n, R, i, R'); MemoryBudgetError if too many.

        For each i the last dimension is a column.
        """
        shape = len(self), self.root.shape[-1], len(other), other.root.shape[-1]
        self._model.require_memory(torch.Size(shape).numel() * self.root.element_size(),
                                   f"covariances of {shape[0]:,} inputs and {shape[2]:,} targets",
                                   'Pass fewer targets or a part of the pool, or use method="information".')
        found = self.root.new_empty(shape)
        for place, column in zip(found.unbind(-1), self._columns(other), strict=True):
            place.copy_(torch.einsum("ncr,cni->nri", self.root, column))
        return found

    def _columns(self, other: Pool, index: slice | Tensor = slice(None)) -> Iterator[Tensor]:
        """V_ni S_i between these inputs and some of another pool, without labels: (C, n, i) for each column of S."""
        few, root = other._rows.subset(index), other.root[index]
        for r in range(root.shape[-1]):
            yield self._precision.cross_covariance(few.weighted(root[..., r : r + 1])).products(self._rows)

    def whitened_half(self) -> Tensor:
        """SᵀV_ni S_i (I + A_ii)^-½ of the input observed last, (n R, R')."""
        return (self.root.mT @ self._halves[-1]).flatten(0, 1)

    def observe(self, source: Pool, chosen: int) -> None:
        """Condition on the label of an input of `source`, whose covariance does not have it yet; `source` comes last.

        V_nn - V_ni S_i (I + A_ii)⁻¹ S_iᵀV_in, all of them given the labels before.
        """
        at = source.root[chosen]
        one = torch.tensor([chosen], device=at.device)
        column = torch.stack([part[..., 0].T for part in self._columns(source, one)], -1)  # (n, C, R)
        for half, of_chosen in zip(self._halves, source._halves, strict=True):
            column = column - half @ (of_chosen[chosen].mT @ at)
        factor = root_of(at.mT @ source.covariance[chosen] @ at)
        half = torch.linalg.solve_triangular(factor.mT, column, upper=True, left=False)
        self.covariance = self.covariance - half @ half.mT
        self._halves.append(half)


def root_of(blocks: Tensor) -> Tensor:
    """L with L Lᵀ = I + A of blocks (..., R, R); NumericalError where the rounding of A is larger than I."""
    eye = torch.eye(blocks.shape[-1], dtype=blocks.dtype, device=blocks.device)
    factor, failed = torch.linalg.cholesky_ex(blocks + eye)
    if bool(failed.any()):
        raise NumericalError("covariances of f whose rounding is below the noise of the labels",
                             f"larger rounding ({blocks.dtype})", more_digits(blocks.dtype))
    return factor


def log_det_half(blocks: Tensor) -> Tensor:
    """½ log det(I + A) of blocks (..., R, R)."""
    return root_of(blocks).diagonal(dim1=-2, dim2=-1).log().sum(-1)
