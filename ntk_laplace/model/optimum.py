"""Descent of the negative log joint over all examples, in the network's present mode: deterministic L-BFGS.

The search runs in units of the prior, u = P0^½ (θ - μ0). There the Hessian is at least the identity, so ½‖∂/∂u‖² bounds
the Newton decrement ½ gᵀH⁻¹g from above, without a factorization.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ntk_laplace.errors import NonFiniteError
from ntk_laplace.model.data import Batches, Inputs, alike, concatenate, num_bytes, num_examples, take
from ntk_laplace.model.objective import Objective
from ntk_laplace.runtime import tuning

Batch = tuple[Inputs, Tensor, Tensor | None]

_RATE = 1e-3  # Adam's learning rate, where L-BFGS finds no decrease: steps of the weights themselves


class Held:
    """Batches of all examples with their weights, kept in memory if they are small; else every pass reads them again.

    Parameters
    ----------
    batches : Batches
        Read once, to count.

    Attributes
    ----------
    num_examples : int
        N.
    sum_of_weights : float or None
        Σ w_n; None without example weights.
    """

    def __init__(self, batches: Batches) -> None:
        self.batches, self.num_examples = batches, 0
        kept: list[Batch] = []
        size = 0
        for batch in self._read():
            self.num_examples += num_examples(batch[0])
            size += num_bytes(batch[0])
            if size <= tuning.HELD_BYTES:
                kept.append(batch)
        self._kept = kept if size <= tuning.HELD_BYTES else None
        self.sum_of_weights = None if batches.weights is None else float(batches.weights.sum())

    def __iter__(self) -> Iterator[Batch]:
        return self._read() if self._kept is None else iter(self._kept)

    def _read(self) -> Iterator[Batch]:
        seen = 0
        for x, y in self.batches:
            n, weights = num_examples(x), self.batches.weights
            yield x, y, None if weights is None else weights[seen : seen + n]
            seen += n

    def minibatches(self, size: int, generator: torch.Generator) -> Iterator[Batch]:
        """Minibatches of at most `size` examples, and no more than a batch has, in random order.

        The order is that of all examples, which may be sorted by their inputs or classes; where they are not in memory,
        or batches differ in shape, it is random within each batch.
        """
        kept = self._kept
        if kept is None or not all(alike(kept[0][:2], batch[:2]) for batch in kept):
            for batch in self:
                for index in torch.randperm(len(batch[1]), generator=generator, device="cpu").split(size):
                    yield _chosen(batch, index)
            return
        lengths = torch.tensor([len(y) for _, y, _ in kept], device="cpu")
        ends = lengths.cumsum(0)
        order = torch.randperm(self.num_examples, generator=generator, device="cpu")
        for index in order.split(min(size, int(lengths.max()))):
            number = torch.bucketize(index, ends, right=True)  # of the batch
            yield concatenate([_chosen(kept[one], (index + lengths[one] - ends[one])[number == one])
                               for one in number.unique().tolist()])


def _chosen(batch: Batch, index: Tensor) -> Batch:
    """The examples of a batch at `index`."""
    x, y, weights = batch
    index = index.to(y.device)
    return take(x, index), y[index], None if weights is None else weights[index]


class Annealing:
    """Minibatch steps of Adam, whole epochs in an order that is always the same, at a rate that falls to 0 as a cosine.

    Parameters
    ----------
    objective : Objective
        Its network moves; `settle` it before each part.
    data : Held
    rate : float
        Of the first step.
    steps : int
        In all parts together, at least.
    size : int
        Examples of a minibatch, at most.
    parts : int
        In how many calls of `advance` the steps are taken.
    """

    def __init__(
        self, objective: Objective, data: Held, rate: float, steps: int, size: int, parts: int = 1
    ) -> None:
        self._objective, self._data, self._rate, self._size = objective, data, rate, size
        self._optimizer = torch.optim.Adam(list(objective.parameters.values()))
        self._generator = torch.Generator().manual_seed(0)
        batches = sum(1 for _ in data.minibatches(size, self._generator))
        self._epochs = max(1, -(-steps // (parts * batches)))
        self._total, self._done = parts * self._epochs * batches, 0

    def advance(self) -> None:
        """Take the steps of one part."""
        for _ in range(self._epochs):
            for x, y, weights in self._data.minibatches(self._size, self._generator):
                share = self._done / self._total
                self._optimizer.param_groups[0]["lr"] = 0.5 * self._rate * (1.0 + math.cos(math.pi * share))
                self._objective.gradient(x, y, weights)
                self._optimizer.step()
                self._done += 1


class Descent:
    """A descent to an optimum of the log joint from the network's weights; call `advance` until it is enough.

    Parameters
    ----------
    objective : Objective
        Its network moves during the descent.
    data : Held
    steps : int
        Iterations that are allowed in all.

    Attributes
    ----------
    start, value : float
        Negative log joint at the beginning and at the best weights so far, nats.
    bound : float
        Upper bound of the Newton decrement at the best weights, nats per example.

    Raises
    ------
    NonFiniteError
        If the objective is not finite at the beginning.
    """

    def __init__(self, objective: Objective, data: Held, steps: int) -> None:
        self._objective, self._data = objective, data
        objective.settle()
        self._mean, self._scale = objective.units()
        fitting = tuning.LBFGS_BYTES // (2 * max(1, self._mean.nbytes))
        self._pairs = min(tuning.LBFGS_PAIRS, -(-steps // tuning.STEPS_A_PAIR), max(tuning.FEWEST_PAIRS, fitting))
        self._u = torch.nn.Parameter((objective.theta() - self._mean) / self._scale)
        self._best = self._u.detach().clone()
        self._known: tuple[Tensor, float, Tensor] | None = None
        self.value, self.bound = math.inf, math.inf
        self.start = self._evaluate()
        if not math.isfinite(self.value):
            raise NonFiniteError("a finite log joint at the network's weights", f"{self.start}",
                                 "Look at the data, or at diverged weights.")
        self._optimizer = self._lbfgs()

    def advance(self, iterations: int) -> bool:
        """Take iterations of L-BFGS; False if the objective falls no more than by rounding."""
        before = self.value
        self._optimizer.param_groups[0].update(max_iter=iterations, max_eval=4 * iterations)
        self._optimizer.step(lambda: torch.tensor(self._evaluate(), dtype=torch.float64, device="cpu"))
        return before - self.value > self.rounding

    def settle(self) -> None:
        """Put the best weights so far into the network."""
        self._objective.move_to(self._mean + self._scale * self._best)

    def anneal(self, steps: int, size: int) -> None:
        """Take at least `steps` minibatch steps of Adam, whole epochs, at a rate that falls to 0; start L-BFGS anew.

        Where outputs have kinks, a line search may find no decrease at weights that are no optimum. For many examples,
        minibatches save passes over all of them. The best weights so far stay if the end is no better.
        """
        self.settle()
        Annealing(self._objective, self._data, _RATE, steps, size).advance()
        self._u.data.copy_((self._objective.theta() - self._mean) / self._scale)
        self._evaluate()
        self._u.data.copy_(self._best)
        self._optimizer = self._lbfgs()

    def _lbfgs(self) -> torch.optim.LBFGS:
        return torch.optim.LBFGS([self._u], history_size=self._pairs, tolerance_grad=0.0, tolerance_change=0.0,
                                 line_search_fn="strong_wolfe")

    @property
    def rounding(self) -> float:
        """Differences of the objective's values that rounding alone may cause, nats."""
        eps = max(torch.finfo(p.dtype).eps for p in self._objective.parameters.values())
        return 4.0 * eps * (1.0 + abs(self.value))

    def _evaluate(self) -> float:
        """Negative log joint at u, whose gradient is set; L-BFGS asks again where a call ended and the next begins."""
        u = self._u.detach()
        if self._known is None or not torch.equal(u, self._known[0]):
            self._known = u.clone(), *self._evaluated(u)
        _, value, gradient = self._known
        self._u.grad = gradient.clone()
        return value

    def _evaluated(self, u: Tensor) -> tuple[float, Tensor]:
        self._objective.move_to(self._mean + self._scale * u)
        # the prior's part of the negative log joint is ½‖u‖²
        value = self._objective.likelihood_gradient(self._data) + 0.5 * float(u.square().sum())
        gradient = u + self._scale * self._objective.flat_gradient()
        if not (math.isfinite(value) and bool(gradient.isfinite().all())) and math.isfinite(self.value):
            away, height = u - self._best, 1.0 + abs(self.value)  # a finite wall turns the line search back
            return self.value + height, 2.0 * height * away / away.square().sum()
        if value < self.value:
            self.value, self._best = value, u.clone()
            self.bound = 0.5 * float(gradient.square().sum()) / self._objective.total
        return value, gradient
