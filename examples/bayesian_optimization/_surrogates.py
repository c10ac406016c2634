"""The models of the comparison: each is fitted to all data so far."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from _problems import Binding, Problem
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.model import Model
from botorch.models.transforms import Standardize
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor, nn

MEMBERS = 4
Surrogate = Callable[[Tensor, Tensor], Model]


def centered(x: Tensor) -> Tensor:
    """From [0, 1] to [-1, 1]."""
    return 2.0 * x - 1.0


def ours(problem: Problem, options: Any) -> Surrogate:
    """`LaplaceModel` with Fourier features on a cube; on sequences a `LaplaceEnsemble` of convolutions, drawn anew.

    Fourier features are linear in their weights and have one optimum: they start where the last fit ended, and more
    members would be the same. A convolution has many optima. The noise is learned everywhere.
    """
    import ntk_laplace as ntkl

    known: list[Any] = [None]

    def fourier(x: Tensor, y: Tensor) -> Model:
        known[0] = ntkl.botorch.LaplaceModel.fit(
            "fourier", x, y, outcome_transform=Standardize(1), warm_start=known[0], **options.ours
        )
        return known[0]

    def convolutions(x: Tensor, y: Tensor) -> Model:
        made = {"prior_mean": "zero", "members": MEMBERS, "trainer": "gauss-newton", "steps": 15} | options.ours
        made |= {"outcome_transform": Standardize(1), "seed": int(torch.randint(2**31, ()))}
        return ntkl.botorch.LaplaceEnsemble.fit(lambda d, m: Binding(m).double(), x, y, **made)

    return fourier if problem.choices is None else convolutions


def laplace_bayesopt(problem: Problem, options: Any) -> Surrogate:
    """laplace-bayesopt with its defaults: on a cube two layers of 64 ReLU units, on sequences the same convolution."""
    from laplace_bayesopt.botorch import LaplaceBoTorch

    def network() -> nn.Module:
        if problem.choices is not None:
            return Binding().double()
        return nn.Sequential(nn.Linear(problem.dimension, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(),
                             nn.Linear(64, 1)).double()

    class Centered(LaplaceBoTorch):
        def posterior(self, X: Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().posterior(X if problem.choices is not None else centered(X), *args, **kwargs)

    def fit(x: Tensor, y: Tensor) -> Model:
        inputs = x if problem.choices is not None else centered(x)
        return Centered(network, inputs, y, outcome_transform=Standardize(1), n_epochs=options.epochs,
                        enable_backprop=problem.choices is None)

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
}
