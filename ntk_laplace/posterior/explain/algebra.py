"""Closed forms of explanations: decomposition, removal, leverage, leave-one-out."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Decomposition:
    """f(x) = offset + Σ_i contribution_i + gap, per output.

    Attributes
    ----------
    offset : Tensor, (n, C)
        f - J(θ*-μ0): the linearized network's output at the prior mean.
    contributions : Tensor, (n, N, C)
        k(x, x_i) r_i.
    gap : Tensor, (n, C)
        The remainder; zero if the weights are a stationary point ([T20] 5.2).
    """

    offset: Tensor
    contributions: Tensor
    gap: Tensor


def _cross(space: FunctionSpacePrecision, left: Jacobian, right: Jacobian) -> Tensor:
    """Prior kernel between two sets of rows, (n1, K1, n2, K2)."""
    shape = left.num_examples, left.num_cotangents, right.num_examples, right.num_cotangents
    if 0 in shape:
        return left.f.new_zeros(shape)  # layouts of tiles are those of at least one example
    return cross_gram(left, right, space.variances).view(shape)


def contributions(space: FunctionSpacePrecision, test: Jacobian, residual: Tensor, centered: Tensor) -> Decomposition:
    """Decompose each output into contributions of the training points.

    Parameters
    ----------
    residual : Tensor, (N, C)
        r at the training points.
    centered : Tensor, (P,)
        θ* - μ0.
    """
    own = space.rows.weighted(residual.unsqueeze(-1))  # rows r_iᵀJ_i
    shares = _cross(space, test, own).squeeze(-1).transpose(1, 2)  # k(x, x_i) r_i, (n, N, C)
    pushed = test.jvp(space.shapes.named(centered))
    return Decomposition(test.f - pushed, shares, pushed - shares.sum(1))


def leverages(blocks: Tensor) -> Tensor:
    """Eigenvalues of SᵀVS, in [0, 1), (N, R), largest last, from the diagonal blocks of B⁻¹."""
    return 1.0 - torch.linalg.eigvalsh(blocks).flip(-1)


@dataclass(frozen=True)
class ResidualParts:
    """r_i = S_i ρ_i + r_i⊥: what removes a point without cancellation, and the part outside the range of S_i.

    Attributes
    ----------
    inside : Tensor, (N, R)
        ρ.
    places : Tensor, (m,)
        Points with a part outside: none, unless S is that of another curvature or a probability underflows.
    outside : Tensor, (m, C)
        r⊥ of these.
    """

    inside: Tensor
    places: Tensor
    outside: Tensor

    @classmethod
    def of(cls, fitted: FittedModel) -> ResidualParts:
        """Of the training points of a structure that keeps the Jacobian."""
        points, root, residual = fitted.points, fitted.function_space.root, fitted.residual()
        with torch.no_grad():
            inverse = points.left_inverse(fitted.curvature_type, fitted.likelihood)
            inverse = torch.linalg.pinv(root, rtol=_RANGE) if inverse is None else inverse
            inside = (inverse.to(residual) @ residual.unsqueeze(-1)).squeeze(-1)
            outside = residual - (root @ inside.unsqueeze(-1)).squeeze(-1)
            rounding = 1e3 * torch.finfo(residual.dtype).eps
            places = (outside.abs().amax(1) > rounding * residual.abs().amax(1)).nonzero().squeeze(1)
        return cls(inside, places, outside[places])


class SingleRemovals:
    """Predictions without each single training point: one Newton step, in function space.

    Terms that depend only on the training points are computed once.

    Parameters
    ----------
    fitted : FittedModel
        Of a structure that keeps the Jacobian.
    """

    def __init__(self, fitted: FittedModel) -> None:
        self._space, self._parts = fitted.function_space, ResidualParts.of(fitted)
        self._columns = OutsideColumns(self._space, self._parts)
        amplified = self._parts.inside.clone()
        amplified[self._parts.places] += self._columns.own()
        # [B⁻¹]_ii⁻¹ (ρ_i + D_ii)
        self._amplified = torch.linalg.solve(self._space.inverse_blocks, amplified.unsqueeze(-1)).squeeze(-1)

    def effects(self, test: Jacobian) -> tuple[Tensor, Tensor]:
        """Change of f(x) if one training point is removed, -V_xi (I - Λ_iV_ii)⁻¹ r_i, and of its variances, (n, N, C).

        (I - Λ_iV_ii)⁻¹ S_i = S_i [B⁻¹]_ii⁻¹, so r_i = S_iρ_i gives -V_xiS_i [B⁻¹]_ii⁻¹ ρ_i: neither Λ is inverted nor
        are large numbers subtracted. A part r⊥ outside the range of S_i adds, with D = B⁻¹SᵀKr⊥,
        V_xi r⊥ = k(x, x_i) r⊥ - K_xS D_i and (I - Λ_iV_ii)⁻¹ r⊥ = r⊥ + S_i [B⁻¹]_ii⁻¹ D_ii.
        """
        to_train, through = self._across(test)
        return self._moved(test, to_train, through), _widened(self._space.inverse_blocks, through)

    def changes(self, test: Jacobian) -> Tensor:
        """The first of these alone."""
        return self._moved(test, *self._across(test))

    def _across(self, test: Jacobian) -> tuple[Tensor, Tensor]:
        """K_xS, (n*K, N*R), and V_xi S_i = (K_xS B⁻¹)_i, (n, K, N, R)."""
        space = self._space
        to_train = space.cross(test).T
        shape = test.num_examples, -1, space.weighted.num_examples, space.weighted.num_cotangents
        return to_train, (to_train @ space.inverse).view(shape)

    def _moved(self, test: Jacobian, to_train: Tensor, through: Tensor) -> Tensor:
        moved = -torch.einsum("xcnr,nr->xnc", through, self._amplified)
        moved[:, self._parts.places] -= self._columns.seen(test, to_train)
        return moved


class OutsideColumns:
    """D = B⁻¹SᵀK r⊥, one column for each point with a residual outside the range of its S.

    Attributes
    ----------
    solved : Tensor, (N, R, m)
    """

    def __init__(self, space: FunctionSpacePrecision, parts: ResidualParts) -> None:
        self._space, self._places = space, parts.places
        self._rows = space.rows.subset(parts.places).weighted(parts.outside.unsqueeze(-1))  # rows r⊥ᵀJ_i
        columns = _cross(space, space.weighted, self._rows).flatten(2)  # (N, R, m)
        self.solved = (space.inverse @ columns.flatten(0, 1)).view_as(columns)

    def own(self) -> Tensor:
        """D_ii, (m, R)."""
        return self.solved[self._places].diagonal(dim1=0, dim2=2).T

    def seen(self, test: Jacobian, to_train: Tensor) -> Tensor:
        """V_xi r⊥_i, (n, m, C), for K_xS (n*K, N*R)."""
        shares = _cross(self._space, test, self._rows).squeeze(-1)  # (n, K, m)
        return (shares - (to_train @ self.solved.flatten(0, 1)).view_as(shares)).transpose(1, 2)


def widening(space: FunctionSpacePrecision, test: Jacobian) -> Tensor:
    """Change of each variance of the rows `test` if one training point is removed, (n, N, K).

    The diagonal of V_xi (I - Λ_iV_ii)⁻¹ Λ_i V_ix = V_xiS_i [B⁻¹]_ii⁻¹ S_iᵀV_ix.
    """
    r, n = space.weighted.num_cotangents, space.weighted.num_examples
    through = (space.cross(test).T @ space.inverse).view(test.num_examples, -1, n, r)
    return _widened(space.inverse_blocks, through)


def _widened(blocks: Tensor, through: Tensor) -> Tensor:
    """`widening` from [B⁻¹]_ii (N, R, R) and V_xiS_i (n, K, N, R)."""
    count, n = through.shape[0], len(blocks)
    half = torch.linalg.solve_triangular(torch.linalg.cholesky(blocks), through.permute(2, 3, 0, 1).flatten(2),
                                         upper=False)  # L_i⁻¹ S_iᵀV_ix with [B⁻¹]_ii = L_i L_iᵀ
    return half.square().sum(1).view(n, count, -1).transpose(0, 1)


def similarities(
    space: FunctionSpacePrecision, test: Jacobian, output: Tensor, squares: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Kernel of one output of each input with all outputs of the training points; with the same output; correlation.

    The first is (n, N, C). The others are (n, N): the similarity of [T20] 5.2, and its correlation, in [-1, 1].
    `squares` (N, C) are k(x_i, x_i).
    """
    n, c = test.f.shape
    chosen = torch.nn.functional.one_hot(output, c).to(test.f).unsqueeze(-1)  # (n, C, 1)
    kernel = _cross(space, test.weighted(chosen), space.rows).squeeze(1)
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
    """Terms for the removal of m training points from a curvature, each alone.

    Attributes
    ----------
    root, half : Tensor, (m, C, R)
        S_i and V_iiS_i.
    inner, complement : Tensor, (m, R, R)
        S_iᵀV_iiS_i, and I minus it; I instead where the removal is not trusted.
    leverage : Tensor, (m,)
        Largest eigenvalue of `inner`.
    trusted : Tensor of bool, (m,)
    """

    root: Tensor
    half: Tensor
    inner: Tensor
    complement: Tensor
    leverage: Tensor
    trusted: Tensor

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
