"""Columns of a table by the options of the command: targets, sources, inputs, and what is none of these."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas

from ntk_laplace.errors import DataError
from ntk_laplace.tools.cli.values import require_distinct, require_present
from ntk_laplace.tools.cli.words import first_few


def require_column(option: str, name: str, columns: Sequence[str], path: Path, remedy: str) -> None:
    """Refuse an option that names none of the columns (DataError, which shows one that is written almost so)."""
    if name not in columns:
        alike = next((other for other in columns if other.strip().casefold() == name.strip().casefold()), None)
        close = "" if alike is None else f"There is {alike!r}. "
        raise DataError(f"{option} COLUMN, one of {first_few(columns)} in {path}", f"{option} {name}",
                        f"{close}{remedy}")


def require_targets(frame: pandas.DataFrame, path: Path, targets: Sequence[str] | None) -> list[str]:
    """The names of the columns of the targets; refuse none, one twice, and one that the table has not (DataError)."""
    found, remedy = list(frame.columns), "Name the column of the targets; all others are inputs."
    if not targets:
        raise DataError(f"--target COLUMN, one of {first_few(found)} in {path}", "none", remedy)
    for name in targets:
        require_column("--target", name, found, path, remedy)
    if len(set(targets)) < len(targets):
        raise DataError("different columns of targets", f"--target {' --target '.join(targets)}", "Name each once.")
    return list(targets)


def training_columns(
    frame: pandas.DataFrame, path: Path, targets: Sequence[str] | None, group: str | None,
    dropped: Sequence[str] | None,
) -> tuple[pandas.DataFrame, list[str], list[Any] | None]:
    """Inputs and targets of a training table, the names of the targets, and the source of each row if it has some.

    DataError if an option names no column of the table, or a row has no source.
    """
    targets, sources = require_targets(frame, path, targets), None
    others = [column for column in frame.columns if column not in targets]
    if group is not None:
        require_column("--group", group, others, path, "Name the column of the sources, which is no target.")
        require_present(frame[group], path)
        require_distinct(frame[group].astype(str), path)
        frame, sources = frame.drop(columns=group), frame[group].tolist()
    return without_dropped(frame, path, dropped, targets), targets, sources


def without_dropped(
    frame: pandas.DataFrame, path: Path, dropped: Sequence[str] | None, targets: Sequence[str]
) -> pandas.DataFrame:
    """The table without columns that are no inputs; refuse one that it has not, and a target (DataError)."""
    others = [column for column in frame.columns if column not in targets]
    for name in dropped or ():
        require_column("--drop", name, others, path, "Name a column that is no target.")
    return frame.drop(columns=list(dropped or ()))


def input_columns(
    frame: pandas.DataFrame, path: Path, targets: Sequence[str], known: Sequence[str] | None, drop: bool = False
) -> list[str]:
    """Names of the columns of inputs, which are all except the targets; the table may be without those.

    If the input columns of the training data are known, they must be those of the table (DataError), and the order is
    theirs. `drop` says whether ``--drop`` leaves out columns of this table alone.
    """
    found = [name for name in frame.columns if name not in targets]
    if not found:
        raise DataError("columns of inputs beside the target", f"{first_few(targets)} alone in {path}",
                        "Add a column of inputs.")
    if known is None:
        return found
    missing, extra = [name for name in known if name not in found], [name for name in found if name not in known]
    if missing or extra:
        got = ([f"no {first_few(missing)}"] if missing else []) + ([f"{first_few(extra)} too"] if extra else [])
        remedy = "Give both tables the same columns; their order does not matter."
        if drop and not missing:
            remedy = f"Leave out what is no input: {' '.join(f'--drop {shlex.quote(name)}' for name in extra)}."
        raise DataError(f"the {len(known)} input columns of the training data in {path}", " and ".join(got), remedy)
    return list(known)


def require_no_dropped(path: Path, dropped: Sequence[str] | None) -> None:
    """Refuse columns to leave out of a file without columns (DataError)."""
    if dropped:
        raise DataError("a table, for --drop COLUMN", f"{path}", "Leave --drop out.")


def require_sources(labels: Iterable[Any], options: argparse.Namespace) -> None:
    """Refuse one source, and as many sources as rows (DataError); `source_effects` does so after the work."""
    names, where = [str(label) for label in labels], f"{options.source!r} of {options.data}"
    if len(set(names)) == 1:
        raise DataError(f"at least two sources in {where}", f"{names[0]!r} in each of {len(names):,} "
                        "training rows", "Name another column, or leave --group out.")
    if len(set(names)) == len(names):
        raise DataError(f"sources of several rows in {where}", f"another one in each of {len(names):,} "
                        f"training rows, such as {names[0]!r}", "Name another column, or leave --group out: the page "
                        "has the effects of single rows.")
