"""Search for a plan on the graph of a small batch, with an optional check against autograd.

From a parameter's accumulator the search follows the graph to the first nodes whose output has an example axis. The
nodes in between are functions of the parameter alone (a transpose, a slice, a weight normalization). A plan is used
until a batch's rows disagree with autograd's gradient. It is then remade with a check of each parameter's rows for two
cotangents; parameters that disagree use the fallback.

An output gradient may be zero, as before a zero-initialized head. It does not reveal the example axis, which is then
inferred from the node's shape for another number of examples. Zero rows are correct in any order, and a batch in
which they are not zero gets a new plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from ntk_laplace.jacobian.blocks import Block, Dense, Outer
from ntk_laplace.jacobian.gradient_check import GradientCheck, agree
from ntk_laplace.jacobian.graph import Graph, is_view, uncast
from ntk_laplace.jacobian.layout import Layout, find_layouts, shape_layout
from ntk_laplace.jacobian.plan import Plan, UsePlan, extractor_of, joined
from ntk_laplace.jacobian.rules import Extractor
from ntk_laplace.runtime import tuning


@dataclass
class Search:
    """A search for a plan: what it is given, and what its two backward passes have shown.

    Attributes
    ----------
    graph : Graph
        Graph of a small batch.
    out : Tensor, (N, C)
        Outputs of at least two examples, with their autograd graph.
    parameters : dict of str to nn.Parameter
    precision : torch.dtype
        Coarsest floating type of the computation.
    other : callable
        Returns the network's graph for another number of examples, and that number; called only if needed.
    ambiguous : bool
        Whether a layout was assumed.
    layouts : dict of int to Layout or None
        Of the nodes that were visited.
    gradients : dict of int to pair of Tensor
        Output gradients of these for both `cotangents`.
    """

    graph: Graph
    out: Tensor
    parameters: dict[str, nn.Parameter]
    precision: torch.dtype
    other: Callable[[], tuple[Graph, int]]
    ambiguous: bool = False
    layouts: dict[int, Layout | None] = field(default_factory=dict)
    gradients: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def draw(self, *shape: int) -> Tensor:
        """Standard normal numbers in the outputs' type and on their device."""
        return torch.randn(*shape, generator=self._generator, dtype=torch.float64, device="cpu").to(self.out)

    @cached_property
    def weights(self) -> Tensor:
        """A distinct weight α_n of each example, (N,)."""
        steps = torch.arange(len(self.out), device="cpu")
        return (1.0 + 0.7 * steps.double() * (-1.0) ** steps).to(self.out)

    @cached_property
    def cotangents(self) -> Tensor:
        """Random r_n and α_n r_n, (2, N, C)."""
        cotangent = self.draw(*self.out.shape)
        return torch.stack([cotangent, cotangent * self.weights[:, None]])

    def visit(self, numbers: set[int]) -> None:
        """Find the layouts of nodes with two backward passes for all of them; views of a parameter have none."""
        graph, wanted = self.graph, []
        for number in sorted(numbers - self.layouts.keys()):
            self.layouts[number] = None
            if not is_view(graph.nodes[number]):
                wanted.append(number)
        if not wanted:
            return
        edges = [GradientEdge(graph.nodes[number], 0) for number in wanted]
        passes = [torch.autograd.grad(self.out, edges, cotangent, retain_graph=True, allow_unused=True)
                  for cotangent in self.cotangents]
        for number, plain, scaled in zip(wanted, *passes, strict=True):
            if plain is None and len(graph.nodes[number]._input_metadata) == 1:
                plain = scaled = self.out.new_zeros(graph.shape(number))  # None stands for a zero gradient
            if plain is None:
                continue
            self.gradients[number] = plain, scaled
            if bool(plain.any()):
                fitting = find_layouts(plain, scaled, self.weights, self.precision)
                self.layouts[number] = self.layout(number, fitting)
            else:
                self.layouts[number] = self.layout_by_shape(number)

    @cached_property
    def shapes(self) -> tuple[list[torch.Size], int] | None:
        """Shapes of the nodes for another number of examples, and that number; None if the graph then differs."""
        graph, m = self.other()
        if graph.signature() != self.graph.signature():
            return None
        return [graph.shape(number) for number in range(len(graph.nodes))], m

    def layout(self, number: int, fitting: Sequence[Layout]) -> Layout | None:
        """The layout of a node among those that its output gradients fit; None if none does.

        Several may fit where few examples have a nonzero gradient. Shapes for another number of examples then tell the
        axis, and not always the order on it: `ambiguous` says that a layout was assumed.
        """
        if len(fitting) < 2:
            return fitting[0] if fitting else None
        own = self.layout_by_shape(number)
        likely = [one for one in fitting if own is not None and one.dim == own.dim] or fitting
        self.ambiguous |= len(likely) > 1
        return likely[0]

    def layout_by_shape(self, number: int) -> Layout | None:
        """Layout of a node whose output gradient is zero, inferred from shapes."""
        if self.shapes is None:
            return None
        shapes, m = self.shapes
        return shape_layout(self.graph.shape(number), len(self.out), shapes[number], m)


