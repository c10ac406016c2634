"""The Jacobian pass: from inputs to rows, batch by batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Protocol, cast

import torch
from torch import Tensor

from ntk_laplace.errors import DataError, NetworkError, warn
from ntk_laplace.jacobian.batch import Batch, all_finite, mixed
from ntk_laplace.jacobian.batch_size import Edge, batch_size, joined_nodes
from ntk_laplace.jacobian.blocks import Block, Outer
from ntk_laplace.jacobian.fallback import Fallback
from ntk_laplace.jacobian.fast import NO_FUSED_LAYERS, FusedAccumulation, FusedLayers, FusedSums, side_by_side
from ntk_laplace.jacobian.gradients import Gradients, edges, kept_whole
from ntk_laplace.jacobian.graph import Graph, node_kind, rows_dtype
from ntk_laplace.jacobian.jacobian import Jacobian
from ntk_laplace.jacobian.plan import Plan
from ntk_laplace.jacobian.search import Search, make_plan
from ntk_laplace.jacobian.storage import apart_from, compacted
from ntk_laplace.model.data import Inputs, differentiable, num_examples, take
from ntk_laplace.model.likelihoods import DiagonalForm
from ntk_laplace.model.network import Network, outside_autocast, probe
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.panels import panels
from ntk_laplace.runtime.random_state import preserved_rng

__all__ = ["JacobianPass", "RootFunction", "passing"]


class RootFunction(Protocol):
    """A root that is computed from the outputs, as in one pass over streaming data."""

    @property
    def columns(self) -> int:
        """Number of columns R."""

    @property
    def has_form(self) -> bool:
        """Whether there is a `form`."""

    def __call__(self, f: Tensor, part: slice) -> Tensor:
        """S (n, C, R) for outputs (n, C) of the examples `part` of the batch."""

    def form(self, f: Tensor, part: slice) -> DiagonalForm:
        """S Sᵀ in O(C) numbers, if `has_form`."""


class JacobianPass:
    """Computes rows of the Jacobian J, or of SᵀJ, of one network.

    Parameters
    ----------
    network : Network
    dtype : torch.dtype
        Floating type of the rows; the network runs in its own type.
    keep_factors : bool
        Keep every layer's inputs and output gradients, for Kronecker factors. By default rows are written out where
        this makes a Gram matrix cheaper.
    budget : int, optional
        Bytes, of which a batch takes at most half.
    """

    def __init__(
        self, network: Network, dtype: torch.dtype, keep_factors: bool = False, budget: int | None = None
    ) -> None:
        self.network, self.dtype, self.keep_factors, self.budget = network, dtype, keep_factors, budget
        # skip parameters with zero elements
        self._parameters = {name: p for name, p in network.parameters.items() if p.numel()}
        self._plans: dict[tuple, Plan] = {}
        self._fallbacks: dict[tuple[str, ...], Fallback] = {}
        self._edges: list[Edge] | None = None
        self._graph_bytes = 0

    def on(self, network: Network, dtype: torch.dtype) -> JacobianPass:
        """The same pass, with its plans, for a copy of the network, or for rows in another floating type."""
        other = JacobianPass(network, dtype, self.keep_factors, self.budget)
        other._plans = self._plans
        if network.device == self.network.device and network.dtype == self.network.dtype:
            other._edges, other._graph_bytes = self._edges, self._graph_bytes
        return other

    @property
    def widening(self) -> float:
        """Size of a number of `dtype` over that of the floating type in which the passes compute rows."""
        return self.dtype.itemsize / rows_dtype(self.network.parameters).itemsize

    def within_budget(self, count: int, each: int) -> int:
        """At most `count` examples of a batch, each of which keeps so many bytes of output gradients, and its graph.

        They are there a second time, as rows of `dtype`.
        """
        if self.budget is None:
            return count
        whole = (1.0 + self.widening) * each + self._graph_bytes
        return max(1, min(count, int(self.budget / 2 / max(1.0, whole))))

    @property
    def graph_bytes(self) -> int:
        """Bytes that a forward pass keeps of each example for the backward passes; 0 before a plan is made."""
        return self._graph_bytes

    def rows(
        self, x: Inputs, root: Tensor | None = None, batch_size: int | None = None, offset: int = 0,
        theta: Tensor | None = None,
    ) -> Jacobian:
        """Rows of all examples of `x`.

        Parameters
        ----------
        x : tensor, tuple or dict of tensors
        root : Tensor, (N, C, R), optional
            Its columns are the cotangents of the backward passes, which gives rows of SᵀJ; default: the identity.
        batch_size : int, optional
            Examples per pass; by default as many as fit in a working set of 128 MiB.
        offset : int
            Index of the first example, for messages.
        theta : Tensor, (P,), optional
            Values of the chosen parameters at which the network is linearized; default: its own. The network is not
            copied, keeps its own values, and plans are used again.

        Raises
        ------
        DataError
            If `theta` has another shape.
        NonFiniteError
            If an output or a row is NaN or infinite, with the index of the example.
        """
        return Jacobian.concatenate(list(self.parts(x, root, batch_size, offset, theta)))

    def parts(
        self, x: Inputs, root: Tensor | None = None, batch_size: int | None = None, offset: int = 0,
        theta: Tensor | None = None,
    ) -> Iterator[Jacobian]:
        """As `rows`, one batch at a time."""
        for rows in self.batches(x, root, batch_size, offset, theta=theta):
            yield apart_from(rows, x)

    def batches(
        self, x: Inputs, root: Tensor | RootFunction | None, batch_size: int | None, offset: int = 0,
        fused_layers: FusedLayers = NO_FUSED_LAYERS, theta: Tensor | None = None,
    ) -> Iterator[Jacobian]:
        """Rows one batch at a time, as `rows`; a `root` that depends on the outputs is a `RootFunction`.

        Use the rows at once: the inputs of a first layer may share memory with `x`. Layers in `fused_layers` may
        yield `FusedSums` instead of blocks.
        """
        size = self.network.num_parameters
        if theta is not None and theta.shape != (size,):
            raise DataError(f"theta of shape ({size},), one value per chosen parameter", f"{tuple(theta.shape)}",
                            "Pass a vector such as network.theta.")
        closed = None if root is None or isinstance(root, Tensor) else root
        closed = closed if closed and self.last_layer(x, fused_layers) and closed.has_form else None
        n, most = num_examples(x), self.examples_at_once(x, None if closed else _columns(root), fused_layers)
        for part in panels(n, 1, min(most, batch_size or most)):
            start = offset + part.start
            if closed:
                yield self._summed(take(x, part), closed, part, start, fused_layers, theta)
                continue
            own = root[part] if isinstance(root, Tensor) else None if root is None else partial(root, part=part)
            yield self._batch(take(x, part), own, start, fused_layers, theta)

    def examples_at_once(
        self, x: Inputs, cotangents: int | None = None, fused_layers: FusedLayers = NO_FUSED_LAYERS
    ) -> int:
        """Number of examples like those of `x` in one batch of a pass with a root of so many columns, or without."""
        self.prepare(x)
        return self.planned_batch(cotangents, fused_layers)[0]

    def planned_batch(
        self, cotangents: int | None = None, fused_layers: FusedLayers = NO_FUSED_LAYERS
    ) -> tuple[int, int]:
        """Number of examples in one batch, and the bytes that it has of each, once a plan is made.

        Backward passes hold gradients of what the forward pass has saved, at most all of them.
        """
        edges = self._edges or []
        root = tuning.ROOT_COPIES * self.network.num_outputs * (cotangents or 0) * self.dtype.itemsize
        if cotangents is None:
            cotangents = 1 if [edge.last for edge in edges] == [True] else self.network.num_outputs
        each, count = batch_size(edges, cotangents, fused_layers, self.network.device, root)
        converted = 0 if self.widening == 1.0 else int(self.widening * each)
        return self.within_budget(count, each), each + converted + 2 * self._graph_bytes

    def last_layer(self, x: Inputs, fused_layers: FusedLayers | None = None) -> bool:
        """Whether the rows are those of one last layer, whose output gradients are the cotangents.

        With `fused_layers`, whether its sums are sufficient for all parameters.
        """
        edges = self._prepared(x)
        if [edge.last for edge in edges] != [True]:
            return False
        weight, bias = edges[0].plain, edges[0].bias
        return fused_layers is None or (weight is not None and set(self._parameters) <= {weight, bias}
                                        and fused_layers.suits(weight, self.network.num_outputs, bias))

    def evaluated_at_once(self) -> int | None:
        """Number of examples in one batch of a forward pass without a graph; None before a plan is made."""
        if self._edges is None:
            return None
        each, count = batch_size(self._edges, 1, NO_FUSED_LAYERS, self.network.device)
        return tuning.FORWARD_FACTOR * self.within_budget(count, each)

    def prepare(self, x: Inputs) -> None:
        """Probe the network and plan its rows on a few examples; later calls return at once.

        Raises
        ------
        NonDeterministicError, MixedExamplesError
            As `Network.probe`.
        """
        self._prepared(x)

    def _prepared(self, x: Inputs) -> list[Edge]:
        if self._edges is not None:
            return self._edges
        with passing(self.network):
            out = probe(self.network, differentiable(x))
        with passing(self.network):  # the probe has set the network's precision
            graph = Graph(out, self._parameters)
            plan = self._plan(graph, out, x)
            extractions = plan.extractions(graph, len(out))
            kept, plain = kept_whole(extractions), {use.step.consumer: use.name for use in plan.uses if use.plain}
            element = torch.promote_types(out.dtype, graph.dtype).itemsize
            sizes = {n: graph.shape(n).numel() * element // len(out) for n in edges(extractions)}
            own = [*self.network.module.parameters(), *self.network.module.buffers()]
            other, m = self._another(x, len(out))  # converted weights, for instance, do not grow with the examples
            grown = other.saved_bytes(own) - graph.saved_bytes(own)
            self._graph_bytes = max(0, grown // (m - len(out)))
            for number in kept & joined_nodes(plan.uses):
                sizes[number] *= 2  # with the copy that joins them
        self._edges = [Edge(max(1, size), number in kept, plain.get(number), plan.partners.get(plain.get(number, "")),
                             number == 0 and number in kept and graph.shape(0) == out.shape)
                       for number, size in sizes.items()]
        return self._edges

    def _plan(self, graph: Graph, out: Tensor, x: Inputs, confirm: bool = False) -> Plan:
        signature = graph.signature()
        if signature not in self._plans:
            self._require_own(graph)
        if signature not in self._plans or confirm:
            search = Search(graph, out, self._parameters, self.network.precision, partial(self._another, x, len(out)))
            self._plans[signature] = make_plan(search, self.keep_factors, confirm)
        return self._plans[signature]

    def _require_own(self, graph: Graph) -> None:
        """Refuse a graph that leads to the caller's network, or that hides the parameters from autograd.

        Raises
        ------
        NetworkError
        """
        name = self.network.read_from_caller(node.variable for node in graph.nodes if hasattr(node, "variable"))
        if name is not None:
            raise NetworkError("a network whose copy reads its own parameters",
                               f"one that reads {name!r} of the network that was passed, through a function on it",
                               "Make that function a method of the module: a copy keeps what a lambda, a wrapper or a "
                               "hook refers to.")
        if any(node_kind(node) == "CheckpointFunctionBackward" for node in graph.nodes):
            raise NetworkError("a network that autograd can follow", "a reentrant checkpoint",
                               "Pass use_reentrant=False to torch.utils.checkpoint.")

    def _another(self, x: Inputs, n: int) -> tuple[Graph, int]:
        """Graph of m examples of `x`, and m, which differs from n."""
        m = 2 if n != 2 else 3
        few = take(x, torch.arange(m) % num_examples(x))
        return Graph(self.network.evaluate(few), self._parameters), m

    def _fallback(self, names: tuple[str, ...]) -> Fallback:
        if names not in self._fallbacks:
            self._fallbacks[names] = Fallback(self.network, names)
            self._announce(names)
        return self._fallbacks[names]

    def _announce(self, names: tuple[str, ...]) -> None:
        modules = dict(self.network.module.named_modules())
        owners = sorted({f"{type(modules[name.rpartition('.')[0]]).__name__} {name!r}" for name in names})
        count = sum(self.network.parameters[name].numel() for name in names)
        warn(f"no factor rule covers {', '.join(owners)} as the network uses them: their {count:,} parameters take the "
             "exact per-example fallback, which costs one backward pass per example and output and stores N x C x "
             f"{count:,} numbers")

    def _batch(
        self, x: Inputs, root: Tensor | Callable[[Tensor], Tensor] | None, offset: int, fused_layers: FusedLayers,
        theta: Tensor | None,
    ) -> Jacobian:
        self.prepare(x)
        network = self.network
        with passing(network), network.with_theta(theta):
            x = differentiable(x)
            out = network.evaluate(x, offset)
            n, c = out.shape
            if root is not None and not isinstance(root, Tensor):
                root = root(out.detach())
            if root is None:
                cotangents = torch.eye(c).to(out)[:, None].expand(c, n, c)
            else:
                cotangents = root.movedim(-1, 0).to(out)
                # each cotangent starts one pass and must be a contiguous matrix, transposed or not
                cotangents = cotangents if cotangents.mT.is_contiguous() else cotangents.contiguous()
            f = out.detach().to(self.dtype, copy=True)
            if not out.requires_grad:
                return Jacobian((), len(cotangents), n, f)
            blocks = self._blocks(Batch(network, self._parameters, x, out, cotangents, offset), fused_layers)
        del out  # and the graph
        of_dtype = _converted(blocks, self.dtype) if self.keep_factors else side_by_side(blocks, self.dtype)
        return Jacobian(tuple(of_dtype), len(cotangents), n, f)

    def _summed(
        self, x: Inputs, root: RootFunction, part: slice, offset: int, fused_layers: FusedLayers, theta: Tensor | None
    ) -> Jacobian:
        """The sums of a last layer, from its rows of J and the output curvature in closed form."""
        rows = self._batch(x, None, offset, NO_FUSED_LAYERS, theta)
        block = rows.blocks[0] if len(rows.blocks) == 1 else None
        if not (isinstance(block, Outer) and block.reads_cotangents(rows.f.shape[1])):
            # in this batch an example's outputs are not those of the layer, unlike in the examples of the plan
            return self._batch(x, partial(root, part=part), offset, fused_layers, theta)
        sums = FusedSums.of_last_layer(block, root.form(rows.f, part), fused_layers.squared)
        return replace(rows, blocks=(cast(Block, sums),))

    def _blocks(self, batch: Batch, fused_layers: FusedLayers = NO_FUSED_LAYERS) -> list[Block]:
        graph = Graph(batch.out, self._parameters)
        if len(batch.out) == 1 and graph.signature() not in self._plans:
            return self._blocks_of_one(batch)
        plan = self._plan(graph, batch.out, batch.x)
        fusing = any(use.plain and use.name in fused_layers.weights for use in plan.uses)
        if batch.sample is not None and fusing and not plan.uncertain:
            blocks = self._planned_blocks(batch, graph, plan, FusedAccumulation(fused_layers, batch.sample, self.dtype))
            if batch.sample_agrees(blocks) and all_finite(blocks):
                return blocks  # else repeat without fusion
        blocks = self._planned_blocks(batch, graph, plan)
        wrong = batch.disagreeing(blocks, uncertain=plan.uncertain)
        if wrong and len(batch.out) == 1:
            return self._blocks_of_one(batch)
        if wrong:
            # a rule fails, or the few examples of the probe did not reveal the example axes: plan on this batch
            blocks = self._planned_blocks(batch, graph, self._plan(graph, batch.out, batch.x, confirm=True))
            wrong = batch.disagreeing(blocks, whole=True)
        if wrong:
            redone = _touching(wrong, blocks)
            blocks = [block for block in blocks if not set(block.names) & redone]
            names = tuple(name for name in self._parameters if name in redone)
            blocks += self._fallback(names).rows(batch.x, batch.cotangents, careful=True)
            wrong = batch.disagreeing(blocks, whole=True)
        if wrong:
            raise mixed(f"gradients of {', '.join(wrong[:3])} over the batch that differ from the examples' own")
        return blocks

    def _blocks_of_one(self, batch: Batch) -> list[Block]:
        """Blocks of a single example, which does not reveal the example axis of a tensor: it is used twice."""
        twice = take(batch.x, torch.zeros(2, dtype=torch.long))
        out, cotangents = self.network.evaluate(twice), batch.cotangents.expand(-1, 2, -1)
        both = self._blocks(replace(batch, x=twice, out=out, cotangents=cotangents))
        return [block.subset(slice(0, 1)) for block in both]

    def _planned_blocks(
        self, batch: Batch, graph: Graph, plan: Plan, accumulation: FusedAccumulation | None = None
    ) -> list[Block]:
        n = len(batch.out)
        gradients, wrong = self._gradients(batch, graph, plan, accumulation)
        if wrong and n == 1:
            return self._blocks_of_one(batch)
        if wrong:  # this batch reveals what the plan did not know
            plan = self._plan(graph, batch.out, batch.x, confirm=True)
            gradients, wrong = self._gradients(batch, graph, plan, accumulation)
        if wrong:
            plan = plan.without(wrong)
            gradients, _ = self._gradients(batch, graph, plan, accumulation)
        blocks = plan.blocks(gradients)
        own = self._fallback(plan.unmatched).rows(batch.x, batch.cotangents) if plan.unmatched else []
        return compacted(chain(blocks, own), self.keep_factors)

    def _gradients(
        self, batch: Batch, graph: Graph, plan: Plan, accumulation: FusedAccumulation | None
    ) -> tuple[Gradients, set[str]]:
        """The output gradients that the plan reads, and the parameters for which the plan is wrong in this batch."""
        wrong = plan.misfits(graph, len(batch.out))
        extractions = [] if wrong else plan.extractions(graph, len(batch.out), accumulation)
        found = Gradients(graph, extractions, batch.cotangents, self.keep_factors, accumulation)
        return (found, wrong) if wrong else (found.collect(batch.out), plan.contradicted(found))


def _converted(blocks: list[Block], dtype: torch.dtype) -> Iterator[Block]:
    """Blocks in another floating type; the list is emptied, so that no block is there twice for long."""
    while blocks:
        yield blocks.pop(0).to(dtype)


def _touching(names: tuple[str, ...], blocks: list[Block]) -> set[str]:
    """The named parameters, and all that share a block with them, directly or through others."""
    found = set(names)
    while True:
        more = {name for block in blocks if set(block.names) & found for name in block.names}
        if more <= found:
            return found
        found |= more


def _columns(root: Tensor | RootFunction | None) -> int | None:
    if root is None:
        return None
    return root.shape[2] if isinstance(root, Tensor) else root.columns


@contextlib.contextmanager
def passing(network: Network) -> Iterator[None]:
    """Context of the forward and backward passes."""
    with torch.inference_mode(False), preserved_rng(network.device), outside_autocast(), network.arithmetic():
        yield
