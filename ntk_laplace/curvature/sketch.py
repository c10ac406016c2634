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
from ntk_laplace.runtime.parameter_layout import ParameterLayout
from ntk_laplace.runtime.sampling import normal


class Curvature(Protocol):
    """JᵀΛJ over the training points, by products, and the prior beside it."""

    @property
    def prior(self) -> GaussianPrior:
        """The prior, at its present precisions."""

    @property
    def shapes(self) -> ParameterLayout:
        """The parameters, in the order that flattens θ."""

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
    """A low rank FᵀF of JᵀΛJ, which it does not exceed at any prior.

    Attributes
    ----------
    exhausted : bool
        Whether a larger one finds nothing more, up to rounding.
    """

    exhausted: bool

    @abstractmethod
    def at(self, curvature: Curvature) -> tuple[Sketch, LowRankBase]:
        """P0 + FᵀF at the present prior, and the sketch with the rows of the precision."""

    @abstractmethod
    def scaled(self, factor: float) -> Sketch:
        """The sketch of c JᵀΛJ."""

    @abstractmethod
    def to(self, device: torch.device, dtype: torch.dtype) -> Sketch:
        """The sketch on another device, with another dtype."""

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """Plain containers of tensors."""

    @abstractmethod
    def rank_left(self, curvature: Curvature) -> int:
        """The most eigenvalues of JᵀΛJ - FᵀF that are not zero."""

    # --- growth

    @abstractmethod
    def most(self, most: int) -> int:
        """The largest rank, if `most` vectors fit in memory."""

    @abstractmethod
    def cost(self, curvature: Curvature, rank: int) -> float:
        """Of a sketch of this kind of another rank, in products."""

    @abstractmethod
    def grown(
        self, curvature: Curvature, base: LowRankBase, rank: int, seed: int, draws: bool
    ) -> tuple[Sketch, LowRankBase]:
        """A sketch of another rank with its precision, where `base` is that of this one; arguments as `sketched`."""

    # --- draws of what the sketch leaves

    @abstractmethod
    def drawing(self, curvature: Curvature, base: LowRankBase, seed: int) -> tuple[Sketch, LowRankBase]:
        """A sketch from which `noise` can be drawn, with its precision."""

    @abstractmethod
    def noise(self, curvature: Curvature, count: int, generator: torch.Generator) -> Tensor:
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

    def at(self, curvature: Curvature) -> tuple[RandomSketch, LowRankPrecision]:
        """P0 + FᵀF at the present prior, and the sketch with its rows turned, whose factor is that of the precision."""
        scale = prior_deviation(curvature.prior, self.factor)
        values, turn = symmetric_eigen(inner(self.factor, self.factor, scale.square()))
        mixing = None if self.mixing is None else turn.T @ self.mixing
        turned = replace(self, factor=turn.T @ self.factor, mixing=mixing)
        return turned, LowRankPrecision(turned.factor, values.clamp_min(0.0), curvature.prior, curvature.shapes)

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

    def rank_left(self, curvature: Curvature) -> int:
        """Those of JᵀΛJ, less one for each vector."""
        return curvature.rank - len(self.factor)

    def most(self, most: int) -> int:
        """As many vectors as fit."""
        return most

    def cost(self, curvature: Curvature, rank: int) -> float:
        """A product for each vector."""
        return rank

    def grown(
        self, curvature: Curvature, base: LowRankBase, rank: int, seed: int, draws: bool
    ) -> tuple[RandomSketch, LowRankPrecision]:
        """From the eigenvectors of this one, and random test vectors."""
        assert isinstance(base, LowRankPrecision)
        return sketched(curvature, base, rank, seed, draws)

    def drawing(
        self, curvature: Curvature, base: LowRankBase, seed: int
    ) -> tuple[RandomSketch, LowRankPrecision]:
        """With test vectors: another round, with products of what is known."""
        assert isinstance(base, LowRankPrecision)
        return (self, base) if self.tests is not None else sketched(curvature, base, base.rank, seed, True)

    def noise(self, curvature: Curvature, count: int, generator: torch.Generator) -> Tensor:
        """Draws from N(0, JᵀΛJ), less their part in the sketch."""
        assert self.tests is not None and self.mixing is not None
        drawn = curvature.noise(count, generator)
        return drawn - (drawn @ self.tests.T @ self.mixing.T) @ self.factor


def sketched(
    curvature: Curvature, known: LowRankPrecision | None, count: int, seed: int, draws: bool = False
) -> tuple[RandomSketch, LowRankPrecision]:
    """A sketch and its precision, from `count` test vectors: eigenvectors that are known, and random ones.

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
    if known is not None and kept:
        drawn, tests = tests, torch.cat([known.factor[-kept:], tests])
        tests[:kept].mul_(scale.square()).mul_(known.values[-kept:].rsqrt().unsqueeze(1))
        # what is known must not hide what is small behind its rounding
        tests[kept:].addmm_(inner(drawn, tests[:kept], scale.square().reciprocal()), tests[:kept], alpha=-1.0)
        del drawn
    found = low_rank(curvature.products, tests, scale, None if draws else curvature.together)
    exhausted = count > kept and 2 * (count - len(found.factor)) >= count - kept
    kept_tests, mixing = (tests, found.mixing) if draws else (None, None)
    sketch = RandomSketch(found.factor, kept_tests, mixing, exhausted)
    return sketch, LowRankPrecision(found.factor, found.values, curvature.prior, curvature.shapes)


def growing(
    curvature: Curvature, start: tuple[Sketch, LowRankBase] | None, ranks: tuple[int, int], seed: int,
    draws: bool = False,
) -> Iterator[tuple[Sketch, LowRankBase, float | None]]:
    """Sketches with their precisions, each of twice the rank of the one before; and the cost of the next, if any.

    The first is `start`, or has the first of `ranks`. The last has the second of them or the curvature's rank, or finds
    nothing more. Costs are in products.
    """
    sketch: Sketch
    base: LowRankBase
    sketch, base = sketched(curvature, None, min(*ranks, curvature.rank), seed, draws) if start is None else start
    start = None  # it is large
    while True:
        doubled = min(2 * base.rank, sketch.most(ranks[1]), curvature.rank)
        more = doubled > base.rank and not sketch.exhausted
        yield sketch, base, sketch.cost(curvature, doubled) if more else None
        if not more:
            return
        sketch, base = sketch.grown(curvature, base, doubled, seed, draws)
