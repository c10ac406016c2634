"""A plan: which node and which rule gives each parameter's rows, made once per graph and checked against autograd.

From a parameter's accumulator the search climbs to the first nodes whose output gradients belong to examples; what
lies between is a function of the parameter alone (a transpose, a slice, a weight normalization). Every parameter's
rows are then compared with autograd's own gradient, for two seeds: what does not agree is left to the fallback.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from ntk_laplace.factors.blocks import Block, Dense, Lookup, Outer, join_positions
from ntk_laplace.factors.graph import Graph, Step, is_view, node_kind, output_shape, pull_back, view_positions
from ntk_laplace.factors.layout import Layout, find_layout
from ntk_laplace.factors.rules import RULES, OperandDense, OperandLookup, OperandOuter, OperandRows, Use

__all__ = ["Plan", "UsePlan", "agree", "find_uses", "loudest", "make_plan"]

_AGREEMENT = {torch.float64: 1e-8, torch.float32: 2e-3}


def loudest(gradients: Sequence[Tensor | None]) -> float:
    """Largest entry of all gradients."""
    return max((float(g.abs().max()) for g in gradients if g is not None and g.numel()), default=0.0)


def agree(own: Tensor, expected: Tensor | None, loud: float) -> bool:
    """Whether a flat sum of rows equals autograd's gradient, up to rounding.

    Parameters
    ----------
    own, expected : Tensor
        `expected` None means zero.
    loud : float
        The largest gradient of the network: what lies below its rounding cannot be compared.
    """
    truth = torch.zeros_like(own) if expected is None else expected.flatten()
    if not own.numel():
        return True
    scale = max(float(truth.abs().max()), float(own.abs().max()))
    floor = 100 * torch.finfo(own.dtype).eps * loud
    return float((own - truth).abs().max()) <= max(_AGREEMENT.get(own.dtype, 5e-2) * scale, floor)


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
    """

    name: str
    step: Step
    source: int
    layout: Layout


@dataclass(frozen=True)
class Plan:
    """Uses of the parameters that rules cover, and the names of those they do not.

    Attributes
    ----------
    uses : tuple of UsePlan
    unmatched : tuple of str
    partners : dict of str to str
        Weight by the name of a bias that an addition of its own brings in, as behind a matrix product.
    """

    uses: tuple[UsePlan, ...]
    unmatched: tuple[str, ...]
    partners: dict[str, str] = field(default_factory=dict)

    @cached_property
    def edges(self) -> list[int]:
        """Numbers of the consuming nodes, each once."""
        return sorted({use.step.consumer for use in self.uses})

    def blocks(
        self, graph: Graph, gradients: dict[int, Tensor], parameters: dict[str, nn.Parameter], n: int,
        memo: dict[int, dict[str, Tensor]] | None = None,
    ) -> list[Block]:  # fmt: skip
        """Rows of every matched parameter, uses of one parameter joined.

        Parameters
        ----------
        graph : Graph
        gradients : dict of int to Tensor
            Output gradients (K, *output shape) by node number.
        parameters : dict of str to nn.Parameter
        n : int
            Number of examples.
        memo : dict, optional
            Keeps by node what rules need beside the gradient, for the next seeds.
        """
        memo = {} if memo is None else memo
        pending: dict[tuple[int, str], Block] = {}
        biases: dict[int, tuple[str, Block]] = {}
        for use in self.uses:
            own = memo.setdefault(use.step.consumer, {})
            block = _use_block(use, graph, gradients[use.step.consumer], parameters[use.name], n, own)
            pending[(use.step.consumer, f"{use.step.operand}.{use.name}")] = block
            if _is_bias(use, graph):
                biases[use.step.consumer] = (f"{use.step.operand}.{use.name}", block)
        _attach_biases(pending, biases)
        return _united(_join(list(pending.values())), self.partners)


def _is_bias(use: UsePlan, graph: Graph) -> bool:
    kind, operand = node_kind(graph.nodes[use.step.consumer]), use.step.operand
    plain = hasattr(graph.nodes[use.source], "variable")
    return plain and (kind, operand) in {("AddmmBackward", 0), ("ConvolutionBackward", 2)}


