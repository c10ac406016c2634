"""[L22] 8.2 and table 3, 4: deep kernel transfer, trained by the evidence of many small tasks or by their CLML.

    python examples/selection/transfer.py --data DIR --out transfer

The paper's data (head poses, Omniglot, EMNIST) are not used; two problems of the same kind are. In both a network and
the hyperparameters of one kernel are shared by all tasks, and each step of Adam takes the mean objective of a few new
tasks, as in deep kernel transfer (Patacchiola et al., 2020). A new task is predicted from its support points alone.

sines: y = A sin(x - φ) + noise of sd 0.1, A in [0.1, 5], φ in [0, π], x in [-5, 5], 10 points a task; [1, 40, 40] ReLU
and an RBF kernel. Tested with 5 support points in the same ranges, and with amplitudes in [5, 10], phases in [π, 2π],
inputs in [5, 10].

digits: the 8 x 8 digits of scikit-learn, and MNIST (DIR/mnist.npz) reduced to 8 x 8; a task has 5 of the ten classes,
and one regression to ±1 for each class; 6 images of a class to train, 1 or 5 support images to test. The network is
trained on one of the two sets and tested on both; [64, 64, 32] ReLU, with an RBF kernel or cosine similarity.

The networks of several seeds are one batch. Tasks differ between seeds, and are the same for all objectives: the LML,
and the CLML given 9 of 10 points or half of them in a new random order at each step; the untrained networks stand
beside them. Differences from the LML are paired over seeds. It writes transfer.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpytorch
import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import LinearKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean
from sklearn.datasets import load_digits
from torch import Generator, Tensor

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _deep import Networks, standard_error
from _shared import machine, once, parser, table, write

from ntk_laplace.gp import ConditionalMarginalLogLikelihood

# given no points, the conditional evidence is the evidence
SHARES = {"LML": 0.0, "CLML, 0.9": 0.9, "CLML, 0.5": 0.5, "untrained": None}
RANGES = {"amplitude": (0.1, 5.0), "phase": (0.0, torch.pi), "x": (-5.0, 5.0)}
ELSEWHERE = {"in range": {}, "amplitude": {"amplitude": (5.0, 10.0)}, "phase": {"phase": (torch.pi, 2 * torch.pi)},
             "inputs": {"x": (5.0, 10.0)}}
Tasks = Callable[[int], tuple[Tensor, Tensor]]


class Shared(gpytorch.models.ExactGP):
    """One network and kernel for each seed, for all its tasks: inputs (S, T, 1, n, d), targets (S, T, C, n)."""

    def __init__(self, sizes: tuple[int, ...], seeds: int, cosine: bool = False) -> None:
        batch = torch.Size([seeds, 1, 1])
        super().__init__(None, None, GaussianLikelihood(batch_shape=batch))
        self.network, self.cosine = Networks(sizes, range(seeds)), cosine
        self.mean = ConstantMean(batch_shape=batch)
        rbf = ScaleKernel(RBFKernel(batch_shape=batch), batch_shape=batch)
        self.kernel = LinearKernel(batch_shape=batch) if cosine else rbf

    def forward(self, x: Tensor) -> MultivariateNormal:
        """The prior at inputs."""
        z = self.network(x.flatten(1, -2)).unflatten(1, x.shape[1:-1])
        z = torch.nn.functional.normalize(z, dim=-1) if self.cosine else z
        return MultivariateNormal(self.mean(z), self.kernel(z))

    def predicted(self, x: Tensor, y: Tensor, support: int) -> tuple[Tensor, Tensor]:
        """Mean and variance of the other targets given the first `support` of each task, (S, T, C, n - support)."""
        with torch.no_grad():
            noisy = self.likelihood(self.forward(x))
            mean, joint = noisy.mean, noisy.covariance_matrix
            given, cross = joint[..., :support, :support], joint[..., support:, :support]
            gain = torch.linalg.solve(given, cross.mT).mT
            moved = gain @ (y - mean)[..., :support, None]
            spread = joint.diagonal(dim1=-2, dim2=-1)[..., support:] - (gain * cross).sum(-1)
            return mean[..., support:] + moved.squeeze(-1), spread


def train(model: Shared, tasks: Tasks, share: float | None, steps: int, rate: float) -> None:
    """Adam on the mean objective of new tasks at each step; None trains nothing."""
    model.double().train()
    if share is None:
        return
    score = ConditionalMarginalLogLikelihood(model.likelihood, model, share)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for step in range(steps):
        x, y = tasks(step)
        model.set_train_data(x, y, strict=False)
        optimizer.zero_grad()
        (-score(model(x), y).sum(0).mean()).backward()
        optimizer.step()


def mean_density(mean: Tensor, variance: Tensor, y: Tensor) -> list[float]:
    """Mean log density of each seed."""
    return torch.distributions.Normal(mean, variance.sqrt()).log_prob(y).flatten(1).mean(1).tolist()


# --- sines


def sines(seed: int, seeds: int, tasks: int, n: int, **ranges: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Tasks (S, T, 1, n, 1) and (S, T, 1, n)."""
    generator, at = Generator().manual_seed(seed), RANGES | ranges

    def uniform(name: str, *shape: int) -> Tensor:
        low, high = at[name]
        return low + (high - low) * torch.rand(*shape, generator=generator, dtype=torch.float64)

    x, shape = uniform("x", seeds, tasks, 1, n), (seeds, tasks, 1, 1)
    y = uniform("amplitude", *shape) * (x - uniform("phase", *shape)).sin()
    return x.unsqueeze(-1), y + 0.1 * torch.randn(y.shape, generator=generator, dtype=torch.float64)


