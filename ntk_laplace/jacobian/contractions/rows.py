"""Contractions of rows that are written out: as they are, for each tile, or a few columns at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from torch import Tensor

from ntk_laplace.jacobian.blocks import Block, Cluster, Dense, Outer, written_out
from ntk_laplace.jacobian.contractions.base import Contraction
from ntk_laplace.jacobian.contractions.factored import same_factors
from ntk_laplace.jacobian.contractions.tile import Tile, Variance, Variances, interleaved, scaled, tile_rows
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.panels import panels
from ntk_laplace.runtime.resources import buffer_bytes


class Rows(Contraction[Dense]):
    """Both sides are matrices of written-out rows: one matrix product per run of columns of one prior variance."""

    stage = 0

    @classmethod
    def applies(cls, left: Cluster, right: Cluster, variances: Variances) -> bool:
        (one, *more), (two, *others) = left, right
        alone = not more and not others
        return alone and isinstance(one, Dense) and isinstance(two, Dense) and one.spans == two.spans

    @property
    def cost(self) -> int:
        return self.cost_of_rows

    def add(self, tile: Tile) -> None:
        ours, theirs = self.left[0].rows.flatten(0, 1), self.right[0].rows.flatten(0, 1)
        for start, stop, variance in self._runs():
            tile.add_product(ours[:, start:stop], theirs[:, start:stop], variance)

    def diagonal(self) -> Tensor:
        block = self.left[0]
        k, n = block.shape
        total = block.rows.new_zeros(n, k, k)
        for start, stop, variance in self._runs():
            rows = block.rows[:, :, start:stop]
            total.baddbmm_(scaled(rows, variance), rows.mT)
        return total

    def tile_shape(self, n: int, step: int) -> tuple[int, int]:
        # few wide tiles: the work above the diagonal is wasted, but narrow products of long rows are slow
        k = self.cotangents
        step = max(1, min(tile_rows(self.left[0].values) // k, max(tuning.FEWEST_TILE_ROWS // k, -(-n // 4))))
        return step, 4 * step

    def _runs(self) -> list[tuple[int, int, Variance]]:
        """First and last column (exclusive) and variance of neighboring parameters with the same prior variance."""
        runs: list[tuple[int, int, Variance]] = []
        for name, start, stop in self.left[0].spans:
            variance = self.variance(name)
            if variance is None:
                continue
            last = runs[-1] if runs else None
            numbers = last and isinstance(last[2], float) and isinstance(variance, float)
            if last and numbers and last[1] == start and last[2] == variance:
                runs[-1] = (last[0], stop, variance)
            else:
                runs.append((start, stop, variance))
        return runs


class Written(Contraction[Block]):
    """Clusters of any kind, whose rows are written out and summed for each tile."""

    stage = 2

    @classmethod
    def applies(cls, left: Cluster, right: Cluster, variances: Variances) -> bool:
        return True

    @property
    def cost(self) -> int:
        return self.cost_of_rows

    def add(self, tile: Tile) -> None:
        ours, theirs = written_out(self.left), written_out(self.right)
        for name in sorted(ours.keys() & theirs.keys()):
            variance = self.variance(name)
            if variance is not None:
                tile.add_product(interleaved(ours[name]), interleaved(theirs[name]), variance)

    def largest_tile(self) -> float:
        if all(isinstance(block, Dense) for block in (*self.left, *self.right)):
            return super().largest_tile()
        each = sum(sum(block.sizes().values()) for block in self.left) * self.left[0].values.element_size()
        return buffer_bytes(tuning.TILE_BYTES, self.left[0].values.device) // (self.cotangents * each)


class Panels(Contraction[Outer]):
    """Rows of one layer are written out a few columns at a time, in the block's order."""

    stage = 1

    @classmethod
    def applies(cls, left: Cluster, right: Cluster, variances: Variances) -> bool:
        return same_factors(left, right) and isinstance(left[0], Outer)

    @property
    def cost(self) -> int:
        return self.left[0].gram_cost.written

    def add(self, tile: Tile) -> None:
        for panel in self.passes():
            panel.add(tile)

    def diagonal(self) -> Tensor:
        (k, n), block = self.left[0].shape, self.left[0]
        return sum((panel.diagonal() for panel in self.passes()), start=block.values.new_zeros(n, k, k))

    def passes(self) -> Iterator[Contraction]:
        block = self.left[0]
        weight, bias = self.variance(block.weight), self.variance(block.bias)
        if weight is not None:
            g, o, i = block.b.shape[2], block.b.shape[4], block.a.shape[3]
            for some in panels(i, g * o, tuning.PANEL_COLUMNS):
                own = block.shaped(weight.flatten())[..., some] if isinstance(weight, Tensor) else weight
                yield self._panel(block.weight, partial(Outer.columns, sample=some), own)
        if block.bias is not None and bias is not None:
            yield self._panel(block.bias, Outer.sums, bias)

    def _panel(self, name: str, rows: Callable[[Outer], Tensor], variance: Variance) -> Rows:
        (left,), (right,) = self.left, self.right

        def matrix(block: Outer) -> tuple[Dense]:
            found = Dense.of(name, rows(block))
            return (replace(found, rows=found.rows.contiguous()),)

        own = matrix(left)
        return Rows(own, own if right is left else matrix(right), {name: variance})
