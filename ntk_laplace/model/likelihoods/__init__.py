"""Observation models: log p(y given f), its derivatives in f, curvature roots, and response distributions.

A likelihood does not depend on the network, kernel or prior. All obey the same identities, with f of shape (N, C):
``residual = ∂ log p/∂f`` and ``root rootᵀ = curvature``, which is ``-∂² log p/∂f²`` or its expectation.
"""

from __future__ import annotations

from ntk_laplace.model.likelihoods.base import Likelihood
from ntk_laplace.model.likelihoods.bernoulli import Bernoulli
from ntk_laplace.model.likelihoods.categorical import Categorical
from ntk_laplace.model.likelihoods.count_mixture import CountMixture
from ntk_laplace.model.likelihoods.custom import CustomLikelihood
from ntk_laplace.model.likelihoods.diagonal_form import DiagonalForm
from ntk_laplace.model.likelihoods.everywhere import Everywhere, positions_of
from ntk_laplace.model.likelihoods.gaussian import Gaussian
from ntk_laplace.model.likelihoods.heteroscedastic import HeteroscedasticGaussian
from ntk_laplace.model.likelihoods.negative_binomial import NegativeBinomial
from ntk_laplace.model.likelihoods.normal_mixture import LogNormalMixture, NormalMixture
from ntk_laplace.model.likelihoods.per_output import PerOutput
from ntk_laplace.model.likelihoods.poisson import Poisson
from ntk_laplace.model.likelihoods.registry import (
    difference,
    likelihood_from_record,
    likelihood_record,
    register_likelihood,
    registered_likelihoods,
)
from ntk_laplace.model.likelihoods.responses import Response
from ntk_laplace.model.likelihoods.student import StudentT
from ntk_laplace.model.likelihoods.targets import MISSING_LABEL
from ntk_laplace.model.likelihoods.tempered import Tempered

__all__ = [
    "MISSING_LABEL",
    "Bernoulli",
    "Categorical",
    "CountMixture",
    "CustomLikelihood",
    "DiagonalForm",
    "Everywhere",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "LogNormalMixture",
    "NegativeBinomial",
    "NormalMixture",
    "PerOutput",
    "Poisson",
    "Response",
    "StudentT",
    "Tempered",
    "difference",
    "likelihood_from_record",
    "likelihood_record",
    "positions_of",
    "register_likelihood",
    "registered_likelihoods",
]
