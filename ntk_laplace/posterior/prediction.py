"""Verbs of the Gaussian process: what it says of new inputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import Distribution

from ntk_laplace.curvature import prior_variances
from ntk_laplace.data import Inputs
from ntk_laplace.errors import UnsupportedError, require_whole
from ntk_laplace.factors import Rows
from ntk_laplace.gram import gram
from ntk_laplace.likelihoods import Likelihood
from ntk_laplace.linalg import symmetric_root
from ntk_laplace.posterior.fitted import Fitted
from ntk_laplace.predictive import predictive, predictive_from_samples
from ntk_laplace.resources import require_memory

with warnings.catch_warnings():  # linear_operator scripts a function as it is imported, which newer torch warns of
    warnings.filterwarnings("ignore", ".torch.jit.script. is deprecated")
    from gpytorch.distributions import MultitaskMultivariateNormal
    from linear_operator.operators import DenseLinearOperator

__all__ = ["PredictionVerbs"]

_DRAWS = 256 * 2**20  # bytes of weight samples held at a time


class PredictionVerbs(Fitted):
    """Outputs and responses at new inputs."""

    def outputs(self, x: Inputs) -> Tensor:
        """f at `x`, (n, C), without its uncertainty: of the network, or of the linearized one that a what-if moved."""
        if self._trained.move is not None:
            return self._rows(x).f
        return self.network.without_grad(self._on_device(x)).to(self.dtype)

    def latent(self, x: Inputs, mean: str = "map") -> MultitaskMultivariateNormal:
        """Joint posterior of f at `x` ([T20] 3.13).

        Parameters
        ----------
        x : tensor, tuple or dict of tensors
            n inputs.
        mean : str
            "map": the network's own outputs; after `remove`, `relabel`, `reweight` or `add` those of the linearized
            network at the weights θ it moved to, f + J(θ-θ*). "posterior": those of the refitted linear model,
            f + J(θ̄-θ*), with θ̄ its optimum, argmin of -Σ log p(y_n | f_n + J_n(θ-θ*)) + ½ (θ-μ0)ᵀP0(θ-μ0). With a
            Gaussian likelihood that is θ̄ = θ - H⁻¹g, with the structure's H. With others, damped Newton steps go to
            the optimum, once for all predictions; they need structure "gp" or "full" and curvature "ggn". The
            covariance stays: V and the evidence are of one factorization, with Λ at the outputs before the refit.

        Returns
        -------
        gpytorch MultitaskMultivariateNormal
            Over (n, C), interleaved.

        Raises
        ------
        UnsupportedError
            If the structure or the curvature has no such optimum.
        NumericalError
            If the optimum is not reached: the prior is too weak, or the likelihood not log-concave.
        """
        rows = self._rows(x)
        # a lazy covariance: torch would factor a dense one at once, and V may be singular
        covariance = DenseLinearOperator(self._joint(rows))
        return MultitaskMultivariateNormal(self._mean(rows, mean), covariance, interleaved=True)

    def latent_moments(self, x: Inputs, mean: str = "map") -> tuple[Tensor, Tensor]:
        """Mean (n, C) and covariance blocks (n, C, C) of f at `x`, never the joint ([T20] 3.13)."""
        rows = self._rows(x)
        return self._mean(rows, mean), self.curvature.moments(rows)

    def prior_latent(self, x: Inputs) -> MultitaskMultivariateNormal:
        """Joint prior of f at `x` under the linearized network: mean f + J(μ0-θ*), covariance K = J P0⁻¹ Jᵀ."""
        rows, trained = self._rows(x), self._trained
        with torch.no_grad():
            back = trained.prior.flat_mean().to(trained.theta) - trained.theta
        covariance = gram(rows, None, prior_variances(trained.prior, self.network.shapes))
        return MultitaskMultivariateNormal(rows.f + rows.jvp(self.network.unflatten(back)), covariance)

    def predict(
        self, x: Inputs, method: str = "glm", samples: int = 1000, *, mean: str = "map",
        likelihood: Likelihood | None = None, generator: torch.Generator | None = None,
    ) -> Distribution:  # fmt: skip
        """Predictive distribution of responses at `x` ([T20] 3.14 to 3.16).

        Parameters
        ----------
        x : tensor, tuple or dict of tensors
        method : str
            "glm": average the response over the linearized model's outputs; closed form for a Gaussian likelihood.
            "blr": moments of the response in closed form. "nn": sample weights (weight space only). "probit": closed
            form approximation for classes. "map": plug in the network's outputs.
        samples : int
            Draws, where the method draws.
        mean : str
            As in `latent`.
        likelihood : Likelihood, optional
            Of the responses, if it is not the training one (other noise, say).
        generator : torch.Generator, optional
            Source of randomness; the global state otherwise.

        Returns
        -------
        torch Distribution
            One per input, with ``log_prob(y)`` of shape (n,), `mean`, `variance`, and `probs` for classes.
        """
        likelihood = self.likelihood.for_new_points() if likelihood is None else likelihood
        if not isinstance(likelihood, Likelihood):
            raise UnsupportedError("a likelihood object, or None for the training one", f"{likelihood!r}",
                                   "Use for instance ntk_laplace.Gaussian(noise).")
        _require_generator(generator)
        if method == "nn":
            require_whole("samples", samples, 1, "Pass a positive number, such as 1000.")
            draws = self._weight_outputs(samples, x, generator)
            with torch.no_grad():  # a temperature is a parameter
                return predictive_from_samples(likelihood, draws, self.network.scalar)
        if method == "map":
            f = self.outputs(x)
            covariance = f.new_zeros(*f.shape, f.shape[1])
        else:
            f, covariance = self.latent_moments(x, mean)
        with torch.no_grad():
            return predictive(likelihood, f, covariance, method, samples, generator, self.network.scalar)

    def sample(self, count: int, x: Inputs | None = None, generator: torch.Generator | None = None) -> Tensor:
        """Draws from the posterior.

        Parameters
        ----------
        count : int
        x : optional
            Function samples at these inputs, (count, n, C); without it weight samples, (count, P), where the
            structure has them.
        """
        require_whole("count", count, 0, "Pass how many draws you want.")
        _require_generator(generator)
        if x is None:
            return self._sample_weights(count, generator)
        rows = self._rows(x)
        root = symmetric_root(self._joint(rows))
        noise = torch.randn(root.shape[0], count, dtype=root.dtype, device=root.device, generator=generator)
        return rows.f + (root @ noise).T.reshape(count, *rows.f.shape)

    # --- inside

    def _joint(self, rows: Rows) -> Tensor:
        size = rows.num_examples * rows.num_seeds
        # K**, and the whitened cross-covariance whose square is subtracted from it
        needed = (size + max(self.num_examples * self.num_outputs, 1)) * size * rows.f.element_size()
        require_memory(needed, rows.f.device, f"the joint covariance of {size:,} outputs",
                       "Ask for latent_moments(x), which never forms it, or for fewer inputs at a time.",
                       self._trained.settings.memory_budget)
        return self.curvature.covariance(rows)

    def _mean(self, rows: Rows, mean: str) -> Tensor:
        if mean == "map":
            return rows.f
        if mean != "posterior":
            raise UnsupportedError('mean "map" or "posterior"', repr(mean), "Choose one of the two.")
        return rows.f - rows.jvp(self.network.unflatten(self._refit_step()))  # f + J(θ̄ - θ*)

    def _sample_weights(self, count: int, generator: torch.Generator | None) -> Tensor:
        draw: Callable[..., Tensor] | None = getattr(self.curvature, "sample_weights", None)
        if draw is None:
            raise UnsupportedError("a structure that has weight samples", f"structure={self.structure!r}",
                                   'Pass x for function samples, or fit in weight space ("full", "kfac", ...).')
        return draw(count, generator)

    def _weight_outputs(self, count: int, x: Inputs, generator: torch.Generator | None) -> Tensor:
        x, step = self._on_device(x), max(1, _DRAWS // (self.num_parameters * self.dtype.itemsize))
        outputs = []
        for start in range(0, count, step):
            weights = self._sample_weights(min(step, count - start), generator)
            outputs += [self.network.with_parameters(theta, x) for theta in weights]
        return torch.stack(outputs).to(self.dtype)


def _require_generator(generator: object) -> None:
    if generator is not None and not isinstance(generator, torch.Generator):
        raise UnsupportedError("a torch.Generator", repr(generator), "Pass torch.Generator().manual_seed(0).")
