"""How H is stored, by the name of the structure: as a matrix, as rows, or in blocks; and its value at the start."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ntk_laplace.curvature import (
    FullPrecision,
    FunctionSpacePrecision,
    GivenPrecision,
    PosteriorPrecision,
    find_parameter_blocks,
)
from ntk_laplace.errors import UnsupportedError, untold
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.structures import KFAC, Diagonal, FittedModel, FullWeightSpace, FunctionSpace, LinearizedModel
from ntk_laplace.structures.block_spec import BlockSpec
from ntk_laplace.structures.structure import StructureSpec
from ntk_laplace.structures.structured import StructuredStructure
from ntk_laplace.variational_inference.block_state import BlockState
from ntk_laplace.variational_inference.states import DenseState, FunctionSpaceState, VariationalState

_NAMES = ("full", "gp", "auto", "kfac", "diag")


class Representation(ABC):
    """How H is stored; `few` are rows of J of some examples."""

    spec: StructureSpec  # the Laplace posterior's structure that stores its H in the same way
    most_rows: int | None = None  # rows beyond which function space becomes weight space; None for no limit

    @abstractmethod
    def require_memory(self, model: LinearizedModel, few: Jacobian, rows: int, total: int) -> None:
        """Refuse what would not fit (MemoryBudgetError), for so many rows of a step, and so many that are kept."""

    @abstractmethod
    def isotropic(self, model: LinearizedModel, few: Jacobian, precision: float) -> VariationalState:
        """The network's weights with H = λ I."""

    @abstractmethod
    def of(self, model: LinearizedModel, fitted: FittedModel) -> VariationalState:
        """Mean and precision of a posterior. UnsupportedError if its H is not of this kind."""


def representation(name: object, rows: int, num_parameters: int, row_tolerance: float) -> Representation:
    """The representation of a name, or of a block structure; "auto" chooses by the number of rows of the first step.

    UnsupportedError if there is none of this name.
    """
    found: dict[str, Representation] = {
        "full": Matrix(), "gp": Rows(row_tolerance), "kfac": Blocks(KFAC()), "diag": Blocks(Diagonal()),
        "auto": Matrix() if rows > num_parameters else Rows(row_tolerance, num_parameters),
    }
    if isinstance(name, BlockSpec):
        return Blocks(name)
    if not isinstance(name, str) or name not in found:
        raise UnsupportedError(f"structure among {', '.join(_NAMES)}", repr(name)[:80],
                               'Use "full" for small networks, "gp" for few rows, "kfac" for large ones.')
    return found[name]


@dataclass(frozen=True)
class Matrix(Representation):
    """A matrix over the parameters."""

    spec = FullWeightSpace()

    def require_memory(self, model: LinearizedModel, few: Jacobian, rows: int, total: int) -> None:
        """H, its factor, and a copy to resume from: 3 P² numbers."""
        p, element = model.network.num_parameters, model.jacobian_pass.dtype.itemsize
        model.require_memory(3 * p * p * element,
                             f"three {p:,} x {p:,} matrices (H, its factor, and a copy to resume from)",
                             'Use structure="kfac", structure="gp", parameters="last_layer", or dtype=torch.float32.')

    def isotropic(self, model: LinearizedModel, few: Jacobian, precision: float) -> DenseState:
        """H - P0 is diagonal."""
        return DenseState.isotropic(model.theta, precision, model.prior)

    def of(self, model: LinearizedModel, fitted: FittedModel) -> DenseState:
        """H of any posterior: a copy where it is a matrix, else its products with unit vectors."""
        theta, inner = fitted.theta.to(model.theta), _inner(fitted)
        own = inner.prior_precision
        if isinstance(inner, FullPrecision):
            excess = inner.ggn.to(theta, copy=True)
            excess.diagonal().add_(own.to(theta))
        else:
            excess = theta.new_zeros(len(theta), len(theta))
            for here, unit in inner.unit_rows():
                excess[here] = inner.multiply(unit).to(theta)
        excess.diagonal().sub_(model.prior.flat_precision().detach().to(excess))
        return DenseState(theta, excess, model.prior)


