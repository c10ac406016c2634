"""The fitted model: a linearized model together with the structure fitted to its training data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from ntk_laplace.curvature import (
    CurvatureType,
    FullPrecision,
    FunctionSpacePrecision,
    LastLayerPrecision,
    PosteriorPrecision,
    accumulate_ggn,
)
from ntk_laplace.errors import DataError, UnsupportedError, warn
from ntk_laplace.jacobian import Jacobian, placed
from ntk_laplace.model.data import Batches
from ntk_laplace.model.likelihoods import DiagonalForm, Likelihood
from ntk_laplace.model.network import Network
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.panels import panels
from ntk_laplace.runtime.reduction import Reducer, SingleProcess
from ntk_laplace.runtime.threads import ReadersAndWriters
from ntk_laplace.structures.data_passes import collected, collected_jacobian
from ntk_laplace.structures.likelihood_checks import require_consistent
from ntk_laplace.structures.model import LinearizedModel, Settings
from ntk_laplace.structures.points import TrainingPoints, present_values, unmoved
from ntk_laplace.structures.structure import Structure, StructureSpec, require_laplace, require_one_process

T = TypeVar("T")


@dataclass
class _Cached:
    """A factorization, with the hyperparameters it belongs to, and what was made of it."""

    precision: PosteriorPrecision | None = None
    at: tuple[Tensor, ...] = ()
    made: dict[str, Any] = field(default_factory=dict)
    threads: ReadersAndWriters = field(default_factory=ReadersAndWriters)


@dataclass(frozen=True)
class FittedModel:
    """Everything that a method of a posterior computes from.

    Attributes
    ----------
    model : LinearizedModel
    structure : Structure
        Fitted to the training data of the model.
    """

    model: LinearizedModel
    structure: Structure
    _cached: _Cached = field(default_factory=_Cached, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, model: LinearizedModel, spec: StructureSpec, batches: Batches) -> FittedModel:
        """Fit a structure to data, check likelihood and data against each other, and factorize: errors appear here."""
        spec.prepare(model, batches.first()[0], batches)
        found = spec.fit(model, batches)
        if batches.shuffled and model.likelihood.at(slice(0, 1)) is not model.likelihood:
            raise DataError("data in a known order, to give each training point its noise",
                            "a DataLoader that shuffles", "Fit with shuffle=False, or with the data set itself.")
        found.points.require_information(model.likelihood)
        require_consistent(found.points, model.likelihood, model.curvature_type)
        at = present_values(model.prior, model.likelihood)  # after the likelihood was bound
        fitted = cls(replace(model, fitted_at=at), found)
        fitted.precision  # noqa: B018
        return fitted

    # --- parts

    @property
    def network(self) -> Network:
        """The private copy of the network at θ*."""
        return self.model.network

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood, with its present hyperparameters."""
        return self.model.likelihood

    @property
    def prior(self) -> GaussianPrior:
        """The prior, with its present precisions."""
        return self.model.prior

    @property
    def curvature_type(self) -> CurvatureType:
        """GGN, empirical Fisher or Monte-Carlo Fisher."""
        return self.model.curvature_type

    @property
    def settings(self) -> Settings:
        """Batch size, memory, progress."""
        return self.model.settings

    @property
    def points(self) -> TrainingPoints:
        """Outputs, targets and weights of the training points."""
        return self.structure.points

    @property
    def num_examples(self) -> int:
        """N."""
        return self.points.num_examples

    @property
    def theta(self) -> Tensor:
        """Weights of the linearized model, (P,)."""
        return self.model.theta

    @property
    def exact(self) -> bool:
        """Whether H = P0 + JᵀΛJ exactly, with the likelihood's Λ."""
        return self.structure.spec.exact and self.curvature_type.kind == "ggn"

    def require_exact(self, what: str, remedy: str, instead: str = "") -> None:
        """Refuse what needs the linearized model's own curvature; `instead` names what would do in its place.

        Raises
        ------
        UnsupportedError
            If the structure or the curvature is not exact.
        """
        if not self.exact:
            raise UnsupportedError(f'{instead}structure="gp", "full" or "iterative" and curvature="ggn"{what}',
                                   f"structure={self.structure.name!r}, curvature={self.curvature_type.kind!r}", remedy)

    def require_laplace(self, what: str) -> None:
        """Refuse what needs the Laplace approximation's precision; see `structures.structure.require_laplace`."""
        require_laplace(self.structure.spec, what)

    @property
    def shuffled(self) -> bool:
        """Whether training points have other numbers than in the data set, because a loader shuffles."""
        source = self.structure.source
        return source is not None and source.shuffled

    def warn_of_order(self) -> None:
        """Warn where numbers of training points, in an answer or a request, are not those of the data set."""
        if self.shuffled:
            warn("the DataLoader of the fit shuffles: training points are numbered in the order in which it was read, "
                 "not in that of your data set. Fit with shuffle=False, or with the data set, for the numbers of your "
                 "rows")

    # --- the posterior precision

    @property
    def precision(self) -> PosteriorPrecision:
        """The factorized posterior precision at the present hyperparameters; recomputed after a change of them."""
        found = self._present.precision
        assert found is not None
        return found

    @property
    def _present(self) -> _Cached:
        """What belongs to the present hyperparameters, factorized."""
        cached, modules = self._cached, (self.prior, self.likelihood)
        if cached.precision is None or not unmoved(cached.at, *modules):
            with cached.threads.writing():
                if cached.precision is None or not unmoved(cached.at, *modules):  # not by another thread meanwhile
                    self._factorize(cached)
        return cached

    def _factorize(self, cached: _Cached) -> None:
        cached.precision = None  # free the old factorization before computing the new one
        cached.made.clear()
        with torch.inference_mode(False):  # gradients may be needed later
            found = self.structure.posterior_precision(self.model)
        if not isinstance(found, PosteriorPrecision):
            raise UnsupportedError(f"a PosteriorPrecision of structure={self.structure.name!r}", f"{found!r}"[:80],
                                   "Return one from `precision` of the specification.")
        cached.precision = found
        cached.at = present_values(self.prior, self.likelihood)

    def once(self, name: str, make: Callable[[], T]) -> T:
        """What `make` returns, called once at the present hyperparameters; a name stands for one thing."""
        made = self._present.made
        if name not in made:
            made[name] = make()
        return made[name]

    def known(self, name: str) -> Any:
        """What `once` has made under this name at the present hyperparameters; None before."""
        return self._present.made.get(name)

    def log_scale(self) -> Tensor | None:
        """Return log c, if all that the likelihood's hyperparameters do to H - P0 is to multiply it by c."""
        spec = self.structure.spec
        return self.curvature_type.log_scale(self.likelihood) if spec.exact or spec.scales else None

    @property
    def function_space(self) -> FunctionSpacePrecision:
        """The posterior precision of a structure that keeps the Jacobian.

        Raises
        ------
        UnsupportedError
            If the structure does not keep it.
        """
        precision = self.precision
        if not isinstance(precision, FunctionSpacePrecision):
            raise UnsupportedError("a structure that keeps the Jacobian", f"structure={self.structure.name!r}",
                                   'Fit with structure="gp".')
        return precision

    @property
    def solver(self) -> PosteriorPrecision:
        """H for many solves: the precision, or that of function space written out if it has few parameters."""
        precision = self.precision
        if not isinstance(precision, FunctionSpacePrecision) or isinstance(precision, LastLayerPrecision):
            return precision
        p, rows = self.model.network.num_parameters, precision.weighted
        if p > min(tuning.DENSE_METRIC, rows.num_cotangents * rows.num_examples):
            return precision
        return self.once("solver", lambda: self._written_out(rows))

    def _written_out(self, rows: Jacobian) -> FullPrecision:
        p = self.model.network.num_parameters
        with torch.no_grad():
            ggn = self.theta.new_zeros(p, p)
            each = p * rows.num_cotangents * ggn.element_size()
            for part in panels(rows.num_examples, each, tuning.FULL_ROWS_BYTES):
                accumulate_ggn(ggn, rows.subset(part), self.prior.shapes)
            return FullPrecision(ggn, self.prior)

    def sensitivity(self) -> Tensor:
        """∂ log det B/∂Λ_n, (N, C, C)."""
        return self.structure.sensitivity(self.model, self.precision)

    def form_sensitivity(self, form: DiagonalForm) -> Tensor:
        """∂ log det B in the numbers of Λ's `DiagonalForm`, in their shape."""
        if isinstance(self.precision, LastLayerPrecision):
            return self.precision.form_sensitivity()
        return form.pulled(self.sensitivity())

    # --- the training points

    def vjp(self, residual: Tensor) -> Tensor:
        """Jᵀr over the training points, (P,), for r (N, C)."""
        return self.structure.vjp(self.model, residual)

    def jvp(self, vector: Tensor) -> Tensor:
        """J v at the training points, (N, C), for v (P,)."""
        return self.structure.jvp(self.model, vector)

    def rows_at(self, index: Tensor) -> Iterator[Jacobian]:
        """Rows of J at some training points, ascending, in batches.

        Raises
        ------
        UnsupportedError
            If each of several processes has a part of them.
        """
        if self.row_reducer.world_size > 1:
            require_one_process(self.model)
        return self.structure.rows_at(self.model, index)

    def own_rows(self, index: Tensor) -> Iterator[tuple[slice | Tensor, Jacobian]]:
        """Rows of J at those of some training points, ascending, that this process reads, and their places in `index`.

        What is computed of them is put together by `collected`.

        Raises
        ------
        UnsupportedError
            If what is computed of rows needs passes of all processes over the data.
        """
        source, reducer = self.structure.read_at(self.model, index), self.row_reducer
        own = None
        if source is not None and reducer.world_size > 1:
            if self.precision.reads_data:
                require_one_process(self.model)
            own = source.numbers(reducer)[0].to(self.points.f.device)
        for here, rows in placed(self.structure.rows_at(self.model, index)):
            yield here if own is None else own[here], rows
            del rows  # before the next are computed

    def gathered_rows(self, index: Tensor, what: str, remedy: str, copies: int = 1) -> Jacobian:
        """Rows of J at some training points, ascending, in one piece, on every process.

        Raises
        ------
        MemoryBudgetError
            After the first batch, if `copies` of the rows do not fit in memory; it names `what` and the `remedy`. What
            one process has to refuse, all refuse, also those that have none of the points.
        DataError
            If the data cannot be read again.
        """
        own = (rows for _, rows in self.own_rows(index))
        parts = list(islice(own, 1))
        needed = [copies * rows.nbytes * -(-len(index) // rows.num_examples) for rows in parts
                  if rows.num_examples < len(index)]
        self.model.require_memory(max(self.row_reducer.gather(max(needed, default=0))), what, remedy)
        parts += own
        source = self.structure.read_at(self.model, index)
        return Jacobian.concatenate(parts) if source is None else collected_jacobian(self.model, source, parts)

    @property
    def row_reducer(self) -> Reducer:
        """Adds up what each process computes of its `own_rows`; a single process where each has all rows."""
        source = self.structure.read_at(self.model, torch.arange(self.num_examples, device="cpu"))
        return SingleProcess() if source is None else self.settings.reducer

    def collected(self, index: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """Values (m, ...) of some training points, from parts of those that this process reads, which may be none."""
        values = torch.cat(list(parts)) if parts else self.points.f.new_empty(0)
        source = self.structure.read_at(self.model, index)
        return values if source is None else collected(self.model, source, values)

    @property
    def from_prior_mean(self) -> Tensor:
        """θ - μ0, (P,)."""
        return self.model.from_prior_mean

    @property
    def total(self) -> float:
        """Number of examples in the log likelihood, each as often as it counts."""
        return self.likelihood.weight * self.points.total(self.likelihood)

    def root(self) -> Tensor:
        """S_n of the training points, (N, C, R), times the square roots of the example weights."""
        return self.points.root(self.curvature_type, self.likelihood)

    def residual(self) -> Tensor:
        """r_n, (N, C), times the example weights, without a graph."""
        with torch.no_grad():
            return self.points.residual(self.likelihood)

    def joint_gradient(self) -> Tensor:
        """g = P0 (θ-μ0) - Jᵀr, (P,), the gradient of the negative log joint."""
        return self.model.joint_gradient(self.vjp(self.residual()))

    def newton_step(self) -> Tensor:
        """z = H⁻¹g, (P,): at θ - z is the optimum of the linearized model, if its likelihood is Gaussian."""
        return self.precision.solve(self.joint_gradient())

    # --- other data

    def derived(self, structure: Structure, model: LinearizedModel | None = None) -> FittedModel:
        """Another structure, with a likelihood and a prior of its own."""
        found = FittedModel((self.model if model is None else model).copied(), structure)
        if self.settings.reducer.world_size > 1 and not structure.spec.keeps_jacobian:
            found.precision  # noqa: B018 - while all processes are here: one of them may save it alone
        return found

    def subset(self, index: Tensor) -> FittedModel:
        """Fitted to some of the training points, ascending."""
        model = self.model.at(index)
        return self.derived(self.structure.subset(model, index), model)

    def to(self, device: torch.device, dtype: torch.dtype) -> FittedModel:
        """On another device, with another dtype for the algebra; hyperparameters move in place."""
        return FittedModel(self.model.to(device, dtype), self.structure.to(device, dtype))
