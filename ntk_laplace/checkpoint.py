"""Checkpoints: restore a posterior from a file and its network."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ntk_laplace.curvature import CurvatureType
from ntk_laplace.data import Batches
from ntk_laplace.errors import DataError, NetworkError
from ntk_laplace.jacobian import JacobianPass
from ntk_laplace.likelihoods import Likelihood, likelihood_from_record
from ntk_laplace.network import Network, require_module
from ntk_laplace.points import TrainingPoints, UnsavedPoints, present_values
from ntk_laplace.posterior import Posterior
from ntk_laplace.priors import GaussianPrior
from ntk_laplace.structures import RESTORE, LinearizedModel, Settings, opened
from ntk_laplace.structures.data_passes import digest, read_outputs
from ntk_laplace.structures.saving import FORMAT, VERSION

__all__ = ["load"]

_NAMES = ("weight", "bias", "spans")  # fields of Jacobian blocks and parameter blocks


def load(
    path: str | os.PathLike[str],
    network: nn.Module,
    data: Any = None,
    likelihood: Likelihood | None = None,
    settings: Settings | None = None,
) -> Posterior:
    """Posterior from a checkpoint of `Posterior.save`.

    Parameters
    ----------
    path : path
    network : nn.Module
        With the weights of the fit, which the checkpoint does not contain. The posterior uses its device.
    data : DataLoader, Dataset, or (X, y), optional
        The training data, for results that need another pass: the correction, ``mean="posterior"``, other
        hyperparameters of the likelihood. Predictions, samples and the evidence do not need it.
    likelihood : Likelihood, optional
        Required for a class that is not registered (`register_likelihood`); its hyperparameters are set to the
        checkpoint's.
    settings : Settings, optional

    Returns
    -------
    Posterior

    Raises
    ------
    DataError
        If the file is not such a checkpoint, or `data` has another number of examples.
    NetworkError
        If the network's parameters differ from those of the fit in name, shape or value.
    """
    place = next((p.device for p in require_module(network).parameters()), torch.device("cpu"))
    saved = _in_names_of(network, _read(path, place))
    settings = Settings.of(settings)
    frozen = _matching(network, saved)
    own = likelihood_from_record(saved["likelihood"], likelihood)
    prior = _prior(saved["prior"], frozen)
    for module in (prior, own):
        module.to(frozen.device)
    exact = saved["structure"] in ("gp", "full")
    factors = JacobianPass(frozen, saved["dtype"], keep_factors=not exact)
    root = saved["root"]  # the keys of version 1 of the format
    curvature_type = CurvatureType(root["curvature"], root["samples"], root["seed"])
    model = LinearizedModel(frozen, own, prior, curvature_type, factors, settings,
                            fitted_at=saved.get("fitted_at"))
    with torch.inference_mode(False):
        batches = None
        if data is not None:
            batches = Batches(data, settings.batch_size, frozen.device, frozen.input_dtype, frozen.targets)
        points = _points(saved, model, batches)
        structure = RESTORE[saved["structure"]](model, saved["state"], points, batches)
        return Posterior(model, structure, saved["reason"])


def _read(path: str | os.PathLike[str], device: torch.device) -> dict[str, Any]:
    what, remedy = "a checkpoint of a posterior", "Pass the path of a file written by posterior.save(path)."
    saved = opened(path, what, remedy, device)
    if not isinstance(saved, dict) or saved.get("format") != FORMAT:
        raise DataError(f"{what} at {path}", "another file", remedy)
    if saved["version"] > VERSION:
        raise DataError(f"a checkpoint of version {VERSION} or older", f"version {saved['version']}",
                        "Update ntk_laplace.")
    return saved


def _in_names_of(network: nn.Module, saved: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint with this network's parameter names; torch.compile's wrappers insert `_orig_mod`."""
    own = {_plain(name): name for name, _ in (*network.named_modules(), *network.named_parameters())}
    new = {name: own.get(_plain(name), name) for name in saved["shapes"]}
    if list(new) == list(new.values()):
        return saved
    prior = dict(saved["prior"])
    if isinstance(prior["groups"], dict):
        prior["groups"] = {g: [own.get(_plain(name), name) for name in names] for g, names in prior["groups"].items()}
    shapes = {new[name]: shape for name, shape in saved["shapes"].items()}
    return saved | {"shapes": shapes, "state": _renamed(saved["state"], new), "prior": prior}


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _renamed(content: Any, new: Mapping[str, str], is_name: bool = False) -> Any:
    """Rename parameters, only in fields that contain names; other strings may look like names."""
    if isinstance(content, dict):
        return {key: _renamed(value, new, key in _NAMES) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return type(content)(_renamed(value, new, is_name) for value in content)
    return new.get(content, content) if is_name and isinstance(content, str) else content


def _matching(network: nn.Module, saved: Mapping[str, Any]) -> Network:
    """The frozen network, if its parameters are those of the fit."""
    there = {name: list(p.shape) for name, p in network.named_parameters()}
    wrong = [
        f"{name} of shape {tuple(there[name])} (fit: {tuple(shape)})" if name in there else f"no {name}"
        for name, shape in saved["shapes"].items() if there.get(name) != shape
    ]  # fmt: skip
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise NetworkError("a network with the parameters of the fit", ", ".join(wrong[:3]) + more,
                           "Build the network with the architecture that was fitted.")
    frozen = Network(network, list(saved["shapes"]), saved.get("output"), saved.get("targets"))
    if digest(frozen.theta) != saved["digest"]:
        raise NetworkError("a network with the weights of the fit", "other weights",
                           "Load the network's own state_dict before the posterior, in the dtype of the fit.")
    frozen.num_outputs, frozen.scalar = saved["num_outputs"], saved["scalar"]
    frozen.input_format = saved.get("form")  # older checkpoints do not store it
    return frozen


def _prior(saved: Mapping[str, Any], frozen: Network) -> GaussianPrior:
    prior = GaussianPrior(mean=saved["mean"], groups=saved["groups"]).bind(frozen.shapes)
    with torch.no_grad():
        prior.log_precision.copy_(saved["log_precision"])
    return prior


def _points(
    saved: Mapping[str, Any], model: LinearizedModel, batches: Batches | None
) -> TrainingPoints | UnsavedPoints:
    kept = saved["points"]
    if batches is not None:
        points = TrainingPoints.checked(model.likelihood, *read_outputs(model, batches), batches.weights)
        if points.num_examples != kept["num_examples"]:
            raise DataError(f"the fit's {kept['num_examples']:,} training examples", f"{points.num_examples:,}",
                            "Pass the data that the posterior was fitted to.")
        total, before = points.total(model.likelihood), kept.get("total")
        if before is not None and not math.isclose(total, before, rel_tol=1e-6):
            raise DataError(f"example weights of the fit, with a sum of {before:g} over examples that have a target",
                            f"a sum of {total:g}", "Pass the data that the posterior was fitted to, (X, y, w).")
        return points
    if "f" in kept:
        model.likelihood.bind(*kept["f"].shape)
        return TrainingPoints(kept["f"], kept["targets"], kept.get("weights"))
    model.likelihood.bind(kept["num_examples"], saved["num_outputs"])
    values, total = present_values(model.likelihood), kept.get("total")
    return UnsavedPoints(kept["num_examples"], saved["num_outputs"], kept["log_likelihood"], values, total)
