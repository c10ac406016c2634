"""Plots of the effects of sources."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ntk_laplace.plotting.style import BLUE, GREY, LIGHT_GREY, VERMILION, in_brackets, literal, tidy
from ntk_laplace.posterior.explain import SourceEffects

_MOST = 30  # sources in a figure
_FEW = 12  # inputs that are dots


def source_effects(found: SourceEffects) -> Figure:
    """One row for each source: its effects, the changes of log p if known, and its own points with and without it.

    Bars are means over the inputs; dots are the inputs if they are few, otherwise lines are two standard errors of the
    mean. A diamond is the mean sum of single effects. At most 30 sources, the first of the table.
    """
    order = found.order[:_MOST].tolist()
    change = None if found.by == "log_likelihood" else found.log_prob_change
    panels = 2 if change is None else 3
    figure = Figure(figsize=(1.4 + 3.2 * panels, 1.4 + 0.36 * len(order)), layout="constrained")
    axes = list(figure.subplots(1, panels, sharey=True, squeeze=False)[0])
    _bars(axes[0], found.effect[:, order].cpu().numpy(), BLUE)
    unit = in_brackets(found.quantity.unit)
    tidy(axes[0], "Effect of leaving it out").set_xlabel(f"change of {found.explained}{unit}")
    means = found.single[:, order].mean(0).cpu().numpy()
    axes[0].plot(means, range(len(order)), "D", ms=5, mfc="white", color="black", label="sum of single effects")
    if change is not None:
        _bars(axes[1], change[:, order].cpu().numpy(), VERMILION)
        tidy(axes[1], "Effect on the targets").set_xlabel("change of log p(y), nats")
    _own(axes[-1], *(one[order].cpu().numpy() for one in (found.own_log_prob, found.own_log_prob_without)))
    axes[0].set_yticks(range(len(order)), [f"{literal(found.names[s])} ({int(found.num_points[s])})" for s in order])
    axes[0].set_ylim(len(order) - 0.5, -0.5)
    axes[0].set_ylabel("source (points)")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def _bars(axes: Axes, values: NDArray[np.floating], color: str) -> None:
    """Means over the inputs (n, S), with each input or with standard errors."""
    rows = range(values.shape[1])
    errors = 2 * values.std(0) / len(values) ** 0.5 if len(values) > _FEW else None
    axes.barh(rows, values.mean(0), xerr=errors, color=color, height=0.62, error_kw={"elinewidth": 1.2})
    if 1 < len(values) <= _FEW:
        for row in rows:
            axes.plot(values[:, row], [row] * len(values), "o", ms=3, color=GREY, alpha=0.6)
    axes.axvline(0.0, color="black", lw=0.8)


def _own(axes: Axes, with_it: NDArray[np.floating], without: NDArray[np.floating]) -> None:
    """How the points of each source are predicted, with it and without it."""
    tidy(axes, "Its own points").set_xlabel("mean log p, nats")
    rows = range(len(without))
    axes.hlines(rows, without, with_it, color=LIGHT_GREY, lw=1.5)
    axes.plot(with_it, rows, "o", ms=6, mfc="white", color=GREY, label="with the source")
    axes.plot(without, rows, "s", ms=6, color=VERMILION, label="without it")
