"""Predictive distributions of responses from the moments or samples of f: glm, blr, probit, map, nn."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor
from torch.quasirandom import SobolEngine

from ntk_laplace.errors import UnsupportedError, require_whole
from ntk_laplace.likelihoods.base import Likelihood
from ntk_laplace.likelihoods.covariances import covariance_root
from ntk_laplace.likelihoods.responses import Response

__all__ = ["METHODS", "normal_points", "predictive", "predictive_from_samples"]

CHUNK = 2**22  # numbers f held at a time while averaging: 32 MB in float64


def predictive(
    likelihood: Likelihood,
    mean: Tensor,
    covariance: Tensor,
    method: str = "glm",
    samples: int = 1000,
    generator: Generator | None = None,
    scalar: bool = False,
) -> Response:
    """Distribution of the response at n inputs, for f ~ N(mean, covariance) at each.

    Parameters
    ----------
    likelihood : Likelihood
    mean : Tensor, (n, C)
    covariance : Tensor, (n, C, C)
        Of the outputs at each input; may be singular.
    method : {"glm", "blr", "probit", "map"}
        * ``glm``: the response averaged over f ([T20] 3.15), in closed form where there is one (Gaussian), else
          over `samples` points of f.
        * ``blr``: moments of the response linearized through the link ([T20] 3.16): mean g⁻¹(mean), covariance
          G V Gᵀ + Cov(y given f), with G the slope of the inverse link g⁻¹.
        * ``probit``: MacKay's closed-form class probabilities.
        * ``map``: the response at the mean of f, as if f were certain.
    samples : int
        Points of f for ``glm``.
    generator : Generator, optional
        Seeds these points; by default they are always the same. They are shared by all inputs, so splitting a
        batch changes nothing.
    scalar : bool
        The network's outputs have shape (N,): means and events are scalars.

    Returns
    -------
    Response, batch shape (n,)
        With `mean`, `variance` and its parts `epistemic` and `aleatoric`, and `probs` for classes.

    Raises
    ------
    UnsupportedError
        If there is no such method, or none for this likelihood.
    HyperparameterError
        If `samples` is no whole number, or not positive.
    NumericalError
        If a covariance has a negative eigenvalue that no rounding explains.
    """
    if method == "glm":
        return _glm(likelihood, mean, covariance, _points(samples, mean, generator), scalar)
    if method not in METHODS:
        raise UnsupportedError(
            f"a method among {sorted([*METHODS, 'glm'])} for moments of f",
            f"{method!r}",
            'Pass one of them; "nn" needs samples of the weights.',
        )
    return METHODS[method](likelihood, mean, covariance, scalar)


def predictive_from_samples(likelihood: Likelihood, f: Tensor, scalar: bool = False) -> Response:
    """Response averaged over equally likely samples of f (S, n, C) ([T20] 3.14): the ``nn`` method."""
    if f.dim() != 3 or f.shape[0] == 0:
        raise UnsupportedError(
            "samples of f of shape (S, n, C), S at least 1", f"shape {tuple(f.shape)}", "Stack samples first."
        )
    return likelihood.average(f, scalar)


def normal_points(samples: int, dimension: int, generator: Generator | None = None) -> Tensor:
    """Points that fill a standard normal evenly (scrambled Sobol), (samples, dimension), float64.

    Averages over them are unbiased over seeds, and closer to the integral than over independent draws. Without a
    generator the seed is 0: an answer does not depend on random numbers drawn elsewhere, nor disturbs them.
    """
    seed = 0
    if generator is not None:
        seed = int(torch.randint(2**31 - 1, (1,), generator=generator, device=generator.device))
    uniform = SobolEngine(dimension, scramble=True, seed=seed).draw(samples, dtype=torch.float64)
    return torch.special.ndtri(uniform + 2.0**-31)  # the middle of the engine's cells of width 2⁻³⁰, never 0


def _points(samples: int, like: Tensor, generator: Generator | None) -> Callable[[], Tensor]:
    require_whole("samples", samples, 1, "Pass a positive number, such as 1000.")
    return lambda: normal_points(samples, like.shape[-1], generator).to(like)


def _glm(
    likelihood: Likelihood, mean: Tensor, covariance: Tensor, points: Callable[[], Tensor], scalar: bool
) -> Response:
    closed_form = likelihood.integrate(mean, covariance, scalar)
    if closed_form is not None:
        return closed_form
    z, root = points(), covariance_root(covariance)
    rows = max(1, CHUNK // z.numel())
    parts = [
        # f = mean + V^½ z, the same z at every input
        likelihood.average(m + torch.einsum("ncd,sd->snc", w, z), scalar)
        for m, w in zip(mean.split(rows), root.split(rows), strict=True)
    ]
    return type(parts[0]).join(parts)


def _map(likelihood: Likelihood, mean: Tensor, covariance: Tensor, scalar: bool) -> Response:
    return likelihood.distribution(mean, scalar)


METHODS: dict[str, Callable[[Likelihood, Tensor, Tensor, bool], Response]] = {
    "blr": lambda likelihood, *arguments: likelihood.linearize(*arguments),
    "probit": lambda likelihood, *arguments: likelihood.probit(*arguments),
    "map": _map,
}
