"""What the rows say: scores of each method, and paired differences with errors clustered by data set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from _shared import table

__all__ = ["DEVELOPMENT", "FOLDS", "NAMES", "PATH", "REFITTED", "STARTS", "Comparison", "Results", "clustered",
           "report"]

DEVELOPMENT = ("boston", "yacht", "energy", "banana", "ionosphere")  # the path's settings were found on these
PATH, STARTS, REFITTED, FOLDS, RETRAINED = "recommended", "two_starts", "refitted", "folds", "retrained"
RIVALS = ("network", "calibrated", "tuned_decay", "ensemble", "calibrated_ensemble", "dropout", "laplace_kron",
          "laplace_last_layer", "leave_one_out", RETRAINED, "evidence_network", "evidence_posterior")
NAMES = {PATH: "the path", STARTS: "the path from two starts", REFITTED: "the refitted path",
         FOLDS: "the path calibrated by folds", RETRAINED: "the retrained network"}
Run = tuple[str, int, str]


def clustered(values: Sequence[float], clusters: Sequence[str]) -> tuple[float, float]:
    """Mean, and its standard error if values of one cluster may depend on each other; not a number for one cluster."""
    values_, names = np.asarray(values, dtype=float), np.asarray(clusters)
    mean, own = values_.mean(), np.unique(names)
    if len(own) < 2:
        return float(mean), math.nan
    sums = [(values_[names == name] - mean).sum() for name in own]
    return float(mean), float(math.sqrt(np.square(sums).sum() * len(own) / (len(own) - 1)) / len(values_))


@dataclass(frozen=True)
class Comparison:
    """Paired differences of log likelihood, nats a point."""

    runs: int
    wins: int
    mean: float
    error: float
    worst: tuple[float, str]


class Results:
    """Rows of the file by run and method. Methods without a weight decay of their own stand beside each."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows = [row for row in rows if "error" not in row]
        self._found = {(row["problem"], row["seed"], row["setting"], row["method"]): row for row in self.rows}
        own = {(row["problem"], row["seed"], row["setting"]) for row in self.rows}
        self.runs: list[Run] = sorted(run for run in own if run[2] != "any") or sorted(own)

    def get(self, run: Run, method: str) -> dict[str, Any] | None:
        """The row of a method in a run."""
        return self._found.get((*run, method)) or self._found.get((run[0], run[1], "any", method))

    def of(self, classes: bool, judged: bool) -> list[Run]:
        """Runs of one kind, on the development sets or on the others."""
        kinds = {row["problem"]: row["classes"] is not None for row in self.rows}
        return [run for run in self.runs if kinds[run[0]] is classes and (run[0] not in DEVELOPMENT) is judged]

    def compare(self, method: str, rival: str, runs: Sequence[Run]) -> Comparison | None:
        """A method less its rival, in the runs that have both."""
        pairs = [(run, self.get(run, method), self.get(run, rival)) for run in runs]
        both = [(run, a["log_likelihood"] - b["log_likelihood"]) for run, a, b in pairs if a and b]
        if not both:
            return None
        values = [value for _, value in both]
        mean, error = clustered(values, [run[0] for run, _ in both])
        worst = min((value, "/".join(map(str, run))) for run, value in both)
        return Comparison(len(both), sum(value > 0 for value in values), mean, error, worst)

    def scores(self, method: str, runs: Sequence[Run]) -> dict[str, float]:
        """Means over the runs that have it; of the time, the median relative to a plain training."""
        own = [row for run in runs if (row := self.get(run, method))]
        if not own:
            return {}
        names = ("log_likelihood", "accuracy", "rmse", "ece", "coverage", "auroc", "auroc_uncalibrated")
        found = {name: float(np.mean([row[name] for row in own])) for name in names if name in own[0]}
        return found | {"time": float(np.median([row["seconds"] / row["training"] for row in own])), "runs": len(own)}

    def recovered(self, runs: Sequence[Run]) -> list[float]:
        """Share of the way from the network to the path that retraining goes, where the path is ahead."""
        found = []
        for run in runs:
            rows = [self.get(run, method) for method in ("network", PATH, RETRAINED)]
            if all(rows):
                network, path, retrained = (row["log_likelihood"] for row in rows if row)
                found += [(retrained - network) / (path - network)] if path > network + 0.05 else []
        return found


def report(results: Results, methods: Sequence[str]) -> str:
    """Tables of scores and of comparisons, for each kind of responses."""
    parts = []
    for classes, kind in ((True, "classification"), (False, "regression")):
        for judged, which in ((True, "data chosen before looking"), (False, "development sets")):
            runs = results.of(classes, judged)
            if runs:
                parts += [f"{kind}, {which}: {len(runs)} runs on {len({run[0] for run in runs})} data sets"]
                parts += [_scores(results, methods, runs), *_comparisons(results, runs)]
                if shares := results.recovered(runs):
                    parts += [f"retraining recovers {np.median(shares):.0%} of the way to the path (median of "
                              f"{len(shares)}), at least 90 % in {np.mean(np.array(shares) >= 0.9):.0%}"]
    return "\n\n".join(parts)


def _scores(results: Results, methods: Sequence[str], runs: Sequence[Run]) -> str:
    heads: dict[str, str] = {
        "log_likelihood": "log likelihood", "accuracy": "accuracy", "rmse": "RMSE", "ece": "ECE",
        "coverage": "90 % coverage", "auroc": "unfamiliar", "auroc_uncalibrated": "uncalibrated", "time": "time",
        "runs": "runs",
    }
    found = {method: results.scores(method, runs) for method in methods}
    shown = [name for name in heads if any(name in one for one in found.values())]
    lines = [[method, *(f"{one[name]:.3g}" for name in shown)] for method, one in found.items() if one]
    return table(["method", *(heads[name] for name in shown)], lines)


def _comparisons(results: Results, runs: Sequence[Run]) -> list[str]:
    parts = []
    for path, name in NAMES.items():
        lines = []
        for rival in (*RIVALS, PATH):
            if path != rival and (found := results.compare(path, rival, runs)):
                lines.append([rival, f"{found.wins} of {found.runs}", f"{found.mean:+.3f} ± {found.error:.3f}",
                              f"{found.worst[0]:+.3f} ({found.worst[1]})"])
        parts += [table([f"{name} against", "wins", "nats a point", "worst"], lines)] if lines else []
    return parts
