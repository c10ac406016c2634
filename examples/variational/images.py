"""Weight samples of image classifiers: "kfac" VOGGN beside Laplace, IVON and the calibrated ensemble.

    python examples/variational/images.py --out images --data DIR

Laplace's weight samples predict like a coin. Here a convolutional network on scikit-learn's digits (1,000 images to
train on) and, with ``--data``, an MLP on 5,000 images of MNIST (DIR/mnist.npz) are trained to their MAP, with the prior
precision of the largest KFAC evidence. Each posterior predicts by weight samples ("nn") and by the linearized network
("glm"). Beside them: the network, the network and five networks with a temperature from a tenth of the data, and IVON
where it is installed (``pip install ivon-opt``). Scores of test images: mean log likelihood, accuracy, expected
calibration error, and how well the entropy of the predictive tells unfamiliar images from test images (AUROC):
the test images with their quarters exchanged. Mean over three seeds.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import ntk_laplace as ntkl
from ntk_laplace import metrics

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "predictions"))

from _scores import temperature
from _shared import machine, mlp, once, parser, table, write

Predict = Callable[[Tensor], Tensor]
SAMPLES = 100
MEMBERS = 5


class Images:
    """Training, test and unfamiliar images, and the network for them."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name = name
        if name == "digits":
            from sklearn.datasets import load_digits

            data = load_digits()
            x, y = torch.as_tensor(data.images / 16.0).float()[:, None], torch.as_tensor(data.target)
            order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
            x, y = x[order], y[order]
            n, end = (200, 1100) if options.small else (1000, len(y))
            self.x, self.y, self.x_test, self.y_test = x[:n], y[:n], x[1000:end], y[1000:end]
        else:
            with np.load(options.data / "mnist.npz") as found:
                arrays = {key: torch.as_tensor(found[key]) for key in ("X_train", "y_train", "X_test", "y_test")}
            n, m = (200, 200) if options.small else (5000, 2000)
            self.x, self.x_test = (arrays[key][:k, None].float() / 255 for key, k in (("X_train", n), ("X_test", m)))
            self.y, self.y_test = arrays["y_train"][:n].long(), arrays["y_test"][:m].long()
        half = self.x.shape[-1] // 2
        self.unfamiliar = self.x_test.roll((half, half), (2, 3))

    def network(self) -> nn.Module:
        """A network with random weights."""
        if self.name == "digits":
            return nn.Sequential(nn.Conv2d(1, 16, 3), nn.Tanh(), nn.Conv2d(16, 16, 3), nn.Tanh(), nn.Flatten(),
                                 nn.Linear(256, 32), nn.Tanh(), nn.Linear(32, 10))
        return nn.Sequential(nn.Flatten(), *mlp((784, 100, 100, 10)))

    def trained(self, rows: Tensor, delta: float, seed: int, epochs: int) -> nn.Module:
        """MAP of some examples by Adam; a step's loss is the mean negative log joint."""
        torch.manual_seed(seed)
        network = self.network()
        optimizer = torch.optim.Adam(network.parameters(), 2e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
        x, y = self.x[rows], self.y[rows]
        for _ in range(epochs):
            for part in torch.randperm(len(y)).split(100):
                optimizer.zero_grad()
                squares = sum(p.square().sum() for p in network.parameters())
                loss = nn.functional.cross_entropy(network(x[part]), y[part]) + 0.5 * delta / len(y) * squares
                loss.backward()
                optimizer.step()
            schedule.step()
        return network.eval()


def scores(data: Images, predict: Predict) -> dict[str, float]:
    """What users ask of probabilities (n, C)."""
    inside, outside = predict(data.x_test).double(), predict(data.unfamiliar).double()
    entropy = [-(p * p.clamp_min(1e-30).log()).sum(-1).numpy() for p in (inside, outside)]
    rows = inside[torch.arange(len(inside)), data.y_test]
    return {
        "log likelihood": rows.clamp_min(1e-30).log().mean().item(),
        "accuracy": metrics.accuracy(inside, data.y_test),
        "ECE": metrics.expected_calibration_error(inside, data.y_test),
        "unfamiliar": metrics.detection_auroc(*entropy),
    }


@torch.no_grad()
def averaged(networks: list[nn.Module], x: Tensor, temperature: float = 1.0) -> Tensor:
    """Mean probabilities of networks."""
    logs = torch.stack([network(x).double().log_softmax(-1) for network in networks]).logsumexp(0)
    return (logs / temperature).softmax(-1)


def of_posterior(posterior: ntkl.Posterior, method: str) -> Predict:
    """Probabilities of a posterior."""

    def predict(x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            return posterior.predict(x, method, samples=SAMPLES, generator=generator).probs

    return predict


def ivon(data: Images, start: nn.Module, delta: float, steps: int, seed: int) -> Predict:
    """IVON from the MAP, with the settings of its README and the precision of the prior."""
    from ivon import IVON

    torch.manual_seed(seed)
    network, n = copy.deepcopy(start).train(), len(data.y)
    optimizer = IVON(network.parameters(), lr=0.1, ess=n, weight_decay=delta / n, hess_init=0.1, beta2=1 - 1e-5)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        part = torch.randint(n, (100,))
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(data.x[part]), data.y[part]).backward()
        optimizer.step()
        schedule.step()
    network.eval()

    @torch.no_grad()
    def predict(x: Tensor) -> Tensor:
        total = torch.zeros(len(x), 10, dtype=torch.float64)
        for _ in range(SAMPLES):
            with optimizer.sampled_params():
                total += network(x).double().softmax(-1)
        return total / SAMPLES

    return predict


def study(data: Images, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Scores and seconds of every method."""
    epochs, steps = (3, 10) if options.small else (options.epochs, options.steps)
    found: dict[str, Any] = {}

    def add(name: str, work: Callable[[], Predict]) -> None:
        start = time.perf_counter()
        predict = work()
        fit = time.perf_counter() - start
        found[name] = scores(data, predict) | {"fit": fit, "predictions": time.perf_counter() - start - fit}
        print(data.name, seed, name, found[name], flush=True)

    order = torch.randperm(len(data.y), generator=torch.Generator().manual_seed(seed))
    held, kept = order[: len(order) // 10], order[len(order) // 10 :]
    delta, every = 1.0, torch.arange(len(data.y))
    for _ in range(0 if options.small else 2):  # the precision that the evidence asks for, and the MAP under it
        network = data.trained(every, delta, seed, epochs)
        posterior = ntkl.laplace(network, (data.x, data.y), ntkl.Categorical(), ntkl.GaussianPrior(precision=delta),
                                 structure="kfac", dtype=torch.float32)
        posterior.fit_hyperparameters(parameters=["precision"])
        delta = posterior.prior.precision.item()
    network = data.trained(every, delta, seed, epochs)
    prior = ntkl.GaussianPrior(precision=delta)
    found["precision"] = delta

    def ensemble(rows: Tensor, count: int) -> list[nn.Module]:
        return [network if k == 0 and len(rows) == len(every) else data.trained(rows, delta, seed + 100 * k, epochs)
                for k in range(count)]

    def calibrated(count: int) -> Predict:
        tuned = temperature(averaged(ensemble(kept, count), data.x[held]).log(), data.y[held])
        whole = ensemble(every, count)
        return lambda x: averaged(whole, x, tuned)

    add("network", lambda: lambda x: averaged([network], x))
    add("network, calibrated", lambda: calibrated(1))
    add("five networks, calibrated", lambda: calibrated(MEMBERS))
    laplace = ntkl.laplace(network, (data.x, data.y), ntkl.Categorical(), prior, structure="kfac", dtype=torch.float32)
    for method in ("nn", "glm"):
        add(f'Laplace, "{method}"', lambda m=method: of_posterior(laplace, m))
    start = time.perf_counter()
    fit = ntkl.variational(
        network, (data.x, data.y), ntkl.Categorical(), prior, structure="kfac", algorithm="voggn", start=laplace,
        step_size=options.step_size, steps=steps, batch_size=min(options.batch, len(data.y)), seed=seed, elbo_every=0,
        dtype=torch.float32,
    )
    found["seconds of VOGGN"] = time.perf_counter() - start
    for method in ("nn", "glm"):
        add(f'VOGGN, "{method}"', lambda m=method: of_posterior(fit.posterior, m))
    if importlib.util.find_spec("ivon") is not None:
        add("IVON", lambda: ivon(data, network, delta, 10 if options.small else 5000, seed))
    return found


def main() -> None:
    """Both data sets."""
    arguments = parser(__doc__, "images")
    arguments.add_argument("--data", type=Path, help="folder with mnist.npz")
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--epochs", type=int, default=60)
    arguments.add_argument("--steps", type=int, default=500)
    arguments.add_argument("--batch", type=int, default=250)
    arguments.add_argument("--step-size", type=float, default=0.005)
    options = arguments.parse_args()
    if options.small:
        options.seeds = 1
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    settings = [str(getattr(options, key)) for key in ("epochs", "steps", "batch", "step_size", "small")]
    results: dict[str, Any] = {}
    for name in ("digits", "mnist") if options.data else ("digits",):
        data = Images(name, options)
        kept = [options.out / f"{name}_{seed}.json" for seed in range(options.seeds)]
        results[name] = [once(path, settings, lambda d=data, s=seed: study(d, s, options))
                         for seed, path in enumerate(kept)]
        columns = ["log likelihood", "accuracy", "ECE", "unfamiliar", "fit", "predictions"]
        rows = [[method, *(f"{np.mean([one[method][column] for one in results[name]]):.3f}" for column in columns)]
                for method in results[name][0] if isinstance(results[name][0][method], dict)]
        print(f"\n{name}\n\n{table(['method', *columns], rows)}\n")
    write(options.out / "images.json", {"machine": machine(options.threads), "results": results})


if __name__ == "__main__":
    main()
