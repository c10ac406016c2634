"""Numerics of sampled evidences: importance weights, annealed importance sampling, samples of a conditional one."""

from ntk_laplace.posterior.estimates.annealing import Chains, annealed_evidence
from ntk_laplace.posterior.estimates.conditional import ConditionalEstimate, conditional_estimate, warn_of
from ntk_laplace.posterior.estimates.importance import importance_evidence
from ntk_laplace.posterior.estimates.result import AnnealedEvidence, ApproximationErrors, EvidenceEstimate
from ntk_laplace.posterior.estimates.weights import effective_samples, log_mean, pareto_shape, standard_error

__all__ = [
    "AnnealedEvidence",
    "ApproximationErrors",
    "Chains",
    "ConditionalEstimate",
    "EvidenceEstimate",
    "annealed_evidence",
    "conditional_estimate",
    "effective_samples",
    "importance_evidence",
    "log_mean",
    "pareto_shape",
    "standard_error",
    "warn_of",
]
