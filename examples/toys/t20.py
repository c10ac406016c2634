"""Model selection and predictives on two toys: [T20] figures 5.2 to 5.5.

    python examples/toys/t20.py --out t20

A tanh network of five hidden layers of 25 units is trained to its MAP for every noise variance σ² and prior precision δ
of a grid on a regression (P = 2,676; 150 made points like Snelson's, with a gap), and for every δ on scikit-learn's two
moons (P = 2,701; 150 points), all at once. At each MAP the library gives the Laplace-GGN evidence. Beside it stand the
average log likelihoods of the MAP on the training data and on 1,000 test points. It writes
* regression_evidence.png (5.2): evidence, test and training log likelihood over the grid; the predictive of the best
  evidence (star), of a model that overfits (A) and of one that underfits (B);
* classification_evidence.png (5.3): the same for the moons;
* regression_predictives.png (5.4): weights sampled ("nn"), the linearized network sampled ("glm") and its closed form
  ("blr"), the Laplace-GGN row of the thesis; three functions drawn from each posterior;
* classification_predictives.png (5.5): "nn", "glm" and the MAP for the moons, and the epistemic and aleatoric parts;
* t20.json.
"""

from __future__ import annotations

import argparse
import copy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sklearn.datasets import make_moons
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

import ntk_laplace as ntkl

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _shared import machine, parser, write

GAP, SPREAD = (2.2, 3.4), (0.0, 6.0)
NOISE = 0.09  # of the made regression
SCORES = {"evidence": "evidence / N", "test": "test log likelihood", "train": "training log likelihood"}
SHADES = "#4c72b0", "#c44e52", "#55a868"


@dataclass(frozen=True)
class Toy:
    """Training and test data."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor


def observed(x: Tensor, generator: torch.Generator) -> Tensor:
    """Responses of the made regression at these inputs."""
    clean = torch.sin(2.2 * x) * torch.exp(-0.15 * x) + 0.5 * torch.cos(0.9 * x)
    return clean + NOISE**0.5 * torch.randn(x.shape, generator=generator, dtype=torch.float64)


def regression(points: int) -> Toy:
    """Points on a smooth curve with noise of variance 0.09; nothing to train on in the gap."""
    generator = torch.Generator().manual_seed(0)

    def draw(count: int, gap: bool) -> tuple[Tensor, Tensor]:
        x = SPREAD[0] + (SPREAD[1] - SPREAD[0]) * torch.rand(4 * count, 1, generator=generator, dtype=torch.float64)
        if gap:
            x = x[(x[:, 0] < GAP[0]) | (x[:, 0] > GAP[1])]
        return x[:count], observed(x[:count], generator)

    return Toy(*draw(points, gap=True), *draw(1000, gap=True))


def moons(points: int) -> Toy:
    """Two moons with a noisy boundary."""
    x, y = make_moons(points + 1000, noise=0.3, random_state=0)
    x, y = torch.as_tensor(x), torch.as_tensor(y, dtype=torch.float64)[:, None]
    return Toy(x[:points], y[:points], x[points:], y[points:])


def network(inputs: int, layers: int) -> nn.Module:
    """`layers` hidden layers of 25 tanh units."""
    made: list[nn.Module] = []
    for layer in range(layers):
        made += [nn.Linear(25 if layer else inputs, 25), nn.Tanh()]
    return nn.Sequential(*made, nn.Linear(25, 1)).double()


def train(
    toy: Toy, template: nn.Module, precision: Tensor, noise: Tensor | None, epochs: int
) -> list[nn.Module]:
    """MAP of one network for each precision (and noise variance), from the same start, all in one program."""
    networks = [copy.deepcopy(template) for _ in precision]
    state, _ = stack_module_state(networks)
    forward = vmap(lambda own: functional_call(template, own, (toy.x,)))
    optimizer = torch.optim.Adam(state.values(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        optimizer.zero_grad()
        f = forward(state)
        if noise is None:
            fits = nn.functional.binary_cross_entropy_with_logits(f, toy.y.expand_as(f), reduction="none").sum((1, 2))
        else:
            fits = 0.5 * (f - toy.y).square().sum((1, 2)) / noise
        squares = sum(own.square().flatten(1).sum(1) for own in state.values())
        # Adam does not see the scale of a loss: divided, small noise needs no smaller steps
        ((fits + 0.5 * precision * squares) * (1.0 if noise is None else noise)).sum().backward()
        optimizer.step()
        schedule.step()
    for number, own in enumerate(networks):
        own.load_state_dict({name: value[number].detach() for name, value in state.items()})
        own.eval()
    return networks


def likelihood_of(noise: float | None) -> ntkl.Likelihood:
    """Bernoulli, or Gaussian with this variance."""
    return ntkl.Bernoulli() if noise is None else ntkl.Gaussian(noise=noise)


def judge(toy: Toy, own: nn.Module, precision: float, noise: float | None) -> dict[str, float]:
    """Evidence per point, and the MAP's mean log likelihoods."""
    likelihood = likelihood_of(noise)
    posterior = ntkl.laplace(own, (toy.x, toy.y), likelihood, ntkl.GaussianPrior(precision=precision))
    with torch.no_grad():
        return {
            "precision": precision, "noise": float("nan") if noise is None else noise,
            "evidence": posterior.log_marginal_likelihood().item() / len(toy.x),
            "test": likelihood.log_prob(own(toy.x_test), toy.y_test).mean().item(),
            "train": likelihood.log_prob(own(toy.x), toy.y).mean().item(),
        }


