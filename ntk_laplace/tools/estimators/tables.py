"""Tables of inputs and targets: columns of numbers, their standardization, and equal rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.preprocessing import StandardScaler

from ntk_laplace.errors import DataError

Array = NDArray[np.floating[Any]]

_SMALLEST = 1e-140


@dataclass(frozen=True)
class Standardized:
    """Mean and scale of each column of a table."""

    mean: Array
    scale: Array

    @classmethod
    def of(cls, table: Array, weight: Array | None, wanted: bool, names: Sequence[str]) -> Standardized:
        """Those of the rows, weighted; a constant column is 0, or 1 at most if it varies by rounding. Else 0 and 1.

        `names` says in messages what each column is.
        """
        columns = table.shape[1]
        if not wanted:
            return cls(np.zeros(columns), np.ones(columns))
        require_magnitudes(table, names)
        found = StandardScaler().fit(table.astype(np.float64), sample_weight=weight)
        low, high = table.min(0).astype(np.float64), table.max(0).astype(np.float64)
        mean = np.where(low == high, low, found.mean_)  # a sum of large numbers is rounded
        rounded = (found.scale_ == 1.0) & (np.sqrt(found.var_) != 1.0)  # what StandardScaler takes for constant
        return cls(mean, np.where(rounded, np.maximum(1.0, np.abs([low - mean, high - mean]).max(0)), found.scale_))

    @property
    def columns(self) -> NDArray[np.intp]:
        """Column of the table that each mean and scale belongs to."""
        return np.arange(len(self.mean))

    def __call__(self, table: Array) -> Array:
        """(table - mean) / scale."""
        return (table - self.mean) / self.scale

    def undone(self, table: Array) -> Array:
        """The table in its own units."""
        return table * self.scale + self.mean

    def expected(self, mean: Array, variance: Array) -> Array:
        """Means of the table in its own units, where the standardized one has this mean and variance."""
        return self.undone(mean)

    def log_jacobian(self, table: Array, weight: Array) -> float:
        """Log densities of the rows of a table less those of the standardized ones, added up with these weights."""
        return -float(weight.sum() * np.log(self.scale).sum())


class StandardizedLogs(Standardized):
    """Mean and scale of the logarithm of each column of positive numbers."""

    @classmethod
    def of(cls, table: Array, weight: Array | None, wanted: bool, names: Sequence[str]) -> Standardized:
        """Those of the logarithms; DataError if a number is not positive."""
        for name, least in zip(names, table.min(0), strict=True):
            if not least > 0:
                raise DataError(f"positive numbers in {name}, for the log-normal likelihood", f"{least:g}",
                                "Take another likelihood, or leave it out.")
        return super().of(np.log(table), weight, wanted, names)

    def __call__(self, table: Array) -> Array:
        """(log(table) - mean) / scale; NaN for numbers that are not positive."""
        return super().__call__(np.log(np.where(table > 0, table, np.nan)))

    def undone(self, table: Array) -> Array:
        """The table in its own units."""
        found: Array = np.exp(super().undone(table))
        return found

    def expected(self, mean: Array, variance: Array) -> Array:
        """Of log-normal numbers, ``exp(m + v/2)``."""
        return self.undone(mean + 0.5 * self.scale * variance)

    def log_jacobian(self, table: Array, weight: Array) -> float:
        """Log densities of the rows of a table less those of the standardized ones, added up with these weights."""
        return super().log_jacobian(table, weight) - float((weight @ np.log(table)).sum())


@dataclass(frozen=True)
class WithExposure(Standardized):
    """Mean and scale of each column of a table but one, an exposure, whose logarithm comes last instead."""

    exposure: int  # its column
    name: str

    @property
    def columns(self) -> NDArray[np.intp]:
        """Column of the table that each mean and scale belongs to."""
        return np.delete(np.arange(len(self.mean) + 1), self.exposure)

    def __call__(self, table: Array) -> Array:
        """(table - mean) / scale, and the logarithm of the exposure; DataError if one is not positive."""
        exposure = table[:, self.exposure]
        require_exposures(exposure, self.name)
        return np.column_stack([super().__call__(table[:, self.columns]), np.log(exposure)])

    def undone(self, table: Array) -> Array:
        """The table in its own units, and order."""
        found: Array = np.insert(super().undone(table[:, :-1]), self.exposure, np.exp(table[:, -1]), axis=1)
        return found


def require_exposures(exposure: Array, name: str) -> None:
    """Refuse exposures that are not positive (DataError)."""
    if not (exposure > 0).all():
        row = int(np.argmin(exposure > 0))
        raise DataError(f"positive exposures in {name}", f"{exposure[row]:g} in row {row}",
                        "Leave out rows that were not observed.")


def merged_rows(x: Array, y: Array, weight: Array) -> tuple[NDArray[np.intp], Array, NDArray[np.intp]]:
    """Equal examples as one, whose weight is the sum of theirs; those of weight 0 are left out.

    The first row of each in their order, its weight, and which of them each row is, -1 for one that is left out.
    """
    _, labels = np.unique(y, return_inverse=True)
    _, first, member = np.unique(np.column_stack([x, labels.reshape(len(x), -1)]), axis=0, return_index=True,
                                 return_inverse=True)
    total: Array = np.bincount(member.ravel(), weights=weight).astype(np.float64)
    order = [group for group in np.argsort(first) if total[group] > 0]
    place = np.full(len(total), -1)
    place[order] = np.arange(len(order))
    return first[order], total[order], np.where(weight > 0, place[member.ravel()], -1)


def require_magnitudes(table: Array, names: Sequence[str]) -> None:
    """Refuse columns (n, columns) whose squares are not finite, or are 0 (DataError); `names` says what each is."""
    largest = np.abs(table).max(0).astype(np.float64)
    outside = np.flatnonzero((largest > 1 / _SMALLEST) | ((largest > 0) & (largest < _SMALLEST)))
    if len(outside):
        first = outside[0]
        raise DataError(f"magnitudes from {_SMALLEST:g} to {1 / _SMALLEST:g} in {names[first]}",
                        f"{largest[first]:g} at most", "Take another unit for it.")


def require_numbers(x: Any) -> None:
    """Refuse columns of a data frame that are names or dates; sklearn's errors do not say which column."""
    import pandas

    if not isinstance(x, pandas.DataFrame):
        return
    if not len(x.columns):
        raise DataError("columns of inputs in X", "a table without columns", "Pass one column for each feature.")
    for index, name in enumerate(x.columns):
        _require_numbers(x.iloc[:, index], f"column {name!r} of X",
                         "Encode it, by pandas.get_dummies or sklearn's OneHotEncoder, or drop it.", ", or drop it")


