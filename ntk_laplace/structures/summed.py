"""Structures whose curvature is a sum over the training points: one pass over streaming data, in bounded memory.

The sums are taken at the likelihood's hyperparameters. A change that multiplies all Λ_n by one number (a Gaussian's
noise) rescales them; any other needs another pass over the data. Predictions and changes of the prior need none.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.curvature import PosteriorPrecision
from ntk_laplace.errors import UnsupportedError
from ntk_laplace.jacobian import Jacobian, placed
from ntk_laplace.model.data import Joined, Missing, Source
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.structures.data_passes import common_factor, read_points, read_rows
from ntk_laplace.structures.model import LinearizedModel
from ntk_laplace.structures.points import TrainingPoints, UnsavedPoints, present_values, unmoved
from ntk_laplace.structures.streamed import StreamedStructure, max_batch
from ntk_laplace.structures.structure import Saved, Structure, StructureSpec, of_kind

Sums = dict[str, Tensor]


class SummedSpec(StructureSpec):
    """Specification of a structure that adds up a function of the rows of SᵀJ, S Sᵀ = Λ, over the training points.

    A subclass defines what is summed (`zeros`, `add`) and the posterior precision that follows (`precision`). Fits in
    batches, other data, merging, what-ifs, changed hyperparameters, devices and checkpoints follow from these.
    """

    @abstractmethod
    def zeros(self, model: LinearizedModel) -> Sums:
        """Sums of no points: tensors by name, in the algebra's dtype, on the network's device."""

    @abstractmethod
    def add(self, sums: Sums, rows: Jacobian, model: LinearizedModel) -> None:
        """Add a batch of rows of SᵀJ, in place."""

    @abstractmethod
    def precision(self, sums: Sums, model: LinearizedModel) -> PosteriorPrecision:
        """The posterior precision at the prior's present precisions."""

    def fit(self, model: LinearizedModel, source: Source) -> SummedStructure:
        """Read outputs and targets; the sums follow on first use."""
        self.check_memory(model)
        return SummedStructure(self, source, read_points(model, source)).displaced(model)

    def check_memory(self, model: LinearizedModel) -> None:
        """Raise MemoryBudgetError if what the fit stores does not fit in memory; called before anything is read."""

    def restored(self, model: LinearizedModel, saved: Saved) -> SummedStructure:
        """From the sums of a checkpoint."""
        at = _AtLikelihood(dict(saved.state), copy.deepcopy(model.likelihood))
        return SummedStructure(self, saved.source, saved.points, at=at)


_FEWEST = 1e-12  # factor of sums that replace those before; smaller ones are computed each time


@dataclass
class _AtLikelihood:
    """Sums, and a copy of the likelihood at which they were taken; recomputed by `SummedStructure` on demand."""

    sums: Sums | None = None
    likelihood: Likelihood | None = None


