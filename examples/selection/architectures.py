"""Choosing among networks without held-out data, in small: [I21] Fig. 2 and [L22] Fig. 5.

    python examples/selection/architectures.py [--data DIR] --out architectures

Thirteen networks, from softmax regression to three hidden layers and small CNNs, on 100 of scikit-learn's digits,
and with ``--data`` on 100 images of MNIST (DIR/mnist.npz, shrunk to 14 x 14). Each is trained to its MAP by L-BFGS in
float64 and turned into a Gaussian process (exact function space), in two ways:
* "layerwise": precisions per layer at the evidence's maximum, training and `fit_hyperparameters` in turns;
* "fixed": one vague precision of 1e-3 for all weights (``--precision``).
Scores from the training data, by Spearman's ρ against test scores of 400 images: evidence, conditional evidence given
80 % in closed form (weights trained on all), leave-one-out, BIC, AIC; and the conditional evidence of [L22] appendix B,
with training on 80 % alone: "retrained", the rest predicted one by one; "retrained, scaled", the covariance scaled on a
seventeenth of the 80 %; "retrained, joint", in closed form. Test scores: log likelihood of the linearized predictive
(glm), the same with its covariance scaled as suits the 20 % best ("scaled"), log likelihood and accuracy of the network
alone (MAP). It writes architectures.json and a picture for each data set.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.stats import spearmanr
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _shared import machine, mlp, parser, table, write

import ntk_laplace as ntkl
from ntk_laplace.metrics import held_out_scores, mean_log_likelihood
from ntk_laplace.model.predictive import predictive
from ntk_laplace.plotting import model_ranking, png

RETRAINED = ("retrained", "retrained, scaled", "retrained, joint")
CRITERIA = ("evidence", "conditional", "loo", "bic", "aic", *RETRAINED)
SHOWN = {"evidence": "evidence", "conditional": "conditional evidence", "retrained": "retrained on 80 %",
         "retrained, scaled": "retrained on 80 %, scaled"}  # fmt: skip
TESTS = {"test_log_likelihood": "glm", "scaled_log_likelihood": "scaled", "map_log_likelihood": "MAP",
         "map_accuracy": "MAP accuracy"}  # fmt: skip
DRAWN = (("layerwise", "test_log_likelihood"), ("fixed", "test_log_likelihood"), ("fixed", "scaled_log_likelihood"))
SCALES = torch.logspace(-4, 0, 9).tolist()
ROUNDS = 3  # of training and fitting precisions in turns


def cnn(channels: tuple[int, ...], width: int, side: int) -> nn.Sequential:
    """3 x 3 convolutions, the last followed by a pool, then one hidden layer of `width` units, or none."""
    layers: list[nn.Module] = [nn.Unflatten(1, (1, side, side))]
    before = 1
    for count in channels:
        layers += [nn.Conv2d(before, count, 3, padding=1), nn.Tanh()]
        before = count
    layers += [nn.AvgPool2d(2), nn.Flatten()]
    size = before * (side // 2) ** 2
    return nn.Sequential(*layers, *(mlp((size, width, 10)) if width else mlp((size, 10))))


@dataclass(frozen=True)
class Problem:
    """Flat images with values in [0, 1] and their labels."""

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @property
    def architectures(self) -> dict[str, Callable[[], nn.Sequential]]:
        """By name."""
        inputs = self.train[0].shape[1]
        hidden = {"linear": (), "4": (4,), "8": (8,), "16": (16,), "32": (32,), "64": (64,), "8-8": (8, 8),
                  "16-16": (16, 16), "32-32": (32, 32), "16-16-16": (16, 16, 16)}  # fmt: skip
        found: dict[str, Callable[[], nn.Sequential]] = {
            name: lambda widths=widths: mlp((inputs, *widths, 10)) for name, widths in hidden.items()
        }
        for name, channels, width in (("conv 4", (4,), 0), ("conv 4-8", (4, 8), 0), ("conv 4, 16", (4,), 16)):
            found[name] = lambda channels=channels, width=width: cnn(channels, width, round(inputs**0.5))
        return found


def problems(options: argparse.Namespace) -> list[Problem]:
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(options.seed).permutation(len(data.target))
    x, y = torch.as_tensor(data.data[order] / 16), torch.as_tensor(data.target[order])
    n, asked = (40, 60) if options.small else (100, 400)
    found = [Problem("digits", (x[:n], y[:n]), (x[n : n + asked], y[n : n + asked]))]
    if options.data is not None:
        with np.load(options.data / "mnist.npz") as file:
            images = [torch.as_tensor(file[f"X_{part}"][:2000]).double() / 255 for part in ("train", "test")]
            labels = [torch.as_tensor(file[f"y_{part}"][:2000]).long() for part in ("train", "test")]
        generator = torch.Generator().manual_seed(options.seed)
        pairs = []
        for image, label, count in zip(images, labels, (n, asked), strict=True):
            index = torch.randperm(len(label), generator=generator)[:count]
            small = nn.functional.avg_pool2d(image[index].unsqueeze(1), 2)
            pairs.append((small.flatten(1), label[index]))
        found.append(Problem("MNIST", *pairs))
    return found


def train(network: nn.Module, data: tuple[Tensor, Tensor], precision: Tensor, steps: int) -> nn.Module:
    """L-BFGS on the negative log joint; one precision per parameter."""
    weights = list(network.parameters())
    own = precision.split([w.numel() for w in weights])
    optimizer = torch.optim.LBFGS(weights, max_iter=steps, tolerance_grad=1e-3, tolerance_change=1e-8,
                                  line_search_fn="strong_wolfe")  # fmt: skip

    def objective() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(data[0]), data[1], reduction="sum")
        loss = loss + 0.5 * sum((p * w.flatten().square()).sum() for p, w in zip(own, weights, strict=True))
        loss.backward()
        return loss

    optimizer.step(objective)
    optimizer.zero_grad()
    return network.eval()


def start(problem: Problem, name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return problem.architectures[name]().double()


def layerwise(problem: Problem, name: str, options: argparse.Namespace) -> tuple[ntkl.Posterior, Tensor]:
    """Training and precisions at the evidence's maximum in turns; the posterior, and one precision per parameter."""
    network = start(problem, name, options.seed)
    precision = torch.ones(sum(w.numel() for w in network.parameters()), dtype=torch.float64)
    for _ in range(1 if options.small else ROUNDS):
        train(network, problem.train, precision, options.steps)
        posterior = ntkl.laplace(network, problem.train, ntkl.Categorical(), ntkl.GaussianPrior(1.0, groups="layer"))
        prior = posterior.prior
        begin = dict(posterior.network.module.named_parameters())
        with torch.no_grad():
            prior.log_precision.copy_(torch.stack([
                precision[_places(begin, prior, group)].mean().log() for group in range(len(prior.log_precision))
            ]))  # fmt: skip
        posterior.fit_hyperparameters(parameters=["precision"], steps=8, tolerance=1e-4, bounds=(1e-4, 1e4))
        precision = prior.flat_precision().detach()
    return posterior, precision


