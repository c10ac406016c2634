"""Expectations over f_n ~ N(m_n, V_nn) of the log density, its gradient r and its curvature Λ, for any likelihood.

A likelihood with a closed form has it (`Likelihood.expected`): Gaussian, Poisson, and the heteroscedastic Gaussian in
mean and log variance. A function of one output, or a sum over outputs, is integrated by a trapezoidal rule. All others
are averaged over quasi-Monte-Carlo points of f in pairs m ± e, with a standard error from independent randomizations.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Generator, Tensor

from ntk_laplace.errors import UnsupportedError, require_whole
from ntk_laplace.model.likelihoods.base import Likelihood
from ntk_laplace.model.likelihoods.covariances import covariance_root
from ntk_laplace.model.likelihoods.protocol import ObservationModel
from ntk_laplace.model.likelihoods.quadrature import expectation_by_output, repeated
from ntk_laplace.runtime import tuning
from ntk_laplace.runtime.panels import panels
from ntk_laplace.runtime.resources import require_memory
from ntk_laplace.runtime.sampling import scrambled_sobol

_RANDOMIZATIONS = 8  # independent shifts of the points of an example, from which its standard error follows
_FEWEST = 4  # draws: two pairs


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
            shifts, count = self._sizes()
            values, errors = [], []
            for part, f in self._points(mean, covariance, 1):
                found = repeated(self.likelihood, _log_prob, f, y, part)
                means = found.view(2, shifts, count, -1).mean((0, 2))
                values.append(means.mean(0))
                errors.append(means.std(0) / shifts**0.5)
            return torch.cat(values), torch.cat(errors)

    def derivatives(self, mean: Tensor, covariance: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """E r_n, (n, C), and E Λ_n, (n, C, C), with r and Λ the likelihood's `residual` and `curvature`.

        They are the derivatives of E log p in m_n and, with minus one half, in V_nn, if Λ is minus the second
        derivative of log p. Parameters and errors as for `log_prob`.
        """
        with torch.no_grad():
            known = self._known(mean, covariance, y)
            if known is not None:
                return known[1], known[2]
            if mean.shape[1] == 1:
                residual, curvature = (
                    expectation_by_output(self.likelihood, function, mean, covariance, y)
                    for function in (_residual, _curvature)
                )
                return residual, curvature
            found = [
                (repeated(self.likelihood, _residual, f, y, part).mean(0),
                 self.likelihood.at(part).averaged_curvature(f, y[part]).detach())
                for part, f in self._points(mean, covariance, mean.shape[1])
            ]
            residuals, curvatures = zip(*found, strict=True)
            return torch.cat(residuals), torch.cat(curvatures)

    def _known(self, mean: Tensor, covariance: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        found = self.likelihood.expected(mean, covariance, y)
        n, c = mean.shape
        shapes = [(n,), (n, c), (n, c, c)]
        if found is not None and [tuple(one.shape) for one in found] != shapes:
            raise UnsupportedError(f"tensors of the shapes {shapes} of {type(self.likelihood).__name__}.expected",
                                   f"{[tuple(one.shape) for one in found]}", "Correct the method.")
        return found

    def _points(self, mean: Tensor, covariance: Tensor, each: int) -> Iterator[tuple[slice, Tensor]]:
        """Values of f, (2 s k, m, C), for slices of examples: pairs m ± e, s randomizations of k points.

        `each` is the number of entries computed at a time for each entry of f.
        """
        n, c = mean.shape
        shifts, count = self._sizes()
        # these points of one example, the pairs and the normal points they are made of, and one number more at each
        require_memory(4 * self.samples * c * mean.element_size(), mean.device,
                       f"{self.samples:,} points of f for an expectation", "Pass fewer samples, such as 1000.")
        basis = self.likelihood.identified(c)
        if basis is None:
            root = covariance_root(covariance)
        else:
            basis = basis.to(mean)
            root = basis @ covariance_root(basis.mT @ covariance @ basis)
        d = root.shape[2]
        base = scrambled_sobol(count, d, self._seed).to(mean.device)
        generator = Generator().manual_seed(self._seed)
        shift = torch.rand(shifts, n, d, generator=generator, dtype=torch.float64, device="cpu")
        for part in panels(n, 2 * shifts * count * c * each, tuning.AVERAGED_OUTPUTS):
            # (s, k, m, d): a random shift modulo 1 of a net is one as even as the net itself
            uniform = (base.view(1, count, 1, d) + shift[:, part].unsqueeze(1).to(mean.device)).frac_()
            z = torch.special.ndtri(uniform.clamp_(2.0**-33, 1 - 2.0**-33)).to(mean).flatten(0, 1)
            e = torch.einsum("ncd,snd->snc", root[part], z)
            yield part, torch.cat([mean[part] + e, mean[part] - e])

    def _sizes(self) -> tuple[int, int]:
        """Randomizations of an example's points, and pairs in each."""
        shifts = min(_RANDOMIZATIONS, self.samples // 2)
        return shifts, self.samples // (2 * shifts)


def _log_prob(likelihood: ObservationModel, f: Tensor, y: Tensor) -> Tensor:
    return likelihood.log_prob(f, y)


def _residual(likelihood: ObservationModel, f: Tensor, y: Tensor) -> Tensor:
    return likelihood.residual(f, y).detach()


def _curvature(likelihood: ObservationModel, f: Tensor, y: Tensor) -> Tensor:
    return likelihood.curvature(f, y).detach()
