"""Scores that choose a model beside the evidence: conditional evidence from samples, bounds of the risk."""

from ntk_laplace.posterior.estimates import ConditionalEstimate
from ntk_laplace.selection.samples import conditional_from_samples

__all__ = ["ConditionalEstimate", "conditional_from_samples"]