@dataclass(frozen=True)
class Rows(Representation):
    """Rows of all steps, with the tolerance of `FunctionSpaceState`."""

    tolerance: float = 0.0
    most_rows: int | None = None
    spec = FunctionSpace()

    def require_memory(self, model: LinearizedModel, few: Jacobian, rows: int, total: int) -> None:
        """Rows with two copies of them in a step, and three matrices over them."""
        few = self._weighted(model, few)
        total = total if self.most_rows is None else min(total, self.most_rows)
        each = few.nbytes // (few.num_examples * few.num_cotangents)
        model.require_memory(3 * total * (total * model.jacobian_pass.dtype.itemsize + each),
                             f"{total:,} rows, {rows:,} a step, and three matrices over them",
                             "Pass fewer samples or steps, row_tolerance=1e-3, which drops old rows and says so, or "
                             'structure="full".')

    def isotropic(self, model: LinearizedModel, few: Jacobian, precision: float) -> FunctionSpaceState:
        """H is diagonal, without rows."""
        rows = self._weighted(model, few).subset(slice(0, 0))
        return self._state(model, model.theta, rows, precision / model.prior.precision.detach())

    def of(self, model: LinearizedModel, fitted: FittedModel) -> FunctionSpaceState:
        """The rows of a posterior in function space."""
        inner = _inner(fitted)
        if not isinstance(inner, FunctionSpacePrecision):
            raise UnsupportedError("a posterior in function space as the start of variational inference in it",
                                   f"structure={fitted.structure.name!r}", 'Pass structure="full", or another start.')
        rows = inner.weighted.to(model.theta.dtype, model.theta.device)
        return self._state(model, fitted.theta.to(model.theta), rows, _ratio(model, inner).to(model.theta))

    def _state(self, model: LinearizedModel, theta: Tensor, rows: Jacobian, ratio: Tensor) -> FunctionSpaceState:
        with torch.no_grad():
            return FunctionSpaceState(theta, rows, ratio, model.prior, self.tolerance)

    def _weighted(self, model: LinearizedModel, few: Jacobian) -> Jacobian:
        """Rows in the form of SᵀJ."""
        return few.weighted(few.f.new_zeros(*few.f.shape, model.likelihood.rank(model.network.num_outputs)))


@dataclass(frozen=True)
class Blocks(Representation):
    """Sums of a block-diagonal structure."""

    spec: BlockSpec

    def require_memory(self, model: LinearizedModel, few: Jacobian, rows: int, total: int) -> None:
        """The averages, those of the last eigendecomposition, those of a step, and a copy to resume from."""
        with untold():  # the first step warns of it
            blocks = find_parameter_blocks(few, model.prior, self.spec.kind, self.spec.squares)
        needed = self.spec.memory(blocks, model)
        replace(needed, stored={name: 4 * size for name, size in needed.stored.items()}).require(
            model, f"the averages of structure={self.spec.name!r}",
            'Use structure="diag", parameters="last_layer", or dtype=torch.float32.')

    def isotropic(self, model: LinearizedModel, few: Jacobian, precision: float) -> BlockState:
        """H is diagonal, without sums."""
        ratio = (precision / model.prior.precision.detach()).to(model.theta)
        return BlockState(model.theta, self.spec, [], ratio, model.prior)

    def of(self, model: LinearizedModel, fitted: FittedModel) -> BlockState:
        """The sums of a Laplace posterior of the same structure."""
        structure = fitted.structure
        if not isinstance(structure, StructuredStructure) or structure.spec.name != self.spec.name:
            raise UnsupportedError(f"a Laplace posterior of structure={self.spec.name!r} as start",
                                   f"structure={structure.name!r}", 'Pass start="map", or a precision.')
        sums = [(spec.sharing, spec.factor_rank) for spec in (self.spec, structure.spec)]
        if sums[0] != sums[1]:  # of other factors, with which no average is one
            raise UnsupportedError(f"a Laplace posterior of structure={self.spec} as start", f"{structure.spec}",
                                   "Fit the start with the same options.")
        prior, ratio = model.prior, torch.ones_like(model.prior.precision.detach()).to(model.theta)
        self.spec.check(prior)
        if isinstance(self.spec, KFAC) and not self.spec.by_input and any(
            len({prior.group_of(name) for name in block.names}) > 1
            for block in structure.parameter_blocks if block.kind == "kronecker"
        ):
            raise _other_groups("one precision for a layer's weight and bias together")
        theta, summaries = fitted.theta.to(model.theta), structure.summaries(fitted.model)
        return BlockState(theta, self.spec, summaries, ratio, model.prior)


def _inner(fitted: FittedModel) -> PosteriorPrecision:
    precision = fitted.precision
    return precision.inner if isinstance(precision, GivenPrecision) else precision


def _ratio(model: LinearizedModel, precision: PosteriorPrecision) -> Tensor:
    """d / P0 by group of the prior, for H = diag(d) + RᵀR. UnsupportedError if it has several values in a group."""
    prior, diagonal = model.prior, precision.prior_precision
    own = prior.flat_precision().detach().to(diagonal)
    numbers = prior.flat_groups().to(diagonal.device)
    ratio = torch.ones_like(prior.precision.detach()).to(diagonal)
    ratio[numbers] = diagonal / own
    if not torch.allclose(ratio[numbers] * own, diagonal, rtol=1e-9):
        raise _other_groups("precisions that differ within a group")
    return ratio


def _other_groups(got: str) -> UnsupportedError:
    return UnsupportedError("a start whose prior has the same groups", got,
                            'Fit the start with the same prior, or pass start="map".')
