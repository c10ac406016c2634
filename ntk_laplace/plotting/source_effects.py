"""Plots of the effects of sources."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from ntk_laplace.plotting.style import BLUE, GREY, LIGHT_GREY, VERMILION, tidy
from ntk_laplace.posterior.explain import SourceEffects

__all__ = ["source_effects"]

_MOST = 30  # sources in a figure


def source_effects(found: SourceEffects) -> Figure:
    """One row for each source: its effects, the changes of log p if known, and its own points with and without it.

    Bars are means over the inputs, dots are single inputs, a diamond is the mean sum of single effects. At most 30
    sources, the first of the table.
    """
    order = found.order[:_MOST].cpu()
    panels = 2 if found.log_prob_change is None else 3
    figure = Figure(figsize=(1.6 + 3.4 * panels, 1.5 + 0.34 * len(order)), layout="constrained")
    axes = list(figure.subplots(1, panels, sharey=True, squeeze=False)[0])
    unit = f" ({found.quantity.unit.strip()})" if found.quantity.unit else ""
    _bars(axes[0], found.effect.cpu()[:, order], BLUE)
    tidy(axes[0], "Effect of leaving it out").set_xlabel(f"change of {found.explained}{unit}")
    means = found.single.cpu()[:, order].mean(0)
    axes[0].plot(means, range(len(order)), "D", ms=5, mfc="white", color="black", label="sum of single effects")
    axes[0].legend(fontsize=8, loc="upper left", bbox_to_anchor=(0.0, -0.16 - 1.2 / (len(order) + 3)), frameon=False)
    if found.log_prob_change is not None:
        _bars(axes[1], found.log_prob_change.cpu()[:, order], VERMILION)
        tidy(axes[1], "Effect on the targets").set_xlabel("change of log p(y), nats")
    _own(axes[-1], found.own_log_prob.cpu()[order], found.own_log_prob_without.cpu()[order])
    axes[0].set_yticks(range(len(order)), [f"{found.names[s]} ({int(found.num_points[s])})" for s in order.tolist()])
    axes[0].set_ylim(len(order) - 0.5, -0.5)
    axes[0].set_ylabel("source (points)")
    return figure


def _bars(axes: Axes, values: Tensor, color: str) -> None:
    """Means over the inputs (n, S), and each input."""
    rows = range(values.shape[1])
    axes.barh(rows, values.mean(0), color=color, height=0.62)
    if 1 < len(values):
        for row in rows:
            axes.plot(values[:, row], [row] * len(values), "o", ms=2.5, color=GREY, alpha=0.5)
    axes.axvline(0.0, color="black", lw=0.8)


def _own(axes: Axes, with_it: Tensor, without: Tensor) -> None:
    """How the points of each source are predicted, with it and without it."""
    tidy(axes, "Its own points").set_xlabel("mean log p, nats")
    rows = range(len(without))
    axes.hlines(rows, without, with_it, color=LIGHT_GREY, lw=1.5)
    axes.plot(with_it, rows, "o", ms=6, mfc="white", color=GREY, label="with the source")
    axes.plot(without, rows, "s", ms=6, color=VERMILION, label="without it")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(0.0, -0.16 - 1.2 / (len(rows) + 3)), frameon=False, ncols=2)
