"""Gram matrices K = J P0⁻¹ Jᵀ from blocks of rows, in tiles; rows of length P are avoided where possible.

Rows are numbered n*K + k ("interleaved"). The tile of two sets of examples is then one contiguous block of the result,
to which each layer adds its product in place.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ntk_laplace.contractions import (
    Pairing,
    Variances,
    add_to_tile,
    clusters,
    contraction,
    pair_up,
    panels,
    self_blocks,
)
from ntk_laplace.jacobian.blocks import Block, Lookup, Outer
from ntk_laplace.jacobian.jacobian import Jacobian
from ntk_laplace.linalg import mirror_lower_
from ntk_laplace.resources import require_memory

__all__ = ["Variances", "cross_gram", "diagonal_blocks", "gram", "gram_lower", "gram_tiles", "multiply"]

_TILE_ROWS = 1024  # rows of a tile whose buffers fit in cache
_TILE_BYTES = 96 * 2**20  # maximum bytes of the buffers that contract shared positions
_FEWEST_ROWS = 160  # with fewer rows, a product of long rows is slow
_POSITIONS = ("positions", "tokens")
_PASSES = (("wide",), _POSITIONS, ("dense", "hadamard"))

_Job = tuple[str, Pairing]


def gram(left: Jacobian, right: Jacobian | None, variances: Variances, budget: int | None = None) -> Tensor:
    """K between two sets of rows, interleaved.

    Parameters
    ----------
    left, right : Jacobian
        Rows of N1 and N2 examples. With `right` None, K is `left` with itself: half is computed and mirrored.
    variances : mapping of str to Tensor
        Prior variance by parameter name.
    budget : int, optional
        Maximum bytes of the result; by default the free memory of the device.

    Returns
    -------
    Tensor, (N1*K1, N2*K2)
        Entry (n*K1 + k, m*K2 + l) is J_nk P0⁻¹ J_mlᵀ.

    Raises
    ------
    MemoryBudgetError
        If the result would not fit, before it is allocated.
    """
    other = left if right is None else right
    height, width = left.num_examples * left.num_cotangents, other.num_examples * other.num_cotangents
    require_memory(height * width * left.f.element_size(), left.f.device, f"a Gram matrix of {height} x {width}",
                   "Ask for tiles (gram_tiles), or for fewer examples at a time.", budget)
    if right is not None:
        return cross_gram(left, right, variances)
    return mirror_lower_(gram_lower(left, variances))


def gram_lower(rows: Jacobian, variances: Variances) -> Tensor:
    """K of rows with themselves, (N*K, N*K); only the lower triangle is guaranteed to be filled."""
    return _fill_whole(rows, None, variances)


def cross_gram(left: Jacobian, right: Jacobian, variances: Variances) -> Tensor:
    """K between two sets of rows, (N1*K1, N2*K2)."""
    return _fill_whole(left, right, variances)


def _fill_whole(left: Jacobian, right: Jacobian | None, variances: Variances) -> Tensor:
    other = left if right is None else right
    k1, k2 = left.num_cotangents, other.num_cotangents
    out = left.f.new_empty(left.num_examples * k1, other.num_examples * k2)
    fresh = True
    for jobs, weights in _passes(_jobs(left, other, variances), variances):
        tiles = _Tiles(left, other, weights, jobs, _strips(left, other, jobs))
        for rows, columns in tiles.pairs(lower=right is None):
            tile = out[rows.start * k1 : rows.stop * k1, columns.start * k2 : columns.stop * k2]
            tiles.fill(rows, columns, tile, fresh)
        fresh = False
    return out.zero_() if fresh else out


def _passes(jobs: list[_Job], variances: Variances) -> Iterator[tuple[list[_Job], Variances]]:
    """Group jobs by the tiles in which they fill a whole matrix; rows written out in panels are one group per panel."""
    for kinds in _PASSES:
        own = [job for job in jobs if job[0] in kinds]
        if own:
            yield own, variances
    for how, pair in jobs:
        if how == "panels":
            for panel, weights in panels(pair, variances):
                yield [("wide", panel)], weights


def gram_tiles(left: Jacobian, right: Jacobian | None, variances: Variances) -> Iterator[tuple[slice, slice, Tensor]]:
    """Tiles of K as (rows, columns, values (n1, K1, n2, K2)); `right` None yields only the lower tiles of K.

    The values share one buffer: copy them to keep them.
    """
    other = left if right is None else right
    k1, k2 = left.num_cotangents, other.num_cotangents
    jobs = _jobs(left, other, variances)
    step = _tile_examples(left, other, jobs)
    tiles = _Tiles(left, other, variances, jobs, (step, step))
    out = left.f.new_empty(step * k1 * step * k2)
    for rows, columns in tiles.pairs(lower=right is None):
        n1, n2 = rows.stop - rows.start, columns.stop - columns.start
        tile = out[: n1 * k1 * n2 * k2].view(n1 * k1, n2 * k2)
        tiles.fill(rows, columns, tile)
        yield rows, columns, tile.view(n1, k1, n2, k2)


def multiply(left: Jacobian, right: Jacobian, variances: Variances, matrix: Tensor) -> Tensor:
    """K(left, right) times a matrix (N2*K2, m), without forming K: (N1*K1, m)."""
    k1, k2 = left.num_cotangents, right.num_cotangents
    out = matrix.new_zeros(left.num_examples * k1, matrix.shape[-1])
    for rows, columns, tile in gram_tiles(left, right, variances):
        flat = tile.reshape(tile.shape[0] * k1, -1)
        out[rows.start * k1 : rows.stop * k1].addmm_(flat, matrix[columns.start * k2 : columns.stop * k2])
    return out


def diagonal_blocks(rows: Jacobian, variances: Variances) -> Tensor:
    """Diagonal blocks of K, one per example, (N, K, K)."""
    k, n = rows.num_cotangents, rows.num_examples
    out = rows.f.new_zeros(n, k, k)
    step = max(1, _TILE_ROWS // k)
    for start in range(0, n, step):
        part = rows.subset(slice(start, start + step))
        for cluster in clusters(part.blocks):
            out[start : start + step] += self_blocks(cluster, variances)
    return out


def _jobs(left: Jacobian, right: Jacobian, variances: Variances) -> list[_Job]:
    """Pairs of clusters with their method; written-out rows come first, because their product initializes a tile."""
    jobs = [(contraction(pair, variances), pair) for pair in pair_up(left.blocks, right.blocks, variances)]
    first = ("wide", "panels", "dense")
    return sorted(jobs, key=lambda job: first.index(job[0]) if job[0] in first else len(first))


def _strips(left: Jacobian, right: Jacobian, jobs: list[_Job]) -> tuple[int, int]:
    """Examples (rows, columns) of the tiles in which these jobs fill a whole matrix.

    Products of long rows use few wide tiles: the work above the diagonal is wasted, but narrow products are slow.
    Positions are contracted example by example in any case.
    """
    step, n, k = _tile_examples(left, right, jobs), left.num_examples, max(left.num_cotangents, right.num_cotangents)
    if jobs[0][0] == "wide":
        step = max(1, min(_TILE_ROWS // k, max(_FEWEST_ROWS // k, -(-n // 4))))
        return step, 4 * step
    if jobs[0][0] in _POSITIONS:
        few = min(step, -(-n // 16))
        return few, step * step // few
    return step, step


def _tile_examples(left: Jacobian, right: Jacobian, jobs: list[_Job]) -> int:
    """Examples on each side of a square tile, chosen to bound its buffers."""
    k = max(left.num_cotangents, right.num_cotangents)
    # at least four blocks of rows, so that symmetry saves work for few examples as well
    step = max(1, min(_TILE_ROWS // k, -(-left.num_examples // 4)))
    size = left.f.element_size()
    for how, (ours, theirs) in jobs:
        both = [block for block in (*ours, *theirs) if isinstance(block, (Outer, Lookup))]
        if how == "dense" and both:
            # written out again for each tile
            entries = sum(sum(block.sizes().values()) for block in ours)
            step = min(step, max(1, _TILE_BYTES // (size * k * entries)))
        elif how in _POSITIONS:
            t = max(block.b.shape[-2] for block in both)
            g = max(block.b.shape[2] if isinstance(block, Outer) else 1 for block in both)
            step = min(step, max(1, int((_TILE_BYTES / (size * g * t * t)) ** 0.5)))
    return step


class _Tiles:
    """Fills tiles with the same jobs, using buffers that are allocated once."""

    def __init__(
        self, left: Jacobian, right: Jacobian, variances: Variances, jobs: list[_Job], steps: tuple[int, int]
    ) -> None:
        self.left, self.right, self.variances, self.jobs, self.steps = left, right, variances, jobs, steps
        whole = any(how == "hadamard" for how, _ in jobs)
        entries = steps[0] * left.num_cotangents * steps[1] * right.num_cotangents
        self._buffer = left.f.new_empty(entries if whole else 0)
        self._cut: tuple[slice, list[tuple[Block, ...]]] | None = None

    def pairs(self, lower: bool) -> Iterator[tuple[slice, slice]]:
        """Slices of examples whose tiles cover K, or its lower triangle."""
        n1, n2 = self.left.num_examples, self.right.num_examples
        for start in range(0, n1, self.steps[0]):
            rows = slice(start, min(start + self.steps[0], n1))
            last = rows.stop if lower else n2
            for first in range(0, last, self.steps[1]):
                yield rows, slice(first, min(first + self.steps[1], last))

    def fill(self, rows: slice, columns: slice, out: Tensor, fresh: bool = True) -> None:
        """Add the tile of these examples to `out` (n1*K1, n2*K2), a block of a larger matrix; `fresh` overwrites."""
        if self._cut is None or self._cut[0] != rows:
            self._cut = (rows, [tuple(b.subset(rows) for b in ours) for _, (ours, _) in self.jobs])
        kinds = [how for how, _ in self.jobs]
        cut = list(zip(self._cut[1], [tuple(b.subset(columns) for b in theirs) for _, (_, theirs) in self.jobs],
                       strict=True))
        for how, pair in zip(kinds, cut, strict=True):
            fresh = add_to_tile(how, out, self._buffer, pair, self.variances, fresh)
        if fresh:
            out.zero_()
