"""Plots of predictions and their uncertainty over one or two inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from ntk_laplace.plotting.style import BLUE, GREY, VERMILION, flat, tidy


def predictive_1d(
    grid: ArrayLike, mean: ArrayLike, epistemic: ArrayLike, total: ArrayLike, data: tuple[ArrayLike, ArrayLike],
    truth: ArrayLike | None = None, title: str = "",
) -> Figure:
    """Prediction along one input, with bands of two standard deviations.

    Parameters
    ----------
    grid : array_like, (n,)
        Inputs.
    mean, epistemic, total : array_like, (n,)
        Predictive mean; standard deviations without and with observation noise.
    data : (array_like, array_like)
        Training inputs and targets.
    truth : array_like, optional
        Noise-free function at `grid`.
    title : str
        Title of the figure.
    """
    grid, mean, epistemic, total = (flat(values) for values in (grid, mean, epistemic, total))
    figure = Figure(figsize=(8.6, 4.2), layout="constrained")
    axes = tidy(figure.add_subplot(), title)
    axes.fill_between(grid, mean - 2 * total, mean + 2 * total, color=BLUE, alpha=0.16, lw=0,
                      label="with noise, ± 2 sd")
    axes.fill_between(grid, mean - 2 * epistemic, mean + 2 * epistemic, color=BLUE, alpha=0.34, lw=0,
                      label="function, ± 2 sd")
    if truth is not None:
        axes.plot(grid, flat(truth), color=GREY, lw=1.4, ls=(0, (4, 2)), label="truth without noise")
    axes.plot(grid, mean, color=BLUE, lw=2.0, label="network's prediction")
    axes.plot(*map(flat, data), "o", ms=4.2, color="black", mec="white", mew=0.5, label="training data")
    # axis limits follow targets and mean, because bands can be much wider far from the data
    shown = np.concatenate([flat(data[1]), mean, *([] if truth is None else [flat(truth)])])
    middle, reach = (shown.max() + shown.min()) / 2, 1.1 * (shown.max() - shown.min())
    axes.set(xlabel="input x", ylabel="target y", xlim=(grid.min(), grid.max()), ylim=(middle - reach, middle + reach))
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return figure


@dataclass(frozen=True)
class Panel:
    """One map over two inputs.

    Attributes
    ----------
    values : array_like, (rows, columns)
        On the grid of inputs.
    title : str
        Title of the panel.
    label : str
        Label of the color bar, with the unit.
    probability : bool
        Whether colors range from 0 to 1 with white at one half, where a contour is drawn.
    """

    values: ArrayLike
    title: str
    label: str
    probability: bool


def predictive_2d(
    across: ArrayLike, up: ArrayLike, panels: Sequence[Panel], points: ArrayLike, labels: ArrayLike
) -> Figure:
    """Draw maps over two inputs side by side, with the training points of two classes on each.

    Parameters
    ----------
    across, up : array_like, (columns,) and (rows,)
        The grid of inputs.
    panels : sequence of Panel
    points, labels : array_like, (N, 2) and (N,)
        Training inputs and their classes, 0 or 1.
    """
    across, up, points, labels = flat(across), flat(up), np.asarray(points), np.asarray(labels).ravel()
    figure = Figure(figsize=(3.6 * len(panels), 4.0), layout="constrained")
    for index, panel in enumerate(panels):
        axes = tidy(figure.add_subplot(1, len(panels), index + 1), panel.title)
        axes.grid(False)
        values = np.asarray(panel.values, dtype=float)
        limits = (0.0, 1.0) if panel.probability else (0.0, float(values.max()))
        mesh = axes.contourf(across, up, values, levels=np.linspace(*limits, 21),
                             cmap="PuOr_r" if panel.probability else "cividis")
        if panel.probability:
            axes.contour(across, up, values, levels=[0.5], colors="black", linewidths=1.2)
        bar = figure.colorbar(mesh, ax=axes, location="bottom", shrink=0.85, ticks=np.linspace(*limits, 5),
                              format="%.2g")
        bar.set_label(panel.label, fontsize=9)
        bar.ax.tick_params(labelsize=8)
        for label, marker, face in ((0, "o", "white"), (1, "^", "black")):
            chosen = points[labels == label]
            edge = "black" if face == "white" else "white"
            axes.plot(*chosen.T, marker, ms=4.6, mfc=face, mec=edge, mew=0.7, label=f"class {label}")
        axes.set(xlabel="input $x_1$", ylabel="input $x_2$" if index == 0 else "", aspect="equal")
        if index == 0:
            axes.legend(loc="lower left", fontsize=8, framealpha=0.9, handletextpad=0.2)
    return figure


def prediction_intervals(
    mean: ArrayLike, lower: ArrayLike, upper: ArrayLike, targets: ArrayLike | None = None, level: float | None = None
) -> Figure:
    """Draw intervals as bars, ordered by the prediction, with the targets inside and outside of them.

    Parameters
    ----------
    mean, lower, upper : array_like, (n,)
        Predictions and the ends of their intervals; infinite ends reach the edge of the figure.
    targets : array_like, (n,), optional
        NaN where missing.
    level : float, optional
        Nominal coverage, for the title.
    """
    order = np.argsort(flat(mean), kind="stable")
    mean, lower, upper = (flat(values)[order] for values in (mean, lower, upper))
    finite = [values[np.isfinite(values)] for values in (mean, lower, upper)]
    at, figure = np.arange(len(mean)), Figure(figsize=(8.6, 4.2), layout="constrained")
    axes = tidy(figure.add_subplot(), "" if level is None else f"intervals of level {level:g}")
    if targets is not None:
        y = flat(targets)[order]
        finite.append(y[np.isfinite(y)])
    low, high = (pick(np.concatenate(finite)) for pick in (np.min, np.max))
    edge = 0.05 * (high - low or 1.0)
    axes.vlines(at, lower.clip(low - 2 * edge), upper.clip(max=high + 2 * edge), color=BLUE, alpha=0.35, lw=2.4,
                label="interval")
    axes.plot(at, mean, ".", ms=4, color=BLUE, label="prediction")
    if targets is not None:
        inside = (lower <= y) & (y <= upper)
        outside = ~inside & np.isfinite(y)
        axes.plot(at[inside], y[inside], "o", ms=3.6, color="black", mec="white", mew=0.4, label="target inside")
        axes.plot(at[outside], y[outside], "x", ms=6, mew=1.6, color=VERMILION, label="target outside")
    axes.set(xlabel="inputs, ordered by their prediction", ylabel="response", ylim=(low - edge, high + edge))
    axes.legend(loc="upper left", fontsize=9, framealpha=0.9)
    return figure
