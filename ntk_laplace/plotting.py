"""Pictures of predictions, as matplotlib figures of their own: no pyplot, no global state, nothing at import.

Functions of plain arrays; each returns a `Figure` that `png` turns into bytes. Colours are those of Okabe and Ito,
which people with any colour vision tell apart, and every difference in colour is also one in shape or place.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray

from ntk_laplace.errors import DataError
from ntk_laplace.metrics import Reliability

__all__ = [
    "BLUE",
    "GREY",
    "ORANGE",
    "VERMILION",
    "ImageExplanation",
    "Panel",
    "confidence_histograms",
    "coverage_diagram",
    "evidence_comparison",
    "image_explanations",
    "model_ranking",
    "png",
    "predictive_1d",
    "predictive_2d",
    "reliability_diagram",
    "selection_curves",
]

BLUE, ORANGE, VERMILION, GREEN, GREY = "#0072B2", "#E69F00", "#D55E00", "#009E73", "#5B6470"
SERIES = ((ORANGE, "s", "--"), (BLUE, "o", "-"), (GREEN, "^", ":"))  # colour, marker, line of each series in turn


def png(figure: Figure, dpi: int = 130) -> bytes:
    """Render to PNG; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


# --- uncertainty over inputs


def predictive_1d(
    grid: ArrayLike,
    mean: ArrayLike,
    epistemic: ArrayLike,
    total: ArrayLike,
    data: tuple[ArrayLike, ArrayLike],
    truth: ArrayLike | None = None,
    title: str = "",
) -> Figure:
    """Prediction along one input, with bands of two standard deviations.

    Parameters
    ----------
    grid : array_like, (n,)
        Inputs.
    mean, epistemic, total : array_like, (n,)
        Predictive mean; standard deviations of the function alone, and with observation noise.
    data : (array_like, array_like)
        Training inputs and targets.
    truth : array_like, optional
        Noise-free function at `grid`.
    title : str
        What is to be seen.
    """
    grid, mean, epistemic, total = (_flat(values) for values in (grid, mean, epistemic, total))
    figure = Figure(figsize=(8.6, 4.2), layout="constrained")
    axes = _tidy(figure.add_subplot(), title)
    axes.fill_between(
        grid, mean - 2 * total, mean + 2 * total, color=BLUE, alpha=0.16, lw=0, label="with noise, ± 2 sd"
    )
    axes.fill_between(
        grid, mean - 2 * epistemic, mean + 2 * epistemic, color=BLUE, alpha=0.34, lw=0, label="function, ± 2 sd"
    )
    if truth is not None:
        axes.plot(grid, _flat(truth), color=GREY, lw=1.4, ls=(0, (4, 2)), label="truth without noise")
    axes.plot(grid, mean, color=BLUE, lw=2.0, label="network's prediction")
    axes.plot(*map(_flat, data), "o", ms=4.2, color="black", mec="white", mew=0.5, label="training data")
    # far from the data the bands may dwarf everything; what matters is on the scale of targets and predictions
    shown = np.concatenate([_flat(data[1]), mean, *([] if truth is None else [_flat(truth)])])
    middle, reach = (shown.max() + shown.min()) / 2, 1.1 * (shown.max() - shown.min())
    axes.set(xlabel="input x", ylabel="target y", xlim=(grid.min(), grid.max()), ylim=(middle - reach, middle + reach))
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return figure


