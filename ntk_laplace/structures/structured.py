"""structure="kfac", "ekfac", "inf", "diag": block approximations of H from sums over streaming data."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.curvature import (
    BlockDiagonalPrecision,
    Eigenbasis,
    LowRank,
    ParameterBlock,
    PosteriorPrecision,
    Summary,
)
from ntk_laplace.errors import UnsupportedError
from ntk_laplace.model.data import Joined, Source
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.runtime.reflections import Reflections
from ntk_laplace.structures.accumulation import Accumulation
from ntk_laplace.structures.block_spec import BlockBasis, BlockSpec, HasEigenbasis
from ntk_laplace.structures.data_passes import (
    ModelSignature,
    common_factor,
    per_example,
    selected,
)
from ntk_laplace.structures.model import LinearizedModel
from ntk_laplace.structures.resuming import require_same_model, resumed, save_regularly
from ntk_laplace.structures.streamed import StreamedStructure
from ntk_laplace.structures.structure import Saved, Structure, no_basis, of_kind


class StructuredSpec(BlockSpec):
    """A `BlockSpec` with its fit."""

    def fit(self, model: LinearizedModel, source: Source) -> StructuredStructure:
        """Sum over the data, in one or two passes; a fit that was interrupted is resumed.

        Raises
        ------
        UnsupportedError
            If the fit to resume, or the basis, belongs to another model.
        """
        accumulated = resumed(model.settings, self, model.network.device)
        if accumulated is None:
            accumulated = Accumulation(self, signature=ModelSignature(model))
            _reuse_eigenbasis(accumulated, self.basis, model)
            save_regularly(accumulated, model.settings)
        else:
            require_same_model(accumulated, model)
            save_regularly(accumulated, model.settings, resumed=True)
        return _fitted(model, source, self, accumulated)

    def restored(self, model: LinearizedModel, saved: Saved) -> StructuredStructure:
        """From the sums of a checkpoint."""
        gathered = Accumulation.from_record(saved.state)
        extras = [None if extra is None else LowRank(**extra) for extra in saved.state["extras"]]
        at = _AtLikelihood(gathered, copy.deepcopy(model.likelihood), found=extras)
        return StructuredStructure(of_kind(StructuredSpec, gathered.spec), saved.source, saved.points, at=at)


def _fitted(
    model: LinearizedModel, source: Source, spec: StructuredSpec, accumulated: Accumulation
) -> StructuredStructure:
    """Run or continue the passes over the data."""
    spec.check(model.prior)
    reducer = model.settings.reducer
    count = source.length if reducer.world_size == 1 else source.numbers(reducer)[1]
    if count is not None:
        model.likelihood.bind(count, model.network.num_outputs)
    accumulated.advance(model, source)
    points = accumulated.points()
    accumulated.forget()
    model.likelihood.bind(*points.f.shape)
    return StructuredStructure(spec, source, points, at=_AtLikelihood.of(accumulated, model.likelihood))


def block_precision(
    spec: BlockSpec, parts: Sequence[tuple[Summary, Eigenbasis, Any]], prior: GaussianPrior, like: Tensor
) -> BlockDiagonalPrecision:
    """H from the sums of each parameter block, their eigenbases and extra state, at the prior's present precisions."""
    with torch.no_grad():
        by_group = prior.precision.to(like)
        named = {name: by_group[prior.group_of(name)] for name in prior.shapes}
    algebras = []
    for summary, eigenbasis, extra in parts:
        block = summary.block
        precision = named[block.weight]
        if precision.ndim or len({prior.group_of(name) for name in block.names}) > 1:
            precision = block.gather({name: named[name].expand(prior.shapes.sizes[name]) for name in block.names})
        algebras.append(spec.algebra(summary, eigenbasis, extra, precision))
    return BlockDiagonalPrecision(algebras, prior, like)


@dataclass
class _AtLikelihood:
    """The sums, and a copy of the likelihood at which they were taken: Λ now is `scale` times Λ then.

    Attributes
    ----------
    accumulated : Accumulation
    likelihood : Likelihood
    scale : float
    found : sequence, optional
        The extra state, once it is derived.
    """

    accumulated: Accumulation
    likelihood: Likelihood
    scale: float = 1.0
    found: Sequence[Any] | None = None

    @classmethod
    def of(cls, accumulated: Accumulation, likelihood: Likelihood) -> _AtLikelihood:
        """Complete sums."""
        for summary in accumulated.summaries:
            summary.require_finite()  # checked at the fit: eigenvectors may be computed much later
        return cls(accumulated, copy.deepcopy(likelihood))

    @property
    def extras(self) -> Sequence[Any]:
        """Extra state of each parameter block, `BlockSpec.finalized`: not of sums that only enter others."""
        if self.found is None:
            self.found = self.accumulated.spec.finalized(self.accumulated.summaries, self.accumulated.eigenbases)
        return self.found

    @property
    def eigenbases(self) -> list[Eigenbasis]:
        """Eigenbases of the parameter blocks at the likelihood of the sums."""
        gathered = self.accumulated
        if not gathered.eigenbases:
            gathered.eigenbases = [Eigenbasis.of(summary, gathered.spec.factor_rank) for summary in gathered.summaries]
        return gathered.eigenbases

    def scaled_eigenbases(self) -> list[Eigenbasis]:
        """Eigenbases for Λ at the likelihood's current hyperparameters."""
        pairs = zip(self.eigenbases, self.accumulated.parameter_blocks, strict=True)
        return [eigenbasis.scaled(block.table, self.scale) for eigenbasis, block in pairs]


