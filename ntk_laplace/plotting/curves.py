"""Plots over the number of training points: added one by one, or removed."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from ntk_laplace.plotting.style import DARK_BLUE, LIGHT_GREY
from ntk_laplace.posterior.scores import LearningCurve

_WINDOW = 20  # maximum window of the running mean, in points; a tenth of the curve if that is less


def learning_curve(curve: LearningCurve) -> Figure:
    """Plot the terms, and their cumulative sum, the evidence, below ([L22] Fig. 4)."""
    frame = curve.to_dataframe()
    figure = Figure(figsize=(6.4, 5.2), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    window = max(1, min(_WINDOW, len(frame) // 10))
    smooth = frame["log_density"].rolling(window, center=True, min_periods=1).mean()
    label = f"mean of {len(curve.terms)} orders" if len(curve.terms) > 1 else "one order"
    top.plot(frame["n"], frame["log_density"], ".", ms=3, color=LIGHT_GREY, label=label)
    top.plot(frame["n"], smooth, color=DARK_BLUE, label=f"running mean of {window}")
    top.set_ylabel("point n given those before, nats")
    # the first terms may be far below all others
    low, high = smooth[len(frame) // 10 :].min(), frame["log_density"].max()
    top.set_ylim(low - 0.3 * (high - low) - 0.1, high + 0.1 * (high - low) + 0.1)
    top.legend(fontsize=8, loc="lower right")
    bottom.plot(frame["n"], frame["evidence_so_far"], color=DARK_BLUE)
    bottom.set(xlabel="points seen, n", ylabel="evidence of the first n, nats")
    return figure


def removal_curves(removed: ArrayLike, outcomes: Mapping[str, ArrayLike], label: str = "outcome") -> Figure:
    """Plot outcomes against the number of removed training points, one line per ranking.

    Parameters
    ----------
    removed : array_like, (F,)
        Numbers of removed points.
    outcomes : mapping of name to array_like, (F,)
        Outcomes by ranking.
    label : str
        What the outcomes are.
    """
    figure = Figure(figsize=(5.6, 3.8), layout="constrained")
    axes = figure.add_subplot()
    markers = "osv^Dx+*"
    for number, (name, values) in enumerate(outcomes.items()):
        axes.plot(removed, values, marker=markers[number % len(markers)], ms=4, label=name)
    axes.set(xlabel="training points removed", ylabel=label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    return figure
