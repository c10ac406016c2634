"""Piecewise linear features: the estimators without and with them, and their choice; gradient boosting beside them.

    python examples/predictions/pieces.py --data DIR --threads 1 --out pieces

`LaplaceRegressor` on four splits of each table, two thirds of its rows, and four draws of functions of eight uniform
columns, 300 points and 1,000 test points: "jumps", a sum of steps along three columns, one of them of two columns;
"smooth", Friedman's function; "bends", absolute values and a bound; and "skewed", a smooth function of the logarithms
of columns that are log-normal. `LaplaceClassifier` on splits of tables with 200 rows, and on 300 points of rules over
such columns, of skewed ones, and of spheres. `HistGradientBoostingRegressor` has the mean square of residuals in five
inner folds as its noise; both of scikit-learn's boosters have their defaults. Figures are nats a test point, of
standardized targets, and R² or accuracy. The picture has a function of one column with a jump and a corner, and the 90
% intervals of the regressor without and with pieces.
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
from matplotlib.figure import Figure
from sklearn.datasets import load_diabetes
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.model_selection import cross_val_predict

import ntk_laplace as ntkl

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _shared import machine, once, parser, table, write
from _tables import FILES, load

Data = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
TABLES = "boston", "concrete", "energy", "yacht", "diabetes"
TABLES_OF_CLASSES = "ionosphere", "australian", "banana", "breast_cancer", "wine"


def friedman(x: np.ndarray) -> np.ndarray:
    """Friedman's first function."""
    return 2 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 4 * (x[:, 2] - 0.5) ** 2 + 2 * x[:, 3] + x[:, 4]


def logarithms(x: np.ndarray) -> np.ndarray:
    """The columns as they are if their logarithms are taken: nearly normal ones."""
    return 4 * (x - 0.5)


FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "jumps": lambda x: 3.0 * (x[:, 0] > 0.3) * (x[:, 1] > 0.6) + 2.0 * (x[:, 2] > 0.5) + x[:, 4],
    "bends": lambda x: np.abs(x[:, 0] - 0.4) + np.minimum(x[:, 1], 0.5) - np.maximum(x[:, 2], x[:, 3]),
    "smooth": friedman,
    "skewed": lambda x: np.tanh(logarithms(x)[:, 0]) + 0.5 * logarithms(x)[:, 1],
}
CHANCES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "rules": lambda x: 0.05 + 0.9 * (((x[:, 0] > 0.4) & (x[:, 1] < 0.7)) | (x[:, 2] > 0.8)),
    "skewed classes": lambda x: 1.0 / (1.0 + np.exp(-logarithms(x) @ [1.0, 1.0, 0, 0, 0, 0, 0, 0])),
    "spheres": lambda x: 1.0 * (((x[:, :4] - 0.5) ** 2).sum(1) < 0.33),
}
WAYS: dict[str, dict[str, Any]] = {
    "without": {"piecewise_features": False}, "with": {"piecewise_features": True}, "default": {},
}


def inputs_of(name: str, x: np.ndarray) -> np.ndarray:
    """Uniform columns, or log-normal ones."""
    return np.exp(2 * logarithms(x)) if name.startswith("skewed") else x


def regression(name: str, folder: Path | None, seed: int, small: bool) -> Data:
    """Of a table or a function, with standardized targets."""
    generator = np.random.default_rng(seed)
    if name in TABLES:
        x, y = load_diabetes(return_X_y=True) if name == "diabetes" else of_file(name, folder)
        order, n = generator.permutation(len(x)), 2 * len(x) // 3
        x, y = x[order], y[order]
    else:
        n = 40 if small else 300
        x = generator.uniform(size=(n + 1000, 8))
        f = FUNCTIONS[name](x)
        x, y = inputs_of(name, x), f / f.std() + 0.3 * generator.normal(size=len(f))
    y = (y - y[:n].mean()) / y[:n].std()
    return x[:n], y[:n], x[n:], y[n:]


