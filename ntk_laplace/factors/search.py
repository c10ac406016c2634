"""The search for a plan: made of a small batch's graph, and checked against autograd.

From a parameter's accumulator the search climbs to the first nodes whose output gradients belong to examples; what
lies between is a function of the parameter alone (a transpose, a slice, a weight normalization). A plan is believed
until a batch's rows disagree with autograd's gradient; it is then made anew, and each parameter's rows are compared,
for two seeds: what does not agree is left to the fallback.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from ntk_laplace.factors.blocks import Block, Dense, Outer
from ntk_laplace.factors.graph import Graph, is_view
from ntk_laplace.factors.layout import Layout, find_layout
from ntk_laplace.factors.plan import Plan, UsePlan, joined, reader_of, use_block
from ntk_laplace.factors.proof import Truth, agree
from ntk_laplace.factors.rules import Reader

__all__ = ["find_uses", "make_plan"]

_WIDEST = 1024  # outputs of a layer whose products are worth making a seed at a time: wider ones dwarf a copy


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


def _read(
    uses: list[UsePlan], graph: Graph, gradients: dict[int, Tensor], parameter: nn.Parameter, n: int
) -> tuple[list[Reader], list[Block]]:
    """Readers of a parameter's uses and their rows, joined; none if a rule does not know how a node is laid out."""
    readers, found = [], []
    for use in uses:
        try:
            reader = reader_of(use, graph, n)
            rows = None if reader is None else reader.read(gradients[use.step.consumer])
            block = None if rows is None else use_block(use, graph, rows, parameter)
        except (RuntimeError, ValueError, AttributeError, IndexError, TypeError):
            return [], []  # the fallback is exact
        if block is None or block.shape != (2, n):
            return [], []
        readers.append(reader)
        found.append(block)
    return readers, joined(found)


def _is_plain(block: Block, gradient: Tensor) -> bool:
    if not isinstance(block, Outer) or block.index is not None or not block.single or gradient.ndim != 3:
        return False
    return gradient.shape[2] <= _WIDEST and torch.equal(block.b[:, :, 0, 0], gradient)


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
