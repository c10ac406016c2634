"""Maximize the evidence over hyperparameters: L-BFGS, Adam, or MacKay's fixed point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ntk_laplace.errors import (
    HyperparameterError,
    NonFiniteError,
    NumericalError,
    UnsupportedError,
    require_bounds,
    require_choice,
    require_flags,
    require_number,
    require_whole,
    warn,
)
from ntk_laplace.model.likelihoods import Gaussian
from ntk_laplace.posterior.hyperparameters.history import HyperparameterHistory
from ntk_laplace.posterior.hyperparameters.objectives import (
    Differentiable,
    Evidence,
    SearchObjective,
    SpectralEvidence,
    distances_of,
)
from ntk_laplace.posterior.hyperparameters.variables import Variables
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.conversion import to_tensor
from ntk_laplace.runtime.progress import track

METHODS = ("lbfgs", "adam", "mackay")
_CERTAIN = -1e-2  # nats; a larger evidence of labels means certainty


def maximize(
    posterior: Evidence, method: str = "lbfgs", parameters: Sequence[str] | None = None, steps: int = 200,
    tolerance: float = 1e-6, bounds: tuple[float, float] = (1e-10, 1e10), *, estimated: bool = False, **options: Any,
) -> HyperparameterHistory:
    """Maximize a posterior's evidence over its hyperparameters, and set them to the best values.

    Where the prior has a hyperprior (`GaussianPrior.log_hyperprior`), it is added to the evidence, also in the history.
    The arguments are those of `fit_hyperparameters`. If log det B is `estimated`, its gradient is another estimate:
    "lbfgs" needs a local model of it.
    """
    correction, progress = options.pop("correction", False), options.pop("progress", None)
    require_flags(correction=correction, progress=progress is not None and progress)
    rate = options.pop("learning_rate", 0.1)
    require_choice(method, METHODS, f"a method among {', '.join(METHODS)}", "Use 'lbfgs' unless you know better.")
    require_whole("steps", steps, 1, "Leave it out for 200.")
    require_number("a positive tolerance", tolerance, "Leave it out for 1e-6.", above=0)
    require_number("a positive learning_rate", rate, "Leave it out for 0.1.", above=0)
    require_bounds(bounds)
    if options:
        raise HyperparameterError("options among correction, learning_rate, progress", ", ".join(options), "Drop them.")
    variables = Variables(posterior, parameters)
    if method == "mackay":
        _require_fixed_point(posterior, set(variables.parameters), correction)
    which = list(variables.parameters)
    evidence: SearchObjective | None = None if correction else SpectralEvidence.of(posterior, variables.parameters)
    # the gradient of an estimate is another estimate: a search needs a function and its own gradient
    searched = evidence is None and not correction and method != "mackay"
    local = SpectralEvidence.of(posterior, variables.parameters, local=True) if searched else None
    if estimated and searched and local is None:
        _follow_an_estimate(method, which)
    if evidence is None:
        evidence = Differentiable(partial(posterior.log_marginal_likelihood, correction=correction))
    search = _Search(variables, evidence, method, bounds, steps, tolerance, rate, progress)
    history = search.history
    try:
        with variables.alone():
            if local is None:
                _run(search)
            else:
                _by_local_models(search, local)
    finally:  # the best values so far, also after an interruption
        variables.set(search.best.logs if search.taken else search.start)
    search.report_bounds()
    search.report_certainty()
    if not history.converged:
        warn(f"the evidence's maximum was not reached: {history.message}")
    return history


@dataclass(frozen=True)
class _Step:
    """What a search maximizes, and its gradient, at these logarithms of the hyperparameters."""

    logs: Tensor
    value: float
    gradient: Tensor


@dataclass
class _Search:
    """An evidence over a box of logarithms, with the prior's hyperprior, and the history of evaluations.

    The rate is Adam's; the fields after the evidence are arguments of `maximize`.
    """

    variables: Variables
    evidence: SearchObjective
    method: str
    bounds: tuple[float, float]
    steps: int
    tolerance: float
    rate: float
    progress: bool | None

    def __post_init__(self) -> None:
        self.history = HyperparameterHistory(self.method, self.variables.names)
        self.low, self.high = self.variables.box(self.bounds)
        self.start, self.taken = self.variables.get(), list[_Step]()

    def inside(self, logs: Tensor) -> Tensor:
        """The nearest point in the box."""
        return torch.minimum(torch.maximum(logs, self.low), self.high)

    def at(self, logs: Tensor) -> _Step:
        """The step to these logarithms."""
        self.variables.set(logs)
        return _Step(logs, *self.variables.value_and_gradient(self.evidence))

    def note(self, step: _Step) -> None:
        """Record one step."""
        self.history.evidence.append(step.value)
        self.history.values.append(self.variables.shown(step.logs))
        self.taken.append(step)

    @property
    def best(self) -> _Step:
        """The step with the largest evidence so far."""
        return self.taken[self.history.best]

    def slope(self, step: _Step) -> float:
        """The largest derivative that does not point out of the box, as a fraction of 1 + abs(evidence)."""
        gradient = step.gradient
        held = ((step.logs <= self.low) & (gradient < 0)) | ((step.logs >= self.high) & (gradient > 0))
        steepest = torch.where(held, torch.zeros_like(gradient), gradient).abs().max()
        return float(steepest) / (1.0 + abs(step.value))

    def flat(self, step: _Step) -> bool:
        """Whether the gradient is within the tolerance."""
        return self.slope(step) <= self.tolerance

    def judge(self, exhausted: bool) -> None:
        """Decide convergence from the gradient at the best step, not from the optimizer's exit status.

        With curvature h a gradient g can increase the evidence by at most g²/2h. In units of 1 + abs(evidence), if g
        is below the square root of the machine epsilon, the increase is below rounding.
        """
        slope = self.slope(self.best)
        if slope <= self.tolerance:
            self.stop(True, "gradient below tolerance")
        elif slope <= torch.finfo(self.variables.posterior.dtype).eps ** 0.5:
            self.stop(True, "the evidence no longer changes beyond rounding")
        elif exhausted:
            self.exhausted()
        else:
            self.stop(False, f"the search ended at a gradient of {slope:.2g} (1 + |evidence|), above the tolerance; "
                             'fit with dtype=torch.float64, or maximize with method="adam"')

    def report_certainty(self) -> None:
        """Warn if all labels are fitted: the evidence then increases to 0 as the temperature falls, with no maximum."""
        if "temperature" in self.variables.parameters and self.history.evidence[self.history.best] > _CERTAIN:
            present = float(self.variables.parameters["temperature"].detach().exp())
            warn("the evidence has no maximum over temperatures: all training labels are fitted, so the evidence "
                 f"increases to 0 as the temperature goes to 0 (now {present:.2g}), where labels carry no information "
                 'about the weights; leave "temperature" out of parameters=, as the default does')

    def still(self, steps: int = 20) -> bool:
        """Whether the evidence has changed by less than the tolerance over some steps."""
        recent = self.history.evidence[-steps:]
        return len(recent) == steps and max(recent) - min(recent) <= self.tolerance * (1.0 + abs(recent[-1]))

    def wall(self, logs: Tensor) -> tuple[float, np.ndarray]:
        """Value and gradient for the line search if the evidence is undefined: a finite slope to the last step."""
        last = self.taken[-1]
        away, height = logs - last.logs, 1.0 + abs(last.value)
        slope = 2.0 * height * away / away.square().sum()
        return height - last.value, slope.numpy()

    def stop(self, converged: bool, message: str) -> None:
        """Record whether and why it stopped."""
        self.history.converged, self.history.message = converged, message

    def exhausted(self) -> None:
        """Record that it has taken all steps."""
        self.stop(False, f"{self.steps} steps were not enough for gradients within tolerance")

    def report_bounds(self) -> None:
        """Record hyperparameters that ended on a bound while the evidence still increases beyond it, and warn."""
        best, shown = self.best, self.history.values[self.history.best]
        for number, name in enumerate(self.variables.names):
            low, high = best.logs[number] <= self.low[number], best.logs[number] >= self.high[number]
            if (low and best.gradient[number] < 0) or (high and best.gradient[number] > 0):
                self.history.at_bounds[name] = shown[number]
        if self.history.at_bounds:
            first = list(self.history.at_bounds.items())[:4]
            found = ", ".join(f"{name} = {value:.3g}" for name, value in first)
            count = len(self.history.at_bounds)
            warn(f"the evidence still grows beyond the bounds of {count} hyperparameters: {found}")


def _run(search: _Search) -> None:
    {"lbfgs": _lbfgs, "adam": _adam, "mackay": _mackay}[search.method](search)


def _by_local_models(search: _Search, local: SearchObjective) -> None:
    """Maximize local models in turn, each made where the one before has its maximum; a step is one of them.

    Two of them differ by their errors where they meet. This is taken from the evidences before, so that the differences
    of steps are those of single models.
    """
    variables, expected, before = search.variables, None, None
    for _ in track(range(tuning.ANCHORS), "ntk_laplace: local models", tuning.ANCHORS, search.progress):
        inner = replace(search, evidence=local, progress=None)
        first = inner.at(inner.inside(variables.get()))
        if expected is None:
            search.note(first)
        else:
            search.history.evidence[:] = [value + first.value - expected for value in search.history.evidence]
        _run(inner)
        end, expected = inner.best, max(inner.history.evidence)
        search.note(replace(end, value=expected))
        gain, move = expected - first.value, float((end.logs - first.logs).abs().max())
        following = move if before is None else move * min(1.0, move / before)  # if moves keep falling so
        if following <= tuning.ANCHOR_MOVE or gain <= search.tolerance * (1.0 + abs(first.value)):
            return search.stop(True, f"a local model moves its hyperparameters by {move:.1g} in logarithms")
        before = move
        variables.set(end.logs)
        found = SpectralEvidence.of(variables.posterior, variables.parameters, local=True)
        assert found is not None
        local = found
    return search.stop(False, f"{tuning.ANCHORS} local models were not enough")


def _lbfgs(search: _Search) -> None:
    """SciPy's bounded L-BFGS on the logarithms."""
    from scipy.optimize import minimize  # installed with scikit-learn

    last = search.at(search.inside(search.start))

    def negative(logs: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal last
        point = search.inside(to_tensor(logs))
        try:
            found = search.at(point)
        except (NumericalError, NonFiniteError):
            return search.wall(point)
        if not (math.isfinite(found.value) and found.gradient.isfinite().all()):
            return search.wall(point)
        last = found
        return -last.value, -last.gradient.numpy()

    def after(_: np.ndarray) -> None:
        search.note(last)
        if search.flat(last):
            raise StopIteration  # SciPy's tolerance is absolute, ours is relative to the evidence

    search.note(last)
    exhausted = False
    if not search.flat(last):
        limits = list(zip(search.low.tolist(), search.high.tolist(), strict=True))
        found = minimize(negative, last.logs.numpy(), jac=True, method="L-BFGS-B", bounds=limits, callback=after,
                         options={"maxiter": search.steps, "gtol": 0.0, "ftol": 1e-15, "maxls": 40})
        exhausted = found.status == 1
    search.judge(exhausted)


def _adam(search: _Search) -> None:
    """Adam on the logarithms, projected onto the box, with a cosine schedule to 1 % of the learning rate."""
    logs = search.inside(search.start).requires_grad_()
    # gradients shrink by orders of magnitude from a bad initial precision: use a short second-moment memory
    optimizer = torch.optim.Adam([logs], lr=search.rate, betas=(0.9, 0.9))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, search.steps, eta_min=search.rate / 100)
    for _ in track(range(search.steps + 1), "ntk_laplace: evidence", search.steps + 1, search.progress):
        step = search.at(logs.detach().clone())
        search.note(step)
        if search.flat(step):
            return search.stop(True, "gradient below tolerance")
        if search.still():
            return search.stop(True, "the evidence no longer changes")
        logs.grad = -step.gradient
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            logs.copy_(search.inside(logs))
    return search.exhausted()


