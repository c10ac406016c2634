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
from ntk_laplace.runtime.linalg import symmetric_eigen
from ntk_laplace.runtime.panels import panels
from ntk_laplace.structures.model import LinearizedModel


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
    collected : callable
        Values (N, ...) of all examples, from those of these examples.
    kept : callable, optional
        Whether rows are kept, on all processes; else, and by default, each pass may compute them again.
    """

    model: LinearizedModel
    rows: Callable[[str], Iterator[tuple[Jacobian, Tensor | None]]]
    shares: Callable[[Tensor], Tensor]
    num_examples: int
    num_columns: int
    collected: Callable[[Tensor], Tensor]
    kept: Callable[[], bool] | None = None

    @property
    def prior(self) -> GaussianPrior:
        """The prior, at its present precisions."""
        return self.model.prior

    @property
    def like(self) -> Tensor:
        """θ, (P,), which gives dtype and device."""
        return self.model.theta

    @property
    def rank(self) -> int:
        """Most eigenvalues that are not zero, the smaller of P and N R."""
        return min(self.model.network.num_parameters, self.num_rows)

    @property
    def num_rows(self) -> int:
        """N R, the rows of SᵀJ."""
        return self.num_examples * self.num_columns

    @property
    def together(self) -> int | None:
        """Vectors of a product beyond which more of them cost as much one after another; None if all share passes."""
        return product_vectors(self.like.nbytes) if self.kept is not None and self.kept() else None

    def products(self, vectors: Tensor) -> Tensor:
        """JᵀΛJ v for vectors (m, P), in one pass."""
        shapes, total = self.prior.shapes, torch.zeros_like(vectors)
        together = product_vectors(vectors.shape[1] * vectors.element_size())
        for rows, root in self.rows(f"{len(vectors):,} products"):
            curvature = None if root is None else root @ root.mT
            for chunk in panels(len(vectors), 1, together):
                pushed = rows.products(shapes.parts(vectors[chunk]))
                if curvature is not None:
                    pushed = (curvature @ pushed.transpose(0, 1)).transpose(0, 1)
                total[chunk] += rows.transposed_products(pushed, shapes)
        self.model.settings.reducer.sum_(total)
        return total

    @property
    def product_flops(self) -> float:
        """4 N P: more only where parameters are shared between positions."""
        return 4.0 * self.num_examples * len(self.like)

    def noise(self, count: int, generator: torch.Generator, parts: Tensor | None = None) -> Tensor:
        """Draws from N(0, JᵀΛJ), (count, P): JᵀSε with ε (N, R, count), the same however the data are read.

        With symmetric `parts` A (N, R, R), JᵀSAε.
        """
        shapes, like, seen = self.prior.shapes, self.like, 0
        total = like.new_zeros(count, len(like))
        drawn = torch.randn(self.num_examples, self.num_columns, count, generator=generator, dtype=like.dtype,
                            device=generator.device)
        own, parts = self.shares(drawn), None if parts is None else self.shares(parts)
        for rows, root in self.rows(f"{count:,} draws"):
            here = slice(seen, seen + rows.num_examples)
            part = own[here].to(like) if parts is None else parts[here] @ own[here].to(like)
            seen += rows.num_examples
            part = part if root is None else root @ part
            total += rows.transposed_products(part.transpose(0, 1), shapes)
        self.model.settings.reducer.sum_(total)
        return total

    def largest(self, function: Callable[[Jacobian], float]) -> float:
        """The largest value of a function of the rows of the first training points, whichever process reads them."""
        measured = self.shares(torch.arange(self.num_examples, device="cpu")) < tuning.MEASURED_POINTS
        value, seen, left = 0.0, 0, int(measured.sum())
        if left:
            for rows, _ in self.rows("variances"):
                some = measured[seen : seen + rows.num_examples].nonzero().squeeze(1)
                if len(some):
                    value = max(value, function(rows.subset(some.to(self.like.device))))
                seen, left = seen + rows.num_examples, left - len(some)
                if not left:
                    break
        return max(self.model.settings.reducer.gather(value))

    def _blocks(self, variances: Variances) -> Iterator[Tensor]:
        """Diagonal blocks [SᵀKS]_nn, (n, R, R), of this process's examples."""
        for rows, root in self.rows("blocks of the kernel"):
            blocks = diagonal_blocks(rows, variances)
            yield blocks if root is None else root.mT @ blocks @ root

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of one cotangent, as `weighted_rows` returns it."""
        first = next(iter(self.rows("variances")), None)
        if first is None:
            own = 1  # one of several processes, without an example
        else:
            rows = first[0].subset(slice(0, 1))
            own = rows.weighted(rows.f.new_ones(1, rows.num_cotangents, 1)).nbytes
        return max(1, *self.model.settings.reducer.gather(own))

    def row_weights(self, variances: Variances) -> tuple[Tensor, Tensor]:
        """Eigenvalues (N, R) and eigenvectors (N, R, R) of the blocks [SᵀKS]_nn, of the examples of all processes."""
        r = self.num_columns
        values, vectors = [self.like.new_zeros(0, r)], [self.like.new_zeros(0, r, r)]
        for blocks in self._blocks(variances):
            for found, part in zip((values, vectors), symmetric_eigen(blocks), strict=True):
                found.append(part)
        return self.collected(torch.cat(values)), self.collected(torch.cat(vectors))

    def weighted_rows(self, chosen: Tensor, directions: Tensor) -> Jacobian:
        """Rows uᵀSᵀJ of one cotangent, for the columns u of `directions` (N, R, R) that are `chosen` (N, R).

        They are in the order of the examples, whichever process reads them.
        """
        reducer, seen = self.model.settings.reducer, 0
        number = self.shares(torch.arange(chosen.numel(), device=chosen.device).view_as(chosen))
        chosen, directions = self.shares(chosen), self.shares(directions)
        parts, numbers = list[Jacobian](), [number[chosen][:0]]
        for rows, root in self.rows("leading rows"):
            here = slice(seen, seen + rows.num_examples)
            seen += rows.num_examples
            for column, some in enumerate(chosen[here].unbind(1)):
                index = some.nonzero().squeeze(1)
                if len(index):
                    own = directions[here][index, :, column].unsqueeze(2)
                    parts.append(rows.subset(index).weighted(own if root is None else root[index] @ own))
                    numbers.append(number[here][index, column])
        gathered = reducer.gather((Jacobian.concatenate(parts) if parts else None, torch.cat(numbers)))
        rows = Jacobian.concatenate([part.to(self.like.dtype, self.like.device) for part, _ in gathered
                                     if part is not None])
        order = torch.cat([numbers.to(self.like.device) for _, numbers in gathered]).argsort()
        return rows.subset(order)

    def diagonal(self, variances: Variances) -> tuple[float, float]:
        """tr SᵀKS, and Σ_n log det (I + [SᵀKS]_nn), from the blocks of single examples."""
        found = torch.zeros(2, dtype=torch.float64, device=self.like.device)
        for blocks in map(Tensor.double, self._blocks(variances)):
            eye = torch.eye(blocks.shape[1], dtype=blocks.dtype, device=blocks.device)
            found[0] += blocks.diagonal(dim1=1, dim2=2).sum()
            found[1] += torch.logdet(eye + blocks).sum()
        self.model.settings.reducer.sum_(found)
        trace, log_dets = found.tolist()
        return trace, log_dets
