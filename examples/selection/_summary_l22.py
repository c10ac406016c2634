"""What the architecture study says: rank correlations, regrets, the check of the priors, and pictures."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from _shared import table
from matplotlib.figure import Figure
from scipy.stats import spearmanr

__all__ = ["SCORES", "TESTS", "Column", "heat_map", "printed", "scatter", "summary"]

PRIORS = ("1e-6", "1e-4", "1e-3", "1e-2", "1e-1", "1", "1e2", "layerwise")
_DELTA = 0.025  # of the draws of the data, in McAllester's bound
_COLDEST = 0.25  # temperature at which the search for it ends


@dataclass(frozen=True)
class Column:
    """All networks of one data set at one prior; `seeds` has one list of rows for each seed."""

    study: str
    count: int
    prior: str
    seeds: list[list[dict[str, Any]]]

    @property
    def place(self) -> tuple[int, str, int, int]:
        """Where it stands in tables and pictures: few networks last, then by data, N and prior."""
        return -len(self.seeds[0]), self.study.split()[0].lower(), self.count, PRIORS.index(self.prior)

    @property
    def label(self) -> str:
        """Its prior, for headings."""
        return self.prior if self.prior == "layerwise" else f"λ = {self.prior}"


def _of(name: str, structure: str = "kfac") -> Callable[[dict[str, Any], int], float | None]:
    return lambda row, count: row["structures"].get(structure, {}).get(name)


def _bound(row: dict[str, Any], count: int) -> float | None:
    """Minus McAllester's bound of the Gibbs risk, not cut at 1."""
    own = row["structures"]["kfac"]
    if "kl" not in own:
        return None
    return -own["gibbs_risk"] - math.sqrt((own["kl"] + math.log(count / _DELTA) + 2) / (2 * count - 1))


SCORES: dict[str, Callable[[dict[str, Any], int], float | None]] = {
    "evidence (KFAC)": _of("lml"),
    "evidence (diagonal)": _of("lml", "diag"),
    "CLML, scaled and tempered": _of("clml"),
    "CLML, 20 joint draws": _of("clml_draws"),
    "LOO, last layer": lambda row, count: row["loo"],
    "validation, BMA": _of("bma_validation"),
    "validation, network": _of("map_validation"),
    "PAC-Bayes bound": _bound,
    "most parameters": lambda row, count: row["parameters"],
}
"""More is better for each."""

TESTS = {"scaled": "the scaled and tempered average", "bma": "the Bayesian average as it is", "map": "the network"}
"""Predictions of the test data: each has a log likelihood and an accuracy."""


CHECKS: dict[str, tuple[Callable[[list[float]], Any], Callable[[dict[str, Any], int], float]]] = {
    "vague": (np.mean, lambda own, count: own["vague"]),
    "narrow": (np.mean, lambda own, count: own["narrow"]),
    "gap / abs(evidence)": (np.median, lambda own, count: own["gap"] / abs(own["lml"])),
    "γ / N": (np.median, lambda own, count: own["effective"] / count),
    "average below network": (np.mean, lambda own, count: own["bma_validation"] < own["map_validation"]),
    "fitted scale": (np.median, lambda own, count: own["scale"]),
}
"""What a user can measure without test data, over the networks of a column: shares and medians."""


def summary(column: Column) -> dict[str, Any]:
    """Rank correlations and regrets of every score for every seed, the check of the prior, and all rows."""
    found: dict[str, Any] = {"study": column.study, "count": column.count, "prior": column.prior, "scores": {}}
    for name, score in SCORES.items():
        for rows in column.seeds:
            values = [score(row, column.count) for row in rows]
            if all(value is not None for value in values):
                own = found["scores"].setdefault(name, {})
                for test in TESTS:
                    for kind in ("log_likelihood", "accuracy"):
                        tested = [row["structures"]["kfac"][f"{test}_{kind}"] for row in rows]
                        each = own.setdefault(f"{test}_{kind}", {"rho": [], "regret": []})
                        each["rho"].append(_correlation(values, tested))
                        each["regret"].append(_regret(values, tested))
    found["check"] = {
        name: [float(reduce([value(row["structures"]["kfac"], column.count) for row in rows])) for rows in column.seeds]
        for name, (reduce, value) in CHECKS.items()
    }
    evidence, size = SCORES["evidence (KFAC)"], SCORES["most parameters"]
    found["evidence_and_size"] = [
        _correlation(*([score(row, column.count) for row in rows] for score in (evidence, size)))
        for rows in column.seeds
    ]
    return found | {"rows": column.seeds}


def _correlation(values: list[float], tested: list[float]) -> float | None:
    """Spearman's ρ; None where one side is constant."""
    if len(set(values)) == 1 or len(set(tested)) == 1:
        return None
    return float(spearmanr(values, tested).statistic)


