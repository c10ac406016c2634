"""The blocks of a batch, checked: what is asked of its graph and of its rows, and what is refused.

A graph must lead to the parameters of the network's copy, and to no others. Its plan must fit the batch. The rows must
agree with autograd's gradient. Where a plan or rows fail, the graph is planned on this batch; parameters that still
fail take the fallback. Rows that disagree even then are those of a network that mixes examples, which is refused.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from ntk_laplace.errors import NetworkError, warn
from ntk_laplace.jacobian.batch import Batch, all_finite, mixed
from ntk_laplace.jacobian.blocks import Block
from ntk_laplace.jacobian.fallback import Fallback
from ntk_laplace.jacobian.fast import NO_FUSED_LAYERS, FusedAccumulation, FusedLayers
from ntk_laplace.jacobian.gradients import Gradients
from ntk_laplace.jacobian.graph import Graph, node_kind
from ntk_laplace.jacobian.plan import Plan
from ntk_laplace.jacobian.search import Search, make_plan
from ntk_laplace.jacobian.storage import compacted
from ntk_laplace.model.data import Inputs, num_examples, take
from ntk_laplace.model.network import Network


class CheckedBlocks:
    """Computes and checks the blocks of batches; keeps the plan of every graph.

    Parameters
    ----------
    network : Network
    dtype : torch.dtype
        Floating type of the sums of fused layers.
    keep_factors : bool
        As in `JacobianPass`.

    Attributes
    ----------
    parameters : dict of str to nn.Parameter
        The chosen parameters that have elements.
    plans : dict of tuple to Plan
        By the graph's signature.
    """

    def __init__(self, network: Network, dtype: torch.dtype, keep_factors: bool) -> None:
        self.network, self.dtype, self.keep_factors = network, dtype, keep_factors
        self.parameters = {name: p for name, p in network.parameters.items() if p.numel()}
        self.plans: dict[tuple, Plan] = {}
        self._fallbacks: dict[tuple[str, ...], Fallback] = {}

    def of(self, batch: Batch, fused_layers: FusedLayers = NO_FUSED_LAYERS) -> list[Block]:
        """Blocks of a batch; layers in `fused_layers` may yield `FusedSums`.

        Raises
        ------
        NetworkError
            If the graph leads to the caller's network, or hides the parameters from autograd.
        MixedExamplesError
            If the rows of the fallback disagree with autograd's gradient.
        NonFiniteError
            If rows are NaN or infinite.
        """
        graph = Graph(batch.out, self.parameters)
        if len(batch.out) == 1 and graph.signature() not in self.plans:
            return self._of_one(batch)
        plan = self.plan(graph, batch.out, batch.x)
        fusing = any(use.plain and use.name in fused_layers.weights for use in plan.uses)
        if batch.sample is not None and fusing and not plan.uncertain:
            blocks = self._planned(batch, graph, plan, FusedAccumulation(fused_layers, batch.sample, self.dtype))
            if batch.sample_agrees(blocks) and all_finite(blocks):
                return blocks  # else repeat without fusion
        blocks = self._planned(batch, graph, plan)
        wrong = batch.disagreeing(blocks, uncertain=plan.uncertain)
        if wrong and len(batch.out) == 1:
            return self._of_one(batch)
        if wrong:
            # a rule fails, or the few examples of the probe did not reveal the example axes: plan on this batch
            blocks = self._planned(batch, graph, self.plan(graph, batch.out, batch.x, confirm=True))
            wrong = batch.disagreeing(blocks, whole=True)
        if wrong:
            redone = _touching(wrong, blocks)
            blocks = [block for block in blocks if not set(block.names) & redone]
            names = tuple(name for name in self.parameters if name in redone)
            blocks += self._fallback(names).rows(batch.x, batch.cotangents, careful=True)
            wrong = batch.disagreeing(blocks, whole=True)
        if wrong:
            raise mixed(f"gradients of {', '.join(wrong[:3])} over the batch that differ from the examples' own")
        return blocks

    def plan(self, graph: Graph, out: Tensor, x: Inputs, confirm: bool = False) -> Plan:
        """The plan of a graph of the outputs `out` at `x`; `confirm` makes it anew, checked against autograd.

        NetworkError as `of`.
        """
        signature = graph.signature()
        if signature not in self.plans:
            _require_own(self.network, graph)
        if signature not in self.plans or confirm:
            search = Search(graph, out, self.parameters, self.network.precision, partial(self.another, x, len(out)))
            self.plans[signature] = make_plan(search, self.keep_factors, confirm)
        return self.plans[signature]

    def another(self, x: Inputs, n: int) -> tuple[Graph, int]:
        """Graph of m examples of `x`, and m, which differs from n."""
        m = 2 if n != 2 else 3
        few = take(x, torch.arange(m, device="cpu") % num_examples(x))
        return Graph(self.network.evaluate(few), self.parameters), m

    def _of_one(self, batch: Batch) -> list[Block]:
        """Blocks of a single example, which does not reveal the example axis of a tensor: it is used twice."""
        twice = take(batch.x, torch.zeros(2, dtype=torch.long, device="cpu"))
        out, cotangents = self.network.evaluate(twice), batch.cotangents.expand(-1, 2, -1)
        both = self.of(replace(batch, x=twice, out=out, cotangents=cotangents))
        return [block.subset(slice(0, 1)) for block in both]

    def _planned(
        self, batch: Batch, graph: Graph, plan: Plan, accumulation: FusedAccumulation | None = None
    ) -> list[Block]:
        n = len(batch.out)
        gradients, wrong = self._gradients(batch, graph, plan, accumulation)
        if wrong and n == 1:
            return self._of_one(batch)
        if wrong:  # this batch reveals what the plan did not know
            plan = self.plan(graph, batch.out, batch.x, confirm=True)
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

    def _fallback(self, names: tuple[str, ...]) -> Fallback:
        """The fallback of these parameters; a warning names them the first time."""
        if names not in self._fallbacks:
            self._fallbacks[names] = Fallback(self.network, names)
            modules = dict(self.network.module.named_modules())
            owners = sorted({f"{type(modules[name.rpartition('.')[0]]).__name__} {name!r}" for name in names})
            count = sum(self.parameters[name].numel() for name in names)
            warn(f"no factor rule covers {', '.join(owners)} as the network uses them: their {count:,} parameters take "
                 "the exact per-example fallback, which costs one backward pass per example and output and stores "
                 f"N x C x {count:,} numbers")
        return self._fallbacks[names]


def _require_own(network: Network, graph: Graph) -> None:
    """Refuse a graph that leads to the caller's network, or that hides the parameters from autograd."""
    name = network.read_from_caller(node.variable for node in graph.nodes if hasattr(node, "variable"))
    if name is not None:
        raise NetworkError("a network whose copy reads its own parameters",
                           f"one that reads {name!r} of the network that was passed, through a function on it",
                           "Make that function a method of the module: a copy keeps what a lambda, a wrapper or a "
                           "hook refers to.")
    if any(node_kind(node) == "CheckpointFunctionBackward" for node in graph.nodes):
        raise NetworkError("a network that autograd can follow", "a reentrant checkpoint",
                           "Pass use_reentrant=False to torch.utils.checkpoint.")


def _touching(names: tuple[str, ...], blocks: list[Block]) -> set[str]:
    """The named parameters, and all that share a block with them, directly or through others."""
    found = set(names)
    while True:
        more = {name for block in blocks if set(block.names) & found for name in block.names}
        if more <= found:
            return found
        found |= more