def _places(weights: dict[str, Tensor], prior: ntkl.GaussianPrior, group: int) -> Tensor:
    """Where in the flat vector the parameters of a group are."""
    marks = [torch.full((w.numel(),), prior.group_of(name) == group) for name, w in weights.items()]
    return torch.cat(marks)


def fixed(problem: Problem, name: str, options: argparse.Namespace) -> tuple[ntkl.Posterior, Tensor]:
    """One vague precision for all weights."""
    network = start(problem, name, options.seed)
    precision = torch.full((sum(w.numel() for w in network.parameters()),), options.precision, dtype=torch.float64)
    train(network, problem.train, precision, options.steps)
    prior = ntkl.GaussianPrior(options.precision)
    return ntkl.laplace(network, problem.train, ntkl.Categorical(), prior), precision


def retrained(problem: Problem, name: str, model: ntkl.Posterior, precision: Tensor, options: argparse.Namespace):
    """[L22] appendix B: weights from the first 80 %, at the same precisions, and the rest predicted."""
    x, y = problem.train
    m = round(0.8 * len(y))
    network = train(start(problem, name, options.seed), (x[:m], y[:m]), precision, options.steps)
    blind = ntkl.laplace(network, problem.train, ntkl.Categorical(), model.prior)
    f, covariance = blind.subset(torch.arange(m)).latent_moments(x[m:])
    best = max(SCALES, key=lambda scale: log_likelihood(f, scale * covariance, y[m:]))
    f, covariance = model.latent_moments(problem.test[0])
    return {
        "scale": best,
        "scaled_log_likelihood": log_likelihood(f, best * covariance, problem.test[1]),
        "retrained": blind.conditional_log_marginal_likelihood(m, 0, method="average", scale=1.0).item(),
        "retrained, scaled": blind.conditional_log_marginal_likelihood(m, 0, method="average").item(),
        "retrained, joint": blind.conditional_log_marginal_likelihood(m, 0).item(),
    }


