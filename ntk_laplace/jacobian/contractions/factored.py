"""Contractions of layer inputs and output gradients, without written-out rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ntk_laplace.jacobian.blocks import Block, Cluster, Factored, Outer
from ntk_laplace.jacobian.contractions.base import Contraction
from ntk_laplace.jacobian.contractions.tile import Tile, Variances, interleaved
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.panels import panels
from ntk_laplace.runtime.resources import buffer_bytes


class Hadamard(Contraction[Outer]):
    """One position: (a aᵀ/δ_w + 1/δ_b) ∘ b bᵀ; a Kronecker product if b is constant, as in the last layer."""

    stage = 2

    @classmethod
    def applies(cls, left: Cluster, right: Cluster, variances: Variances) -> bool:
        (one, *_), (two, *_) = left, right
        single = isinstance(one, Outer) and isinstance(two, Outer) and one.single and two.single
        return single and same_factors(left, right) and _one_variance_each(one, variances)

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
        b_left, b_right = (interleaved(block.full_b()[:, :, 0, 0]) for block in (left, right))
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
        return same_factors(left, right) and _one_variance_each(left[0], variances)

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
        for n in range(n1):
            for some in panels(n2, g * t1 * o * k2 * target.element_size(), cache):
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
        few = min(step, max(1, -(-n // 16)))  # one where there are no rows yet
        return few, step * step // few

    def _numbers(self) -> tuple[float, float]:
        """Prior variances of the weight and of the bias."""
        weight, *bias = self.left[0].names
        return self.number(weight), self.number(bias[0] if bias else None)


def same_factors(left: Cluster, right: Cluster) -> bool:
    """Whether each side is one block with factors, of the same entries in the same order."""
    return len(left) == len(right) == 1 and isinstance(left[0], Factored) and left[0].matches(right[0])


def _one_variance_each(block: Block, variances: Variances) -> bool:
    return all(isinstance(variances[name], float) for name in block.names if name in variances)


def _add_kronecker(out: Tensor, inputs: Tensor, pairs: Tensor) -> None:
    """out (n1, K1, n2, K2) += inputs ⊗ pairs."""
    # elsewhere, a look at the entries would wait for the device
    square = out.device.type == "cpu" and pairs.shape[0] == pairs.shape[1]
    if square and not bool((pairs - torch.diag(pairs.diagonal())).any()):
        out.diagonal(dim1=1, dim2=3).addcmul_(inputs.unsqueeze(2), pairs.diagonal())
    else:
        out.addcmul_(inputs[:, None, :, None], pairs[None, :, None, :])
