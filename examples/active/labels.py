"""Which images to label next: accuracy against the number of labels, for seven ways to choose them.

    python examples/active/labels.py [--problems digits,mnist --data DIR] --threads 1 --out labels

A pool of 1,000 images of scikit-learn's digits, or of MNIST (DIR/mnist.npz, shrunk to 14 x 14), and twenty labels at
the start. In each of eight rounds a perceptron with 32 tanh units is trained to its MAP on all labels so far (prior
precision 1), and ten more images are labeled: at random, or greedily by "epig" (the default, with 100 images of the
pool as targets), "information", "bald" or "variance", each given those chosen before it; "fitted": under the precision
of the largest evidence at these weights. Test accuracy and log likelihood (glm) of 500 images; means and paired
standard errors over ten seeds of data and weights. It writes labels.json and labels.png.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn

import ntk_laplace as ntkl
from ntk_laplace.plotting import png

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _shared import machine, mlp, once, parser, table, write

COLORS = ("0.45", "#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7")
START, BATCH = 20, 10

# posterior, labeled inputs and labels, unlabeled inputs, generator -> indices of BATCH unlabeled inputs
Choice = Callable[[ntkl.Posterior, Tensor, Tensor, Tensor, torch.Generator], Tensor]
# name of the data, choice, seed, options -> scores after each round
Run = Callable[[str, Choice, int, Any], dict[str, list[float]]]


def at_random(posterior: ntkl.Posterior, x: Tensor, y: Tensor, rest: Tensor, generator: torch.Generator) -> Tensor:
    """Any ten."""
    return torch.randperm(len(rest), generator=generator)[:BATCH]


def greedy(method: str, fitted: bool = False) -> Choice:
    """The batch of `ntkl.active.select`, if `fitted` under the precision of the largest evidence."""

    def choice(posterior: ntkl.Posterior, x: Tensor, y: Tensor, rest: Tensor, generator: torch.Generator) -> Tensor:
        if fitted:
            posterior.fit_hyperparameters()
        return ntkl.active.select(posterior, rest, BATCH, method).indices

    return choice


WAYS: dict[str, Choice] = {"random": at_random} | {m: greedy(m) for m in ("epig", "information", "bald", "variance")}
WAYS |= {f"{method}, fitted": greedy(method, fitted=True) for method in ("information", "bald")}


def images(name: str, folder: Path | None) -> tuple[Tensor, Tensor]:
    """Flat images with values in [0, 1], and labels."""
    if name == "digits":
        x, y = load_digits(return_X_y=True)
        return torch.as_tensor(x / 16.0), torch.as_tensor(y)
    with np.load(Path(str(folder)) / "mnist.npz") as found:
        x = torch.as_tensor(found["X_train"][:4000]).double() / 255.0
        y = torch.as_tensor(found["y_train"][:4000]).long()
    return nn.functional.avg_pool2d(x.unsqueeze(1), 2).flatten(1), y


def train(x: Tensor, y: Tensor, width: int, steps: int = 150) -> nn.Module:
    """The MAP of a perceptron, by L-BFGS."""
    network = mlp((x.shape[1], width, 10)).double()
    weights = list(network.parameters())
    optimizer = torch.optim.LBFGS(weights, max_iter=steps, line_search_fn="strong_wolfe")

    def objective() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(x), y, reduction="sum")
        loss = loss + 0.5 * sum(p.square().sum() for p in weights)
        loss.backward()
        return loss

    optimizer.step(objective)
    return network


def labeled(name: str, choice: Choice, seed: int, options: Any) -> dict[str, list[float]]:
    """Test scores after each round."""
    x, y = images(name, options.data)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=generator)
    size, tests = (45, 60) if options.small else (1000, 500)
    x, y = x[order[: size + tests]], y[order[: size + tests]]
    pool, pool_y, x_test, y_test = x[:size], y[:size], x[size:], y[size:]
    known, found = list(range(START)), {"labels": [], "accuracy": [], "log_likelihood": []}
    while True:
        torch.manual_seed(seed)
        network = train(pool[known], pool_y[known], *((8, 20) if options.small else (32,)))
        posterior = ntkl.laplace(network, (pool[known], pool_y[known]), ntkl.Categorical(), ntkl.GaussianPrior(1.0))
        response = posterior.predict(x_test, samples=256)
        found["labels"].append(len(known))
        found["accuracy"].append((response.probs.argmax(1) == y_test).double().mean().item())
        found["log_likelihood"].append(response.log_prob(y_test).mean().item())
        if len(found["labels"]) > options.rounds:
            return found
        rest = [i for i in range(size) if i not in set(known)]
        new = choice(posterior, pool[known], pool_y[known], pool[rest], generator)
        known += [rest[i] for i in new.tolist()]


def main(
    ways: dict[str, Choice], description: str | None, title: str, *, scored: Run = labeled, score: str = "accuracy",
    problems: tuple[str, ...] = ("digits", "mnist"), rounds: int = 8,
) -> None:
    """Every way, on every problem; the first is random choice."""
    arguments = parser(description, "labels")
    arguments.add_argument("--problems", default=problems[0], help=f"of {', '.join(problems)}, with commas between")
    arguments.add_argument("--data", type=Path, help=f"folder with .npz files, for all but {problems[0]}")
    arguments.add_argument("--seeds", type=int, default=10)
    arguments.add_argument("--rounds", type=int, default=rounds)
    options = arguments.parse_args()
    if options.small:
        options.seeds, options.rounds = 2, 1
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    names = options.problems.split(",")
    results: dict[str, Any] = {}
    figure = Figure(figsize=(5.5 * len(names), 4), layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, len(names)))
    for name, panel in zip(names, axes, strict=True):
        runs = {
            way: [once(options.out / f"{name} {way} {seed}.json", [str(options.small), str(options.rounds)],
                       lambda n=name, w=way, s=seed: scored(n, ways[w], s, options)) for seed in range(options.seeds)]
            for way in ways
        }
        rows = []
        for number, way in enumerate(ways):
            scores = {key: np.array([run[key] for run in runs[way]]) for key in (score, "log_likelihood")}
            area = scores[score][:, 1:].mean(1) - np.array([r[score][1:] for r in runs["random"]]).mean(1)
            error = area.std(ddof=1) / len(area) ** 0.5
            labels = runs[way][0]["labels"]
            panel.plot(labels, scores[score].mean(0), color=COLORS[number], label=way)
            rows.append([way, *(f"{scores[score].mean(0)[i]:.3f}" for i in (len(labels) // 2, -1)),
                         f"{scores['log_likelihood'].mean(0)[-1]:.3f}", f"{area.mean():+.4f} ± {error:.4f}"])
            results.setdefault(name, {})[way] = {
                "labels": labels, score: scores[score].mean(0).tolist(),
                "log_likelihood": scores["log_likelihood"].mean(0).tolist(),
                "above_random": area.mean(), "error": error,
            }
        panel.set(title=name, xlabel="labels", ylabel=f"test {score}")
        panel.legend()
        print(f"\n{name}, {options.seeds} seeds\n")
        half, last = labels[len(labels) // 2], labels[-1]
        print(table(["way", f"{score} at {half}", f"at {last}", f"log likelihood at {last}",
                     f"mean {score} above random"], rows))
    (options.out / f"{title}.png").write_bytes(png(figure))
    write(options.out / f"{title}.json", {"machine": machine(options.threads), "results": results})


if __name__ == "__main__":
    main(WAYS, __doc__, "labels")
