"""Products with JᵀΛJ over the training points, in passes over rows of SᵀJ that are kept or computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ntk_laplace.jacobian import Jacobian
from ntk_laplace.jacobian.gram import Variances, diagonal_blocks
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.parameter_layout import ParameterLayout
from ntk_laplace.structures.model import LinearizedModel

__all__ = ["CurvatureProducts", "product_vectors"]


def product_vectors(vector_bytes: int) -> int:
    """Vectors of so many bytes that share a product with the rows of a batch."""
    return max(tuning.FEWEST_PRODUCT_VECTORS, min(tuning.PRODUCT_VECTORS, tuning.PRODUCT_BYTES // vector_bytes))


@dataclass(frozen=True)
class CurvatureProducts:
    """JᵀΛJ, Λ = S Sᵀ, from rows of J or of SᵀJ, in passes over them.

    Attributes
    ----------
    model : LinearizedModel
    rows : callable
        Iterates over the examples that this process reads, in batches: rows of J with S (n, C, R), or rows of SᵀJ with
        None. Its argument says what for, in a progress bar.
    shares : callable
        The rows of values (N, ...) that belong to these examples.
    num_examples, num_columns : int
        N and R, of all processes.
    kept : callable, optional
        Whether rows are kept, on all processes; else, and by default, each pass may compute them again.
    """

    model: LinearizedModel
    rows: Callable[[str], Iterator[tuple[Jacobian, Tensor | None]]]
    shares: Callable[[Tensor], Tensor]
    num_examples: int
    num_columns: int
    kept: Callable[[], bool] | None = None

    @property
    def prior(self) -> GaussianPrior:
        """The prior, at its present precisions."""
        return self.model.prior

    @property
    def shapes(self) -> ParameterLayout:
        """The parameters, in the order that flattens θ."""
        return self.model.network.shapes

    @property
    def like(self) -> Tensor:
        """θ, (P,), which gives dtype and device."""
        return self.model.theta

    @property
    def rank(self) -> int:
        """Most eigenvalues that are not zero, the smaller of P and N R."""
        return min(self.model.network.num_parameters, self.num_examples * self.num_columns)

    @property
    def together(self) -> int | None:
        """Vectors of a product beyond which more of them cost as much one after another; None if all share passes."""
        return product_vectors(self.like.nbytes) if self.kept is not None and self.kept() else None

    def products(self, vectors: Tensor) -> Tensor:
        """JᵀΛJ v for vectors (m, P), in one pass."""
        shapes, total = self.shapes, torch.zeros_like(vectors)
        together = product_vectors(vectors.shape[1] * vectors.element_size())
        for rows, root in self.rows(f"{len(vectors):,} products"):
            curvature = None if root is None else root @ root.mT
            for start in range(0, len(vectors), together):
                chunk = slice(start, start + together)
                pushed = rows.products(shapes.parts(vectors[chunk]))
                if curvature is not None:
                    pushed = (curvature @ pushed.transpose(0, 1)).transpose(0, 1)
                total[chunk] += rows.transposed_products(pushed, shapes)
        self.model.settings.reducer.sum_(total)
        return total

    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        """Draws from N(0, JᵀΛJ), (count, P): JᵀSε with ε (N, R, count), the same however the data are read."""
        shapes, like, seen = self.shapes, self.like, 0
        total = like.new_zeros(count, len(like))
        drawn = torch.randn(self.num_examples, self.num_columns, count, generator=generator, dtype=like.dtype,
                            device=generator.device)
        own = self.shares(drawn)
        for rows, root in self.rows(f"{count:,} draws"):
            part = own[seen : seen + rows.num_examples].to(like)
            seen += rows.num_examples
            part = part if root is None else root @ part
            total += rows.transposed_products(part.transpose(0, 1), shapes)
        self.model.settings.reducer.sum_(total)
        return total

    def largest(self, function: Callable[[Jacobian], float]) -> float:
        """The largest value of a function of the rows of the first training points, of all processes."""
        first = next(iter(self.rows("variances")), None)
        value = 0.0 if first is None else function(first[0].subset(slice(0, tuning.MEASURED_POINTS)))
        return max(self.model.settings.reducer.gather(value))

    def diagonal(self, variances: Variances) -> tuple[float, float]:
        """tr SᵀKS, and Σ_n log det (I + [SᵀKS]_nn), from the blocks of single examples."""
        found = torch.zeros(2, dtype=torch.float64, device=self.like.device)
        for rows, root in self.rows("blocks of the kernel"):
            blocks = diagonal_blocks(rows, variances)
            blocks = (blocks if root is None else root.mT @ blocks @ root).double()
            eye = torch.eye(blocks.shape[1], dtype=blocks.dtype, device=blocks.device)
            found[0] += blocks.diagonal(dim1=1, dim2=2).sum()
            found[1] += torch.logdet(eye + blocks).sum()
        self.model.settings.reducer.sum_(found)
        trace, log_dets = found.tolist()
        return trace, log_dets