def of_file(name: str, folder: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of a table."""
    with np.load((folder or Path()) / f"{name}.npz") as found:
        return found["X"].astype(float), found["y"].astype(float).ravel()


def classes(name: str, folder: Path | None, seed: int, small: bool) -> Data:
    """Inputs and labels of a table, or of what is made."""
    if name in TABLES_OF_CLASSES:
        problem = load(name, folder, seed, small)
        return tuple(part.numpy() for part in (problem.x, problem.y, problem.x_test, problem.y_test))
    generator, n = np.random.default_rng(seed), 40 if small else 300
    x = generator.uniform(size=(n + 1000, 8))
    y = (generator.uniform(size=len(x)) < CHANCES[name](x)).astype(int)
    x = inputs_of(name, x)
    return x[:n], y[:n], x[n:], y[n:]


def boosted(data: Data) -> tuple[float, float]:
    """Nats and R² of boosting, whose noise is normal."""
    x, y, x_test, y_test = data
    held_out = cross_val_predict(HistGradientBoostingRegressor(random_state=0), x, y, cv=5)
    variance = np.mean((held_out - y) ** 2)
    error = HistGradientBoostingRegressor(random_state=0).fit(x, y).predict(x_test) - y_test
    nats = -0.5 * np.log(2 * np.pi * variance) - 0.5 * np.mean(error**2) / variance
    return float(nats), 1.0 - float(np.mean(error**2) / np.var(y_test))


def boosted_classes(data: Data) -> tuple[float, float]:
    """Nats and accuracy of boosting."""
    x, y, x_test, y_test = data
    model = HistGradientBoostingClassifier(random_state=0).fit(x, y)
    places = np.searchsorted(model.classes_, y_test)
    chance = model.predict_proba(x_test)[np.arange(len(y_test)), places]
    return float(np.log(np.maximum(chance, 1e-15)).mean()), float(model.score(x_test, y_test))


def scores(model: Any, x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Nats a test point of an estimator, and R² or accuracy."""
    if isinstance(model, ntkl.LaplaceClassifier):
        nats = model.predict_log_proba(x)[np.arange(len(y)), np.searchsorted(model.classes_, y)]
    else:
        nats = model.predict_distribution(x).log_prob(torch.as_tensor(y))
    return float(nats.mean()), float(model.score(x, y))


def case(data: Data, of_classes: bool, seed: int, **network: Any) -> dict[str, float]:
    """Nats, score and seconds of each way, and of boosting."""
    x, y, x_test, y_test = data
    row: dict[str, float] = {}
    for name, options in WAYS.items():
        model: Any = (ntkl.LaplaceClassifier if of_classes else ntkl.LaplaceRegressor)(
            random_state=seed, **options, **network)
        start = time.process_time()
        model.fit(x, y)
        row[f"{name} seconds"] = time.process_time() - start
        row[name], row[f"{name} score"] = scores(model, x_test, y_test)
        row[f"{name} pieces"] = float(bool(model.piecewise_features_))
    row["boosting"], row["boosting score"] = (boosted_classes if of_classes else boosted)(data)
    return row


def picture(small: bool, **network: Any) -> Figure:
    """A jump and a corner: the regressor without and with pieces."""
    generator = np.random.default_rng(0)

    def function(x: np.ndarray) -> np.ndarray:
        return 1.0 * (x > 0.35) + np.maximum(0.0, 6.0 * (x - 0.7))

    x, grid = np.sort(generator.uniform(size=30 if small else 100)), np.linspace(0.0, 1.0, 400)
    y = function(x) + 0.1 * generator.normal(size=len(x))
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axes, (name, options) in zip(figure.subplots(1, 2, sharey=True), list(WAYS.items())[:2], strict=True):
        model = ntkl.LaplaceRegressor(random_state=0, **options, **network).fit(x[:, None], y)
        low, middle, high = model.predict_quantiles(grid[:, None], (0.05, 0.5, 0.95)).T
        axes.fill_between(grid, low, high, color="tab:blue", alpha=0.2, lw=0)
        axes.plot(grid, middle, color="tab:blue", lw=1.2, label="prediction, 90 % interval")
        axes.plot(grid, function(grid), color="0.4", lw=0.8, ls="--", label="function")
        axes.plot(x, y, ".k", ms=3, label="training data")
        axes.set_title(f"{name} piecewise linear features", fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("x")
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    return figure


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__, "pieces")
    arguments.add_argument("--data", type=Path, help="folder with boston.npz and its like")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")  # the table says what the library says of its numbers
    options.out.mkdir(parents=True, exist_ok=True)
    more: dict[str, Any] = {"epochs": 1, "hidden_layer_sizes": (4,), "precision": 1.0} if options.small else {}
    picture(options.small, **more).savefig(options.out / "pieces.png", dpi=110)
    kept: dict[str, list[dict[str, float]]] = {}
    for of_classes, tables, made in ((False, TABLES, FUNCTIONS), (True, TABLES_OF_CLASSES, CHANCES)):
        names = [*(name for name in tables if options.data or name not in FILES), *made]
        read = classes if of_classes else regression
        rows = []
        for name in names[1:2] if options.small else names:
            cases = kept[name] = [
                once(options.out / f"{name} {seed}.json", [str(options.small)],
                     lambda name=name, seed=seed, read=read, of_classes=of_classes: case(
                         read(name, options.data, seed, options.small), of_classes, seed, **more))
                for seed in (range(1) if options.small else range(20, 24))]
            mean = {key: float(np.mean([one[key] for one in cases])) for key in cases[0]}
            least = min(one["default"] - one["without"] for one in cases)
            rows.append([name, *(f"{mean[way]:.2f}" for way in WAYS), f"{least:+.2f}", f"{mean['boosting']:.2f}",
                         *(f"{mean[f'{way} score']:.2f}" for way in (*WAYS, "boosting")),
                         f"{mean['default seconds'] / mean['without seconds']:.1f}"])
        score = "accuracy" if of_classes else "R²"
        print(table(["classes" if of_classes else "regression", "nats without", "with", "default",
                     "default less without, least", "boosting", f"{score} without", "with", "default", "boosting",
                     "time of the default, ratio"], rows), "\n")
    write(options.out / "pieces.json", {"machine": machine(options.threads), "cases": kept})


if __name__ == "__main__":
    main()
