"""Maximize the evidence over hyperparameters: L-BFGS, Adam, or MacKay's fixed point."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ntk_laplace.errors import (
    HyperparameterError,
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
    local_evidence,
    with_hyperprior,
)
from ntk_laplace.posterior.hyperparameters.variables import Variables
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.progress import track

METHODS = ("lbfgs", "adam", "mackay")
_CERTAIN = -1e-2  # nats; a larger evidence of labels means certainty


def maximize(
    posterior: Evidence, theta: Tensor, method: str = "lbfgs", parameters: Sequence[str] | None = None,
    steps: int = 200, tolerance: float = 1e-6, bounds: tuple[float, float] = (1e-10, 1e10), *, estimated: bool = False,
    **options: Any,
) -> HyperparameterHistory:
    """Maximize a posterior's evidence over its hyperparameters, and set them to the best values.

    Where the prior has a hyperprior (`GaussianPrior.log_hyperprior`), it is added to the evidence, also in the history.

    Parameters
    ----------
    posterior : Evidence
    theta : Tensor, (P,)
        The weights.
    method, parameters, steps, tolerance, bounds, options
        As of `fit_hyperparameters`.
    estimated : bool
        Whether log det B is a stochastic estimate, whose gradient is another one: "lbfgs" needs a local model of it.

    Returns
    -------
    HyperparameterHistory
    """
    correction, progress = options.pop("correction", False), options.pop("progress", None)
    require_flags(correction=correction, progress=progress is not None and progress)
    rate = options.pop("learning_rate", 0.1)
    _check(method, steps, tolerance, bounds, rate)
    if options:
        raise HyperparameterError("options among correction, learning_rate, progress", ", ".join(options), "Drop them.")
    variables = Variables(posterior, parameters)
    if method == "mackay":
        _require_fixed_point(posterior, set(variables.parameters), correction)
    which = list(variables.parameters)
    evidence: SearchObjective | None = None if correction else SpectralEvidence.of(posterior, theta, which)
    # the gradient of an estimate is another estimate: a search needs a function and its own gradient
    searched = evidence is None and not correction and method != "mackay"
    local = local_evidence(posterior, theta, which) if searched else None
    if estimated and searched and local is None:
        _follow_an_estimate(method, which)
    if evidence is None:
        evidence = Differentiable(partial(posterior.log_marginal_likelihood, correction=correction))
    search = _Search(variables, evidence, method, bounds, steps, tolerance)
    history = search.history
    try:
        with variables.alone():
            if local is None:
                _run(search, theta, rate, progress)
            else:
                _by_local_models(search, local, theta, rate, progress)
    finally:
        variables.set(search.best())  # the best values so far, also after an interruption
    search.report_bounds()
    search.report_certainty()
    if not history.converged:
        warn(f"the evidence's maximum was not reached: {history.message}")
    return history


def _run(search: _Search, theta: Tensor, rate: float, progress: bool | None) -> None:
    if search.method == "mackay":
        _mackay(search, theta, progress)
    elif search.method == "adam":
        _adam(search, rate, progress)
    else:
        _lbfgs(search)


def _by_local_models(
    search: _Search, local: SearchObjective, theta: Tensor, rate: float, progress: bool | None
) -> None:
    """Maximize local models in turn, each made where the one before has its maximum; a step is one of them.

    Two of them differ by their errors where they meet. This is taken from the evidences before, so that the differences
    of steps are those of single models.
    """
    variables, expected, before = search.variables, None, None
    for _ in track(range(tuning.ANCHORS), "ntk_laplace: local models", tuning.ANCHORS, progress):
        inner = _Search(variables, local, search.method, search.bounds, search.steps, search.tolerance)
        start = inner.inside(variables.get())
        value, gradient = inner.at(start)
        if expected is None:
            search.note(value, start, gradient)
        else:
            search.shift(value - expected)
        _run(inner, theta, rate, None)
        end, expected = inner.best(), max(inner.history.evidence)
        search.note(expected, end, inner.best_gradient())
        gain, move = expected - value, float((end - start).abs().max())
        following = move if before is None else move * min(1.0, move / before)  # if moves keep falling so
        if following <= tuning.ANCHOR_MOVE or gain <= search.tolerance * (1.0 + abs(value)):
            return search.stop(True, f"a local model moves its hyperparameters by {move:.1g} in logarithms")
        before = move
        variables.set(end)
        found = local_evidence(variables.posterior, theta, list(variables.parameters))
        assert found is not None
        local = found
    return search.stop(False, f"{tuning.ANCHORS} local models were not enough")


class _Search:
    """An evidence over a box of logarithms, with the prior's hyperprior, and the history of evaluations."""

    def __init__(
        self, variables: Variables, evidence: SearchObjective, method: str, bounds: tuple[float, float], steps: int,
        tolerance: float,
    ) -> None:
        self.variables, self.method, self.bounds = variables, method, bounds
        self.steps, self.tolerance = steps, tolerance
        self.objective = with_hyperprior(evidence, variables.posterior.prior)
        self.history = HyperparameterHistory(method, variables.names)
        self.low, self.high = variables.box(bounds)
        self.start = variables.get()
        self._logs: list[Tensor] = []
        self._gradients: list[Tensor] = []

    def inside(self, logs: Tensor) -> Tensor:
        """The nearest point in the box."""
        return torch.minimum(torch.maximum(logs, self.low), self.high)

    def at(self, logs: Tensor) -> tuple[float, Tensor]:
        """Evidence and gradient at these logarithms."""
        self.variables.set(logs)
        return self.variables.value_and_gradient(self.objective)

    def note(self, value: float, logs: Tensor, gradient: Tensor) -> None:
        """Record one step."""
        self.history.evidence.append(value)
        self.history.values.append(self.variables.shown(logs))
        self._logs.append(logs.clone())
        self._gradients.append(gradient)

    def shift(self, difference: float) -> None:
        """Add to all evidences so far."""
        self.history.evidence[:] = [value + difference for value in self.history.evidence]

    def best(self) -> Tensor:
        """Logarithms at the largest evidence so far."""
        return self._logs[self.history.best] if self._logs else self.start

    def best_gradient(self) -> Tensor:
        """The gradient there."""
        return self._gradients[self.history.best]

    def slope(self, value: float, logs: Tensor, gradient: Tensor) -> float:
        """The largest derivative that does not point out of the box, as a fraction of 1 + abs(evidence)."""
        held = ((logs <= self.low) & (gradient < 0)) | ((logs >= self.high) & (gradient > 0))
        steepest = torch.where(held, torch.zeros_like(gradient), gradient).abs().max()
        return float(steepest) / (1.0 + abs(value))

    def flat(self, value: float, logs: Tensor, gradient: Tensor) -> bool:
        """Whether the gradient is within the tolerance."""
        return self.slope(value, logs, gradient) <= self.tolerance

    def judge(self, exhausted: bool) -> None:
        """Decide convergence from the gradient at the best step, not from the optimizer's exit status.

        With curvature h a gradient g can increase the evidence by at most g²/2h. In units of 1 + abs(evidence), if g
        is below the square root of the machine epsilon, the increase is below rounding.
        """
        best, dtype = self.history.best, self.variables.posterior.dtype
        slope = self.slope(self.history.evidence[best], self._logs[best], self.best_gradient())
        if slope <= self.tolerance:
            self.stop(True, "gradient below tolerance")
        elif slope <= torch.finfo(dtype).eps ** 0.5:
            self.stop(True, "the evidence no longer changes beyond rounding")
        elif exhausted:
            self.stop(False, f"{self.steps} steps were not enough for gradients within tolerance")
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
        away = logs - self._logs[-1]
        height = 1.0 + abs(self.history.evidence[-1])
        slope = 2.0 * height * away / away.square().sum()
        return height - self.history.evidence[-1], slope.numpy()

    def stop(self, converged: bool, message: str) -> None:
        """Record whether and why it stopped."""
        self.history.converged, self.history.message = converged, message

    def report_bounds(self) -> None:
        """Record hyperparameters that ended on a bound while the evidence still increases beyond it, and warn."""
        best, gradient, shown = self.best(), self.best_gradient(), self.history.values[self.history.best]
        for number, name in enumerate(self.variables.names):
            low, high = best[number] <= self.low[number], best[number] >= self.high[number]
            if (low and gradient[number] < 0) or (high and gradient[number] > 0):
                self.history.at_bounds[name] = shown[number]
        if self.history.at_bounds:
            first = list(self.history.at_bounds.items())[:4]
            found = ", ".join(f"{name} = {value:.3g}" for name, value in first)
            count = len(self.history.at_bounds)
            warn(f"the evidence still grows beyond the bounds of {count} hyperparameters: {found}")