def _regret(values: list[float], tested: list[float]) -> float:
    """What the choice by a score gives away against the best of the test, on average over ties."""
    chosen = [t for value, t in zip(values, tested, strict=True) if value == max(values)]
    return max(tested) - sum(chosen) / len(chosen)


def _mean(values: list[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan


def _with_range(values: list[float | None], form: str = "{:.2f}") -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    if len(known) == 1:
        return form.format(known[0])
    return f"{form.format(_mean(values))} ({form.format(min(known))} to {form.format(max(known))})"


def printed(columns: list[Column], results: list[dict[str, Any]]) -> str:
    """Tables: ρ with every test score, regrets, and the check of the prior beside what the evidence did."""
    parts = []
    for key, title, form in (
        ("rho", "Spearman's ρ, mean (range over seeds)", "{:.2f}"),
        ("regret", "Regret of the choice, nats a point or share of the images", "{:.3f}"),
    ):
        for test, words in TESTS.items():
            for kind in ("log_likelihood", "accuracy"):
                head = ["data", "prior", "seeds", *SCORES]
                lines = [
                    [column.study, column.label, str(len(column.seeds)), *(
                        _with_range(found["scores"][name][f"{test}_{kind}"][key], form)
                        if name in found["scores"] else "" for name in SCORES
                    )] for column, found in zip(columns, results, strict=True)
                ]
                parts.append(f"{title}: {kind.replace('_', ' ')} of {words}\n{table(head, lines)}")
    head = ["data", "prior", *CHECKS, "ρ with P", "regret of the evidence", "of the CLML", "misled"]
    lines = []
    for column, found in zip(columns, results, strict=True):
        regrets = [found["scores"][name]["scaled_log_likelihood"]["regret"]
                   for name in ("evidence (KFAC)", "CLML, scaled and tempered")]
        lines.append([
            column.study, column.label, *(f"{_mean(found['check'][name]):.2g}" for name in CHECKS),
            _with_range(found["evidence_and_size"]), *(_with_range(each, "{:.3f}") for each in regrets),
            f"{sum(mine > other for mine, other in zip(*regrets, strict=True))} of {len(column.seeds)}",
        ])
    parts.append(f"What can be measured without test data: shares of the networks, and medians\n{table(head, lines)}")
    parts.append(_families(columns))
    best = ["data", "prior", "best accuracy", "median accuracy", "best log likelihood", "median log likelihood"]
    lines = []
    for column in columns:
        tested = [[row["structures"]["kfac"] for row in rows] for rows in column.seeds]
        cells = []
        for kind in ("scaled_accuracy", "scaled_log_likelihood"):
            for reduce in (np.max, np.median):
                cells.append(_with_range([float(reduce([own[kind] for own in each])) for each in tested], "{:.3f}"))
        lines.append([column.study, column.label, *cells])
    parts.append(f"The networks\n{table(best, lines)}")
    return "\n\n".join([*parts, _tuning(columns)])


def _tuning(columns: list[Column]) -> str:
    """What scale and temperature did to the test, and the lowest of Seeger's bounds."""
    shares: dict[str, Callable[[dict[str, Any]], bool]] = {
        "temperature at its bound": lambda own: own["temperature"] < 1.001 * _COLDEST,
        "scaled average above network": lambda own: own["scaled_log_likelihood"] > own["map_log_likelihood"],
    }
    lines = []
    for column in columns:
        tested = [[row["structures"]["kfac"] for row in rows] for rows in column.seeds]
        bounds = [[own["bound"] for own in each if "bound" in own] for each in tested]
        lines.append([
            column.study, column.label, *(_with_range([float(np.mean([holds(own) for own in each])) for each in tested])
                                          for holds in shares.values()),
            _with_range([min(each) if each else None for each in bounds]),
        ])
    head = ["data", "prior", *shares, "lowest of Seeger's bounds"]
    return f"Tuning: shares of the networks, mean (range over seeds)\n{table(head, lines)}"


def _families(columns: list[Column]) -> str:
    """ρ with the accuracy of the scaled average within families of networks."""
    names = "evidence (KFAC)", "CLML, scaled and tempered", "validation, BMA", "validation, network"
    families: dict[str, Callable[[dict[str, Any]], bool]] = {
        "CNNs": lambda row: row["network"].startswith("conv"),
        "the ten widest CNNs": lambda row: row["network"].endswith((" 12", " 16")),
        "residual networks": lambda row: row["network"].startswith("res"),
    }
    lines = []
    for column in columns:
        for family, belongs in families.items():
            chosen = [[row for row in rows if belongs(row)] for rows in column.seeds]
            if all(len(rows) >= 4 for rows in chosen):
                lines.append([column.study, column.label, family, str(len(chosen[0])), *(_with_range([
                    _correlation([SCORES[name](row, column.count) for row in rows],
                                 [row["structures"]["kfac"]["scaled_accuracy"] for row in rows]) for rows in chosen
                ]) for name in names)])
    heads = ["data", "prior", "family", "networks", *names]
    return f"Families: ρ with the accuracy of the scaled and tempered average\n{table(heads, lines)}"


def heat_map(columns: list[Column], results: list[dict[str, Any]], test: str) -> Figure:
    """Above: mean ρ with the test log likelihood. Below: the regret in nats, and in accuracy points beneath it."""
    figure = Figure(figsize=(max(7.0, 2.6 + 0.52 * len(columns)), 8.4), layout="constrained")  # room for the title
    figure.suptitle(f"Which score chooses the network? Test scores of {TESTS[test]}", fontsize=11)
    panels = figure.subplots(2, 1)
    rho, nats, points = (np.full((len(SCORES), len(columns)), np.nan) for _ in range(3))
    for place, found in enumerate(results):
        for row, name in enumerate(SCORES):
            if name in found["scores"]:
                own = found["scores"][name]
                rho[row, place] = _mean(own[f"{test}_log_likelihood"]["rho"])
                nats[row, place] = _mean(own[f"{test}_log_likelihood"]["regret"])
                points[row, place] = 100 * _mean(own[f"{test}_accuracy"]["regret"])
    labels = [column.label for column in columns]
    for axes, values, options in (
        (panels[0], rho, {"cmap": "RdBu", "vmin": -1, "vmax": 1}),
        (panels[1], nats, {"cmap": "Oranges", "vmin": 0, "vmax": 0.3}),
    ):
        axes.imshow(np.ma.masked_invalid(values), aspect="auto", **options)
        axes.set_yticks(range(len(SCORES)), list(SCORES), fontsize=8)
        axes.set_xticks(range(len(columns)), labels, rotation=90, fontsize=8)
        for (row, place), value in np.ndenumerate(values):
            if not math.isnan(value):
                words = f"{value:.2f}" if values is rho else f"{value:.2f}\n{points[row, place]:.1f}"
                dark = abs(value) > 0.65 if values is rho else value > 0.2
                axes.text(place, row, words, ha="center", va="center", fontsize=6.5, color="white" if dark else "black")
        begin = 0
        for place in range(1, len(columns) + 1):
            if place == len(columns) or columns[place].study != columns[begin].study:
                middle = (begin + place - 1) / 2
                words = columns[begin].study.replace(" networks", "").replace(", ", "\nonly ")
                if axes is panels[0]:
                    axes.text(middle, -0.65, words.replace(" ", "\n", 1), ha="center", fontsize=8)
                if place < len(columns):
                    axes.axvline(place - 0.5, color="black", linewidth=1.2)
                begin = place
    panels[0].set_title("Spearman's ρ with the test log likelihood, mean over seeds", fontsize=9, pad=38)
    panels[1].set_title("Regret of the choice: nats a point, and points of accuracy below", fontsize=9)
    return figure


def _tested(column: Column) -> list[float]:
    """The scaled average's test log likelihood of every network of the first seed."""
    return [row["structures"]["kfac"]["scaled_log_likelihood"] for row in column.seeds[0]]


def scatter(columns: list[Column]) -> Figure:
    """Evidence and CLML against the test log likelihood of the scaled average, of the first seed.

    A column whose networks are all at chance has no panel: its differences are of rounding.
    """
    shown = [column for column in columns if column.study == columns[0].study and np.ptp(_tested(column)) > 1e-3]
    figure = Figure(figsize=(2.2 * len(shown), 4.6), layout="constrained")
    panels = np.atleast_2d(figure.subplots(2, len(shown), squeeze=False))
    for place, column in enumerate(shown):
        rows = column.seeds[0]
        tested = _tested(column)
        for axes, name in zip(panels[:, place], ("evidence (KFAC)", "CLML, scaled and tempered"), strict=True):
            values = [SCORES[name](row, column.count) for row in rows]
            for family, marker in (("conv", "o"), ("res", "^")):
                own = [(v, t, row["parameters"]) for v, t, row in zip(values, tested, rows, strict=True)
                       if row["network"].startswith(family)]
                if own:
                    x, y, size = zip(*own, strict=True)
                    axes.scatter(x, y, c=np.log10(size), s=16, marker=marker, cmap="viridis", vmin=2, vmax=4.1)
            rho = _correlation(values, tested)
            axes.set_title(f"{column.label}: ρ = {rho:.2f}" if rho is not None else column.label, fontsize=8)
            axes.tick_params(labelsize=6.5)
            axes.set_xlabel(name, fontsize=7.5)
    for axes in panels[:, 0]:
        axes.set_ylabel("test log likelihood", fontsize=7.5)
    words = "circles are CNNs, triangles residual networks, brighter is larger"
    figure.suptitle(f"{columns[0].study}: {words}", fontsize=9)
    return figure
