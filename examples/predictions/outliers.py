"""Student's t beside the Gaussian: networks trained with their evidence, and which of the two the evidence prefers.

    python examples/predictions/outliers.py --data DIR --threads 1

Every table is split four times. A network is trained with `train_with_evidence(predictive="loo")` under either
likelihood, from the same weights; noise and degrees of freedom are learned. Two tables are made here: a sine with a
twentieth of outliers, and eight columns with noise of three degrees of freedom. Figures are nats a test point, in
standardized units. Without `--data` the tables of scikit-learn and those made here are run. A second table has
`LaplaceRegressor` with its default, likelihood="auto", beside "gaussian", both without clipping and piecewise linear
features; three more tables made here are for it: noise that grows with the input, counts, and a function of the
logarithm of the target.
"""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import ntk_laplace as ntkl

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _shared import machine, once, parser, table, write
from _tables import FILES, REGRESSION, load

Table = tuple[Tensor, Tensor, Tensor, Tensor]
LIKELIHOODS = {"Gaussian": lambda: ntkl.Gaussian(0.3), "Student": lambda: ntkl.StudentT(0.3)}


def sine(seed: int, n: int) -> Table:
    """A sine of one input; a twentieth of the targets are off by 3 in the mean square."""
    generator = np.random.default_rng(seed)
    x = generator.uniform(-2.0, 2.0, (n + 1000, 1))
    y = np.sin(3.0 * x) + 0.1 * generator.normal(size=x.shape)
    y += 3.0 * generator.normal(size=x.shape) * (generator.uniform(size=x.shape) < 0.05)
    return standardized(x, y, n)


def heavy_tails(seed: int, n: int) -> Table:
    """Three of eight columns count, and the noise has three degrees of freedom."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(n + 1000, 8))
    y = np.sin(3.0 * x[:, :1]) + x[:, 1:2] * x[:, 2:3] + 0.3 * generator.standard_t(3.0, (n + 1000, 1))
    return standardized(x, y, n)


def skewed(seed: int, n: int) -> Table:
    """The logarithm of the target is a function of two columns, with normal noise."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(n + 1000, 4))
    log_y = np.sin(2.0 * x[:, :1]) + 0.5 * x[:, 1:2] + 0.5 * generator.normal(size=(n + 1000, 1))
    return standardized(x, np.exp(log_y), n)


def growing(seed: int, n: int) -> Table:
    """A sine whose noise grows with the distance from 0."""
    generator = np.random.default_rng(seed)
    x = generator.uniform(-2.0, 2.0, (n + 1000, 1))
    return standardized(x, np.sin(3.0 * x) + 0.5 * np.abs(x) * generator.normal(size=x.shape), n)


