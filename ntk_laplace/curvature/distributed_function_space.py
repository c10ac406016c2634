"""Function space on several processes: B = I + SᵀKS in block rows, and right sides dealt to the processes.

Every process keeps the rows of J at all training points, which are small beside B, and block rows of B. All results
are equal on all processes, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ntk_laplace.curvature.function_space import FunctionSpacePrecision
from ntk_laplace.curvature.posterior_precision import less_
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.jacobian.gram import Variances, cross_gram, diagonal_blocks, gram
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.block_rows import BlockRows
from ntk_laplace.runtime.lower_triangle import LowerTriangle
from ntk_laplace.runtime.reduction import Reducer, collective_property
from ntk_laplace.runtime.resources import require_memory


class DistributedFunctionSpacePrecision(FunctionSpacePrecision):
    """Factorization of B on several processes, for one setting of the hyperparameters.

    Parameters
    ----------
    rows : Jacobian
        Rows of J at all training points, one cotangent per output; on every process.
    root : Tensor, (N, C, R)
        S with S Sᵀ = Λ.
    prior : GaussianPrior
    reducer : Reducer

    Attributes
    ----------
    matrix : BlockRows
        L with L Lᵀ = B.
    """

    def __init__(self, rows: Jacobian, root: Tensor, prior: GaussianPrior, reducer: Reducer) -> None:
        self._keep(rows, prior)
        self.root, self.reducer = root, reducer
        self.weighted = rows.weighted(root)
        self.matrix = self._block_rows(self.variances)

    def _block_rows(self, variances: Variances) -> BlockRows:
        """L with B = L Lᵀ in block rows."""
        n, k = self.weighted.num_examples, self.weighted.num_cotangents
        each = dealt_examples(n, k, self.reducer.world_size, self.rows.f.device)
        matrix = BlockRows([*range(0, n * k, each * k), n * k], self.reducer, self.rows.f)
        for i in matrix.own:
            start, stop = (bound // k for bound in matrix.bounds[i : i + 2])
            left, right = (self.weighted.subset(slice(*part)) for part in ((start, stop), (0, stop)))
            matrix.rows[i] = cross_gram(left, right, variances)
            matrix.rows[i][:, start * k :].diagonal().add_(1.0)  # B = I + SᵀKS
        matrix.cholesky_()
        return matrix

    def log_det_at(self, factor: float) -> Tensor:
        """log det B with all prior precisions multiplied by a factor, from other block rows."""
        return self._block_rows({name: v / factor for name, v in self.variances.items()}).log_det()

    @collective_property
    def factor(self) -> LowerTriangle:
        """L in one piece, (N*R, N*R), on every process: for methods that need the inverse of B.

        It has to fit in memory (MemoryBudgetError).
        """
        like = self.rows.f
        require_memory(self.matrix.size**2 * like.element_size(), like.device, "B in one piece, on every process",
                       "Use a method that needs no inverse of B, or one process with more memory.")
        return LowerTriangle.of(self.matrix.whole())

    @collective_property
    def inverse(self) -> Tensor:
        """B⁻¹, interleaved (n*R + r), on every process; computed only for explanations."""
        return self.factor.inverse()

    # --- evidence

    def log_det(self) -> Tensor:
        return self.matrix.log_det()

    @collective_property
    def log_det_rounding(self) -> float:
        return self.matrix.pivot_rounding()

    def _column_squares(self, matrix: Tensor) -> Tensor:
        """Squared norms of the columns of L⁻¹M, for M (N*R, m): (m,), each process its own."""

        def squares(part: slice) -> Tensor:
            return self.matrix.solve(matrix[:, part].contiguous()).square().sum(0)

        return self._dealt(matrix.shape[1], 1, squares)

    @collective_property
    def inverse_blocks(self) -> Tensor:
        """Diagonal blocks [B⁻¹]_nn, (N, R, R), from own columns of L⁻¹."""
        k, n = self.weighted.num_cotangents, self.weighted.num_examples
        blocks = self.rows.f.new_zeros(n, k, k)
        for start, panel in self._inverse_columns(factor_only=True):
            own = blocks[start // k : (start + panel.shape[1]) // k]
            for rows in panel.unflatten(1, (-1, k)).split(tuning.SOLVE_ROWS):
                own.baddbmm_(rows.permute(1, 2, 0), rows.transpose(0, 1))
        self.reducer.sum_(blocks)
        return blocks

    def _inverse_panels(self) -> Iterator[tuple[int, Tensor]]:
        """First row and panel of own columns of B⁻¹."""
        return self._inverse_columns(factor_only=False)

    def _inverse_columns(self, factor_only: bool) -> Iterator[tuple[int, Tensor]]:
        """First row and panel of own columns of B⁻¹ or L⁻¹; a quarter of them at a time, to bound the memory."""
        step = -(-self.matrix.blocks // 4)
        for first in range(0, self.matrix.blocks, step):
            found = self.matrix.inverse_columns(first, min(first + step, self.matrix.blocks), factor_only)
            for i in sorted(found):
                yield self.matrix.bounds[i], found.pop(i)

    def spectrum(self) -> None:
        """None: the eigenvalues of a matrix in block rows are not available."""

    # --- solves

    def _white(self, shape: tuple[int, int], generator: torch.Generator | None) -> Tensor:
        return self.reducer.broadcast(super()._white(shape, generator))  # as one process draws it

    def _seen(self, scaled: Tensor, noise: Tensor | None = None) -> Tensor:
        """As one process computes it: each takes some of the m."""
        seen = super()._seen
        return self._dealt(len(scaled), self.matrix.size,
                           lambda part: seen(scaled[part], None if noise is None else noise[part]))

    def _solved_sides(self, right: Tensor) -> Tensor:
        return self.matrix.solve_transposed(self.matrix.solve(right.contiguous()))

    # --- covariance of f

    def covariance_blocks(self, rows: Jacobian) -> Tensor:
        """V = K** - K*S B⁻¹ SᵀK*ᵀ ([T20] 3.13), diagonal blocks (n, C, C): each process takes some examples."""
        k = rows.num_cotangents

        def blocks(part: slice) -> Tensor:
            own = rows.subset(part)
            half = self.matrix.solve(self.cross(own)).view(self.matrix.size, -1, k).permute(1, 2, 0)
            return less_(diagonal_blocks(own, self.variances), half)

        return self._dealt(rows.num_examples, self.matrix.size * k, blocks)

    def covariance(self, rows: Jacobian) -> Tensor:
        k = rows.num_cotangents

        def half(part: slice) -> Tensor:
            return self.matrix.solve(self.cross(rows.subset(part))).T.unflatten(0, (-1, k))

        found = self._dealt(rows.num_examples, self.matrix.size * k, half).flatten(0, 1)
        return self.reducer.broadcast(less_(gram(rows, self.variances), found))

    def _dealt(self, count: int, numbers: int, function: Callable[[slice], Tensor]) -> Tensor:
        """A function of slices of 0 ... count, each by one process, concatenated.

        All processes call it equally often, also with empty slices; one of `numbers` stored numbers per element bounds
        the elements at a time.
        """
        ranks, rank = self.reducer.world_size, self.reducer.rank
        kept = sum(row.nbytes for row in self.matrix.rows.values())
        least = min(self.reducer.gather(max(tuning.COVARIANCE_BYTES, kept // 8)))
        step = max(1, least // (numbers * self.rows.f.element_size()))
        found = []
        for start in range(0, count, step * ranks):
            here = min(step * ranks, count - start)
            first, last = (start + here * edge // ranks for edge in (rank, rank + 1))
            found.append(self.reducer.concat(function(slice(first, last))))
        return torch.cat(found) if found else function(slice(0, 0))


def dealt_examples(n: int, k: int, ranks: int, device: torch.device) -> int:
    """Examples of a block row, of n with k rows each: many enough for efficient products, few enough for equal work."""
    rows = tuning.DEALT_ROWS if device.type == "cpu" else tuning.DEALT_ROWS_DEVICE
    fewest = min(tuning.FEWEST_DEALT_ROWS, rows)
    return max(1, fewest // k, min(rows // k, -(-n // (8 * ranks))))
