"""Tables of many columns: `LaplaceRegressor` with and without a linear part, and its choice; lasso and ridge beside it.

    python examples/predictions/wide.py --threads 1 --out wide

200 examples of 30 to 240 columns, 500 test points, three draws of each. "three": a linear function of three of the
columns; "four": a sine of one, a product of two, and a linear function of another; "friedman": Friedman's function of
five uniform columns; all with noise. "factors": all columns are noisy linear functions of eight numbers, of which the
target has two; "all": a linear function of all columns. Figures are R² of the test points, nats a point, and the share
of test points in the 90 % intervals; "left out" is what leave-one-out says of the training. With `predictive="folds"`
the mean is the same, so that only the other figures are shown. The penalties of lasso and ridge are those of their
cross-validation.
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
from sklearn.datasets import make_friedman1
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


def friedman(generator: np.random.Generator, n: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Friedman's function, with noise of sd 1."""
    x, y = make_friedman1(n, columns, noise=1.0, random_state=int(generator.integers(2**31)))
    return np.asarray(x), np.asarray(y)


PROBLEMS: dict[str, Draw] = {
    "three": of_columns(lambda x: x[:, 0] + 2 * x[:, 1] - x[:, 2]),
    "four": of_columns(lambda x: np.sin(2 * x[:, 0]) + 2 * x[:, 1] - x[:, 2] * x[:, 3]),
    "friedman": friedman, "factors": of_factors, "all": of_all,
}
FORMS = "without", "with"
WAYS: dict[str, dict[str, Any]] = {
    "default": {}, "without": {"linear_part": False}, "with": {"linear_part": True}, "folds": {"predictive": "folds"},
}


def case(name: str, columns: int, seed: int, n: int, **more: Any) -> dict[str, float]:
    """R², log likelihood, coverage, seconds and what leave-one-out or the folds say."""
    x, y = PROBLEMS[name](np.random.default_rng(seed), n + 500, columns)
    x, x_test, y, y_test = x[:n], x[n:], y[:n], y[n:]

    def explained(predicted: np.ndarray) -> float:
        return 1.0 - float(np.mean((predicted - y_test) ** 2) / np.var(y_test))

    row: dict[str, float] = {}
    for way, options in WAYS.items():
        start = time.process_time()
        model = ntkl.LaplaceRegressor(random_state=seed, **options, **more).fit(x, y)
        row[f"{way} seconds"] = time.process_time() - start
        row[way] = explained(model.predict(x_test))
        row[f"{way} density"] = float(model.predict_distribution(x_test).log_prob(torch.as_tensor(y_test)).mean())
        low, high = model.predict_quantiles(x_test, (0.05, 0.95)).T
        row[f"{way} coverage"] = float(np.mean((low <= y_test) & (y_test <= high)))
        row[f"{way} left out"] = model.predictive_fit_.after if model.predictive_fit_ is not None else np.nan
    return row | {"lasso": explained(LassoCV().fit(x, y).predict(x_test)),
                  "ridge": explained(RidgeCV(np.logspace(-2, 4, 20)).fit(x, y).predict(x_test))}


def cells(mean: dict[str, float]) -> list[str]:
    """Of a row of the table."""
    r2 = (f"{mean[way]:.2f}" for way in ("default", *FORMS, "lasso", "ridge"))
    nats = (f"{mean[f'{way} density']:.2f}" for way in ("default", *FORMS))
    first, second = ([f"{mean[f'{way} left out']:.2f}", f"{mean[f'{way} coverage']:.0%}",
                      f"{mean[f'{way} seconds']:.0f}"] for way in ("default", "folds"))
    return [*r2, *nats, *first, f"{mean['folds density']:.2f}", *second]


def main() -> None:
    """Run, print, write."""
    options = parser(__doc__, "wide").parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")  # the table says what the library says of its numbers
    options.out.mkdir(parents=True, exist_ok=True)
    sizes, seeds, n = ((17,), range(1), 30) if options.small else ((30, 60, 120, 240), range(3), 200)
    more: dict[str, Any] = {"epochs": 300}
    if options.small:
        more = {"epochs": 1, "hidden_layer_sizes": (8,), "precision": 1.0, "likelihood": "gaussian"}
    rows, found = [], {}
    for name in list(PROBLEMS)[3:4] if options.small else PROBLEMS:
        for columns in sizes:
            cases = [once(options.out / f"{name} {columns} {seed}.json", [str(options.small)],
                          lambda name=name, columns=columns, seed=seed: case(name, columns, seed, n, **more))
                     for seed in seeds]
            mean = found[f"{name} {columns}"] = {key: float(np.mean([one[key] for one in cases])) for key in cases[0]}
            rows.append([f"{name} of {columns}", *cells(mean)])
    total = {key: float(np.mean([one[key] for one in found.values()])) for key in next(iter(found.values()))}
    found["mean"] = total
    rows.append(["mean", *cells(total)])
    measured = "covered", "seconds"
    print(table(["function", "R²", *FORMS, "lasso", "ridge", "nats", *FORMS, "left out", *measured, "folds", "they say",
                 *measured], rows))
    write(options.out / "wide.json", {"machine": machine(options.threads), "cases": found})


if __name__ == "__main__":
    main()