def _attach_biases(pending: dict[tuple[int, str], Block], biases: dict[int, tuple[str, Block]]) -> None:
    """A bias shares its weight's output gradient: one `Outer` holds both, and one product serves both."""
    uses_of: dict[str, int] = {}
    for block in pending.values():
        uses_of[block.names[0]] = uses_of.get(block.names[0], 0) + 1
    for consumer, (key, bias) in biases.items():
        partner = next(
            (k for k, b in pending.items() if k[0] == consumer and isinstance(b, Outer)), None
        )
        if partner is None:
            continue
        weight = pending[partner]
        same_uses = uses_of[weight.names[0]] == uses_of[bias.names[0]]
        rows = weight.b.shape[2] * weight.b.shape[4]
        if same_uses and bias.rows.shape[2] == rows and weight.index is None:
            pending[partner] = Outer(weight.weight, bias.weight, weight.b, weight.a, None, weight.size)
            del pending[(consumer, key)]


def _join(blocks: list[Block]) -> list[Block]:
    joined: dict[tuple, Block] = {}
    for block in blocks:
        kind = block.kind
        joined[kind] = join_positions(joined[kind], block) if kind in joined else block
    return list(joined.values())


def _find_partners(blocks: list[Block]) -> dict[str, str]:
    """Biases whose rows are the sums of a weight's output gradients, in the same module."""
    weights = {}
    for block in blocks:
        if isinstance(block, Outer) and block.bias is None and block.index is None:
            weights.setdefault(block.weight.rpartition(".")[0], []).append(block)
    found: dict[str, str] = {}
    for block in blocks:
        if not isinstance(block, Dense):
            continue
        for weight in weights.get(block.weight.rpartition(".")[0], []):
            sums = weight.full_b().sum(3).flatten(2)
            if weight.weight not in found.values() and sums.shape == block.rows.shape:
                scale = float(sums.abs().max())
                if agree(sums.flatten(), block.rows.flatten(), scale):
                    found[block.weight] = weight.weight
                    break
    return found


def _united(blocks: list[Block], partners: dict[str, str]) -> list[Block]:
    if not partners:
        return blocks
    biases = {weight: bias for bias, weight in partners.items()}
    united = [
        replace(block, bias=biases[block.weight]) if isinstance(block, Outer) and block.weight in biases else block
        for block in blocks
    ]
    return [block for block in united if not (isinstance(block, Dense) and block.weight in partners)]


def _operand_rows(
    use: UsePlan, graph: Graph, gradient: Tensor, n: int, memo: dict[str, Tensor]
) -> OperandRows | None:
    node = graph.nodes[use.step.consumer]
    rule = RULES.get(node_kind(node))
    if rule is None:
        return None
    shape = output_shape(graph.nodes[use.source], use.step.output)
    return rule(Use(node, use.step.operand, shape, gradient, use.layout, n, memo))


def _use_block(
    use: UsePlan, graph: Graph, gradient: Tensor, parameter: nn.Parameter, n: int, memo: dict[str, Tensor]
) -> Block | None:
    rows = _operand_rows(use, graph, gradient, n, memo)
    if rows is None:
        return None
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


def find_uses(graph: Graph, out: Tensor, seed: Tensor, weights: Tensor) -> tuple[dict[str, list[UsePlan]], set[str]]:
    """Climb from each parameter to where its examples part.

    Returns
    -------
    uses : dict of str to list of UsePlan
    lost : set of str
        Parameters with a way to the output on which no such node was found.
    """
    layouts: dict[int, Layout | None] = {}
    uses: dict[str, list[UsePlan]] = {name: [] for name in graph.accumulators}
    lost: set[str] = set()
    frontier = [(name, number) for name, number in graph.accumulators.items()]
    visited: set[tuple[str, int]] = set()
    while frontier:
        steps = [(name, source, step) for name, source in frontier for step in graph.consumers[source]]
        lost |= {name for name, source in frontier if not graph.consumers[source]}
        _probe(graph, out, seed, weights, {step.consumer for _, _, step in steps}, layouts)
        frontier = []
        for name, source, step in steps:
            layout = layouts[step.consumer]
            if layout is not None:
                uses[name].append(UsePlan(name, step, source, layout))
            elif (name, step.consumer) not in visited:
                visited.add((name, step.consumer))
                frontier.append((name, step.consumer))
    return uses, lost


