"""Comparison: the evidence of one trained network under several structures, and what each costs."""

from ntk_laplace.comparison.compare import ComparisonInterrupted, compare_evidence
from ntk_laplace.comparison.table import EvidenceComparison, StructureEvidence

__all__ = ["ComparisonInterrupted", "EvidenceComparison", "StructureEvidence", "compare_evidence"]
