"""Variational inference: the arguments are checked and combined, and the steps are run."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from ntk_laplace.curvature import PosteriorPrecision
from ntk_laplace.errors import (
    HyperparameterError,
    UnsupportedError,
    is_number,
    require_callables,
    require_choice,
    require_flags,
    require_number,
    require_whole,
    warn,
)
from ntk_laplace.model.data import Batches, take
from ntk_laplace.model.likelihoods import Likelihood
from ntk_laplace.model.network import ParameterChoice, outside_autocast
from ntk_laplace.model.priors import GaussianPrior
from ntk_laplace.posterior import Posterior
from ntk_laplace.posterior.explain.reliability import MOST_DECREMENT, newton_decrement
from ntk_laplace.posterior.fit import linearized
from ntk_laplace.runtime.serialization import require_writable
from ntk_laplace.structures import (
    FittedModel,
    GivenGaussian,
    LinearizedModel,
    Settings,
    StructureSpec,
)
from ntk_laplace.structures.data_passes import ModelSignature, digest
from ntk_laplace.structures.points import present_values
from ntk_laplace.variational_inference.algorithms import LGVA, OGGN, VOGGN, Algorithm, SampledLGVA
from ntk_laplace.variational_inference.examples import Examples
from ntk_laplace.variational_inference.iteration import Iteration, SampledIteration
from ntk_laplace.variational_inference.representations import Representation, representation
from ntk_laplace.variational_inference.result import Callback, VariationalFit
from ntk_laplace.variational_inference.run import Run, StepSizes
from ntk_laplace.variational_inference.sites import AnchoredSites, AnchoredWeights
from ntk_laplace.variational_inference.start import Start, checked_start, optimum, require_same_network

_POINTS = 256  # of f for each example, LGVA
_EVALUATIONS = 20  # of the ELBO in a run, by default
_ROUNDING = 0.01  # of the relative rounding: rows of that weight are dropped, whatever the tolerance


def variational(
    network: nn.Module, data: Any, likelihood: Likelihood, prior: GaussianPrior | None = None,
    structure: str | StructureSpec = "full", algorithm: str = "voggn", *, start: Start = "map",
    samples: int | None = None, step_size: float = 0.01, steps: int = 1000, relinearize: bool = True,
    decay: float | None = None, average: bool = False, expectations: str = "outputs", batch_size: int | None = None,
    tolerance: float | None = None, row_tolerance: float = 0.0, elbo_every: int | None = None, elbo_samples: int = 50,
    seed: int = 0, callbacks: Callback | Sequence[Callback] = (), inplace: bool = False,
    parameters: ParameterChoice = None, dtype: torch.dtype | None = None, settings: Settings | None = None,
    output: str | int | None = None, targets: str | None = None,
) -> VariationalFit:
    """Gaussian posterior N(μ, H⁻¹) by variational inference with generalized Gauss-Newton steps ([T20] chapter 4).

    A step of size γ, with expectations ĝ = E Σ Jᵀr and Ĝ = E Σ JᵀΛJ over the present Gaussian, is a natural-gradient
    step of an evidence lower bound (ELBO):

        H ← (1-γ) H + γ (P0 + Ĝ),    μ ← μ + γ H⁻¹ [ĝ - P0 (μ - μ0)].

    Parameters
    ----------
    network : nn.Module
        In the mode of use. It is copied, and left as it is unless `inplace`.
    data, likelihood, prior, parameters, dtype, output, targets
        As in `laplace`.
    structure : str or StructureSpec
        "full": H is a P x P matrix. "gp": function space, H = diag(d) + RᵀR with rows R of all steps, whose number
        grows by N R S each step; nothing of size P x P. "auto": function space until there are more rows than
        parameters, then weight space: the same algebra, with other random numbers. "kfac", "diag", or `KFAC` and
        `Diagonal` with their options: H is block diagonal, from moving averages of the structure's sums; noisy K-FAC
        and VOGN with generalized Gauss-Newton steps.
    algorithm : str
        "voggn" averages over weight samples of the network, and maximizes the network's ELBO. "lgva" linearizes the
        network at μ in each step. "oggn" evaluates at μ alone: Newton steps of the log joint, which end in the Laplace
        posterior.
    start : str, Posterior or float
        "map": the optimum of the log joint from the network's weights, by L-BFGS, with Laplace's H. A posterior of this
        network: its mean and precision; in blocks, a Laplace posterior of the same structure. A number λ:
        the network's weights with H = λI (10 is [T20]'s Σ = 0.1 I).
    samples : int, optional
        S, weight samples per step, in pairs μ ± e: 2 by default. An odd number leaves one without a partner, so that μ
        keeps a noise at constant step sizes; a warning says how large. For "lgva" over outputs, the points of f for
        each example where its expectations are not closed: 256 by default.
    relinearize : bool
        False, for "lgva": the network is linearized once, at the start, and q maximizes the ELBO of that model; where
        the likelihood's curvature is its Fisher information, q is near that maximum. In function space there is one
        site per training point, and no row of an earlier step is kept.
    step_size : float
        γ in (0, 1]; the first if it decays.
    steps : int
        Number of steps, at most.
    decay : float, optional
        τ of decreasing step sizes γ (1 + t/τ)^-0.6, in steps; constant by default.
    average : bool
        Whether the mean of the result is the average of μ over the second half of the steps.
    expectations : str
        Of "lgva": "outputs", over f_n ~ N(f(x_n; μ), J_n H⁻¹ J_nᵀ), closed for Gaussian and Poisson, by quadrature for
        a likelihood that is a product over outputs; or "weights", by S weight samples in the linearized network, as in
        [T20].
    batch_size : int, optional
        b: a step reads a random minibatch, whose sums are multiplied by N/b. By default all examples.
    tolerance : float, optional
        In nats per example: the run ends when ½ gᵀH⁻¹g/N, averaged over five steps, is at most this; g is the
        natural gradient's ĝ - P0(μ - μ0), which contains the noise of the samples.
    row_tolerance : float
        In function space, rows whose weight Π(1-γ) since their step is at most this are dropped. H then lacks at most
        this times the largest Ĝ in norm; ``VariationalFit.dropped`` says how much. By default only rows are dropped
        whose weight is below rounding.
    elbo_every : int, optional
        Steps between two estimates of both ELBOs for the history; by default a twentieth of the steps, 0 for none.
    elbo_samples : int
        Weight samples of each estimate.
    seed : int
        Of all random numbers. The global random state is neither read nor changed.
    callbacks : callable or sequence of callables
        Each is called with a `VariationalStep` after every step, and may stop the run.
    inplace : bool
        Whether the caller's network is set to μ at the end.
    settings : Settings, optional
        Batch size of the passes, memory budget, progress bar. A `checkpoint` is written every minute. `resume`
        continues from a checkpoint, or from the `state` of a `VariationalInterrupted`, to the bit-identical result,
        given the same data and arguments (`steps` may increase without `average`).

    Returns
    -------
    VariationalFit
        With the posterior, of structure "gaussian". For "oggn" at its fixed point it is the Laplace posterior at μ.

    Raises
    ------
    HyperparameterError
        If a number is out of range.
    UnsupportedError
        If a name is unknown, arguments contradict each other, the likelihood is not log-concave without an override of
        its curvature, or several processes call it.
    MemoryBudgetError
        If matrices or rows would not fit in memory; nothing was allocated.
    NumericalError
        If a step is not finite.
    VariationalInterrupted
        On Ctrl-C.
    NTKLaplaceError
        As `laplace`.

    Examples
    --------
    >>> import torch, ntk_laplace as ntkl
    >>> network = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    >>> x = torch.linspace(-1, 1, 20).double().unsqueeze(1)
    >>> fit = ntkl.variational(network, (x, x.sin()), ntkl.Gaussian(0.1), ntkl.GaussianPrior(1.0), steps=20)
    >>> fit.posterior.structure, len(fit.history)
    ('gaussian', 20)
    """
    settings = Settings.of(settings)
    settings.reducer.require_one("variational inference", "Run it in one process.")
    require_flags(relinearize=relinearize, average=average, inplace=inplace)
    step_sizes = StepSizes(_step_size(step_size), None if decay is None else _positive("decay", decay, "decay=100"))
    method = _algorithm(algorithm, samples, expectations)
    if decay is None and not average:
        _tell_noise(method, step_sizes.first)
    steps = require_whole("steps", steps, 1, "Pass steps=1000, for instance.")
    seed = require_whole("seed", seed, 0, "Pass seed=0.")
    if batch_size is not None:
        require_whole("batch_size", batch_size, 1, "Leave it out to read all examples in every step.")
    if tolerance is not None:
        _positive("tolerance", tolerance, "tolerance=1e-6")
    if not is_number(row_tolerance) or not 0 <= row_tolerance < 1:
        raise HyperparameterError("a row_tolerance in [0, 1)", repr(row_tolerance), "Leave it out to keep the rows.")
    require_whole("elbo_samples", elbo_samples, 4, "Leave it out for 50.")
    every = max(1, steps // _EVALUATIONS) if elbo_every is None else require_whole(
        "elbo_every", elbo_every, 0, "Leave it out, or pass 0 for no estimates.")
    given = checked_start(start)
    called = require_callables(callbacks, "VariationalStep")
    if settings.checkpoint is not None:
        require_writable(settings.checkpoint)
    form = representation(structure, 0, 0, row_tolerance)  # of "auto" any
    with torch.inference_mode(False):
        own = copy.deepcopy(Likelihood.of(likelihood)), copy.deepcopy(GaussianPrior.of(prior))
    plain = replace(settings, checkpoint=None, resume=None)
    model, batches = linearized(network, data, *own, form.spec, "ggn", parameters=parameters, dtype=dtype,
                                settings=plain, output=output, targets=targets)
    with torch.inference_mode(False), outside_autocast(), contextlib.closing(batches):
        model.jacobian_pass.prepare(batches.first()[0])
        examples = Examples(model, batches, batch_size)
        c = model.network.num_outputs
        rows = examples.per_step * model.likelihood.rank(c) * method.rows_per_example
        forgotten = max(float(row_tolerance), _ROUNDING * torch.finfo(model.jacobian_pass.dtype).eps)
        form = representation(structure, rows, model.network.num_parameters, forgotten)
        if isinstance(given, Posterior):
            require_same_network(given, model)
        p, element = model.network.num_parameters, model.jacobian_pass.dtype.itemsize
        model.require_memory(method.weight_samples * p * element,
                             f"{method.weight_samples:,} samples of {p:,} weights in a step", "Use fewer samples.")
        iteration: Iteration
        if relinearize:
            kept, with_start = step_sizes.kept(steps, forgotten)
            first = 0 if isinstance(given, float) else examples.num_examples * model.likelihood.rank(c)
            few = model.jacobian_pass.rows(take(next(examples.all()).x, slice(0, 2)))
            form.require_memory(model, few, rows, rows * kept + with_start * first)
            if isinstance(given, float) or (given is None and settings.resume is not None):
                state = form.isotropic(model, few, given or 1.0)  # a state to resume from takes the place of any
            else:
                state = form.of(model, optimum(model, batches, form.spec) if given is None else given.fitted)
                model = model.at_weights(state.mean)
            iteration = SampledIteration(model, examples, method, state, seed, form.most_rows)
        else:
            model, iteration = _anchored(model, batches, examples, form, method, given)

        def posterior(mean: Tensor, precision: PosteriorPrecision) -> FittedModel:
            at = model.at_weights(mean) if relinearize else replace(model, displacement=mean - model.theta)
            return FittedModel.of(at, GivenGaussian(precision), batches)

        def bound(mean: Tensor, precision: PosteriorPrecision) -> tuple[float, float, float, float]:
            found = Posterior(posterior(mean, precision))
            generator = torch.Generator(device=mean.device).manual_seed(seed)
            of_network, linear = found.elbo("nn", elbo_samples, generator=generator), found.elbo("glm", _POINTS)
            return (float(of_network), float(of_network.standard_error), float(linear), float(linear.standard_error))

        signature = _signature(model, examples) | {
            "structure": f"{structure}", "algorithm": f"{method!r}{'' if relinearize else ', linearized once'}",
            "row tolerance": f"{row_tolerance:g}", "step sizes": f"{step_sizes}", "seed": f"{seed}",
            "average": f"over the last half of {steps:,} steps" if average else "none",
        }
        run = Run(iteration, step_sizes, steps, examples.total, tolerance, average, bound, every, signature)
        run.go(settings, called)
        fitted, reason = posterior(run.mean, iteration.precision), f"{algorithm}, {len(run.history):,} steps"
        if isinstance(method, OGGN):
            laplace = FittedModel.of(model.at_weights(run.mean), form.spec, batches)
            decrement = newton_decrement(laplace)
            if decrement <= MOST_DECREMENT:
                fitted, reason = laplace, f"{reason}, at an optimum of the log joint: the Laplace posterior"
            else:
                warn(f"OGGN is not at its fixed point: the Newton decrement is {decrement:.2g} nats a point, above "
                     f"{MOST_DECREMENT}; take more steps, or smaller ones. The posterior is that of the last step")
        if inplace:
            _write(network, model, run.mean)
        fitted = replace(fitted, model=replace(fitted.model, settings=settings))
        return VariationalFit(Posterior(fitted, reason), run.history, run.stopped, iteration.dropped)


def _anchored(
    model: LinearizedModel, batches: Batches, examples: Examples, form: Representation, method: Algorithm,
    start: float | Posterior | None,
) -> tuple[LinearizedModel, Iteration]:
    """LGVA of the network linearized once, with the model at that point.

    UnsupportedError if another algorithm, minibatches or weight samples are asked for, or H is in blocks.
    """
    if not isinstance(method, LGVA) or examples.batch_size is not None or not form.spec.exact:
        raise UnsupportedError('algorithm="lgva" over outputs of all examples, structure "full", "gp" or "auto", for '
                               "relinearize=False", f"{type(method).__name__}, structure={form.spec.name!r}, "
                               f"{examples.per_step:,} examples a step", "Leave relinearize= out.")
    if isinstance(start, Posterior) and not (start.fitted.exact and start.fitted.model.displacement is None):
        at = "" if start.fitted.model.displacement is None else ", at other weights than its network's"
        raise UnsupportedError("an exact Laplace posterior as the start of relinearize=False",
                               f"structure={start.structure!r}{at}", 'Pass start="map", or a precision.')
    theta = start.fitted.theta if isinstance(start, Posterior) else model.network.theta
    if start is None:
        fitted = optimum(model, batches, form.spec)
    else:
        fitted = FittedModel.of(model.at_weights(theta), form.spec, batches)
    kind = AnchoredSites if form.spec.keeps_jacobian else AnchoredWeights
    return fitted.model, kind(fitted, start if isinstance(start, float) else None, method.points)


def _algorithm(name: object, samples: int | None, expectations: object) -> Algorithm:
    """The algorithm of a name, with its samples."""
    if samples is not None:
        require_whole("samples", samples, 1, "Pass an even number, such as samples=2.")
    require_choice(expectations, ("outputs", "weights"), 'expectations="outputs" or "weights"', "Leave it out.")
    require_choice(name, ("voggn", "lgva", "oggn"), 'algorithm among "voggn", "lgva", "oggn"', 'Use "voggn".')
    if expectations == "weights" and name != "lgva":
        raise UnsupportedError('expectations="weights" for algorithm="lgva"', f"algorithm={name!r}", "Leave it out.")
    if name == "oggn":
        if samples is not None:
            raise UnsupportedError('samples= for "voggn" or "lgva"', f'{samples} with algorithm="oggn", at μ alone',
                                   "Leave it out.")
        return OGGN()
    if name == "lgva" and expectations == "outputs":
        return LGVA(_POINTS if samples is None else samples)
    count = 2 if samples is None else samples
    return VOGGN(count) if name == "voggn" else SampledLGVA(count)


def _tell_noise(method: Algorithm, step_size: float) -> None:
    """Warn of the noise of a sample without a partner, at constant step sizes."""
    samples = method.weight_samples
    if samples % 2 == 0:
        return
    floor = step_size / (2.0 - step_size) / samples**2
    warn(f"of samples={samples} one has no partner μ - e: at a constant step_size, μ keeps a squared distance of "
         f"about {floor:.3g} tr[(G H⁻¹)²] to its optimum, in the metric of H (up to {floor:.3g} times the effective "
         "number of parameters); pass an even number, decay=100 or average=True")


def _step_size(value: object) -> float:
    if not is_number(value) or not 0 < value <= 1:
        raise HyperparameterError("a step_size in (0, 1]", repr(value), "Pass step_size=0.01, for instance.")
    return float(value)


def _positive(what: str, value: object, example: str) -> float:
    return require_number(f"a positive {what}", value, f"Pass {example}, or leave it out.", above=0)


def _signature(model: LinearizedModel, examples: Examples) -> dict[str, str]:
    """The model and the data of a run, for one that resumes; weights move, and are in the state."""
    own = {name: value for name, value in ModelSignature(model).items() if name != "network"}
    module = model.network.module
    kinds = [type(part).__name__ for part in module.modules()]
    return own | {
        "network": f"{type(module).__name__} of {len(kinds)} modules, {crc32(' '.join(kinds).encode()):08x}",
        "output": repr(model.network.output), "targets and example weights": examples.fingerprint,
        "prior": digest(*present_values(model.prior)), "number of examples": f"{examples.num_examples:,}",
        "batch size": f"{examples.per_step:,}",
    }


def _write(network: nn.Module, model: LinearizedModel, mean: Tensor) -> None:
    """Set the caller's network to μ."""
    values, own = model.network.unflatten(mean), dict(network.named_parameters())
    for name, value in values.items():
        # an inference tensor can be changed in the mode alone that it was made in
        with torch.inference_mode() if own[name].is_inference() else torch.no_grad():
            own[name].copy_(value)