def _probe(graph: Graph, out: Tensor, seed: Tensor, weights: Tensor, numbers: set[int], layouts: dict) -> None:
    """Find the layout at each node, with two backward passes for all of them; views of a parameter have none."""
    wanted = []
    for number in sorted(numbers - layouts.keys()):
        layouts[number] = None
        if not is_view(graph.nodes[number]):
            wanted.append(number)
    if not wanted:
        return
    edges = [GradientEdge(graph.nodes[number], 0) for number in wanted]
    plain = torch.autograd.grad(out, edges, seed, retain_graph=True, allow_unused=True)
    scaled = torch.autograd.grad(out, edges, seed * weights[:, None], retain_graph=True, allow_unused=True)
    for number, one, other in zip(wanted, plain, scaled, strict=True):
        if one is not None and other is not None:
            layouts[number] = find_layout(one, other, weights)


def make_plan(graph: Graph, out: Tensor, parameters: dict[str, nn.Parameter]) -> Plan:
    """Search the graph of a small batch, and keep what autograd confirms.

    Parameters
    ----------
    graph : Graph
    out : Tensor, (N, C)
        Outputs of at least two examples, with their graph.
    parameters : dict of str to nn.Parameter
    """
    generator = torch.Generator().manual_seed(0)
    n = len(out)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(out)

    weights = 1.0 + 0.7 * torch.arange(n, dtype=torch.float64) * (-1.0) ** torch.arange(n)
    seeds, weights = draw(2, *out.shape), weights.to(out)
    uses, lost = find_uses(graph, out, seeds[0], weights)
    truth = torch.autograd.grad(
        out, list(parameters.values()), seeds[0] + seeds[1] * weights[:, None], retain_graph=True, allow_unused=True
    )
    numbers = sorted({use.step.consumer for plans in uses.values() for use in plans})
    gradients = _stack_gradients(out, graph, numbers, seeds)
    cotangent = torch.stack([torch.ones_like(weights), weights])
    loud = loudest(truth)
    good: list[UsePlan] = []
    unmatched: list[str] = []
    memo: dict[int, dict[str, Tensor]] = {}
    for (name, parameter), expected in zip(parameters.items(), truth, strict=True):
        if name not in uses:  # the outputs do not depend on it: its rows are zero
            continue
        reference = expected, loud
        if name not in lost and _confirmed(uses[name], graph, (gradients, memo), parameter, cotangent, reference):
            good.extend(uses[name])
        else:
            unmatched.append(name)
    plan = Plan(tuple(good), tuple(unmatched))
    kept = {use.step.consumer: gradients[use.step.consumer] for use in good}
    return replace(plan, partners=_find_partners(plan.blocks(graph, kept, parameters, n, memo)))


def _stack_gradients(out: Tensor, graph: Graph, numbers: list[int], seeds: Tensor) -> dict[int, Tensor]:
    if not numbers:
        return {}
    edges = [GradientEdge(graph.nodes[number], 0) for number in numbers]
    found = [torch.autograd.grad(out, edges, seed, retain_graph=True) for seed in seeds]
    return {number: torch.stack(same) for number, same in zip(numbers, zip(*found, strict=True), strict=True)}


def _confirmed(
    uses: list[UsePlan], graph: Graph, known: tuple[dict[int, Tensor], dict[int, dict[str, Tensor]]],
    parameter: nn.Parameter, cotangent: Tensor, expected: tuple[Tensor | None, float],
) -> bool:  # fmt: skip
    gradients, memo = known
    total = torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
    n = cotangent.shape[1]
    for use in uses:
        try:
            number = use.step.consumer
            block = _use_block(use, graph, gradients[number], parameter, n, memo.setdefault(number, {}))
        except (RuntimeError, ValueError, AttributeError, IndexError, TypeError):
            return False  # a node laid out in a way the rule does not know: the fallback is exact
        if block is None or block.shape != (2, n):
            return False
        total += block.vjp(cotangent)[use.name].detach()
    return bool(uses) and agree(total, *expected)
