"""When more trainings are worth their time: one start, two, and what residuals of neighbors ask for.

    python examples/predictions/starts.py --data DIR --threads 1

`LaplaceRegressor` with normal noise on six splits of each table and six draws of functions: from the prior precision 1;
from 1 and from 0.01, of which leave-one-out chooses; without Fourier features, which goes on from 1 to 0.01 where
left-out residuals of neighbors are alike, and where they clearly are to 1e-4 and 1e-6 with three times as many epochs;
and its default, which before that adds Fourier features where they are alike along one input. All are without clipping
and piecewise linear features. Splits and draws are not those that these numbers were chosen on. Figures are nats a test
point in standardized units, and the correlation of neighbors' residuals after one start. Functions have 200 points.
Without `--data` the tables of scikit-learn and the functions are run. A second table has `LaplaceClassifier`, from 1
and by default, which goes on from 1 to 1e-4 and 1e-6 in the same way; classes that are made here have 300 points.
"""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ntk_laplace as ntkl

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _shared import machine, once, parser, table, write
from _tables import FILES, REGRESSION, TABLES, load
from outliers import Table, of_file, standardized

PLAIN: dict[str, Any] = {"piecewise_features": False, "smooth_clipping": False}
WAYS: dict[str, dict[str, Any]] = {
    "one": {"precision": 1.0, "fourier_features": 0, **PLAIN},
    "weak": {"precision": 0.01, "fourier_features": 0, **PLAIN},
    "starts": {"fourier_features": 0, **PLAIN}, "default": PLAIN,
}
SHOWN = "two", "starts", "default"
FUNCTIONS = {
    "linear": (5, 1.0, lambda x: x[:, :1] + 0.5 * x[:, 1:2]),
    "sine of 3x": (1, 0.3, lambda x: np.sin(3 * x)),
    "sine of 6x": (1, 0.3, lambda x: np.sin(6 * x)),
    "sine of the square": (1, 0.2, lambda x: np.sin(x**2)),
    "season": (1, 0.3, lambda x: x + 0.1 * x**2 + 0.7 * np.sin(12 * x)),
    "a wave in one of five": (5, 0.3, lambda x: np.sin(6 * x[:, :1]) + 0.5 * x[:, 1:2]),
    "sawtooth": (3, 0.3, lambda x: 2 * ((2 * x[:, :1]) % 1) + x[:, 1:2]),
    "waves": (2, 0.2, lambda x: np.sin(2 * x[:, :1]) * np.cos(2 * x[:, 1:])),
    "rings": (2, 0.2, lambda x: np.sin(3 * np.hypot(x[:, :1], x[:, 1:]))),
    "jump": (2, 0.3, lambda x: np.sign(x[:, :1])),
    "noise": (3, 1.0, lambda x: np.zeros((len(x), 1))),
}


