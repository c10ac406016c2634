"""Blocks: storage of a batch's Jacobian rows for one parameter, or for a weight and its bias.

Rows are indexed by a cotangent k (a column of the root, or an output) and an example n. All block types are exact:

* `Outer`: J_nk = Σ_t b_nkt ⊗ a_nt, a layer's output gradients b and inputs a over shared positions t;
* `Lookup`: an embedding's rows, where a is a one-hot token;
* `Dense`: the dense rows of one parameter;
* `Wide`: the dense rows of several parameters, concatenated.

All have the same methods, in the same order:

* `sizes`: number of entries of each parameter;
* `dense`: the rows written out, (K, N, p) by parameter;
* `weighted`: rows of SᵀJ for a root S (N, C, R);
* `subset`: rows of some examples;
* `to`: the block in another floating type, or on another device;
* `jvp`: J v for a vector v by parameter, (K, N);
* `vjp`: Jᵀ c for c (K, N), flat by parameter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = ["Block", "Dense", "Lookup", "Outer", "Wide", "weigh"]


def weigh(values: Tensor, root: Tensor) -> Tensor:
    """Sᵀ over the leading output axis: (C, N, ...) and root (N, C, R) give (R, N, ...)."""
    flat = values.flatten(2)
    return torch.einsum("ncr,cnx->rnx", root, flat).reshape(root.shape[-1], *values.shape[1:])


def _over_cotangents(cotangent: Tensor, b: Tensor) -> Tensor:
    """Σ_k c_kn b_kn: (K, N) and (K, N, ...) give (N, ...). A loop, because an einsum would run N tiny products."""
    weights = cotangent.reshape(*cotangent.shape, *(1,) * (b.ndim - 2))
    total = b[0] * weights[0]
    for k in range(1, len(b)):
        total.addcmul_(b[k], weights[k])
    return total


def _position_product(left: Tensor, right: Tensor) -> Tensor:
    """Σ_t left_kngto right_ngti -> (K, N, G*o*i), examples first in memory, the layout of `Wide`.

    One product per example covers all cotangents. It needs no copy if the cotangents are next to the examples in
    memory, which is how `Gradients` stores them.
    """
    k, n, g, t, o = left.shape
    if t == 1:
        return (left.squeeze(3).unsqueeze(-1) * right.squeeze(2).unsqueeze(-2)).flatten(2)
    few = _few_rows(k, left, right)
    left = left.permute(1, 2, 0, 4, 3).reshape(n, g, k * o, t)
    # read both operands contiguously: transposing a small result is cheaper
    rows = (right.mT @ left.mT).mT.contiguous() if few else left @ right
    rows = rows.view(n, g, k, -1).transpose(1, 2).reshape(n, k, -1)
    return rows.transpose(0, 1)


def _summed_product(left: Tensor, right: Tensor) -> Tensor:
    """Σ_nt left_ngto right_ngti -> (G, o, i)."""
    if left.shape[1:3] == (1, 1):
        return (left[:, 0, 0].T @ right[:, 0, 0]).unsqueeze(0)
    if _few_rows(1, left, right):
        return (right.mT @ left).sum(0).mT
    return torch.einsum("ngto,ngti->goi", left, right)


def _few_rows(k: int, left: Tensor, right: Tensor) -> bool:
    """Whether the rows of k cotangents are small beside factors whose inputs are contiguous over positions."""
    t, o, i = left.shape[-2], left.shape[-1], right.shape[-1]
    return right.stride(-2) == 1 and t * (k * o + i) > 2 * k * o * i


@dataclass(frozen=True)
class Dense:
    """Dense rows of one parameter.

    Attributes
    ----------
    weight : str
        The parameter's name.
    rows : Tensor, (K, N, p)
        In the parameter's flat order.
    """

    weight: str
    rows: Tensor

    @property
    def names(self) -> tuple[str, ...]:
        return (self.weight,)

    @property
    def kind(self) -> tuple:
        return ("dense", self.weight)

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N)."""
        return self.rows.shape[0], self.rows.shape[1]

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    def sizes(self) -> dict[str, int]:
        return {self.weight: self.rows.shape[-1]}

    def dense(self) -> dict[str, Tensor]:
        return {self.weight: self.rows}

    def weighted(self, root: Tensor) -> Dense:
        return replace(self, rows=weigh(self.rows, root))

    def subset(self, index: slice | Tensor) -> Dense:
        return replace(self, rows=self.rows[:, index])

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> Dense:
        return replace(self, rows=self.rows.to(device, dtype))

    def jvp(self, vector: dict[str, Tensor]) -> Tensor:
        return self.rows @ vector[self.weight].flatten()

    def vjp(self, cotangent: Tensor) -> dict[str, Tensor]:
        rows, weights = self.rows, cotangent
        if rows.stride(0) < rows.stride(1):
            # examples come first in memory: this order is one matrix product without a copy
            rows, weights = rows.transpose(0, 1), weights.T
        return {self.weight: weights.flatten() @ rows.flatten(0, 1)}


