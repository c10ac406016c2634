"""The scikit-learn estimators beside scikit-learn's own: mean log likelihood of the left-out fifth, five folds.

    python examples/predictions/estimators.py --threads 1 --out estimators

    python examples/predictions/estimators.py --threads 1 --out estimators --defaults

Regression: diabetes (442 x 10), Friedman's first function (300 x 10, noise of sd 1), and a function of three of 30
columns (600 x 30, noise of sd 1). Classification: breast cancer (569 x 30), wine (178 x 13), and which of three columns
is the largest, with half of the labels drawn at random (600 x 20). Beside `LaplaceRegressor` and `LaplaceClassifier`
with defaults stand a Gaussian process (`GaussianProcessRegressor` with an RBF kernel of one length for each feature,
and white noise; `GaussianProcessClassifier` with an RBF kernel of one length, as its optimizer is slow with more), and
a multilayer perceptron of one hidden layer of 32 units: with the residuals' variance in five inner folds as its noise,
and calibrated by `CalibratedClassifierCV`. Inputs are standardized in every fold. Figures are nats a point, in units of
the targets. The second command undoes one default of `LaplaceRegressor` at a time, on other draws of Friedman's
function.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine, make_friedman1
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.model_selection import KFold, StratifiedKFold, cross_val_predict
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.preprocessing import StandardScaler

import ntk_laplace as ntkl

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _shared import machine, once, parser, table, write

Score = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def normal(y: np.ndarray, mean: np.ndarray, std: np.ndarray | float) -> np.ndarray:
    """log N(y; mean, std²)."""
    return -0.5 * np.log(2 * np.pi * np.square(std)) - 0.5 * ((y - mean) / std) ** 2


def ours(model: ntkl.LaplaceRegressor, x_new: np.ndarray, y_new: np.ndarray) -> np.ndarray:
    """Log densities of our predictive distribution, which is normal only under normal noise."""
    return model.predict_distribution(x_new).log_prob(torch.from_numpy(y_new)).numpy()


def laplace_regressor(
    x: np.ndarray, y: np.ndarray, x_new: np.ndarray, y_new: np.ndarray, **options: Any
) -> np.ndarray:
    """Ours, with defaults."""
    return ours(ntkl.LaplaceRegressor(random_state=0, **options).fit(x, y), x_new, y_new)


def gaussian_process(
    x: np.ndarray, y: np.ndarray, x_new: np.ndarray, y_new: np.ndarray, restarts: int = 2
) -> np.ndarray:
    """RBF with a length for each feature, and white noise."""
    kernel = ConstantKernel(1.0) * RBF(np.full(x.shape[1], 3.0), (1e-1, 1e3)) + WhiteKernel(0.1)
    model = GaussianProcessRegressor(kernel, normalize_y=True, n_restarts_optimizer=restarts, random_state=0)
    model.fit(x, y)
    return normal(y_new, *model.predict(x_new, return_std=True))


def perceptron(
    x: np.ndarray, y: np.ndarray, x_new: np.ndarray, y_new: np.ndarray, inner: int = 5, epochs: int = 2000
) -> np.ndarray:
    """The noise is the mean square of residuals in inner folds."""
    mean, scale = y.mean(), y.std()
    model = MLPRegressor(hidden_layer_sizes=(32,), activation="tanh", max_iter=epochs, random_state=0)
    held_out = cross_val_predict(model, x, (y - mean) / scale, cv=inner)
    noise = scale * np.sqrt(np.mean((held_out - (y - mean) / scale) ** 2))
    return normal(y_new, model.fit(x, (y - mean) / scale).predict(x_new) * scale + mean, noise)


def _of_label(model: Any, x_new: np.ndarray, y_new: np.ndarray) -> np.ndarray:
    return np.log(np.maximum(model.predict_proba(x_new)[np.arange(len(y_new)), y_new], 1e-15))


def laplace_classifier(
    x: np.ndarray, y: np.ndarray, x_new: np.ndarray, y_new: np.ndarray, **options: Any
) -> np.ndarray:
    """Ours, with defaults."""
    return _of_label(ntkl.LaplaceClassifier(random_state=0, **options).fit(x, y), x_new, y_new)


def process_classifier(x: np.ndarray, y: np.ndarray, x_new: np.ndarray, y_new: np.ndarray) -> np.ndarray:
    """RBF of one length."""
    kernel = ConstantKernel(1.0) * RBF(5.0, (1e-1, 1e3))
    return _of_label(GaussianProcessClassifier(kernel, random_state=0).fit(x, y), x_new, y_new)


def calibrated_perceptron(
    x: np.ndarray, y: np.ndarray, x_new: np.ndarray, y_new: np.ndarray, inner: int = 5, epochs: int = 2000
) -> np.ndarray:
    """By inner folds."""
    model = MLPClassifier(hidden_layer_sizes=(32,), activation="tanh", max_iter=epochs, random_state=0)
    return _of_label(CalibratedClassifierCV(model, cv=inner).fit(x, y), x_new, y_new)


def noisy_columns() -> tuple[np.ndarray, np.ndarray]:
    """Three columns of 30 count, and noise is as large as the function."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(600, 30))
    return x, np.sin(2 * x[:, 0]) * x[:, 1] + 0.3 * x[:, 2] ** 2 + generator.normal(size=600)