def _mackay(search: _Search) -> None:
    """Alternate δ_g = γ_g/‖θ_g - μ0‖² and σ² = Σ‖y - f‖²/(NC - γ) with γ."""
    variables = search.variables
    distances = distances_of(variables.posterior).clamp_min(torch.finfo(torch.float64).tiny).cpu()
    variables.set(search.inside(search.start))
    for _ in track(range(search.steps + 1), "ntk_laplace: evidence", search.steps + 1, search.progress):
        step = search.at(variables.get())
        search.note(step)
        if search.flat(step):
            return search.stop(True, "gradient below tolerance")
        variables.set(search.inside(_fixed_point(variables, distances)))
    return search.exhausted()


def _fixed_point(variables: Variables, distances: Tensor) -> Tensor:
    posterior, found = variables.posterior, []
    likelihood, used = posterior.likelihood, posterior.effective_parameters().detach().double().cpu()
    for name in variables.parameters:
        if name == "precision" or not isinstance(likelihood, Gaussian):
            found.append((used.clamp_min(torch.finfo(torch.float64).tiny) / distances).log())
        else:
            residual = likelihood.residual(posterior.f, posterior.targets).detach()
            counts = posterior.weights.double()
            squares = float((residual.double() * likelihood.noise.detach()).square().sum(1) @ counts)
            observed = likelihood.observed(posterior.targets)
            each = residual.shape[1] if observed is None else observed.sum(1)
            left = max(float((counts * each).sum()) - float(used.sum()), torch.finfo(torch.float64).tiny)
            found.append(torch.tensor([squares / left], dtype=torch.float64, device="cpu").log())
    return torch.cat(found)


