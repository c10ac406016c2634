"""Results with one row for each of several things: looked up by label, as a data frame, as JSON."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

if TYPE_CHECKING:
    import pandas
    from _typeshed import DataclassInstance

Row = TypeVar("Row", bound="DataclassInstance")


@dataclass(frozen=True)
class Rows(Generic[Row]):
    """Rows of one dataclass, whose first field is the label."""

    rows: tuple[Row, ...]
    _row: ClassVar[Any]
    _what: ClassVar[str] = "structure"

    def __getitem__(self, label: str) -> Row:
        """The row with this label."""
        rows = {getattr(row, fields(self._row)[0].name): row for row in self.rows}
        if label not in rows:
            raise KeyError(f"no {self._what} {label!r} among {', '.join(rows)}")
        return rows[label]

    def to_dataframe(self) -> pandas.DataFrame:
        """One line and one column per row and attribute of a row."""
        import pandas

        names = [entry.name for entry in fields(self._row)]
        return pandas.DataFrame.from_records([asdict(row) for row in self.rows], columns=names)

    def to_json(self) -> str:
        """All numbers in full precision, as a JSON object keyed by attribute name."""
        return json.dumps(asdict(self), indent=2)

    def _cells(self, name: str, form: Callable[[Any], str]) -> list[str]:
        """The cells of an attribute's column; a dash for None."""
        return ["-" if (value := getattr(row, name)) is None else form(value) for row in self.rows]


def plus_minus(error: float) -> tuple[str, int]:
    """A standard error with two digits behind its sign, empty if there is none, and how many decimals they take."""
    if not error > 0.0:
        return "", 2
    decimals = max(0, 1 - math.floor(math.log10(error)))
    return f" ± {error:,.{decimals}f}", decimals


def notes_of(rows: Iterable[Any]) -> list[str]:
    """The notes of structures, in lines of at most 80 letters."""
    return [textwrap.fill(f"{row.structure}: {row.note}", 80, subsequent_indent="  ") for row in rows if row.note]


def aligned(columns: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table from its columns, headings first; the first column is left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in columns]
    rows = list(zip(*columns, strict=True))
    rows.insert(1, tuple("-" * width for width in widths))
    first, *others = widths
    return ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]) for row in rows]
