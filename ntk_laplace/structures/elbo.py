"""The evidence lower bound of a Gaussian q = N(θ, H⁻¹) over the weights, and its divergence from prior or posterior.

log p(D) >= E_q log p(D given f) - KL(q ‖ N(μ0, P0⁻¹)) ([T20] 2.14). The divergence needs three numbers that every
structure has: ½ [(θ-μ0)ᵀP0(θ-μ0) + log det B - Σ γ_g], with B = P0^-½HP0^-½ and Σ γ_g = P - tr(P0 H⁻¹).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from ntk_laplace.curvature import GivenPrecision
from ntk_laplace.curvature.posterior_precision import checked_form
from ntk_laplace.errors import DataError, require_choice, require_whole
from ntk_laplace.model.data import InputData, Inputs, Source, num_examples
from ntk_laplace.model.expectations import Expectation
from ntk_laplace.model.network import varying
from ntk_laplace.runtime.sampling import draw_sizes, require_generator
from ntk_laplace.structures.batch_merging import merged_batches
from ntk_laplace.structures.data_passes import shown
from ntk_laplace.structures.fitted_model import FittedModel
from ntk_laplace.structures.training_inputs import training_inputs

_METHODS = ("glm", "nn")
_FEWEST = 4  # draws: two pairs, of which a standard error follows


@dataclass(frozen=True)
class Divergence:
    """KL(q ‖ N(μ0, P0⁻¹)) in nats: value = ½ (distance + log_det - effective).

    Mean μ0 and precision P0 are those of the prior, or of another posterior.

    Attributes
    ----------
    value : Tensor, ()
    standard_error : float
        Of `value`, where `log_det` or `effective` are stochastic estimates; else 0.
    distance : Tensor, ()
        (θ-μ0)ᵀP0(θ-μ0).
    log_det : Tensor, ()
        log det H - log det P0; of the prior it is log det B.
    effective : Tensor, ()
        P - tr(P0 H⁻¹); of the prior it is the number of effective parameters.
    """

    value: Tensor
    standard_error: float
    distance: Tensor
    log_det: Tensor
    effective: Tensor

    def __float__(self) -> float:
        return float(self.value)

    def __str__(self) -> str:
        terms = f"distance {float(self.distance):,.3f}, log det {float(self.log_det):,.3f}, "
        return f"{_with_error(self)} nats ({terms}effective parameters {float(self.effective):,.3f})"


@dataclass(frozen=True)
class LowerBound:
    """An evidence lower bound in nats: value = log_likelihood - kl ([T20] 2.14).

    Attributes
    ----------
    value : Tensor, ()
        For "nn" a lower bound of the network's log evidence, for "glm" of the linearized model's, up to its error.
    standard_error : float
        Of `value`; 0 where nothing is sampled, NaN where the average is not finite.
    log_likelihood : Tensor, ()
        E_q log p(D given f), summed over the data.
    kl : Tensor, ()
        KL(q ‖ prior).
    method : str
        "glm" or "nn".
    """

    value: Tensor
    standard_error: float
    log_likelihood: Tensor
    kl: Tensor
    method: str

    def __float__(self) -> float:
        return float(self.value)

    def __str__(self) -> str:
        terms = f"log likelihood {float(self.log_likelihood):,.3f}, divergence {float(self.kl):,.3f}"
        return f"{_with_error(self)} nats ({self.method}: {terms})"


def _with_error(found: Divergence | LowerBound) -> str:
    return f"{float(found):,.3f}" + (f" ± {found.standard_error:.3g}" if found.standard_error else "")


def divergence(fitted: FittedModel) -> Divergence:
    """KL(N(θ, H⁻¹) ‖ N(μ0, P0⁻¹)) at the present hyperparameters."""
    precision = fitted.precision
    with torch.no_grad():
        distance = 2.0 * fitted.prior.energy(fitted.theta)
        log_det, effective = (part.to(distance) for part in (precision.log_det(), precision.information_gained()))
    error = 0.5 * math.hypot(precision.standard_error, precision.effective_error)
    return Divergence(0.5 * (distance + log_det - effective), error, distance, log_det, effective)


def divergence_between(fitted: FittedModel, other: FittedModel) -> Divergence:
    """KL(N(θ, H⁻¹) ‖ N(θ', H'⁻¹)) of two posteriors of the same parameters.

    tr(H'H⁻¹) takes covariances of f alone where H' = P0' + Σ J'ᵀΛ'J' exactly: it is tr(P0'H⁻¹) + Σ tr(Λ' J'H⁻¹J'ᵀ) over
    the points of `other`. Elsewhere, and where there are fewer parameters than rows of J' that are not kept, H'
    multiplies columns of H⁻¹.

    Raises
    ------
    DataError
        If the parameters differ in name, order or shape, or in device or dtype of the algebra.
    """
    precision, its = fitted.precision, other.precision
    forms = [(list(one.network.shapes.items()), one.theta.device, one.theta.dtype) for one in (fitted, other)]
    if forms[0] != forms[1]:
        words = [f"{shapes.num_parameters:,} parameters in {len(shapes)} tensors, {theta.dtype} on {theta.device}"
                 for shapes, theta in ((one.network.shapes, one.theta) for one in (fitted, other))]
        raise DataError(f"posteriors of the same parameters ({words[0]})", f"another of {words[1]}, or other names",
                        "Fit the same parameters of one architecture; move one with to(device, dtype).")
    inner = precision.inner if isinstance(precision, GivenPrecision) else precision
    against = GivenPrecision(inner, other.prior)  # H beside the other's prior
    with torch.no_grad():
        step = fitted.theta - other.theta
        distance = (step * its.multiply(step)).sum(dtype=torch.float64)
        log_det = (against.log_det() - its.log_det()).to(distance)
        spec, rows = other.structure.spec, other.points.num_examples * other.points.num_outputs
        if spec.exact and (spec.keeps_jacobian or rows < len(step)):
            seen = other.structure.training_covariances(other.model, precision)
            curvature = other.points.curvature(other.curvature_type, other.likelihood)
            effective = against.information_gained() - (curvature * seen).sum(dtype=torch.float64)
        else:
            products = ((here, its.multiply(precision.solve(unit))) for here, unit in precision.unit_rows())
            traces = (part[:, here].diagonal().sum(dtype=torch.float64) for here, part in products)
            effective = len(step) - sum(traces, start=distance.new_zeros(()))  # P - tr(H'H⁻¹)
    error = 0.5 * math.hypot(precision.standard_error, precision.effective_error, its.standard_error)
    return Divergence(0.5 * (distance + log_det - effective), error, distance, log_det, effective.to(distance))


def lower_bound(
    fitted: FittedModel, method: str = "glm", samples: int = 1000, x: InputData | None = None,
    generator: Generator | None = None,
) -> LowerBound:
    """E_q log p(D given f) - KL(q ‖ prior); arguments as in `Posterior.elbo`."""
    require_choice(method, _METHODS, f"a method among {', '.join(_METHODS)}",
                   'Use "glm" for the linearized model, "nn" for the network.')
    require_whole("samples", samples, _FEWEST, "Pass a number of draws, such as 1000.")
    require_generator(generator)
    kl = divergence(fitted)
    with torch.no_grad():
        found, error = _linearized(fitted, samples, generator) if method == "glm" else _network(
            fitted, samples, x, generator)
    found = found.to(kl.value)
    return LowerBound(found - kl.value, math.hypot(error, kl.standard_error), found, kl.value, method)


def _linearized(fitted: FittedModel, samples: int, generator: Generator | None) -> tuple[Tensor, float]:
    """Σ w_n E log p(y_n given f_n) over f_n ~ N(f(x_n), V_nn), and its standard error."""
    points, model = fitted.points, fitted.model
    mean = points.f
    expectation = Expectation(fitted.likelihood, samples, generator)
    n, c = mean.shape
    model.require_memory(n * c * c * mean.element_size(), f"the covariances of {c:,} outputs at {n:,} points",
                         "Fit to fewer points.")
    covariances = fitted.structure.training_covariances(model, fitted.precision)
    values, errors = expectation.log_prob(mean, covariances, points.targets)
    counts = points.counts.to(values)
    values, errors = (part.masked_fill(counts == 0, 0.0) * counts for part in (values, errors))
    return values.sum(dtype=torch.float64), float(errors.double().square().sum().sqrt())


def _network(
    fitted: FittedModel, samples: int, x: InputData | None, generator: Generator | None
) -> tuple[Tensor, float]:
    """E log p(D given f(θ)) over pairs of weights θ ± e, and its standard error: the pairs are independent."""
    model, precision, theta = fitted.model, fitted.precision, fitted.theta
    source, reducer = training_inputs(model, fitted.structure, x, 'elbo("nn", x=x)'), model.settings.reducer
    if generator is None:  # the same draws on all processes
        generator = Generator(theta.device).manual_seed(0)
    pairs = -(-samples // 2)
    model.require_memory(8 * pairs, f"the log densities at {samples:,} weights", "Pass fewer samples.")
    sizes = draw_sizes(pairs, len(theta), theta)
    found = theta.new_zeros(pairs, dtype=torch.float64)

    def batches() -> Iterator[tuple[int, Tensor, int, Inputs]]:
        """The first pair of a block, its draws, and each batch with the number of examples before it."""
        for block, size in enumerate(sizes):
            drawn = precision.sample(size, generator)
            draws = checked_form(precision, "sample", drawn, (size, len(theta)), theta)
            seen = 0
            for part, _ in merged_batches(source, model.network):
                yield block * sizes[0], draws, seen, part
                seen += num_examples(part)

    total = None if source.length is None else source.length * len(sizes)
    numbers = _numbers(fitted, source)
    for first, draws, seen, part in shown(
        model, batches(), "evidence lower bound", total, lambda item: num_examples(item[3])
    ):
        here = numbers[seen : seen + num_examples(part)]
        own, points = fitted.likelihood.at(here), fitted.points.subset(here)
        outputs = varying(model.network, part, seen)
        for place, e in enumerate(draws, first):
            for signed in (e, -e):
                f = outputs(theta + signed).to(points.f)
                values = points.log_prob_at(own, f)
                found[place] += 0.5 * values.sum(dtype=torch.float64)
    reducer.sum_(found)
    mean = found.mean()
    return mean, float(found.std() / pairs**0.5) if bool(mean.isfinite()) else math.nan


def _numbers(fitted: FittedModel, source: Source) -> Tensor:
    """Numbers of the points that this process reads, in its order."""
    reducer = fitted.settings.reducer
    if reducer.world_size == 1:
        return torch.arange(fitted.num_examples, device=fitted.points.f.device)
    return source.numbers(reducer)[0].to(fitted.points.f.device)
