"""Deep kernels of GPyTorch's pieces, many at once: batched networks, one kernel and one noise for each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean, ZeroMean
from gpytorch.mlls import ExactMarginalLogLikelihood, LeaveOneOutPseudoLikelihood
from gpytorch.utils.grid import ScaleToBounds
from torch import Tensor, nn

from ntk_laplace.gp import ConditionalMarginalLogLikelihood

__all__ = ["OBJECTIVES", "Bounds", "DeepKernel", "Networks", "objective", "standard_error"]

OBJECTIVES = ("LML", "CLML", "CLML, one order", "LOO", "LML, new subset", "released")


class Networks(nn.Module):
    """ReLU networks of one architecture, initialized as `nn.Linear` is after each seed; inputs (B, n, d)."""

    def __init__(self, sizes: Sequence[int], seeds: Sequence[int]) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(sizes))
        with torch.random.fork_rng():
            each = []
            for seed in seeds:
                torch.manual_seed(seed)
                each.append([nn.Linear(*pair) for pair in pairs])
        layers = list(zip(*each, strict=True))
        self.weights = nn.ParameterList([torch.stack([one.weight.detach().T for one in layer]) for layer in layers])
        self.biases = nn.ParameterList([torch.stack([one.bias.detach()[None] for one in layer]) for layer in layers])

    def forward(self, x: Tensor) -> Tensor:
        for place, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias, x.relu() if place else x, weight)
        return x


class Bounds(ScaleToBounds):
    """GPyTorch's, with bounds for each model of the batch instead of common ones."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.min_val, self.max_val = x.detach().amin((-2, -1), True), x.detach().amax((-2, -1), True)
        x = x if self.training else x.clamp(self.min_val, self.max_val)
        span = 0.95 * (self.upper_bound - self.lower_bound)
        return (x - self.min_val) * (span / (self.max_val - self.min_val)) + 0.95 * self.lower_bound


class DeepKernel(gpytorch.models.ExactGP):
    """An RBF kernel with a lengthscale per feature, of scaled features of a network; one for each of the batch."""

    def __init__(self, x: Tensor, y: Tensor, network: nn.Module, features: int, zero_mean: bool = False) -> None:
        batch = x.shape[:-2]
        super().__init__(x, y, GaussianLikelihood(batch_shape=batch))
        self.network, self.bounds = network, Bounds(-1.0, 1.0)
        self.mean = ZeroMean(batch_shape=batch) if zero_mean else ConstantMean(batch_shape=batch)
        self.kernel = ScaleKernel(RBFKernel(ard_num_dims=features, batch_shape=batch), batch_shape=batch)

    def forward(self, x: Tensor) -> MultivariateNormal:
        return self.of_features(self.network(x))

    def of_features(self, features: Tensor) -> MultivariateNormal:
        """The prior at inputs whose features are known."""
        z = self.bounds(features)
        return MultivariateNormal(self.mean(z), self.kernel(z))

    def scores(self, x: Tensor, y: Tensor, chunk: int = 250) -> dict[str, list[float]]:
        """Root mean squared error and negative log likelihood, a mean over (B, n) test points, of each model."""
        self.eval()
        squares, densities = [], []
        with torch.no_grad():
            for part, targets in zip(x.split(chunk, 1), y.split(chunk, 1), strict=True):
                predicted = self.likelihood(self(part))
                squares.append((predicted.mean - targets).square())
                variance = predicted.variance
                densities.append(torch.distributions.Normal(predicted.mean, variance.sqrt()).log_prob(targets))
            noise = self.likelihood.noise.flatten()
        self.train()
        rmse, nll = torch.cat(squares, 1).mean(1).sqrt(), -torch.cat(densities, 1).mean(1)
        return {"rmse": rmse.tolist(), "nll": nll.tolist(), "noise": noise.tolist()}


def objective(name: str, model: DeepKernel, share: float = 0.9, seed: int = 0) -> Callable[[], Tensor]:
    """What is maximized, (B,): one of OBJECTIVES, or the mean of ten new orders, "CLML, 10 orders".

    Each is in nats per point but the released one, which is a sum.
    """
    x, y, likelihood = model.train_inputs[0], model.train_targets, model.likelihood
    exact, generator = ExactMarginalLogLikelihood(likelihood, model), torch.Generator().manual_seed(seed)
    n, m = y.shape[-1], round(share * y.shape[-1])

    def drawn() -> Tensor:
        return torch.randperm(n, generator=generator)[:m]

    def released() -> Tensor:
        # the features of the m points have bounds of their own, not those with which all points are predicted
        part, features = drawn(), model.network(x)
        given = exact(model.of_features(features[..., part, :]), y[..., part]) * m
        return exact(model.of_features(features), y) * n - given

    def new_subset() -> Tensor:
        part = drawn()
        return exact(model(x)[..., part], y[..., part])

    if name in ("released", "LML, new subset"):
        return released if name == "released" else new_subset
    scores = {
        "LML": exact,
        "LOO": LeaveOneOutPseudoLikelihood(likelihood, model),
        "CLML": ConditionalMarginalLogLikelihood(likelihood, model, share, seed=seed),
        "CLML, 10 orders": ConditionalMarginalLogLikelihood(likelihood, model, share, 10, seed=seed),
        "CLML, one order": ConditionalMarginalLogLikelihood(likelihood, model, share, fresh=False, seed=seed),
    }
    return lambda: scores[name](model(x), y)


def standard_error(values: Tensor) -> float:
    """Of the mean of independent values."""
    return values.std().item() / len(values) ** 0.5
