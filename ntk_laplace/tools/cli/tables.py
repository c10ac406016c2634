"""Tables of the command: CSV, Parquet and Arrow files."""

from __future__ import annotations

import codecs
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from pandas.api.types import infer_dtype

from ntk_laplace.errors import DataError, first_line
from ntk_laplace.tools.cli.files import require_file

TABLES = ".csv, .parquet, .feather or .arrow"
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")  # of CSV; pandas knows them by these names
# types of what pandas keeps as objects: the last two where values are missing
_OF_OBJECTS = {"decimal": "float64", "boolean": "boolean", "empty": "float64"}
# the default of later versions, which do not take the option
_EXACT: dict[str, Any] = {"float_precision": "round_trip"} if int(pandas.__version__.partition(".")[0]) < 4 else {}


def is_table(path: Path) -> bool:
    """Whether the name ends with that of a table; a CSV file may be compressed."""
    return _ending(path) in (".csv", *_COLUMNAR)


def _ending(path: Path) -> str:
    endings = [ending.lower() for ending in path.suffixes]
    return endings[-2] if endings[-2:-1] == [".csv"] and endings[-1] in COMPRESSED else "".join(endings[-1:])


def read_table(path: Path, what: str, text: Sequence[str] = ()) -> pandas.DataFrame:
    """Read a table with at least one row, whose columns have different names (DataError if it is none).

    `what` says in messages what the file contains. Columns in `text` of a CSV file are read as they are written.
    """
    require_file(path, f"a table of {what}")
    frame = _csv(path, text) if _ending(path) == ".csv" else _columnar(path)
    if frame.empty:
        raise DataError("a table with at least one row below the names of its columns", f"{path} without rows",
                        "Check the file.")
    kinds = {name: infer_dtype(column, skipna=True) for name, column in frame.items() if column.dtype == object}
    return frame.astype({name: _OF_OBJECTS[kind] for name, kind in kinds.items() if kind in _OF_OBJECTS})


def _csv(path: Path, text: Sequence[str]) -> pandas.DataFrame:
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
            lines = _lines_of_one_column(path) if len(names) == 1 else 0
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
        raise DataError("a name for each column", f"none for column {int(unnamed.argmax()) + 1} of {path}",
                        "Name it, or take it out." if names[0] else
                        f"Name it. If it is pandas's own row numbers, take it out in Python: {line}.")
    _require_different(names, path)
    if lines > len(frame):
        raise DataError(f"a value in each line of {path}, which has one column", "an empty line between others",
                        "Write NA where a value is missing, or remove the line.")
    return frame


def _lines_of_one_column(path: Path) -> int:
    """Lines from the first value to the last one of a table of one column; elsewhere an empty line is no row."""
    first: dict[str, Any] = {"names": ["x"], "usecols": [0], "dtype": str, "keep_default_na": False}
    texts = pandas.read_csv(path, skip_blank_lines=False, **first)["x"]
    there = np.flatnonzero(texts.fillna("").str.strip() != "")
    return int(np.ptp(there)) if len(there) else 0


def _require_different(names: pandas.Series | pandas.Index, path: Path) -> None:
    twice = names[names.duplicated()].tolist()
    if twice:
        raise DataError("columns with different names", f"{twice[0]!r} twice in {path}", "Rename one.")


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


def _columnar(path: Path) -> pandas.DataFrame:
    """A file that pyarrow reads for pandas."""
    what, read = _COLUMNAR[_ending(path)]
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
    _require_different(frame.columns, path)
    return frame.reset_index(drop=True)


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


_COLUMNAR: dict[str, tuple[str, Callable[[Path], pandas.DataFrame]]] = {
    ".parquet": ("a Parquet", lambda path: pandas.read_parquet(path)),
    ".feather": ("a Feather", lambda path: pandas.read_feather(path)),
    ".arrow": ("an Arrow", _arrow),
}


def missing_word(path: Path, name: str, row: int) -> str:
    """What a CSV file has where a value is missing, such as NA, None or null; empty for other tables."""
    if _ending(path) != ".csv":
        return ""
    words = pandas.read_csv(path, index_col=False, dtype=str, keep_default_na=False, usecols=[name], nrows=row + 1)
    return str(words[name].iloc[row]).strip()
