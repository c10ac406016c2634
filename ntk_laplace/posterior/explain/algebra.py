"""Closed forms of explanations: decomposition, removal, leverage, leave-one-out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ntk_laplace.curvature import FunctionSpacePrecision
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.jacobian.gram import cross_gram, diagonal_blocks
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.structures import FittedModel
from ntk_laplace.structures.points import TrainingPoints
from ntk_laplace.structures.what_if import HIGH_LEVERAGE

_RANGE = 1e-8  # singular values of a root, relative to its largest, below which they count as zero


def _kernel(space: FunctionSpacePrecision, left: Jacobian, right: Jacobian) -> Tensor:
    """Prior kernel between two sets of rows, (n1, K1, n2, K2)."""
    shape = left.num_examples, left.num_cotangents, right.num_examples, right.num_cotangents
    if 0 in shape:
        return left.f.new_zeros(shape)  # layouts of tiles are those of at least one example
    return cross_gram(left, right, space.variances).view(shape)


def contributions(space: FunctionSpacePrecision, test: Jacobian, residual: Tensor) -> Tensor:
    """k(x, x_i) r_i for residuals r (N, C), (n, N, C)."""
    return _kernel(space, test, space.rows.weighted(residual.unsqueeze(-1))).squeeze(-1).transpose(1, 2)


def leverages(blocks: Tensor) -> Tensor:
    """Eigenvalues of SᵀVS, in [0, 1), (N, R), largest last, from the diagonal blocks of B⁻¹."""
    return 1.0 - torch.linalg.eigvalsh(blocks).flip(-1)


class Removals:
    """Predictions without training points, single ones or groups: one Newton step, in function space.

    Terms that depend only on the training points are computed once. The residuals are r_i = S_i ρ_i + r⊥_i, of which
    the first part removes a point without cancellation. Few points have one outside the range of S_i: none, unless S is
    that of another curvature or a probability underflows. With D = B⁻¹SᵀKr⊥, one column for each of these,

        V_xi r⊥ = k(x, x_i) r⊥ - K_xS D_i,    (I - Λ_iV_ii)⁻¹ r⊥ = r⊥ + S_i [B⁻¹]_ii⁻¹ D_ii.

    The structure keeps the Jacobian.
    """

    def __init__(self, fitted: FittedModel) -> None:
        points, residual = fitted.points, fitted.residual()
        self._space = space = fitted.function_space
        with torch.no_grad():
            inverse = points.left_inverse(fitted.curvature_type, fitted.likelihood)
            inverse = torch.linalg.pinv(space.root, rtol=_RANGE) if inverse is None else inverse
            self._inside = (inverse.to(residual) @ residual.unsqueeze(-1)).squeeze(-1)  # ρ, (N, R)
            outside = residual - (space.root @ self._inside.unsqueeze(-1)).squeeze(-1)
        rounding = 1e3 * torch.finfo(residual.dtype).eps
        self._places = (outside.abs().amax(1) > rounding * residual.abs().amax(1)).nonzero().squeeze(1)
        self._outside = space.rows.subset(self._places).weighted(outside[self._places].unsqueeze(-1))  # rows r⊥ᵀJ_i
        columns = _kernel(space, space.weighted, self._outside).flatten(2)
        self._solved = (space.inverse @ columns.flatten(0, 1)).view_as(columns)  # D, (N, R, m)

    @cached_property
    def _amplified(self) -> Tensor:
        """[B⁻¹]_ii⁻¹ (ρ_i + D_ii), (N, R)."""
        right = self._inside.clone()
        right[self._places] += self._solved[self._places].diagonal(dim1=0, dim2=2).T
        return torch.linalg.solve(self._space.inverse_blocks, right.unsqueeze(-1)).squeeze(-1)

    def effects(self, test: Jacobian) -> tuple[Tensor, Tensor]:
        """Change of f(x) if one training point is removed, -V_xi (I - Λ_iV_ii)⁻¹ r_i, and of its variances, (n, N, C).

        (I - Λ_iV_ii)⁻¹ S_i = S_i [B⁻¹]_ii⁻¹, so r_i = S_iρ_i gives -V_xiS_i [B⁻¹]_ii⁻¹ ρ_i: neither Λ is inverted nor
        are large numbers subtracted.
        """
        to_train, through = self._across(test)
        return self._moved(test, to_train, through), self._widened(through)

    def changes(self, test: Jacobian) -> Tensor:
        """The first of these alone."""
        return self._moved(test, *self._across(test))

    def widening(self, test: Jacobian) -> Tensor:
        """The second alone, of any rows: change of each variance, (n, N, K)."""
        return self._widened(self._across(test)[1])

    def joint(self, test: Jacobian, groups: Sequence[Tensor]) -> Tensor:
        """-V_xG (I - Λ_GV_GG)⁻¹ r_G for the group G of training points of each of n inputs, (n, C).

        As for a single point, -V_xGS_G [B⁻¹]_GG⁻¹ ρ_G for r_G = S_Gρ_G, and the same for a part outside the range.
        """
        space, r = self._space, self._space.weighted.num_cotangents
        to_train = space.cross(test).T
        seen = self._seen(test, to_train)
        changes = []
        for i, group in enumerate(groups):
            places = (group[:, None] * r + torch.arange(r, device=group.device)).flatten()
            outside = torch.isin(self._places, group)
            amplified = self._inside[group] + self._solved[group][:, :, outside].sum(2)  # ρ_G + D_G
            columns = space.inverse[:, places]
            inside = to_train.view(test.num_examples, -1, len(columns))[i] @ (
                columns @ torch.linalg.solve(columns[places], amplified.flatten()))
            changes.append(-(seen[i, outside].sum(0) + inside))
        return torch.stack(changes)

    def _across(self, test: Jacobian) -> tuple[Tensor, Tensor]:
        """K_xS, (n*K, N*R), and V_xi S_i = (K_xS B⁻¹)_i, (n, K, N, R)."""
        space = self._space
        to_train = space.cross(test).T
        shape = test.num_examples, -1, space.weighted.num_examples, space.weighted.num_cotangents
        return to_train, (to_train @ space.inverse).view(shape)

    def _moved(self, test: Jacobian, to_train: Tensor, through: Tensor) -> Tensor:
        moved = -torch.einsum("xcnr,nr->xnc", through, self._amplified)
        moved[:, self._places] -= self._seen(test, to_train)
        return moved

    def _seen(self, test: Jacobian, to_train: Tensor) -> Tensor:
        """V_xi r⊥_i, (n, m, C), for K_xS (n*K, N*R)."""
        shares = _kernel(self._space, test, self._outside).squeeze(-1)  # (n, K, m)
        return (shares - (to_train @ self._solved.flatten(0, 1)).view_as(shares)).transpose(1, 2)

    def _widened(self, through: Tensor) -> Tensor:
        """The diagonal of V_xi (I - Λ_iV_ii)⁻¹ Λ_i V_ix = V_xiS_i [B⁻¹]_ii⁻¹ S_iᵀV_ix, (n, N, K)."""
        blocks, count = self._space.inverse_blocks, through.shape[0]
        half = torch.linalg.solve_triangular(torch.linalg.cholesky(blocks), through.permute(2, 3, 0, 1).flatten(2),
                                             upper=False)  # L_i⁻¹ S_iᵀV_ix with [B⁻¹]_ii = L_i L_iᵀ
        return half.square().sum(1).view(len(blocks), count, -1).transpose(0, 1)


def similarities(
    space: FunctionSpacePrecision, test: Jacobian, output: Tensor, squares: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Kernel of one output of each input with all outputs of the training points; with the same output; correlation.

    The first is (n, N, C). The others are (n, N): the similarity of [T20] 5.2, and its correlation, in [-1, 1].
    `squares` (N, C) are k(x_i, x_i).
    """
    n, c = test.f.shape
    chosen = torch.nn.functional.one_hot(output, c).to(test.f).unsqueeze(-1)  # (n, C, 1)
    kernel = _kernel(space, test.weighted(chosen), space.rows).squeeze(1)
    index = output.view(n, 1, 1).expand(-1, kernel.shape[1], 1)
    same = kernel.gather(2, index).squeeze(2)
    own = diagonal_blocks(test, space.variances).diagonal(dim1=1, dim2=2).gather(1, output.unsqueeze(1))
    scale = (own * squares[:, output].T).sqrt()
    return kernel, same, torch.where(scale > 0, same / scale, torch.zeros_like(same))


