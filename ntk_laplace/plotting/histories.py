"""Plots of the evidence and the hyperparameters during an optimization or a training."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator

from ntk_laplace.plotting.style import DARK_BLUE, ORANGE
from ntk_laplace.posterior.hyperparameters import HyperparameterHistory
from ntk_laplace.training import EvidenceHistory
from ntk_laplace.variational_inference.result import VariationalHistory

_MOST_LINES = 12  # maximum hyperparameters plotted
_MOST_INSIDE, _LONG = 4, 20  # entries, and letters per entry, of a legend inside the axes


def hyperparameter_history(history: HyperparameterHistory) -> Figure:
    """Plot the evidence over the steps, and the hyperparameters on a log scale below."""
    figure = _history("step", range(len(history)), history.evidence, history.names, history.values)
    figure.axes[0].set_title(f"{history.method}: {history.message}", fontsize=10)
    return figure


def training_history(history: EvidenceHistory) -> Figure:
    """Plot evidence and loss over the epochs, and the hyperparameters on a log scale below."""
    figure = _history("epoch", history.epochs, history.evidence, history.names, history.values)
    top, joint = figure.axes[0], [-loss for loss in history.loss]
    top.plot(range(1, len(joint) + 1), joint, color="#b0b0b0", lw=1, zorder=0)
    top.plot(history.epochs[history.best], history.evidence[history.best], "o", color=DARK_BLUE, mfc="none", ms=9)
    top.legend(["evidence", "log joint", "best evidence"], fontsize=8)
    lower_quartile = sorted(history.evidence)[len(history.evidence) // 4]  # the first values may be far below
    top.set_ylim(*_with_margin(lower_quartile, max(*history.evidence, *joint)))
    top.set_ylabel("nats")
    return figure


def variational_history(history: VariationalHistory) -> Figure:
    """Plot both ELBOs over the steps, and the norm of the natural gradient on a log scale below.

    The axis of the ELBOs shows three quarters of the values of each: the first ones may be far below.
    """
    figure = Figure(figsize=(6.4, 5.2 if history.steps else 2.6), layout="constrained")
    if history.steps:
        top, bottom = figure.subplots(2, 1, sharex=True)
        _bounds(top, history)
    else:
        bottom = figure.subplots()
    bottom.semilogy(range(1, len(history) + 1), history.natural_gradient, color=DARK_BLUE, lw=1)
    bottom.set(xlabel="step", ylabel="norm of the natural gradient")
    bottom.yaxis.set_major_formatter(LogFormatter())
    bottom.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _bounds(axes: Axes, history: VariationalHistory) -> None:
    """Plot both ELBOs with their standard errors."""
    both = (("network", history.elbo_nn, history.elbo_nn_error, DARK_BLUE, "o"),
            ("linearized network", history.elbo_glm, history.elbo_glm_error, ORANGE, "s"))
    low, high = math.inf, -math.inf
    for label, values, errors, color, marker in both:
        axes.errorbar(history.steps, values, errors, label=label, color=color, marker=marker, ms=3)
        ends = sorted(end for end in map(float.__sub__, values, errors) if math.isfinite(end))
        if ends:
            low, high = min(low, ends[len(ends) // 4]), max(high, *filter(math.isfinite, values))
    if math.isfinite(low):
        axes.set_ylim(*_with_margin(low, high))
    axes.set_ylabel("ELBO, nats")
    axes.legend(fontsize=8)


def _history(
    axis: str, steps: Sequence[int], evidence: Sequence[float], names: Sequence[str], values: Sequence[Sequence[float]]
) -> Figure:
    """Plot the evidence over steps or epochs, and hyperparameters on a log scale below."""
    figure = Figure(figsize=(6.4, 5.2), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    marker = "." if len(steps) < 40 else None
    top.plot(steps, evidence, color=DARK_BLUE, marker=marker)
    top.set_ylabel("evidence, nats")
    for number, name in enumerate(names[:_MOST_LINES]):
        bottom.plot(steps, [row[number] for row in values], label=name, marker=marker)
    bottom.set_yscale("log" if all(value > 0 for row in values for value in row[:_MOST_LINES]) else "symlog")
    shown = f"\n(first {_MOST_LINES} of {len(names)})" if len(names) > _MOST_LINES else ""
    bottom.set(xlabel=axis, ylabel="hyperparameter" + shown)
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    longest = max(map(len, names), default=0)
    if len(names) > _MOST_INSIDE or longest > _LONG:  # the legend would cover the lines
        figure.legend(fontsize=8, ncols=max(1, min(4, 100 // (longest + 8))), loc="outside lower center")
    else:
        bottom.legend(fontsize=8, ncols=2)
    return figure


def _with_margin(low: float, high: float) -> tuple[float, float]:
    """Axis limits a little beyond both values."""
    margin = 0.15 * (high - low) or 1.0
    return low - margin, high + margin
