"""What people have already, beside this library at each step of its path: the practitioner's table.

    python examples/predictions/table.py --data DIR --threads 1 --out predictions

Networks: MLPs 50-50, tanh and relu alternating, on up to 200 points of each table (with ``--data``: boston, concrete,
energy, yacht, snelson, australian, ionosphere and banana from DIR/*.npz; always four of scikit-learn, three made
ones, and five that were added last), full-batch Adam for 600 steps; or, if they are named with ``--problems``, three
convolutional networks on 1,000, 5,000 or 60,000 images of DIR/mnist.npz. Weight decay is ordinary ("wd", 5e-4 of the
mean loss) or almost none ("over").

Methods: the network; with a temperature, or noise, of 10 % held-out data ("calibrated"); its weight decay tuned on
them too; an ensemble of five, as it is and calibrated; dropout; laplace-torch, if it is installed (the extra
"benchmarks"). The library: the exact posterior as trained, after `fit_hyperparameters`, after
`fit_predictive("loo")`; training with evidence, with a precision for each column of a table and one for each further
layer: its network, its own KFAC posterior, the exact one, and that after `fit_predictive` ("recommended", the path),
that at the linear model's optimum ("refitted"), and the better by leave-one-out of two starts ("two_starts", where an
exact posterior is cheap); the path calibrated by five trainings without a fold ("folds"); the path with one precision
for each layer ("by_layer"); the network as it was brought, retrained.

Every result is added to OUT/table.jsonl, and a result that is there already is not computed again. At the end the
script prints scores, wins and paired differences of log likelihood, and writes OUT/summary.json. Seconds are CPU time.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _baselines import Baselines
from _ours import Ours
from _scores import score
from _shared import machine, parser, write
from _summary import FOLDS, NAMES, PATH, REFITTED, STARTS, Results, report
from _tables import FILES, IMAGES, TABLES, load, trained

import ntk_laplace as ntkl

DECAYS = {"wd": 5e-4, "over": 1e-6}  # coupled, of the mean loss
PEERS = ("laplace_kron", "laplace_last_layer")
BASELINES = ("network", "calibrated", "tuned_decay", "ensemble", "calibrated_ensemble", "dropout", *PEERS)
OURS = ("posterior", "hyperparameters", "leave_one_out", "evidence_network", "online", "evidence_posterior",
        "by_layer", PATH, STARTS, REFITTED, FOLDS, "retrained")
WITHOUT_DECAY = ("tuned_decay", "evidence_network", "online", "evidence_posterior", "by_layer", PATH, STARTS,
                 REFITTED, FOLDS)


def rows(name: str, seed: int, options: argparse.Namespace, done: set[str]) -> Iterator[dict[str, Any]]:
    """Results of a problem that the file does not have."""
    keys = {(setting, method): f"{name}/{seed}/{'any' if method in WITHOUT_DECAY else setting}/{method}"
            for setting in options.settings for method in options.methods}
    if done.issuperset(keys.values()):
        return
    problem = load(name, options.data, seed, options.small)
    trained(replace(problem, recipe=replace(problem.recipe, epochs=1)), 0.0, seed)  # first calls take longer
    for setting in options.settings:
        baselines = Baselines(problem, DECAYS[setting], seed)
        ours = Ours(baselines)
        for method in options.methods:
            key = keys[setting, method]
            if key in done:
                continue
            done.add(key)
            row = {"key": key, "problem": name, "seed": seed, "setting": key.split("/")[2], "method": method,
                   "classes": problem.classes, "training": baselines.whole[1]}
            try:
                yield row | score(getattr(ours if method in OURS else baselines, method)(), problem)
            except ntkl.NTKLaplaceError as error:  # a result too
                yield row | {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__, "predictions")
    arguments.add_argument("--data", type=Path, help="folder with boston.npz and its like, and mnist.npz")
    arguments.add_argument("--problems", nargs="+", choices=[*TABLES, *IMAGES], help="default: all tables")
    arguments.add_argument("--seeds", type=int, default=3, help="networks and splits of each problem (default 3)")
    arguments.add_argument("--settings", nargs="+", choices=DECAYS, default=list(DECAYS), help="weight decays")
    arguments.add_argument("--methods", nargs="+", choices=[*BASELINES, *OURS], default=[*BASELINES, *OURS])
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    if not Baselines.have_laplace_torch():
        options.methods = [method for method in options.methods if method not in PEERS]
    names = options.problems or [name for name in TABLES if options.data or name not in FILES]
    warnings.simplefilter("ignore")  # the file keeps what the library says of its numbers
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / "table.jsonl"
    found = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    done = {row["key"] for row in found}
    for seed in range(options.seeds):
        for name in names:
            for row in rows(name, seed, options, done):
                found.append(row)
                with kept.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(row["key"], row.get("error") or f"{row['log_likelihood']:.3f}", flush=True)
    results = Results([row for row in found if row["problem"] in names])
    kinds = {"classification": results.of(True, True), "regression": results.of(False, True)}
    compared = {
        f"{name} against".removeprefix("the "): {
            kind: {rival: vars(one) for rival in BASELINES if (one := results.compare(path, rival, runs))}
            for kind, runs in kinds.items()
        }
        for path, name in NAMES.items()
    }
    write(options.out / "summary.json", {"machine": machine(options.threads)} | compared)
    print(f"\n{report(results, [*BASELINES, *OURS])}")


if __name__ == "__main__":
    main()
