"""Leaving out several training points at once, another group for every prediction."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ntk_laplace.curvature import FunctionSpace
from ntk_laplace.factors import Rows
from ntk_laplace.gram import cross_gram

__all__ = ["JointRemoval"]


class JointRemoval:
    """Change of predictions when a group of training points leaves, in one Newton step.

    Parameters
    ----------
    space : FunctionSpace
    residual : Tensor, (N, C)
        r at the training points.
    """

    def __init__(self, space: FunctionSpace, residual: Tensor) -> None:
        self._space = space
        n, r = space.weighted.num_examples, space.weighted.num_seeds
        own = space.rows.weighted(residual.unsqueeze(-1))
        self._columns = cross_gram(space.weighted, own, space.variances).view(n * r, n)  # SᵀKr, one column per point

    def effects(self, test: Rows, contributions: Tensor, groups: Sequence[Tensor]) -> Tensor:
        """-V_xG (I - Λ_GV_GG)⁻¹ r_G for each input's own group G, (n, C).

        Written, as for a single point, without an inverse of Λ: V_xG r_G is the group's contribution less K_xS D with
        D = B⁻¹SᵀK_G r_G, and (I - Λ_GV_GG)⁻¹ r_G = r_G + S_G [B⁻¹]_GG⁻¹ D_G.

        Parameters
        ----------
        test : Rows
            Of the n inputs.
        contributions : Tensor, (n, N, C)
            k(x, x_i) r_i.
        groups : sequence of Tensor
            Training indices that leave.
        """
        space = self._space
        n, r = space.weighted.num_examples, space.weighted.num_seeds
        to_train = space.cross(test).T.reshape(test.num_examples, -1, n * r)  # K_xS
        changes = []
        for i, group in enumerate(groups):
            places = (group[:, None] * r + torch.arange(r, device=group.device)).flatten()
            solved = space.inverse @ self._columns[:, group].sum(1)  # D
            seen = contributions[i, group].sum(0) - to_train[i] @ solved  # V_xG r_G
            columns = space.inverse[:, places]
            amplified = torch.linalg.solve(columns[places], solved[places])
            changes.append(-(seen + to_train[i] @ (columns @ amplified)))
        return torch.stack(changes)