def without_each(
    space: FunctionSpacePrecision, points: TrainingPoints, likelihood: Likelihood
) -> tuple[Tensor, Tensor]:
    """Leave-one-out mean f_i - V_-i r_i and covariance V_-i = V_ii (I - Λ_iV_ii)⁻¹, (N, C) and (N, C, C).

    Computed as V_-i = V_ii + V_iiS_i [B⁻¹]_ii⁻¹ S_iᵀV_ii, without the difference I - Λ_iV_ii, which cancels
    catastrophically near leverage 1; the block of B⁻¹ does not.
    """
    with torch.no_grad():
        residual = points.residual(likelihood)
    moments = space.covariance_blocks(space.rows)
    half = moments @ space.root  # V_iiS_i
    covariance = moments + half @ torch.linalg.solve(space.inverse_blocks, half.mT)
    return points.f - (covariance @ residual.unsqueeze(-1)).squeeze(-1), covariance


@dataclass(frozen=True)
class RemovalTerms:
    """Terms for the removal of m training points from a curvature, each alone."""

    root: Tensor  # S_i, (m, C, R)
    half: Tensor  # V_iiS_i, (m, C, R)
    inner: Tensor  # S_iᵀV_iiS_i, (m, R, R)
    complement: Tensor  # I minus that; I where the removal is not trusted
    leverage: Tensor  # (m,), the largest eigenvalue of `inner`
    trusted: Tensor  # (m,)

    def amplified(self, residual: Tensor) -> Tensor:
        """(I - Λ_iV_ii)⁻¹ r_i for r (m, C), (m, C, 1); r_i where the removal is not trusted."""
        pull = residual.unsqueeze(-1)
        bent = torch.linalg.solve(self.complement, self.half.mT @ pull)  # (I - SᵀVS)⁻¹ SᵀV r
        return pull + self.root @ (bent * self.trusted.view(-1, 1, 1))

    def spread(self) -> Tensor:
        """W with W Wᵀ = S (I - SᵀVS)⁻¹ Sᵀ = (I - Λ_iV_ii)⁻¹ Λ_i, (m, C, R)."""
        return torch.linalg.solve_triangular(torch.linalg.cholesky(self.complement), self.root.mT, upper=False).mT


def removal_terms(moments: Tensor, root: Tensor, exact: bool) -> RemovalTerms:
    """I - S_iᵀV_iiS_i for covariances V_ii (m, C, C) and roots S_i (m, C, R).

    In an exact structure, whose H contains the S_iS_iᵀ of every point, leverages are below 1, up to rounding. An
    approximate one may contain less information about a point: above `HIGH_LEVERAGE` nothing is subtracted, and effects
    are of first order.
    """
    half = moments @ root
    inner = root.mT @ half
    leverage = torch.linalg.eigvalsh(inner)[:, -1]
    trusted = leverage < 1.0 if exact else leverage <= HIGH_LEVERAGE
    eye = torch.eye(inner.shape[1], dtype=inner.dtype, device=inner.device)
    return RemovalTerms(root, half, inner, torch.where(trusted.view(-1, 1, 1), eye - inner, eye), leverage, trusted)
