"""A low rank of JᵀΛJ from the rows of SᵀJ of largest norm, factorized in function space."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.curvature.function_space import FunctionSpacePrecision
from ntk_laplace.curvature.low_rank import LowRankBase
from ntk_laplace.curvature.sketch import Approximation, Curvature, RandomSketch, Sketch
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.jacobian.gram import diagonal_blocks, gram
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.linalg import symmetric_eigen


@dataclass(frozen=True)
class LeadingRows(Sketch):
    """F consists of the rows uᵀSᵀJ of largest norm in units of the prior, u the eigenvectors of the blocks [SᵀKS]_nn.

    Where few outputs are uncertain, few rows have nearly the whole trace of JᵀΛJ. They cost one pass over the data and
    a factorization in function space, where a random sketch of the same rank takes a product for each vector.

    Attributes
    ----------
    rows : Jacobian
        The r rows, each an example of one cotangent.
    rest : Tensor, (N, R, R)
        I - UUᵀ with the chosen eigenvectors U of each example.
    limit : int
        Rows for whose factorization there is memory.
    exhausted : bool
    """

    rows: Jacobian
    rest: Tensor
    limit: int
    exhausted: bool = False

    def at(self, curvature: Curvature) -> LeadingRowsApproximation:
        base = LeadingRowsPrecision(self.rows, None, curvature.prior)
        return LeadingRowsApproximation(curvature, self, base)

    def scaled(self, factor: float) -> LeadingRows:
        return replace(self, rows=self.rows.weighted(self.rows.f.new_full((len(self.rows.f), 1, 1), factor**0.5)))

    def to(self, device: torch.device, dtype: torch.dtype) -> LeadingRows:
        return replace(self, rows=self.rows.to(dtype, device), rest=self.rest.to(device, dtype))

    def record(self) -> dict[str, Any]:
        return {"rows": self.rows.record(), "rest": self.rest, "limit": self.limit, "exhausted": self.exhausted}


@dataclass(frozen=True)
class LeadingRowsApproximation(Approximation):
    """That of leading rows."""

    sketch: LeadingRows
    base: LeadingRowsPrecision

    @property
    def rank_left(self) -> int:
        """As many as other rows, or parameters: rows that were chosen may depend on each other."""
        return min(len(self.curvature.like), self.curvature.num_rows - self.base.rank)

    def most(self, most: int) -> int:
        """Rows for which there is memory."""
        return self.sketch.limit

    def cost(self, rank: int) -> float:
        """Of the Cholesky factorization."""
        return max(1.0, rank**3 / 3 / self.curvature.product_flops)

    def grown(self, rank: int, seed: int, draws: bool) -> LeadingRowsApproximation:
        """Chosen anew, at the present prior."""
        weights = self.curvature.row_weights(self.base.variances)
        return _chosen(self.curvature, *weights, rank, self.sketch.limit).at(self.curvature)

    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        """Draws from N(0, J_restᵀΛJ_rest) of the rows that were not chosen."""
        return self.curvature.noise(count, generator, self.sketch.rest)


class LeadingRowsPrecision(LowRankBase, FunctionSpacePrecision):
    """P0 + FᵀF in function space: B = I + FP0⁻¹Fᵀ = L Lᵀ, (r, r).

    W = I - P0^-½Fᵀ L⁻ᵀ(L + I)⁻¹ FP0^-½ has W Wᵀ = M⁻¹: with U = (L + I)⁻¹, LU = UL = I - U, so that T = L⁻ᵀU has
    T + Tᵀ - T(B - I)Tᵀ = L⁻ᵀ[(I - U) + (I - U)ᵀ - (I - U)(I - U)ᵀ + UUᵀ]L⁻¹ = B⁻¹.
    """

    @property
    def rank(self) -> int:
        return len(self.factor)

    @cached_property
    def trace(self) -> float:
        return float(diagonal_blocks(self.weighted, self.variances).sum(dtype=torch.float64))

    @cached_property
    def largest(self) -> float:
        """By a few steps of the power method, from below."""
        vector = self.deviation.new_ones(1, self.num_parameters)
        for _ in range(tuning.POWER_STEPS):
            vector = self.products(vector / vector.norm() * self.deviation) * self.deviation
        return float(vector.norm())

    def products(self, vectors: Tensor) -> Tensor:
        return self._pulled(self._pushed(vectors))

    def whitened_solve(self, vectors: Tensor) -> Tensor:
        """M⁻¹ v for vectors (m, P), by the Woodbury identity."""
        seen = self.factor.solve(self._pushed(vectors * self.deviation))
        return vectors - self._pulled(seen).mul_(self.deviation)

    def whitened_half(self, vectors: Tensor, transpose: bool = False) -> Tensor:
        seen = self._pushed(vectors * self.deviation)
        if transpose:
            self.factor.solve_lower_(self.factor.solve_lower_(seen), transpose=True, shift=1.0)
        else:
            self.factor.solve_lower_(self.factor.solve_lower_(seen, shift=1.0), transpose=True)
        return vectors - self._pulled(seen).mul_(self.deviation)

    def eigenvalues(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        values, turn = symmetric_eigen(gram(self.weighted, self.variances))
        seen = (turn.T @ self._pushed(vectors * self.deviation)).square().sum(1)  # qᵀFP0^-½v = λ^½ uᵀv
        return values.clamp_min(0.0), seen

    def group_grams(self) -> Tensor:
        found = []
        for group in range(self._num_groups):
            variances = {name: self._of_one_group(name, group) for name in self.shapes}
            used = [name for name, part in variances.items() if bool(part.any())]
            found.append(gram(self.weighted.restricted(used), variances).double())
        return torch.stack(found)

    def _of_one_group(self, name: str, group: int) -> Tensor:
        """P0⁻¹ of a parameter's entries in a prior group, and 0 of others."""
        groups = torch.as_tensor(self._group_of[name], device=self.deviation.device)
        return self.deviation.new_ones(()) * self.variances[name] * (groups == group)

    def _pushed(self, vectors: Tensor) -> Tensor:
        """F v for vectors (m, P), (r, m)."""
        return self.weighted.products(self.shapes.parts(vectors))[0]

    def _pulled(self, coefficients: Tensor) -> Tensor:
        """Fᵀ c for coefficients (r, m), (m, P)."""
        return self.weighted.transposed_products(coefficients.unsqueeze(0), self.shapes)


