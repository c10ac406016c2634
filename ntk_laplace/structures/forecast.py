"""Forecasts: the memory and the work of a fit, from sizes and the rows of a few examples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from torch import Tensor

from ntk_laplace.jacobian import Jacobian, LayerRows
from ntk_laplace.jacobian.blocks import Factored
from ntk_laplace.model.predictive import SAMPLES, response_bytes
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.resources import available_memory, buffer_bytes
from ntk_laplace.structures.model import LinearizedModel

_EIGH = 10  # flops of eigenvectors over n³


@dataclass(frozen=True)
class Problem:
    """What a forecast is computed from.

    Attributes
    ----------
    model : LinearizedModel
    num_examples : int
        N, of all processes.
    sample : Jacobian
        Rows of J of one or more examples, stored as the fit would store them.
    processes : int
        Processes that share the fit.
    spectrum : Tensor, optional
        Estimates of the largest eigenvalues of SᵀKS, descending.
    log_joint : float, optional
        An estimate of the log joint, in nats.
    root : Tensor, (n, C, R), optional
        S of the examples of the sample.
    """

    model: LinearizedModel
    num_examples: int
    sample: Jacobian
    processes: int = 1
    spectrum: Tensor | None = None
    log_joint: float | None = None
    root: Tensor | None = None

    def buffer(self, size: int) -> int:
        """A size of `tuning` on the network's device."""
        return buffer_bytes(size, self.model.network.device)

    @property
    def num_columns(self) -> int:
        """R."""
        return self.model.curvature_type.columns(self.model.likelihood, self.num_outputs)

    @property
    def num_outputs(self) -> int:
        """C."""
        return self.model.network.num_outputs

    @property
    def num_rows(self) -> int:
        """N R, the order of B."""
        return self.num_examples * self.num_columns

    @property
    def num_parameters(self) -> int:
        """P."""
        return self.model.network.num_parameters

    @property
    def element(self) -> int:
        """Bytes of a number of the algebra."""
        return self.model.jacobian_pass.dtype.itemsize

    @property
    def vector_bytes(self) -> int:
        """Bytes of P numbers."""
        return self.num_parameters * self.element

    @property
    def share(self) -> int:
        """Examples that one process reads."""
        return -(-self.num_examples // self.processes)

    @property
    def root_bytes(self) -> int:
        """Bytes of S, (N, C, R)."""
        return self.num_rows * self.num_outputs * self.element

    def row_bytes(self, n: int) -> int:
        """Bytes of the rows of J of n examples."""
        return _linear(self.sample, n)

    def weighted_bytes(self, n: int) -> int:
        """Bytes of the rows of SᵀJ of n examples."""
        few = self.sample.subset(slice(0, 2))
        return _linear(few.weighted(few.f.new_ones(few.num_examples, self.num_outputs, self.num_columns)), n)

    @property
    def single_row_bytes(self) -> int:
        """Bytes of one row of SᵀJ of one cotangent."""
        one = self.sample.subset(slice(0, 1))
        return one.weighted(one.f.new_ones(1, self.num_outputs, 1)).nbytes

    @property
    def shares_positions(self) -> bool:
        """Whether a layer uses its weights at several positions."""
        return any(isinstance(block, Factored) and block.b.shape[-2] > 1 for block in self.sample.blocks)

    @property
    def pair_flops(self) -> int:
        """Flops of SᵀKS for a pair of examples, of which only half are computed."""
        r, total = self.num_columns, 0
        for block in self.sample.blocks:
            if isinstance(block, Factored):
                positions = block.b.shape[-2]
                outputs = block.b.shape[-1]
                total += r * r * positions * outputs + positions**2 * sum(block.sizes().values()) // max(1, outputs)
            else:
                total += r * r * sum(block.sizes().values())
        return total

    def written_bytes(self, rows: LayerRows, columns: int, count: int) -> int:
        """Bytes of the rows of a layer that are written out at a time, of so many columns and examples."""
        one = rows.copies * columns * math.prod(rows.entries) * self.element
        return min(count * one, max(one, self.buffer(tuning.WRITTEN_BYTES)))

    @property
    def predicted(self) -> int:
        """Inputs of the prediction that is counted: as many as there are examples, at most those read together."""
        return min(self.num_examples, tuning.PREDICTED_EXAMPLES)

    @property
    def chunk(self) -> int:
        """Inputs of the largest chunk of a prediction.

        The first has as many as fit with dense rows, all later ones as many as fit with their own; and with the
        covariances of outputs.
        """
        c, positions = self.num_outputs, self.model.likelihood.num_positions(self.num_outputs)
        width = c if positions == 1 else max(tuning.POSITION_BLOCK, c // positions)
        room, dense = self.buffer(tuning.CHUNK_BYTES), self.vector_bytes * c
        most = min(self.model.jacobian_pass.sizes.batch()[0], max(1, room // (3 * c * width * self.element)))
        first = _even(self.predicted, min(most, max(tuning.FEWEST_CHUNK_EXAMPLES, room // dense)))
        row = max(1, self.row_bytes(2) - self.row_bytes(1))
        return max(first, _even(self.predicted - first, min(most, max(1, room // row))))

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk: its rows, those of one block in another basis, and the graph of its forward pass."""
        turned = max((block.nbytes // max(1, block.shape[1]) for block in self.sample.blocks), default=0)
        row = self.row_bytes(2) - self.row_bytes(1)
        return self.chunk * (row + turned + self.model.jacobian_pass.sizes.graph_bytes)

    @property
    def response_bytes(self) -> int:
        """Bytes of a prediction's responses, beside the rows of a chunk; of many positions, of f at weight samples."""
        likelihood, c, e = self.model.likelihood, self.num_outputs, self.element
        positions = likelihood.num_positions(c)
        if positions > 1 and c > tuning.POSITION_OUTPUTS:
            draws = min(SAMPLES * self.num_parameters * e, tuning.WEIGHT_SAMPLE_BYTES)
            together = min(self.predicted, max(1, tuning.SAMPLED_OUTPUTS // (SAMPLES * c)))
            return 2 * draws + together * SAMPLES * (5 * c + 2 * positions) * e
        inputs, chunk = self.predicted * positions, self.chunk * positions
        return self.row_bytes(self.chunk) + response_bytes(likelihood, inputs, chunk, c // positions, e)

    @property
    def batch_bytes(self) -> int:
        """Bytes of a batch of rows of J with its graph."""
        count, each = self.model.jacobian_pass.sizes.batch()
        return min(self.share, count) * each


def _even(count: int, most: int) -> int:
    """Size of even parts of so many, of which none has more than `most`."""
    return -(-count // max(1, -(-count // most)))


def _linear(rows: Jacobian, n: int) -> int:
    """Bytes of n examples like these; what all examples share is counted once."""
    one, two = (rows.subset(slice(0, m)).nbytes for m in (1, min(2, rows.num_examples)))
    return one + (n - 1) * (two - one) if rows.num_examples > 1 else n * one


@dataclass(frozen=True)
class Work:
    """Work of a fit and its evidence, of one process.

    Attributes
    ----------
    passes : float
        Examples whose rows are computed.
    products : float
        Products of the rows of an example with one vector, forth and back.
    matmul, cholesky : float
        Floating-point operations, in large matrix products and in factorizations.
    eigh : float
        Σ n³ over the symmetric matrices (n, n) whose eigenvectors are computed; a third of it for eigenvalues alone.
    """

    passes: float = 0.0
    products: float = 0.0
    matmul: float = 0.0
    cholesky: float = 0.0
    eigh: float = 0.0

    def seconds(self, rates: Work) -> float:
        """The time at these rates, each in the unit of its attribute per second."""
        pairs = ((getattr(self, entry.name), getattr(rates, entry.name)) for entry in fields(self))
        return sum(amount / rate for amount, rate in pairs if amount)

    @property
    def algebra(self) -> float:
        """Floating-point operations of dense linear algebra."""
        return self.matmul + self.cholesky + _EIGH * self.eigh

    def operations(self, problem: Problem) -> float:
        """Floating-point operations, about, with those of rows and of products with them."""
        passes = 2 * (1 + problem.num_outputs)
        return self.algebra + problem.num_parameters * (passes * self.passes + 4 * self.products)


@dataclass(frozen=True)
class Forecast:
    """Memory, work and communication of a fit, its evidence and a prediction, of each process.

    Attributes
    ----------
    stored : mapping of str to int
        Bytes that the posterior keeps, by what they are.
    temporary : int
        Bytes beyond them at the peak, which grow with the problem.
    buffers : int
        The same of buffers with a largest size, whatever the problem.
    work : Work, optional
        None if it is not known.
    communication : int
        Bytes that each process sends, and as many that it receives.
    note : str
        What the forecast assumes.
    least : int, optional
        Bytes without which the fit is refused, if it takes less where memory is short.
    """

    stored: Mapping[str, int]
    temporary: int = 0
    buffers: int = 0
    work: Work | None = None
    communication: int = 0
    note: str = ""
    least: int | None = None

    @classmethod
    def of_phases(
        cls, stored: Mapping[str, int], sizes: Mapping[str, int], buffers: Mapping[str, int] | None = None
    ) -> Forecast:
        """With the largest of several phases, by name: bytes that grow with the problem, and those of buffers."""
        kept, phases = sum(stored.values()), [(size, (buffers or {}).get(name, 0)) for name, size in sizes.items()]
        fixed = max(kept, *sizes.values())
        return cls(stored, fixed - kept, max(0, *(size + more - fixed for size, more in phases)))

    @property
    def bytes(self) -> int:
        """Bytes at the peak."""
        return sum(self.stored.values()) + self.temporary + self.buffers

    @property
    def required(self) -> int:
        """What has to fit in memory: the peak without buffers, or `least`."""
        return sum(self.stored.values()) + self.temporary if self.least is None else self.least

    def require(self, model: LinearizedModel, what: str, remedy: str, held: int = 0) -> None:
        """Raise an error if this does not fit in memory, except for `held` bytes that are there already.

        Raises
        ------
        MemoryBudgetError
        """
        model.require_memory(self.required - held, what, remedy)


def memory_of(model: LinearizedModel) -> int:
    """Bytes that the fit may use."""
    budget = model.settings.memory_budget
    return available_memory(model.network.device) if budget is None else int(budget)
