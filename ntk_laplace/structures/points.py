"""Training points: outputs, targets and weights; or the summary in a checkpoint without data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ntk_laplace.curvature import CurvatureType, Draws
from ntk_laplace.errors import DataError, NonFiniteError, UnsupportedError
from ntk_laplace.model.likelihoods import DiagonalForm, Likelihood
from ntk_laplace.model.likelihoods.targets import first_bad

BRANCH = "torch.where and nansum keep the NaN of a derivative that they do not take: replace its argument first."


def coarsest(*dtypes: torch.dtype) -> torch.dtype:
    """The floating type of the largest rounding."""
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def present_values(*modules: nn.Module) -> tuple[Tensor, ...]:
    """Copies of all hyperparameters of likelihoods and priors, to detect a later change."""
    return tuple(t.detach().clone() for module in modules for t in (*module.parameters(), *module.buffers()))


def unmoved(before: Sequence[Tensor], *modules: nn.Module) -> bool:
    """Whether the hyperparameters equal those of `before`."""
    now = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    return len(now) == len(before) and all(torch.equal(a, b.to(a)) for a, b in zip(now, before, strict=True))


@dataclass(frozen=True)
class TrainingPoints:
    """The stored training data: outputs, targets and weights, never the inputs.

    Attributes
    ----------
    f : Tensor, (N, C)
        Outputs at the trained weights.
    targets : Tensor
        In the likelihood's canonical form.
    weights : Tensor, (N,), optional
        How often each point counts in the log likelihood, its gradient and its curvature; once by default. A what-if
        may have changed them since the fit.
    expanded : Tensor, (N, C), optional
        Outputs at which the curvature is taken, if not `f`: those at the start of the last Newton step.
    rounded : torch.dtype, optional
        A coarser type that the outputs have been in, whose rounding they keep.
    drawn : Draws, optional
        Which points' labels are drawn together, of a curvature that draws them; those of all by default.
    """

    f: Tensor
    targets: Tensor
    weights: Tensor | None = None
    expanded: Tensor | None = None
    rounded: torch.dtype | None = None
    drawn: Draws | None = None

    @property
    def num_examples(self) -> int:
        """N."""
        return self.f.shape[0]

    @property
    def num_outputs(self) -> int:
        """C."""
        return self.f.shape[1]

    @property
    def precision(self) -> torch.dtype:
        """The floating type whose rounding the outputs have."""
        return self.f.dtype if self.rounded is None else self.rounded

    def log_likelihood(self, likelihood: Likelihood) -> Tensor:
        """Σ log p(y_n | f_n), nats. NonFiniteError if one of them is NaN."""
        each = self.log_prob(likelihood)
        bad = each.detach().isnan()
        if bad.any():
            raise NonFiniteError(f"log densities of {type(likelihood).__name__} that are numbers",
                                 f"NaN at example {first_bad(bad)}",
                                 "Look at its log_prob there; override `targets` to refuse what it cannot take.")
        return each.sum()

    def ordered(self, likelihood: Likelihood) -> float:
        """Σ (n/N) log p(y_n | f_n), which tells the same points in another order from these."""
        each = self.log_prob(likelihood).detach().double()
        return float(each @ torch.linspace(0, 1, len(each), dtype=each.dtype, device=each.device))

    def log_prob(self, likelihood: Likelihood) -> Tensor:
        """log p(y_n | f_n), (N,), times the weights."""
        return self.log_prob_at(likelihood, self.f)

    def log_prob_at(self, likelihood: Likelihood, f: Tensor) -> Tensor:
        """log p(y_n | f_n), (N,), times the weights, at other outputs f (N, C)."""
        return self._counted(likelihood.log_prob(f, self.targets))

    def residual(self, likelihood: Likelihood) -> Tensor:
        """r_n, (N, C), times the weights."""
        return self._times(_derivative("residual", likelihood, likelihood.residual(self.f, self.targets)))

    def log_prob_and_residual(self, likelihood: Likelihood) -> tuple[Tensor, Tensor]:
        """Both, (N,) and (N, C), times the weights."""
        values, residual = likelihood.log_prob_and_residual(self.f, self.targets)
        return self._counted(values), self._times(residual)

    def root(self, curvature_type: CurvatureType, likelihood: Likelihood) -> Tensor:
        """S_n, (N, C, R), times the square roots of the weights."""
        root = curvature_type.root(likelihood, self._at, self.targets, self.drawn)
        return self._times(_derivative("curvature", likelihood, root), 0.5)

    def left_inverse(self, curvature_type: CurvatureType, likelihood: Likelihood) -> Tensor | None:
        """L_n (N, R, C) with L_n S_n = I, if the range of Λ_n is constant in the hyperparameters; zero at zero weight.

        Where an example has no target, S_n is zero and L_n is arbitrary.
        """
        observed = likelihood.observed(self.targets)
        if observed is not None and observed.ndim > 1 and bool((observed.any(1) != observed.all(1)).any()):
            return None  # examples with partly missing targets have different roots
        found = curvature_type.left_inverse(likelihood, self._at)
        if found is None or self.weights is None:
            return found
        scale = torch.where(self.weights > 0, self.weights, torch.inf).to(found).rsqrt()
        return found * scale.view(-1, 1, 1)

    def curvature(self, curvature_type: CurvatureType, likelihood: Likelihood) -> Tensor:
        """Λ_n = S_n S_nᵀ, (N, C, C), differentiable in the likelihood's hyperparameters."""
        return self._times(curvature_type.curvature(likelihood, self._at, self.targets, self.drawn))

    def diagonal_form(self, curvature_type: CurvatureType, likelihood: Likelihood) -> DiagonalForm | None:
        """Λ_n in O(C) numbers, differentiable in the likelihood's hyperparameters; None if it has no such form."""
        form = curvature_type.diagonal_form(likelihood, self._at, self.targets)
        return form if form is None or self.weights is None else form.times(self.weights)

    @property
    def counts(self) -> Tensor:
        """The weights, (N,); ones if there are none."""
        return self.f.new_ones(len(self.f)) if self.weights is None else self.weights

    def same_data(self, other: TrainingPoints) -> bool:
        """Whether targets and weights are those of other points, whatever the outputs."""
        pairs = (self.targets, other.targets), (self.counts, other.counts)
        return all(a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all()) for a, b in pairs)

    def present(self, likelihood: Likelihood) -> Tensor | None:
        """Which points have any target, (N,); None if no target of any output is missing."""
        observed = likelihood.observed(self.targets)
        return None if observed is None else observed.reshape(len(self.f), -1).any(1)

    def observed_counts(self, likelihood: Likelihood) -> Tensor:
        """How often each point counts in the log likelihood, (N,): its weight, 0 where it has no target."""
        present = self.present(likelihood)
        return self.counts if present is None else self.counts * present

    def observed_outputs(self, likelihood: Likelihood) -> float:
        """Number of outputs in the log likelihood: Σ w_n C, less those whose targets are missing."""
        observed = likelihood.observed(self.targets)
        each = self.counts if observed is None else self.counts * observed.reshape(len(self.f), -1).to(self.f).mean(1)
        return float(each.sum()) * self.num_outputs

    def total(self, likelihood: Likelihood) -> float:
        """Number of examples in the log likelihood: Σ w_n over those with a target."""
        return float(self.observed_counts(likelihood).sum())

    def require_log_likelihood(self, likelihood: Likelihood, before: float, precision: torch.dtype) -> float:
        """Refuse points whose log likelihood is not that of a fit beyond the rounding of a network in this type.

        Returns the difference that rounding hides.

        Raises
        ------
        DataError
        """
        each = self.log_prob(likelihood).detach().double()
        value, rounding = float(each.sum()), float(each.abs().sum() + len(each)) * torch.finfo(precision).eps ** 0.5
        if not abs(value - before) <= rounding and value != before:
            raise DataError(f"the data of the fit, of log likelihood {before:.6g} nats at its weights",
                            f"data of {value:.6g} nats", "Pass the data that the posterior was fitted to.")
        return rounding

    def require_information(self, likelihood: Likelihood) -> None:
        """Refuse points that carry no information.

        Raises
        ------
        DataError
            If all targets are missing, or all weights are zero.
        """
        if self.total(likelihood) == 0:
            got = "weights that are all zero" if self.present(likelihood) is None else "none"
            raise DataError("at least one example with a target and a positive weight", got,
                            "Look at how missing targets are marked, and at the example weights.")

    @property
    def _at(self) -> Tensor:
        return self.f if self.expanded is None else self.expanded

    def _counted(self, values: Tensor) -> Tensor:
        if self.weights is not None:
            values = values.masked_fill(self.weights == 0, 0.0)  # a removed point may have log p = -inf: 0 x inf is NaN
        return self._times(values)

    def _times(self, values: Tensor, power: float = 1.0) -> Tensor:
        if self.weights is None:
            return values
        return values * self.weights.to(values).pow(power).view(-1, *[1] * (values.ndim - 1))

    def to(self, device: torch.device, dtype: torch.dtype) -> TrainingPoints:
        """The same points on another device and with another dtype; labels stay integers."""
        targets = self.targets.to(device, dtype if self.targets.is_floating_point() else self.targets.dtype)
        weights, expanded = (None if v is None else v.to(device, dtype) for v in (self.weights, self.expanded))
        return TrainingPoints(self.f.to(device, dtype), targets, weights, expanded, coarsest(self.precision, dtype),
                              self.drawn)

    def subset(self, index: slice | Tensor) -> TrainingPoints:
        """Some of the points."""
        weights, expanded = (None if v is None else v[index] for v in (self.weights, self.expanded))
        drawn = None if self.drawn is None else _of_some(self.drawn, index)
        return TrainingPoints(self.f[index], self.targets[index], weights, expanded, self.rounded, drawn)

    def joined(self, likelihood: Likelihood, other: TrainingPoints) -> TrainingPoints:
        """Points of both data sets."""
        f = torch.cat([self.f, other.f])
        likelihood.bind(*f.shape)
        both = (self, other)
        weights = None if all(p.weights is None for p in both) else torch.cat([p.counts for p in both])
        expanded = None if all(p.expanded is None for p in both) else torch.cat([p._at for p in both])
        pairs = ((self.targets, other.targets), (other.targets, self.targets))
        targets = torch.cat([likelihood.in_form_of(*pair) for pair in pairs])
        drawn = self.drawn_after(0) + other.drawn_after(0)  # as their sums were made
        return TrainingPoints(f, targets, weights, expanded, coarsest(self.precision, other.precision), drawn)

    def drawn_after(self, count: int) -> Draws:
        """`drawn` of these points where `count` others come before them, as in `CurvatureType.after`."""
        draws = ((0, self.num_examples),) if self.drawn is None else self.drawn
        return tuple((after + count, own) for after, own in draws)

    def record(self, likelihood: Likelihood, include_data: bool) -> dict[str, Any]:
        """Plain containers of tensors: number and log likelihood, and with `include_data` the points themselves."""
        data = {"f": self.f, "targets": self.targets, "weights": self.weights} if include_data else {}
        return _summary(self, likelihood) | {"ordered": self.ordered(likelihood)} | data

    @classmethod
    def checked(
        cls, likelihood: Likelihood, f: Tensor, targets: Tensor, weights: Tensor | None = None
    ) -> TrainingPoints:
        """Points from given targets and example weights, validated against the outputs and the likelihood.

        Raises
        ------
        TargetError, NonFiniteError, HyperparameterError
            If they do not match.
        """
        likelihood.bind(*f.shape)
        return cls(f, likelihood.targets(targets, *f.shape).to(f.device), None if weights is None else weights.to(f))


