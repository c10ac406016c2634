"""Comparison of structures for one trained network, with their cost, and of several trained models."""

from ntk_laplace.tools.comparison.compare import ComparisonInterrupted, compare_evidence
from ntk_laplace.tools.comparison.models import compare_models
from ntk_laplace.tools.comparison.plan import Plan, StructurePlan, plan
from ntk_laplace.tools.comparison.ranking import ModelComparison, ModelScores
from ntk_laplace.tools.comparison.table import EvidenceComparison, StructureEvidence

__all__ = [
    "ComparisonInterrupted",
    "EvidenceComparison",
    "ModelComparison",
    "ModelScores",
    "Plan",
    "StructureEvidence",
    "StructurePlan",
    "compare_evidence",
    "compare_models",
    "plan",
]