@dataclass(frozen=True)
class Outer:
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
    def shape(self) -> tuple[int, int]:
        """(K, N)."""
        return self.b.shape[0], self.a.shape[0]

    @property
    def nbytes(self) -> int:
        return self.b.nbytes + self.a.nbytes

    @property
    def single(self) -> bool:
        """One position and one group: the Gram matrix is a Hadamard product."""
        return self.b.shape[2] == 1 and self.b.shape[3] == 1

    def full_b(self) -> Tensor:
        """b with a full example axis, also if it is constant."""
        return self.b.expand(-1, self.a.shape[0], -1, -1, -1) if self.constant else self.b

    def sizes(self) -> dict[str, int]:
        found = {self.weight: self.size}
        return found if self.bias is None else found | {self.bias: self.b.shape[2] * self.b.shape[4]}

    def dense(self) -> dict[str, Tensor]:
        b = self.full_b()
        rows = _position_product(b, self.a)
        if self.index is not None:
            whole = rows.new_zeros(*rows.shape[:2], self.size)
            whole[..., self.index] = rows
            rows = whole
        found = {self.weight: rows}
        if self.bias is not None:
            found[self.bias] = self.sums()
        return found

    def columns(self, sample: slice) -> Tensor:
        """Rows of the weight for some columns of the layer inputs, in the order of the block, (K, N, G*o*i)."""
        return _position_product(self.full_b(), self.a[..., sample])

    def shaped(self, vector: Tensor) -> Tensor:
        """Entries of the weight, (G, o, i)."""
        flat = vector.flatten() if self.index is None else vector.flatten()[self.index]
        return flat.reshape(self.b.shape[2], self.b.shape[4], self.a.shape[3])

    def sums(self) -> Tensor:
        """Σ_t b_nkt, the rows of a bias, (K, N, G*o)."""
        b = self.full_b()
        return (b.squeeze(3) if b.shape[3] == 1 else b.sum(3)).flatten(2)

    def weighted(self, root: Tensor) -> Outer:
        return replace(self, b=weigh(self.full_b(), root), constant=False)

    def subset(self, index: slice | Tensor) -> Outer:
        return replace(self, b=self.b if self.constant else self.b[:, index], a=self.a[index])

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> Outer:
        index = None if self.index is None else self.index.to(device)
        return replace(self, b=self.b.to(device, dtype), a=self.a.to(device, dtype), index=index)

    def jvp(self, vector: dict[str, Tensor]) -> Tensor:
        forward = torch.einsum("ngti,goi->ngto", self.a, self.shaped(vector[self.weight]))
        if self.bias is not None:
            forward = forward + vector[self.bias].reshape(1, self.b.shape[2], 1, self.b.shape[4])
        return torch.einsum("kngto,ngto->kn", self.full_b(), forward)

    def vjp(self, cotangent: Tensor) -> dict[str, Tensor]:
        backward = _over_cotangents(cotangent, self.full_b())
        flat = _summed_product(backward, self.a).flatten()
        if self.index is not None:
            whole = flat.new_zeros(self.size)
            whole[self.index] = flat
            flat = whole
        found = {self.weight: flat}
        if self.bias is not None:
            found[self.bias] = backward.sum((0, 2)).flatten()
        return found


