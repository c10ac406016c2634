"""Serialization of a posterior as plain containers of tensors. `ntk_laplace.checkpoint` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ntk_laplace.likelihoods import likelihood_record
from ntk_laplace.points import UnsavedPoints
from ntk_laplace.priors import GaussianPrior
from ntk_laplace.structures.base import LinearizedModel, Structure
from ntk_laplace.structures.data_passes import digest

__all__ = ["FORMAT", "VERSION", "posterior_record"]

FORMAT, VERSION = "ntk_laplace posterior", 1


def posterior_record(model: LinearizedModel, structure: Structure, reason: str, include_data: bool) -> dict[str, Any]:
    """Everything but the network's weights and, without `include_data`, the training data.

    Raises
    ------
    UnsupportedError
        If the structure consists of training data and `include_data` is False.
    """
    network, kind = model.network, model.curvature_type
    return {
        "format": FORMAT,
        "version": VERSION,
        "structure": structure.name,
        "reason": reason,
        "dtype": model.jacobian_pass.dtype,
        "root": {"curvature": kind.kind, "samples": kind.samples, "seed": kind.seed},  # as in version 1
        "shapes": {name: list(shape) for name, shape in network.shapes.items()},
        "digest": digest(network.theta),
        "output": network.output,
        "targets": network.targets,
        "num_outputs": structure.points.num_outputs,
        "scalar": network.scalar,
        "form": _plain(network.input_format),
        "likelihood": likelihood_record(model.likelihood),
        "prior": _prior_record(model.prior),
        "fitted_at": model.fitted_at,
        "state": structure.state(model, include_data),
        "points": _points_record(model, structure, include_data),
    }


def _plain(spec: Any) -> Any:
    """The format of the network's inputs in plain containers; None if it contains another type."""
    if spec is None or isinstance(spec, (Tensor, str, int, float)):
        return spec
    if not isinstance(spec, (Mapping, tuple, list)):
        return None
    keys, values = (spec.keys(), spec.values()) if isinstance(spec, Mapping) else ([], spec)
    found = [_plain(value) for value in values]
    if not all(isinstance(key, str) for key in keys) or any(
        one is None and value is not None for one, value in zip(found, values, strict=True)
    ):
        return None
    return dict(zip(keys, found, strict=True)) if isinstance(spec, Mapping) else found


def _prior_record(prior: GaussianPrior) -> dict[str, Any]:
    groups = prior.groups if isinstance(prior.groups, str) else {g: list(names) for g, names in prior.groups.items()}
    mean: Tensor = prior.flat_mean()
    same = bool((mean == mean[0]).all())
    return {
        "groups": groups, "mean": float(mean[0]) if same else mean.clone(),
        "log_precision": prior.log_precision.detach().clone(),
    }  # fmt: skip


def _points_record(model: LinearizedModel, structure: Structure, include_data: bool) -> dict[str, Any]:
    points = structure.points
    value = points.log_likelihood(model.likelihood).detach()
    total = points.total(model.likelihood)
    found: dict[str, Any] = {"num_examples": points.num_examples, "log_likelihood": value, "total": total}
    if include_data and not isinstance(points, UnsavedPoints):
        found |= {"f": points.f, "targets": points.targets, "weights": points.weights}
    return found
