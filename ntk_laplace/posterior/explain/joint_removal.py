"""Joint removal in weight space of groups of training points, a different group for each prediction."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ntk_laplace.jacobian import Jacobian
from ntk_laplace.jacobian.gram import cross_gram
from ntk_laplace.structures import FittedModel
from ntk_laplace.structures.what_if import HIGH_LEVERAGE, ChangedPrecision, rows_of


class GroupRemoval:
    """Joint removal in weight space: rows of the groups are computed and subtracted from the structure's precision.

    The members, ascending, are those that may be removed: few, because their rows are stored.
    """

    def __init__(self, fitted: FittedModel, members: Tensor) -> None:
        self._fitted, self._members = fitted, members
        self._rows = rows_of(fitted, members)
        self._residual = fitted.residual()[members]
        with torch.no_grad():
            self._root = fitted.root()[members]

    def effects(self, test: Jacobian, groups: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """-V_xG (I - Λ_GV_GG)⁻¹ r_G for the group G of each of n inputs, (n, C), with the structure's V.

        With it, (n,), the joint leverage of the group, the largest eigenvalue of S_GᵀV_GGS_G; and whether it is not too
        large for an approximate curvature. If it is, nothing is subtracted, and the change is that of first order,
        -V_xG r_G.
        """
        found = [self._one(test.subset(slice(i, i + 1)), group) for i, group in enumerate(groups)]
        changes, leverages, trusted = zip(*found, strict=True)
        return torch.cat(changes), torch.tensor(leverages, device="cpu"), torch.tensor(trusted, device="cpu")

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

    def contributions(self, test: Jacobian, output: Tensor, residual: Tensor) -> Tensor:
        """k(x, x_j) r_j of one output of each input, for all members, (n, m), with `residual` of all points, (N, C)."""
        fitted = self._fitted
        chosen = one_hot(output, test.f.shape[1]).to(test.f).unsqueeze(-1)
        own = self._rows.weighted(residual[self._members].to(self._rows.f).unsqueeze(-1))
        return cross_gram(test.weighted(chosen), own, fitted.prior.variances())
