"""[L22] section 4.2 and appendix A: the evidence overfits the mean function of a Gaussian process (Fig. 2).

    python examples/selection/exact/mean_function.py --data DIR --threads 1 --out mean_function

100 points on [0, 10] from a Gaussian process with a radial basis function kernel of lengthscale 0.75 and noise variance
0.02; the first 50 are trained on, the other 50 are all to the right of them. Two models, with a constant and with a
perceptron (two layers of 50 ReLU units) as mean: mean, lengthscale, output scale and noise are learned by 500 steps of
Adam from GPyTorch's starting values, and maximize the evidence, the conditional evidence of a random tenth of the
points, new in each step or the same in all, or leave-one-out. It prints evidence, noise, and log density, error and
coverage of 95 % intervals of the test points, and the log density halfway between the training points: over many data
sets, and for the authors' (with --data). All data sets are one batch. It writes mean_function.json and
mean_function.png.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Any

import torch
from _exact import ask, authors, left_out, log_density, machine, means, normal, predictive, shown, table, write
from matplotlib.figure import Figure
from torch import Tensor, nn

from ntk_laplace.plotting import BLUE, ORANGE, png

N, WIDTH, NOISE, LENGTH = 50, 50, 0.02, 0.75
MEANS, OBJECTIVES = ("constant", "perceptron"), ("evidence", "conditional", "one subset", "left out")
X = torch.linspace(0, 10, 2 * N, dtype=torch.float64)
BETWEEN = (X[: N - 1] + X[1:N]) / 2  # new points inside of the data
SCORES = ("log density", "error", "coverage", "log density between")


@dataclass(frozen=True)
class DataSets:
    """A batch: targets at X, (sets, 2 N), and between the training points, (sets, N - 1)."""

    y: Tensor
    between: Tensor | None = None

    @classmethod
    def drawn(cls, count: int) -> DataSets:
        """From the prior, with noise."""
        generator = torch.Generator().manual_seed(0)
        x = torch.cat([X, BETWEEN])
        jitter = 1e-8 * torch.eye(len(x), dtype=torch.float64)
        covariance = radial(x, x, torch.tensor(LENGTH, dtype=torch.float64)) + jitter
        draws = torch.randn(2, count, len(x), generator=generator, dtype=torch.float64)
        y = draws[0] @ torch.linalg.cholesky(covariance).T + NOISE**0.5 * draws[1]
        return cls(y[:, : 2 * N], y[:, 2 * N :])


def radial(a: Tensor, b: Tensor, length: Tensor) -> Tensor:
    """Radial basis function kernel, (..., A, B)."""
    return (-0.5 * (a[:, None] - b).square() / length.square()).exp()


class Models(nn.Module):
    """One Gaussian process for each data set, each with its own parameters, from GPyTorch's starting values."""

    def __init__(self, mean: str, count: int, seed: int) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.zeros(3, count, 1, 1, dtype=torch.float64))  # lengthscale, output scale, noise
        self.constant = nn.Parameter(torch.zeros(count, 1, dtype=torch.float64))
        self.layers = nn.ParameterList()
        generator = torch.Generator().manual_seed(seed)
        for inputs, outputs in ((1, WIDTH), (WIDTH, WIDTH), (WIDTH, 1)) if mean == "perceptron" else ():
            for shape in ((count, inputs, outputs), (count, 1, outputs)):  # as nn.Linear
                draws = 2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1
                self.layers.append(nn.Parameter(draws / math.sqrt(inputs)))

    def mean(self, x: Tensor) -> Tensor:
        """Of the latent function at `x`, (sets, n)."""
        if not self.layers:
            return self.constant.expand(-1, len(x))
        f = x[:, None].expand(len(self.constant), -1, 1)
        for weight, bias in zip(self.layers[::2], self.layers[1::2], strict=True):
            f = f @ weight + bias
            f = f if weight.shape[-1] == 1 else f.relu()
        return f.squeeze(-1)

    def covariance(self, a: Tensor, b: Tensor) -> Tensor:
        """Of the latent function, (sets, A, B)."""
        length, scale, _ = nn.functional.softplus(self.raw)
        return scale * radial(a, b, length)

    @property
    def noise(self) -> Tensor:
        """Variances, (sets, 1, 1), with GPyTorch's lower bound."""
        return nn.functional.softplus(self.raw[2]) + 1e-4

    def score(self, y: Tensor, objective: str, known: Tensor) -> Tensor:
        """Of the training points, nats for each of those that are asked for, (sets,)."""
        errors = y[:, :N] - self.mean(X[:N])
        covariance = self.covariance(X[:N], X[:N]) + self.noise * torch.eye(N, dtype=torch.float64)
        if objective == "left out":
            return left_out(covariance, errors) / N
        if objective == "evidence":
            return log_density(covariance, errors) / N
        first = log_density(covariance[:, known[:, None], known], errors[:, known])
        return (log_density(covariance, errors) - first) / (N - len(known))

    def predict(self, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of targets at `x`, (sets, n)."""
        covariance = self.covariance(X[:N], X[:N]) + self.noise * torch.eye(N, dtype=torch.float64)
        mean, spread = predictive(covariance, y[:, :N] - self.mean(X[:N]), self.covariance(x, X[:N]),
                                  self.covariance(x, x))
        return mean + self.mean(x), spread.diagonal(dim1=-2, dim2=-1) + self.noise[..., 0]


def trained(data: DataSets, mean: str, objective: str, steps: int) -> tuple[Models, list[float]]:
    """Adam on the sum over data sets, whose gradients are separate; the mean score at each step."""
    models, history = Models(mean, len(data.y), seed=1), []
    optimizer, generator = torch.optim.Adam(models.parameters(), lr=0.01), torch.Generator().manual_seed(2)
    for step in range(steps):
        optimizer.zero_grad()
        if step == 0 or objective != "one subset":
            known = torch.randperm(N, generator=generator)[: int(0.9 * N)]
        scores = models.score(data.y, objective, known)
        (-scores.sum()).backward()
        history.append(float(scores.mean().detach()))
        optimizer.step()
    return models, history


def judged(models: Models, data: DataSets) -> dict[str, Tensor]:
    """Scores of each data set, (sets,)."""
    with torch.no_grad():
        mean, variance = models.predict(data.y, X[N:])
        y = data.y[:, N:]
        found = {
            "log density": normal(y, mean, variance).mean(1), "error": (y - mean).square().mean(1).sqrt(),
            "coverage": ((y - mean).abs() < 1.96 * variance.sqrt()).double().mean(1),
            "noise": models.noise.flatten(), "evidence": models.score(data.y, "evidence", torch.arange(N)),
        }
        if data.between is not None:
            found["log density between"] = normal(data.between, *models.predict(data.y, BETWEEN)).mean(1)
    return found


def study(data: DataSets, options: argparse.Namespace) -> dict[tuple[str, str], dict[str, Any]]:
    """Every model by its mean and its objective."""
    found = {}
    for mean in MEANS:
        for objective in OBJECTIVES:
            models, history = trained(data, mean, objective, options.steps)
            found[mean, objective] = {"models": models, "history": history, **judged(models, data)}
    return found


def picture(data: DataSets, found: dict[tuple[str, str], dict[str, Any]], words: str) -> Figure:
    """Both means, trained by the evidence, and the perceptron by the conditional evidence."""
    figure = Figure(figsize=(11.4, 3.5), layout="constrained")
    shown_here = (("constant", "evidence"), ("perceptron", "evidence"), ("perceptron", "conditional"))
    x = torch.linspace(0, 10, 300, dtype=torch.float64)
    for axes, key in zip(figure.subplots(1, 3, sharey=True), shown_here, strict=True):
        with torch.no_grad():
            mean, variance = (value[0] for value in found[key]["models"].predict(data.y, x))
        axes.fill_between(x, mean - 2 * variance.sqrt(), mean + 2 * variance.sqrt(), color=BLUE, alpha=0.2, lw=0)
        axes.plot(x, mean, color=BLUE)
        axes.plot(X[:N], data.y[0, :N], "o", ms=3, color="black")
        axes.plot(X[N:], data.y[0, N:], "x", ms=4, color=ORANGE)
        axes.set(xlabel="x", ylim=(-4, 4))
        axes.set_title(f"{key[0]} mean, {key[1]}: test {float(found[key]['log density'][0]):.2f}", fontsize=10)
    figure.suptitle(words, fontsize=9)
    return figure


def main() -> None:
    options = ask(__doc__, "mean_function", 50).parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.steps, options.sets = (15, min(options.sets, 3)) if options.small else (500, options.sets)
    torch.set_num_threads(options.threads)
    data = DataSets.drawn(options.sets)
    found = study(data, options)
    kept: dict[str, Any] = {"machine": machine(options.threads), "means": {}, "histories": {}}
    print(f"mean of {options.sets} data sets; the paper shows one. Outside: 50 points to the right of the data")
    rows = []
    for key, own in found.items():
        name = " mean, ".join(key)
        kept["means"][name] = {s: means(own[s]) for s in (*SCORES, "noise", "evidence")}
        kept["histories"][name] = own["history"]
        rows.append([name, shown(own["evidence"], 3), shown(own["noise"], 4), shown(own["log density"]),
                     shown(own["error"]), f"{float(own['coverage'].mean()):.0%}", shown(own["log density between"], 3)])
    heads = ["model", "evidence a point", "noise (0.02)", "outside: log density", "error", "coverage", "between"]
    print(table(heads, rows))
    kept["wins"] = {}
    for objective in OBJECTIVES:
        gains = {s: found["perceptron", objective][s] - found["constant", objective][s]
                 for s in ("evidence", "log density", "log density between")}
        kept["wins"][objective] = {s: float((gain > 0).double().mean()) for s, gain in gains.items()}
        print(f"{objective}: the perceptron's mean is better in "
              + ", ".join(f"{s} {share:.0%}" for s, share in kept["wins"][objective].items()))
    theirs, words = authors(options.data, "gp_mean_overfitting"), "the first data set"
    if theirs is not None:
        data, words = DataSets(torch.cat([theirs["train_y"], theirs["test_y"]])[None]), "the authors' data set"
        found = study(data, options)
        rows = []
        for key, own in found.items():
            rows.append([" mean, ".join(key), f"{-own['history'][min(200, options.steps - 1)]:.3f}",
                         f"{-own['history'][-1]:.3f}", f"{float(own['noise']):.4f}", f"{float(own['log density']):.2f}",
                         f"{float(own['error']):.2f}", f"{float(own['coverage']):.0%}"])
        y = theirs["test_y"]
        mean, variance = theirs["pred_mean"][N:], theirs["pred_sigma_wnoise"][N:].square()
        noise, error = (theirs["pred_sigma_wnoise"].square() - theirs["pred_sigma"].square()).mean(), y - mean
        rows.append(["the authors' file (perceptron)", "-0.040", "-", f"{float(noise):.4f}",
                     f"{float(normal(y, mean, variance).mean()):.2f}", f"{float(error.square().mean().sqrt()):.2f}",
                     f"{float((error.abs() < 1.96 * variance.sqrt()).double().mean()):.0%}"])
        rows.append(["the authors' notebook (constant)", "0.150", *["-"] * 5])
        heads = ["the authors' data set", "loss at step 201", "at the end", "noise", "log density", "error", "coverage"]
        print(f"\n{table(heads, rows)}")
        kept["authors"] = rows
    write(options.out / "mean_function.json", kept)
    (options.out / "mean_function.png").write_bytes(png(picture(data, found, words)))


if __name__ == "__main__":
    main()
