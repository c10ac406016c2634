"""The base class of likelihoods: one interface, with defaults by automatic differentiation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Size, Tensor, nn

from ntk_laplace.errors import TargetError, UnsupportedError
from ntk_laplace.model.likelihoods import differentiation
from ntk_laplace.model.likelihoods.diagonal_form import DiagonalForm
from ntk_laplace.model.likelihoods.linearized import LinearizedResponse
from ntk_laplace.model.likelihoods.mixture import MixtureResponse
from ntk_laplace.model.likelihoods.normal_mixture import NormalMixture
from ntk_laplace.model.likelihoods.number_mixture import NumberMixture
from ntk_laplace.model.likelihoods.responses import Response
from ntk_laplace.model.likelihoods.targets import first_bad, read

# relative to log densities: products of matrices in float32, whatever the type of their result, differ with the rows
_ROUNDING = torch.finfo(torch.float32).eps ** 0.5


class Likelihood(nn.Module):
    """An observation model p(y given f), where f (N, C) is the network's output, such as the natural parameter.

    A subclass must override `log_prob`; residual, curvature and root then come from automatic differentiation.
    Override `mean` and `response_covariance` for predictive moments, `targets` to validate targets, and
    `distribution` for samples of y. If the log density is not concave in f, override `curvature` with the Fisher
    information. If there are not as many responses as outputs, override `num_responses`. If the constructor takes
    arguments, override `record`.

    Results have the dtype and device of f and are differentiable in the hyperparameters, which are parameters of
    this module on a log scale. Examples never mix.
    """

    classifies: bool = False
    """Whether `mean` contains class probabilities."""

    is_density: bool | None = None
    """Whether `log_prob` is the log of a density (True) or of a probability mass (False); None if not declared.

    Evidences of densities and of masses have different units, so they cannot be compared.
    """

    scales_noise: bool = False
    """Whether ``y = f + noise``, with one target for each output, and `scaled_noise` scales the noise."""

    weight: float = 1.0
    """How many times each example counts; see `Tempered`."""

    positions: Size | None = None
    """Shape of the positions of one example, each with a response of its own; None for one. See `Everywhere`.

    Empty if the first targets are to give it: see `place`.
    """

    # --- validation -----------------------------------------------------------------------------------

    @staticmethod
    def of(likelihood: Likelihood) -> Likelihood:
        """Return a likelihood unchanged.

        Raises
        ------
        UnsupportedError
            If it is something else, such as a name or a loss.
        """
        if not isinstance(likelihood, Likelihood):
            remedy = "Use ntk_laplace.Gaussian(noise), Bernoulli(), Categorical() or Poisson()."
            if isinstance(likelihood, Tensor):
                raise UnsupportedError("a likelihood object", f"a tensor of shape {tuple(likelihood.shape)}",
                                       f"Pass the data as one pair, (X, y), and then the likelihood. {remedy}")
            if isinstance(likelihood, type) and issubclass(likelihood, Likelihood):
                remedy = f"Call the class: {likelihood.__name__}(...)."
            elif callable(likelihood):
                remedy = f"{remedy} A log density of your own is CustomLikelihood(log_density)."
            raise UnsupportedError("a likelihood object", f"{likelihood!r}", remedy)
        return likelihood

    def place(self, y: Any) -> None:
        """Take the positions from the first targets `y`, if they were not given.

        Raises
        ------
        TargetError
            If targets of this shape have none.
        """

    def bind(self, num_examples: int, num_outputs: int) -> None:
        """Check that hyperparameters fit the training data's size.

        Raises
        ------
        HyperparameterError, NetworkError
            If they do not.
        """

    def targets(self, y: Any, num_examples: int, num_outputs: int) -> Tensor:
        """Check targets and convert them to canonical form, one row per example.

        By default they do not change, except that (N,) becomes (N, 1) for one response, to match ``y - f``. If this
        method is not overridden, each target must have the `event_shape`, where that is fixed.

        Raises
        ------
        TargetError
            If shape, type or values do not fit; for values the message names the first bad example.
        NonFiniteError
            If an entry is NaN or infinite.
        """
        y, shape = read(y, num_examples), self.event_shape(num_outputs)
        if y.dim() == 1 and shape != Size() and self.num_responses(num_outputs) == 1:
            y = y.unsqueeze(1)
        if type(self).targets is Likelihood.targets and shape is not None and y.shape[1:] != shape:
            raise TargetError(f"targets of shape {(num_examples, *shape)} for {type(self).__name__}",
                              f"shape {tuple(y.shape)}",
                              "Give each example one row, with torch.stack([time, event], 1) for instance.")
        return y

    def num_responses(self, num_outputs: int) -> int:
        """D, the number of responses of C outputs: the columns of `mean`; C by default.

        Raises
        ------
        NetworkError
            If no such likelihood has C outputs.
        """
        return num_outputs

    def event_shape(self, num_outputs: int) -> Size | None:
        """Shape of one example's target in canonical form; None if it is not fixed."""
        return None

    def num_positions(self, num_outputs: int) -> int:
        """L: the outputs are L groups side by side, and each group's response has a likelihood of its own."""
        return 1

    def at_position(self) -> Likelihood:
        """Return the likelihood of one position."""
        return self

    def apart(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs and canonical targets of n examples as those of n L positions."""
        return f, y

    def together(self, marginals: Response) -> Response:
        """Return responses of n L positions as those of n examples."""
        return marginals

    def at(self, index: Tensor | slice) -> Likelihood:
        """Return the likelihood of a subset of the bound examples; itself unless noise is per point."""
        return self

    def for_new_points(self) -> Likelihood:
        """Return the likelihood at new points; itself unless noise is per point.

        Raises
        ------
        UnsupportedError
            If the noise belongs to the training points.
        """
        return self

    def counted_once(self) -> Likelihood:
        """Return the likelihood of an example that counts once: without the weight of `Tempered`."""
        return self

    def scaled_noise(self, factor: float) -> Likelihood:
        """Return a copy with all noise covariances multiplied by `factor`.

        Raises
        ------
        UnsupportedError
            If the likelihood has no additive noise.
        """
        raise self._unsupported("additive noise", "Leave its noise as it is, noise=1.")

    def log_curvature_scale(self) -> Tensor | None:
        """Return log c if the hyperparameters affect `curvature` only by a scalar factor c; else None."""
        return None

    def log_residual_scale(self) -> Tensor | None:
        """Return log c if the hyperparameters affect `residual` only by a scalar factor c; else None."""
        return None

    def density_by_scale(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """k, m and q, (N,) each, if the hyperparameters affect `log_prob` only by the curvature's scale c; else None.

        Where log c, which is linear in the one hyperparameter, grows by s, `log_prob` is ``k + ½ (m s - q eˢ)``.
        """
        return None

    # --- missing targets ---------------------------------------------------------------------------------

    def observed(self, y: Tensor) -> Tensor | None:
        """Mask of observed canonical targets: (N,), or (N, D) for one target per response; None if all are observed.

        A missing target contributes nothing to log p, its gradient and its curvature.
        """
        return None

    def hidden(self, y: Tensor, observed: Tensor) -> Tensor:
        """Canonical targets `y`, marked as missing where `observed` is false."""
        raise self._unsupported("missing targets", "Override observed(y) and hidden(y, observed).")

    def in_form_of(self, y: Tensor, other: Tensor) -> Tensor:
        """Canonical targets `y` in the format of `other`, so that both can be concatenated."""
        return y

    # --- the density and its derivatives in f -----------------------------------------------------------

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Log density (or probability) of each example, including constants, (N,), nats."""
        raise UnsupportedError(f"log_prob(f, y) of {type(self).__name__}", "a class without it",
                               "Define it; or pass the log density to CustomLikelihood.")

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """Gradient of `log_prob` in f, (N, C)."""
        self.require_apart(f, y)
        return differentiation.gradient(lambda f: self.log_prob(f, y), f)

    def log_prob_and_residual(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """`log_prob` and `residual`; override it where both share work."""
        return self.log_prob(f, y), self.residual(f, y)

    def curvature(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Λ (N, C, C), positive semidefinite: minus the second derivative of `log_prob` in f, or the Fisher matrix.

        The Fisher matrix is the expectation of the outer product of `residual` over y given f. It equals the
        second derivative for a canonical link, which does not need `y`. Where the log density is not concave it takes
        its place ([T20] 2.6). A missing target contributes nothing.

        Raises
        ------
        UnsupportedError
            If it is computed from `log_prob` and there is no `y`.
        """
        if y is None:
            raise UnsupportedError("targets, for the second derivative of the log density", "none",
                                   f"Let {type(self).__name__} override curvature(f, y=None).")
        return differentiation.negative_hessian(lambda f: self.log_prob(f, y), f)

    def diagonal_form(self, f: Tensor, y: Tensor | None = None) -> DiagonalForm | None:
        """`curvature` as a diagonal less an outer product, without matrices (C, C); None if it is no such matrix.

        A subclass that overrides `curvature` overrides this too, or inherits None.
        """
        return None

    def root(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """S (N, C, R) with ``S Sᵀ`` equal to `curvature`, exact for singular matrices too."""
        return differentiation.root_of_hessian(self.curvature(f, y))

    def left_inverse(self, f: Tensor) -> Tensor | None:
        """L (N, R, C) with ``L S = I``, if the range of `curvature` is the same at all hyperparameters; else None.

        It makes evidence gradients cheaper. Where a column of S is zero, the row of L is zero.
        """
        return None

    def rank(self, num_outputs: int) -> int:
        """R, the number of columns of `root`."""
        return num_outputs

    def identified(self, num_outputs: int) -> Tensor | None:
        """Orthonormal columns (C, m) that span the directions of f on which `log_prob` depends; None for all of them.

        Expectations over f ignore the other directions.
        """
        return None

    # --- the response -----------------------------------------------------------------------------------

    def mean(self, f: Tensor) -> Tensor:
        """Mean response, the inverse link of f, (N, D)."""
        raise self._unsupported("a mean response", "Override mean(f), or pass mean= to CustomLikelihood.")

    def mean_jacobian(self, f: Tensor) -> Tensor:
        """Derivative of `mean` in f, (N, D, C)."""
        return differentiation.jacobian(self.mean, f)

    def response_covariance(self, f: Tensor) -> Tensor:
        """Covariance of the response given f, (N, D, D)."""
        remedy = "Override response_covariance(f), or pass covariance= to CustomLikelihood."
        raise self._unsupported("a response covariance", remedy)

    def response_variance(self, f: Tensor) -> Tensor:
        """Variance of each response given f, (N, D): the diagonal of `response_covariance`."""
        return self.response_covariance(f).diagonal(dim1=-2, dim2=-1)

    def additive_noise(self, f: Tensor) -> Tensor | None:
        """Covariance of the noise (N, C, C), if ``y = f + noise`` with normal noise independent of f; else None."""
        return None

    def distribution(self, f: Tensor, scalar: bool = False) -> Response:
        """Return the response given f, with batch shape (N,); `scalar` is for a network with outputs of shape (N,)."""
        return MixtureResponse(self, f.unsqueeze(0), scalar)

    # --- the response when f is uncertain -----------------------------------------------------------------

    def average(self, f: Tensor, scalar: bool = False) -> Response:
        """Average the response over equally likely samples of f (S, n, C) ([T20] 3.14, 3.15)."""
        return MixtureResponse(self, f, scalar)

    def keeps_samples(self, num_outputs: int) -> bool:
        """Whether what `average` returns keeps the samples of f, as a mixture does."""
        return type(self).average is Likelihood.average

    def integrates(self, num_outputs: int) -> bool:
        """Whether `integrate` has a closed form."""
        return type(self).integrate is not Likelihood.integrate

    def integrate(self, mean: Tensor, covariance: Tensor, scalar: bool = False) -> Response | None:
        """Response for f ~ N(mean, covariance) in closed form; None if there is no closed form."""
        return None

    def response_moments(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Moments of the response for f ~ N(mean, covariance) where `integrate` has none; None if they are sampled.

        They are the mean response, the variance of the mean given f and the mean of the variance given f, each (n, D).
        """
        return None

    def univariate(self, mean: Tensor, variance: Tensor) -> NormalMixture:
        """Distribution of each number of the response for f ~ N(mean, variance), output by output, (..., D).

        Raises
        ------
        UnsupportedError
            If it is no mixture of normals.
        """
        raise self._unsupported("numbers that are normal, or mixtures of normals, given f",
                                "Use the probabilities of classes; else the quantiles of samples, sample((1000,)).")

    def univariate_of(self, mean: Tensor, covariance: Tensor) -> NumberMixture | None:
        """`univariate` for f ~ N(mean (n, C), covariance (n, C, C)); None if it has to be sampled."""
        return self.univariate(mean, covariance.diagonal(dim1=-2, dim2=-1)) if self.scales_noise else None

    def expected(self, mean: Tensor, covariance: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """E log p (n,), E r (n, C) and E Λ (n, C, C) for f ~ N(mean, covariance); None if they have to be sampled.

        Here `mean` is (n, C), `covariance` (n, C, C), and `y` holds n canonical targets; r is `residual` and Λ
        `curvature`. See `ntk_laplace.model.expectations`.
        """
        return None

    def averaged_curvature(self, f: Tensor, y: Tensor) -> Tensor:
        """`curvature` averaged over equally likely samples of f (S, n, C), (n, C, C)."""
        index = torch.arange(f.shape[1], device=f.device).repeat(len(f))
        return self.at(index).curvature(f.flatten(0, 1), y[index]).unflatten(0, f.shape[:2]).mean(0)

    def linearize(self, mean: Tensor, covariance: Tensor, scalar: bool = False) -> Response:
        """Moments of the response for f ~ N(mean, covariance), linearized through the link ([T20] 3.16)."""
        slope = self.mean_jacobian(mean)
        latent = slope @ covariance @ slope.mT
        noise = self.response_covariance(mean)
        return LinearizedResponse(self, self.mean(mean), latent, noise, scalar, num_outputs=mean.shape[-1])

    def probit(self, mean: Tensor, covariance: Tensor, scalar: bool = False) -> Response:
        """Class probabilities for f ~ N(mean, covariance) by MacKay's probit approximation."""
        raise self._unsupported("a probit approximation", 'Predict with method="glm".')

    def probit_by_variance(self, mean: Tensor, variance: Tensor, scalar: bool = False) -> Response | None:
        """`probit` from the variances of f alone, (n, C); None if it needs their covariances."""
        return None

    # --- saving -------------------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        """Arguments of the constructor that build an equal likelihood: numbers, strings, tensors, dicts and lists.

        A checkpoint contains them beside the hyperparameters (``state_dict()``). See `register_likelihood`.
        """
        return {}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Likelihood:
        """Build the likelihood from what `record` returned; hyperparameters are loaded afterwards.

        Raises
        ------
        UnsupportedError
            If the constructor does not take these arguments.
        """
        try:
            return cls(**record)
        except TypeError as error:
            raise UnsupportedError(f"a record with the arguments of {cls.__name__}", f"{error}",
                                   "Override record() and from_record(), or pass likelihood= to load().") from error

    def require_apart(self, f: Tensor, y: Tensor) -> None:
        """Check that each half of the examples has the same log densities without the other half.

        Raises
        ------
        UnsupportedError
            If it has not.
        """
        middle, end = len(f) // 2, len(f)
        with torch.no_grad():
            whole = self.log_prob(f, y)
            try:
                halves = [self.at(half).log_prob(f[half], y[half])
                          for half in (slice(0, middle), slice(middle, end)) if half.stop > half.start]
                parts = torch.cat([whole[:0], *halves])
            except (RuntimeError, IndexError) as error:
                raise self._mixing(f"an error for {middle} of {end} examples: {error}") from error
        bad = ~torch.isclose(parts, whole, rtol=_ROUNDING, atol=_ROUNDING, equal_nan=True)
        if bad.any():
            raise self._mixing(f"one that changes at example {first_bad(bad)} when others are left out")

    def _mixing(self, got: str) -> UnsupportedError:
        remedy = "Check for broadcasts of (N,) against (N, 1), and for sums over examples."
        return UnsupportedError("a log density that treats examples apart", got, remedy)

    def _unsupported(self, what: str, remedy: str) -> UnsupportedError:
        return UnsupportedError(f"a likelihood with {what}", type(self).__name__, remedy)
