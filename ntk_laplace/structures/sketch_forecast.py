"""What the low rank of "iterative" and "nystrom" is expected to become and to take, from rows of a few examples."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from ntk_laplace.curvature.leading_rows import leading_count
from ntk_laplace.jacobian import Jacobian, Outer
from ntk_laplace.jacobian.gram import diagonal_blocks, gram
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.lower_triangle import LowerTriangle
from ntk_laplace.structures.forecast import Forecast, Problem, Work, memory_of
from ntk_laplace.structures.products import product_vectors

Left = Callable[[int], tuple[float, float]]
_STEPS, _LATER_STEPS = 6, 3  # products with one of the first probes and of the others, expected
_LANCZOS_VECTORS = 15  # of one of these probes, at the peak
_DRAW_TENSORS = 11  # of the size of all draws, in the conjugate gradients for them and a product
_OUTPUT_TENSORS = 3  # of all outputs of all examples for the draws, in a product
_WEIGHTED_EXAMPLES = 2048  # whose rows are weighted together, at most


def tolerance(relative_error: float, joint: float, log_det: float) -> float:
    """Wished standard error of log det B: twice that of the evidence, at least of one nat."""
    return 2.0 * relative_error * max(abs(joint - 0.5 * log_det), 1.0)


def expected_logs(problem: Problem) -> Tensor:
    """Estimates of log(1 + λ) of the eigenvalues of SᵀKS, descending; none where the spectrum is not known."""
    spectrum = problem.spectrum
    if spectrum is None:
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    return spectrum.double().clamp_min(0.0).log1p()


@dataclass(frozen=True)
class Course:
    """The low ranks that a fit is expected to try, and their probes.

    Attributes
    ----------
    ranks, further : list of int
        Ranks for the evidence, and further ones for predictions.
    probes : list of int
        Of those for the evidence.
    """

    ranks: list[int]
    further: list[int] = field(default_factory=list)
    probes: list[int] = field(default_factory=list)

    @property
    def last(self) -> int:
        """The largest rank."""
        return [*self.ranks, *self.further][-1]

    @property
    def tried(self) -> int:
        """Products of all probes: the first ones of a low rank go on until their bracket is narrow."""
        firsts = [min(count, tuning.LANCZOS_PROBES) for count in self.probes]
        return sum(firsts) * _STEPS + (sum(self.probes) - sum(firsts)) * _LATER_STEPS

    @property
    def probing_passes(self) -> int:
        """Passes of all probes, where rows are computed anew."""
        return sum(-(-count // tuning.LANCZOS_PROBES) for count in self.probes) * _STEPS

    def lanczos_bytes(self, vector: int) -> int:
        """Bytes of the probes that share products, for vectors of so many bytes."""
        return min(tuning.LANCZOS_PROBES, max(self.probes, default=0)) * _LANCZOS_VECTORS * vector


@dataclass(frozen=True)
class Growth:
    """The decisions of `grown`, and of `IterativePrecision.refined` after it, at estimates of what a low rank leaves.

    Attributes
    ----------
    left : callable
        Σ log(1 + λ), and Σ log²(1 + λ), over the eigenvalues that a low rank of this rank leaves.
    cost : callable
        Products that one of this rank takes.
    log_det, wished : float
        log det B, and the wished standard error of it.
    most : int
        The largest rank.
    refined : bool
        Whether predictions take a low rank that leaves little.
    """

    left: Left
    cost: Callable[[int], float]
    log_det: float
    wished: float
    most: int
    refined: bool = True

    @classmethod
    def of(
        cls, problem: Problem, relative_error: float, left: Left, cost: Callable[[int], float],
        most: int, refined: bool,
    ) -> Growth:
        """With log det B by the spectrum of the problem."""
        log_det = float(expected_logs(problem).sum())
        return cls(left, cost, log_det, tolerance(relative_error, problem.log_joint or 0.0, log_det), most, refined)

    def expected(self, first: int, probes: int | None) -> Course:
        """From the first rank on."""
        ranks, found, least = [first], [], probes or tuning.FIRST_PROBES
        while self.left(ranks[-1])[0] > tuning.QUADRATURE_SHARE * self.wished:
            needed = max(least, 2.0 * self.left(ranks[-1])[1] / self.wished**2)
            few = needed <= tuning.MOST_PROBES and (needed - least) * _STEPS <= self._larger(ranks)
            if few or ranks[-1] >= self.most or probes is not None:
                found.append(int(min(needed, tuning.MOST_PROBES)))
                break
            found.append(min(tuning.LANCZOS_PROBES, least))
            ranks.append(min(2 * ranks[-1], self.most))
        evidence = len(ranks)
        fewest, most = (count * tuning.DRAW_PRODUCTS for count in (tuning.REMAINDER_DRAWS, tuning.MOST_DRAWS))
        while self.refined and ranks[-1] < self.most:
            larger, little = self._larger(ranks), self.left(ranks[-1])[0] <= tuning.LEFT_SHARE * self.log_det
            if (little and larger >= fewest / 2) or larger > most - fewest:
                break
            ranks.append(min(2 * ranks[-1], self.most))
        return Course(ranks[:evidence], ranks[evidence:], found)

    def _larger(self, ranks: list[int]) -> float:
        return self.cost(min(2 * ranks[-1], self.most))


def rows_kept(problem: Problem) -> bool:
    """Whether a process is expected to keep rows of J of its share of the examples."""
    return 2 * problem.row_bytes(problem.share) <= memory_of(problem.model)


def batch_bytes(problem: Problem) -> int:
    """Bytes of S, and of rows that are weighted together."""
    return problem.root_bytes + problem.weighted_bytes(min(problem.share, _WEIGHTED_EXAMPLES))


def rows_limit(memory: int, num_rows: int, columns: int, element: int, row: int) -> int:
    """Leading rows that take at most half of the memory; 0 if the eigenvectors of all blocks take more.

    Their factorization has half of a square matrix, and what builds it. The rows are held twice while they are put
    in order. Of the blocks there are eigenvectors, those that are chosen, and what they leave.
    """
    if 2 * 4 * num_rows * columns * element > memory:
        return 0
    return min(math.isqrt(memory // (2 * element)), memory // (8 * row))


@dataclass(frozen=True)
class SampledRows:
    """Rows uᵀSᵀJ of some examples, u the eigenvectors of the blocks [SᵀKS]_nn, the longest first.

    Attributes
    ----------
    problem : Problem
    weighted : Jacobian
        Rows of SᵀJ of these examples.
    count, limit : int
        Leading rows that are expected at first, and rows for which there is memory.
    """

    problem: Problem
    weighted: Jacobian
    count: int
    limit: int

    def left(self, rank: int) -> tuple[float, float]:
        """What the longest leave, as `Growth.left`, if of all rows as many are taken as of these.

        The share of log det B falls with the number of examples, as more rows explain the others: by a power, which
        half of the examples show. Each eigenvalue is taken to fall by that share.
        """
        n, rows, logs = self.problem.num_examples, self.problem.num_rows, expected_logs(self.problem)
        whole, half = (float(pivots[math.ceil(rank * len(pivots) / rows) :].sum() / pivots.sum())
                       for pivots in self._log_pivots)
        doublings = math.log2(max(1.0, n / self._used))
        share = whole * min(1.0, whole / max(half, 1e-300)) ** doublings
        return share * float(logs.sum()), share**2 * float(logs.square().sum())

    @property
    def _used(self) -> int:
        """Examples whose Gram matrix is factorized."""
        return min(self.weighted.num_examples, max(2, tuning.PROBED_GRAM_ROWS // self.problem.num_columns))

    @cached_property
    def _log_pivots(self) -> tuple[Tensor, Tensor]:
        """Log pivots of B of the examples, and of half of them, repeated to all: sums are those of leading minors."""
        m, r, found = self._used, self.problem.num_columns, []
        rows, variances = self.weighted.subset(slice(0, m)), self.problem.model.prior.variances()
        products = gram(rows, variances).double().view(m, r, m, r)
        each = torch.arange(m, device=products.device)
        _, turn = torch.linalg.eigh(products[each, :, each])
        products = torch.einsum("nra,nrms,msb->namb", turn, products, turn)
        for count in (m, m // 2):
            given = products[:count, :, :count].reshape(count * r, -1) * (self.problem.num_examples / count)
            order = given.diagonal().argsort(descending=True)
            given = given[order][:, order]
            given.diagonal().add_(1.0)
            found.append(torch.linalg.cholesky(given).diagonal().log())
        return found[0], found[1]


def expected_rows(problem: Problem) -> SampledRows | None:
    """The leading rows that a fit would choose; None if it would choose none, or for want of a sample."""
    if problem.root is None:
        return None
    weighted, row = problem.sample.weighted(problem.root), problem.single_row_bytes
    squares = torch.linalg.eigvalsh(diagonal_blocks(weighted, problem.model.prior.variances())).clamp_min(0.0)
    limit = rows_limit(memory_of(problem.model), problem.num_rows, problem.num_columns, problem.element, row)
    count = leading_count(squares, problem.num_rows, min(limit, problem.num_parameters))
    return None if count is None else SampledRows(problem, weighted, count, limit)


def forecast_of_rows(
    problem: Problem, rows: SampledRows, relative_error: float, probes: int | None, least: int, refined: bool
) -> Forecast:
    """Leading rows and the Cholesky factor of their B on every process, and rows of J of its share if they fit."""
    model, p, e, share = problem.model, problem.num_parameters, problem.element, problem.share
    each = 4.0 * problem.num_examples * p
    growth = Growth.of(problem, relative_error, rows.left, lambda rank: rank**3 / 3 / each,
                       min(rows.limit, p, problem.num_rows), refined)
    course = growth.expected(rows.count, probes)
    before, rank = [0, *course.ranks, *course.further][-2:]
    single, blocks = problem.single_row_bytes, problem.num_rows * problem.num_columns * e
    kept = rows_kept(problem)
    triangle = partial(LowerTriangle.predicted_bytes, unit=1, dtype=model.jacobian_pass.dtype,
                       device=model.network.device)
    stored = {"leading rows": rank * single + blocks, "factor": triangle(rank),
              "rows of J": kept * problem.row_bytes(share)}
    passes = 3 * len(course.ranks) + course.probing_passes
    algebra = problem.pair_flops / problem.num_columns**2 * sum(r * r for r in course.ranks)
    algebra += 4.0 * p * course.tried * course.ranks[-1]
    work = Work(passes=share * (1 if kept else passes), products=share * course.tried, matmul=algebra,
                cholesky=sum(r**3 for r in course.ranks) / 3)
    whole = sum(stored.values())
    # rows are put in order beside the factorization before; of all blocks there are directions, and what they leave
    choosing = (rank + before) * single + triangle(before) + 3 * blocks
    lanczos, rows_of_batch = course.lanczos_bytes(problem.vector_bytes), batch_bytes(problem)
    forecast = Forecast.of_phases(
        stored, {"rows": whole + choosing + rows_of_batch, "probes": whole + lanczos + rows_of_batch,
                 "draws": whole, "responses": whole},
        {"draws": problem.root_bytes + draw_bytes(problem, kept, rank), "responses": problem.response_bytes})
    sent = (2 * course.tried * p * e + rank * single + 2 * blocks) * (problem.processes - 1) // problem.processes
    note = f"{rank:,} leading rows, rows {'kept' if kept else 'streamed'}"
    return replace(forecast, work=work, communication=sent, note=note, least=least)


def layer_bytes(problem: Problem, vectors: int, tensors: int, panels: int, rows: int = 0) -> int:
    """Bytes of a product of a layer's rows with vectors: tensors of a batch's examples, or of more `rows`, and columns.

    Rows of several positions are written out, in `panels`.
    """
    widths = [block.b.shape[4] for block in problem.sample.blocks if isinstance(block, Outer)]
    columns = max((width * min(vectors, max(1, tuning.PRODUCT_COLUMNS // width)) for width in widths), default=0)
    own = max(tensors * min(problem.share, _WEIGHTED_EXAMPLES), rows) * columns * problem.element
    return own + panels * problem.shares_positions * problem.buffer(tuning.WRITTEN_BYTES)


def product_bytes(problem: Problem, vectors: int) -> int:
    """Bytes of products of JᵀΛJ with so many vectors: those that share a product twice, outputs, and a layer."""
    together = min(product_vectors(problem.vector_bytes), vectors)
    outputs = min(problem.share, _WEIGHTED_EXAMPLES) * problem.num_columns * problem.element
    return together * (2 * problem.vector_bytes + outputs) + layer_bytes(problem, together, 4, 1)


def draw_bytes(problem: Problem, kept: bool, rows: int = 0) -> int:
    """Bytes of draws of what a low rank leaves, and of products with them.

    `kept` says whether rows of J are; a low rank of leading rows has `rows` of them.
    """
    some = min(tuning.REMAINDER_DRAWS, max(1, tuning.COVARIANCE_BYTES // problem.vector_bytes))
    some = min(some, product_vectors(problem.vector_bytes)) if kept else some
    outputs = _OUTPUT_TENSORS * problem.share * problem.num_outputs * problem.element
    layer = layer_bytes(problem, some, 2, 2, rows)
    return some * (_DRAW_TENSORS * problem.vector_bytes + outputs) + layer + problem.chunk_bytes


def covariance_bytes(problem: Problem, rank: int) -> int:
    """Bytes of V by a low rank, of a chunk of a prediction or of the measured points: products of rows with it.

    There are three tensors of them: the result, the sum over layers, and one layer's.
    """
    inputs = max(problem.chunk, min(problem.num_examples, tuning.MEASURED_POINTS))
    return problem.chunk_bytes + 3 * inputs * problem.num_outputs * rank * problem.element
