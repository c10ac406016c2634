"""Predictive distributions of responses from moments or samples of f: glm, blr, probit, map, nn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

import torch
from torch import Generator, Tensor

from ntk_laplace.errors import UnsupportedError, require_choice, require_whole
from ntk_laplace.model.likelihoods.base import Likelihood
from ntk_laplace.model.likelihoods.covariances import covariance_root, diagonal_blocks
from ntk_laplace.model.likelihoods.importance import NormalOutputs
from ntk_laplace.model.likelihoods.mixture import MixtureResponse, plug_in
from ntk_laplace.model.likelihoods.responses import Response, no_join
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.panels import panels
from ntk_laplace.runtime.resources import require_memory
from ntk_laplace.runtime.sampling import scrambled_sobol

SAMPLES = 1000  # points of f of a prediction, by default


def predictive(
    likelihood: Likelihood, mean: Tensor, covariance: Tensor, method: str = "glm", samples: int = SAMPLES,
    generator: Generator | None = None, scalar: bool = False,
) -> Response:
    """Distribution of the response at n inputs, for f ~ N(mean, covariance) at each.

    Parameters
    ----------
    likelihood : Likelihood
    mean : Tensor, (n, C)
    covariance : Tensor, (n, C, C)
        Covariance of the outputs at each input; may be singular.
    method : {"glm", "blr", "probit", "map"}
        * ``glm``: the response averaged over f ([T20] 3.15), in closed form if there is one (`Gaussian`, and one
          response of `StudentT`, or of `HeteroscedasticGaussian` with "log variance"), else over `samples`
          quasi-Monte-Carlo points of f. Half of those of the density of a number are points of f given the target, with
          importance weights. Mean and variance of counts, and of several responses of `HeteroscedasticGaussian`
          with "log variance", are in closed form too.
        * ``blr``: moments of the response linearized through the link ([T20] 3.16): mean g⁻¹(mean), covariance
          G V Gᵀ + Cov(y given f), with G the slope of the inverse link g⁻¹.
        * ``probit``: MacKay's closed-form class probabilities.
        * ``map``: the response at the mean of f, as if f were certain.
    samples : int
        Number of points of f for ``glm``.
    generator : Generator, optional
        Seeds these points; by default they are always the same. All inputs share them, so splitting a batch does not
        change the result.
    scalar : bool
        The network's outputs have shape (N,): means and events are scalars.

    Returns
    -------
    Response, batch shape (n,)
        With `mean`, `variance` and its parts `epistemic` and `aleatoric`, and `probs` for classes.

    Raises
    ------
    UnsupportedError
        If the method is unknown, or not available for this likelihood.
    HyperparameterError
        If `samples` is not a positive integer.
    NumericalError
        If a covariance has a negative eigenvalue larger than rounding errors.
    """
    return Predictive(likelihood, method, samples, generator, scalar)(mean, covariance)


class Predictive:
    """`predictive` for several batches of inputs: the points of f are generated once and shared.

    Parameters
    ----------
    likelihood, method, samples, generator, scalar
        As in `predictive`, with the same errors.
    """

    def __init__(
        self, likelihood: Likelihood, method: str = "glm", samples: int = SAMPLES, generator: Generator | None = None,
        scalar: bool = False,
    ) -> None:
        require_choice(method, ("glm", *METHODS), f"a method among {sorted([*METHODS, 'glm'])} for moments of f",
                       'Pass one of them; "nn" needs samples of the weights.')
        if method == "glm":
            require_whole("samples", samples, 1, "Pass a positive number, such as 1000.")
        self.likelihood, self.method, self.samples, self.scalar = likelihood, method, samples, scalar
        self._generator = generator
        self._points: Tensor | None = None

    def __call__(self, mean: Tensor, covariance: Tensor) -> Response:
        """Distribution of the response for f ~ N(mean (n, C), covariance (n, C, C)).

        For "probit" the covariance may be the variances (n, C), if the likelihood has `probit_by_variance`.
        """
        if self.method != "glm":
            return METHODS[self.method](self.likelihood, mean, covariance, self.scalar)
        if self.likelihood.positions is not None:
            each = mean.shape[-1] // self.likelihood.num_positions(mean.shape[-1])
            blocks = diagonal_blocks(covariance, each).flatten(0, 1)
            return self.likelihood.together(self._of_position(mean.reshape(-1, each), blocks))
        closed_form = self.likelihood.integrate(mean, covariance, self.scalar)
        if closed_form is not None:
            return closed_form
        if self._points is None:
            self._points = normal_points(self.samples, mean.shape[-1], self._generator).to(mean)
        outputs = NormalOutputs(mean, covariance_root(covariance), self._points)
        likelihood = self.likelihood.counted_once()
        rows = max(1, tuning.AVERAGED_OUTPUTS // self._points.numel())
        averaged = joined(average(likelihood, outputs.at(here), self.scalar) for here in panels(len(mean), 1, rows))
        known = self.likelihood.response_moments(mean, covariance)
        return averaged.with_moments(*known) if known and isinstance(averaged, MixtureResponse) else averaged

    @cached_property
    def _of_position(self) -> Predictive:
        return Predictive(self.likelihood.at_position(), self.method, self.samples, self._generator)


def average(likelihood: Likelihood, outputs: NormalOutputs, scalar: bool = False) -> Response:
    """The response averaged over f."""
    if not likelihood.keeps_samples(outputs.mean.shape[-1]):
        return likelihood.average(outputs.samples(), scalar)
    return mixture(likelihood, outputs, scalar)


def mixture(likelihood: Likelihood, outputs: NormalOutputs, scalar: bool = False) -> MixtureResponse:
    """The response given f, mixed over f, of several outputs jointly.

    Probabilities of classes are those of one set of points for all labels, so that their sum is 1. The density of a
    number is sharp in f, and has points of its own.
    """
    several = len(outputs.points) > 1 and not likelihood.classifies
    return MixtureResponse(likelihood, outputs.samples(), scalar, outputs if several else None)


def response_bytes(
    likelihood: Likelihood, inputs: int, chunk: int, outputs: int, element: int, samples: int = SAMPLES
) -> int:
    """Bytes at the peak of `Predictive` by method "glm", from the moments of f of chunks of inputs, and of its results.

    In closed form: seven tensors of covariances (n, C, C), of f, of the noise, of the response and its factor, while
    chunks are joined. Else the points z (S, C) and roots (m, C, C) of a chunk; and f of all inputs at the points, twice
    while parts are joined, if the response keeps it; if it does not, four tensors of f of as many inputs as are
    averaged together, and with several outputs two of one number for each point and input.

    Parameters
    ----------
    likelihood : Likelihood
    inputs, chunk : int
        Inputs of a prediction, and how many of them are predicted together.
    outputs : int
        C.
    element : int
        Bytes of a number.
    samples : int
        S.
    """
    own, points = likelihood.at_position().counted_once(), samples * outputs
    if own.integrates(outputs):
        return 7 * inputs * outputs**2 * element
    if own.keeps_samples(outputs):
        averaged = 2 * inputs * points
    else:
        each = 4 * points + 2 * samples * (outputs > 1)
        averaged = min(chunk, max(1, tuning.AVERAGED_OUTPUTS // points)) * each
    return (points + chunk * outputs**2 + averaged) * element


def joined(parts: Iterable[Response]) -> Response:
    """Concatenate responses for consecutive inputs, while they are computed.

    Two neighbors that stand for as many parts are joined at once. One small response per part would fragment the memory
    between the large temporary ones, and memory would grow with the number of parts.

    Raises
    ------
    UnsupportedError
        If there are several and their class does not support concatenation.
    """
    found: list[tuple[int, Response]] = []  # with the number of parts in each, which halves at least
    for part in parts:
        count = 1
        while found and found[-1][0] == count:
            part, count = _join([found.pop()[1], part]), 2 * count
        found.append((count, part))
    return _join([part for _, part in found])


def _join(parts: Sequence[Response]) -> Response:
    if len(parts) == 1:
        return parts[0]
    if not isinstance(parts[0], Response):
        raise no_join(type(parts[0]))
    return type(parts[0]).join(parts)


def predictive_from_samples(likelihood: Likelihood, f: Tensor, scalar: bool = False) -> Response:
    """Response averaged over equally likely samples of f (S, n, C) ([T20] 3.14): the ``nn`` method."""
    if f.dim() != 3 or f.shape[0] == 0:
        raise UnsupportedError("samples of f of shape (S, n, C), S at least 1", f"shape {tuple(f.shape)}",
                               "Stack samples first.")
    return likelihood.average(f, scalar)


def normal_points(samples: int, dimension: int, generator: Generator | None = None) -> Tensor:
    """Quasi-Monte-Carlo points of a standard normal (scrambled Sobol), (samples, dimension), float64.

    Averages over them are unbiased over seeds, and more accurate than averages over independent draws. Without a
    generator the seed is 0; the global random state is neither read nor changed.

    Raises
    ------
    MemoryBudgetError
        If they do not fit in memory; nothing was allocated.
    """
    require_memory(24 * samples * dimension, torch.device("cpu"), f"{samples:,} points of f",
                   "Pass fewer samples, such as 1000.")  # the points, and two arrays that they are made of
    seed = 0
    if generator is not None:
        seed = int(torch.randint(2**31 - 1, (1,), generator=generator, device=generator.device))
    uniform = scrambled_sobol(samples, dimension, seed)
    return torch.special.ndtri(uniform + 2.0**-31)  # the center of the engine's cells of width 2⁻³⁰, never 0


def _probit(likelihood: Likelihood, mean: Tensor, covariance: Tensor, scalar: bool) -> Response:
    found = likelihood.probit_by_variance(mean, covariance, scalar) if covariance.ndim == 2 else None
    return likelihood.probit(mean, covariance, scalar) if found is None else found


METHODS: dict[str, Callable[[Likelihood, Tensor, Tensor, bool], Response]] = {
    "blr": lambda likelihood, *arguments: likelihood.linearize(*arguments),
    "probit": _probit,
    "map": lambda likelihood, mean, _, scalar: plug_in(likelihood, mean, scalar),
}
