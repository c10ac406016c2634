"""Tables of the command, CSV, Parquet and Arrow: some columns are targets, all others are inputs."""

from __future__ import annotations

import codecs
import shlex
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from numpy.typing import NDArray
from pandas.api.types import (
    infer_dtype,
    is_bool_dtype,
    is_datetime64_any_dtype,
    is_numeric_dtype,
    is_timedelta64_dtype,
)

from ntk_laplace.errors import DataError, first_line
from ntk_laplace.tools.cli.python_files import first_few, require_file

TABLES = ".csv, .parquet, .feather or .arrow"
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")  # of CSV; pandas knows them by these names
# types of what pandas keeps as objects: the last two where values are missing
_OF_OBJECTS = {"decimal": "float64", "boolean": "boolean", "empty": "float64"}
# the default of later versions, which do not take the option
_EXACT: dict[str, Any] = {"float_precision": "round_trip"} if int(pandas.__version__.partition(".")[0]) < 4 else {}


def is_table(path: Path) -> bool:
    """Whether the name ends with that of a table; a CSV file may be compressed."""
    return _ending(path) in _READERS


def _ending(path: Path) -> str:
    endings = [ending.lower() for ending in path.suffixes]
    return endings[-2] if endings[-2:-1] == [".csv"] and endings[-1] in COMPRESSED else "".join(endings[-1:])


def read_table(path: Path, what: str, text: Sequence[str] = ()) -> pandas.DataFrame:
    """Read a table with at least one row, whose columns have different names.

    Parameters
    ----------
    path : Path
    what : str
        What the file contains, for messages.
    text : sequence of str
        Columns of a CSV file that are read as they are written, without a type.

    Raises
    ------
    DataError
        If the file is missing, cannot be read, or is no such table.
    """
    require_file(path, f"a table of {what}")
    frame = _csv(path, text) if _ending(path) == ".csv" else _READERS[_ending(path)](path)
    if frame.empty:
        raise DataError("a table with at least one row below the names of its columns", f"{path} without rows",
                        "Check the file.")
    kinds = {name: infer_dtype(column, skipna=True) for name, column in frame.items() if column.dtype == object}
    return frame.astype({name: _OF_OBJECTS[kind] for name, kind in kinds.items() if kind in _OF_OBJECTS})


def _csv(path: Path, text: Sequence[str] = ()) -> pandas.DataFrame:
    expected = "a table with commas between the columns, and their names in the first line"
    options: dict[str, Any] = {"index_col": False, "low_memory": False, "dtype": dict.fromkeys(text, str), **_EXACT}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pandas.errors.ParserWarning)  # columns that it would drop
            warnings.simplefilter("ignore", DeprecationWarning)
            names = _names(path)
            mark = _separator(names)
            if mark != ",":
                raise DataError(expected, f"{path} with {mark!r} between them", f"{_conversion(path, 'commas', mark)}.")
            frame = pandas.read_csv(path, **options)
    except DataError:
        raise
    except pandas.errors.EmptyDataError as cause:
        raise DataError(expected, f"{path}, which is empty", "Check the file.") from cause
    except UnicodeDecodeError as cause:
        raise _other_encoding(path, cause) from cause
    except (pandas.errors.ParserWarning, ValueError, OSError, EOFError) as cause:
        raise DataError(expected, f"{path} ({first_line(cause)})", "Check the file.") from cause
    unnamed = names == ""
    if unnamed.any():
        copy = str(path.with_name(f"{path.name.partition('.')[0]}_named.csv"))
        line = f"pandas.read_csv({str(path)!r}, index_col=0).to_csv({copy!r}, index=False)"
        raise DataError("a name for each column", f"none for column {int(np.argmax(unnamed)) + 1} of {path}",
                        "Name it, or take it out." if names[0] else
                        f"Name it. If it is pandas's own row numbers, take it out in Python: {line}.")
    if names.duplicated().any():
        raise DataError("columns with different names", f"{names[names.duplicated()].iloc[0]!r} twice in {path}",
                        "Rename one.")
    return frame


