"""A plan: which node and which rule gives each parameter's rows, made once per graph and checked against autograd.

From a parameter's accumulator the search climbs to the first nodes whose output gradients belong to examples; what
lies between is a function of the parameter alone (a transpose, a slice, a weight normalization). A plan is believed
until a batch's rows disagree with autograd's gradient; it is then made anew, and each parameter's rows are compared,
for two seeds: what does not agree is left to the fallback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from ntk_laplace.factors.blocks import Block, Dense, Lookup, Outer
from ntk_laplace.factors.folding import Folded, Folding
from ntk_laplace.factors.gradients import Gradients, Reading
from ntk_laplace.factors.graph import Graph, Step, is_view, node_kind, output_shape, pull_back, view_positions
from ntk_laplace.factors.joins import join_positions
from ntk_laplace.factors.layout import Layout, find_layout
from ntk_laplace.factors.proof import Truth, agree
from ntk_laplace.factors.rules import RULES, OperandDense, OperandLookup, OperandOuter, OperandRows, Reader, Use

__all__ = ["Plan", "UsePlan", "find_uses", "make_plan"]

_WIDEST = 1024  # outputs of a layer whose products are worth making a seed at a time: wider ones dwarf a copy


@dataclass(frozen=True)
class UsePlan:
    """One use of one parameter.

    Attributes
    ----------
    name : str
        The parameter.
    step : Step
        The consuming node, its operand, and which output of `source` it reads.
    source : int
        Number of the node just before it on the parameter's side.
    layout : Layout
        Where the examples lie in the consumer's output.
    at_once : bool
        Its rows are made of one seed's gradient at a time.
    plain : bool
        An example's b is a row of the node's output gradient as it is: one position, one group, not too wide.
    """

    name: str
    step: Step
    source: int
    layout: Layout
    at_once: bool = False
    plain: bool = False


@dataclass(frozen=True)
class Plan:
    """Uses of the parameters that rules cover, and the names of those they do not.

    Attributes
    ----------
    uses : tuple of UsePlan
    unmatched : tuple of str
    partners : dict of str to str
        Bias by the name of its weight, where an addition of its own brings it in, as behind a matrix product.
    """

    uses: tuple[UsePlan, ...]
    unmatched: tuple[str, ...]
    partners: dict[str, str] = field(default_factory=dict)

    def readings(self, graph: Graph, n: int, folding: Folding | None = None) -> list[Reading]:
        """What reads each use's rows, in the order of `uses`, from a batch of n examples."""
        found = [_reading(use, graph, n) for use in self.uses]
        for index in self._folded(graph, n, folding):
            found[index] = replace(found[index], folded=True)
        return found

    def _folded(self, graph: Graph, n: int, folding: Folding | None) -> list[int]:
        """Uses whose gradients may be added up as they come: nothing else reads that node, or that parameter.

        A product of fewer examples than outputs would be the reading of its total, seed after seed.
        """
        if folding is None:
            return []
        alone = [family[0] for family in self._families() if len(family) == 1]
        found = []
        for index in alone:
            use = self.uses[index]
            if use.plain:
                o = graph.shape(use.step.consumer)[-1]
                if folding.fold.suits(use.name, o, self.partners.get(use.name)) and (folding.fold.squared or o <= n):
                    found.append(index)
        return found

    def blocks(self, graph: Graph, gradients: Gradients, parameters: dict[str, nn.Parameter]) -> Iterator[Block]:
        """Rows of every matched parameter, uses of one parameter joined; gradients are freed as they are used up.

        Parameters
        ----------
        graph : Graph
        gradients : Gradients
            Of the plan's readings.
        parameters : dict of str to nn.Parameter
        """
        for family in self._families():
            if gradients.readings[family[0]].folded:
                yield self._folded_block(graph, gradients, parameters, family[0])
                gradients.forget(family)
                continue
            found = [
                _use_block(self.uses[index], graph, gradients.rows(index), parameters[self.uses[index].name])
                for index in family
            ]
            gradients.forget(family)
            for block in _joined(found):
                whole = isinstance(block, Outer) and block.index is None
                partner = self.partners.get(block.weight) if whole else None
                yield block if partner is None else replace(block, bias=partner)

    def _folded_block(
        self, graph: Graph, gradients: Gradients, parameters: dict[str, nn.Parameter], index: int
    ) -> Folded:
        use, folding = self.uses[index], gradients.folding
        sums, kept = gradients.folds(index)
        unread = kept.new_zeros(()).expand(1, *graph.shape(use.step.consumer))  # the inputs alone are looked for
        whole = _use_block(use, graph, gradients.readings[index].read(unread), parameters[use.name])
        b, a = kept[:, :, None, None], whole.a[folding.some]
        rows = Outer(use.name, self.partners.get(use.name), b, a, None, whole.size)
        return Folded(sums, folding.fold.squared, whole.a[:, 0, 0], rows)

    def _families(self) -> list[list[int]]:
        """Indices of uses, those with a parameter or a consuming node in common together."""
        families: list[tuple[set[str | int], list[int]]] = []
        for index, use in enumerate(self.uses):
            ties, members = {use.name, use.step.consumer}, [index]
            for family in [family for family in families if family[0] & ties]:
                families.remove(family)
                ties, members = ties | family[0], family[1] + members
            families.append((ties, members))
        return [members for _, members in families]


