"""INF: a low-rank term with Kronecker eigenvectors plus a diagonal that makes H's diagonal exact ([S20] section 2).

H = R U Λ Uᵀ R + D + P0 on one parameter block. U = U_g ⊗ U_a has a few eigenvectors on each side; R = I unless [S20]
lemma 3 is violated. Determinant, solves and samples cost O(L³) in L = |U_g| |U_a|; U itself is never formed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ntk_laplace.curvature.parameter_blocks import ParameterBlock
from ntk_laplace.curvature.structured import BlockPrecision
from ntk_laplace.errors import HyperparameterError, NumericalError, is_whole
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.linalg import cholesky_log_det, cholesky_of, solve_lower, symmetric_eigen
from ntk_laplace.runtime.panels import panels
from ntk_laplace.runtime.reflections import Basis, Reflections
from ntk_laplace.runtime.resources import buffer_bytes, require_memory


def chosen_rank(values: Tensor, rank: int | float | str) -> int:
    """Number of largest eigenvalues that `rank` selects; zero eigenvalues are excluded.

    The rank is a number; a fraction in (0, 1]; or "trace:0.95", as many as reach that share of the trace.
    """
    ordered = values.flatten().double().sort(descending=True).values
    positive = int((ordered > ordered[0] * torch.finfo(values.dtype).eps).sum()) if len(ordered) else 0
    if isinstance(rank, str):
        share = float(rank.removeprefix("trace:"))
        captured = ordered.cumsum(0)
        count = int((captured < share * captured[-1]).sum()) + 1
    elif isinstance(rank, float):
        count = max(1, round(rank * len(ordered)))
    else:
        count = rank
    return max(1, min(count, positive))


def check_rank(rank: int | float | str) -> int | float | str:
    """The rank, of a form that `chosen_rank` accepts; a whole number as one of Python (HyperparameterError)."""
    if is_whole(rank, 1):
        return int(rank)
    good = isinstance(rank, float) and 0.0 < rank <= 1.0
    if isinstance(rank, str) and rank.startswith("trace:"):
        try:
            good = 0.0 < float(rank.removeprefix("trace:")) <= 1.0
        except ValueError:
            good = False
    if not good:
        raise HyperparameterError('a rank: a number of eigenvalues, a fraction in (0, 1], or "trace:0.95"', f"{rank!r}",
                                  "Pass INF(rank=100), INF(rank=0.25) or INF(rank=\"trace:0.9\").")
    return rank


@dataclass(frozen=True)
class LowRank:
    """The kept eigenvectors of one parameter block.

    Attributes
    ----------
    left, right : Tensor, (o, p) and (i, q)
        U_g and U_a; L = p q.
    rows, columns : Tensor
        Their indices among all eigenvectors of each side.
    """

    left: Tensor
    right: Tensor
    rows: Tensor
    columns: Tensor

    @classmethod
    def keep(cls, block: ParameterBlock, basis: Basis, values: Tensor, rank: int | float | str) -> LowRank:
        """Keep the eigenvectors of both sides that belong to the largest eigenvalues (1, o, i) ([S20] 2)."""
        o, i = block.entries[1:]
        top = values[0].flatten().topk(chosen_rank(values, rank)).indices
        rows, columns = torch.unique(top // i), torch.unique(top % i)
        assert not isinstance(basis.left, Reflections) and not isinstance(basis.right, Reflections)
        return cls(_columns(basis.left, o, rows, values), _columns(basis.right, i, columns, values), rows, columns)

    def to(self, device: torch.device, dtype: torch.dtype) -> LowRank:
        """The same eigenvectors on another device, or in another floating type."""
        left, right = (side.to(device, dtype) for side in (self.left, self.right))
        return LowRank(left, right, self.rows.to(device), self.columns.to(device))

    @property
    def size(self) -> int:
        """L, the rank."""
        return self.left.shape[1] * self.right.shape[1]


def _columns(side: Tensor | None, size: int, chosen: Tensor, like: Tensor) -> Tensor:
    if side is not None:
        return side[0][:, chosen]
    unit = like.new_zeros(size, len(chosen))  # not a slice of the identity: a vocabulary is large
    unit[chosen, torch.arange(len(chosen), device=like.device)] = 1.0
    return unit


class InfBlock(BlockPrecision):
    """H on one parameter block, for one setting of the precisions.

    Parameters
    ----------
    block : ParameterBlock
        A block with G = 1.
    low : LowRank
    moments : Tensor, (1, o, i)
        Second moments in the eigenbasis.
    exact : Tensor, (1, o, i)
        Diagonal of JᵀΛJ.
    precision : Tensor, () or (1, o, i)
        Prior precision δ.
    violation : str
        Where the diagonal of the low-rank term exceeds the exact one: "shrink" scales its row and column down to the
        exact diagonal; "raise" leaves it, and raises an error if D + P0 is not positive.
    """

    def __init__(
        self, block: ParameterBlock, low: LowRank, moments: Tensor, exact: Tensor, precision: Tensor,
        violation: str = "shrink"
    ) -> None:
        self.block, self.low, self.violation = block, low, violation
        self.kept = moments[0][low.rows][:, low.columns]  # (p, q)
        self.exact, self.precision = exact[0], precision if precision.ndim == 0 else precision[0]
        element = exact.element_size()
        require_memory(3 * low.size**2 * element, exact.device, f"INF's matrices of rank L = {low.size:,}",
                       "Ask for a smaller rank: INF(rank=...).")
        self._require_positive()

    # --- [S20] lemma 3

    def low_diagonal(self) -> Tensor:
        """Diagonal of U Λ Uᵀ before any scaling, (o, i)."""
        return self._low_diagonal(self.kept)

    def excess(self) -> Tensor:
        """Excess of the diagonal of U Λ Uᵀ over the exact diagonal, (o, i), at least zero ([S20] lemma 3)."""
        over = self.low_diagonal() - self.exact
        rounding = 64 * torch.finfo(over.dtype).eps * self.exact.abs().amax()
        return torch.where(over > rounding, over, torch.zeros_like(over))

    def zeros(self) -> int:
        """Number of the L kept eigenvalues that are zero up to rounding ([S20] lemma 3, second condition)."""
        return int((self.kept <= self.kept.max() * torch.finfo(self.kept.dtype).eps).sum())

    def _require_positive(self) -> None:
        if self.violation != "raise":
            return
        total = self._terms(self.kept, self.exact)[0] + self.precision
        bad = total <= 0
        if bool(bad.any()):
            raise NumericalError(
                f"a positive diagonal correction on {' + '.join(self.block.names)} ([S20] lemma 3)",
                f"{int(bad.sum())} of {bad.numel()} entries where the low-rank part exceeds the exact diagonal by more "
                f"than the prior precision, at worst by {float(-total.min()):.3g}",
                'Use INF(violation="shrink"), a smaller rank or a larger precision.',
            )

    # --- the terms of H, as functions of λ and the exact diagonal, so that autograd can differentiate them

    def _low_diagonal(self, kept: Tensor) -> Tensor:
        return self.low.left.square() @ kept @ self.low.right.square().T

    def _terms(self, kept: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
        """D, which makes the diagonal exact, and R²; D is zero where R scales the low-rank term down."""
        low = self._low_diagonal(kept)
        if self.violation == "raise":
            return exact - low, low.new_ones(()).expand_as(low)
        over = low > exact
        squared = torch.where(over, exact.clamp_min(0.0) / torch.where(over, low, 1.0), 1.0)
        return (exact - low).clamp_min(0.0), squared

    @staticmethod
    def _root(squared: Tensor) -> Tensor:
        """R; zero with zero derivative where the exact diagonal is zero, such as at a dead unit."""
        zero = squared == 0
        return torch.where(zero, 0.0, torch.where(zero, 1.0, squared).sqrt())

    def _inner(self, kept: Tensor, weights: Tensor) -> Tensor:
        """Λ^½ Uᵀ diag(w) U Λ^½ for w (o, i), (L, L): V_sᵀV_s of [S20], without forming U."""
        left, right = self.low.left, self.low.right
        if self.block.table:  # unit vectors: only the chosen tokens contribute
            left, weights = left[self.low.rows], weights[self.low.rows]
        p, q = left.shape[1], right.shape[1]
        pairs = torch.einsum("op,or->opr", left, left).flatten(1)  # (o, p²)
        sides = weights.T @ pairs  # (i, p²)
        both = torch.einsum("iq,is->iqs", right, right).flatten(1).T @ sides  # (q², p²)
        matrix = both.view(q, q, p, p).permute(2, 0, 3, 1).reshape(p * q, p * q)
        # a floor far below rounding: the square root has an infinite slope at a zero eigenvalue, but log det has not
        limits = torch.finfo(kept.dtype)
        floor = max(limits.eps**2 * float(kept.detach().max()), limits.tiny)
        root = (kept.clamp_min(0.0) + floor).sqrt().flatten()
        return matrix * root * root.unsqueeze(1)

    def _log_det(self, kept: Tensor, exact: Tensor, log_precision: Tensor) -> Tensor:
        """log det (I + P0^-½ (JᵀΛJ) P0^-½) on this parameter block, for this approximation of JᵀΛJ."""
        precision = log_precision.exp()
        diagonal, squared = self._terms(kept, exact)
        total = diagonal + precision  # D' = D + P0
        inner = self._inner(kept, squared / total)
        inner = inner + torch.eye(len(inner), dtype=inner.dtype, device=inner.device)
        log_det = 2.0 * cholesky_of(inner).diagonal().log().double().sum()
        return torch.log(total / precision).double().sum() + log_det

    @cached_property
    def _pieces(self) -> tuple[Tensor, Tensor, Tensor]:
        """1/D' with D' = D + P0, R, and the Cholesky factor of I + V_sᵀV_s."""
        diagonal, squared = self._terms(self.kept, self.exact)
        weights = diagonal.add_(self.precision).reciprocal_()
        inner = self._inner(self.kept, squared * weights)
        scale = self._root(squared)
        inner.diagonal().add_(1.0)
        return weights, scale, cholesky_of(inner)

    # --- evidence

    def log_det(self) -> Tensor:
        """log det B on this parameter block, in double precision, from a determinant of size L ([S20])."""
        weights, _, factor = self._pieces
        return cholesky_log_det(factor).double() - torch.log(weights * self.precision).double().sum()

    def log_det_curve(self, factors: Tensor) -> Tensor:
        return torch.stack([
            self._log_det(self.kept, self.exact, (self.precision * factor).log()) for factor in factors.to(self.exact)
        ])

    def effective(self) -> Tensor:
        """γ = -∂ log det B/∂ log δ, 0-d or (1, o, i)."""
        with torch.enable_grad():
            log_precision = self.precision.log().detach().requires_grad_()
            value = self._log_det(self.kept, self.exact, log_precision)
        (gradient,) = torch.autograd.grad(value, log_precision)
        return -gradient if gradient.ndim == 0 else -gradient.unsqueeze(0)

    # --- H⁻¹ and its root

    def solve(self, values: Tensor) -> Tensor:
        """H⁻¹ v for v (..., 1, o, i), by the Woodbury identity."""
        weights, _, factor = self._pieces
        scaled = weights * values
        inner = self._down(scaled).flatten(-2)
        solved = torch.cholesky_solve(inner.reshape(-1, inner.shape[-1]).T, factor).T.reshape(inner.shape)
        return scaled - weights * self._up(solved)

    def multiply(self, values: Tensor) -> Tensor:
        weights, _, _ = self._pieces
        return values / weights + self._up(self._down(values).flatten(-2))

    def factor(self, noise: Tensor) -> Tensor:
        """F z with F Fᵀ = H⁻¹ for z (..., 1, o, i): [S20] Eq. 9 with the symmetric root of I + V_sV_sᵀ."""
        weights, _, _ = self._pieces
        values, vectors = self._inner_eigen
        # (I + V Vᵀ)^-½ = I - V Q diag((1 - (1+g)^-½)/g) Qᵀ Vᵀ; the quotient has the limit ½ at g = 0
        grown = (1.0 + values).sqrt()
        quotient = 1.0 / (grown * (1.0 + grown))
        root = weights.sqrt()
        inner = self._down(root * noise).flatten(-2)
        return root * (noise - root * self._up((inner @ vectors * quotient) @ vectors.T))

    @cached_property
    def _inner_eigen(self) -> tuple[Tensor, Tensor]:
        weights, scale, _ = self._pieces
        values, vectors = symmetric_eigen(self._inner(self.kept, scale.square() * weights))
        return values.clamp_min(0.0), vectors  # rounding makes eigenvalues of a Gram matrix slightly negative

    def _down(self, values: Tensor) -> Tensor:
        """Λ^½ Uᵀ R v, (..., 1, p, q)."""
        _, scale, _ = self._pieces
        return self.low.left.T @ (scale * values) @ self.low.right * self.kept.clamp_min(0.0).sqrt()

    def _up(self, values: Tensor) -> Tensor:
        """R U Λ^½ u for u (..., L), (..., o, i)."""
        _, scale, _ = self._pieces
        inner = values.unflatten(-1, tuple(self.kept.shape)) * self.kept.clamp_min(0.0).sqrt()
        return scale * (self.low.left @ inner @ self.low.right.T)

    # --- covariance of f

    def blocks(self, rows: Jacobian) -> Tensor:
        weights, _, _ = self._pieces
        k, n = rows.num_cotangents, rows.num_examples
        found = self.block.rows(rows).inner(weights.unsqueeze(0))
        room = buffer_bytes(tuning.CHUNK_BYTES, weights.device)
        for part in panels(n, k * self.low.size * weights.element_size(), room):
            half = self._half(rows.subset(part))
            half = half.view(len(half), -1, k).permute(1, 2, 0)
            found[part] -= half @ half.mT
        return found

    def joint(self, rows: Jacobian) -> Tensor:
        weights, _, _ = self._pieces
        half = self._half(rows)
        return self.block.rows(rows).joint(weights.unsqueeze(0)) - half.T @ half

    def _half(self, rows: Jacobian) -> Tensor:
        """L_C⁻¹ Λ^½ Uᵀ R D'⁻¹ Jᵀ with L_C L_Cᵀ = I + V_sᵀV_s, (L, n*K)."""
        weights, scale, factor = self._pieces
        own = self.block.rows(rows)
        inner = own.project((scale * weights).unsqueeze(0), self.low.left.unsqueeze(0), self.low.right.unsqueeze(0))
        inner = inner[:, :, 0] * self.kept.clamp_min(0.0).sqrt()  # (n, K, p, q)
        return solve_lower(factor, inner.flatten(2).flatten(0, 1).T)

    # --- derivatives in Λ

    def sensitivity(self, rows: Jacobian, vector: Tensor | None = None) -> Tensor:
        """∂ log det H/∂Λ_n (n, C, C) with the kept eigenvectors fixed; with a vector z, ∂ zᵀHz/∂Λ_n."""
        with torch.enable_grad():
            kept, exact = (t.detach().requires_grad_() for t in (self.kept, self.exact))
            value = self._quadratic(kept, exact, vector) if vector is not None else (
                self._log_det(kept, exact, self.precision.log())
            )
        by_kept, by_exact = torch.autograd.grad(value, (kept, exact))
        own = self.block.rows(rows)
        turned = own.rotated(Basis(self.low.left.unsqueeze(0), self.low.right.unsqueeze(0)))
        return turned.inner(by_kept.unsqueeze(0)) + own.inner(by_exact.unsqueeze(0))

    def quadratic(self, vector: Tensor) -> Tensor:
        return self._quadratic(self.kept, self.exact, vector).double()

    def _quadratic(self, kept: Tensor, exact: Tensor, vector: Tensor) -> Tensor:
        z, (diagonal, squared) = vector[0], self._terms(kept, exact)
        inner = self.low.left.T @ (self._root(squared) * z) @ self.low.right
        return (kept * inner.square()).sum() + (diagonal * z.square()).sum()

    def information(self) -> Tensor:
        diagonal, squared = self._terms(self.kept, self.exact)
        basis = torch.einsum("op,iq->oipq", self.low.left, self.low.right).flatten(2)
        flat = (basis * self._root(squared).unsqueeze(-1)).flatten(0, 1)
        return (flat * self.kept.flatten()) @ flat.T + torch.diag(diagonal.flatten())
