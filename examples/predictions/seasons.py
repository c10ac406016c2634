"""A season that a network takes for noise, and that its residuals show.

    python examples/predictions/seasons.py --threads 1

A made series of 20 years has a trend, a season of 12 months and normal noise. The training data are 160 months of the
first 18 years; the others are test data, and so are the two years after them. `LaplaceRegressor` is fitted without
Fourier features and by default. Beside it stand scikit-learn's Gaussian processes with a squared exponential kernel,
and with the kernel of such series: a trend, and a period that is optimized from 10, 12 and 15 months, the best by the
evidence. Figures are means over five draws: root mean squared errors and log likelihoods of standardized targets, nats
a month, and the period that was found.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, ExpSineSquared, WhiteKernel

import ntk_laplace as ntkl

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _shared import machine, parser, table, write

MONTHS, KNOWN, TRAINING = 240, 216, 160


@dataclass(frozen=True)
class Series:
    """Months, standardized values, and which of them are training data."""

    month: np.ndarray
    value: np.ndarray
    training: np.ndarray

    @classmethod
    def made(cls, seed: int) -> Series:
        """A draw."""
        random, month = np.random.default_rng(seed), np.arange(float(MONTHS))
        year = month / 12.0
        value = 0.3 * year + 0.01 * year**2 + np.sin(2 * np.pi * year + random.uniform(0, 6))
        value = value + 0.4 * np.sin(4 * np.pi * year) + 0.2 * random.normal(size=MONTHS)
        training = np.isin(month, random.permutation(KNOWN)[:TRAINING])
        return cls(month, (value - value[training].mean()) / value[training].std(), training)

    @property
    def x(self) -> np.ndarray:
        """Inputs, (N, 1)."""
        return self.month[:, None]


def process(series: Series, period: float | None, restarts: int) -> GaussianProcessRegressor:
    """A Gaussian process of months over 100; with a period its kernel adds one to the trend."""
    kernel = ConstantKernel(1.0) * RBF(1.0) + WhiteKernel(0.1)
    if period is not None:
        kernel = kernel + ConstantKernel(1.0) * RBF(10.0) * ExpSineSquared(1.0, period / 100.0)
    model = GaussianProcessRegressor(kernel, n_restarts_optimizer=restarts, random_state=0)
    return model.fit(series.x[series.training] / 100.0, series.value[series.training])


def fitted(series: Series, small: bool) -> dict[str, tuple[np.ndarray, np.ndarray, float | None]]:
    """Mean, standard deviation and period of each model, at all months."""
    found, epochs, restarts = {}, 20 if small else 300, 0 if small else 2
    for name, options in {"network": {"fourier_features": 0}, "network, Fourier features": {}}.items():
        model = ntkl.LaplaceRegressor(likelihood="gaussian", epochs=epochs, random_state=0, **options)
        if small and options:
            model.set_params(precision=1.0)  # from one start
        model.fit(series.x[series.training], series.value[series.training])
        periods = [period for _, period in model.fourier_features_]
        found[name] = *model.predict(series.x, return_std=True), next(iter(periods), None)
    found["GP, squared exponential"] = *process(series, None, restarts).predict(series.x / 100.0, return_std=True), None
    best = max((process(series, period, restarts) for period in ((12.0,) if small else (10.0, 12.0, 15.0))),
               key=lambda one: one.log_marginal_likelihood_value_)
    period = 100.0 * best.kernel_.get_params()["k2__k2__periodicity"]
    found["GP, trend and period"] = *best.predict(series.x / 100.0, return_std=True), period
    return found


def scores(series: Series, mean: np.ndarray, std: np.ndarray) -> dict[str, float]:
    """Of the months between, and of the two years after the training data."""
    later, found = series.month >= KNOWN, {}
    for name, part in {"between": ~series.training & ~later, "after": later}.items():
        error = series.value[part] - mean[part]
        density = -0.5 * ((error / std[part]) ** 2 + np.log(2 * np.pi * std[part] ** 2))
        found |= {f"rmse {name}": float(np.sqrt((error**2).mean())), f"nats {name}": float(density.mean())}
    return found


def picture(series: Series, found: dict[str, tuple[np.ndarray, np.ndarray, float | None]]) -> Figure:
    """The series with two standard deviations of the network without and with Fourier features."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    for axes, name in zip(figure.subplots(2, 1, sharex=True, sharey=True), list(found)[:2], strict=True):
        mean, std, period = found[name]
        axes.fill_between(series.month, mean - 2 * std, mean + 2 * std, color="tab:blue", alpha=0.2, lw=0)
        axes.plot(series.month, mean, color="tab:blue", lw=1)
        axes.plot(series.month[series.training], series.value[series.training], ".k", ms=3, label="training data")
        axes.plot(series.month[~series.training], series.value[~series.training], "x", color="tab:red", ms=3,
                  label="test data")
        axes.axvline(KNOWN - 0.5, color="0.6", lw=0.8, ls="--")
        axes.set_title(name if period is None else f"{name}: period {period:.4g} months", fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylabel("value")
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    axes.set_xlabel("month")
    return figure


def main() -> None:
    """Run, print, draw, write."""
    options = parser(__doc__, "seasons").parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")  # of a network that misses the season, and of bounds of kernels
    options.out.mkdir(parents=True, exist_ok=True)
    cases: dict[str, list[dict[str, Any]]] = {}
    for seed in range(1 if options.small else 5):
        series = Series.made(seed)
        found = fitted(series, options.small)
        if seed == 0:
            picture(series, found).savefig(options.out / "seasons.png", dpi=110)
        for name, (mean, std, period) in found.items():
            cases.setdefault(name, []).append(scores(series, mean, std) | {"period": period})
    columns = ["rmse between", "nats between", "rmse after", "nats after"]
    rows = []
    for name, own in cases.items():
        periods = [case["period"] for case in own if case["period"] is not None]
        told = f"{min(periods):.2f} to {max(periods):.2f}" if periods else "-"
        rows.append([name, *(f"{np.mean([case[column] for case in own]):.2f}" for column in columns), told])
    print(table(["model", *columns, "period, months"], rows))
    write(options.out / "summary.json", {"machine": machine(options.threads), "cases": cases})


if __name__ == "__main__":
    main()
