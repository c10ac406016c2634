"""Prequential evidence in function space: of the first n points of any order, and of each point given those before it.

The Laplace-GGN replaces the likelihood of point i by a Gaussian factor in δ_i = J_i(θ - θ*),
t_i = exp(log p(y_i | f_i) + r_iᵀδ_i - ½ δ_iᵀΛ_iδ_i). With the prior of δ, N(-d, K), d = J(θ* - μ0), the evidence of
any set A of points is the Gaussian integral Z(A) = E[Π_A t_i], as in [T20] Theorem 3.3:

    log Z(A) = Σ_A log p(y_i | f_i) + ½ rᵀKr - dᵀr - ½ log det B - ½ ‖L⁻¹Sᵀ(Kr - d)‖²,   B = I + SᵀKS = L Lᵀ,

all restricted to A. Λ is never inverted. For A = all data this is the evidence with correction ([I21] A.1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ntk_laplace.jacobian.gram import cross_gram, gram
from ntk_laplace.runtime.linalg import cholesky_, cholesky_log_det, solve_lower
from ntk_laplace.structures import FittedModel


@dataclass(frozen=True)
class PrequentialEvidence:
    """Terms of the evidence of points in any order; a new order only selects rows and columns."""

    log_prob: Tensor  # log p(y_i | f_i), (N,)
    whitened: Tensor  # SᵀKS, (N, R, N, R)
    pull: Tensor  # terms of SᵀK r, one for each point of r, (N, R, N)
    energy: Tensor  # terms of rᵀK r, one for each pair of points, (N, N)
    back: Tensor  # Sᵀd, (N, R)
    work: Tensor  # terms of dᵀr, (N,)

    @classmethod
    def of(cls, fitted: FittedModel) -> PrequentialEvidence:
        """Compute the terms from the stored rows of a fit."""
        space, points = fitted.function_space, fitted.points
        n, k = space.weighted.num_examples, space.weighted.num_cotangents
        fitted.model.require_memory(2 * (n * k) ** 2 * points.f.element_size(),
                                    f"B of {n * k:,} x {n * k:,} in the data's order and in another",
                                    "Use fewer points, or a structured posterior.")
        residual = fitted.residual()
        with torch.no_grad():
            log_prob = points.log_prob(fitted.likelihood)
            distance = fitted.jvp(fitted.from_prior_mean)  # d = J(θ* - μ0)
        own = space.rows.weighted(residual.unsqueeze(-1))
        return cls(log_prob, gram(space.weighted, space.variances).view(n, k, n, k),
                   cross_gram(space.weighted, own, space.variances).view(n, k, n), gram(own, space.variances),
                   torch.einsum("ncr,nc->nr", space.root, distance), (distance * residual).sum(-1))

    def _factor(self, order: Tensor) -> Tensor:
        """Cholesky factor L of B with the points in this order."""
        size = len(order) * self.back.shape[1]
        matrix = self.whitened[order][:, :, order].reshape(size, size)
        matrix.diagonal().add_(1.0)
        return cholesky_(matrix)

    def evidence(self, order: Tensor) -> Tensor:
        """log Z of the points in `order` ([T20] Theorem 3.3), nats."""
        if len(order) == 0:
            return self.log_prob.new_zeros(())
        order = order.to(self.log_prob.device)
        factor = self._factor(order)
        pull = self.pull[order][:, :, order].sum(-1) - self.back[order]  # Sᵀ(Kr - d)
        moved = solve_lower(factor, pull.reshape(-1, 1))
        linear = 0.5 * self.energy[order][:, order].sum() - self.work[order].sum()
        return self.log_prob[order].sum() + linear - 0.5 * cholesky_log_det(factor) - 0.5 * moved.square().sum()

    def increments(self, order: Tensor) -> Tensor:
        """log Z(first n) - log Z(first n - 1) for each n, (N,), from one factorization.

        The leading blocks of L are the factors of the leading blocks of B, and forward substitution uses only earlier
        rows. So the columns W = L⁻¹SᵀK r, one for each point of r, and L⁻¹Sᵀd suffice for all prefixes of the data.
        With a = E[δ_n] and V = Cov[δ_n] given the earlier points,
        log E[t_n] = log p + aᵀr + ½ rᵀVr - ½ log det(I + SᵀVS) - ½ ‖(L⁻¹Sᵀ(Kr - d))_n‖².
        """
        order = order.to(self.log_prob.device)
        n, k = len(order), self.back.shape[1]
        factor = self._factor(order)
        columns = self.pull[order][:, :, order].reshape(n * k, n)
        columns = solve_lower(factor, columns).view(n, k, n)  # W
        start = solve_lower(factor, self.back[order].reshape(n * k, 1)).view(n, k, 1)
        so_far = columns.cumsum(-1) - start  # L⁻¹Sᵀ(Kr - d), with r only up to each column's point
        own = so_far.diagonal(dim1=0, dim2=2).T  # in the rows of that point, (N, R)
        energy = self.energy[order][:, order]
        prior = energy.tril(-1).sum(1) - self.work[order] + 0.5 * energy.diagonal()  # rᵀ(K r - d) + ½ rᵀKr
        earlier = torch.ones(n, n, dtype=torch.bool, device=columns.device).triu(1).unsqueeze(1)  # rows before n
        seen = (columns * (so_far - 0.5 * columns) * earlier).sum((0, 1))  # minus what the earlier points explain
        log_det = factor.diagonal().log().view(n, k).sum(1)  # ½ log det(I + SᵀVS)
        return self.log_prob[order] + prior - seen - log_det - 0.5 * own.square().sum(1)
