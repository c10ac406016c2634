"""The Gram engine: K = J P0⁻¹ Jᵀ from blocks of rows, in tiles, without a row of length P where it can be helped.

Inside, rows are numbered seed-major (k*N + n): a tile of a layer with one position is then a matrix product times a
small matrix that is broadcast along contiguous memory. Results for callers are interleaved (n*K + k).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ntk_laplace.factors.blocks import Block, Dense, Lookup, Outer
from ntk_laplace.factors.rows import Rows
from ntk_laplace.resources import require_memory

__all__ = ["Variances", "diagonal_blocks", "gram", "gram_lower", "gram_tiles", "multiply"]

Variances = Mapping[str, Tensor]
"""Prior variance (one over precision) of each parameter: a number, or one per entry. Absent or zero: left out."""

_TILE_ROWS = 1024  # rows of a tile: its buffers stay in cache
_TILE_BYTES = 96 * 2**20  # and the contraction buffers of shared positions within this


def gram(left: Rows, right: Rows | None, variances: Variances, budget: int | None = None) -> Tensor:
    """K between two sets of rows, interleaved.

    Parameters
    ----------
    left, right : Rows
        Rows of N1 and N2 examples; `right` None means `left` again, of which half is computed and mirrored.
    variances : mapping of str to Tensor
        Prior variance by parameter name.
    budget : int, optional
        Bytes the result may take; the free memory of the device if left out.

    Returns
    -------
    Tensor, (N1*K1, N2*K2)
        Entry (n*K1 + k, m*K2 + l) is J_nk P0⁻¹ J_mlᵀ (design section 2).

    Raises
    ------
    MemoryBudgetError
        If the result would not fit, before it is allocated.
    """
    other = left if right is None else right
    shape = (left.num_examples, left.num_seeds, other.num_examples, other.num_seeds)
    needed = torch.Size(shape).numel() * left.f.element_size()
    require_memory(needed, left.f.device, f"a Gram matrix of {shape[0] * shape[1]} x {shape[2] * shape[3]}",
                   "Ask for tiles (gram_tiles), or for fewer examples at a time.", budget)
    out = left.f.new_empty(shape)
    for rows, columns, tile in gram_tiles(left, right, variances):
        out[rows, :, columns, :] = tile.permute(1, 0, 3, 2)
        if right is None and rows != columns:
            out[columns, :, rows, :] = tile.permute(3, 2, 1, 0)
    return out.reshape(shape[0] * shape[1], shape[2] * shape[3])


def gram_lower(rows: Rows, variances: Variances) -> Tensor:
    """K of rows with themselves, seed-major, (K*N, K*N); only the lower triangle is sure to be filled."""
    k, n = rows.num_seeds, rows.num_examples
    out = rows.f.new_empty(k * n, k * n)
    whole = out.view(k, n, k, n)
    for part, columns, tile in gram_tiles(rows, None, variances):
        whole[:, part, :, columns] = tile
        if part != columns:
            # seed-major: the tile of (part, columns) meets both triangles, so its mirror image is needed too
            whole[:, columns, :, part] = tile.permute(2, 3, 0, 1)
    return out


def gram_tiles(left: Rows, right: Rows | None, variances: Variances) -> Iterator[tuple[slice, slice, Tensor]]:
    """Tiles of K as (rows, columns, values (K1, n1, K2, n2)); `right` None yields the lower tiles of K alone.

    The values share one buffer: copy what you keep.
    """
    other = left if right is None else right
    plan = _plan(left, other, variances)
    step = _tile_examples(left, other, plan)
    tiles = _Tiles(left, other, plan, variances)
    for start in range(0, left.num_examples, step):
        rows = slice(start, min(start + step, left.num_examples))
        stop = other.num_examples if right is not None else rows.stop
        for first in range(0, stop, step):
            columns = slice(first, min(first + step, other.num_examples))
            yield rows, columns, tiles.fill(rows, columns)


def multiply(left: Rows, right: Rows, variances: Variances, matrix: Tensor) -> Tensor:
    """K(left, right) times a matrix, without K: (K2, N2, m) seed-major gives (K1, N1, m)."""
    out = matrix.new_zeros(left.num_seeds, left.num_examples, matrix.shape[-1])
    for rows, columns, tile in gram_tiles(left, right, variances):
        out[:, rows] += torch.einsum("knlm,lmx->knx", tile, matrix[:, columns])
    return out


def diagonal_blocks(rows: Rows, variances: Variances) -> Tensor:
    """The blocks of K that pair an example with itself, (N, K, K)."""
    k, n = rows.num_seeds, rows.num_examples
    out = rows.f.new_zeros(n, k, k)
    step = max(1, _TILE_ROWS // k)
    for start in range(0, n, step):
        part = rows.part(slice(start, start + step))
        for cluster in _clusters(part.blocks):
            out[start : start + step] += _self_blocks(cluster, variances)
    return out


# --- which blocks meet, and how


def _clusters(blocks: tuple[Block, ...]) -> list[tuple[Block, ...]]:
    """Blocks that share a parameter must be added before they meet themselves; all others stand alone."""
    found: list[list[Block]] = []
    for block in blocks:
        touching = [c for c in found if any(_overlap(block, member) for member in c)]
        merged = [member for cluster in touching for member in cluster] + [block]
        found = [cluster for cluster in found if cluster not in touching] + [merged]
    return [tuple(cluster) for cluster in found]


def _overlap(first: Block, second: Block) -> bool:
    if not set(first.names) & set(second.names):
        return False
    apart = isinstance(first, Outer) and isinstance(second, Outer) and first.weight == second.weight
    if apart and first.bias is None and second.bias is None and first.index is not None and second.index is not None:
        return bool(torch.isin(first.index, second.index).any())  # slices of one parameter may be disjoint
    return True


def _key(cluster: tuple[Block, ...]) -> tuple:
    return tuple(sorted(name for block in cluster for name in set(block.names)))


def _variance(variances: Variances, name: str | None) -> Tensor | None:
    return None if name is None else variances.get(name)


def _is_scalar(value: Tensor | None) -> bool:
    return value is None or value.numel() == 1


def _number(value: Tensor | None) -> float:
    return 0.0 if value is None else float(value)


def _written_out(cluster: tuple[Block, ...]) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for block in cluster:
        for name, rows in block.dense().items():
            total[name] = total[name] + rows if name in total else rows
    return total


Pairing = tuple[tuple[Block, ...], tuple[Block, ...]]


def _plan(left: Rows, right: Rows, variances: Variances) -> list[Pairing]:
    """Clusters of both sides that hold the same parameters, those of zero prior variance left out."""
    ours, theirs = _clusters(left.blocks), _clusters(right.blocks)
    if [_key(cluster) for cluster in ours] != [_key(cluster) for cluster in theirs]:
        names = sorted({name for block in (*left.blocks, *right.blocks) for name in block.names})
        ours, theirs = _by_parameter(left.blocks, names), _by_parameter(right.blocks, names)
    used = [bool(any(_variance(variances, name) is not None for name in _key(one))) for one in ours]
    return [pair for pair, wanted in zip(zip(ours, theirs, strict=True), used, strict=True) if wanted]


def _by_parameter(blocks: tuple[Block, ...], names: list[str]) -> list[tuple[Block, ...]]:
    """One cluster per parameter; blocks of a weight and its bias are taken apart."""
    dense = _written_out(blocks)
    return [(Dense(name, dense[name]),) for name in names if name in dense]


def _contraction(pair: Pairing, variances: Variances) -> str:
    """How a pair of clusters is contracted: 'hadamard', 'positions', 'tokens' or 'dense'."""
    left, right = pair
    if len(left) == len(right) == 1 and all(_is_scalar(_variance(variances, n)) for n in left[0].names):
        one, two = left[0], right[0]
        if isinstance(one, Outer) and isinstance(two, Outer):
            same = one.index is two.index or (
                one.index is not None and two.index is not None and torch.equal(one.index, two.index)
            )
            if same and one.names == two.names:
                return "hadamard" if one.single and two.single else "positions"
        if isinstance(one, Lookup) and isinstance(two, Lookup):
            return "tokens"
    return "dense"


def _tile_examples(left: Rows, right: Rows, plan: list[Pairing]) -> int:
    k = max(left.num_seeds, right.num_seeds)
    step = max(1, _TILE_ROWS // k)
    size = left.f.element_size()
    for ours, theirs in plan:
        if isinstance(ours[0], Dense) and isinstance(theirs[0], Dense):
            continue
        positions = [b.b.shape[3] if isinstance(b, Outer) else b.b.shape[2] for b in (*ours, *theirs)
                     if not isinstance(b, Dense)]
        t = max(positions, default=1)
        if len(ours) > 1 or len(theirs) > 1:
            entries = sum(rows.shape[-1] for rows in _written_out(tuple(b.part(slice(0, 1)) for b in ours)).values())
            step = min(step, max(1, _TILE_BYTES // (size * k * entries)))
        elif t > 1:
            o = max(b.b.shape[-1] for b in (*ours, *theirs) if not isinstance(b, Dense))
            g = max(b.b.shape[2] if isinstance(b, Outer) else 1 for b in ours if not isinstance(b, Dense))
            per_pair = size * g * (t * t + 2 * t * k * o)
            step = min(step, max(1, int((_TILE_BYTES / per_pair) ** 0.5)))
    return step


class _Tiles:
    """Fills one tile after another into buffers that are allocated once."""

    def __init__(self, left: Rows, right: Rows, plan: list[Pairing], variances: Variances) -> None:
        self.left, self.right, self.variances = left, right, variances
        self.jobs = [(_contraction(pair, variances), pair) for pair in plan]
        self._buffers: dict[tuple, tuple[Tensor, Tensor]] = {}
        self._cut: tuple[slice, list] | None = None

    def fill(self, rows: slice, columns: slice) -> Tensor:
        """Values (K1, n1, K2, n2) of one tile."""
        k1, k2 = self.left.num_seeds, self.right.num_seeds
        shape = (k1, rows.stop - rows.start, k2, columns.stop - columns.start)
        if shape not in self._buffers:
            self._buffers[shape] = (self.left.f.new_empty(shape), self.left.f.new_empty(shape))
        out, buffer = self._buffers[shape]
        out.zero_()
        if self._cut is None or self._cut[0] != rows:
            self._cut = (rows, [tuple(b.part(rows) for b in ours) for _, (ours, _) in self.jobs])
        for (how, (_, theirs)), ours in zip(self.jobs, self._cut[1], strict=True):
            other = tuple(block.part(columns) for block in theirs)
            if how == "hadamard":
                _add_hadamard(out, buffer, ours[0], other[0], self.variances)
            elif how == "dense":
                _add_dense(out, ours, other, self.variances)
            else:
                _add_positions(out, ours[0], other[0], self.variances)
        return out


def _add_hadamard(out: Tensor, buffer: Tensor, left: Outer, right: Outer, variances: Variances) -> None:
    """One position: (a aᵀ/δ_w + 1/δ_b) ∘ b bᵀ, the last layer's constant b as a Kronecker product."""
    weight, bias = _number(_variance(variances, left.weight)), _number(_variance(variances, left.bias))
    inputs = left.a[:, 0, 0] @ right.a[:, 0, 0].T
    inputs.mul_(weight)
    if bias:
        inputs.add_(bias)
    b_left, b_right = left.b[:, :, 0, 0], right.b[:, :, 0, 0]
    if left.constant and right.constant:
        pairs = b_left[:, 0] @ b_right[:, 0].T
        for k, l in pairs.nonzero().tolist():
            out[k, :, l, :].add_(inputs, alpha=float(pairs[k, l]))
        return
    n1, n2 = left.a.shape[0], right.a.shape[0]
    b_left = b_left.expand(-1, n1, -1).flatten(0, 1)
    b_right = b_right.expand(-1, n2, -1).flatten(0, 1)
    torch.mm(b_left, b_right.T, out=buffer.view(len(b_left), len(b_right)))
    out.addcmul_(buffer, inputs[None, :, None, :])