@dataclass(frozen=True)
class Panel:
    """One map over the plane.

    Attributes
    ----------
    values : array_like, (rows, columns)
        On the grid of inputs.
    title : str
        What is to be seen.
    label : str
        Of the colour bar, with the unit.
    probability : bool
        Colours run from 0 to 1 with white in the middle, and the line at one half is drawn.
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
    across, up, points, labels = _flat(across), _flat(up), np.asarray(points), np.asarray(labels).ravel()
    figure = Figure(figsize=(3.6 * len(panels), 4.0), layout="constrained")
    for index, panel in enumerate(panels):
        axes = _tidy(figure.add_subplot(1, len(panels), index + 1), panel.title)
        axes.grid(False)
        values = np.asarray(panel.values, dtype=float)
        limits = (0.0, 1.0) if panel.probability else (0.0, float(values.max()))
        mesh = axes.contourf(
            across, up, values, levels=np.linspace(*limits, 21), cmap="PuOr_r" if panel.probability else "cividis"
        )
        if panel.probability:
            axes.contour(across, up, values, levels=[0.5], colors="black", linewidths=1.2)
        bar = figure.colorbar(
            mesh, ax=axes, location="bottom", shrink=0.85, ticks=np.linspace(*limits, 5), format="%.2g"
        )
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


# --- calibration


def reliability_diagram(panels: Mapping[str, Mapping[str, Reliability]]) -> Figure:
    """Accuracy against confidence of several predictions, one panel for each set of held-out data.

    Parameters
    ----------
    panels : mapping of title to mapping of name to Reliability
        At most three names in each panel. Where the predictions of all names fill one bin alone there is little to
        be seen, and the caption should say so.
    """
    figure = Figure(figsize=(4.3 * len(panels), 4.7), layout="constrained")
    tops = figure.subplots(2, len(panels), height_ratios=(3.4, 1), squeeze=False, sharex=True)
    for column, (title, series) in enumerate(panels.items()):
        top, bottom = _tidy(tops[0, column], title), _tidy(tops[1, column])
        top.plot([0, 1], [0, 1], color=GREY, lw=1, ls=(0, (4, 2)), label="perfectly calibrated")
        for index, (name, bins) in enumerate(series.items()):
            colour, marker, line = SERIES[index]
            label = f"{name}: ECE {bins.error:.3f}"
            top.plot(bins.confidence, bins.accuracy, line, marker=marker, ms=6, color=colour, lw=1.7, label=label)
            bottom.vlines(bins.confidence, 0.7, bins.count, color=colour, lw=1.6, ls=line)
            bottom.plot(bins.confidence, bins.count, marker, ms=5, color=colour)
        low = min(float(bins.confidence.min()) for bins in series.values())
        top.set(ylim=(-0.03, 1.05), xlim=(max(0.0, low - 0.08), 1.05), ylabel="fraction that is right")
        bottom.set(yscale="log", ylim=(0.7, None), ylabel="images", xlabel="confidence of the prediction")
        top.legend(loc="lower right", fontsize=9, framealpha=0.9)
    return figure


def coverage_diagram(levels: ArrayLike, series: Mapping[str, ArrayLike], title: str) -> Figure:
    """Fraction of held-out targets inside central intervals, against the intervals' nominal probability.

    Parameters
    ----------
    levels : array_like, (L,)
        Nominal probabilities.
    series : mapping of name to array_like, (L,)
        Observed fractions.
    title : str
        What is to be seen.
    """
    figure = Figure(figsize=(5.0, 4.6), layout="constrained")
    axes = _tidy(figure.add_subplot(), title)
    axes.plot([0, 1], [0, 1], color=GREY, lw=1, ls=(0, (4, 2)), label="perfectly calibrated")
    for (name, found), (colour, marker, line) in zip(series.items(), SERIES, strict=False):
        axes.plot(_flat(levels), _flat(found), line, marker=marker, ms=6, color=colour, lw=1.7, label=name)
    axes.set(xlabel="nominal probability of the interval", ylabel="fraction of targets inside")
    axes.set(xlim=(0, 1.02), ylim=(0, 1.02), aspect="equal")
    axes.legend(loc="upper left", fontsize=9, framealpha=0.9)
    return figure


def confidence_histograms(panels: Mapping[str, Mapping[str, ArrayLike]]) -> Figure:
    """Distribution of the confidence in groups of inputs, one panel for each prediction.

    Parameters
    ----------
    panels : mapping of title to mapping of group to array_like, (n,)
        Probabilities of the predicted class, of two groups of inputs at most.
    """
    low = min(float(_flat(values).min()) for groups in panels.values() for values in groups.values())
    edges = np.linspace(min(low, 0.5), 1.0, 21)
    figure = Figure(figsize=(4.3 * len(panels), 3.4), layout="constrained")
    rows = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for index, (axes, (title, groups)) in enumerate(zip(rows, panels.items(), strict=True)):
        _tidy(axes, title)
        for (name, values), colour, hatch in zip(groups.items(), (BLUE, VERMILION), ("", "////"), strict=False):
            share = np.histogram(_flat(values), edges)[0] / _flat(values).size
            axes.stairs(100 * share, edges, fill=True, fc=(colour, 0.25), ec=(colour, 0.5), hatch=hatch, lw=0)
            axes.stairs(100 * share, edges, color=colour, lw=1.8, label=f"{name}: mean {_flat(values).mean():.2f}")
        axes.set(xlabel="confidence of the prediction", ylabel="% of images" if index == 0 else "")
        axes.legend(loc="upper left", fontsize=9, framealpha=0.9)
    return figure


# --- model selection


def selection_curves(curves: Mapping[str, tuple[ArrayLike, Mapping[str, ArrayLike]]]) -> Figure:
    """Scores of a model against its prior precision, the best of each ringed.

    Parameters
    ----------
    curves : mapping of title to (precision, mapping of name to score), each (G,)
        Scores in nats per example; at most three, with the same names in each panel.
    """
    figure = Figure(figsize=(3.6 * len(curves), 3.6), layout="constrained")
    for index, (title, (precision, scores)) in enumerate(curves.items()):
        axes = _tidy(figure.add_subplot(1, len(curves), index + 1), title)
        for (name, score), (colour, marker, style) in zip(scores.items(), SERIES, strict=False):
            line = _flat(score)
            # open triangles on top: where two curves coincide both are seen
            face, size = ("white", 7.5) if marker == "^" else (colour, 5.5)
            axes.plot(_flat(precision), line, style, marker=marker, ms=size, mfc=face, color=colour, lw=1.7, label=name)
            best = int(line.argmax())
            axes.plot(_flat(precision)[best], line[best], "o", ms=14, mfc="none", mec=colour, mew=1.6)
        axes.set(xscale="log", xlabel="prior precision δ (1 / weight²)")
        axes.set_xticks(_flat(precision), labels=[f"{value:g}" for value in _flat(precision)])
        axes.set_xticks([], minor=True)
        if index == 0:
            axes.set_ylabel("nats per example (higher is better)")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def evidence_comparison(
    names: Sequence[str],
    evidence: Sequence[float | None],
    seconds: Sequence[tuple[float, float] | None],
    memory: Sequence[float | None],
    exact: float | None = None,
) -> Figure:
    """Evidence, time and memory of one network under several structures, a line for each.

    Parameters
    ----------
    names : sequence of str
        The structures, from top to bottom.
    evidence : sequence of float or None
        In nats; None where a structure gave no value, and below where nothing is known.
    seconds : sequence of (float, float) or None
        Of the fit, and of the evidence after it.
    memory : sequence of float or None
        Peak, in bytes.
    exact : float, optional
        Evidence of an exact structure, drawn as a line; the differences from it are written beside the points.
    """
    figure = Figure(figsize=(10.2, 1.3 + 0.42 * len(names)), layout="constrained")
    left, middle, right = figure.subplots(1, 3, sharey=True, width_ratios=(1.5, 1, 1))
    if exact is not None:
        left.axvline(exact, color=GREY, lw=1.2, ls=(0, (4, 2)))
    for line, (value, parts, size) in enumerate(zip(evidence, seconds, memory, strict=True)):
        if value is None or parts is None:
            left.text(0.03, line, "no value", transform=left.get_yaxis_transform(), color=GREY, va="center", fontsize=9)
            continue
        away = None if exact is None or np.isclose(value, exact, rtol=1e-6) else value - exact
        left.plot(value, line, "o", ms=8, color=BLUE)
        _beside(left, value, line, f"{value:.1f}" if away is None else f"{away:+.4g}")
        middle.barh(line, parts[0], height=0.62, fc=(BLUE, 0.55), ec=BLUE, lw=0.8)
        middle.barh(line, parts[1], left=parts[0], height=0.62, fc=(ORANGE, 0.55), ec=ORANGE, hatch="////", lw=0.8)
        _beside(middle, sum(parts), line, f"{sum(parts):.2g}")
        if size is not None:
            right.barh(line, size / 2**20, height=0.62, fc=(GREY, 0.45), ec=GREY, lw=0.8)
            _beside(right, size / 2**20, line, f"{size / 2**20:.3g}")
    left.set(xlabel="nats" + ("" if exact is None else " (beside a point: its distance from exact)"))
    left.set(ylabel="structure", ylim=(len(names) - 0.4, -0.6))
    left.set_yticks(range(len(names)), labels=names)
    middle.set(xlabel="seconds: fit, evidence (hatched)")
    right.set(xlabel="extra peak memory, MiB")
    for axes, title in ((left, "Evidence"), (middle, "Time"), (right, "Memory")):
        _tidy(axes, title).grid(False, axis="y")
        axes.margins(x=0.22)
        if axes is not left:
            axes.set_xlim(left=0)
    return figure


def model_ranking(
    across: tuple[str, Sequence[float]],
    up: tuple[str, Sequence[float]],
    names: Sequence[str],
    parameters: Sequence[int],
    rho: float,
    hollow: Sequence[bool],
    axes: Axes | None = None,
) -> Figure:
    """Two scores of several models, a point for each, with the correlation of their ranks.

    Parameters
    ----------
    across, up : (label, sequence of float)
        The scores.
    names : sequence of str
    parameters : sequence of int
        Numbers of parameters: the larger the model, the larger its point.
    rho : float
        Spearman's ρ of the two; left out if it is not a number.
    hollow : sequence of bool
        Models whose prior is vague.
    axes : Axes, optional
        Where to draw; a figure of its own otherwise.
    """
    figure = Figure(figsize=(6.0, 4.6), layout="constrained") if axes is None else axes.figure
    axes = _tidy(figure.add_subplot() if axes is None else axes, "" if np.isnan(rho) else f"Spearman's ρ = {rho:.2f}")
    scale = np.log(np.maximum(_flat(parameters), 2.0))
    size = 5.0 + 7.0 * (scale - scale.min()) / max(float(np.ptp(scale)), 1e-12)
    for x, y, name, own, open_ in zip(across[1], up[1], names, size, hollow, strict=True):
        axes.plot(x, y, "o", ms=own, mfc="white" if open_ else BLUE, mec=BLUE, mew=1.4, alpha=0.85)
        axes.annotate(name, (x, y), xytext=(0, 0.6 * own + 2), textcoords="offset points", fontsize=7, color=GREY,
                      ha="center")  # fmt: skip
    if any(hollow):
        axes.plot([], [], "o", mfc="white", mec=BLUE, mew=1.4, label="vague prior")
        axes.legend(loc="best", fontsize=8, frameon=False)
    axes.set(xlabel=across[0], ylabel=up[0])
    axes.margins(0.12)
    return figure


def _beside(axes: Axes, x: float, y: float, words: str) -> None:
    words, plain = words.replace("-", "\N{MINUS SIGN}"), {"fc": "white", "ec": "none", "pad": 1}
    axes.annotate(words, (x, y), xytext=(8, 0), textcoords="offset points", va="center", fontsize=9, bbox=plain)


# --- explanations


@dataclass(frozen=True)
class ImageExplanation:
    """A test image beside the training images that speak for and against its prediction.

    Attributes
    ----------
    image : array_like, (h, w)
        The test image.
    caption : str
        Above it: truth and prediction.
    supporting, opposing : sequence of (image, caption)
        Training images, the strongest first; the caption says label and effect.
    """

    image: ArrayLike
    caption: str
    supporting: Sequence[tuple[ArrayLike, str]]
    opposing: Sequence[tuple[ArrayLike, str]]


def image_explanations(rows: Sequence[ImageExplanation], unit: str) -> Figure:
    """Test images beside the training images that speak for them (left) and against them (right).

    Parameters
    ----------
    rows : sequence of ImageExplanation
        With equally many training images each.
    unit : str
        Of the effects, for the headings.
    """
    if not rows:
        raise DataError("at least one image to explain", "none", "Pass one ImageExplanation for each row.")
    many = max(max(len(row.supporting), len(row.opposing)) for row in rows)
    figure = Figure(figsize=(1.75 + 1.12 * 2 * many + 0.5, 1.62 * len(rows) + 0.75), layout="constrained")
    left, middle, right = figure.subfigures(1, 3, width_ratios=(1.65, 1.12 * many, 1.12 * many))
    _gallery(left, [[(row.image, row.caption)] for row in rows], "test image", "black", 1)
    _gallery(middle, [row.supporting for row in rows], f"speak for the prediction ({unit})", BLUE, many)
    _gallery(right, [row.opposing for row in rows], f"speak against it ({unit})", VERMILION, many)
    return figure


def _gallery(
    figure: Figure, rows: Sequence[Sequence[tuple[ArrayLike, str]]], title: str, colour: str, many: int
) -> None:
    figure.suptitle(title, color=colour, fontsize=11, fontweight="bold")
    grid = figure.subplots(len(rows), many, squeeze=False)
    for cells, entries in zip(grid, rows, strict=True):
        for axes in cells[len(entries) :]:
            axes.set_axis_off()
        for axes, (image, caption) in zip(cells, entries, strict=False):
            axes.imshow(np.asarray(image, dtype=float), cmap="gray_r", vmin=0, vmax=1, interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            axes.set_title(caption, fontsize=9, color=colour, pad=3)
            for spine in axes.spines.values():
                spine.set(color=colour, linewidth=1.8)


# --- inside


def _flat(values: ArrayLike) -> NDArray[np.float64]:
    return np.asarray(values, dtype=np.float64).ravel()


def _tidy(axes: Axes, title: str = "") -> Axes:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#E3E6EA", lw=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9)
    if title:
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    return axes
