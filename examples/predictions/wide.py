"""Tables of many columns: `LaplaceRegressor` beside the same perceptron without a linear part, lasso and ridge.

    python examples/predictions/wide.py --threads 1 --out wide

300 examples of 100, 200 and 400 columns, 500 test points, three draws of each. "three": a linear function of three of
the columns; "four": a sine of one, a product of two, and a linear function of another, both with noise of sd 0.5;
"factors": all columns are noisy linear functions of eight numbers, of which the target has two; "all": a linear
function of all columns. Figures are R² of the test points, and nats a point; "left out" is what leave-one-out
says of the training. The perceptron without a linear part has one precision for each layer. The penalties of lasso and
ridge are those of their cross-validation.
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
from sklearn.linear_model import LassoCV, RidgeCV

import ntk_laplace as ntkl

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _shared import machine, once, parser, table, write

Draw = Callable[[np.random.Generator, int, int], tuple[np.ndarray, np.ndarray]]
_NOISE = 0.5


def of_columns(function: Callable[[np.ndarray], np.ndarray]) -> Draw:
    """A function of independent columns."""

    def draw(generator: np.random.Generator, n: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
        x = generator.normal(size=(n, columns))
        return x, function(x) + _NOISE * generator.normal(size=n)

    return draw


def of_factors(generator: np.random.Generator, n: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """A function of two of eight factors of the columns."""
    factors = generator.normal(size=(n, 8))
    x = factors @ generator.normal(size=(8, columns)) + 0.5 * generator.normal(size=(n, columns))
    return x, factors[:, 0] + np.sin(2 * factors[:, 1]) + 0.3 * generator.normal(size=n)


def of_all(generator: np.random.Generator, n: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """A linear function of all columns."""
    x = generator.normal(size=(n, columns))
    return x, 1.5 * x @ generator.normal(size=columns) / columns**0.5 + _NOISE * generator.normal(size=n)


PROBLEMS: dict[str, Draw] = {
    "three": of_columns(lambda x: x[:, 0] + 2 * x[:, 1] - x[:, 2]),
    "four": of_columns(lambda x: np.sin(2 * x[:, 0]) + 2 * x[:, 1] - x[:, 2] * x[:, 3]),
    "factors": of_factors, "all": of_all,
}


def perceptron(features: int, outputs: int) -> torch.nn.Module:
    """The estimator's perceptron without a linear part."""
    layers = [torch.nn.Linear(features, 32), torch.nn.SiLU(), torch.nn.Linear(32, 32), torch.nn.SiLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(32, outputs)).double()


WAYS: dict[str, dict[str, Any]] = {"default": {}, "perceptron": {"network": perceptron}}


def case(name: str, columns: int, seed: int, n: int, epochs: int) -> dict[str, float]:
    """R², log likelihood, seconds and what leave-one-out says."""
    x, y = PROBLEMS[name](np.random.default_rng(seed), n + 500, columns)
    x, x_test, y, y_test = x[:n], x[n:], y[:n], y[n:]

    def explained(predicted: np.ndarray) -> float:
        return 1.0 - float(np.mean((predicted - y_test) ** 2) / np.var(y_test))

    row: dict[str, float] = {}
    for way, options in WAYS.items():
        start = time.process_time()
        model = ntkl.LaplaceRegressor(epochs=epochs, random_state=seed, **options).fit(x, y)
        row[f"{way} seconds"] = time.process_time() - start
        row[way] = explained(model.predict(x_test))
        row[f"{way} density"] = float(model.predict_distribution(x_test).log_prob(torch.as_tensor(y_test)).mean())
        row[f"{way} left out"] = model.predictive_fit_.after if model.predictive_fit_ is not None else np.nan
    return row | {"lasso": explained(LassoCV().fit(x, y).predict(x_test)),
                  "ridge": explained(RidgeCV(np.logspace(-2, 4, 20)).fit(x, y).predict(x_test))}


def main() -> None:
    """Run, print, write."""
    options = parser(__doc__, "wide").parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")  # the table says what the library says of its numbers
    options.out.mkdir(parents=True, exist_ok=True)
    sizes, seeds, n, epochs = ((66,), range(1), 30, 2) if options.small else ((100, 200, 400), range(3), 300, 300)
    rows, found = [], {}
    for name in list(PROBLEMS)[2:] if options.small else PROBLEMS:
        for columns in sizes:
            cases = [once(options.out / f"{name} {columns} {seed}.json", [str(options.small)],
                          lambda name=name, columns=columns, seed=seed: case(name, columns, seed, n, epochs))
                     for seed in seeds]
            mean = found[f"{name} {columns}"] = {key: float(np.mean([one[key] for one in cases])) for key in cases[0]}
            r2, nats = (f"{mean[f'{way}']:.2f}" for way in WAYS), (f"{mean[f'{way} density']:.2f}" for way in WAYS)
            rows.append([f"{name} of {columns}", *r2, f"{mean['lasso']:.2f}", f"{mean['ridge']:.2f}", *nats,
                         f"{mean['default left out']:.2f}", *(f"{mean[f'{way} seconds']:.0f}" for way in WAYS)])
    print(table(["function", "R²", "perceptron alone", "lasso", "ridge", "nats", "perceptron alone", "left out",
                 "seconds", "perceptron alone"], rows))
    write(options.out / "wide.json", {"machine": machine(options.threads), "cases": found})


if __name__ == "__main__":
    main()
