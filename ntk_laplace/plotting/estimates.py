"""Plots of sampled evidences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ntk_laplace.plotting.style import BLUE, GREY, VERMILION, tidy

if TYPE_CHECKING:
    from ntk_laplace.posterior.estimates import ApproximationErrors


def approximation_errors(found: ApproximationErrors) -> Figure:
    """Three evidences from Laplace's to the network's, with bars of two standard errors and the steps between them.

    A ring marks an estimate that is not to be trusted.
    """
    figure = Figure(figsize=(7.8, 3.2), layout="constrained")
    axes = tidy(figure.add_subplot(), "What each approximation of the evidence hides")
    names = ("Laplace", "linearized model", "network")
    values = (found.laplace, found.linearized.value, found.network.value)
    errors = (found.laplace_error, found.linearized.standard_error, found.network.standard_error)
    trusted = (True, found.linearized.trusted, found.network.trusted)
    for row, (value, error, good) in enumerate(zip(values, errors, trusted, strict=True)):
        color = BLUE if good else VERMILION
        axes.errorbar(value, row, xerr=2 * error, fmt="o", ms=8, color=color, mfc=color if good else "white", capsize=5)
        _at_the_side(axes, row, _number(value, error) + ("" if good else " (not to be trusted)"), color)
    steps = (("the Gaussian", found.gaussian), ("the linearization", found.linearization))
    for row, (name, (step, error)) in enumerate(steps):
        arrow = {"arrowstyle": "-|>", "color": GREY, "lw": 1.2, "shrinkA": 7, "shrinkB": 7}
        axes.annotate("", (values[row + 1], row + 1), xytext=(values[row], row), arrowprops=arrow)
        _at_the_side(axes, row + 0.5, f"{name} {_number(step, error, '+')}", GREY)
    axes.set(xlabel="evidence, nats", ylim=(2.4, -0.4))
    axes.set_yticks(range(3), labels=names)
    axes.grid(False, axis="y")
    axes.margins(x=0.1)
    return figure


def _at_the_side(axes: Axes, row: float, words: str, color: str) -> None:
    axes.annotate(words, (1.0, row), xycoords=axes.get_yaxis_transform(), xytext=(8, 0), textcoords="offset points",
                  va="center", fontsize=9, color=color, annotation_clip=False)


def _number(value: float, error: float, sign: str = "") -> str:
    words = f"{round(value, 2) + 0.0:{sign},.2f}" + (f" ± {error:.2g}" if error else "")  # no minus zero
    return words.replace("-", "\N{MINUS SIGN}")
