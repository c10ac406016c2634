"""Gram matrices K = J P0⁻¹ Jᵀ from blocks of rows, in tiles; rows of length P are avoided where possible.

Rows are numbered n*K + k ("interleaved"). The tile of two sets of examples is then one contiguous block of the result,
to which each layer adds its product in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, groupby, pairwise

from torch import Tensor

from ntk_laplace.jacobian.contractions import Contraction, Tile, Variances, contractions, read_once, tile_rows
from ntk_laplace.jacobian.jacobian import Jacobian
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.linalg import mirror_lower_
from ntk_laplace.runtime.lower_triangle import LowerTriangle, require_full_precision
from ntk_laplace.runtime.panels import panels
from ntk_laplace.runtime.resources import require_memory


def gram(rows: Jacobian, variances: Variances, right: Jacobian | None = None) -> Tensor:
    """K of rows of N1 examples with themselves, or with others `right` of N2, (N1*K1, N2*K2), interleaved.

    Entry (n*K1 + k, m*K2 + l) is J_nk P0⁻¹ J_mlᵀ. Of rows with themselves half is computed and mirrored. It has to fit
    in memory (MemoryBudgetError).
    """
    other = rows if right is None else right
    height, width = rows.num_examples * rows.num_cotangents, other.num_examples * other.num_cotangents
    require_memory(height * width * rows.f.element_size(), rows.f.device, f"a Gram matrix of {height} x {width}",
                   "Ask for tiles (gram_tiles), or for fewer examples at a time.")
    if right is not None:
        return cross_gram(rows, right, variances)
    out = rows.f.new_empty(height, height)
    _fill_panels(rows, None, variances, [out])
    return mirror_lower_(out)


def gram_lower(rows: Jacobian, variances: Variances) -> LowerTriangle:
    """K of rows with themselves, the lower triangle of (N*K, N*K) alone; each panel holds whole examples."""
    out = LowerTriangle.empty(rows.num_examples * rows.num_cotangents, rows.num_cotangents, rows.f)
    _fill_panels(rows, None, variances, out.panels)
    return out


def cross_gram(left: Jacobian, right: Jacobian, variances: Variances) -> Tensor:
    """K between two sets of rows, (N1*K1, N2*K2)."""
    out = left.f.new_empty(left.num_examples * left.num_cotangents, right.num_examples * right.num_cotangents)
    _fill_panels(left, right, variances, [out])
    return out


def _fill_panels(left: Jacobian, right: Jacobian | None, variances: Variances, panels: Sequence[Tensor]) -> None:
    """Fill panels of rows of K, one below the other; `right` None fills the lower triangle of `left` with itself."""
    other = left if right is None else right
    k1, k2 = left.num_cotangents, other.num_cotangents
    ends = accumulate((len(panel) // k1 for panel in panels), initial=0)
    bounds = [slice(*both) for both in pairwise(ends)]  # examples of each panel
    fresh = True
    for together in _passes(_contractions(left, other, variances)):
        step = _tile_examples(left, other, together)
        steps = together[0].tile_shape(left.num_examples, step)
        for panel, own in zip(panels, bounds, strict=True):
            for rows, columns, parts in _tiles(own, other, together, steps, lower=right is None):
                here = slice((rows.start - own.start) * k1, (rows.stop - own.start) * k1)
                _fill(panel[here, columns.start * k2 : columns.stop * k2], (k1, k2), parts, fresh)
        fresh = False
    if fresh:
        for panel in panels:
            panel.zero_()


def _contractions(left: Jacobian, right: Jacobian, variances: Variances) -> list[Contraction]:
    """The contractions of all rows, where torch multiplies them with all digits."""
    require_full_precision(left.dtype, left.f.device)
    return contractions(left.blocks, right.blocks, variances)


def _passes(found: list[Contraction]) -> Iterator[list[Contraction]]:
    """Contractions that fill a whole matrix together, tile by tile; rows written out in panels are passes of one."""
    for _, stage in groupby(found, key=lambda each: each.stage):
        whole = []
        for each in stage:
            parts = each.passes()
            first = next(parts)
            if first is each:
                whole.append(each)
            else:
                yield from ([part] for part in chain([first], parts))
        if whole:
            yield whole


def gram_tiles(left: Jacobian, right: Jacobian | None, variances: Variances) -> Iterator[tuple[slice, slice, Tensor]]:
    """Tiles of K as (rows, columns, values (n1, K1, n2, K2)); `right` None yields only the lower tiles of K.

    The values share one buffer: copy them to keep them.
    """
    other = left if right is None else right
    k1, k2 = left.num_cotangents, other.num_cotangents
    found = _contractions(left, other, variances)
    step = _tile_examples(left, other, found)
    out = left.f.new_empty(step * k1 * step * k2)
    whole = slice(0, left.num_examples)
    for rows, columns, parts in _tiles(whole, other, found, (step, step), lower=right is None):
        n1, n2 = rows.stop - rows.start, columns.stop - columns.start
        tile = out[: n1 * k1 * n2 * k2].view(n1 * k1, n2 * k2)
        _fill(tile, (k1, k2), parts)
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
    out, variances = rows.f.new_zeros(n, k, k), read_once(variances)
    for some in panels(n, k, tile_rows(rows.f)):
        part = rows.subset(some)
        for own in _contractions(part, part, variances):
            out[some] += own.diagonal()
    return out


def _tile_examples(left: Jacobian, right: Jacobian, found: list[Contraction]) -> int:
    """Examples on each side of a square tile, chosen to bound its buffers."""
    k = max(left.num_cotangents, right.num_cotangents)
    step = tile_rows(left.f) // k
    if left is right:  # at least four blocks of rows, for symmetry to save work, unless these are too small
        step = min(step, max(tuning.FEWEST_TILE_ROWS // k, -(-left.num_examples // 4)))
    return int(max(1, min([step, *(each.largest_tile() for each in found)])))


def _tiles(
    within: slice, right: Jacobian, found: list[Contraction], steps: tuple[int, int], lower: bool
) -> Iterator[tuple[slice, slice, list[Contraction]]]:
    """Slices of examples whose tiles cover these rows of K, or their lower part, with the contractions of each tile."""
    for start in range(within.start, within.stop, steps[0]):
        rows = slice(start, min(start + steps[0], within.stop))
        own, last = [each.cut_rows(rows) for each in found], rows.stop if lower else right.num_examples
        for first in range(0, last, steps[1]):
            columns = slice(first, min(first + steps[1], last))
            yield rows, columns, [each.cut_columns(columns) for each in own]


def _fill(values: Tensor, cotangents: tuple[int, int], found: list[Contraction], fresh: bool = True) -> None:
    """Add contractions to a tile (n1*K1, n2*K2), which may be a part of a larger matrix; `fresh` overwrites."""
    tile = Tile(values, cotangents, fresh)
    for each in found:
        each.add(tile)
    tile.started()
