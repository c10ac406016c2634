"""Leave-one-out beside retraining without the point, and whether the library says where the two differ.

    python examples/selection/leave_one_out.py --data DIR --out leave_one_out

MLPs of two hidden layers of 50 tanh units on 120 points of each table (with ``--data``: boston, concrete, energy,
yacht, australian, ionosphere and banana from DIR/*.npz; always diabetes, breast cancer, wine and digits of
scikit-learn), trained by full-batch Adam for 600 steps, coupled weight decay of 5e-4 or 1e-6 of the mean loss; the
noise is then the mean squared residual. Each is scored by `leave_one_out` as trained, trained on to its optimum, after
`fit_hyperparameters` at fixed weights (one precision, one for each layer, both with correction too), with its precision
chosen by leave-one-out itself, and after training with evidence. Beside each mean log density by leave-one-out stands
the real one of a random part of the points: Gauss-Newton steps from the trained weights without the point, to
convergence, a new posterior there, its log density of the point; and that of 400 test points. "Off" is a difference
of more than 0.1 nats a point from retraining. It prints a table and how often the library spoke, and
writes leave_one_out.json; a table that is there already with the same options is kept.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _retraining import retrained
from sklearn import datasets
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _shared import machine, once, parser, table, write

import ntk_laplace as ntkl

BUNDLED = {"diabetes": datasets.load_diabetes, "breast_cancer": datasets.load_breast_cancer,
           "wine": datasets.load_wine, "digits": datasets.load_digits}
REGRESSION = ("boston", "concrete", "energy", "yacht", "diabetes")
FILES = ("boston", "concrete", "energy", "yacht", "australian", "ionosphere", "banana")
DECAYS = {"ordinary": 5e-4, "almost none": 1e-6}  # coupled, of the mean loss
BOUNDS = (1e-6, 1e6)
OFF = 0.1  # nats a point


@dataclass(frozen=True)
class Problem:
    """Standardized data; `classes` is None for a regression."""

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    classes: int | None

    @classmethod
    def read(cls, name: str, folder: Path | None, count: int, seed: int, tests: int = 400) -> Problem:
        """So many training points of a table, and up to so many others."""
        if name in BUNDLED:
            found = BUNDLED[name]()
            x, y = found.data, found.target
        else:
            with np.load(folder / f"{name}.npz") as found:
                x, y = found["X"].astype(float), found["y"]
        order = np.random.default_rng(seed).permutation(len(x))
        train, test = order[:count], order[count : count + tests]
        spread = x[train].std(0)
        x = torch.as_tensor((x - x[train].mean(0)) / np.where(spread > 1e-8, spread, 1.0))
        if name in REGRESSION:
            y, classes = torch.as_tensor((y - y[train].mean()) / y[train].std())[:, None], None
        else:
            y = torch.as_tensor(np.unique(y, return_inverse=True)[1])
            classes = int(y.max()) + 1
        return cls(name, (x[train], y[train]), (x[test], y[test]), classes)

    def likelihood(self, noise: float | None) -> ntkl.Likelihood:
        """Categorical, or Gaussian of this noise."""
        return ntkl.Categorical() if self.classes else ntkl.Gaussian(noise)

    def network(self, width: int, seed: int) -> nn.Sequential:
        """Untrained."""
        torch.manual_seed(seed)
        sizes = (self.train[0].shape[1], width, width, self.classes or 1)
        layers = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.Tanh())]
        return nn.Sequential(*layers[:-1]).double().eval()


@dataclass(frozen=True)
class Model:
    """A network with the noise and the prior that it is scored under."""

    problem: Problem
    network: nn.Sequential
    noise: float | None
    precision: float | Tensor
    groups: str = "all"

    def posterior(self, groups: str | None = None, network: nn.Module | None = None, without: int = -1) -> Any:
        """Function space; of another network or without a point."""
        x, y = self.problem.train
        kept = torch.arange(len(y)) != without
        groups = self.groups if groups is None else groups
        prior = ntkl.GaussianPrior(self.precision, groups=groups)
        own = self.network if network is None else network
        return ntkl.laplace(own, (x[kept], y[kept]), self.problem.likelihood(self.noise), prior)

    def after(self, posterior: ntkl.Posterior) -> Model:
        """At the hyperparameters that a posterior has now."""
        noise = None if self.problem.classes else float(posterior.likelihood.noise.detach())
        precision, groups = posterior.prior.precision.detach().clone(), posterior.prior.groups
        return Model(self.problem, self.network, noise, precision if len(precision) > 1 else float(precision), groups)

    def retrained(self, points: Tensor) -> list[nn.Module]:
        """Networks trained on without each of the points, -1 for none."""
        flat = self.posterior().prior.flat_precision().detach()
        weights, _ = retrained(self.network, *self.problem.train, self.noise, flat, points)
        found = [copy.deepcopy(self.network) for _ in weights]
        for network, own in zip(found, weights, strict=True):
            nn.utils.vector_to_parameters(own, network.parameters())
        return found


def trained(problem: Problem, width: int, decay: float, steps: int, seed: int) -> Model:
    """Full-batch Adam on the mean loss; its weight decay as a precision of the summed one."""
    network, (x, y) = problem.network(width, seed), problem.train
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        f = network(x)
        loss = nn.functional.cross_entropy(f, y) if problem.classes else 0.5 * (f - y).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
    optimizer.zero_grad()
    with torch.no_grad():
        noise = None if problem.classes else float((network(x) - y).square().mean())
    return Model(problem, network, noise, decay * len(y) / (noise or 1.0))


def with_evidence(problem: Problem, width: int, epochs: int, seed: int) -> Model:
    """[I21] Algorithm 1 with KFAC and a precision for each layer, full batches."""
    network, prior = problem.network(width, seed), ntkl.GaussianPrior(groups="layer")
    found = ntkl.train_with_evidence(
        network, problem.train, problem.likelihood(1.0), prior, epochs=epochs, batch_size=None,
        optimizer=lambda own: torch.optim.Adam(own, lr=1e-2), schedule=ntkl.EvidenceSchedule(10, 20),
        settings=ntkl.Settings(progress=False),
    )
    noise = None if problem.classes else float(found.posterior.likelihood.noise.detach())
    return Model(problem, network, noise, found.posterior.prior.precision.detach().clone(), "layer")


def cases(problem: Problem, options: argparse.Namespace, seed: int) -> Iterator[tuple[str, Model, ntkl.Posterior]]:
    """Each setting by name, with the posterior that is asked."""
    for words, decay in DECAYS.items():
        model = trained(problem, options.width, decay, options.steps, seed)
        yield f"{words}: as trained", model, model.posterior()
        (network,) = model.retrained(torch.tensor([-1]))
        further = Model(problem, network, model.noise, model.precision)
        yield f"{words}: at the optimum", further, further.posterior()
        for correction in (False, True):
            for groups in ("all", "layer"):
                posterior = model.posterior(groups)
                moving = ["precision"] if problem.classes else ["precision", "noise"]
                posterior.fit_hyperparameters(parameters=moving, bounds=BOUNDS, correction=correction)
                name = f"evidence{' with correction' if correction else ''}, {'one' if groups == 'all' else groups}"
                yield f"{words}: {name}", model.after(posterior), posterior
        posterior = model.posterior()
        factors = np.logspace(-2, 4, 13)
        scores = []
        for factor in factors:
            posterior.prior.precision = model.precision * factor
            scores.append(float(posterior.loo_log_density()))
        posterior.prior.precision = model.precision * factors[int(np.argmax(scores))]
        yield f"{words}: chosen by leave-one-out", model.after(posterior), posterior
    model = with_evidence(problem, options.width, options.epochs, seed)
    yield "training with evidence", model, model.posterior()


def scored(problem: Problem, model: Model, posterior: ntkl.Posterior, points: Tensor) -> dict[str, Any]:
    """Leave-one-out beside retraining and test, nats a point, and what the library says of it."""
    found = posterior.leave_one_out()
    x, y = problem.train
    densities = []
    for network, point in zip(model.retrained(points), points.tolist(), strict=True):
        prediction = model.posterior(network=network, without=point).predict(x[point : point + 1])
        densities.append(float(prediction.log_prob(y[point : point + 1])))
    gaps = found.log_density[points] - torch.tensor(densities, dtype=torch.float64)
    measured = found.reliability
    return {
        "leave_one_out": float(found.log_density.mean()), "test": mean(posterior, problem.test),
        "part": float(found.log_density[points].mean()), "retrained": float(np.mean(densities)),
        "gap": float(gaps.mean()), "error": float(gaps.std() / len(gaps) ** 0.5),
        "decrement": measured.decrement, "ratio": measured.prior_ratio, "flagged": measured.high_leverage,
        "largest": measured.largest_leverage, "spread": measured.precision_spread, "moved": measured.moved,
        "trusted": found.trusted, "reasons": list(found.reasons),
    }


def study(name: str, count: int, seed: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All settings of one table."""
    problem, found = Problem.read(name, options.data, count, seed), []
    points = torch.as_tensor(np.random.default_rng(100 + seed).permutation(len(problem.train[1])))
    for words, model, posterior in cases(problem, options, seed):
        one = scored(problem, model, posterior, points[: options.points])
        found.append({"table": name, "seed": seed, "case": words} | one)
        print(row(found[-1]), flush=True)
    return found


