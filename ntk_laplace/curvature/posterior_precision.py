"""Base class of a factorized posterior precision: three abstract methods, and all others derived from these."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.curvature.log_det_terms import LogDetTerm, Spectrum
from ntk_laplace.errors import NonFiniteError, UnsupportedError, warn
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.krylov import conjugate_gradients
from ntk_laplace.runtime.linalg import log_det_curve
from ntk_laplace.runtime.lower_triangle import more_digits
from ntk_laplace.runtime.panels import panels
from ntk_laplace.runtime.parameter_layout import ParameterLayout
from ntk_laplace.runtime.resources import available_memory

_DIGITS = 0.01  # relative error of a variance, above which a warning is issued


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


class PosteriorPrecision(ABC):
    """H = P0 + JᵀΛJ, or an approximation of it, factorized at one setting of the hyperparameters.

    A subclass defines `log_det`, `solve` and `sample`. The other methods follow from these and from rows of the
    Jacobian; a subclass overrides those it has a faster way for.

    Parameters
    ----------
    prior : GaussianPrior
        Bound to the parameters. Its present precisions are copied.
    like : Tensor
        Gives dtype and device.
    shapes : mapping of str to torch.Size, optional
        Of some of the parameters, in order; by default all of them.

    Attributes
    ----------
    homogeneous : bool
        Whether scaling Λ and P0 by c scales H by c.
    standard_error : float
        Of `log_det`, if it is a stochastic estimate; 0 if it is computed without sampling.
    log_det_bounds : tuple of float, or None
        Certain bounds of the exact `log_det`, if it is an estimate; None if it is not.
    made_of_data : bool
        Whether `record` contains rows of training points.
    many_variances : bool
        Whether `variances_of_outputs` computes no covariances of outputs on the way.
    solves_covariance : bool
        Whether J H⁻¹ Jᵀ by `solve` is what `covariance` returns, up to rounding; not if that is an estimate by draws.
    reads_data : bool
        Whether solves and covariances take passes over the data: several processes then compute the same ones together.
    """

    homogeneous: bool = True
    made_of_data: bool = False
    many_variances: bool = False
    solves_covariance: bool = True
    reads_data: bool = False
    standard_error: float = 0.0
    log_det_bounds: tuple[float, float] | None = None

    def __init__(self, prior: GaussianPrior, like: Tensor, shapes: Mapping[str, torch.Size] | None = None) -> None:
        self.shapes = prior.shapes if shapes is None else ParameterLayout.of(shapes)
        self._prior = prior  # for the names of groups; its precisions may change later
        self._by_group = prior.precision.detach().to(like).clone()  # (G,)
        self._num_groups = len(self._by_group)

    # --- abstract

    @abstractmethod
    def log_det(self) -> Tensor:
        """log det B = log det H - log det P0, a scalar."""

    @abstractmethod
    def solve(self, vectors: Tensor) -> Tensor:
        """H⁻¹ v for vectors (..., P)."""

    @abstractmethod
    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws from N(0, H⁻¹), (count, P)."""

    # --- storage

    def record(self) -> dict[str, Any] | None:
        """H in plain containers of tensors, for `given_records.restored_precision`; None if it has no such form."""
        return None

    def prior_record(self) -> dict[str, Any]:
        """The diagonal P0 at the factorization: its groups, and the logarithm of the precision of each."""
        groups = self._prior.groups
        named = groups if isinstance(groups, str) else [{"group": g, "spans": list(n)} for g, n in groups.items()]
        return {"groups": named, "input_groups": self._prior.input_groups,
                "log_precision": self._by_group.double().log()}

    # --- products

    def multiply(self, vectors: Tensor) -> Tensor:
        """H v for vectors (..., P): the log density of N(0, H⁻¹) is -½ vᵀHv and terms without v.

        By default v = H⁻¹x is solved for x by conjugate gradients, whose operator is `solve` in units of the prior.
        """
        scale = self.prior_precision.sqrt()
        flat = vectors.reshape(-1, self.num_parameters) * scale
        tolerance = torch.finfo(flat.dtype).eps ** 0.7
        found, _ = conjugate_gradients(lambda v: self._solved(v * scale) * scale, flat, lambda v: v, tolerance,
                                    1.0, tuning.CONJUGATE_GRADIENT_STEPS)  # P0^½ H⁻¹ P0^½ is at most I
        return (found * scale).view_as(vectors)

    # --- the prior

    @cached_property
    def prior_precision(self) -> Tensor:
        """Diagonal of P0, (P,)."""
        return self._by_group[self.groups]

    @cached_property
    def groups(self) -> Tensor:
        """Prior group of each parameter, (P,)."""
        named = self._prior.shapes.named(self._prior.flat_groups().to(self._by_group.device))
        return self.shapes.flat(named)

    @property
    def num_parameters(self) -> int:
        """P."""
        return self.shapes.num_parameters

    # --- evidence

    @cached_property
    def log_det_rounding(self) -> float:
        """About how far rounding moves `log_det`; 0 where that is not known."""
        return 0.0

    def effective_parameters(self) -> Tensor:
        """γ_g = n_g - δ_g tr_g(H⁻¹) for each prior group, (G,), from solves with unit vectors."""
        counts = torch.bincount(self.groups, minlength=self._num_groups).to(self._by_group)
        for here, unit in self.unit_rows():
            variances = self._solved(unit)[:, here].diagonal()
            counts.index_add_(0, self.groups[here], -self.prior_precision[here] * variances)
        return counts

    def unit_rows(self) -> Iterator[tuple[slice, Tensor]]:
        """Rows of the identity (P, P), some at a time, with their places."""
        like = self.prior_precision
        for here in panels(len(like), like.nbytes, tuning.COVARIANCE_BYTES):
            unit = like.new_zeros(here.stop - here.start, len(like))
            unit[:, here].fill_diagonal_(1.0)
            yield here, unit

    def information_gained(self) -> Tensor:
        """P - tr(P0 H⁻¹), in double precision: the sum of `effective_parameters`, unless H - P0 depends on P0."""
        return self.effective_parameters().sum(dtype=torch.float64)

    @property
    def effective_error(self) -> float:
        """Standard error of the sum of `effective_parameters`; 0 if they are computed without sampling."""
        return 0.0

    def spectrum(self) -> Tensor | None:
        """Eigenvalues of P0^-½ (H - P0) P0^-½, zeros included or not; None if they are not available.

        The exact structures have none above `tuning.LARGEST_SPECTRUM` rows of their matrix, or if another two such
        matrices do not fit in memory: callers then take one Cholesky factorization for each setting.
        """
        return None

    def log_det_terms(self) -> Sequence[LogDetTerm] | None:
        """Terms whose sum is log det B at any precisions; None if every setting needs another factorization."""
        spectrum = self.spectrum() if self._num_groups == 1 else None
        return None if spectrum is None else [Spectrum(spectrum.flatten(), 0)]

    def local_log_det(self) -> Sequence[LogDetTerm] | None:
        """Terms of a smooth model of log det B for `log_det` that is a stochastic estimate; None if it is not."""
        return None

    def log_det_curve(self, factors: Tensor) -> Tensor:
        """log det B with all prior precisions multiplied by each of `factors` (m,); (m,).

        Raises
        ------
        UnsupportedError
            If the spectrum is not available, and `log_det_at` is not defined.
        """
        spectrum = self.spectrum()
        if spectrum is not None:
            return log_det_curve(spectrum, factors)
        return torch.stack([self.log_det_at(factor) for factor in factors.tolist()])

    def log_det_at(self, factor: float) -> Tensor:
        """log det B with all prior precisions multiplied by a factor, without the spectrum; a scalar.

        Raises
        ------
        UnsupportedError
            By default.
        """
        raise UnsupportedError("a structure whose eigenvalues are known, for the evidence over many precisions",
                               f"a {type(self).__name__} without them",
                               "Set prior.log_precision, and ask for the evidence there.")

    def _lists_eigenvalues(self, n: int) -> bool:
        """Whether the eigenvalues of an n x n matrix are computed: two matrices fit, and the routine takes them."""
        like = self._by_group
        return n <= tuning.LARGEST_SPECTRUM and 2 * n * n * like.element_size() <= available_memory(like.device)

    # --- terms of the correction

    def quadratic(self, vector: Tensor, gradient: Tensor) -> Tensor:
        """zᵀ (H - P0) z for z = H⁻¹g, in double precision; z and g are (P,)."""
        return (vector * (gradient - self.prior_precision * vector)).sum(dtype=torch.float64)

    def quadratic_slope(self, vector: Tensor) -> Tensor:
        """Derivative of zᵀ (H - P0) z in each log precision, (G,); zero unless H - P0 depends on the prior."""
        return self._by_group.new_zeros(self._num_groups, dtype=torch.float64)

    # --- covariance of f

    def covariance_blocks(self, rows: Jacobian) -> Tensor:
        """V = J H⁻¹ Jᵀ, diagonal blocks (n, C, C)."""
        k, n = rows.num_cotangents, rows.num_examples
        blocks = rows.f.new_empty(n, k, k)
        for part in self._panels(rows):
            dense = rows.subset(part).dense(self.shapes).transpose(0, 1)  # (m, K, P)
            blocks[part] = dense @ self._solved(dense).mT
        return blocks

    def variances_of_outputs(self, rows: Jacobian) -> Tensor:
        """Diagonals of `covariance_blocks`, (n, C)."""
        return self.covariance_blocks(rows).diagonal(dim1=1, dim2=2)

    def removal_blocks(self, rows: Jacobian, root: Tensor) -> Tensor:
        """V at training points with the roots S (n, C, R) of Λ, (n, C, C), from which (I - SᵀVS)⁻¹ is computed.

        The blocks of `covariance_blocks`, unless these are estimates: at a leverage close to 1 a small error of V is a
        large one of the inverse.
        """
        return self.covariance_blocks(rows)

    def covariance(self, rows: Jacobian) -> Tensor:
        """V = J H⁻¹ Jᵀ, joint and interleaved, (nC, nC)."""
        dense = rows.dense(self.shapes).transpose(0, 1).flatten(0, 1)
        return dense @ self._solved(dense).T

    def cross_covariance(self, rows: Jacobian) -> CrossCovariance:
        """V between later rows and these, which have one cotangent."""
        solved = self._solved(rows.dense(self.shapes)[0])
        return CrossCovariance(partial(self._products, self.shapes.parts(solved)), solved.numel())

    def _products(self, named: dict[str, Tensor], rows: Jacobian) -> Tensor:
        """V between rows and those that were solved for, in panels."""
        return torch.cat([rows.subset(part).products(named) for part in self._panels(rows)], 1)

    def differentiable_solve(self, vectors: Tensor) -> Tensor:
        """H⁻¹ v for vectors (..., P), with its graph in v: H⁻¹ is symmetric, so backward is another `solve`."""
        found: Tensor = _Solve.apply(vectors, self)
        return found

    def _solved(self, vectors: Tensor) -> Tensor:
        """H⁻¹ v, with its form checked."""
        return checked_form(self, "solve", self.solve(vectors), vectors.shape, vectors)

    def _panels(self, rows: Jacobian) -> Iterator[slice]:
        """Slices of examples whose dense rows fit in a panel."""
        each = self.num_parameters * rows.num_cotangents * rows.f.element_size()
        return panels(rows.num_examples, each, tuning.COVARIANCE_BYTES)


