"""Names, pictures and rows of the inputs and of the training points, as the caller gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ntk_laplace.errors import DataError
from ntk_laplace.model.data import Inputs
from ntk_laplace.tools.explorer.display import rounded_each, spread_of
from ntk_laplace.tools.explorer.sprites import images_of, sheet

_ALL_PICTURES = 2000  # with more training points only the displayed ones get a picture
MOST_FEATURES = 40  # maximum number of displayed features of an input
_MISSING = "None", "<NA>", "NaT"  # how None and what pandas has for missing values are written


Units = tuple[Sequence[float] | NDArray[np.float64], Sequence[float] | NDArray[np.float64]]
"""Scale and mean, (C,), of outputs in other units."""


@dataclass(frozen=True)
class Naming:
    """Names of classes, features, targets, inputs and training points on the page.

    Attributes
    ----------
    classes : sequence of str, optional
        Names of the classes, or of the outputs.
    features : sequence of str, optional
        Names of the inputs' columns.
    shape : sequence of int, optional
        Of inputs that are images: (height, width), (height, width, 3) or (3, height, width).
    target : str
        Name of the predicted quantity, for regression.
    inputs : sequence of str, optional
        Names of the inputs to explain, such as their files; numbers by default.
    training : sequence of str, optional
        Names of the training points.
    values : pair of tables, optional
        What is shown in place of the numbers of the inputs to explain, and of the training inputs, such as names of
        categories: DataFrames, whose columns name the features, or arrays with a number or text for each of `features`.
    units : pair of sequences of float, optional
        Scale and mean of each target, if targets were standardized: outputs are shown as ``scale * f + mean``, and
        effects of sources are given in these units.
    """

    classes: Sequence[str] | None = None
    features: Sequence[str] | None = None
    shape: Sequence[int] | None = None
    target: str = "target"
    inputs: Sequence[str] | None = None
    training: Sequence[str] | None = None
    values: tuple[Any, Any] | None = None
    units: Units | None = None


def texts(names: Sequence[str] | None) -> list[str] | None:
    """Names as the page holds them."""
    return None if names is None else [str(name) for name in names]


def pictures(x: Inputs, training: Inputs | None, shown: list[int], naming: Naming) -> dict[str, Any] | None:
    """Pictures of the inputs, and of the training points that are `shown`; None if the inputs are no images."""
    if not isinstance(x, Tensor):
        return None
    inputs = images_of(x, naming.shape)
    if inputs is None:
        return None
    found: dict[str, Any] = {"points": sheet(inputs), "training": None}
    if isinstance(training, Tensor):
        some = list(range(len(training))) if len(training) <= _ALL_PICTURES else shown
        images = images_of(training[some], naming.shape)
        found["training"] = None if images is None else sheet(images) | {"indices": some}
    return found


def rows(x: Inputs, training: Inputs | None, shown: list[int], naming: Naming, count: int) -> dict[str, Any] | None:
    """Values of the inputs and of `count` training points, if they are no images: numbers, or what stands for them."""
    if not isinstance(x, Tensor) or x.ndim != 2 or naming.shape is not None:
        return None
    own, known = (x, training) if naming.values is None else _tables(naming.values, len(x), count)
    names = _feature_names(naming, own.shape[1])
    if len(names) > MOST_FEATURES:
        return None
    points, few = own.tolist(), {}
    if isinstance(known, (Tensor, np.ndarray)):
        few = {str(j): known[j].tolist() for j in shown}
    spreads = [spread_of(column) for column in zip(*points, *few.values(), strict=True)]
    return {"features": texts(names), "spreads": spreads, "points": [rounded_each(row, spreads) for row in points],
            "training": {j: rounded_each(row, spreads) for j, row in few.items()} if few else None}


def _feature_names(naming: Naming, count: int) -> Sequence[str]:
    unnamed = [f"x{i}" for i in range(count)] if naming.values is None else getattr(naming.values[0], "columns", [])
    names = unnamed if naming.features is None else naming.features
    if len(names) != count:
        raise DataError(f"{count} names of features", f"{len(names)}", "Name each column of the inputs once.")
    return names


def _tables(values: Any, *counts: int) -> list[NDArray[Any]]:
    """Both tables as arrays of numbers and texts, (n, features); None where a value is missing."""
    if not isinstance(values, (tuple, list)) or len(values) != len(counts):
        raise DataError("a pair of tables as values", f"a {type(values).__name__}",
                        "Pass Naming(values=(frame, training_frame)).")
    found = [np.asarray(table, dtype=object) for table in values]
    width = found[0].shape[1] if found[0].ndim == 2 else 1
    for table, count in zip(found, counts, strict=True):
        if table.shape != (count, width):
            raise DataError(f"values of shape ({count}, {width})", f"{table.shape}",
                            "Pass a row for each input, and a column for each of the features.")
    return [np.vectorize(_word, [object])(table) for table in found]


def _word(value: Any) -> Any:
    """A number or text; None where pandas says so."""
    return value if isinstance(value, (int, float, str)) else None if str(value) in _MISSING else str(value)
