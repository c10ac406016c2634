"""Serialization of a structured fit's state: plain containers of tensors that load with ``weights_only=True``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.curvature import Eigenbasis, FactorEigen, ParameterBlock, Summary
from ntk_laplace.data import fill_buffer
from ntk_laplace.errors import DataError, UnsupportedError
from ntk_laplace.files import opened
from ntk_laplace.structures.accumulation import Accumulation
from ntk_laplace.structures.block_spec import BlockSpec
from ntk_laplace.structures.structure import of_kind, structure_named

__all__ = ["from_record", "record", "resumed"]


def record(gathered: Accumulation, include_data: bool) -> dict[str, Any]:
    """Serialize an accumulation; outputs, targets and weights, which are training data, only with `include_data`."""
    return {
        "form": {"name": gathered.spec.name, "options": gathered.spec.options()},  # the key of version 1
        "model": dict(gathered.signature),
        "stage": gathered.stage,
        "batches_done": gathered.batches_done,
        "examples_done": gathered.examples_done,
        "parts": [asdict(part) | {"entries": list(part.entries)} for part in gathered.parameter_blocks],
        "sums": [dict(summary.sums) for summary in gathered.summaries],
        "frames": [  # the key of version 1
            {"basis_left": f.basis.left, "basis_right": f.basis.right, "left": f.left, "right": f.right}
            for f in gathered.eigenbases
        ],
        "f": [gathered.f.rows] if include_data and len(gathered.f) else [],
        "targets": [gathered.targets.rows] if include_data and len(gathered.targets) else [],
        "weights": [gathered.weights.rows] if include_data and len(gathered.weights) else [],
    }


def from_record(saved: Mapping[str, Any]) -> Accumulation:
    """Restore a serialized accumulation."""
    parts = [ParameterBlock(**(dict(part) | {"entries": tuple(part["entries"])})) for part in saved["parts"]]
    sums = saved["sums"]
    spec = structure_named(saved["form"]["name"])(**saved["form"]["options"])
    eigenbases = [_eigenbasis(own) for own in saved["frames"]]
    return Accumulation(
        of_kind(BlockSpec, spec),  # type: ignore[type-abstract]  # the class is only compared
        dict(saved["model"]), saved["stage"], saved["batches_done"], saved["examples_done"],
        parts, [Summary(part, dict(own)) for part, own in zip(parts, sums, strict=True)] if sums else [], eigenbases,
        fill_buffer(saved["f"]), fill_buffer(saved["targets"]), fill_buffer(saved.get("weights", [])),
    )  # fmt: skip


def _eigenbasis(saved: Mapping[str, Tensor | None]) -> Eigenbasis:
    if saved["right"] is None:
        return Eigenbasis()
    return Eigenbasis(FactorEigen(None, saved["left"], saved["basis_left"]), FactorEigen(None, saved["right"],
                                                                                         saved["basis_right"]))


def resumed(resume: Any, spec: BlockSpec, device: torch.device) -> Accumulation | None:
    """The accumulation to resume, from a file or the `state` of a `FitInterrupted`.

    Raises
    ------
    DataError, UnsupportedError
        If it is not one, or belongs to another structure.
    """
    if resume is None:
        return None
    if isinstance(resume, (str, os.PathLike)):
        resume = _loaded(Path(resume), device)
    if not isinstance(resume, Accumulation):
        raise DataError("the state of an interrupted fit, or the file it was saved to", f"a {type(resume).__name__}",
                        "Pass Settings(resume=error.state) of a FitInterrupted, or its checkpoint's path.")
    if (resume.spec.name, resume.spec.options()) != (spec.name, spec.options()):
        raise UnsupportedError(f"to resume {resume.spec}, which was interrupted", str(spec),
                               "Pass the same structure with the same options.")
    return resume.copy()


def _loaded(path: Path, device: torch.device) -> Accumulation:
    what, remedy = "a checkpoint of an interrupted fit", "Pass the path that was given as Settings(checkpoint=...)."
    saved = opened(path, what, remedy, device)
    if not isinstance(saved, dict) or "accumulation" not in saved:
        raise DataError(f"{what} at {path}", "another file", remedy)
    return from_record(saved["accumulation"])