def spirals(x: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Two spirals, made of the first input alone."""
    angle, kind = 3 * np.pi * np.sqrt((x[:, 0] + 3) / 6), generator.integers(0, 2, len(x))
    turned = angle + np.pi * kind
    return angle[:, None] * np.stack([np.cos(turned), np.sin(turned)], 1) + 0.3 * generator.normal(size=x.shape), kind


CLASSES = {
    "spirals": spirals,
    "checkerboard": lambda x, _: (x, (np.floor((x + 3) / 1.5).sum(1) % 2).astype(int)),
    "rings of two classes": lambda x, _: (x, (np.sin(3 * np.hypot(x[:, 0], x[:, 1])) > 0).astype(int)),
    "product": lambda x, _: (x, (x[:, 0] * x[:, 1] > 0).astype(int)),
}


def classes(name: str, data: Path | None, seed: int, small: bool) -> tuple[np.ndarray, ...]:
    """Standardized inputs and labels of a table, or of what is made."""
    if name not in CLASSES:
        problem = load(name, data, seed, small)
        return tuple(part.numpy() for part in (problem.x, problem.y, problem.x_test, problem.y_test))
    generator, n = np.random.default_rng(seed), 60 if small else 300
    x, y = CLASSES[name](generator.uniform(-3.0, 3.0, (n + 1000, 2)), generator)
    return x[:n], y[:n], x[n:], y[n:]


def case_of_classes(data: tuple[np.ndarray, ...], seed: int, epochs: int, **network: Any) -> dict[str, float]:
    """Test log likelihood, accuracy, seconds and correlation of one start and of the default."""
    x, y, x_test, y_test = data
    row: dict[str, float] = {}
    for name in ("one", "default"):
        model = ntkl.LaplaceClassifier(epochs=epochs, random_state=seed, **WAYS[name], **network)
        start = time.process_time()
        probabilities = model.fit(x, y).predict_proba(x_test)
        row[f"{name}_seconds"] = time.process_time() - start
        row[name] = float(np.log(probabilities[np.arange(len(y_test)), np.searchsorted(model.classes_, y_test)]).mean())
        row[f"{name}_accuracy"] = float(model.score(x_test, y_test))
        row[f"{name}_correlation"] = model.posterior_.lack_of_fit().correlation
    return row


def made(name: str, seed: int, n: int) -> Table:
    """A function of uniform inputs, with normal noise."""
    inputs, noise, function = FUNCTIONS[name]
    generator = np.random.default_rng(seed)
    x = generator.uniform(-3.0, 3.0, (n + 500, inputs))
    return standardized(x, function(x) + noise * generator.normal(size=(n + 500, 1)), n)


def case(data: Table, seed: int, epochs: int, **network: Any) -> dict[str, Any]:
    """Test log likelihood, seconds and correlation of each way."""
    x, y, x_test, y_test = data
    row: dict[str, Any] = {}
    left_out: dict[str, float] = {}
    for name, options in WAYS.items():
        model = ntkl.LaplaceRegressor(likelihood="gaussian", epochs=epochs, random_state=seed, **options, **network)
        start = time.process_time()
        model.fit(x.numpy(), y[:, 0].numpy())
        row[f"{name}_seconds"] = time.process_time() - start
        density = model.predict_distribution(x_test.numpy()).log_prob(y_test[:, 0])
        row[name], left_out[name] = float(density.mean()), model.predictive_fit_.after
        row[f"{name}_correlation"] = model.posterior_.lack_of_fit().correlation
    row["two"] = row["weak" if left_out["weak"] > left_out["one"] else "one"]
    return row | {"two_seconds": row["one_seconds"] + row["weak_seconds"]}


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__, "starts")
    arguments.add_argument("--data", type=Path, help="folder with boston.npz and its like")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")  # the table says what the library says of its numbers
    tables = [name for name in REGRESSION if options.data or name not in FILES]
    names = [tables[-1], "sine of 6x"] if options.small else [*tables, *FUNCTIONS]
    options.out.mkdir(parents=True, exist_ok=True)
    seeds, epochs, points = (range(1), 2, 30) if options.small else (range(10, 16), 300, 200)
    network = dict(hidden_layer_sizes=(8,)) if options.small else {}
    found: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        found[name] = []
        for seed in seeds:
            data = of_file(name, options.data, seed, options.small) if name in tables else made(name, seed, points)
            found[name].append(once(options.out / f"{name} {seed}.json", [str(options.small)],
                                    lambda data=data, seed=seed: case(data, seed, epochs, **network)))
    rows = []
    for name, cases in found.items():
        mean = {key: float(np.mean([case[key] for case in cases])) for key in cases[0]}
        least = {way: min(case[way] - case["one"] for case in cases) for way in SHOWN}
        rows.append([name, f"{mean['one_correlation']:.2f}", f"{mean['one']:.2f}",
                     *(f"{mean[way] - mean['one']:+.2f}, {least[way]:+.2f}" for way in least),
                     ", ".join(f"{mean[f'{way}_seconds'] / mean['one_seconds']:.1f}" for way in least)])
    everything = [case for cases in found.values() for case in cases]
    gains = {way: np.array([case[way] - case["one"] for case in everything]) for way in SHOWN}
    times = {way: np.mean([case[f"{way}_seconds"] / case["one_seconds"] for case in everything]) for way in gains}
    rows.append(["all", "", f"{np.mean([case['one'] for case in everything]):.2f}",
                 *(f"{gain.mean():+.2f}, {gain.min():+.2f}" for gain in gains.values()),
                 ", ".join(f"{ratio:.1f}" for ratio in times.values())])
    print(table(["data", "correlation after one start", "one start", "two less it, mean and least",
                 "without Fourier features less it", "default less it", "time of these, ratio"], rows))
    tables = [name for name in TABLES if name not in REGRESSION and (options.data or name not in FILES)]
    by_class: dict[str, list[dict[str, float]]] = {}
    for name in ["wine", "product"] if options.small else [*tables, *CLASSES]:
        data = {seed: classes(name, options.data, seed, options.small) for seed in seeds}
        by_class[name] = [once(options.out / f"{name} {seed}.json", [str(options.small)],
                               lambda one=one, seed=seed: case_of_classes(one, seed, min(epochs, 100), **network))
                          for seed, one in data.items()]
    rows = []
    for name, cases in by_class.items():
        mean = {key: float(np.mean([case[key] for case in cases])) for key in cases[0]}
        gain = [case["default"] - case["one"] for case in cases]
        rows.append([name, f"{mean['one_correlation']:.2f}", f"{mean['one']:.2f}", f"{mean['one_accuracy']:.2f}",
                     f"{np.mean(gain):+.2f}, {min(gain):+.2f}", f"{mean['default_accuracy']:.2f}",
                     f"{mean['default_seconds'] / mean['one_seconds']:.1f}"])
    print("\nClasses, one start and the default:\n")
    print(table(["classes", "correlation after one start", "one start", "its accuracy",
                 "default less it, mean and least", "accuracy of the default", "time, ratio"], rows))
    found |= by_class
    write(options.out / "summary.json", {"machine": machine(options.threads), "cases": found})


if __name__ == "__main__":
    main()
