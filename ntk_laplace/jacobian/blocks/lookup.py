"""Rows of an embedding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ntk_laplace.jacobian.blocks.base import Block, Factored, GramCost, cat_positions, over_cotangents, weigh
from ntk_laplace.jacobian.blocks.dense import Dense
from ntk_laplace.runtime.reflections import Basis, turned


@dataclass(frozen=True)
class Lookup(Factored):
    """Rows of an embedding: J_nk[v] = Σ_t 1[token_nt = v] b_nkt. Its entries are (1, V, d).

    Attributes
    ----------
    weight : str
        The table's name.
    b : Tensor, (K, N, T, d)
        Output gradients, zero at padding tokens.
    tokens : Tensor, (N, T)
        Row of the table used at each position.
    vocabulary : int
        Number of rows V of the table.
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
        return self.b.shape[0], self.b.shape[1]

    @property
    def nbytes(self) -> int:
        return self.b.nbytes + self.tokens.nbytes

    @property
    def values(self) -> Tensor:
        return self.b

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

    def jvp(self, vector: Mapping[str, Tensor]) -> Tensor:
        table = vector[self.weight].reshape(self.vocabulary, -1)
        return torch.einsum("kntd,ntd->kn", self.b, table[self.tokens])

    def vjp(self, cotangent: Tensor) -> dict[str, Tensor]:
        backward = over_cotangents(cotangent, self.b)
        table = backward.new_zeros(self.vocabulary, backward.shape[-1])
        return {self.weight: table.index_add_(0, self.tokens.flatten(), backward.flatten(0, 1)).flatten()}

    def push(self, vectors: Mapping[str, Tensor]) -> Tensor:
        return self.products(vectors[self.weight].view(-1, *self.entries))

    def pull(self, cotangents: Tensor) -> dict[str, Tensor]:
        tables = [self.vjp(cotangents[..., place])[self.weight] for place in range(cotangents.shape[2])]
        return {self.weight: torch.stack(tables)}

    def joined(self, others: Sequence[Lookup]) -> Lookup:
        uses = [self, *others]
        return replace(self, b=torch.cat([one.b for one in uses], 2), tokens=torch.cat([one.tokens for one in uses], 1))

    def concatenated(self, parts: Sequence[Lookup]) -> Lookup:
        tokens = cat_positions([part.tokens for part in parts], 0, 1)
        return replace(self, b=cat_positions([part.b for part in parts], 1, 2), tokens=tokens)

    # --- factors in Gram matrices

    @property
    def gram_cost(self) -> GramCost:
        k, _, t, d = self.b.shape
        rows = k * self.vocabulary * d
        return GramCost(k * rows, 2 * (t * t * (1 + k * d) + k * k * t * d), rows, k * t * d)

    def matches(self, other: Block) -> bool:
        return isinstance(other, Lookup) and other.weight == self.weight

    def input_products(self, other: Lookup, weight: float, bias: float) -> Tensor:
        equal = self.tokens[:, None, :, None] == other.tokens[None, :, None]
        return equal.to(self.b.dtype).mul_(weight).unsqueeze(2)

    def own_input_products(self, weight: float, bias: float) -> Tensor:
        return (self.tokens[:, :, None] == self.tokens[:, None, :]).to(self.b.dtype)[:, None] * weight

    def grouped_b(self) -> Tensor:
        return self.b.unsqueeze(2)

    def with_cotangents_last(self) -> Lookup:
        return replace(self, b=self.b.movedim(0, -1).contiguous().movedim(-1, 0))

    # --- rows as (1, V, d) entries

    @property
    def entries(self) -> tuple[int, int, int]:
        return 1, self.vocabulary, self.b.shape[3]

    def written(self, part: slice) -> Tensor:
        return self.subset(part).dense()[self.weight].transpose(0, 1).unflatten(2, self.entries)

    def rotated(self, basis: Basis) -> Lookup | Dense:
        """Rows in another basis; written out unless its left side, that of the tokens, is the identity."""
        rows = replace(self, b=turned(self.b.unsqueeze(2), basis.right).squeeze(2), padding=-1)
        return rows if basis.left is None else rows._as_dense().rotated(Basis(basis.left, None))

    def squares(self) -> Tensor:
        squares = self._summed_by_token().square().sum(0).flatten(0, 1)
        return squares.new_zeros(self.vocabulary, squares.shape[1]).index_add_(0, self.tokens.flatten(), squares)[None]

    def inner(self, weights: Tensor) -> Tensor:
        own = weights.expand(self.entries)[0][self.tokens]  # (N, T, d)
        rows = self._summed_by_token().transpose(0, 1)
        return (rows * own.unsqueeze(1)).flatten(2) @ rows.flatten(2).mT

    def products(self, vectors: Tensor) -> Tensor:
        return torch.stack([torch.einsum("kntd,ntd->kn", self.b, table[self.tokens]) for table in vectors[:, 0]], 2)

    def joint(self, weights: Tensor) -> Tensor:
        """`inner` for all pairs of examples, interleaved, (N*K, N*K); unused tokens are skipped."""
        used, tokens = torch.unique(self.tokens, return_inverse=True)
        rows = replace(self, tokens=tokens, vocabulary=len(used), padding=-1)._as_dense()
        return rows.joint(weights.expand(self.entries)[:, used])

    def _as_dense(self) -> Dense:
        return Dense.of_layer(self.weight, self.written(slice(None)))

    def _summed_by_token(self) -> Tensor:
        """b summed over equal tokens of an example: the sum at the first of them, zero at the others."""
        equal = self.tokens[:, :, None] == self.tokens[:, None, :]  # (N, T, S)
        first = ~equal.tril(-1).any(-1)
        summed = torch.einsum("nts,knsd->kntd", equal.to(self.b.dtype), self.b)
        return summed * first.to(self.b.dtype)[None, :, :, None]
