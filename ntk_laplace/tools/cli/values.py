"""Values in the columns of tables: numbers, names and classes, and what is none of them."""

from __future__ import annotations

import datetime
import re
import shlex
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from numpy.typing import NDArray
from pandas.api.types import is_bool_dtype, is_datetime64_any_dtype, is_numeric_dtype, is_timedelta64_dtype

from ntk_laplace.errors import DataError
from ntk_laplace.tools.cli.tables import missing_word
from ntk_laplace.tools.cli.words import first_few, row_words

_WHOLE = re.compile(r"^([+-]?\d+)\.0+$")  # a whole number with a fraction of zeros, as beside gaps


def numbers(
    frame: pandas.DataFrame, path: Path, names: Sequence[str], missing: bool = False, other: str | None = None
) -> NDArray[np.float64]:
    """Values of numeric columns, (rows, columns); NaN where a value is missing, if it may be.

    Refuse one that is infinite or no number (DataError). `other` is what can be done about the column beside a
    correction; by default, that it is left out.
    """
    for name in names:
        column = frame[name]
        if not missing:
            require_present(column, path)
        if not is_numeric_dtype(column.dtype):
            categories = "make columns of 0 and 1 of categories, " if other is None else ""
            other = other or f"leave the column out, --drop {shlex.quote(name)}"
            require_64_bits(column, path, other)
            row = int(np.argmax(pandas.to_numeric(column, errors="coerce").isna() & column.notna()))
            raise DataError(f"numbers in column {name!r} of {path}", f"{str(column.iloc[row])!r}{row_words(row)}",
                            f"Replace it by a number, {categories}or {other}.")
    found = np.column_stack([frame[name].to_numpy(np.float64, na_value=np.nan) for name in names])
    for row, index in np.argwhere(np.isinf(found))[:1]:
        got = f"{found[row, index]:g}{row_words(row)}"
        raise DataError(f"finite numbers in column {names[index]!r} of {path}", got,
                        "Correct the value, or remove the row.")
    return found


def scored_numbers(frame: pandas.DataFrame, names: Sequence[Any]) -> tuple[NDArray[np.float64], list[str]]:
    """Targets that predictions are compared with, (rows, columns), and the values that are no finite numbers.

    A prediction needs no target, so nothing is refused: targets that are missing, and those values, are NaN.
    """
    found, others = [], list[str]()
    for name in names:
        column = frame[name]
        values = pandas.to_numeric(column.astype(object), errors="coerce").to_numpy(np.float64, na_value=np.nan)
        finite = np.isfinite(values)
        others += column[column.notna().to_numpy() & ~finite].astype(str).tolist()
        found.append(np.where(finite, values, np.nan))
    return np.column_stack(found), others


def scored_classes(values: Sequence[Any], known: Sequence[Any]) -> tuple[NDArray[np.intp], list[str]]:
    """Numbers of the classes that predictions are compared with, -1 for none, and the values that are no known class.

    Values are known by themselves or by their text: in a file without the class "K", the class "2" is the number 2.
    """
    number = _numbers_of(known)
    found = np.array([_class_of(value, number) for value in values], np.intp)
    return found, [str(value) for value, index in zip(values, found, strict=True)
                   if index < 0 and not (pandas.api.types.is_scalar(value) and pandas.isna(value))]


def _numbers_of(known: Sequence[Any]) -> dict[Any, int]:
    """Numbers of classes by their values and by their texts; truth values by each text that pandas takes for one."""
    number = {key: index for index, label in enumerate(known) for key in (str(label), label)}
    names = [str(label) for label in known]
    if set(names) <= {"True", "False"}:
        number |= {text: number[name] for name in names for text in (name.lower(), name.upper())}
    return number


def _class_of(value: Any, number: dict[Any, int]) -> int:
    """The number of the class that a value is, -1 for none."""
    if not isinstance(value, Hashable):
        return -1
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # beside gaps, whole numbers are floating ones
    keys = value, str(value), _WHOLE.sub(r"\1", str(value))
    return next((number[key] for key in keys if key in number), -1)


