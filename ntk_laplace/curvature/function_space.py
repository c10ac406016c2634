"""Function space: the Laplace-GGN posterior from B = I + SᵀKS, a matrix over data instead of parameters.

A change of a hyperparameter requires only a new factorization of B. The Jacobian rows are computed once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.curvature.posterior_precision import PosteriorPrecision, less_
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.jacobian.contractions import read_once
from ntk_laplace.jacobian.gram import Variances, cross_gram, diagonal_blocks, gram, gram_lower, gram_tiles
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.linalg import symmetric_eigenvalues
from ntk_laplace.runtime.lower_triangle import LowerTriangle
from ntk_laplace.runtime.panels import panels
from ntk_laplace.runtime.reduction import Reducer, SingleProcess, collective_property
from ntk_laplace.runtime.resources import require_memory
from ntk_laplace.runtime.sampling import normal


class FunctionSpacePrecision(PosteriorPrecision):
    """Factorization of B for one setting of the hyperparameters.

    Parameters
    ----------
    rows : Jacobian
        Rows of J at the training points, one cotangent per output.
    root : Tensor, (N, C, R), optional
        S with S Sᵀ = Λ; None if the rows are those of SᵀJ.
    prior : GaussianPrior
    gram : Tensor, (N*R, N*R), optional
        SᵀKS, if it is known: its lower triangle is overwritten.
    shapes : mapping of str to torch.Size, optional
        As in `PosteriorPrecision`.

    Attributes
    ----------
    factor : LowerTriangle
        L with B = L Lᵀ, (N*R, N*R), interleaved (n*R + r).
    """

    made_of_data = True
    reducer: Reducer = SingleProcess()

    def __init__(
        self, rows: Jacobian, root: Tensor | None, prior: GaussianPrior, gram: Tensor | None = None,
        shapes: Mapping[str, torch.Size] | None = None,
    ) -> None:
        self._keep(rows, prior, shapes)
        own = torch.eye(rows.num_cotangents, dtype=rows.f.dtype, device=rows.f.device).expand(rows.num_examples, -1, -1)
        self.root = own if root is None else root
        self.weighted = rows if root is None else rows.weighted(root)
        if gram is None:
            self.factor = self._factorized(self.variances)
        else:
            self.factor = LowerTriangle.of(gram).add_to_diagonal_(1.0).cholesky_()

    def _keep(self, rows: Jacobian, prior: GaussianPrior, shapes: Mapping[str, torch.Size] | None = None) -> None:
        """The rows, and the prior beside them: all but B."""
        PosteriorPrecision.__init__(self, prior, rows.f, shapes)
        variances = prior.variances()
        self.rows = rows
        self.variances: Variances = read_once({name: variances[name] for name in self.shapes})
        self._group_of = {name: prior.group_of(name) for name in self.shapes}

    def _factorized(self, variances: Variances) -> LowerTriangle:
        """L with B = I + SᵀKS = L Lᵀ; only the lower triangle is ever stored."""
        return gram_lower(self.weighted, variances).add_to_diagonal_(1.0).cholesky_()

    # --- storage

    def record(self) -> dict[str, Any] | None:
        """P0 and the rows of SᵀJ."""
        return {"kind": "rows", "prior": self.prior_record(), "rows": self.weighted.record()}

    # --- evidence

    def log_det(self) -> Tensor:
        return self.factor.log_det()

    @cached_property
    def log_det_rounding(self) -> float:
        """Of B, from the pivots of its factorization."""
        return self.factor.pivot_rounding()

    def effective_parameters(self) -> Tensor:
        """γ_g = n_g - δ_g tr_g(H⁻¹) = tr(B⁻¹ SᵀK_gS) for each prior group, (G,)."""
        if self._num_groups == 1:
            return self.information_gained().to(self.weighted.f).reshape(1)
        total = self._effective_by_tensor.clone() if self._of_group else self.weighted.f.new_zeros(self._num_groups)
        for name, groups in self._group_of.items():
            if isinstance(groups, Tensor):
                total.index_add_(0, groups.to(total.device), self._effective_by_entry(name))
        return total

    def information_gained(self) -> Tensor:
        """tr(B⁻¹SᵀKS) = N R - tr B⁻¹."""
        blocks = self.inverse_blocks
        left = blocks.diagonal(dim1=1, dim2=2).sum(dtype=torch.float64)
        return blocks.shape[0] * blocks.shape[1] - left

    @cached_property
    def _of_group(self) -> dict[int, list[str]]:
        """The parameters that have one precision each, by their prior group."""
        found: dict[int, list[str]] = {}
        for name, group in self._group_of.items():
            if isinstance(group, int):
                found.setdefault(group, []).append(name)
        return found

    @collective_property
    def _effective_by_tensor(self) -> Tensor:
        """γ_g of whole tensors, (G,): B⁻¹ in panels of columns, each multiplied by tiles of SᵀK_gS."""
        k, n = self.weighted.num_cotangents, self.weighted.num_examples
        total, blocks = self.weighted.f.new_zeros(self._num_groups), self.weighted.f.new_zeros(n, k, k)
        for start, panel in self._inverse_panels():
            first, width = start // k, panel.shape[1] // k
            panel = panel.view(n - first, k, width, k)
            blocks[first : first + width] = panel[:width].diagonal(dim1=0, dim2=2).permute(2, 0, 1)
            panel[width:] *= 2.0  # B⁻¹ and SᵀK_gS are symmetric: count the upper triangle too
            below, own = self.weighted.subset(slice(first, n)), self.weighted.subset(slice(first, first + width))
            for group, names in self._of_group.items():
                variances = {name: self.variances[name] for name in names}
                for rows, columns, tile in gram_tiles(below, own, variances):
                    total[group] += tile.mul_(panel[rows, :, columns]).sum()
        self.reducer.sum_(total, blocks)
        vars(self)["inverse_blocks"] = blocks
        return total

    def _inverse_panels(self) -> Iterator[tuple[int, Tensor]]:
        """First row and panel of columns of B⁻¹, those of this process."""
        return self.factor.inverse_panels(self.weighted.num_cotangents)

    def _effective_by_entry(self, name: str) -> Tensor:
        """γ of each entry of a parameter, (numel,): columns of L⁻¹SᵀJ."""
        rows = self.weighted.restricted([name]).dense({name: self.shapes[name]}).transpose(0, 1).flatten(0, 1)
        return self._column_squares(rows) * self.shapes.parts(self.prior_precision)[name].reciprocal()

    def _column_squares(self, matrix: Tensor) -> Tensor:
        """Squared norms of the columns of L⁻¹M, for M (N*R, m): (m,), a panel at a time."""
        total = matrix.new_empty(matrix.shape[1])
        for part in panels(matrix.shape[1], matrix.shape[0] * matrix.element_size(), tuning.COVARIANCE_BYTES):
            total[part] = self.factor.solve_lower(matrix[:, part]).square().sum(0)
        return total

    def require_inverse(self) -> None:
        """Refuse an inverse of B that does not fit in memory before other work; here `inverse` itself does so."""

    @cached_property
    def inverse(self) -> Tensor:
        """B⁻¹, interleaved (n*R + r); a square matrix, computed only for explanations."""
        require_memory(len(self.factor) ** 2 * self.weighted.dtype.itemsize, self.weighted.f.device, "the inverse of B",
                       "Use fewer training points, or a structured posterior.")
        return self.factor.inverse()

    @cached_property
    def inverse_blocks(self) -> Tensor:
        """Diagonal blocks [B⁻¹]_nn, (N, R, R), from B⁻¹ if it is stored; SᵀV_nnS = I - [B⁻¹]_nn."""
        n, r = self.weighted.num_examples, self.weighted.num_cotangents
        if "inverse" in vars(self):
            return self.inverse.view(n, r, n, r).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
        return self.factor.inverse_diagonal(r)

    def sensitivity(self, left_inverse: Tensor) -> Tensor:
        """∂ log det B/∂Λ_n for changes dΛ_n within the range of Λ_n: Lᵀ(I - [B⁻¹]_nn)L, (N, C, C).

        `left_inverse` is L (N, R, C) with L S = I. The result replaces V_nn: any dΛ_n = S E Sᵀ has E = L dΛ_n Lᵀ,
        and tr(V_nn dΛ_n) = tr(SᵀV_nnS E).
        """
        blocks = self.inverse_blocks
        seen = torch.eye(blocks.shape[1], dtype=blocks.dtype, device=blocks.device) - blocks
        return left_inverse.mT @ seen @ left_inverse

    def spectrum(self) -> Tensor | None:
        """Eigenvalues of SᵀKS = B - I, (N*R,), ascending; SᵀKS is recomputed, because the factor overwrote B."""
        if not self._lists_eigenvalues(len(self.factor)):
            return None
        return symmetric_eigenvalues(gram(self.weighted, self.variances))

    def log_det_at(self, factor: float) -> Tensor:
        """log det B with all prior precisions multiplied by a factor, from a second triangle."""
        require_memory(self.factor.nbytes, self.weighted.f.device, "a second B for the evidence at other precisions",
                       "Set prior.log_precision, and ask for the evidence there.")
        return self._factorized({name: v / factor for name, v in self.variances.items()}).log_det()

    def solve(self, vectors: Tensor) -> Tensor:
        """H⁻¹ v for vectors (..., P), by the Woodbury identity: P0⁻¹(v - JᵀS B⁻¹ SᵀJ P0⁻¹ v)."""
        scaled = vectors.reshape(-1, self.num_parameters) / self.prior_precision
        return (scaled - self._seen(scaled)).view_as(vectors)

    def multiply(self, vectors: Tensor) -> Tensor:
        """H v = P0 v + JᵀS SᵀJ v for vectors (..., P)."""
        flat = vectors.reshape(-1, self.num_parameters)
        seen = self.weighted.transposed_products(self.weighted.products(self.shapes.parts(flat)), self.shapes)
        return (self.prior_precision * flat + seen).view_as(vectors)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws from N(0, H⁻¹), (count, P), by Matheron's rule: u - P0⁻¹JᵀS B⁻¹(SᵀJ u + ε), u ~ N(0, P0⁻¹)."""
        draws = self._white((count, self.num_parameters), generator) * self.prior_precision.rsqrt()
        noise = (count, self.weighted.num_examples * self.weighted.num_cotangents)
        return draws - self._seen(draws, self._white(noise, generator))

    def _white(self, shape: tuple[int, int], generator: torch.Generator | None) -> Tensor:
        return normal(shape, self.weighted.f, generator)

    def _seen(self, scaled: Tensor, noise: Tensor | None = None) -> Tensor:
        """P0⁻¹JᵀS B⁻¹ (SᵀJ u + ε), (m, P), for u (m, P) and ε (m, N R)."""
        inner = self.weighted.products(self.shapes.parts(scaled)).transpose(0, 1)  # SᵀJ u, (N, R, m)
        right = inner.flatten(0, 1)
        solved = self._solved_sides(right if noise is None else right + noise.T).view(inner.shape)
        return self.weighted.transposed_products(solved.transpose(0, 1), self.shapes) / self.prior_precision

    def _solved_sides(self, right: Tensor) -> Tensor:
        """B⁻¹ times right sides (N*R, m)."""
        return self.factor.solve(right)

    # --- covariance of f

    def cross(self, rows: Jacobian) -> Tensor:
        """SᵀK between training points and `rows`, interleaved, (N*R, n*K)."""
        return cross_gram(self.weighted, rows, self.variances)

    def covariance_blocks(self, rows: Jacobian) -> Tensor:
        """V = K** - K*S B⁻¹ SᵀK*ᵀ ([T20] 3.13), diagonal blocks (n, C, C)."""
        blocks = diagonal_blocks(rows, self.variances)
        k, n = rows.num_cotangents, rows.num_examples
        if not len(self.factor):
            return blocks  # nothing is known: the prior's
        for part in panels(n, len(self.factor) * k * rows.dtype.itemsize, tuning.COVARIANCE_BYTES):
            half = self.factor.solve_lower_(self.cross(rows.subset(part))).view(len(self.factor), -1, k)
            less_(blocks[part], half.permute(1, 2, 0))  # (m, K, N R)
            del half  # before the next is computed
        return blocks

    def covariance(self, rows: Jacobian) -> Tensor:
        """V = K** - K*S B⁻¹ SᵀK*ᵀ ([T20] 3.13), joint and interleaved, (nC, nC)."""
        return less_(gram(rows, self.variances), self.factor.solve_lower_(self.cross(rows)).T)
