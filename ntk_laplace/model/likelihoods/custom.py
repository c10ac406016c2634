"""A user-defined likelihood from a log density."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ntk_laplace.errors import UnsupportedError, require_flags
from ntk_laplace.model.likelihoods.base import Likelihood


class CustomLikelihood(Likelihood):
    """A likelihood from ``log_density(f, y)``; residual, curvature and root come from automatic differentiation.

    Parameters
    ----------
    log_density : callable or nn.Module
        Takes f (N, C) and targets with N rows, returns log p(y given f), (N,), in nats including constants. It must
        be twice differentiable, concave in f, and must not mix examples. A module's parameters are hyperparameters.
    mean : callable, optional
        Mean response (N, C) of f; needed for `mean` and `variance` of predictions, and for ``method="blr"``.
    covariance : callable, optional
        Covariance of the response given f, (N, C, C); needed for `variance`, and for ``method="blr"``.
    classifies : bool
        Whether the outputs are classes, and the mean response their probabilities: predictions then have `probs`, and
        explanations are of the predicted class.

    Examples
    --------
    >>> import torch
    >>> laplace_noise = CustomLikelihood(lambda f, y: -torch.log(2 * torch.cosh(y - f)).sum(1))
    """

    def __init__(
        self, log_density: Callable[[Tensor, Tensor], Tensor], mean: Callable[[Tensor], Tensor] | None = None,
        covariance: Callable[[Tensor], Tensor] | None = None, classifies: bool = False,
    ) -> None:
        super().__init__()
        require_flags(classifies=classifies)
        self.classifies = bool(classifies)
        self._log_density, self._mean, self._covariance = log_density, mean, covariance

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """The given log density, (N,), checked for shape."""
        scores = self._log_density(f, y)
        if not isinstance(scores, Tensor) or scores.shape != f.shape[:1]:
            shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise UnsupportedError(f"log densities of shape ({f.shape[0]},), one per example",
                                   f"{shape} from your log density",
                                   "Sum over the outputs of each example, not over examples.")
        return scores

    def mean(self, f: Tensor) -> Tensor:
        """The given mean response of f, (N, C)."""
        return super().mean(f) if self._mean is None else self._mean(f)

    def response_covariance(self, f: Tensor) -> Tensor:
        """The given covariance of the response, (N, C, C)."""
        return super().response_covariance(f) if self._covariance is None else self._covariance(f)
