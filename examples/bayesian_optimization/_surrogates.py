"""The models of the comparison: each is fitted to all data so far."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from _problems import Binding, Problem
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.model import Model
from botorch.models.transforms import Standardize
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor, nn

Surrogate = Callable[[Tensor, Tensor], Model]


def centered(x: Tensor) -> Tensor:
    """From [0, 1] to [-1, 1]."""
    return 2.0 * x - 1.0


def ours(problem: Problem, options: Any) -> Surrogate:
    """`LaplaceModel.fit`: Fourier features on a cube, the convolution on sequences; the noise is learned everywhere."""
    import ntk_laplace as ntkl

    known: list[Any] = [None]
    network: Any = "fourier" if problem.pool is None else lambda d, m: Binding(m).double()

    def fit(x: Tensor, y: Tensor) -> Model:
        known[0] = ntkl.botorch.LaplaceModel.fit(
            network, x, y, outcome_transform=Standardize(1), warm_start=known[0], **options.ours
        )
        return known[0]

    return fit


def laplace_bayesopt(problem: Problem, options: Any) -> Surrogate:
    """laplace-bayesopt with its defaults: on a cube two layers of 64 ReLU units, on sequences the same convolution."""
    from laplace_bayesopt.botorch import LaplaceBoTorch

    def network() -> nn.Module:
        if problem.pool is not None:
            return Binding().double()
        return nn.Sequential(nn.Linear(problem.dimension, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(),
                             nn.Linear(64, 1)).double()  # fmt: skip

    class Centered(LaplaceBoTorch):
        def posterior(self, X: Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().posterior(X if problem.pool is not None else centered(X), *args, **kwargs)

    def fit(x: Tensor, y: Tensor) -> Model:
        inputs = x if problem.pool is not None else centered(x)
        return Centered(network, inputs, y, outcome_transform=Standardize(1), n_epochs=options.epochs,
                        enable_backprop=problem.pool is None)  # fmt: skip

    return fit


def gaussian_process(problem: Problem, options: Any) -> Surrogate:
    """BoTorch's `SingleTaskGP` with its defaults; sequences are one-hot."""

    def fit(x: Tensor, y: Tensor) -> Model:
        model = SingleTaskGP(x, y, outcome_transform=Standardize(1))
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        return model

    return fit


METHODS: dict[str, Callable[[Problem, Any], Surrogate] | None] = {
    "ntk_laplace": ours, "laplace-bayesopt": laplace_bayesopt, "SingleTaskGP": gaussian_process, "Sobol": None,
}  # fmt: skip
