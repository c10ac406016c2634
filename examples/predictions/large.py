"""Tables of ten thousand to a million rows: the estimators with their defaults, and gradient boosting.

    python examples/predictions/large.py [--rows 10000,100000,1000000] --threads 1 --out large

The functions of eight columns of pieces.py, one draw of each with 10,000 test points; the noise of a regression has a
standard deviation of 0.3 of the function's. From 20,000 steps on a training has fewer epochs than those of a small
table, which "all epochs" has, for 100,000 rows; "one layer" has one hidden layer, as in a classification of a small
table, for at most as many. `HistGradientBoosting` is as in pieces.py. Figures are nats a test point, of standardized
targets, R² or accuracy, and processor time, on one core with `--threads 1`; "best possible" are nats of the function
itself.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ntk_laplace as ntkl

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _shared import machine, once, parser, table, write
from pieces import CHANCES, FUNCTIONS, boosted, boosted_classes, inputs_of, scores

NOISE, TEST = 0.3, 10_000
ROWS, COMPARED = (10_000, 100_000, 1_000_000), 100_000  # of which all epochs are tried too
EPOCHS = {True: 100, False: 300}  # of classes, and of numbers


def problem(name: str, rows: int) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray], float]:
    """Inputs and targets or labels, of the training and of the test, and the best possible mean log density."""
    generator = np.random.default_rng(0)
    x = generator.uniform(size=(rows + TEST, 8))
    if name in CHANCES:
        chance = CHANCES[name](x)
        y = (generator.uniform(size=len(x)) < chance).astype(int)
        right = np.where(y == 1, chance, 1.0 - chance)[rows:]
        best = float(np.log(np.maximum(right, 1e-300)).mean())
    else:
        f = FUNCTIONS[name](x)
        noise = NOISE * f.std()
        y = f + noise * generator.normal(size=len(f))
        scale = y[:rows].std()
        best = -0.5 * float(np.log(2 * np.pi * (noise / scale) ** 2) + np.mean(((y - f)[rows:] / noise) ** 2))
        y = (y - y[:rows].mean()) / scale
    x = inputs_of(name, x)
    return (x[:rows], y[:rows], x[rows:], y[rows:]), best


def timed(found: Callable[[], Any]) -> tuple[Any, float]:
    """What a function returns, and its seconds of processor time."""
    start = time.process_time()
    return found(), time.process_time() - start


def case(name: str, rows: int, **options: Any) -> dict[str, float]:
    """Nats, score and seconds of each way."""
    data, best = problem(name, rows)
    x, y, x_test, y_test = data
    of_classes = name in CHANCES
    ways: dict[str, dict[str, Any]] = {"default": {}}
    if rows == COMPARED:
        ways["all epochs"] = {"epochs": EPOCHS[of_classes]}
    if of_classes and rows <= COMPARED:
        ways["one layer"] = {"hidden_layer_sizes": (32,)}
    row = {"best": best}
    for way, own in ways.items():
        model: Any = (ntkl.LaplaceClassifier if of_classes else ntkl.LaplaceRegressor)(random_state=0, **options | own)
        _, row[f"{way} seconds"] = timed(lambda model=model: model.fit(x, y))
        row[way], row[f"{way} score"] = scores(model, x_test, y_test)
    (row["boosting"], row["boosting score"]), row["boosting seconds"] = timed(
        lambda: (boosted_classes if of_classes else boosted)(data))
    return row


def cells(row: dict[str, float], way: str) -> list[str]:
    """Nats and score of a way."""
    return [f"{row[way]:.3f}", f"{row[f'{way} score']:.3f}"] if way in row else ["", ""]


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__, "large")
    arguments.add_argument("--rows", default=",".join(map(str, ROWS)), help="numbers of rows, with commas")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")  # the table says what the library says of its numbers
    options.out.mkdir(parents=True, exist_ok=True)
    more: dict[str, Any] = {"epochs": 1, "hidden_layer_sizes": (4,), "precision": 1.0} if options.small else {}
    kept: dict[str, dict[str, float]] = {}
    lines = []
    for rows in [400] if options.small else [int(number) for number in options.rows.split(",")]:
        for name in ["smooth", "rules"] if options.small else [*FUNCTIONS, *CHANCES]:
            row = kept[f"{name}, {rows}"] = once(
                options.out / f"{name} {rows}.json", [str(options.small)],
                lambda name=name, rows=rows: case(name, rows, **more))
            slower = f"{row['all epochs seconds'] / row['default seconds']:.1f}" if "all epochs" in row else ""
            lines.append([name, f"{rows:,}", f"{row['best']:.3f}", *cells(row, "default"), *cells(row, "boosting"),
                          *cells(row, "one layer")[:1], *cells(row, "all epochs")[:1], slower,
                          f"{row['default seconds'] / row['boosting seconds']:.1f}",
                          f"{row['default seconds']:.0f}"])
    print(table(["data", "rows", "best possible", "nats", "R² or accuracy", "boosting, nats", "R² or accuracy",
                 "one layer, nats", "all epochs, nats", "their time, ratio", "time to boosting, ratio", "seconds"],
                lines))
    write(options.out / "large.json", {"machine": machine(options.threads), "cases": kept})


if __name__ == "__main__":
    main()
