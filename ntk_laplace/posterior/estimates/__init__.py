"""Numerics of sampled evidences: importance weights, Pareto k̂, annealed importance sampling, elliptical slices."""

from ntk_laplace.posterior.estimates.annealing import annealed_evidence
from ntk_laplace.posterior.estimates.importance import importance_evidence
from ntk_laplace.posterior.estimates.result import AnnealedEvidence, ApproximationErrors, EvidenceEstimate
from ntk_laplace.posterior.estimates.weights import effective_samples, log_mean, pareto_shape, standard_error

__all__ = [
    "AnnealedEvidence",
    "ApproximationErrors",
    "EvidenceEstimate",
    "annealed_evidence",
    "effective_samples",
    "importance_evidence",
    "log_mean",
    "pareto_shape",
    "standard_error",
]