def log_likelihood(f: Tensor, covariance: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return mean_log_likelihood(predictive(ntkl.Categorical(), f, covariance, "glm", 500), y)


def study(problem: Problem, kind: str, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Scores of every network."""
    found: dict[str, dict[str, Any]] = {}
    fit = layerwise if kind == "layerwise" else fixed
    for name in list(problem.architectures)[:: 6 if options.small else 1]:
        kept, begin = options.out / f"{problem.name}_{kind}_{name}_{options.seed}.json", time.perf_counter()
        if kept.exists() and not options.small:  # a long run that was interrupted goes on
            found[name] = json.loads(kept.read_text())
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ntkl.NTKLaplaceWarning)  # few steps are enough between trainings
            model, precision = fit(problem, name, options)
            comparison = ntkl.compare_models([(name, model)], problem.test)
        plugged = held_out_scores(model.predict(problem.test[0], method="map"), problem.test[1])
        found[name] = vars(comparison[name]) | retrained(problem, name, model, precision, options) | {
            f"map_{score}": value for score, value in plugged.items()
        } | {"precisions": model.prior.precision.tolist(), "seconds": time.perf_counter() - begin}  # fmt: skip
        kept.write_text(json.dumps(found[name]))
        row = found[name]
        print(f"{problem.name} {kind} {name}: evidence {row['evidence']:.1f}, test {row['test_log_likelihood']:.4f}, "
              f"{row['seconds']:.1f} s", file=sys.stderr, flush=True)  # fmt: skip
    return found


def correlation(models: dict[str, dict[str, Any]], criterion: str, against: str) -> float:
    return float(spearmanr(*([row[name] for row in models.values()] for name in (criterion, against))).statistic)


def picture(problem: str, results: dict[str, dict[str, dict[str, Any]]]) -> Figure:
    """Rows: the priors and test scores. Columns: criteria."""
    figure = Figure(figsize=(3.3 * len(SHOWN), 3.0 * len(DRAWN)), layout="constrained")
    figure.suptitle(f"{problem}: scores from training data, in nats, against test log likelihoods", fontsize=11)
    for number, (kind, against) in enumerate(DRAWN):
        models = results[kind]
        for column, (criterion, words) in enumerate(SHOWN.items()):
            axes = figure.add_subplot(len(DRAWN), len(SHOWN), number * len(SHOWN) + column + 1)
            across, up = ([row[name] for row in models.values()] for name in (criterion, against))
            label = f"{kind}: test log likelihood, {TESTS[against]}" if column == 0 else ""
            sizes = [row["parameters"] for row in models.values()]
            rho = correlation(models, criterion, against)
            model_ranking((words, across), (label, up), list(models), sizes, rho, [False] * len(models), axes)
            if against == "scaled_log_likelihood":  # one failure must not hide the others
                axes.set_yscale("symlog", linthresh=0.2)
                axes.set_yticks([-4, -2, -1, -0.5, -0.3, -0.2], labels=["-4", "-2", "-1", "-0.5", "-0.3", "-0.2"])
    return figure


def main() -> None:
    arguments = parser(__doc__, "architectures")
    arguments.add_argument("--data", type=Path, help="folder with mnist.npz; without it, digits alone")
    arguments.add_argument("--precision", type=float, default=1e-3, help="the fixed precision (default 1e-3)")
    arguments.add_argument("--seed", type=int, default=0, help="of the subset and the weights (default 0)")
    options = arguments.parse_args()
    options.steps = 60 if options.small else 300
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    results: dict[str, Any] = {}
    for problem in problems(options):
        kinds = {kind: study(problem, kind, options) for kind in ("layerwise", "fixed")}
        heads = ["network", "P", "effective", "evidence", "conditional", "LOO", *RETRAINED, "test glm", "scale",
                 "scaled", "MAP", "MAP accuracy"]  # fmt: skip
        for kind, models in kinds.items():
            rows = [[
                name, f"{row['parameters']:,}", f"{row['effective_parameters']:.0f}",
                *(f"{row[key]:.1f}" for key in ("evidence", "conditional", "loo", *RETRAINED)),
                f"{row['test_log_likelihood']:.3f}", f"{row['scale']:.1g}", f"{row['scaled_log_likelihood']:.3f}",
                f"{row['map_log_likelihood']:.3f}", f"{row['map_accuracy']:.3f}",
            ] for name, row in models.items()]  # fmt: skip
            print(f"\n{problem.name}, {kind}\n{table(heads, rows)}")
        rho = {kind: {against: {criterion: correlation(models, criterion, against) for criterion in CRITERIA}
                      for against in TESTS} for kind, models in kinds.items()}  # fmt: skip
        lines = [[kind, TESTS[against], *(f"{value:.2f}" for value in values.values())]
                 for kind, each in rho.items() for against, values in each.items()]  # fmt: skip
        print(f"\n{problem.name}: Spearman's ρ\n{table(['prior', 'test score', *CRITERIA], lines)}")
        results[problem.name] = {"models": kinds, "spearman": rho}
        (options.out / f"{problem.name.lower()}.png").write_bytes(png(picture(problem.name, kinds)))
    write(options.out / "architectures.json", {"machine": machine(options.threads), "results": results})


if __name__ == "__main__":
    main()
