"""Where leave-one-out is to be trusted: its mean log density beside that of test data, and the measured diagnostics.

    python examples/predictions/guards.py --data DIR --threads 1 --out guards

Posteriors on the networks of table.py: as trained with ordinary or almost no weight decay; after
`fit_hyperparameters` at fixed weights; refitted by leave-one-out (regression); retrained; trained with evidence. A case
is bad if leave-one-out is off by more than 0.1 nats a point, and by more than two standard errors of the difference:
both are means over points, of the training data and of the test data.
The script prints how often `Reliability` (for the posterior as it is) and `PredictiveFit` (for the fitted predictive)
speak in bad and in good cases, and the area under the ROC curve of each diagnostic. Every case is added to
OUT/guards.jsonl, and one that is there already is not computed again.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _baselines import Baselines
from _ours import BOUNDS, Ours
from _shared import parser
from _tables import FILES, TABLES, Problem, load
from table import DECAYS

import ntk_laplace as ntkl
from ntk_laplace import metrics

OFF = 0.1  # nats a point
DIAGNOSTICS = ("decrement", "low_prior_ratio", "high_leverage", "precision_spread", "effective_share", "evidence_loss")


def posteriors(ours: Ours, problem: Problem, data: tuple[torch.Tensor, torch.Tensor], first: bool) -> Iterator[
    tuple[str, Callable[[], ntkl.Posterior]]
]:
    """Kinds of posteriors, and what makes them; those without weight decay for the first setting only."""

    def at_fixed_weights() -> ntkl.Posterior:
        found = ours.as_trained()
        prior = ntkl.GaussianPrior(float(found.prior.precision[0].detach()), groups="layer")
        found = ours.laplace(ours.baselines.whole[0], found.likelihood, prior)
        found.fit_hyperparameters(parameters=ours.moving, bounds=BOUNDS, progress=False)
        return found

    yield "as trained", ours.as_trained
    yield "evidence precisions", at_fixed_weights
    yield "retrained", lambda: ours.as_trained().retrain(data, predictive=None)
    if problem.classes is None:
        yield "refit", lambda: ours.as_trained().refit("loo")
    if first:
        yield "evidence training", lambda: ours.with_evidence().posterior


def case(posterior: ntkl.Posterior, problem: Problem) -> dict[str, Any]:
    """Leave-one-out beside test data, of the posterior as it is and with the calibration by leave-one-out."""
    found = posterior.leave_one_out(strict=False)
    fit = posterior.fit_predictive("loo", strict=False)
    measured = found.reliability
    row: dict[str, Any] = {
        "decrement": measured.decrement, "low_prior_ratio": -measured.prior_ratio,
        "high_leverage": measured.high_leverage,
        "effective_share": measured.effective_share, "evidence_loss": -(measured.gain or 0.0),
        "precision_spread": measured.precision_spread if measured.moved else 1.0,
        "moved": measured.moved, "posterior speaks": not measured.trusted, "fitted speaks": not fit.trusted,
    }
    own = float(found.log_density.mean())  # at the weights
    own_error = float(found.log_density.std()) / math.sqrt(len(found.log_density))
    for name, left_out, error, calibrated in (
        ("posterior", own, own_error, False), ("fitted", fit.after, fit.standard_error, True),
    ):
        scores = posterior.predict(problem.x_test, calibrated=calibrated).log_prob(problem.y_test)
        row |= {f"{name} gap": left_out - float(scores.mean()), f"{name} test": float(scores.mean()),
                f"{name} error": math.hypot(error, float(scores.std()) / math.sqrt(len(scores)))}
    return row


def report(rows: list[dict[str, Any]]) -> str:
    """How often the guards speak, by kind, and the area under each diagnostic's ROC curve."""
    columns = "density", "model", "posterior", "cases", "off", "speaks if off", "speaks if not", "silent mean gap"
    head = f"| {' | '.join(columns)} |"
    lines = [head, "|" + "---|" * 8]
    for density in ("posterior", "fitted"):
        for classes in (True, False):
            own = [row for row in rows if row["classes"] == classes]
            words = f"{density} | {'classes' if classes else 'regression'}"
            bad = {row["key"]: abs(row[f"{density} gap"]) > max(OFF, 2 * row[f"{density} error"]) for row in own}
            for kind in [*dict.fromkeys(row["kind"] for row in own), "all"]:
                some = [row for row in own if kind in ("all", row["kind"])]
                said = {off: [row[f"{density} speaks"] for row in some if bad[row["key"]] == off]
                        for off in (True, False)}
                silent = [abs(row[f"{density} gap"]) for row in some if not row[f"{density} speaks"]]
                gap = f"{sum(silent) / len(silent):.2f}" if silent else ""
                lines.append(f"| {words} | {kind} | {len(some)} | {len(said[True])} | {sum(said[True])} | "
                             f"{sum(said[False])} | {gap} |")
            areas = []
            for name in DIAGNOSTICS:
                off, on = ([row[name] for row in own if bad[row["key"]] == wanted] for wanted in (True, False))
                if off and on:
                    areas.append(f"{name} {metrics.detection_auroc(on, off):.2f}")
            lines.append(f"| {words} | ROC areas: {', '.join(areas)} | | | | | |")
    return "\n".join(lines)


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__, "guards")
    arguments.add_argument("--data", type=Path, help="folder with boston.npz and its like")
    arguments.add_argument("--problems", nargs="+", choices=TABLES, help="default: all tables")
    arguments.add_argument("--seeds", type=int, default=2, help="networks and splits of each problem (default 2)")
    options: argparse.Namespace = arguments.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / "guards.jsonl"
    rows = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    done = {row["key"] for row in rows}
    for seed in range(options.seeds):
        for name in options.problems or [name for name in TABLES if options.data or name not in FILES]:
            problem = load(name, options.data, seed, options.small)
            for setting, decay in DECAYS.items():
                ours = Ours(Baselines(problem, decay, seed))
                kinds = posteriors(ours, problem, (problem.x, problem.y), setting == next(iter(DECAYS)))
                for kind, make in kinds:
                    key = f"{name}/{seed}/{setting}/{kind}"
                    if key in done:
                        continue
                    row = {"key": key, "kind": kind, "classes": problem.classes is not None}
                    try:
                        row |= case(make(), problem)
                    except ntkl.NTKLaplaceError as error:
                        print(key, error, flush=True)
                        continue
                    rows.append(row)
                    with kept.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                    print(key, f"gap {row['posterior gap']:+.3f}, fitted {row['fitted gap']:+.3f}", flush=True)
    print(f"\n{report(rows)}")


if __name__ == "__main__":
    main()
