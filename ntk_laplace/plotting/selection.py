"""Plots of the evidence over hyperparameters, structures and models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import ArrayLike

from ntk_laplace.plotting.style import BLUE, GREY, ORANGE, SERIES, flat, literal, tidy

_MOST_NAMES, _LONGEST_NAME = 10, 14  # limits for labels at the points, to avoid overlaps


def selection_curves(curves: Mapping[str, tuple[ArrayLike, Mapping[str, ArrayLike]]]) -> Figure:
    """Scores of a model against its prior precision; a ring marks the best of each.

    Parameters
    ----------
    curves : mapping of title to (precision, mapping of name to score), each (G,)
        Scores in nats per example; at most three per panel, with the same names in each.
    """
    figure = Figure(figsize=(3.6 * len(curves), 3.6), layout="constrained")
    for index, (title, (precision, scores)) in enumerate(curves.items()):
        axes = tidy(figure.add_subplot(1, len(curves), index + 1), title)
        for (name, score), (color, marker, style) in zip(scores.items(), SERIES, strict=False):
            line = flat(score)
            # open triangles are drawn on top, which keeps coinciding curves visible
            face, size = ("white", 7.5) if marker == "^" else (color, 5.5)
            axes.plot(flat(precision), line, style, marker=marker, ms=size, mfc=face, color=color, lw=1.7, label=name)
            best = int(line.argmax())
            axes.plot(flat(precision)[best], line[best], "o", ms=14, mfc="none", mec=color, mew=1.6)
        axes.set(xscale="log", xlabel="prior precision δ (1 / weight²)")
        axes.set_xticks(flat(precision), labels=[f"{value:g}" for value in flat(precision)])
        axes.set_xticks([], minor=True)
        if index == 0:
            axes.set_ylabel("nats per example (higher is better)")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def evidence_comparison(
    names: Sequence[str], evidence: Sequence[float | None], seconds: Sequence[tuple[float, float] | None],
    memory: Sequence[float | None], exact: float | None = None, errors: Sequence[float | None] = (),
) -> Figure:
    """Evidence, time and memory of one network under several structures, one row each.

    Parameters
    ----------
    names : sequence of str
        The structures, from top to bottom.
    evidence : sequence of float or None
        Evidence in nats; None, here and below, for unknown values.
    seconds : sequence of (float, float) or None
        Wall time of the fit, and of the evidence after it.
    memory : sequence of float or None
        Peak memory in bytes.
    exact : float, optional
        Evidence of an exact structure, drawn as a line; differences from it are written at the points.
    errors : sequence of float or None
        Standard errors of the evidence, drawn as bars of two; 0 or None without.
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
        error = errors[line] if line < len(errors) else None
        if error:
            left.errorbar(value, line, xerr=2 * error, color=BLUE, capsize=4, lw=1.5)
        _beside(left, value, line, f"{value:.1f}" if away is None else f"{away:+.4g}")
        middle.barh(line, parts[0], height=0.62, fc=(BLUE, 0.55), ec=BLUE, lw=0.8)
        middle.barh(line, parts[1], left=parts[0], height=0.62, fc=(ORANGE, 0.55), ec=ORANGE, hatch="////", lw=0.8)
        _beside(middle, sum(parts), line, f"{sum(parts):.2g}")
        if size is not None:
            right.barh(line, size / 2**20, height=0.62, fc=(GREY, 0.45), ec=GREY, lw=0.8)
            _beside(right, size / 2**20, line, f"{size / 2**20:.3g}")
    left.set(xlabel="nats" + ("" if exact is None else " (beside a point: its distance from exact)"))
    left.set(ylabel="structure", ylim=(len(names) - 0.4, -0.6))
    left.set_yticks(range(len(names)), labels=[literal(name) for name in names])
    middle.set(xlabel="seconds: fit, evidence (hatched)")
    right.set(xlabel="extra peak memory, MiB")
    for axes, title in ((left, "Evidence"), (middle, "Time"), (right, "Memory")):
        tidy(axes, title).grid(False, axis="y")
        axes.margins(x=0.22)
        if axes is not left:
            axes.set_xlim(left=0)
    return figure


def model_ranking(
    across: tuple[str, Sequence[float]], up: tuple[str, Sequence[float]], names: Sequence[str],
    parameters: Sequence[int], rho: float, hollow: Sequence[bool], axes: Axes | None = None,
) -> Figure:
    """Two scores of several models, one point each, with their rank correlation.

    Parameters
    ----------
    across, up : (label, sequence of float)
        The scores.
    names : sequence of str
        Labels of the points. In a new figure, many or long names become numbers with a key.
    parameters : sequence of int
        Numbers of parameters; larger models have larger points.
    rho : float
        Spearman's ρ of the two scores; omitted if it is NaN.
    hollow : sequence of bool
        Models whose prior is vague.
    axes : Axes, optional
        Axes to draw on; by default a new figure.
    """
    keyed = axes is None and (len(names) > _MOST_NAMES or max(map(len, names)) > _LONGEST_NAME)
    if axes is None:
        axes = Figure(figsize=(7.6 if keyed else 6.0, 4.6), layout="constrained").add_subplot()
    figure = cast(Figure, axes.figure)
    axes = tidy(axes, "" if np.isnan(rho) else f"Spearman's ρ = {rho:.2f}")
    scale = np.log(np.maximum(flat(parameters), 2.0))
    size = 5.0 + 7.0 * (scale - scale.min()) / max(float(np.ptp(scale)), 1e-12)
    shown = [str(number) for number in range(1, len(names) + 1)] if keyed else [literal(name) for name in names]
    for x, y, name, own, open_ in zip(across[1], up[1], shown, size, hollow, strict=True):
        axes.plot(x, y, "o", ms=own, mfc="white" if open_ else BLUE, mec=BLUE, mew=1.4, alpha=0.85)
        axes.annotate(name, (x, y), xytext=(0, 0.6 * own + 2), textcoords="offset points", fontsize=7, color=GREY,
                      ha="center")
    if any(hollow):
        axes.plot([], [], "o", mfc="white", mec=BLUE, mew=1.4, label="vague prior")
        axes.legend(loc="best", fontsize=8, frameon=False)
    if keyed:
        none = [Line2D([], [], ls="") for _ in names]
        words = [f"{number}  {literal(name)}" for number, name in zip(shown, names, strict=True)]
        figure.legend(none, words, loc="outside right upper", handlelength=0, handletextpad=0, frameon=False,
                      fontsize=7, labelcolor=GREY)
    axes.set(xlabel=across[0], ylabel=up[0])
    axes.margins(0.12)
    return figure


def _beside(axes: Axes, x: float, y: float, words: str) -> None:
    words, plain = words.replace("-", "\N{MINUS SIGN}"), {"fc": "white", "ec": "none", "pad": 1}
    axes.annotate(words, (x, y), xytext=(8, 0), textcoords="offset points", va="center", fontsize=9, bbox=plain)
