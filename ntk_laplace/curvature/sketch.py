"""Low ranks of JᵀΛJ, which they never exceed, and the Nyström approximation from products with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ntk_laplace.curvature.low_rank import LowRankBase, LowRankPrecision, prior_deviation
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.jacobian.gram import Variances
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.runtime.krylov import inner, low_rank
from ntk_laplace.runtime.linalg import symmetric_eigen
from ntk_laplace.runtime.sampling import normal


class Curvature(Protocol):
    """JᵀΛJ over the training points, by products, and the prior beside it."""

    @property
    def prior(self) -> GaussianPrior:
        """The prior, at its present precisions."""

    @property
    def like(self) -> Tensor:
        """(P,), gives dtype and device."""

    @property
    def rank(self) -> int:
        """Most eigenvalues that are not zero, the smaller of P and N R."""

    @property
    def together(self) -> int | None:
        """Vectors of a product beyond which more of them cost as much one after another; None if all share passes."""

    @property
    def num_rows(self) -> int:
        """N R, the rows of SᵀJ."""

    @property
    def num_columns(self) -> int:
        """R, columns of S."""

    @property
    def product_flops(self) -> float:
        """Floating-point operations of a product with one vector, at least."""

    def products(self, vectors: Tensor) -> Tensor:
        """JᵀΛJ v for vectors (m, P)."""

    def noise(self, count: int, generator: torch.Generator, parts: Tensor | None = None) -> Tensor:
        """Draws from N(0, JᵀΛJ), (count, P): JᵀSε; JᵀSAε for symmetric A (N, R, R), if these `parts` are given."""

    def row_weights(self, variances: Variances) -> tuple[Tensor, Tensor]:
        """Eigenvalues (N, R) and eigenvectors (N, R, R) of the diagonal blocks of SᵀKS, of all examples."""

    def weighted_rows(self, chosen: Tensor, directions: Tensor) -> Jacobian:
        """Rows uᵀSᵀJ of one cotangent, for the columns u of `directions` (N, R, R) that are `chosen` (N, R)."""

    def largest(self, function: Callable[[Jacobian], float]) -> float:
        """The largest value of a function of the rows of some training points."""

    def diagonal(self, variances: Variances) -> tuple[float, float]:
        """tr SᵀKS, which is tr P0⁻¹JᵀΛJ, and Σ_n log det (I + [SᵀKS]_nn) over single examples."""


class Sketch(ABC):
    """F, the rows of a low rank FᵀF of JᵀΛJ, which it does not exceed at any prior.

    Attributes
    ----------
    exhausted : bool
        Whether a larger one finds nothing more, up to rounding.
    """

    exhausted: bool

    @abstractmethod
    def at(self, curvature: Curvature) -> Approximation:
        """The approximation of a curvature, at its present prior."""

    @abstractmethod
    def scaled(self, factor: float) -> Sketch:
        """The sketch of c JᵀΛJ."""

    @abstractmethod
    def to(self, device: torch.device, dtype: torch.dtype) -> Sketch:
        """The sketch on another device, with another dtype."""

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """Plain containers of tensors."""


@dataclass(frozen=True)
class Approximation(ABC):
    """A curvature and its low rank, at the present prior.

    Attributes
    ----------
    curvature : Curvature
        JᵀΛJ.
    sketch : Sketch
        F.
    base : LowRankBase
        P0 + FᵀF.
    """

    curvature: Curvature
    sketch: Sketch
    base: LowRankBase

    @property
    @abstractmethod
    def rank_left(self) -> int:
        """The most eigenvalues of JᵀΛJ - FᵀF that are not zero."""

    # --- growth

    @abstractmethod
    def most(self, most: int) -> int:
        """The largest rank, if `most` vectors fit in memory."""

    @abstractmethod
    def cost(self, rank: int) -> float:
        """Of one of this kind of another rank, in products."""

    @abstractmethod
    def grown(self, rank: int, seed: int, draws: bool) -> Approximation:
        """One of another rank; arguments as `sketched`."""

    # --- draws of what the low rank leaves

    def drawing(self, seed: int) -> Approximation:
        """One from which `noise` can be drawn; by default this one."""
        return self

    @abstractmethod
    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        """Draws from N(0, JᵀΛJ - FᵀF), (count, P)."""


@dataclass(frozen=True)
class RandomSketch(Sketch):
    """The Nyström approximation from random test vectors, or from those of a smaller one and random ones.

    Attributes
    ----------
    factor : Tensor, (r, P)
        F.
    tests : Tensor, (m, P), optional
        Ω, which is needed for draws of what the sketch leaves.
    mixing : Tensor, (r, m), optional
        W with F = W Ω JᵀΛJ and W Ω JᵀΛJ Ωᵀ Wᵀ = I.
    exhausted : bool
    """

    factor: Tensor
    tests: Tensor | None = None
    mixing: Tensor | None = None
    exhausted: bool = False

    def at(self, curvature: Curvature) -> NystromApproximation:
        """With the rows of the sketch turned to those of the precision."""
        scale = prior_deviation(curvature.prior, self.factor)
        values, turn = symmetric_eigen(inner(self.factor, self.factor, scale.square()))
        mixing = None if self.mixing is None else turn.T @ self.mixing
        turned = replace(self, factor=turn.T @ self.factor, mixing=mixing)
        base = LowRankPrecision(turned.factor, values.clamp_min(0.0), curvature.prior)
        return NystromApproximation(curvature, turned, base)

    def best(self, rank: int) -> RandomSketch:
        """The last rows, at most `rank`, without tests."""
        return replace(self, factor=self.factor[-rank:].clone(), tests=None, mixing=None)

    def scaled(self, factor: float) -> RandomSketch:
        mixing = None if self.mixing is None else self.mixing * factor**-0.5
        return replace(self, factor=self.factor * factor**0.5, mixing=mixing)

    def to(self, device: torch.device, dtype: torch.dtype) -> RandomSketch:
        tests, mixing = (None if one is None else one.to(device, dtype) for one in (self.tests, self.mixing))
        return RandomSketch(self.factor.to(device, dtype), tests, mixing, self.exhausted)

    def record(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class NystromApproximation(Approximation):
    """That of a random sketch."""

    sketch: RandomSketch
    base: LowRankPrecision

    @property
    def rank_left(self) -> int:
        """Those of JᵀΛJ, less one for each vector."""
        return self.curvature.rank - self.base.rank

    def most(self, most: int) -> int:
        """As many vectors as fit."""
        return most

    def cost(self, rank: int) -> float:
        """A product for each vector."""
        return rank

    def grown(self, rank: int, seed: int, draws: bool) -> NystromApproximation:
        """From the eigenvectors of this one, and random test vectors."""
        return sketched(self.curvature, self.base, rank, seed, draws)

    def drawing(self, seed: int) -> NystromApproximation:
        """With test vectors: another round, with products of what is known."""
        return self if self.sketch.tests is not None else self.grown(self.base.rank, seed, True)

    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        """Draws from N(0, JᵀΛJ), less their part in the sketch."""
        tests, mixing, drawn = self.sketch.tests, self.sketch.mixing, self.curvature.noise(count, generator)
        assert tests is not None and mixing is not None
        return drawn - (drawn @ tests.T @ mixing.T) @ self.sketch.factor


def sketched(
    curvature: Curvature, known: LowRankPrecision | None, count: int, seed: int, draws: bool = False
) -> NystromApproximation:
    """From `count` test vectors: eigenvectors that are known, and random ones.

    Products with known eigenvectors are a round of subspace iteration. The test vectors are kept, which are as large as
    the sketch, if `draws` of what it leaves are needed.
    """
    like, kept = curvature.like, 0
    scale = prior_deviation(curvature.prior, like)
    if known is not None:
        clear = known.values > len(known.values) * torch.finfo(like.dtype).eps * known.values[-1:]
        kept = min(count, int(clear.sum()))
    generator = torch.Generator().manual_seed(seed + 2 + count)
    tests = normal((count - kept, len(like)), like, generator).mul_(scale / len(like) ** 0.5)
    least = None
    if known is not None and kept:
        drawn, tests = tests, torch.cat([known.factor[-kept:], tests])
        tests[:kept].mul_(scale.square()).mul_(known.values[-kept:].rsqrt().unsqueeze(1))
        # what is known must not hide what is small behind its rounding
        taken = inner(drawn, tests[:kept], scale.square().reciprocal())
        tests[kept:].addmm_(taken, tests[:kept], alpha=-1.0)
        # where nothing else is there, what is left is the rounding of what was taken, and so is its image
        least = torch.cat([like.new_zeros(kept), taken.square() @ known.values[-kept:] * torch.finfo(like.dtype).eps])
        del drawn
    found = low_rank(curvature.products, tests, scale, None if draws else curvature.together, least)
    exhausted = count > kept and 2 * (count - len(found.factor)) >= count - kept
    kept_tests, mixing = (tests, found.mixing) if draws else (None, None)
    base = LowRankPrecision(found.factor, found.values, curvature.prior)
    return NystromApproximation(curvature, RandomSketch(found.factor, kept_tests, mixing, exhausted), base)


def growing(
    found: Approximation, most: int, seed: int, draws: bool = False
) -> Iterator[tuple[Approximation, float | None]]:
    """Approximations, each of twice the rank of the one before; with the cost of the next, if any.

    The last has the rank `most` or the curvature's, or finds nothing more. Costs are in products.
    """
    while True:
        doubled = min(2 * found.base.rank, found.most(most), found.curvature.rank)
        more = doubled > found.base.rank and not found.sketch.exhausted
        yield found, found.cost(doubled) if more else None
        if not more:
            return
        found = found.grown(doubled, seed, draws)