def _joined(blocks: Iterable[Block]) -> list[Block]:
    joined: dict[tuple, Block] = {}
    for block in blocks:
        joined[block.kind] = join_positions(joined[block.kind], block) if block.kind in joined else block
    return list(joined.values())


def _find_partners(blocks: dict[str, list[Block]], uses: Sequence[UsePlan]) -> dict[str, str]:
    """Biases whose rows are the sums of a weight's output gradients, by the weight's name: its block holds them too.

    Looked for among the weights that enter where the bias does, and those of its module: an addition of its own may
    bring it in. A weight whose rows are made at once has no such gradients.
    """
    enters: dict[str, set[int]] = {}
    for use in uses:
        enters.setdefault(use.name, set()).add(use.step.consumer)
    early = {use.name for use in uses if use.at_once}
    kept = [block for name in blocks if name not in early for block in blocks[name]]
    weights = [block for block in kept if isinstance(block, Outer) and block.index is None]
    found: dict[str, str] = {}
    for name, own in blocks.items():
        if len(own) != 1 or not isinstance(own[0], Dense):
            continue
        rows, module = own[0].rows, name.rpartition(".")[0]
        beside = [w for w in weights if enters[w.weight] == enters[name]]
        beside += [w for w in weights if w.weight.rpartition(".")[0] == module and enters[w.weight] != enters[name]]
        for weight in beside:
            sums = weight.sums()
            same = weight.weight not in found and sums.shape == rows.shape
            size = float(sums.abs().max()) if same else 0.0
            if same and agree(rows.flatten(), sums.flatten(), size, size):
                found[weight.weight] = name
                break
    return found


def _reading(use: UsePlan, graph: Graph, n: int) -> Reading:
    read = _reader(use, graph, n).read
    if use.at_once:
        read = _written_out(read, output_shape(graph.nodes[use.source], use.step.output))
    return Reading(use.step.consumer, use.layout.dim, read, use.at_once)


def _written_out(read: Callable[[Tensor], OperandRows], shape: torch.Size) -> Callable[[Tensor], OperandDense]:
    """The same rows of an operand of this shape, without their factors."""
    return lambda gradient: OperandDense(_operand_dense(read(gradient), shape))


def _reader(use: UsePlan, graph: Graph, n: int) -> Reader | None:
    node = graph.nodes[use.step.consumer]
    rule = RULES.get(node_kind(node))
    shape = output_shape(graph.nodes[use.source], use.step.output)
    output = graph.shape(use.step.consumer)
    return None if rule is None else rule(Use(node, use.step.operand, shape, output, use.layout, n))


