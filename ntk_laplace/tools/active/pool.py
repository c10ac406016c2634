"""The pool in whitened form: rows of SᵀJ, with S Sᵀ the output curvature at the network's outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from ntk_laplace.jacobian import Jacobian
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.posterior import Posterior

__all__ = ["Pool", "log_det_half"]


class Pool:
    """Rows of SᵀJ at inputs, made of those of J, and A = SᵀVS of their posterior covariance V.

    Each output is a response of unit noise then. A label at x tells ½ log det(I + A_xx) about the weights: exactly for
    a Gaussian likelihood, to second order in f otherwise.

    Attributes
    ----------
    mean : Tensor, (n, C)
        Outputs of the (linearized) network.
    covariance : Tensor, (n, C, C)
        V at each input.
    root : Tensor, (n, C, R)
        S.
    """

    def __init__(self, posterior: Posterior, rows: Jacobian) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.likelihood: Likelihood = posterior.likelihood.for_new_points()
            self.mean, self._rows, self._precision = rows.f, rows, posterior.posterior_precision
            self.root = self.likelihood.root(self.mean).to(rows.f)
            self.covariance = self._precision.covariance_blocks(rows)

    def __len__(self) -> int:
        return len(self.mean)

    @property
    def rank(self) -> int:
        """R."""
        return self.root.shape[-1]

    def rows_at(self, index: Tensor | slice) -> tuple[Jacobian, Tensor]:
        """Rows of J, and S, at some of the inputs."""
        return self._rows.subset(index), self.root[index]

    def blocks(self) -> Tensor:
        """A_nn, (n, R, R)."""
        return self.root.mT @ self.covariance @ self.root

    def cross(self, other: Pool, index: Tensor | slice = slice(None)) -> Tensor:
        """A_ni between these inputs and some of another pool, (n, i, R, R')."""
        with torch.no_grad():
            few, root = other.rows_at(index)
            whitened: Jacobian = self._rows.weighted(self.root)
            columns = [
                self._precision.cross_covariance(few.weighted(root[..., r : r + 1])).products(whitened)
                for r in range(root.shape[-1])
            ]  # each (R, n, i)
            return torch.stack(columns, -1).permute(1, 2, 0, 3)


def log_det_half(blocks: Tensor) -> Tensor:
    """½ log det(I + A) of positive semidefinite blocks (..., R, R)."""
    eye = torch.eye(blocks.shape[-1], dtype=blocks.dtype, device=blocks.device)
    factor = torch.linalg.cholesky(blocks + eye)
    found: Tensor = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return found
