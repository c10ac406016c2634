"""Observation models: log p(y given f), its derivatives and their roots, and what a response looks like.

A likelihood knows no network, kernel or prior. Every one obeys the same laws, with f of shape (N, C):
``residual = ∂ log p/∂f``, ``hessian = -∂² log p/∂f²`` and ``root rootᵀ = hessian``.
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
