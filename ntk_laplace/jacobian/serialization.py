"""Serialization of a Jacobian as plain containers of tensors, for checkpoints. The keys are those of version 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ntk_laplace.jacobian.blocks import Block, Dense, Lookup, Outer
from ntk_laplace.jacobian.jacobian import Jacobian

__all__ = ["jacobian_from_record", "jacobian_record"]


def jacobian_record(rows: Jacobian) -> dict[str, Any]:
    """Return a Jacobian as plain containers: each block as its fields and the name of its type."""
    blocks = [_record(block) for block in rows.blocks]
    return {"blocks": blocks, "num_seeds": rows.num_cotangents, "num_examples": rows.num_examples, "f": rows.f}


def jacobian_from_record(saved: Mapping[str, Any]) -> Jacobian:
    """Restore a Jacobian from `jacobian_record`."""
    blocks = tuple(_block(**record) for record in saved["blocks"])
    return Jacobian(blocks, saved["num_seeds"], saved["num_examples"], saved["f"])


def _record(block: Block) -> dict[str, Any]:
    if isinstance(block, Dense):
        return {"kind": "Wide", "spans": [list(span) for span in block.spans], "rows": block.rows}
    return {"kind": type(block).__name__} | {field.name: getattr(block, field.name) for field in fields(block)}


def _block(kind: str, **values: Any) -> Block:
    if kind == "Wide":
        return Dense(tuple((name, start, stop) for name, start, stop in values["spans"]), values["rows"])
    if kind == "Dense":  # one parameter, with the cotangents first
        return Dense.of(values["weight"], values["rows"])
    return {"Outer": Outer, "Lookup": Lookup}[kind](**values)
