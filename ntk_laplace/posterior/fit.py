"""Fit: from a trained network and its data, or from a checkpoint, to a posterior."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ntk_laplace.curvature import CurvatureType, PosteriorPrecision
from ntk_laplace.errors import MemoryBudgetError, UnsupportedError, is_choice, require_choice, warn
from ntk_laplace.jacobian import JacobianPass
from ntk_laplace.model.data import Batches, Inputs, take
from ntk_laplace.model.likelihoods import Likelihood, positions_of
from ntk_laplace.model.network import Network, ParameterChoice, outside_autocast
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.posterior import Posterior
from ntk_laplace.posterior.evidence import tell_rounding
from ntk_laplace.runtime import tuning
from ntk_laplace.structures import (
    Auto,
    FittedModel,
    FullWeightSpace,
    FunctionSpace,
    GivenGaussian,
    Iterative,
    LinearizedModel,
    Settings,
    StructureSpec,
    require_name,
    structure_of,
)
from ntk_laplace.structures.checkpoint import restored_model
from ntk_laplace.structures.data_passes import ModelSignature, digest
from ntk_laplace.structures.forecast import Problem, memory_of
from ntk_laplace.structures.points import present_values
from ntk_laplace.structures.problem_sample import ProblemSample

_LOG = logging.getLogger("ntk_laplace")
_FEWEST_NUMBERS = 10  # different whole weights that are taken for numbers of rows


def laplace(
    network: nn.Module, data: Any, likelihood: Likelihood, prior: GaussianPrior | None = None,
    structure: str | StructureSpec = "gp", curvature: str | CurvatureType = "ggn", *,
    parameters: ParameterChoice = None, dtype: torch.dtype | None = None, settings: Settings | None = None,
    output: str | int | None = None, targets: str | None = None,
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
        `Gaussian`, `StudentT`, `HeteroscedasticGaussian`, `Bernoulli`, `Categorical`, `Poisson`, `NegativeBinomial`, or
        a user-defined one. It is copied, and so is the prior: those of the posterior are ``posterior.likelihood`` and
        ``posterior.prior``.
    prior : GaussianPrior, optional
        By default precision 1 and mean 0; its precision is the weight decay of the summed loss.
    structure : str or StructureSpec
        Exact: "gp" (function space, (NR)²/2 numbers), "full" (weight space, 2P²), "iterative" (by products alone, with
        an error bar of the evidence), or "auto", the cheaper of the first two that fits in memory, and the third where
        none fits or where it takes a tenth of more than 3e13 operations (3e15 on a GPU), as ``posterior.reason`` says.
        For large data: "nystrom" (the low rank of "iterative" alone), and the approximations "kfac", "ekfac", "inf",
        "diag". `plan` says what each takes. Or a specification with its options: `FunctionSpace`, `FullWeightSpace`,
        `Iterative`, `Nystrom`, `KFAC`, `EKFAC`, `INF`, `Diagonal`, or one of your own.
    curvature : str or CurvatureType
        "ggn" (exact), "ef" (empirical Fisher) or "mc" (Monte-Carlo Fisher; ``CurvatureType("mc", samples, seed)``).
    parameters : optional
        Which parameters are linearized: names or prefixes, a predicate of name and parameter, or "last_layer", those of
        the module that is registered last. Frozen ones are excluded.
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
    with torch.inference_mode(False):  # hyperparameters must be trainable later
        own = copy.deepcopy(Likelihood.of(likelihood)), copy.deepcopy(GaussianPrior.of(prior))
    spec = spec_of(structure)
    posterior = fitted_to(spec, *linearized(network, data, *own, spec, curvature, parameters=parameters, dtype=dtype,
                                            settings=settings, output=output, targets=targets))
    tell_rounding(posterior.posterior_precision)
    return posterior


def gaussian_posterior(
    network: nn.Module, data: Any, likelihood: Likelihood, prior: GaussianPrior | None = None, *,
    precision: Tensor | Mapping[str, Tensor] | PosteriorPrecision, parameters: ParameterChoice = None,
    dtype: torch.dtype | None = None, settings: Settings | None = None, output: str | int | None = None,
    targets: str | None = None,
) -> Posterior:
    """Posterior N(θ*, H⁻¹) with a precision H that was found elsewhere: by IVON, SWAG or variational inference.

    Predictions, samples, calibration on held-out data, `kl`, `elbo` and the sampled evidences are those of this
    Gaussian. What needs the curvature of the data at θ* is refused: the evidence of the Laplace approximation,
    hyperparameters by evidence, explanations, leave-one-out, what-ifs and other data.

    Parameters
    ----------
    network : nn.Module
        Its weights are the mean θ*. Otherwise as in `laplace`, like `data`, `likelihood`, `prior` and the rest.
    precision : Tensor, mapping or PosteriorPrecision
        H over the P linearized parameters, in the order of ``network.named_parameters()``: a symmetric matrix (P, P);
        its diagonal (P,); a mapping from every parameter's name to a diagonal of its shape or a dense block (p, p); or
        the ``posterior_precision`` of another posterior of these parameters. It is the whole precision, that of the
        prior included. For variances v it is 1/v; for IVON's `hess` with effective sample size n it is
        n·(hess + weight_decay).

    Returns
    -------
    Posterior
        Of structure "gaussian".

    Raises
    ------
    HyperparameterError
        If the precision has another shape or other names, is not symmetric or not finite, or a diagonal is not
        positive.
    NumericalError
        If a matrix is not positive definite.
    MemoryBudgetError
        If its factor does not fit in memory; nothing was allocated.
    NTKLaplaceError
        As `laplace`.

    Examples
    --------
    >>> import torch, ntk_laplace as ntkl
    >>> network = torch.nn.Linear(2, 1).double()
    >>> data = torch.ones(4, 2).double(), torch.zeros(4, 1).double()
    >>> prior, variances = ntkl.GaussianPrior(1.0), torch.tensor([0.5, 0.5, 0.2])
    >>> q = ntkl.gaussian_posterior(network, data, ntkl.Gaussian(), prior, precision=1 / variances)
    >>> float(q.elbo().value) < 0
    True
    """
    return laplace(network, data, likelihood, prior, GivenGaussian(precision), parameters=parameters, dtype=dtype,
                   settings=settings, output=output, targets=targets)


def linearized(
    network: nn.Module, data: Any, likelihood: Likelihood, prior: GaussianPrior, spec: StructureSpec | Auto,
    curvature: str | CurvatureType, *, parameters: ParameterChoice = None, dtype: torch.dtype | None = None,
    settings: Settings | None = None, output: str | int | None = None, targets: str | None = None,
) -> tuple[LinearizedModel, Batches]:
    """The model that `laplace` fits a structure to, and its data.

    Its likelihood and prior are these themselves: both are moved to the network's device, and the prior is bound to it.
    """
    frozen = Network(network, parameters, output, targets)
    with torch.inference_mode(False):
        prior.bind(frozen.shapes)
    curvature_type = CurvatureType.of(curvature)
    dtype = torch.float64 if dtype is None else dtype
    require_choice(dtype, (torch.float32, torch.float64), "dtype torch.float64 or torch.float32 for the algebra",
                   "Leave it out for float64; the network itself may run in any other.")
    settings = Settings.of(settings).agreed(frozen.device)
    for module in (prior, likelihood):
        module.to(frozen.device)  # hyperparameters are on the network's device
    batches = settings.own(frozen.batches(data, settings.batch_size))
    frozen.caller.positions = positions_of(likelihood, batches)
    jacobian_pass = JacobianPass(frozen, dtype, spec.factored_rows, settings.memory_budget)
    return LinearizedModel(frozen, likelihood, prior, curvature_type, jacobian_pass, settings), batches


def load(
    path: str | os.PathLike[str], network: nn.Module, data: Any = None, likelihood: Likelihood | None = None,
    settings: Settings | None = None,
) -> Posterior:
    """Posterior from a checkpoint of `Posterior.save`.

    Parameters
    ----------
    path : path
    network : nn.Module
        With the weights of the fit, which the checkpoint does not contain; it has digests of them and of what is
        frozen. The posterior uses its device.
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
        If the file is not such a checkpoint, or `data` are not those of the fit in its order: their number, weights
        or log likelihood differ.
    NetworkError
        If the network's parameters, frozen ones too, or its saved buffers differ from those of the fit.
    """
    with torch.inference_mode(False):
        fitted, reason, calibration = restored_model(path, network, data, likelihood, Settings.of(settings))
        return Posterior(fitted, reason, calibration)


def spec_of(structure: str | StructureSpec | Auto) -> StructureSpec | Auto:
    """The specification of a name; for "auto" the choice of one (UnsupportedError if it is neither of these)."""
    if isinstance(structure, StructureSpec):
        require_name(structure)
        return structure
    if isinstance(structure, Auto):
        return structure
    return Auto(Iterative()) if is_choice(structure, ("auto",)) else structure_of(structure, {})


def fitted_to(spec: StructureSpec | Auto, model: LinearizedModel, batches: Batches) -> Posterior:
    """The structure, or the one that is chosen, fitted to a `linearized` model's data, which are closed at the end.

    It is factorized here, so that errors appear at the fit.
    """
    settings, reason = model.settings, ""
    with torch.inference_mode(False), outside_autocast(), contextlib.closing(batches):
        first, _ = batches.first()
        model.jacobian_pass.prepare(first)
        if settings.reducer.world_size == 1 and batches.length is not None:
            model.likelihood.bind(batches.length, model.network.num_outputs)  # forecasts ask for single examples
        if isinstance(spec, Auto):
            problem = _problem(model, batches, first)
            spec, reason = spec.chosen(problem, lambda: _sampled(problem, batches))
            _LOG.info(reason)
        elif isinstance(spec, FunctionSpace):
            _warn_of_work(spec, model, batches, first)
        if settings.resume is not None and not spec.resumable:
            raise UnsupportedError(
                'a structure that is summed over the data, "kfac", "ekfac", "inf" or "diag", to resume',
                repr(spec.name), "Leave resume= out: the exact structures are fitted in one go.")
        if settings.reducer.world_size > 1:
            values = digest(*present_values(model.prior))
            settings.reducer.require_equal("model", (str(spec), values, dict(ModelSignature(model))))
        fitted = FittedModel.of(model, spec, batches)
        _warn_of_numbers(fitted.points.counts)
        return Posterior(fitted, reason)


def can_fit(spec: Auto, model: LinearizedModel, batches: Batches) -> bool:
    """Whether an exact structure is not refused for a `linearized` model's data; nothing is fitted."""
    with torch.inference_mode(False), outside_autocast(), contextlib.closing(batches):
        first, _ = batches.first()
        model.jacobian_pass.prepare(first)
        problem = _problem(model, batches, first)
        try:
            spec.require_memory(problem)
            spec.chosen(problem, lambda: problem)
        except (MemoryBudgetError, UnsupportedError):
            return False
    return True


