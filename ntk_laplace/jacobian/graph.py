"""The autograd graph: nodes in a fixed order, the consumers of each, and the path from a parameter to its uses."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from ntk_laplace.model.network import autograd_nodes

# nodes that only permute, select or convert entries of a parameter
_CAST = "ToCopyBackward"
_VIEWS = {
    "T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze", "Slice", "Select",
    "Split", "SplitWithSizes", "UnsafeSplit", "UnsafeSplitWithSizes", "Unbind", "Alias", "Clone", "Narrow",
    "ToCopy",
}
# nodes that select or reorder entries by values, which differ from batch to batch
_REORDERS = re.compile(r"(Index|Gather|Scatter|Masked(?!Fill)|Take|Put|Sort|Topk|Segment)")
_DIGIT = 256  # positions are sent through a view in base 256, which is exact in every floating dtype


def node_kind(node: Any) -> str:
    """Name of a node without its version: ``AddmmBackward0`` -> ``AddmmBackward``."""
    return node.name().split("::")[-1].rstrip("0123456789")


def is_view(node: Any) -> bool:
    """Whether the node only permutes or selects entries, or converts them to another floating type."""
    return node_kind(node).removesuffix("Backward") in _VIEWS


def uncast(node: Any, output: int) -> tuple[Any, int]:
    """The node's output (or parameter) before conversions to other floating types, such as those of autocast."""
    while node_kind(node) == _CAST:
        node, output = node.next_functions[0]
    return node, output


def rows_dtype(parameters: dict[str, nn.Parameter]) -> torch.dtype:
    """Floating type of the rows: the parameters' type, but at least float32.

    A layer's inputs and output gradients may have other types, and different ones; both are converted to this one.
    """
    first = next(iter(parameters.values()), None)
    return torch.promote_types(torch.float32, torch.float32 if first is None else first.dtype)


def output_shape(node: Any, output: int) -> torch.Size:
    """Shape of one output of a node (of the parameter, for its accumulator)."""
    if hasattr(node, "variable"):
        return node.variable.shape
    return torch.Size(node._input_metadata[output].shape)


@dataclass(frozen=True)
class Step:
    """`consumer` reads output `output` of the preceding node as its input number `operand`."""

    consumer: int
    operand: int
    output: int


class Graph:
    """Autograd nodes of a network's output, numbered in an order that depends only on the graph's structure.

    Attributes
    ----------
    nodes : list
        Autograd nodes; the output's own node comes first.
    accumulators : dict of str to int
        Number of the node that accumulates each parameter's gradient.
    consumers : list of list of Step
        Nodes that read each node's outputs.
    dtype : torch.dtype
        Floating type of the rows.
    parameters : dict of str to nn.Parameter
        The leaves that rows belong to; a graph may reach some of them only.
    """

    def __init__(self, out: Tensor, parameters: dict[str, nn.Parameter]) -> None:
        self.dtype, self.parameters = rows_dtype(parameters), parameters
        self.nodes = list(autograd_nodes(out))
        numbers = {node: number for number, node in enumerate(self.nodes)}
        self.consumers: list[list[Step]] = [[] for _ in self.nodes]
        for number, node in enumerate(self.nodes):
            for operand, (before, output) in enumerate(node.next_functions):
                if before is not None:
                    self.consumers[numbers[before]].append(Step(number, operand, output))
        by_identity = {id(parameter): name for name, parameter in parameters.items()}
        self.accumulators = {
            by_identity[id(node.variable)]: number
            for number, node in enumerate(self.nodes)
            if hasattr(node, "variable") and id(node.variable) in by_identity
        }

    def shape(self, number: int) -> torch.Size:
        """Shape of a node's first output."""
        return output_shape(self.nodes[number], 0)

    def added_at(self, number: int) -> int | None:
        """Number of the addition that reads a node's whole output, if nothing else reads it; views may lie between."""
        while len(self.consumers[number]) == 1:
            size, number = self.shape(number).numel(), self.consumers[number][0].consumer
            if node_kind(self.nodes[number]) == "AddBackward":
                return number
            if not is_view(self.nodes[number]) or self.shape(number).numel() != size:
                break
        return None

    def saved_bytes(self, apart: Iterable[Tensor]) -> int:
        """Bytes of the tensors that the nodes have saved for backward, without those that share memory with `apart`.

        Tensors without readable memory, of a subclass or changed in place since, are not counted.
        """
        counted = dict.fromkeys(storage for tensor in apart for storage, _ in _storage(tensor))
        sizes: dict[int, int] = {}
        for node in self.nodes:
            for saved in _saved(node):
                sizes |= {storage: size for storage, size in _storage(saved) if storage not in counted}
        return sum(sizes.values())

    def reorders(self) -> bool:
        """Whether a node selects or reorders entries by values."""
        return any(_REORDERS.match(node_kind(node)) for node in self.nodes)

    def signature(self) -> tuple:
        """Key of the graph: a plan made on one batch applies to batches with the same signature."""
        return tuple((node.name(), len(self.consumers[i])) for i, node in enumerate(self.nodes))


@cache
def _saved_names(kind: type) -> tuple[str, ...]:
    """Attributes that hold what a node of this class has saved."""
    return tuple(name for name in dir(kind) if name.startswith("_saved_") or name == "saved_tensors")


def _saved(node: Any) -> Iterator[Tensor]:
    """Tensors that a node has saved."""
    kind: Any = type(node)
    for name in _saved_names(kind):
        try:
            found = getattr(node, name)
        except RuntimeError:  # changed in place since: backward never reads it
            continue
        several = found if isinstance(found, (tuple, list)) else [found]
        yield from (saved for saved in several if isinstance(saved, Tensor))


def _storage(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """Address and bytes of a tensor's memory, if it has one piece that can be read."""
    with contextlib.suppress(RuntimeError, NotImplementedError):
        storage = tensor.untyped_storage()
        yield storage.data_ptr(), storage.nbytes()


def pull_back(node: Any, output: int, parameter: Tensor, rows: Tensor) -> Tensor:
    """Backpropagate rows (M, *shape of the node's output) to the parameter, (M, p) in its flat order.

    The nodes in between are functions of the parameter alone: a view, an exponential, a weight normalization.
    """
    edge = GradientEdge(node, output)
    pulled = []
    for row in rows:
        # one row at a time: not every backward node has a batching rule, and these tensors are parameter-sized
        (gradient,) = torch.autograd.grad([edge], [parameter], [row], retain_graph=True)
        pulled.append(gradient.flatten().to(row.dtype))
    return torch.stack(pulled)


def view_positions(node: Any, output: int, parameter: Tensor) -> Tensor | None:
    """Position of each entry of a view in the parameter's flat order; None if the node is no view of the parameter.

    The numbers of the entries are backpropagated through the view as gradients, digit by digit.
    """
    shape = output_shape(node, output)
    numbers = torch.arange(1, shape.numel() + 1, device=parameter.device)
    digits = []
    while bool((numbers > 0).any()):
        digits.append((numbers % _DIGIT).to(parameter.dtype).reshape(shape))
        numbers = numbers // _DIGIT
    back = pull_back(node, output, parameter, torch.stack(digits)).round().long()
    values = torch.zeros_like(back[0])
    for digit in reversed(back):
        values = values * _DIGIT + digit
    covered = values.nonzero().squeeze(1)
    if len(covered) != shape.numel() or not torch.equal(
        values[covered].sort().values, torch.arange(1, shape.numel() + 1, device=values.device)
    ):
        return None
    positions = torch.empty(shape.numel(), dtype=torch.long, device=parameter.device)
    positions[values[covered] - 1] = covered
    return positions
