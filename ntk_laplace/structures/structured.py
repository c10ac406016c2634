"""structure="kfac", "ekfac", "inf", "diag": sums over the data stay, the data pass by."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.curvature import Form, Frame, LowRank, Part, StructuredWeightSpace
from ntk_laplace.data import Batches, Joined, Source, gather, kept_or_missing
from ntk_laplace.errors import UnsupportedError
from ntk_laplace.evidence import NewtonStep
from ntk_laplace.factors import Rows
from ntk_laplace.points import ForgottenPoints, TrainingPoints
from ntk_laplace.structures.accumulation import Accumulation
from ntk_laplace.structures.autosave import Autosave
from ntk_laplace.structures.base import Trained
from ntk_laplace.structures.reading import ModelSignature, backproject, common_factor, push, read_rows, selected
from ntk_laplace.structures.records import form_record, form_words, from_record, record

__all__ = ["StructuredStructure"]


class StructuredStructure:
    """Parts of weight space: Kronecker factors, blocks, diagonals.

    A change of the prior costs O(P). A change of the likelihood that multiplies all Λ_n by one number (a Gaussian's
    noise) rescales the sums; any other asks for another pass over the data, in the eigenbasis of the fit.

    Parameters
    ----------
    trained : Trained
    batches : Source
    form : Form
        KFAC, EKFAC, INF or Diagonal, with their options.
    accumulated : Accumulation, optional
        Of an interrupted fit, which goes on.
    """

    def __init__(
        self, trained: Trained, batches: Source, form: Form, accumulated: Accumulation | None = None
    ) -> None:
        form.check(trained.prior)
        self.form, self._batches = form, batches
        if batches.length is not None:
            trained.likelihood.bind(batches.length, trained.network.num_outputs)
        if accumulated is None:
            accumulated = Accumulation(form, model=ModelSignature(trained))
            _borrow(accumulated, form, trained)
        else:
            _require_same_model(accumulated, trained)
        self._accumulated = accumulated
        accumulated.checkpoint = Autosave(trained.settings.checkpoint)
        accumulated.advance(trained, batches)
        self._settle(trained)

    def _settle(self, trained: Trained) -> None:
        """What follows from the sums, once, at the likelihood they were gathered under."""
        gathered = self._accumulated
        self.points: TrainingPoints | ForgottenPoints = self._gathered_points()
        trained.likelihood.bind(*self.points.f.shape)
        for summary in gathered.summaries:
            summary.require_finite()  # at the fit: eigenvectors may be made long after it
        self._extras = self.form.settled(gathered.summaries, gathered.frames)
        self._likelihood = copy.deepcopy(trained.likelihood)
        self._scale = 1.0

    def _gathered_points(self) -> TrainingPoints:
        """Outputs and targets of all examples; kept once, here."""
        points = self._accumulated.points
        self._accumulated.forget()
        return points

    @property
    def name(self) -> str:
        """What `structure=` called it."""
        return self.form.name

    @property
    def parts(self) -> list[Part]:
        """What shares a factorization, and in which form."""
        return list(self._accumulated.parts)

    @property
    def frames(self) -> Sequence[Frame]:
        """Eigenbases of the parts."""
        gathered = self._accumulated
        if not gathered.frames:
            gathered.frames = [Frame.of(summary) for summary in gathered.summaries]
        return gathered.frames

    def _frames(self) -> list[Frame]:
        """The same for Λ at the likelihood's present hyperparameters."""
        pairs = zip(self.frames, self.parts, strict=True)
        return [frame.scaled(part.table, self._scale) for frame, part in pairs]

    # --- algebra

    def curvature(self, trained: Trained) -> StructuredWeightSpace:
        """Algebra at the present hyperparameters."""
        self._follow(trained)
        with torch.no_grad():
            by_group = trained.prior.precision.to(trained.theta)
            named = {name: by_group[trained.prior.group_of(name)] for name in trained.network.shapes}
        gathered = self._accumulated
        algebras = []
        for summary, frame, extra in zip(gathered.summaries, self._frames(), self._extras, strict=True):
            part = summary.part
            precision = named[part.weight]  # a bias that is part of it has the same
            if precision.ndim or part.kind == "diagonal":
                sizes = {name: trained.network.shapes[name].numel() for name in part.names}
                precision = part.gather({name: named[name].expand(size) for name, size in sizes.items()})
            algebras.append(self.form.algebra(summary.scaled(self._scale), frame, extra, precision))
        return StructuredWeightSpace(algebras, trained.prior, trained.network.shapes, trained.theta)

    def _follow(self, trained: Trained) -> None:
        """Bring the sums to the likelihood's present hyperparameters."""
        factor = common_factor(trained, self._likelihood, self.points)
        if factor is not None:
            self._scale = factor
            return
        gathered = replace(self._accumulated)  # what there is stays, until the pass has come to its end
        gathered.frames = list(gathered.frames) if self.form.moments else []
        gathered.again(trained, self._batches)
        self._accumulated = gathered
        self.points = self._gathered_points()
        self._likelihood, self._scale = copy.deepcopy(trained.likelihood), 1.0

    # --- further passes

    def backproject(self, trained: Trained, residual: Tensor) -> Tensor:
        """Jᵀr, (P,): one pass, seeded with r."""
        return backproject(trained, self._batches, residual, trained.settings.batch_size)

    def push(self, trained: Trained, vector: Tensor) -> Tensor:
        """J v, (N, C)."""
        return push(trained, self._batches, vector, trained.settings.batch_size)

    def sensitivity(self, trained: Trained, curvature: StructuredWeightSpace) -> Tensor:
        """∂ log det B/∂Λ_n, (N, C, C), eigenbases held."""
        return self._sensitivity(trained, curvature, None)

    def newton_step(self, trained: Trained, curvature: StructuredWeightSpace, gradient: Tensor) -> NewtonStep:
        """z = H⁻¹g; zᵀ(H - P0)z is this structure's own."""
        z = curvature.newton(gradient)
        own = *curvature.quadratic(z), lambda: self._sensitivity(trained, curvature, z)
        return NewtonStep(z, self.push(trained, z), own)

    def _sensitivity(self, trained: Trained, curvature: StructuredWeightSpace, z: Tensor | None) -> Tensor:
        passes = read_rows(trained, self._batches, None, trained.settings.batch_size, "likelihood gradients")
        return gather((curvature.sensitivity(rows, z) for rows in passes), self.points.num_examples).rows

    # --- more data

    def another(self, trained: Trained, batches: Source) -> StructuredStructure:
        """The same form fitted to other data, in this eigenbasis."""
        accumulated = Accumulation(self.form, model=ModelSignature(trained), parts=list(self.parts))
        if self.form.moments:
            accumulated.frames = list(self.frames)
        return StructuredStructure(trained, batches, self.form, accumulated)

    def part(self, trained: Trained, index: Tensor) -> StructuredStructure:
        """Sums over those alone, in this eigenbasis, from another pass."""
        return self.another(trained, selected(self._batches, index, self.points.num_examples))

    def rows_at(self, trained: Trained, index: Tensor) -> Iterator[Rows]:
        """From another pass."""
        batches = selected(self._batches, index, self.points.num_examples)
        yield from read_rows(trained, batches, None, trained.settings.batch_size, "Jacobians")

    def merged(self, trained: Trained, other: StructuredStructure) -> StructuredStructure:
        """Sums over both data sets; forms whose sums live in an eigenbasis must share it."""
        _require_mergeable(self, other)
        for one in (self, other):
            one._follow(trained)
        ours, theirs = self._accumulated, other._accumulated
        total = copy.copy(self)
        pairs = zip(ours.summaries, theirs.summaries, strict=True)
        summaries = [a.scaled(self._scale).merged(b.scaled(other._scale)) for a, b in pairs]
        f = gather([self.points.f, other.points.f])  # refused here if a checkpoint held none
        points = self.points.joined(trained.likelihood, other.points)
        frames = list(ours.frames) if self.form.moments else []
        total._accumulated = replace(
            ours, summaries=summaries, frames=frames, f=f, targets=gather([points.targets]),
            weights=gather([] if points.weights is None else [points.weights]),
            examples_done=ours.examples_done + theirs.examples_done,
        )  # fmt: skip
        total._batches = Joined([self._batches, other._batches])
        total._settle(trained)
        return total

    def copied(self) -> StructuredStructure:
        """The same, to be moved elsewhere while this one stays."""
        other = copy.copy(self)
        other._accumulated, other._likelihood = self._accumulated.copy(), copy.deepcopy(self._likelihood)
        return other

    # --- checkpoints

    def state(self, trained: Trained, include_data: bool) -> dict[str, Any]:
        """The sums at the present likelihood, and the eigenbasis, if it was asked for."""
        self._follow(trained)
        gathered = self._accumulated
        frames = self._frames()
        now = replace(
            gathered, summaries=[s.scaled(self._scale) for s in gathered.summaries],
            frames=frames if all(frame.made for frame in frames) else [],
        )  # fmt: skip
        return record(now, include_data=False) | {
            "extras": [None if extra is None else vars(extra).copy() for extra in self._extras]
        }

    @classmethod
    def restored(
        cls, trained: Trained, saved: dict[str, Any], points: TrainingPoints | ForgottenPoints, batches: Batches | None
    ) -> StructuredStructure:
        """From a checkpoint."""
        made = cls.__new__(cls)
        gathered = from_record(saved)
        made.form, made._batches, made._accumulated = gathered.form, kept_or_missing(batches), gathered
        made._extras = [None if extra is None else LowRank(**extra) for extra in saved["extras"]]
        made._likelihood, made._scale = copy.deepcopy(trained.likelihood), 1.0
        made.points = points
        return made

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move the sums, and where batches go."""
        gathered = self._accumulated
        gathered.summaries = [summary.to(device, dtype) for summary in gathered.summaries]
        gathered.frames = [frame.to(device, dtype) for frame in gathered.frames]
        self._extras = [None if extra is None else extra.to(device, dtype) for extra in self._extras]
        self._batches.device, self.points = device, self.points.to(device, dtype)
        self._likelihood.to(device)


def _borrow(accumulated: Accumulation, form: Form, trained: Trained) -> None:
    """Take parts and eigenbasis from another posterior, if the form names one."""
    other: Any = getattr(form, "basis", None)
    if other is None:
        return
    structure = getattr(other, "fitted", None)
    if not isinstance(structure, StructuredStructure) or structure.form.kind != "kronecker":
        raise UnsupportedError('basis= a posterior with structure "kfac", "ekfac" or "inf"', repr(other),
                               "Fit KFAC first, to all data or to any part of them.")
    if other.network.shapes != trained.network.shapes:
        raise UnsupportedError("basis= a posterior of the same network", "one with other parameters",
                               "Fit the basis with the same network and parameters=.")
    if structure.form.squares != form.squares and any(part.entries[0] > 1 for part in structure.parts):
        raise UnsupportedError("a basis of the same kind where convolutions have groups", repr(structure.form.name),
                               "Take the basis from a posterior of the same structure.")
    accumulated.parts, accumulated.frames = list(structure.parts), list(structure.frames)


def _require_same_model(accumulated: Accumulation, trained: Trained) -> None:
    """What is resumed must go on as it began."""
    for what, now in ModelSignature(trained).items():
        if accumulated.model.get(what) != now:
            raise UnsupportedError(f"to resume with the {what} of the interrupted fit", "another",
                                   "Pass the same arguments, or start anew without resume=.")


def _require_mergeable(first: StructuredStructure, second: StructuredStructure) -> None:
    if form_record(first.form) != form_record(second.form):
        raise UnsupportedError(f"two posteriors of structure {form_words(first.form)}", form_words(second.form),
                               "Fit both with the same structure and options.")
    same = len(first.parts) == len(second.parts)
    same = same and all(
        (a.kind, a.names, a.entries) == (b.kind, b.names, b.entries)
        for a, b in zip(first.parts, second.parts, strict=True)
    )
    if not same:
        raise UnsupportedError(f"two {first.form.name!r} posteriors of one network", f"{second.form.name!r}, or other "
                               "parts", "Fit both with the same network, structure and prior groups.")
    if not first.form.moments:
        return
    for one, other in zip(first.frames, second.frames, strict=True):
        for a, b in ((one.basis.left, other.basis.left), (one.basis.right, other.basis.right)):
            if a is not None and not torch.equal(a, b.to(a)):
                raise UnsupportedError("one eigenbasis for both posteriors", "two",
                                       f"Fit both with {first.form.name.upper()}(basis=kfac_posterior).")
