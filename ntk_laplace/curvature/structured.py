"""Structured weight space: H is block diagonal over parameter blocks, each with its own factorization."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor

from ntk_laplace.curvature.parameter_blocks import ParameterBlock
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.priors import GaussianPrior

__all__ = ["BlockPrecision", "CrossCovariance", "StructuredWeightSpace", "dense_cross_covariance", "group_numbers"]


@dataclass(frozen=True)
class CrossCovariance:
    """Lazy cross-covariance V = J H⁻¹ J*ᵀ between later rows J and m fixed rows J* of one cotangent.

    Attributes
    ----------
    products : callable
        Returns V, (K, N, m), for rows of N examples and K cotangents.
    numbers : int
        Stored numbers.
    """

    products: Callable[[Jacobian], Tensor]
    numbers: int


class BlockPrecision(Protocol):
    """Interface of H on one parameter block at fixed hyperparameters; vectors are (..., G, o, i).

    Attributes
    ----------
    block : ParameterBlock
    homogeneous : bool
        Whether multiplying Λ and P0 by c multiplies H by c.
    """

    block: ParameterBlock
    homogeneous: bool

    def log_det(self) -> Tensor:
        """log det H - log det P0."""

    def log_det_curve(self, factors: Tensor) -> Tensor:
        """`log_det` with the precision multiplied by each factor."""

    def effective(self) -> Tensor:
        """γ, 0-d or per entry."""

    def solve(self, values: Tensor) -> Tensor:
        """H⁻¹ v."""

    def factor(self, noise: Tensor) -> Tensor:
        """F z with F Fᵀ = H⁻¹."""

    def blocks(self, rows: Jacobian) -> Tensor:
        """J H⁻¹ Jᵀ for each example."""

    def joint(self, rows: Jacobian) -> Tensor:
        """J H⁻¹ Jᵀ, interleaved."""

    def sensitivity(self, rows: Jacobian, vector: Tensor | None = None) -> Tensor:
        """∂ log det H/∂Λ_n, or ∂ zᵀHz/∂Λ_n."""

    def quadratic(self, vector: Tensor) -> Tensor:
        """zᵀ (H - P0) z."""

    def information(self) -> Tensor:
        """The approximation of JᵀΛJ, (p, p)."""


class StructuredWeightSpace:
    """Factorization of H, block diagonal over parameter blocks, for one setting of the hyperparameters.

    Parameters
    ----------
    parts : sequence of BlockPrecision
        One per parameter block.
    prior : GaussianPrior
    shapes : dict of str to torch.Size
        The parameters, in order.
    theta : Tensor, (P,)
        The weights at which the network is linearized.
    """

    def __init__(
        self, parts: Sequence[BlockPrecision], prior: GaussianPrior, shapes: dict[str, torch.Size], theta: Tensor
    ) -> None:
        self.algebras, self.shapes, self.theta = tuple(parts), shapes, theta
        self._by_group = prior.precision.detach().to(theta)  # a copy, because the prior may change
        self._num_groups = len(self._by_group)
        self._prior = prior

    @cached_property
    def prior_precision(self) -> Tensor:
        """Diagonal of P0, (P,)."""
        return self._by_group[self._groups]

    # --- evidence

    def log_det(self) -> Tensor:
        """log det B = log det H - log det P0, in double precision."""
        return sum((part.log_det() for part in self.algebras), start=self._zero())

    def log_det_curve(self, factors: Tensor) -> Tensor:
        """log det B with all precisions multiplied by each of `factors` (m,): (m,)."""
        return sum((part.log_det_curve(factors) for part in self.algebras), start=self._zero().expand(len(factors)))

    def spectrum(self) -> Tensor | None:
        """Eigenvalues of P0^-½ (H - P0) P0^-½ over all parameter blocks; None if a block does not list its own."""
        lists = [getattr(algebra, "spectrum", lambda: None)() for algebra in self.algebras]
        return None if any(own is None for own in lists) else torch.cat([own.double().flatten() for own in lists])

    def group_spectra(self) -> list[tuple[Tensor, int | Tensor]] | None:
        """Spectrum of each parameter block, with its prior group, or with one group per eigenvalue.

        None if a block does not list its eigenvalues, or if an eigenvector mixes entries of different precisions.
        """
        found: list[tuple[Tensor, int | Tensor]] = []
        for algebra in self.algebras:
            spectrum = getattr(algebra, "spectrum", lambda: None)()
            if spectrum is None:
                return None
            groups = [self._prior.group_of(name) for name in algebra.block.names]
            if isinstance(groups[0], int) and groups.count(groups[0]) == len(groups):
                found.append((spectrum.flatten(), groups[0]))
                continue
            own = algebra.entry_of(algebra.block.gather(self._named(self._groups)))
            if own is None:
                return None
            found.append((spectrum.flatten(), own.flatten()))
        return found

    @property
    def homogeneous(self) -> bool:
        """Whether multiplying Λ and P0 by c multiplies H by c; false for damped factors."""
        return all(algebra.homogeneous for algebra in self.algebras)

    def effective_parameters(self) -> Tensor:
        """γ_g = -∂ log det B/∂ log δ_g for each prior group, (G,)."""
        total = self.theta.new_zeros(self._num_groups, dtype=torch.float64)
        flat, scattered = self.theta.new_zeros(len(self.theta)), False
        for algebra in self.algebras:
            own = algebra.effective()
            if own.ndim == 0:
                total[self._prior.group_of(algebra.block.weight)] += own
            else:
                algebra.block.scatter_(self._named(flat), own)
                scattered = True
        return total.index_add_(0, self._groups, flat.double()) if scattered else total

    def _zero(self) -> Tensor:
        return self.theta.new_zeros((), dtype=torch.float64)

    @cached_property
    def _groups(self) -> Tensor:
        return group_numbers(self._prior, self.shapes).to(self.theta.device)

    # --- H⁻¹ and its root

    def solve(self, gradient: Tensor) -> Tensor:
        """H⁻¹ g; g and the result are (P,)."""
        return self._through("solve", gradient, gradient / self.prior_precision)

    def factor(self, noise: Tensor) -> Tensor:
        """F z with F Fᵀ = H⁻¹, (..., P); maps white noise z to a draw from N(0, H⁻¹)."""
        return self._through("factor", noise, noise * self.prior_precision.rsqrt())

    def _through(self, verb: str, values: Tensor, untouched: Tensor) -> Tensor:
        """Apply method `verb` of each parameter block; parameters in no block keep the prior's value, `untouched`."""
        named, out = self._named(values), self._named(untouched)
        for algebra in self.algebras:
            algebra.block.scatter_(out, getattr(algebra, verb)(algebra.block.gather(named)))
        return untouched

    def sample_weights(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws from N(θ*, H⁻¹), (count, P)."""
        noise = torch.randn(count, len(self.theta), dtype=self.theta.dtype, device=self.theta.device,
                            generator=generator)
        return self.theta + self.factor(noise)

    # --- covariance of f

    def covariance_blocks(self, rows: Jacobian) -> Tensor:
        """V = J H⁻¹ Jᵀ, diagonal blocks (n, C, C)."""
        k, n = rows.num_cotangents, rows.num_examples
        return sum((part.blocks(rows) for part in self.algebras), start=rows.f.new_zeros(n, k, k))

    def covariance(self, rows: Jacobian) -> Tensor:
        """V = J H⁻¹ Jᵀ, joint and interleaved, (nC, nC)."""
        size = rows.num_examples * rows.num_cotangents
        return sum((part.joint(rows) for part in self.algebras), start=rows.f.new_zeros(size, size))

    def cross_covariance(self, rows: Jacobian) -> CrossCovariance:
        """V between later rows and these, which have one cotangent."""
        found = [getattr(part, "cross_covariance", partial(dense_cross_covariance,
                                                           part))(rows) for part in self.algebras]

        def products(other: Jacobian) -> Tensor:
            start = other.f.new_zeros(other.num_cotangents, other.num_examples, rows.num_examples)
            return sum((part.products(other) for part in found), start=start)

        return CrossCovariance(products, sum(part.numbers for part in found))

    # --- derivatives in Λ

    def sensitivity(self, rows: Jacobian, vector: Tensor | None = None) -> Tensor:
        """∂ log det B/∂Λ_n at training rows, (n, C, C), with fixed eigenbases; with z (P,), ∂ zᵀHz/∂Λ_n."""
        k, n = rows.num_cotangents, rows.num_examples
        named = None if vector is None else self._named(vector)
        parts = (a.sensitivity(rows, None if named is None else a.block.gather(named)) for a in self.algebras)
        return sum(parts, start=rows.f.new_zeros(n, k, k))

    def quadratic(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """zᵀ (H - P0) z for z (P,), in double precision, and its derivative in each log precision, (G,)."""
        named, total = self._named(vector), self._zero()
        slope = self.theta.new_zeros(self._num_groups, dtype=torch.float64)
        for algebra in self.algebras:
            z = algebra.block.gather(named)
            total = total + algebra.quadratic(z)
            of_precision = getattr(algebra, "quadratic_slope", None)  # zero unless factors are damped
            if of_precision is not None:
                slope[self._prior.group_of(algebra.block.weight)] += of_precision(z)
        return total, slope

    def information(self) -> Tensor:
        """The structure's approximation of JᵀΛJ, (P, P), written out: for small networks."""
        total = self.theta.new_zeros(len(self.theta), len(self.theta))
        numbers = self._named(torch.arange(len(self.theta), device=self.theta.device))
        for algebra in self.algebras:
            where = algebra.block.gather(numbers).flatten()
            total[where.unsqueeze(1), where] = algebra.information()
        return total

    def _named(self, vector: Tensor) -> dict[str, Tensor]:
        """Split a flat vector (..., P) into views by parameter name."""
        parts = vector.split([shape.numel() for shape in self.shapes.values()], dim=-1)
        return dict(zip(self.shapes, parts, strict=True))


def dense_cross_covariance(algebra: BlockPrecision, rows: Jacobian) -> CrossCovariance:
    """Cross-covariance that stores H⁻¹ J*ᵀ."""
    held = algebra.solve(algebra.block.rows(rows).written(slice(None))[:, 0])
    return CrossCovariance(lambda other: algebra.block.rows(other).products(held), held.numel())


def group_numbers(prior: GaussianPrior, shapes: dict[str, torch.Size]) -> Tensor:
    """Prior group of each entry of θ, (P,)."""
    found = []
    for name, shape in shapes.items():
        group = prior.group_of(name)
        if isinstance(group, slice):
            found.append(torch.arange(group.start, group.stop))
        else:
            found.append(torch.full((shape.numel(),), group))
    return torch.cat(found)
