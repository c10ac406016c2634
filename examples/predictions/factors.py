"""Positive targets that vary by factors: `LaplaceRegressor`, which tries log-normal noise, and gradient boosting.

    python examples/predictions/factors.py --threads 1 --out factors

Tables of 200 rows and four normal columns. The logarithm of the target is a column and a product of two others, or a
sine and a line, with normal noise; or the target is the exponential of the latter times a gamma factor of variance 0.5,
or with noise of three degrees of freedom in its logarithm. In the last table an exponential is added to 5, with normal
noise: nothing is better there in logarithms. scikit-learn's gradient boosting (60 trees of rate 0.05) has normal noise,
whose variance is that of errors in five folds, as it is or for the logarithms of targets. "normal" is
`likelihood="gaussian"`. Figures are nats of 2,000 other targets, and errors of the mean, in standard deviations of
these. Means over five seeds. It writes factors.json.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from counts import LAPLACE, Numbers, parser, report, rmse
from scipy import stats
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.model_selection import cross_val_predict

import ntk_laplace as ntkl

NAMES = ("a product", "a sine", "gamma factors", "heavy tails", "sums")
PEERS = {"gradient boosting": False, "gradient boosting, logarithms": True}


def draw(name: str, seed: int, rows: int) -> tuple[Numbers, Numbers]:
    """Inputs and targets."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 4))
    if name == "sums":
        return x, 5 + np.exp(x[:, 0]) + 0.2 * random.normal(size=rows)
    if name == "a product":
        return x, np.exp(1.2 * x[:, 0] + 0.5 * x[:, 1] * x[:, 2] + 0.5 * random.normal(size=rows))
    log_factor = {"a sine": lambda: 0.3 * random.normal(size=rows),
                  "gamma factors": lambda: np.log(random.gamma(2.0, 0.5, rows)),
                  "heavy tails": lambda: 0.25 * random.standard_t(3, rows)}[name]()
    return x, np.exp(np.sin(2 * x[:, 0]) + 0.5 * x[:, 1] + log_factor)


def of_laplace(likelihood: str, train: Any, test: Any, seed: int, epochs: Any) -> dict[str, float]:
    """Scores of the estimator."""
    start = time.process_time()
    model = ntkl.LaplaceRegressor(likelihood=likelihood, epochs=epochs, random_state=seed).fit(*train)
    spent = time.process_time() - start
    x, y = test
    density = model.predict_distribution(x).log_prob(torch.from_numpy(y))
    lower, upper = model.predict_quantiles(x, (0.05, 0.95)).T
    return {"log likelihood": float(density.mean()), "rmse": rmse(model.predict(x), y) / float(y.std()),
            "coverage": float(((lower <= y) & (y <= upper)).mean()), "seconds": spent,
            "factors": float(model.likelihood_ == "log-normal")}


def of_peer(logs: bool, train: Any, test: Any) -> dict[str, float]:
    """Scores of gradient boosting, with the variance of errors in five folds."""
    start, (x, y), (x_test, y_test) = time.process_time(), train, test
    new = HistGradientBoostingRegressor(max_iter=60, learning_rate=0.05, random_state=0)
    values = np.log(y) if logs else y
    deviation = rmse(cross_val_predict(new, x, values, cv=5), values)
    mean = new.fit(x, values).predict(x_test)
    spent = time.process_time() - start
    own = stats.lognorm(deviation, scale=np.exp(mean)) if logs else stats.norm(mean, deviation)
    lower, upper = own.ppf(0.05), own.ppf(0.95)
    return {"log likelihood": float(own.logpdf(y_test).mean()), "rmse": rmse(own.mean(), y_test) / float(y_test.std()),
            "coverage": float(((lower <= y_test) & (y_test <= upper)).mean()), "seconds": spent}


def case(name: str, seed: int, small: bool) -> dict[str, dict[str, float]]:
    """Every model on one table."""
    train, test = draw(name, seed, 60 if small else 200), draw(name, 1000 + seed, 200 if small else 2000)
    found = {way: of_laplace(likelihood, train, test, seed, 3 if small else "auto")
             for way, likelihood in LAPLACE.items()}
    return found | {way: of_peer(logs, train, test) for way, logs in PEERS.items()}


def main() -> None:
    """A table of each score."""
    options = parser(__doc__, "factors").parse_args()
    results = report(options, NAMES[:1] if options.small else NAMES, case)
    for name, one in results.items():
        print(f"{name}: log-normal noise in {100 * one['LaplaceRegressor']['factors']:.0f} % of the cases")


if __name__ == "__main__":
    main()
