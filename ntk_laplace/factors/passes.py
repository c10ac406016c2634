"""One pass over data: from inputs to rows. The only place that differentiates the network."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor, nn

from ntk_laplace.data import Inputs, check_finite, differentiable, leaves, num_examples, take
from ntk_laplace.errors import MixedExamplesError, NTKLaplaceWarning
from ntk_laplace.factors.blocks import Block, Dense, Lookup, Outer, Wide
from ntk_laplace.factors.fallback import Fallback
from ntk_laplace.factors.folding import NO_FOLD, Fold, Folded, Folding
from ntk_laplace.factors.gradients import Gradients, edges, kept_whole
from ntk_laplace.factors.graph import Graph
from ntk_laplace.factors.plan import Plan, make_plan
from ntk_laplace.factors.proof import Truth, agree
from ntk_laplace.factors.rows import Rows, compact
from ntk_laplace.network import Network, preserved_rng

__all__ = ["FactorPass", "Seeds"]

_PROOF, _FEWEST = 64, 4  # an eighth of a batch's examples, at most and at least, is held against autograd
_WORKING_SET = 128 * 2**20  # bytes of output gradients per batch
_WARM = 32 * 2**20  # and of one of them: larger tensors are given back to the system, and come cold
_MATRIX = 512  # entries of a parameter whose rows deserve a matrix product of their own


class Seeds(Protocol):
    """A root that is known once the outputs are, as in one pass over streaming data.

    Attributes
    ----------
    columns : int
        R.
    """

    columns: int

    def __call__(self, f: Tensor, part: slice) -> Tensor:
        """S (n, C, R) for outputs (n, C) of the examples `part` of the batch."""


class FactorPass:
    """Turns inputs into rows of the Jacobian, or of SᵀJ, of one network.

    Parameters
    ----------
    network : Network
    dtype : torch.dtype
        Floating type of the rows; the network itself runs in its own.
    keep_factors : bool
        Leave every layer's inputs and output gradients as they are, for Kronecker factors; by default rows are
        written out where a Gram matrix is cheaper from them.
    """

    def __init__(self, network: Network, dtype: torch.dtype, keep_factors: bool = False) -> None:
        self.network, self.dtype, self.keep_factors = network, dtype, keep_factors
        # a layer without inputs or outputs has a weight without entries, and that no rows
        self._parameters = {name: p for name, p in network.parameters.items() if p.numel()}
        self._plans: dict[tuple, Plan] = {}
        self._fallbacks: dict[tuple[str, ...], Fallback] = {}
        self._edges: list[_Edge] | None = None

    def on(self, network: Network, dtype: torch.dtype) -> FactorPass:
        """The same pass over a network that has moved, or in another floating type."""
        return FactorPass(network, dtype, self.keep_factors)

    def rows(self, x: Inputs, root: Tensor | None = None, batch_size: int | None = None, offset: int = 0) -> Rows:
        """Rows of all examples of `x`.

        Parameters
        ----------
        x : tensor, tuple or dict of tensors
        root : Tensor, (N, C, R), optional
            Columns seed the backward passes, so that the rows are those of SᵀJ; by default the identity.
        batch_size : int, optional
            Examples per pass; by default as many as fit a working set of 128 MiB.
        offset : int
            Index of the first example, for messages.

        Raises
        ------
        NonFiniteError
            If an output or a row is NaN or infinite, with the index of the example.
        """
        parts = [_apart_from(rows, x) for rows in self.batches(x, root, batch_size, offset)]
        return Rows.concatenate(parts)

    def batches(
        self, x: Inputs, root: Tensor | Seeds | None, batch_size: int | None, offset: int = 0,
        fold: Fold = NO_FOLD,
    ) -> Iterator[Rows]:
        """The same, a batch at a time; a `root` that depends on the outputs is a `Seeds`.

        A first layer's inputs may be the memory of `x` itself: for use at once. Blocks of layers of which sums are
        enough may come as `Folded`.
        """  # fmt: skip
        self.prepare(x)
        n, seeds = num_examples(x), _columns(root, self.network)
        most = _examples_at_once(self._edges, seeds, fold)
        step = min(most, batch_size or most)
        for start in range(0, n, step):
            part = slice(start, min(start + step, n))
            own = root[part] if isinstance(root, Tensor) else None if root is None else partial(root, part=part)
            yield self._batch(take(x, part), own, offset + start, fold)

    def examples_at_once(self, x: Inputs, seeds: int, fold: Fold = NO_FOLD) -> int:
        """As many examples like those of `x` as a pass takes at a time with so many seeds."""
        self.prepare(x)
        return _examples_at_once(self._edges, seeds, fold)

    def prepare(self, x: Inputs) -> None:
        """Probe the network and make its plan on a few examples, once.

        Raises
        ------
        NonDeterministicError, MixedExamplesError
            As `Network.probe`.
        """
        if self._edges is not None:
            return
        with torch.inference_mode(False), preserved_rng(self.network.device), _plain_kernels(self.network.module):
            out = self.network.probe(differentiable(x))
            graph = Graph(out, self._parameters)
            plan = self._plan(graph, out)
            readings = plan.readings(graph, len(out))
            kept, plain = kept_whole(readings), {use.step.consumer: use.name for use in plan.uses if use.plain}
            sizes = {n: graph.shape(n).numel() * out.element_size() // len(out) for n in edges(readings)}
        self._edges = [_Edge(max(1, size), number in kept, plain.get(number)) for number, size in sizes.items()]

    def _plan(self, graph: Graph, out: Tensor, confirm: bool = False) -> Plan:
        signature = graph.signature()
        if signature not in self._plans or confirm:
            plan = make_plan(graph, out, self._parameters, self.keep_factors, confirm)
            self._plans[signature] = plan
        return self._plans[signature]

    def _fallback(self, names: tuple[str, ...]) -> Fallback:
        if names not in self._fallbacks:
            self._fallbacks[names] = Fallback(self.network, names)
            self._announce(names)
        return self._fallbacks[names]

    def _announce(self, names: tuple[str, ...]) -> None:
        modules = dict(self.network.module.named_modules())
        owners = sorted({f"{type(modules[name.rpartition('.')[0]]).__name__} {name!r}" for name in names})
        count = sum(self.network.parameters[name].numel() for name in names)
        warnings.warn(
            f"no factor rule covers {', '.join(owners)}: their {count:,} parameters take the exact per-example "
            f"fallback, which costs one backward pass per example and output and stores N x C x {count:,} numbers",
            NTKLaplaceWarning, stacklevel=2,
        )  # fmt: skip

    def _batch(
        self, x: Inputs, root: Tensor | Callable[[Tensor], Tensor] | None, offset: int, fold: Fold
    ) -> Rows:
        self.prepare(x)
        network = self.network
        with torch.inference_mode(False), preserved_rng(network.device), _plain_kernels(network.module):
            x = differentiable(x)
            out = network.evaluate(x, offset)
            n, c = out.shape
            if root is not None and not isinstance(root, Tensor):
                root = root(out.detach())
            if root is None:
                seeds = torch.eye(c).to(out)[:, None].expand(c, n, c)
            else:
                seeds = root.movedim(-1, 0).to(out)
                # each seed starts a pass of its own: a matrix, either way round
                seeds = seeds if seeds.mT.is_contiguous() else seeds.contiguous()
            if not out.requires_grad:
                return Rows((), len(seeds), n, out.detach().to(self.dtype))
            blocks = self._blocks(x, out, seeds, offset, fold)
        finished = (block.to(self.dtype) for block in blocks) if self.keep_factors else _finished(blocks, self.dtype)
        return Rows(tuple(finished), len(seeds), n, out.detach().to(self.dtype, copy=True))

    def _blocks(
        self, x: Inputs, out: Tensor, seeds: Tensor, offset: int, fold: Fold = NO_FOLD
    ) -> list[Block | Folded]:
        graph = Graph(out, self._parameters)
        signature = graph.signature()
        if len(out) == 1 and signature not in self._plans:
            # a single example says nothing about where examples lie in a tensor
            twice = take(x, torch.zeros(2, dtype=torch.long))
            doubled = self._blocks(twice, self.network.evaluate(twice), seeds.expand(-1, 2, -1), offset)
            return [block.part(slice(0, 1)) for block in doubled]
        plan, some = self._plan(graph, out), _some_examples(out)
        if some is not None and any(use.plain and use.name in fold.weights for use in plan.uses):
            blocks = self._planned_blocks(x, out, graph, plan, seeds, Folding(fold, some, self.dtype))
            if self._holds_for(some, x, blocks, out, seeds, offset) and _finite(blocks):
                return blocks  # else it is looked into with all rows at hand
        blocks = self._planned_blocks(x, out, graph, plan, seeds)
        wrong = self._disagreeing(x, blocks, out, seeds, offset)
        if wrong:
            # a rule does not hold, or the probe's few examples did not show where this batch's lie: plan on the batch
            blocks = self._planned_blocks(x, out, graph, self._plan(graph, out, confirm=True), seeds)
            wrong = self._disagreeing(x, blocks, out, seeds, offset, whole=True)
        if wrong:
            redone = _touching(wrong, blocks)
            blocks = [block for block in blocks if not set(block.names) & redone]
            blocks += self._fallback(tuple(n for n in self._parameters if n in redone)).rows(x, seeds, careful=True)
            wrong = self._disagreeing(x, blocks, out, seeds, offset, whole=True)
        if wrong:
            raise _mixed(f"gradients of {', '.join(wrong[:3])} over the batch that differ from the examples' own")
        return blocks

    def _planned_blocks(
        self, x: Inputs, out: Tensor, graph: Graph, plan: Plan, seeds: Tensor, folding: Folding | None = None
    ) -> list[Block | Folded]:
        readings = plan.readings(graph, len(out), folding)
        gradients = Gradients(graph, readings, seeds, self.keep_factors, folding).collect(out)
        blocks = plan.blocks(graph, gradients, self._parameters)
        own = self._fallback(plan.unmatched).rows(x, seeds) if plan.unmatched else []
        return _compacted(chain(blocks, own), self.keep_factors)

    def _disagreeing(
        self, x: Inputs, blocks: list[Block], out: Tensor, seeds: Tensor, offset: int, whole: bool = False
    ) -> tuple[str, ...]:
        """Parameters whose rows, randomly weighted, do not add up to autograd's gradient of the batch.

        One more backward pass; random weights make rows of the wrong example, and mixing, show. Of all
        but the smallest batches, random examples are taken, and evaluated by themselves: mixing shows then too.
        Whatever they show is looked into on the `whole` batch.
        """
        some = None if whole else _some_examples(out)
        if some is not None and self._holds_for(some, x, blocks, out, seeds, offset):
            _require_finite(blocks, offset)
            return ()
        wrong = self._sums_agree(blocks, out, seeds)
        if wrong is None:
            _require_finite(blocks, offset)
        return tuple(self._parameters) if wrong is None else wrong

    def _holds_for(
        self, some: Tensor, x: Inputs, blocks: list[Block | Folded], out: Tensor, seeds: Tensor, offset: int
    ) -> bool:
        """Whether rows of some examples agree with autograd's gradient of these examples alone.

        Their outputs alone must be those of the batch: rows of a fallback, made one example at a time, mix nothing.
        """
        few = [block.some if isinstance(block, Folded) else block.part(some) for block in blocks]
        alone = self.network.evaluate(take(x, some), offset)
        own, there = alone.detach(), out.detach()[some]
        size = float(there.abs().max())
        if not agree(own, there, size, size):
            gap = float((own - there).abs().max())
            raise _mixed(f"outputs that change by {gap:.2g} with the other examples of the batch")
        return self._sums_agree(few, alone, seeds[:, some]) == ()

    def _sums_agree(self, blocks: list[Block], out: Tensor, seeds: Tensor) -> tuple[str, ...] | None:
        """Parameters whose randomly weighted rows differ from autograd's gradient; None if that is not finite."""
        generator = torch.Generator().manual_seed(len(out))
        weights = torch.randn(seeds.shape[:2], generator=generator, dtype=torch.float64).to(seeds)
        truth = Truth(out, seeds, weights, self._parameters)
        return truth.disagreeing(blocks) if truth.finite else None