def _lbfgs(search: _Search) -> None:
    """SciPy's bounded L-BFGS on the logarithms."""
    from scipy.optimize import minimize  # installed with scikit-learn

    def negative(logs: np.ndarray) -> tuple[float, np.ndarray]:
        point = search.inside(torch.as_tensor(logs))
        try:
            value, gradient = search.at(point)
        except NumericalError:
            return search.wall(point)
        last.update(value=value, logs=point, gradient=gradient)
        return -value, -gradient.numpy()

    def after(_: np.ndarray) -> None:
        search.note(**last)
        if search.flat(**last):
            raise StopIteration  # SciPy's tolerance is absolute, ours is relative to the evidence

    start = search.inside(search.start)
    value, gradient = search.at(start)
    last: dict[str, Any] = {"value": value, "logs": start, "gradient": gradient}
    search.note(**last)
    exhausted = False
    if not search.flat(**last):
        limits = list(zip(search.low.tolist(), search.high.tolist(), strict=True))
        found = minimize(negative, start.numpy(), jac=True, method="L-BFGS-B", bounds=limits, callback=after,
                         options={"maxiter": search.steps, "gtol": 0.0, "ftol": 1e-15, "maxls": 40})
        exhausted = found.status == 1
    search.judge(exhausted)


def _adam(search: _Search, rate: float, progress: bool | None) -> None:
    """Adam on the logarithms, projected onto the box, with a cosine schedule to 1 % of the learning rate."""
    logs = search.inside(search.start).clone().requires_grad_()
    # gradients shrink by orders of magnitude from a bad initial precision: use a short second-moment memory
    optimizer = torch.optim.Adam([logs], lr=rate, betas=(0.9, 0.9))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, search.steps, eta_min=rate / 100)
    for _ in track(range(search.steps + 1), "ntk_laplace: evidence", search.steps + 1, progress):
        value, gradient = search.at(logs.detach())
        search.note(value, logs.detach(), gradient)
        if search.flat(value, logs.detach(), gradient):
            return search.stop(True, "gradient below tolerance")
        if search.still():
            return search.stop(True, "the evidence no longer changes")
        logs.grad = -gradient
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            logs.copy_(search.inside(logs))
    return search.stop(False, f"{search.steps} steps were not enough for gradients within tolerance")


