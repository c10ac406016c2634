"""Tables of counts: `LaplaceRegressor`, which tries a negative binomial, and scikit-learn's Poisson losses.

    python examples/predictions/counts.py --threads 1 --out counts

Counts of 600 rows, whose log rate is a sine of one column of five and a product of two others: few (0.6 in the
geometric mean), some (3.3), many (33), and some whose rates vary by gamma factors too, so that their variance is
larger than their mean. A log-linear rate of eight columns with such factors. Last, some whose rates vary, and are
multiplied by an exposure from 0.05 to 2, of which `LaplaceRegressor` is told, or gets it as a column. scikit-learn's
gradient boosting with the Poisson loss (60 trees of rate 0.05) and its PoissonRegressor give means; their distribution
is the negative binomial whose dispersion is the most likely one at means of five folds. They are fitted to counts
divided by the exposure, which is their weight. "normal" is `likelihood="gaussian"`; the exposure is a column. Figures
are nats of a count of 2,000 others: probabilities, of normal distributions those of the interval around the count. RMSE
is that of the mean against the rate. Means over five seeds. It writes counts.json.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import optimize, stats
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.linear_model import PoissonRegressor
from sklearn.model_selection import cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import ntk_laplace as ntkl

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _shared import machine, once, parser, table, write

Numbers = NDArray[np.float64]
LEVELS = {"few": -0.5, "some": 1.2, "many": 3.5, "some, rates vary": 1.2}
LAPLACE = {"LaplaceRegressor": "auto", "normal": "gaussian"}
PEERS = {  # and how each takes weights
    "gradient boosting": (lambda: HistGradientBoostingRegressor(loss="poisson", max_iter=60, learning_rate=0.05),
                          "sample_weight"),
    "log-linear": (lambda: make_pipeline(StandardScaler(), PoissonRegressor(alpha=1e-3)),
                   "poissonregressor__sample_weight"),
}
LINEAR = "log-linear, rates vary"
EXPOSED, COLUMN = "exposures, rates vary", "exposures as a column"


def draw(name: str, seed: int, rows: int) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Inputs, of which an exposure is the last, counts, means without the gamma factors, and exposures, or 1."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 8 if name == LINEAR else 5))
    if name == LINEAR:
        log_rate = 1.0 + x[:, :4] @ np.array([0.5, -0.4, 0.3, 0.2])
    else:
        log_rate = LEVELS.get(name, LEVELS["some"]) + 0.6 * np.sin(1.5 * x[:, 0]) + 0.3 * x[:, 1] * x[:, 2]
    exposed = name in (EXPOSED, COLUMN)
    factor = random.gamma(2.0, 0.5, rows) if exposed or "vary" in name else 1.0
    exposure = random.uniform(0.05, 2.0, rows) if exposed else np.ones(rows)
    mean = np.exp(log_rate) * exposure
    return np.column_stack([x, *[exposure] * exposed]), random.poisson(mean * factor).astype(float), mean, exposure


def log_mass(y: Numbers, mean: Numbers, dispersion: float) -> Numbers:
    """Log probabilities under a negative binomial."""
    found: Numbers = stats.nbinom(1 / dispersion, 1 / (1 + dispersion * mean)).logpmf(y)
    return found


def of_laplace(train: Any, test: Any, **parameters: Any) -> dict[str, float]:
    """Scores of the estimator."""
    x, y, *_ = train
    x_test, y_test, rate, *_ = test
    start = time.process_time()
    model = ntkl.LaplaceRegressor(**parameters).fit(x, y)
    spent = time.process_time() - start
    each, count = model.predict_distribution(x_test), torch.from_numpy(y_test)
    if isinstance(each, ntkl.NormalMixture):
        below = torch.where(count > 0, each.cdf(count - 0.5), 0.0)  # all that is below 1/2 counts as 0
        density = (each.cdf(count + 0.5) - below).clamp_min(1e-12).log()
    else:
        density = each.log_prob(count)
    lower, upper = model.predict_quantiles(x_test, (0.05, 0.95)).T
    return {"log likelihood": float(density.mean()), "rmse": rmse(model.predict(x_test), rate), "seconds": spent,
            "coverage": float(((lower <= y_test) & (y_test <= upper)).mean()),
            "counts": float(model.likelihood_ == "negative-binomial")}


def of_peer(name: str, train: Any, test: Any) -> dict[str, float]:
    """Scores of a model of scikit-learn, with a dispersion by cross-validation."""
    (x, y, _, exposure), (x_test, y_test, rate, new) = train, test
    made, weight = PEERS[name]
    if (exposure != 1.0).any():
        x, x_test = x[:, :-1], x_test[:, :-1]
    start = time.process_time()
    left_out = exposure * cross_val_predict(made(), x, y / exposure, cv=5, params={weight: exposure})
    log_alpha = optimize.minimize_scalar(lambda log_alpha: -log_mass(y, left_out, np.exp(log_alpha)).mean(),
                                         bounds=(-9.0, 3.0), method="bounded").x
    mean = new * made().fit(x, y / exposure, **{weight: exposure}).predict(x_test)
    spent = time.process_time() - start
    alpha = float(np.exp(log_alpha))
    own = stats.nbinom(1 / alpha, 1 / (1 + alpha * mean))
    return {"log likelihood": float(log_mass(y_test, mean, alpha).mean()), "rmse": rmse(mean, rate), "seconds": spent,
            "coverage": float(((own.ppf(0.05) <= y_test) & (y_test <= own.ppf(0.95))).mean())}


def rmse(mean: Numbers, rate: Numbers) -> float:
    """Root mean squared difference."""
    return float(np.mean((mean - rate) ** 2)) ** 0.5


def case(name: str, seed: int, small: bool) -> dict[str, dict[str, float]]:
    """Every model on one table."""
    train, test = draw(name, seed, 60 if small else 600), draw(name, 1000 + seed, 200 if small else 2000)
    shared = {"epochs": 3 if small else "auto", "random_state": seed}
    found = {way: of_laplace(train, test, likelihood=likelihood, **shared,
                             exposure=5 if name == EXPOSED and likelihood == "auto" else None)
             for way, likelihood in LAPLACE.items()}
    return found | {way: of_peer(way, train, test) for way in PEERS}


def report(options: Any, names: Sequence[str], case: Callable[..., dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Print a table of each score, means over seeds, and return them by table; `case` takes a name and a seed."""
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")  # of tables where leave-one-out is not to be trusted
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    for name in names:
        runs = [once(options.out / f"{name} {seed}.json", [str(options.small)],
                     lambda name=name, seed=seed: case(name, seed, options.small))
                for seed in range(1 if options.small else 5)]
        results[name] = {way: {score: float(np.mean([run[way][score] for run in runs])) for score in runs[0][way]}
                         for way in runs[0]}
    for score in ("log likelihood", "rmse", "coverage", "seconds"):
        print(f"\n{score}\n")
        digits = 1 if score == "seconds" else 3
        print(table(["data", *results[names[0]]],
                    [[name, *(f"{one[score]:.{digits}f}" for one in results[name].values())] for name in names]))
    write(options.out / f"{options.out.name}.json", {"machine": machine(options.threads), "results": results})
    return results


def main() -> None:
    """A table of each score."""
    options = parser(__doc__, "counts").parse_args()
    results = report(options, ["some, rates vary"] if options.small else [*LEVELS, LINEAR, EXPOSED, COLUMN], case)
    chosen = [one["LaplaceRegressor"]["counts"] for one in results.values()]
    print(f"\nThe evidence takes the negative binomial in {100 * np.mean(chosen):.0f} % of the cases.")


if __name__ == "__main__":
    main()