def _names(path: Path, **options: Any) -> pandas.Series:
    """The first line of a CSV file."""
    return pandas.read_csv(path, header=None, nrows=1, dtype=str, keep_default_na=False, **options).iloc[0]


def _separator(names: pandas.Series) -> str:
    """What separates the columns: a comma, or another character that is in one name for all."""
    return next((mark for mark in ";\t|" if mark in str(names[0])), ",") if len(names) == 1 else ","


def _conversion(path: Path, name: str, mark: str, **options: Any) -> str:
    """The line of pandas that converts a CSV file to one that is read here, as a remedy without its full stop."""
    if mark != ",":
        rows = pandas.read_csv(path, sep=mark, header=None, nrows=2, dtype=str, **options)
        decimal = rows.iloc[1:].stack().str.fullmatch(r"-?\d+,\d+").any()
        options |= {"sep": mark} | ({"decimal": ","} if decimal else {})
    told = "".join(f", {option}={value!r}" for option, value in options.items())
    copy = str(path.with_name(f"{path.name.partition('.')[0]}_{name}.csv"))
    return f"Convert it in Python: pandas.read_csv({str(path)!r}{told}).to_csv({copy!r}, index=False)"


def _other_encoding(path: Path, cause: UnicodeDecodeError) -> DataError:
    """The error for a text that is not in UTF-8, with the line that converts it."""
    marked = cause.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    encoding = "utf-16" if marked else "cp1252"
    try:
        line = _conversion(path, "utf8", _separator(_names(path, encoding=encoding)), encoding=encoding)
    except ValueError:  # another encoding still
        line = _conversion(path, "utf8", ",", encoding=encoding)
    other = "" if marked else ", if it is a text of Windows in western languages; else name its encoding"
    return DataError("a table in UTF-8", f"{path} ({first_line(cause)})", f"{line}{other}.")


def _columnar(read: Callable[[Path], pandas.DataFrame], what: str) -> Callable[[Path], pandas.DataFrame]:
    """A reader of files that pyarrow reads for pandas."""

    def reader(path: Path) -> pandas.DataFrame:
        try:
            frame = read(path)
        except ImportError as cause:
            raise DataError("a table that pandas can read here", f"{path}, for which pandas finds no engine",
                            "Install one, pip install pyarrow, or save the table as .csv.") from cause
        except (ValueError, OSError) as cause:  # among them all errors of pyarrow for damaged files
            raise DataError(f"{what} table", f"{path} ({first_line(cause)})", "Check the file.") from cause
        # the file has a named index as a column, which is not dropped; an index without a name counts the rows
        named = [name for name in frame.index.names if name is not None]
        frame = frame.reset_index(named, allow_duplicates=True) if named else frame
        frame.columns = frame.columns.map(str)
        twice = frame.columns[frame.columns.duplicated()]
        if len(twice):
            raise DataError("columns with different names", f"{twice[0]!r} twice in {path}", "Rename one.")
        return frame.reset_index(drop=True)

    return reader


def _arrow(path: Path) -> pandas.DataFrame:
    """A file in the Arrow format, which is that of Feather, or a stream, as the package datasets writes them."""
    from pyarrow import ArrowInvalid, ipc

    try:
        return pandas.read_feather(path)
    except ArrowInvalid as cause:
        try:
            with open(path, "rb") as stream:
                return ipc.open_stream(stream).read_pandas()
        except ValueError:
            raise cause from None


_READERS: dict[str, Callable[[Path], pandas.DataFrame]] = {
    ".csv": _csv,
    ".parquet": _columnar(lambda path: pandas.read_parquet(path), "a Parquet"),
    ".feather": _columnar(lambda path: pandas.read_feather(path), "a Feather"),
    ".arrow": _columnar(_arrow, "an Arrow"),
}


def no_column(option: str, name: str, columns: Sequence[str], path: Path, remedy: str) -> DataError:
    """The error for an option that names none of the columns; it shows one that is written almost so."""
    alike = next((other for other in columns if other.strip().casefold() == name.strip().casefold()), None)
    close = "" if alike is None else f"There is {alike!r}. "
    return DataError(f"{option} COLUMN, one of {first_few(columns)} in {path}", f"{option} {name}", f"{close}{remedy}")