def mean(posterior: ntkl.Posterior, data: tuple[Tensor, Tensor]) -> float:
    """Mean log density."""
    return float(posterior.predict(data[0]).log_prob(data[1]).mean())


def confusion(results: list[dict[str, Any]]) -> str:
    """How often the library spoke, by how far leave-one-out is from retraining."""
    kinds = {"too optimistic": lambda gap: gap > OFF, "too pessimistic": lambda gap: gap < -OFF,
             "within 0.1": lambda gap: abs(gap) <= OFF}
    rows = []
    for words, belongs in kinds.items():
        own = [one for one in results if belongs(one["gap"])]
        rows.append([words, str(len(own)), str(sum(not one["trusted"] for one in own))])
    return table(["leave-one-out less retraining", "cases", "the library speaks"], rows)


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__, "leave_one_out")
    arguments.add_argument("--data", type=Path, help="folder with boston.npz and its like")
    arguments.add_argument("--problems", nargs="+", choices=[*FILES, *BUNDLED])
    arguments.add_argument("--seeds", type=int, default=1, help="networks and splits for each table (default 1)")
    arguments.add_argument("--points", type=int, default=12, help="left out by retraining (default 12)")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    options.width, options.steps, options.epochs, count = 50, 600, 300, 120
    names = options.problems or [*(FILES if options.data else ()), *BUNDLED]
    if options.small:
        options.width, options.steps, options.epochs, count, options.points = 5, 60, 20, 20, 2
        names = options.problems or ["wine"]
    warnings.simplefilter("ignore", ntkl.NTKLaplaceWarning)  # it is counted, not printed
    options.out.mkdir(parents=True, exist_ok=True)
    results = []
    for name in names:
        for seed in range(options.seeds):
            few = 60 if name == "digits" and not options.small else count
            asked = [str(value) for value in (few, seed, options.points, options.width)]
            results += once(options.out / f"{name}-{seed}.json", asked, partial(study, name, few, seed, options))
    write(options.out / "leave_one_out.json", {"machine": machine(options.threads), "results": results})
    heads = ["table", "case", "leave-one-out", "of the part", "retrained", "difference", "test", "decrement", "ρ",
             "leverage > 0.9", "spread", "speaks"]
    print(f"\n{table(heads, [row(one) for one in results])}\n\n{confusion(results)}")


def row(one: dict[str, Any]) -> list[str]:
    """A line of the table."""
    numbers = [f"{one[key]:.3f}" for key in ("leave_one_out", "part", "retrained")]
    speaks = "-" if one["trusted"] else "yes"
    return [one["table"], one["case"], *numbers, f"{one['gap']:+.3f} ± {one['error']:.3f}", f"{one['test']:.3f}",
            f"{one['decrement']:.3g}", f"{one['ratio']:.2g}", f"{one['flagged']:.2f}", f"{one['spread']:.2g}",
            speaks]


if __name__ == "__main__":
    main()