@dataclass
class StructuredStructure(StreamedStructure):
    """Block-diagonal weight space: Kronecker factors, dense blocks, diagonals.

    A change of the prior costs O(P). A change of the likelihood that multiplies all Λ_n by one number (a Gaussian's
    noise) rescales the sums; any other needs another pass over the data, in the eigenbasis of the fit.

    Attributes
    ----------
    spec : StructuredSpec
        KFAC, EKFAC, INF or Diagonal, with their options.
    at : _AtLikelihood
        A cache of the sums.
    """

    spec: StructuredSpec
    at: _AtLikelihood = field(kw_only=True)

    @property
    def parameter_blocks(self) -> list[ParameterBlock]:
        return list(self.at.accumulated.parameter_blocks)

    @property
    def eigenbases(self) -> Sequence[Eigenbasis]:
        """Eigenbases of the parameter blocks."""
        return self.at.eigenbases

    def summaries(self, model: LinearizedModel) -> list[Summary]:
        """The sums of each parameter block at the current hyperparameters."""
        self._follow(model)
        return [summary.scaled(self.at.scale) for summary in self.at.accumulated.summaries]

    # --- algebra

    def posterior_precision(self, model: LinearizedModel) -> BlockDiagonalPrecision:
        parts = list(zip(self.summaries(model), self.at.scaled_eigenbases(), self.at.extras, strict=True))
        return block_precision(self.spec, parts, model.prior, model.theta)

    def _follow(self, model: LinearizedModel) -> None:
        """Update the sums to the likelihood's current hyperparameters."""
        factor = common_factor(model, self.at.likelihood, self.points)
        if factor is not None:
            self.at.scale = factor
            return
        gathered = replace(self.at.accumulated, drawn=self.points.drawn)  # the old sums are valid until the pass ends
        gathered.eigenbases = list(gathered.eigenbases) if self.spec.second_pass else []
        gathered.again(model, self.data)
        gathered.forget()
        self.at = _AtLikelihood(gathered, copy.deepcopy(model.likelihood), found=self.at.extras)

    # --- further passes

    def _batch(self, model: LinearizedModel, cotangents: int) -> int | None:
        """Batches of the fit: rows are blocks of layers, never dense."""
        return model.settings.batch_size

    def sensitivity(self, model: LinearizedModel, precision: PosteriorPrecision) -> Tensor:
        """∂ log det B/∂Λ_n, (N, C, C), at fixed eigenbases."""
        return self._sensitivity(model, precision, None)

    def curve_sensitivity(self, model: LinearizedModel, precision: PosteriorPrecision, z: Tensor) -> Tensor:
        """∂ zᵀHz/∂Λ_n with z fixed, (N, C, C), at fixed eigenbases."""
        return self._sensitivity(model, precision, z)

    def _sensitivity(self, model: LinearizedModel, precision: PosteriorPrecision, z: Tensor | None) -> Tensor:
        blocks = of_kind(BlockDiagonalPrecision, precision)
        return per_example(model, self.data, model.settings.batch_size, "likelihood gradients",
                           lambda rows: blocks.sensitivity(rows, z))

    # --- more data

    def refit_on(self, model: LinearizedModel, source: Source) -> StructuredStructure:
        """The same structure fitted to other data, in this eigenbasis."""
        accumulated = Accumulation(self.spec, signature=ModelSignature(model),
                                   parameter_blocks=list(self.parameter_blocks))
        if self.spec.second_pass:
            accumulated.eigenbases = list(self.eigenbases)
        return _fitted(model, source, self.spec, accumulated)

    def subset(self, model: LinearizedModel, index: Tensor) -> StructuredStructure:
        """Sums over some points, in this eigenbasis, from another pass."""
        return self.refit_on(model, selected(model, self.data, index, self.points.num_examples))

    def merged(self, model: LinearizedModel, other: Structure) -> StructuredStructure:
        """Sums over both data sets; structures whose sums are in an eigenbasis must share it."""
        other = of_kind(StructuredStructure, other)
        _require_mergeable(self, other)
        for one in (self, other):
            one._follow(model)
        ours, theirs = self.at.accumulated, other.at.accumulated
        pairs = zip(ours.summaries, theirs.summaries, strict=True)
        total = replace(ours, summaries=[a.scaled(self.at.scale).merged(b.scaled(other.at.scale)) for a, b in pairs],
                        eigenbases=list(ours.eigenbases) if self.spec.second_pass else [])
        points = self.points.joined(model.likelihood, other.points)
        return StructuredStructure(self.spec, Joined([self.data, other.data]), points,
                                   at=_AtLikelihood.of(total, model.likelihood))

    # --- storage

    def state(self, model: LinearizedModel, include_data: bool) -> dict[str, Any]:
        """The sums at the current likelihood, and the eigenbasis if it was computed."""
        self._follow(model)
        at = self.at
        eigenbases = at.scaled_eigenbases()
        now = replace(at.accumulated, summaries=[s.scaled(at.scale) for s in at.accumulated.summaries],
                      eigenbases=eigenbases if all(eigenbasis.made for eigenbasis in eigenbases) else [])
        return now.record(include_data=False) | {
            "extras": [None if extra is None else vars(extra).copy() for extra in at.extras]
        }

    def to(self, device: torch.device, dtype: torch.dtype) -> StructuredStructure:
        at = self.at
        gathered = replace(at.accumulated,
                           summaries=[summary.to(device, dtype) for summary in at.accumulated.summaries],
                           eigenbases=[eigenbasis.to(device, dtype) for eigenbasis in at.accumulated.eigenbases])
        moved = _AtLikelihood(gathered, copy.deepcopy(at.likelihood).to(device), at.scale,
                              [None if extra is None else extra.to(device, dtype) for extra in at.extras])
        return self._moved(device, dtype, at=moved)

    def basis(self, model: LinearizedModel) -> BlockBasis:
        """The eigenbases, for another fit.

        Raises
        ------
        UnsupportedError
            If the structure is diagonal.
        """
        if self.spec.kind != "kronecker":
            raise no_basis(repr(self.name))
        return BlockBasis(self.name, model.network.shapes, tuple(self.parameter_blocks), tuple(self.eigenbases),
                          self.spec.squares)


