"""The data sets of the attribution benchmark, and a small network trained to convergence by L-BFGS in float64."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import minimize
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_iris, load_wine
from torch import nn
from torch.nn import functional

sys.path.append(str(Path(__file__).resolve().parents[1] / "structures"))

from _images import load, miniature

import ntk_laplace as ntkl


@dataclass(frozen=True)
class Problem:
    """A data set, a network of one hidden tanh layer, a likelihood and a weight decay δ/2 ‖θ‖².

    What is to be predicted at the test points is the `target`: the "loss" there, or (for one output) the "output".
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    outputs: int
    kind: str
    delta: float
    noise: float = 1.0
    halves: int = 100
    hidden: int = 16
    target: str = "loss"

    @property
    def name_of_files(self) -> str:
        """Without blanks."""
        return f"{self.name.replace(' ', '-')}-{self.delta:g}{'' if self.target == 'loss' else '-output'}"

    def network(self, theta: np.ndarray | None = None, seed: int = 0) -> nn.Module:
        """torch's own start at a seed, or the network at given weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers = nn.Linear(self.x.shape[1], self.hidden), nn.Tanh(), nn.Linear(self.hidden, self.outputs)
            network = nn.Sequential(*layers).double()
        if theta is not None:
            nn.utils.vector_to_parameters(torch.as_tensor(theta.copy()), network.parameters())
        return network

    def likelihood(self) -> ntkl.Likelihood:
        """A fresh one."""
        return {"categorical": ntkl.Categorical, "bernoulli": ntkl.Bernoulli,
                "gaussian": lambda: ntkl.Gaussian(noise=self.noise)}[self.kind]()

    def posterior(self, theta: np.ndarray, structure: str = "gp") -> ntkl.Posterior:
        """Of the trained network."""
        data = torch.as_tensor(self.x), torch.as_tensor(self.y)
        prior = ntkl.GaussianPrior(self.delta)
        return ntkl.laplace(self.network(theta), data, self.likelihood(), prior, structure)

    # --- training, in numpy: a hundred times what autograd takes

    def _parts(self, theta: np.ndarray) -> list[np.ndarray]:
        d, h, c = self.x.shape[1], self.hidden, self.outputs
        ends = np.cumsum([h * d, h, c * h])
        first, bias, second, last = np.split(theta, ends)
        return [first.reshape(h, d), bias, second.reshape(c, h), last]

    def f(self, theta: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Outputs, (n, C)."""
        w1, b1, w2, b2 = self._parts(theta)
        return np.tanh(x @ w1.T + b1) @ w2.T + b2

    def loss(self, f: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """-log p of each example up to a constant, (n,), and its gradient in f."""
        if self.kind == "gaussian":
            return 0.5 * ((f - y) ** 2).sum(1) / self.noise, (f - y) / self.noise
        if self.kind == "bernoulli":
            p = 1.0 / (1.0 + np.exp(-f))
            return (np.logaddexp(0.0, f) - y * f).sum(1), p - y
        shifted = f - f.max(1, keepdims=True)
        logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
        rows = np.arange(len(f))
        gradient = np.exp(logs)
        gradient[rows, y] -= 1.0
        return -logs[rows, y], gradient

    def objective(self, theta: np.ndarray, indices: np.ndarray) -> tuple[float, np.ndarray]:
        """Summed loss of some of the data plus δ/2 ‖θ‖², and its gradient (P,)."""
        x, y = self.x[indices], self.y[indices]
        w1, b1, w2, b2 = self._parts(theta)
        hidden = np.tanh(x @ w1.T + b1)
        value, back = self.loss(hidden @ w2.T + b2, y)
        inner = (back @ w2) * (1.0 - hidden**2)
        gradient = [inner.T @ x, inner.sum(0), back.T @ hidden, back.sum(0)]
        flat = np.concatenate([g.ravel() for g in gradient]) + self.delta * theta
        return float(value.sum() + 0.5 * self.delta * theta @ theta), flat

    def hessian(self, theta: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """Of the objective at weights, exact, by torch, (P, P)."""
        network, likelihood = self.network(), self.likelihood()
        shapes = {name: value.shape for name, value in network.named_parameters()}

        def loss(weights: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            parts = weights.split([shape.numel() for shape in shapes.values()])
            named = {name: part.view(shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)}
            return -likelihood.log_prob(torch.func.functional_call(network, named, (x,)), y).sum()

        weights = torch.as_tensor(theta)
        found = self.delta * torch.eye(len(weights), dtype=weights.dtype)
        data = torch.as_tensor(self.x[indices]), torch.as_tensor(self.y[indices])
        for x, y in zip(*(part.split(100) for part in data), strict=True):
            found += torch.func.jacrev(torch.func.grad(loss), chunk_size=100)(weights, x, y).detach()
        return found.numpy()

    def train(self, indices: np.ndarray, seed: int = 0, start: np.ndarray | None = None) -> np.ndarray:
        """Weights at a minimum of the objective, gradient below 1e-5."""
        if start is None:
            weights = self.network(seed=seed).parameters()
            start = nn.utils.parameters_to_vector(weights).detach().numpy()
        options = {"maxcor": 30, "maxiter": 50_000, "maxfun": 100_000, "gtol": 1e-5, "ftol": 0.0}
        found = minimize(self.objective, start, args=(indices,), jac=True, method="L-BFGS-B", options=options)
        return found.x

    def measured(self, f: np.ndarray) -> np.ndarray:
        """The target at each test point, (n,), of outputs there."""
        return f[:, 0] if self.target == "output" else self.loss(f, self.y_test)[0]

    def slope(self, f: np.ndarray) -> np.ndarray:
        """Gradient of the target in the outputs, (n, C)."""
        return np.ones_like(f) if self.target == "output" else self.loss(f, self.y_test)[1]

    def effects(self, posterior: ntkl.Posterior) -> np.ndarray:
        """Change of the target at the test points if a training point is removed, (n, N)."""
        x, y = torch.as_tensor(self.x_test), torch.as_tensor(self.y_test)
        if self.target == "output":
            return posterior.removal_effects(x).numpy()
        return -posterior.removal_effects(x, by="log_likelihood", y=y).numpy()

    def outcome(self, indices: np.ndarray, seed: int) -> np.ndarray:
        """The target at each test point after training on some of the data, (n,)."""
        return self.measured(self.f(self.train(indices, seed), self.x_test))

    def moved(self, start: np.ndarray, indices: np.ndarray, seed: int) -> np.ndarray:
        """Outputs at the test points, (n, C), after training on some of the data from these weights."""
        return self.f(self.train(indices, start=start), self.x_test)

    def returned(self, start: np.ndarray, indices: np.ndarray, seed: int) -> np.ndarray:
        """The same, trained on with all of the data afterwards."""
        without = self.train(indices, start=start)
        return self.f(self.train(np.arange(len(self.x)), start=without), self.x_test)


class Convolutions(Problem):
    """Images (N, 1, 28, 28) and a network of two convolutions; gradients are those of torch.

    For training, the convolutions are matrix products with patches: torch's own are slow in float64.
    """

    def network(self, theta: np.ndarray | None = None, seed: int = 0) -> nn.Module:
        """Means of 2 x 2 pixels, convolutions of `hidden` / 2 and `hidden` channels, tanh, and a linear layer."""
        c = self.hidden
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(1, c // 2, 5, 2), nn.Tanh(), nn.Conv2d(c // 2, c, 3),
                                    nn.Tanh(), nn.Flatten(), nn.Linear(9 * c, self.outputs)).double()
        if theta is not None:
            nn.utils.vector_to_parameters(torch.as_tensor(theta.copy()), network.parameters())
        return network

    def f(self, theta: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Outputs, (n, C)."""
        with torch.no_grad():
            return self.network(theta)(torch.as_tensor(x)).numpy()

    @cached_property
    def _patches(self) -> torch.Tensor:
        """Of the first convolution, (N, 25, 25)."""
        return functional.unfold(functional.avg_pool2d(torch.as_tensor(self.x), 2), 5, stride=2)

    def objective(self, theta: np.ndarray, indices: np.ndarray) -> tuple[float, np.ndarray]:
        """Summed loss of some of the data plus δ/2 ‖θ‖², and its gradient (P,)."""
        c, at = self.hidden, torch.as_tensor(theta).requires_grad_()
        w1, b1, w2, b2, w3, b3 = at.split([25 * c // 2, c // 2, 9 * c * c // 2, c, 9 * c * self.outputs, self.outputs])
        patches = self._patches if len(indices) == len(self.x) else self._patches[indices]
        hidden = torch.tanh(w1.view(-1, 25) @ patches + b1[:, None])
        hidden = torch.tanh(w2.view(c, -1) @ functional.unfold(hidden.unflatten(2, (5, 5)), 3) + b2[:, None])
        f = hidden.flatten(1) @ w3.view(self.outputs, -1).T + b3
        value, back = self.loss(f.detach().numpy(), self.y[indices])
        (gradient,) = torch.autograd.grad(f, at, torch.as_tensor(back))
        return float(value.sum() + 0.5 * self.delta * theta @ theta), gradient.numpy() + self.delta * theta


def digits(delta: float = 1.0) -> Problem:
    """500 and 100 digits, 64-16-10."""
    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.data))
    x, y = found.data[order] / 16.0, found.target[order]
    return Problem("digits", x[:500], y[:500], x[500:600], y[500:600], 10, "categorical", delta)


def fours_and_nines(delta: float = 1.0) -> Problem:
    """260 and 101 digits that are fours or nines, 64-16-1; nine is 1."""
    found = load_digits()
    both = np.flatnonzero(np.isin(found.target, (4, 9)))
    order = np.random.default_rng(0).permutation(both)
    x, y = found.data[order] / 16.0, (found.target[order] == 9).astype(float)[:, None]
    return Problem("fours and nines", x[:260], y[:260], x[260:], y[260:], 1, "bernoulli", delta)


def breast_cancer(delta: float = 0.5) -> Problem:
    """400 and 169 rows of 30 standardized features, 30-16-1."""
    found = load_breast_cancer()
    order = np.random.default_rng(0).permutation(len(found.data))
    x, y = _standardized(found.data)[order], found.target[order].astype(float)[:, None]
    return Problem("breast cancer", x[:400], y[:400], x[400:], y[400:], 1, "bernoulli", delta, halves=60)


def diabetes(delta: float = 5.0) -> Problem:
    """350 and 92 rows of 10 standardized features, 10-16-1, noise variance 0.5; the output is to be predicted."""
    found = load_diabetes()
    order = np.random.default_rng(0).permutation(len(found.data))
    x, y = _standardized(found.data)[order], _standardized(found.target[:, None])[order]
    problem = Problem("diabetes", x[:350], y[:350], x[350:], y[350:], 1, "gaussian", delta, noise=0.5)
    return replace(problem, halves=60, target="output")


def iris(delta: float = 0.5) -> Problem:
    """100 and 50 rows of 4 standardized features, 4-16-3."""
    return _table("iris", load_iris(), 100, delta)


def wine(delta: float = 1.0) -> Problem:
    """120 and 58 rows of 13 standardized features, 13-16-3."""
    return _table("wine", load_wine(), 120, delta)


def mnist(folder: Path | None, delta: float = 10.0) -> Problem:
    """1,000 and 100 images of the folder's mnist.npz (scikit-learn's digits without one), and two convolutions."""
    split = miniature() if folder is None else load(folder)
    count = min(1000, len(split.y))
    x, y, x_test, y_test = (found.numpy() for found in (split.x[:count], split.y[:count], split.x_test[:100],
                                                        split.y_test[:100]))
    x, x_test = (found[:, None] / 255.0 for found in (x, x_test))
    return Convolutions("mnist", x, y, x_test, y_test, 10, "categorical", delta, halves=20, hidden=8)


def _table(name: str, found, count: int, delta: float) -> Problem:
    order = np.random.default_rng(0).permutation(len(found.data))
    x, y = _standardized(found.data)[order], found.target[order]
    return Problem(name, x[:count], y[:count], x[count:], y[count:], 3, "categorical", delta, halves=60)


def _standardized(values: np.ndarray) -> np.ndarray:
    return (values - values.mean(0)) / values.std(0)


PROBLEMS = {"digits": digits, "fours-nines": fours_and_nines, "cancer": breast_cancer, "diabetes": diabetes,
            "iris": iris, "wine": wine}


def small(problem: Problem) -> Problem:
    """The same in miniature."""
    return replace(problem, x=problem.x[:40], y=problem.y[:40], x_test=problem.x_test[:8],
                   y_test=problem.y_test[:8], halves=6, hidden=4)