@dataclass(frozen=True)
class Lookup:
    """Rows of an embedding: J_nk[v] = Σ_t 1[token_nt = v] b_nkt.

    Attributes
    ----------
    weight : str
        The table's name.
    b : Tensor, (K, N, T, d)
        Output gradients, zero at padding tokens.
    tokens : Tensor, (N, T)
        Row of the table used at each position.
    vocabulary : int
        Number of rows of the table.
    padding : int
        The padding token, which has no gradient; -1 if there is none.
    """

    weight: str
    b: Tensor
    tokens: Tensor
    vocabulary: int
    padding: int = -1

    @property
    def names(self) -> tuple[str, ...]:
        return (self.weight,)

    @property
    def kind(self) -> tuple:
        return ("lookup", self.weight, self.b.shape[3])

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N)."""
        return self.b.shape[0], self.b.shape[1]

    @property
    def nbytes(self) -> int:
        return self.b.nbytes + self.tokens.nbytes

    def sizes(self) -> dict[str, int]:
        return {self.weight: self.vocabulary * self.b.shape[3]}

    def dense(self) -> dict[str, Tensor]:
        k, n, t, d = self.b.shape
        rows = self.b.new_zeros(k, n, self.vocabulary, d)
        where = self.tokens[None, :, :, None].expand(k, n, t, d)
        return {self.weight: rows.scatter_add_(2, where, self.b).flatten(2)}

    def weighted(self, root: Tensor) -> Lookup:
        return replace(self, b=weigh(self.b, root))

    def subset(self, index: slice | Tensor) -> Lookup:
        return replace(self, b=self.b[:, index], tokens=self.tokens[index])

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> Lookup:
        return replace(self, b=self.b.to(device, dtype), tokens=self.tokens.to(device))

    def jvp(self, vector: dict[str, Tensor]) -> Tensor:
        table = vector[self.weight].reshape(self.vocabulary, -1)
        return torch.einsum("kntd,ntd->kn", self.b, table[self.tokens])

    def vjp(self, cotangent: Tensor) -> dict[str, Tensor]:
        backward = _over_cotangents(cotangent, self.b)
        table = backward.new_zeros(self.vocabulary, backward.shape[-1])
        return {self.weight: table.index_add_(0, self.tokens.flatten(), backward.flatten(0, 1)).flatten()}


@dataclass(frozen=True)
class Wide:
    """Concatenated dense rows of several parameters, for one matrix product over all of them.

    Attributes
    ----------
    spans : tuple of (str, int, int)
        Name, first and last column (exclusive) of each parameter.
    rows : Tensor, (N, K, Σp)
        Examples first: consecutive examples are one contiguous matrix.
    """

    spans: tuple[tuple[str, int, int], ...]
    rows: Tensor

    @classmethod
    def of(cls, blocks: list[Dense], dtype: torch.dtype | None = None) -> Wide:
        """Concatenate the rows of single parameters. The list is emptied: each block is freed once it is copied.

        A single block that already has the right memory layout is not copied.
        """
        k, n = blocks[0].shape
        if len(blocks) == 1:
            only = blocks.pop()
            return cls(((only.weight, 0, only.rows.shape[2]),), only.rows.transpose(0, 1).to(dtype).contiguous())
        rows = blocks[0].rows.new_empty(n, k, sum(block.rows.shape[2] for block in blocks), dtype=dtype)
        spans, start = [], 0
        while blocks:
            block = blocks.pop(0)
            width = block.rows.shape[2]
            rows[:, :, start : start + width] = block.rows.transpose(0, 1)
            spans.append((block.weight, start, start + width))
            start += width
        return cls(tuple(spans), rows)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _, _ in self.spans)

    @property
    def kind(self) -> tuple:
        return ("wide", self.spans)

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N)."""
        return self.rows.shape[1], self.rows.shape[0]

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    def sizes(self) -> dict[str, int]:
        return {name: stop - start for name, start, stop in self.spans}

    def dense(self) -> dict[str, Tensor]:
        cotangents_first = self.rows.transpose(0, 1)
        return {name: cotangents_first[:, :, start:stop] for name, start, stop in self.spans}

    def weighted(self, root: Tensor) -> Wide:
        return replace(self, rows=root.mT @ self.rows)

    def subset(self, index: slice | Tensor) -> Wide:
        return replace(self, rows=self.rows[index])

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> Wide:
        return replace(self, rows=self.rows.to(device or self.rows.device, dtype))

    def jvp(self, vector: dict[str, Tensor]) -> Tensor:
        return (self.rows @ torch.cat([vector[name].flatten() for name in self.names])).T

    def vjp(self, cotangent: Tensor) -> dict[str, Tensor]:
        total = cotangent.T.flatten() @ self.rows.flatten(0, 1)
        return {name: total[start:stop] for name, start, stop in self.spans}


Block = Dense | Outer | Lookup | Wide
