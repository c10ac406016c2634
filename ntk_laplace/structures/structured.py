"""structure="kfac", "ekfac", "inf", "diag": block approximations of H from sums over streaming data."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.curvature import Eigenbasis, LowRank, ParameterBlock, StructuredWeightSpace, StructureSpec
from ntk_laplace.data import Batches, Joined, Source, fill_buffer, kept_or_missing
from ntk_laplace.errors import UnsupportedError
from ntk_laplace.evidence import NewtonStep
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.points import TrainingPoints, UnsavedPoints
from ntk_laplace.structures.accumulation import Accumulation
from ntk_laplace.structures.autosave import Autosave
from ntk_laplace.structures.base import LinearizedModel
from ntk_laplace.structures.data_passes import ModelSignature, common_factor, jvp, read_rows, selected, vjp
from ntk_laplace.structures.records import from_record, record, spec_record, spec_words

__all__ = ["StructuredStructure"]


class StructuredStructure:
    """Block-diagonal weight space: Kronecker factors, dense blocks, diagonals.

    A change of the prior costs O(P). A change of the likelihood that multiplies all Λ_n by one number (a Gaussian's
    noise) rescales the sums; any other needs another pass over the data, in the eigenbasis of the fit.

    Parameters
    ----------
    model : LinearizedModel
    batches : Source
    spec : StructureSpec
        KFAC, EKFAC, INF or Diagonal, with their options.
    accumulated : Accumulation, optional
        State of an interrupted fit, to resume.
    """

    def __init__(
        self, model: LinearizedModel, batches: Source, spec: StructureSpec, accumulated: Accumulation | None = None
    ) -> None:
        spec.check(model.prior)
        self.spec, self._batches = spec, batches
        if batches.length is not None:
            model.likelihood.bind(batches.length, model.network.num_outputs)
        if accumulated is None:
            accumulated = Accumulation(spec, signature=ModelSignature(model))
            _reuse_eigenbasis(accumulated, spec, model)
        else:
            _require_same_model(accumulated, model)
        self._accumulated = accumulated
        accumulated.checkpoint = Autosave(model.settings.checkpoint)
        accumulated.advance(model, batches)
        self._finalize(model)

    def _finalize(self, model: LinearizedModel) -> None:
        """Derive points and the blocks' extra state from the sums, at the likelihood of the fit."""
        gathered = self._accumulated
        self.points: TrainingPoints | UnsavedPoints = self._gathered_points()
        model.likelihood.bind(*self.points.f.shape)
        for summary in gathered.summaries:
            summary.require_finite()  # checked at the fit: eigenvectors may be computed much later
        self._extras = self.spec.finalized(gathered.summaries, gathered.eigenbases)
        self._likelihood = copy.deepcopy(model.likelihood)
        self._scale = 1.0

    def _gathered_points(self) -> TrainingPoints:
        """Outputs and targets of all examples; stored only here."""
        points = self._accumulated.points
        self._accumulated.forget()
        return points

    @property
    def name(self) -> str:
        """The name that `structure=` takes."""
        return self.spec.name

    @property
    def parameter_blocks(self) -> list[ParameterBlock]:
        """Which parameters share a factorization, and of which kind."""
        return list(self._accumulated.parameter_blocks)

    @property
    def eigenbases(self) -> Sequence[Eigenbasis]:
        """Eigenbases of the parameter blocks."""
        gathered = self._accumulated
        if not gathered.eigenbases:
            gathered.eigenbases = [Eigenbasis.of(summary) for summary in gathered.summaries]
        return gathered.eigenbases

    def _eigenbases(self) -> list[Eigenbasis]:
        """Eigenbases for Λ at the likelihood's current hyperparameters."""
        pairs = zip(self.eigenbases, self.parameter_blocks, strict=True)
        return [eigenbasis.scaled(part.table, self._scale) for eigenbasis, part in pairs]

    # --- algebra

    def posterior_precision(self, model: LinearizedModel) -> StructuredWeightSpace:
        """The factorized posterior precision at the current hyperparameters."""
        self._follow(model)
        with torch.no_grad():
            by_group = model.prior.precision.to(model.theta)
            named = {name: by_group[model.prior.group_of(name)] for name in model.network.shapes}
        gathered = self._accumulated
        algebras = []
        for summary, eigenbasis, extra in zip(gathered.summaries, self._eigenbases(), self._extras, strict=True):
            part = summary.block
            precision = named[part.weight]  # a bias in the block has the same
            if precision.ndim or part.kind == "diagonal":
                sizes = {name: model.network.shapes[name].numel() for name in part.names}
                precision = part.gather({name: named[name].expand(size) for name, size in sizes.items()})
            algebras.append(self.spec.algebra(summary.scaled(self._scale), eigenbasis, extra, precision))
        return StructuredWeightSpace(algebras, model.prior, model.network.shapes, model.theta)

    def _follow(self, model: LinearizedModel) -> None:
        """Update the sums to the likelihood's current hyperparameters."""
        factor = common_factor(model, self._likelihood, self.points)
        if factor is not None:
            self._scale = factor
            return
        gathered = replace(self._accumulated)  # the old sums are valid until the pass ends
        gathered.eigenbases = list(gathered.eigenbases) if self.spec.second_pass else []
        gathered.again(model, self._batches)
        self._accumulated = gathered
        self.points = self._gathered_points()
        self._likelihood, self._scale = copy.deepcopy(model.likelihood), 1.0

    # --- further passes

    def vjp(self, model: LinearizedModel, residual: Tensor) -> Tensor:
        """Jᵀr, (P,), in one pass with cotangent r."""
        return vjp(model, self._batches, residual, model.settings.batch_size)

    def jvp(self, model: LinearizedModel, vector: Tensor) -> Tensor:
        """J v, (N, C)."""
        return jvp(model, self._batches, vector, model.settings.batch_size)

    def sensitivity(self, model: LinearizedModel, precision: StructuredWeightSpace) -> Tensor:
        """∂ log det B/∂Λ_n, (N, C, C), at fixed eigenbases."""
        return self._sensitivity(model, precision, None)

    def newton_step(self, model: LinearizedModel, precision: StructuredWeightSpace, gradient: Tensor) -> NewtonStep:
        """z = H⁻¹g and J z; zᵀ(H - P0)z uses this structure's H."""
        z = precision.solve(gradient)
        own = *precision.quadratic(z), lambda: self._sensitivity(model, precision, z)
        return NewtonStep(z, self.jvp(model, z), own)

    def _sensitivity(self, model: LinearizedModel, precision: StructuredWeightSpace, z: Tensor | None) -> Tensor:
        passes = read_rows(model, self._batches, None, model.settings.batch_size, "likelihood gradients")
        return fill_buffer((precision.sensitivity(rows, z) for rows in passes), self.points.num_examples).rows

    # --- more data

    def refit_on(self, model: LinearizedModel, batches: Source) -> StructuredStructure:
        """The same structure fitted to other data, in this eigenbasis."""
        accumulated = Accumulation(self.spec, signature=ModelSignature(model),
                                   parameter_blocks=list(self.parameter_blocks))
        if self.spec.second_pass:
            accumulated.eigenbases = list(self.eigenbases)
        return StructuredStructure(model, batches, self.spec, accumulated)

    def subset(self, model: LinearizedModel, index: Tensor) -> StructuredStructure:
        """Sums over some points, in this eigenbasis, from another pass."""
        return self.refit_on(model, selected(self._batches, index, self.points.num_examples))

    def rows_at(self, model: LinearizedModel, index: Tensor) -> Iterator[Jacobian]:
        """Rows of J, from another pass."""
        batches = selected(self._batches, index, self.points.num_examples)
        yield from read_rows(model, batches, None, model.settings.batch_size, "Jacobians")

    def merged(self, model: LinearizedModel, other: StructuredStructure) -> StructuredStructure:
        """Sums over both data sets; structures whose sums are in an eigenbasis must share it."""
        _require_mergeable(self, other)
        for one in (self, other):
            one._follow(model)
        ours, theirs = self._accumulated, other._accumulated
        total = copy.copy(self)
        pairs = zip(ours.summaries, theirs.summaries, strict=True)
        summaries = [a.scaled(self._scale).merged(b.scaled(other._scale)) for a, b in pairs]
        f = fill_buffer([self.points.f, other.points.f])  # an error here if the checkpoint has no data
        points = self.points.joined(model.likelihood, other.points)
        eigenbases = list(ours.eigenbases) if self.spec.second_pass else []
        total._accumulated = replace(
            ours, summaries=summaries, eigenbases=eigenbases, f=f, targets=fill_buffer([points.targets]),
            weights=fill_buffer([] if points.weights is None else [points.weights]),
            examples_done=ours.examples_done + theirs.examples_done,
        )  # fmt: skip
        total._batches = Joined([self._batches, other._batches])
        total._finalize(model)
        return total

    def copied(self) -> StructuredStructure:
        """A copy that can move to another device while this one stays."""
        other = copy.copy(self)
        other._accumulated, other._likelihood = self._accumulated.copy(), copy.deepcopy(self._likelihood)
        return other

    # --- checkpoints

    def state(self, model: LinearizedModel, include_data: bool) -> dict[str, Any]:
        """The sums at the current likelihood, and the eigenbasis if it was computed."""
        self._follow(model)
        gathered = self._accumulated
        eigenbases = self._eigenbases()
        now = replace(
            gathered, summaries=[s.scaled(self._scale) for s in gathered.summaries],
            eigenbases=eigenbases if all(eigenbasis.made for eigenbasis in eigenbases) else [],
        )  # fmt: skip
        return record(now, include_data=False) | {
            "extras": [None if extra is None else vars(extra).copy() for extra in self._extras]
        }

    @classmethod
    def restored(
        cls, model: LinearizedModel, saved: dict[str, Any], points: TrainingPoints | UnsavedPoints,
        batches: Batches | None
    ) -> StructuredStructure:
        """Restore from a checkpoint."""
        made = cls.__new__(cls)
        gathered = from_record(saved)
        made.spec, made._batches, made._accumulated = gathered.spec, kept_or_missing(batches), gathered
        made._extras = [None if extra is None else LowRank(**extra) for extra in saved["extras"]]
        made._likelihood, made._scale = copy.deepcopy(model.likelihood), 1.0
        made.points = points
        return made

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move the sums, and set the device of later batches."""
        gathered = self._accumulated
        gathered.summaries = [summary.to(device, dtype) for summary in gathered.summaries]
        gathered.eigenbases = [eigenbasis.to(device, dtype) for eigenbasis in gathered.eigenbases]
        self._extras = [None if extra is None else extra.to(device, dtype) for extra in self._extras]
        self._batches.device, self.points = device, self.points.to(device, dtype)
        self._likelihood.to(device)


def _reuse_eigenbasis(accumulated: Accumulation, spec: StructureSpec, model: LinearizedModel) -> None:
    """Take parameter blocks and eigenbases from the posterior that the spec's `basis` names, if any."""
    other: Any = getattr(spec, "basis", None)
    if other is None:
        return
    structure = getattr(other, "fitted", None)
    if not isinstance(structure, StructuredStructure) or structure.spec.kind != "kronecker":
        raise UnsupportedError('basis= a posterior with structure "kfac", "ekfac" or "inf"', repr(other),
                               "Fit KFAC first, to all data or to any part of them.")
    if other.network.shapes != model.network.shapes:
        raise UnsupportedError("basis= a posterior of the same network", "one with other parameters",
                               "Fit the basis with the same network and parameters=.")
    if structure.spec.squares != spec.squares and any(part.entries[0] > 1 for part in structure.parameter_blocks):
        raise UnsupportedError("a basis of the same kind where convolutions have groups", repr(structure.spec.name),
                               "Take the basis from a posterior of the same structure.")
    accumulated.parameter_blocks, accumulated.eigenbases = list(structure.parameter_blocks), list(structure.eigenbases)


