"""Structured weight space: H is block diagonal over parameter blocks, each with its own factorization."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.curvature.log_det_terms import LogDetTerm
from ntk_laplace.curvature.parameter_blocks import ParameterBlock
from ntk_laplace.curvature.posterior_precision import CrossCovariance, PosteriorPrecision
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.runtime.sampling import normal


class BlockPrecision(ABC):
    """H on one parameter block, factorized at fixed hyperparameters; vectors are (..., G, o, i).

    Attributes
    ----------
    block : ParameterBlock
    homogeneous : bool
        Whether multiplying Λ and P0 by c multiplies H by c.
    many_variances : bool
        Whether `variances` computes no covariances of outputs on the way.
    """

    block: ParameterBlock
    homogeneous: bool = True
    many_variances: bool = False

    def record(self) -> dict[str, Any] | None:
        """H on this block in plain containers of tensors; None if it has no such form."""
        return None

    @abstractmethod
    def log_det(self) -> Tensor:
        """log det H - log det P0."""

    @abstractmethod
    def log_det_curve(self, factors: Tensor) -> Tensor:
        """`log_det` with the precision multiplied by each factor."""

    @abstractmethod
    def effective(self) -> Tensor:
        """γ, 0-d or per entry."""

    def information_gained(self) -> Tensor:
        """p - tr(P0 H⁻¹), 0-d: the sum of γ, unless H - P0 depends on P0."""
        return self.effective().sum(dtype=torch.float64)

    @abstractmethod
    def solve(self, values: Tensor) -> Tensor:
        """H⁻¹ v."""

    @abstractmethod
    def multiply(self, values: Tensor) -> Tensor:
        """H v."""

    @abstractmethod
    def factor(self, noise: Tensor) -> Tensor:
        """F z with F Fᵀ = H⁻¹."""

    @abstractmethod
    def blocks(self, rows: Jacobian) -> Tensor:
        """J H⁻¹ Jᵀ on this block for each example, (n, K, K)."""

    def variances(self, rows: Jacobian) -> Tensor:
        """Diagonals of `blocks`, (n, K)."""
        return self.blocks(rows).diagonal(dim1=1, dim2=2)

    @abstractmethod
    def joint(self, rows: Jacobian) -> Tensor:
        """J H⁻¹ Jᵀ on this block, joint and interleaved, (n*K, n*K)."""

    @abstractmethod
    def sensitivity(self, rows: Jacobian, vector: Tensor | None = None) -> Tensor:
        """∂ log det H/∂Λ_n, (n, C, C); with a vector z, ∂ zᵀHz/∂Λ_n."""

    @abstractmethod
    def quadratic(self, vector: Tensor) -> Tensor:
        """zᵀ (H - P0) z for z (G, o, i), 0-d in double precision."""

    @abstractmethod
    def information(self) -> Tensor:
        """The approximation of JᵀΛJ on this block, (p, p); for small blocks."""

    def quadratic_slope(self, vector: Tensor) -> Tensor:
        """Derivative of `quadratic` in log δ; zero unless H - P0 depends on the prior."""
        return vector.new_zeros((), dtype=torch.float64)

    def spectrum(self) -> Tensor | None:
        """Eigenvalues relative to P0; None if they are not available."""
        return None

    def log_det_term(self, groups: int | Tensor) -> LogDetTerm | None:
        """`log_det` at any precisions, from the prior group of all entries or of each, (G, o, i).

        None if every setting needs another factorization.
        """
        return None

    def cross_covariance(self, rows: Jacobian) -> CrossCovariance:
        """V between later rows and these, which have one cotangent; stores H⁻¹ J*ᵀ."""
        solved = self.solve(self.block.rows(rows).written(slice(None))[:, 0])
        return CrossCovariance(partial(self._products, solved), solved.numel())

    def _products(self, solved: Tensor, rows: Jacobian) -> Tensor:
        """V between rows and those that were solved for."""
        return self.block.rows(rows).products(solved)


class BlockDiagonalPrecision(PosteriorPrecision):
    """Factorization of H, block diagonal over parameter blocks, for one setting of the hyperparameters.

    Parameters
    ----------
    parts : sequence of BlockPrecision
        One per parameter block.
    prior : GaussianPrior
    like : Tensor
        Gives dtype and device.
    """

    def __init__(self, parts: Sequence[BlockPrecision], prior: GaussianPrior, like: Tensor) -> None:
        super().__init__(prior, like)
        self.algebras = tuple(parts)
        # false for damped factors
        self.homogeneous = all(algebra.homogeneous for algebra in self.algebras)
        self.many_variances = all(algebra.many_variances for algebra in self.algebras)

    # --- storage

    def record(self) -> dict[str, Any] | None:
        """P0, and H on each block."""
        blocks = [one.record() for one in self.algebras]
        return None if None in blocks else {"kind": "spectral", "prior": self.prior_record(), "blocks": blocks}

    # --- evidence

    def log_det(self) -> Tensor:
        """log det B = log det H - log det P0, in double precision."""
        return sum((part.log_det() for part in self.algebras), start=self._zero())

    def log_det_curve(self, factors: Tensor) -> Tensor:
        return sum((part.log_det_curve(factors) for part in self.algebras), start=self._zero().expand(len(factors)))

    def spectrum(self) -> Tensor | None:
        """Eigenvalues of P0^-½ (H - P0) P0^-½ over all parameter blocks; None if a block does not list its own."""
        lists = [algebra.spectrum() for algebra in self.algebras]
        known = [own.double().flatten() for own in lists if own is not None]
        return torch.cat(known) if len(known) == len(lists) else None

    def log_det_terms(self) -> list[LogDetTerm] | None:
        """One for each parameter block; None if eigenvectors of a block mix entries of different precisions."""
        found: list[LogDetTerm] = []
        for algebra in self.algebras:
            groups = [self._prior.group_of(name) for name in algebra.block.names]
            one = groups[0] if all(isinstance(group, int) and group == groups[0] for group in groups) else None
            each = algebra.block.gather(self.shapes.parts(self.groups)) if one is None else one
            term = algebra.log_det_term(each)
            if term is None:
                return None
            found.append(term)
        return found

    def effective_parameters(self) -> Tensor:
        """γ_g = -∂ log det B/∂ log δ_g for each prior group, (G,)."""
        total = self._by_group.new_zeros(self._num_groups, dtype=torch.float64)
        flat, scattered = self._by_group.new_zeros(self.num_parameters), False
        for algebra in self.algebras:
            own = algebra.effective()
            if own.ndim == 0:
                total[self._prior.group_of(algebra.block.weight)] += own
            else:
                algebra.block.scatter_(self.shapes.parts(flat), own)
                scattered = True
        return total.index_add_(0, self.groups, flat.double()) if scattered else total

    def information_gained(self) -> Tensor:
        return sum((part.information_gained() for part in self.algebras), start=self._zero())

    def _zero(self) -> Tensor:
        return self._by_group.new_zeros((), dtype=torch.float64)

    # --- H⁻¹ and its root

    def solve(self, vectors: Tensor) -> Tensor:
        return self._by_block(lambda block, v: block.solve(v), vectors, vectors / self.prior_precision)

    def multiply(self, vectors: Tensor) -> Tensor:
        return self._by_block(lambda block, v: block.multiply(v), vectors, vectors * self.prior_precision)

    def factor(self, noise: Tensor) -> Tensor:
        """F z with F Fᵀ = H⁻¹, (..., P); maps white noise z to a draw from N(0, H⁻¹)."""
        return self._by_block(lambda block, z: block.factor(z), noise, noise * self.prior_precision.rsqrt())

    def _by_block(
        self, apply: Callable[[BlockPrecision, Tensor], Tensor], values: Tensor, untouched: Tensor
    ) -> Tensor:
        """Apply a method of each block to its entries; parameters in no block keep the prior's value, `untouched`."""
        named, out = self.shapes.parts(values), self.shapes.parts(untouched)
        for algebra in self.algebras:
            algebra.block.scatter_(out, apply(algebra, algebra.block.gather(named)))
        return untouched

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        return self.factor(normal((count, self.num_parameters), self._by_group, generator))

    # --- covariance of f

    def covariance_blocks(self, rows: Jacobian) -> Tensor:
        k, n = rows.num_cotangents, rows.num_examples
        return sum((part.blocks(rows) for part in self.algebras), start=rows.f.new_zeros(n, k, k))

    def variances_of_outputs(self, rows: Jacobian) -> Tensor:
        start = rows.f.new_zeros(rows.num_examples, rows.num_cotangents)
        return sum((part.variances(rows) for part in self.algebras), start=start)

    def covariance(self, rows: Jacobian) -> Tensor:
        size = rows.num_examples * rows.num_cotangents
        return sum((part.joint(rows) for part in self.algebras), start=rows.f.new_zeros(size, size))

    def cross_covariance(self, rows: Jacobian) -> CrossCovariance:
        found = [part.cross_covariance(rows) for part in self.algebras]
        return CrossCovariance(partial(_added_products, found, rows.num_examples), sum(part.numbers for part in found))

    # --- derivatives in Λ

    def sensitivity(self, rows: Jacobian, vector: Tensor | None = None) -> Tensor:
        """∂ log det B/∂Λ_n at training rows, (n, C, C), with fixed eigenbases; with z (P,), ∂ zᵀHz/∂Λ_n."""
        k, n = rows.num_cotangents, rows.num_examples
        named = None if vector is None else self.shapes.parts(vector)
        parts = (a.sensitivity(rows, None if named is None else a.block.gather(named)) for a in self.algebras)
        return sum(parts, start=rows.f.new_zeros(n, k, k))

    def quadratic(self, vector: Tensor, gradient: Tensor) -> Tensor:
        """zᵀ (H - P0) z for z (P,), block by block, in double precision."""
        named = self.shapes.parts(vector)
        return sum((block.quadratic(block.block.gather(named)) for block in self.algebras), start=self._zero())

    def quadratic_slope(self, vector: Tensor) -> Tensor:
        """Derivative of zᵀ (H - P0) z in each log precision, (G,); not zero if factors are damped."""
        slope, named = super().quadratic_slope(vector), self.shapes.parts(vector)
        for algebra in self.algebras:
            if not algebra.homogeneous:
                group = self._prior.group_of(algebra.block.weight)
                slope[group] += algebra.quadratic_slope(algebra.block.gather(named))
        return slope

    def information(self) -> Tensor:
        """The structure's approximation of JᵀΛJ, (P, P), written out: for small networks."""
        p = self.num_parameters
        total = self._by_group.new_zeros(p, p)
        numbers = self.shapes.parts(torch.arange(p, device=total.device))
        for algebra in self.algebras:
            where = algebra.block.gather(numbers).flatten()
            total[where.unsqueeze(1), where] = algebra.information()
        return total


def _added_products(parts: Sequence[CrossCovariance], count: int, rows: Jacobian) -> Tensor:
    """V between rows and `count` fixed ones, summed over parameter blocks."""
    start = rows.f.new_zeros(rows.num_cotangents, rows.num_examples, count)
    return sum((part.products(rows) for part in parts), start=start)
