"""Leave-one-out of some points under a structured posterior, beside the exact one and beside test data.

    python examples/selection/leave_some_out.py --data DIR --out leave_some_out

MLPs of two hidden layers of 50 tanh units on the tables (with ``--data``: boston, concrete, energy, yacht, australian,
ionosphere, banana from DIR/*.npz; always diabetes and digits of scikit-learn) and a CNN on 1,000 images of
DIR/mnist.npz, trained with evidence (KFAC, a precision for each layer) or with weight decay 5e-4. For each structure
the mean log density of training points stands beside that of test points under its predictions:

    exact        leave-one-out of the exact posterior
    subtracted   each point subtracted from the structure's curvature: leave_one_out(strict=False)
    last layer   exact leave-one-out of the last layer alone
    kernel       as `leave_one_out(points)`, with the structure's kernel for the means too
    narrow       as `leave_one_out(points)`, with covariances that know the rest of the group
    points       `leave_one_out(points)`

Each also chooses the scale c of the covariance, and the temperature T or the noise; the table gives the test log
likelihood of the structure's predictions with the chosen values, and with those of held-out data. Points are all of a
table (ten groups), and 200 of digits and images. Writes leave_some_out.json; what is there already is kept.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from leave_one_out import DECAYS, FILES, Model, Problem, trained, with_evidence
from scipy.optimize import minimize
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _shared import machine, once, parser, table, write

import ntk_laplace as ntkl
from ntk_laplace.model.predictive import predictive
from ntk_laplace.structures.what_if import rows_of

COUNTS = {"boston": 350, "concrete": 400, "energy": 400, "yacht": 200, "diabetes": 300, "australian": 350,
          "ionosphere": 200, "banana": 400, "digits": 1000, "mnist": 1000}
FEW = 200  # points of digits and images
SCALES, TEMPERATURES = (math.exp(-9), 20.0), (0.25, 4.0)
Moments = tuple[Tensor, Tensor]


class Images(Problem):
    """MNIST, and a CNN of 3,106 weights."""

    @classmethod
    def read(cls, name: str, folder: Path | None, count: int, seed: int, tests: int = 2000) -> Problem:
        """So many training images, and so many test images."""
        with np.load(folder / f"{name}.npz") as found:
            chosen = np.random.default_rng(seed).permutation(len(found["y_train"]))[:count]
            pairs = ((found[f"X_{part}"][where], found[f"y_{part}"][where])
                     for part, where in (("train", chosen), ("test", slice(tests))))
            train, test = ((torch.tensor(x / 255.0).unsqueeze(1), torch.tensor(y).long()) for x, y in pairs)
        return cls(name, train, test, 10)

    def network(self, width: int, seed: int) -> nn.Sequential:
        """Untrained."""
        torch.manual_seed(seed)
        convolutions = nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 8, 5, stride=2), nn.ReLU()
        return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(128, 10)).double().eval()


def fit(model: Model, structure: str, **options: Any) -> ntkl.Posterior:
    """A posterior of the trained network."""
    likelihood, prior = model.problem.likelihood(model.noise), ntkl.GaussianPrior(model.precision, groups=model.groups)
    if "parameters" in options:
        prior = ntkl.GaussianPrior(torch.as_tensor(model.precision).reshape(-1)[-1])
    return ntkl.laplace(model.network, model.problem.train, likelihood, prior, structure, **options)


def kernel_alone(posterior: ntkl.Posterior, index: Tensor) -> Moments:
    """f_i - V_-i r_i and V_-i, with the structure fitted without a group and conditioned on all of the group but i."""
    fitted, count = posterior.fitted, -(-len(index) // (posterior.num_examples // 10))
    root = fitted.points.root(fitted.curvature_type, fitted.likelihood).detach()
    mean, covariance = torch.empty_like(posterior.f), torch.empty_like(root @ root.mT)
    for group in (index[start::count] for start in range(count)):
        stays = torch.ones(posterior.num_examples, dtype=torch.bool).index_fill(0, group, False)
        joint = posterior.subset(stays).posterior_precision.covariance(rows_of(fitted, group))
        kernel = joint.view(len(group), posterior.num_outputs, len(group), posterior.num_outputs)
        for place, point in enumerate(group.tolist()):
            rest = torch.arange(len(group)) != place
            known = torch.einsum("icjd,jdr->icjr", kernel[:, :, rest], root[group[rest]]).flatten(2)  # KS
            inner = torch.einsum("jdr,jdx->jrx", root[group[rest]], known[rest]).flatten(0, 1)
            inner.diagonal().add_(1.0)
            own = known[place]
            covariance[point] = kernel[place, :, place] - own @ torch.linalg.solve(inner, own.T)
            mean[point] = posterior.f[point] - covariance[point] @ fitted.residual()[point]
    return mean[index], covariance[index]


class Scale:
    """Densities with covariance cV, and temperature T of classes or another noise."""

    def __init__(self, problem: Problem, noise: float | None, evaluations: int = 60) -> None:
        self.problem, self.noise, self.evaluations = problem, noise, evaluations

    def __call__(self, found: Moments, y: Tensor, c: float = 1.0, other: float | None = None) -> float:
        """Mean log density; `other` is T or the noise."""
        if self.problem.classes:
            likelihood: ntkl.Likelihood = ntkl.Categorical(temperature=1.0 if other is None else other)
        else:
            likelihood = ntkl.Gaussian(self.noise if other is None else other)
        with torch.no_grad():
            return float(predictive(likelihood, found[0], c * found[1], samples=200).log_prob(y).mean())

    def tuned(self, found: Moments, y: Tensor) -> tuple[float, float]:
        """The c and the T, or noise, of highest density."""
        low, high = TEMPERATURES if self.problem.classes else (self.noise / 50, self.noise * 50)
        bounds = [tuple(math.log(b) for b in pair) for pair in (SCALES, (low, high))]

        def loss(logs: np.ndarray) -> float:
            c, other = (math.exp(min(max(v, b[0]), b[1])) for v, b in zip(logs, bounds, strict=True))
            return -self(found, y, c, other)

        side = 7 if self.evaluations > 10 else 3
        grid = [np.array([a, b]) for a in np.linspace(*bounds[0], side) for b in np.linspace(*bounds[1], side)]
        best = min(grid, key=loss)
        simplex = best + np.array([[0, 0], [0.5, 0], [0, 0.5]])
        end = minimize(loss, best, method="Nelder-Mead",
                       options={"maxfev": self.evaluations, "initial_simplex": simplex}).x
        c, other = (math.exp(min(max(v, b[0]), b[1])) for v, b in zip(end, bounds, strict=True))
        return c, other


def study(name: str, how: str, structures: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """One network under all structures."""
    count, tests = (30, 40) if options.small else (COUNTS[name], 2000)
    problem = (Images if name == "mnist" else Problem).read(name, options.data, count, options.seed, tests)
    half = len(problem.test[1]) // 2
    held, test = (tuple(part[where] for part in problem.test) for where in (slice(half), slice(half, None)))
    if how == "evidence":
        model = with_evidence(problem, options.width, options.epochs, options.seed)
    else:
        model = trained(problem, options.width, DECAYS["ordinary"], options.steps, options.seed)
    weights = sum(p.numel() for p in model.network.parameters())
    exact = fit(model, "full" if weights < count * ((problem.classes or 2) - 1) else "gp")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(options.seed))
    points = order[: count if count <= 400 and not options.small else min(FEW, count // 2)].sort().values
    y, scale, results = problem.train[1][points], Scale(problem, model.noise, 6 if options.small else 60), []
    first, whole = fit(model, "full", parameters="last_layer").leave_one_out(points), exact.leave_one_out(points)
    for structure in structures:
        posterior = fit(model, structure)
        subtracted, some = posterior.leave_one_out(strict=False), posterior.leave_one_out(points)
        kernel, narrow = kernel_alone(posterior, points)
        ways: dict[str, Moments] = {
            "exact": (whole.mean, whole.covariance),
            "subtracted": (subtracted.mean[points], subtracted.covariance[points]),
            "last layer": (first.mean, first.covariance),
            "kernel": (kernel, narrow), "narrow": (some.mean, narrow), "points": (some.mean, some.covariance),
        }
        at_test, at_held = posterior.latent_moments(test[0]), posterior.latent_moments(held[0])
        one: dict[str, Any] = {
            "table": name, "training": how, "structure": structure, "points": len(points), "weights": weights,
            "test": scale(at_test, test[1]), "network": scale(at_test, test[1], 0.0),
            "exact posterior": scale(exact.latent_moments(test[0]), test[1]),
            "held-out": scale(at_test, test[1], *scale.tuned(at_held, held[1])),
            "unfinished": some.reliability.unfinished, "trusted": some.trusted,
            "largest": float(subtracted.leverage.max()), "error": some.standard_error,
        }
        for words, found in ways.items():
            c, other = scale.tuned(found, y)
            one[words] = {"density": scale(found, y), "c": c, "other": other, "scaled": scale(found, y, c, other),
                          "test": scale(at_test, test[1], c, other)}
        results.append(one)
        print(f"{name}, {how}, {structure}: test {one['test']:.3f}, points {one['points']['density']:.3f}", flush=True)
    return results


WAYS = ("exact", "subtracted", "last layer", "kernel", "narrow", "points")


def printed(results: list[dict[str, Any]], training: str) -> str:
    """Densities, and test densities at the chosen values, with mean absolute differences below."""
    chosen = [one for one in results if one["training"] == training]
    heads = ["table", "structure", "test", *WAYS]
    rows = [[one["table"], one["structure"], f"{one['test']:.3f}", *(f"{one[way]['density']:.3f}" for way in WAYS)]
            for one in chosen]
    for words, against in (("mean absolute difference from test", lambda one: one["test"]),
                           ("from exact", lambda one: one["exact"]["density"])):
        gaps = [np.mean([abs(one[way]["density"] - against(one)) for one in chosen]) for way in WAYS]
        rows.append([words, "", "", *(f"{gap:.3f}" for gap in gaps)])
    first = table(heads, rows)
    heads = ["table", "structure", "network", "as it is", "held-out", *WAYS]
    rows = [[one["table"], one["structure"], *(f"{one[key]:.3f}" for key in ("network", "test", "held-out")),
             *(f"{one[way]['test']:.3f}" for way in WAYS)] for one in chosen]
    means = [np.mean([one[key] for one in chosen]) for key in ("network", "test", "held-out")]
    means += [np.mean([one[way]["test"] for one in chosen]) for way in WAYS]
    rows.append(["mean", "", *(f"{value:.3f}" for value in means)])
    return f"trained with {training}: mean log density\n{first}\n\ntest log likelihood, tuned by\n{table(heads, rows)}"


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__, "leave_some_out")
    arguments.add_argument("--data", type=Path, help="folder with boston.npz and its like")
    arguments.add_argument("--problems", nargs="+", choices=[*COUNTS, "wine"])
    arguments.add_argument("--structures", nargs="+", default=["kfac"])
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    options.width, options.steps, options.epochs = (5, 60, 20) if options.small else (50, 600, 300)
    names = options.problems or [*(FILES if options.data else ()), "diabetes", "digits"]
    names = options.problems or (["wine"] if options.small else [*names, *(["mnist"] if options.data else [])])
    warnings.simplefilter("ignore", ntkl.NTKLaplaceWarning)  # it is written, not printed
    options.out.mkdir(parents=True, exist_ok=True)
    results = []
    for name in names:
        for how in ("evidence", "weight decay"):
            asked = [str(options.seed), str(options.width), *options.structures]
            kept = options.out / f"{name}-{how.replace(' ', '-')}.json"
            results += once(kept, asked, partial(study, name, how, options.structures, options))
    write(options.out / "leave_some_out.json", {"machine": machine(options.threads), "results": results})
    for how in ("evidence", "weight decay"):
        print(f"\n{printed(results, how)}")


if __name__ == "__main__":
    main()
