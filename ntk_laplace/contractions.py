"""Contractions: add the products of two sets of blocks to a tile of K, each by its cheapest exact method.

A tile is an (n1*K1, n2*K2) matrix with interleaved rows and columns; every function adds to it in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from ntk_laplace.jacobian.blocks import Block, Dense, Lookup, Outer, Wide
from ntk_laplace.jacobian.jacobian import contracts_positions

__all__ = ["Pairing", "Variances", "add_to_tile", "clusters", "contraction", "pair_up", "panels", "self_blocks"]

Variances = Mapping[str, Tensor]
"""Prior variance (one over precision) of each parameter, 0-d or one per entry. Absent parameters contribute nothing."""

_PANEL = 4096  # columns of rows written out at a time
_CACHE = 2 * 2**20  # bytes of inner sums over positions that fit in a core's cache
_DEVICE_CHUNK = 64 * 2**20  # the same on an accelerator, where few large products are faster


def clusters(blocks: tuple[Block, ...]) -> list[tuple[Block, ...]]:
    """Group blocks that share a parameter: their rows must be summed before products are formed."""
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


def pair_up(left: tuple[Block, ...], right: tuple[Block, ...], variances: Variances) -> list[Pairing]:
    """Pair the clusters of both sides by their parameters; clusters without a prior variance are left out."""
    ours, theirs = clusters(left), clusters(right)
    if [_key(cluster) for cluster in ours] != [_key(cluster) for cluster in theirs]:
        # sequence lengths or branches of the network differ: only parameters that both sides use contribute
        one, two = _written_out(left), _written_out(right)
        names = sorted(one.keys() & two.keys())
        ours, theirs = [(Dense(n, one[n]),) for n in names], [(Dense(n, two[n]),) for n in names]
    used = [bool(any(_variance(variances, name) is not None for name in _key(one))) for one in ours]
    return [pair for pair, wanted in zip(zip(ours, theirs, strict=True), used, strict=True) if wanted]


def contraction(pair: Pairing, variances: Variances) -> str:
    """Method for a pair of clusters: 'wide', 'panels', 'hadamard', 'positions', 'tokens' or 'dense'."""
    left, right = pair
    one, two = left[0], right[0]
    if isinstance(one, Wide) and isinstance(two, Wide) and one.spans == two.spans:
        return "wide"
    if len(left) != 1 or len(right) != 1:
        return "dense"
    plain = all(_is_scalar(_variance(variances, n)) for n in one.names)
    if isinstance(one, Lookup) and isinstance(two, Lookup) and plain:
        return "tokens"
    if isinstance(one, Outer) and isinstance(two, Outer) and one.names == two.names and _same(one.index, two.index):
        if one.single and two.single and plain:
            return "hadamard"
        return "positions" if plain and contracts_positions(one) else "panels"
    return "dense"


def _same(one: Tensor | None, two: Tensor | None) -> bool:
    return one is two or (one is not None and two is not None and torch.equal(one, two))


def add_to_tile(
    how: str, out: Tensor, buffer: Tensor, pair: Pairing, variances: Variances, fresh: bool
) -> bool:
    """Add a pair of clusters to a tile by the method `how`.

    Parameters
    ----------
    how : str
        As `contraction` returns it.
    out : Tensor, (n1*K1, n2*K2)
        The tile.
    buffer : Tensor
        Workspace of at least n1*K1*n2*K2 numbers, used by 'hadamard'.
    pair : Pairing
    variances : mapping of str to Tensor
    fresh : bool
        The tile is uninitialized and is overwritten.

    Returns
    -------
    bool
        Whether the tile is still uninitialized.
    """
    ours, theirs = pair
    if how == "wide":
        return _add_wide(out, ours[0], theirs[0], variances, fresh)
    if how == "dense":
        return _add_dense(out, ours, theirs, variances, fresh)
    if how == "panels":
        for (own, other), weights in panels(pair, variances):
            fresh = _add_wide(out, own[0], other[0], weights, fresh)
        return fresh
    if how == "hadamard":
        _add_hadamard(out, buffer, ours[0], theirs[0], variances, fresh)
        return False
    if fresh:
        out.zero_()
    _add_positions(out, ours[0], theirs[0], variances)
    return False


def _interleaved(b: Tensor) -> Tensor:
    """(K, n, o) -> (n*K, o)."""
    return b.transpose(0, 1).flatten(0, 1)


def _add_hadamard(
    out: Tensor, buffer: Tensor, left: Outer, right: Outer, variances: Variances, fresh: bool
) -> None:
    """One position: (a aᵀ/δ_w + 1/δ_b) ∘ b bᵀ; a Kronecker product if b is constant, as in the last layer."""
    weight, bias = _number(_variance(variances, left.weight)), _number(_variance(variances, left.bias))
    inputs = left.a[:, 0, 0] @ right.a[:, 0, 0].T
    inputs.mul_(weight)
    if bias:
        inputs.add_(bias)
    n1, n2 = inputs.shape
    k1, k2 = left.b.shape[0], right.b.shape[0]
    if left.constant and right.constant:
        _add_kronecker(out.unflatten(0, (n1, k1)).unflatten(2, (n2, k2)), inputs,
                       left.b[:, 0, 0, 0] @ right.b[:, 0, 0, 0].T, fresh)
        return
    products = buffer[: n1 * k1 * n2 * k2].view(n1 * k1, n2 * k2)
    b_left, b_right = left.b[:, :, 0, 0].expand(-1, n1, -1), right.b[:, :, 0, 0].expand(-1, n2, -1)
    torch.mm(_interleaved(b_left), _interleaved(b_right).T, out=products)
    # repeat each input product over K2 columns once, so that the large multiplication reads contiguous memory
    spread = inputs.unsqueeze(2).expand(n1, n2, k2).reshape(n1, 1, n2 * k2)
    target, products = out.unflatten(0, (n1, k1)), products.view(n1, k1, n2 * k2)
    if fresh:
        torch.mul(products, spread, out=target)
    else:
        target.addcmul_(products, spread)


def _add_kronecker(out: Tensor, inputs: Tensor, pairs: Tensor, fresh: bool) -> None:
    """out (n1, K1, n2, K2) += inputs ⊗ pairs."""
    if fresh:
        out.zero_()
    if pairs.shape[0] == pairs.shape[1] and not bool((pairs - torch.diag(pairs.diagonal())).any()):
        out.diagonal(dim1=1, dim2=3).addcmul_(inputs.unsqueeze(2), pairs.diagonal())
    else:
        out.addcmul_(inputs[:, None, :, None], pairs[None, :, None, :])


def _add_product(out: Tensor, left: Tensor, right: Tensor, variance: Tensor, fresh: bool) -> None:
    """out += left diag(variance) rightᵀ; `fresh` overwrites."""
    if variance.numel() == 1:
        out.addmm_(left, right.T, beta=0.0 if fresh else 1.0, alpha=float(variance))
    else:
        out.addmm_(left * variance.to(left).flatten(), right.T, beta=0.0 if fresh else 1.0)


def _add_wide(out: Tensor, left: Wide, right: Wide, variances: Variances, fresh: bool) -> bool:
    """One product per run of columns with the same prior variance; returns whether `out` is still uninitialized."""
    ours, theirs = left.rows.flatten(0, 1), right.rows.flatten(0, 1)
    for start, stop, variance in _runs(left, variances):
        _add_product(out, ours[:, start:stop], theirs[:, start:stop], variance, fresh)
        fresh = False
    return fresh


def panels(pair: Pairing, variances: Variances) -> Iterator[tuple[Pairing, Variances]]:
    """Rows of one layer a few columns at a time, with the prior variance of these columns, in the block's order."""
    (left,), (right,) = pair
    weight, bias = _variance(variances, left.weight), _variance(variances, left.bias)
    if weight is not None:
        g, o, i = left.b.shape[2], left.b.shape[4], left.a.shape[3]
        step = max(1, _PANEL // (g * o))
        for start in range(0, i, step):
            some = slice(start, min(start + step, i))
            own = weight if _is_scalar(weight) else left.shaped(weight)[..., some]
            yield _side_by_side(left, right, left.weight, lambda block, s=some: block.columns(s)), {left.weight: own}
    if bias is not None:
        yield _side_by_side(left, right, left.bias, lambda block: block.sums()), {left.bias: bias}


def _side_by_side(left: Outer, right: Outer, name: str, rows: Callable[[Outer], Tensor]) -> Pairing:
    own = Wide.of([Dense(name, rows(left))])
    return (own,), (own if right is left else Wide.of([Dense(name, rows(right))]),)


def _runs(block: Wide, variances: Variances) -> list[tuple[int, int, Tensor]]:
    runs: list[tuple[int, int, Tensor]] = []
    for name, start, stop in block.spans:
        variance = _variance(variances, name)
        if variance is None:
            continue
        if runs and runs[-1][1] == start and runs[-1][2].numel() == variance.numel() == 1 and runs[-1][2] == variance:
            runs[-1] = (runs[-1][0], stop, variance)
        else:
            runs.append((start, stop, variance))
    return runs


def _add_dense(
    out: Tensor, left: tuple[Block, ...], right: tuple[Block, ...], variances: Variances, fresh: bool
) -> bool:
    """Clusters of any kind, written out for this tile; returns whether `out` is still uninitialized."""
    ours, theirs = _written_out(left), _written_out(right)
    for name in sorted(ours.keys() & theirs.keys()):
        variance = _variance(variances, name)
        if variance is not None:
            _add_product(out, _interleaved(ours[name]), _interleaved(theirs[name]), variance, fresh)
            fresh = False
    return fresh


def _position_gram(left: Block, right: Block, variances: Variances) -> tuple[Tensor, Tensor, Tensor]:
    """Inner products of layer inputs at every pair of positions, (n1, n2, G, T1, T2), and both b as (n, G, T, o, K)."""
    if isinstance(left, Lookup):
        equal = left.tokens[:, None, :, None] == right.tokens[None, :, None]
        inputs = equal.to(left.b.dtype).mul_(_number(_variance(variances, left.weight))).unsqueeze(2)
        return inputs, left.b.permute(1, 2, 3, 0).unsqueeze(1), right.b.permute(1, 2, 3, 0).unsqueeze(1)
    n1, g, t1, i = left.a.shape
    n2, _, t2, _ = right.a.shape
    one = left.a.transpose(0, 1).reshape(g, n1 * t1, i)
    two = right.a.transpose(0, 1).reshape(g, n2 * t2, i)
    inputs = (one @ two.mT).mul_(_number(_variance(variances, left.weight)))
    bias = _number(_variance(variances, left.bias))
    if bias:
        inputs.add_(bias)
    inputs = inputs.view(g, n1, t1, n2, t2).permute(1, 3, 0, 2, 4)
    return inputs, left.full_b().permute(1, 2, 3, 4, 0), right.full_b().permute(1, 2, 3, 4, 0)


def _add_positions(out: Tensor, left: Block, right: Block, variances: Variances) -> None:
    """Shared positions without written-out rows: Σ_ts (a_t·a_s) (b_t·b_s), the inner sum first.

    Takes one left example at a time, and as many right examples as keep the inner sums in cache.
    """
    inputs, b_left, b_right = _position_gram(left, right, variances)
    n1, n2, g, t1, t2 = inputs.shape
    o, k1, k2 = b_left.shape[3], b_left.shape[4], b_right.shape[4]
    b_left, b_right = b_left.reshape(n1, g * t1 * o, k1), b_right.reshape(n2, g, t2, o * k2)
    step = max(1, (_CACHE if out.device.type == "cpu" else _DEVICE_CHUNK) // (g * t1 * o * k2 * out.element_size()))
    target = out.unflatten(0, (n1, k1)).unflatten(2, (n2, k2))
    for n in range(n1):
        for start in range(0, n2, step):
            some = slice(start, min(start + step, n2))
            # (m, G, T1, T2) @ (m, G, T2, o l), then (k, G T1 o) @ (m, G T1 o, l)
            inner = (inputs[n, some] @ b_right[some]).view(-1, g * t1 * o, k2)
            target[n, :, some].add_(torch.bmm(b_left[n].T.expand(len(inner), -1, -1), inner).transpose(0, 1))


def self_blocks(cluster: tuple[Block, ...], variances: Variances) -> Tensor:
    """Σ over a cluster of J_nk P0⁻¹ J_nlᵀ, (n, K, K)."""
    block = cluster[0]
    if isinstance(block, Wide) and len(cluster) == 1:
        total = block.rows.new_zeros(block.shape[1], block.shape[0], block.shape[0])
        for start, stop, variance in _runs(block, variances):
            rows = block.rows[:, :, start:stop]
            total.baddbmm_(rows * variance.to(rows).flatten(), rows.mT)
        return total
    plain = len(cluster) == 1 and isinstance(block, (Outer, Lookup))
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
