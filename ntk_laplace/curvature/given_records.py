"""A given precision in plain containers of tensors: read back, and moved to another device and dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ntk_laplace.curvature.function_space import FunctionSpacePrecision
from ntk_laplace.curvature.given import BlockwisePrecision
from ntk_laplace.curvature.posterior_precision import PosteriorPrecision
from ntk_laplace.curvature.spectral import SpectralBlock
from ntk_laplace.curvature.structured import BlockDiagonalPrecision
from ntk_laplace.errors import UnsupportedError
from ntk_laplace.jacobian import Jacobian
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.runtime.parameter_layout import ParameterLayout


def restored_precision(record: Mapping[str, Any], shapes: ParameterLayout) -> PosteriorPrecision:
    """The precision of which `PosteriorPrecision.record` returned this, factorized where it was."""
    kind = record["kind"]
    if kind == "blocks":
        return BlockwisePrecision.from_record(record, shapes)
    prior = _prior(record["prior"], shapes)
    if kind == "rows":
        return FunctionSpacePrecision(Jacobian.from_record(record["rows"]), None, prior)
    blocks = [SpectralBlock.from_record(block) for block in record["blocks"]]
    like = blocks[0].values if blocks else record["prior"]["log_precision"]
    return BlockDiagonalPrecision(blocks, prior, like)


def _prior(record: Mapping[str, Any], shapes: ParameterLayout) -> GaussianPrior:
    groups = record["groups"]
    named = groups if isinstance(groups, str) else {one["group"]: one["spans"] for one in groups}
    return GaussianPrior.from_record(dict(record) | {"groups": named, "mean": 0.0}, shapes).to(
        record["log_precision"].device)


def moved_precision(precision: PosteriorPrecision, device: torch.device, dtype: torch.dtype) -> PosteriorPrecision:
    """The same H on another device, with another dtype (UnsupportedError if it has no record)."""
    record = precision.record()
    if record is None:
        raise no_record(precision, "to move")

    def moved(content: Any) -> Any:
        if isinstance(content, Mapping):  # hyperparameters are float64 in every dtype
            return {key: one.to(device) if key == "log_precision" else moved(one) for key, one in content.items()}
        if isinstance(content, (list, tuple)):
            return [moved(one) for one in content]
        if not isinstance(content, Tensor):
            return content
        return content.to(device, dtype if content.is_floating_point() else None)

    return restored_precision(moved(record), precision.shapes)


def no_record(precision: PosteriorPrecision, what: str) -> UnsupportedError:
    """The error of a precision that is no container of tensors."""
    return UnsupportedError(f"a precision in tensors, {what}", f"a {type(precision).__name__}",
                            "Save or move the posterior that it is from, or give a tensor.")
