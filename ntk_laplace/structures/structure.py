"""Interfaces of a structure: its specification, with declared capabilities, and what a fit keeps of the data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ntk_laplace.curvature import ParameterBlock, PosteriorPrecision
from ntk_laplace.errors import UnsupportedError
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.model.data import Inputs, Source, fill_buffer
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.structures.forecast import Forecast, Problem
from ntk_laplace.structures.model import LinearizedModel
from ntk_laplace.structures.points import TrainingPoints


@dataclass(frozen=True)
class Saved:
    """What a checkpoint gives a structure to restore itself from.

    Attributes
    ----------
    state : mapping
        What `Structure.state` returned.
    points : TrainingPoints
    source : Source
        The training data, if they were passed to `load`.
    """

    state: Mapping[str, Any]
    points: TrainingPoints
    source: Source


class StructureSpec(ABC):
    """Specification of a structure: which posterior precision is computed, with which options and capabilities.

    `structure=` of `laplace` takes an object of this class, or the name of a registered one (`register_structure`).
    A subclass is a frozen dataclass whose fields are the options. To sum over the data, derive from `SummedSpec`.

    Attributes
    ----------
    name : str
        Name for `structure=`, tables and checkpoints.
    exact : bool
        Whether H = P0 + JᵀΛJ for the Λ of the curvature type. Exact structures support the evidence with bounds,
        leave-one-out scores, refits and what-ifs of many Newton steps.
    keeps_jacobian : bool
        Whether the fit keeps the rows of J of all training points, as a `FunctionSpacePrecision` over them.
    factored_rows : bool
        Whether the fit reads rows of J as products of layer inputs and output gradients.
    resumable : bool
        Whether an interrupted fit can be resumed, and written to `Settings.checkpoint`.
    scales : bool
        Whether multiplying Λ by c multiplies by c what is summed over the data, and H - P0.
    laplace : bool
        Whether H is the Laplace approximation's at the weights, exact or approximate. If it is that of another
        Gaussian, everything that follows from the curvature of the data is refused; see `require_laplace`.
    offered : bool
        Whether `structure=` takes its name, and tables list it.
    """

    name: ClassVar[str]
    exact: ClassVar[bool] = False
    keeps_jacobian: ClassVar[bool] = False
    factored_rows: ClassVar[bool] = False
    resumable: ClassVar[bool] = False
    scales: ClassVar[bool] = True
    laplace: ClassVar[bool] = True
    offered: ClassVar[bool] = True

    @abstractmethod
    def fit(self, model: LinearizedModel, source: Source) -> Structure:
        """Fit to the data, in one or more passes."""

    @abstractmethod
    def restored(self, model: LinearizedModel, saved: Saved) -> Structure:
        """The structure that `Structure.state` saved."""

    def check(self, prior: GaussianPrior) -> None:  # noqa: B027 - most structures support every prior
        """Raise an error for a prior that the structure does not support."""

    def prepare(self, model: LinearizedModel, x: Inputs, source: Source) -> None:  # noqa: B027
        """Called before the first pass with the first batch of inputs, for example to choose the batch size."""

    def require_memory(self, model: LinearizedModel, n: int, first: Structure) -> None:  # noqa: B027
        """Raise MemoryBudgetError if a fit to n examples would not fit in memory; `first` is a fit to a few."""

    def forecast(self, problem: Problem) -> Forecast | None:
        """Memory and work of a fit, before anything large is allocated; None if they are not known.

        The fit is refused where `Forecast.required` does not fit in memory, and `plan` says the same.
        """
        return None

    def options(self) -> dict[str, Any]:
        """The fields that determine the structure, for checkpoints and messages."""
        return dict(vars(self))

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options().items())
        return f"{type(self).__name__}({options})"


T = TypeVar("T")


class Structure(ABC):
    """What a fit keeps of the training data, and how the posterior precision follows from it.

    Attributes
    ----------
    spec : StructureSpec
    points : TrainingPoints
        Outputs, targets and weights of the training points.
    base : TrainingPoints or None
        The points the network was trained on, if a what-if has changed them since.
    """

    spec: StructureSpec
    points: TrainingPoints
    base: TrainingPoints | None = None

    @property
    def name(self) -> str:
        """The name that `structure=` takes."""
        return self.spec.name

    @property
    def parameter_blocks(self) -> Sequence[ParameterBlock]:
        """Which parameters share a factorization, and of which kind; none by default."""
        return ()

    # --- abstract

    @abstractmethod
    def posterior_precision(self, model: LinearizedModel) -> PosteriorPrecision:
        """The factorized posterior precision at the current hyperparameters."""

    @abstractmethod
    def vjp(self, model: LinearizedModel, residual: Tensor) -> Tensor:
        """Jᵀr over the training points, (P,)."""

    @abstractmethod
    def jvp(self, model: LinearizedModel, vector: Tensor) -> Tensor:
        """J v at the training points, (N, C)."""

    @abstractmethod
    def rows_at(self, model: LinearizedModel, index: Tensor) -> Iterator[Jacobian]:
        """Rows of J at some of the points, ascending, in batches: those that this process reads."""

    @abstractmethod
    def subset(self, model: LinearizedModel, index: Tensor) -> Structure:
        """The structure of some of the points, ascending; `model` is the model of those."""

    @abstractmethod
    def merged(self, model: LinearizedModel, other: Structure) -> Structure:
        """The structure fitted to the union of both data sets."""

    @abstractmethod
    def state(self, model: LinearizedModel, include_data: bool) -> dict[str, Any]:
        """Plain containers of tensors and numbers from which `StructureSpec.restored` restores the structure."""

    @abstractmethod
    def to(self, device: torch.device, dtype: torch.dtype) -> Structure:
        """The structure with all tensors on another device, with another dtype."""

    # --- defaults

    def read_at(self, model: LinearizedModel, index: Tensor) -> Source | None:
        """What `rows_at` reads, of which each process has a share; None if every process has all rows."""
        return None

    @property
    def source(self) -> Source | None:
        """The training data, for another pass; None if the structure does not need and keep them."""
        return None

    @property
    def trained_points(self) -> TrainingPoints:
        """The points the network was trained on, before any what-if."""
        return self.points if self.base is None else self.base

    @property
    def points_to_change(self) -> TrainingPoints:
        """The points that a what-if changes, outputs at the start of its first step."""
        return self.points

    def sensitivity(self, model: LinearizedModel, precision: PosteriorPrecision) -> Tensor:
        """∂ log det B/∂Λ_n, (N, C, C): V_nn if the structure is exact.

        Raises
        ------
        UnsupportedError
            If the structure is an approximation that does not define it.
        """
        if not self.spec.exact:
            raise self._no_gradient()
        return self.training_covariances(model, precision)

    def training_covariances(self, model: LinearizedModel, precision: PosteriorPrecision) -> Tensor:
        """V_nn at the training points, (N, C, C)."""
        everything = torch.arange(self.points.num_examples, device="cpu")
        parts = (precision.covariance_blocks(rows) for rows in self.rows_at(model, everything))
        return fill_buffer(parts, self.points.num_examples).rows

    def curve_sensitivity(self, model: LinearizedModel, precision: PosteriorPrecision, z: Tensor) -> Tensor:
        """∂ zᵀHz/∂Λ_n of an approximation with z fixed, (N, C, C); refused by default, as in `sensitivity`."""
        raise self._no_gradient()

    def basis(self, model: LinearizedModel) -> Any:
        """Eigenbases for another fit, a `BlockBasis`; refused by structures without Kronecker factors."""
        raise no_basis(repr(self.name))

    def _no_gradient(self) -> UnsupportedError:
        return UnsupportedError("a structure with the evidence's gradient in the likelihood's hyperparameters",
                                f"structure={self.name!r}", 'Move "precision" alone, use an exact structure, or switch '
                                "the other gradient off, posterior.likelihood.requires_grad_(False).")

    def refit_on(self, model: LinearizedModel, source: Source) -> Structure:
        """The same kind of structure fitted to other data, so that the two can be merged."""
        return self.spec.fit(model, source)

    def changed(self, model: LinearizedModel, points: TrainingPoints, added: Structure | None = None) -> Structure:
        """The structure of changed points, those of `added` last; `base` keeps the training points.

        Raises
        ------
        UnsupportedError
            If the structure is an approximation.
        """
        raise UnsupportedError("an exact structure, whose curvature follows any change of its points",
                               f"structure={self.name!r}", 'Fit with structure="gp", "full" or "iterative".')

    def solve_at(self, model: LinearizedModel, points: TrainingPoints, gradient: Tensor) -> Tensor:
        """H⁻¹g, (P,), with the curvature of `points`."""
        return self.changed(model, points).posterior_precision(model).solve(gradient)

    def _merged_base(self, model: LinearizedModel, other: Structure) -> TrainingPoints | None:
        """Base after new points were added: conditioning never moves the weights, also after a what-if."""
        if self.base is None:
            return None
        added = self.points.subset(slice(self.base.num_examples, None))
        added = replace(added, weights=added.f.new_zeros(len(added.f)))  # added points: no training residual
        return self.base.joined(model.likelihood, added).joined(model.likelihood, other.points)

    def _base_at(self, index: Tensor) -> TrainingPoints | None:
        """Base of some points. Points that were added come last and have none."""
        return None if self.base is None else self.base.subset(index[index < self.base.num_examples])


def of_kind(kind: type[T], part: object) -> T:
    """The given structure or precision, which has to be of the class `kind`.

    Raises
    ------
    UnsupportedError
        If it is of another class.
    """
    if not isinstance(part, kind):
        raise UnsupportedError(f"a {kind.__name__}", f"a {type(part).__name__}", "Fit both with the same structure.")
    return part


def require_laplace(spec: StructureSpec, what: str) -> None:
    """Refuse what needs the Laplace approximation's precision, H = P0 + JᵀΛJ at the weights or an approximation of it.

    Raises
    ------
    UnsupportedError
        If the structure's H is another.
    """
    if not spec.laplace:
        raise UnsupportedError(
            f"a Laplace posterior, whose precision is the curvature at its weights, for {what}",
            f"structure={spec.name!r}, a Gaussian found elsewhere",
            "Its evidence is bounded by elbo() and estimated by importance_evidence(); fit laplace(...) for the rest.",
        )


def no_basis(got: str) -> UnsupportedError:
    """The error of a `basis=` that has no eigenbases."""
    return UnsupportedError('basis= a posterior with structure "kfac", "ekfac" or "inf"', got,
                            "Fit KFAC first, to all data or to any part of them.")


def require_one_process(model: LinearizedModel) -> None:
    """Refuse what needs all rows of J, or computes from a process's own in passes of all (UnsupportedError)."""
    model.settings.reducer.require_one(
        "rows of J at chosen training points, which this method needs",
        'Fit with structure="gp", which collects all rows on every process, or save and load on one process.')


def require_unchanged(model: LinearizedModel, structure: Structure) -> None:
    """Refuse to save the result of a what-if. A refit of the same data is none, nor is a Gaussian found elsewhere.

    Raises
    ------
    UnsupportedError
        If the data were changed, or if the network was relinearized after a what-if.
    """
    base = structure.base
    refitted = model.refitted or not structure.spec.laplace
    same = base is None or (refitted and structure.points.same_data(base))
    if not same or model.training_gradient is not None:
        raise UnsupportedError("a posterior of the data it was fitted to, to save", "one that a what-if changed",
                               "Save the original, and ask what if again after loading it.")
