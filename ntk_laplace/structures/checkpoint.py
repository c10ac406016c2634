"""Checkpoints of a posterior: what is written to a file, and how it is restored."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Size, Tensor, nn

from ntk_laplace.curvature import CurvatureType
from ntk_laplace.errors import DataError, NetworkError, UnsupportedError, warn
from ntk_laplace.jacobian import JacobianPass
from ntk_laplace.model.calibration import Calibration
from ntk_laplace.model.data import Batches, Missing
from ntk_laplace.model.likelihoods import (
    Likelihood,
    likelihood_from_record,
    likelihood_record,
    registered_likelihoods,
)
from ntk_laplace.model.network import Network, require_module
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.runtime.serialization import FileFormat
from ntk_laplace.structures.data_passes import digest, read_points
from ntk_laplace.structures.fitted_model import FittedModel
from ntk_laplace.structures.model import LinearizedModel, Settings
from ntk_laplace.structures.points import TrainingPoints, UnsavedPoints, coarsest, present_values
from ntk_laplace.structures.registry import structure_named, structure_of
from ntk_laplace.structures.structure import Saved, Structure, StructureSpec, require_unchanged

_FORMAT = FileFormat("ntk_laplace posterior", 1, "a checkpoint of a posterior",
                     "Pass the path of a file written by posterior.save(path).")
_NAMES = ("weight", "bias", "spans")  # fields of Jacobian blocks and parameter blocks

# --- writing

def posterior_record(
    fitted: FittedModel, reason: str, include_data: bool, calibration: Calibration | None = None
) -> dict[str, Any]:
    """Everything but the network's weights and, without `include_data`, the training data.

    Raises
    ------
    UnsupportedError
        If the structure consists of training data and `include_data` is False, or if a what-if changed the posterior.
    """
    model, structure = fitted.model, fitted.structure
    require_unchanged(model, structure)
    network, kind = model.network, model.curvature_type
    return {
        **_FORMAT.header,
        "structure": structure.name,
        "options": structure.spec.options(),
        "reason": reason,
        "dtype": model.jacobian_pass.dtype,
        "root": {"curvature": kind.kind, "samples": kind.samples, "seed": kind.seed},  # as in version 1
        "shapes": {name: list(shape) for name, shape in network.shapes.items()},
        "digest": digest(network.theta),
        "fixed": digest(*network.fixed),
        "output": network.output,
        "targets": network.targets,
        "num_outputs": structure.points.num_outputs,
        "scalar": network.scalar,
        "form": _plain_containers(network.input_format),
        "likelihood": _checked_record(model.likelihood, structure.points),
        "prior": model.prior.record(),
        "fitted_at": model.fitted_at,
        "displacement": model.displacement,
        "refitted": model.refitted,
        "base": _outputs_before(structure) if model.refitted and include_data else None,
        "state": structure.state(model, include_data),
        "points": structure.points.record(model.likelihood, include_data),
        "calibration": None if calibration is None else asdict(calibration),
    }


def _checked_record(likelihood: Likelihood, points: TrainingPoints) -> dict[str, Any]:
    """The likelihood's record, of which `load` makes an equal one where its class is registered (UnsupportedError)."""
    record = likelihood_record(likelihood)
    if isinstance(points, UnsavedPoints) or type(likelihood) not in registered_likelihoods().values():
        return record
    try:
        other = likelihood_from_record(record).to(points.f.device)
    except UnsupportedError:  # load() says so, and takes the likelihood itself
        return record
    other.bind(points.num_examples, points.num_outputs)
    saved, own = (points.log_likelihood(one).detach() for one in (other, likelihood))
    if not torch.isclose(saved, own, rtol=torch.finfo(own.dtype).eps ** 0.5, equal_nan=True):
        raise UnsupportedError(f"a record() of {type(likelihood).__name__} that builds an equal likelihood",
                               f"one whose log likelihood is {float(saved):.6g} nats, not {float(own):.6g}",
                               "Return all arguments of the constructor from record().")
    return record


def _outputs_before(structure: Structure) -> dict[str, Tensor | None]:
    """Of the training points of a refit: outputs of the network, and those at which the curvature is taken."""
    points = structure.points
    return {"f": structure.trained_points.f, "expanded": points.expanded}