# ------------------------------------------------------------------------------------------------ regression, 5.2, 5.4


def draw_grid(figure: Any, found: list[dict[str, float]], shape: tuple[int, int], marks: dict[str, int]) -> None:
    """Three maps over σ² and δ."""
    noise = np.array([row["noise"] for row in found]).reshape(shape)
    precision = np.array([row["precision"] for row in found]).reshape(shape)
    for axes, (key, title) in zip(figure.subplots(1, 3, sharey=True), SCORES.items(), strict=True):
        values = np.array([row[key] for row in found]).reshape(shape)
        levels = np.linspace(-3, max(0.5, values.max()), 15)
        picture = axes.contourf(noise, precision, values.clip(-3.0), levels=levels, cmap="viridis", extend="min")
        axes.set(xscale="log", yscale="log", xlabel="noise variance σ²", title=title)
        for label, index in marks.items():
            axes.text(found[index]["noise"], found[index]["precision"], label, color="white", ha="center", va="center",
                      fontsize=14, fontweight="bold")
        figure.colorbar(picture, ax=axes, format="%.1f", label="nats per point")
    figure.axes[0].set_ylabel("prior precision δ")


def draw_band(axes: Axes, toy: Toy, x: Tensor, mean: Tensor, deviation: Tensor, color: str) -> None:
    """Mean and two standard deviations."""
    x, mean, deviation = (v.detach().flatten().numpy() for v in (x, mean, deviation))
    axes.plot(toy.x.numpy(), toy.y.numpy(), ".", color="0.5", markersize=3)
    axes.fill_between(x, mean - 2 * deviation, mean + 2 * deviation, color=color, alpha=0.25, linewidth=0)
    axes.plot(x, mean, color=color)
    axes.set(xlabel="x", ylim=(-3, 3))


