"""How hard are the first splits of the UCI regressions? A random forest's error on each of them.

    python examples/uci/splits.py --data DIR --first 3 --out splits

`uci.py` scores the first three of twenty splits, [I21] ten random ones. A forest has nothing to do with either, so the
splits on which it does well are the easy ones. It prints the root mean squared test errors in the original units: of
the first splits, mean and standard deviation of all, and how far the mean of the first lies below that of all, in
standard errors of a mean of as many. It writes splits.json.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
from sklearn.ensemble import RandomForestRegressor
from sklearn.model_selection import train_test_split
from uci import REGRESSION, read

from ntk_laplace import metrics

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _shared import machine, parser, table, write


def errors(name: str, folder: Path | None, trees: int) -> list[float]:
    """RMSE of a forest on each split."""
    x, y, splits = read(name, folder)
    if not splits:
        index = np.arange(len(x))
        splits = [train_test_split(index, train_size=0.9, random_state=number) for number in range(4)]
    y = y.reshape(len(x))
    found = []
    for train, test in splits:
        forest = RandomForestRegressor(trees, random_state=0).fit(x[train], y[train])
        found.append(metrics.rmse(forest.predict(x[test]), y[test]))
    return found


def main() -> None:
    """All data sets."""
    arguments = parser(__doc__, "splits")
    arguments.add_argument("--data", type=Path, help="folder of the .npz files; scikit-learn's diabetes otherwise")
    arguments.add_argument("--first", type=int, default=3, help="splits to hold against all of them (default 3)")
    options = arguments.parse_args()
    names = ("diabetes",) if options.data is None else REGRESSION
    found = {name: errors(name, options.data, 5 if options.small else 40) for name in names}
    rows = []
    for name, all_of_them in found.items():
        first, mean, spread = all_of_them[: options.first], np.mean(all_of_them), np.std(all_of_them, ddof=1)
        far = (np.mean(first) - mean) / (spread / math.sqrt(len(first)))
        rows.append([name, ", ".join(f"{error:.2f}" for error in first), f"{mean:.2f} ± {spread:.2f}", f"{far:+.1f}"])
    print(table(["data", f"RMSE, first {options.first}", "all", "in standard errors"], rows))
    options.out.mkdir(parents=True, exist_ok=True)
    write(options.out / "splits.json", {"machine": machine(options.threads), "results": found})


if __name__ == "__main__":
    main()