def _add_dense(out: Tensor, left: tuple[Block, ...], right: tuple[Block, ...], variances: Variances) -> None:
    ours, theirs = _written_out(left), _written_out(right)
    flat = out.view(out.shape[0] * out.shape[1], out.shape[2] * out.shape[3])
    for name in ours.keys() & theirs.keys():
        variance = _variance(variances, name)
        if variance is None:
            continue
        one, two = ours[name].flatten(0, 1), theirs[name].flatten(0, 1)
        if variance.numel() == 1:
            flat.addmm_(one, two.T, alpha=float(variance))
        else:
            flat.addmm_(one * variance.to(one).flatten(), two.T)


def _position_gram(left: Block, right: Block, variances: Variances) -> tuple[Tensor, Tensor, Tensor]:
    """Inner products of layer inputs at every pair of positions, (G, n1, T1, n2, T2), and both b as (K, n, G, T, o)."""
    if isinstance(left, Lookup):
        equal = left.tokens[:, :, None, None] == right.tokens[None, None]
        inputs = equal.to(left.b.dtype).mul_(_number(_variance(variances, left.weight)))
        return inputs[None], left.b.unsqueeze(2), right.b.unsqueeze(2)
    n1, g, t1, i = left.a.shape
    n2, _, t2, _ = right.a.shape
    one = left.a.transpose(0, 1).reshape(g, n1 * t1, i)
    two = right.a.transpose(0, 1).reshape(g, n2 * t2, i)
    inputs = (one @ two.mT).mul_(_number(_variance(variances, left.weight)))
    bias = _number(_variance(variances, left.bias))
    if bias:
        inputs.add_(bias)
    return inputs.view(g, n1, t1, n2, t2), left.full_b(), right.full_b()


