"""A posterior precision H that is given: it does not follow from the prior, nor from the curvature of the data.

log det B = log det H - log det P0 and γ_g = n_g - δ_g tr_g(H⁻¹) are those of the prior's present precisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.curvature.full import whitened
from ntk_laplace.curvature.posterior_precision import CrossCovariance, PosteriorPrecision
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.jacobian.gram import diagonal_blocks, gram
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.runtime.linalg import cholesky_log_det, solve_lower, solve_spd
from ntk_laplace.runtime.lower_triangle import LowerTriangle
from ntk_laplace.runtime.parameter_layout import ParameterLayout
from ntk_laplace.runtime.sampling import normal


class BlockwisePrecision(PosteriorPrecision):
    """H, block diagonal over whole parameters: diagonals and dense blocks, or one of all. Its own prior is N(0, I).

    Parameters
    ----------
    diagonals : mapping of str to Tensor, (p,)
        Diagonal of H for these parameters.
    factors : sequence of (names, Tensor)
        Cholesky factors, (p, p), of which only the lower triangles are read, of the blocks of consecutive parameters.
    shapes : mapping of str to torch.Size
        The parameters, in order; each has a diagonal or belongs to one block.
    """

    def __init__(
        self, diagonals: Mapping[str, Tensor], factors: Sequence[tuple[tuple[str, ...], Tensor]],
        shapes: Mapping[str, torch.Size],
    ) -> None:
        like = next(iter(diagonals.values())) if diagonals else factors[0][1]
        super().__init__(GaussianPrior(1.0, groups="parameter").bind(shapes).to(like.device), like)
        self.diagonals, self.factors = dict(diagonals), list(factors)
        self._variances = {name: own.reciprocal() for name, own in self.diagonals.items()}
        places = self.shapes.slices()
        self._diagonal_places = [(places[name], own) for name, own in self.diagonals.items()]
        self._blocks = [
            (slice(places[names[0]].start, places[names[-1]].stop), factor,
             ParameterLayout({name: self.shapes[name] for name in names})) for names, factor in self.factors
        ]

    # --- storage

    def record(self) -> dict[str, Any]:
        """Diagonals and factors."""
        return {
            "kind": "blocks",
            "diagonals": [{"weight": name, "values": own} for name, own in self.diagonals.items()],
            "factors": [{"spans": list(names), "values": factor.tril()} for names, factor in self.factors],
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any], shapes: ParameterLayout) -> BlockwisePrecision:
        """Restore what `record` returned."""
        diagonals = {one["weight"]: one["values"] for one in record["diagonals"]}
        return cls(diagonals, [(tuple(one["spans"]), one["values"]) for one in record["factors"]], shapes)

    # --- algebra

    def log_det(self) -> Tensor:
        """log det H, in double precision."""
        parts = [own.double().log().sum() for own in self.diagonals.values()]
        return torch.stack(parts + [cholesky_log_det(factor).double() for _, factor in self.factors]).sum()

    def effective_parameters(self) -> Tensor:
        """1 - [H⁻¹]_pp, (P,)."""
        used = torch.ones_like(self.prior_precision)
        for place, own in self._diagonal_places:
            used[place] -= own.reciprocal()
        for place, factor, _ in self._blocks:
            used[place] -= LowerTriangle.of(factor).inverse_diagonal(1).flatten()
        return used

    def solve(self, vectors: Tensor) -> Tensor:
        return self._by_block(vectors, lambda own, v: v / own, solve_spd)

    def multiply(self, vectors: Tensor) -> Tensor:
        return self._by_block(vectors, lambda own, v: v * own, lambda factor, v: (low := factor.tril()) @ (low.T @ v))

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        like = self.prior_precision
        noise = normal((len(like), count), like, generator)
        return self._by_block(noise.T, lambda own, v: v * own.rsqrt(), lambda factor, v: solve_lower(factor, v, True))

    def _by_block(
        self, vectors: Tensor, along: Callable[[Tensor, Tensor], Tensor], block: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Apply functions of a diagonal and vectors (k, p), and of a factor and columns (p, k), to vectors (..., P)."""
        flat = vectors.reshape(-1, self.num_parameters)
        found = torch.empty_like(flat)
        for place, own in self._diagonal_places:
            found[:, place] = along(own, flat[:, place])
        for place, factor, _ in self._blocks:
            found[:, place] = block(factor, flat[:, place].T).T
        return found.view_as(vectors)

    # --- covariance of f

    def covariance_blocks(self, rows: Jacobian) -> Tensor:
        k, n = rows.num_cotangents, rows.num_examples
        blocks = diagonal_blocks(rows, self._variances) if self._variances else rows.f.new_zeros(n, k, k)
        for part in self._panels(rows) if self._blocks else ():
            for half in self._halves(rows.subset(part)):
                own = half.permute(1, 2, 0)
                blocks[part] += own @ own.mT
        return blocks

    def covariance(self, rows: Jacobian) -> Tensor:
        k, n = rows.num_cotangents, rows.num_examples
        joint = gram(rows, self._variances) if self._variances else rows.f.new_zeros(n * k, n * k)
        for half in self._halves(rows):
            own = half.flatten(1)
            joint.addmm_(own.T, own)
        return joint

    def _halves(self, rows: Jacobian) -> Iterator[Tensor]:
        """L⁻¹Jᵀ of each dense block, (p, n, K)."""
        return (whitened(factor, rows, names) for _, factor, names in self._blocks)


