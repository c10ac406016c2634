"""Contractions: exact methods that add the products of two clusters of blocks to a tile of K, each with its cost.

A cluster is a set of blocks that share a parameter, whose rows are summed before products are formed. `contractions`
pairs the clusters of two Jacobians and chooses the cheapest method for each pair.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from ntk_laplace.jacobian.blocks import Block, Cluster, Dense, Factored, Outer, clusters, written_out
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.resources import buffer_bytes

__all__ = ["Contraction", "Tile", "Variances", "contractions", "read_once", "tile_rows"]

B = TypeVar("B", bound=Block)

Variance = Tensor | float
"""Prior variance (one over precision) of a parameter: a number, or a tensor with one entry or one per entry of it."""

Variances = Mapping[str, Variance]
"""Prior variance of each parameter. Absent parameters contribute nothing."""


class Tile:
    """Entries of K between n1 and n2 examples, to which contractions add in place.

    Parameters
    ----------
    values : Tensor, (n1*K1, n2*K2)
        A part of a larger matrix, with interleaved rows and columns.
    cotangents : tuple of int
        K1 and K2.
    fresh : bool
        The values are uninitialized: the first product overwrites them.
    """

    def __init__(self, values: Tensor, cotangents: tuple[int, int], fresh: bool) -> None:
        self.values, self.fresh, self._cotangents = values, fresh, cotangents

    def add_product(self, left: Tensor, right: Tensor, variance: Variance) -> None:
        """Add left diag(variance) rightᵀ for rows (n*K, p) and a variance that is a number or has p entries."""
        scale = variance if isinstance(variance, float) else 1.0
        left = _scaled(left, variance) if isinstance(variance, Tensor) else left
        self.values.addmm_(left, right.T, beta=0.0 if self.fresh else 1.0, alpha=scale)
        self.fresh = False

    def started(self) -> Tensor:
        """The values as (n1, K1, n2, K2), zero where nothing was added yet."""
        if self.fresh:
            self.values.zero_()
            self.fresh = False
        k1, k2 = self._cotangents
        return self.values.unflatten(0, (-1, k1)).unflatten(2, (-1, k2))


@dataclass(frozen=True)
class Contraction(ABC, Generic[B]):
    """The products J_nk P0⁻¹ J_mlᵀ of two clusters, by one method.

    A subclass is one method: it gives its `cost`, and adds to a tile in `add`.

    Attributes
    ----------
    left, right : tuple of Block
        Clusters that name the same parameters.
    variances : mapping of str to float or Tensor
        As `read_once` returns them: a tile that asked a device for a number would wait for all work before it.
    """

    left: tuple[B, ...]
    right: tuple[B, ...]
    variances: Variances

    stage: ClassVar[int]  # contractions of one stage share a pass over K; later stages add to an initialized tile

    @classmethod
    @abstractmethod
    def applies(cls, left: Cluster, right: Cluster, variances: Variances) -> bool:
        """Whether the method is exact for these clusters and variances."""

    @property
    @abstractmethod
    def cost(self) -> int:
        """Multiply-adds per pair of examples; more where the method also moves much memory."""

    @abstractmethod
    def add(self, tile: Tile) -> None:
        """Add the products of all examples of both sides."""

    def diagonal(self) -> Tensor:
        """The products of each example with itself, (n, K, K); both sides are the same cluster."""
        k, n = self.left[0].shape
        total: Tensor | None = None
        for name, rows in written_out(self.left).items():
            variance = self.variance(name)
            if variance is not None:
                own = torch.einsum("knp,lnp->nkl", _scaled(rows, variance), rows)
                total = own if total is None else total + own
        return self.left[0].values.new_zeros(n, k, k) if total is None else total

    def passes(self) -> Iterator[Contraction]:
        """Parts that fill K one after the other, to bound the memory of rows that are written out."""
        yield self

    def largest_tile(self) -> float:
        """Maximum number of examples on a side of a square tile, by the buffers of the method."""
        return float("inf")

    def tile_shape(self, n: int, step: int) -> tuple[int, int]:
        """Examples (rows, columns) of the tiles that fill K of n rows of examples; `step` bounds the buffers."""
        return step, step

    def cut_rows(self, examples: slice) -> Contraction:
        """The same products for some examples of the left side."""
        return replace(self, left=_cut(self.left, examples))

    def cut_columns(self, examples: slice) -> Contraction:
        """The same products for some examples of the right side."""
        return replace(self, right=_cut(self.right, examples))

    def variance(self, name: str | None) -> Variance | None:
        """Prior variance of a parameter; None if it contributes nothing."""
        return None if name is None else self.variances.get(name)

    def number(self, name: str | None) -> float:
        """Prior variance of a parameter that has only one, zero if it contributes nothing."""
        variance = self.variance(name)
        return 0.0 if variance is None else float(variance)

    @property
    def cotangents(self) -> int:
        """The larger of K1 and K2."""
        return max(self.left[0].shape[0], self.right[0].shape[0])

    @property
    def cost_of_rows(self) -> int:
        """Cost of products of written-out rows."""
        sizes = {name: size for block in self.left for name, size in block.sizes().items()}
        return self.cotangents**2 * sum(sizes.values())


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
            total.baddbmm_(_scaled(rows, variance), rows.mT)
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
                tile.add_product(_interleaved(ours[name]), _interleaved(theirs[name]), variance)

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
        return _same_factors(left, right) and isinstance(left[0], Outer)

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
            step = max(1, tuning.PANEL_COLUMNS // (g * o))
            for start in range(0, i, step):
                some = slice(start, min(start + step, i))
                own = block.shaped(weight)[..., some] if isinstance(weight, Tensor) else weight
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


class Hadamard(Contraction[Outer]):
    """One position: (a aᵀ/δ_w + 1/δ_b) ∘ b bᵀ; a Kronecker product if b is constant, as in the last layer."""

    stage = 2

    @classmethod
    def applies(cls, left: Cluster, right: Cluster, variances: Variances) -> bool:
        (one, *_), (two, *_) = left, right
        single = isinstance(one, Outer) and isinstance(two, Outer) and one.single and two.single
        return single and _same_factors(left, right) and _one_variance_each(one, variances)

    @property
    def cost(self) -> int:
        (k, _), o, i = self.left[0].shape, self.left[0].b.shape[4], self.left[0].a.shape[3]
        return i + k * k * o

    def add(self, tile: Tile) -> None:
        (left,), (right,) = self.left, self.right
        inputs = (left.a[:, 0, 0] @ right.a[:, 0, 0].T).mul_(self.number(left.weight))
        bias = self.number(left.bias)
        if bias:
            inputs.add_(bias)
        if left.constant and right.constant:
            _add_kronecker(tile.started(), inputs, left.b[:, 0, 0, 0] @ right.b[:, 0, 0, 0].T)
            return
        (n1, n2), k1, k2 = inputs.shape, left.b.shape[0], right.b.shape[0]
        b_left, b_right = (_interleaved(block.full_b()[:, :, 0, 0]) for block in (left, right))
        products = (b_left @ b_right.T).view(n1, k1, n2 * k2)
        # repeat each input product over K2 columns once, so that the large multiplication reads contiguous memory
        spread = inputs.unsqueeze(2).expand(n1, n2, k2).reshape(n1, 1, n2 * k2)
        target = tile.values.unflatten(0, (n1, k1))
        if tile.fresh:
            torch.mul(products, spread, out=target)
            tile.fresh = False
        else:
            target.addcmul_(products, spread)

    def diagonal(self) -> Tensor:
        return Positions(self.left, self.right, self.variances).diagonal()


class Positions(Contraction[Factored]):
    """Pairs of positions or tokens, without written-out rows: Σ_ts (a_t·a_s) (b_t·b_s), the inner sum first."""

    stage = 3

    @classmethod
    def applies(cls, left: Cluster, right: Cluster, variances: Variances) -> bool:
        return _same_factors(left, right) and _one_variance_each(left[0], variances)

    @property
    def cost(self) -> int:
        return self.left[0].gram_cost.contracted

    def add(self, tile: Tile) -> None:
        """Take one left example at a time, and as many right examples as keep the inner sums in cache."""
        (left,), (right,), target = self.left, self.right, tile.started()
        inputs = left.input_products(right, *self._numbers())
        b_left, b_right = (block.grouped_b().permute(1, 2, 3, 4, 0) for block in (left, right))  # (n, G, T, o, K)
        n1, n2, g, t1, t2 = inputs.shape
        o, k1, k2 = b_left.shape[3], b_left.shape[4], b_right.shape[4]
        b_left, b_right = b_left.reshape(n1, g * t1 * o, k1), b_right.reshape(n2, g, t2, o * k2)
        cache = tuning.INNER_SUMS_BYTES if target.device.type == "cpu" else tuning.INNER_SUMS_DEVICE_BYTES
        step = max(1, cache // (g * t1 * o * k2 * target.element_size()))
        for n in range(n1):
            for start in range(0, n2, step):
                some = slice(start, min(start + step, n2))
                # (m, G, T1, T2) @ (m, G, T2, o l), then (k, G T1 o) @ (m, G T1 o, l)
                inner = (inputs[n, some] @ b_right[some]).view(-1, g * t1 * o, k2)
                target[n, :, some].add_(torch.bmm(b_left[n].T.expand(len(inner), -1, -1), inner).transpose(0, 1))

    def diagonal(self) -> Tensor:
        block = self.left[0]
        b = block.grouped_b()
        return torch.einsum("kngto,ngts,lngso->nkl", b, block.own_input_products(*self._numbers()), b)

    def largest_tile(self) -> float:
        both = [block.grouped_b() for block in (*self.left, *self.right)]
        t, g = max(b.shape[3] for b in both), max(b.shape[2] for b in both)
        room = buffer_bytes(tuning.TILE_BYTES, both[0].device)
        return int((room / (both[0].element_size() * g * t * t)) ** 0.5)

    def tile_shape(self, n: int, step: int) -> tuple[int, int]:
        few = min(step, -(-n // 16))
        return few, step * step // few

    def _numbers(self) -> tuple[float, float]:
        """Prior variances of the weight and of the bias."""
        weight, *bias = self.left[0].names
        return self.number(weight), self.number(bias[0] if bias else None)


METHODS: tuple[type[Contraction[Any]], ...] = (Rows, Hadamard, Positions, Panels, Written)
"""All methods; of two that cost the same, the first is taken."""


def contractions(left: Cluster, right: Cluster, variances: Variances) -> list[Contraction]:
    """The cheapest contraction of each pair of clusters, in the order in which they initialize a tile.

    Clusters are paired by their parameters; those without a prior variance are left out.
    """
    variances = read_once(variances)
    ours, theirs = clusters(left), clusters(right)
    if [_names(cluster) for cluster in ours] != [_names(cluster) for cluster in theirs]:
        # sequence lengths or branches of the network differ: only parameters that both sides use contribute
        one, two = written_out(left), written_out(right)
        names = sorted(one.keys() & two.keys())
        ours, theirs = [(Dense.of(n, one[n]),) for n in names], [(Dense.of(n, two[n]),) for n in names]
    found = [
        min((method(*pair) for method in METHODS if method.applies(*pair)), key=lambda each: each.cost)
        for pair in (_by_input(one, two, variances) for one, two in zip(ours, theirs, strict=True)
                     if any(name in variances for name in _names(one)))
    ]
    return sorted(found, key=lambda each: each.stage)


def _by_input(left: Cluster, right: Cluster, variances: Variances) -> tuple[Cluster, Cluster, Variances]:
    """The same products with one prior variance of a layer's weight, if it has one for each input.

    Their roots are multiplied into the inputs, so that rows need not be written out.
    """
    (one, *_), (two, *_) = left, right
    if not (isinstance(one, Outer) and isinstance(two, Outer) and _same_factors(left, right)):
        return left, right, variances
    variance = variances.get(one.weight)
    if not isinstance(variance, Tensor):
        return left, right, variances
    entries = one.shaped(variance)  # (G, o, i)
    if not torch.equal(entries, entries[:, :1].expand_as(entries)):
        return left, right, variances
    scale = entries[:, :1].sqrt()

    def scaled(block: Outer) -> Cluster:
        return (replace(block, a=block.a * scale.to(block.a)),)

    ours = scaled(one)
    return ours, ours if two is one else scaled(two), {**variances, one.weight: 1.0}


def _names(cluster: Cluster) -> tuple[str, ...]:
    return tuple(sorted(name for block in cluster for name in set(block.names)))


def _cut(cluster: tuple[B, ...], examples: slice) -> tuple[B, ...]:
    return tuple(block.subset(examples) for block in cluster)


def _same_factors(left: Cluster, right: Cluster) -> bool:
    """Whether each side is one block with factors, of the same entries in the same order."""
    return len(left) == len(right) == 1 and isinstance(left[0], Factored) and left[0].matches(right[0])


def _one_variance_each(block: Block, variances: Variances) -> bool:
    return all(isinstance(variances[name], float) for name in block.names if name in variances)


def read_once(variances: Variances) -> Variances:
    """The same variances, those of one entry as numbers; all of them come from the device together."""
    single = {name: v for name, v in variances.items() if isinstance(v, Tensor) and v.numel() == 1}
    if not single:
        return variances
    numbers = torch.stack([v.flatten()[0] for v in single.values()]).tolist()
    return {**variances, **dict(zip(single, numbers, strict=True))}


def tile_rows(like: Tensor) -> int:
    """Rows of a tile on the device of `like`."""
    return tuning.TILE_ROWS if like.device.type == "cpu" else tuning.TILE_DEVICE_ROWS


def _scaled(rows: Tensor, variance: Variance) -> Tensor:
    """Rows (..., p) times a variance that is a number or has p entries."""
    return rows * (variance.to(rows).flatten() if isinstance(variance, Tensor) else variance)


def _interleaved(b: Tensor) -> Tensor:
    """(K, n, o) -> (n*K, o)."""
    return b.transpose(0, 1).flatten(0, 1)


def _add_kronecker(out: Tensor, inputs: Tensor, pairs: Tensor) -> None:
    """out (n1, K1, n2, K2) += inputs ⊗ pairs."""
    # elsewhere, a look at the entries would wait for the device
    square = out.device.type == "cpu" and pairs.shape[0] == pairs.shape[1]
    if square and not bool((pairs - torch.diag(pairs.diagonal())).any()):
        out.diagonal(dim1=1, dim2=3).addcmul_(inputs.unsqueeze(2), pairs.diagonal())
    else:
        out.addcmul_(inputs[:, None, :, None], pairs[None, :, None, :])