def require_64_bits(column: pandas.Series, path: Path, other: str) -> None:
    """Refuse whole numbers without a type of their size, which pandas keeps as text or as objects (DataError).

    `other` is what can be done about them beside a correction.
    """
    texts = column.dropna().astype(str)
    if is_numeric_dtype(column.dtype) or not texts.str.fullmatch(r"\s*[+-]?\d+\s*").all():
        return
    wide = [number for number, text in zip(np.flatnonzero(column.notna()), texts, strict=True)
            if not -(2**63) <= int(text) < 2**63]
    if wide:
        raise DataError(f"numbers of at most 64 bits in column {column.name!r} of {path}",
                        f"{str(column.iloc[wide[0]])!r}{row_words(int(wide[0]))}",
                        f"Write them with a decimal point, or {other}.")


def target_classes(
    column: pandas.Series, path: Path, known: Sequence[str] | None
) -> tuple[NDArray[np.int64], list[str]]:
    """Class numbers of a column of names, and the names: those of the training data if they are known, else sorted.

    Refuse a value that is missing, and one that is not among the known names (DataError).
    """
    require_present(column, path)
    require_names(column, path)
    texts = column.astype(str)
    if known is None:
        require_distinct(texts, path)
    names = sorted(texts.unique()) if known is None else list(known)
    number = _numbers_of(names)
    found = np.array([_class_of(text, number) for text in texts], np.int64)
    if (found < 0).any():
        row = int(np.argmax(found < 0))
        raise DataError(f"classes of the training data ({first_few(names)}) in column {column.name!r} of {path}",
                        f"{texts.iloc[row]!r}{row_words(row)}", "Correct the name, or remove the row.")
    return found, names


def require_names(
    column: pandas.Series, path: Path, remedy: str = "Make it text or a number, or name another target."
) -> None:
    """Refuse values that are no names: lists, bytes and dates (DataError); they may be missing."""
    if is_datetime64_any_dtype(column.dtype) or is_timedelta64_dtype(column.dtype):
        row, kind = 0, "a date or a time"
    else:
        kinds = (str, bool, int, float, np.generic)
        wrong = [number for number, (value, there) in enumerate(zip(column, column.notna(), strict=True))
                 if there and not isinstance(value, kinds)]
        if not wrong:
            return
        row, kind = wrong[0], f"a value of type {type(column.iloc[wrong[0]]).__name__}"
    raise DataError(f"names or numbers in column {column.name!r} of {path}", f"{kind}{row_words(row)}", remedy)


_MARKS = r"(?:[\s$€£¥₹%+-]|USD|EUR|GBP|CHF|JPY|CNY|INR|CAD|AUD|SEK|NOK|DKK|PLN)*"  # around an amount
_AMOUNTS = {  # patterns of amounts, with what makes them numbers
    rf"{_MARKS}(?:\d+|\d{{1,3}}(?:[,'\s]\d{{3}})+)(?:\.\d+)?{_MARKS}": ".str.replace(r'[^-+.0-9]', '', regex=True)",
    rf"{_MARKS}(?:\d+|\d{{1,3}}(?:[.'\s]\d{{3}})+)(?:,\d+)?{_MARKS}":
    ".str.replace(r'[^-+,0-9]', '', regex=True).str.replace(',', '.')",
}
_DATES = r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}(?:[T ].*)?", r"(\d{1,2})[-/.](\d{1,2})[-/.]\d{2,4}(?: .*)?"


def as_numbers(column: pandas.Series) -> str:
    """The line of pandas that makes numbers of a column of dates or amounts, as a remedy; empty for other values."""
    frame, texts = f"frame[{str(column.name)!r}]", column.dropna()
    dates = is_datetime64_any_dtype(column.dtype)
    if not dates:
        if texts.empty or not all(isinstance(text, str) for text in texts):
            return ""
        texts = texts.drop_duplicates().astype(str)
        if pandas.to_numeric(texts, errors="coerce").notna().all():
            return ""
    year_first, year_last = (not dates and texts.str.fullmatch(pattern).all() for pattern in _DATES)
    if dates or year_first or year_last:
        first = ""
        if year_last:
            day, month = texts.str.extract(_DATES[1]).astype(int).max().tolist()
            first = ", dayfirst=True" if day > month else ""
        return (f"Make days of the dates, in pandas by {frame} = (pandas.to_datetime({frame}{first}) - "
                "pandas.Timestamp('2000-01-01')).dt.days.")
    lines = [line for pattern, line in _AMOUNTS.items() if texts.str.fullmatch(pattern).all()]
    return f"Make numbers of the amounts, in pandas by {frame} = {frame}{lines[0]}.astype(float)." if lines else ""


