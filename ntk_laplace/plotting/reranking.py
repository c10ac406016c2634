"""Plots of rankings by the effects on the network itself."""

from __future__ import annotations

from matplotlib.figure import Figure

from ntk_laplace.plotting.style import BLUE, GREY, ORANGE, VERMILION, in_brackets, tidy
from ntk_laplace.posterior.explain import Reranking


def reranking(found: Reranking) -> Figure:
    """Moving effects against linear ones, one dot for each input and candidate; groups as squares."""
    figure = Figure(figsize=(5.2, 4.6), layout="constrained")
    axes = tidy(figure.add_subplot(), "Effects of leaving training points out")
    away, apart = ~found.comes_back.cpu(), found.disagrees.cpu()
    linear, moving = found.linear.cpu(), found.moving.cpu()
    for where, marker, color, words in (
        (~away & ~apart, "o", BLUE, "agree"), (~away & apart, "^", ORANGE, "disagree"),
        (away, "X", VERMILION, "do not come back"),
    ):
        if where.any():
            axes.plot(linear[where], moving[where], marker, ms=5, color=color, alpha=0.7, ls="", mew=0, label=words)
    if found.groups:
        axes.plot(found.group_linear.cpu().flatten(), found.group_moving.cpu().flatten(), "s", ms=6, mfc="white",
                  color="black", ls="", label="groups")
    axes.axline((0.0, 0.0), slope=1.0, color=GREY, lw=0.8, ls="--")
    unit = in_brackets(found.quantity.unit)
    axes.set_aspect("equal", "datalim")
    axes.set_xlabel(f"linear effect{unit}")
    axes.set_ylabel(f"moving effect{unit}")
    axes.legend(fontsize=8, frameon=False)
    return figure