class UnsavedPoints(TrainingPoints):
    """Summary of the training points in a checkpoint without data: their number and log likelihood.

    Everything that needs outputs or targets raises an `UnsupportedError`.

    Parameters
    ----------
    num_examples, num_outputs : int
    value : Tensor, ()
        Σ log p(y_n | f_n) at the checkpoint's hyperparameters.
    hyperparameters : tuple of Tensor
        The checkpoint's hyperparameters of the likelihood.
    precision : torch.dtype
        The floating type whose rounding the outputs had.
    size : float, optional
        Σ w_n over the examples with a target; by default N.
    drawn : Draws, optional
        As of the points.
    """

    def __init__(
        self, num_examples: int, num_outputs: int, value: Tensor, hyperparameters: tuple[Tensor, ...],
        precision: torch.dtype, size: float | None = None, drawn: Draws | None = None,
    ) -> None:
        self._sizes: tuple[int, int]
        self._value: Tensor
        self._hyperparameters: tuple[Tensor, ...]
        self._total: float | None
        # the base class is frozen
        vars(self).update(_sizes=(num_examples, num_outputs), _value=value, _hyperparameters=hyperparameters,
                          _total=size, rounded=precision, drawn=drawn)

    def __repr__(self) -> str:
        return f"UnsavedPoints(num_examples={self.num_examples}, num_outputs={self.num_outputs})"

    @property
    def precision(self) -> torch.dtype:
        return self._value.dtype if self.rounded is None else self.rounded

    @property
    def num_examples(self) -> int:
        return self._sizes[0]

    @property
    def num_outputs(self) -> int:
        return self._sizes[1]

    @property
    def f(self) -> Tensor:
        """Refused: not in the checkpoint."""
        raise _not_saved("the outputs at the training points")

    @property
    def targets(self) -> Tensor:
        """Refused: not in the checkpoint."""
        raise _not_saved("the training targets")

    def log_likelihood(self, likelihood: Likelihood) -> Tensor:
        """Σ log p(y_n | f_n), if the likelihood's hyperparameters are the checkpoint's."""
        if not unmoved(self._hyperparameters, likelihood):
            raise _not_saved("the evidence at other hyperparameters of the likelihood")
        return self._value

    @property
    def counts(self) -> Tensor:
        """Ones, (N,); refused if the fit had example weights."""
        if self._total not in (None, self.num_examples):
            raise _not_saved("the weights of the training points")
        return self._value.new_ones(self.num_examples)

    def total(self, likelihood: Likelihood) -> float:
        return float(self.num_examples) if self._total is None else self._total

    def residual(self, likelihood: Likelihood) -> Tensor:
        """Refused: not in the checkpoint."""
        raise _not_saved("the residuals at the training points")

    def root(self, curvature_type: CurvatureType, likelihood: Likelihood) -> Tensor:
        """Refused: not in the checkpoint."""
        raise _not_saved("the curvature at the training points")

    def curvature(self, curvature_type: CurvatureType, likelihood: Likelihood) -> Tensor:
        """Empty: the evidence is constant in the likelihood's hyperparameters."""
        return self._value.new_zeros(0)

    def diagonal_form(self, curvature_type: CurvatureType, likelihood: Likelihood) -> DiagonalForm | None:
        """None: `curvature` is empty."""
        return None

    def subset(self, index: slice | Tensor) -> TrainingPoints:
        """Refused: not in the checkpoint."""
        raise _not_saved("some of the training points")

    def joined(self, likelihood: Likelihood, other: TrainingPoints) -> TrainingPoints:
        """Refused: not in the checkpoint."""
        raise _not_saved("the training points together with others")

    def to(self, device: torch.device, dtype: torch.dtype) -> UnsavedPoints:
        """The same on another device, with another dtype."""
        moved = tuple(value.to(device) for value in self._hyperparameters)
        precision = coarsest(self.precision, dtype)
        return UnsavedPoints(*self._sizes, self._value.to(device), moved, precision, self._total, self.drawn)

    def record(self, likelihood: Likelihood, include_data: bool) -> dict[str, Any]:
        """Number and log likelihood, as in the checkpoint; there are no data to include."""
        return _summary(self, likelihood)


