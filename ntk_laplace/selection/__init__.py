"""Selection: how well a model predicts what it has not seen, asked of its training data in one order or another."""

from ntk_laplace.selection.average import average_score
from ntk_laplace.selection.curve import LearningCurve, require_beginning
from ntk_laplace.selection.orders import orders
from ntk_laplace.selection.prequential import PrequentialEvidence

__all__ = ["LearningCurve", "PrequentialEvidence", "average_score", "orders", "require_beginning"]
