"""Selection: scores of predictions of training points from other training points, in different orders."""

from ntk_laplace.selection.average import average_score
from ntk_laplace.selection.curve import LearningCurve, require_beginning
from ntk_laplace.selection.orders import orders
from ntk_laplace.selection.prequential import PrequentialEvidence

__all__ = ["LearningCurve", "PrequentialEvidence", "average_score", "orders", "require_beginning"]