def noisy_labels() -> tuple[np.ndarray, np.ndarray]:
    """Three columns of 20 count, and half of the labels are drawn at random."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(600, 20))
    return x, np.where(generator.uniform(size=600) < 0.5, generator.integers(0, 3, 600), x[:, :3].argmax(1))


DATA: dict[str, tuple[Callable[[], tuple[np.ndarray, np.ndarray]], bool]] = {
    "diabetes": (lambda: load_diabetes(return_X_y=True), False),
    "friedman": (lambda: make_friedman1(300, noise=1.0, random_state=0), False),
    "noisy columns": (noisy_columns, False),
    "breast cancer": (lambda: load_breast_cancer(return_X_y=True), True),
    "wine": (lambda: load_wine(return_X_y=True), True),
    "noisy labels": (noisy_labels, True),
}
METHODS: dict[bool, dict[str, Score]] = {
    False: {"Laplace": laplace_regressor, "Gaussian process": gaussian_process, "perceptron": perceptron},
    True: {"Laplace": laplace_classifier, "Gaussian process": process_classifier, "perceptron": calibrated_perceptron},
}

# in miniature
SMALL: dict[Score, Score] = {
    laplace_regressor: partial(laplace_regressor, epochs=1, hidden_layer_sizes=(8,), likelihood="gaussian"),
    laplace_classifier: partial(laplace_classifier, epochs=1, hidden_layer_sizes=(8,)),
    gaussian_process: partial(gaussian_process, restarts=0), perceptron: partial(perceptron, inner=2, epochs=40),
    calibrated_perceptron: partial(calibrated_perceptron, inner=2, epochs=40),
}


def scores(name: str, method: str, small: bool) -> dict[str, Any]:
    """Log likelihood of each example when its fold is left out, and processor time."""
    read, classes = DATA[name]
    (x, y), score = read(), METHODS[classes][method]
    if small:
        x, y = x[::4][:50], y[::4][:50]
        score = SMALL.get(score, score)
    folds = (StratifiedKFold if classes else KFold)(2 if small else 5, shuffle=True, random_state=0)
    found, began = np.empty(len(y)), time.process_time()
    for kept, held_out in folds.split(x, y):
        scaler = StandardScaler().fit(x[kept])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the others' optimizers
            found[held_out] = score(
                scaler.transform(x[kept]), y[kept], scaler.transform(x[held_out]), y[held_out])
    return {"log_likelihoods": found.tolist(), "seconds": time.process_time() - began}


DEFAULTS: dict[str, dict[str, Any]] = {
    "defaults": {}, "precision=1.0": {"precision": 1.0}, 'groups="layer"': {"groups": "layer"},
    'activation="tanh"': {"activation": "tanh"}, "hidden_layer_sizes=(32,)": {"hidden_layer_sizes": (32,)},
    "epochs=100": {"epochs": 100},
}


def undone(draw: int, small: bool) -> dict[str, float]:
    """Log likelihood of 1,000 new points less that of a Gaussian process, with each default of the regressor undone."""
    count, shown = (40, 2) if small else (240, len(DEFAULTS))
    x, y = make_friedman1(count + 1000, noise=1.0, random_state=draw)
    x = StandardScaler().fit(x[:count]).transform(x)
    own, new = (x[:count], y[:count]), (x[count:], y[count:])
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the other's optimizer
        process = (SMALL[gaussian_process] if small else gaussian_process)(*own, *new).mean()
    regressor = SMALL[laplace_regressor] if small else laplace_regressor
    for name, options in list(DEFAULTS.items())[:shown]:
        found[name] = float(regressor(*own, *new, **options).mean() - process)
    return found


def main() -> None:
    """Every method on every data set, or the regressor with each default undone."""
    arguments = parser(__doc__, "estimators")
    arguments.add_argument("--defaults", action="store_true", help="undo one default of the regressor at a time")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.defaults:
        draws = [
            once(options.out / f"defaults {draw}.json", [str(options.small)], lambda d=draw: undone(d, options.small))
            for draw in range(100, 101 if options.small else 104)
        ]
        rows = [[name, f"{np.mean([draw[name] for draw in draws]):+.3f}",
                 ", ".join(f"{draw[name]:+.3f}" for draw in draws)] for name in draws[0]]
        print(table(["LaplaceRegressor", "less the Gaussian process, mean", "each draw"], rows))
        return
    rows, kept = [], {}
    for name, (_, classes) in DATA.items():
        found = {
            method: once(options.out / f"{name} {method}.json", [str(options.small)],
                         lambda n=name, m=method: scores(n, m, options.small))
            for method in METHODS[classes]
        }
        own = np.array(found["Laplace"]["log_likelihoods"])
        for method, result in found.items():
            values = np.array(result["log_likelihoods"])
            difference = own - values
            kept[f"{name}, {method}"] = {"mean": values.mean(), "seconds": result["seconds"],
                                         "behind": difference.mean(), "error": difference.std() / len(own) ** 0.5}
            rows.append([name, method, f"{values.mean():.3f}", f"{difference.mean():+.3f} ± "
                         f"{difference.std() / len(own) ** 0.5:.3f}", f"{result['seconds']:.0f}"])
    print(table(["data", "method", "log likelihood", "Laplace less this", "processor time, s"], rows))
    write(options.out / "estimators.json", {"machine": machine(options.threads), "results": kept})


if __name__ == "__main__":
    main()