def _at_refit(model: LinearizedModel, structure: Any, before: Mapping[str, Tensor | None] | None) -> Structure:
    """The structure whose points are those of the refit: as saved, or displaced from the network's own outputs."""
    points = structure.points
    if isinstance(points, UnsavedPoints):
        return structure
    if before is not None:
        return replace(structure, points=replace(points, expanded=before["expanded"]),
                       base=replace(points, f=before["f"]))
    moved = points.f + structure.jvp(model, model.displacement)
    return replace(structure, points=replace(points, f=moved), base=points)


def _plain_containers(spec: Any) -> Any:
    """The format of the network's inputs in plain containers; None if it contains another type."""
    if spec is None or isinstance(spec, (Tensor, str, int, float)):
        return spec
    if not isinstance(spec, (Mapping, tuple, list)):
        return None
    keys, values = (spec.keys(), spec.values()) if isinstance(spec, Mapping) else ([], spec)
    found = [_plain_containers(value) for value in values]
    if not all(isinstance(key, str) for key in keys) or any(
        one is None and value is not None for one, value in zip(found, values, strict=True)
    ):
        return None
    return dict(zip(keys, found, strict=True)) if isinstance(spec, Mapping) else found


# --- restoring


def restored_model(
    path: str | os.PathLike[str], network: nn.Module, data: Any, likelihood: Likelihood | None, settings: Settings
) -> tuple[FittedModel, str, Calibration | None]:
    """The fitted model of a checkpoint, why its structure was chosen, and its calibration; arguments as in `load`."""
    place = next((p.device for p in require_module(network).parameters()), torch.device("cpu"))
    saved = _in_names_of(network, _FORMAT.read(path, place))
    spec = _spec(saved)
    own = likelihood_from_record(saved["likelihood"], likelihood)
    frozen = _matching(network, saved, own.positions)
    prior = GaussianPrior.from_record(saved["prior"], frozen.shapes)
    for module in (prior, own):
        module.to(frozen.device)
    jacobian_pass = JacobianPass(frozen, saved["dtype"], spec.factored_rows, settings.memory_budget)
    root = saved["root"]  # the keys of version 1 of the format
    curvature_type = CurvatureType(root["curvature"], root["samples"], root["seed"])
    model = LinearizedModel(frozen, own, prior, curvature_type, jacobian_pass, settings,
                            displacement=saved.get("displacement"), fitted_at=saved.get("fitted_at"),
                            refitted=saved.get("refitted", False))
    batches = None
    if data is not None:
        batches = settings.own(frozen.batches(data, settings.batch_size))
    points = _points(saved, model, batches)
    if curvature_type.kind == "mc" and saved["dtype"] != torch.float64 and "drawn" not in saved["points"]:
        warn("this checkpoint is of an earlier version, which drew labels in float32: explanations and what-ifs give "
             "single training points other labels than its sums have; fit again for these")
    structure = spec.restored(model, Saved(saved["state"], points, batches or Missing()))
    if model.refitted:
        structure = _at_refit(model, structure, saved["base"] if batches is None else None)
    if batches is not None:
        _require_same_data(structure.points, model, saved["points"])
    calibration = saved.get("calibration")  # older checkpoints do not store it
    return FittedModel(model, structure), saved["reason"], None if calibration is None else Calibration(**calibration)


def _spec(saved: Mapping[str, Any]) -> StructureSpec:
    """The specification of the fit; checkpoints of block structures keep its options in their state too."""
    options = saved.get("options")
    if options is None:
        options = saved["state"]["form"]["options"] if "form" in saved["state"] else {}
    try:
        structure_named(saved["structure"])
    except UnsupportedError as error:
        raise UnsupportedError(f"the structure {saved['structure']!r} of the fit", "no structure of this name",
                               "Import the module that registers it with register_structure, then load.") from error
    return structure_of(saved["structure"], options)


