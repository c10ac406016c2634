"""Plots of the evidence and the hyperparameters during an optimization or a training."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ntk_laplace.plotting.style import DARK_BLUE, ORANGE
from ntk_laplace.posterior.hyperparameters import HyperparameterHistory
from ntk_laplace.training import EvidenceHistory
from ntk_laplace.variational_inference.result import VariationalHistory

__all__ = ["hyperparameter_history", "training_history", "variational_history"]

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
    top = figure.axes[0]
    top.plot(range(1, len(history.loss) + 1), [-loss for loss in history.loss], color="#b0b0b0", lw=1, zorder=0)
    top.plot(history.epochs[history.best], history.evidence[history.best], "o", color=DARK_BLUE, mfc="none", ms=9)
    top.legend(["evidence", "log joint", "best evidence"], fontsize=8)
    top.set_ylim(*_window(history.evidence, [-loss for loss in history.loss]))
    top.set_ylabel("nats")
    return figure


def variational_history(history: VariationalHistory) -> Figure:
    """Plot both ELBOs over the steps, and the norm of the natural gradient on a log scale below."""
    figure = Figure(figsize=(6.4, 5.2), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    both = (("network", history.elbo_nn, history.elbo_nn_error, DARK_BLUE, "o"),
            ("linearized network", history.elbo_glm, history.elbo_glm_error, ORANGE, "s"))
    for label, values, errors, color, marker in both:
        top.errorbar(history.steps, values, errors, label=label, color=color, marker=marker, ms=3)
    if history.steps:
        values = [value for own in (history.elbo_nn, history.elbo_glm) for value in own]
        top.set_ylim(*_window(values, values))
        top.legend(fontsize=8)
    top.set_ylabel("ELBO, nats")
    bottom.semilogy(range(1, len(history) + 1), history.natural_gradient, color=DARK_BLUE, lw=1)
    bottom.set(xlabel="step", ylabel="norm of the natural gradient")
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


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
        bottom.semilogy(steps, [row[number] for row in values], label=name, marker=marker)
    shown = f"\n(first {_MOST_LINES} of {len(names)})" if len(names) > _MOST_LINES else ""
    bottom.set(xlabel=axis, ylabel="hyperparameter" + shown)
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    longest = max(map(len, names), default=0)
    if len(names) > _MOST_INSIDE or longest > _LONG:  # the legend would cover the lines
        figure.legend(fontsize=8, ncols=max(1, min(4, 100 // (longest + 8))), loc="outside lower center")
    else:
        bottom.legend(fontsize=8, ncols=2)
    return figure


def _window(evidence: list[float], joint: list[float]) -> tuple[float, float]:
    """Axis limits from a little below the evidence's lower quartile to a little above all values."""
    low, high = sorted(evidence)[len(evidence) // 4], max(*evidence, *joint)
    margin = 0.15 * (high - low) or 1.0
    return low - margin, high + margin
