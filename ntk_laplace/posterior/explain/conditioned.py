"""Leave-one-out of some points under an approximate posterior, fitted to the others.

An approximate H contains less information about single points than they have, and subtracting one from it can make it
indefinite. Here nothing is subtracted. A group M of points is left out, and the structure is fitted to the others: H.
It predicts the points of the group with the covariances K_ii of K = J_M H⁻¹ J_Mᵀ, as it predicts any new point.

For the means the group is taken back in, all points but one. With H̃ = P0 + JᵀΛJ the exact precision of the others,
B = I + SᵀKS, and r the residuals at the trained weights,

    d = J_M H̃⁻¹ J_Mᵀ r        change of f if the group is removed, one Newton step of the linearized model
    V = K - KS B⁻¹ SᵀK         covariance of f given everything
    m = f - d + V (r + Λd)     mean after the group is taken back in; f if H = H̃
    V_-i = V_ii + V_iiS_i [B⁻¹]_ii⁻¹ S_iᵀV_ii,    mean_-i = m_i - V_-i (r_i - Λ_i (m_i - f_i)).

Leverages are below 1 by construction, and with H = H̃ the means are those of the exact posterior's leave-one-out. H̃⁻¹
takes conjugate gradients preconditioned with H. examples/selection/leave_some_out.py measures the choices: means by the
approximation alone (d = Kr) are worse. V_-i is narrower than the predictions of H at new points, and would not give
the scale of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ntk_laplace.errors import DataError, UnsupportedError
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.posterior.explain.algebra import leverages
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.linalg import cholesky_of, solve_lower
from ntk_laplace.runtime.lower_triangle import LowerTriangle
from ntk_laplace.structures import FittedModel
from ntk_laplace.structures.what_if import rows_of

_MATRICES = 6  # of the size of K at a time


@dataclass(frozen=True)
class Without:
    """Predictive moments without each point, and the terms of its removal, all (m, ...)."""

    mean: Tensor
    covariance: Tensor
    leverage: Tensor
    used: Tensor
    information: Tensor

    @classmethod
    def of(cls, mean: Tensor, covariance: Tensor, blocks: Tensor) -> Without:
        """The moments, and the terms that follow from the blocks [B⁻¹]_ii = I - SᵀV_iiS, (m, R, R)."""
        used = blocks.shape[1] - blocks.diagonal(dim1=1, dim2=2).sum(1)
        information = -0.5 * torch.linalg.slogdet(blocks).logabsdet
        return cls(mean, covariance, leverages(blocks)[:, -1], used, information)

    @classmethod
    def joined(cls, parts: Sequence[Without], join: Callable[[list[Tensor]], Tensor] = torch.cat) -> Without:
        """The moments of several sets of points, one after the other, or as `join` has it."""
        return cls(*(join([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    def each(self, function: Callable[[Tensor], Tensor]) -> Without:
        """A function of every one of the moments and terms."""
        return Without(*(function(getattr(self, field.name)) for field in fields(self)))


def conditioned(fitted: FittedModel, index: Tensor) -> tuple[Without, float]:
    """Moments without each of some training points (m,), ascending, in groups of at most a tenth of the data.

    The number beside them is the largest share of a Newton step that the last passes still added; 0 if all are taken.

    UnsupportedError if the curvature is not the GGN; DataError if no other points remain, or the data cannot be read
    again; MemoryBudgetError if a group's matrices do not fit in memory.
    """
    n, c = fitted.num_examples, fitted.points.num_outputs
    if fitted.curvature_type.kind != "ggn":
        raise UnsupportedError('curvature="ggn" to leave out chosen points', f"{fitted.curvature_type.kind!r}",
                               "Fit with the GGN, or score the model on other data.")
    if n < 2:
        raise DataError("at least two training points, to leave one out", f"{n}", "Score the model on other data.")
    count = -(-len(index) // max(1, int(n * tuning.LEFT_OUT_SHARE)))
    largest = -(-len(index) // count) * c
    fitted.model.require_memory(_MATRICES * largest**2 * fitted.points.f.element_size(),
                                f"{_MATRICES} matrices over {largest:,} outputs of points to leave out",
                                "Leave out fewer points at a time.")
    product = _Products(fitted)
    # every count-th point: neighbors in the data, often of one class, are not left out together
    groups = [torch.arange(start, len(index), count, device=index.device) for start in range(count)]
    found = [_group(fitted, index[group], product) for group in groups]
    order = torch.cat(groups).argsort()
    joined = Without.joined([one for one, _ in found])
    return joined.each(lambda values: values[order]), max(left for _, left in found)


def _group(fitted: FittedModel, group: Tensor, product: _Products) -> tuple[Without, float]:
    """Moments without each point of a group that is left out together."""
    with torch.inference_mode(False), torch.no_grad():
        stays = torch.ones(fitted.num_examples, dtype=torch.bool, device=group.device)
        stays[group] = False
        precision = fitted.subset(stays.nonzero().squeeze(1)).precision
        rows, points, shapes = rows_of(fitted, group), fitted.points.subset(group), fitted.network.shapes
        residual = fitted.residual()[group]
        root = fitted.root()[group]
        step, left = _solved(lambda v: product(v, stays), rows.vjp(residual, shapes), precision.solve)
        moved = rows.jvp(shapes.named(step))  # d
        kernel = precision.covariance(rows)
    return _taken_back(0.5 * (kernel + kernel.mT), points.f, residual, root, moved), left


def _taken_back(kernel: Tensor, f: Tensor, residual: Tensor, root: Tensor, moved: Tensor) -> Without:
    """The group is taken back in, all points but each one; kernel (m C, m C), root (m, C, R), the others (m, C)."""
    m, c, r = root.shape
    half = torch.einsum("xjd,jdr->xjr", kernel.view(m * c, m, c), root).reshape(m * c, m * r)  # KS
    inner = torch.einsum("icr,icx->irx", root, half.view(m, c, m * r)).reshape(m * r, m * r)
    factor = cholesky_of(inner + torch.eye(m * r, dtype=kernel.dtype, device=kernel.device))  # of B
    blocks = LowerTriangle.of(factor).inverse_diagonal(r)
    half = solve_lower(factor, half.T)  # L⁻¹SᵀK
    own = kernel.view(m, c, m, c).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    thin = half.view(m * r, m, c).permute(1, 2, 0)
    moments = own - thin @ thin.mT  # V_ii
    through = moments @ root
    widened = moments + through @ torch.linalg.solve(blocks, through.mT)  # V_-i
    pull = (residual + _times(root, moved)).reshape(-1)
    shift = (kernel @ pull - half.T @ (half @ pull)).view(m, c) - moved  # m - f
    mean = f + shift - (widened @ (residual - _times(root, shift)).unsqueeze(-1)).squeeze(-1)
    return Without.of(mean, own.clone(), blocks)


def _times(root: Tensor, values: Tensor) -> Tensor:
    """Λ v, (m, C), for S (m, C, R) and v (m, C)."""
    return (root @ (root.mT @ values.unsqueeze(-1))).squeeze(-1)


class _Products:
    """v -> (P0 + JᵀΛJ) v over the training points that stay; rows of J are kept between passes where they fit.

    Each process adds up over its own.
    """

    def __init__(self, fitted: FittedModel) -> None:
        self._fitted, self._prior = fitted, fitted.prior.flat_precision().detach().to(fitted.theta)
        self._kept: list[tuple[slice | Tensor, Jacobian]] | None = None
        with torch.no_grad():
            self._root = fitted.root()

    def __call__(self, vector: Tensor, stays: Tensor) -> Tensor:
        shapes = self._fitted.network.shapes
        named, total = shapes.named(vector), torch.zeros_like(vector)
        root = self._root * stays.view(-1, 1, 1)
        for here, rows in self._rows():
            total += rows.vjp(_times(root[here], rows.jvp(named)), shapes)
        self._fitted.row_reducer.sum_(total)
        return total.add_(self._prior * vector)

    def _rows(self) -> Iterator[tuple[slice | Tensor, Jacobian]]:
        if self._kept is not None:
            yield from self._kept
            return
        n, budget = self._fitted.num_examples, self._fitted.settings.memory_budget
        room = min(tuning.KEPT_ROWS_BYTES, tuning.KEPT_ROWS_BYTES if budget is None else budget)
        kept: list[tuple[slice | Tensor, Jacobian]] = []
        fits = True
        for here, rows in self._fitted.own_rows(torch.arange(n, device="cpu")):
            fits = fits and rows.nbytes * n <= room * rows.num_examples
            if fits:
                kept.append((here, rows))
            yield here, rows
        self._kept = kept if fits else None


def _solved(
    product: Callable[[Tensor], Tensor], right: Tensor, precondition: Callable[[Tensor], Tensor]
) -> tuple[Tensor, float]:
    """A⁻¹b by preconditioned conjugate gradients from 0, and the share of bᵀA⁻¹b that the last steps added.

    Each step adds its gain to bᵀx, which grows to bᵀA⁻¹b; a few last gains estimate what is missing.
    """
    solution, rest = torch.zeros_like(right), right.clone()
    direction = scaled = precondition(rest)
    size = start = float(rest @ scaled)
    gains: list[float] = []
    left = 0.0
    while size > start * torch.finfo(right.dtype).eps ** 1.5:  # with an exact preconditioner one step is enough
        pushed = product(direction)
        length = size / float(direction @ pushed)
        solution, rest = solution + length * direction, rest - length * pushed
        gains.append(length * size)
        left = sum(gains[-3:]) / sum(gains)
        if left <= tuning.LEFT_OUT_ACCURACY or len(gains) == tuning.LEFT_OUT_PASSES:
            break
        scaled = precondition(rest)
        before, size = size, float(rest @ scaled)
        direction = scaled + size / before * direction
    else:
        left = 0.0
    return solution, left
