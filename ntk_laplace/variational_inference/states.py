"""The Gaussian q = N(μ, H⁻¹) that variational inference moves, and how one step changes it."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.curvature import FullPrecision, FunctionSpacePrecision, PosteriorPrecision
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.jacobian.gram import Variances, cross_gram, gram
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.linalg import add_outer_lower_


@dataclass(frozen=True)
class DataTerms:
    """Share of some examples in the two expectations of a step, ĝ = Σ Jᵀr (P,) and Ĝ = Σ JᵀΛJ = RᵀR."""

    gradient: Tensor
    rows: Jacobian  # rows of SᵀJ, scaled so that the sum of their outer products is the share of Ĝ
    counts: Tensor | None = None  # how often each example counts, (n,); equally often by default


class VariationalState(ABC):
    """q = N(μ, H⁻¹) under a prior N(μ0, P0⁻¹), updated by natural gradients ([T20] 4.2, 4.3).

    A step of size γ with the expectations ĝ (P,) and Ĝ (P, P) is, without a difference of large vectors,

        H ← (1-γ) H + γ (P0 + Ĝ),    μ ← μ + γ H⁻¹ [ĝ - P0 (μ - μ0)],    with the new H in the second.

    μ (P,) is in the dtype of the algebra.
    """

    dropped: float = 0.0  # bound of what H lacks because rows of old steps were dropped

    def __init__(self, mean: Tensor, prior: GaussianPrior) -> None:
        self.mean, self._prior, self._shapes = mean, prior, prior.shapes
        self._prior_mean = prior.flat_mean().to(mean)

    @property
    @abstractmethod
    def precision(self) -> PosteriorPrecision:
        """H, factorized. Its `log_det` may be relative to another diagonal than P0."""

    @abstractmethod
    def update(self, step_size: float, terms: Iterable[DataTerms]) -> float:
        """Take one step. The terms are read once, and may be computed from this state while they are read.

        Return the norm of the natural gradient in q's own metric, sqrt(gᵀH⁻¹g) for g = ĝ - P0 (μ - μ0).
        NumericalError if the new H is not positive definite; the state is then undefined.
        """

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """Copies of all tensors that another process needs to continue with the same numbers."""

    @abstractmethod
    def restore(self, record: Mapping[str, Any]) -> None:
        """Continue from a record."""

    @property
    def rows_kept(self) -> int | None:
        """Number of rows that represent H - diag; None if it is a matrix of parameters."""
        return None

    @torch.no_grad()
    def draw(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws e from N(0, H⁻¹), (count, P); θ = μ ± e are two samples of q."""
        return self.precision.sample(count, generator)

    def covariance_blocks(self, rows: Jacobian) -> Tensor:
        """V = J H⁻¹ Jᵀ, diagonal blocks (n, C, C): covariance of the outputs, linearized in the weights."""
        return self.precision.covariance_blocks(rows)

    def _pull(self) -> Tensor:
        """P0 (μ0 - μ), the prior's share of g."""
        return self._prior.flat_precision().detach().to(self.mean) * (self._prior_mean - self.mean)

    def _move(self, step_size: float, gradient: Tensor, precision: PosteriorPrecision) -> float:
        """μ ← μ + γ H⁻¹g, and the norm sqrt(gᵀH⁻¹g)."""
        direction = precision.solve(gradient)
        self.mean = self.mean + step_size * direction
        return float((gradient @ direction).clamp_min(0.0).sqrt())