def _mackay(search: _Search, theta: Tensor, progress: bool | None) -> None:
    """Alternate δ_g = γ_g/‖θ_g - μ0‖² and σ² = Σ‖y - f‖²/(NC - γ) with γ."""
    distances = search.variables.posterior.prior.group_distances(theta).clamp_min(torch.finfo(torch.float64).tiny).cpu()
    search.variables.set(search.inside(search.start))
    for _ in track(range(search.steps + 1), "ntk_laplace: evidence", search.steps + 1, progress):
        logs = search.variables.get()
        value, gradient = search.at(logs)
        search.note(value, logs, gradient)
        if search.flat(value, logs, gradient):
            return search.stop(True, "gradient below tolerance")
        search.variables.set(search.inside(_fixed_point(search.variables, distances)))
    return search.stop(False, f"{search.steps} steps were not enough for gradients within tolerance")


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
            found.append(torch.tensor([squares / left], dtype=torch.float64).log())
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


def _check(method: str, steps: int, tolerance: float, bounds: tuple[float, float], rate: float) -> None:
    require_choice(method, METHODS, f"a method among {', '.join(METHODS)}", "Use 'lbfgs' unless you know better.")
    require_whole("steps", steps, 1, "Leave it out for 200.")
    require_number("a positive tolerance", tolerance, "Leave it out for 1e-6.", above=0)
    require_number("a positive learning_rate", rate, "Leave it out for 0.1.", above=0)
    require_bounds(bounds)
