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
from ntk_laplace.runtime.krylov import inner, low_rank
from ntk_laplace.runtime.linalg import symmetric_eigen
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

    @property
    def together(self) -> int | None:
        """Vectors of a product beyond which more of them cost as much one after another; None if all share passes."""

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

    def at(self, curvature: Curvature) -> tuple[Sketch, LowRankPrecision]:
        """P0 + FᵀF at the present prior, and the sketch with its rows turned, whose factor is that of the precision."""
        scale = prior_deviation(curvature.prior, self.factor)
        values, turn = symmetric_eigen(inner(self.factor, self.factor, scale.square()))
        mixing = None if self.mixing is None else turn.T @ self.mixing
        turned = replace(self, factor=turn.T @ self.factor, mixing=mixing)
        return turned, LowRankPrecision(turned.factor, values.clamp_min(0.0), curvature.prior, curvature.shapes)

    def best(self, rank: int) -> Sketch:
        """The last rows, at most `rank`, without tests."""
        return replace(self, factor=self.factor[-rank:].clone(), tests=None, mixing=None)

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
    curvature: Curvature, known: LowRankPrecision | None, count: int, seed: int, draws: bool = False
) -> tuple[Sketch, LowRankPrecision]:
    """A sketch and its precision, from `count` test vectors: eigenvectors that are known, and random ones.

    Products with known eigenvectors are a round of subspace iteration. The test vectors are kept, which are as large as
    the sketch, if `draws` of what it leaves are needed.
    """
    like, kept = curvature.like, 0
    scale = prior_deviation(curvature.prior, like)
    if known is not None:
        clear = known.values > len(known.values) * torch.finfo(like.dtype).eps * known.values[-1:]
        kept = min(count, int(clear.sum()))
    tests = normal(count - kept, like, torch.Generator().manual_seed(seed + 2 + count)).mul_(scale / len(like) ** 0.5)
    if known is not None and kept:
        drawn, tests = tests, torch.cat([known.factor[-kept:], tests])
        tests[:kept].mul_(scale.square()).mul_(known.values[-kept:].rsqrt().unsqueeze(1))
        # what is known must not hide what is small behind its rounding
        tests[kept:].addmm_(inner(drawn, tests[:kept], scale.square().reciprocal()), tests[:kept], alpha=-1.0)
        del drawn
    found = low_rank(curvature.products, tests, scale, None if draws else curvature.together)
    exhausted = count > kept and 2 * (count - len(found.factor)) >= count - kept
    kept_tests, mixing = (tests, found.mixing) if draws else (None, None)
    sketch = Sketch(found.factor, kept_tests, mixing, exhausted)
    return sketch, LowRankPrecision(found.factor, found.values, curvature.prior, curvature.shapes)


def growing(
    curvature: Curvature, start: tuple[Sketch, LowRankPrecision] | None, ranks: tuple[int, int], seed: int,
    draws: bool = False,
) -> Iterator[tuple[Sketch, LowRankPrecision, int | None]]:  # fmt: skip
    """Sketches with their precisions, each of twice the rank of the one before; and the rank of the next, if any.

    The first is `start`, or has the first of `ranks`. The last has the second of them or the curvature's rank, or finds
    nothing more.
    """
    most = min(ranks[1], curvature.rank)
    sketch, base = sketched(curvature, None, min(ranks[0], most), seed, draws) if start is None else start
    start = None  # it is large
    while True:
        doubled = min(2 * len(base.values), most)
        more = doubled > len(base.values) and not sketch.exhausted
        yield sketch, base, doubled if more else None
        if not more:
            return
        sketch, base = sketched(curvature, base, doubled, seed, draws)
