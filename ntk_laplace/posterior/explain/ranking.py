"""Ranking over streaming data: the strongest training points for and against, in bounded memory, for every structure.

With U_x = H⁻¹ J_xᵀ c_x for the quantity's direction c_x, the effects of all training points on a prediction are
products of U_x with rows of the Jacobian, batch by batch. No N x P matrix is formed, nor U_x itself if the structure
has a cheaper form of the products.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ntk_laplace.errors import DataError
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.posterior.explain.algebra import removal_terms
from ntk_laplace.posterior.explain.explanation import ExplanationRequest
from ntk_laplace.posterior.explain.quantity import SPREADS, Quantity
from ntk_laplace.posterior.explain.ranked import AT_OPTIMUM, Entry, Ranked, counted
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.panels import panels
from ntk_laplace.runtime.reduction import Reducer
from ntk_laplace.structures import FittedModel
from ntk_laplace.structures.what_if import HIGH_LEVERAGE

_SUMS = "offset, the sum of contributions and gap add up to the prediction exactly; single contributions are not kept"
_FIRST_ORDER = "effects on a probability or a log likelihood are of first order in the change of the outputs"
_GUARANTEES = {
    "full": "removal effects on outputs are exact for one Newton step of the linearized model without the point",
    "other root": "removal effects take the point out of this precision, which is not the linearized model's: they "
    "rank, and are no refit",
    "other": "removal effects take the point out of this structure's own approximation of the curvature: they rank, "
    "and are no refit; where its leverage exceeds 0.9 the effect is of first order, and the point is flagged",
}


@dataclass(frozen=True, repr=False)
class Ranking(Ranked):
    """The training points with the strongest effects on predictions, found in a pass over the data.

    Axes are named: n inputs explained, N training points, C outputs, k ranks; `AXES` lists them by field.

    Attributes
    ----------
    f : Tensor, (n, C)
        The predictions.
    quantity : Quantity
        The explained quantity: `by`, its `output` (n,), the targets.
    offset, total, gap : Tensor, (n, C)
        f = offset + total + gap; `total` is the sum of all contributions.
    importance : Tensor, (N, C)
        Residuals of the training points, of which contributions are made.
    at_optimum : bool
        Whether they are those of the optimum of the linearized network, and not of the weights.
    indices, effects : dict of str to Tensor, (n, k)
        By side, "for" and "against", strongest first: training points, and the change of the quantity if one were left
        out.
    leverage : Tensor, (N,)
        Largest eigenvalue of SᵀVS; with an approximate curvature it may exceed 1.
    targets : Tensor
        Training targets.
    k : int
        Training points shown on each side.
    guarantees : tuple of str
        What is exact, and what is not.
    """

    total: Tensor
    indices: dict[str, Tensor]
    effects: dict[str, Tensor]

    AXES: ClassVar[dict[str, tuple[str, ...]]] = {
        **dict.fromkeys(("f", "offset", "total", "gap"), ("input", "output")),
        **dict.fromkeys(("indices", "effects"), ("input", "rank")),
        "importance": ("training point", "output"), **dict.fromkeys(("leverage", "flagged"), ("training point",)),
    }

    def supporting(self, k: int | None = None) -> Tensor:
        """Indices of the training points that speak most for the prediction (its proponents), (n, k)."""
        return self.indices["for"][:, : self._kept(k)]

    def opposing(self, k: int | None = None) -> Tensor:
        """Indices of the training points that speak most against the prediction (its opponents), (n, k)."""
        self._require_side("against")
        return self.indices["against"][:, : self._kept(k)]

    def top(self, k: int | None = None) -> Tensor:
        """Indices of the training points with the largest effects of either sign, (n, k)."""
        k = self._kept(k)
        effects = torch.cat(list(self.effects.values()), 1)
        chosen = effects.abs().argsort(dim=1, descending=True, stable=True)
        found = torch.cat(list(self.indices.values()), 1).gather(1, chosen)
        # with few points the same one may be on both sides: list it once
        rows = [list(dict.fromkeys(row))[:k] for row in found.tolist()]
        return torch.tensor(rows, device=found.device)

    def _kept(self, k: int | None) -> int:
        k = counted(k, self.k)
        if self.k < k and self.k < len(self.leverage):
            raise DataError(f"at most the {self.k} training points kept on each side", f"k={k}",
                            f"Ask for them when explaining: explain(x, k={k}).")
        return k

    def _entries(self, i: int, side: str, k: int | None) -> list[Entry]:
        pairs = zip(self.indices[side][i].tolist(), self.effects[side][i].tolist(), strict=True)
        return [self._entry(i, j, effect) for j, effect in list(pairs)[: self._kept(k)]]

    def contributed(self) -> Tensor:
        return self.total

    def __repr__(self) -> str:
        n, c = self.f.shape
        return (
            f"Ranking({n} input(s), the strongest of {len(self.leverage)} training points, {c} output(s); largest gap "
            f"{float(self.gap.abs().max()):.2g}; {int(self.flagged.sum())} point(s) of leverage above {HIGH_LEVERAGE})"
        )


@dataclass
class _Strongest:
    """The k largest values so far for each input, and their indices."""

    k: int
    values: Tensor
    indices: Tensor

    @classmethod
    def of(cls, like: Tensor, k: int) -> _Strongest:
        """Nothing yet, for the inputs of rows `like`."""
        return cls(k, like.new_zeros(len(like), 0), like.new_zeros(len(like), 0, dtype=torch.long))

    def add(self, values: Tensor, here: Tensor) -> None:
        """Values (n, m) of training points `here` (m,) or (n, m), later than the others; ties go to the earlier one."""
        values, here = torch.cat([self.values, values], 1), torch.cat([self.indices, here.expand_as(values)], 1)
        order = values.argsort(dim=1, descending=True, stable=True)[:, : self.k]
        self.values, self.indices = values.gather(1, order), here.gather(1, order)

    def collected(self, reducer: Reducer) -> _Strongest:
        """The strongest of the points of all processes."""
        values, indices = reducer.concat(self.values.T).T, reducer.concat(self.indices.T).T
        order = indices.argsort(dim=1)
        found = _Strongest.of(self.values, self.k)
        found.add(values.gather(1, order), indices.gather(1, order))
        return found


def rank(
    fitted: FittedModel, chunks: Iterable[Jacobian], request: ExplanationRequest, optimum: FittedModel | None = None
) -> Iterator[Ranking]:
    """Rank the training points by their effects on predictions, in a pass over the data for each chunk of rows of J.

    The contributions that are summed up are made of the residuals of the model at its `optimum`, if it is given.
    """
    for test, quantity, k in request.of_each(fitted.model, chunks, fitted.num_examples):
        yield _rank(fitted, test, quantity, k, optimum)


def _rank(
    fitted: FittedModel, test: Jacobian, quantity: Quantity, k: int, optimum: FittedModel | None
) -> Ranking:
    sides: dict[str, list[_Strongest]] = {side: [] for side in quantity.sides}
    leverage, total = test.f.new_zeros(fitted.num_examples), torch.zeros_like(fitted.theta)
    for part in _parts(fitted, test):
        heaps = {side: _Strongest.of(test.f[part], k) for side in sides}
        passing = _Passing(fitted, test.subset(part), quantity.subset(part))
        for here, change in passing.effects():
            support = -quantity.good * change
            for side, heap in heaps.items():
                heap.add(support if side == "for" else -support, here)
        passing.finish()
        for side, heap in heaps.items():
            sides[side].append(heap.collected(passing.reducer))
        leverage, total = passing.leverage, passing.backprojected
    with torch.no_grad():
        network, prior = fitted.network, fitted.prior
        pushed = test.jvp(network.unflatten(fitted.from_prior_mean))
        step = total / prior.flat_precision().to(total)  # P0⁻¹ Jᵀr, which is θ̄ - μ0 at an optimum θ̄
        contributed = test.jvp(network.unflatten(step if optimum is None else optimum.from_prior_mean))
    case = "full" if fitted.exact else "other root" if fitted.structure.spec.exact else "other"
    guarantees = (_SUMS if optimum is None else AT_OPTIMUM, _GUARANTEES[case])
    first_order = (_FIRST_ORDER,) if quantity.by in ("probability", "log_likelihood") else ()
    signs = {"for": -quantity.good, "against": quantity.good}
    return Ranking(
        f=test.f, quantity=quantity, offset=test.f - pushed, total=contributed, gap=pushed - contributed,
        importance=(optimum or fitted).residual(), at_optimum=optimum is not None,
        indices={side: torch.cat([heap.indices for heap in heaps]) for side, heaps in sides.items()},
        effects={side: signs[side] * torch.cat([heap.values for heap in heaps]) for side, heaps in sides.items()},
        leverage=leverage, targets=fitted.points.targets, k=k, guarantees=guarantees + first_order,
    )


def effects(
    fitted: FittedModel, chunks: Iterable[Jacobian], request: ExplanationRequest
) -> Iterator[Tensor]:
    """Change of the quantity for each chunk's inputs and every training point, (n, N), in the same passes."""
    for test, quantity, _ in request.of_each(fitted.model, chunks, fitted.num_examples):
        for part in _parts(fitted, test):
            passing = _Passing(fitted, test.subset(part), quantity.subset(part))
            yield fitted.collected(passing.index, [change.T for _, change in passing.effects()]).T


