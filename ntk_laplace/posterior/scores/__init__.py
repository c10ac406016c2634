"""Selection: scores of predictions of training points from other training points, in different orders."""

from ntk_laplace.posterior.scores.curve import LearningCurve, orders, require_beginning
from ntk_laplace.posterior.scores.prequential import PrequentialEvidence

__all__ = ["LearningCurve", "PrequentialEvidence", "orders", "require_beginning"]