class GivenPrecision(PosteriorPrecision):
    """A given H beside the present prior.

    Parameters
    ----------
    inner : PosteriorPrecision
        H, relative to a prior of its own: its `log_det` is log det H less the log determinant of its diagonal
        `prior_precision`.
    prior : GaussianPrior
        Of the posterior.

    Attributes
    ----------
    inner : PosteriorPrecision
    """

    homogeneous = False

    def __init__(self, inner: PosteriorPrecision, prior: GaussianPrior) -> None:
        super().__init__(prior, inner.prior_precision)
        self.inner = inner
        with torch.no_grad():
            own, present = (one.double().log().sum() for one in (inner.prior_precision, self.prior_precision))
        self._log_det = inner.log_det().detach().double() + own - present
        self.standard_error = inner.standard_error  # known once `log_det` is

    def log_det(self) -> Tensor:
        """log det B = log det H - log det P0, in double precision."""
        return self._log_det

    def effective_parameters(self) -> Tensor:
        """γ_g = n_g - δ_g tr_g(H⁻¹) for each group of the present prior, (G,)."""
        groups, inner = self.groups, self.inner
        count = int(inner.groups.max()) + 1
        ends = [torch.full((count,), value, device=groups.device) for value in (-1, self._num_groups)]
        most = ends[0].scatter_reduce(0, inner.groups, groups, "amax")
        least = ends[1].scatter_reduce(0, inner.groups, groups, "amin")
        if not (torch.equal(most, least) and inner.homogeneous):  # the inner groups are no finer
            return super().effective_parameters()
        sizes = torch.bincount(inner.groups, minlength=count).double()
        inside = torch.zeros_like(sizes).scatter_(0, inner.groups, inner.prior_precision.double())
        traces = (sizes - inner.effective_parameters().double()) / inside  # tr_g(H⁻¹) in the groups of the inner prior
        total = torch.zeros(self._num_groups, dtype=torch.float64, device=groups.device)
        total.index_add_(0, least, traces).mul_(-self._by_group.double())
        return total + torch.bincount(groups, minlength=self._num_groups)

    @property
    def effective_error(self) -> float:
        """That of the inner precision, if one number is the ratio of the two priors; else an upper bound."""
        if not self.inner.effective_error:
            return 0.0
        return self.inner.effective_error * float((self.prior_precision / self.inner.prior_precision).max())

    def solve(self, vectors: Tensor) -> Tensor:
        return self.inner.solve(vectors)

    def multiply(self, vectors: Tensor) -> Tensor:
        return self.inner.multiply(vectors)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        return self.inner.sample(count, generator)

    def covariance_blocks(self, rows: Jacobian) -> Tensor:
        return self.inner.covariance_blocks(rows)

    def covariance(self, rows: Jacobian) -> Tensor:
        return self.inner.covariance(rows)

    def cross_covariance(self, rows: Jacobian) -> CrossCovariance:
        return self.inner.cross_covariance(rows)