def _require_same_model(accumulated: Accumulation, model: LinearizedModel) -> None:
    """Refuse to resume a fit under a different model."""
    for what, now in ModelSignature(model).items():
        if accumulated.signature.get(what) != now:
            raise UnsupportedError(f"to resume with the {what} of the interrupted fit", "another",
                                   "Pass the same arguments, or start anew without resume=.")


def _require_mergeable(first: StructuredStructure, second: StructuredStructure) -> None:
    if spec_record(first.spec) != spec_record(second.spec):
        raise UnsupportedError(f"two posteriors of structure {spec_words(first.spec)}", spec_words(second.spec),
                               "Fit both with the same structure and options.")
    same = len(first.parameter_blocks) == len(second.parameter_blocks)
    same = same and all(
        (a.kind, a.names, a.entries) == (b.kind, b.names, b.entries)
        for a, b in zip(first.parameter_blocks, second.parameter_blocks, strict=True)
    )
    if not same:
        raise UnsupportedError(f"two {first.spec.name!r} posteriors of one network", f"{second.spec.name!r}, or other "
                               "parts", "Fit both with the same network, structure and prior groups.")
    if not first.spec.second_pass:
        return
    for one, other in zip(first.eigenbases, second.eigenbases, strict=True):
        for a, b in ((one.basis.left, other.basis.left), (one.basis.right, other.basis.right)):
            if a is not None and not torch.equal(a, b.to(a)):
                raise UnsupportedError("one eigenbasis for both posteriors", "two",
                                       f"Fit both with {first.spec.name.upper()}(basis=kfac_posterior).")
