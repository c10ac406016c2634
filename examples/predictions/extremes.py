"""Columns with extreme values: estimators that clip them smoothly or not, and scikit-learn's forests and boosting.

    python examples/predictions/extremes.py --threads 1 --out extremes

Tables of 300 rows and five normal columns. The target is a sine of one column, a product of two and a line of a fourth,
with noise. Then 1 % of the values are 20 times as large ("slips"), 2 % are -999 ("codes"), or columns are the
exponential of twice their values ("skewed"). In two further tables columns have Student's t distribution of two degrees
of freedom, and the target bounded functions of them ("heavy tails"), or it is proportional to one skewed column beside
the others ("line"): nothing is better there with clipping. scikit-learn's models have normal noise, whose variance is
that of errors in five folds. Figures are nats of 2,000 other targets, standardized by the training's, and errors of the
mean. Means over five seeds. It writes extremes.json.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from counts import Numbers, parser, report, rmse
from scipy import stats
from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor
from sklearn.model_selection import cross_val_predict

import ntk_laplace as ntkl

NAMES = ("slips", "codes", "skewed", "heavy tails", "line")
CLIPPING: dict[str, bool | str] = {"LaplaceRegressor": "auto", "without clipping": False}
PEERS = {"forest": RandomForestRegressor, "gradient boosting": HistGradientBoostingRegressor}


def draw(name: str, seed: int, rows: int) -> tuple[Numbers, Numbers]:
    """Inputs and targets."""
    random = np.random.default_rng(seed)
    x, noise = random.normal(size=(rows, 5)), 0.3 * random.normal(size=rows)
    if name == "heavy tails":
        x = random.standard_t(2, size=(rows, 5))
        return x, np.sin(x[:, 0]) + np.tanh(x[:, 1] * x[:, 2]) + 0.5 * np.clip(x[:, 3], -3, 3) + noise
    rest = 0.5 * x[:, 1] * x[:, 2] + 0.5 * x[:, 3] + noise
    if name == "line":
        x[:, 0] = np.exp(1.5 * x[:, 0])
        return x, x[:, 0] / 6 + rest
    y = np.sin(1.5 * x[:, 0]) + rest
    if name == "skewed":
        return np.exp(2 * x), y
    changed = random.random(x.shape) < (0.01 if name == "slips" else 0.02)
    return np.where(changed, 20 * x if name == "slips" else -999.0, x), y


def of_laplace(clipping: bool | str, train: Any, test: Any, seed: int, epochs: Any) -> dict[str, float]:
    """Scores of the estimator."""
    start = time.process_time()
    model = ntkl.LaplaceRegressor(smooth_clipping=clipping, epochs=epochs, random_state=seed).fit(*train)
    spent = time.process_time() - start
    x, y = test
    lower, upper = model.predict_quantiles(x, (0.05, 0.95)).T
    return {"log likelihood": float(model.predict_distribution(x).log_prob(torch.from_numpy(y)).mean()),
            "rmse": rmse(model.predict(x), y), "coverage": float(((lower <= y) & (y <= upper)).mean()),
            "seconds": spent}


def of_peer(name: str, train: Any, test: Any) -> dict[str, float]:
    """Scores of a model of scikit-learn, with the variance of errors in five folds."""
    start, (x, y), (x_test, y_test) = time.process_time(), train, test
    new = PEERS[name](random_state=0)
    deviation = rmse(cross_val_predict(new, x, y, cv=5), y)
    mean = new.fit(x, y).predict(x_test)
    spent = time.process_time() - start
    within = np.abs(y_test - mean) <= deviation * stats.norm.ppf(0.95)
    return {"log likelihood": float(stats.norm(mean, deviation).logpdf(y_test).mean()), "rmse": rmse(mean, y_test),
            "coverage": float(within.mean()), "seconds": spent}


def case(name: str, seed: int, small: bool) -> dict[str, dict[str, float]]:
    """Every model on one table."""
    train, test = draw(name, seed, 60 if small else 300), draw(name, 1000 + seed, 200 if small else 2000)
    mean, scale = train[1].mean(), train[1].std()
    train, test = ((x, (y - mean) / scale) for x, y in (train, test))
    found = {way: of_laplace(clipping, train, test, seed, 3 if small else "auto")
             for way, clipping in CLIPPING.items()}
    return found | {way: of_peer(way, train, test) for way in PEERS}


def main() -> None:
    """A table of each score."""
    options = parser(__doc__, "extremes").parse_args()
    report(options, NAMES[:1] if options.small else NAMES, case)


if __name__ == "__main__":
    main()
