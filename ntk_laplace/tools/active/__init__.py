"""Active learning: which unlabeled examples to label next."""

from ntk_laplace.tools.active.choice import Selection, select
from ntk_laplace.tools.active.scores import METHODS, score

__all__ = ["METHODS", "Selection", "score", "select"]