def of_sines(share: float | None, options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Train on sines; scores of each seed in and out of range."""
    model = Shared((1, 40, 40), options.seeds)
    train(model, lambda step: sines(step, options.seeds, 8, 10), share, 3 * options.steps, 1e-3)
    found = {}
    for words, ranges in ELSEWHERE.items():
        x, y = sines(10**6, options.seeds, options.tasks, 55, **ranges)
        mean, variance = model.predicted(x, y, 5)
        error = (mean - y[..., 5:]).square().flatten(1).mean(1)
        found[words] = {"MSE": error.tolist(), "log density": mean_density(mean, variance, y[..., 5:])}
    return found


# --- digits and MNIST


def images(folder: Path) -> dict[str, dict[str, tuple[Tensor, Tensor]]]:
    """8 x 8 images in [0, 1] and labels, to train and to test.

    MNIST is padded to 32 x 32 and averaged over squares, as the digits were made.
    """
    digits = load_digits()
    x, y = torch.as_tensor(digits.data / 16), torch.as_tensor(digits.target).long()
    found = {"digits": {"train": (x[:1000], y[:1000]), "test": (x[1000:], y[1000:])}}
    if (folder / "mnist.npz").exists():
        with np.load(folder / "mnist.npz") as data:
            found["MNIST"] = {part: _reduced(data[f"X_{part}"][:5000], data[f"y_{part}"][:5000])
                              for part in ("train", "test")}
    return found


def _reduced(pictures: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
    padded = torch.nn.functional.pad(torch.as_tensor(pictures).double() / 255, (2, 2, 2, 2))
    return torch.nn.functional.avg_pool2d(padded, 4).flatten(1), torch.as_tensor(labels).long()


def episodes(data: tuple[Tensor, Tensor], seed: int, shape: tuple[int, int], each: int) -> tuple[Tensor, Tensor]:
    """Tasks of 5 classes, `each` images of each in turns: (S, T, 1, 5 each, 64), and ±1 for each class."""
    x, labels = data
    rng = np.random.default_rng(seed)
    of_class = [np.flatnonzero(labels.numpy() == c) for c in range(10)]
    chosen = [
        np.stack([rng.choice(of_class[c], each, replace=False) for c in rng.permutation(10)[:5]], 1).ravel()
        for _ in range(shape[0] * shape[1])
    ]
    index = torch.as_tensor(np.stack(chosen)).view(*shape, 1, 5 * each)
    sign = 2.0 * torch.eye(5, dtype=torch.float64).repeat(1, each) - 1.0  # class c has places c, c + 5, ...
    return x[index], sign.expand(*shape, 5, 5 * each)


def of_images(
    source: str, cosine: bool, share: float | None, data: dict[str, dict[str, tuple[Tensor, Tensor]]],
    options: argparse.Namespace,
) -> dict[str, dict[str, list[float]]]:
    """Train on one set of images; accuracy and density of each seed on both."""
    model = Shared((64, 64, 32), options.seeds, cosine)
    train(model, lambda step: episodes(data[source]["train"], step, (options.seeds, 4), 6), share, options.steps, 1e-3)
    found = {}
    for target in data:
        for shots in (1, 5):
            x, y = episodes(data[target]["test"], 10**6, (options.seeds, options.tasks), shots + 10)
            mean, variance = model.predicted(x, y, 5 * shots)
            right = (mean.argmax(2) == y[..., 5 * shots :].argmax(2)).double().flatten(1).mean(1)
            found[f"{target}, {shots} shot"] = {
                "accuracy": right.tolist(), "log density": mean_density(mean, variance, y[..., 5 * shots :]),
            }
    return found


def report(words: str, runs: dict[str, dict[str, dict[str, list[float]]]]) -> list[dict[str, Any]]:
    """Print a table of one problem, with paired differences from the LML; its numbers."""
    rows, kept = [], []
    for place, scores in runs["LML"].items():
        for score, values in scores.items():
            base = torch.tensor(values, dtype=torch.float64)
            row = [place, score, f"{base.mean().item():.4f}"]
            for name in list(runs)[1:]:
                own = torch.tensor(runs[name][place][score], dtype=torch.float64)
                difference, better = own - base, own < base if score == "MSE" else own > base
                error = standard_error(difference)
                row += [f"{difference.mean().item():+.4f} ± {error:.4f} ({int(better.sum())}/{len(own)})"]
                kept.append({"problem": words, "place": place, "score": score, "objective": name,
                             "lml": base.mean().item(), "difference": difference.mean().item(),
                             "standard_error": error, "better": int(better.sum())})
            rows.append(row)
    heads = ["tested on", "score", "LML", *(f"{name} less LML" for name in list(runs)[1:])]
    print(f"\n{words} (in parentheses: seeds in which it is better)\n{table(heads, rows)}", flush=True)
    return kept


def main() -> None:
    arguments = parser(__doc__, "transfer")
    arguments.add_argument("--data", type=Path, default=Path("data"), help="folder of mnist.npz")
    arguments.add_argument("--seeds", type=int, default=10, help="initializations and task streams (default 10)")
    arguments.add_argument("--steps", type=int, default=1000, help="of Adam (default 1,000; 3 x that for sines)")
    arguments.add_argument("--tasks", type=int, default=100, help="test tasks of each seed (default 100)")
    options = arguments.parse_args()
    if options.small:
        options.seeds, options.steps, options.tasks = 2, 3, 3
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    settings = [str(options.seeds), str(options.steps), str(options.tasks)]

    def runs(name: str, compute: Callable[[float | None], Any]) -> dict[str, Any]:
        return {
            words: once(options.out / f"{name}_{share}.json", settings, lambda share=share: compute(share))
            for words, share in SHARES.items()
        }

    found = report("sines", runs("sines", lambda share: of_sines(share, options)))
    data = images(options.data)
    for source in data:
        for kernel, cosine in (("RBF", False), ("cosine", True)):
            own = runs(f"{source}_{kernel}", lambda share, job=(source, cosine): of_images(*job, share, data, options))
            found += report(f"trained on {source}, {kernel}", own)
    write(options.out / "transfer.json", {"machine": machine(options.threads), "results": found})


if __name__ == "__main__":
    main()
