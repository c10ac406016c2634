"""Prediction intervals and sets by closed-form leave-one-out, beside MAPIE, which trains the network N times.

    pip install mapie
    python examples/predictions/intervals.py --data DIR --out intervals

MLPs of one hidden layer of 50 tanh units on 100 points of each table (with ``--data``: boston, concrete, energy,
yacht, australian, ionosphere and banana from DIR/*.npz; always diabetes, breast cancer, wine and digits of
scikit-learn), trained from one start by 150 steps of full-batch Adam and Gauss-Newton steps to the optimum: with a
weight decay of 5e-4 of the mean loss ("ordinary"), and at the noise and the precision of each layer that training with
evidence chose ("evidence"). MAPIE's jackknife+ (its cross-conformal sets of leave-one-out, for classes) has the same
network trained from the same start without each point. Coverage and average width or size of level 0.9 are those of up
to 400 other points; widths are in standard deviations of y. "Gaussian" is the central interval of `predict`. It prints
tables and writes intervals.json; a table that is there already with the same options is kept. Without MAPIE its columns
are left out.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "selection"))

from _retraining import retrained
from _shared import machine, once, parser, table, write
from leave_one_out import BUNDLED, FILES, Problem, with_evidence

import ntk_laplace as ntkl

try:
    from mapie.classification import CrossConformalClassifier
    from mapie.regression import CrossConformalRegressor
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.model_selection import LeaveOneOut
except ImportError:
    CrossConformalRegressor = None

LEVEL = 0.9
Z = 1.6448536269514722  # of a central normal interval of that level
SETTINGS = ("ordinary", "evidence")
SCORES = {False: ("normalized", "absolute"), True: ("probability", "cumulative", "randomized")}


class Shallow(Problem):
    """Networks of one hidden layer."""

    def network(self, width: int, seed: int) -> nn.Sequential:
        """Untrained."""
        torch.manual_seed(seed)
        first = nn.Linear(self.train[0].shape[1], width)
        return nn.Sequential(first, nn.Tanh(), nn.Linear(width, self.classes or 1)).double().eval()


class Recipe:
    """All networks of a table from one start, at fixed precisions and noise: without each point, and (last) of all."""

    def __init__(self, problem: Problem, setting: str, options: argparse.Namespace, seed: int) -> None:
        self.problem, start, count = problem, problem.network(options.width, seed), len(problem.train[1])
        if setting == "ordinary":
            self.precision, self.noise, self.groups = torch.tensor([5e-4 * count] * 2), 1.0, "all"
        else:
            found = with_evidence(problem, options.width, options.epochs, seed)
            self.precision, self.noise, self.groups = found.precision, found.noise or 1.0, "layer"
        self.networks = self._trained(start, options.steps)

    def _trained(self, start: nn.Sequential, steps: int) -> list[nn.Module]:
        """Full-batch Adam on N + 1 penalized likelihoods at once, then Gauss-Newton steps to their optima."""
        x, y = self.problem.train
        count = len(y)
        included = torch.cat([1 - torch.eye(count, dtype=x.dtype), torch.ones(1, count, dtype=x.dtype)])
        weights = [p.detach().expand(count + 1, *p.shape).clone().requires_grad_() for p in start.parameters()]
        optimizer = torch.optim.Adam(weights, lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            optimizer.zero_grad()
            w, b, v, a = weights
            f = torch.baddbmm(a.unsqueeze(1), torch.tanh(x @ w.mT + b.unsqueeze(1)), v.mT)
            if self.problem.classes:
                loss = -f.log_softmax(-1).gather(2, y.view(1, -1, 1).expand(count + 1, -1, 1)).squeeze(2)
            else:
                loss = 0.5 * (f - y).square().squeeze(2) / self.noise
            penalty = sum(0.5 * d * (m.square().sum() + n.square().sum())
                          for d, m, n in zip(self.precision, weights[::2], weights[1::2], strict=True))
            ((included * loss).sum() + penalty).backward()
            optimizer.step()
            schedule.step()
        theta = torch.cat([w.detach().flatten(1) for w in weights], 1)
        flat = torch.cat([d.to(x).expand(p.numel()) for d, p in zip(self.precision.repeat_interleave(2),
                                                                     start.parameters(), strict=True)])
        points = torch.cat([torch.arange(count), torch.tensor([-1])])
        noise = None if self.problem.classes else self.noise
        theta, _ = retrained(start, x, y, noise, flat, points, start=theta)
        networks = [copy.deepcopy(start) for _ in theta]
        for own, network in zip(theta, networks, strict=True):
            nn.utils.vector_to_parameters(own, network.parameters())
        return networks


def ours(recipe: Recipe) -> tuple[dict[str, Any], float]:
    """Coverage and width of each score of the library, and the seconds for all after one training."""
    problem, (x, y) = recipe.problem, recipe.problem.test
    network, noise, precision = recipe.networks[-1], recipe.noise, recipe.precision.double()
    if recipe.groups == "all":
        precision = float(precision[0])
        if not problem.classes:  # weight decay says nothing of the noise: the mean squared residual
            with torch.no_grad():
                noise = float((network(problem.train[0]) - problem.train[1]).square().mean())
            precision /= noise
    begun = time.perf_counter()
    prior = ntkl.GaussianPrior(precision, groups=recipe.groups)
    posterior = ntkl.laplace(network, problem.train, problem.likelihood(noise), prior, structure="gp")
    found: dict[str, Any] = {}
    for score in SCORES[bool(problem.classes)]:
        if problem.classes:
            generator = torch.Generator().manual_seed(0)
            one: Any = posterior.predict_set(x, LEVEL, score=score, generator=generator)
        else:
            one = posterior.predict_interval(x, LEVEL, score=score)
        sizes = one.size if problem.classes else one.width
        found[score] = [one.coverage(y), float(sizes.double().mean())]
    measured = one.reliability
    found["speaks"], found["reasons"] = not measured.trusted, list(measured.reasons)
    seconds = time.perf_counter() - begun
    if not problem.classes:
        response = posterior.predict(x)
        sd = response.variance.sqrt()
        inside = (response.mean - y).abs() <= Z * sd
        found["Gaussian"] = [float(inside.double().mean()), float(2 * Z * sd.mean())]
    else:
        found["accuracy"] = float((one.probabilities.argmax(1) == y).double().mean())
    return found, seconds


def of_mapie(recipe: Recipe) -> dict[str, Any]:
    """The same of MAPIE, which fits once for each point."""
    problem, (x, y) = recipe.problem, [part.numpy() for part in recipe.problem.train]
    x_test, y_test = (part.numpy() for part in problem.test)
    # the number of a training point, by which an estimator knows which point it is without
    x, x_test = (np.column_stack([np.arange(len(part)), part]) for part in (x, x_test))
    y, y_test = y.ravel(), y_test.ravel()
    common = {"confidence_level": LEVEL, "cv": LeaveOneOut()}
    if problem.classes:
        model = CrossConformalClassifier(Classifier(recipe), conformity_score="lac", **common).fit_conformalize(x, y)
        sets = model.predict_set(x_test, agg_scores="crossval")[1][:, :, 0]
        return {"lac": [float(sets[np.arange(len(y_test)), y_test].mean()), float(sets.sum(1).mean())]}
    model = CrossConformalRegressor(Regressor(recipe), method="plus", **common).fit_conformalize(x, y)
    lower, upper = model.predict_interval(x_test)[1][:, :, 0].T
    return {"plus": [float(((lower <= y_test) & (y_test <= upper)).mean()), float((upper - lower).mean())]}


if CrossConformalRegressor is not None:

    class Regressor(RegressorMixin, BaseEstimator):
        """A recipe as scikit-learn sees it."""

        def __init__(self, recipe: Recipe | None = None) -> None:
            self.recipe = recipe

        def __sklearn_clone__(self) -> Regressor:
            return type(self)(self.recipe)

        def fit(self, x: np.ndarray, y: np.ndarray) -> Regressor:
            """Take the network that was trained on these points."""
            count = len(self.recipe.networks) - 1
            (index,) = set(range(count)) - set(x[:, 0].astype(int)) or {count}
            self.network_, self.n_features_in_ = self.recipe.networks[index], x.shape[1]
            return self

        def outputs(self, x: np.ndarray) -> Tensor:
            """The network's."""
            with torch.no_grad():
                return self.network_(torch.as_tensor(x[:, 1:]))

        def predict(self, x: np.ndarray) -> np.ndarray:
            """Responses."""
            return self.outputs(x).squeeze(1).numpy()

    class Classifier(ClassifierMixin, Regressor):
        """The same for classes."""

        def fit(self, x: np.ndarray, y: np.ndarray) -> Classifier:
            """As above; a fold may lack a class, the network has an output for each."""
            self.classes_ = np.arange(self.recipe.problem.classes)
            return super().fit(x, y)

        def predict_proba(self, x: np.ndarray) -> np.ndarray:
            """Class probabilities."""
            return self.outputs(x).softmax(1).numpy()

        def predict(self, x: np.ndarray) -> np.ndarray:
            """Most probable classes."""
            return self.outputs(x).argmax(1).numpy()