FIRST_DAY = "2000-01-01"
_ISO_8601 = r"\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?)?"


def has_dates(column: pandas.Series) -> bool:
    """Whether all values that are not missing are dates or times: of Python or pandas, or text as ISO 8601 has it."""
    if is_datetime64_any_dtype(column.dtype):
        return True
    values = column.dropna()
    if is_numeric_dtype(column.dtype) or values.empty:
        return False
    return all(isinstance(value, datetime.date) for value in values) or all(
        isinstance(value, str) and _is_date(value) for value in values)


def days(column: pandas.Series) -> NDArray[np.float64]:
    """Days from `FIRST_DAY` to dates and times, in UTC if they name no zone, (rows,); NaN for what is no date."""
    values, options = column, {}
    if not is_datetime64_any_dtype(column.dtype):
        own = column.astype(object)
        values = own.where(own.map(_is_date), None)
        options = {"format": "ISO8601"}
    times = pandas.to_datetime(values, errors="coerce", utc=True, **options).dt.tz_localize(None)
    # by NumPy: in pandas before 3 differences of nanoseconds overflow after 292 years without an error
    found: NDArray[np.float64] = (times.to_numpy("datetime64[us]") - np.datetime64(FIRST_DAY)) / np.timedelta64(1, "D")
    return found


def _is_date(value: Any) -> bool:
    """Not "now" or "today", which pandas takes too, nor "2020"."""
    return isinstance(value, datetime.date) or (isinstance(value, str) and re.fullmatch(_ISO_8601, value) is not None)


def dates(days: pandas.Series) -> pandas.Series:
    """The dates after so many days, as text; with the time of day in UTC if some is not midnight. None for NaN."""
    seconds = (86_400 * days.to_numpy(np.float64)).round()
    times, there = np.datetime64(FIRST_DAY) + seconds.astype("timedelta64[s]"), ~np.isnan(seconds)
    texts = np.datetime_as_string(times, unit="s" if (seconds[there] % 86_400).any() else "D")
    return pandas.Series(texts, days.index, dtype=object).str.replace("T", " ").where(there, None)


def require_no_numbers(column: pandas.Series, path: Path, other: str) -> None:
    """Refuse dates and amounts as text, which would be names without an order (DataError).

    The error shows the line that makes numbers of them; `other` is what can be done beside that.
    """
    remedy = "" if is_datetime64_any_dtype(column.dtype) else as_numbers(column)
    if remedy:
        row = int(np.argmax(column.notna()))
        raise DataError(f"names or numbers in column {column.name!r} of {path}",
                        f"{column.iloc[row]!r}{row_words(row)}, a date or an amount as text", f"{remedy} Or {other}.")


def require_distinct(texts: pandas.Series, path: Path) -> None:
    """Refuse names that differ in blanks around them alone, and names of blanks (DataError); some may be missing."""
    texts = texts.reset_index(drop=True).dropna()
    bare = texts.map(str.strip)
    odd = (texts != bare) & (bare.isin(texts) | (bare == "") | (texts.groupby(bare).transform("nunique") > 1))
    if not odd.any():
        return
    row, name = int(odd.idxmax()), str(texts.name)
    own = texts[row]
    twins = [text for text in texts.unique() if text != own and text.strip() == own.strip()]
    got = f"{own!r}{row_words(row)}" + (f", beside {twins[0]!r}" if own.strip() else "")
    raise DataError(f"names that differ in more than blanks in column {name!r} of {path}", got,
                    f"Remove the blanks, in pandas by frame[{name!r}] = frame[{name!r}].str.strip()"
                    + ("." if own.strip() else ", and name what is left empty, or fill it in."))


def named_classes(column: pandas.Series) -> bool:
    """Whether values are names: text, categories, or truth values."""
    return is_bool_dtype(column.dtype) or not is_numeric_dtype(column.dtype)


def require_present(column: pandas.Series, path: Path, remedy: str = "") -> None:
    """Refuse missing values (DataError); `remedy` is added to the usual ones."""
    gaps = column.isna()
    if gaps.any():
        row = int(np.argmax(gaps))
        word = missing_word(path, str(column.name), row)
        got = f"{word!r}, which is read as missing," if word else "none"
        name = " If it is a name, write another one." if word else ""
        raise DataError(f"a value in each row of column {column.name!r} of {path}", f"{got}{row_words(row)}",
                        f"Fill it in, or remove the row.{name}{remedy}")