def _summary(points: TrainingPoints | UnsavedPoints, likelihood: Likelihood) -> dict[str, Any]:
    value = points.log_likelihood(likelihood).detach()
    return {"num_examples": points.num_examples, "log_likelihood": value, "total": points.total(likelihood),
            "precision": points.precision, "drawn": points.drawn}


def _derivative(what: str, likelihood: Likelihood, values: Tensor) -> Tensor:
    """A derivative of log densities, with a row per example; NonFiniteError if it is not finite."""
    bad = ~values.detach().isfinite()
    if bad.any():
        raise NonFiniteError(f"a finite {what} of {type(likelihood).__name__}",
                             f"NaN or infinity at example {first_bad(bad)}",
                             f"Look at its log_prob there. {BRANCH}")
    return values


def _of_some(draws: Draws, index: slice | Tensor) -> Draws:
    """The draws of some of the points."""
    counts = torch.tensor([count for _, count in draws], device="cpu")
    number = torch.arange(len(draws), device="cpu").repeat_interleave(counts)
    kept, sizes = torch.unique_consecutive(number[index if isinstance(index, slice) else index.cpu()],
                                           return_counts=True)
    return tuple((draws[own][0], size) for own, size in zip(kept.tolist(), sizes.tolist(), strict=True))


def _not_saved(what: str) -> UnsupportedError:
    return UnsupportedError(f"training data, for {what}", "a checkpoint without them",
                            "Load it with ntk_laplace.load(path, network, data=...). With include_data=True, save "
                            "keeps outputs and targets, but no inputs for another pass.")
