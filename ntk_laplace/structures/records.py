"""Serialization of a structured fit's state: plain containers of tensors that load with ``weights_only=True``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.curvature import STRUCTURE_SPECS, Eigenbasis, FactorEigen, ParameterBlock, StructureSpec, Summary
from ntk_laplace.data import fill_buffer
from ntk_laplace.errors import DataError, UnsupportedError
from ntk_laplace.structures.accumulation import Accumulation

__all__ = [
    "from_record",
    "opened",
    "record",
    "require_place",
    "resumed",
    "spec_from",
    "spec_record",
    "spec_words",
    "write",
]  # fmt: skip


def record(gathered: Accumulation, include_data: bool) -> dict[str, Any]:
    """Serialize an accumulation; outputs, targets and weights, which are training data, only with `include_data`."""
    return {
        "form": spec_record(gathered.spec),
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
    eigenbases = [_eigenbasis(own) for own in saved["frames"]]
    return Accumulation(
        spec_from(saved["form"]), dict(saved["model"]), saved["stage"], saved["batches_done"], saved["examples_done"],
        parts, [Summary(part, dict(own)) for part, own in zip(parts, sums, strict=True)] if sums else [], eigenbases,
        fill_buffer(saved["f"]), fill_buffer(saved["targets"]), fill_buffer(saved.get("weights", [])),
    )  # fmt: skip


def _eigenbasis(saved: Mapping[str, Tensor | None]) -> Eigenbasis:
    if saved["right"] is None:
        return Eigenbasis()
    return Eigenbasis(FactorEigen(None, saved["left"], saved["basis_left"]), FactorEigen(None, saved["right"],
                                                                                         saved["basis_right"]))


def spec_record(spec: StructureSpec) -> dict[str, Any]:
    """Name and options of a spec; a reused basis is stored with the eigenbases."""
    options = {name: value for name, value in vars(spec).items() if name != "basis"}
    return {"name": spec.name, "options": options}


def spec_from(saved: Mapping[str, Any]) -> StructureSpec:
    """Restore a serialized spec."""
    return STRUCTURE_SPECS[saved["name"]](**saved["options"])


def write(content: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Save atomically: a reader never sees a partial file."""
    path = Path(path)
    partial = path.with_name(path.name + ".block")
    torch.save(dict(content), partial)
    partial.replace(path)


def opened(path: str | os.PathLike[str], what: str, remedy: str, device: torch.device) -> Any:
    """Content of a file that `write` made; no code in it is executed.

    Raises
    ------
    DataError
        If it is not such a file.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise DataError(f"a path of {what}", repr(path), remedy)
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError as error:
        raise DataError(f"{what} at {path}", "no such file", remedy) from error
    except Exception as error:  # unpickling foreign bytes may raise anything
        raise DataError(f"{what} at {path}", f"what cannot be read as one ({type(error).__name__})", remedy) from error


def require_place(path: Any) -> None:
    """Refuse a path that is not writable, before the computation to be saved.

    Raises
    ------
    DataError
    """
    remedy = "Make its folder first, and pass the path of a file in it."
    if not isinstance(path, (str, os.PathLike)):
        raise DataError("a path as checkpoint", repr(path), remedy)
    path = Path(path)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise DataError("a checkpoint in a folder that is there and can be written to", f"{path}", remedy)


def resumed(resume: Any, spec: StructureSpec, device: torch.device) -> Accumulation | None:
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
    if spec_record(resume.spec) != spec_record(spec):
        raise UnsupportedError(f"to resume {spec_words(resume.spec)}, which was interrupted", spec_words(spec),
                               "Pass the same structure with the same options.")
    return resume.copy()


def spec_words(spec: StructureSpec) -> str:
    """A spec as Python code."""
    options = ", ".join(f"{k}={v!r}" for k, v in spec_record(spec)["options"].items())
    return f"{type(spec).__name__}({options})"


def _loaded(path: Path, device: torch.device) -> Accumulation:
    what, remedy = "a checkpoint of an interrupted fit", "Pass the path that was given as Settings(checkpoint=...)."
    saved = opened(path, what, remedy, device)
    if not isinstance(saved, dict) or "accumulation" not in saved:
        raise DataError(f"{what} at {path}", "another file", remedy)
    return from_record(saved["accumulation"])

