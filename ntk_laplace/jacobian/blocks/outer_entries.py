"""Algebra of sums of outer products as entries (G, o, i) of a layer, whatever parameters these belong to."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ntk_laplace.jacobian.blocks.base import LayerRows, steps
from ntk_laplace.jacobian.blocks.outer_products import position_product, projected
from ntk_laplace.runtime.reflections import Basis, turned


class OuterEntries(LayerRows):
    """Rows J_nk = Σ_t b_nkt ⊗ a_nt.

    Attributes
    ----------
    b : Tensor, (K, N, G, T, o)
        Output gradients; (K, 1, G, T, o) if `constant`, the same for every example.
    a : Tensor, (N, G, T, i)
        Layer inputs, without that of a bias.
    """

    b: Tensor
    a: Tensor
    constant: bool

    @abstractmethod
    def with_ones(self, a: Tensor) -> Tensor:
        """Layer inputs (..., i), with a last input of one if there is a bias."""

    @cached_property
    def inputs(self) -> Tensor:
        """Layer inputs, with a last input of one if there is a bias, (N, G, T, i)."""
        return self.with_ones(self.a)

    def full_b(self) -> Tensor:
        """b with a full example axis, also if it is constant."""
        return self.b.expand(-1, self.a.shape[0], -1, -1, -1) if self.constant else self.b

    @property
    def shape(self) -> tuple[int, int]:
        return self.b.shape[0], self.a.shape[0]

    @property
    def like(self) -> Tensor:
        return self.b

    @property
    def one_position(self) -> bool:
        """Each row is one outer product, in each group."""
        return self.b.shape[3] == 1

    def written(self, part: slice) -> Tensor:
        rows = position_product(self.full_b()[:, part], self.with_ones(self.a[part]))  # `inputs` has all examples
        return rows.transpose(0, 1).unflatten(2, self.entries)

    def rotated(self, basis: Basis) -> TurnedOuter:
        return TurnedOuter(turned(self.b, basis.left), turned(self.inputs, basis.right), self.constant)

    def squares(self) -> Tensor:
        if not self.one_position:
            return super().squares()
        b = self.full_b()[:, :, :, 0].square().sum(0)
        return torch.einsum("ngo,ngi->goi", b, self.inputs[:, :, 0].square())

    def inner(self, weights: Tensor) -> Tensor:
        if not self.one_position:
            return super().inner(weights)
        rows = self.full_b()[:, :, :, 0].transpose(0, 1).flatten(2)
        return (rows * self._output_weights(weights).unsqueeze(1)) @ rows.mT

    def inner_diagonal(self, weights: Tensor) -> Tensor:
        if not self.one_position:
            return super().inner_diagonal(weights)
        own = self._output_weights(weights)
        if self.constant:
            return own @ self.b[:, 0, :, 0].flatten(1).square().T
        return torch.einsum("kno,no->nk", self.b[:, :, :, 0].flatten(2).square(), own)

    def _output_weights(self, weights: Tensor) -> Tensor:
        """Σ_i w_oi a_i², (N, G*o), for rows of one position: `inner` is a weighted product of their b."""
        return torch.einsum("ngi,goi->ngo", self.inputs[:, :, 0].square(), weights.expand(self.entries)).flatten(1)

    def joint(self, weights: Tensor) -> Tensor:
        """`inner` for all pairs of examples, (N*K, N*K), a few outputs of the layer at a time."""
        (k, n), (g, o, i) = self.shape, self.entries
        out, weights, b = self.b.new_zeros(n * k, n * k), weights.expand(self.entries), self.full_b()
        for part in steps(o, n * k * g * i * self.b.element_size(), self.b.device):
            rows = position_product(b[..., part], self.inputs).transpose(0, 1).flatten(0, 1)
            out.addmm_(rows * weights[:, part].flatten(), rows.T)
        return out

    def products(self, vectors: Tensor) -> Tensor:
        if not self.one_position:
            return super().products(vectors)
        a, b = self.inputs[:, :, 0].transpose(0, 1), self.full_b()[:, :, :, 0]
        out = self.b.new_empty(*self.shape, len(vectors))
        for place, vector in enumerate(vectors):  # bᵀ V a, without written-out rows
            out[:, :, place] = torch.einsum("kngo,gno->kn", b, a @ vector.mT)
        return out

    def project(self, weights: Tensor, left: Tensor, right: Tensor) -> Tensor:
        if not self.one_position:
            return super().project(weights, left, right)
        return projected(self.full_b()[:, :, :, 0], self.inputs[:, :, 0], weights.expand(self.entries), left, right)


@dataclass(frozen=True)
class TurnedOuter(OuterEntries):
    """Such rows in another basis, whose entries belong to no parameter; a bias is among the inputs."""

    b: Tensor
    a: Tensor
    constant: bool

    def with_ones(self, a: Tensor) -> Tensor:
        return a

    @property
    def entries(self) -> tuple[int, int, int]:
        return self.b.shape[2], self.b.shape[4], self.a.shape[3]
