"""Four or nine? Importances, similarities and removal effects on MNIST: [T20] figure 5.6.

    python examples/attribution/t20_digits.py --data DIR --out t20_digits

A CNN of 4,587 parameters (two convolutions with ReLU and max pooling, three linear layers) is trained on 3,000 images
of fours and nines with prior precision 10, by Adam and L-BFGS. The objective's kinks keep its gradient from vanishing,
and the decomposition has a gap. With ``--smooth`` it has tanh and average pooling, and is trained on by L-BFGS in the
metric of the library's posterior, for a MAP at which nothing is left. DIR holds ``mnist.npz``, without it
scikit-learn's digits are taken. Pictures:
* importances.png: the residuals of the training images in order, with images along the curve. Those at the ends are
  fours that look like nines, and nines that look like fours;
* similarities.png: a test image that is classified rightly and two that are not, each with the training images most
  similar to it by the kernel, and below with those whose removal would move its logit most.
It checks that the decomposition adds up, and writes t20_digits.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.optimize import minimize
from sklearn.datasets import load_digits
from torch import Tensor, nn

import ntk_laplace as ntkl

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _shared import machine, parser, write

PRECISION, OF_THE_SMALL = 10.0, 0.1  # ten would leave nothing of a network for 250 small images
SETTLED = 1e-6  # length of the gradient
SHOWN = 8  # training images beside each test image


def images(folder: Path | None, small: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Fours and nines: training images (N, 1, h, w) and labels (N, 1), 1 for a nine; the same for testing."""
    if folder is None or small:
        found = load_digits()
        x, y = torch.as_tensor(found.images)[:, None] / 16, torch.as_tensor(found.target)
        chosen = (y == 4) | (y == 9)
        x, y = x[chosen], (y[chosen] == 9).double()[:, None]
        return x[:250], y[:250], x[250:], y[250:]
    with np.load(folder / "mnist.npz") as found:
        parts = []
        for part in ("train", "test"):
            labels = found[f"y_{part}"]
            chosen = np.flatnonzero((labels == 4) | (labels == 9))
            if part == "train":
                chosen = np.random.default_rng(0).permutation(chosen)[:3000]
            pixels = torch.as_tensor(found[f"X_{part}"][chosen], dtype=torch.float64)[:, None] / 255
            parts += [pixels, torch.as_tensor(labels[chosen] == 9).double()[:, None]]
    return tuple(parts)


