"""What a network's outputs read: which leaves their graph leads to, and the nodes that read each of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def readers(out: Tensor) -> dict[int, list[Any]]:
    """The autograd nodes that read each leaf of the outputs' graph, by the leaf's `id`."""
    found: dict[int, list[Any]] = {}
    stack, seen = [out.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for before, _ in node.next_functions:
            leaf = getattr(before, "variable", None)
            if leaf is not None:
                found.setdefault(id(leaf), []).append(node)
            stack.append(before)
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
