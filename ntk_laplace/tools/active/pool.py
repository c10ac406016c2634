"""The posterior covariance at a pool of inputs, given the labels of those that were chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from ntk_laplace.jacobian import Jacobian
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.posterior import Posterior


class Pool:
    """Posterior covariance V of f at n inputs, and its whitened form A = SᵀVS, with S Sᵀ = Λ at the network's outputs.

    Each output is a response of unit noise then. A label at x tells ½ log det(I + A_xx) about the weights: exactly for
    a Gaussian likelihood, to second order in f otherwise.
    """

    def __init__(self, posterior: Posterior, rows: Jacobian) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.likelihood: Likelihood = posterior.likelihood.for_new_points()
            self.mean, self._rows, self._precision = rows.f, rows, posterior.posterior_precision
            self.root = self.likelihood.root(self.mean).to(rows.f)  # S, (n, C, R)
            self.covariance = self._precision.covariance_blocks(rows)  # V given the labels observed so far, (n, C, C)
        self._halves: list[Tensor] = []  # V_ni S_i (I + A_ii)^-½ of each observed i, given those before it, (n, C, R)

    def __len__(self) -> int:
        return len(self.mean)

    def blocks(self) -> Tensor:
        """A_nn given the labels observed so far, (n, R, R)."""
        return self.root.mT @ self.covariance @ self.root

    def columns(self, other: Pool, index: slice | Tensor = slice(None)) -> Tensor:
        """V_ni S_i between these inputs and some of another pool, (n, i, C, R'); of the posterior, without labels."""
        few, root = other._rows.subset(index), other.root[index]
        columns = [self._precision.cross_covariance(few.weighted(root[..., r : r + 1])).products(self._rows)
                   for r in range(root.shape[-1])]  # each (C, n, i)
        return torch.stack(columns, -1).permute(1, 2, 0, 3)

    def whitened_half(self) -> Tensor:
        """SᵀV_ni S_i (I + A_ii)^-½ of the input observed last, (n, R, R')."""
        return self.root.mT @ self._halves[-1]

    def observe(self, source: Pool, chosen: int) -> None:
        """Condition on the label of an input of `source`, whose covariance does not have it yet; `source` comes last.

        V_nn - V_ni S_i (I + A_ii)⁻¹ S_iᵀV_in, all of them given the labels before.
        """
        at = source.root[chosen]
        column = self.columns(source, torch.tensor([chosen], device=at.device))[:, 0]
        for half, of_chosen in zip(self._halves, source._halves, strict=True):
            column = column - half @ (of_chosen[chosen].mT @ at)
        factor = root_of(at.mT @ source.covariance[chosen] @ at)
        half = torch.linalg.solve_triangular(factor.mT, column, upper=True, left=False)
        self.covariance = self.covariance - half @ half.mT
        self._halves.append(half)


def root_of(blocks: Tensor) -> Tensor:
    """L with L Lᵀ = I + A of blocks (..., R, R)."""
    return torch.linalg.cholesky(blocks + torch.eye(blocks.shape[-1], dtype=blocks.dtype, device=blocks.device))


def log_det_half(blocks: Tensor) -> Tensor:
    """½ log det(I + A) of blocks (..., R, R)."""
    return root_of(blocks).diagonal(dim1=-2, dim2=-1).log().sum(-1)