def network(side: int, smooth: bool) -> nn.Module:
    """Two convolutions, three linear layers; 4,587 parameters for images of 28 x 28."""
    torch.manual_seed(0)
    kernel, border = (5, 0) if side == 28 else (3, 1)
    after = ((side + 2 * border - kernel + 1) // 2 + 2 * border - kernel + 1) // 2
    bend, pool = (nn.Tanh, nn.AvgPool2d) if smooth else (nn.ReLU, nn.MaxPool2d)
    return nn.Sequential(
        nn.Conv2d(1, 3, kernel, padding=border), bend(), pool(2),
        nn.Conv2d(3, 10, kernel, padding=border), bend(), pool(2),
        nn.Flatten(), nn.Linear(10 * after**2, 20), bend(), nn.Linear(20, 24), bend(), nn.Linear(24, 1),
    ).double()


def train(own: nn.Module, x: Tensor, y: Tensor, precision: float, epochs: int) -> nn.Module:
    """Adam in minibatches, then L-BFGS on all images, for the network with kinks."""
    weights = list(own.parameters())

    def loss(x: Tensor, y: Tensor, share: float) -> Tensor:
        fits = nn.functional.binary_cross_entropy_with_logits(own(x), y, reduction="sum")
        return fits + 0.5 * precision * share * sum(w.square().sum() for w in weights)

    optimizer = torch.optim.Adam(weights, lr=3e-3)
    for _ in range(epochs):
        for part in torch.randperm(len(x)).split(100):
            optimizer.zero_grad()
            loss(x[part], y[part], len(part) / len(x)).backward()
            optimizer.step()
    optimizer = torch.optim.LBFGS(weights, max_iter=10 * epochs, line_search_fn="strong_wolfe")

    def whole() -> Tensor:
        optimizer.zero_grad()
        value = loss(x, y, 1.0)
        value.backward()
        return value

    optimizer.step(whole)
    return own.eval()


@dataclass
class Objective:
    """The negative log joint -Σ log p(y|f) + δ/2 ‖θ‖² of a network, and the ways down."""

    own: nn.Module
    x: Tensor
    y: Tensor
    precision: float

    def subset(self, rows: Tensor | slice) -> Tensor:
        """Of some of the data, with their share of the prior."""
        x, y = self.x[rows], self.y[rows]
        fits = nn.functional.binary_cross_entropy_with_logits(self.own(x), y, reduction="sum")
        squares = sum(w.square().sum() for w in self.own.parameters())
        return fits + 0.5 * self.precision * len(x) / len(self.x) * squares

    def gradient(self) -> tuple[float, Tensor]:
        """Value and gradient (P,)."""
        value = self.subset(slice(None))
        return value.item(), nn.utils.parameters_to_vector(torch.autograd.grad(value, list(self.own.parameters())))

    def adam(self, epochs: int) -> None:
        """Minibatches in single precision, the rate falling to zero."""
        single = replace(self, own=self.own.float(), x=self.x.float(), y=self.y.float())
        optimizer = torch.optim.Adam(self.own.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
        for _ in range(epochs):
            for rows in torch.randperm(len(self.x)).split(100):
                optimizer.zero_grad()
                single.subset(rows).backward()
                optimizer.step()
            schedule.step()
        self.own.double()

    def settle(self, rounds: int, iterations: int) -> None:
        """L-BFGS from here, in coordinates in which H = JᵀΛJ + δI is the identity.

        H is the library's own, of the network as each round finds it. Where the objective is smooth it is nearly
        quadratic in these coordinates, and a few rounds end at a gradient of nearly zero.
        """
        weights = list(self.own.parameters())
        for _ in range(rounds):
            data, prior = (self.x, self.y), ntkl.GaussianPrior(self.precision)
            factor = ntkl.laplace(self.own, data, ntkl.Bernoulli(), prior,
                                  "full").posterior_precision.factor  # H = L Lᵀ
            start = nn.utils.parameters_to_vector(weights).detach()

            def whitened(z: np.ndarray, start: Tensor = start, factor: Tensor = factor) -> tuple[float, np.ndarray]:
                step = torch.linalg.solve_triangular(factor.T, torch.as_tensor(z).unsqueeze(1), upper=True)
                nn.utils.vector_to_parameters(start + step.squeeze(1), weights)
                value, gradient = self.gradient()
                inner = torch.linalg.solve_triangular(factor, gradient.unsqueeze(1), upper=False)
                return value, inner.squeeze(1).numpy()

            limits = {"maxcor": 50, "maxiter": iterations, "gtol": 1e-10, "ftol": 0.0}
            found = minimize(whitened, np.zeros(len(start)), jac=True, method="L-BFGS-B", options=limits)
            whitened(found.x)
            length = float(self.gradient()[1].norm())
            print(f"  objective {found.fun:.8f}, gradient {length:.1e} after {found.nfev} evaluations", flush=True)
            if length < SETTLED:
                break


def show(axes: Axes, image: Tensor, title: str, color: str = "black") -> None:
    """One image and its words."""
    axes.imshow(image[0].numpy(), cmap="gray_r")
    axes.set_title(title, fontsize=8, color=color)
    axes.set(xticks=[], yticks=[])


def importances(residual: Tensor, x: Tensor, y: Tensor, path: Path) -> None:
    """The sorted residuals, and images at even steps along them, closer at the ends."""
    order = residual.argsort()
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(1.5, 1))
    axes = upper.subplots()
    axes.plot(residual[order].numpy(), color="#4c72b0")
    axes.axhline(0.0, color="0.7", linewidth=0.8)
    count = 12
    ends = torch.linspace(-1, 1, count).double()
    places = ((ends.sign() * ends.abs().pow(0.3) + 1) / 2 * (len(order) - 1)).round().long()
    axes.plot(places, residual[order[places]], "o", color="#c44e52", markersize=4)
    axes.set(xlabel="training images, in order", ylabel="importance: the residual y - p")
    for place, panel in zip(places, lower.subplots(1, count), strict=True):
        index = int(order[place])
        show(panel, x[index], f"{'nine' if y[index] else 'four'}\n{float(residual[index]):+.2g}")
    figure.savefig(path, dpi=110)


def similarities(
    found: ntkl.Explanation, x: Tensor, truth: Tensor, training: tuple[Tensor, Tensor], path: Path
) -> list[dict[str, Any]]:
    """Two rows for each test image: most similar by the kernel, most moving by removal."""
    records = []
    figure = Figure(figsize=(11, 2.75 * len(x)), layout="constrained")
    axes = figure.subplots(2 * len(x), SHOWN + 1)
    words = {0: "four", 1: "nine"}
    for i in range(len(x)):
        predicted = int(found.f[i, 0] >= 0)
        right = predicted == int(truth[i])
        similar = found.similarity[i].argsort(descending=True)[:SHOWN]
        moving = found.effect[i].abs().argsort(descending=True)[:SHOWN]
        title = f"says {words[predicted]}" + ("" if right else f"\nit is a {words[int(truth[i])]}")
        for row, (order, values, sign) in enumerate(
            ((similar, found.similarity[i], ""), (moving, found.effect[i], "+"))
        ):
            line = axes[2 * i + row]
            if row == 0:
                show(line[0], x[i], title, "black" if right else "#c44e52")
            else:
                line[0].axis("off")
                line[0].text(0.5, 0.5, "change of logit\nif left out", ha="center", va="center", fontsize=8)
            for panel, j in zip(line[1:], order.tolist(), strict=True):
                label = words[int(training[1][j])]
                color = "#0072b2" if label == words[predicted] else "#d55e00"
                show(panel, training[0][j], f"{label}, {float(values[j]):{sign}.2g}", color)
        records.append({
            "predicted": predicted, "truth": int(truth[i]), "logit": float(found.f[i, 0]),
            "similar_of_the_predicted_class": int((training[1][similar, 0] == predicted).sum()),
            "residuals_of_the_similar": [float(found.importance[j, 0]) for j in similar],
            "largest_effect": float(found.effect[i, moving[0]]),
        })
    figure.savefig(path, dpi=110)
    return records


def main() -> None:
    """Train, explain, draw."""
    arguments = parser(__doc__, "t20_digits")
    arguments.add_argument("--data", type=Path, help="folder of mnist.npz; scikit-learn's digits otherwise")
    arguments.add_argument("--smooth", action="store_true", help="tanh and average pooling, trained on to the MAP")
    options: argparse.Namespace = arguments.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    x, y, x_test, y_test = images(options.data, options.small)
    precision = PRECISION if x.shape[-1] == 28 else OF_THE_SMALL
    own = network(x.shape[-1], options.smooth)
    objective = Objective(own, x, y, precision)
    if options.smooth:
        objective.adam(20 if options.small else 200)
        objective.settle(*(3, 60) if options.small else (12, 100))
    else:
        train(own, x, y, precision, 10 if options.small else 20)
    value, gradient = objective.gradient()
    own.eval()
    trained = time.perf_counter()
    posterior = ntkl.laplace(own, (x, y), ntkl.Bernoulli(), ntkl.GaussianPrior(precision=precision))
    with torch.no_grad():
        wrong = ((own(x_test) >= 0).double() != y_test)[:, 0]
    chosen = torch.cat([(~wrong).nonzero()[:1, 0], wrong.nonzero()[:2, 0]])
    found = posterior.explain(x_test[chosen], k=SHOWN)
    residual = found.importance[:, 0]
    importances(residual, x, y, options.out / "importances.png")
    records = similarities(found, x_test[chosen], y_test[chosen, 0], (x, y), options.out / "similarities.png")
    parts = found.offset + found.contributions.sum(1) + found.gap
    result = {
        "machine": machine(options.threads), "parameters": posterior.num_parameters, "N": len(x),
        "test_accuracy": 1 - float(wrong.double().mean()),
        "train_accuracy": float(((posterior.f >= 0) == y).double().mean()),
        "largest_importance": float(residual.abs().max()), "largest_gap": float(found.gap.abs().max()),
        "objective": value, "gradient": float(gradient.norm()),
        "adds_up_to": float((parts - found.f).abs().max()), "inputs": records,
        "seconds_training": trained - start, "seconds_explaining": time.perf_counter() - trained,
    }
    write(options.out / "t20_digits.json", result)
    print(
        f"{len(x):,} images, {posterior.num_parameters:,} parameters; objective {result['objective']:.4f}, "
        f"gradient {result['gradient']:.1e}; accuracy {result['test_accuracy']:.4f}; largest "
        f"importance {result['largest_importance']:.2f}; largest gap {result['largest_gap']:.1e}; parts add up to "
        f"{result['adds_up_to']:.0e}; training {result['seconds_training']:.0f} s, fit and explanations "
        f"{result['seconds_explaining']:.0f} s"
    )


if __name__ == "__main__":
    main()
