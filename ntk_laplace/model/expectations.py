"""Expectations over f_n ~ N(m_n, V_nn) of the log density, its gradient r and its curvature Λ, for any likelihood.

A likelihood with a closed form has it (`Likelihood.expected`): Gaussian, Poisson, and the heteroscedastic Gaussian in
mean and log variance. A function of one output, or a sum over outputs, is integrated by a trapezoidal rule. All others
are averaged over quasi-Monte-Carlo points of f in pairs m ± e, with a standard error from independent randomizations.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor
from torch.quasirandom import SobolEngine

from ntk_laplace.errors import UnsupportedError, require_whole
from ntk_laplace.model.likelihoods.base import Likelihood
from ntk_laplace.model.likelihoods.covariances import covariance_root
from ntk_laplace.model.likelihoods.protocol import ObservationModel
from ntk_laplace.model.likelihoods.quadrature import expectation_by_output, repeated
from ntk_laplace.runtime import tuning

__all__ = ["Expectation"]

_RANDOMIZATIONS = 8  # independent shifts of the points of an example, from which its standard error follows
_FEWEST = 4  # draws: two pairs
_Function = Callable[[ObservationModel, Tensor, Tensor], Tensor]


class Expectation:
    """Expectations of functions of f_n ~ N(m_n, V_nn) at n points, with the same points of f in every call.

    Parameters
    ----------
    likelihood : Likelihood
        Bound to the points.
    samples : int
        Points of f for each example, at least 4, where they are needed.
    generator : torch.Generator, optional
        Seeds them; by default they are always the same. Examples have independent points.

    Raises
    ------
    HyperparameterError
        If `samples` is less than 4.
    """

    def __init__(self, likelihood: Likelihood, samples: int = 1000, generator: Generator | None = None) -> None:
        self.likelihood = likelihood
        self.samples = require_whole("samples", samples, _FEWEST, "Pass a number of draws of f, such as 1000.")
        self._seed = 0
        if generator is not None:
            self._seed = int(torch.randint(2**31 - 1, (1,), generator=generator, device=generator.device))

    def log_prob(self, mean: Tensor, covariance: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """E log p(y_n given f_n), (n,), in nats, and the standard error of each, (n,); 0 where nothing is sampled.

        Parameters
        ----------
        mean : Tensor, (n, C)
        covariance : Tensor, (n, C, C)
            Of the outputs at each point; may be singular.
        y : Tensor
            Canonical targets; missing ones contribute nothing.

        Raises
        ------
        NumericalError
            If a covariance has a negative eigenvalue larger than rounding errors.
        """
        with torch.no_grad():
            known = self._known(mean, covariance, y)
            if known is not None:
                return known[0], torch.zeros_like(known[0])
            if mean.shape[1] == 1:
                found = expectation_by_output(self.likelihood, _log_prob, mean, covariance, y)
                return found, torch.zeros_like(found)
            (values,), (errors,) = self._sampled((_log_prob,), mean, covariance, y)
            return values, errors

    def derivatives(self, mean: Tensor, covariance: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """E r_n, (n, C), and E Λ_n, (n, C, C), with r and Λ the likelihood's `residual` and `curvature`.

        They are the derivatives of E log p in m_n and, with minus one half, in V_nn, if Λ is minus the second
        derivative of log p. Parameters and errors as for `log_prob`.
        """
        with torch.no_grad():
            known = self._known(mean, covariance, y)
            if known is not None:
                return known[1], known[2]
            functions = _residual, _curvature
            if mean.shape[1] == 1:
                residual, curvature = (
                    expectation_by_output(self.likelihood, function, mean, covariance, y) for function in functions
                )
            else:
                residual, curvature = self._sampled(functions, mean, covariance, y)[0]
            return residual, curvature

    def _known(self, mean: Tensor, covariance: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        found = self.likelihood.expected(mean, covariance, y)
        n, c = mean.shape
        shapes = [(n,), (n, c), (n, c, c)]
        if found is not None and [tuple(one.shape) for one in found] != shapes:
            raise UnsupportedError(f"tensors of the shapes {shapes} of {type(self.likelihood).__name__}.expected",
                                   f"{[tuple(one.shape) for one in found]}", "Correct the method.")
        return found

    def _sampled(
        self, functions: tuple[_Function, ...], mean: Tensor, covariance: Tensor, y: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Means and standard errors of some functions, by tiles of examples."""
        n, c = mean.shape
        shifts = min(_RANDOMIZATIONS, self.samples // 2)
        each = self.samples // (2 * shifts)
        basis = self.likelihood.identified(c)
        if basis is None:
            root = covariance_root(covariance)
        else:
            basis = basis.to(mean)
            root = basis @ covariance_root(basis.mT @ covariance @ basis)
        d = root.shape[2]
        base = SobolEngine(d, scramble=True, seed=self._seed).draw(each, dtype=torch.float64).to(mean.device)
        generator = Generator().manual_seed(self._seed)
        shift = torch.rand(shifts, n, d, generator=generator, dtype=torch.float64)
        largest = c * c if _curvature in functions else c
        rows = max(1, tuning.AVERAGED_OUTPUTS // (2 * shifts * each * largest))
        parts: list[list[Tensor]] = [[] for _ in functions]
        errors: list[list[Tensor]] = [[] for _ in functions]
        for start in range(0, n, rows):
            part = slice(start, min(start + rows, n))
            # (shifts, each, m, d): a random shift modulo 1 of a net is one as even as the net itself
            uniform = (base.view(1, each, 1, d) + shift[:, part].unsqueeze(1).to(mean.device)) % 1.0
            z = torch.special.ndtri(uniform.clamp(2.0**-33, 1 - 2.0**-33)).to(mean).flatten(0, 1)
            e = torch.einsum("ncd,snd->snc", root[part], z)
            f = torch.stack([mean[part] + e, mean[part] - e]).flatten(0, 1)
            for number, function in enumerate(functions):
                values = repeated(self.likelihood, function, f, y, part)
                means = values.view(2, shifts, each, *values.shape[1:]).mean((0, 2))
                parts[number].append(means.mean(0))
                errors[number].append(means.std(0) / shifts**0.5)
        return [torch.cat(own) for own in parts], [torch.cat(own) for own in errors]


def _log_prob(likelihood: ObservationModel, f: Tensor, y: Tensor) -> Tensor:
    return likelihood.log_prob(f, y)


def _residual(likelihood: ObservationModel, f: Tensor, y: Tensor) -> Tensor:
    return likelihood.residual(f, y).detach()


def _curvature(likelihood: ObservationModel, f: Tensor, y: Tensor) -> Tensor:
    return likelihood.curvature(f, y).detach()
