"""Accumulation: one or two passes over streaming data, in bounded memory, interrupted and resumed without loss."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from ntk_laplace.curvature import Form, Frame, Part, Products, Summary, find_parts, plain_part
from ntk_laplace.data import Gathered, Inputs, Source, num_examples
from ntk_laplace.errors import DataError, FitInterrupted, TargetError, UnsupportedError
from ntk_laplace.factors import NO_FOLD, Fold, Layer, Rows
from ntk_laplace.points import TrainingPoints
from ntk_laplace.resources import require_memory
from ntk_laplace.structures.base import Trained
from ntk_laplace.structures.reading import read_batches

__all__ = ["FIRST", "SECOND", "Accumulation"]

FIRST, SECOND = "first", "second"  # passes: factors, blocks and diagonals; then moments in the eigenbasis


@dataclass
class Accumulation:
    """What a fit has gathered so far; `advance` goes on from there.

    Attributes
    ----------
    form : Form
    model : mapping of str to str
        Fingerprints of the network, the likelihood and so on.
    stage : str
        The pass that is under way.
    batches_done, examples_done : int
        In that pass.
    parts : list of Part
        Known from the first batch on.
    summaries : list of Summary
    frames : list of Frame
        The eigenbasis, once it is settled (or from the start, if it is another fit's).
    f, targets, weights : Gathered
        Outputs, canonical targets, and example weights if there are any.
    checkpoint : callable
        Called after each batch, to save what there is if it is time, and with ``now=True`` at an interruption.
    """

    form: Form
    model: Mapping[str, str] = field(default_factory=dict)
    stage: str = FIRST
    batches_done: int = 0
    examples_done: int = 0
    parts: list[Part] = field(default_factory=list)
    summaries: list[Summary] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)
    f: Gathered = field(default_factory=Gathered)
    targets: Gathered = field(default_factory=Gathered)
    weights: Gathered = field(default_factory=Gathered)
    checkpoint: Callable[..., None] = field(default=lambda gathered, now=False: None, repr=False, compare=False)

    def advance(self, trained: Trained, batches: Source) -> None:
        """Go on to the end of the data, through all passes.

        Raises
        ------
        FitInterrupted
            On Ctrl-C, between two batches; this object, its `state`, holds all that was gathered.
        """
        borrowed = bool(self.frames)
        if self.stage == FIRST and not self.batches_done:
            self.forget(batches.length)
        if self.stage == FIRST:
            self._pass(trained, batches, "curvature", partial(self._first, borrowed=borrowed))
            self._complete(trained)
            if self.form.moments and not borrowed:
                for summary in self.summaries:
                    summary.require_finite()
                self.frames = [Frame.of(summary) for summary in self.summaries]
                self.stage, self.batches_done, self.examples_done = SECOND, 0, 0
        if self.stage == SECOND:
            self._pass(trained, batches, "second moments", self._second)

    def again(self, trained: Trained, batches: Source) -> None:
        """Gather anew at other hyperparameters of the likelihood: in the same eigenbasis, in one pass.

        For a `copy`: what there was is gone, should the pass not come to its end.
        """
        self.stage, self.batches_done, self.examples_done = FIRST, 0, 0
        self.parts, self.summaries = list(self.parts), [Summary(part, {}) for part in self.parts]
        self.forget(batches.length)
        self._pass(trained, batches, "curvature", partial(self._first, borrowed=self.form.moments))
        self._complete(trained)

    def forget(self, expected: int | None = None) -> None:
        """Let go of outputs, targets and weights, and make room for as many as are expected."""
        self.f, self.targets, self.weights = (Gathered(expected or 0) for _ in range(3))

    def _pass(self, trained: Trained, batches: Source, what: str, absorb: Callable[..., None]) -> None:
        try:
            roots = _Roots(trained, batches)
            for x, y in self._rest(read_batches(trained, batches, what)):
                with _uninterrupted():
                    absorb(trained, roots, x, y)
                    self.batches_done += 1
                    self.examples_done += num_examples(x)
                self.checkpoint(self)
        except KeyboardInterrupt as cause:
            self.checkpoint(self, now=True)
            raise FitInterrupted(self, self.examples_done, batches.length) from cause

    def _rest(self, reader: Iterator[tuple[Inputs, Tensor]]) -> Iterator[tuple[Inputs, Tensor]]:
        """Batches that were not yet seen; those that were must be as many examples as then."""
        skipped = sum(num_examples(x) for x, _ in islice(reader, self.batches_done))
        if skipped != self.examples_done:
            raise DataError(f"the {self.examples_done:,} examples of the interrupted fit in the first "
                            f"{self.batches_done} batches", f"{skipped:,}",
                            "Resume with the same data in the same batches.")
        yield from reader

    def copy(self) -> Accumulation:
        """The same, to go on with while this one stays."""
        summaries = [Summary(s.part, {name: value.clone() for name, value in s.sums.items()}) for s in self.summaries]
        return replace(self, summaries=summaries, parts=list(self.parts), frames=list(self.frames), f=self.f.copy(),
                       targets=self.targets.copy(), weights=self.weights.copy())

    def _first(self, trained: Trained, roots: _Roots, x: Inputs, y: Tensor, borrowed: bool) -> None:
        """One batch: parts on the first, sums on all; outputs and targets are kept."""
        n, seen = num_examples(x), self.examples_done
        targets, weights = _canonical(trained, y, n, seen), roots.weights(seen, n)
        counts, done = _counts(trained, targets, weights), 0
        fold = NO_FOLD if borrowed else self._fold(trained)
        for rows in self._rows(trained, roots, x, targets, seen, counts, fold):
            own = None if counts is None else counts[done : done + rows.num_examples]
            done += rows.num_examples
            if not self.parts:
                self.parts = find_parts(rows, trained.prior, self.form.kind, self.form.squares)
                _require_memory(self.parts, self.form, trained)
            self._meet(rows, trained)
            if not self.summaries:
                self.summaries = [Summary(part, {}) for part in self.parts]
            products = Products()
            for number, summary in enumerate(self.summaries):
                if borrowed and summary.part.kind == "kronecker":
                    summary.add_moments(rows, self.frames[number].basis, self.form.squares)
                else:
                    summary.add_factors(rows, getattr(self.form, "sharing", "expand"), products, own)
            self.f.append(rows.f)
        self.targets.append(targets)
        if weights is not None:
            self.weights.append(weights)

    def _meet(self, rows: Rows, trained: Trained) -> None:
        """Parts of parameters that no batch before has reached: so far the curvature is zero there.

        Raises
        ------
        UnsupportedError
            Where Kronecker factors would depend on how the data are cut into batches.
        """
        known = {name for part in self.parts for name in part.names}
        late = [block for block in rows.blocks if not set(block.names) <= known]
        if not late:
            return
        names = sorted({name for block in late for name in block.names} - known)
        if self.form.kind != "diagonal":
            raise UnsupportedError(
                f"every batch to reach {', '.join(names[:3])}", "a batch that is the first to do so",
                'Use structure="diag", "full" or "gp", which follow any graph, or larger batches.',
            )  # fmt: skip
        whole = [block for block in late if not set(block.names) & known]
        found = find_parts(replace(rows, blocks=tuple(whole)), trained.prior, self.form.kind) if whole else []
        found += self._plain(set(names) - {name for part in found for name in part.names}, trained)
        self.parts += found
        self.summaries += [Summary(part, {}) for part in found] if self.summaries else []

    def _plain(self, names: Container[str], trained: Trained) -> list[Part]:
        sizes = {name: shape.numel() for name, shape in trained.network.shapes.items()}
        return [plain_part(name, size) for name, size in sizes.items() if size and name in names]

    def _complete(self, trained: Trained) -> None:
        """Parameters that no example reaches have no curvature, and their prior all the same."""
        known = {name for part in self.parts for name in part.names}
        more = self._plain(set(trained.network.names) - known, trained)
        self.parts = [*self.parts, *more]
        self.frames += [Frame() for _ in more] if self.frames else []
        self.summaries += [Summary(part, {}) for part in more]
        for summary in self.summaries:
            if summary.part.kind == "diagonal" and "squares" not in summary.sums:
                zeros = torch.zeros(summary.part.entries, dtype=trained.factors.dtype, device=trained.network.device)
                summary.sums["squares"] = zeros

    def _second(self, trained: Trained, roots: _Roots, x: Inputs, y: Tensor) -> None:
        """One batch: second moments in the eigenbasis."""
        seen = self.examples_done
        n = num_examples(x)
        targets = _canonical(trained, y, n, seen)
        counts = _counts(trained, targets, roots.weights(seen, n))
        for rows in self._rows(trained, roots, x, targets, seen, counts):
            for summary, frame in zip(self.summaries, self.frames, strict=True):
                if summary.part.kind == "kronecker":
                    summary.add_moments(rows, frame.basis, self.form.squares)

    def _rows(
        self, trained: Trained, roots: _Roots, x: Inputs, targets: Tensor, seen: int, counts: Tensor | None,
        fold: Fold = NO_FOLD,
    ) -> Iterator[Rows]:  # fmt: skip
        return trained.factors.batches(x, roots.at(targets, seen, counts), trained.settings.batch_size, seen, fold)

    def _fold(self, trained: Trained) -> Fold:
        """Sums are enough of parts of the form's own kind, on the first batch of all."""
        if not self.parts:
            return self.form.fold(dict.fromkeys(trained.network.names))
        plain = {part.weight for part in self.parts if part.kind == "block"}  # biases with parts of their own
        layers = {part.weight: part.layer for part in self.parts if part.kind == self.form.kind and part.layer}
        if plain:
            layers = {
                name: layer if layer.biases != (None,) else Layer(layer.outputs, {None, *plain})
                for name, layer in layers.items()
            }
        return self.form.fold(layers)

    @property
    def points(self) -> TrainingPoints:
        """Outputs, targets and weights of all examples."""
        weights = self.weights.rows if len(self.weights) else None
        return TrainingPoints(self.f.rows, self.targets.rows, None if weights is None else weights.to(self.f.rows))


@dataclass(frozen=True)
class _Seeds:
    """S of a batch, once its outputs are known, times the roots of the examples' counts."""

    roots: _Roots
    targets: Tensor
    seen: int
    counts: Tensor | None
    columns: int

    def __call__(self, f: Tensor, part: slice) -> Tensor:
        root = self._once(f, part)
        return root if self.counts is None else root * self.counts[part].to(root).sqrt().view(-1, 1, 1)

    def _once(self, f: Tensor, part: slice) -> Tensor:
        trained, dtype = self.roots.trained, self.roots.trained.factors.dtype
        here = slice(self.seen + part.start, self.seen + part.start + len(f))
        if self.roots.whole is not None:
            return self.roots.whole[here]
        likelihood = trained.likelihood.at(here)
        return trained.root.root(likelihood, f.to(dtype), self.targets[part].to(f.device)).detach()


class _Roots:
    """Where S comes from: each batch's own outputs, or, for labels drawn at random, all outputs at once.

    Drawn labels must not depend on how the data are cut into batches, so a pass for the outputs comes first.
    """

    def __init__(self, trained: Trained, batches: Source) -> None:
        self.trained, self._batches = trained, batches
        self.whole: Tensor | None = None
        self.columns = trained.root.columns(trained.likelihood, trained.network.num_outputs)
        if trained.root.curvature == "mc":
            f, targets = Gathered(batches.length or 0), Gathered(batches.length or 0)
            for x, y in read_batches(trained, batches, "outputs"):
                seen = len(f)
                f.append(trained.network.without_grad(x, seen).to(trained.factors.dtype))
                targets.append(_canonical(trained, y, num_examples(x), seen))
            self.whole = trained.root.root(trained.likelihood, f.rows, targets.rows).detach()

    def at(self, targets: Tensor, seen: int, counts: Tensor | None) -> _Seeds:
        """The roots of one batch."""
        return _Seeds(self, targets, seen, counts, self.columns)

    def weights(self, seen: int, n: int) -> Tensor | None:
        """Example weights of one batch, which has been read."""
        weights = self._batches.weights
        return None if weights is None else weights[seen : seen + n].to(self.trained.network.device)


def _require_memory(parts: list[Part], form: Form, trained: Trained) -> None:
    """Refuse sums that do not fit, before the first of them is allocated."""
    largest = max(parts, key=lambda part: part.numbers, default=None)
    ways = ['structure="diag", which keeps one number per parameter'] * (form.name != "diag")
    ways += ['parameters="last_layer"', *["dtype=torch.float32"] * (trained.factors.dtype != torch.float32)]
    require_memory(
        sum(part.numbers for part in parts) * trained.factors.dtype.itemsize, trained.network.device,
        f"the sums of structure={form.name!r}, most of them for {largest}",
        f"Use {', or '.join(ways)}.",
        trained.settings.memory_budget,
    )  # fmt: skip


def _counts(trained: Trained, targets: Tensor, weights: Tensor | None) -> Tensor | None:
    """How often each example of a batch counts, (n,): not at all where it has no target; None for once each."""
    observed = trained.likelihood.observed(targets)
    if observed is None:
        return weights
    present = observed.reshape(len(targets), -1).any(1)
    return present.double() if weights is None else weights * present


def _canonical(trained: Trained, y: Tensor, n: int, seen: int) -> Tensor:
    """Targets of a batch in canonical form; an error names the batch's place in the data."""
    try:
        targets = trained.likelihood.targets(y, n, trained.network.num_outputs)
    except DataError as error:
        if not seen:
            raise
        kind = type(error) if isinstance(error, TargetError) else DataError
        raise kind(error.expected, f"{error.got}, counted from example {seen:,} of the data, where its batch starts",
                   error.remedy) from error
    return targets.to(trained.network.device)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits for the end of the block, so that a batch counts whole or not at all."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    waiting: list[Sequence[object]] = []
    signal.signal(signal.SIGINT, lambda *arguments: waiting.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if waiting:
        raise KeyboardInterrupt