def study(name: str, setting: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One table."""
    few = min(options.count, 60) if name == "digits" else options.count  # ten classes
    problem = Shallow.read(name, options.data, few, seed)
    recipe = Recipe(problem, setting, options, seed)
    found, seconds = ours(recipe)
    result = {"table": name, "setting": setting, "seed": seed, "classes": problem.classes, **found, "seconds": seconds}
    if CrossConformalRegressor is not None and not options.alone:
        result |= of_mapie(recipe)
    return result


def summary(results: list[dict[str, Any]], classes: bool) -> str:
    """Means over the seeds: coverage and width of each method."""
    own = [one for one in results if bool(one["classes"]) == classes]
    named = [*SCORES[classes], *(("lac",) if classes else ("Gaussian", "plus"))]
    named = [name for name in named if any(name in one for one in own)]
    rows = []
    for table_name, setting in dict.fromkeys((one["table"], one["setting"]) for one in own):
        same = [one for one in own if (one["table"], one["setting"]) == (table_name, setting)]
        numbers = [np.mean([one[name] for one in same], 0) if name in same[0] else None for name in named]
        spoke = f"{sum(one['speaks'] for one in same)}/{len(same)}"
        more = [f"{np.mean([one['accuracy'] for one in same]):.3f}"] if classes else []
        cells = ["-" if n is None else f"{n[0]:.3f}, {n[1]:.3f}" for n in numbers]
        rows.append([table_name, setting, *cells, *more, spoke])
    names = {"lac": "MAPIE: lac", "plus": "MAPIE: plus"}
    heads = ["table", "training", *(names.get(name, name) for name in named), *(["accuracy"] if classes else [])]
    return table([*heads, "the library speaks"], rows) if rows else ""


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__, "intervals")
    arguments.add_argument("--data", type=Path, help="folder with boston.npz and its like")
    arguments.add_argument("--problems", nargs="+", choices=[*FILES, *BUNDLED])
    arguments.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    arguments.add_argument("--seeds", type=int, default=3, help="networks and splits for each table (default 3)")
    arguments.add_argument("--alone", action="store_true", help="without MAPIE")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    options.width, options.steps, options.epochs, options.count = 50, 150, 150, 100
    names = options.problems or [*(FILES if options.data else ()), *BUNDLED]
    if options.small:
        options.width, options.steps, options.epochs, options.count, options.seeds = 5, 30, 20, 24, 1
        names = options.problems or ["diabetes", "wine"]
    warnings.simplefilter("ignore")  # the library's are counted; MAPIE's are of folds without a class
    options.out.mkdir(parents=True, exist_ok=True)
    results = []
    for setting in options.settings:
        for seed in range(options.seeds):
            for name in names:
                asked = [str(value) for value in (name, setting, seed, options.width, options.count, options.alone)]
                compute: Callable[[], Any] = partial(study, name, setting, seed, options)
                results.append(once(options.out / f"{setting}-{name}-{seed}.json", asked, compute))
                print({k: v for k, v in results[-1].items() if k != "classes"}, flush=True)
    write(options.out / "intervals.json", {"machine": machine(options.threads), "results": results})
    for classes in (False, True):
        print(f"\n{summary(results, classes)}")


if __name__ == "__main__":
    main()