def _use_block(use: UsePlan, graph: Graph, rows: OperandRows, parameter: nn.Parameter) -> Block:
    source = graph.nodes[use.source]
    shape = output_shape(source, use.step.output)
    if hasattr(source, "variable"):
        return _plain_block(use.name, rows, parameter)
    if isinstance(rows, OperandOuter):
        transposed = node_kind(source) == "TBackward" and _direct(source)
        if rows.order == "gio" and transposed and shape.numel() == parameter.numel():
            return Outer(use.name, None, rows.b, rows.a, None, parameter.numel())
        positions = view_positions(source, use.step.output, parameter) if _all_views(source) else None
        if positions is not None:
            index = positions[_order(rows)] if rows.order == "gio" else positions
            return Outer(use.name, None, rows.b, rows.a, _unless_identity(index, parameter), parameter.numel())
    dense = _operand_dense(rows, shape)
    flat = dense.flatten(0, 1).reshape(-1, *shape)
    return Dense(use.name, pull_back(source, use.step.output, parameter, flat).reshape(*dense.shape[:2], -1))


def _direct(node: object) -> bool:
    return hasattr(node.next_functions[0][0], "variable")


def _all_views(node: object) -> bool:
    while not hasattr(node, "variable"):
        if not is_view(node):
            return False
        node = node.next_functions[0][0]
    return True


def _order(rows: OperandOuter) -> Tensor:
    """Flat operand position of (g, o, i) where the operand runs (g, i, o)."""
    g, o, i = rows.b.shape[2], rows.b.shape[4], rows.a.shape[3]
    return torch.arange(g * o * i, device=rows.b.device).reshape(g, i, o).transpose(1, 2).flatten()


def _unless_identity(index: Tensor, parameter: nn.Parameter) -> Tensor | None:
    whole = len(index) == parameter.numel()
    return None if whole and torch.equal(index, torch.arange(len(index), device=index.device)) else index


def _plain_block(name: str, rows: OperandRows, parameter: nn.Parameter) -> Block:
    if isinstance(rows, OperandDense):
        return Dense(name, rows.rows)
    if isinstance(rows, OperandLookup):
        return Lookup(name, rows.b, rows.tokens, parameter.shape[0], rows.padding)
    index = _unless_identity(_order(rows), parameter) if rows.order == "gio" else None
    return Outer(name, None, rows.b, rows.a, index, parameter.numel())


def _operand_dense(rows: OperandRows, shape: torch.Size) -> Tensor:
    if isinstance(rows, OperandDense):
        return rows.rows
    if isinstance(rows, OperandLookup):
        return Lookup("", rows.b, rows.tokens, shape[0]).dense()[""]
    index = _order(rows) if rows.order == "gio" else None
    return Outer("", None, rows.b, rows.a, index, shape.numel()).dense()[""]


def find_uses(
    graph: Graph, out: Tensor, seeds: Tensor, weights: Tensor
) -> tuple[dict[str, list[UsePlan]], set[str], dict[int, tuple[Tensor, Tensor]]]:
    """Climb from each parameter to where its examples part.

    Returns
    -------
    uses : dict of str to list of UsePlan
    lost : set of str
        Parameters with a way to the output on which no such node was found.
    gradients : dict of int to pair of Tensor
        Output gradients of both `seeds` at the nodes that were looked at; the second seed is the first, each example
        of it times its own of `weights`.
    """
    gradients: dict[int, tuple[Tensor, Tensor]] = {}
    layouts: dict[int, Layout | None] = {}
    uses: dict[str, list[UsePlan]] = {name: [] for name in graph.accumulators}
    lost: set[str] = set()
    frontier = [(name, number) for name, number in graph.accumulators.items()]
    visited: set[tuple[str, int]] = set()
    while frontier:
        steps = [(name, source, step) for name, source in frontier for step in graph.consumers[source]]
        lost |= {name for name, source in frontier if not graph.consumers[source]}
        wanted = {step.consumer for _, _, step in steps}
        gradients |= _probe(graph, out, seeds, weights, wanted, layouts)
        frontier = []
        for name, source, step in steps:
            layout = layouts[step.consumer]
            if layout is not None:
                uses[name].append(UsePlan(name, step, source, layout))
            elif (name, step.consumer) not in visited:
                visited.add((name, step.consumer))
                frontier.append((name, step.consumer))
    return uses, lost, gradients