def _reuse_eigenbasis(accumulated: Accumulation, given: HasEigenbasis | None, model: LinearizedModel) -> None:
    """Take parameter blocks and eigenbases from the spec's `basis`, if it has one."""
    if given is None:
        return
    if not isinstance(given, HasEigenbasis):
        raise no_basis(repr(given))
    found = given.eigenbasis()
    if found.shapes != model.network.shapes:
        raise UnsupportedError("basis= a posterior of the same network", "one with other parameters",
                               "Fit the basis with the same network and parameters=.")
    if found.squares != accumulated.spec.squares and any(block.entries[0] > 1 for block in found.parameter_blocks):
        raise UnsupportedError("a basis of the same kind where convolutions have groups", repr(found.structure),
                               "Take the basis from a posterior of the same structure.")
    sides = [side for one in found.eigenbases for side in (one.basis.left, one.basis.right) if side is not None]
    if accumulated.spec.squares and any(isinstance(side, Reflections) for side in sides):
        raise UnsupportedError("a basis= with all eigenvectors for INF", "one of KFAC(rank=...)",
                               "Leave the rank out of the basis, or fit EKFAC(basis=...).")
    dtype, device = model.jacobian_pass.dtype, model.network.device
    other = next((side.dtype for side in sides if side.dtype != dtype), None)
    if other is not None:
        raise UnsupportedError(f"basis= a posterior with dtype={dtype}", f"one with {other}",
                               "Fit both with the same dtype: a cast basis is not orthogonal to rounding.")
    accumulated.parameter_blocks = list(found.parameter_blocks)
    accumulated.eigenbases = [eigenbasis.to(device, dtype) for eigenbasis in found.eigenbases]


def _require_mergeable(first: StructuredStructure, second: StructuredStructure) -> None:
    if (first.name, first.spec.options()) != (second.name, second.spec.options()):
        raise UnsupportedError(f"two posteriors of structure {first.spec}", str(second.spec),
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
            if a is not None and (b is None or not _same(a, b)):
                raise UnsupportedError("one eigenbasis for both posteriors", "two",
                                       f"Fit both with {first.spec.name.upper()}(basis=kfac_posterior).")


def _same(one: Tensor | Reflections, other: Tensor | Reflections) -> bool:
    a, b = (side.vectors if isinstance(side, Reflections) else side for side in (one, other))
    return a.shape == b.shape and torch.equal(a, b.to(a))