def counts(seed: int, n: int) -> Table:
    """Counts whose log rate is a function of two columns."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(n + 1000, 4))
    return standardized(x, generator.poisson(np.exp(np.sin(2.0 * x[:, :1]) + 0.5 * x[:, 1:2])).astype(float), n)


def standardized(x: np.ndarray, y: np.ndarray, n: int) -> Table:
    """The first n rows are for training."""
    x, y = ((part - part[:n].mean(0)) / part[:n].std(0) for part in (x, y))
    return (*map(torch.from_numpy, (x[:n], y[:n], x[n:], y[n:])),)


def of_file(name: str, data: Path | None, seed: int, small: bool) -> Table:
    """A table of `table.py`."""
    problem = load(name, data, seed, small)
    return tuple(part.double() for part in (problem.x, problem.y, problem.x_test, problem.y_test))


def case(data: Table, seed: int, epochs: int) -> dict[str, Any]:
    """Mean test log likelihood, evidence a point, and median error, by likelihood."""
    x, y, x_test, y_test = data
    found = {}
    for name, likelihood in LIKELIHOODS.items():
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(x.shape[1], 32), nn.Tanh(), nn.Linear(32, 1)).double()
        posterior = ntkl.train_with_evidence(network, (x, y), likelihood(), epochs=epochs, predictive="loo").posterior
        response = posterior.predict(x_test)
        found[name] = {
            "log likelihood": float(response.log_prob(y_test).mean()),
            "evidence": float(posterior.log_marginal_likelihood()) / len(x),
            "median error": float((response.mean - y_test).abs().median()),
        }
        if name == "Student":
            found[name]["degrees of freedom"] = float(posterior.likelihood.df)
    return found


def estimator_case(data: Table, seed: int, epochs: int, **options: Any) -> dict[str, Any]:
    """Mean test log likelihood, error and processor seconds of `LaplaceRegressor`, by its likelihood."""
    x, y, x_test, y_test = (part.numpy() for part in data)
    found = {}
    for name in ("gaussian", "auto"):
        start = time.process_time()
        model = ntkl.LaplaceRegressor(likelihood=name, epochs=epochs, random_state=seed, piecewise_features=False,
                                      smooth_clipping=False, **options).fit(x, y[:, 0])
        found[name] = {
            "seconds": time.process_time() - start,
            "log likelihood": float(model.predict_distribution(x_test).log_prob(data[3][:, 0]).mean()),
            "error": float(np.mean((model.predict(x_test) - y_test[:, 0]) ** 2)) ** 0.5,
            "student": model.likelihood_ == "student-t",
            "depends": model.likelihood_ == "heteroscedastic-gaussian",
        }
    return found


def estimators(found: dict[str, list[dict[str, Any]]]) -> None:
    """The table of `LaplaceRegressor`."""
    rows = []
    for name, cases in found.items():
        normal, auto = ({key: np.array([one[which][key] for one in cases]) for key in cases[0][which]}
                        for which in ("gaussian", "auto"))
        gain = auto["log likelihood"] - normal["log likelihood"]
        rows.append([name, f"{normal['log likelihood'].mean():.2f}", f"{gain.mean():+.2f}", f"{gain.min():+.2f}",
                     f"{auto['student'].sum()}, {auto['depends'].sum()} of {len(cases)}",
                     f"{auto['error'].mean() / normal['error'].mean():.2f}",
                     f"{auto['seconds'].sum() / normal['seconds'].sum():.1f}"])
    print(table(["data", "gaussian", "auto less it", "least", "Student's t, depends on inputs", "error, ratio",
                 "time, ratio"], rows))


def main() -> None:
    """Every table, and how often the evidence is right."""
    arguments = parser(__doc__, "outliers")
    arguments.add_argument("--data", type=Path, help="folder with boston.npz and its like")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")  # of leave-one-out that is not to be trusted
    options.out.mkdir(parents=True, exist_ok=True)
    seeds, epochs, n = (1, 4, 30) if options.small else (4, 400, 300)
    made = {"sine, outliers": lambda seed: sine(seed, n), "heavy tails": lambda seed: heavy_tails(seed, n)}
    for name in REGRESSION[-1:] if options.small else REGRESSION:
        if options.data or name not in FILES:
            made[name] = lambda seed, own=name: of_file(own, options.data, seed, options.small)
    rows, results, right, by_estimator = [], {}, [], {}
    most, network = (2, dict(hidden_layer_sizes=(8,), precision=1.0)) if options.small else (300, {})
    more = {"growing noise": growing, "counts": counts, "skewed targets": skewed}
    tables = {name: lambda seed, own=own: own(seed, n) for name, own in more.items()}
    tables = tables if options.small else {**made, **tables}
    for name, read in tables.items():
        by_estimator[name] = [once(options.out / f"estimator {name} {seed}.json", [str(options.small)],
                                   lambda read=read, seed=seed: estimator_case(read(seed), seed, most, **network))
                              for seed in range(seeds)]
    for name, read in made.items():
        found = [once(options.out / f"{name} {seed}.json", [str(options.small)],
                      lambda read=read, seed=seed: case(read(seed), seed, epochs)) for seed in range(seeds)]
        gains = {key: np.array([one["Student"][key] - one["Gaussian"][key] for one in found])
                 for key in ("log likelihood", "evidence", "median error")}
        agree = int((np.sign(gains["log likelihood"]) == np.sign(gains["evidence"])).sum())
        right.append(agree)
        results[name] = {key: values.tolist() for key, values in gains.items()} | {"agree": agree}
        mean = {key: np.mean([one["Gaussian"][key] for one in found]) for key in gains}
        freedom = np.median([one["Student"]["degrees of freedom"] for one in found])
        rows.append([name, f"{mean['log likelihood']:.2f}", f"{gains['log likelihood'].mean():+.2f}",
                     f"{gains['log likelihood'].min():+.2f}", f"{gains['evidence'].mean():+.2f}",
                     f"{1 + gains['median error'].mean() / mean['median error']:.2f}", f"{freedom:.1f}",
                     f"{agree} of {seeds}"])
    print(table(["data", "Gaussian", "Student less it", "least", "evidence less it", "median error, ratio",
                 "degrees of freedom", "evidence agrees"], rows))
    clear = [gain for one in results.values()
             for gain, evidence in zip(one["log likelihood"], one["evidence"], strict=True) if evidence > 0.05]
    if clear:
        print(f"Where its evidence is larger by 0.05 nats a point, Student is better in {sum(x > 0 for x in clear)} of "
              f"{len(clear)} splits, by {np.mean(clear):+.2f} in the mean and {min(clear):+.2f} at least.")
    estimators(by_estimator)
    print(f"The evidence agrees with the test points in {sum(right)} of {len(made) * seeds}.")
    write(options.out / "outliers.json",
          {"machine": machine(options.threads), "results": results, "estimators": by_estimator})


if __name__ == "__main__":
    main()
