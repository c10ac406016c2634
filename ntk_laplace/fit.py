"""Fit: from a trained network and its data to a posterior."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ntk_laplace.curvature import STRUCTURE_SPECS, CurvatureType, StructureSpec
from ntk_laplace.data import Batches
from ntk_laplace.errors import UnsupportedError
from ntk_laplace.jacobian import NO_FUSED_LAYERS, JacobianPass
from ntk_laplace.likelihoods import Likelihood
from ntk_laplace.network import Network, ParameterChoice, outside_autocast
from ntk_laplace.points import present_values
from ntk_laplace.posterior import Posterior
from ntk_laplace.priors import GaussianPrior
from ntk_laplace.structures import (
    FullStructure,
    FunctionSpaceStructure,
    LinearizedModel,
    Settings,
    Structure,
    StructuredStructure,
    resumed,
)

__all__ = ["STRUCTURES", "laplace", "spec_of"]

EXACT = {"gp": FunctionSpaceStructure, "full": FullStructure}
STRUCTURES = (*EXACT, *STRUCTURE_SPECS)
_LOG = logging.getLogger("ntk_laplace")


def laplace(
    network: nn.Module,
    data: Any,
    likelihood: Likelihood,
    prior: GaussianPrior | None = None,
    structure: str | StructureSpec = "gp",
    curvature: str | CurvatureType = "ggn",
    *,
    parameters: ParameterChoice = None,
    dtype: torch.dtype | None = None,
    settings: Settings | None = None,
    output: str | int | None = None,
    targets: str | None = None,
) -> Posterior:
    """Laplace-GGN posterior of a trained network: a Gaussian process with the network's tangent kernel.

    Parameters
    ----------
    network : nn.Module
        Trained, in the mode of use (normally ``network.eval()``). Maps (N, ...) to (N, C) or (N,). It is copied and
        not changed.
    data : DataLoader, Dataset, (X, y), (X, y, w), or a mapping
        The training data. Batches are pairs (inputs, targets), triples with example weights, or mappings with the
        targets under the key `targets`. With weights w (N,), example n counts w_n times in the log likelihood, its
        gradient and its curvature, as if it occurred that often; 0 leaves it out.
    likelihood : Likelihood
        `Gaussian`, `HeteroscedasticGaussian`, `Bernoulli`, `Categorical`, `Poisson`, or a user-defined one.
    prior : GaussianPrior, optional
        By default precision 1 and mean 0; its precision is the weight decay of the summed loss.
    structure : str or StructureSpec
        Exact: "gp" (function space, (NC)² memory), "full" (weight space, P²), or "auto", the cheaper of the two,
        explained in ``posterior.reason``. For large data: "kfac", "ekfac", "inf", "diag", or one of `KFAC`, `EKFAC`,
        `INF`, `Diagonal` with its options.
    curvature : str or CurvatureType
        "ggn" (exact), "ef" (empirical Fisher) or "mc" (Monte-Carlo Fisher; ``CurvatureType("mc", samples, seed)``).
    parameters : optional
        Which parameters are linearized: names or prefixes, a predicate, or "last_layer". Frozen ones are excluded.
    dtype : torch.dtype, optional
        Of the algebra; float64 by default. The network runs in its own dtype.
    settings : Settings, optional
        Batch size, memory budget, progress bar.
    output : str or int, optional
        Which output tensor to use, if the network returns several: ``output="logits"`` for a `ModelOutput` of
        transformers, a dict, a dataclass or a named tuple, ``output=0`` for a tuple. Later calls use it too.
    targets : str, optional
        The key of the targets, if a batch or the whole data set is a mapping: ``targets="labels"``. The network is
        called without this key, here and in every method of the posterior.

    Returns
    -------
    Posterior

    Raises
    ------
    NTKLaplaceError
        A subclass of it; the message states what was expected, what was received and a remedy.
    """
    frozen = Network(network, parameters, output, targets)
    with torch.inference_mode(False):  # hyperparameters must be trainable later
        prior = GaussianPrior.of(prior).bind(frozen.shapes)
    curvature_type = CurvatureType.of(curvature)
    dtype = torch.float64 if dtype is None else dtype
    if dtype not in (torch.float32, torch.float64):
        raise UnsupportedError("dtype torch.float64 or torch.float32 for the algebra", repr(dtype),
                               "Leave it out for float64; the network itself may run in any other.")
    settings = Settings.of(settings)
    likelihood = Likelihood.of(likelihood)
    for module in (prior, likelihood):
        module.to(frozen.device)  # hyperparameters are on the network's device
    batches = Batches.of(data, settings.batch_size, frozen.device, frozen.input_dtype, targets)
    spec = spec_of(structure)
    factors = JacobianPass(frozen, dtype, keep_factors=isinstance(spec, StructureSpec))
    model = LinearizedModel(frozen, likelihood, prior, curvature_type, factors, settings)
    with torch.inference_mode(False), outside_autocast(), contextlib.closing(batches):
        x, _ = batches.first()
        factors.prepare(x)
        if isinstance(spec, StructureSpec):
            fused_layers = NO_FUSED_LAYERS if spec.second_pass else spec.fused_layers(dict.fromkeys(frozen.names))
            batches.limit_batch_size(factors.examples_at_once(x, curvature_type.columns(likelihood,
                                                                                        frozen.num_outputs),
                                                                                        fused_layers))
        fitted, reason = _fit(spec, model, batches)
        fitted.points.require_information(likelihood)
        model = replace(model, fitted_at=present_values(prior, likelihood))  # once the likelihood is bound
        posterior = Posterior(model, fitted, reason)
        posterior.posterior_precision  # noqa: B018 - factorize now, so that errors appear at the fit
    return posterior


def spec_of(structure: str | StructureSpec) -> str | StructureSpec:
    """The structure spec of a name; "gp", "full" and "auto" are returned unchanged.

    Raises
    ------
    UnsupportedError
        If the name is unknown.
    """
    if isinstance(structure, StructureSpec) or structure in (*EXACT, "auto"):
        return structure
    if structure not in STRUCTURE_SPECS:
        raise UnsupportedError(f'structure among {", ".join([*STRUCTURES, "auto"])}', repr(structure),
                               'Use "gp" for small data, "full" for small networks, "kfac" for large ones, "auto" to '
                               "let cost decide between the exact two.")
    return STRUCTURE_SPECS[structure]()


def _fit(spec: str | StructureSpec, model: LinearizedModel, batches: Batches) -> tuple[Structure, str]:
    resume = model.settings.resume
    if isinstance(spec, StructureSpec):
        return StructuredStructure(model, batches, spec, resumed(resume, spec, model.network.device)), ""
    if resume is not None:
        raise UnsupportedError('a structure that is summed over the data, "kfac", "ekfac", "inf" or "diag", to resume',
                               repr(spec), "Leave resume= out: the exact structures are fitted in one go.")
    name, reason = _choose(spec, model, batches)
    return EXACT[name](model, batches), reason


def _choose(structure: str, model: LinearizedModel, batches: Batches) -> tuple[str, str]:
    if structure in EXACT:
        return structure, ""
    n = batches.length or sum(len(y) for _, y in batches)
    size = n * model.curvature_type.columns(model.likelihood, model.network.num_outputs)
    p = model.network.num_parameters
    name = "gp" if size <= p else "full"
    reason = f"auto: N x R = {size:,} rows against P = {p:,} parameters, so {name!r} factors the smaller matrix"
    _LOG.info(reason)
    return name, reason
