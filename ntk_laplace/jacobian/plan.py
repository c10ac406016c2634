"""The plan: the node and the rule that give each parameter's rows. It is made once per graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import cast

from ntk_laplace.jacobian.blocks import Block, Outer
from ntk_laplace.jacobian.fast import FusedAccumulation
from ntk_laplace.jacobian.gradients import Extraction, Gradients
from ntk_laplace.jacobian.graph import Graph, Step, node_kind
from ntk_laplace.jacobian.layout import Layout
from ntk_laplace.jacobian.path import ParameterPath
from ntk_laplace.jacobian.rules import RULES, Extractor, Use


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
        Number of the node before the consumer, on the parameter's side.
    layout : Layout
        Example axis of the consumer's output.
    at_once : bool
        Rows are computed from one cotangent's gradient at a time.
    plain : bool
        An example's b is one row of the node's output gradient: one position, one group, not too wide.
    by_shape : bool
        The output gradient was zero when the plan was made, and the layout was inferred from shapes. The plan is
        valid as long as this gradient is zero.
    idle : bool
        As `by_shape`, but another use of the parameter had a nonzero gradient. This use gives no rows; its gradient
        is only checked for zero.
    """

    name: str
    step: Step
    source: int
    layout: Layout
    at_once: bool = False
    plain: bool = False
    by_shape: bool = False
    idle: bool = False


@dataclass(frozen=True)
class Plan:
    """Uses of the parameters that rules cover, and the names of the other parameters.

    Attributes
    ----------
    uses : tuple of UsePlan
    unmatched : tuple of str
    partners : dict of str to str
        Bias by the name of its weight, if the weight's output gradients also give the bias's rows.
    uncertain : bool
        A layout was assumed, or the graph selects or reorders entries by their values, so that rows may belong to other
        examples in each batch: a few examples of a batch do not speak for the others.
    """

    uses: tuple[UsePlan, ...]
    unmatched: tuple[str, ...]
    partners: dict[str, str] = field(default_factory=dict)
    uncertain: bool = False

    def extractions(self, graph: Graph, n: int, accumulation: FusedAccumulation | None = None) -> list[Extraction]:
        """Extraction of each use, in the order of `uses`, for a batch of n examples."""
        found = []
        for use in self.uses:
            extractor = None if use.idle else extractor_of(use, graph, n)
            extract = None if extractor is None else extractor.extract
            found.append(Extraction(use.name, use.step.consumer, use.layout.dim, extract, use.at_once))
        for index in self._fused_uses(graph, n, accumulation):
            found[index] = replace(found[index], fused=True)
        return found

    def misfits(self, graph: Graph, n: int) -> set[str]:
        """Parameters with a use whose example axis cannot have n examples: a layer that runs on some of them alone."""
        def fits(use: UsePlan) -> bool:
            shape = graph.shape(use.step.consumer)
            return use.layout.dim < len(shape) and shape[use.layout.dim] % n == 0

        return {use.name for use in self.uses if not fits(use)}

    def contradicted(self, gradients: Gradients) -> set[str]:
        """Parameters with a nonzero gradient where the plan is valid only for a zero gradient."""
        return {use.name for index, use in enumerate(self.uses) if use.by_shape and gradients.any(index)}

    def without(self, names: set[str]) -> Plan:
        """The plan with these parameters, and the partner biases of these weights, left to the fallback."""
        left = names | {self.partners[name] for name in names if name in self.partners}
        partners = {name: partner for name, partner in self.partners.items() if name not in left}
        uses = tuple(use for use in self.uses if use.name not in left)
        return replace(self, uses=uses, unmatched=(*self.unmatched, *sorted(left)), partners=partners)

    def _fused_uses(self, graph: Graph, n: int, accumulation: FusedAccumulation | None) -> list[int]:
        """Uses whose gradients may be summed during the backward passes: no other reads the node or the parameter."""
        if accumulation is None:
            return []
        alone = {family[0]: self.uses[family[0]] for family in self._families() if len(family) == 1}
        return [
            index for index, use in alone.items()
            if use.plain and graph.shape(use.step.consumer)[0] == n  # one position, in this batch too
            and accumulation.suits(use.name, self.partners.get(use.name), n, graph.shape(use.step.consumer)[-1])
        ]

    def blocks(self, gradients: Gradients) -> Iterator[Block]:
        """Blocks of every matched parameter, with the uses of one parameter joined; used gradients are freed.

        With fused layers some are `FusedSums`, for callers that asked for these.
        """
        for family in self._families():
            if gradients.extractions[family[0]].fused:
                sums = gradients.fused_block(family[0], self.partners.get(self.uses[family[0]].name))
                yield cast(Block, sums)
                gradients.forget(family)
                continue
            found = [gradients.block(index) for index in family if not self.uses[index].idle]
            gradients.forget(family)
            for block in joined(found):
                if isinstance(block, Outer) and block.index is None and block.weight in self.partners:
                    block = replace(block, bias=self.partners[block.weight])
                yield block

    def _families(self) -> list[list[int]]:
        """Indices of uses, grouped by common parameter or consuming node."""
        families: list[tuple[set[str | int], list[int]]] = []
        for index, use in enumerate(self.uses):
            ties: set[str | int] = {use.name, use.step.consumer}
            members = [index]
            for family in [family for family in families if family[0] & ties]:
                families.remove(family)
                ties, members = ties | family[0], family[1] + members
            families.append((ties, members))
        return [members for _, members in families]


def joined(blocks: Iterable[Block]) -> list[Block]:
    """Blocks of several uses of one parameter, with blocks of the same kind joined."""
    found: dict[tuple, list[Block]] = {}
    for block in blocks:
        found.setdefault(block.kind, []).append(block)
    return [first.joined(others) if others else first for first, *others in found.values()]


def extractor_of(use: UsePlan, graph: Graph, n: int) -> Extractor | None:
    """Extractor of the use's rows for a batch of n examples; None if no rule applies to the node."""
    node = graph.nodes[use.step.consumer]
    rule = RULES.get(node_kind(node))
    if rule is None or node._input_metadata[0].dtype.is_complex:  # rows are real, and so are the rules
        return None
    path = ParameterPath.to(use.name, graph.parameters[use.name], graph.nodes[use.source], use.step.output)
    output = graph.shape(use.step.consumer)
    extractor = rule(Use(node, use.step.operand, path.shape, output, use.layout, n, graph.dtype, path))
    return None if extractor is None else replace(extractor,
                                                  extract=lambda gradient: extractor.extract(gradient.to(graph.dtype)))
