"""Trained networks as Gaussian processes: exact evidence, posteriors and explanations."""

from ntk_laplace import gp
from ntk_laplace.comparison import ComparisonInterrupted, EvidenceComparison, StructureEvidence, compare_evidence
from ntk_laplace.curvature import Root
from ntk_laplace.errors import (
    DataError,
    HyperparameterError,
    MemoryBudgetError,
    MixedExamplesError,
    NetworkError,
    NonDeterministicError,
    NonFiniteError,
    NTKLaplaceError,
    NTKLaplaceWarning,
    NumericalError,
    TargetError,
    UnsupportedError,
)
from ntk_laplace.explain import Explanation, LeaveOneOut
from ntk_laplace.fit import laplace
from ntk_laplace.likelihoods import Bernoulli, Categorical, CustomLikelihood, Gaussian, Likelihood, Poisson
from ntk_laplace.ntk import empirical_ntk
from ntk_laplace.posterior import Posterior
from ntk_laplace.priors import GaussianPrior
from ntk_laplace.structures import Settings

__version__ = "0.1.0"

__all__ = [
    "Bernoulli",
    "Categorical",
    "ComparisonInterrupted",
    "CustomLikelihood",
    "DataError",
    "EvidenceComparison",
    "Explanation",
    "Gaussian",
    "GaussianPrior",
    "HyperparameterError",
    "LeaveOneOut",
    "Likelihood",
    "MemoryBudgetError",
    "MixedExamplesError",
    "NTKLaplaceError",
    "NTKLaplaceWarning",
    "NetworkError",
    "NonDeterministicError",
    "NonFiniteError",
    "NumericalError",
    "Poisson",
    "Posterior",
    "Root",
    "Settings",
    "StructureEvidence",
    "TargetError",
    "UnsupportedError",
    "compare_evidence",
    "empirical_ntk",
    "gp",
    "laplace",
]