class DenseState(VariationalState):
    """H - P0 as a matrix over the parameters, (P, P): only the lower triangle is read, and changed in place."""

    def __init__(self, mean: Tensor, excess: Tensor, prior: GaussianPrior) -> None:
        super().__init__(mean, prior)
        self._excess = excess
        self._precision: FullPrecision | None = None

    @classmethod
    def isotropic(cls, mean: Tensor, precision: float, prior: GaussianPrior) -> DenseState:
        """H = λ I for a number λ."""
        excess = mean.new_zeros(len(mean), len(mean))
        excess.diagonal().copy_(precision - prior.flat_precision().detach().to(mean))
        return cls(mean, excess, prior)

    @property
    def precision(self) -> FullPrecision:
        """H, factorized; `log_det` is relative to P0."""
        if self._precision is None:
            self._precision = FullPrecision(self._excess, self._prior)
        return self._precision

    def update(self, step_size: float, terms: Iterable[DataTerms]) -> float:
        """H - P0 ← (1-γ)(H - P0) + γ Ĝ by few large products, one factorization, and one solve."""
        gradient, keep = self._pull(), 1.0 - step_size
        waiting = [self._excess[:0]]  # until one product over them is efficient

        def add() -> None:
            nonlocal keep, waiting
            add_outer_lower_(self._excess, torch.cat(waiting), scale=step_size, keep=keep)
            waiting, keep = [], 1.0

        for part in terms:
            gradient += part.gradient
            waiting.append(part.rows.dense(self._shapes).flatten(0, 1))
            if sum(rows.nbytes for rows in waiting) >= tuning.FULL_ROWS_BYTES:
                add()
        if waiting:
            add()
        self._precision = None  # the new factor takes its memory
        return self._move(step_size, gradient, self.precision)

    def record(self) -> dict[str, Any]:
        """μ and H - P0."""
        return {"mean": self.mean.clone(), "excess": self._excess.clone()}

    def restore(self, record: Mapping[str, Any]) -> None:
        self.mean = record["mean"].to(self.mean)
        self._excess.copy_(record["excess"])
        self._precision = None


class FunctionSpaceState(VariationalState):
    """H = diag(d) + RᵀR with rows R of several ages: no matrix over the parameters.

    One step scales the rows by √(1-γ) and appends those of the step. Draws and solves take a matrix B = I + R d⁻¹ Rᵀ
    over the rows. Products of old rows with each other are scaled, those with new rows are computed.

    At the start R may have no examples, and the ratio is d / P0 of each prior group, (G,). Rows are dropped when what
    is left of their weight, Π(1-γ) over the steps since, is within the tolerance; rows of weight 0 always. `dropped`
    bounds the spectral norm of P0^-½ D P0^-½ for the sum D of all that is missing in H, if the other rows are given. It
    is at most the tolerance times the largest norm of Ĝ in the same units.
    """

    def __init__(
        self, mean: Tensor, rows: Jacobian, ratio: Tensor, prior: GaussianPrior, tolerance: float = 0.0
    ) -> None:
        super().__init__(mean, prior)
        self._rows, self._ratio, self._tolerance, self.dropped = rows, ratio.to(mean), tolerance, 0.0
        self._ages: list[tuple[int, float]] = [(rows.num_examples, 1.0)] if rows.num_examples else []
        self._scales, classes = self._ratio.unique(return_inverse=True)
        self._classify(classes)
        self._grams = [gram(rows, variances) for variances in self._variances]
        self._precision: FunctionSpacePrecision | None = None

    def _classify(self, classes: Tensor) -> None:
        """Note which groups have the same multiple d / P0: they share a matrix of products."""
        self._classes = classes
        self._variances = [self._of_class(number) for number in range(int(classes.max()) + 1)]

    def _of_class(self, number: int) -> Variances:
        """Prior variances of the groups of a class; the others contribute nothing."""
        found, chosen = {}, self._classes == number
        for name, variance in self._prior.variances().items():
            own = chosen[self._prior.group_of(name)]
            if own.ndim:
                found[name] = variance * own
            elif own:
                found[name] = variance
        return found

    @property
    def precision(self) -> FunctionSpacePrecision:
        """H, factorized; `log_det` is relative to `diagonal`."""
        if self._precision is None:
            total = self._grams[0] / self._scales[0]
            for own, scale in zip(self._grams[1:], self._scales[1:], strict=True):
                total.add_(own / scale)
            self._precision = FunctionSpacePrecision(self._rows, None, self.diagonal, total)
        return self._precision

    @property
    def diagonal(self) -> GaussianPrior:
        """A prior with the precisions d."""
        return prior_times(self._prior, self._ratio)

    @property
    def rows_kept(self) -> int:
        """Number of rows of R."""
        return self._rows.num_examples * self._rows.num_cotangents

    def update(self, step_size: float, terms: Iterable[DataTerms]) -> float:
        """d ← (1-γ) d + γ P0, R ← [√(1-γ) R; √γ new rows]."""
        gradient, parts = self._pull(), []
        for part in terms:
            gradient += part.gradient
            parts.append(_scaled(part.rows, step_size**0.5))
        new = self._of_one_width(Jacobian.concatenate(parts))
        self._precision = None
        self._forget(1.0 - step_size)
        self._grams = [
            _bordered(own, cross_gram(new, self._rows, variances), gram(new, variances))
            for own, variances in zip(self._grams, self._variances, strict=True)
        ]
        self._rows = Jacobian.concatenate([self._rows, new]) if self._ages else new
        self._ages.append((new.num_examples, 1.0))
        self._ratio = (1.0 - step_size) * self._ratio + step_size
        self._scales = (1.0 - step_size) * self._scales + step_size
        return self._move(step_size, gradient, self.precision)

    def _of_one_width(self, new: Jacobian) -> Jacobian:
        """Rows of as many cotangents as the kept ones; whichever have fewer get rows of zeros.

        A root of an average of Λ may have more columns than one of Λ.
        """
        width = max(new.num_cotangents, self._rows.num_cotangents)
        if self._rows.num_cotangents < width:
            self._rows = _padded(self._rows, width)
            self._grams = [gram(self._rows, variances) for variances in self._variances]
        return _padded(new, width)

    def _forget(self, keep: float) -> None:
        """Scale the rows and their products, and drop the rows whose weight is within the tolerance."""
        self._ages = [(count, keep * weight) for count, weight in self._ages]
        gone = sum(count for count, weight in self._ages if weight <= self._tolerance)
        self._ages = [(count, weight) for count, weight in self._ages if weight > self._tolerance]
        first = gone * self._rows.num_cotangents
        self.dropped *= keep
        if gone:
            lost = sum((own[:first, :first].tril() for own in self._grams), start=self._grams[0].new_zeros(()))
            # of a symmetric matrix by its lower triangle: the Frobenius norm bounds the spectral one
            self.dropped += keep * float((2.0 * lost.square().sum() - lost.diagonal().square().sum()).sqrt())
            self._rows = self._rows.subset(slice(gone, None))
        self._rows = _scaled(self._rows, keep**0.5)
        self._grams = [own[first:, first:] * keep for own in self._grams]

    def dense(self) -> DenseState:
        """The same q in weight space."""
        excess = self.mean.new_zeros(len(self.mean), len(self.mean))
        add_outer_lower_(excess, self._rows.dense(self._shapes).flatten(0, 1))
        own, given = (p.flat_precision().detach().to(self.mean) for p in (self._prior, self.diagonal))
        excess.diagonal().add_(given - own)
        return DenseState(self.mean, excess, self._prior)

    def record(self) -> dict[str, Any]:
        """μ, d/P0, the rows with their ages and their products, and what was dropped."""
        return copy.deepcopy({
            "mean": self.mean, "ratio": self._ratio, "scales": self._scales, "classes": self._classes,
            "rows": self._rows.record(), "ages": self._ages, "grams": self._grams, "dropped": self.dropped,
        })

    def restore(self, record: Mapping[str, Any]) -> None:
        record = copy.deepcopy(dict(record))
        self.mean, self._ratio = record["mean"].to(self.mean), record["ratio"].to(self.mean)
        self._scales, self._grams = record["scales"].to(self.mean), [own.to(self.mean) for own in record["grams"]]
        self._classify(record["classes"].to(self.mean.device))
        self._rows = Jacobian.from_record(record["rows"]).to(self.mean.dtype, self.mean.device)
        self._ages, self.dropped = [(int(n), float(w)) for n, w in record["ages"]], record["dropped"]
        self._precision = None


