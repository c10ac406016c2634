"""What the hyperparameter steps of a training maximize: a posterior's evidence, or a lower bound from some examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ntk_laplace.errors import HyperparameterError, MemoryBudgetError, UnsupportedError, require_choice, require_whole
from ntk_laplace.jacobian import JacobianPass
from ntk_laplace.model.data import Batches, Inputs, Selected
from ntk_laplace.posterior import Posterior
from ntk_laplace.posterior.hyperparameters import Evidence
from ntk_laplace.runtime.scalars import scalar
from ntk_laplace.structures import Auto, LinearizedModel
from ntk_laplace.structures.data_passes import read_points
from ntk_laplace.structures.forecast import Problem
from ntk_laplace.structures.points import TrainingPoints
from ntk_laplace.training.model import Model


@dataclass(frozen=True)
class Evaluation:
    """An evidence as a function of the hyperparameters, at the present weights."""

    evidence: Evidence
    posterior: Posterior | None  # that of all examples with the training's structure, if it was fitted
    examples: int | None  # M, the number of examples in the log determinant; None for all, at every evaluation


class StepEvidence:
    """The evidence of the posterior itself, with its structure, from all examples, at fixed weights."""

    words: str = "posterior"  # what a resumed training must share with the interrupted one
    most: int = 0  # the most examples that an evaluation may read; 0 if every evaluation reads all

    def require_memory(self, model: LinearizedModel, x: Inputs) -> None:
        """Refuse, before the training, an evaluation that would not fit in memory beside the posterior (of few `x`)."""

    def at(self, model: Model, left: int, quietly: bool) -> Evaluation:
        """The evidence at the present weights, as a function of the hyperparameters; `left` evaluations follow."""
        posterior = model.posterior(quietly)
        return Evaluation(posterior, posterior, None)


class SubsetEvidence(StepEvidence):
    """The lower bound from M examples that are drawn anew for each evaluation ([I23] theorem 2), M growing at the end.

    log joint - ½ (N/M) log det B_M: the log joint is that of all examples, and B_M that of the exact posterior of M
    of them. The last tenth of the evaluations, and at least two, read all N examples: their evidence is exact. In those
    before, M is halved from one to the one before it, down to `examples`. A grown M that does not fit in memory is
    halved until it does. N is `total`, and `batches` returns the data of the evidence, for one pass.
    """

    def __init__(
        self, examples: int, total: int, epochs: int, evaluations: int, batches: Callable[[], Batches]
    ) -> None:
        self.examples, self.total, self.batches = min(examples, total), total, batches
        self.most, self.whole = total, max(2, -(-evaluations // 10))
        self.words = f"subset of {self.examples:,} examples, growing over {epochs} epochs"

    def require_memory(self, model: LinearizedModel, x: Inputs) -> None:
        """Refuse a first M that does not fit in memory (MemoryBudgetError)."""
        jacobian_pass = JacobianPass(model.network, model.jacobian_pass.dtype, budget=model.settings.memory_budget)
        plain = replace(model, jacobian_pass=jacobian_pass)
        try:
            Auto(None, None).require_memory(Problem(plain, self.examples, plain.jacobian_pass.rows(x)))
        except MemoryBudgetError as error:
            raise _too_many(self.examples, error) from error

    def at(self, model: Model, left: int, quietly: bool) -> Evaluation:
        """Fit the cheaper exact structure to M examples, and read the outputs at all of them.

        MemoryBudgetError if the first M does not fit in memory.
        """
        while True:
            m = min(self.most, max(self.examples, self.total >> max(0, left + 1 - self.whole)))
            try:
                if m == self.total and model.exact() is model:
                    return replace(super().at(model, left, quietly), examples=m)
                part = replace(model, data=self._drawn(m), structure="auto").posterior(quietly)
            except MemoryBudgetError as error:
                if m == self.examples:
                    raise _too_many(m, error) from error
                self.most = max(self.examples, m // 2)
            else:
                bound = _Bound(part, read_points(part.fitted.model, self.batches()), self.total / m)
                return Evaluation(bound, None, m)

    def _drawn(self, m: int) -> DataLoader:
        """M examples by torch's global random state, in batches as they are read."""
        keep = torch.zeros(self.total, dtype=torch.bool, device="cpu")
        keep[torch.randperm(self.total, device="cpu")[:m]] = True
        chosen = Selected(self.batches(), keep)
        batches: list[Any] = list(chosen)
        if chosen.weights is not None:
            weights = chosen.weights.split([len(y) for _, y in batches])
            batches = [(x, y, w) for (x, y), w in zip(batches, weights, strict=True)]
        return DataLoader(_Batches(batches), batch_size=None, collate_fn=lambda batch: batch)


def _too_many(examples: int, error: MemoryBudgetError) -> MemoryBudgetError:
    return MemoryBudgetError(f"an evidence of {examples:,} examples that fits in memory", f"{error}",
                             "Pass a smaller examples=.")


class _Bound:
    """The bound as a function of the hyperparameters, with the interface of a posterior that `Ascent` uses.

    The part is the posterior of M examples, the points are those of all, and the factor is N/M.
    """

    def __init__(self, part: Posterior, points: TrainingPoints, factor: float) -> None:
        self.part, self.points, self.factor = part, points, factor
        self.prior, self.likelihood, self.fitted, self.dtype = part.prior, part.likelihood, part.fitted, part.dtype
        self.f, self.targets, self.weights = points.f, points.targets, points.counts

    def log_likelihood(self) -> Tensor:
        """Σ log p(y_n given f_n) of all examples."""
        return scalar(self.points.log_likelihood(self.likelihood))

    def log_scale(self) -> Tensor | None:
        """As of the part."""
        return self.part.log_scale()

    def log_det_terms(self) -> None:
        """None: a step takes a factorization of the M examples."""

    def local_log_det(self) -> None:
        """None: the bound of a draw is no estimate."""

    def effective_parameters(self) -> Tensor:
        """N/M γ_g of the part."""
        return self.factor * self.part.effective_parameters()

    def log_marginal_likelihood(self, correction: bool = False) -> Tensor:
        """Log joint - ½ (N/M) log det B_M, differentiable in the hyperparameters.

        UnsupportedError with a correction.
        """
        if correction:
            raise UnsupportedError("a bound without correction", "correction=True", "Leave it out.")
        fit = self.log_likelihood()
        log_prior = -self.prior.energy(self.fitted.theta)
        return fit + log_prior.to(fit) - 0.5 * self.factor * self.part.log_det().to(fit)


class _Batches(IterableDataset):
    """Batches in memory; without a length, which is that of batches and not of examples."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def step_evidence(
    evidence: str, examples: int | None, total: int, epochs: int, evaluations: int, batches: Callable[[], Batches]
) -> StepEvidence:
    """The strategy that the arguments of `train_with_evidence` name.

    UnsupportedError if there is none of this name. HyperparameterError if `examples` is missing, is not a whole number,
    or has no use.
    """
    require_choice(evidence, ("posterior", "subset"), 'evidence="posterior" or "subset"')
    remedy = 'Pass for example evidence="subset", examples=500.'
    if evidence == "subset":
        return SubsetEvidence(require_whole("examples", examples, 1, remedy), total, epochs, evaluations, batches)
    if examples is not None:
        raise HyperparameterError('examples= with evidence="subset" only', f"examples={examples!r}", remedy)
    return StepEvidence()