def _require_fixed_point(posterior: Evidence, moving: set[str], correction: bool) -> None:
    noise = isinstance(posterior.likelihood, Gaussian) and posterior.likelihood.kind == "scalar"
    others = moving - ({"precision", "noise"} if noise else {"precision"})
    if others or correction or posterior.prior.has_hyperprior:
        what = ", ".join(sorted(others)) or ("an evidence with correction" if correction else "a prior with a spread")
        raise UnsupportedError(f'method "lbfgs" or "adam" for {what}', '"mackay"', "The fixed point is known for "
                               "precisions and for a Gaussian's one noise variance, without correction or spread.")


def _follow_an_estimate(method: str, moving: list[str]) -> None:
    """Refuse a line search along the gradient of another function than its own; warn of steps along it."""
    what = f"the gradient of an estimated evidence in {', '.join(moving)}"
    if method == "lbfgs":
        remedy = ('Name parameters=["precision"], use method="adam", or fit with structure="gp" or "full".'
                  if moving != ["precision"] else 'Use method="mackay", or fewer prior groups.')
        raise UnsupportedError('method "adam", or a local model of log det B, for ' + what, '"lbfgs"', remedy)
    warn(f"{what} is an estimate without a local model: the hyperparameters found have errors of their own; "
         'structure="gp" or "full" has none')
