"""log p(D | θ) and its derivatives at many weights at once, of the network and of the linearized model.

The data of each value of the weights may have example weights of their own, (S, N).
"""

from __future__ import annotations

from ntk_laplace.model.data import InputData
from ntk_laplace.structures.fitted_model import FittedModel
from ntk_laplace.structures.weight_likelihood.base import LocalCurvature, WeightedLikelihood, WeightLikelihood
from ntk_laplace.structures.weight_likelihood.linearized import LinearizedLikelihood, all_rows
from ntk_laplace.structures.weight_likelihood.many_points import ManyPoints
from ntk_laplace.structures.weight_likelihood.network import NetworkLikelihood

__all__ = [
    "LinearizedLikelihood",
    "LocalCurvature",
    "ManyPoints",
    "NetworkLikelihood",
    "WeightLikelihood",
    "WeightedLikelihood",
    "all_rows",
    "likelihood_of",
]


def likelihood_of(fitted: FittedModel, model: str, x: InputData | None, count: int) -> WeightLikelihood:
    """That of the network, "nn", or of the linearized model, "glm", with room for `count` weights at a time."""
    return NetworkLikelihood.of(fitted, x, count) if model == "nn" else LinearizedLikelihood(fitted, count)
