"""Explain: which training points make a prediction, and what it would be without them."""

from ntk_laplace.explain.explanation import Explanation, explain
from ntk_laplace.explain.leave_one_out import LeaveOneOut, leave_one_out

__all__ = ["Explanation", "LeaveOneOut", "explain", "leave_one_out"]