def _in_names_of(network: nn.Module, saved: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint with this network's parameter names; torch.compile's wrappers insert `_orig_mod`."""
    own = {_unwrapped(name): name for name, _ in (*network.named_modules(), *network.named_parameters())}
    new = {name: own.get(_unwrapped(name), name) for name in saved["shapes"]}
    if list(new) == list(new.values()):
        return saved
    prior = dict(saved["prior"])
    if isinstance(prior["groups"], dict):
        groups = prior["groups"].items()
        prior["groups"] = {g: [own.get(_unwrapped(name), name) for name in names] for g, names in groups}
    shapes = {new[name]: shape for name, shape in saved["shapes"].items()}
    return saved | {"shapes": shapes, "state": _renamed(saved["state"], new), "prior": prior}


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _renamed(content: Any, new: Mapping[str, str], is_name: bool = False) -> Any:
    """Rename parameters, only in fields that contain names; other strings may look like names."""
    if isinstance(content, dict):
        return {key: _renamed(value, new, key in _NAMES) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return type(content)(_renamed(value, new, is_name) for value in content)
    return new.get(content, content) if is_name and isinstance(content, str) else content


def _matching(network: nn.Module, saved: Mapping[str, Any], positions: Size | None) -> Network:
    """The frozen network, if its parameters are those of the fit."""
    there = {name: list(p.shape) for name, p in network.named_parameters()}
    wrong = [
        f"{name} of shape {tuple(there[name])} (fit: {tuple(shape)})" if name in there else f"no {name}"
        for name, shape in saved["shapes"].items() if there.get(name) != shape
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise NetworkError("a network with the parameters of the fit", ", ".join(wrong[:3]) + more,
                           "Build the network with the architecture that was fitted.")
    frozen = Network(network, list(saved["shapes"]), saved.get("output"), saved.get("targets"), positions)
    if digest(frozen.theta) != saved["digest"]:
        raise NetworkError("a network with the weights of the fit", "other weights",
                           "Load the network's own state_dict before the posterior, in the dtype of the fit.")
    if saved.get("fixed") not in (None, digest(*frozen.fixed)):  # older checkpoints do not store it
        raise NetworkError("a network with the frozen parameters and buffers of the fit", "others",
                           "Load the state_dict of the whole network before the posterior, that of its base too.")
    frozen.num_outputs, frozen.scalar = saved["num_outputs"], saved["scalar"]
    frozen.input_format = saved.get("form")  # older checkpoints do not store it
    return frozen


def _require_same_data(points: TrainingPoints, model: LinearizedModel, kept: Mapping[str, Any]) -> None:
    """Refuse data whose log likelihood is not that of the fit, or not in its order, beyond the network's rounding."""
    before = kept.get("precision", points.precision)  # older checkpoints do not store it
    precision = coarsest(model.network.precision, points.precision, before)
    rounding = points.require_log_likelihood(model.likelihood, float(kept["log_likelihood"]), precision)
    ordered = kept.get("ordered", math.nan)  # older checkpoints do not store it
    if not math.isfinite(ordered):  # a density may be zero
        return
    if not abs(points.ordered(model.likelihood) - ordered) <= rounding:
        raise DataError("the data of the fit in their order", "another order",
                        "Pass them without shuffling: explanations name training points by their number.")


def _points(
    saved: Mapping[str, Any], model: LinearizedModel, batches: Batches | None
) -> TrainingPoints:
    kept = saved["points"]
    drawn = None if kept.get("drawn") is None else tuple((after, count) for after, count in kept["drawn"])
    if batches is not None:
        points = read_points(model, batches)
        if points.num_examples != kept["num_examples"]:
            raise DataError(f"the fit's {kept['num_examples']:,} training examples", f"{points.num_examples:,}",
                            "Pass the data that the posterior was fitted to.")
        total, before = points.total(model.likelihood), kept.get("total")
        if before is not None and not math.isclose(total, before, rel_tol=1e-6):
            raise DataError(f"example weights of the fit, with a sum of {before:g} over examples that have a target",
                            f"a sum of {total:g}", "Pass the data that the posterior was fitted to, (X, y, w).")
        return replace(points, drawn=drawn)
    if "f" in kept:
        model.likelihood.bind(*kept["f"].shape)
        return TrainingPoints(kept["f"], kept["targets"], kept.get("weights"), rounded=kept.get("precision"),
                              drawn=drawn)
    model.likelihood.bind(kept["num_examples"], saved["num_outputs"])
    values, total = present_values(model.likelihood), kept.get("total")
    precision = kept.get("precision", saved["dtype"])
    return UnsavedPoints(kept["num_examples"], saved["num_outputs"], kept["log_likelihood"], values, precision, total,
                         drawn)
