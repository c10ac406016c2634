"""Common style of all plots: colors, axes, PNG output.

Colors are those of Okabe and Ito, which are distinguishable with color vision deficiencies.
"""

from __future__ import annotations

import io

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray

BLUE, ORANGE, VERMILION, GREEN, GREY = "#0072B2", "#E69F00", "#D55E00", "#009E73", "#5B6470"
DARK_BLUE, LIGHT_GREY = "#1F4E79", "#9AA3AD"
SERIES = ((ORANGE, "s", "--"), (BLUE, "o", "-"), (GREEN, "^", ":"))  # color, marker and line style of each series


def png(figure: Figure, dpi: int = 130) -> bytes:
    """Render to PNG; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def flat(values: ArrayLike) -> NDArray[np.float64]:
    """One-dimensional float64 values."""
    return np.asarray(values, dtype=np.float64).ravel()


def literal(name: object) -> str:
    """A name that a user gave, as text: matplotlib reads what stands between two dollar signs as a formula."""
    return str(name).replace("$", r"\$")


def in_brackets(unit: str) -> str:
    """A unit as the end of a label; empty if there is none."""
    return f" ({unit.strip()})" if unit else ""


def tidy(axes: Axes, title: str = "") -> Axes:
    """Apply the common axes style: no box, a light grid behind, the title on the left."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#E3E6EA", lw=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9)
    if title:
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    return axes
