"""Observation models: log p(y given f), its derivatives in f, Hessian square roots, and response distributions.

A likelihood does not depend on the network, kernel or prior. All obey the same identities, with f of shape (N, C):
``residual = ∂ log p/∂f``, ``curvature = -∂² log p/∂f²`` and ``root rootᵀ = curvature``.
"""

from __future__ import annotations

from ntk_laplace.likelihoods.base import Likelihood
from ntk_laplace.likelihoods.bernoulli import Bernoulli
from ntk_laplace.likelihoods.categorical import Categorical
from ntk_laplace.likelihoods.custom import CustomLikelihood, from_log_prob
from ntk_laplace.likelihoods.gaussian import Gaussian
from ntk_laplace.likelihoods.poisson import Poisson
from ntk_laplace.likelihoods.responses import Response
from ntk_laplace.likelihoods.tempered import Tempered

__all__ = [
    "Bernoulli",
    "Categorical",
    "CustomLikelihood",
    "Gaussian",
    "Likelihood",
    "Poisson",
    "Response",
    "Tempered",
    "from_log_prob",
]
