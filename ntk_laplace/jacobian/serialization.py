"""Serialization of a Jacobian as plain containers of tensors, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ntk_laplace.jacobian.blocks import Dense, Lookup, Outer, Wide
from ntk_laplace.jacobian.jacobian import Jacobian

__all__ = ["jacobian_from_record", "jacobian_record"]

_KINDS = {kind.__name__: kind for kind in (Dense, Lookup, Outer, Wide)}


def jacobian_record(rows: Jacobian) -> dict[str, Any]:
    """Return a Jacobian as plain containers: each block as its fields and the name of its type."""
    blocks = [{"kind": type(block).__name__} | vars(block) for block in rows.blocks]
    for block in blocks:
        if "spans" in block:
            block["spans"] = [list(span) for span in block["spans"]]
    # the keys of version 1 of the format
    return {"blocks": blocks, "num_seeds": rows.num_cotangents, "num_examples": rows.num_examples, "f": rows.f}


def jacobian_from_record(saved: Mapping[str, Any]) -> Jacobian:
    """Restore a Jacobian from `jacobian_record`."""
    blocks = []
    for block in saved["blocks"]:
        fields = {name: value for name, value in block.items() if name != "kind"}
        if "spans" in fields:
            fields["spans"] = tuple(tuple(span) for span in fields["spans"])
        blocks.append(_KINDS[block["kind"]](**fields))
    return Jacobian(tuple(blocks), saved["num_seeds"], saved["num_examples"], saved["f"])
