"""Resuming of a structured fit: its checkpoints while it runs, and what a resumed fit must share with it.

Sums add up, so the files of several processes are one state: the sum of what they hold, and the examples that none of
them has done. Each file names its run. A run that resumed another begins with a file of its first process that contains
all of the earlier run; the latest run counts, and of a resumed one only if it has that file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ntk_laplace.errors import DataError, UnsupportedError
from ntk_laplace.model.data import RowBuffer, fill_buffer
from ntk_laplace.runtime.serialization import Autosave, FileFormat
from ntk_laplace.structures.accumulation import FIRST, SECOND, SECOND_SUMS, Accumulation
from ntk_laplace.structures.agreement import joined_summaries, without_own
from ntk_laplace.structures.block_spec import BlockSpec
from ntk_laplace.structures.data_passes import ModelSignature
from ntk_laplace.structures.model import LinearizedModel, Settings

_FORMAT = FileFormat("ntk_laplace fit", 2, "a checkpoint of an interrupted fit",
                     "Pass the path that was given as Settings(checkpoint=...).", key="accumulation")


def save_regularly(accumulated: Accumulation, settings: Settings, resumed: bool = False) -> None:
    """Save an accumulation once a minute while it advances, and at an interruption.

    The file contains the training targets seen so far: a resumed fit needs them. The first of several processes writes
    to `Settings.checkpoint`, the others to files beside it, with their number after the name.

    Raises
    ------
    DataError
        If the path is not writable.
    """
    path, reducer = settings.checkpoint, settings.reducer
    run = {"run": reducer.gather(time.time_ns())[0], "resumed": resumed, "process": reducer.rank}
    if path is not None and reducer.rank:
        path = _path_of(path, reducer.rank)
    accumulated.checkpoint = partial(_save, Autosave(path), run)
    if resumed and reducer.rank == 0:
        accumulated.checkpoint(accumulated, now=True)
    reducer.gather(None)  # no other file of this run before the first one


def _path_of(path: str | os.PathLike[str], rank: int) -> Path:
    path = Path(path)
    return path.with_name(f"{path.name}.{rank}")


def _save(save: Autosave, run: dict[str, Any], gathered: Accumulation, now: bool = False) -> None:
    save(lambda: _FORMAT.header | run | {"accumulation": gathered.record(include_data=True)}, now)


def resumed(settings: Settings, spec: BlockSpec, device: torch.device) -> Accumulation | None:
    """The accumulation to resume, from files or the `state` of a `FitInterrupted`; sums are in the first process.

    Raises
    ------
    DataError, UnsupportedError
        If it is not one, or belongs to another structure.
    """
    resume, reducer = settings.resume, settings.reducer
    if resume is None:
        return None
    if isinstance(resume, (str, os.PathLike)):
        shares = _read(resume, device)
        reducer.require_equal("files to resume from", [share.examples_done for share in shares])
    elif isinstance(resume, Accumulation):
        records = reducer.gather(resume.record(include_data=True)) if reducer.world_size > 1 else []
        shares = [Accumulation.from_record(record) for record in records] or [resume]
    else:
        raise DataError("the state of an interrupted fit, or the file it was saved to", f"a {type(resume).__name__}",
                        "Pass Settings(resume=error.state) of a FitInterrupted, or its checkpoint's path.")
    for share in shares:
        if (share.spec.name, share.spec.options()) != (spec.name, spec.options()):
            raise UnsupportedError(f"to resume {share.spec}, which was interrupted", str(spec),
                                   "Pass the same structure with the same options.")
    found = _joined(shares)
    return found.copy() if reducer.rank == 0 else _without_examples(found)


def _read(path: str | os.PathLike[str], device: torch.device) -> list[Accumulation]:
    """The states in the files of the latest run that is complete."""
    place = Path(path)
    others = sorted(one for one in place.parent.glob(f"{place.name}.*") if one.suffix[1:].isdigit())
    paths = [place, *others] if place.exists() or not others else others
    records = [_FORMAT.read(one, device) for one in paths]
    runs: dict[int, list[dict[str, Any]]] = {}
    for record in records:
        runs.setdefault(record.get("run", 0), []).append(record)
    for number in sorted(runs, reverse=True):
        run = runs[number]
        if not run[0].get("resumed", False) or any(record["process"] == 0 for record in run):
            return [Accumulation.from_record(record["accumulation"]) for record in run]
    raise DataError(f"the first process's file of an interrupted fit at {place}", "those of others alone",
                    "Copy the files of all processes to one folder.")


def _joined(shares: Sequence[Accumulation]) -> Accumulation:
    """One state from those of several processes.

    After the first pass each process holds its totals: those that had not got so far add nothing.
    """
    stage = SECOND if any(share.stage == SECOND for share in shares) else FIRST
    shares = [share for share in shares if share.stage == stage]
    first = shares[0]
    if len(shares) == 1:
        return first
    done = torch.cat([share.done.rows.long() for share in shares])
    if len(done.unique()) < len(done):
        raise DataError("each example in the file of one process", "examples in several",
                        "Remove files of other fits from the folder.")
    summaries = joined_summaries([share.summaries for share in shares], None if stage == FIRST else SECOND_SUMS)
    found = replace(first, done=fill_buffer([done]), summaries=summaries,
                    parameter_blocks=[summary.block for summary in summaries] or first.parameter_blocks)
    if stage == FIRST:
        weighted = any(len(share.weights) for share in shares)
        for share in shares:
            if weighted and len(share.f) and not len(share.weights):
                share.weights.append(share.f.rows.new_ones(len(share.f), dtype=torch.float64))
        for name in ("f", "targets", "weights"):
            rows = [getattr(share, name).rows for share in shares]
            setattr(found, name, fill_buffer([own for own in rows if len(own)]))
    return found


def _without_examples(found: Accumulation) -> Accumulation:
    """What every process knows of a state whose sums are in the first one."""
    names = None if found.stage == FIRST else SECOND_SUMS
    rest = replace(found, done=RowBuffer(), summaries=without_own(found.summaries, names))
    if found.stage == FIRST:
        rest.forget()
    return rest


def require_same_model(accumulated: Accumulation, model: LinearizedModel) -> None:
    """Refuse to resume a fit under a different model (UnsupportedError)."""
    for what, now in ModelSignature(model).items():
        if accumulated.signature.get(what, now) != now:  # older states do not know all of them
            raise UnsupportedError(f"to resume with the {what} of the interrupted fit", "another",
                                   "Pass the same arguments, or start anew without resume=.")
