"""Explain: which training points determine a prediction, and the prediction without them."""

from ntk_laplace.explain.explanation import Explanation, ExplanationRequest, bytes_of_each, explain
from ntk_laplace.explain.joint_removal import GroupRemoval, JointRemoval
from ntk_laplace.explain.leave_one_out import LeaveOneOut, leave_one_out
from ntk_laplace.explain.newton import refitted
from ntk_laplace.explain.quantity import SPREADS
from ntk_laplace.explain.ranked import HIGH_LEVERAGE, Ranked, joined
from ntk_laplace.explain.ranking import Ranking, effects, rank
from ntk_laplace.explain.reliability import Reliability
from ntk_laplace.explain.relinearize import relinearized
from ntk_laplace.explain.what_if import (
    Indices,
    positions,
    relabeled,
    require_steps,
    reweighted,
    stepped,
    stepped_once,
)

__all__ = [
    "HIGH_LEVERAGE",
    "SPREADS",
    "Explanation",
    "ExplanationRequest",
    "GroupRemoval",
    "Indices",
    "JointRemoval",
    "LeaveOneOut",
    "Ranked",
    "Ranking",
    "Reliability",
    "bytes_of_each",
    "effects",
    "explain",
    "joined",
    "leave_one_out",
    "positions",
    "rank",
    "refitted",
    "relabeled",
    "relinearized",
    "require_steps",
    "reweighted",
    "stepped",
    "stepped_once",
]
