"""Hessian roots S of batches, from their outputs, targets and example weights, during a pass over streaming data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ntk_laplace.curvature import Draws
from ntk_laplace.errors import DataError, TargetError
from ntk_laplace.model.data import RowBuffer, Source, num_examples
from ntk_laplace.model.likelihoods import DiagonalForm
from ntk_laplace.structures.data_passes import collected, read_batches
from ntk_laplace.structures.last_layer import has_form
from ntk_laplace.structures.model import LinearizedModel


@dataclass(frozen=True)
class BatchRoot:
    """Computes S of a batch from its outputs, times the square roots of the examples' counts."""

    roots: Roots
    targets: Tensor
    seen: int
    counts: Tensor | None
    columns: int

    def __call__(self, f: Tensor, part: slice) -> Tensor:
        """S of a part of the batch with outputs f (n, C), (n, C, R)."""
        root = self._once(f, part)
        return root if self.counts is None else root * self.counts[part].to(root).sqrt().view(-1, 1, 1)

    @property
    def has_form(self) -> bool:
        """Whether Λ has a `DiagonalForm`."""
        model = self.roots.model
        return self.roots.whole is None and has_form(model)

    def form(self, f: Tensor, part: slice) -> DiagonalForm:
        """Λ of a batch, times the examples' counts."""
        model, here = self.roots.model, self.roots.numbers(self.seen + part.start, len(f))
        likelihood = model.likelihood.at(here)
        found = model.curvature_type.diagonal_form(likelihood, f, self.targets[part].to(f.device))
        if found is None:
            raise ValueError("this likelihood has no diagonal form")
        return (found if self.counts is None else found.times(self.counts[part])).detach()

    def _once(self, f: Tensor, part: slice) -> Tensor:
        model, dtype = self.roots.model, self.roots.model.jacobian_pass.dtype
        here = self.roots.numbers(self.seen + part.start, len(f))
        if self.roots.whole is not None:
            return self.roots.whole[here]
        likelihood = model.likelihood.at(here)
        return model.curvature_type.root(likelihood, f.to(dtype), self.targets[part].to(f.device)).detach()


class Roots:
    """Computes the Hessian roots S, from each batch's outputs, or from all outputs at once if labels are sampled.

    Sampled labels must not depend on how the data are split into batches, so they need a first pass for all outputs.
    The roots are those of the batches of `rest`, which may be fewer.
    """

    def __init__(self, model: LinearizedModel, batches: Source, rest: Source, draws: Draws | None = None) -> None:
        self.model, self._batches = model, rest
        self.whole: Tensor | None = None
        reducer = model.settings.reducer
        alone = rest is batches and reducer.world_size == 1
        self._numbers = None if alone else rest.numbers(reducer)[0]
        self.columns = model.curvature_type.columns(model.likelihood, model.network.num_outputs)
        if model.curvature_type.kind == "mc":
            f, targets = RowBuffer(batches.length or 0), RowBuffer(batches.length or 0)
            for x, y in read_batches(model, batches, "outputs"):
                seen = len(f)
                f.append(model.network.without_grad(x, seen).to(model.jacobian_pass.dtype))
                targets.append(canonical_targets(model, y, num_examples(x), seen))
            every, labels = (collected(model, batches, own.rows) for own in (f, targets))
            self.whole = model.curvature_type.root(model.likelihood, every, labels, draws).detach()

    def at(self, targets: Tensor, seen: int, counts: Tensor | None) -> BatchRoot:
        """The roots of one batch."""
        return BatchRoot(self, targets, seen, counts, self.columns)

    def weights(self, seen: int, n: int) -> Tensor | None:
        """Example weights of one batch, which must have been read."""
        weights = self._batches.weights
        return None if weights is None else weights[seen : seen + n].to(self.model.network.device)

    def numbers(self, seen: int, n: int) -> Tensor:
        """Global numbers of n examples, of which the first is number `seen` of those that this process reads."""
        return torch.arange(seen, seen + n, device="cpu") if self._numbers is None else self._numbers[seen : seen + n]


def counts_of(model: LinearizedModel, targets: Tensor, weights: Tensor | None) -> Tensor | None:
    """How often each example of a batch counts, (n,): 0 without a target; None if each counts once."""
    observed = model.likelihood.observed(targets)
    if observed is None:
        return weights
    present = observed.reshape(len(targets), -1).any(1)
    return present.double() if weights is None else weights * present


def canonical_targets(model: LinearizedModel, y: Tensor, n: int, seen: int) -> Tensor:
    """Targets of a batch in canonical form; an error names the batch's position in the data."""
    try:
        targets = model.likelihood.targets(y, n, model.network.num_outputs)
    except DataError as error:
        if not seen:
            raise
        kind = type(error) if isinstance(error, TargetError) else DataError
        raise kind(error.expected, f"{error.got}, counted from example {seen:,} of the data, where its batch starts",
                   error.remedy) from error
    return targets.to(model.network.device)