def regressions(options: argparse.Namespace) -> dict[str, Any]:
    """Figures 5.2 and 5.4."""
    size, points, layers, epochs, samples = (4, 40, 2, 80, 50) if options.small else (9, 150, 5, options.epochs, 500)
    toy = regression(points)
    torch.manual_seed(0)
    template = network(1, layers)
    sides = (torch.logspace(*ends, size, dtype=torch.float64) for ends in ((-3, 1), (-4, 2)))
    noise, precision = torch.meshgrid(*sides, indexing="xy")
    trained = train(toy, template, precision.flatten(), noise.flatten(), epochs)
    pairs = zip(trained, precision.flatten().tolist(), noise.flatten().tolist(), strict=True)
    found = [judge(toy, own, delta, variance) for own, delta, variance in pairs]
    best = max(range(len(found)), key=lambda i: found[i]["evidence"])
    marks = {"★": best, "A": size + 1, "B": (size - 2) * size + size - 2}  # weak and strong regularization
    grid = torch.linspace(SPREAD[0] - 1.5, SPREAD[1] + 1.5, 200, dtype=torch.float64)[:, None]

    figure = Figure(figsize=(12, 7), layout="constrained")
    upper, lower = figure.subfigures(2, 1)
    draw_grid(upper, found, (size, size), marks)
    axes = lower.subplots(1, 3, sharey=True)
    for place, (label, index) in enumerate(marks.items()):
        row = found[index]
        posterior = ntkl.laplace(trained[index], (toy.x, toy.y), likelihood_of(row["noise"]),
                                 ntkl.GaussianPrior(precision=row["precision"]))
        prediction = posterior.predict(grid)
        draw_band(axes[place], toy, grid, prediction.mean, prediction.stddev, SHADES[place])
        axes[place].set_title(f"{label}: σ² = {row['noise']:.2g}, δ = {row['precision']:.2g}, "
                              f"evidence {row['evidence']:.2f}, test {row['test']:.2f}", fontsize=9)
    figure.savefig(options.out / "regression_evidence.png", dpi=110)

    row, scores = found[best], {}
    posterior = ntkl.laplace(trained[best], (toy.x, toy.y), likelihood_of(row["noise"]),
                             ntkl.GaussianPrior(precision=row["precision"]), structure="full")
    figure = Figure(figsize=(12, 6), layout="constrained")
    axes = figure.subplots(2, 3, sharey=True, sharex=True)
    generator = torch.Generator().manual_seed(0)
    draws = {"nn": posterior.sample(3, generator=generator), "glm": None, "blr": None}
    for place, method in enumerate(draws):
        prediction = posterior.predict(grid, method, samples=samples, generator=torch.Generator().manual_seed(0))
        at_test = posterior.predict(toy.x_test, method, samples=samples, generator=torch.Generator().manual_seed(0))
        scores[method] = at_test.log_prob(toy.y_test).mean().item()
        draw_band(axes[0, place], toy, grid, prediction.mean, prediction.variance.sqrt(), SHADES[place])
        axes[0, place].set(title=f'"{method}": test log likelihood {scores[method]:.2f}', xlabel="")
        if method == "nn":
            functions = torch.stack([posterior.network.with_parameters(theta, grid) for theta in draws["nn"]])
        else:
            functions = posterior.sample(3, grid, generator=generator)
        axes[1, place].plot(grid.numpy(), functions[..., 0].detach().numpy().T, color=SHADES[place], linewidth=1)
        axes[1, place].plot(toy.x.numpy(), toy.y.numpy(), ".", color="0.5", markersize=3)
        axes[1, place].set(title="three functions drawn", xlabel="x", ylim=(-3, 3))
    figure.savefig(options.out / "regression_predictives.png", dpi=110)
    return {"grid": found, "marks": marks, "predictives": scores}


# -------------------------------------------------------------------------------------------- classification, 5.3, 5.5


def draw_points(axes: Axes, toy: Toy) -> None:
    """Training points by class."""
    for label, color in ((0.0, "#3b4cc0"), (1.0, "#b40426")):
        chosen = toy.x[toy.y[:, 0] == label].numpy()
        axes.plot(*chosen.T, "o", color=color, markersize=3, markeredgecolor="white", markeredgewidth=0.4)
    axes.set(xticks=[], yticks=[])


