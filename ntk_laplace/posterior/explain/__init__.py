"""Explain: which training points determine a prediction, and the prediction without them."""

from ntk_laplace.posterior.explain.algebra import Removals
from ntk_laplace.posterior.explain.explanation import Explanation, ExplanationRequest, bytes_of_each, explain
from ntk_laplace.posterior.explain.joint_removal import GroupRemoval
from ntk_laplace.posterior.explain.leave_one_out import (
    LeaveOneOut,
    leave_one_out,
    leave_one_out_score,
    leave_some_out,
    left_out_means,
)
from ntk_laplace.posterior.explain.quantity import SPREADS
from ntk_laplace.posterior.explain.ranked import Entry, Ranked, joined
from ntk_laplace.posterior.explain.ranking import Ranking, effects, rank
from ntk_laplace.posterior.explain.reliability import Reliability
from ntk_laplace.posterior.explain.reranking import Reranking
from ntk_laplace.posterior.explain.source_effects import SourceEffects, Sources, numbered, source_labels

__all__ = [
    "SPREADS",
    "Entry",
    "Explanation",
    "ExplanationRequest",
    "GroupRemoval",
    "LeaveOneOut",
    "Ranked",
    "Ranking",
    "Reliability",
    "Removals",
    "Reranking",
    "SourceEffects",
    "Sources",
    "bytes_of_each",
    "effects",
    "explain",
    "joined",
    "leave_one_out",
    "leave_one_out_score",
    "leave_some_out",
    "left_out_means",
    "numbered",
    "rank",
    "source_labels",
]
