"""Accumulation: one or two passes over streaming data, in bounded memory; an interrupted fit resumes without loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.curvature import (
    Draws,
    Eigenbasis,
    ParameterBlock,
    Products,
    Summary,
    find_parameter_blocks,
)
from ntk_laplace.errors import FitInterrupted
from ntk_laplace.jacobian import FusedLayer, FusedLayers, Jacobian, placed
from ntk_laplace.model.data import Batches, Inputs, RowBuffer, Source, fill_buffer, num_examples
from ntk_laplace.runtime.reduction import Reducer
from ntk_laplace.runtime.signals import terminable, uninterrupted
from ntk_laplace.structures.agreement import agreed_blocks, plain_blocks, total, unreached
from ntk_laplace.structures.batch_roots import Roots, canonical_targets, counts_of
from ntk_laplace.structures.block_spec import BlockSpec
from ntk_laplace.structures.data_passes import read_batches
from ntk_laplace.structures.model import LinearizedModel
from ntk_laplace.structures.points import TrainingPoints
from ntk_laplace.structures.registry import structure_of
from ntk_laplace.structures.structure import of_kind

FIRST, SECOND = "first", "second"  # passes: factors, blocks and diagonals; then second moments in the eigenbasis
SECOND_SUMS = ("moments", "squares")  # what the second pass adds to a Kronecker block


def _saved_nowhere(gathered: Accumulation, now: bool = False) -> None:
    """The checkpoint of a fit without a file."""


@dataclass
class Accumulation:
    """The sums of a structured fit so far; `advance` continues from them.

    Attributes
    ----------
    spec : BlockSpec
    signature : mapping of str to str
        Fingerprints of the network, the likelihood and so on.
    stage : str
        The current pass.
    done : RowBuffer
        Global numbers of the examples that this process has processed in that pass, in order.
    parameter_blocks : list of ParameterBlock
        Determined by the first batch.
    summaries : list of Summary
    eigenbases : list of Eigenbasis
        One per block, after the first pass (from the start if they are reused from another fit).
    f, targets, weights : RowBuffer
        Outputs, canonical targets, and example weights if there are any: of the examples `done` in the first pass, of
        all examples of all processes after it.
    drawn : Draws, optional
        As of the `TrainingPoints`.
    checkpoint : callable
        Called after each batch to save the state if it is due, and with ``now=True`` at an interruption.
    """

    spec: BlockSpec
    signature: Mapping[str, str] = field(default_factory=dict)
    stage: str = FIRST
    done: RowBuffer = field(default_factory=RowBuffer)
    parameter_blocks: list[ParameterBlock] = field(default_factory=list)
    summaries: list[Summary] = field(default_factory=list)
    eigenbases: list[Eigenbasis] = field(default_factory=list)
    f: RowBuffer = field(default_factory=RowBuffer)
    targets: RowBuffer = field(default_factory=RowBuffer)
    weights: RowBuffer = field(default_factory=RowBuffer)
    drawn: Draws | None = None
    checkpoint: Callable[..., None] = field(default=_saved_nowhere, repr=False, compare=False)

    @property
    def examples_done(self) -> int:
        """Number of examples that this process has processed in the current pass."""
        return len(self.done)

    def advance(self, model: LinearizedModel, batches: Source) -> None:
        """Continue to the end of the data, through all passes.

        Raises
        ------
        FitInterrupted
            On Ctrl-C, or of several processes also on SIGTERM, between two batches. Its `state` is this object, from
            which the fit resumes.
        ProcessLostError
            If another process died. What this one has summed is in its checkpoint.
        """
        borrowed = bool(self.eigenbases)
        self._share_eigenbases(model)
        if self.stage == FIRST and not self.examples_done:
            self.forget(batches.length)
        if self.stage == FIRST:
            self._first_pass(model, batches, borrowed)
            if self.spec.second_pass and not borrowed:
                for summary in self.summaries:
                    summary.require_finite()
                self.eigenbases = [Eigenbasis.of(summary, unique=True) for summary in self.summaries]
                self._share_eigenbases(model)
                self.stage, self.done = SECOND, RowBuffer(batches.length or 0)
        if self.stage == SECOND:
            self._pass(model, batches, "second moments", self._second)
            self.summaries = total(model, self.parameter_blocks, self.summaries, SECOND_SUMS)

    def _first_pass(self, model: LinearizedModel, batches: Source, borrowed: bool) -> None:
        """The first pass, and what follows from the sums, outputs and targets of all processes."""
        self._pass(model, batches, "curvature", partial(self._first, borrowed=borrowed))
        self.summaries = total(model, self.parameter_blocks, self.summaries)
        self.parameter_blocks = [summary.block for summary in self.summaries]
        self._collect(model)
        self._complete(model)

    def again(self, model: LinearizedModel, batches: Source) -> None:
        """Recompute the sums at new hyperparameters of the likelihood: in the same eigenbasis, in one pass.

        Call it on a `copy`: an interrupted pass loses the previous sums.
        """
        self.stage, self.done = FIRST, RowBuffer(batches.length or 0)
        self.parameter_blocks = list(self.parameter_blocks)
        self.summaries = [Summary(block, {}) for block in self.parameter_blocks]
        self.forget(batches.length)
        self._first_pass(model, batches, self.spec.second_pass)

    def forget(self, expected: int | None = None) -> None:
        """Drop outputs, targets and weights, and allocate buffers for the expected number of examples."""
        self.f, self.targets, self.weights = (RowBuffer(expected or 0) for _ in range(3))

    def _pass(self, model: LinearizedModel, batches: Source, what: str, absorb: Callable[..., None]) -> None:
        reducer = model.settings.reducer
        rest = self._rest(batches, reducer)
        try:
            roots, seen = Roots(model, batches, rest, self.drawn), 0
            with terminable(reducer):
                for x, y in read_batches(model, rest, what):
                    numbers = roots.numbers(seen, num_examples(x))
                    with uninterrupted():
                        absorb(model, roots, x, y, seen)
                        self.done.append(numbers)
                    seen += len(numbers)
                    self.checkpoint(self)
        except KeyboardInterrupt as cause:
            self.checkpoint(self, now=True)
            raise FitInterrupted(self, self.examples_done, batches.length) from cause
        if reducer.world_size > 1:  # if another process dies, this one's sums must not be lost
            self.checkpoint(self, now=True)

    def _rest(self, batches: Source, reducer: Reducer) -> Source:
        """The examples that this process still has to read."""
        done = reducer.concat(self.done.rows.long())
        return batches.without(done, reducer) if len(done) and isinstance(batches, Batches) else batches

    def copy(self) -> Accumulation:
        """An independent copy; changing it leaves this one unchanged."""
        summaries = [Summary(s.block, {name: value.clone() for name, value in s.sums.items()}) for s in self.summaries]
        return replace(self, summaries=summaries, parameter_blocks=list(self.parameter_blocks),
                       eigenbases=list(self.eigenbases), done=self.done.copy(), f=self.f.copy(),
                       targets=self.targets.copy(), weights=self.weights.copy())

    def record(self, include_data: bool) -> dict[str, Any]:
        """Plain containers of tensors; the numbers done, outputs, targets and weights only with `include_data`."""
        data = {"f": self.f, "targets": self.targets, "weights": self.weights}
        return {
            "form": {"name": self.spec.name, "options": self.spec.options()},
            "model": dict(self.signature),
            "stage": self.stage,
            "done": self.done.rows.long() if include_data else torch.arange(0, device="cpu"),
            "parts": [block.record() for block in self.parameter_blocks],
            "sums": [dict(summary.sums) for summary in self.summaries],
            "frames": [eigenbasis.record() for eigenbasis in self.eigenbases],
        } | {name: [rows.rows] if include_data and len(rows) else [] for name, rows in data.items()}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Accumulation:
        """Restore an accumulation from its record, of this version or the first."""
        done = record["done"].cpu() if "done" in record else torch.arange(record["examples_done"], device="cpu")
        blocks, sums = [ParameterBlock.from_record(own) for own in record["parts"]], record["sums"]
        spec = structure_of(record["form"]["name"], record["form"]["options"])
        return cls(
            of_kind(BlockSpec, spec),  # type: ignore[type-abstract]  # the class is only compared
            dict(record["model"]),
            record["stage"], fill_buffer([done]), blocks,
            [Summary(block, dict(own)) for block, own in zip(blocks, sums, strict=True)] if sums else [],
            [Eigenbasis.from_record(own) for own in record["frames"]],
            fill_buffer(record["f"]), fill_buffer(record["targets"]), fill_buffer(record.get("weights", [])),
        )

    def _first(
        self, model: LinearizedModel, roots: Roots, x: Inputs, y: Tensor, seen: int, borrowed: bool
    ) -> None:
        """First pass, one batch: find the parameter blocks (first batch only), add to the sums, store outputs."""
        n = num_examples(x)
        targets, weights = canonical_targets(model, y, n, seen), roots.weights(seen, n)
        counts, fused_layers = counts_of(model, targets, weights), self._fused_layers(model, moments=borrowed)
        for here, rows in placed(self._rows(model, roots, x, targets, seen, counts, fused_layers)):
            own = None if counts is None else counts[here]
            if not self.parameter_blocks:
                found = find_parameter_blocks(rows, model.prior, self.spec.kind, self.spec.squares)
                self.parameter_blocks = agreed_blocks(model, found, self.spec.kind)
                _require_memory(self.parameter_blocks, self.spec, model)
            self._meet(rows, model)
            if not self.summaries:
                self.summaries = [Summary(part, {}) for part in self.parameter_blocks]
            products = Products()
            for number, summary in enumerate(self.summaries):
                if borrowed and summary.block.kind == "kronecker":
                    summary.add_second_moments(rows, self.eigenbases[number].basis, self.spec.squares)
                else:
                    summary.add_factors(rows, self.spec.sharing, products, own, self.spec.factor_rank)
            self.f.append(rows.f)
            del rows, products  # before the next are computed
        self.targets.append(targets)
        if weights is not None:
            self.weights.append(weights)

    def _meet(self, rows: Jacobian, model: LinearizedModel) -> None:
        """Add blocks for parameters that no earlier batch reached; their curvature is zero so far.

        Raises
        ------
        UnsupportedError
            If the Kronecker factors would depend on how the data are split into batches.
        """
        known = {name for part in self.parameter_blocks for name in part.names}
        late = [block for block in rows.blocks if not set(block.names) <= known]
        if not late:
            return
        names = sorted({name for block in late for name in block.names} - known)
        if self.spec.kind != "diagonal":
            raise unreached(names, "a batch that is the first to do so")
        whole = [block for block in late if not set(block.names) & known]
        found = find_parameter_blocks(replace(rows, blocks=tuple(whole)), model.prior, self.spec.kind) if whole else []
        found += plain_blocks(set(names) - {name for part in found for name in part.names}, model)
        self.parameter_blocks += found
        self.summaries += [Summary(part, {}) for part in found] if self.summaries else []

    def _collect(self, model: LinearizedModel) -> None:
        """Outputs, targets and weights of all processes, by global number."""
        reducer = model.settings.reducer
        if reducer.world_size == 1 and torch.equal(self.done.so_far, torch.arange(len(self.done), device="cpu")):
            return
        order = reducer.concat(self.done.rows.long()).argsort()
        if any(reducer.gather(len(self.weights) > 0)) and not len(self.weights) and len(self.f):
            self.weights.append(self.f.rows.new_ones(len(self.f), dtype=torch.float64))
        for name in ("f", "targets", "weights"):
            rows = reducer.concat(getattr(self, name).rows).to(model.network.device)
            setattr(self, name, fill_buffer([rows[order.to(rows.device)]] if len(rows) else []))

    def _share_eigenbases(self, model: LinearizedModel) -> None:
        """Use rank 0's eigenvectors."""
        reducer = model.settings.reducer
        if reducer.world_size > 1:
            for number, eigenbasis in enumerate(self.eigenbases):  # in place: one of them is there twice at a time
                self.eigenbases[number] = eigenbasis.shared(reducer)

    def _complete(self, model: LinearizedModel) -> None:
        """Add zero diagonal blocks for parameters that no example reaches: their precision is the prior's."""
        known = {name for part in self.parameter_blocks for name in part.names}
        added = plain_blocks(set(model.network.names) - known, model)
        self.parameter_blocks = [*self.parameter_blocks, *added]
        self.eigenbases += [Eigenbasis() for _ in added] if self.eigenbases else []
        self.summaries += [Summary(part, {}) for part in added]
        for summary in self.summaries:
            if summary.block.kind == "diagonal" and "squares" not in summary.sums:
                zeros = torch.zeros(summary.block.entries, dtype=model.jacobian_pass.dtype, device=model.network.device)
                summary.sums["squares"] = zeros

    def _second(self, model: LinearizedModel, roots: Roots, x: Inputs, y: Tensor, seen: int) -> None:
        """Second pass, one batch: second moments in the eigenbasis."""
        n = num_examples(x)
        targets = canonical_targets(model, y, n, seen)
        counts = counts_of(model, targets, roots.weights(seen, n))
        for rows in self._rows(model, roots, x, targets, seen, counts, self._fused_layers(model, moments=True)):
            for summary, eigenbasis in zip(self.summaries, self.eigenbases, strict=True):
                if summary.block.kind == "kronecker":
                    summary.add_second_moments(rows, eigenbasis.basis, self.spec.squares)
            del rows  # before the next are computed

    def _rows(
        self, model: LinearizedModel, roots: Roots, x: Inputs, targets: Tensor, seen: int, counts: Tensor | None,
        fused_layers: FusedLayers,
    ) -> Iterator[Jacobian]:
        return model.jacobian_pass.batches(x, roots.at(targets, seen, counts), model.settings.batch_size, seen,
                                           fused_layers)

    def _fused_layers(self, model: LinearizedModel, moments: bool) -> FusedLayers:
        """Layers whose sums can be accumulated during backward: blocks of the spec's kind; all on the first batch.

        With `moments`, layers whose second moments in a basis can be: a last layer.
        """
        if not self.parameter_blocks:
            return self.spec.fused_layers(dict.fromkeys(model.network.names), moments)
        blocks, kind = self.parameter_blocks, self.spec.kind
        plain = {block.weight for block in blocks if block.kind == "block"}  # biases with separate blocks
        layers = {block.weight: block.layer for block in blocks if block.kind == kind and block.layer}
        if plain:
            layers = {
                name: layer if layer.biases != (None,) else FusedLayer(layer.outputs, {None, *plain})
                for name, layer in layers.items()
            }
        return self.spec.fused_layers(layers, moments)

    def points(self) -> TrainingPoints:
        """Outputs, targets and weights of all examples, once all have been read."""
        f, weights = self.f.rows, self.weights.rows
        return TrainingPoints(f, self.targets.rows, weights.to(f) if len(weights) else None)


def _require_memory(parts: list[ParameterBlock], spec: BlockSpec, model: LinearizedModel) -> None:
    """Raise an error if the sums do not fit in memory, before any is allocated."""
    largest = max(parts, key=lambda part: part.numbers, default=None)
    ways = ['structure="diag", which keeps one number per parameter'] * (spec.kind != "diagonal")
    ways += ['parameters="last_layer"', *["dtype=torch.float32"] * (model.jacobian_pass.dtype != torch.float32)]
    spec.memory(parts, model).require(model, f"the sums of structure={spec.name!r}, most of them for {largest}",
                                      f"Use {', or '.join(ways)}.")