def _probe(
    graph: Graph, out: Tensor, seeds: Tensor, weights: Tensor, numbers: set[int], layouts: dict
) -> dict[int, tuple[Tensor, Tensor]]:
    """Find the layout at each node, with two backward passes for all of them; views of a parameter have none."""
    wanted = []
    for number in sorted(numbers - layouts.keys()):
        layouts[number] = None
        if not is_view(graph.nodes[number]):
            wanted.append(number)
    if not wanted:
        return {}
    edges = [GradientEdge(graph.nodes[number], 0) for number in wanted]
    passes = [torch.autograd.grad(out, edges, seed, retain_graph=True, allow_unused=True) for seed in seeds]
    found = {number: pair for number, *pair in zip(wanted, *passes, strict=True) if pair[0] is not None}
    for number, (plain, scaled) in found.items():
        layouts[number] = find_layout(plain, scaled, weights)
    return found


def make_plan(
    graph: Graph, out: Tensor, parameters: dict[str, nn.Parameter], keep_factors: bool = False, confirm: bool = True
) -> Plan:
    """Search the graph of a small batch, and keep what autograd confirms.

    Parameters
    ----------
    graph : Graph
    out : Tensor, (N, C)
        Outputs of at least two examples, with their graph.
    parameters : dict of str to nn.Parameter
    keep_factors : bool
        Rows that have factors are wanted as such.
    confirm : bool
        Compare each parameter's rows with autograd's gradient, at the cost of another backward pass.
    """
    generator = torch.Generator().manual_seed(0)
    n = len(out)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(out)

    weights = 1.0 + 0.7 * torch.arange(n, dtype=torch.float64) * (-1.0) ** torch.arange(n)
    seed, weights = draw(*out.shape), weights.to(out)
    seeds = torch.stack([seed, seed * weights[:, None]])
    uses, lost, found = find_uses(graph, out, seeds, weights)
    numbers = {use.step.consumer for plans in uses.values() for use in plans}
    gradients = {number: torch.stack(found[number]) for number in numbers}
    truth = Truth(out, seeds, draw(2, n), parameters) if confirm else None
    blocks: dict[str, list[Block]] = {}
    good: list[UsePlan] = []
    unmatched: list[str] = []
    for name, parameter in parameters.items():
        if name not in uses:  # the outputs do not depend on it: its rows are zero
            continue
        readers, own = ([], []) if name in lost else _read(uses[name], graph, gradients, parameter, n)
        if own and (truth is None or not truth.disagreeing(own, [name])):
            blocks[name] = own
            for use, reader in zip(uses[name], readers, strict=True):
                short = reader.short and not keep_factors and use.source == graph.accumulators[name]
                plain = keep_factors and len(own) == 1 and _is_plain(own[0], gradients[use.step.consumer])
                good.append(replace(use, at_once=reader.summed or short, plain=plain))
        else:
            unmatched.append(name)
    partners = _find_partners(blocks, good)
    covered = set(partners.values())  # by their weights' blocks
    return Plan(tuple(use for use in good if use.name not in covered), tuple(unmatched), partners)


def _is_plain(block: Block, gradient: Tensor) -> bool:
    if not isinstance(block, Outer) or block.index is not None or not block.single or gradient.ndim != 3:
        return False
    return gradient.shape[2] <= _WIDEST and torch.equal(block.b[:, :, 0, 0], gradient)


def _read(
    uses: list[UsePlan], graph: Graph, gradients: dict[int, Tensor], parameter: nn.Parameter, n: int
) -> tuple[list[Reader], list[Block]]:
    """Readers of a parameter's uses and their rows, joined; none if a rule does not know how a node is laid out."""
    readers, found = [], []
    for use in uses:
        try:
            reader = _reader(use, graph, n)
            rows = None if reader is None else reader.read(gradients[use.step.consumer])
            block = None if rows is None else _use_block(use, graph, rows, parameter)
        except (RuntimeError, ValueError, AttributeError, IndexError, TypeError):
            return [], []  # the fallback is exact
        if block is None or block.shape != (2, n):
            return [], []
        readers.append(reader)
        found.append(block)
    return readers, _joined(found)
