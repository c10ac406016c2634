"""What a low rank leaves of the inverse of a posterior precision, and of effective parameters, by draws."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ntk_laplace.curvature.probed_log_det import ProbedLogDet, student
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.reduction import collective_property
from ntk_laplace.runtime.sampling import normal


class Remainder:
    """Draws d with the covariance M⁻¹ - (P0^-½HP0^-½)⁻¹, in units of the prior.

    With E = P0^-½(JᵀΛJ - FᵀF)P0^-½, x ~ N(0, M⁻¹) and e ~ N(0, E): d = (M + E)⁻¹(E x + e).

    Parameters
    ----------
    probing : ProbedLogDet
        The low rank, and the products.
    most : int
        Draws for which there is memory.
    variance_error : float
        Expected relative error of a variance that is not too wrong.

    Attributes
    ----------
    draws : Tensor, (s, P)
        Those so far.
    """

    def __init__(self, probing: ProbedLogDet, most: int, variance_error: float) -> None:
        self._probing, self._most, self._variance_error = probing, most, variance_error
        self.draws = probing.curvature.like.new_zeros(0, len(probing.curvature.like))
        self._directions: tuple[int, dict[str, Tensor]] = 0, {}  # of so many draws, by parameter

    @property
    def probing(self) -> ProbedLogDet:
        """The low rank, with what is known of its log determinant."""
        return self._probing

    def __len__(self) -> int:
        return len(self.draws)

    def draw(self, count: int) -> None:
        """Draw more, until there are `count` in all."""
        generator = torch.Generator().manual_seed(self._probing.seed + 1 + len(self))
        together = self._probing.together
        more = [self._drawn(min(together, count - start), generator) for start in range(len(self), count, together)]
        self.draws = torch.cat([self.draws, *more]) if more else self.draws

    def _drawn(self, count: int, generator: torch.Generator) -> Tensor:
        curvature, base = self._probing.curvature, self._probing.base
        x = base.whitened_half(normal((count, len(curvature.like)), curvature.like, generator)) * base.deviation
        noise = self._probing.approximation.noise(count, generator)
        right = curvature.products(x) - base.products(x) + noise
        return self._probing.solved_draws(right.mul_(base.deviation))

    # --- effective parameters

    def effective(self) -> tuple[Tensor, Tensor]:
        """γ_g of the low rank, (G,), and those beyond it in double precision, as each draw finds them, (s, G)."""
        base, draws = self._probing.base, self.draws
        low = base.effective_parameters()
        if self._probing.complete:
            return low, low.new_zeros(1, len(low), dtype=torch.float64)
        return low, draws.new_zeros(len(draws), len(low)).index_add_(1, base.groups, draws.square()).double()

    def effective_error(self) -> float:
        """The largest relative standard error of a γ_g by the draws so far."""
        low, used = self.effective()
        errors = used.std(0) * (student(len(used) - 1) / len(used) ** 0.5)
        found = low.to(errors) + used.mean(0)
        return float((errors / found.clamp_min(torch.finfo(errors.dtype).tiny)).max())

    # --- variances

    @collective_property
    def enough(self) -> Remainder:
        """The same with as many draws as variances need."""
        self.draw(tuning.REMAINDER_DRAWS)
        self.draw(self.needed())
        return self

    def outputs(self, rows: Jacobian) -> Tensor:
        """J d over s^½ for all draws, (n, K, s): the product with its transpose is what the low rank leaves of V."""
        if self._directions[0] != len(self):
            scale = self._probing.base.deviation / len(self) ** 0.5
            self._directions = len(self), self._probing.curvature.prior.shapes.parts(self.draws * scale)
        return rows.products(self._directions[1]).transpose(0, 1)

    def uncertain(self, own: Tensor, rest: Tensor, draws: int | None = None) -> Tensor:
        """Mask of blocks A (n, k, k) of which cᵀAc may be too wrong for some c, with `rest` R in A by s draws.

        The expected relative error cᵀRc/cᵀAc (2/s)^½ is at most the wished one for all c if a multiple of A less R is
        positive definite: differences of outputs are right too, whose variance may be far below those of the outputs.
        """
        allowed = self._variance_error * ((draws or len(self)) / 2) ** 0.5
        slack = 64 * torch.finfo(own.dtype).eps * (own + rest).diagonal(dim1=1, dim2=2).abs()
        tiny = torch.finfo(own.dtype).tiny
        return torch.linalg.cholesky_ex(allowed * own - rest + torch.diag_embed(slack + tiny)).info > 0

    def needed(self) -> int:
        """Draws that leave no block of the measured training points uncertain, by those so far."""
        # as many as would do without a low rank
        most = max(tuning.REMAINDER_DRAWS, math.ceil(2.0 / self._variance_error**2))

        def needed_at(rows: Jacobian) -> float:
            count, (blocks, rest) = float(len(self)), self._estimated(rows)
            while count < most and bool(self.uncertain(blocks, rest, int(count)).any()):
                count *= 1.25
            return count

        return min(int(self._probing.curvature.largest(needed_at)), most, self._most)

    def blocks(self, rows: Jacobian, root: Tensor | None = None) -> Tensor:
        """V, diagonal blocks (n, C, C), solved exactly where it is uncertain, or I - SᵀVS for a root S (n, C, R)."""
        blocks, rest = self._estimated(rows)
        uncertain = self.uncertain(blocks, rest)
        if root is not None:
            eye = torch.eye(root.shape[2], dtype=root.dtype, device=root.device)
            uncertain |= self.uncertain(eye - root.mT @ blocks @ root, root.mT @ rest @ root)
        solved = uncertain.nonzero().squeeze(1)
        if len(solved):
            blocks[solved] = self.solved_blocks(rows.subset(solved))
        return blocks

    def _estimated(self, rows: Jacobian) -> tuple[Tensor, Tensor]:
        """V by the draws, diagonal blocks (n, C, C), and what they subtract from that of the low rank."""
        seen = self.outputs(rows)
        rest = seen @ seen.mT
        return self._probing.base.covariance_blocks(rows) - rest, rest

    def solved_blocks(self, rows: Jacobian) -> Tensor:
        """V by solves. With solutions X, their residuals R and rows J, in units of the prior: V = JXᵀ + XRᵀ + EĤEᵀ.

        The last term, of the errors E of X, is of second order and is left out: residuals are the root of what they are
        in other solves.
        """
        probing, n, k = self._probing, rows.num_examples, rows.num_cotangents
        shapes, found = probing.curvature.prior.shapes, []
        tolerance = torch.finfo(probing.curvature.like.dtype).eps ** 0.35
        for some in torch.arange(n, device=rows.f.device).split(max(1, probing.together // k)):
            right = rows.subset(some).dense(shapes).transpose(0, 1) * probing.base.deviation
            solved = probing.solved(right.flatten(0, 1), tolerance)
            solutions, residuals = (part.view_as(right) for part in solved)
            found.append(solutions @ right.mT + residuals @ solutions.mT)
        return torch.cat(found)

    def joint(self, rows: Jacobian) -> Tensor | None:
        """V, joint and interleaved, (nC, nC); None if a diagonal block is uncertain."""
        joint, seen = self._probing.base.covariance(rows), self.outputs(rows)
        own = joint.view(rows.num_examples, rows.num_cotangents, rows.num_examples, -1)
        rest = seen @ seen.mT
        if bool(self.uncertain(own.diagonal(dim1=0, dim2=2).permute(2, 0, 1) - rest, rest).any()):
            return None
        flat = seen.flatten(0, 1)
        return joint.addmm_(flat, flat.T, alpha=-1.0)