@dataclass
class SummedStructure(StreamedStructure):
    """Sums over the training points, with the data for another pass.

    Attributes
    ----------
    spec : SummedSpec
    at : _AtLikelihood
        A cache of the sums.
    """

    spec: SummedSpec
    at: _AtLikelihood = field(default_factory=_AtLikelihood)

    def sums(self, model: LinearizedModel) -> Sums:
        """The sums at the likelihood's current hyperparameters."""
        at, factor = self.at, None
        if at.sums is not None and at.likelihood is not None:
            if unmoved(present_values(at.likelihood), model.likelihood):
                return at.sums
            if self.spec.scales and not isinstance(self.points, UnsavedPoints):
                factor = common_factor(model, at.likelihood, self.points)
        if at.sums is None or factor is None:
            root = self.points.root(model.curvature_type, model.likelihood).detach()
            if not isinstance(self.data, Missing):
                at.sums = None  # free the old sums before computing the new ones
            at.sums = self._summed(model, root)
        else:
            scaled = {name: total * factor for name, total in at.sums.items()}
            if not _FEWEST < float(factor) < 1.0 / _FEWEST:
                return scaled  # these may have overflowed: keep those before
            at.sums = scaled
        at.likelihood = copy.deepcopy(model.likelihood)
        return at.sums

    def _summed(self, model: LinearizedModel, root: Tensor) -> Sums:
        sums, device = self.spec.zeros(model), model.network.device
        if not (isinstance(sums, dict) and all(isinstance(t, Tensor) and t.device == device for t in sums.values())):
            raise UnsupportedError(f"tensors by name on {device} of {type(self.spec).__name__}.zeros",
                                   f"{sums!r}"[:80], "Create them with model.theta.new_zeros(...).")
        for rows in read_rows(model, self.data, root, max_batch(model, root.shape[2]), "curvature"):
            self.spec.add(sums, rows, model)
            del rows  # before the next are computed
        model.settings.reducer.sum_(*sums.values())
        return sums

    def posterior_precision(self, model: LinearizedModel) -> PosteriorPrecision:
        """Factorize H at the current hyperparameters."""
        return self.spec.precision(self.sums(model), model)

    # --- other points

    def merged(self, model: LinearizedModel, other: Structure) -> SummedStructure:
        """Sums of both data sets."""
        other = of_kind(SummedStructure, other)
        if self.spec.options() != other.spec.options():
            raise UnsupportedError(f"two posteriors of structure {self.spec}", str(other.spec),
                                   "Fit both with the same structure and options.")
        ours, theirs = self.sums(model), other.sums(model)
        at = _AtLikelihood({name: ours[name] + theirs[name] for name in ours}, copy.deepcopy(model.likelihood))
        points = self.points.joined(model.likelihood, other.points)
        return SummedStructure(self.spec, Joined([self.data, other.data]), points, self._merged_base(model, other), at)

    def changed(
        self, model: LinearizedModel, points: TrainingPoints, added: Structure | None = None
    ) -> SummedStructure:
        """The structure of changed points, those of `added` last; `base` keeps the training points."""
        source = self.data if added is None else Joined([self.data, of_kind(SummedStructure, added).data])
        other = SummedStructure(self.spec, source, points, self.trained_points)
        sums = self._updated(model, other)
        if sums is not None:
            other.at = _AtLikelihood(sums, copy.deepcopy(model.likelihood))
        return other

    def _updated(self, model: LinearizedModel, other: SummedStructure) -> Sums | None:
        """The sums of the other points by updating those whose Λ has changed; None if more than half have.

        None on several processes too: one pass over all shares is shorter than reading the changed points alone.
        """
        if model.settings.reducer.world_size > 1:
            return None
        root, before = (points.root(model.curvature_type, model.likelihood).detach()
                        for points in (other.points, self.points))
        own = torch.cat([before, before.new_zeros(len(root) - len(before), *before.shape[1:])])
        moved = (root != own).flatten(1).any(1).nonzero().squeeze(1)
        if 2 * len(moved) > len(root):
            return None
        sums = {name: total.clone() for name, total in self.sums(model).items()}
        if len(moved) == 0:
            return sums
        removed = self.spec.zeros(model)
        for here, rows in placed(other.rows_at(model, moved)):
            self.spec.add(sums, rows.weighted(root[moved[here]]), model)
            self.spec.add(removed, rows.weighted(own[moved[here]]), model)
        return {name: total.sub_(removed[name]) for name, total in sums.items()}

    # --- storage

    def state(self, model: LinearizedModel, include_data: bool) -> dict[str, Any]:
        """The sums at the current likelihood."""
        return self.sums(model)

    def to(self, device: torch.device, dtype: torch.dtype) -> SummedStructure:
        sums, likelihood = self.at.sums, self.at.likelihood
        moved = None if sums is None else {name: total.to(device, dtype) for name, total in sums.items()}
        at = _AtLikelihood(moved, None if likelihood is None else copy.deepcopy(likelihood).to(device))
        return self._moved(device, dtype, at=at)