class _Solve(torch.autograd.Function):
    """H⁻¹ v, whose derivative is H⁻¹ as well."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, precision: PosteriorPrecision) -> Tensor:
        ctx.precision = precision
        return precision._solved(vectors)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return ctx.precision.differentiable_solve(upstream), None


def checked_form(
    precision: PosteriorPrecision, method: str, found: object, shape: Sequence[int], like: Tensor
) -> Tensor:
    """What a method of a posterior precision returned, if it is a tensor of this shape with dtype and device of `like`.

    UnsupportedError if it is not.
    """
    wanted = tuple(shape), like.dtype, like.device
    if isinstance(found, Tensor) and (found.shape, found.dtype, found.device) == wanted:
        return found
    got = f"{tuple(found.shape)} in {found.dtype} on {found.device}" if isinstance(found, Tensor) else f"{found!r}"[:80]
    raise UnsupportedError(f"a tensor {tuple(shape)} in {like.dtype} on {like.device} of "
                           f"{type(precision).__name__}.{method}", got, "Correct the method.")


def require_finite(variances: Tensor) -> Tensor:
    """The variances of f, if they are finite (NonFiniteError)."""
    if bool(torch.isfinite(variances).all()):
        return variances
    raise NonFiniteError("finite variances of f", f"numbers that overflow in {variances.dtype}",
                         "Give inputs in the units of the training data, scaled to unit variance.")


def less_(prior: Tensor, seen: Tensor) -> Tensor:
    """Subtract what the data have determined, V = K** - Σ_r s_r s_rᵀ, in place: (n, C, C) and s (n, C, r), or one of n.

    Warns where V is so much smaller than K** that rounding of K** is 1 % of a variance.

    Raises
    ------
    NonFiniteError
        If a variance is not finite.
    """
    if prior.ndim == 2:
        return less_(prior.unsqueeze(0), seen.unsqueeze(0)).squeeze(0)
    before = prior.diagonal(dim1=1, dim2=2).clone()
    variances = prior.baddbmm_(seen, seen.mT, alpha=-1.0).diagonal(dim1=1, dim2=2)
    if bool((_DIGITS * variances >= torch.finfo(prior.dtype).eps * before).all()):
        return prior
    require_finite(variances)
    warn("the covariances of f have few correct digits: the prior variances are too large beside them. "
         f"{more_digits(prior.dtype)}")
    return prior