def _warn_of_work(spec: FunctionSpace, model: LinearizedModel, batches: Batches, x: Inputs) -> None:
    """Warn where function space takes long, and weight space a small part of it for the same numbers."""
    n, outputs = batches.length, model.network.num_outputs
    if n is None or model.settings.reducer.world_size > 1:  # a stream is not counted
        return
    most = tuning.LONG_OPERATIONS if model.network.device.type == "cpu" else tuning.LONG_OPERATIONS_DEVICE
    rows = n * model.curvature_type.columns(model.likelihood, outputs)
    if rows**3 / 3 < most or rows <= model.network.num_parameters:
        return
    problem, other = _problem(model, batches, x), FullWeightSpace()
    here, there = spec.forecast(problem), other.forecast(problem)
    if here.work is None or there is None or there.work is None or there.required > memory_of(model):
        return
    takes, would = here.work.operations(problem), there.work.operations(problem)
    if takes >= most and takes > tuning.FASTER * would:
        warn(f"structure={spec.name!r} takes about {takes:.1g} operations for {rows:,} rows, and again when "
             f"hyperparameters change; structure={other.name!r} has the same numbers from about {would:.1g}, and "
             'structure="auto" takes the cheaper of the two')


def _warn_of_numbers(weights: Tensor) -> None:
    """Warn of example weights that look like numbers of rows: the third member of (x, y, index) is taken as them."""
    found = weights.unique()
    if len(weights) != len(found) or len(found) < _FEWEST_NUMBERS or bool((found != found.round()).any()):
        return
    # as many numbers of so small a range would hardly be all different if they were counts
    if len(found) ** 2 >= 4 * float(found[-1] - found[0] + 1):
        warn(f"the example weights w of (x, y, w) are {len(found):,} different whole numbers, as indices are: an "
             f"example counts up to {float(found[-1]):g} times. If they are indices, leave them out: data are (x, y)")


def _problem(model: LinearizedModel, batches: Batches, x: Inputs) -> Problem:
    """What the choice of a structure depends on; a stream is counted."""
    reducer = model.settings.reducer
    alone = reducer.world_size == 1
    n = batches.length or sum(len(y) for _, y in batches) if alone else batches.numbers(reducer)[1]
    return Problem(model, n, model.jacobian_pass.rows(take(x, slice(0, 2))), reducer.world_size)


def _sampled(problem: Problem, batches: Batches) -> Problem | None:
    """The problem with the spectrum that examples of the first batch show; None if those of two are too many rows."""
    model = problem.model
    if 2 * problem.num_columns > tuning.PROBED_GRAM_ROWS:
        return None
    model.likelihood.bind(problem.num_examples, model.network.num_outputs)  # noise of each point, in a stream
    sample = ProblemSample.of(model, *batches.first(), problem.num_examples, problem.processes)
    return sample.problem(model, model.jacobian_pass.rows(sample.x))
