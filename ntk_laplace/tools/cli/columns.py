"""Columns of inputs as numbers: categories become columns of 0 and 1, and dates days; missing values may be filled."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas
from numpy.typing import NDArray
from pandas.api.types import is_numeric_dtype

from ntk_laplace.errors import DataError
from ntk_laplace.tools.cli.table_columns import require_column
from ntk_laplace.tools.cli.values import (
    FIRST_DAY,
    as_numbers,
    dates,
    days,
    has_dates,
    numbers,
    require_64_bits,
    require_distinct,
    require_names,
    require_no_numbers,
    require_present,
)
from ntk_laplace.tools.cli.words import first_few, row_words

_MOST = 100  # categories of one column
_TOLD = 10  # columns that are categories or filled
_SHOWN = 3  # unknown categories of one column
_OTHERS = "--skip-unknown predicts the others"


@dataclass(frozen=True)
class InputColumns:
    """The columns of inputs of the training data, and how each becomes numbers."""

    names: list[str]  # columns of the table
    categories: dict[str, list[str]]  # sorted values of the columns of categories: each becomes a column of 0 and 1
    # what replaces missing numbers, for the columns that may have gaps; 0 in each column of a category. Each gets one
    # more column, which is 1 where a value is missing
    filled: dict[str, float]
    dates: tuple[str, ...] = ()  # columns of dates and times: each becomes days since `FIRST_DAY`

    @classmethod
    def of(
        cls, frame: pandas.DataFrame, path: Path, names: Sequence[str], categories: Sequence[str] = (),
        fill: bool = False,
    ) -> InputColumns:
        """Find the categories and dates of training data, and the means that fill missing numbers, if some may be.

        Columns in `categories` are categories whatever their values are; all columns of names are. Refuse a column that
        is neither numbers, names nor dates, has too many categories, or no value (DataError).
        """
        for name in categories:
            require_column("--category", name, names, path, "Name a column of inputs.")
        for name in () if fill else names:
            require_present(frame[name], path, " Or let --fill-missing do so.")
        dated = tuple(name for name in names if name not in categories and has_dates(frame[name]))
        found = {name: _categories(frame[name], path) for name in names
                 if name in categories or (name not in dated and _has_names(frame[name], path))}
        for name in dated:
            _require_dates(frame[name], path, f"take all as names, --category {shlex.quote(name)}")
        gaps = [name for name in names if fill and frame[name].isna().any()]
        for name in gaps:
            if frame[name].isna().all():
                raise DataError(f"a value in some row of column {name!r} of {path}", "none",
                                f"Leave it out, --drop {shlex.quote(name)}.")
        counted = [name for name in gaps if name not in found]
        means = {name: float(np.nanmean(days(frame[name]) if name in dated else numbers(frame, path, [name], True)))
                 for name in counted}
        own = cls(list(names), found, dict.fromkeys(gaps, 0.0) | means, dated)
        twice = pandas.Index(own.features)
        if twice.has_duplicates:
            raise DataError("different names of the columns of inputs and of categories",
                            f"{twice[twice.duplicated()][0]!r} twice for {path}", "Rename a column.")
        return own

    @property
    def features(self) -> list[str]:
        """Names of the columns of numbers."""
        return [feature for own in self.features_of.values() for feature in own]

    @property
    def features_of(self) -> dict[str, list[str]]:
        """Names of the columns of numbers that each column of the table becomes."""
        found = {}
        for name in self.names:
            own = [f"{name}={value}" for value in self.categories[name]] if name in self.categories else [name]
            found[name] = own + ([f"{name} missing"] if name in self.filled else [])
        return found

    def rows(self, frame: pandas.DataFrame, path: Path, skip: bool = False) -> pandas.DataFrame:
        """Inputs of a table as numbers, (n, features).

        Refuse values that are no numbers, and those that are `unknown` (DataError); with `skip` these are NaN.
        """
        unknown = self.unknown(frame)
        if not skip:
            self._require_known(frame, path, unknown)
        known = {name: days(frame[name])[:, None] if name in self.dates else
                 numbers(frame, path, [name], True, "remove the row")  # later tables need each column
                 for name in self.names if name not in self.categories}
        parts = []
        for name in self.names:
            gaps = frame[name].isna().to_numpy(bool)[:, None]
            part = self._indicators(frame[name]) if name in self.categories else known[name]
            part = np.where(gaps, self.filled.get(name, np.nan), part)
            parts.append(np.where(unknown[name][:, None], np.nan, part) if name in unknown else part)
            parts += [gaps] if name in self.filled else []
        return pandas.DataFrame(np.hstack(parts).astype(np.float64), columns=self.features)

    def require_number(self, option: str, name: str, path: Path) -> None:
        """Refuse an option that names no column of numbers without gaps (DataError)."""
        require_column(option, name, self.names, path, "Name a column of inputs.")
        kinds = {"names": self.categories, "dates": self.dates, "missing values": self.filled}
        for what, columns in kinds.items():
            if name in columns:
                raise DataError(f"numbers alone in column {name!r} of {path}, for {option}", what,
                                "Name another column, or correct the values.")

    def unknown(self, frame: pandas.DataFrame) -> dict[str, NDArray[np.bool_]]:
        """Rows with another category than the training data, or without a value where these have all; by column.

        Columns without such rows are left out.
        """
        found = {}
        for name in self.names:
            gaps, known = frame[name].isna(), self.categories.get(name)
            other = gaps & (name not in self.filled)
            if known is not None:
                other |= ~gaps & ~_texts(frame[name]).isin(known)
            if name in self.dates:
                other |= ~gaps & np.isnan(days(frame[name]))
            found[name] = other.to_numpy(bool)
        return {name: other for name, other in found.items() if other.any()}

    def _require_known(self, frame: pandas.DataFrame, path: Path, unknown: dict[str, NDArray[np.bool_]]) -> None:
        for name in self.names:
            if name not in self.filled:
                require_present(frame[name], path, f" No row of the training data lacks it; {_OTHERS}.")
        for name in self.dates:
            _require_dates(frame[name], path, _OTHERS)
        for name, rows in unknown.items():
            own, texts = self.categories[name], _texts(frame[name])[rows]
            bare = {text.strip(): text for text in own}
            twin = next((bare[text.strip()] for text in texts if text.strip() in bare), None)
            remedy = "" if twin is None else f"One differs from {twin!r} in blanks alone. "
            raise DataError(f"categories of the training data ({first_few(own)}) in column {name!r} of {path}",
                            f"{_where(texts)}, counted from 0 below the names",
                            f"{remedy}Correct the names, or remove the rows; {_OTHERS}.")

    def unknown_words(self, frame: pandas.DataFrame) -> str:
        """The `unknown` inputs of a table, where they are and what they are; empty if there are none."""
        return "; ".join(f"{_where(_texts(frame[name])[other].where(frame[name].notna(), None))} of column {name!r}"
                         for name, other in self.unknown(frame).items())

    def shown(self, rows: pandas.DataFrame) -> pandas.DataFrame:
        """Inputs as numbers (n, features), as the columns of the table, with the names of categories and with gaps."""
        found = {}
        for name in self.names:
            known = self.categories.get(name)
            if name in self.dates:
                own = rows[name]  # without the mean that fills gaps, which has a time of day
                found[name] = dates(own.where(rows[f"{name} missing"] < 0.5) if name in self.filled else own)
            elif known is None:
                found[name] = rows[name].astype(object)
            else:
                number = rows[[f"{name}={value}" for value in known]].to_numpy().argmax(1)
                found[name] = pandas.Series([known[i] for i in number], rows.index, dtype=object)
            if name in self.filled:
                found[name] = found[name].where(rows[f"{name} missing"] < 0.5, None)
        return pandas.DataFrame(found)

    def _indicators(self, column: pandas.Series) -> NDArray[np.bool_]:
        """Whether each row has each category, (n, categories)."""
        texts = _texts(column)
        return np.column_stack([texts == value for value in self.categories[str(column.name)]])

    def __str__(self) -> str:
        """What the columns are taken as, beside numbers; empty if all are numbers without gaps."""
        words = [f"{name} as {len(values)} {'category' if len(values) == 1 else 'categories'}"
                 for name, values in self.categories.items()]
        words += [f"{name} as days since {FIRST_DAY}" for name in self.dates]
        words += [f"{name} filled where it is missing" for name in self.filled]
        return f"Inputs: {first_few(words, quote=False, most=_TOLD)}" if words else ""


def _has_names(column: pandas.Series, path: Path) -> bool:
    """Whether the values are names: text, or pandas's categories."""
    if is_numeric_dtype(column.dtype):
        return False
    name = str(column.name)
    require_names(column, path, f"{as_numbers(column) or 'Make it a number or text.'} Or leave the column out, --drop "
                  f"{shlex.quote(name)}.")
    if isinstance(column.dtype, pandas.CategoricalDtype):
        return True
    require_64_bits(column, path, f"leave the column out, --drop {shlex.quote(name)}")
    require_no_numbers(column, path, f"take all as names, --category {shlex.quote(name)}, or leave the column out, "
                       f"--drop {shlex.quote(name)}")
    named = pandas.to_numeric(column, errors="coerce").isna() & column.notna()
    if named[column.notna()].all():
        return True
    row = int(np.argmax(named if named.any() else column.notna()))
    got = f"{str(column.iloc[row])!r}{row_words(row)}, {'beside numbers' if named.any() else 'as text'}"
    raise DataError(f"numbers alone, or names alone, in column {name!r} of {path}", got,
                    "Correct the values, leave cells empty where one is missing, for --fill-missing, or take all as "
                    f"names, --category {shlex.quote(name)}.")


