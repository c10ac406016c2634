"""Joint removal of groups of training points, a different group for each prediction."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ntk_laplace.jacobian import Jacobian
from ntk_laplace.jacobian.gram import cross_gram
from ntk_laplace.posterior.explain.algebra import OutsideColumns, ResidualParts
from ntk_laplace.structures import FittedModel
from ntk_laplace.structures.what_if import HIGH_LEVERAGE, ChangedPrecision, rows_of


class JointRemoval:
    """Change of predictions if a group of training points is removed: one Newton step, in function space.

    Parameters
    ----------
    fitted : FittedModel
        Of a structure that keeps the Jacobian.
    """

    def __init__(self, fitted: FittedModel) -> None:
        self._space, self._parts = fitted.function_space, ResidualParts.of(fitted)
        self._columns = OutsideColumns(self._space, self._parts)

    def effects(self, test: Jacobian, groups: Sequence[Tensor]) -> Tensor:
        """-V_xG (I - Λ_GV_GG)⁻¹ r_G for each input's group G, (n, C).

        As for a single point, -V_xGS_G [B⁻¹]_GG⁻¹ ρ_G for r_G = S_Gρ_G. A part r⊥ outside the range of S_G adds
        V_xG r⊥ = K_xG r⊥ - K_xS D and S_G [B⁻¹]_GG⁻¹ D_G, with D = B⁻¹SᵀK_G r⊥.

        Parameters
        ----------
        test : Jacobian
            Rows at the n inputs.
        groups : sequence of Tensor
            Indices of the removed training points, per input.
        """
        space, parts = self._space, self._parts
        n, r = space.weighted.num_examples, space.weighted.num_cotangents
        to_train = space.cross(test).T  # K_xS
        seen = self._columns.seen(test, to_train)
        to_train = to_train.reshape(test.num_examples, -1, n * r)
        changes = []
        for i, group in enumerate(groups):
            places = (group[:, None] * r + torch.arange(r, device=group.device)).flatten()
            outside = torch.isin(parts.places, group)
            amplified = parts.inside[group] + self._columns.solved[group][:, :, outside].sum(2)  # ρ_G + D_G
            columns = space.inverse[:, places]
            inside = to_train[i] @ (columns @ torch.linalg.solve(columns[places], amplified.flatten()))
            changes.append(-(seen[i, outside].sum(0) + inside))
        return torch.stack(changes)


class GroupRemoval:
    """Joint removal in weight space: rows of the groups are computed and subtracted from the structure's precision.

    Parameters
    ----------
    fitted : FittedModel
    members : Tensor
        Training points that may be removed, ascending; few, because their rows are stored.
    """

    def __init__(self, fitted: FittedModel, members: Tensor) -> None:
        self._fitted, self._members = fitted, members
        self._rows = rows_of(fitted, members)
        self._residual = fitted.residual()[members]
        with torch.no_grad():
            self._root = fitted.root()[members]

    def effects(self, test: Jacobian, groups: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """-V_xG (I - Λ_GV_GG)⁻¹ r_G for each input's group G, with the structure's V.

        Parameters
        ----------
        test : Jacobian
            Rows at the n inputs.
        groups : sequence of Tensor
            Indices of the removed training points, per input.

        Returns
        -------
        change : Tensor, (n, C)
        leverage : Tensor, (n,)
            Largest eigenvalue of S_GᵀV_GGS_G: the joint leverage of the group.
        trusted : Tensor of bool, (n,)
            False if the leverage is too large for an approximate curvature: nothing is then subtracted, and the
            change is the first-order one, -V_xG r_G.
        """
        found = [self._one(test.subset(slice(i, i + 1)), group) for i, group in enumerate(groups)]
        changes, leverages, trusted = zip(*found, strict=True)
        return torch.cat(changes), torch.tensor(leverages), torch.tensor(trusted)

    def _one(self, test: Jacobian, group: Tensor) -> tuple[Tensor, float, bool]:
        if len(group) == 0:
            return torch.zeros_like(test.f), 0.0, True
        fitted, here = self._fitted, torch.searchsorted(self._members, group)
        rows, root = self._rows.subset(here), self._root[here]
        without = ChangedPrecision(fitted.precision, rows.weighted(root), -torch.ones_like(root[:, 0]), fitted.prior,
                                   fitted.settings.memory_budget,
                                   None if fitted.structure.spec.exact else HIGH_LEVERAGE)
        step = without.solve(rows.vjp(self._residual[here].to(rows.f), fitted.network.shapes))
        return -test.jvp(fitted.network.unflatten(step)), without.leverage, not without.partial

    def contributions(self, test: Jacobian, output: Tensor) -> Tensor:
        """k(x, x_j) r_j of one output of each input, for all members, (n, m)."""
        fitted = self._fitted
        chosen = one_hot(output, test.f.shape[1]).to(test.f).unsqueeze(-1)
        own = self._rows.weighted(self._residual.to(self._rows.f).unsqueeze(-1))
        return cross_gram(test.weighted(chosen), own, fitted.prior.variances())
