"""Jacobian rows of one parameter block, as (G, o, i) entries, optionally rotated into an eigenbasis.

Structured weight space needs sums of squares, weighted inner products of rows, and projections. They are computed
without a dense C x P Jacobian where a layer's inputs and output gradients suffice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ntk_laplace import tuning

__all__ = ["BlockRows", "DenseRows", "FusedBlockSums", "LookupRows", "OuterRows"]


def _steps(n: int, per_example: int) -> Iterator[slice]:
    """Slices of examples whose written-out rows fit in the panel."""
    step = max(1, tuning.WRITTEN_BYTES // max(1, per_example))
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))


def _turn(values: Tensor, basis: Tensor | None) -> Tensor:
    """Project (..., G, T, p) onto the columns of a basis (G, p, q); None is the identity."""
    return values if basis is None else torch.einsum("...gtp,gpq->...gtq", values, basis)


class _Written:
    """Base class: operations on rows that are written out a few examples at a time."""

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """(K, N, G, o, i)."""
        raise NotImplementedError

    @property
    def held(self) -> Tensor:
        """A tensor of the rows' type and device."""
        raise NotImplementedError

    def written(self, part: slice) -> Tensor:
        """Rows of some examples, (n, K, G, o, i)."""
        raise NotImplementedError

    @property
    def num_cotangents(self) -> int:
        """K."""
        return self.shape[0]

    @property
    def num_examples(self) -> int:
        """N."""
        return self.shape[1]

    @property
    def entries(self) -> tuple[int, int, int]:
        """(G, o, i)."""
        return self.shape[2:]

    @property
    def itemsize(self) -> int:
        """Bytes of one entry."""
        return self.held.element_size()

    def _panels(self) -> Iterator[tuple[slice, Tensor]]:
        g, o, i = self.entries
        for part in _steps(self.num_examples, self.num_cotangents * g * o * i * self.itemsize):
            yield part, self.written(part)

    def squares(self) -> Tensor:
        """Σ_nk J_nk², (G, o, i)."""
        total = self.held.new_zeros(self.entries)
        for _, rows in self._panels():
            total += rows.square().sum((0, 1))
        return total

    def blocks(self, weights: Tensor) -> Tensor:
        """Σ_e w_e J_nke J_nle for weights (G, o, i): (N, K, K)."""
        out = self.held.new_empty(self.num_examples, self.num_cotangents, self.num_cotangents)
        flat = weights.expand(self.entries).flatten()
        for part, rows in self._panels():
            rows = rows.flatten(2)
            out[part] = (rows * flat) @ rows.mT
        return out

    def joint(self, weights: Tensor) -> Tensor:
        """`blocks` for all pairs of examples, interleaved, (N*K, N*K)."""
        size = self.num_examples * self.num_cotangents
        out = self.held.new_zeros(size, size)
        flat = weights.expand(self.entries).flatten()
        halves = list(self._panels())
        for rows, left in halves:
            scaled = left.flatten(2).flatten(0, 1) * flat
            for columns, right in halves:
                k = self.num_cotangents
                out[rows.start * k : rows.stop * k, columns.start * k : columns.stop * k] = (
                    scaled @ right.flatten(2).flatten(0, 1).T
                )
        return out

    def products(self, vectors: Tensor) -> Tensor:
        """J_nk v for vectors (m, G, o, i): (K, N, m)."""
        flat = vectors.flatten(1).T
        return torch.cat([rows.flatten(2) @ flat for _, rows in self._panels()]).transpose(0, 1)

    def project(self, weights: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """(left ⊗ right)ᵀ (w ∘ J_nk) for bases (G, o, p) and (G, i, q): (N, K, G, p, q)."""
        g = self.entries[0]
        out = self.held.new_empty(self.num_examples, self.num_cotangents, g, left.shape[2], right.shape[2])
        for part, rows in self._panels():
            out[part] = left.mT @ (rows * weights) @ right
        return out


@dataclass(frozen=True)
class OuterRows(_Written):
    """J_nk = Σ_t b_nkt ⊗ a_nt.

    Attributes
    ----------
    b : Tensor, (K, N, G, T, o)
    inputs : Tensor, (N, G, T, i), or (N, G, T, i - 1) with `ones`
    ones : bool
        Append an input of 1, for the bias.
    """

    b: Tensor
    inputs: Tensor
    ones: bool = False

    @cached_property
    def a(self) -> Tensor:
        """Inputs, with the appended 1 if there is one, (N, G, T, i)."""
        if not self.ones:
            return self.inputs
        return torch.cat([self.inputs, self.inputs.new_ones(*self.inputs.shape[:-1], 1)], -1)

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """(K, N, G, o, i)."""
        k, n = self.b.shape[0], self.inputs.shape[0]
        return k, n, self.b.shape[2], self.b.shape[4], self.inputs.shape[3] + self.ones

    @property
    def held(self) -> Tensor:
        """A tensor of the rows' type and device."""
        return self.b

    @property
    def single(self) -> bool:
        """One position: each row is one outer product."""
        return self.b.shape[3] == 1

    def rotated(self, left: Tensor | None, right: Tensor | None) -> OuterRows:
        """Rows in the basis left ⊗ right, (G, o, p) and (G, i, q)."""
        return OuterRows(_turn(self.b, left), _turn(self.a, right))

    def scaled(self, scale: Tensor) -> DenseRows:
        """Entries multiplied by (G, o, i)."""
        return DenseRows(self.written(slice(None)) * scale)

    def written(self, part: slice) -> Tensor:
        """Rows of some examples, (n, K, G, o, i)."""
        b, a = self.b[:, part], self.a[part]
        k, n, g, t, o = b.shape
        left = b.permute(1, 2, 0, 4, 3).reshape(n, g, k * o, t)
        return (left @ a).view(n, g, k, o, -1).transpose(1, 2)

    def squares(self) -> Tensor:
        """Σ_nk J_nk², (G, o, i)."""
        if not self.single:
            return super().squares()
        return torch.einsum("ngo,ngi->goi", self.b[:, :, :, 0].square().sum(0), self.a[:, :, 0].square())

    def blocks(self, weights: Tensor) -> Tensor:
        """Σ_e w_e J_nke J_nle for weights (G, o, i): (N, K, K)."""
        if not self.single:
            return super().blocks(weights)
        # Σ_i w_oi a_i² first, which leaves a weighted product of the outputs' side
        sides = torch.einsum("ngi,goi->ngo", self.a[:, :, 0].square(), weights.expand(self.entries)).flatten(1)
        rows = self.b[:, :, :, 0].transpose(0, 1).flatten(2)
        return (rows * sides.unsqueeze(1)) @ rows.mT

    def joint(self, weights: Tensor) -> Tensor:
        """`blocks` for all pairs of examples, interleaved, (N*K, N*K), a few outputs of the layer at a time."""
        g, o, i = self.entries
        size = self.num_examples * self.num_cotangents
        out, weights = self.held.new_zeros(size, size), weights.expand(self.entries)
        for part in _steps(o, size * g * i * self.itemsize):
            rows = OuterRows(self.b[..., part], self.a).written(slice(None)).flatten(2).flatten(0, 1)
            out.addmm_(rows * weights[:, part].flatten(), rows.T)
        return out

    def products(self, vectors: Tensor) -> Tensor:
        """J_nk v for vectors (m, G, o, i): (K, N, m)."""
        if not self.single:
            return super().products(vectors)
        a, out = self.a[:, :, 0].transpose(0, 1), self.held.new_empty(self.num_cotangents, self.num_examples,
                                                                      len(vectors))
        for place, vector in enumerate(vectors):  # bᵀ V a, without written-out rows
            inputs = a @ vector.mT  # (G, N, o)
            out[:, :, place] = torch.einsum("kngo,gno->kn", self.b[:, :, :, 0], inputs)
        return out

    def separated(self, left: Tensor, right: Tensor) -> Tensor:
        """Σ_r (b_nkᵀ l_mr)(a_nᵀ h_mr), one group and position, for l (m, r, o) and h (m, r, i): (K, N, m)."""
        out = self.held.new_empty(self.num_cotangents, self.num_examples, len(left))
        outputs, inner = left.flatten(0, 1).T, right.flatten(0, 1).T
        for part in _steps(self.num_examples, 2 * inner.shape[1] * self.itemsize):
            inputs = self.a[part, 0, 0] @ inner
            for seed, b in enumerate(self.b[:, part, 0, 0]):
                out[seed, part] = (b @ outputs).mul_(inputs).view(-1, *left.shape[:2]).sum(2)
        return out

    def project(self, weights: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """(left ⊗ right)ᵀ (w ∘ J_nk) for bases (G, o, p) and (G, i, q): (N, K, G, p, q)."""
        if not self.single:
            return super().project(weights, left, right)
        out = self.held.new_empty(self.num_examples, self.num_cotangents, len(left), left.shape[2], right.shape[2])
        weights = weights.expand(self.entries)
        (o, i), p, q, k = self.entries[1:], left.shape[2], right.shape[2], self.num_cotangents
        numbers = len(left) * (k * o * p + q * (o + i) + k * p * q)  # per example
        for part in _steps(self.num_examples, numbers * self.itemsize):
            inner = weights @ (self.a[part, :, 0].unsqueeze(-1) * right)  # (n, G, o, q)
            own = self.b[:, part, :, 0].transpose(0, 1).unsqueeze(-1) * left  # (n, K, G, o, p)
            out[part] = own.mT @ inner.unsqueeze(1)
        return out


@dataclass(frozen=True)
class LookupRows(_Written):
    """Rows of a table: J_nk[v] = Σ_t 1[token_nt = v] b_nkt.

    Attributes
    ----------
    b : Tensor, (K, N, T, d)
    tokens : Tensor, (N, T)
    vocabulary : int
    padding : int
        The padding token, which has no gradient; -1 if there is none.
    """

    b: Tensor
    tokens: Tensor
    vocabulary: int
    padding: int = -1

    def _added_up(self) -> Tensor:
        """b summed over equal tokens of an example: the sum at the first of them, zero at the others."""
        equal = self.tokens[:, :, None] == self.tokens[:, None, :]  # (N, T, S)
        first = ~equal.tril(-1).any(-1)
        summed = torch.einsum("nts,knsd->kntd", equal.to(self.b.dtype), self.b)
        return summed * first.to(self.b.dtype)[None, :, :, None]

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """(K, N, G, o, i)."""
        return *self.b.shape[:2], 1, self.vocabulary, self.b.shape[3]

    @property
    def held(self) -> Tensor:
        """A tensor of the rows' type and device."""
        return self.b

    def rotated(self, left: Tensor | None, right: Tensor | None) -> LookupRows | DenseRows:
        """Rows in the basis left ⊗ right; written out unless `left`, the side of the tokens, is the identity."""
        turned = self.b if right is None else self.b @ right[0]
        rows = LookupRows(turned, self.tokens, self.vocabulary)
        return rows if left is None else DenseRows(rows.written(slice(None))).rotated(left, None)

    def scaled(self, scale: Tensor) -> LookupRows:
        """Entries multiplied by (1, V, d)."""
        return LookupRows(self.b * scale.expand(self.entries)[0][self.tokens], self.tokens, self.vocabulary)

    def written(self, part: slice) -> Tensor:
        """Rows of some examples, (n, K, 1, V, d)."""
        b, tokens = self.b[:, part], self.tokens[part]
        k, n, t, d = b.shape
        rows = b.new_zeros(k, n, self.vocabulary, d)
        rows.scatter_add_(2, tokens[None, :, :, None].expand(k, n, t, d), b)
        return rows.transpose(0, 1).unsqueeze(2)

    def squares(self) -> Tensor:
        """Σ_nk J_nk², (1, V, d)."""
        squares = self._added_up().square().sum(0).flatten(0, 1)
        return squares.new_zeros(self.vocabulary, squares.shape[1]).index_add_(0, self.tokens.flatten(), squares)[None]

    def blocks(self, weights: Tensor) -> Tensor:
        """Σ_e w_e J_nke J_nle for weights (1, V, d): (N, K, K)."""
        own = weights.expand(self.entries)[0][self.tokens]  # (N, T, d)
        rows = self._added_up().transpose(0, 1)
        return (rows * own.unsqueeze(1)).flatten(2) @ rows.flatten(2).mT

    def products(self, vectors: Tensor) -> Tensor:
        """J_nk v for vectors (m, 1, V, d): (K, N, m)."""
        return torch.stack([torch.einsum("kntd,ntd->kn", self.b, table[self.tokens]) for table in vectors[:, 0]], 2)

    def joint(self, weights: Tensor) -> Tensor:
        """`blocks` for all pairs of examples, interleaved, (N*K, N*K); unused tokens are skipped."""
        used, tokens = torch.unique(self.tokens, return_inverse=True)
        rows = DenseRows(LookupRows(self.b, tokens, len(used)).written(slice(None)))
        return rows.joint(weights.expand(self.entries)[:, used])


@dataclass(frozen=True)
class DenseRows(_Written):
    """Dense rows, (N, K, G, o, i)."""

    rows: Tensor

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """(K, N, G, o, i)."""
        return self.rows.shape[1], self.rows.shape[0], *self.rows.shape[2:]

    @property
    def held(self) -> Tensor:
        """A tensor of the rows' type and device."""
        return self.rows

    def rotated(self, left: Tensor | None, right: Tensor | None) -> DenseRows:
        """Rows in the basis left ⊗ right, (G, o, p) and (G, i, q)."""
        rows = self.rows if left is None else left.mT @ self.rows
        return DenseRows(rows if right is None else rows @ right)

    def scaled(self, scale: Tensor) -> DenseRows:
        """Entries multiplied by (G, o, i)."""
        return DenseRows(self.rows * scale)

    def written(self, part: slice) -> Tensor:
        """Rows of some examples."""
        return self.rows[part]


@dataclass(frozen=True)
class FusedBlockSums:
    """Sums for Kronecker factors or a diagonal, in place of rows; one position and one group.

    Attributes
    ----------
    outputs : Tensor
        Σ_nk b bᵀ, (o, o), lower triangle; or Σ_k b² of each example, (N, o).
    squared : bool
        Whether `outputs` is Σ_k b².
    inputs : Tensor, (N, i)
    """

    outputs: Tensor
    squared: bool
    inputs: Tensor

    def squares(self, ones: bool) -> Tensor:
        """Σ_nk (b_o a_i)² from the sums of squares, (1, o, i); `ones` appends an input of 1."""
        (n, o), i = self.outputs.shape, self.inputs.shape[1]
        total = self.outputs.new_zeros(1, o, i + ones)
        step = max(1, tuning.SQUARED_INPUT_BYTES // max(1, i * self.inputs.element_size()))
        for start in range(0, n, step):
            part = slice(start, start + step)
            total[0, :, :i].addmm_(self.outputs[part].T, self.inputs[part].square())
        if ones:
            total[0, :, i] = self.outputs.sum(0)
        return total


BlockRows = OuterRows | LookupRows | DenseRows