def _require_dates(column: pandas.Series, path: Path, other: str) -> None:
    """Refuse values that are no dates; they may be missing (DataError). `other` can be done beside a correction."""
    wrong = np.isnan(days(column)) & column.notna().to_numpy(bool)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise DataError(f"dates such as 2026-01-31 in column {column.name!r} of {path}",
                        f"{str(column.iloc[row])!r}{row_words(row)}", f"Correct the value, remove the row, or {other}.")


def _texts(column: pandas.Series) -> pandas.Series:
    """Values as names; a whole number has no fraction, also where gaps make the column one of floating numbers."""
    return column.astype(str).str.replace(r"^([+-]?\d+)\.0+$", r"\1", regex=True)


def _where(texts: pandas.Series) -> str:
    """Values, and the rows in which they are."""
    words = []
    for value, rows in texts.reset_index().groupby(texts.name, sort=False, dropna=False)["index"]:
        what = "none" if pandas.isna(value) else repr(value)
        words.append(f"{what} in row{'s' * (len(rows) > 1)} {first_few(rows.tolist(), quote=False)}")
    others = len(words) - _SHOWN
    more = [f"{others} other name{'s' * (others > 1)}"] if others > 0 else []
    return " and ".join([", ".join(words[:_SHOWN]), *more])


def _categories(column: pandas.Series, path: Path) -> list[str]:
    """The sorted names in a column."""
    require_names(column, path, f"Leave it out, --drop {shlex.quote(str(column.name))}.")
    texts = _texts(column)
    require_distinct(texts.where(column.notna()), path)
    found = sorted(texts[column.notna()].unique())
    if len(found) > min(_MOST, max(2, len(column) // 2)):
        raise DataError(f"at most {_MOST} categories in column {column.name!r} of {path}, of two rows each in the mean",
                        f"{len(found):,} in {len(column):,} rows, such as {found[0]!r}",
                        f"Join names, or leave the column out, --drop {shlex.quote(str(column.name))}.")
    return found
