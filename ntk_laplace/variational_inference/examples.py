"""The training data as steps of variational inference read them: all examples, or a random minibatch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.errors import DataError, UnsupportedError
from ntk_laplace.jacobian import Jacobian, placed
from ntk_laplace.model.data import Batches, Inputs, num_bytes, num_examples, take
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.resources import format_bytes
from ntk_laplace.structures import LinearizedModel
from ntk_laplace.structures.batch_merging import merged_batches
from ntk_laplace.structures.data_passes import digest
from ntk_laplace.structures.points import TrainingPoints


@dataclass(frozen=True)
class Part:
    """Some training examples of one step, with their canonical targets, weights (n,) and likelihood."""

    x: Inputs
    y: Tensor
    weights: Tensor | None
    likelihood: Likelihood
    scale: float = 1.0  # how often each of them counts for the others: N/b in a minibatch of b
    offset: int = 0  # number of the first, for messages

    def linearized(
        self, model: LinearizedModel, theta: Tensor | None
    ) -> Iterator[tuple[Jacobian, TrainingPoints, Likelihood]]:
        """Rows of J at θ with the outputs and the likelihood of their examples, in batches."""
        batches = model.jacobian_pass.batches(self.x, None, model.settings.batch_size, self.offset, theta=theta)
        for here, rows in placed(batches):
            weights = None if self.weights is None else self.weights[here].to(rows.f)
            yield rows, TrainingPoints(rows.f, self.y[here], weights), self.likelihood.at(here)


class Examples:
    """All training examples, to which the likelihood of the model is bound.

    The batches are read once here, and kept in memory if they are not large; else they are read again in every step.
    With a batch size b a step takes a minibatch of so many examples, in a random order that is drawn anew when all were
    read. UnsupportedError if the data are then not kept in memory.
    """

    def __init__(self, model: LinearizedModel, batches: Batches, batch_size: int | None) -> None:
        self._model, self._batches = model, batches
        kept: list[tuple[Inputs, Tensor]] = []
        size, self.num_examples, labels = 0, 0, list[Tensor]()
        for x, y in merged_batches(batches, model.network):
            if not model.network.evaluated:
                model.jacobian_pass.prepare(x)
            # refused here rather than in a step
            labels.append(model.likelihood.targets(y, num_examples(x), model.network.num_outputs).flatten().cpu())
            self.num_examples += num_examples(x)
            size += num_bytes(x)
            kept.append((x, y))
            if size > tuning.HELD_BYTES:
                kept.clear()
        self._kept = kept if size <= tuning.HELD_BYTES else None
        self._weights = batches.weights
        # whatever their order is: a loader may shuffle
        seen = [torch.cat(labels), *([] if self._weights is None else [self._weights.cpu()])]
        self.fingerprint = digest(*(values.sort().values for values in seen))
        model.likelihood.bind(self.num_examples, model.network.num_outputs)
        self.batch_size = None if batch_size is None or batch_size >= self.num_examples else batch_size
        if self.batch_size is not None and self._kept is None:
            raise UnsupportedError(f"data of at most {format_bytes(tuning.HELD_BYTES)} for minibatches",
                                   format_bytes(size), "Leave batch_size= out: every step then reads all examples.")
        self._order, self._position = torch.empty(0, dtype=torch.long, device="cpu"), 0
        if float(self.total) == 0:
            raise DataError("at least one example with a positive weight", "weights that are all zero",
                            "Look at the example weights.")

    @property
    def total(self) -> float:
        """N, or the sum of the example weights."""
        return self.num_examples if self._weights is None else float(self._weights.sum())

    @property
    def per_step(self) -> int:
        """Examples of a step."""
        return self.batch_size or self.num_examples

    @property
    def steps_per_epoch(self) -> int:
        """Steps that read all examples once."""
        return math.ceil(self.num_examples / self.per_step)

    def all(self) -> Iterator[Part]:
        """All examples, in their order."""
        seen = 0
        for x, y in merged_batches(self._batches, self._model.network) if self._kept is None else self._kept:
            yield self._part(x, y, torch.arange(seen, seen + num_examples(x), device="cpu"))
            seen += num_examples(x)

    def next(self, generator: torch.Generator) -> Iterator[Part]:
        """The examples of the next step; minibatches of one order differ by at most one example in size."""
        if self.batch_size is None:
            yield from self.all()
            return
        assert self._kept is not None
        if self._position == self.steps_per_epoch or not len(self._order):
            device = generator.device
            self._order, self._position = torch.randperm(self.num_examples, generator=generator, device=device).cpu(), 0
        chosen = self._order.tensor_split(self.steps_per_epoch)[self._position].sort().values
        self._position += 1
        seen = 0
        for x, y in self._kept:
            own = chosen[(chosen >= seen) & (chosen < seen + num_examples(x))]
            if len(own):
                here = (own - seen).to(y.device)
                yield self._part(take(x, here), y[here], own, self.num_examples / len(chosen))
            seen += num_examples(x)

    def _part(self, x: Inputs, y: Tensor, numbers: Tensor, scale: float = 1.0) -> Part:
        model = self._model
        y = model.likelihood.targets(y, len(numbers), model.network.num_outputs)
        weights = None if self._weights is None else self._weights[numbers.to(self._weights.device)]
        return Part(x, y.to(model.network.device), weights, model.likelihood.at(numbers), scale, int(numbers[0]))

    def record(self) -> dict[str, Any]:
        """The order of the minibatches, and the position in it."""
        return {"order": self._order.clone(), "position": self._position}

    def restore(self, record: Mapping[str, Any]) -> None:
        """Continue from there."""
        self._order, self._position = record["order"].cpu(), int(record["position"])
