"""What people have already, beside this library at each step of its path."""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _shared import parser
from _baselines import Baselines
from _ours import Ours
from _problems import IMAGES, TABLES, load, trained
from _scores import Method, score
from _summary import summary

import ntk_laplace as ntkl

DECAYS = {"wd": 5e-4, "over": 1e-6}  # coupled, of the mean loss
BASELINES = ("network", "calibrated", "tuned_decay", "ensemble", "calibrated_ensemble", "dropout", "laplace_kron",
             "laplace_last_layer")  # fmt: skip
OURS = ("posterior", "hyperparameters", "leave_one_out", "evidence_network", "online", "evidence_posterior",
        "recommended", "retrained")  # fmt: skip
WITHOUT_DECAY = {"tuned_decay", "evidence_network", "online", "evidence_posterior", "recommended"}


def runs(name: str, seed: int, options: argparse.Namespace, done: set[str]) -> Iterator[dict[str, Any]]:
    """Rows that the file does not have."""
    problem = load(name, options.data, seed, options.small)
    trained(replace(problem, recipe=replace(problem.recipe, epochs=1)), 0.0, seed)  # first calls cost more
    for setting in options.settings:
        baselines = Baselines(problem, DECAYS[setting], seed)
        ours = Ours(baselines)
        for method in options.methods:
            own = "any" if method in WITHOUT_DECAY else setting
            key = f"{name}/{seed}/{own}/{method}"
            if key in done:
                continue
            done.add(key)
            start = time.time()
            try:
                found = score(getattr(ours if method in OURS else baselines, method)(), problem)
            except ntkl.NTKLaplaceError as error:
                found = {"error": f"{type(error).__name__}: {error}"}
            yield {"key": key, "problem": name, "seed": seed, "setting": own, "method": method,
                   "classes": problem.classes, "training": baselines.whole[1], "wall": time.time() - start} | found


def main() -> None:
    arguments = parser(__doc__, "predictions")
    arguments.add_argument("--data", type=Path, help="folder with boston.npz and its like")
    arguments.add_argument("--problems", nargs="+", choices=[*TABLES, *IMAGES])
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--settings", nargs="+", choices=list(DECAYS), default=list(DECAYS))
    arguments.add_argument("--methods", nargs="+", choices=[*BASELINES, *OURS], default=[*BASELINES, *OURS])
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / "table.jsonl"
    rows = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    done = {row["key"] for row in rows}
    for seed in range(options.seeds):
        for name in options.problems or TABLES:
            for row in runs(name, seed, options, done):
                rows.append(row)
                with kept.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(row["key"], row.get("log_likelihood", row.get("error")), f"{row.get('seconds', 0):.2f}", f"{row['wall']:.1f}", flush=True)
    print(summary(rows))


if __name__ == "__main__":
    main()
