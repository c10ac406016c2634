"""What a network's outputs read: the nodes of their graph, the leaves it leads to, and the nodes that read each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


def autograd_nodes(out: Tensor) -> Iterator[Any]:
    """The nodes of the outputs' graph, their own first, in an order that depends only on the graph's structure."""
    stack, seen = [out.grad_fn], set()
    while stack:
        node: Any = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            stack.extend(before for before, _ in node.next_functions)


def readers(out: Tensor) -> dict[int, list[Any]]:
    """The autograd nodes that read each leaf of the outputs' graph, by the leaf's `id`."""
    found: dict[int, list[Any]] = {}
    for node in autograd_nodes(out):
        for before, _ in node.next_functions:
            leaf = getattr(before, "variable", None)
            if leaf is not None:
                found.setdefault(id(leaf), []).append(node)
    return found


def padding_rows(module: nn.Module, names: Iterable[str], out: Tensor) -> dict[str, Tensor]:
    """Which rows of the named embeddings are those of padding, (rows, 1) by name: torch defines them as constants.

    A weight that something else reads too, a tied head or an embedding with other padding, has a gradient there.
    """
    chosen, read = set(names), readers(out)
    found: dict[str, Tensor] = {}
    for prefix, part in module.named_modules():
        name = f"{prefix}.weight" if prefix else "weight"
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.padding_idx is not None and name in chosen:
            nodes = read.get(id(part.weight), [])
            if nodes and all(getattr(node, "_saved_padding_idx", None) == part.padding_idx for node in nodes):
                rows = torch.arange(len(part.weight), device=part.weight.device)
                found[name] = (rows == part.padding_idx).unsqueeze(1)
    return found