@dataclass(frozen=True)
class _Edge:
    """A node whose output gradient is read: its bytes per example, whether for all seeds, and what can be folded."""

    size: int
    kept: bool
    plain: str | None

    def held(self, seeds: int, fold: Fold) -> int:
        """Bytes held per example."""
        return self.size * seeds if self.kept and self.plain not in fold.weights else self.size


def _examples_at_once(edges: list[_Edge], seeds: int, fold: Fold) -> int:
    held = [edge.held(seeds, fold) for edge in edges]
    return max(1, min(_WORKING_SET // max(1, sum(held)), _WARM // max(held, default=1)))


def _mixed(got: str) -> MixedExamplesError:
    return MixedExamplesError("a network whose outputs depend on their own example alone", got,
                              "Call network.eval() before the fit, or remove the operation that looks across examples.")


def _some_examples(out: Tensor) -> Tensor | None:
    """Random examples of a batch, in order, that its proof looks at; None for all of them."""
    n = len(out)
    count = max(_FEWEST, min(_PROOF, n // 8))
    if n <= count:
        return None
    return torch.randperm(n, generator=torch.Generator().manual_seed(n))[:count].sort().values.to(out.device)


def _columns(root: Tensor | Seeds | None, network: Network) -> int:
    if root is None:
        return network.num_outputs
    return root.shape[2] if isinstance(root, Tensor) else root.columns


def _finished(blocks: list[Block], dtype: torch.dtype) -> Iterator[Block]:
    """Put what was written out into matrices, small ones side by side, and all into the algebra's floating type."""
    elsewhere = {name for block in blocks if not isinstance(block, Dense) for name in block.names}
    small = []
    while blocks:
        block = blocks.pop(0)
        if not isinstance(block, Dense) or block.weight in elsewhere:
            yield block.to(dtype)
        elif block.rows.shape[2] >= _MATRIX:
            alone = [block]
            del block
            yield Wide.of(alone, dtype)
        else:
            small.append(block)
    if small:
        block = None
        yield Wide.of(small, dtype)


def _compacted(blocks: Iterable[Block], keep_factors: bool) -> list[Block]:
    """Choose each block's form, and add up what was written out for one parameter."""
    written: dict[str, Dense] = {}
    kept: list[Block] = []
    for block in blocks:
        block = _share_constant(block)
        for small in [block] if keep_factors else compact(block):
            if not isinstance(small, Dense):
                kept.append(small)
            elif small.weight in written:
                written[small.weight] = replace(small, rows=small.rows + written[small.weight].rows)
            else:
                written[small.weight] = small
    return [*kept, *written.values()]


def _finite(blocks: list[Block | Folded]) -> bool:
    """Whether all entries are; of sums of products, their diagonal shows it."""
    return all(bool(torch.isfinite(_values(block).sum())) for block in blocks)


def _values(block: Block | Folded) -> Tensor:
    if isinstance(block, Folded):
        return block.sums if block.squared else block.sums.diagonal()
    return block.rows if isinstance(block, Dense) else block.b


def _require_finite(blocks: list[Block], offset: int) -> None:
    for block in blocks:
        check_finite(_values(block).transpose(0, 1), "Jacobians", "Look at that input, or at diverged weights.", offset)


def _apart_from(rows: Rows, x: Inputs) -> Rows:
    """A first layer's inputs are the caller's own memory: take a copy, which later changes cannot reach."""
    theirs = {tensor.untyped_storage().data_ptr() for tensor in leaves(x)}

    def apart(block: Block) -> Block:
        if isinstance(block, Outer) and block.a.untyped_storage().data_ptr() in theirs:
            return replace(block, a=block.a.clone())
        if isinstance(block, Lookup) and block.tokens.untyped_storage().data_ptr() in theirs:
            return replace(block, tokens=block.tokens.clone())
        return block

    return replace(rows, blocks=tuple(apart(block) for block in rows.blocks))


def _touching(names: tuple[str, ...], blocks: list[Block]) -> set[str]:
    """The named parameters, and all that share a block with one of them."""
    found = set(names)
    while True:
        more = {name for block in blocks if set(block.names) & found for name in block.names}
        if more <= found:
            return found
        found |= more


def _share_constant(block: Block) -> Block:
    """Hold b once where it is the same for all examples: the last linear layer's b is the seeds."""
    if not isinstance(block, Outer) or not block.single or block.b.shape[1] < 2:
        return block
    if torch.equal(block.b[:, 0], block.b[:, 1]) and bool((block.b == block.b[:, :1]).all()):
        return replace(block, b=block.b[:, :1], constant=True)
    return block


@contextlib.contextmanager
def _plain_kernels(module: nn.Module) -> Iterator[None]:
    """Recurrent layers run from their matrix products, not as one opaque kernel, so that rules see their weights."""
    if not any(isinstance(layer, nn.RNNBase) for layer in module.modules()):
        yield
        return
    with warnings.catch_warnings(), torch.backends.cudnn.flags(enabled=False):
        warnings.filterwarnings("ignore", message="TF32 acceleration")  # torch warns of its own flag context
        with torch.backends.mkldnn.flags(enabled=False):
            yield
