"""Products with JᵀΛJ over the training points, in passes over rows of SᵀJ that are kept or computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ntk_laplace.jacobian import Jacobian
from ntk_laplace.jacobian.gram import Variances, diagonal_blocks
from ntk_laplace.runtime import tuning
from ntk_laplace.structures.model import LinearizedModel

__all__ = ["CurvatureProducts"]


@dataclass(frozen=True)
class CurvatureProducts:
    """JᵀΛJ from rows of SᵀJ, (SᵀJ)ᵀ(SᵀJ), in passes over them.

    Attributes
    ----------
    model : LinearizedModel
    rows : callable
        Iterates over the rows of SᵀJ of the examples that this process reads, in batches.
    shares : callable
        The rows of values (N, ...) that belong to these examples.
    num_examples, num_columns : int
        N and R, of all processes.
    """

    model: LinearizedModel
    rows: Callable[[], Iterator[Jacobian]]
    shares: Callable[[Tensor], Tensor]
    num_examples: int
    num_columns: int

    @property
    def rank(self) -> int:
        """Most eigenvalues that are not zero, the smaller of P and N R."""
        return min(self.model.network.num_parameters, self.num_examples * self.num_columns)

    def products(self, vectors: Tensor) -> Tensor:
        """JᵀΛJ v for vectors (m, P), in one pass."""
        shapes, total = self.model.network.shapes, torch.zeros_like(vectors)
        chunks = [slice(start, start + tuning.PRODUCT_VECTORS) for start in
                  range(0, len(vectors), tuning.PRODUCT_VECTORS)]
        for rows in self.rows():
            for chunk in chunks:
                pushed = rows.products(shapes.parts(vectors[chunk]))
                total[chunk] += rows.transposed_products(pushed, shapes)
        self.model.settings.reducer.sum_(total)
        return total

    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        """Draws from N(0, JᵀΛJ), (count, P): JᵀSε with ε (N, R, count), the same however the data are read."""
        shapes, like, seen = self.model.network.shapes, self.model.theta, 0
        total = like.new_zeros(count, len(like))
        drawn = torch.randn(self.num_examples, self.num_columns, count, generator=generator, dtype=like.dtype,
                            device=generator.device)
        own = self.shares(drawn)
        for rows in self.rows():
            part = own[seen : seen + rows.num_examples].to(like)
            seen += rows.num_examples
            total += rows.transposed_products(part.transpose(0, 1), shapes)
        self.model.settings.reducer.sum_(total)
        return total

    def trace(self, variances: Variances) -> float:
        """tr P0⁻¹JᵀΛJ, from the diagonal blocks of SᵀKS."""
        total = self.model.theta.new_zeros((), dtype=torch.float64)
        for rows in self.rows():
            total += diagonal_blocks(rows, variances).diagonal(dim1=1, dim2=2).sum(dtype=torch.float64)
        self.model.settings.reducer.sum_(total)
        return float(total)