def classifications(options: argparse.Namespace) -> dict[str, Any]:
    """Figures 5.3 and 5.5."""
    size, points, layers, epochs, samples = (3, 40, 2, 80, 50) if options.small else (17, 150, 5, options.epochs, 500)
    toy = moons(points)
    torch.manual_seed(0)
    precision = torch.logspace(-2, 2, size, dtype=torch.float64)
    trained = train(toy, network(2, layers), precision, None, epochs)
    found = [judge(toy, own, delta, None) for own, delta in zip(trained, precision.tolist(), strict=True)]
    best = max(range(size), key=lambda i: found[i]["evidence"])
    marks = {"★": best, "A": 0, "B": size - 2}
    side = np.linspace(-2.5, 3.5, 20 if options.small else 60), np.linspace(-2.5, 3.0, 20 if options.small else 60)
    plane = np.meshgrid(*side)
    at = torch.as_tensor(np.stack([part.ravel() for part in plane], 1))
    whole = {"levels": np.linspace(0, 1, 21), "cmap": "coolwarm"}

    figure = Figure(figsize=(11, 7), layout="constrained")
    upper, lower = figure.subfigures(2, 1)
    axes = upper.subplots()
    for key, label in SCORES.items():
        axes.plot(precision, [row[key] for row in found], "-" if key == "evidence" else "--", label=label)
    for label, index in marks.items():
        axes.axvline(found[index]["precision"], color="0.8", zorder=0)
        where = axes.get_xaxis_transform()
        axes.text(found[index]["precision"], 0.08, label, ha="center", transform=where, fontsize=13)
    axes.set(xscale="log", xlabel="prior precision δ", ylabel="nats per point")
    axes.legend()
    panels = lower.subplots(1, 3)
    for panel, (label, index) in zip(panels, marks.items(), strict=True):
        posterior = ntkl.laplace(trained[index], (toy.x, toy.y), ntkl.Bernoulli(),
                                 ntkl.GaussianPrior(precision=found[index]["precision"]))
        picture = panel.contourf(*plane, posterior.predict(at).probs.detach().reshape(plane[0].shape), **whole)
        draw_points(panel, toy)
        panel.set_title(f"{label}: δ = {found[index]['precision']:.2g}, evidence {found[index]['evidence']:.2f}, "
                        f"test {found[index]['test']:.2f}", fontsize=9)
    lower.colorbar(picture, ax=panels, label="predictive probability of class 1")
    figure.savefig(options.out / "classification_evidence.png", dpi=110)

    prior, scores = ntkl.GaussianPrior(precision=found[best]["precision"]), {}
    posterior = ntkl.laplace(trained[best], (toy.x, toy.y), ntkl.Bernoulli(), prior, structure="full")
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    axes = figure.subplots(2, 3)
    for place, method in enumerate(("nn", "glm", "map")):
        prediction = posterior.predict(at, method, samples=samples, generator=torch.Generator().manual_seed(0))
        at_test = posterior.predict(toy.x_test, method, samples=samples, generator=torch.Generator().manual_seed(0))
        scores[method] = at_test.log_prob(toy.y_test).mean().item()
        picture = axes[0, place].contourf(*plane, prediction.probs.detach().reshape(plane[0].shape), **whole)
        draw_points(axes[0, place], toy)
        axes[0, place].set_title(f'"{method}": test log likelihood {scores[method]:.2f}', fontsize=10)
    figure.colorbar(picture, ax=axes[0], label="probability of class 1")
    blr = posterior.predict(at, "blr")
    parts = {"epistemic variance": blr.epistemic, "aleatoric variance": blr.aleatoric,
             "epistemic share": blr.epistemic / (blr.epistemic + blr.aleatoric)}
    for panel, (label, values) in zip(axes[1], parts.items(), strict=True):
        picture = panel.contourf(*plane, values.detach().reshape(plane[0].shape), levels=20, cmap="magma")
        figure.colorbar(picture, ax=panel, format="%.2g")
        draw_points(panel, toy)
        panel.set_title(label, fontsize=10)
    figure.savefig(options.out / "classification_predictives.png", dpi=110)
    return {"grid": found, "marks": marks, "predictives": scores}


def main() -> None:
    """Both toys."""
    arguments = parser(__doc__, "t20")
    arguments.add_argument("--epochs", type=int, default=5000)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    found = {"regression": regressions(options), "classification": classifications(options)}
    write(options.out / "t20.json", {"machine": machine(options.threads), **found})


if __name__ == "__main__":
    main()
