"""Plots of calibration: reliability, coverage and confidence."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from ntk_laplace.metrics import Reliability
from ntk_laplace.plotting.style import BLUE, GREY, SERIES, VERMILION, flat, literal, tidy


def reliability_diagram(panels: Mapping[str, Mapping[str, Reliability]]) -> Figure:
    """Accuracy against confidence of several predictions, one panel per held-out data set.

    Parameters
    ----------
    panels : mapping of title to mapping of name to Reliability
        At most three names per panel. If all predictions are in one bin, the diagram shows little, and the caption
        should say so.
    """
    figure = Figure(figsize=(4.3 * len(panels), 4.7), layout="constrained")
    tops = figure.subplots(2, len(panels), height_ratios=(3.4, 1), squeeze=False, sharex=True)
    for column, (title, series) in enumerate(panels.items()):
        top, bottom = tidy(tops[0, column], title), tidy(tops[1, column])
        top.plot([0, 1], [0, 1], color=GREY, lw=1, ls=(0, (4, 2)), label="perfectly calibrated")
        for index, (name, bins) in enumerate(series.items()):
            color, marker, line = SERIES[index]
            label = f"{literal(name)}: ECE {bins.error:.3f}"
            top.plot(bins.confidence, bins.accuracy, line, marker=marker, ms=6, color=color, lw=1.7, label=label)
            bottom.vlines(bins.confidence, 0.7, bins.count, color=color, lw=1.6, ls=line)
            bottom.plot(bins.confidence, bins.count, marker, ms=5, color=color)
        low = min(float(bins.confidence.min()) for bins in series.values())
        top.set(ylim=(-0.03, 1.05), xlim=(max(0.0, low - 0.08), 1.05), ylabel="fraction that is right")
        bottom.set(yscale="log", ylim=(0.7, None), ylabel="examples", xlabel="confidence of the prediction")
        top.legend(loc="lower right", fontsize=9, framealpha=0.9)
    return figure


def coverage_diagram(
    levels: ArrayLike, series: Mapping[str, ArrayLike], title: str, region: str = "interval"
) -> Figure:
    """Fraction of held-out targets inside central intervals, against the intervals' nominal probability.

    Parameters
    ----------
    levels : array_like, (L,)
        Nominal probabilities.
    series : mapping of name to array_like, (L,)
        Observed fractions.
    title : str
        Title of the figure.
    region : str
        What has the probability: "interval", or "set" of labels.
    """
    figure = Figure(figsize=(5.0, 4.6), layout="constrained")
    axes = tidy(figure.add_subplot(), title)
    axes.plot([0, 1], [0, 1], color=GREY, lw=1, ls=(0, (4, 2)), label="perfectly calibrated")
    for (name, found), (color, marker, line) in zip(series.items(), SERIES, strict=False):
        axes.plot(flat(levels), flat(found), line, marker=marker, ms=6, color=color, lw=1.7, label=literal(name))
    axes.set(xlabel=f"nominal probability of the {region}", ylabel="fraction of targets inside")
    axes.set(xlim=(0, 1.02), ylim=(0, 1.02), aspect="equal")
    axes.legend(loc="upper left", fontsize=9, framealpha=0.9)
    return figure


def confidence_histograms(panels: Mapping[str, Mapping[str, ArrayLike]]) -> Figure:
    """Distribution of the confidence in groups of inputs, one panel per prediction.

    Parameters
    ----------
    panels : mapping of title to mapping of group to array_like, (n,)
        Probabilities of the predicted class, for at most two groups of inputs.
    """
    low = min(float(flat(values).min()) for groups in panels.values() for values in groups.values())
    edges = np.linspace(min(low, 0.5), 1.0, 21)
    figure = Figure(figsize=(4.3 * len(panels), 3.4), layout="constrained")
    rows = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for index, (axes, (title, groups)) in enumerate(zip(rows, panels.items(), strict=True)):
        tidy(axes, title)
        for (name, values), color, hatch in zip(groups.items(), (BLUE, VERMILION), ("", "////"), strict=False):
            share = np.histogram(flat(values), edges)[0] / flat(values).size
            axes.stairs(100 * share, edges, fill=True, fc=(color, 0.25), ec=(color, 0.5), hatch=hatch, lw=0)
            words = f"{literal(name)}: mean {flat(values).mean():.2f}"
            axes.stairs(100 * share, edges, color=color, lw=1.8, label=words)
        axes.set(xlabel="confidence of the prediction", ylabel="% of images" if index == 0 else "")
        axes.legend(loc="upper left", fontsize=9, framealpha=0.9)
    return figure
