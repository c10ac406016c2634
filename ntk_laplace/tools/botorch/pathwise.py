"""Draws of functions where BoTorch asks for Matheron paths, as `PathwiseThompsonSampling` does."""

from __future__ import annotations

from typing import Any

from botorch.models.model import ModelList
from botorch.sampling.pathwise import draw_matheron_paths
from botorch.sampling.pathwise.paths import PathList, SamplePath
from botorch.sampling.pathwise.posterior_samplers import DrawMatheronPaths
from torch import Size, Tensor

from ntk_laplace.errors import DataError
from ntk_laplace.tools.botorch.gaussian_model import GaussianModel


class LaplacePath(SamplePath):
    """Draws from a model's posterior, its `thompson_path`, in the shapes of BoTorch's paths."""

    def __init__(self, model: GaussianModel, sample_shape: Size) -> None:
        super().__init__()
        self.draws = model.drawn(sample_shape)
        self.num_outputs = model.num_outputs

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        """Values (..., n) at inputs (..., n, d) that broadcast with the draws.

        Values of m > 1 outputs are (..., m, n), at inputs (..., 1, n, d) or (n, d). DataError if these have no axis for
        the outputs.
        """
        if self.num_outputs == 1:
            return self.draws(x).squeeze(-1)
        if x.ndim > 2 and x.shape[-3] != 1:
            raise DataError(f"inputs (..., 1, n, d) of the {self.num_outputs} outputs", f"shape {tuple(x.shape)}",
                            "Pass X.unsqueeze(-3).")
        return self.draws(x.squeeze(-3) if x.ndim > 2 else x).mT

    def set_ensemble_as_batch(self, ensemble_as_batch: bool) -> None:
        """Nothing: members of an ensemble are drawn, and are no batch."""


@DrawMatheronPaths.register(GaussianModel)
def _of_laplace(model: GaussianModel, *, sample_shape: Size, **_: Any) -> LaplacePath:
    return LaplacePath(model, Size(sample_shape))


if (ModelList,) not in DrawMatheronPaths.funcs:  # BoTorch has it for lists of GPyTorch's models alone

    @DrawMatheronPaths.register(ModelList)
    def _of_list(model: ModelList, *, sample_shape: Size, **samplers: Any) -> PathList:
        return PathList([draw_matheron_paths(one, sample_shape=sample_shape, **samplers) for one in model.models])