def prior_times(prior: GaussianPrior, ratio: Tensor) -> GaussianPrior:
    """A prior whose precisions are multiplied by numbers (G,)."""
    found = copy.deepcopy(prior)
    with torch.no_grad():
        found.log_precision.add_(ratio.log().to(found.log_precision))
    return found


def _scaled(rows: Jacobian, factor: float) -> Jacobian:
    """All rows times a number."""
    eye = torch.eye(rows.num_cotangents, dtype=rows.f.dtype, device=rows.f.device)
    return rows.weighted((eye * factor).expand(rows.num_examples, -1, -1))


def _padded(rows: Jacobian, width: int) -> Jacobian:
    """Rows with so many cotangents, of which the last are zero."""
    eye = torch.eye(rows.num_cotangents, width, dtype=rows.f.dtype, device=rows.f.device)
    return rows if len(eye) == width else rows.weighted(eye.expand(rows.num_examples, -1, -1))


def _bordered(matrix: Tensor, below: Tensor, corner: Tensor) -> Tensor:
    """The lower triangle of a symmetric matrix with more rows; the rest above the diagonal is zero."""
    (m, n), k = below.shape, len(matrix)
    out = matrix.new_zeros(m + n, m + n)
    out[:k, :k], out[k:, :k], out[k:, k:] = matrix, below, corner
    return out
