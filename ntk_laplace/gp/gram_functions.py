"""Gram matrices as functions of the log precisions, with exact first derivatives from the same Jacobian.

K(δ) = Σ_g K_g/δ_g, so ∂/∂log δ_g of <G, K> is -<G, K_g>/δ_g. No new Jacobian is computed and no K_g is stored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ntk_laplace.jacobian import Jacobian
from ntk_laplace.jacobian.contractions import Variance
from ntk_laplace.jacobian.gram import Variances, diagonal_blocks, gram, gram_tiles
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.conversion import to_tensor
from ntk_laplace.runtime.known_gradients import with_gradients
from ntk_laplace.runtime.panels import panels
from ntk_laplace.runtime.parameter_layout import ParameterLayout


@dataclass(frozen=True)
class GramFunction(ABC):
    """A function of two Jacobians that is linear in the variances of a prior, Σ_p v_p (...)_p.

    If `right` is None it equals `left`.
    """

    left: Jacobian
    right: Jacobian | None
    prior: GaussianPrior

    @abstractmethod
    def value(self, variances: Variances) -> Tensor:
        """The value of the sum."""

    @abstractmethod
    def contract(self, upstream: Tensor, variances: Variances) -> Tensor:
        """``<upstream, value(variances)>``, a scalar."""

    @abstractmethod
    def by_parameter(self, upstream: Tensor) -> Tensor:
        """``<upstream, derivative in v_p>`` for every parameter, (P,)."""

    def weighted(self) -> Tensor:
        """The value at the prior's variances, differentiable (once) in ``prior.log_precision``."""
        prior, shapes = self.prior, self.prior.shapes
        variances = prior.variances()
        groups = {name: prior.group_of(name) for name in shapes}
        like = prior.log_precision.detach()
        numbers = prior.flat_groups()

        def by_precision(upstream: Tensor) -> Tensor:
            slope, upstream = torch.zeros_like(like), upstream.contiguous()
            if any(isinstance(group, Tensor) for group in groups.values()):
                variance = torch.cat([_entries(variances[name], size, upstream) for name, size in shapes.sizes.items()])
                each = variance * self.by_parameter(upstream)
                return slope.index_add_(0, numbers, -each.to(slope))
            for group in range(len(slope)):
                own = {name: v for name, v in variances.items() if groups[name] == group}
                # ∂ K / ∂ log δ_g = -K_g / δ_g
                slope[group] -= self.contract(upstream, own).to(slope)
            return slope

        with torch.no_grad():
            value = self.value(variances)
        return with_gradients(value, "the kernel", (prior.log_precision, by_precision))


class FullGram(GramFunction):
    """K between two Jacobians, interleaved."""

    def value(self, variances: Variances) -> Tensor:
        """K, (N1*C, N2*C)."""
        return gram(self.left, variances, self.right)

    def contract(self, upstream: Tensor, variances: Variances) -> Tensor:
        """Computed in tiles, without a second K in memory."""
        grid, total = self._grid(upstream), upstream.new_zeros(())
        for rows, columns, tile in gram_tiles(self.left, self.right, variances):
            part = grid[rows, :, columns]
            if self.right is None and rows != columns:
                part = part + grid[columns, :, rows].permute(2, 3, 0, 1)  # the transposed tile, by symmetry
            total += (part * tile).sum()
        return total

    def by_parameter(self, upstream: Tensor) -> Tensor:
        """Σ_ij G_ij J_ip J_jp = Σ_i J_ip (G J)_ip."""
        grid, total = self._grid(upstream), upstream.new_zeros(self.prior.shapes.num_parameters)
        for rows, one in _panels(self.left, self.prior.shapes):
            for columns, two in _panels(self.right or self.left, self.prior.shapes):
                total += (one * (grid[rows, :, columns].reshape(len(one), len(two)) @ two)).sum(0)
        return total

    def _grid(self, upstream: Tensor) -> Tensor:
        other = self.right or self.left
        return upstream.view(self.left.num_examples, self.left.num_cotangents, other.num_examples, other.num_cotangents)


class GramDiagonal(GramFunction):
    """The diagonal of K between paired Jacobian rows, (N*C,)."""

    def value(self, variances: Variances) -> Tensor:
        """k of each example and output with its paired one."""
        if self.right is None:
            return diagonal_blocks(self.left, variances).diagonal(dim1=-2, dim2=-1).reshape(-1)
        like = self.left.f
        flat = torch.cat([_entries(variances.get(name), size, like) for name, size in self.prior.shapes.sizes.items()])
        return torch.cat([(one * two) @ flat for _, one, two in self._pairs()])

    def contract(self, upstream: Tensor, variances: Variances) -> Tensor:
        """The upstream derivative times the value."""
        return upstream @ self.value(variances)

    def by_parameter(self, upstream: Tensor) -> Tensor:
        """Σ_i G_i J_ip J'_ip."""
        grid, total = upstream.view(-1, self.left.num_cotangents), upstream.new_zeros(self.prior.shapes.num_parameters)
        for rows, one, two in self._pairs():
            total += (grid[rows].reshape(-1, 1) * one * two).sum(0)
        return total

    def _pairs(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        for rows, one in _panels(self.left, self.prior.shapes):
            yield rows, one, one if self.right is None else _written_out(self.right.subset(rows), self.prior.shapes)


def _panels(rows: Jacobian, shapes: ParameterLayout) -> Iterator[tuple[slice, Tensor]]:
    """Dense rows of the Jacobian, a few examples at a time."""
    each = rows.num_cotangents * shapes.num_parameters * rows.f.element_size()
    for part in panels(rows.num_examples, each, tuning.GP_ROWS_BYTES):
        yield part, _written_out(rows.subset(part), shapes)


def _written_out(rows: Jacobian, shapes: ParameterLayout) -> Tensor:
    """Dense Jacobian, (n*K, P), interleaved."""
    return rows.dense(shapes).transpose(0, 1).flatten(0, 1)


def _entries(variance: Variance | None, size: int, like: Tensor) -> Tensor:
    return to_tensor(0.0 if variance is None else variance).to(like).expand(size)
