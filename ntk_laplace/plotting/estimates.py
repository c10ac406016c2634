"""Plots of sampled evidences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from ntk_laplace.plotting.style import BLUE, GREY, VERMILION, tidy

if TYPE_CHECKING:
    from ntk_laplace.posterior.estimates import ApproximationErrors

__all__ = ["approximation_errors"]


def approximation_errors(found: ApproximationErrors) -> Figure:
    """Three evidences from Laplace's to the network's, with bars of two standard errors and the steps between them.

    A ring marks an estimate that is not to be trusted.
    """
    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    axes = tidy(figure.add_subplot(), "What each approximation of the evidence hides")
    names = ("Laplace", "linearized model", "network")
    values = (found.laplace, found.linearized.value, found.network.value)
    errors = (found.laplace_error, found.linearized.standard_error, found.network.standard_error)
    trusted = (True, found.linearized.trusted, found.network.trusted)
    for row, (value, error, good) in enumerate(zip(values, errors, trusted, strict=True)):
        color = BLUE if good else VERMILION
        axes.errorbar(value, row, xerr=2 * error, fmt="o", ms=8, color=color, mfc=color if good else "white", capsize=5)
        words = f"{value:,.2f}" + (f" ± {error:.2g}" if error else "") + ("" if good else ", not to be trusted")
        axes.annotate(words.replace("-", "\N{MINUS SIGN}"), (value, row), xytext=(0, 10), textcoords="offset points",
                      ha="center", fontsize=9, color=GREY)  # fmt: skip
    steps = (("the Gaussian", found.gaussian), ("the linearization", found.linearization))
    for row, (name, (step, error)) in enumerate(steps):
        arrow = {"arrowstyle": "-|>", "color": GREY, "lw": 1.2, "shrinkA": 7, "shrinkB": 7}
        axes.annotate("", (values[row + 1], row + 1), xytext=(values[row], row), arrowprops=arrow)
        words = f"{name}: {step:+,.2f} ± {error:.2g}".replace("-", "\N{MINUS SIGN}")
        axes.annotate(words, (0.5 * (values[row] + values[row + 1]), row + 0.5), xytext=(14, 0), fontsize=9, va="center",
                      textcoords="offset points")  # fmt: skip
    axes.set(xlabel="evidence, nats", ylim=(2.5, -0.6))
    axes.set_yticks(range(3), labels=names)
    axes.grid(False, axis="y")
    axes.margins(x=0.35)
    return figure
