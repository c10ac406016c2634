"""Plots of test images with the training images that explain their predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from ntk_laplace.errors import DataError
from ntk_laplace.plotting.style import BLUE, VERMILION


@dataclass(frozen=True)
class ImageExplanation:
    """A test image with the training images that support or oppose its prediction.

    Attributes
    ----------
    image : array_like, (h, w)
        The test image.
    caption : str
        Text above the image: true and predicted class.
    supporting, opposing : sequence of (image, caption)
        Training images, the strongest first; the caption states label and effect.
    """

    image: ArrayLike
    caption: str
    supporting: Sequence[tuple[ArrayLike, str]]
    opposing: Sequence[tuple[ArrayLike, str]]


def image_explanations(rows: Sequence[ImageExplanation], unit: str) -> Figure:
    """Test images with the training images that support (left) or oppose (right) their predictions.

    Parameters
    ----------
    rows : sequence of ImageExplanation
        Rows with equal numbers of training images.
    unit : str
        Unit of the effects, for the headings.
    """
    if not rows:
        raise DataError("at least one image to explain", "none", "Pass one ImageExplanation for each row.")
    many = max(max(len(row.supporting), len(row.opposing)) for row in rows)
    figure = Figure(figsize=(1.75 + 1.12 * 2 * many + 0.5, 1.62 * len(rows) + 0.75), layout="constrained")
    left, middle, right = np.asarray(figure.subfigures(1, 3, width_ratios=(1.65, 1.12 * many, 1.12 * many)))
    _gallery(left, [[(row.image, row.caption)] for row in rows], "test image", "black", 1)
    _gallery(middle, [row.supporting for row in rows], f"speak for the prediction ({unit})", BLUE, many)
    _gallery(right, [row.opposing for row in rows], f"speak against it ({unit})", VERMILION, many)
    return figure


def _gallery(
    figure: Figure, rows: Sequence[Sequence[tuple[ArrayLike, str]]], title: str, color: str, many: int
) -> None:
    figure.suptitle(title, color=color, fontsize=11, fontweight="bold")
    grid = figure.subplots(len(rows), many, squeeze=False)
    for cells, entries in zip(grid, rows, strict=True):
        for axes in cells[len(entries) :]:
            axes.set_axis_off()
        for axes, (image, caption) in zip(cells, entries, strict=False):
            axes.imshow(np.asarray(image, dtype=float), cmap="gray_r", vmin=0, vmax=1, interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            axes.set_title(caption, fontsize=9, color=color, pad=3)
            for spine in axes.spines.values():
                spine.set(color=color, linewidth=1.8)