def leading_rows(curvature: Curvature, limit: int) -> LeadingRows | None:
    """The rows with `tuning.LEADING_SHARE` of the trace of JᵀΛJ, if they are few of all rows; at most `limit`."""
    limited = min(limit, curvature.rank)
    if _most(curvature.num_rows, limited) < tuning.FIRST_LEADING:
        return None
    values, directions = curvature.row_weights(curvature.prior.variances())
    count = leading_count(values, curvature.num_rows, limited)
    if count is None:
        return None
    return _chosen(curvature, values, directions, count, limit)


def leading_count(weights: Tensor, num_rows: int, limit: int) -> int | None:
    """How many of `num_rows` rows, of which a sample has these squared lengths, are leading rows; None if too many.

    At most `limit`.
    """
    ordered = weights.flatten().sort(descending=True).values.double()
    needed = int((ordered.cumsum(0) < tuning.LEADING_SHARE * ordered.sum()).sum()) + 1
    count = max(math.ceil(needed * num_rows / len(ordered)), tuning.FIRST_LEADING)
    few = count <= _most(num_rows, limit) and math.isfinite(float(ordered.sum()))
    return count if few else None


def _most(num_rows: int, limit: int) -> int:
    return min(limit, num_rows // tuning.ROWS_PER_LEADING)


def _chosen(curvature: Curvature, values: Tensor, directions: Tensor, count: int, limit: int) -> LeadingRows:
    """The `count` rows of largest weight."""
    flat = values.flatten()
    chosen = torch.zeros_like(flat, dtype=torch.bool)
    chosen[flat.topk(min(count, len(flat))).indices] = True
    chosen &= flat > 0
    exhausted, chosen = int(chosen.sum()) < count, chosen.view_as(values)
    used = directions * chosen.unsqueeze(1)
    eye = torch.eye(values.shape[1], dtype=values.dtype, device=values.device)
    return LeadingRows(curvature.weighted_rows(chosen, directions), eye - used @ used.mT, limit, exhausted)


def restored_sketch(record: Mapping[str, Any]) -> Sketch:
    """Restore a sketch of either kind from its record."""
    if "rows" not in record:
        return RandomSketch(**record)
    return LeadingRows(**{**record, "rows": Jacobian.from_record(record["rows"])})