def require_columns(frame: pandas.DataFrame, path: Path, targets: Sequence[str] | None) -> list[str]:
    """Return the names of the columns of the targets unchanged.

    Raises
    ------
    DataError
        If the table has no such column, a name is given twice, or none was given.
    """
    missing = [name for name in targets or () if name not in frame.columns]
    if not targets or missing:
        found, remedy = list(frame.columns), "Name the column of the targets; all others are inputs."
        if missing:
            raise no_column("--target", missing[0], found, path, remedy)
        raise DataError(f"--target COLUMN, one of {first_few(found)} in {path}", "none", remedy)
    if len(set(targets)) < len(targets):
        raise DataError("different columns of targets", f"--target {' --target '.join(targets)}", "Name each once.")
    return list(targets)


def input_columns(
    frame: pandas.DataFrame, path: Path, targets: Sequence[str] | None, known: Sequence[str] | None, drop: bool = False
) -> list[str]:
    """Names of the columns of inputs, which are all except the targets, in the order of `known` if that is given.

    Parameters
    ----------
    frame : DataFrame
    path : Path
        For messages.
    targets : sequence of str, optional
        The columns of the targets; the table may be without them.
    known : sequence of str, optional
        Input columns of the training data.
    drop : bool
        Whether ``--drop`` leaves out other columns of this table alone.

    Raises
    ------
    DataError
        If there are none, or other ones than in the training data.
    """
    found = [name for name in frame.columns if name not in (targets or ())]
    if not found:
        raise DataError("columns of inputs beside the target", f"{first_few(targets or [])} alone in {path}",
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


def numbers(
    frame: pandas.DataFrame, path: Path, names: Sequence[str], missing: bool = False, other: str | None = None
) -> NDArray[np.float64]:
    """Values of numeric columns, (rows, columns).

    Parameters
    ----------
    frame : DataFrame
    path : Path
        For messages.
    names : sequence of str
        Of the columns.
    missing : bool
        Whether a value may be missing, which is then NaN.
    other : str, optional
        What can be done about a column beside a correction; by default, that it is left out.

    Raises
    ------
    DataError
        Names the column, and the row of the first value that is missing, infinite or no number.
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
    number = {key: index for index, label in enumerate(known) for key in (str(label), label)}
    # beside gaps, whole numbers are floating ones
    whole = [int(value) if isinstance(value, float) and value.is_integer() else value for value in values]
    found = np.array([number.get(value, number.get(str(value), -1)) if isinstance(value, Hashable) else -1
                      for value in whole], np.intp)
    return found, [str(value) for value, index in zip(values, found, strict=True)
                   if index < 0 and not (pandas.api.types.is_scalar(value) and pandas.isna(value))]


def require_64_bits(column: pandas.Series, path: Path, other: str) -> None:
    """Refuse whole numbers without a type of their size, which pandas keeps as text or as objects.

    `other` is what can be done about them beside a correction.

    Raises
    ------
    DataError
        Names the column, and the first row with such a number.
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
    """Class numbers of a column of names, and the names in sorted order.

    Parameters
    ----------
    column : Series
    path : Path
        For messages.
    known : sequence of str, optional
        Names in the training data.

    Raises
    ------
    DataError
        If a value is missing, or is not among the known names.
    """
    require_present(column, path)
    require_names(column, path)
    texts = column.astype(str)
    if known is None:
        require_distinct(texts, path)
    names = sorted(texts.unique()) if known is None else list(known)
    number = {name: index for index, name in enumerate(names)}
    other = ~texts.isin(names)
    if other.any():
        row = int(np.argmax(other))
        raise DataError(f"classes of the training data ({first_few(names)}) in column {column.name!r} of {path}",
                        f"{texts.iloc[row]!r}{row_words(row)}", "Correct the name, or remove the row.")
    return texts.map(number).to_numpy(np.int64, copy=True), names


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


def require_no_numbers(column: pandas.Series, path: Path, other: str) -> None:
    """Refuse dates and amounts as text, which would be names without an order; `other` is what can be done beside that.

    Raises
    ------
    DataError
        Names the column, and shows the line that makes numbers of it.
    """
    remedy = "" if is_datetime64_any_dtype(column.dtype) else as_numbers(column)
    if remedy:
        row = int(np.argmax(column.notna()))
        raise DataError(f"names or numbers in column {column.name!r} of {path}",
                        f"{column.iloc[row]!r}{row_words(row)}, a date or an amount as text", f"{remedy} Or {other}.")


def require_distinct(texts: pandas.Series, path: Path) -> None:
    """Refuse names that differ from others in blanks around them alone, and names of blanks alone; some may be missing.

    Raises
    ------
    DataError
        Names the column, the row and both names.
    """
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


def without_dropped(
    frame: pandas.DataFrame, path: Path, dropped: Sequence[str] | None, targets: Sequence[str] | None
) -> pandas.DataFrame:
    """The table without columns that are no inputs.

    Raises
    ------
    DataError
        If the table has no such column, or it is one of the targets.
    """
    others = [column for column in frame.columns if column not in (targets or ())]
    for name in dropped or ():
        if name not in others:
            raise no_column("--drop", name, others, path, "Name a column that is no target.")
    return frame.drop(columns=list(dropped or ()))


def require_no_dropped(path: Path, dropped: Sequence[str] | None) -> None:
    """Refuse columns to leave out of a file without columns (DataError)."""
    if dropped:
        raise DataError("a table, for --drop COLUMN", f"{path}", "Leave --drop out.")


def without_sources(
    frame: pandas.DataFrame, path: Path, name: str | None, targets: Sequence[str] | None
) -> tuple[pandas.DataFrame, list[Any] | None]:
    """The table without the column of the sources, and the source of each row; None if no column is named.

    Raises
    ------
    DataError
        If the table has no such column, it is one of the targets, or a value is missing.
    """
    if name is None:
        return frame, None
    others = [column for column in frame.columns if column not in (targets or ())]
    if name not in others:
        raise no_column("--group", name, others, path, "Name the column of the sources, which is no target.")
    require_present(frame[name], path)
    require_distinct(frame[name].astype(str), path)
    return frame.drop(columns=name), frame[name].tolist()


def require_sources(labels: Iterable[Any], path: Path, name: str) -> None:
    """Refuse one source, and as many sources as rows, before the work; `source_effects` does so after it.

    Raises
    ------
    DataError
        Names the column or array.
    """
    names = [str(label) for label in labels]
    if len(set(names)) == 1:
        raise DataError(f"at least two sources in {name!r} of {path}", f"{names[0]!r} in each of {len(names):,} "
                        "training rows", "Name another column, or leave --group out.")
    if len(set(names)) == len(names):
        raise DataError(f"sources of several rows in {name!r} of {path}", f"another one in each of {len(names):,} "
                        f"training rows, such as {names[0]!r}", "Name another column, or leave --group out: the page "
                        "has the effects of single rows.")


def named_classes(column: pandas.Series) -> bool:
    """Whether values are names: text, categories, or truth values."""
    return is_bool_dtype(column.dtype) or not is_numeric_dtype(column.dtype)


def require_present(column: pandas.Series, path: Path, remedy: str = "") -> None:
    """Refuse missing values (DataError); `remedy` is added to the usual ones."""
    gaps = column.isna()
    if gaps.any():
        row = int(np.argmax(gaps))
        word = _word(path, str(column.name), row)
        got = f"{word!r}, which is read as missing," if word else "none"
        name = " If it is a name, write another one." if word else ""
        raise DataError(f"a value in each row of column {column.name!r} of {path}", f"{got}{row_words(row)}",
                        f"Fill it in, or remove the row.{name}{remedy}")


def _word(path: Path, name: str, row: int) -> str:
    """What a CSV file has where a value is missing, such as NA, None or null; empty for other tables."""
    if _ending(path) != ".csv":
        return ""
    words = pandas.read_csv(path, index_col=False, dtype=str, keep_default_na=False, usecols=[name], nrows=row + 1)
    return str(words[name].iloc[row]).strip()


def row_words(row: int) -> str:
    """Where a value is, at the end of a phrase."""
    return f" in row {row}, counted from 0 below the names"
