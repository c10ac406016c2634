"""Means and variances of f at new inputs without each single training point, in tiles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ntk_laplace.curvature.posterior_precision import require_finite
from ntk_laplace.jacobian import Jacobian, grouped
from ntk_laplace.posterior.explain import bytes_of_each
from ntk_laplace.posterior.explain.algebra import Removals, removal_terms
from ntk_laplace.runtime import tuning
from ntk_laplace.structures import FittedModel


class WithoutEach:
    """Moments of f at new inputs without each training point: one Newton step of the linearized model.

    f_-i(x) = f(x) - V_xi (I - Λ_iV_ii)⁻¹ r_i, and, if `variances` are needed,
    V_-i(x) = V_xx + V_xi (I - Λ_iV_ii)⁻¹ Λ_i V_ix. The curvature is exact.
    """

    def __init__(self, fitted: FittedModel, variances: bool) -> None:
        self._fitted, self._residual, self._variances = fitted, fitted.residual(), variances
        self._columns: Tensor | None = None  # of the training points that are `_known`
        self._index = torch.arange(fitted.num_examples, device=self._residual.device)
        self._known = torch.zeros_like(self._index, dtype=torch.bool)
        with torch.no_grad():
            self._removals = Removals(fitted) if fitted.structure.spec.keeps_jacobian else None

    @property
    def bytes_of_each(self) -> int:
        """Bytes of the tile of one input, and of its intermediate results."""
        n, c = self._fitted.points.f.shape
        if self._removals is not None:
            return bytes_of_each(self._fitted)
        size = self._residual.element_size()
        return c * size * (6 * n + 2 * self._fitted.network.num_parameters)

    def tiles(self, chunks: Iterable[Jacobian]) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """f (n, C), f_-i (n, N, C) and the diagonals of V_-i (n, N, C) at the rows of each chunk.

        Without stored rows, each tile is a pass over the training data, which chunks share as memory allows.
        """
        if self._removals is None:
            chunks = grouped(chunks, attrgetter("num_examples"), max(1, tuning.EXPLAINED_BYTES // self.bytes_of_each))
        for test in chunks:
            with torch.no_grad():
                moved, widened = self._changes(test)
                if widened is not None:
                    widened.add_(require_finite(self._fitted.precision.variances_of_outputs(test)).unsqueeze(1))
                tile = test.f, moved.add_(test.f.unsqueeze(1)), widened
            del test, moved, widened  # before the rows of the next chunk are computed
            yield tile
            del tile

    def _changes(self, test: Jacobian) -> tuple[Tensor, Tensor | None]:
        """f_-i - f and V_-i - V_xx, (n, N, C).

        In weight space they are products of V_·x with the training points' rows, batch by batch.
        """
        if self._removals is not None:
            return self._removals.effects(test) if self._variances else (self._removals.changes(test), None)
        fitted, (n, c) = self._fitted, test.f.shape
        across = []
        for output in range(c):
            chosen = one_hot(torch.tensor(output, device="cpu"), c).to(test.f).expand(n, c).unsqueeze(-1)
            across.append(fitted.precision.cross_covariance(test.weighted(chosen)))
        moved = test.f.new_zeros(n, fitted.num_examples, c)
        widened = torch.zeros_like(moved) if self._variances else None
        for here, rows in fitted.own_rows(self._index):
            weighted = rows.weighted(self._of_training(here, rows))
            for output, one in enumerate(across):
                seen = one.products(weighted)  # (1 + R, m, n)
                moved[:, here, output] = -seen[0].T
                if widened is not None:
                    widened[:, here, output] = seen[1:].square().sum(0).T
        fitted.row_reducer.sum_(*(tile for tile in (moved, widened) if tile is not None))
        return moved, widened

    def _of_training(self, here: slice | Tensor, rows: Jacobian) -> Tensor:
        """(I - Λ_iV_ii)⁻¹ times r_i, and, for variances, a square root of (I - Λ_iV_ii)⁻¹ Λ_i beside it, (m, C, 1 + R).

        They are kept: each tile reads them.
        """
        if not bool(self._known[here].all()):
            root = self._fitted.root()[here]
            out = removal_terms(self._fitted.precision.removal_blocks(rows, root), root, True)
            pull = out.amplified(self._residual[here])
            found = torch.cat([pull, out.spread()], -1) if self._variances else pull
            if self._columns is None:
                self._columns = found.new_empty(len(self._residual), *found.shape[1:])
            self._columns[here], self._known[here] = found, True
        assert self._columns is not None
        return self._columns[here]