def _add_positions(out: Tensor, left: Block, right: Block, variances: Variances) -> None:
    """Shared positions without rows: Σ_ts (a_t·a_s) (b_t·b_s), the inner sum first (design section 7)."""
    inputs, b_left, b_right = _position_gram(left, right, variances)
    g, n1, t1, n2, t2 = inputs.shape
    k1, k2, o = b_left.shape[0], b_right.shape[0], b_left.shape[-1]
    # (G, m, n T1, T2) @ (G, m, T2, l o)
    first = inputs.permute(0, 3, 1, 2, 4).reshape(g, n2, n1 * t1, t2)
    second = b_right.permute(2, 1, 3, 0, 4).reshape(g, n2, t2, k2 * o)
    inner = (first @ second).view(g, n2, n1, t1, k2, o)
    # (n, k, G T1 o) @ (n, G T1 o, l m)
    outer = b_left.permute(1, 0, 2, 3, 4).reshape(n1, k1, g * t1 * o)
    inner = inner.permute(2, 0, 3, 5, 4, 1).reshape(n1, g * t1 * o, k2 * n2)
    out.add_((outer @ inner).view(n1, k1, k2, n2).transpose(0, 1))


def _self_blocks(cluster: tuple[Block, ...], variances: Variances) -> Tensor:
    """Σ over a cluster of J_nk P0⁻¹ J_nlᵀ, (n, K, K)."""
    block = cluster[0]
    plain = len(cluster) == 1 and not isinstance(block, Dense)
    if plain and all(_is_scalar(_variance(variances, name)) for name in block.names):
        if isinstance(block, Outer):
            weight, bias = _number(_variance(variances, block.weight)), _number(_variance(variances, block.bias))
            inputs = torch.einsum("ngti,ngsi->ngts", block.a, block.a) * weight + bias
            b = block.full_b()
        else:
            inputs = (block.tokens[:, :, None] == block.tokens[:, None, :]).to(block.b.dtype)[:, None]
            inputs, b = inputs * _number(_variance(variances, block.weight)), block.b.unsqueeze(2)
        return torch.einsum("kngto,ngts,lngso->nkl", b, inputs, b)
    total = 0.0
    for name, rows in _written_out(cluster).items():
        variance = _variance(variances, name)
        if variance is not None:
            total = total + torch.einsum("knp,lnp->nkl", rows * variance.to(rows).flatten(), rows)
    k, n = block.shape
    return total if isinstance(total, Tensor) else block.dense()[block.names[0]].new_zeros(n, k, k)