def require_number_targets(y: Any) -> None:
    """Refuse targets that are names or dates, which NumPy makes numbers of, or has an error without a remedy for."""
    import pandas

    if not isinstance(y, (pandas.DataFrame, pandas.Series)):
        try:
            y = pandas.DataFrame(np.asarray(y))
        except (TypeError, ValueError):  # no table: sklearn's own error says so
            return
    columns = [y] if isinstance(y, pandas.Series) else [y.iloc[:, index] for index in range(y.shape[1])]
    for column in columns:
        name = "y" if len(columns) == 1 else f"column {column.name!r} of y"
        _require_numbers(column, name, "LaplaceClassifier takes names.", "")


def _require_numbers(column: Any, name: str, of_names: str, else_of_dates: str) -> None:
    import pandas

    dtype = column.dtype
    if dtype.kind in "biufc" or not len(column):
        return
    if dtype.kind in "mM" or isinstance(dtype, (pandas.DatetimeTZDtype, pandas.PeriodDtype)):
        raise DataError(f"numbers in {name}", f"dates or times, {dtype}",
                        f"Make it a number, such as days since a date{else_of_dates}.")
    other = pandas.to_numeric(column, errors="coerce").isna() & column.notna()
    if other.any():
        row = int(np.argmax(other))
        raise DataError(f"numbers in {name}", f"{column.iloc[row]!r} in row {row}", of_names)