def _parts(fitted: FittedModel, test: Jacobian) -> Iterator[slice]:
    """Slices of inputs that share a pass over the data."""
    with torch.no_grad():
        one = test.subset(slice(0, 1))
        numbers = fitted.precision.cross_covariance(one.weighted(torch.ones_like(one.f).unsqueeze(-1))).numbers
    size = numbers * test.f.element_size()
    step = min(test.num_examples, max(1, tuning.DIRECTION_BYTES // size))
    fitted.model.require_memory(3 * step * size, f"directions of {step} inputs", "Fit a smaller network.")
    return panels(test.num_examples, 1, step)


class _Passing:
    """One pass over the training data for a few inputs, each process over its own."""

    def __init__(self, fitted: FittedModel, test: Jacobian, quantity: Quantity) -> None:
        self.fitted, self.quantity, self.reducer = fitted, quantity, fitted.row_reducer
        self.index = torch.arange(fitted.num_examples, device=test.f.device)
        with torch.no_grad():
            direction = quantity.direction(test.f).unsqueeze(-1)
            self.cross_covariance = fitted.precision.cross_covariance(test.weighted(direction))  # V_·x c_x
        self.leverage = test.f.new_zeros(fitted.num_examples)
        self.backprojected = torch.zeros_like(fitted.theta)  # Jᵀr

    def effects(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(Indices (m,), effects (n, m)) of the training points, batch by batch, in order."""
        fitted = self.fitted
        residual = fitted.residual()
        with torch.no_grad():
            root = fitted.root()
            for here, rows in fitted.own_rows(self.index):
                weights = self._weights(rows, residual[here], root[here], here)
                self.backprojected += rows.vjp(residual[here].to(rows.f), fitted.network.shapes)
                seen = self.cross_covariance.products(rows.weighted(weights))  # weighted V_ix c_x
                change = seen.square().sum(0) if self.quantity.by in SPREADS else -seen[0]
                yield self.index[here], change.T

    def finish(self) -> None:
        """Add up what the processes found."""
        self.reducer.sum_(self.leverage, self.backprojected)

    def _weights(self, rows: Jacobian, residual: Tensor, root: Tensor, here: slice | Tensor) -> Tensor:
        """(I - Λ_iV_ii)⁻¹ r_i (m, C, 1), or W with W Wᵀ = (I - Λ_iV_ii)⁻¹ Λ_i (m, C, R) for variances."""
        exact = self.fitted.structure.spec.exact
        out = removal_terms(self.fitted.precision.removal_blocks(rows, root), root, exact)
        self.leverage[here] = out.leverage
        return out.spread() if self.quantity.by in SPREADS else out.amplified(residual)
