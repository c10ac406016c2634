"""A low rank of JᵀΛJ from products with it, which it never exceeds: the Nyström approximation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ntk_laplace.curvature.low_rank import LowRankPrecision, prior_deviation
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.jacobian.gram import Variances
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.runtime.krylov import low_rank
from ntk_laplace.runtime.parameter_layout import ParameterLayout

__all__ = ["Curvature", "Sketch", "growing", "normal", "sketched"]


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

    def products(self, vectors: Tensor) -> Tensor:
        """JᵀΛJ v for vectors (m, P)."""

    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        """Draws from N(0, JᵀΛJ), (count, P): JᵀSε."""

    def largest(self, function: Callable[[Jacobian], float]) -> float:
        """The largest value of a function of the rows of some training points."""

    def diagonal(self, variances: Variances) -> tuple[float, float]:
        """tr SᵀKS, which is tr P0⁻¹JᵀΛJ, and Σ_n log det (I + [SᵀKS]_nn) over single examples."""


@dataclass(frozen=True)
class Sketch:
    """A low rank FᵀF of JᵀΛJ, which it does not exceed at any prior.

    Attributes
    ----------
    factor : Tensor, (r, P)
        F.
    tests : Tensor, (m, P), optional
        Ω, which is needed for draws of what the sketch leaves.
    mixing : Tensor, (r, m), optional
        W with F = W Ω JᵀΛJ and W Ω JᵀΛJ Ωᵀ Wᵀ = I.
    exhausted : bool
        Whether more test vectors find nothing more, up to rounding.
    """

    factor: Tensor
    tests: Tensor | None = None
    mixing: Tensor | None = None
    exhausted: bool = False

    def precision(self, curvature: Curvature) -> LowRankPrecision:
        """P0 + FᵀF at the present prior."""
        return LowRankPrecision(self.factor, curvature.prior, curvature.shapes)

    def scaled(self, factor: float) -> Sketch:
        """The sketch of c JᵀΛJ."""
        mixing = None if self.mixing is None else self.mixing * factor**-0.5
        return replace(self, factor=self.factor * factor**0.5, mixing=mixing)

    def to(self, device: torch.device, dtype: torch.dtype) -> Sketch:
        """The sketch on another device, with another dtype."""
        tests, mixing = (None if one is None else one.to(device, dtype) for one in (self.tests, self.mixing))
        return Sketch(self.factor.to(device, dtype), tests, mixing, self.exhausted)

    def record(self) -> dict[str, Any]:
        """Plain containers of tensors."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Sketch:
        """Restore a sketch from its record."""
        return cls(**record)

    def left(self, noise: Tensor) -> Tensor:
        """Draws from N(0, JᵀΛJ), (s, P), less their part in the sketch: draws from N(0, JᵀΛJ - FᵀF)."""
        assert self.tests is not None and self.mixing is not None
        return noise - (noise @ self.tests.T @ self.mixing.T) @ self.factor


def normal(count: int, like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal vectors (count, P), of the generator's device."""
    return torch.randn(count, like.shape[-1], generator=generator, device=generator.device, dtype=like.dtype).to(like)


def sketched(
    curvature: Curvature, known: LowRankPrecision | None, count: int, seed: int
) -> tuple[Sketch, LowRankPrecision]:
    """A sketch and its precision, from `count` test vectors: eigenvectors that are known, and random ones.

    Products with known eigenvectors are a round of subspace iteration.
    """
    like = curvature.like
    scale = prior_deviation(curvature.prior, like)
    vectors = like.new_empty(0, len(like)) if known is None else known.vectors[-count:]
    drawn = normal(count - len(vectors), like, torch.Generator().manual_seed(seed + 2 + count)) / len(like) ** 0.5
    drawn -= (drawn @ vectors.T) @ vectors  # what is known must not hide what is small behind its rounding
    found = low_rank(lambda v: curvature.products(v * scale) * scale, torch.cat([vectors, drawn]))
    factor = found.vectors * found.values.sqrt().unsqueeze(1) / scale
    sketch = Sketch(factor, found.tests * scale, found.mixing, 2 * (count - len(factor)) >= len(drawn))
    return sketch, LowRankPrecision(factor, curvature.prior, curvature.shapes, (found.values, found.vectors))


def growing(
    curvature: Curvature, start: tuple[Sketch, LowRankPrecision] | None, ranks: tuple[int, int], seed: int
) -> Iterator[tuple[Sketch, LowRankPrecision, int | None]]:
    """Sketches with their precisions, each of twice the rank of the one before; and the rank of the next, if any.

    The first is `start`, or has the first of `ranks`. The last has the second of them or the curvature's rank, or finds
    nothing more.
    """
    most = min(ranks[1], curvature.rank)
    sketch, base = sketched(curvature, None, min(ranks[0], most), seed) if start is None else start
    start = None  # it is large
    while True:
        doubled = min(2 * len(base.values), most)
        more = doubled > len(base.values) and not sketch.exhausted
        yield sketch, base, doubled if more else None
        if not more:
            return
        sketch, base = sketched(curvature, base, doubled, seed)