def make_plan(search: Search, keep_factors: bool = False, confirm: bool = True) -> Plan:
    """Search the graph of a small batch for a plan; `keep_factors` keeps those of rows that have them.

    `confirm` keeps only parameters whose rows agree with autograd's gradient; it costs another backward pass.
    """
    graph, out, parameters = search.graph, search.out, search.parameters
    n, (uses, lost) = len(out), _find_uses(search)
    numbers = {use.step.consumer for plans in uses.values() for use in plans}
    gradients = {number: torch.stack(search.gradients[number]) for number in numbers}
    truth = GradientCheck(out, search.cotangents, search.draw(2, n), parameters, search.precision) if confirm else None
    blocks: dict[str, list[Block]] = {}
    good: list[UsePlan] = []
    unmatched: list[str] = []
    for name in parameters:
        if name not in uses:  # the outputs do not depend on it: its rows are zero
            continue
        speaking = [use for use in uses[name] if not use.by_shape] or uses[name]
        extractors, own = ([], []) if name in lost else _extract(speaking, graph, gradients, n)
        if own and (truth is None or not truth.disagreeing(own, [name])):
            blocks[name] = own
            good += [replace(use, idle=True) for use in uses[name] if use not in speaking]
            for use, extractor in zip(speaking, extractors, strict=True):
                short = extractor.short and not keep_factors and _is_whole(graph, use)
                plain = keep_factors and len(own) == 1 and _is_plain(own[0], gradients[use.step.consumer])
                good.append(replace(use, at_once=extractor.summed or short, plain=plain))
        else:
            unmatched.append(name)
    partners = _find_partners(blocks, good, graph, search.precision)
    covered = set(partners.values())  # their weights' blocks contain their rows
    uses_apart = tuple(use for use in good if use.name not in covered)
    return Plan(uses_apart, tuple(unmatched), partners, search.ambiguous or graph.reorders())


def _find_uses(search: Search) -> tuple[dict[str, list[UsePlan]], set[str]]:
    """Follow the graph from each parameter to its first nodes with an example axis.

    The uses of each parameter, and those with a path to the output on which no such node was found.
    """
    graph = search.graph
    uses: dict[str, list[UsePlan]] = {name: [] for name in graph.accumulators}
    lost: set[str] = set()
    frontier = [(name, number) for name, number in graph.accumulators.items()]
    visited: set[tuple[str, int]] = set()
    while frontier:
        steps = [(name, source, step) for name, source in frontier for step in graph.consumers[source]]
        lost |= {name for name, source in frontier if not graph.consumers[source]}
        search.visit({step.consumer for _, _, step in steps})
        frontier = []
        for name, source, step in steps:
            layout = search.layouts[step.consumer]
            if layout is not None:
                by_shape = not bool(search.gradients[step.consumer][0].any())
                uses[name].append(UsePlan(name, step, source, layout, by_shape=by_shape))
            elif (name, step.consumer) not in visited:
                visited.add((name, step.consumer))
                frontier.append((name, step.consumer))
    return uses, lost


def _extract(
    uses: list[UsePlan], graph: Graph, gradients: dict[int, Tensor], n: int
) -> tuple[list[Extractor], list[Block]]:
    """Extractors of a parameter's uses and their joined blocks; empty if no rule covers one of the uses."""
    extractors, found = [], []
    for use in uses:
        try:
            extractor = extractor_of(use, graph, n)
            block = None if extractor is None else extractor.extract(gradients[use.step.consumer])
        except (RuntimeError, ValueError, AttributeError, IndexError, TypeError):
            return [], []  # the fallback is exact
        if extractor is None or block is None or block.shape != (2, n):
            return [], []
        if isinstance(block, Outer):
            covered = block.size if block.index is None else len(block.index)  # of the weight, or of its slice
            if math.prod(block.entries) != covered:  # the layout takes positions for features
                return [], []
        extractors.append(extractor)
        found.append(block)
    return extractors, joined(found)


def _is_whole(graph: Graph, use: UsePlan) -> bool:
    """Whether the node reads the parameter itself, or a type conversion of it."""
    return hasattr(uncast(graph.nodes[use.source], use.step.output)[0], "variable")


def _is_plain(block: Block, gradient: Tensor) -> bool:
    if not isinstance(block, Outer) or block.index is not None or not block.single or gradient.ndim != 3:
        return False
    return gradient.shape[2] <= tuning.WIDEST_FUSED_LAYER and torch.equal(block.b[:, :, 0, 0], gradient.to(block.b))


def _find_partners(
    blocks: dict[str, list[Block]], uses: Sequence[UsePlan], graph: Graph, precision: torch.dtype
) -> dict[str, str]:
    """Biases whose rows are the sums of a weight's output gradients, by the weight's name; they share a block.

    Candidates are the weights of the same node, and those of the same module to whose whole output an addition adds the
    bias. That rows are equal in the examples of the search is not enough: a bias that is switched off in some examples,
    or added after the outputs of several positions were mixed, has other rows there. Weights whose rows are computed at
    once store no output gradients and are excluded.
    """
    enters: dict[str, set[int]] = {}
    for use in uses:
        enters.setdefault(use.name, set()).add(use.step.consumer)
    early = {use.name for use in uses if use.at_once}
    added_at = {use.step.consumer: graph.added_at(use.step.consumer) for use in uses}
    kept = [block for name in blocks if name not in early for block in blocks[name]]
    weights = [block for block in kept if isinstance(block, Outer) and block.index is None]
    found: dict[str, str] = {}
    for name, own in blocks.items():
        if len(own) != 1 or not isinstance(own[0], Dense):
            continue
        rows, module = own[0].values, name.rpartition(".")[0]
        beside = [w for w in weights if enters[w.weight] == enters[name]]
        beside += [w for w in weights if w.weight.rpartition(".")[0] == module
                   and {added_at[number] for number in enters[w.weight]} == enters[name]]
        for weight in beside:
            sums = weight.sums()
            same = weight.weight not in found and sums.shape == rows.shape
            size = float(sums.abs().max()) if same else 0.0
            if same and agree(rows.flatten(), sums.flatten(), size, size, precision):
                found[weight.weight] = name
                break
    return found
