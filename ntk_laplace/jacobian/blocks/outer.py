"""Rows of a layer as sums of outer products."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ntk_laplace.jacobian.blocks.base import Block, Factored, GramCost, cat_positions, over_cotangents, weigh
from ntk_laplace.jacobian.blocks.outer_entries import OuterEntries
from ntk_laplace.jacobian.blocks.outer_products import (
    add_pulled_,
    add_pushed_,
    factors_are_cheaper,
    position_product,
    summed_product,
)
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.panels import panels


@dataclass(frozen=True)
class Outer(OuterEntries, Factored):
    """Rows of a weight, and of the bias that shares its output gradient, as sums of outer products.

    Attributes
    ----------
    weight : str
        The weight's name.
    bias : str or None
        The bias's name; its rows are Σ_t b_nkt. None if the block has no bias.
    b : Tensor, (K, N, G, T, o)
        Output gradients; G counts groups of a grouped convolution.
    a : Tensor, (N, G, T, i)
        Layer inputs.
    index : Tensor or None, (G*o*i,)
        Position of entry (g, o, i) in the weight's flat order; None if the two orders are the same.
    size : int
        Number of entries of the weight (larger than G*o*i where a slice of it is used).
    constant : bool
        b is the same for every example, as in the last linear layer.
    """

    weight: str
    bias: str | None
    b: Tensor
    a: Tensor
    index: Tensor | None
    size: int
    constant: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def kind(self) -> tuple:
        key = None if self.index is None else hash(self.index.cpu().numpy().tobytes())
        return ("outer", self.weight, self.bias, self.b.shape[2], self.b.shape[4], self.a.shape[3], key)

    @property
    def nbytes(self) -> int:
        return self.b.nbytes + self.a.nbytes

    @property
    def values(self) -> Tensor:
        return self.b

    @property
    def single(self) -> bool:
        """One position and one group: the Gram matrix is a Hadamard product."""
        return self.b.shape[2] == 1 and self.b.shape[3] == 1

    def sizes(self) -> dict[str, int]:
        found = {self.weight: self.size}
        return found if self.bias is None else found | {self.bias: self.b.shape[2] * self.b.shape[4]}

    def dense(self) -> dict[str, Tensor]:
        found = {self.weight: self._in_place(position_product(self.full_b(), self.a))}
        return found if self.bias is None else found | {self.bias: self.sums()}

    def _in_place(self, entries: Tensor) -> Tensor:
        """Entries (..., G o i) at their places in the weight, (..., size)."""
        if self.index is None:
            return entries
        whole = entries.new_zeros(*entries.shape[:-1], self.size)
        whole[..., self.index] = entries
        return whole

    def columns(self, sample: slice) -> Tensor:
        """Rows of the weight for some columns of the layer inputs, in the order of the block, (K, N, G*o*i)."""
        return position_product(self.full_b(), self.a[..., sample])

    def shaped(self, vectors: Tensor) -> Tensor:
        """Flat vectors (..., p) of the weight as entries (..., G, o, i)."""
        flat = vectors if self.index is None else vectors[..., self.index]
        return flat.unflatten(-1, (self.b.shape[2], self.b.shape[4], self.a.shape[3]))

    def sums(self) -> Tensor:
        """Σ_t b_nkt, the rows of a bias, (K, N, G*o)."""
        b = self.full_b()
        return (b.squeeze(3) if b.shape[3] == 1 else b.sum(3)).flatten(2)

    def weighted(self, root: Tensor) -> Outer:
        if self.constant:
            b = (root.mT @ self.b[:, 0].flatten(1)).transpose(0, 1).unflatten(2, self.b.shape[2:])
        else:
            b = weigh(self.b, root)
        return replace(self, b=b, constant=False)

    def subset(self, index: slice | Tensor) -> Outer:
        return replace(self, b=self.b if self.constant else self.b[:, index], a=self.a[index])

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> Outer:
        index = None if self.index is None else self.index.to(device)
        return replace(self, b=self.b.to(device, dtype), a=self.a.to(device, dtype), index=index)

    def jvp(self, vector: Mapping[str, Tensor]) -> Tensor:
        forward = torch.einsum("ngti,goi->ngto", self.a, self.shaped(vector[self.weight].flatten()))
        if self.bias is not None:
            forward = forward + vector[self.bias].reshape(1, self.b.shape[2], 1, self.b.shape[4])
        if self.constant:
            return self.b[:, 0].flatten(1) @ forward.flatten(1).T
        return torch.einsum("kngto,ngto->kn", self.b, forward)

    def vjp(self, cotangent: Tensor) -> dict[str, Tensor]:
        if self.constant:
            backward = (cotangent.T @ self.b[:, 0].flatten(1)).view(-1, *self.b.shape[2:])
        else:
            backward = over_cotangents(cotangent, self.b)
        found = {self.weight: self._in_place(summed_product(backward, self.a).flatten())}
        return found if self.bias is None else found | {self.bias: backward.sum((0, 2)).flatten()}

    def push(self, vectors: Mapping[str, Tensor]) -> Tensor:
        count = len(vectors[self.weight])
        if not factors_are_cheaper(self.b, self.a, count):
            return super().push(vectors)
        b = self.full_b()
        out = b.new_zeros(*self.shape, count)
        for some in self._vector_panels(count):
            weights = self.shaped(vectors[self.weight][some])
            biases = None if self.bias is None else vectors[self.bias][some].unflatten(1, weights.shape[1:3])
            add_pushed_(out[..., some], b, self.a, weights, biases)
        return out

    def pull(self, cotangents: Tensor) -> dict[str, Tensor]:
        count = cotangents.shape[2]
        if not factors_are_cheaper(self.b, self.a, count):
            return super().pull(cotangents)
        b = self.full_b()
        groups, _, o = b.shape[2:]
        weights, biases = b.new_zeros(count, groups, o, self.a.shape[3]), b.new_zeros(count, groups, o)
        for some in self._vector_panels(count):
            add_pulled_(weights[some], biases[some], b, self.a, cotangents[..., some])
        found = {self.weight: self._in_place(weights.flatten(1))}
        return found if self.bias is None else found | {self.bias: biases.flatten(1)}

    def _vector_panels(self, count: int) -> Iterator[slice]:
        """Slices of vectors whose entries of one layer form a wide product that stays in the cache."""
        return panels(count, self.b.shape[4], tuning.PRODUCT_COLUMNS)

    def joined(self, others: Sequence[Outer]) -> Outer:
        uses = [self, *others]
        b, a = torch.cat([one.full_b() for one in uses], 3), torch.cat([one.a for one in uses], 2)
        return replace(self, b=b, a=a, constant=False)

    def concatenated(self, parts: Sequence[Outer]) -> Outer:
        a = cat_positions([part.a for part in parts], 0, 2)
        if all(part.constant and torch.equal(part.b, self.b) for part in parts):
            return replace(self, a=a)
        return replace(self, b=cat_positions([part.full_b() for part in parts], 1, 3), a=a, constant=False)

    # --- factors in Gram matrices

    @property
    def gram_cost(self) -> GramCost:
        (k, _, g, t, o), i = self.b.shape, self.a.shape[3]
        rows = k * g * o * i
        return GramCost(k * rows, 2 * g * (t * t * (i + k * o) + k * k * t * o), rows, g * t * (k * o + i))

    def matches(self, other: Block) -> bool:
        return isinstance(other, Outer) and other.names == self.names and same_order(self.index, other.index)

    def input_products(self, other: Outer, weight: float, bias: float) -> Tensor:
        (n1, g, t1, i), (n2, _, t2, _) = self.a.shape, other.a.shape
        one = self.a.transpose(0, 1).reshape(g, n1 * t1, i)
        two = other.a.transpose(0, 1).reshape(g, n2 * t2, i)
        inputs = (one @ two.mT).mul_(weight)
        if bias:
            inputs.add_(bias)
        return inputs.view(g, n1, t1, n2, t2).permute(1, 3, 0, 2, 4)

    def own_input_products(self, weight: float, bias: float) -> Tensor:
        return torch.einsum("ngti,ngsi->ngts", self.a, self.a) * weight + bias

    def grouped_b(self) -> Tensor:
        return self.full_b()

    def with_cotangents_last(self) -> Outer:
        return replace(self, b=self.b.movedim(0, -1).contiguous().movedim(-1, 0), a=self.a.contiguous())

    # --- rows as (G, o, i) entries

    @property
    def entries(self) -> tuple[int, int, int]:
        return self.b.shape[2], self.b.shape[4], self.a.shape[3] + (self.bias is not None)

    def with_ones(self, a: Tensor) -> Tensor:
        return a if self.bias is None else torch.cat([a, a.new_ones(*a.shape[:-1], 1)], -1)


def same_order(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two `index` of entries are the same."""
    if one is None or other is None:
        return one is other
    return one is other or torch.equal(one, other)
